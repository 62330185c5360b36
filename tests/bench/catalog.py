"""A catalog of a million shards: how long the operator's questions take, a start, and how much memory it costs.

Owns the rows catalog-*. The shards are saved for real, through the client, with the drain held: every one of them is in the
cache and waits for its tier, which is the most that a catalog has to know of it.
"""

import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from bench.harness import RUN, Job, drop_caches, gateway
from bench.rows import BY_NAME, Row, measured

SHARDS_A_STEP = 1000
SIZE = 256
ASKED = 20
STARTS = 3
FILE_BYTES_MAX = 13 << 10  # what a small shard can cost on the disk where it has a file of its own, its inode included


def at_scale(job: Job) -> Iterator[Row]:
    """Fill, start anew, ask."""
    steps = max(1, job.catalog_shards // SHARDS_A_STEP)
    job.room(job.catalog_shards * FILE_BYTES_MAX)
    with job.place() as place, gateway(place, capacity=max(1 << 30, 2 * job.catalog_shards * FILE_BYTES_MAX)) as node:
        began_s = time.perf_counter()
        content = os.urandom(SIZE)
        for _ in range(steps):
            with node.client.checkpoint(RUN, node.next_step()) as checkpoint:
                checkpoint.put_many({f"opt/{number:06d}": content for number in range(SHARDS_A_STEP)})
                checkpoint.commit(wait="cache")
        filled_s = time.perf_counter() - began_s
        starts = []
        for _ in range(min(STARTS, job.pairs)):
            node.process.terminate(600)
            how = drop_caches(*(node.process.cache / "catalog").iterdir())
            began_s = time.perf_counter()
            node.process.start(ready=False)
            node.process.wait_ready(600)
            starts.append(time.perf_counter() - began_s)
        asked = random.Random(1).sample(range(1, steps + 1), min(ASKED, steps))
        node.client.status()
        statuses = [_ms(node.client.status) for _ in range(ASKED)]
        listings = [_ms(lambda step=step: node.client.describe(RUN, step)) for step in asked]
        memory = psutil.Process(node.pid).memory_info()
        held = _size(node.process.cache / "catalog") / 2**20
    count = f"{steps * SHARDS_A_STEP:,} shards in {steps:,} checkpoints"
    for name, values in (("catalog-status", statuses), ("catalog-ls", listings), ("catalog-start", starts)):
        detail = f"median of {len(values)}, {min(values):.3g} to {max(values):.3g}"
        if name == "catalog-start":
            detail += f"; after an orderly end, {how}"
        yield measured(BY_NAME[name], statistics.median(values), detail, {"values": values}, count)
    anonymous, mapped = (memory.rss - memory.shared) / 2**20, memory.shared / 2**20
    detail = (
        f"{anonymous:.0f} its own, {mapped:.0f} of mapped files; the catalog has {held:.0f} MiB; filled in {filled_s:.0f} s"
    )
    yield measured(BY_NAME["catalog-rss"], memory.rss / 2**20, detail, note=count)


def _ms(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - began_s)


def _size(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
