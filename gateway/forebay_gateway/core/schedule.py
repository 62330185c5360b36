"""What goes next to one tier. Pure: times come in as arguments (seconds of one monotonic clock), decisions go out.

For operators, the rules in their order:

1.  The unit is a *part*: what one writer committed of one checkpoint. Its shards go in their order.
2.  What you *prioritise* goes first, in the order in which you named it. What you *hold* does not go, and is not skipped.
3.  A part that has waited longer than `max_age` goes next, whatever its class, the oldest first. Where everything is that old,
    such parts get half of the tier's bytes and the rules below the other half: a tier that is hopelessly behind still
    takes a last save, and nothing waits for ever.
4.  *Preemption* saves go before *final* ones, these before *periodic* ones.
5.  Within a class, *runs share*: each gets `quantum` bytes a round (times its weight), so a run with ten times as much to save
    does not push another one aside. In a round, the part whose deadline is nearest goes first: the time at which it became
    pending, plus its class's age limit. A run that was silent starts two rounds ahead, and keeps no older claims.
6.  Within a run, a checkpoint that has begun to go is finished before another one begins; else the nearest deadline counts.
7.  *Cadence*: with `every = N` a periodic checkpoint goes when N have come since the last one that went, with `min_interval`
    when so much time has passed. Until then it is held back, and does not count as waiting. One that has not begun to go when
    a newer complete checkpoint of its run is here is *skipped*. One that nothing supersedes for `defer_max` goes after all: a
    job that ended without a final save still gets its last state out. One that may not be skipped (rule 9, or nobody can
    decide for all of its nodes) goes once a newer one is here: held back, they would pile up in the cache.
8.  *Lag*: with `skip_superseded`, a periodic checkpoint that has waited for `lag` and is superseded by a newer complete one
    is skipped, so that the newest state gets out soonest. The newer one takes over the time for which it has waited. One that
    is held supersedes nothing.
9.  Never skipped: what is pinned, final, from a preemption, prioritised, held, or has begun to go. (Were a begun one skipped, a
    tier that needs longer than the interval would never complete anything.)

"Newer" means committed later, not a higher step: a job that went back to an older step saves its newest state there.

A checkpoint of several nodes is decided on by one of them, or it would end as a half: on the others it `awaits` the decision,
which is no waiting as far as the rules above are concerned; then it `goes`, by whatever rule here, or is dropped by `forget`.

How a drain uses it:

    add(part)              for each part in the pending index at start, and at each commit; Part.order is the index's own
    complete(session_id)   when all writers of a checkpoint have committed
    decide(now_s)          Next: hand out a batch of that part, and say took(); Skip: mark its copies SKIPPED; Idle: wait
    verified(), failed(), pause()   as a batch's shards are proved, fall back, or have to wait; forget() what was deleted

Costs: heaps all through, nothing is scanned; entries that became stale are dropped when they come up.
Does not own batches, bandwidth, concurrency, or what is written to the catalog.
"""

from bisect import bisect_right
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import islice
from math import inf

from forebay_gateway.core.schedule_heaps import Heaps, Queue
from forebay_gateway.core.schedule_rows import (
    Checkpoint,
    Entry,
    Idle,
    Kind,
    Next,
    Part,
    Rules,
    RunRules,
    Skip,
    Waiting,
)

__all__ = ["Entry", "Idle", "Kind", "Next", "Part", "Rules", "RunRules", "Scheduler", "Skip"]

RUNS_REMEMBERED_MAX = 4096


