"""What the bench reports: every row by name, what it is measured against, and its goal.

Owns the list of rows and how a result is judged. Does not own how anything is measured. The goals are promises of the project:
they are not moved to fit a result.
"""

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Goal:
    """What a value has to be."""

    at_least: bool
    value: float

    def __str__(self) -> str:
        return f"{'>=' if self.at_least else '<='} {self.value:g}"

    def holds(self, value: float) -> bool:
        """Whether the value is good enough."""
        return value >= self.value if self.at_least else value <= self.value


def at_least(value: float) -> Goal:
    """Bigger is better."""
    return Goal(True, value)


def at_most(value: float) -> Goal:
    """Smaller is better."""
    return Goal(False, value)


@dataclass(frozen=True)
class Spec:
    """A row before it is measured. `unit` "x" is a ratio: median over pairs, both sides of a pair one after the other."""

    name: str
    what: str
    against: str
    goal: Goal | None
    unit: str = "x"


FIO_WRITE = "fio 4 MiB O_DIRECT depth 4, fsync"
FIO_READ = "fio 4 MiB O_DIRECT depth 4"
BARE_UP, BARE_DOWN = "bare grpcio stream up", "bare grpcio stream down"


def _catalog(name: str, state: str) -> tuple[Spec, ...]:
    return (
        Spec(f"{name}-status", f"status, 1,000,000 shards, {state}", "", at_most(100), "ms"),
        Spec(f"{name}-ls", f"ls of a step, {state}", "", at_most(50), "ms"),
        Spec(f"{name}-start", f"start until it answers, {state}", "", at_most(5), "s"),
        Spec(f"{name}-rss", f"gateway RSS, {state}", "", at_most(300), "MiB"),
    )


SPECS = (
    Spec("save-fd", "durable save, fd lane", FIO_WRITE, at_least(0.90)),
    Spec("save-fd-unaligned", "the same from unaligned memory", FIO_WRITE, None),
    Spec("save-stream", "durable save, stream lane", BARE_UP, at_least(0.85)),
    Spec("save-stream-cpu", "its CPU a GB, client + gateway", BARE_UP, at_most(1.5)),
    Spec("save-juicefs", "durable save", "JuiceFS --writeback, dd conv=fsync", at_least(5)),
    Spec("save-dcp", "durable save", "torch DCP FileSystemWriter", at_least(1.5)),
    Spec("save-dcp-writer", "dcp.save to cache", "torch DCP FileSystemWriter", at_least(1.5)),
    Spec("small-shards", "10,000 shards of 4 KiB, durable", "create + write + fsync each", at_least(5)),
    Spec("small-restore", "10,000 shards of 4 KiB, restored", "open + read each", None),
    Spec("restore-fd", "restore from cache, fd lane, cold", FIO_READ, at_least(0.90)),
    Spec("restore-stream", "restore from cache, stream lane", BARE_DOWN, at_least(0.85)),
    Spec("restore-stream-cpu", "its CPU a GB, client + gateway", BARE_DOWN, None),
    Spec("restore-dcp", "dcp.load from cache, cold", "torch DCP FileSystemReader", at_least(1.0)),
    Spec("restore-dir", "restore_dir of shards in the cache", "cp + fsync", None),
    Spec("restore-s3", "restore_dir from S3, evicted", "rclone copy + fsync", None),
    Spec("drain-posix", "drain to POSIX, verified", "cp + fsync + cmp", at_least(1.0)),
    Spec("drain-posix-cpu", "its CPU a GB, gateway + mover", "cp + fsync + cmp", None),
    Spec("drain-s3", "drain to S3, verified", "rclone copy --checksum", at_least(1.0)),
    Spec("drain-s3-cpu", "its CPU a GB, gateway + mover", "bare aiobotocore multipart", at_most(1.2)),
    Spec("drain-s3-torch", "drain to S3, verified", "s3torchconnector writer", None),
    Spec("busy-s3-stream", "stream save while draining to S3", "the same save alone", at_least(0.70)),
    Spec("busy-s3-fd", "fd save while draining to S3", "the same save alone", at_least(0.70)),
    Spec("busy-posix-stream", "stream save while draining to POSIX", "the same save alone", at_least(0.70)),
    Spec("busy-posix-fd", "fd save while draining to POSIX", "the same save alone", at_least(0.70)),
    Spec("async-save", "async save, trainer blocked", "one memcpy", at_most(1.5)),
    Spec("async-dcp", "dcp.async_save, trainer blocked", "the same with FileSystemWriter", at_most(1.0)),
    Spec("async-dcp-copy", "dcp.async_save, trainer blocked", "one memcpy", at_most(1.5)),
    *_catalog("catalog", "all cached"),
    *_catalog("catalog-evicted", "all evicted"),
    Spec("plan-decision", "drain scheduler, a decision, 1,000,000 copies pending", "", at_most(1), "ms"),
    Spec("plan-simulate", "10,000 nodes x 24 h simulated", "", at_most(60), "s"),
    Spec("plan-predicted", "time until a save is out", "the simulation's", None),
    Spec("memory-peak", "gateway RSS, highest", "", at_most(400), "MiB"),
    Spec("memory-growth", "RSS of the last quarter", "of the second quarter", at_most(1.1)),
    Spec("loop-lag", "event-loop lag p99 under load", "", at_most(50), "ms"),
)
BY_NAME = {spec.name: spec for spec in SPECS}


