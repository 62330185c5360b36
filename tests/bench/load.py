"""A gateway under load for long: its memory while many times the cache's size passes through, and how late its loop runs.

Owns the rows memory-* and loop-lag.
"""

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator

import psutil

import forebay
from bench.harness import BLOCK, RUN, TIMEOUT_S, Job, Node, Watched, data, gateway
from bench.rows import BY_NAME, CannotRun, Row, measured

STEP_BYTES = 1 << 30
WINDOW_S = 60.0  # the gateway's own p99 is that of its last minute
WRITERS = 4
SMALL = 500

Act = Callable[[forebay.Client, str, int, bytes], None]


def memory(job: Job) -> Iterator[Row]:
    """Saved, drained and deleted on the way: the tier's room is not this row's subject."""
    step_bytes = min(STEP_BYTES, max(BLOCK, job.through // 8 // BLOCK * BLOCK))
    count = max(8, job.through // step_bytes)
    job.room(12 * step_bytes)
    with job.place() as place, gateway(place, capacity=6 * step_bytes, held=False) as node:
        view = data(step_bytes)
        drained: list[int] = []
        with Watched(node.pid) as watched:
            began_s = time.perf_counter()
            marks = []
            for _ in range(count):
                drained.append(node.save({"shard": view}, "auto"))
                if len(drained) > 2:
                    old = drained.pop(0)
                    node.client.wait(RUN, old, "pfs", timeout=TIMEOUT_S)
                    node.drop(old)
                marks.append(len(watched.rss))
            seconds = time.perf_counter() - began_s
        second, last = (
            watched.rss[marks[low] : marks[high]] for low, high in ((count // 4, count // 2), (-(count // 4) - 1, -1))
        )
    gib = count * step_bytes / 2**30
    detail = f"{watched.start / 2**20:.0f} MiB at start; {gib * 2**30 / seconds / 1e9:.2f} GB/s saved and drained"
    yield measured(BY_NAME["memory-peak"], watched.peak / 2**20, detail, note=f"{gib:.0f} GiB through it")
    growth = statistics.median(last) / statistics.median(second)
    detail = f"medians {statistics.median(last) / 2**20:.0f} and {statistics.median(second) / 2**20:.0f} MiB"
    yield measured(BY_NAME["memory-growth"], growth, detail)


def loop_lag(job: Job) -> Iterator[Row]:
    """Large saves, small ones, restores and the drain at once; what the gateway says of its own loop meanwhile."""
    job.room(16 * BLOCK * WRITERS)
    with job.place() as place, gateway(place, capacity=64 * BLOCK * WRITERS, held=False) as node:
        over = threading.Event()
        failures: list[BaseException] = []
        acts = [*(_large for _ in range(WRITERS)), _small]
        threads = [
            threading.Thread(target=_repeat, args=(act, node, number, over, failures)) for number, act in enumerate(acts)
        ]
        for thread in threads:
            thread.start()
        seen = []
        try:
            deadline_s = time.monotonic() + job.load_s
            while time.monotonic() < deadline_s and not failures:
                time.sleep(1)
                seen.append(node.client.status().loop_lag_p99_s * 1e3)
            busy = psutil.Process(node.pid).cpu_times()
        finally:
            over.set()
            for thread in threads:
                thread.join()
        if failures:
            raise CannotRun(f"the load ended: {failures[0]}") from failures[0]
    cpu = 100 * (busy.user + busy.system) / job.load_s
    span = f"the window of {WINDOW_S:.0f} s is all load" if job.load_s > WINDOW_S else f"only {job.load_s:.0f} s of load"
    detail = f"highest seen {max(seen):.1f}; {WRITERS} writers, small shards, restores, drain; front at {cpu:.0f} % CPU; {span}"
    yield measured(BY_NAME["loop-lag"], seen[-1], detail, {"seen_ms": seen})


def _repeat(act: Act, node: Node, number: int, over: threading.Event, failures: list[BaseException]) -> None:
    step = 0
    try:
        with forebay.Client(node.process.address, admit_timeout=TIMEOUT_S, progress=False) as client:
            content = os.urandom(BLOCK)
            while not over.is_set():
                step += 1
                act(client, f"{RUN}/{number}", step, content)
    except BaseException as error:
        failures.append(error)


def _large(client: forebay.Client, run: str, step: int, content: bytes) -> None:
    with client.checkpoint(run, step, lane="stream") as checkpoint:
        checkpoint.put("shard", content)
        checkpoint.commit(wait="cache")
    client.open(run, step).read("shard")
    client.wait(run, step, "pfs", timeout=TIMEOUT_S)
    client.delete(run, step, force=True)


def _small(client: forebay.Client, run: str, step: int, content: bytes) -> None:
    with client.checkpoint(run, step) as checkpoint:
        checkpoint.put_many({f"small/{number}": content[number : number + 4096] for number in range(SMALL)})
        checkpoint.commit(wait="cache")
    client.delete(run, step, force=True)
