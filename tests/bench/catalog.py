"""A catalog of a million shards: how long the operator's questions take, a start, and how much memory it costs.

Owns the rows catalog-*, twice. First the shards are saved for real, through the client, with the drain held: every one of them
is in the cache and waits for its tier. Then, as on a node that has run for long, each has been verified on its tier and
evicted; catalog_scale.py makes that one by the gateway's own acts on the catalog, since the bytes would be a terabyte.
"""

import os
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import psutil

from bench.harness import RUN, Job, drop_caches, gateway
from bench.rows import BY_NAME, CannotRun, Row, measured

SHARDS_A_STEP = 1000
SHARDS_GOAL = 1_000_000  # for which the goals are meant
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
            subprocess.run(
                [sys.executable, "-c", "import forebay_gateway.serve"], check=True
            )  # Python's own files are not meant
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
    count = _count(steps * SHARDS_A_STEP, steps)
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


def evicted(job: Job) -> Iterator[Row]:
    """Large shards, verified on a tier and evicted: rows of their own, whatever becomes of small ones."""
    try:
        scale = import_module("bench.catalog_scale")
    except ModuleNotFoundError as error:
        raise CannotRun(f"{error.name} is not in this build") from error
    steps = max(1, job.catalog_shards // SHARDS_A_STEP)
    job.room(job.catalog_shards << 10)
    with job.place() as place:
        found = scale.measure(place, steps, SHARDS_A_STEP)
    count = _count(found["shards"], found["checkpoints"])
    values = {"status": found["status_ms"], "ls": found["ls_step_ms"], "start": found["start_s"], "rss": found["after_rss_mib"]}
    details = {
        "start": f"after an orderly end; {found['start_after_kill_s']} s after a kill",
        "rss": f"{found['after_rss_anon_mib']} its own, {found['after_rss_file_mib']} of mapped files; "
        f"the catalog has {found['catalog_mib']} MiB",
    }
    for name, value in values.items():
        yield measured(BY_NAME[f"catalog-evicted-{name}"], value, details.get(name, "median"), note=count)


def _count(shards: int, checkpoints: int) -> str:
    return f"{'' if shards >= SHARDS_GOAL else 'ONLY '}{shards:,} shards in {checkpoints:,} checkpoints"


def _ms(act: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    act()
    return 1e3 * (time.perf_counter() - began_s)


def _size(directory: Path) -> int:
    return sum(path.stat().st_blocks * 512 for path in directory.rglob("*") if path.is_file())
