"""Whether a shard's cache file may go: the acts that keep "evictable" true when copies on tiers come and go.

Owns the rule (every required tier that its policy sends it to holds the complete checkpoint and, still, a verified copy of the
shard; where the drain left it out on some, another tier holds it) and the transitions that follow from it. What is on no tier
by policy never becomes evictable shard by shard: it leaves the cache as a whole or not at all, since a checkpoint is complete
or it is not there. Each function is part of one catalog transaction.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterator

from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import NotFound
from forebay_gateway.core.records import CheckpointRow, PublishState, SessionRow, ShardKey, ShardRow
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


def expendable(txn: ReadTxn, required: Collection[str]) -> Iterator[CheckpointRow]:
    """Checkpoints that may leave the cache as a whole though no tier has them, oldest first."""
    outlived = _Outlived(txn, required)
    looked_at = set()
    for session_id in txn.cache_only():
        session = txn.session(session_id)
        if session is None or (name := (session.run, session.step)) in looked_at:
            continue
        looked_at.add(name)
        row = txn.checkpoint(*name)
        if row is not None and _is_expendable(txn, row, outlived):
            yield row


def is_expendable(txn: ReadTxn, row: CheckpointRow, required: Collection[str]) -> bool:
    """Whether that holds for this one: it is not pinned, and each of its sessions is transient; or the drain left it out
    everywhere, and a newer checkpoint of its run, by commit and by step, is complete on a required tier: `latest` never names
    one that is gone."""
    return _is_expendable(txn, row, _Outlived(txn, required, row.step))


def expendable_bytes(txn: ReadTxn, required: Collection[str]) -> int:
    """Bytes in the cache of all such checkpoints, without the padding of files."""
    return sum(txn.session_sums(session_id).cached_size for row in expendable(txn, required) for session_id in row.session_ids)


def _is_expendable(txn: ReadTxn, row: CheckpointRow, outlived: "_Outlived") -> bool:
    if row.pinned or row.deleting:
        return False
    for session_id in row.session_ids:
        session, sums = txn.session(session_id), txn.session_sums(session_id)
        if session is None or not session.is_cache_only or not sums.committed or sums.committed < sums.parts:
            return False
        if not session.is_transient and not outlived(session):
            return False
    return True


class _Outlived:
    """Whether something newer than a session is complete on a required tier; a run is looked at once, however many are asked
    about."""

    def __init__(self, txn: ReadTxn, required: Collection[str], first_step: int = 0) -> None:
        self._txn, self._required, self._first_step = txn, required, first_step
        self._runs: dict[str, tuple[list[int], list[int]]] = {}

    def __call__(self, session: SessionRow) -> bool:
        if session.run not in self._runs:
            self._runs[session.run] = self._complete(session.run)
        steps, newest = self._runs[session.run]
        behind = bisect_right(steps, session.step)
        return behind < len(steps) and newest[behind] > session.commit_seq

    def _complete(self, run: str) -> tuple[list[int], list[int]]:
        """Steps that are complete on a required tier, ascending, and for each the newest commit of it and those behind it."""
        found: list[tuple[int, int]] = []
        for row in self._txn.checkpoints(run, self._first_step):
            sessions = [] if row.deleting else self._txn.sessions_of(row)
            commits = [session.commit_seq for session in sessions if self._is_there(session)]
            if commits:
                found.append((row.step, max(commits)))
        newest, latest = [], 0
        for _, commit_seq in reversed(found):
            latest = max(latest, commit_seq)
            newest.append(latest)
        return [step for step, _ in found], newest[::-1]

    def _is_there(self, session: SessionRow) -> bool:
        return any(session.publish.get(name) is PublishState.COMPLETE for name in self._required)


def is_safe(txn: ReadTxn, session: SessionRow, row: ShardRow, required: Collection[str]) -> bool:
    """Whether no required tier lacks its copy; where one was left out, some tier has to hold a verified one, unless a newer
    session stands there in its place. A tier without a row was never asked to hold one (it joined later)."""
    copies = txn.copies(row.key)
    wanted = [(name, copy.state) for name, copy in copies.items() if name in required]
    if any(state not in SETTLED_COPIES for _, state in wanted):
        return False
    left_out = [name for name, state in wanted if state is CopyState.SKIPPED]
    if all(session.publish.get(name) is PublishState.SUPERSEDED for name in left_out):
        return True
    return any(copy.state is CopyState.VERIFIED for copy in copies.values())


def let_go(txn: WriteTxn, key: ShardKey, required: Collection[str]) -> None:
    """SEALED to EVICTABLE, where the tiers allow it."""
    row = txn.shard(key)
    session = txn.session(key.session_id)
    if row is None or session is None or row.state is not ShardState.SEALED or not is_published(session, required):
        return
    if is_safe(txn, session, row, required):
        txn.shard_event(key, ShardEvent.ALL_VERIFIED)


def copy_lost(txn: WriteTxn, key: ShardKey, tier: str, event: CopyEvent, error: str, required: Collection[str]) -> bool:
    """A VERIFIED copy was seen to be bad (MISMATCH) or absent (GONE): the cache keeps its file from here on. False where the
    copy is no longer what it was taken for."""
    copy, row, session = txn.copy(key, tier), txn.shard(key), txn.session(key.session_id)
    if copy is None or row is None or session is None or copy.state is not CopyState.VERIFIED:
        return False
    txn.copy_event(key, tier, event, error=error)
    if row.state is ShardState.EVICTABLE and not is_safe(txn, session, row, required):
        txn.shard_event(key, ShardEvent.REQUIRE)
    return True


def arrived(txn: WriteTxn, key: ShardKey, disk_size: int, required: Collection[str]) -> int:
    """A tier's copy is in the cache, verified; how many bytes of an older file it has replaced. Raises NotFound."""
    row, session = txn.shard(key), txn.session(key.session_id)
    if row is None or session is None:
        raise NotFound("the shard was deleted meanwhile", session_id=key.session_id, shard_id=key.shard_id)
    if row.state not in (ShardState.EVICTED, ShardState.QUARANTINED):
        return row.disk_size
    replaced = row.disk_size
    if row.state is ShardState.EVICTED:
        row = txn.shard_event(key, ShardEvent.FETCHED, disk_size=disk_size)
        if not is_safe(txn, session, row, required):
            txn.shard_event(key, ShardEvent.REQUIRE)
    else:
        txn.shard_event(key, ShardEvent.REPAIRED, disk_size=disk_size)
        let_go(txn, key, required)
    return replaced
