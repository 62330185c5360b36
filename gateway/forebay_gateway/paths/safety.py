"""Whether a shard's cache file may go: the acts that keep "evictable" true when copies on tiers come and go.

Owns the rule (every required tier that its policy sends it to holds the complete checkpoint and, still, a verified copy of the
shard; where the drain left it out on some, another tier holds it) and the transitions that follow from it. What is on no tier
by policy never becomes evictable shard by shard: it leaves the cache as a whole or not at all, since a checkpoint is complete
or it is not there. Each function is part of one catalog transaction.
"""

from collections.abc import Collection

from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import NotFound
from forebay_gateway.core.records import PublishState, SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyEvent, CopyState, ShardEvent, ShardState

HELD_STATES = (PublishState.COMPLETE, PublishState.SUPERSEDED)
SETTLED_COPIES = (CopyState.VERIFIED, CopyState.SKIPPED)


def required_of(session: SessionRow, required: Collection[str]) -> tuple[str, ...]:
    """Those of the required tiers that the session's policy sends it to."""
    return tuple(name for name in required if session.goes_to(name))


def is_published(session: SessionRow, required: Collection[str]) -> bool:
    """Whether every required tier, and at least one, holds the complete checkpoint or something newer in its place; the drain
    may have left it out on some, never on all."""
    settled = {name for name, state in session.publish.items() if state is not PublishState.PENDING}
    held = any(state in HELD_STATES for state in session.publish.values())
    return held and settled.issuperset(required_of(session, required))


def is_expendable(txn: ReadTxn, session: SessionRow, required: Collection[str]) -> bool:
    """Whether a session that no tier has may leave the cache: it is transient; or the drain left it out everywhere and a newer
    checkpoint of its run, by commit and by step, is complete on a required tier: `latest` never names one that is gone."""
    sums = txn.session_sums(session.id)
    if not session.is_cache_only or not sums.committed or sums.committed < sums.parts:
        return False
    return session.is_transient or _is_outlived(txn, session, required)


def expendable_bytes(txn: ReadTxn, required: Collection[str]) -> int:
    """Bytes in the cache of all such sessions, without the padding of files."""
    total = 0
    for session_id in txn.cache_only():
        session = txn.session(session_id)
        if session is not None and is_expendable(txn, session, required):
            total += txn.session_sums(session_id).cached_size
    return total


def _is_outlived(txn: ReadTxn, session: SessionRow, required: Collection[str]) -> bool:
    for row in txn.checkpoints(session.run, session.step + 1):
        for number in () if row.deleting else row.session_ids:
            newer = txn.session(number)
            if newer is None or newer.commit_seq <= session.commit_seq:
                continue
            if any(newer.publish.get(name) is PublishState.COMPLETE for name in required):
                return True
    return False


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
