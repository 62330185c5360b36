"""The plan: what an interval asks of disks, network and tiers, and which interval they carry. Pure arithmetic.

Owns the model. Everything that flows is taken as steady: a checkpoint's bytes over its interval. Bursts, failures and queues
are the simulation's.
"""

import math
from dataclasses import dataclass, replace

from forebay.plan.inputs import Inputs, Tier, check
from forebay.plan.interval import daly_s, lost_share, young_s

PART_BYTES, PARTS_MAX = 16 << 20, 10_000  # of a multipart upload, as the gateway makes them
POSIX_OPS_A_SHARD = 6  # create, rename, two directory entries synced, open and stat for reading back
MONTH_S = 365.25 / 12 * 86400
FULL_AT = 0.95  # of the cache: new shards are refused
YEARS_MIN = 3.0  # a disk that lasts shorter is worth a word
SHARE_MAX = 0.2  # so is a job that loses more than this


@dataclass(frozen=True, slots=True)
class Need:
    """One resource: what the interval needs of it a second, and what it has. `has` None: not known, then also `share` (needs
    by has) and `interval_min_s` (where it is as busy as headroom allows)."""

    name: str
    scope: str  # "node", "fleet" or "job"
    unit: str  # "bytes/s", "operations/s", "requests/s" or "s/s"
    needs: float
    has: float | None
    share: float | None
    interval_min_s: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Drain:
    """One tier. `drain_s`: until a checkpoint is out, where nothing else waits; None: the tier's rate is not known."""

    tier: str
    kind: str
    source: str
    node_bytes_per_s: float
    fleet_bytes_per_s: float
    carries_bytes_per_s: float | None
    drain_s: float | None


@dataclass(frozen=True, slots=True)
class Cache:
    """A node's cache. `needed_bytes` None: a tier is slower than the interval needs, and no size lasts."""

    saves: int | None  # that lie in it at the worst
    needed_bytes: int | None
    has_bytes: int | None


@dataclass(frozen=True, slots=True)
class Objects:
    """What an object tier costs. Requests of class "put" also create and complete uploads; "get" are HEADs."""

    tier: str
    puts_a_checkpoint: int
    gets_a_checkpoint: int
    puts_a_month: float
    kept_bytes: int
    storage_a_month: float
    requests_a_month: float
    total_a_month: float


@dataclass(frozen=True, slots=True)
class Wear:
    """Of the cache's disk, on one node. None: its capacity or endurance is not known."""

    bytes_a_day: float
    drive_writes_a_day: float | None
    rated_drive_writes_a_day: float
    endurance_bytes: float | None
    years: float | None
    source: str


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that does not hold, and the nearest value that would."""

    what: str
    nearest: str


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer. `holds`: nothing that is known is asked for more than it has."""

    inputs: Inputs
    needs: tuple[Need, ...]
    saturates_first: str
    interval_young_s: float
    interval_daly_s: float
    interval_safe_s: float
    interval_best_s: float
    limited_by: str
    lost_share: float
    lost_share_best: float
    drains: tuple[Drain, ...]
    cache: Cache
    objects: tuple[Objects, ...]
    wear: Wear
    warnings: tuple[Notice, ...]
    holds: bool


