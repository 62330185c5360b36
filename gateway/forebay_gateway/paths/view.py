"""What people and schedulers see of checkpoints: state, what is missing, how far each level is.

Owns the words. Reads the catalog only; find.py has looked at the tiers before.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import MissingPart
from forebay_gateway.core.records import CheckpointRow, NamedShard, PartState, PublishState, SessionRow, ShardRow
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.wholeness import describe_missing, is_complete, missing_parts, sessions_of
from forebay_wire.packs import PackIndex


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


def view(node: Node, txn: ReadTxn, row: CheckpointRow) -> CheckpointView | None:
    """The view of a checkpoint, None while it has no session or is being deleted."""
    if row.deleting:
        return None
    sessions = sessions_of(txn, row)
    if not sessions:
        return None
    complete = [session for session in sessions if is_complete(txn, session)]
    session = complete[-1] if complete else sessions[-1]
    parts = txn.parts(session.id)
    missing = () if complete else missing_parts(txn, session)
    reason = session.reason or (describe_missing(missing) if missing else "")
    if not complete and not reason:
        reason = "all parts are committed; they meet on a tier once drained"
    return CheckpointView(
        session=session,
        state="complete" if complete else "incomplete",
        missing=missing,
        levels=tuple(_levels(node, txn, session)),
        size=sum(part.visible_size for part in parts),
        shard_count=sum(part.visible_count for part in parts),
        pinned=row.pinned,
        metadata_json=next((part.metadata_json for part in parts if part.writer == 0), ""),
        reason=reason,
    )


def _levels(node: Node, txn: ReadTxn, session: SessionRow) -> list[LevelView]:
    parts = [part for part in txn.parts(session.id) if part.state is PartState.COMMITTED]
    rows = list(txn.shards(session.id))
    total = sum(row.size for row in rows)
    here = sum(row.size for row in rows if row.is_cached)
    if len(parts) < session.writers:
        cache_state = "incomplete"
    else:
        cache_state = "complete" if all(row.is_cached for row in rows) else "evicted"
    views = [LevelView("cache", cache_state, here, total)]
    for tier in node.tiers.values():
        state = session.publish.get(tier.name)
        done = size = 0
        for part in parts:
            _, _, verified_bytes, part_bytes = txn.part_progress(session.id, part.writer, tier.name)
            done, size = done + verified_bytes, size + part_bytes
        if state is PublishState.COMPLETE:
            word = "complete"
        elif state is PublishState.SUPERSEDED:
            word = "superseded"
        elif state is None:
            word = "incomplete"
        else:
            word = "draining" if done < size else "pending"
        views.append(LevelView(tier.name, word, done, size, "" if tier.usable else f"{tier.state.value}: {tier.reason}"))
    return views


def listed(txn: ReadTxn, session: SessionRow) -> Iterator[NamedShard]:
    """All shards of the session by name, those in packs among the others. Outlives the snapshot; holds indexes, not names."""
    rows = list(txn.shards(session.id))
    plain = sorted((NamedShard(row) for row in rows if not row.is_pack), key=_name_of)
    packs = [_inside(row, txn.pack_index(row.key)) for row in rows if row.is_pack]
    return heapq.merge(plain, *packs, key=_name_of)


def _inside(row: ShardRow, index: PackIndex) -> Iterator[NamedShard]:
    return (NamedShard(row, packed) for packed in index)


def _name_of(shard: NamedShard) -> str:
    return shard.name
