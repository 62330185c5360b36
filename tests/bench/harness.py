"""What all rows share: the place under test, data, gateways, pairs in turn, caches dropped, CPU counted.

Owns everything that is started and its end: whatever a row opens here is gone when its block ends, also after Ctrl-C. Does not
own what is measured.
"""

import contextlib
import itertools
import mmap
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

import forebay
from bench.rows import CannotRun, Measured
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay.errors import NotFound, Unsupported

CHUNK = 4 << 20  # the gateway's chunk size, and that of every peer
BLOCK = 64 << 20  # random bytes that large data repeats
PART = 256 << 20  # of a drained checkpoint's shards
RUN = "bench"
TIMEOUT_S = 900.0
CAPACITY_MIN = 1 << 30
DROP_CACHES = Path("/proc/sys/vm/drop_caches")


@dataclass(frozen=True)
class Job:
    """What was asked for. `directory` lies on the disk under test, and is gone afterwards."""

    directory: Path
    size: int = 1536 << 20
    pairs: int = 5
    through: int = 20 << 30
    shards: int = 10_000
    catalog_shards: int = 1_000_000
    load_s: float = 75.0
    largest: int = 8 << 30
    quick: bool = False

    def room(self, size: int) -> None:
        """Raise CannotRun where the disk has no room for `size` bytes more."""
        free = shutil.disk_usage(self.directory).free
        if free < size + (2 << 30):
            raise CannotRun(f"needs {size / 2**30:.0f} GiB and 2 to spare on the disk, {free / 2**30:.0f} are free")

    @contextlib.contextmanager
    def place(self) -> Iterator[Path]:
        """A directory of one row."""
        # Sockets lie in it, whose paths may have 107 bytes.
        path = Path(tempfile.mkdtemp(prefix="r-", dir=self.directory))
        try:
            yield path
        finally:
            shutil.rmtree(path)


def data(size: int, unaligned: bool = False) -> memoryview:
    """`size` bytes in memory that a trainer could hold: page-aligned, or 64 bytes past a page; freed with the last view."""
    shift = 64 if unaligned else 0
    memory = mmap.mmap(-1, size + shift)
    block = os.urandom(min(size, BLOCK))
    memory.seek(shift)
    for at in range(0, size, len(block)):
        memory.write(block[: size - at])
    return memoryview(memory)[shift:]


@contextlib.contextmanager
def gateway(
    place: Path,
    *tiers: str,
    capacity: int,
    held: bool = True,
    cache_keys: str = "",
    environment: dict[str, str] | None = None,
) -> Iterator["Node"]:
    """A gateway with its cache in `place`, and a POSIX tier there unless others are given; its queue is held at first."""
    root = place / "pfs"
    root.mkdir(exist_ok=True)
    process = GatewayProcess(
        place,
        "bench",
        tiers or (posix_tier(root),),
        capacity=str(max(CAPACITY_MIN, capacity)),
        cache_keys=cache_keys,
        environment=environment,
    )
    with process, forebay.Client(process.address, admit_timeout=TIMEOUT_S, progress=False) as client:
        if held:
            client.hold()
        yield Node(process, client)


