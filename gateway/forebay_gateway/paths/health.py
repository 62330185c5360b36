"""Is data at risk, what is stuck, when is it out: what an operator asks, answered from catalog and monitors.

Owns what counts as an alarm and how bad it is. Takes no action.
"""

import contextlib
import logging
from dataclasses import dataclass
from itertools import islice

from forebay_gateway.admission.budget import disk_full_reason
from forebay_gateway.base.clock import Clock
from forebay_gateway.base.metrics import LoopLag
from forebay_gateway.catalog import CatalogDamaged, ReadTxn
from forebay_gateway.core.errors import DiskFull, ForebayError
from forebay_gateway.core.records import ShardKey
from forebay_gateway.core.states import CopyState
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.view import CheckpointView, view
from forebay_gateway.paths.wholeness import missing_parts
from forebay_gateway.tiers.monitor import TierState
from forebay_wire.names import is_commit_last

log = logging.getLogger("forebay.health")

STALLED_AFTER_S = 30.0
FAILED_ATTEMPTS = 3  # of one copy, at a tier that answers
PIECE_BYTES = 64 << 20  # what a transfer may send before it tells: a part, or the chunks of a window
DISK_FULL_SHOWN_S = 3.0  # a refusal that the disk's free bytes do not explain: a quota, or space that came and went
SKEW_S_MAX = 300.0
LOOK_AHEAD_MAX = 200  # each costs three look-ups, every second
INCOMPLETE_SHOWN_MAX = 100
ALARMS_SHOWN_MAX = 100


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something an operator should know."""

    severity: str
    what: str
    todo: str


@dataclass(frozen=True, slots=True)
class HealthReport:
    """The whole answer."""

    health: str
    alarms: tuple[Alarm, ...]
    complete: int
    incomplete: int
    incomplete_shown: tuple[CheckpointView, ...]
    uptime_s: float
    loop_lag_p99_s: float


@dataclass(slots=True)
class _Head:
    """The oldest pending shard of a queue."""

    key: ShardKey
    since_s: float
    attempts: int  # that had failed when it came here, or when the tier was last away


class Health:
    """Watches the queues' heads, so that a stall shows without a scan."""

    def __init__(self, node: Node, clock: Clock, lag: LoopLag) -> None:
        self._node = node
        self._clock = clock
        self._lag = lag
        self._began_s = clock.monotonic()
        self._refusals_seen, self._refused_s = 0, 0.0
        self._heads: dict[str, _Head] = {}  # by tier

    async def step(self) -> float | None:
        """Note the head of each queue and its age, and whether the disk fails, is full, or has space again."""
        await self._watch_disk()
        self._watch_age()
        now_s = self._clock.monotonic()
        with self._node.catalog.read() as txn:
            for name, tier in self._node.tiers.items():
                rests = self._node.resting.get(name, _never)
                entries = islice(txn.pending(name), LOOK_AHEAD_MAX)
                entry = next((entry for entry in entries if not rests(entry.order) and _may_go(txn, entry.key, name)), None)
                head = self._heads.get(name)
                if entry is None:
                    self._heads.pop(name, None)
                elif head is None or head.key != entry.key:
                    self._heads[name] = _Head(entry.key, now_s, _attempts(txn, entry.key, name))
                elif not tier.usable:
                    head.attempts = _attempts(txn, entry.key, name)
        return None

    async def _watch_disk(self) -> None:
        """Also where nobody writes: a disk that is full shows, and one that is no more is usable."""
        node, budget = self._node, self._node.budget
        if budget.disk.reason:
            try:
                await node.io.run(node.cache.try_writing)
            except ForebayError as error:
                budget.disk.failed(error.sentence)
            else:
                log.info("the cache's disk takes writes again")
                budget.disk.worked()
                for listener in node.on_disk_return:
                    listener()
        if node.catalog.no_space:
            with contextlib.suppress(DiskFull):
                await node.catalog.write(lambda txn: None)  # asks for the space again
        free, reserve = node.cache.free_on_disk, node.config.cache.catalog_reserve
        if node.catalog.no_space:
            budget.disk_full(node.catalog.no_space)
        elif free < reserve:
            budget.disk_full(disk_full_reason(free, reserve), reserve)
        now_s = self._clock.monotonic()
        if budget.disk_refusals != self._refusals_seen:
            self._refusals_seen, self._refused_s = budget.disk_refusals, now_s
        elif free >= budget.disk_needs and now_s - self._refused_s >= DISK_FULL_SHOWN_S:
            budget.disk_usable()

    def _watch_age(self) -> None:
        """How long ago the oldest that waits for a required tier was begun, or seen first by this process: no wall clock. What
        stays back by a rule or an operator's word, or waits for writers that may never commit, is no reason to slow anybody."""
        node, now_s = self._node, self._clock.monotonic()
        age_s = 0.0
        with node.catalog.read() as txn:
            for name in node.required_tiers:
                rests = node.resting.get(name, _never)
                entries = (entry for entry in islice(txn.pending(name), LOOK_AHEAD_MAX) if not rests(entry.order))
                if (entry := next((entry for entry in entries if _may_go(txn, entry.key, name)), None)) is not None:
                    age_s = max(age_s, now_s - node.first_seen_s.setdefault(entry.key.session_id, now_s))
        node.budget.dirty_age_s = age_s

    def oldest_pending_s(self, tier: str) -> float | None:
        """For how long the queue's oldest shard has been that, in seconds; None for an empty queue."""
        head = self._heads.get(tier)
        with self._node.catalog.read() as txn:
            totals = txn.totals().tiers.get(tier)
        if totals is None or not totals.copies:
            return None
        return None if head is None else self._clock.monotonic() - head.since_s

    def _fails(self, tier: str) -> bool:
        """Whether the queue's oldest shard is tried again and again: bytes may move all the while."""
        head = self._heads.get(tier)
        if head is None or (self.oldest_pending_s(tier) or 0.0) <= STALLED_AFTER_S:
            return False
        with self._node.catalog.read() as txn:
            return _attempts(txn, head.key, tier) - head.attempts >= FAILED_ATTEMPTS

    def report(self) -> HealthReport:
        """Everything at once."""
        alarms = [*self._tier_alarms(), *self._cache_alarms()]
        try:
            incomplete = self._incomplete()
        except CatalogDamaged as error:  # one row that cannot be read is no reason to say nothing
            incomplete = ()
            alarms.append(Alarm("critical", "some incomplete checkpoints cannot be shown: " + error.what, "forebay fsck"))
        alarms += [Alarm("critical", what, todo) for what, todo in self._node.alarms.values()]
        limit_s = self._node.config.node.complete_within
        for found in incomplete:
            age_s = self._clock.monotonic() - self._node.first_seen_s.get(found.session.id, self._clock.monotonic())
            if age_s >= limit_s:
                alarms.append(
                    Alarm(
                        "warning",
                        f"{found.session.run} step {found.session.step} is still {found.reason}",
                        "look at the named writers; delete the step if they will not come back",
                    )
                )
        order = {"critical": 0, "warning": 1}
        alarms.sort(key=lambda alarm: order[alarm.severity])
        if (more := len(alarms) - ALARMS_SHOWN_MAX) > 0:
            alarms[ALARMS_SHOWN_MAX:] = [Alarm(alarms[0].severity, f"{more} more alarms", "see the gateway's log")]
        health = alarms[0].severity if alarms else "ok"
        with self._node.catalog.read() as txn:
            complete, incomplete_count = txn.complete_count(), txn.incomplete_count()
        return HealthReport(
            health,
            tuple(alarms),
            complete,
            incomplete_count,
            incomplete,
            self._clock.monotonic() - self._began_s,
            self._lag.p99_s,
        )

    def _incomplete(self) -> tuple[CheckpointView, ...]:
        """The first checkpoints that are not complete, from their index."""
        with self._node.catalog.read() as txn:
            rows = islice(txn.incomplete(), INCOMPLETE_SHOWN_MAX)
            return tuple(found for row in rows if (found := view(self._node, txn, row)) is not None)

    def _tier_alarms(self) -> list[Alarm]:
        alarms = []
        with self._node.catalog.read() as txn:
            totals = txn.totals().tiers
        for tier in self._node.tiers.values():
            waiting = totals[tier.name].copies if tier.name in totals else 0
            queue = "nothing waits" if not waiting else "1 copy waits" if waiting == 1 else f"{waiting} copies wait"
            if tier.state in (TierState.AWAY, TierState.DENIED, TierState.FULL):
                severity = "critical" if waiting and tier.required else "warning"
                todo = {
                    TierState.AWAY: "bring the tier back; the queue goes on by itself",
                    TierState.DENIED: "check the tier's credentials and rights",
                    TierState.FULL: "make space on the tier; the queue goes on by itself",
                }[tier.state]
                alarms.append(Alarm(severity, f"tier {tier.name} is {tier.state.value}, {queue}: {tier.reason}", todo))
            elif tier.held and waiting:
                alarms.append(Alarm("warning", f"the drain to {tier.name} is held, {queue}", "forebay queue release"))
            elif min(self.oldest_pending_s(tier.name) or 0.0, tier.rate.quiet_s) > self._patience_s(tier.name):
                what = f"the drain to {tier.name} makes no progress, {queue}"
                alarms.append(Alarm("critical", what, "see the gateway's log"))
            elif self._fails(tier.name):
                what = f"the drain to {tier.name} fails at the same shard again and again, {queue}"
                alarms.append(Alarm("critical", what, "see the gateway's log"))
            skew_s = tier.tier.capabilities.clock_skew_s if tier.tier.capabilities else None
            if skew_s is not None and abs(skew_s) > SKEW_S_MAX:
                alarms.append(
                    Alarm("warning", f"this node's clock and tier {tier.name} differ by {skew_s:.0f} s", "mend the clock (NTP)")
                )
        return alarms

    def _patience_s(self, tier: str) -> float:
        """Without any byte moved; longer where the operator wants it slow."""
        bandwidth = self._node.tier_config(tier).bandwidth
        return STALLED_AFTER_S + (PIECE_BYTES / bandwidth if bandwidth else 0.0)

    def _cache_alarms(self) -> list[Alarm]:
        pressure = self._node.budget.pressure()
        alarms = []
        if pressure.through:
            todo = (
                f"saves go at the pace of {pressure.through}; see the kernel's log, and replace the disk of cache.path once "
                "its queue is empty, if it can still be read"
            )
            alarms.append(Alarm("critical", f"write-through to {pressure.through}: {self._node.budget.disk.reason}", todo))
        if pressure.level == "refusing":
            todo = "the drain must make room"
            if self._node.budget.disk_reason:
                todo = "make space on the disk of cache.path; it is used again by itself"
            if self._node.budget.disk.reason:
                todo = "see the kernel's log; replace the disk of cache.path once its queue is empty, if it can still be read"
            alarms.append(Alarm("critical", f"new shards are refused: {pressure.reason}", todo))
        if self._node.budget.too_old:
            age_s = self._node.budget.dirty_age_s
            what = (
                f"the oldest shard has waited {age_s:.0f} s for a required tier, and writers are slowed (cache.max_dirty_age)"
            )
            alarms.append(Alarm("warning", what, "see which tier lags, and why; save less often, or give it more"))
        if not self._node.cache.direct_io:
            alarms.append(
                Alarm(
                    "warning",
                    "the cache's file system refuses O_DIRECT, writes are buffered",
                    "move cache.path to a local disk",
                )
            )
        return alarms


def _never(order: int) -> bool:
    return False


def _attempts(txn: ReadTxn, key: ShardKey, tier: str) -> int:
    copy = txn.copy(key, tier)
    return 0 if copy is None else copy.attempts


def _may_go(txn: ReadTxn, key: ShardKey, tier: str) -> bool:
    """Whether the drain could move this entry: what waits for other writers, or for repair, is no stall of the drain."""
    row, session, copy = txn.shard(key), txn.session(key.session_id), txn.copy(key, tier)
    if row is None or session is None or copy is None or copy.state is CopyState.QUARANTINED:
        return False
    return not (is_commit_last(row.name) and missing_parts(txn, session))