def make(inputs: Inputs) -> Plan:
    """The plan. Raises BadInput."""
    check(inputs)
    needs = tuple(_needs(inputs))
    known = [need for need in needs if need.share is not None]
    first = max(known, key=lambda need: need.share or 0.0)
    daly = daly_s(inputs.cost_s, inputs.job_mtbf_s)
    tightest = max(known, key=lambda need: need.interval_min_s or 0.0)
    safe_s = max(1.0, tightest.interval_min_s or 0.0)
    drains = tuple(_drain(inputs, tier) for tier in inputs.tiers)
    behind_s = max((drain.drain_s or 0.0 for drain in drains), default=0.0)
    best_s = max(daly, safe_s)
    plan = Plan(
        inputs=inputs,
        needs=needs,
        saturates_first=first.name,
        interval_young_s=young_s(inputs.cost_s, inputs.job_mtbf_s),
        interval_daly_s=daly,
        interval_safe_s=safe_s,
        interval_best_s=best_s,
        limited_by="failures" if daly >= safe_s else tightest.name,
        lost_share=lost_share(inputs.interval_s, inputs.cost_s, inputs.job_mtbf_s, behind_s, inputs.restart_s),
        lost_share_best=lost_share(best_s, inputs.cost_s, inputs.job_mtbf_s, behind_s, inputs.restart_s),
        drains=drains,
        cache=_cache(inputs, drains),
        objects=tuple(_objects(inputs, tier) for tier in inputs.tiers if tier.kind == "s3"),
        wear=_wear(inputs),
        warnings=(),
        holds=all((need.share or 0.0) <= 1 for need in known),
    )
    return _with_warnings(plan)


# -- resources ---------------------------------------------------------------------------------------------------------


def _needs(inputs: Inputs) -> list[Need]:
    node, interval = inputs.node_bytes, inputs.interval_s
    sent = sum(node / tier.every for tier in inputs.tiers)
    needs = [
        _need(inputs, "save", "job", "s/s", inputs.cost_s / interval, 1.0, "the trainer stands still"),
        _need(
            inputs, "nvme", "node", "bytes/s", (node + sent) / interval, inputs.nvme_bytes_per_s, "written, and read to drain"
        ),
        _need(inputs, "network", "node", "bytes/s", sent / interval, inputs.network_bytes_per_s, "sent to all tiers"),
    ]
    for tier in inputs.tiers:
        period_s = interval * tier.every
        rate = inputs.size_bytes / period_s
        needs.append(_need(inputs, tier.name, "fleet", "bytes/s", rate, tier.fleet_bytes_per_s, tier.source))
        if tier.kind == "s3":
            puts = puts_a_checkpoint(inputs) / period_s
            needs.append(_need(inputs, f"{tier.name} requests", "fleet", "requests/s", puts, inputs.object_puts_per_s, "PUTs"))
        else:
            ops = POSIX_OPS_A_SHARD * (documents(inputs) + shards(inputs)) / period_s
            name = f"{tier.name} metadata"
            needs.append(
                _need(inputs, name, "fleet", "operations/s", ops, inputs.metadata_ops_per_s, "creates, renames, stats")
            )
    return needs


def _need(inputs: Inputs, name: str, scope: str, unit: str, needs: float, has: float | None, source: str) -> Need:
    if has is None:
        return Need(name, scope, unit, needs, None, None, None, source)
    share = needs / has
    return Need(name, scope, unit, needs, has, share, share * inputs.interval_s / inputs.headroom, source)


def shards(inputs: Inputs) -> int:
    """Of a whole checkpoint."""
    return inputs.ranks * inputs.shards_per_rank


def documents(inputs: Inputs) -> int:
    """Part records and the manifest."""
    return inputs.ranks + 1


def puts_a_checkpoint(inputs: Inputs) -> int:
    """Requests of the dear class."""
    size = math.ceil(inputs.size_bytes / shards(inputs))
    part = max(PART_BYTES, math.ceil(size / PARTS_MAX))
    a_shard = 1 if size <= part else math.ceil(size / part) + 2  # create, parts, complete
    return shards(inputs) * a_shard + documents(inputs)


def _drain(inputs: Inputs, tier: Tier) -> Drain:
    share = None if tier.fleet_bytes_per_s is None else min(tier.fleet_bytes_per_s / inputs.nodes, inputs.network_bytes_per_s)
    period_s = inputs.interval_s * tier.every
    return Drain(
        tier.name,
        tier.kind,
        tier.source,
        inputs.node_bytes / period_s,
        inputs.size_bytes / period_s,
        tier.fleet_bytes_per_s,
        None if share is None else inputs.node_bytes / share,
    )


