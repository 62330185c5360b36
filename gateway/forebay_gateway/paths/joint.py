"""A checkpoint whose writers use several nodes, on a tier where a rule may leave it out: one of them decides for all.

    writer 0's node: goes or is skipped, by the scheduler (order.py) -> its verdict on the tier -> only then its own act
    the others: nothing of it begins to go -> the verdict is there -> they do the same
    what must go (a pin, a final or preemption save on any node, bytes that went through and lie there alone), or has begun
    to: whoever sees it says that it goes

The first word counts, and a skip may be taken back (core/verdicts.py). Nobody waits for ever: where writer 0's node says
nothing for so long that it is taken for lost, any other decides, by the same rules and in the same document.

What it costs: nothing where no rule can leave anything out, for one writer, or where all writers are here. Else one write for
each checkpoint by who decides, and reads of one document a run by the others, at pauses that grow with how long they have
waited. Owns who decides, what is waited for, and when the tier is asked. Does not own the scheduler, nor the acts (skip.py).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from hashlib import sha256

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.core.records import CheckpointRow, PartState, PublishState, SessionRow
from forebay_gateway.core.schedule import Rules, RunRules
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.skip import Taken, cadence_setting, is_begun, is_only_there, is_outrun, must_go
from forebay_gateway.paths.verdicts import Unsaid, Verdicts, name_of
from forebay_gateway.paths.wholeness import complete_at_cache
from forebay_gateway.tiers.monitor import OF_ONE_OBJECT

log = logging.getLogger("forebay.joint")

LAG_S = 60.0  # a checkpoint that has waited for this long may be left out, where policy.skip says so
LOOK_S_MIN, LOOK_S_MAX = 0.5, 30.0  # while something is waited for
REST_S_MIN, REST_S_MAX = 30.0, 600.0  # while only what was left out might be taken back
OUTRUN_S = 300.0  # after a newer complete one is there, whoever decides has had its time; jitter is added
STUCK_S = 60.0  # between looks for a session that no rule of this node is for, and that others do not bring out
RUNS_MAX = 4096


class Stance(Enum):
    """How this node stands to a session on the tier."""

    ALONE = "alone"  # the rules of one node hold, as all of it is here or none may leave it out
    DECIDES = "decides"
    AWAITS = "awaits"
    GOES = "goes"


class Claim(Enum):
    """What this node is to say of a session."""

    DECIDE = "decide"  # once the scheduler comes to it
    GOES = "goes"  # it has begun, an operator put it first, or whose word it were has no rule and asks nobody
    MUST_GO = "must go"  # also where it was left out


@dataclass(slots=True)
class _Awaited:
    run: str
    since_s: float
    outrun_s: float | None = None  # since when something newer is complete


def rules_of(node: Node, tier: str, run: str) -> RunRules:
    """What holds for the run on the tier now."""
    policy = node.policy(run)
    every = policy.every or next(each.every for each in node.config.tiers if each.name == tier)
    return RunRules(every.count, every.interval_s, skip_superseded=policy.skip, lag_s=LAG_S)


def may_leave_out(rules: RunRules) -> bool:
    """Whether some rule leaves checkpoints out."""
    return rules.has_cadence or rules.skip_superseded


class Joint:
    """The sessions of several nodes on one tier. All its methods belong to the event loop."""

    def __init__(self, node: Node, tier: str) -> None:
        self._node, self._tier = node, tier
        self.verdicts = Verdicts(node, tier)
        self.claims: dict[int, Claim] = {}
        self.to_follow: set[int] = set()  # sessions that were left out for all nodes, and not yet here
        # The same, and something of them lies on the tier, which complete.py takes away; since when no part record does.
        self.to_clean: dict[int, float | None] = {}
        self._awaited: dict[int, _Awaited] = {}
        self._taken_back: set[int] = set()  # sessions that go after all by this node's word
        self._freed: set[int] = set()  # sessions whose decision was waited for long enough: this node decides
        self._said_s: dict[int, float] = {}  # sessions that go, since when
        self._runs: dict[str, tuple[float, float]] = {}  # watched: since when, and when the tier is asked next
        self._stuck_s: dict[str, float] = {}
        self._left: set[str] = set()  # runs that a newer release decides on, or the like: here nothing of them is left out
        self._has_looked_back = False

    @property
    def can(self) -> bool:
        """Whether nodes can agree on this tier, as far as is known."""
        proved = self._node.tiers[self._tier].tier.capabilities
        return proved is None or proved.conditional_replace

    # -- how this node stands ------------------------------------------------------------------------------------------

    def stance(self, txn: ReadTxn, row: CheckpointRow, session: SessionRow) -> Stance:
        """As things are now; what is to be said or waited for is noted."""
        self.claims.pop(session.id, None)
        self.to_follow.discard(session.id)
        awaited = self._awaited.pop(session.id, None)
        if not self._is_joint(txn, session):
            return Stance.ALONE
        if session.run in self._left:
            return Stance.GOES
        now_s = self._node.clock.monotonic()
        self._watch(session.run, now_s)
        verdict = self.verdicts.of(session)
        if verdict is not None and verdict.goes:
            self._said_s.setdefault(session.id, now_s)
            return Stance.GOES
        is_alone_there = verdict is not None and is_only_there(txn, session, self._tier, self._node.tier_names)
        if must_go(row, session) or session.id in self._taken_back or is_alone_there:
            self.claims[session.id] = Claim.MUST_GO
            return Stance.GOES
        if verdict is not None:
            self.to_follow.add(session.id)
            return Stance.AWAITS
        if row.turn or self._has_begun(txn, session) or self._tier in self._node.unruled.get(session.id, ()):
            self.claims[session.id] = Claim.GOES
            return Stance.GOES
        if session.id in self._freed or _has_writer_0(txn, session):
            self.claims[session.id] = Claim.DECIDE
            return Stance.DECIDES
        self._awaited[session.id] = awaited or _Awaited(session.run, now_s)
        self._runs[session.run] = (now_s, min(self._runs[session.run][1], now_s + LOOK_S_MIN))
        return Stance.AWAITS

    def _is_joint(self, txn: ReadTxn, session: SessionRow) -> bool:
        if session.writers == 1 or session.publish.get(self._tier) is not PublishState.PENDING:
            return False
        if not may_leave_out(rules_of(self._node, self._tier, session.run)) or not self.can:
            return False
        return not all_here(txn, session)

    def _has_begun(self, txn: ReadTxn, session: SessionRow) -> bool:
        taken = Taken.read(txn, cadence_setting(self._tier, session.run))
        return is_begun(txn, session, self._tier) or (taken is not None and taken.commit_seq == session.commit_seq)

    def is_taken_back(self, session: SessionRow) -> bool:
        """Whether it was left out here, and goes for all nodes by now."""
        verdict = self.verdicts.of(session) if session.writers > 1 else None
        return verdict is not None and verdict.goes

    def is_awaited(self, session_id: int) -> bool:
        """Whether nothing of it can be on the tier before another node has decided."""
        return session_id in self._awaited

    def holds_back(self, session: SessionRow) -> bool:
        """Whether an earlier one of its run that this node let go is not yet complete on the tier. Were the next to begin by
        then, the slowest of the nodes would fall ever further behind, and nobody would see that it lags."""
        if self.claims.get(session.id) is not Claim.DECIDE:
            return False
        if not rules_of(self._node, self._tier, session.run).skip_superseded:
            return False
        now_s = self._node.clock.monotonic()
        for earlier_id, said_s in list(self._said_s.items()):
            with self._node.catalog.read() as txn:
                earlier = txn.session(earlier_id)
                is_out = earlier is None or earlier.publish.get(self._tier) is not PublishState.PENDING
                if is_out or now_s - said_s > Rules().max_age_s:
                    del self._said_s[earlier_id]
                elif earlier is not None and _is_before(earlier, session) and complete_at_cache(txn, earlier):
                    return True
        return False

    # -- what is said --------------------------------------------------------------------------------------------------

    async def say(self, session: SessionRow, goes: bool, reason: str = "") -> bool:
        """Whether the session goes, for all nodes, by this word or by what was said before. Raises Unsaid."""
        over = self.claims.get(session.id) is Claim.MUST_GO
        try:
            verdict = await self.verdicts.say(session, goes, reason, over=over)
        except OF_ONE_OBJECT as error:
            self._leave(session.run, error)
            return True
        self.claims.pop(session.id, None)
        if verdict.goes:
            self._said_s.setdefault(session.id, self._node.clock.monotonic())
        return verdict.goes

    async def take_back(self, session_id: int) -> None:
        """A session that was left out goes after all, as this node sees it; the others are told."""
        with self._node.catalog.read() as txn:
            session = txn.session(session_id)
            is_known = session is None or session.writers == 1 or all_here(txn, session)
        if session is None or is_known or not self.can:
            return
        if may_leave_out(rules_of(self._node, self._tier, session.run)) and not self.is_taken_back(session):
            self._taken_back.add(session_id)
            self.claims[session_id] = Claim.MUST_GO
            try:
                await self.say(session, goes=True)
            except Unsaid as error:  # said again before anything of it begins to go
                self._node.tiers[self._tier].failed(error.cause)

    def _leave(self, run: str, error: ForebayError) -> None:
        """The document cannot be used, now or ever: that must not keep the run's data from going, nor any other's."""
        log.warning("nothing of this run is left out here tier=%s run=%s error=%s", self._tier, run, error)
        self._left.add(run)
        with self._node.catalog.read() as txn:
            claimed = [each.id for number in self.claims if (each := txn.session(number)) is not None and each.run == run]
        for session_id in [*claimed, *(each for each, awaited in self._awaited.items() if awaited.run == run)]:
            self._node.changes.tell(session_id)

    # -- what others said ----------------------------------------------------------------------------------------------

    async def step(self) -> float | None:
        """Say what is to be said at once, read what others have said; returns the pause in seconds. Raises as the tier does."""
        if not self._has_looked_back:
            self._look_back()
        for session_id in [each for each, claim in self.claims.items() if claim is not Claim.DECIDE]:
            with self._node.catalog.read() as txn:
                session = txn.session(session_id)
            if session is None or session.publish.get(self._tier) is not PublishState.PENDING:
                self.claims.pop(session_id, None)
            elif not await self.say(session, goes=True):
                self._node.changes.tell(session_id)
        now_s = self._node.clock.monotonic()
        for run in [run for run, (_, at_s) in self._runs.items() if at_s <= now_s]:
            await self._look(run)
        return min((max(0.0, at_s - now_s) for _, at_s in self._runs.values()), default=None)

    def _look_back(self) -> None:
        """After a start: what an earlier process left out may have been taken back since."""
        self._has_looked_back = True
        with self._node.catalog.read() as txn:
            for run in txn.runs() if self.can else ():
                if len(self._runs) < RUNS_MAX and may_leave_out(rules_of(self._node, self._tier, run)):
                    self._watch(run, self._node.clock.monotonic())

    def _watch(self, run: str, now_s: float) -> None:
        if run not in self._runs:
            self._runs[run] = (now_s, now_s + LOOK_S_MIN)

    async def _look(self, run: str) -> None:
        try:
            await self.verdicts.read(run)
        except OF_ONE_OBJECT as error:
            self._leave(run, error)
            del self._runs[run]
            return
        now_s = self._node.clock.monotonic()
        with self._node.catalog.read() as txn:
            told = list(self._heeded(txn, run)) if self.verdicts.is_news(run) else []
            self._free(txn, run, now_s)
        for session_id in told:
            self._node.changes.tell(session_id)
        self._plan(run, now_s)

    def _heeded(self, txn: ReadTxn, run: str) -> Iterator[int]:
        """Sessions here that what was read now makes a difference to."""
        for verdict in self.verdicts.of_run(run):
            row = txn.checkpoint(run, verdict.step)
            for session in () if row is None or row.deleting else txn.sessions_of(row):
                state = session.publish.get(self._tier)
                waits = state is PublishState.PENDING and (session.id in self._awaited or session.id in self.claims)
                if name_of(session) == verdict.name and (waits or (state is PublishState.SKIPPED and verdict.goes)):
                    yield session.id

    def _free(self, txn: ReadTxn, run: str, now_s: float) -> None:
        """Where whoever decides has had its time, this node does."""
        rules = rules_of(self._node, self._tier, run)
        patience_s = max(Rules().max_age_s, rules.defer_max_s if rules.has_cadence else 0.0)
        for session_id, awaited in list(self._awaited.items()):
            session = txn.session(session_id) if awaited.run == run else None
            if session is None:
                if awaited.run == run:
                    del self._awaited[session_id]
                continue
            if not is_outrun(txn, session, self._tier):
                awaited.outrun_s = None
            elif awaited.outrun_s is None:
                awaited.outrun_s = now_s
            waited = awaited.outrun_s is not None and now_s - awaited.outrun_s >= self._spread(OUTRUN_S)
            if waited or now_s - awaited.since_s >= self._spread(patience_s):
                log.warning("no node has decided for long: this one does tier=%s run=%s step=%s", self._tier, run, session.step)
                self._freed.add(session_id)
                self._node.changes.tell(session_id)

    def _spread(self, time_s: float) -> float:
        """So that not all nodes decide at once."""
        return time_s * (1 + int.from_bytes(sha256(self._node.id.encode()).digest()[:2], "big") / (4 << 16))

    def _plan(self, run: str, now_s: float) -> None:
        """When the tier is asked again: the longer it was waited, the later; never, where nothing was ever decided and nothing
        waits."""
        waiting = [awaited.since_s for awaited in self._awaited.values() if awaited.run == run]
        waiting += self._claimed_since_s(run, now_s)  # another node may say that it must go
        watched_s, _ = self._runs[run]
        if waiting:
            pause_s = min(LOOK_S_MAX, max(LOOK_S_MIN, (now_s - max(waiting)) / 2))
        elif self.verdicts.exists(run):
            pause_s = min(REST_S_MAX, max(REST_S_MIN, (now_s - watched_s) / 2))
        else:
            del self._runs[run]
            self.verdicts.forget(run)
            return
        self._runs[run] = (watched_s, now_s + pause_s)

    def _claimed_since_s(self, run: str, now_s: float) -> list[float]:
        with self._node.catalog.read() as txn:
            sessions = [session for session_id in self.claims if (session := txn.session(session_id)) is not None]
        return [self._node.first_seen_s.setdefault(each.id, now_s) for each in sessions if each.run == run]

    # -- where nodes go by different rules -----------------------------------------------------------------------------

    async def look_if_stuck(self, session: SessionRow) -> None:
        """Its parts are on the tier and the others' do not come: another node may have left it out by a rule that this one does
        not have. Then what lies there goes again, where a newer one is complete; else all nodes bring it out, as where the word
        on it is lost. Raises as the tier does, and Unsaid."""
        now_s = self._node.clock.monotonic()
        if session.writers == 1 or session.id in self.to_clean or now_s < self._stuck_s.get(session.run, 0.0):
            return
        if len(self._stuck_s) >= RUNS_MAX:
            self._stuck_s.clear()
        self._stuck_s[session.run] = now_s + STUCK_S
        try:
            await self.verdicts.read(session.run)
        except OF_ONE_OBJECT:
            return
        verdict, has_lost = self.verdicts.of(session), self.verdicts.has_lost(session)
        self._forget_unwatched(session.run)
        if has_lost:  # they may have left it out by a word that is no more, and would wait for another one for ever
            await self.verdicts.say(session, True)
        if verdict is None or verdict.goes:
            return
        with self._node.catalog.read() as txn:
            row = txn.checkpoint(session.run, session.step)
            may = row is not None and not must_go(row, session) and is_outrun(txn, session, self._tier)
            clears = may and not is_only_there(txn, session, self._tier, self._node.tier_names)
        if clears:
            self.to_clean[session.id] = None
            self._node.changes.tell(session.id)
        else:
            await self.verdicts.say(session, True, over=True)

    async def is_left_out(self, session: SessionRow) -> bool:
        """Whether it stands on the tier now that no node is to bring it out. Raises as the tier does."""
        try:
            await self.verdicts.read(session.run)
        except OF_ONE_OBJECT:
            return False
        verdict = self.verdicts.of(session)
        self._forget_unwatched(session.run)
        return verdict is not None and not verdict.goes

    def _forget_unwatched(self, run: str) -> None:
        if run not in self._runs:
            self.verdicts.forget(run)

    def ended(self, session_id: int) -> None:
        """Nothing of it waits for this tier any more."""
        for known in (self.claims, self._awaited, self._said_s, self.to_clean):
            known.pop(session_id, None)
        for some in (self._freed, self._taken_back, self.to_follow):
            some.discard(session_id)


def all_here(txn: ReadTxn, session: SessionRow) -> bool:
    """Whether every writer committed through this node: then it alone decides whether the checkpoint is left out, and nobody
    need be told."""
    if txn.session_sums(session.id).committed < session.writers:
        return False
    return all(part.state is PartState.COMMITTED and not part.is_adopted for part in txn.parts(session.id))


def _is_before(earlier: SessionRow, session: SessionRow) -> bool:
    return earlier.run == session.run and earlier.commit_seq < session.commit_seq


def _has_writer_0(txn: ReadTxn, session: SessionRow) -> bool:
    part = txn.part(session.id, 0)
    return part is not None and part.state is PartState.COMMITTED and not part.is_adopted