class Node:
    """A running gateway and a client of it. Every save is a step of its own."""

    def __init__(self, process: GatewayProcess, client: forebay.Client) -> None:
        self.process = process
        self.client = client
        self._steps = itertools.count(1)

    @property
    def pid(self) -> int:
        """Of the front."""
        return self.process.pid

    def next_step(self) -> int:
        """A step that nothing has used."""
        return next(self._steps)

    def save(self, shards: Mapping[str, Any], lane: str) -> int:
        """One writer's whole checkpoint, durable when this returns; its step."""
        step = self.next_step()
        with self.client.checkpoint(RUN, step, lane=lane) as checkpoint:
            for name, content in shards.items():
                checkpoint.put(name, content)
            checkpoint.commit(wait="cache")
        return step

    def timed_save(self, shards: Mapping[str, Any], lane: str) -> Measured:
        """The same with its cost; deleted again afterwards, unmeasured."""
        saved: list[int] = []
        taken = measure(lambda: saved.append(self.save(shards, lane)), self.pid)
        self.drop(saved[0])
        return taken

    def drop(self, step: int) -> None:
        """Delete a step, drained or not, so that the next act finds the same room."""
        with contextlib.suppress(NotFound):
            self.client.delete(RUN, step, force=True)

    def needs_lane(self, lane: str) -> None:
        """Raise CannotRun where this build has not the lane."""
        with not_in_this_build(f"the {lane} lane"):
            step = self.save({"probe": bytes(2 << 20)}, lane)
            try:
                self.reader(step, lane).read("probe")
            finally:
                self.drop(step)

    def best_lane(self) -> str:
        """ "fd" where this build has it."""
        try:
            self.needs_lane("fd")
        except CannotRun:
            return "stream"
        return "fd"

    def reader(self, step: int, lane: str) -> forebay.Reader:
        """A checkpoint for reading from the cache over one lane."""
        try:
            return self.client.open(RUN, step, source="cache", lane=lane)  # type: ignore[call-arg, unused-ignore]
        except TypeError:  # a build whose reader knows no lanes has the stream lane alone
            if lane != "stream":
                raise Unsupported(f"client.open knows no lane {lane!r}") from None
            return self.client.open(RUN, step, source="cache")


@contextlib.contextmanager
def not_in_this_build(feature: str) -> Iterator[None]:
    """What the client calls Unsupported is a feature that this build lacks, and no failure."""
    try:
        yield
    except Unsupported as error:
        raise CannotRun(f"{feature} is not in this build: {error.message}") from error


def measure(act: Callable[[], object], *pids: int) -> Measured:
    """Run `act`: its seconds, and the CPU of this process and the trees of `pids`."""
    os.sync()  # what an earlier act left to be written is not this one's
    cpu_s, began_s = time.process_time() + tree_cpu_s(*pids), time.perf_counter()
    act()
    seconds = time.perf_counter() - began_s
    return Measured(seconds, time.process_time() + tree_cpu_s(*pids) - cpu_s)


def tree_cpu_s(*pids: int) -> float:
    """CPU seconds of processes and their children, user and system, children that have ended included."""
    total = 0.0
    for pid in pids:
        root = psutil.Process(pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += sum(process.cpu_times()[:4])
    return total


def in_turn(pairs: int, *acts: Callable[[], Measured]) -> list[list[Measured]]:
    """Each act `pairs` times, one after the other, in alternating order; one list of results an act."""
    results: list[list[Measured]] = [[] for _ in acts]
    for number in range(pairs):
        order = list(enumerate(acts))
        for index, act in order if number % 2 == 0 else reversed(order):
            results[index].append(act())
    return results


def drop_caches(*files: Path) -> str:
    """Make the next read of these files come from the disk; says how."""
    os.sync()
    try:
        DROP_CACHES.write_text("3")
        return "drop_caches"
    except OSError:
        pass
    for path in files:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return "posix_fadvise"


def shards_of(view: memoryview) -> dict[str, memoryview]:
    """Data as a checkpoint of several shards, at least four."""
    part = min(PART, -(-view.nbytes // 4))
    return {f"shard-{at // part:03d}": view[at : at + part] for at in range(0, view.nbytes, part)}


def write_files(directory: Path, shards: dict[str, memoryview]) -> list[Path]:
    """The same bytes as plain files, on the disk when this returns."""
    directory.mkdir()
    paths = []
    for name, view in shards.items():
        path = directory / name
        with path.open("wb", buffering=0) as file:
            for at in range(0, view.nbytes, CHUNK):
                file.write(view[at : at + CHUNK])
            os.fsync(file.fileno())
        paths.append(path)
    return paths


class Watched:
    """Resident memory of a process tree's root while a block runs, sampled ten times a second."""

    def __init__(self, pid: int) -> None:
        self._process = psutil.Process(pid)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="bench-watch")
        self.rss: list[int] = []

    def __enter__(self) -> "Watched":
        self.rss.append(self._process.memory_info().rss)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(0.1):
            with contextlib.suppress(psutil.NoSuchProcess):
                self.rss.append(self._process.memory_info().rss)

    @property
    def start(self) -> int:
        """At the block's beginning, bytes."""
        return self.rss[0]

    @property
    def peak(self) -> int:
        """The highest, bytes."""
        return max(self.rss)