class CannotRun(Exception):
    """A row that cannot be measured here; the text says why. No failure."""


@dataclass(frozen=True)
class Row:
    """One line of the result. `met` is None without a goal or a value; `reason` says why there is no value."""

    name: str
    what: str
    against: str
    unit: str
    value: float | None
    goal: str
    met: bool | None
    detail: str = ""
    reason: str = ""
    failed: bool = False
    samples: dict[str, list[float]] = field(default_factory=dict)

    @property
    def shown(self) -> str:
        """The value for people."""
        if self.value is None:
            return "-"
        return f"{self.value:.2f}" if self.unit == "x" else f"{self.value:.{0 if abs(self.value) >= 20 else 2}f} {self.unit}"

    @property
    def verdict(self) -> str:
        """One word."""
        if self.value is None:
            return "failed" if self.failed else "not run"
        return "" if self.met is None else "met" if self.met else "NOT MET"


def measured(spec: Spec, value: float, detail: str, samples: dict[str, list[float]] | None = None, note: str = "") -> Row:
    """A row with its value, judged by the spec's goal."""
    met = None if spec.goal is None else spec.goal.holds(value)
    detail = f"{note}: {detail}" if note else detail
    return Row(spec.name, spec.what, spec.against, spec.unit, value, _goal(spec), met, detail, samples=samples or {})


def not_run(spec: Spec, reason: str, *, failed: bool = False) -> Row:
    """A row without a value."""
    return Row(spec.name, spec.what, spec.against, spec.unit, None, _goal(spec), None, reason=reason, failed=failed)


def _goal(spec: Spec) -> str:
    if spec.goal is None:
        return ""
    return str(spec.goal) if spec.unit == "x" else f"{spec.goal} {spec.unit}"


@dataclass(frozen=True)
class Measured:
    """One act: seconds, and CPU seconds of all processes that it is charged with."""

    seconds: float
    cpu_s: float = 0.0


def speed(name: str, ours: Sequence[Measured], theirs: Sequence[Measured], size: int, note: str = "") -> Row:
    """How many times as fast as the other side, for the same bytes."""
    ratios = [other.seconds / mine.seconds for mine, other in zip(ours, theirs, strict=True)]
    rates = {side: [size / 1e9 / each.seconds for each in acts] for side, acts in (("ours", ours), ("theirs", theirs))}
    medians = [statistics.median(rates[side]) for side in ("ours", "theirs")]
    detail = f"{medians[0]:.2f} against {medians[1]:.2f} GB/s; {_spread(ratios)}"
    return measured(BY_NAME[name], statistics.median(ratios), detail, {"ratio": ratios, **_named(rates, "gb_per_s")}, note)


def cost(name: str, ours: Sequence[Measured], theirs: Sequence[Measured], size: int, note: str = "") -> Row:
    """How many times the other side's CPU, for the same bytes."""
    ratios = [mine.cpu_s / other.cpu_s for mine, other in zip(ours, theirs, strict=True)]
    costs = {side: [each.cpu_s / (size / 1e9) for each in acts] for side, acts in (("ours", ours), ("theirs", theirs))}
    medians = [statistics.median(costs[side]) for side in ("ours", "theirs")]
    detail = f"{medians[0]:.2f} against {medians[1]:.2f} CPU-s a GB; {_spread(ratios)}"
    return measured(BY_NAME[name], statistics.median(ratios), detail, {"ratio": ratios, **_named(costs, "cpu_s_per_gb")}, note)


def _named(sides: dict[str, list[float]], unit: str) -> dict[str, list[float]]:
    return {f"{side}_{unit}": values for side, values in sides.items()}


def _spread(ratios: Sequence[float]) -> str:
    return f"{len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}"


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Lines for a terminal."""
    yield f"{'ROW':22} {'WHAT':38} {'AGAINST':36} {'VALUE':>10}  {'GOAL':12} {'':8} DETAIL"
    for row in rows:
        yield line(row)


def line(row: Row) -> str:
    """One line of the table."""
    rest = row.detail if row.value is not None else row.reason
    return f"{row.name:22} {row.what:38} {row.against:36} {row.shown:>10}  {row.goal:12} {row.verdict:8} {rest}".rstrip()


def as_json(row: Row) -> dict[str, Any]:
    """A row in the result file."""
    return {**asdict(row), "samples": {name: [round(value, 5) for value in values] for name, values in row.samples.items()}}
