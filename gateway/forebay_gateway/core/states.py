"""The two state machines, as tables. An event a table does not list raises; the diagram in ARCHITECTURE.md is made from here.

Owns which state follows which event. Does not own when events happen (paths/) or where states are kept (catalog/).
"""

from collections.abc import Iterable
from enum import StrEnum
from typing import TypeVar


class ShardState(StrEnum):
    """A shard in this node's cache."""

    RECEIVING = "receiving"
    SEALED = "sealed"
    EVICTABLE = "evictable"
    EVICTING = "evicting"
    EVICTED = "evicted"
    ABANDONED = "abandoned"
    QUARANTINED = "quarantined"


class ShardEvent(StrEnum):
    """What happens to a shard."""

    SEAL = "seal"  # footer, fsync and catalog are down
    ABANDON = "abandon"  # stream broke, writer aborted, or its session fell silent before commit
    ALL_VERIFIED = "all_verified"  # every required tier holds a verified copy and a complete checkpoint
    REQUIRE = "require"  # a required tier lost its copy, or a policy now asks for one more
    EVICT = "evict"
    UNLINKED = "unlinked"
    FETCHED = "fetched"  # a tier's copy is in the cache again, verified
    MISMATCH = "mismatch"  # bytes in the cache do not match their checksum, or the file is gone
    REPAIRED = "repaired"  # good bytes from another copy replaced bad ones


class CopyState(StrEnum):
    """One shard on one tier."""

    PENDING = "pending"
    WRITING = "writing"
    WRITTEN = "written"
    VERIFIED = "verified"
    QUARANTINED = "quarantined"
    SKIPPED = "skipped"


class CopyEvent(StrEnum):
    """What happens to a copy."""

    START = "start"
    FAIL = "fail"  # the attempt ended without a whole object
    PUT = "put"  # the tier has a whole object of the right size
    VERIFY = "verify"  # the tier's bytes are proved equal
    MISMATCH = "mismatch"
    GONE = "gone"  # the tier says, with authority, that it is not there
    REQUEUE = "requeue"
    SKIP = "skip"  # policy
    REMOVE = "remove"  # retention took the checkpoint from the tier
    UNSKIP = "unskip"


class IllegalTransition(Exception):
    """An event that the table does not allow in this state: a defect, never a user's fault."""


S, SE, C, CE = ShardState, ShardEvent, CopyState, CopyEvent

SHARD_TABLE: dict[tuple[ShardState, ShardEvent], ShardState] = {
    (S.RECEIVING, SE.SEAL): S.SEALED,
    (S.RECEIVING, SE.ABANDON): S.ABANDONED,
    (S.SEALED, SE.ABANDON): S.ABANDONED,
    (S.SEALED, SE.ALL_VERIFIED): S.EVICTABLE,
    (S.SEALED, SE.MISMATCH): S.QUARANTINED,
    (S.EVICTABLE, SE.REQUIRE): S.SEALED,
    (S.EVICTABLE, SE.EVICT): S.EVICTING,
    (S.EVICTABLE, SE.MISMATCH): S.QUARANTINED,
    (S.EVICTING, SE.UNLINKED): S.EVICTED,
    (S.EVICTED, SE.FETCHED): S.EVICTABLE,
    (S.QUARANTINED, SE.REPAIRED): S.SEALED,
    (S.QUARANTINED, SE.EVICT): S.EVICTING,
}

COPY_TABLE: dict[tuple[CopyState, CopyEvent], CopyState] = {
    (C.PENDING, CE.START): C.WRITING,
    (C.PENDING, CE.SKIP): C.SKIPPED,
    (C.PENDING, CE.REMOVE): C.SKIPPED,
    (C.WRITING, CE.FAIL): C.PENDING,
    (C.WRITING, CE.PUT): C.WRITTEN,
    (C.WRITTEN, CE.VERIFY): C.VERIFIED,
    (C.WRITTEN, CE.MISMATCH): C.QUARANTINED,
    (C.WRITTEN, CE.GONE): C.PENDING,
    (C.VERIFIED, CE.MISMATCH): C.QUARANTINED,
    (C.VERIFIED, CE.GONE): C.PENDING,
    (C.VERIFIED, CE.REMOVE): C.SKIPPED,
    (C.QUARANTINED, CE.REMOVE): C.SKIPPED,
    (C.QUARANTINED, CE.REQUEUE): C.PENDING,
    (C.SKIPPED, CE.UNSKIP): C.PENDING,
}

_State = TypeVar("_State", ShardState, CopyState)
_Event = TypeVar("_Event", ShardEvent, CopyEvent)


def _next(table: dict[tuple[_State, _Event], _State], state: _State, event: _Event) -> _State:
    try:
        return table[state, event]
    except KeyError:
        raise IllegalTransition(f"event {event.value} in state {state.value}") from None


def next_shard_state(state: ShardState, event: ShardEvent) -> ShardState:
    """The state after `event`; raises IllegalTransition where the table has no row."""
    return _next(SHARD_TABLE, state, event)


def next_copy_state(state: CopyState, event: CopyEvent) -> CopyState:
    """The state after `event`; raises IllegalTransition where the table has no row."""
    return _next(COPY_TABLE, state, event)


def diagram() -> str:
    """Both tables as Mermaid state diagrams; ARCHITECTURE.md shows exactly this."""
    shard = _mermaid(((state, event, after) for (state, event), after in SHARD_TABLE.items()), S.RECEIVING)
    copy = _mermaid(((state, event, after) for (state, event), after in COPY_TABLE.items()), C.PENDING)
    return f"Shard (in this node's cache):\n\n{shard}\nCopy (one shard on one tier):\n\n{copy}"


def _mermaid(rows: Iterable[tuple[StrEnum, StrEnum, StrEnum]], start: StrEnum) -> str:
    arrows = [f"    {state.value} --> {after.value}: {event.value}" for state, event, after in rows]
    return "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {start.value}", *arrows, "```", ""])
