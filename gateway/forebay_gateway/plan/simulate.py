"""A fleet that saves, drains, fails and restarts, as discrete events from one seed.

Every decision on what drains next, and what is skipped, is made by core/schedule on the simulated clock, as a gateway's drain
has it made. The same scenario gives the same outcome.

What is approximated:

- Nodes of one job do the same at the same time, so they are taken together: up to 4 groups a job, each with its own scheduler,
  its own place in the stagger window and its own speed (`uneven`). A job's checkpoint is out when its slowest group is.
- The tier is shared by processor sharing: each node that drains gets the same rate, at most its network's. Requests, metadata
  and latency cost nothing.
- A slower node is modelled as one that has more to send, so it also takes a little more of the tier.
- Where checkpoints may be skipped, the first group decides, and begins another one only when the last one is out everywhere:
  else a group that is slower falls ever further behind.
- A part goes in 4 pieces. What is under way is not called back, also after a failure.
- A failure takes one node with its cache: its job restarts from the newest checkpoint that is complete on the tier. Others
  of that job in caches are given up, though a peer or a repaired node might have brought them back.
- A save keeps the trainer for `save_cost_s`, always. A restart reads at the job's share of an idle tier.
- A cache holds what is not out yet, and one checkpoint for restarts.
"""

import random
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf

from forebay_gateway.core.schedule import Idle, Next, Part, Rules, Scheduler, Skip
from forebay_gateway.plan.scenario import BATCHES, Outcome, Sample, Scenario, check

SAMPLES = 200
ROUND_BYTES = 2 << 30


def simulate(scenario: Scenario) -> Outcome:
    """Run it. Raises Unfinishable before anything runs."""
    check(scenario)
    return _Fleet(scenario).run()


class _Group:
    """Nodes of one job that do the same."""

    def __init__(self, job: "_Job", nodes: int, factor: float, offset_s: float, decides: bool) -> None:
        scenario = job.fleet.scenario
        quantum = max(ROUND_BYTES, int(scenario.node_bytes))
        self.job = job
        self.nodes = nodes
        self.factor = factor  # above 1: slower
        self.offset_s = offset_s
        self.decides = decides
        self.queue = Scheduler(Rules(max_age_s=scenario.max_age_s, quantum_bytes=quantum), lambda run: scenario.rules)
        self.pieces: dict[int, int] = {}  # session: pieces that are not out
        self.sending = 0  # session
        self.wake_s = inf

    def kick(self) -> None:
        """Begin what the scheduler says, unless something is under way."""
        fleet = self.job.fleet
        while not self.sending:
            fleet.decisions += 1
            found = self.queue.decide(fleet.now_s)
            if isinstance(found, Idle):
                if found.until_s is not None and found.until_s != self.wake_s:
                    self.wake_s = found.until_s
                    fleet.at(found.until_s, self._woken)
                return
            if isinstance(found, Skip):
                self.job.skip(found.session_id)
                continue
            if not self._may_begin(found.session_id):
                return
            self._send(found)

    def _may_begin(self, session: int) -> bool:
        rules = self.job.fleet.scenario.rules
        if not self.decides or not (rules.skip_superseded or rules.has_cadence):
            return True
        return self.job.begun in (0, session)

    def _woken(self) -> None:
        self.wake_s = inf
        self.kick()

    def _send(self, found: Next) -> None:
        fleet = self.job.fleet
        size = fleet.scenario.node_bytes / BATCHES
        self.sending = found.session_id
        if self.decides:
            self.job.begun = found.session_id
        self.queue.took(found.order, 1, int(size), fleet.now_s)
        fleet.tier.send(self, size * self.factor)

    def sent(self) -> None:
        """A piece is out."""
        session, self.sending = self.sending, 0
        self.queue.verified(session)
        if session in self.pieces:
            self.pieces[session] -= 1
            self._waits(-1)
            if not self.pieces[session]:
                del self.pieces[session]
                self.job.out(session)
        self.kick()

    def forget(self, session: int) -> None:
        """It is skipped or lost."""
        self.queue.forget(session)
        self._waits(-self.pieces.pop(session, 0))

    def save(self, session: int) -> None:
        """All of its nodes have a part in their caches."""
        fleet = self.job.fleet
        self.pieces[session] = BATCHES
        self._waits(BATCHES)
        self.queue.add(Part(session, self.job.run, session, session, BATCHES, fleet.now_s, may_skip=self.decides))
        self.queue.complete(session)
        if self.offset_s:
            self.queue.pause(session, fleet.now_s + self.offset_s)

    def _waits(self, pieces: int) -> None:
        fleet = self.job.fleet
        fleet.waiting_pieces += pieces * self.nodes
        fleet.most_pieces = max(fleet.most_pieces, fleet.waiting_pieces)


