"""How many small durable acts a directory takes in a second: fsyncs of 4 KiB, and files created and renamed.

Owns these two loops. Each is bounded in number and in time.
"""

import os
import statistics
import time
from pathlib import Path

from forebay_gateway.doctor.report import Check
from forebay_gateway.doctor.watch import Watch

SLOW_FSYNC_S = 0.020
SLOW_CREATES_PER_S = 200.0


def fsync_rate(directory: Path, watch: Watch, count: int, seconds_max: float) -> list[float]:
    """Seconds of each 4 KiB write with its fsync."""
    path, data, taken_s = directory / "fsync", os.urandom(4096), []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        end_s = time.perf_counter() + seconds_max
        for index in range(count):
            watch.tick()
            began_s = time.perf_counter()
            os.pwrite(descriptor, data, index * 4096)
            os.fsync(descriptor)
            taken_s.append(time.perf_counter() - began_s)
            if time.perf_counter() > end_s:
                break
    finally:
        os.close(descriptor)
        path.unlink()
    return taken_s


def create_rate(directory: Path, watch: Watch, count: int, seconds_max: float) -> float:
    """Files created under one name and renamed to another, a second."""
    made: list[Path] = []
    began_s = time.perf_counter()
    try:
        for index in range(count):
            watch.tick()
            before, after = directory / f"new-{index}", directory / f"named-{index}"
            made += [before, after]
            os.close(os.open(before, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
            before.rename(after)
            if time.perf_counter() - began_s > seconds_max:
                break
        return len(made) / 2 / (time.perf_counter() - began_s)
    finally:
        for path in made:
            path.unlink(missing_ok=True)


def fsync_check(where: str, taken_s: list[float]) -> Check:
    """From the seconds of each."""
    median_s = statistics.median(taken_s)
    slow = median_s > SLOW_FSYNC_S
    return Check(
        where,
        "fsync",
        "WARN" if slow else "OK",
        f"{len(taken_s) / sum(taken_s):.0f} a second, median {median_s * 1000:.1f} ms",
        "every acknowledgement waits for fsyncs, also that of the smallest shard",
        "use a disk with power-loss protection, or keep other writers off this one" if slow else "",
        {"per_s": len(taken_s) / sum(taken_s), "median_s": median_s},
    )


def create_check(where: str, per_s: float) -> Check:
    """From the rate."""
    slow = per_s < SLOW_CREATES_PER_S
    return Check(
        where,
        "metadata",
        "WARN" if slow else "OK",
        f"{per_s:.0f} files created and renamed a second",
        "each shard and each document is a file that is made and renamed",
        "save fewer and larger shards; on a parallel file system look at its metadata servers" if slow else "",
        {"per_s": per_s},
    )