def _cache(inputs: Inputs, drains: tuple[Drain, ...]) -> Cache:
    for tier, drain in zip(inputs.tiers, drains, strict=True):
        if drain.drain_s is not None and drain.drain_s > inputs.interval_s * tier.every:
            return Cache(None, None, inputs.cache_bytes)
    drain_s = max((drain.drain_s or 0.0 for drain in drains), default=0.0)
    # One that is being written, those that come while a drain or an outage lasts, and one that stays for a restart.
    saves = 2 + math.ceil((drain_s + inputs.outage_s) / inputs.interval_s)
    return Cache(saves, math.ceil(saves * inputs.node_bytes / FULL_AT), inputs.cache_bytes)


def _objects(inputs: Inputs, tier: Tier) -> Objects:
    prices = inputs.prices
    puts, gets = puts_a_checkpoint(inputs), shards(inputs)
    checkpoints = MONTH_S / (inputs.interval_s * tier.every)
    kept = inputs.keep * inputs.size_bytes
    storage = kept / 2**30 * prices.gib_month
    requests = checkpoints * (puts * prices.put_1000 + gets * prices.get_1000) / 1000
    return Objects(tier.name, puts, gets, checkpoints * puts, kept, storage, requests, storage + requests)


def _wear(inputs: Inputs) -> Wear:
    disk = inputs.disk
    a_day = inputs.node_bytes * disk.amplification * 86400 / inputs.interval_s
    endurance = disk.endurance_bytes
    if endurance is None and disk.capacity_bytes is not None:
        endurance = disk.capacity_bytes * disk.drive_writes_a_day * disk.rated_years * 365.25
    return Wear(
        a_day,
        None if disk.capacity_bytes is None else a_day / disk.capacity_bytes,
        disk.drive_writes_a_day,
        endurance,
        None if endurance is None else max(0.0, endurance - disk.written_bytes) / (a_day * 365.25),
        disk.source,
    )


# -- what does not hold ------------------------------------------------------------------------------------------------


def _with_warnings(plan: Plan) -> Plan:
    warnings = [*_slow(plan), *_other(plan)]
    return replace(plan, warnings=tuple(warnings))


def _slow(plan: Plan) -> list[Notice]:
    found = []
    for need in plan.needs:
        if need.share is not None and need.interval_min_s is not None and need.share > plan.inputs.headroom:
            how = "cannot carry this interval" if need.share > 1 else "has no headroom left"
            found.append(
                Notice(
                    f"{need.name} {how}: it would be busy {need.share:.0%} of the time",
                    f"an interval of {need.interval_min_s:.0f} s, where it is busy {plan.inputs.headroom:.0%}",
                )
            )
    return found


def _other(plan: Plan) -> list[Notice]:
    inputs, cache, wear = plan.inputs, plan.cache, plan.wear
    found = []
    if inputs.cache_bytes is not None and cache.needed_bytes is not None and inputs.cache_bytes < cache.needed_bytes:
        what = f"the cache has {inputs.cache_bytes:,} bytes: saves are refused when a tier is away for {inputs.outage_s:.0f} s"
        found.append(Notice(what, f"{cache.needed_bytes:,} bytes"))
    if wear.years is not None and wear.years < YEARS_MIN:
        found.append(
            Notice(
                f"the cache's disk is worn out after {wear.years:.1f} years",
                f"an interval of {inputs.interval_s * YEARS_MIN / max(wear.years, 1e-9):.0f} s lasts {YEARS_MIN:.0f} years"
                if wear.years > 0
                else "another disk: this one has written all that it is good for",
            )
        )
    if plan.lost_share > SHARE_MAX:
        found.append(
            Notice(
                f"{plan.lost_share:.0%} of the time is lost to saves, failures and restarts",
                f"an interval of {plan.interval_best_s:.0f} s loses {plan.lost_share_best:.0%}",
            )
        )
    return found
