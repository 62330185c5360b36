"""Which disks a directory lies on, and what /proc/diskstats says of one while something runs.

Owns sysfs and diskstats. A network file system, a memory file system and an overlay have no disk here.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay_gateway.doctor.report import Check

DISKSTATS = Path("/proc/diskstats")
SYS_BLOCK = Path("/sys/dev/block")

BUSY_BEFORE = 0.30
SLOW_WRITE_S = 0.100


@dataclass(frozen=True, slots=True)
class DiskTimes:
    """Counters since boot."""

    writes: int
    writing_ms: int  # summed over all writes: what they waited and took
    busy_ms: int  # any request under way


def parse_diskstats(text: str) -> dict[str, DiskTimes]:
    """By the device's name; lines that are not understood are left out. Format: Documentation/admin-guide/iostats.rst."""
    found = {}
    for line in text.splitlines():
        fields = line.split()
        if len(fields) >= 14 and all(each.isdigit() for each in (fields[7], fields[10], fields[12])):
            found[fields[2]] = DiskTimes(int(fields[7]), int(fields[10]), int(fields[12]))
    return found


@dataclass(frozen=True, slots=True)
class Load:
    """Of a disk, over some time."""

    busy: float  # fraction of the time with a request under way
    write_wait_s: float  # mean of a write, waiting included; 0 where there was none


def load_between(before: DiskTimes, after: DiskTimes, elapsed_s: float) -> Load:
    """What happened between two readings. Counters that went back (a device that was replaced) count as nothing."""
    busy_ms = max(0, after.busy_ms - before.busy_ms)
    writes = after.writes - before.writes
    wait_s = max(0, after.writing_ms - before.writing_ms) / writes / 1000 if writes > 0 else 0.0
    return Load(min(1.0, busy_ms / 1000 / elapsed_s) if elapsed_s > 0 else 0.0, wait_s)


class Gauge:
    """A reading at its beginning; `load` compares with now."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._began_s = time.perf_counter()
        self._before = self._read()

    def _read(self) -> DiskTimes | None:
        try:
            return parse_diskstats(DISKSTATS.read_text()).get(self._device)
        except OSError:
            return None

    def load(self) -> Load | None:
        """Since then; None where the device is not listed."""
        after = self._read()
        if self._before is None or after is None:
            return None
        return load_between(self._before, after, time.perf_counter() - self._began_s)


def device_of(path: Path, source: str = "") -> str:
    """The block device's name (a partition's own); empty where there is none. `source` is the mount's, for file systems such as
    btrfs whose device number is made up."""
    numbers = [path.stat().st_dev]
    if source.startswith("/dev/"):
        with contextlib.suppress(OSError):  # a device that is not shown in this container
            numbers.append(Path(source).stat().st_rdev)
    for number in numbers:
        link = SYS_BLOCK / f"{os.major(number)}:{os.minor(number)}"
        if link.exists():
            return link.resolve().name
    return ""


def disks_under(device: str, sysfs: Path = Path("/sys/class/block")) -> frozenset[str]:
    """The whole disks below a device: of a partition its disk, of a volume or an array all of its members."""
    here = sysfs / device
    members = list((here / "slaves").iterdir()) if (here / "slaves").is_dir() else []
    if members:
        return frozenset().union(*(disks_under(member.name, sysfs) for member in members))
    if (here / "partition").exists():
        return disks_under(here.resolve().parent.name, sysfs)
    return frozenset({device}) if device else frozenset()


def disks_of(path: Path, device: str) -> frozenset[str]:
    """What a directory has in common with others that share its disks. Where none is to be seen (an overlay, a network file
    system) that is the number of the file system."""
    number = path.stat().st_dev
    return disks_under(device) or frozenset({f"file system {os.major(number)}:{os.minor(number)}"})


def sharing(disks: frozenset[str], others: Mapping[str, frozenset[str]]) -> list[str]:
    """Names of those in `others` that have one of these disks."""
    return [name for name, theirs in others.items() if disks & theirs]


def disk_check(where: str, device: str, before: Load | None, during: Load | None) -> Check:
    """From the loads before and while the writes ran."""
    why = "a disk that others keep busy, or that makes writes wait, holds saves up"
    if before is None or during is None:
        return Check(where, "disk", "OK", "no disk of this machine", why, "", {"device": device or None})
    slow, shared = during.write_wait_s > SLOW_WRITE_S, before.busy > BUSY_BEFORE
    advice = "find who uses it (iostat -x, pidstat -d) and keep them off while checkpoints are saved"
    return Check(
        where,
        "disk",
        "WARN" if slow or shared else "OK",
        f"{device}: busy {before.busy:.0%} before, {during.busy:.0%} while it was written; "
        f"a write waited {during.write_wait_s * 1000:.1f} ms",
        why,
        advice if slow or shared else "",
        {"device": device, "busy_before": before.busy, "busy": during.busy, "write_wait_s": during.write_wait_s},
    )
