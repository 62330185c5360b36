"""Leaving a checkpoint out on one tier, and taking it back in: the acts in the catalog.

    begin_skip: the session is SKIPPED there, with the reason -> skip_some, again and again: its copies leave the queue
    pinned meanwhile, or final -> unskip_some, again and again: its copies are PENDING again -> end_unskip: the session is, too
    a newer session of the same step is complete there -> outdo: it is superseded, and may leave the cache

Owns these acts, each part of one transaction, and what the catalog remembers of a run's cadence. Whoever finds queued copies of
a session that is SKIPPED goes on with the first line, or, where it must go, with the second. Which checkpoint is left out is
the scheduler's to say (order.py); here it is asked once more whether that may be.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from itertools import chain

from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.records import CheckpointRow, PartState, PendingCopy, PublishState, SessionRow, ShardKey
from forebay_gateway.core.schedule_rows import Kind
from forebay_gateway.core.states import CopyEvent, CopyState
from forebay_gateway.paths.wholeness import complete_at_cache

COPIES_A_TRANSACTION = 2000


def begin_skip(session_id: int, tier: str, reason: str, cadence: str, txn: WriteTxn) -> bool:
    """The decision; False where it does not hold any more. `cadence` names the setting that counts it, "" for none."""
    session = txn.session(session_id)
    if session is None or not may_be_left_out(txn, session, tier):
        return False
    _note_skip(txn, session_id, tier, reason, cadence)
    return True


def may_be_left_out(txn: ReadTxn, session: SessionRow, tier: str) -> bool:
    """Whether nothing keeps it, and something newer goes there in its place."""
    row = txn.checkpoint(session.run, session.step)
    if row is None or row.turn or not _may_leave(row, session, tier) or is_begun(txn, session, tier):
        return False
    return is_outrun(txn, session, tier)


class Followed(Enum):
    """What became of a decision of another node."""

    DONE = "done"
    KEPT = "kept"  # it is held, must go, or waits here no more
    BEGUN = "begun"  # something of it lies on the tier, which has to be taken away first


def follow_skip(session_id: int, tier: str, reason: str, cadence: str, txn: WriteTxn) -> Followed:
    """The same by a decision for all nodes: whoever made it has seen that it may be left out."""
    session = txn.session(session_id)
    row = None if session is None else txn.checkpoint(session.run, session.step)
    if session is None or row is None or not _may_leave(row, session, tier):
        return Followed.KEPT
    if is_begun(txn, session, tier):
        return Followed.BEGUN
    _note_skip(txn, session_id, tier, reason, cadence)
    return Followed.DONE


def _note_skip(txn: WriteTxn, session_id: int, tier: str, reason: str, cadence: str) -> None:
    txn.skip(session_id, tier, reason)
    name = skipped_setting(tier)
    txn.set_setting(name, b"%d" % (skipped_count(txn, tier) + 1))
    if cadence and (taken := Taken.read(txn, cadence)) is not None:
        taken.write(txn, cadence, skipped=taken.skipped + 1)


def _may_leave(row: CheckpointRow, session: SessionRow, tier: str) -> bool:
    if row.deleting or row.held or must_go(row, session):
        return False
    return session.publish.get(tier) is PublishState.PENDING


def is_begun(txn: ReadTxn, session: SessionRow, tier: str) -> bool:
    """Whether something of it has begun to go there."""
    return bool(txn.session_progress(session.id, tier)[0] or txn.uploads_of(session.id, tier))


def is_only_there(txn: ReadTxn, session: SessionRow, tier: str, tiers: Iterable[str]) -> bool:
    """Whether something of it that is not in the cache may lie on this one of the `tiers` alone: it went through to it past a
    cache whose disk fails. By sums, so that in doubt it stays."""
    sums = txn.session_sums(session.id)
    if sums.cached >= sums.shards or not txn.session_progress(session.id, tier)[0]:
        return False
    return not any(name != tier and txn.session_progress(session.id, name)[0] >= sums.shards for name in tiers)


def is_outrun(txn: ReadTxn, session: SessionRow, tier: str) -> bool:
    """Whether a newer complete checkpoint of the run is on the tier or on its way there. It is a later step as a rule, so these
    are looked at first."""
    rows = chain(txn.checkpoints(session.run, session.step + 1), txn.checkpoints(session.run))
    for row in rows:
        for number in () if row.deleting else row.session_ids:
            newer = txn.session(number)
            if newer is None or newer.commit_seq <= session.commit_seq:
                continue
            state = newer.publish.get(tier)
            if state is PublishState.COMPLETE:
                return True
            if state is PublishState.PENDING and not row.held and is_sound(txn, newer):
                return True
    return False


def is_sound(txn: ReadTxn, session: SessionRow) -> bool:
    """Whether all of a session is there to be put on a tier, as far as this node knows: what is damaged takes nobody's
    place."""
    if PublishState.COMPLETE in session.publish.values():
        return True
    sums = txn.session_sums(session.id)
    return not session.reason and sums.cached == sums.shards and complete_at_cache(txn, session)


def outdo(session_id: int, tier: str, txn: WriteTxn) -> tuple[int, ...]:
    """Sessions of the same step that go to the tier no more are superseded there once this newer one is complete on it, and may
    leave the cache: those that were left out, and those that by policy never went. Which they are."""
    newer = txn.session(session_id)
    row = None if newer is None else txn.checkpoint(newer.run, newer.step)
    if newer is None or row is None or newer.publish.get(tier) is not PublishState.COMPLETE:
        return ()
    found = []
    for number in row.session_ids:
        older = txn.session(number)
        if older is None or not 0 < older.commit_seq < newer.commit_seq:
            continue
        state = older.publish.get(tier)
        goes_no_more = state is PublishState.SKIPPED or (state is None and older.is_transient)
        if goes_no_more and not txn.session_progress(number, tier)[1]:  # else the end of its skip does it
            txn.set_publish(number, tier, PublishState.SUPERSEDED)
            found.append(number)
    return tuple(found)


def must_go(row: CheckpointRow, session: SessionRow) -> bool:
    """Whether it is not to be left out, and goes after all where it was."""
    return row.pinned or session.kind is not Kind.PERIODIC


def skip_some(session_id: int, tier: str, txn: WriteTxn) -> bool:
    """The next copies of a SKIPPED session; whether there may be more. One that is to go after all is left as it is."""
    session = txn.session(session_id)
    row = None if session is None else txn.checkpoint(session.run, session.step)
    if session is None or row is None or must_go(row, session) or session.publish.get(tier) is not PublishState.SKIPPED:
        return False
    keys: list[ShardKey] = []
    for part in txn.parts(session_id):
        if part.state is not PartState.COMMITTED or part.is_adopted:
            continue
        for entry in txn.pending(tier, PendingCopy(part.commit_seq, ShardKey(0, 0))):
            if entry.order != part.commit_seq or len(keys) >= COPIES_A_TRANSACTION:
                break
            copy = txn.copy(entry.key, tier)
            if copy is not None and copy.state is CopyState.PENDING:
                keys.append(entry.key)
    for key in keys:
        txn.copy_event(key, tier, CopyEvent.SKIP)
    return len(keys) >= COPIES_A_TRANSACTION


def unskip_some(session_id: int, tier: str, after: int, txn: WriteTxn) -> int | None:
    """The next copies of a session that is to go there after all, from behind the shard id `after`; where to go on."""
    rows = []
    for row in txn.shards(session_id, after=after):
        rows.append(row)
        if len(rows) >= COPIES_A_TRANSACTION:
            break
    for row in rows:
        copy = txn.copy(row.key, tier)
        if copy is not None and copy.state is CopyState.SKIPPED:
            txn.copy_event(row.key, tier, CopyEvent.UNSKIP)
    return rows[-1].shard_id if len(rows) >= COPIES_A_TRANSACTION else None


def end_unskip(session_id: int, tier: str, txn: WriteTxn) -> bool:
    """All its copies are queued again; where they are not (unpinned and left out once more meanwhile), it stays SKIPPED: what
    is to be published must have a copy of every shard on its way."""
    session = txn.session(session_id)
    if session is None or session.publish.get(tier) is not PublishState.SKIPPED:
        return False
    if txn.session_progress(session_id, tier)[1] != txn.session_sums(session_id).shards:
        return False
    txn.unskip(session_id, tier)
    return True


# -- what is remembered ------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Taken:
    """The newest checkpoint of a run that began to go to a tier: its commit, when (wall clock), how many were left out
    since."""

    commit_seq: int
    wall_s: float
    skipped: int = 0

    @classmethod
    def read(cls, txn: ReadTxn, name: str) -> "Taken | None":
        """As the catalog has it."""
        data = txn.setting(name)
        return None if data is None else cls(*json.loads(data))

    def write(self, txn: WriteTxn, name: str, skipped: int) -> None:
        """Keep it."""
        txn.set_setting(name, json.dumps([self.commit_seq, self.wall_s, skipped]).encode())


def note_taken(txn: WriteTxn, name: str, commit_seq: int, wall_s: float) -> None:
    """A checkpoint of the run begins to go. What is older than the one that went last changes nothing."""
    known = Taken.read(txn, name)
    if known is None or known.commit_seq < commit_seq:
        Taken(commit_seq, wall_s).write(txn, name, 0)


def cadence_setting(tier: str, run: str) -> str:
    """Under which name the catalog keeps where a run's cadence stands. A run's name may be longer than a setting's."""
    return f"cadence:{tier}:{hashlib.sha256(run.encode()).hexdigest()[:32]}"


def skipped_setting(tier: str) -> str:
    """Under which name the catalog keeps how many checkpoints were left out."""
    return f"skipped:{tier}"


def skipped_count(txn: ReadTxn, tier: str) -> int:
    """How many checkpoints were left out on the tier so far."""
    return int(txn.setting(skipped_setting(tier)) or 0)
