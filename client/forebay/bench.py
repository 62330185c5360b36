"""Measuring a running gateway on its own node and tiers: durable saves, restores, the drain, small acknowledgements, the disk.

Owns what is done, in which order, and that nothing of it stays: everything is saved under a run name that no other has, and is
deleted whatever happens. Does not own how figures are shown (cli/bench.py). Peers to compare with are no part of it.
"""

import contextlib
import inspect
import math
import mmap
import os
import shutil
import statistics
import time
import tomllib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ulid import ULID

from forebay.api import Client
from forebay.errors import CacheFull, DeadlineExceeded, ForebayError, InvalidArgument, NotFound, Unavailable, Unsupported

LANES = ("fd", "stream")
PART_BYTES = 256 << 20  # of a checkpoint's shards: memory is bounded by two of them, whatever the size
BLOCK_BYTES = 4 << 20
ALIGNMENT = 4096
DISK_WRITES_AT_A_TIME = 4
SMALL_BYTES = 4096
OVERHEAD_BYTES = 64 << 10  # of a shard's footer, checksums and padding, rounded up
DISK_SPARE_BYTES = 1 << 30
MIN_BYTES = 1 << 20

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Figure:
    """One result: a median `value` in `unit`, None where it could not be measured, for `reason`. `name` is stable."""

    name: str
    value: float | None
    unit: str
    meaning: str
    reason: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class Plan:
    """What was asked for. `disk` is a directory to write to without the gateway; `drain_timeout_s` is each tier's."""

    size: int = 1 << 30
    rounds: int = 3
    small: int = 200
    disk: Path | None = None
    drain_timeout_s: float = 600.0