class Scheduler(Heaps):
    """The drain queue of one tier. Methods that name a part or session that is not here do nothing: it went meanwhile."""

    def __len__(self) -> int:
        """Parts that are here."""
        return len(self._parts)

    def __contains__(self, order: int) -> bool:
        return order in self._parts

    # -- what comes and goes -------------------------------------------------------------------------------------------

    def add(self, part: Part) -> None:
        """A part is pending. Raises ValueError where its order is taken."""
        if part.order in self._parts:
            raise ValueError(f"a part with this order is here already order={part.order}")
        checkpoint = self._checkpoints.get(part.session_id) or self._new_checkpoint(part)
        checkpoint.add(part)
        self._index(checkpoint)
        if part.kind < checkpoint.kind:
            self.promote(part.session_id, part.kind)
        waiting = self._parts[part.order] = Waiting(part, checkpoint)
        if part.started and not checkpoint.started:
            self._start(checkpoint, part.since_s)
        self._list_part(waiting)

    def resume(self, run: str, taken_s: float, seen_since: int = 0) -> None:
        """After a restart: when the run's last checkpoint began to go to this tier, and how many came after it that are no
        longer pending. Call it before the run's first add()."""
        row = self._run(run)
        row.taken, row.taken_s, row.seen = 0, taken_s, seen_since

    def complete(self, session_id: int) -> None:
        """All parts of the checkpoint are in caches or on the tier: from now on it supersedes older ones of its run."""
        checkpoint = self._checkpoints.get(session_id)
        if checkpoint is None:  # this node's parts went before the others' were committed
            checkpoint = next((run.finished[session_id] for run in self._runs.values() if session_id in run.finished), None)
        if checkpoint is None or checkpoint.complete:
            return
        checkpoint.complete = True
        self._supersede(checkpoint)

    def _supersede(self, checkpoint: Checkpoint) -> None:
        """It takes the place of older ones, unless it is held: then it does not go itself."""
        run = checkpoint.run
        if not checkpoint.complete or any(self._parts[order].held for order in checkpoint.parts):
            return
        run.completed(checkpoint)
        while run.latest and run.latest[0][0] < run.newest_complete:
            self._may_skip(heappop(run.latest)[2])

    def forget(self, session_id: int) -> None:
        """The checkpoint was deleted, or skipped by another node."""
        checkpoint = self._checkpoints.get(session_id)
        if checkpoint is None:
            return
        for order in list(checkpoint.parts):
            self._drop(self._parts[order])
        checkpoint.run.finished.pop(session_id, None)
        checkpoint.run.no_more_complete(checkpoint)

    def decides(self, session_id: int) -> None:
        """This node decides on the checkpoint: all of it is here, or it does so for the others."""
        checkpoint = self._checkpoints.get(session_id)
        if checkpoint is not None and (checkpoint.awaits or not checkpoint.may_skip):
            checkpoint.may_skip, checkpoint.awaits = True, False
            self._look_again(checkpoint)

    def alone(self, session_id: int) -> None:
        """No other node is waited for."""
        checkpoint = self._checkpoints.get(session_id)
        if checkpoint is not None and checkpoint.awaits:
            checkpoint.awaits = False
            self._look_again(checkpoint)

    def awaits(self, session_id: int) -> None:
        """Another node decides on it, and has not yet: nothing of it begins to go before."""
        checkpoint = self._checkpoints.get(session_id)
        if checkpoint is not None and (checkpoint.goes or not checkpoint.awaits):
            checkpoint.awaits, checkpoint.may_skip, checkpoint.goes = True, False, False
            self._look_again(checkpoint)

    def goes(self, session_id: int) -> None:
        """It was decided for all nodes that the checkpoint goes: it is neither skipped nor held back any more."""
        checkpoint = self._checkpoints.get(session_id)
        if checkpoint is not None and not checkpoint.goes:
            checkpoint.goes, checkpoint.awaits = True, False
            self._look_again(checkpoint)

    def gone(self, order: int) -> None:
        """Nothing of the part is pending any more: it came to the tier another way."""
        if (waiting := self._parts.get(order)) is not None:
            self._drop(waiting)

    def took(self, order: int, copies: int, size: int, now_s: float) -> None:
        """A batch of the part was handed out: `copies` shards of `size` bytes together."""
        waiting = self._parts.get(order)
        if waiting is None:
            return
        checkpoint, lane = waiting.checkpoint, waiting.checkpoint.lane
        waiting.left = max(0, waiting.left - copies)
        waiting.out += copies
        if not checkpoint.started:
            self._start(checkpoint, now_s)
        lane.virtual += size / checkpoint.run.rules.weight
        self._debt = self._debt + size if waiting.overdue else max(-self._rules.quantum_bytes, self._debt - size)
        self._list_checkpoint(checkpoint)

    def verified(self, order: int, copies: int = 1) -> None:
        """So many of its copies are proved on the tier; the part goes with the last one."""
        waiting = self._parts.get(order)
        if waiting is None:
            return
        waiting.out = max(0, waiting.out - copies)
        if waiting.left == 0 and waiting.out == 0:
            self._drop(waiting)

    def failed(self, order: int, copies: int = 1) -> None:
        """So many of its copies are pending again."""
        waiting = self._parts.get(order)
        if waiting is not None:
            waiting.out = max(0, waiting.out - copies)
            waiting.left += copies
            self._list_part(waiting)

    def pause(self, order: int, until_s: float = inf) -> None:
        """Nothing of it can go before; without a time, until wake()."""
        waiting = self._parts.get(order)
        if waiting is not None:
            waiting.paused_until_s = until_s
            if until_s < inf:
                heappush(self._timers, (until_s, next(self._count), waiting))
            self._list_checkpoint(waiting.checkpoint)

    def wake(self, order: int) -> None:
        """It may go."""
        waiting = self._parts.get(order)
        if waiting is not None:
            waiting.paused_until_s = 0.0
            self._list_part(waiting)

    # -- what others see ---------------------------------------------------------------------------------------------------

    def orders(self, session_id: int) -> list[int]:
        """The checkpoint's parts that are here."""
        checkpoint = self._checkpoints.get(session_id)
        return [] if checkpoint is None else sorted(checkpoint.parts)

    def rests(self, order: int) -> bool:
        """Whether the part stays here by a rule or an operator's word: no sign that the drain stands."""
        waiting = self._parts.get(order)
        if waiting is None:
            return False
        return self._held or waiting.held or waiting.checkpoint.awaits or waiting.checkpoint.deferred_until_s > 0

    def entries(self, after: Entry | None = None, most: int | None = None) -> list[Entry]:
        """What is here, by checkpoint: what is prioritised, then by class and commit. At most `most`, behind `after`: the last
        one of the page before, which may be gone. What has moved meanwhile may come twice, or not at all."""
        begin = 0 if after is None else bisect_right(self._places, after.place)
        found = []
        for *_, session_id in islice(self._places, begin, None if most is None else begin + most):
            checkpoint = self._checkpoints[session_id]
            found.append(Entry.of(checkpoint, [self._parts[order] for order in checkpoint.parts]))
        return found

    # -- what an operator says -----------------------------------------------------------------------------------------

    def hold(self, orders: Iterable[int] | None = None) -> None:
        """These do not go until release(); None: nothing does."""
        if orders is None:
            self._held = True
            return
        for order in orders:
            if (waiting := self._parts.get(order)) is not None:
                waiting.held = True
                waiting.checkpoint.run.no_more_complete(waiting.checkpoint)
                self._list_checkpoint(waiting.checkpoint)

    def release(self, orders: Iterable[int] | None = None) -> None:
        """The opposite; None: all, whatever held them."""
        if orders is None:
            self._held = False
            orders = [order for order, waiting in self._parts.items() if waiting.held]
        for order in orders:
            if (waiting := self._parts.get(order)) is not None and waiting.held:
                waiting.held = False
                self._list_part(waiting)
                self._may_skip(waiting.checkpoint)
                self._supersede(waiting.checkpoint)

    def prioritise(self, orders: Iterable[int]) -> None:
        """These go first, in this order, behind those that were named before."""
        for order in orders:
            if (waiting := self._parts.get(order)) is not None and not waiting.turn:
                waiting.turn = next(self._count)
                waiting.checkpoint.turn = waiting.checkpoint.turn or waiting.turn
                self._index(waiting.checkpoint)
                self._list_part(waiting)

    def promote(self, session_id: int, kind: Kind) -> None:
        """The checkpoint is of another class now, as at a preemption."""
        checkpoint = self._checkpoints.get(session_id)
        if checkpoint is not None and checkpoint.kind is not kind:
            left = checkpoint.lane
            checkpoint.move(kind)
            self._index(checkpoint)
            checkpoint.deferred_until_s = 0.0
            checkpoint.deadline_s = checkpoint.since_s + self._rules.age_limit_of(kind)
            self._list_lane(left)
            self._list_checkpoint(checkpoint)

    def pin(self, session_id: int, pinned: bool) -> None:
        """A pinned checkpoint is never skipped nor held back."""
        checkpoint = self._checkpoints.get(session_id)
        if checkpoint is not None:
            checkpoint.pinned = pinned
            self._look_again(checkpoint)

    def rule(self, run: str, rules: RunRules) -> None:
        """Other rules for one run from now on. Looks at all checkpoints that wait."""
        self._run(run).rules = rules
        for checkpoint in self._checkpoints.values():
            if checkpoint.run.name == run:
                self._look_again(checkpoint)

    def _look_again(self, checkpoint: Checkpoint) -> None:
        checkpoint.deferred_until_s = 0.0
        self._list_checkpoint(checkpoint)
        self._may_skip(checkpoint)

    # -- decisions -----------------------------------------------------------------------------------------------------

    def decide(self, now_s: float) -> Next | Skip | Idle:
        """What to do now. Next and Idle change nothing that counts: asked again, it says the same. A Skip left the queue."""
        if self._held:
            return Idle(None)
        while True:
            self._wake(now_s)
            if (skip := self._skip(now_s)) is not None:
                return skip
            waiting, why = self._pick(now_s)
            if waiting is not None:
                waiting.overdue = why == "overdue"
                part = waiting.part
                return Next(part.order, part.session_id, part.run, part.step, why)
            upcoming_s = self._upcoming_s()
            if upcoming_s is None or upcoming_s > now_s:
                return Idle(upcoming_s)

    def _pick(self, now_s: float) -> tuple[Waiting | None, str]:
        if (waiting := self._prioritised()) is not None:
            return waiting, "prioritised"
        if (waiting := self._overdue(now_s)) is not None:
            return waiting, "overdue"
        for kind, queue in self._classes.items():
            if (waiting := self._fair(queue, now_s)) is not None:
                return waiting, kind.name.lower()
        return None, ""

    def _prioritised(self) -> Waiting | None:
        while self._favoured:
            turn, order = self._favoured[0]
            waiting = self._parts.get(order)
            if waiting is not None and waiting.turn == turn:
                if waiting.ready:
                    return waiting
                waiting.favoured = False  # keeps its turn for when it can go again
            heappop(self._favoured)
        return None

    def _overdue(self, now_s: float) -> Waiting | None:
        while self._ages:
            since_s, order, _, lane = self._ages[0]
            if lane.aged != (since_s, order):
                heappop(self._ages)
                continue
            if since_s + self._rules.max_age_s > now_s:
                self._debt = 0.0
                return None
            if self._debt > 0:
                return None
            waiting = self._head(lane)
            if waiting is not None and not self._defer(waiting.checkpoint, now_s):
                return waiting
            self._list_lane(lane)
        self._debt = 0.0
        return None

    def _fair(self, queue: Queue, now_s: float) -> Waiting | None:
        while queue.heap:
            entry = queue.heap[0]
            lane = entry[4]
            if lane.listed != entry[:3]:
                heappop(queue.heap)
                continue
            waiting = self._head(lane)
            if waiting is not None and not self._defer(waiting.checkpoint, now_s):
                queue.virtual = max(queue.virtual, lane.virtual)
                return waiting
            self._list_lane(lane)
        return None

    def _skip(self, now_s: float) -> Skip | None:
        while self._skips and self._skips[0][0] <= now_s:
            checkpoint = heappop(self._skips)[2]
            if self._checkpoints.get(checkpoint.session_id) is not checkpoint or not self._is_skippable(checkpoint):
                continue
            run = checkpoint.run
            if not checkpoint.is_superseded:  # what superseded it was deleted
                heappush(run.latest, (checkpoint.order, next(self._count), checkpoint))
                continue
            heir = run.complete[run.newest_complete]
            if heir.inherit(checkpoint, now_s):
                self._list_checkpoint(heir)
            orders = tuple(sorted(checkpoint.parts))
            for order in orders:
                self._drop(self._parts[order])
            reason = f"{'cadence' if run.rules.has_cadence else 'the drain lags'}: step {heir.step} is newer and complete"
            return Skip(checkpoint.session_id, run.name, checkpoint.step, orders, reason)
        return None

    def _is_skippable(self, checkpoint: Checkpoint) -> bool:
        if checkpoint.kind is not Kind.PERIODIC or checkpoint.started or checkpoint.pinned:
            return False
        if checkpoint.goes or not checkpoint.may_skip:
            return False
        waiting = [self._parts[order] for order in checkpoint.parts]
        return not any(part.held or part.turn for part in waiting)

    def _may_skip(self, checkpoint: Checkpoint) -> None:
        """It is superseded, or something changed that had kept it: look at it when its time comes."""
        if not checkpoint.is_superseded:
            return
        if checkpoint.deferred_until_s and not checkpoint.may_skip:  # it is to go all the same, so what it waited for is here
            checkpoint.deferred_until_s = 0.0
            self._list_checkpoint(checkpoint)
        run, number = checkpoint.run, next(self._count)
        if run.rules.has_cadence:
            heappush(self._skips, (0.0, number, checkpoint))
        elif run.rules.skip_superseded:
            heappush(self._skips, (checkpoint.since_s + run.rules.lag_s, number, checkpoint))

    def _defer(self, checkpoint: Checkpoint, now_s: float) -> bool:
        """Hold it back where its cadence says so."""
        until_s = checkpoint.held_back_until_s()
        if until_s <= now_s:
            return False
        checkpoint.deferred_until_s = until_s
        if until_s < inf:
            heappush(self._timers, (until_s, next(self._count), checkpoint))
        return True

    # -- checkpoints of runs -----------------------------------------------------------------------------------------------

    def _new_checkpoint(self, part: Part) -> Checkpoint:
        run = self._run(part.run)
        checkpoint = run.finished.pop(part.session_id, None)
        if checkpoint is None:
            checkpoint = Checkpoint(run, part, part.since_s + self._rules.age_limit_of(part.kind))
        run.waiting += 1
        self._checkpoints[part.session_id] = checkpoint
        if checkpoint.is_superseded:
            self._may_skip(checkpoint)
        else:
            heappush(run.latest, (checkpoint.order, next(self._count), checkpoint))
        return checkpoint

    def _start(self, checkpoint: Checkpoint, now_s: float) -> None:
        run = checkpoint.run
        checkpoint.started, checkpoint.deferred_until_s = True, 0.0
        if run.taken is None or checkpoint.ordinal > run.taken:
            run.taken, run.taken_s = checkpoint.ordinal, now_s

    def _drop(self, waiting: Waiting) -> None:
        checkpoint = waiting.checkpoint
        del self._parts[waiting.part.order]
        checkpoint.parts.discard(waiting.part.order)
        if waiting.turn and waiting.turn == checkpoint.turn:
            turns = (self._parts[order].turn for order in checkpoint.parts)
            checkpoint.turn = min((turn for turn in turns if turn), default=0)
        self._index(checkpoint)
        if not checkpoint.parts:
            del self._checkpoints[checkpoint.session_id]
            run = checkpoint.run
            run.finish(checkpoint)
            if not run.waiting and len(self._runs) > RUNS_REMEMBERED_MAX:
                del self._runs[run.name]
        self._list_lane(checkpoint.lane)
