"""How cost grows: with the number of clients at once, and with a shard's size.

Owns the rows scaling-*. Clients are processes, as ranks are. No goal but one: nothing grows worse than linearly.
"""

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import psutil

import forebay
from bench.harness import BLOCK, RUN, TIMEOUT_S, Job, Node, Watched, data, gateway, measure, tree_cpu_s
from bench.rows import CannotRun, Measured, Row, Spec, at_most, measured, not_run

CLIENTS = (1, 4, 16)
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB, GIB, 8 * GIB)
SMALL_MAX = 1 * MIB  # up to here shards travel together
COUNT_MAX = 4000
GROWTH_MAX = 1.25  # noise of a shared machine included; linear is 1


def clients(job: Job, lane: str) -> Iterator[Row]:
    """The same bytes from 1, 4 and 16 processes, writers of one checkpoint."""
    job.room(3 * job.size)
    costs = []
    with job.place() as place, gateway(place, capacity=8 * job.size) as node:
        node.needs_lane(lane)
        for count in CLIENTS:
            share = job.size // count
            with Writers(node, lane, count, share) as writers, Watched(node.pid) as watched:
                writers.save()  # warm-up
                taken = [writers.save() for _ in range(job.pairs)]
            size = share * count
            costs.append(statistics.median(each.cpu_s for each in taken) / (size / 1e9))
            yield _row(
                f"scaling-clients-{lane}-{count}", f"{lane} save, {_count(count, 'client')} at once", taken, size, watched
            )
    yield _growth(
        f"scaling-clients-{lane}-growth", f"{lane}: CPU a GB, {CLIENTS[-1]} clients", "1 client", costs[-1] / costs[0]
    )


def sizes(job: Job, lane: str) -> Iterator[Row]:
    """One client; small shards by put_many, larger ones by put one after the other."""
    big: list[float] = []
    for size in SIZES:
        name, what = f"scaling-sizes-{lane}-{_text(size)}", f"{lane} save, shards of {_text(size)}"
        if size > job.largest:
            yield not_run(Spec(name, what, "", None, "GB/s"), f"larger than asked for ({_text(job.largest)}); --largest-gib")
        elif size <= SMALL_MAX and lane == "fd":
            continue  # small shards travel by stream on either lane
        elif psutil.virtual_memory().available < size + 2 * GIB:
            yield not_run(Spec(name, what, "", None, "GB/s"), f"needs {_text(size)} of memory and 2 GiB to spare")
        else:
            taken, total, watched = _one_size(job, lane, size)
            if size >= 16 * MIB:
                big.append(statistics.median(each.cpu_s for each in taken) / (total / 1e9))
            yield _row(name, what, taken, total, watched)
    if len(big) > 1:
        yield _growth(f"scaling-sizes-{lane}-growth", f"{lane}: CPU a GB, largest shard", "a shard of 16 MiB", big[-1] / big[0])


def _one_size(job: Job, lane: str, size: int) -> tuple[list[Measured], int, Watched]:
    count = max(1, min(COUNT_MAX, job.size // size))
    job.room(3 * max(size * count, 13 * KIB * count))
    with job.place() as place, gateway(place, capacity=4 * GIB + 8 * size * count) as node:
        node.needs_lane(lane)
        view = data(size)
        shards = {f"shard-{number}": view for number in range(count)}

        def act() -> Measured:
            if size > SMALL_MAX:
                return node.timed_save(shards, lane)
            step = node.next_step()
            taken = measure(partial(_put_many, node.client, step, shards), node.pid)
            node.drop(step)
            return taken

        with Watched(node.pid) as watched:
            act()
            return [act() for _ in range(job.pairs if size <= GIB else min(3, job.pairs))], size * count, watched


def _put_many(client: forebay.Client, step: int, shards: dict[str, memoryview]) -> None:
    with client.checkpoint(RUN, step) as checkpoint:
        checkpoint.put_many(shards)
        checkpoint.commit(wait="cache")


class Writers:
    """Processes that save their parts of one checkpoint at once, each time they are told to."""

    def __init__(self, node: Node, lane: str, count: int, share: int) -> None:
        self._node = node
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(count)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_write, args=(theirs, node.process.address, lane, number, count, share), daemon=True)
            for number, (_, theirs) in enumerate(pipes)
        ]
        self._theirs = [theirs for _, theirs in pipes]

    def __enter__(self) -> "Writers":
        for process, theirs in zip(self._processes, self._theirs, strict=True):
            process.start()
            theirs.close()
        self._answers()
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()  # the end of its work
        for process in self._processes:
            process.join(30)
            if process.is_alive():
                process.kill()
                process.join()

    @property
    def pids(self) -> list[int]:
        """Of the processes, in writers' order."""
        return [process.pid or 0 for process in self._processes]

    def save(self) -> Measured:
        """From the first one's start to the last one's acknowledgement; CPU of all of them and the gateway."""
        step = self._node.next_step()
        cpu_s, began_s = tree_cpu_s(self._node.pid), time.perf_counter()
        for pipe in self._pipes:
            pipe.send(step)
        theirs_s = self._answers()
        seconds = time.perf_counter() - began_s
        cpu_s = tree_cpu_s(self._node.pid) - cpu_s + theirs_s
        self._node.drop(step)
        return Measured(seconds, cpu_s)

    def _answers(self) -> float:
        total = 0.0
        for pipe in self._pipes:
            answer = pipe.recv()
            if isinstance(answer, str):
                raise CannotRun(f"a client failed: {answer}")
            total += answer
        return total


def _write(pipe: Any, address: str, lane: str, writer: int, writers: int, share: int) -> None:
    view = data(share)
    parts = {f"{writer}/{at // BLOCK}": view[at : at + BLOCK] for at in range(0, share, BLOCK)}
    with forebay.Client(address, admit_timeout=TIMEOUT_S, progress=False) as client:
        client.pressure()
        pipe.send(0.0)
        while True:
            try:
                step = pipe.recv()
            except EOFError:
                return
            cpu_s = time.process_time()
            try:
                with client.checkpoint(RUN, step, writers, writer, "scaling", lane=lane) as checkpoint:
                    for name, part in parts.items():
                        checkpoint.put(name, part)
                    checkpoint.commit(wait="cache")
                pipe.send(time.process_time() - cpu_s)
            except Exception as error:
                pipe.send(repr(error))


def _row(name: str, what: str, taken: list[Measured], size: int, watched: Watched) -> Row:
    rates = [size / 1e9 / each.seconds for each in taken]
    cpu = statistics.median(each.cpu_s for each in taken) / (size / 1e9)
    spread = f"{len(rates)} times, {min(rates):.2f} to {max(rates):.2f}"
    detail = f"{cpu:.2f} CPU-s a GB; gateway RSS {watched.peak / 2**20:.0f} MiB; {spread}"
    samples = {
        "gb_per_s": rates,
        "cpu_s_per_gb": [each.cpu_s / (size / 1e9) for each in taken],
        "rss_peak": [float(watched.peak)],
    }
    return measured(Spec(name, what, "", None, "GB/s"), statistics.median(rates), detail, samples)


def _growth(name: str, what: str, against: str, ratio: float) -> Row:
    return measured(Spec(name, what, against, at_most(GROWTH_MAX)), ratio, "no worse than linear, noise allowed for")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _text(size: int) -> str:
    unit, name = next((unit, name) for unit, name in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if size >= unit)
    return f"{size // unit}{name}"
