"""Restores from the cache, over both lanes, and from an object store: from the disk and not from memory, every chunk checked.

Owns the rows restore-*. What came back is compared once more.
"""

import shutil
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from bench.bare_grpc import BareStream
from bench.drain import object_store
from bench.harness import (
    BLOCK,
    CHUNK,
    RUN,
    TIMEOUT_S,
    Job,
    Node,
    data,
    drop_caches,
    gateway,
    in_turn,
    measure,
    shards_of,
    write_files,
)
from bench.peers import dcp, fio, rclone
from bench.rows import CannotRun, Measured, Row, cost, speed
from forebay.demo.gateways import s3_tier
from forebay.demo.seaweedfs import SeaweedFS


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


def against_dcp(job: Job) -> Iterator[Row]:
    """dcp.load by the best lane against torch's own reader of the same files, both from a disk that nothing is cached of."""
    dcp.needs_torch()
    import torch.distributed.checkpoint

    from forebay.torch import ForebayStorageReader, ForebayStorageWriter

    job.room(4 * job.size)
    with job.place() as place, gateway(place, capacity=4 * job.size) as node:
        lane = node.best_lane()
        source, target = data(job.size), data(job.size)
        tensors, found = dcp.tensors(source), dcp.tensors(target)
        dcp.saved(tensors, ForebayStorageWriter(RUN, 1, node.process.address, thread_count=dcp.THREADS, lane=lane))
        dcp.saved(tensors, dcp.file_writer(place / "dcp"))
        mine, plain = _files_of(node.process.cache), list((place / "dcp").iterdir())

        def load(reader: Any, *files: Path) -> Measured:
            drop_caches(*files)
            target[:: BLOCK // 16] = bytes(len(target[:: BLOCK // 16]))
            taken = dcp.loaded(found, reader, node.pid)
            _compare(source, target)
            return taken

        def ours() -> Measured:
            return load(ForebayStorageReader(RUN, 1, node.process.address, source="cache", lane=lane), *mine)

        def theirs() -> Measured:
            return load(torch.distributed.checkpoint.FileSystemReader(place / "dcp"), *plain)

        ours()
        how = drop_caches(*mine)
        taken, other = in_turn(job.pairs, ours, theirs)
    yield speed("restore-dcp", taken, other, job.size, f"{lane} lane, {how}")


def directory(job: Job) -> Iterator[Row]:
    """restore_dir of several shards, each fsynced, against cp and fsync of as many files."""
    job.room(5 * job.size)
    with job.place() as place, gateway(place, capacity=4 * job.size) as node:
        shards = shards_of(data(job.size))
        paths = write_files(place / "files", shards)
        step = node.save(shards, node.best_lane())

        def ours_once() -> Measured:
            drop_caches(*_files_of(node.process.cache))
            return _restored(node, step, place / "ours", shards)

        def copied() -> Measured:
            target = place / "theirs"
            drop_caches(*paths)
            target.mkdir()
            copies = [str(target / path.name) for path in paths]

            def act() -> None:
                subprocess.run(["cp", *map(str, paths), str(target)], check=True)
                subprocess.run(["sync", *copies], check=True)

            taken = measure(act)
            shutil.rmtree(target)
            return taken

        ours, theirs = in_turn(job.pairs, ours_once, copied)
    yield speed("restore-dir", ours, theirs, job.size)


def from_s3(job: Job) -> Iterator[Row]:
    """What is in no cache any more, as files, against rclone's copy of the same objects."""
    rclone.needs_rclone()
    job.room(6 * job.size)
    with job.place() as place, object_store(place) as server:
        tier = s3_tier(server.endpoint, server.bucket)
        with gateway(place, tier, capacity=4 * job.size, environment=server.environment, held=False) as node:
            shards = shards_of(data(job.size))
            step = node.save(shards, "stream")
            node.client.wait(RUN, step, "object", timeout=TIMEOUT_S)
            prefix = _prefix_of(server, max(shards))

            def ours_once() -> Measured:
                node.client.care.evict(RUN, step)
                if _files_of(node.process.cache):
                    raise CannotRun("the cache still holds shards after their eviction")
                drop_caches()
                return _restored(node, step, place / "ours", shards)

            def fetched() -> Measured:
                drop_caches()
                taken = rclone.fetch(server, prefix, place / "theirs")
                shutil.rmtree(place / "theirs")
                return taken

            ours, theirs = in_turn(job.pairs, ours_once, fetched)
    yield speed("restore-s3", ours, theirs, job.size)


def _restored(node: Node, step: int, target: Path, shards: Mapping[str, memoryview]) -> Measured:
    """A restore into a new directory, compared and removed unmeasured."""
    taken = measure(lambda: node.client.restore_dir(RUN, step, target), node.pid)
    for name, view in shards.items():
        with (target / name).open("rb") as file:
            for at in range(0, view.nbytes, CHUNK):
                _compare(view[at : at + CHUNK], memoryview(file.read(CHUNK)))
    shutil.rmtree(target)
    return taken


def _prefix_of(server: SeaweedFS, name: str) -> str:
    """Where the tier has the directory of the one saved step."""
    client = server.client()
    try:
        keys = [entry["Key"] for entry in client.list_objects_v2(Bucket=server.bucket).get("Contents", ())]
    finally:
        client.close()
    found = [key for key in keys if key.endswith(f"/{name}")]
    if len(found) != 1:
        raise CannotRun(f"the tier has {len(found)} objects of one shard: this build's layout is another")
    return found[0].removesuffix(f"/{name}")


def _files_of(cache: Path) -> list[Path]:
    return [path for path in (cache / "data").rglob("*") if path.is_file() and not path.name.endswith(".json")]


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
