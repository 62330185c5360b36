"""Restores from the cache: both lanes, from the disk and not from memory, every chunk checked.

Owns the rows restore-*. What came back is compared once more after the last pair.
"""

from collections.abc import Iterator
from pathlib import Path

from bench.bare_grpc import BareStream
from bench.harness import BLOCK, CHUNK, Job, Node, data, drop_caches, gateway, in_turn, measure
from bench.peers import fio
from bench.rows import CannotRun, Measured, Row, cost, speed


def over_fd(job: Job) -> Iterator[Row]:
    """The fd lane against fio, which reads the very same file."""
    fio.needs_fio()
    job.room(2 * job.size)
    with job.place() as place, gateway(place, capacity=4 * job.size) as node:
        node.needs_lane("fd")
        source, target = data(job.size), data(job.size)
        step = node.save({"shard": source}, "fd")
        file = _file_of(node.process.cache, job.size)
        _read(node, "fd", step, target[:BLOCK], file)
        how = drop_caches(file)

        def disk() -> Measured:
            drop_caches(file)
            return fio.read(file, job.size)

        ours, theirs = in_turn(job.pairs, lambda: _read(node, "fd", step, target, file), disk)
        _compare(source, target)
    yield speed("restore-fd", ours, theirs, job.size, how)


def over_stream(job: Job) -> Iterator[Row]:
    """The stream lane against a bare stream down."""
    job.room(2 * job.size)
    with job.place() as place, gateway(place, capacity=4 * job.size) as node, BareStream(place, CHUNK) as bare:
        source, target = data(job.size), data(job.size)
        step = node.save({"shard": source}, "stream")
        file = _file_of(node.process.cache, job.size)
        _read(node, "stream", step, target[:BLOCK], file)
        how = drop_caches(file)
        ours, theirs = in_turn(job.pairs, lambda: _read(node, "stream", step, target, file), lambda: bare.down(job.size))
        _compare(source, target)
    yield speed("restore-stream", ours, theirs, job.size, how)
    yield cost("restore-stream-cpu", ours, theirs, job.size)


def _read(node: Node, lane: str, step: int, target: memoryview, file: Path) -> Measured:
    reader = node.reader(step, lane)
    drop_caches(file)
    return measure(lambda: reader.readinto("shard", target), node.pid)


def _file_of(cache: Path, size: int) -> Path:
    """The cache's file of the one large shard."""
    found = [path for path in (cache / "data").rglob("*") if path.is_file() and path.stat().st_size >= size]
    if len(found) != 1:
        raise CannotRun(f"the cache has {len(found)} files of the shard's size: this build's layout is another")
    return found[0]


def _compare(source: memoryview, target: memoryview) -> None:
    if source != target:
        raise AssertionError("restored bytes differ")
