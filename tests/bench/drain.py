"""The drain, verified on the tier, against other ways to bring the same files there; and saves while it runs.

Owns the rows drain-* and busy-*. A drain's clock runs from the release of the held queue to the manifest on the tier.
"""

import contextlib
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from bench.harness import BLOCK, RUN, TIMEOUT_S, Job, Node, data, drop_caches, gateway, in_turn, measure, shards_of, write_files
from bench.peers import multipart, rclone, s3torch
from bench.rows import BY_NAME, CannotRun, Measured, Row, cost, measured, speed
from forebay.demo.gateways import posix_tier, s3_tier
from forebay.demo.seaweedfs import SeaweedFS, weed_binary

BACKLOG_SHARE_MAX = 8  # of a save's size, so that the drain lasts longer than the save beside it
POLL_S = 0.02

Peer = Callable[[SeaweedFS, list[Path]], Measured]


def to_posix(job: Job) -> Iterator[Row]:
    """Against cp, fsync and cmp of the same files."""
    job.room(5 * job.size)
    with job.place() as place, gateway(place, capacity=4 * job.size) as node:
        shards = shards_of(data(job.size))
        paths = write_files(place / "files", shards)
        _drain_once(node, "pfs", {"warm": shards["shard-000"][:BLOCK]})
        ours, theirs = in_turn(job.pairs, lambda: _drain_once(node, "pfs", shards), lambda: _copy(paths, place / "copy"))
    yield speed("drain-posix", ours, theirs, job.size)
    yield cost("drain-posix-cpu", ours, theirs, job.size)


def to_s3(job: Job) -> Iterator[Row]:
    """Against rclone."""
    rclone.needs_rclone()
    ours, theirs = _against(job, rclone.copy)
    yield speed("drain-s3", ours, theirs, job.size)


def to_s3_cpu(job: Job) -> Iterator[Row]:
    """Against a bare multipart upload, which checks nothing."""
    ours, theirs = _against(job, multipart.upload)
    yield cost("drain-s3-cpu", ours, theirs, job.size)


def to_s3_torch(job: Job) -> Iterator[Row]:
    """Against a training loop that writes to the object store itself."""
    s3torch.needs_connector()
    ours, theirs = _against(job, s3torch.save)
    yield speed("drain-s3-torch", ours, theirs, job.size)


def _against(job: Job, peer: Peer) -> list[list[Measured]]:
    # What peers have written goes with their bucket; what the gateway has deleted stays in the server's files.
    job.room((job.pairs + 6) * job.size)
    with job.place() as place, object_store(place) as server:
        tier = s3_tier(server.endpoint, server.bucket)
        with gateway(place, tier, capacity=4 * job.size, environment=server.environment) as node:
            shards = shards_of(data(job.size))
            paths = write_files(place / "files", shards)
            (short,) = write_files(place / "short", {"warm": shards["shard-000"][:BLOCK]})
            _drain_once(node, "object", {"warm": shards["shard-000"][:BLOCK]})
            peer(server, [short])
            return in_turn(job.pairs, lambda: _drain_once(node, "object", shards), lambda: peer(server, paths))


@contextlib.contextmanager
def object_store(place: Path) -> Iterator[SeaweedFS]:
    """An S3 server with its files in `place`."""
    try:
        weed_binary()
    except FileNotFoundError as error:
        raise CannotRun(f"no S3 server: {error}") from error
    with SeaweedFS(place / "s3") as server:
        yield server


def _drain_once(node: Node, tier: str, shards: dict[str, memoryview]) -> Measured:
    """Save with the queue held, drop what is in memory, let it go."""
    step = node.save(shards, "stream")
    drop_caches(*(path for path in (node.process.cache / "data").rglob("*") if path.is_file()))

    def act() -> None:
        node.client.release()
        node.client.wait(RUN, step, tier, timeout=TIMEOUT_S)

    taken = measure(act, node.pid)
    node.client.hold()
    node.drop(step)
    return taken


