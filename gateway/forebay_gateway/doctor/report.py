"""What the doctor says: one check a line, and the list of all checks with their figures.

Owns the shapes and the names that JSON shows. Does not own what is measured, nor how a line is printed.
"""

from dataclasses import dataclass, field
from typing import Literal

from forebay_gateway.core.quantities import size_text

Status = Literal["OK", "WARN", "FAIL"]
Figure = float | int | str | bool | None | list[float]

NODE = "node"  # where a check belongs to neither the cache nor one tier

# Each check, and the names of its figures: bytes, bytes a second, seconds, fractions of 1, and counts, as the names say.
CHECKS: dict[str, tuple[str, ...]] = {
    "path": (),
    "write_through": ("tier",),
    "write": ("bytes_per_s", "rounds_bytes_per_s", "tool", "direct"),
    "read": ("bytes_per_s", "direct"),
    "fsync": ("per_s", "median_s"),
    "metadata": ("per_s",),
    "disk": ("device", "busy_before", "busy", "write_wait_s"),
    "filesystem": ("type",),
    "mount": ("options",),
    "striping": ("stripes", "stripe_bytes", "targets", "command"),
    "space": ("free_bytes", "total_bytes", "checkpoints"),
    "inodes": ("free",),
    "wear": ("device", "used", "written_bytes"),
    "apart": ("shares_with",),
    "probe": ("conditional_create", "conditional_replace", "links", "direct_io", "list_after_put", "seconds"),
    "round_trip": ("median_s", "per_s"),
    "conditional_create": ("create", "replace"),
    "checksums": ("put", "full_object"),
    "list_after_put": ("listed",),
    "clock_skew": ("seconds",),
    "multipart": ("supported", "max_parts", "part_bytes", "largest_bytes"),
    "sample_data": ("shares_with",),
    "dirty_pages": ("dirty_bytes", "background_bytes", "flush_s"),
    "tcp": ("sent", "retransmitted", "ratio"),
    "open_files": ("soft", "hard"),
    "listen": ("ports",),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One line: where it belongs, what was measured, why that matters, and what to do (empty: nothing)."""

    where: str
    check: str
    status: Status
    value: str
    why: str
    do: str = ""
    figures: dict[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # What was not measured is null, so that every check has its keys at all times.
        unknown = self.figures.keys() - CHECKS[self.check]
        if unknown:
            raise ValueError(f"{self.check} has no figures {sorted(unknown)}")
        object.__setattr__(self, "figures", {name: self.figures.get(name) for name in CHECKS[self.check]})


@dataclass(frozen=True, slots=True)
class Part:
    """What a checkpoint costs at one place: written, and read once more where that is part of the way."""

    name: str
    write_bytes_per_s: float
    read_bytes_per_s: float | None
    limit_bytes_per_s: float | None  # what the configuration allows
    seconds: float
    devices: tuple[str, ...]  # parts on one device take turns


@dataclass(frozen=True, slots=True)
class Frequency:
    """How often a checkpoint can be saved and drained, if nothing else is done. None where `reason` says why not."""

    interval_s: float | None
    per_hour: float | None
    bytes_per_s: float | None
    bounded_by: str
    reason: str
    parts: tuple[Part, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """Everything that was found."""

    config: str
    size_bytes: int
    nodes: int
    status: Status
    checks: tuple[Check, ...]
    frequency: Frequency


def worst(checks: "list[Check]") -> Status:
    """The status of them all."""
    states = {check.status for check in checks}
    return "FAIL" if "FAIL" in states else "WARN" if "WARN" in states else "OK"


def rate_text(bytes_per_s: float) -> str:
    """A rate for people."""
    return f"{size_text(bytes_per_s)}/s"