class Bench:
    """One measurement of one gateway. `run` leaves nothing behind, also when it is interrupted."""

    def __init__(self, client: Client, plan: Plan, tell: Tell) -> None:
        if plan.size < MIN_BYTES or plan.rounds < 1 or plan.small < 1:
            raise InvalidArgument(f"a measurement needs at least {MIN_BYTES} bytes, one round and one small shard")
        self._client = client
        self._plan = plan
        self._tell = tell
        self.status = client.status()
        self.run_name = f"forebay-bench/{str(ULID()).lower()}"
        self._steps = 0
        self._left: set[int] = set()  # steps that are not deleted yet
        self._values: dict[str, list[float]] = {}
        self._reasons: dict[str, str] = {}

    def run(self) -> list[Figure]:
        """Measure. Raises CacheFull where the cache has not the room, and what a save raises."""
        self._check_room()
        part = min(self._plan.size, PART_BYTES)
        self._content, self._target = (_memory(part) for _ in range(2))
        _fill(self._content)
        try:
            for number in range(self._plan.rounds):
                for lane in LANES:
                    self._tell(f"round {number + 1} of {self._plan.rounds}: {lane} lane, then its drain")
                    self._round(lane)
                self._disk_alone()
            self._tell(f"{self._plan.small} small shards, one after the other")
            self._acknowledgements()
        finally:
            for step in sorted(self._left):
                self._delete(step)
        return self._figures()

    def _check_room(self) -> None:
        """Before a byte is sent: a measurement must not be what makes a gateway refuse its own writers."""
        cache = self.status.cache
        refuse = tomllib.loads(self._client.config()).get("cache", {}).get("refuse", 0.95)
        room = int(cache.capacity_bytes * refuse) - cache.used_bytes - cache.reserved_bytes
        shards = -(-self._plan.size // PART_BYTES)
        need = max(self._plan.size + shards * OVERHEAD_BYTES, self._plan.small * 4 * SMALL_BYTES)
        if need > room:
            raise CacheFull(
                f"the cache has not the room: {need} bytes are needed, {max(0, room)} are left before it refuses writers; "
                "give a smaller size"
            )

    def _round(self, lane: str) -> None:
        """One checkpoint: saved, drained to every tier, read back from the cache, deleted. One thing at a time."""
        if f"save_{lane}" in self._reasons:
            return
        step, part = self._next_step(), len(self._content)
        sizes = {f"shard-{at // part:04d}": min(part, self._plan.size - at) for at in range(0, self._plan.size, part)}
        began_s = time.perf_counter()
        try:
            with self._client.checkpoint(self.run_name, step, lane=lane) as checkpoint:
                for name, size in sizes.items():
                    checkpoint.put(name, self._content[:size])
                checkpoint.commit(wait="cache")
        except Unsupported as error:
            self._reasons[f"save_{lane}"] = self._reasons[f"restore_{lane}"] = error.message
            return
        acknowledged_s = time.perf_counter()
        self._keep(f"save_{lane}", self._rate(acknowledged_s - began_s))
        self._wait_for_tiers(step, acknowledged_s)
        try:
            self._keep(f"restore_{lane}", self._rate(self._read(step, lane, sizes)))
        except (Unsupported, NotFound, Unavailable) as error:  # the latter two: evicted meanwhile, the cache is that full
            self._reasons[f"restore_{lane}"] = error.message
        self._delete(step)

    def _read(self, step: int, lane: str, sizes: dict[str, int]) -> float:
        known = "lane" in inspect.signature(self._client.open).parameters
        if lane != "stream" and not known:
            raise Unsupported("this client reads over 'stream' alone")
        options: dict[str, Any] = {"lane": lane} if known else {}
        reader = self._client.open(self.run_name, step, source="cache", **options)
        began_s = time.perf_counter()
        for name, size in sizes.items():
            reader.readinto(name, self._target[:size])
        return time.perf_counter() - began_s

    def _wait_for_tiers(self, step: int, acknowledged_s: float) -> None:
        for tier in self.status.tiers:
            name = f"drain_{tier.name}"
            if name in self._reasons:
                continue
            if tier.state != "ok":
                self._reasons[name] = f"the tier is {tier.state}{f': {tier.reason}' if tier.reason else ''}"
                continue
            try:
                self._client.wait(self.run_name, step, tier.name, timeout=self._plan.drain_timeout_s)
            except DeadlineExceeded:
                self._reasons[name] = f"not there within {self._plan.drain_timeout_s:g} s"
            except ForebayError as error:  # not for this run, or away now: this tier has no figure, the others have
                self._reasons[name] = error.message
            else:
                self._keep(name, self._rate(time.perf_counter() - acknowledged_s))

    def _acknowledgements(self) -> None:
        step, content = self._next_step(), bytes(self._content[:SMALL_BYTES])
        taken_ms = []
        with self._client.checkpoint(self.run_name, step) as checkpoint:
            for number in range(self._plan.small):
                began_s = time.perf_counter()
                checkpoint.put(f"small/{number:06d}", content)
                taken_ms.append(1e3 * (time.perf_counter() - began_s))
        taken_ms.sort()
        for percent in (50, 99):  # by nearest rank
            self._keep(f"ack_p{percent}", taken_ms[max(0, math.ceil(percent / 100 * len(taken_ms)) - 1)])

    def _disk_alone(self) -> None:
        disk, need = self._plan.disk, self._plan.size + DISK_SPARE_BYTES
        if disk is None:
            self._reasons["disk_write"] = "give a directory on the cache's disk to compare with"
            return
        self._tell(f"the disk alone, in {disk}")
        try:
            if (free := shutil.disk_usage(disk).free) < need:
                self._reasons["disk_write"] = f"{disk} has {free} bytes free, {need} are needed"
                return
            self._keep("disk_write", self._rate(_write_direct(disk, self._content, self._plan.size)))
        except OSError as error:
            self._reasons["disk_write"] = f"{disk}: {error.strerror}"

    def _figures(self) -> list[Figure]:
        meanings = {}
        for lane in LANES:
            meanings[f"save_{lane}"] = f"durable save over the {lane} lane, until it is acknowledged"
            meanings[f"restore_{lane}"] = f"restore from this node's cache over the {lane} lane, every byte checked"
        for tier in self.status.tiers:
            meanings[f"drain_{tier.name}"] = f"from the acknowledgement until complete and verified on tier {tier.name}"
        meanings["disk_write"] = f"O_DIRECT write of as many bytes and fsync, without a gateway{self._elsewhere()}"
        figures = [self._figure(name, "GB/s", meaning) for name, meaning in meanings.items()]
        for percent in (50, 99):
            meaning = f"acknowledgement of a shard of 4 KiB, percentile {percent} of {self._plan.small}"
            figures.append(self._figure(f"ack_p{percent}", "ms", meaning))
        return figures

    def _figure(self, name: str, unit: str, meaning: str) -> Figure:
        values = self._values.get(name, [])
        reason = self._reasons.get(name, "")
        return Figure(name, None if reason else statistics.median(values), unit, meaning, reason, tuple(values))

    def _elsewhere(self) -> str:
        """A remark where the directory is not on the cache's file system; nothing where that cannot be seen from here."""
        with contextlib.suppress(OSError):
            if self._plan.disk and self._plan.disk.stat().st_dev != Path(self.status.cache.path).stat().st_dev:
                return " (NOT on the cache's file system)"
        return ""

    def _keep(self, name: str, value: float) -> None:
        self._values.setdefault(name, []).append(value)

    def _rate(self, seconds: float) -> float:
        return self._plan.size / 1e9 / seconds

    def _next_step(self) -> int:
        self._steps += 1
        self._left.add(self._steps)
        return self._steps

    def _delete(self, step: int) -> None:
        """Drained or not; one that was never committed has been aborted already."""
        with contextlib.suppress(NotFound):
            self._client.delete(self.run_name, step, force=True)
        self._left.discard(step)


def _memory(size: int) -> memoryview:
    """Page-aligned, whole blocks below."""
    return memoryview(mmap.mmap(-1, -(-size // BLOCK_BYTES) * BLOCK_BYTES))[:size]


def _fill(view: memoryview) -> None:
    """Bytes that nothing on the way could compress."""
    block = os.urandom(min(len(view), 16 << 20))
    for at in range(0, len(view), len(block)):
        view[at : at + len(block)] = block[: len(view) - at]


def _write_direct(directory: Path, content: memoryview, size: int) -> float:
    """Seconds that a new file of `size` bytes takes, fsync included; it is gone afterwards."""
    path = directory / f".forebay-bench-{str(ULID()).lower()}"
    blocks = content[: len(content) // ALIGNMENT * ALIGNMENT]

    def write(at: int) -> None:
        start = at % max(ALIGNMENT, len(blocks) // BLOCK_BYTES * BLOCK_BYTES)
        length = min(BLOCK_BYTES, -(-(size - at) // ALIGNMENT) * ALIGNMENT)
        if os.pwrite(descriptor, blocks[start : start + length], at) != length:
            raise OSError(0, "a short write")

    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_DIRECT, 0o600)
    pool = ThreadPoolExecutor(DISK_WRITES_AT_A_TIME, thread_name_prefix="forebay-bench")
    try:
        began_s = time.perf_counter()
        os.posix_fallocate(descriptor, 0, size)  # as the gateway does
        for _ in pool.map(write, range(0, size, BLOCK_BYTES)):
            pass
        os.fsync(descriptor)
        return time.perf_counter() - began_s
    finally:
        pool.shutdown(cancel_futures=True)
        os.close(descriptor)
        path.unlink()
