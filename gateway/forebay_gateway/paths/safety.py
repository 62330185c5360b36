"""Whether a shard's cache file may go: the acts that keep "evictable" true when copies on tiers come and go.

Owns the rule (every required tier holds the complete checkpoint and, still, a verified copy of the shard) and the transitions
that follow from it. Each function is part of one catalog transaction.
"""

from collections.abc import Collection

from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import NotFound
from forebay_gateway.core.records import PublishState, SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyEvent, CopyState, ShardEvent, ShardState

SETTLED_COPIES = (CopyState.VERIFIED, CopyState.SKIPPED)


def is_published(session: SessionRow, required: Collection[str]) -> bool:
    """Whether every required tier, and at least one, holds the complete checkpoint."""
    settled = {name for name, state in session.publish.items() if state is not PublishState.PENDING}
    return bool(settled) and settled.issuperset(required)


def is_safe(txn: ReadTxn, row: ShardRow, required: Collection[str]) -> bool:
    """Whether no required tier lacks its copy. A tier without a row was never asked to hold one (it joined later)."""
    return not any(name in required and copy.state not in SETTLED_COPIES for name, copy in txn.copies(row.key).items())


def let_go(txn: WriteTxn, key: ShardKey, required: Collection[str]) -> None:
    """SEALED to EVICTABLE, where the tiers allow it."""
    row = txn.shard(key)
    session = txn.session(key.session_id)
    if row is None or session is None or row.state is not ShardState.SEALED or not is_published(session, required):
        return
    if is_safe(txn, row, required):
        txn.shard_event(key, ShardEvent.ALL_VERIFIED)


def copy_lost(txn: WriteTxn, key: ShardKey, tier: str, event: CopyEvent, error: str, required: Collection[str]) -> bool:
    """A VERIFIED copy was seen to be bad (MISMATCH) or absent (GONE): the cache keeps its file from here on. False where the
    copy is no longer what it was taken for."""
    copy, row = txn.copy(key, tier), txn.shard(key)
    if copy is None or row is None or copy.state is not CopyState.VERIFIED:
        return False
    txn.copy_event(key, tier, event, error=error)
    if row.state is ShardState.EVICTABLE and not is_safe(txn, row, required):
        txn.shard_event(key, ShardEvent.REQUIRE)
    return True


def arrived(txn: WriteTxn, key: ShardKey, disk_size: int, required: Collection[str]) -> int:
    """A tier's copy is in the cache, verified; how many bytes of an older file it has replaced. Raises NotFound."""
    row = txn.shard(key)
    if row is None:
        raise NotFound("the shard was deleted meanwhile", session_id=key.session_id, shard_id=key.shard_id)
    if row.state not in (ShardState.EVICTED, ShardState.QUARANTINED):
        return row.disk_size
    replaced = row.disk_size
    if row.state is ShardState.EVICTED:
        row = txn.shard_event(key, ShardEvent.FETCHED, disk_size=disk_size)
        if not is_safe(txn, row, required):
            txn.shard_event(key, ShardEvent.REQUIRE)
    else:
        txn.shard_event(key, ShardEvent.REPAIRED, disk_size=disk_size)
        let_go(txn, key, required)
    return replaced
