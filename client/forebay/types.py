"""What the client answers with: frozen records. Sizes are bytes, durations seconds.

Owns the shapes. Does not own how they are read from messages (convert.py), and imports neither gRPC nor protobuf.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Missing:
    """A writer that a checkpoint lacks. `shards` names what it lacks; empty means its whole part. `state` is "absent", or
    "open" where the writer has begun and not committed."""

    writer: int
    shards: tuple[str, ...] = ()
    state: str = "absent"

    def __str__(self) -> str:
        shown = ", ".join(self.shards[:5]) + (f" and {len(self.shards) - 5} more" if len(self.shards) > 5 else "")
        return f"writer {self.writer} ({self.state}{': ' + shown if shown else ''})"


@dataclass(frozen=True, slots=True)
class Receipt:
    """One shard is durable at `level`, "cache" or a tier (see CommitReceipt); `crc32c` is that of the whole shard."""

    name: str
    size: int
    crc32c: int
    level: str
    transient: bool = False


@dataclass(frozen=True, slots=True)
class TierBacklog:
    """What waits to be drained to one tier; `eta_s` is None while no rate is known."""

    tier: str
    pending_bytes: int
    drain_bytes_per_s: float
    eta_s: float | None


@dataclass(frozen=True, slots=True)
class Pressure:
    """How full the cache is: `level` is "ok", "soft", "hard" or "refusing", `fill` a share of capacity (0 to 1).

    `writers_bytes_per_s` is what all writers of the gateway together are slowed to, None where they are not; `waiting` how many
    requests wait for space; `through` the tier that new shards go through to while the cache's disk fails, "" for none.
    """

    level: str
    reason: str
    fill: float
    tiers: tuple[TierBacklog, ...] = ()
    retry_after_s: float | None = None
    writers_bytes_per_s: float | None = None
    waiting: int = 0
    through: str = ""

    def sustainable_interval_s(self, size: int) -> float | None:
        """The shortest interval between saves of `size` bytes on this node that every tier which is draining now carries at the
        rate that it shows; None where none is. Leave some room above it."""
        rates = [tier.drain_bytes_per_s for tier in self.tiers if tier.pending_bytes > 0 and tier.drain_bytes_per_s > 0]
        return size / min(rates) if rates else None


@dataclass(frozen=True, slots=True)
class NotReached:
    """A level that a checkpoint had not reached by the deadline, why, and how many bytes are left."""

    level: str
    reason: str
    bytes_left: int


@dataclass(frozen=True, slots=True)
class Preempted:
    """How far a checkpoint came by the deadline; `complete`: every writer's part is durable somewhere."""

    run: str
    step: int
    session: str
    complete: bool
    reached: tuple[str, ...]
    missed: tuple[NotReached, ...]


@dataclass(frozen=True, slots=True)
class CommitReceipt:
    """A writer's part is promised at `level`: "cache", or the tiers of `through`, or both ("cache+pfs").

    `checkpoint_complete` says that with it the whole checkpoint is complete in the cache; `transient` that by policy this run
    stays in the cache and is never drained; `through` that shards went past the failing cache to these tiers, "" for none. A
    transient one whose parts go through several nodes is complete on none of them: it is held in their caches, and no node can
    restore it as a whole.
    """

    level: str
    checkpoint_complete: bool
    transient: bool
    pressure: Pressure
    shard_count: int
    size: int
    through: str = ""


@dataclass(frozen=True, slots=True)
class Level:
    """How far a checkpoint is at "cache" or at a tier.

    `state` is "complete", "incomplete", "draining", "pending", "evicted", "superseded", "removed" (by retention), "gone" (it
    was complete there, and another node may have deleted it), "skipped" (a newer checkpoint goes in its place) or "excluded"
    (its run does not go there); `reason` says why.
    """

    level: str
    state: str
    bytes_done: int
    bytes_total: int
    reason: str


