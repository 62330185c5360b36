"""`make bench`: each figure as a ratio, both sides in one run, interleaved; medians.

usage: run.py [--size-mib 1536] [--pairs 5] [--through-gib 20] [--directory DIR] [--json FILE] [ROW ...]
Rows: save, save-fd, restore, restore-fd, memory (those with fd need fio). DIR lies on the disk under test (default: temporary
files' directory).
"""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

import forebay
from bench.bare_grpc import BareStream, Measured, cpu_of
from bench.fio import FIO, fio
from bench.machine import facts
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay.lanes.memory import aligned

CHUNK = 4 << 20


@dataclass(frozen=True)
class Row:
    """One line of the result. `goal` is "" where none is set."""

    what: str
    against: str
    value: str
    goal: str
    detail: str


@dataclass(frozen=True)
class Job:
    """What was asked for."""

    directory: Path
    size: int
    pairs: int
    through: int


def save(job: Job) -> Iterator[Row]:
    """Durable save over the stream lane against a bare stream that discards."""
    source = memoryview(bytearray(os.urandom(64 << 20) * (job.size // (64 << 20))))
    bare: list[Measured] = []
    ours: list[Measured] = []
    with _gateway(job, capacity=20 * job.size) as gateway, BareStream(CHUNK) as stream:
        server = psutil.Process(gateway.pid)
        client = forebay.Client(gateway.address)
        gateway.cli("queue", "hold")
        _save_once(client, server, 0, source[: 64 << 20])
        for step in range(1, job.pairs + 1):
            bare.append(stream.up(job.size))
            ours.append(_save_once(client, server, step, source))
    yield _speed("durable save, stream lane", "bare grpcio stream up", bare, ours, job.size, ">= 0.7 now, 0.85 the aim")
    yield _cost("CPU of it, client + gateway", "bare grpcio stream up", bare, ours, job.size, "<= 1.5")


def save_fd(job: Job) -> Iterator[Row]:
    """Durable save over the fd lane against fio, which writes and fsyncs; from memory as Python gives it, and page-aligned."""
    block = os.urandom(64 << 20)
    plain = memoryview(bytearray(block * (job.size // len(block))))
    pages = aligned(job.size)
    pages[:] = plain
    for what, source in (("any memory", plain), ("page-aligned", pages)):
        theirs: list[Measured] = []
        ours: list[Measured] = []
        with _gateway(job, capacity=20 * job.size) as gateway:
            server = psutil.Process(gateway.pid)
            client = forebay.Client(gateway.address)
            gateway.cli("queue", "hold")
            for step in range(1, job.pairs + 1):
                # A new file each time, as the gateway's is: some disks are much faster where they were written before.
                theirs.append(fio(job.directory / "fio", job.size, "write"))
                (job.directory / "fio").unlink()
                ours.append(_save_once(client, server, step, source, "fd"))
        yield _speed(f"durable save, fd lane, {what}", FIO, theirs, ours, job.size, ">= 0.90")


def restore_fd(job: Job) -> Iterator[Row]:
    """Restore from the cache over the fd lane, around the page cache, all chunks checked, against fio's reading alone."""
    block = os.urandom(64 << 20)
    source = memoryview(bytearray(block * (job.size // len(block))))
    for what, target in (("any memory", memoryview(bytearray(job.size))), ("page-aligned", aligned(job.size))):
        theirs: list[Measured] = []
        ours: list[Measured] = []
        with _gateway(job, capacity=20 * job.size) as gateway:
            server = psutil.Process(gateway.pid)
            client = forebay.Client(gateway.address)
            gateway.cli("queue", "hold")
            _save_once(client, server, 1, source, "fd")
            reader = client.open("bench", 1, lane="fd")
            reader.readinto("shard", target)  # its pages are there from here on, as a training process's are
            fio(job.directory / "fio", job.size, "write")
            for _ in range(job.pairs):
                theirs.append(fio(job.directory / "fio", job.size, "read"))
                cpu_s, began_s = cpu_of(server), time.perf_counter()
                reader.readinto("shard", target)
                ours.append(Measured(time.perf_counter() - began_s, cpu_of(server) - cpu_s))
            if target != source:
                raise SystemExit("restored bytes differ")
        (job.directory / "fio").unlink()
        yield _speed(f"restore from cache, fd lane, {what}", FIO, theirs, ours, job.size, ">= 0.90")


def _save_once(client: forebay.Client, server: psutil.Process, step: int, source: memoryview, lane: str = "stream") -> Measured:
    cpu_s, began_s = cpu_of(server), time.perf_counter()
    with client.checkpoint("bench", step, lane=lane) as checkpoint:
        checkpoint.put("shard", source)
        checkpoint.commit(wait="cache")
    return Measured(time.perf_counter() - began_s, cpu_of(server) - cpu_s)


def restore(job: Job) -> Iterator[Row]:
    """Restore from the cache over the stream lane, O_DIRECT reads and all checks, against a bare stream down."""
    source = memoryview(bytearray(os.urandom(64 << 20) * (job.size // (64 << 20))))
    target = bytearray(job.size)
    bare: list[Measured] = []
    ours: list[Measured] = []
    with _gateway(job, capacity=20 * job.size) as gateway, BareStream(CHUNK) as stream:
        server = psutil.Process(gateway.pid)
        client = forebay.Client(gateway.address)
        gateway.cli("queue", "hold")
        _save_once(client, server, 1, source)
        reader = client.open("bench", 1, lane="stream")
        for _ in range(job.pairs):
            bare.append(stream.down(job.size))
            cpu_s, began_s = cpu_of(server), time.perf_counter()
            reader.readinto("shard", target)
            ours.append(Measured(time.perf_counter() - began_s, cpu_of(server) - cpu_s))
        if target != source:
            raise SystemExit("restored bytes differ")
    yield _speed("restore from cache, stream lane", "bare grpcio stream down", bare, ours, job.size, "0.85 the aim")


def memory(job: Job) -> Iterator[Row]:
    """The gateway's resident memory while many times the cache's size passes through it, drained and evicted on the way."""
    source = memoryview(bytearray(os.urandom(64 << 20) * 16))
    steps = max(1, job.through // len(source))
    with _gateway(job, capacity=6 << 30) as gateway:
        server = psutil.Process(gateway.pid)
        at_start = server.memory_info().rss
        peak = [at_start]
        done = threading.Event()
        watcher = threading.Thread(target=_watch, args=(server, peak, done))
        watcher.start()
        client = forebay.Client(gateway.address, admit_timeout=120)
        began_s = time.perf_counter()
        for step in range(steps):
            with client.checkpoint("bench", step) as checkpoint:
                checkpoint.put("shard", source)
                checkpoint.commit(wait="cache")
            if step >= 2:  # retention is not this bench's subject: the tier would fill the disk
                client.wait("bench", step - 2, "pfs", timeout=300)
                client.delete("bench", step - 2)
        seconds = time.perf_counter() - began_s
        done.set()
        watcher.join()
    moved = steps * len(source)
    yield Row(
        "gateway RSS, highest",
        f"{moved / 2**30:.0f} GiB through it",
        f"{peak[0] / 2**20:.0f} MiB",
        "< 400 MiB",
        f"{at_start / 2**20:.0f} MiB at start; {moved / seconds / 1e9:.2f} GB/s saved and drained",
    )


def _watch(server: psutil.Process, peak: list[int], done: threading.Event) -> None:
    while not done.wait(0.1):
        peak[0] = max(peak[0], server.memory_info().rss)


def _gateway(job: Job, capacity: int) -> GatewayProcess:
    directory = Path(tempfile.mkdtemp(prefix="bench-", dir=job.directory))
    (directory / "pfs").mkdir()
    return GatewayProcess(directory, "bench", [posix_tier(directory / "pfs")], capacity=str(capacity))


def _speed(what: str, against: str, bare: list[Measured], ours: list[Measured], size: int, goal: str) -> Row:
    ratios = [theirs.seconds / mine.seconds for theirs, mine in zip(bare, ours, strict=True)]
    detail = f"{_rate(ours, size):.2f} against {_rate(bare, size):.2f} GB/s; ratios {min(ratios):.2f} to {max(ratios):.2f}"
    return Row(what, against, f"{statistics.median(ratios):.2f}", goal, detail)


def _cost(what: str, against: str, bare: list[Measured], ours: list[Measured], size: int, goal: str) -> Row:
    ratios = [mine.cpu_s / theirs.cpu_s for theirs, mine in zip(bare, ours, strict=True)]
    mine, theirs = (statistics.median(each.cpu_s for each in side) / (size / 1e9) for side in (ours, bare))
    return Row(what, against, f"{statistics.median(ratios):.2f}", goal, f"{mine:.2f} against {theirs:.2f} CPU-s a GB")


def _rate(measured: list[Measured], size: int) -> float:
    return size / 1e9 / statistics.median(each.seconds for each in measured)


ROWS: dict[str, Callable[[Job], Iterator[Row]]] = {
    "save": save,
    "save-fd": save_fd,
    "restore": restore,
    "restore-fd": restore_fd,
    "memory": memory,
}


def main() -> None:
    """Run the rows asked for, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size-mib", type=int, default=1536)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--through-gib", type=int, default=20)
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    parser.add_argument("rows", nargs="*", choices=[*ROWS, []], default=list(ROWS))
    arguments = parser.parse_args()
    results: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="forebay-bench-", dir=arguments.directory) as name:
        job = Job(Path(name), arguments.size_mib >> 6 << 26, arguments.pairs, arguments.through_gib << 30)
        machine = facts(job.directory)
        print("  ".join(f"{key}: {value}" for key, value in machine.items()))
        print(f"{'WHAT':40} {'AGAINST':26} {'RATIO':>8}  {'GOAL':26} DETAIL")
        for row in arguments.rows:
            if row.endswith("-fd") and shutil.which("fio") is None:
                print(f"{row}: not run: fio is not installed")
                continue
            for result in ROWS[row](job):
                results.append(result)
                print(f"{result.what:40} {result.against:26} {result.value:>8}  {result.goal:26} {result.detail}", flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"machine": machine, "rows": [asdict(row) for row in results]}, indent=2))


if __name__ == "__main__":
    sys.exit(main())