def _copy(paths: list[Path], target: Path) -> Measured:
    """What a careful script does: copy, fsync, and compare with what the disk gives back. The drop between is not counted."""
    target.mkdir()
    drop_caches(*paths)
    cpu_s = _children_cpu_s()
    copies = [target / path.name for path in paths]
    pairs = [(str(path), str(copy)) for path, copy in zip(paths, copies, strict=True)]
    first = measure(lambda: [_run(*command) for pair in pairs for command in (("cp", *pair), ("sync", pair[1]))])
    drop_caches(*paths, *copies)
    second = measure(lambda: [_run("cmp", *pair) for pair in pairs])
    for copy in copies:
        copy.unlink()
    target.rmdir()
    return Measured(first.seconds + second.seconds, first.cpu_s + second.cpu_s + _children_cpu_s() - cpu_s)


def _children_cpu_s() -> float:
    """Of commands that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


def busy(job: Job, kind: str, lane: str) -> Iterator[Row]:
    """The same save alone and beside a drain that lasts longer than it."""
    job.room((3 if kind == "posix" else job.pairs + 3) * (BACKLOG_SHARE_MAX // 2) * job.size)
    with job.place() as place, contextlib.ExitStack() as stack:
        environment: dict[str, str] = {}
        (place / "pfs").mkdir()
        tier = posix_tier(place / "pfs")
        if kind == "s3":
            server = stack.enter_context(object_store(place))
            tier, environment = s3_tier(server.endpoint, server.bucket), server.environment
        node = stack.enter_context(gateway(place, tier, capacity=32 * job.size, environment=environment))
        node.needs_lane(lane)
        shards = shards_of(data(job.size))
        node.timed_save({"warm": shards["shard-000"][:BLOCK]}, lane)
        beside = _Beside(node, shards, lane)
        beside()
        ours, alone = in_turn(job.pairs, beside, partial(node.timed_save, shards, lane))
    ratios = [other.seconds / mine.seconds for mine, other in zip(ours, alone, strict=True)]
    rates = [statistics.median(job.size / 1e9 / each.seconds for each in side) for side in (ours, alone)]
    detail = (
        f"{rates[0]:.2f} against {rates[1]:.2f} GB/s, draining {statistics.median(beside.drained):.2f} GB/s meanwhile; "
        f"{len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}"
    )
    samples = {"ratio": ratios, "drained_gb_per_s": beside.drained}
    yield measured(BY_NAME[f"busy-{kind}-{lane}"], statistics.median(ratios), detail, samples)


class _Beside:
    """A save beside a drain. The backlog grows until it outlasts the save; a save that was alone for a part does not count."""

    def __init__(self, node: Node, shards: dict[str, memoryview], lane: str) -> None:
        self._node = node
        self._shards = shards
        self._lane = lane
        self._backlog = 1
        self.drained: list[float] = []

    def __call__(self) -> Measured:
        while True:
            taken, rate, lasted = self._once()
            if lasted:
                self.drained.append(rate)
                return taken
            if self._backlog >= BACKLOG_SHARE_MAX // 2:
                raise CannotRun(f"a backlog of {self._backlog} times the save was drained before the save's end")
            self._backlog *= 2

    def _once(self) -> tuple[Measured, float, bool]:
        node, client = self._node, self._node.client
        steps = [node.save(self._shards, "stream") for _ in range(self._backlog)]
        before = _waiting(node)
        os.sync()
        client.release()
        while _waiting(node) == before:  # until it really runs
            time.sleep(POLL_S)
        begun, saved = _waiting(node), []
        taken = measure(lambda: saved.append(node.save(self._shards, self._lane)), node.pid)
        left = _waiting(node) - sum(view.nbytes for view in self._shards.values())
        client.hold()
        for step in (*steps, *saved):
            node.drop(step)
        return taken, (begun - left) / 1e9 / taken.seconds, left > 0


def _waiting(node: Node) -> int:
    return sum(tier.pending_bytes for tier in node.client.status().tiers)


BUSY = {f"busy-{kind}-{lane}": partial(busy, kind=kind, lane=lane) for kind in ("s3", "posix") for lane in ("stream", "fd")}