@dataclass(frozen=True, slots=True)
class Shard:
    """One shard: its state in this node's cache ("" where it is not there) and of its copy on each tier."""

    name: str
    size: int
    crc32c: int
    writer: int
    state: str
    copies: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Policy:
    """What holds for a run's checkpoints now: `run` is the pattern of the `[[policy]]` that fits, "" where none does.

    `tiers` are those that they go to; `every` says by tier how many of the periodic ones do, "1" all, "4" each fourth, "1800s"
    one in so many seconds; `skip` whether a drain that lags may leave superseded ones out; `kind` is the class of a save that
    names none; `quota_bytes` bounds what the run holds of the cache while it waits for a tier; `transient` as in CommitReceipt.
    """

    run: str = ""
    tiers: tuple[str, ...] = ()
    every: Mapping[str, str] = field(default_factory=dict)
    skip: bool = False
    kind: str = "periodic"
    quota_bytes: int | None = None
    transient: bool = False


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A (run, step). `state` is "complete" or "incomplete"; then `missing` says what it lacks. `kind` is "periodic", "final" or
    "preemption"; `transient` as in CommitReceipt.

    `shards` and `policy` are filled by Client.describe alone; lists leave them empty.
    """

    run: str
    step: int
    session: str
    writers: int
    state: str
    missing: tuple[Missing, ...]
    levels: tuple[Level, ...]
    size: int
    shard_count: int
    pinned: bool
    metadata: Mapping[str, Any]
    reason: str
    kind: str = "periodic"
    transient: bool = False
    policy: Policy = field(default_factory=Policy, repr=False)
    shards: tuple[Shard, ...] = field(default=(), repr=False)

    @property
    def complete(self) -> bool:
        """Whether every shard of every writer has landed."""
        return self.state == "complete"


@dataclass(frozen=True, slots=True)
class Run:
    """A run; `latest_step` is its newest complete checkpoint, None where it has none."""

    run: str
    checkpoints: int
    latest_step: int | None


@dataclass(frozen=True, slots=True)
class WaitProgress:
    """How far a wait is; `reason` is one clause on what it waits for."""

    reached: bool
    bytes_done: int
    bytes_total: int
    missing: tuple[Missing, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Deletion:
    """What a delete removed, or would remove."""

    shards: int
    size: int
    levels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SaveSummary:
    """What save_dir did: `level` was reached; `checkpoint_complete`, `transient` and `through` as in CommitReceipt."""

    run: str
    step: int
    session: str
    writer: int
    shards: int
    size: int
    level: str
    checkpoint_complete: bool
    elapsed_s: float
    transient: bool = False
    through: str = ""


@dataclass(frozen=True, slots=True)
class RestoreSummary:
    """What restore_dir wrote below `path`."""

    run: str
    step: int
    session: str
    shards: int
    size: int
    path: str
    elapsed_s: float


@dataclass(frozen=True, slots=True)
class CacheStatus:
    """The gateway's cache. `dirty_bytes` are not yet verified on every required tier; `disk_free_bytes` may be fewer than the
    capacity leaves, None where the disk does not say."""

    path: str
    capacity_bytes: int
    used_bytes: int
    reserved_bytes: int
    dirty_bytes: int
    direct_io: bool
    file_system: str
    open_streams: int
    oldest_dirty_s: float
    disk_free_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class TierStatus:
    """One tier and its queue. `state` is "ok", "away", "full", "starting" or "held"; `skipped` counts the checkpoints that were
    left out on it so far."""

    name: str
    kind: str
    state: str
    reason: str
    capabilities: Mapping[str, str]
    pending_copies: int
    pending_bytes: int
    oldest_pending_s: float | None
    drain_bytes_per_s: float
    required: bool
    clock_skew_s: float | None
    live_nodes: int | None
    bandwidth_bytes_per_s: int | None
    retention: "RetentionStatus"
    skipped: int = 0


@dataclass(frozen=True, slots=True)
class RetentionStatus:
    """Retention on one tier, as this gateway's process has done it. `state` is "on", "no rule", or why it is off; `last` is
    the checkpoint that went last, as run/step."""

    state: str
    looked_s: float | None
    removed: int
    removed_bytes: int
    last: str


@dataclass(frozen=True, slots=True)
class QueueEntry:
    """A checkpoint that waits for a tier. `id` is what hold, release, retry and prioritise take.
    `state` is "going", "waiting", "held", "deferred" (by its cadence) or "paused" (to be tried again, or waiting for others),
    `why` says it in a clause; `prio` is its place among those that were prioritised, 0 for none.
    """

    id: str
    run: str
    step: int
    tier: str
    kind: str
    state: str
    why: str
    parts: int
    copies: int
    bytes: int
    held: bool
    prio: int
    next_in_s: float | None


@dataclass(frozen=True, slots=True)
class QueueList:
    """What waits, tier by tier; `skipped` says how many checkpoints were left out on each tier so far."""

    entries: tuple[QueueEntry, ...]
    skipped: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Reloaded:
    """Keys of the configuration that were applied, and keys that differ and take a restart."""

    changed: tuple[str, ...]
    needs_restart: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class MoverStatus:
    """One mover process."""

    name: str
    pid: int
    doing: str
    restarts: int


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something an operator should know: `severity` is "warning" or "critical", `todo` says what helps."""

    severity: str
    what: str
    todo: str


