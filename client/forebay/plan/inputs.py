"""What a plan is made from, and which of it makes no sense.

Owns defaults, their sources, and the bounds. Sizes are bytes, rates bytes a second, durations seconds.
"""

from dataclasses import dataclass, field

# One of 2,048 nodes of 8 GPUs: 419 unexpected interruptions in 54 days ("The Llama 3 Herd of Models", 2024, section 3.3.4).
NODE_MTBF_S = 54 * 86400 * 2048 / 419


@dataclass(frozen=True, slots=True)
class Tier:
    """A tier and what it carries. `fleet_bytes_per_s`: of all nodes together; None: not known."""

    name: str
    fleet_bytes_per_s: float | None
    kind: str = "posix"
    source: str = "given"
    every: int = 1


@dataclass(frozen=True, slots=True)
class Prices:
    """US dollars; the defaults are Amazon's list prices of S3 Standard in us-east-1 (first 50 TB, 2025)."""

    gib_month: float = 0.023
    put_1000: float = 0.005  # also create, complete, copy, list
    get_1000: float = 0.0004  # also head


@dataclass(frozen=True, slots=True)
class Disk:
    """The cache's disk. `capacity_bytes` None: not known."""

    capacity_bytes: int | None = None
    drive_writes_a_day: float = 1.0  # as rated
    rated_years: float = 5.0  # the time for which they are rated
    amplification: float = 1.1  # bytes that the disk writes for each of ours: large, sequential, aligned
    written_bytes: int = 0
    endurance_bytes: float | None = None  # as the disk's own wear implies; None: as rated
    source: str = "given"


@dataclass(frozen=True, slots=True)
class Inputs:
    """One question."""

    size_bytes: int  # a whole checkpoint, over all nodes
    nodes: int
    interval_s: float
    tiers: tuple[Tier, ...] = ()
    ranks_per_node: int = 8
    shards_per_rank: int = 1
    mtbf_s: float = NODE_MTBF_S  # of one node
    restart_s: float = 300.0  # from a failure until training goes on, without reading the checkpoint
    save_cost_s: float | None = None  # how long a save keeps the trainer; None: until it is on NVMe
    nvme_bytes_per_s: float = 3e9
    network_bytes_per_s: float = 12.5e9  # a node's, 100 Gb/s
    metadata_ops_per_s: float = 10_000.0  # what a POSIX tier's metadata servers do for us
    object_puts_per_s: float = 3500.0  # Amazon S3's documented limit for one partitioned prefix
    headroom: float = 0.7  # how busy a resource may be on average
    outage_s: float = 3600.0  # how long a tier may be away without a save being refused
    cache_bytes: int | None = None
    keep: int = 5  # checkpoints kept on an object tier
    disk: Disk = field(default_factory=Disk)
    prices: Prices = field(default_factory=Prices)

    @property
    def ranks(self) -> int:
        """Of all nodes."""
        return self.nodes * self.ranks_per_node

    @property
    def node_bytes(self) -> float:
        """A node's part of a checkpoint."""
        return self.size_bytes / self.nodes

    @property
    def cost_s(self) -> float:
        """How long a save keeps the trainer from training."""
        return self.node_bytes / self.nvme_bytes_per_s if self.save_cost_s is None else self.save_cost_s

    @property
    def job_mtbf_s(self) -> float:
        """Of the job, which stops when any node fails."""
        return self.mtbf_s / self.nodes


# name: (least, most, how to write them). What is outside is a mistake, and not a large machine.
BOUNDS: dict[str, tuple[float, float, str]] = {
    "size_bytes": (1, 1e18, "bytes"),
    "nodes": (1, 100_000, "nodes"),
    "interval_s": (1, 30 * 86400, "s"),
    "ranks_per_node": (1, 1024, "ranks"),
    "shards_per_rank": (1, 1_000_000, "shards"),
    "mtbf_s": (60, 1e11, "s"),
    "restart_s": (0, 7 * 86400, "s"),
    "save_cost_s": (0, 7 * 86400, "s"),
    "nvme_bytes_per_s": (1e6, 1e13, "bytes/s"),
    "network_bytes_per_s": (1e6, 1e13, "bytes/s"),
    "metadata_ops_per_s": (1, 1e9, "operations/s"),
    "object_puts_per_s": (1, 1e9, "requests/s"),
    "headroom": (0.05, 1, ""),
    "outage_s": (0, 30 * 86400, "s"),
    "cache_bytes": (1 << 20, 1e18, "bytes"),
    "keep": (1, 1_000_000, "checkpoints"),
}
TIER_BOUNDS = {"fleet_bytes_per_s": (1e5, 1e15, "bytes/s"), "every": (1, 1_000_000, "checkpoints")}
DISK_BOUNDS = {
    "capacity_bytes": (1 << 30, 1e18, "bytes"),
    "drive_writes_a_day": (0.01, 1000, "a day"),
    "rated_years": (0.1, 50, "years"),
    "amplification": (1, 100, ""),
}
PRICE_BOUNDS = dict.fromkeys(("gib_month", "put_1000", "get_1000"), (0.0, 1000000.0, "dollars"))


class BadInput(ValueError):
    """A value that is refused: which, why, and the nearest that would do."""


def check(inputs: Inputs) -> None:
    """Raise BadInput for the first value that makes no sense."""
    _within(inputs, BOUNDS, "")
    _within(inputs.disk, DISK_BOUNDS, "disk ")
    _within(inputs.prices, PRICE_BOUNDS, "price ")
    names = [tier.name for tier in inputs.tiers]
    for tier in inputs.tiers:
        _within(tier, TIER_BOUNDS, f"tier {tier.name} ")
        if names.count(tier.name) > 1:
            raise BadInput(f"tier {tier.name} is named twice")


def _within(record: object, bounds: dict[str, tuple[float, float, str]], prefix: str) -> None:
    for name, (least, most, unit) in bounds.items():
        value = getattr(record, name)
        if value is None or least <= value <= most:
            continue
        nearest = least if value < least else most
        words = name.removesuffix("_s").removesuffix("_bytes").removesuffix("_per").replace("_", " ")
        unit = f" {unit}" if unit else ""
        raise BadInput(
            f"{prefix}{words} is {_shown(value)}{unit}, and can be {_shown(least)} to {_shown(most)}; "
            f"nearest sensible value: {_shown(nearest)}{unit}"
        )


def _shown(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:g}"
