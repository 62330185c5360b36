"""Durable saves: both lanes against the disk and against a bare stream, and against two other ways to save.

Owns the rows save-*. Every side's bytes are on the disk (fsync) when its clock stops.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.bare_grpc import BareStream
from bench.harness import BLOCK, CHUNK, RUN, Job, data, gateway, in_turn, write_files
from bench.peers import dcp, fio, juicefs
from bench.rows import Measured, Row, cost, speed


def over_fd(job: Job) -> Iterator[Row]:
    """The fd lane against fio; aligned and unaligned memory share fio's runs."""
    fio.needs_fio()
    job.room(3 * job.size)
    with job.place() as place, gateway(place, capacity=8 * job.size) as node:
        node.needs_lane("fd")
        aligned, unaligned = data(job.size), data(job.size, unaligned=True)
        node.timed_save({"shard": aligned[:BLOCK]}, "fd")
        fio.write(place / "fio", BLOCK)
        plain, shifted, disk = in_turn(
            job.pairs,
            lambda: node.timed_save({"shard": aligned}, "fd"),
            lambda: node.timed_save({"shard": unaligned}, "fd"),
            lambda: fio.write(place / "fio", job.size),
        )
    yield speed("save-fd", plain, disk, job.size)
    yield speed("save-fd-unaligned", shifted, disk, job.size)


def over_stream(job: Job) -> Iterator[Row]:
    """The stream lane against a bare stream that discards."""
    job.room(2 * job.size)
    with job.place() as place, gateway(place, capacity=8 * job.size) as node, BareStream(place, CHUNK) as bare:
        view = data(job.size)
        node.timed_save({"shard": view[:BLOCK]}, "stream")
        ours, theirs = in_turn(job.pairs, lambda: node.timed_save({"shard": view}, "stream"), lambda: bare.up(job.size))
    yield speed("save-stream", ours, theirs, job.size)
    yield cost("save-stream-cpu", ours, theirs, job.size)


def against_juicefs(job: Job) -> Iterator[Row]:
    """The best lane against a write-back file system; both read the same file from the page cache."""
    juicefs.needs_juicefs()
    job.room(8 * job.size)
    with job.place() as place, gateway(place, capacity=8 * job.size) as node, juicefs.mounted(place / "jfs") as mount:
        lane = node.best_lane()
        (source,) = write_files(place / "source", {"shard": data(job.size)})
        (short,) = write_files(place / "warm", {"shard": data(BLOCK)})

        def ours() -> Measured:
            cached(source)
            return node.timed_save({"shard": source}, lane)

        def theirs() -> Measured:
            cached(source)
            return juicefs.dd(source, mount / "shard")

        node.timed_save({"shard": short}, lane)
        juicefs.dd(short, mount / "shard")
        mine, other = in_turn(job.pairs, ours, theirs)
    yield speed("save-juicefs", mine, other, job.size, f"{lane} lane")


def against_dcp(job: Job) -> Iterator[Row]:
    """The best lane, and dcp.save through it, against torch's own writer: the same tensors to the same disk, one process."""
    dcp.needs_torch()
    from forebay.torch import ForebayStorageWriter

    job.room(4 * job.size)
    with job.place() as place, gateway(place, capacity=8 * job.size) as node:
        lane = node.best_lane()
        tensors = dcp.tensors(data(job.size))
        first = dict(list(tensors.items())[:1])

        def through(state: dict[str, Any]) -> Measured:
            step = node.next_step()
            writer = ForebayStorageWriter(RUN, step, node.process.address, thread_count=dcp.THREADS, lane=lane)
            taken = dcp.saved(state, writer, node.pid)
            node.drop(step)
            return taken

        node.timed_save(first, lane)
        through(first)
        dcp.save(first, place / "dcp")
        plain, mine, other = in_turn(
            job.pairs,
            lambda: node.timed_save(tensors, lane),
            lambda: through(tensors),
            lambda: dcp.save(tensors, place / "dcp"),
        )
    yield speed("save-dcp", plain, other, job.size, f"{lane} lane")
    yield speed("save-dcp-writer", mine, other, job.size, f"{lane} lane")


def cached(path: Path) -> None:
    """Read a file once, so that whoever reads it next finds it in the page cache."""
    with path.open("rb", buffering=0) as file:
        while file.read(CHUNK):
            pass
