"""What goes next to one tier: the scheduler (core/schedule.py), fed from the catalog's queue.

    at start, and now and then: every part in the pending index that the scheduler does not know -> add
    told of a session (commit, pin, hold, deletion, completion): its parts, marks and completeness as the catalog has them
    the drain: decide -> a batch of a part, or a checkpoint to leave out, or nothing before a time

The pending index is the queue, and the scheduler only a cache of it: it can be thrown away at any time and made again, and is
where it proves wrong. A part is one commit, so one commit_seq: finding the parts costs one look-up for each, whatever
shards they have, and how many are left is a sum that the catalog keeps.

After a restart parts are as old as this process: wall clocks are not trusted for order, and the order of commits is kept, which
is all that their ages would say among each other. Where a run's cadence stands is in the catalog (skip.py).

Owns what the scheduler hears, the cadence's memory, and skips. Does not own batches, retries or copies (drain.py).
"""

import asyncio
import contextlib
import logging
from functools import partial

from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import NotFound
from forebay_gateway.core.records import CheckpointRow, PartRow, PartState, PendingCopy, PublishState, SessionRow, ShardKey
from forebay_gateway.core.schedule import Entry, Idle, Kind, Next, Part, Rules, Scheduler, Skip
from forebay_gateway.paths.announce import own_writers, withdraw
from forebay_gateway.paths.evictable import mark_evictable
from forebay_gateway.paths.joint import Joint, Stance, all_here, rules_of
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import page_of
from forebay_gateway.paths.skip import (
    Followed,
    Taken,
    begin_skip,
    cadence_setting,
    end_unskip,
    follow_skip,
    is_sound,
    may_be_left_out,
    must_go,
    note_taken,
    outdo,
    skip_some,
    unskip_some,
)
from forebay_gateway.paths.verdicts import Unsaid

log = logging.getLogger("forebay.order")

BATCH_BYTES_MAX = 1 << 30
QUANTUM_BYTES = 2 * BATCH_BYTES_MAX  # shares finer than two batches would be rounding
PARTS_A_PAGE = 256
PARTS_MAX = 50_000  # known at a time, some 50 MiB; more wait in the index until these have gone, but for what is urgent
LOOK_AGAIN_S = 5.0
REST_FACTOR = 20  # a look at all parts takes at most this part of one core, however many there are
BLOCKED_S = 1.0  # until a part whose shards must wait for something else is looked at again, where nothing tells before


