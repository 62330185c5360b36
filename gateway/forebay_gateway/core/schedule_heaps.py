"""The drain scheduler's heaps: what stands where, without a scan; entries that became stale are dropped when they come up.

Owns the parts, checkpoints and runs of one tier's queue, and the heaps over them. Does not own the rules (schedule.py), nor
what can be said of one part, checkpoint or run alone (schedule_rows.py).
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

from forebay_gateway.core.schedule_rows import Checkpoint, Kind, Lane, Place, Rules, Run, RunRules, Waiting

TIMERS_AT_ONCE = 64  # so that many pauses that end together do not make one decision long


class Queue:
    """The lanes of one class: a heap by (round, deadline), and how far the class is in virtual bytes."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, float, int, int, Lane]] = []
        self.virtual = 0.0


class Heaps:
    """What the scheduler of one tier keeps."""

    def __init__(self, rules: Rules | None = None, run_rules: Callable[[str], RunRules] = lambda run: RunRules()) -> None:
        self._rules = rules or Rules()
        self._run_rules = run_rules
        self._parts: dict[int, Waiting] = {}
        self._checkpoints: dict[int, Checkpoint] = {}
        self._places: list[Place] = []  # of all of them, sorted: a page of the list needs no look at the others
        self._runs: dict[str, Run] = {}
        self._classes = {kind: Queue() for kind in sorted(Kind)}
        self._ages: list[tuple[float, int, int, Lane]] = []
        self._timers: list[tuple[float, int, Waiting | Checkpoint]] = []
        self._skips: list[tuple[float, int, Checkpoint]] = []
        self._favoured: list[tuple[int, int]] = []  # (turn, order)
        self._count = count(1)
        self._held = False
        self._debt = 0.0  # bytes that overdue parts got beyond what others got meanwhile

    def _run(self, name: str) -> Run:
        run = self._runs.get(name)
        if run is None:
            run = self._runs[name] = Run(name, self._run_rules(name))
        return run

    def _index(self, checkpoint: Checkpoint) -> None:
        """It came, went, or has another place in the list."""
        place = checkpoint.place if checkpoint.parts else None
        if place == checkpoint.indexed:
            return
        if checkpoint.indexed is not None:
            del self._places[bisect_left(self._places, checkpoint.indexed)]
        if place is not None:
            insort(self._places, place)
        checkpoint.indexed = place

    def _upcoming_s(self) -> float | None:
        while self._timers and not self._timers[0][2].waits_for(self._timers[0][0]):
            heappop(self._timers)
        return min((heap[0][0] for heap in (self._timers, self._skips) if heap), default=None)

    def _wake(self, now_s: float) -> None:
        for _ in range(TIMERS_AT_ONCE):
            if not self._timers or self._timers[0][0] > now_s:
                return
            until_s, _, found = heappop(self._timers)
            if not found.waits_for(until_s):
                continue
            if isinstance(found, Waiting):
                found.paused_until_s = 0.0
                self._list_part(found)
            else:  # its wait begins now, as far as rule 3 is concerned
                found.waits_since_s, found.deferred_until_s = until_s, 0.0
                self._list_checkpoint(found)

    def _head(self, lane: Lane) -> Waiting | None:
        """The part that the lane gives next; drops what became stale."""
        while lane.heap:
            key, checkpoint = lane.heap[0][:3], lane.heap[0][4]
            if checkpoint.lane is lane and checkpoint.listed == key and not checkpoint.deferred_until_s:
                while checkpoint.ready:
                    waiting = self._parts.get(checkpoint.ready[0])
                    if waiting is not None and waiting.checkpoint is checkpoint:
                        if waiting.ready:
                            return waiting
                        waiting.listed = False
                    heappop(checkpoint.ready)
            heappop(lane.heap)
            if checkpoint.listed == key and checkpoint.lane is lane:
                checkpoint.listed = None
        return None

    def _list_part(self, waiting: Waiting) -> None:
        if waiting.ready and not waiting.listed:
            waiting.listed = True
            heappush(waiting.checkpoint.ready, waiting.part.order)
        if waiting.ready and waiting.turn and not waiting.favoured:
            waiting.favoured = True
            heappush(self._favoured, (waiting.turn, waiting.part.order))
        self._list_checkpoint(waiting.checkpoint)

    def _list_checkpoint(self, checkpoint: Checkpoint) -> None:
        lane = checkpoint.lane
        key = (not checkpoint.started, checkpoint.deadline_s, checkpoint.order)
        if checkpoint.ready and not checkpoint.deferred_until_s and checkpoint.listed != key:
            checkpoint.listed = key
            heappush(lane.heap, (*key, next(self._count), checkpoint))
        self._list_lane(lane)

    def _list_lane(self, lane: Lane) -> None:
        waiting = self._head(lane)
        if waiting is None:
            lane.listed = lane.aged = None
            return
        queue, quantum = self._classes[lane.kind], self._rules.quantum_bytes
        if lane.listed is None:  # it was silent: two rounds ahead of the others, and no more
            lane.virtual = max(lane.virtual, queue.virtual - 2 * quantum)
        checkpoint, order = waiting.checkpoint, waiting.part.order
        listed = (int(lane.virtual // quantum), checkpoint.deadline_s, order)
        if listed != lane.listed:
            lane.listed = listed
            heappush(queue.heap, (*listed, next(self._count), lane))
        aged = (checkpoint.waits_since_s, order)
        if aged != lane.aged:
            lane.aged = aged
            heappush(self._ages, (*aged, next(self._count), lane))
