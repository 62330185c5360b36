"""The state tables: every pair is a listed row or an error, and the promises that follow from their shape."""

from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from typing import Any

import pytest

from forebay_gateway.core.states import (
    COPY_TABLE,
    SHARD_TABLE,
    CopyEvent,
    CopyState,
    IllegalTransition,
    ShardEvent,
    ShardState,
    next_copy_state,
    next_shard_state,
)

S, C = ShardState, CopyState


@pytest.mark.parametrize(("state", "event"), list(product(ShardState, ShardEvent)))
def test_every_shard_pair(state: ShardState, event: ShardEvent) -> None:
    if (state, event) in SHARD_TABLE:
        assert next_shard_state(state, event) is SHARD_TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition, match=rf"^event {event.value} in state {state.value}$"):
            next_shard_state(state, event)


@pytest.mark.parametrize(("state", "event"), list(product(CopyState, CopyEvent)))
def test_every_copy_pair(state: CopyState, event: CopyEvent) -> None:
    if (state, event) in COPY_TABLE:
        assert next_copy_state(state, event) is COPY_TABLE[state, event]
    else:
        with pytest.raises(IllegalTransition, match=rf"^event {event.value} in state {state.value}$"):
            next_copy_state(state, event)


def reachable(table: Mapping[Any, StrEnum], start: StrEnum, without: frozenset[StrEnum] = frozenset()) -> set[StrEnum]:
    """States that can follow from `start` on ways that do not pass through `without`."""
    seen, todo = {start}, [start]
    while todo:
        at = todo.pop()
        for (state, _event), after in table.items():
            if state is at and after not in seen and after not in without:
                seen.add(after)
                todo.append(after)
    return seen


def test_every_state_is_reachable_and_every_event_used() -> None:
    assert reachable(SHARD_TABLE, S.RECEIVING) == set(ShardState)
    assert reachable(COPY_TABLE, C.PENDING) == set(CopyState)
    assert {event for _, event in SHARD_TABLE} == set(ShardEvent)
    assert {event for _, event in COPY_TABLE} == set(CopyEvent)


def test_only_an_abandoned_shard_is_final() -> None:
    assert set(ShardState) - {state for state, _ in SHARD_TABLE} == {S.ABANDONED}
    assert {state for state, _ in COPY_TABLE} == set(CopyState)


def test_dirty_data_is_never_evicted() -> None:
    # What is not verified on every required tier has no way to the unlink but through quarantine, which is the operator's act.
    clean_or_bad = frozenset({S.EVICTABLE, S.QUARANTINED})
    assert S.EVICTING not in reachable(SHARD_TABLE, S.RECEIVING, clean_or_bad)
    assert {state for (state, _), after in SHARD_TABLE.items() if after is S.EVICTING} == clean_or_bad


def test_a_copy_is_verified_only_after_it_was_written() -> None:
    assert {row for row, after in COPY_TABLE.items() if after is C.VERIFIED} == {(C.WRITTEN, CopyEvent.VERIFY)}
    assert {row for row, after in COPY_TABLE.items() if after is C.WRITTEN} == {(C.WRITING, CopyEvent.PUT)}


def test_a_lost_copy_goes_back_into_the_queue_from_everywhere() -> None:
    for state in CopyState:
        assert C.PENDING in reachable(COPY_TABLE, state)
