"""What is simulated, and what is refused beforehand.

Sizes are bytes, rates bytes a second, durations seconds.
"""

from dataclasses import dataclass, field

from forebay_gateway.core.schedule import RunRules

NODES_MAX = 10_000
BATCHES = 4  # into which a node's part is cut: what is under way is not called back
SLICES_MAX = 4
EVENTS_MAX = 1_000_000  # less than a minute on one core


class Unfinishable(ValueError):
    """Parameters that make no sense, or would not end: why, and the nearest that would do."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One fleet on one shared tier. `jobs` equal ones share the nodes; `size_bytes` is what all of them save in an interval."""

    nodes: int
    size_bytes: int
    interval_s: float
    tier_bytes_per_s: float
    jobs: int = 1
    duration_s: float = 86400.0
    seed: int = 1
    mtbf_s: float = 22.8e6  # of one node
    save_cost_s: float = 10.0
    restart_s: float = 300.0
    node_bytes_per_s: float = 12.5e9  # a node's network
    cache_bytes: float | None = None  # a node's; None: large enough
    refuse: float = 0.95
    reopen: float = 0.85
    stagger_s: float = 0.0  # over which the nodes of a job begin to drain
    uneven: float = 0.1  # nodes drain by up to this share slower than the best
    rules: RunRules = field(default_factory=RunRules)
    max_age_s: float = 3600.0

    @property
    def slices(self) -> int:
        """Of each job: groups of its nodes that do the same."""
        return min(SLICES_MAX, self.nodes // self.jobs)

    @property
    def node_bytes(self) -> float:
        """A node's part of a checkpoint."""
        return self.size_bytes / self.nodes

    @property
    def save_events(self) -> float:
        """About how many events saves make."""
        saves = self.duration_s / (self.interval_s + self.save_cost_s)
        return self.jobs * self.slices * saves * (BATCHES + 2)

    @property
    def failure_events(self) -> float:
        """About how many failures make."""
        return 4 * self.slices * self.duration_s * self.nodes / self.mtbf_s


def check(scenario: Scenario) -> None:
    """Raise Unfinishable."""
    nodes, jobs = scenario.nodes, scenario.jobs
    if not 1 <= nodes <= NODES_MAX:
        raise Unfinishable(f"{nodes} nodes cannot be simulated: 1 to {NODES_MAX}; nearest: {min(max(nodes, 1), NODES_MAX)}")
    if not 1 <= jobs <= nodes or nodes % jobs:
        near = next(count for count in range(min(max(jobs, 1), nodes), 0, -1) if nodes % count == 0)
        raise Unfinishable(f"{jobs} equal jobs on {nodes} nodes are not possible; nearest: {near}")
    positive = (scenario.size_bytes, scenario.interval_s, scenario.tier_bytes_per_s, scenario.mtbf_s, scenario.node_bytes_per_s)
    if min(positive) <= 0 or min(scenario.save_cost_s, scenario.restart_s, scenario.stagger_s) < 0:
        raise Unfinishable("size, interval, rates and time between failures must be above 0, costs and stagger at least 0")
    if not 0 <= scenario.uneven < 1:
        raise Unfinishable(f"uneven is a share below 1; nearest to {scenario.uneven:g}: {0.9 if scenario.uneven > 0 else 0}")
    if scenario.duration_s < 2 * scenario.interval_s:
        raise Unfinishable(
            f"{scenario.duration_s:.0f} s of simulation hold no two saves; nearest: {10 * scenario.interval_s:.0f} s"
        )
    if scenario.cache_bytes is not None and scenario.cache_bytes * scenario.refuse < 2 * scenario.node_bytes:
        least = 2 * scenario.node_bytes / scenario.refuse
        raise Unfinishable(
            f"a cache of {scenario.cache_bytes:.0f} bytes never takes a second save, and the job would stand still; "
            f"nearest: {least:.0f} bytes"
        )
    if scenario.failure_events > EVENTS_MAX / 2:
        least_s = scenario.mtbf_s * 2 * scenario.failure_events / EVENTS_MAX
        raise Unfinishable(
            f"a node that fails every {scenario.mtbf_s:g} s makes about {scenario.failure_events:,.0f} events, "
            f"which would take longer than a minute; nearest: {least_s:,.0f} s"
        )
    if scenario.save_events > EVENTS_MAX:
        factor = scenario.save_events / EVENTS_MAX
        interval_s = (scenario.interval_s + scenario.save_cost_s) * factor - scenario.save_cost_s
        raise Unfinishable(
            f"about {scenario.save_events:,.0f} events would take longer than a minute; nearest: an interval of "
            f"{interval_s:.0f} s, or {scenario.duration_s / factor:.0f} s of simulation"
            + (f", or {max(1, int(jobs / factor))} jobs" if jobs > 1 else "")
        )


@dataclass(frozen=True, slots=True)
class Sample:
    """The fleet from the sample before until `at_s`: the largest backlog, the oldest age, how busy the tier was."""

    at_s: float
    backlog_bytes: float
    oldest_s: float
    tier_busy: float


@dataclass(frozen=True, slots=True)
class Outcome:
    """What happened. "Lost" time was trained and undone by a failure; ages are from a save's end until it is out."""

    nodes: int
    jobs: int
    duration_s: float
    seed: int
    saves: int  # complete in caches
    complete: int  # of those, complete on the tier
    skipped: int
    dropped: int  # gone with a node that failed, before they were out
    waiting: int  # at the end
    failures: int
    lost_work_s: float  # summed over jobs, likewise below
    restart_s: float
    saving_s: float
    stalled_s: float  # caches were full
    useful_share: float  # of the jobs' time
    backlog_max_bytes: float
    backlog_end_bytes: float
    oldest_max_s: float
    drain_mean_s: float | None
    drain_p99_s: float | None
    interval_on_tier_s: float | None  # mean time between checkpoints of one job that are complete on the tier
    tier_busy: float
    decisions: int
    events: int
    samples: tuple[Sample, ...]
