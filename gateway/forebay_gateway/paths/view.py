"""What people and schedulers see of checkpoints: state, what is missing, how far each level is.

Owns the words. A view is made of look-ups, however many shards there are. Reads the catalog only; find.py has looked at the
tiers before.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import MissingPart, NotFound
from forebay_gateway.core.records import CheckpointRow, NamedShard, PublishState, SessionRow
from forebay_gateway.paths.node import SHARD_BYTES, Node
from forebay_gateway.paths.pages import all_shards, inside_of
from forebay_gateway.paths.wholeness import (
    describe_gone,
    describe_missing,
    describe_spread,
    is_complete,
    missing_parts,
    past_the_cache,
)


@dataclass(frozen=True, slots=True)
class LevelView:
    """One level of one checkpoint."""

    level: str
    state: str
    done: int
    total: int
    reason: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointView:
    """One checkpoint, by its complete session, else its newest."""

    session: SessionRow
    state: str
    missing: tuple[MissingPart, ...]
    levels: tuple[LevelView, ...]
    size: int
    shard_count: int
    pinned: bool
    metadata_json: str
    reason: str
    transient: bool


def view(node: Node, txn: ReadTxn, row: CheckpointRow) -> CheckpointView | None:
    """The view of a checkpoint, None while it has no session or is being deleted."""
    if row.deleting:
        return None
    sessions = txn.sessions_of(row)
    if not sessions:
        return None
    complete = [session for session in sessions if is_complete(txn, session) and session.id not in node.gone]
    session = complete[-1] if complete else sessions[-1]
    sums, first = txn.session_sums(session.id), txn.part(session.id, 0)
    missing = () if complete else missing_parts(txn, session)
    reason = session.reason or (describe_missing(missing) if missing else "")
    if not complete and not reason:
        reason = describe_gone(session) if session.id in node.gone else describe_spread(txn, session)
    return CheckpointView(
        session=session,
        state="complete" if complete else "incomplete",
        missing=missing,
        levels=tuple(_levels(node, txn, session)),
        size=sums.committed_size,
        shard_count=sums.committed_shards,
        pinned=row.pinned,
        metadata_json="" if first is None else first.metadata_json,
        reason=reason,
        transient=node.restriction_of(session) == (),
    )


def _levels(node: Node, txn: ReadTxn, session: SessionRow) -> list[LevelView]:
    sums = txn.session_sums(session.id)
    cache_state = "complete" if sums.cached == sums.shards else "evicted"
    if sums.committed < session.writers:
        cache_state = "incomplete"
    views = [LevelView("cache", cache_state, sums.cached_size, sums.size, past_the_cache(txn, session))]
    for tier in node.tiers.values():
        state = session.publish.get(tier.name)
        _, _, done, size = txn.session_progress(session.id, tier.name)
        if state is PublishState.COMPLETE:
            word = "gone" if session.id in node.gone else "complete"
        elif state is PublishState.SUPERSEDED:
            word = "superseded"
        elif state is PublishState.REMOVED:
            word = "removed"
        elif state is None:
            word = "incomplete"
        else:
            word = "draining" if done < size else "pending"
        reason = "" if tier.usable else f"{tier.state.value}: {tier.reason}"
        if state is PublishState.SKIPPED:
            word, reason = "skipped", session.skipped.get(tier.name, "")
        elif state is None and not session.goes_to(tier.name):
            word, reason = "excluded", excluded_reason(session)
        views.append(LevelView(tier.name, word, done, size, reason))
    return views


def excluded_reason(session: SessionRow) -> str:
    """Why a session does not go to a tier that its policy does not name."""
    return "by policy it stays in the cache" if session.is_transient else "by policy its run does not go there"


async def listed(node: Node, session: SessionRow) -> Iterator[NamedShard]:
    """All shards of the session by name, those in packs among the others. Holds rows and indexes, and no snapshot. Raises
    NotFound where packs of an open part are joined again and again."""
    for last in (False, False, True):
        rows = await all_shards(node, session.id)
        try:
            packs = [_begun(inside_of(node, row)) for row in rows if row.is_pack]
            break
        except NotFound:  # joined since the look at its row
            if last:
                raise
    plain = [NamedShard(row) for row in rows if not row.is_pack]
    await node.aside(SHARD_BYTES * len(plain), lambda: plain.sort(key=_name_of))
    return heapq.merge(plain, *packs, key=_name_of)


def _begun(shards: Iterator[NamedShard]) -> Iterator[NamedShard]:
    """With its first step taken, which looks up the index."""
    return chain([next(shards)], shards)


def _name_of(shard: NamedShard) -> str:
    return shard.name