class Order:
    """The order of one tier's queue. All its methods belong to the event loop."""

    def __init__(self, node: Node, tier: str) -> None:
        self._node = node
        self._tier = tier
        self._hinted: set[int] = set()
        self._out: dict[ShardKey, int] = {}  # copies handed out: their part
        self.joint = Joint(node, tier)
        self._kept: set[int] = set()  # sessions that the catalog did not let be left out, until something is told
        node.changes.listen_sessions(self._hint)
        node.resting[tier] = self.rests
        self._begin()

    def _begin(self) -> None:
        self._scheduler = Scheduler(Rules(quantum_bytes=QUANTUM_BYTES), partial(rules_of, self._node, self._tier))
        self._blocked: dict[int, set[int]] = {}  # session: parts that wait for something else
        self._resumed: dict[str, Taken | None] = {}
        self._load_at_s = float("-inf")

    def _hint(self, session_id: int) -> None:
        self._hinted.add(session_id)

    def reload(self) -> None:
        """Rules have changed: what waits is looked at again by the new ones."""
        self._begin()

    # -- what the drain asks and tells ---------------------------------------------------------------------------------

    async def catch_up(self) -> None:
        """Take in what the catalog's queue has got since."""
        if self._node.clock.monotonic() >= self._load_at_s:
            await self._load()
        turns: list[tuple[int, int]] = []
        while self._hinted:
            session_id = self._hinted.pop()
            with self._node.catalog.read() as txn:
                goes_after_all = self._look_at(txn, session_id, turns)
            await (self.unskip(session_id) if goes_after_all else asyncio.sleep(0))
        self._prioritise(turns)
        for session_id in list(self.joint.to_follow):
            await self._follow(session_id)

    def decide(self) -> Next | Skip | Idle:
        """What the rules say now."""
        return self._scheduler.decide(self._node.clock.monotonic())

    def took(self, order: int, keys: list[ShardKey], size: int) -> None:
        """These are handed out."""
        self._out.update(dict.fromkeys(keys, order))
        self._scheduler.took(order, len(keys), size, self._node.clock.monotonic())

    def verified(self, key: ShardKey) -> None:
        """Its copy is proved."""
        if (order := self._out.pop(key, None)) is not None:
            self._scheduler.verified(order)

    def failed(self, key: ShardKey) -> None:
        """Its copy is pending again."""
        if (order := self._out.pop(key, None)) is not None:
            self._scheduler.failed(order)

    def gone(self, order: int) -> None:
        """Nothing of the part is in the queue any more."""
        self._scheduler.gone(order)

    def blocked(self, part: Next, wait_s: float) -> None:
        """All that is left of the part must wait, at most so long: others go meanwhile."""
        self._scheduler.pause(part.order, self._node.clock.monotonic() + wait_s)
        self._blocked.setdefault(part.session_id, set()).add(part.order)

    def wake(self, session_id: int) -> None:
        """Something happened that its parts may have waited for."""
        for order in self._blocked.pop(session_id, ()):
            self._scheduler.wake(order)

    def wake_all(self) -> None:
        """Nothing waits for its pause any more."""
        for session_id in list(self._blocked):
            self.wake(session_id)

    def rests(self, order: int) -> bool:
        """Whether a part waits because a rule or an operator says so, and not because the drain does not come to it."""
        return self._scheduler.rests(order)

    def entries(self, after: Entry | None, most: int) -> list[Entry]:
        """What waits, by checkpoint: at most `most`, behind `after`."""
        return self._scheduler.entries(after, most)

    def begun(self, txn: WriteTxn, session: SessionRow) -> None:
        """Part of the transaction that hands out a batch: the cadence counts from this checkpoint on."""
        if rules_of(self._node, self._tier, session.run).has_cadence:
            note_taken(txn, cadence_setting(self._tier, session.run), session.commit_seq, self._node.clock.wall())

    async def may_begin(self, part: Next) -> bool:
        """Whether a batch of the part may be handed out: of a checkpoint of several nodes, what this node has decided is said
        to the others before. Raises Unsaid."""
        if part.session_id not in self.joint.claims:
            return True
        with self._node.catalog.read() as txn:
            session = txn.session(part.session_id)
        if session is None:
            return True
        if self.joint.holds_back(session):
            self.blocked(part, BLOCKED_S)
            return False
        if await self.joint.say(session, goes=True):
            self._scheduler.goes(session.id)
            return True
        await self._follow(session.id)
        return False

    async def skip(self, decision: Skip) -> bool:
        """Leave a checkpoint out, in the catalog; False where that is not so any more: then all is looked at anew. Raises
        Unsaid where the other nodes that save it could not be told."""
        if not await self._agreed(decision):
            self._begin()
            return False
        act = partial(begin_skip, decision.session_id, self._tier, decision.reason, self._cadence(decision.run))
        if not await self._node.catalog.write(act):
            self._kept.add(decision.session_id)
            self._begin()
            return False
        log.info("left out run=%s step=%s tier=%s reason=%s", decision.run, decision.step, self._tier, decision.reason)
        await self._end_skip(decision.session_id)
        return True

    async def _agreed(self, decision: Skip) -> bool:
        with self._node.catalog.read() as txn:
            session = txn.session(decision.session_id)
            is_alone = session is not None and (session.writers == 1 or all_here(txn, session))
            may = session is not None and may_be_left_out(txn, session, self._tier)
        if is_alone:
            return True
        if session is None or not may or session.id not in self.joint.claims:
            self._kept.add(decision.session_id)
            return False
        try:
            return not await self.joint.say(session, goes=False, reason=decision.reason)
        except Unsaid:
            self._begin()  # the scheduler has let go of it
            raise

    def _cadence(self, run: str) -> str:
        return cadence_setting(self._tier, run) if rules_of(self._node, self._tier, run).has_cadence else ""

    async def _follow(self, session_id: int) -> None:
        """It was decided for all nodes that the checkpoint is left out."""
        self.joint.to_follow.discard(session_id)
        with self._node.catalog.read() as txn:
            session = txn.session(session_id)
        verdict = None if session is None else self.joint.verdicts.of(session)
        if session is None or verdict is None or verdict.goes:
            return
        act = partial(follow_skip, session_id, self._tier, verdict.reason, self._cadence(session.run))
        followed = await self._node.catalog.write(act)
        if followed is not Followed.DONE:
            self._scheduler.awaits(session_id)
            if followed is Followed.BEGUN:
                self.joint.to_clean.setdefault(session_id, None)
        else:
            log.info("left out, by %s run=%s step=%s tier=%s", verdict.node, session.run, session.step, self._tier)
            await self.left_out(session_id)

    async def left_out(self, session_id: int) -> None:
        """The catalog says that a checkpoint of several nodes is left out here."""
        self._scheduler.forget(session_id)
        self.joint.ended(session_id)
        await self._end_skip(session_id)

    async def _end_skip(self, session_id: int) -> None:
        while await self._node.catalog.write(partial(skip_some, session_id, self._tier)):
            pass
        with self._node.catalog.read() as txn:
            session = txn.session(session_id)
            row = None if session is None else txn.checkpoint(session.run, session.step)
        for number in () if row is None else row.session_ids:  # a newer one of the same step may be complete
            await self._node.catalog.write(partial(outdo, number, self._tier))
        await mark_evictable(self._node, session_id)  # it may be safe on other tiers, and had waited for this one alone
        if session is not None and session.writers > 1 and session.is_cache_only:
            await withdraw(self._node, session, own_writers(self._node, session))
        self._node.changes.tell(session_id)

    async def unskip(self, session_id: int) -> None:
        """A checkpoint that was left out goes after all."""
        await self.joint.take_back(session_id)
        after: int | None = -1
        while after is not None:
            with contextlib.suppress(NotFound):  # deleted meanwhile
                after = await self._node.catalog.write(partial(unskip_some, session_id, self._tier, after))
        if await self._node.catalog.write(partial(end_unskip, session_id, self._tier)):
            self._node.changes.tell(session_id)

    # -- from the catalog ----------------------------------------------------------------------------------------------

    async def _load(self) -> None:
        """Parts in the queue that are not known here."""
        clock = self._node.clock
        began_s, after, ended = clock.monotonic(), 0, False
        turns: list[tuple[int, int]] = []
        half_skipped: dict[int, bool] = {}
        while not ended and len(self._scheduler) < PARTS_MAX:
            with self._node.catalog.read() as txn:
                entries = txn.pending_parts(self._tier, after)
                looked, ended = page_of(
                    clock, (self._take_in(txn, entry, turns, half_skipped) for entry in entries), PARTS_A_PAGE
                )
            after = looked[-1] if looked else after
            await asyncio.sleep(0)
        self._prioritise(turns)
        now_s = clock.monotonic()
        self._load_at_s = now_s + max(LOOK_AGAIN_S, REST_FACTOR * (now_s - began_s))
        for session_id, goes in half_skipped.items():  # cut short by a crash
            await (self.unskip(session_id) if goes else self._end_skip(session_id))

    def _take_in(self, txn: ReadTxn, entry: PendingCopy, turns: list[tuple[int, int]], half_skipped: dict[int, bool]) -> int:
        if entry.order in self._scheduler:
            return entry.order
        session, row = txn.session(entry.key.session_id), txn.shard(entry.key)
        part = None if session is None or row is None else txn.part(session.id, row.writer)
        checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
        if session is None or part is None or checkpoint is None or checkpoint.deleting:
            return entry.order
        if session.publish.get(self._tier) is PublishState.SKIPPED:
            half_skipped[session.id] = must_go(checkpoint, session) or self.joint.is_taken_back(session)
            return entry.order
        self._add(txn, checkpoint, session, part, turns)
        self._take_stance(txn, checkpoint, session)
        self._note_completeness(txn, session)
        return entry.order

    def _look_at(self, txn: ReadTxn, session_id: int, turns: list[tuple[int, int]]) -> bool:
        """A session of which something was told; whether it was left out and must go: it is final now, or pinned."""
        self.wake(session_id)
        self._kept.discard(session_id)
        session = txn.session(session_id)
        checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
        if session is None or checkpoint is None or checkpoint.deleting:
            self._scheduler.forget(session_id)
            return False
        if session.publish.get(self._tier) is PublishState.SKIPPED:
            return must_go(checkpoint, session) or self.joint.is_taken_back(session)
        if session.publish.get(self._tier) is PublishState.PENDING:
            for part in txn.parts(session_id):
                if part.state is PartState.COMMITTED and not part.is_adopted and part.commit_seq not in self._scheduler:
                    self._add(txn, checkpoint, session, part, turns)
        self._scheduler.promote(session_id, session.kind)
        self._scheduler.pin(session_id, checkpoint.pinned)
        orders = self._scheduler.orders(session_id)
        (self._scheduler.hold if checkpoint.held else self._scheduler.release)(orders)
        turns += [(checkpoint.turn, order) for order in orders if checkpoint.turn]
        self._take_stance(txn, checkpoint, session)
        self._note_completeness(txn, session)
        return False

    def _take_stance(self, txn: ReadTxn, checkpoint: CheckpointRow, session: SessionRow) -> None:
        """Who decides on a session whose writers use several nodes, if not all of them."""
        stance = self.joint.stance(txn, checkpoint, session)
        if stance is Stance.GOES:
            self._scheduler.goes(session.id)
        elif stance is Stance.AWAITS:
            self._scheduler.awaits(session.id)
        elif stance is Stance.ALONE:
            self._scheduler.alone(session.id)
        elif session.id not in self._kept:
            self._scheduler.decides(session.id)

    def _add(
        self, txn: ReadTxn, checkpoint: CheckpointRow, session: SessionRow, part: PartRow, turns: list[tuple[int, int]]
    ) -> None:
        proved, copies, _, _ = txn.part_progress(session.id, part.writer, self._tier)
        is_urgent = session.kind is not Kind.PERIODIC or checkpoint.turn > 0
        if copies <= proved or (len(self._scheduler) >= PARTS_MAX and not is_urgent):
            return
        taken = self._resume(txn, session.run)
        begun = taken is not None and taken.commit_seq == session.commit_seq
        begun = begun or session.publish.get(self._tier) is not PublishState.PENDING  # it was there, and a copy was lost
        self._scheduler.add(
            Part(
                order=part.commit_seq,
                run=session.run,
                step=session.step,
                session_id=session.id,
                copies=copies - proved,
                since_s=self._node.clock.monotonic(),
                kind=session.kind,
                pinned=checkpoint.pinned,
                started=begun or txn.session_progress(session.id, self._tier)[0] > 0,
                may_skip=session.writers == 1 and session.id not in self._kept,  # of several writers: once all parts are here
            )
        )
        if checkpoint.held:
            self._scheduler.hold([part.commit_seq])
        if checkpoint.turn:
            turns.append((checkpoint.turn, part.commit_seq))

    def _resume(self, txn: ReadTxn, run: str) -> Taken | None:
        """Where the run's cadence stood when this process met it first."""
        if run not in self._resumed:
            has_cadence = rules_of(self._node, self._tier, run).has_cadence
            taken = self._resumed[run] = Taken.read(txn, cadence_setting(self._tier, run)) if has_cadence else None
            if taken is not None:
                ago_s = max(0.0, self._node.clock.wall() - taken.wall_s)  # a clock that was set back delays, and no more
                self._scheduler.resume(run, self._node.clock.monotonic() - ago_s, taken.skipped)
        return self._resumed[run]

    def _note_completeness(self, txn: ReadTxn, session: SessionRow) -> None:
        if is_sound(txn, session):
            self._scheduler.complete(session.id)
            if session.id not in self._kept and all_here(txn, session):
                self._scheduler.decides(session.id)

    def _prioritise(self, turns: list[tuple[int, int]]) -> None:
        self._scheduler.prioritise(order for _, order in sorted(turns))


async def promote(node: Node, run: str, step: int, kind: Kind = Kind.PREEMPTION) -> tuple[int, ...]:
    """The checkpoint, all its sessions here, is of a more urgent class from now on, on every tier, also after a restart; their
    ids. Raises NotFound."""

    def act(txn: WriteTxn) -> tuple[int, ...]:
        row = txn.checkpoint(run, step)
        if row is None or row.deleting:
            raise NotFound(f"no checkpoint of run {run!r} has step {step} here", run=run, step=step)
        for session_id in row.session_ids:
            txn.set_kind(session_id, kind)
        return row.session_ids

    session_ids = await node.catalog.write(act)
    for session_id in session_ids:
        node.changes.tell(session_id)
    return session_ids