class _Job:
    """One job: trains, saves, stalls, fails and restarts."""

    def __init__(self, fleet: "_Fleet", number: int, nodes: int, factors: list[float]) -> None:
        scenario = fleet.scenario
        self.fleet = fleet
        self.run = f"job-{number}"
        self.nodes = nodes
        self.life = 0  # events of a life before count no more
        self.trained_s = 0.0
        self.safe_s = 0.0  # trained, and complete on the tier
        self.since_s: float | None = None  # training since
        self.stalled_since_s: float | None = None
        self.refusing = False
        self.begun = 0  # the session that the deciding group has begun to send, until it is out everywhere
        self.saved: dict[int, tuple[float, float, int]] = {}  # session: trained then, when, groups that have it not out
        count = len(factors)
        sizes = [nodes // count + (index < nodes % count) for index in range(count)]
        self.groups = [
            _Group(self, size, factor, scenario.stagger_s * index / count, index == 0)
            for index, (size, factor) in enumerate(zip(sizes, factors, strict=True))
        ]

    def later(self, delay_s: float, act: Callable[[], None]) -> None:
        """Do it then, if the job lives on until then."""
        life = self.life
        self.fleet.at(self.fleet.now_s + delay_s, lambda: act() if life == self.life else None)

    def train(self) -> None:
        """Until the next save."""
        self.since_s = self.fleet.now_s
        self.later(self.fleet.scenario.interval_s, self.save)

    def save(self) -> None:
        """Where there is room; else wait for it."""
        fleet, scenario = self.fleet, self.fleet.scenario
        if self.since_s is not None:
            self.trained_s += fleet.now_s - self.since_s
            self.since_s = None
        if not self._has_room():
            self.stalled_since_s = fleet.now_s if self.stalled_since_s is None else self.stalled_since_s
            return
        if self.stalled_since_s is not None:
            fleet.stalled_s += fleet.now_s - self.stalled_since_s
            self.stalled_since_s = None
        fleet.saving_s += scenario.save_cost_s
        self.later(scenario.save_cost_s, self._is_saved)

    def _has_room(self) -> bool:
        scenario = self.fleet.scenario
        if scenario.cache_bytes is None:
            return True
        most = max(len(group.pieces) for group in self.groups)
        filled = (most + 1) * scenario.node_bytes / scenario.cache_bytes
        self.refusing = filled > (scenario.reopen if self.refusing and most else scenario.refuse)
        return not self.refusing

    def _is_saved(self) -> None:
        fleet = self.fleet
        fleet.saves += 1
        session = fleet.saves  # also the commit's number: higher ones are newer
        self.saved[session] = (self.trained_s, fleet.now_s, len(self.groups))
        for group in self.groups:
            group.save(session)
        for group in self.groups:
            group.kick()
        self.train()

    def out(self, session: int) -> None:
        """One group has it on the tier."""
        fleet = self.fleet
        trained_s, at_s, left = self.saved[session]
        if left > 1:
            self.saved[session] = (trained_s, at_s, left - 1)
        else:
            del self.saved[session]
            fleet.complete += 1
            fleet.drains_s.append(fleet.now_s - at_s)
            fleet.oldest_s = max(fleet.oldest_s, fleet.now_s - at_s)
            self.safe_s = max(self.safe_s, trained_s)
            self.begun = 0 if self.begun == session else self.begun
            self.groups[0].kick()
        self._go_on()

    def _go_on(self) -> None:
        if self.stalled_since_s is not None:
            self.save()

    def skip(self, session: int) -> None:
        """The deciding group does not send it: nor do the others."""
        del self.saved[session]
        self.fleet.skipped += 1
        for group in self.groups:
            group.forget(session)
        self._go_on()

    def fail(self) -> None:
        """A node is gone, with its cache."""
        fleet, scenario = self.fleet, self.fleet.scenario
        self.life += 1
        if self.since_s is not None:
            self.trained_s += fleet.now_s - self.since_s
            self.since_s = None
        if self.stalled_since_s is not None:
            fleet.stalled_s += fleet.now_s - self.stalled_since_s
            self.stalled_since_s = None
        fleet.failures += 1
        fleet.lost_s += self.trained_s - self.safe_s
        fleet.dropped += len(self.saved)
        self.trained_s = self.safe_s
        for session in list(self.saved):
            for group in self.groups:
                group.forget(session)
        self.saved.clear()
        self.begun = 0
        self.refusing = False
        rate = min(scenario.node_bytes_per_s, scenario.tier_bytes_per_s / self.nodes)
        restart_s = scenario.restart_s + (scenario.node_bytes / rate if self.safe_s else 0.0)
        fleet.restart_s += min(restart_s, scenario.duration_s - fleet.now_s)
        self.later(restart_s, self.train)
        fleet.fail_later(self, restart_s)


class _SharedTier:
    """Processor sharing: every node that sends gets the same rate. One virtual clock of bytes a node serves for all of them."""

    def __init__(self, fleet: "_Fleet") -> None:
        self._fleet = fleet
        self._clock = 0.0  # bytes that a node which sends since the beginning has sent
        self._at_s = 0.0
        self._rate = 0.0
        self._nodes = 0
        self._ends: list[tuple[float, int, _Group]] = []
        self._version = 0
        self._number = 0
        self.carried_bytes = 0.0

    def send(self, group: _Group, size: float) -> None:
        """`size` bytes from each of its nodes; tells the group when they are there."""
        self.advance()
        self._number += 1
        heappush(self._ends, (self._clock + size, self._number, group))
        self._nodes += group.nodes
        self._plan()

    def advance(self) -> None:
        """Up to now."""
        passed_s = self._fleet.now_s - self._at_s
        self._clock += passed_s * self._rate
        self.carried_bytes += passed_s * self._rate * self._nodes
        self._at_s = self._fleet.now_s

    def _plan(self) -> None:
        self._version += 1
        if not self._nodes:
            self._clock = self._rate = 0.0  # no rounding piles up over a long time
            return
        scenario, version = self._fleet.scenario, self._version
        self._rate = min(scenario.node_bytes_per_s, scenario.tier_bytes_per_s / self._nodes)
        wait_s = max(0.0, self._ends[0][0] - self._clock) / self._rate
        self._fleet.at(self._fleet.now_s + wait_s, lambda: self._end() if version == self._version else None)

    def _end(self) -> None:
        self.advance()
        ended = []
        bound = self._ends[0][0]
        while self._ends and self._ends[0][0] <= bound:
            ended.append(heappop(self._ends)[2])
        self._clock = max(self._clock, bound)
        for group in ended:
            self._nodes -= group.nodes
        self._plan()
        for group in ended:
            group.sent()


class _Fleet:
    """The clock, the jobs, and what is counted."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = 0
        self._random = random.Random(scenario.seed)
        self.saves = self.complete = self.skipped = self.dropped = self.failures = self.decisions = self.done = 0
        self.waiting_pieces = 0  # of nodes' parts
        self.most_pieces, self.oldest_s = 0, 0.0  # since the last sample
        self.lost_s = self.restart_s = self.saving_s = self.stalled_s = 0.0
        self.drains_s: list[float] = []
        self.samples: list[Sample] = []
        self._carried_bytes = 0.0
        self.tier = _SharedTier(self)
        nodes = scenario.nodes // scenario.jobs
        self.jobs = [
            _Job(self, number, nodes, [1 / (1 - scenario.uneven * self._random.random()) for _ in range(scenario.slices)])
            for number in range(scenario.jobs)
        ]

    def at(self, at_s: float, act: Callable[[], None]) -> None:
        """Do it then."""
        self._number += 1
        heappush(self._events, (at_s, self._number, act))

    def fail_later(self, job: _Job, after_s: float = 0.0) -> None:
        """A job of n nodes fails n times as often as a node; not while it restarts."""
        self.at(self.now_s + after_s + self._random.expovariate(job.nodes / self.scenario.mtbf_s), job.fail)

    def run(self) -> Outcome:
        """All of it."""
        for job in self.jobs:
            # Jobs did not all begin at the same time.
            self.at(self._random.random() * self.scenario.interval_s if len(self.jobs) > 1 else 0.0, job.train)
            self.fail_later(job)
        step_s = self.scenario.duration_s / SAMPLES
        for number in range(1, SAMPLES + 1):
            self.at(number * step_s, self._sample)
        while self._events and self._events[0][0] <= self.scenario.duration_s:
            self.now_s, _, act = heappop(self._events)
            self.done += 1
            act()
        return self._outcome()

    def _sample(self) -> None:
        self.tier.advance()
        scenario = self.scenario
        oldest_s = max([self.oldest_s, *(self.now_s - at_s for job in self.jobs for _, at_s, _ in job.saved.values())])
        backlog_bytes = self.most_pieces * scenario.node_bytes / BATCHES
        self.most_pieces, self.oldest_s = self.waiting_pieces, 0.0
        carried, self._carried_bytes = self.tier.carried_bytes - self._carried_bytes, self.tier.carried_bytes
        busy = carried / (scenario.tier_bytes_per_s * scenario.duration_s / SAMPLES)
        self.samples.append(Sample(self.now_s, backlog_bytes, oldest_s, busy))

    def _outcome(self) -> Outcome:
        scenario = self.scenario
        self.now_s = scenario.duration_s
        useful_s = sum(job.trained_s + (self.now_s - job.since_s if job.since_s is not None else 0.0) for job in self.jobs)
        stalled_s = self.stalled_s + sum(
            self.now_s - job.stalled_since_s for job in self.jobs if job.stalled_since_s is not None
        )
        drains_s = sorted(self.drains_s)
        return Outcome(
            nodes=scenario.nodes,
            jobs=scenario.jobs,
            duration_s=scenario.duration_s,
            seed=scenario.seed,
            saves=self.saves,
            complete=self.complete,
            skipped=self.skipped,
            dropped=self.dropped,
            waiting=sum(len(job.saved) for job in self.jobs),
            failures=self.failures,
            lost_work_s=self.lost_s,
            restart_s=self.restart_s,
            saving_s=self.saving_s,
            stalled_s=stalled_s,
            useful_share=useful_s / (scenario.jobs * scenario.duration_s),
            backlog_max_bytes=max(sample.backlog_bytes for sample in self.samples),
            backlog_end_bytes=self.waiting_pieces * scenario.node_bytes / BATCHES,
            oldest_max_s=max(sample.oldest_s for sample in self.samples),
            drain_mean_s=sum(drains_s) / len(drains_s) if drains_s else None,
            drain_p99_s=drains_s[int(0.99 * (len(drains_s) - 1))] if drains_s else None,
            interval_on_tier_s=scenario.jobs * scenario.duration_s / self.complete if self.complete else None,
            tier_busy=self.tier.carried_bytes / (scenario.tier_bytes_per_s * scenario.duration_s),
            decisions=self.decisions,
            events=self.done,
            samples=tuple(self.samples),
        )