@dataclass(frozen=True, slots=True)
class Status:
    """A gateway at a glance. `health` is "ok", "warning" or "critical"."""

    node: str
    version: str
    uptime_s: float
    health: str
    pressure: Pressure
    cache: CacheStatus
    tiers: tuple[TierStatus, ...]
    movers: tuple[MoverStatus, ...]
    alarms: tuple[Alarm, ...]
    checkpoints_complete: int
    checkpoints_incomplete: int
    incomplete: tuple[Checkpoint, ...]
    listen: tuple[str, ...]
    loop_lag_p99_s: float


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one checkpoint on one tier: it `goes`, or stays for the `reason`. `session` is its hash's first digits,
    as directories have it, empty where it is not complete there. `outcome` says what was done, empty for nothing."""

    tier: str
    run: str
    step: int
    session: str
    size: int
    goes: bool
    reason: str
    outcome: str


@dataclass(frozen=True, slots=True)
class CopyReport:
    """One copy of one shard, read for its own sake. `state` is "good", "bad", "absent", "pending" or "unreachable"."""

    name: str
    where: str
    state: str
    size: int
    reason: str


@dataclass(frozen=True, slots=True)
class TierScrub:
    """The background reading back of one tier. Counts are of the pass under way, else of the last one."""

    tier: str
    state: str
    rate_bytes_per_s: int
    every_s: float
    passes: int
    copies: int
    bytes: int
    bad: int
    unreadable: int
    next_in_s: float | None


@dataclass(frozen=True, slots=True)
class ScrubStatus:
    """The background reading of the cache. Counts are of the pass under way, else of the last one."""

    state: str
    rate_bytes_per_s: int
    every_s: float
    passes: int
    shards: int
    bytes: int
    bad: int
    copies: int
    copies_bad: int
    copies_not_asked: int
    next_in_s: float | None
    tiers: tuple[TierScrub, ...]


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that fsck found. `remedy` is what a repair does, empty for nothing; `outcome` what came of it."""

    kind: str
    severity: str
    where: str
    run: str
    step: int
    session: str
    name: str
    path: str
    what: str
    remedy: str
    outcome: str


@dataclass(frozen=True, slots=True)
class Quarantined:
    """A bad copy. `good` names where a good one is known to be."""

    id: str
    run: str
    step: int
    session: str
    name: str
    where: str
    path: str
    size: int
    reason: str
    good: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Garbage:
    """Something left over on a tier: `kind` is "upload", "lock", "superseded" or "foreign"; only what is `deletable` ever goes.

    With `kind` "not_asked" it is a tier (`where`) that could not be asked, or not for all, and `what` says why.
    """

    kind: str
    where: str
    path: str
    what: str
    age_s: float | None
    deletable: bool
    outcome: str


@dataclass(frozen=True, slots=True)
class Moved:
    """Shards and bytes that came into the cache or left it; `left` were not moved, for `reason`."""

    shards: int
    size: int
    left: int
    reason: str
