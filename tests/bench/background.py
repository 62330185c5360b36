"""Saving in the background: how long the trainer stands still.

Owns the rows async-*.
"""

import inspect
import shutil
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import numpy

import forebay
from bench.harness import BLOCK, RUN, TIMEOUT_S, Job, data, gateway, in_turn, measure, not_in_this_build
from bench.peers import dcp
from bench.rows import BY_NAME, CannotRun, Measured, Row, measured


def blocked(job: Job) -> Iterator[Row]:
    """From the first put to the end of the block, against one copy of the same bytes into memory that is there already."""
    if not hasattr(forebay.Client, "async_checkpoint"):
        raise CannotRun("async save is not in this build: Client has no async_checkpoint")
    job.room(3 * job.size)
    source, target = data(job.size), data(job.size)
    with job.place() as place, gateway(place, capacity=8 * job.size) as node, _client(node.process.address, job.size) as client:

        def ours(size: int = job.size) -> Measured:
            step = node.next_step()
            handles: list[Any] = []

            def act() -> None:
                with client.async_checkpoint(RUN, step) as checkpoint:
                    for at in range(0, size, BLOCK):
                        checkpoint.put(f"shard-{at // BLOCK}", source[at : at + BLOCK])
                    handles.append(checkpoint.commit())

            taken = measure(act)
            handles[0].result(TIMEOUT_S)  # the next one finds the whole pool free
            node.drop(step)
            return taken

        with not_in_this_build("async save"):
            ours()
        mine, theirs = in_turn(job.pairs, ours, lambda: _copy(source, target))
    yield _row("async-save", mine, theirs)


def blocked_by_dcp(job: Job) -> Iterator[Row]:
    """dcp.async_save through one ForebayStorageWriter, against DCP's own writer to the same disk, and one copy."""
    dcp.needs_torch()
    from forebay.torch import ForebayStorageWriter

    job.room(4 * job.size)
    source, target = data(job.size), data(job.size)
    tensors = dcp.tensors(source)
    with job.place() as place, gateway(place, capacity=8 * job.size) as node:
        writer = ForebayStorageWriter(address=node.process.address, thread_count=dcp.THREADS)

        def ours() -> Measured:
            step = node.next_step()
            taken = dcp.blocked(tensors, writer, f"forebay://{RUN}/{step}")
            node.drop(step)
            return taken

        def theirs() -> Measured:
            taken = dcp.blocked(tensors, dcp.file_writer(place / "dcp"))
            shutil.rmtree(place / "dcp")
            return taken

        ours()  # as every save but a job's first, the measured ones find warm memory
        mine, other, copies = in_turn(job.pairs, ours, theirs, lambda: _copy(source, target))
    yield _row("async-dcp", mine, other)
    yield _row("async-dcp-copy", mine, copies)


def _copy(source: memoryview, target: memoryview) -> Measured:
    pair = numpy.frombuffer(target, numpy.uint8), numpy.frombuffer(source, numpy.uint8)
    return measure(lambda: numpy.copyto(*pair))


def _row(name: str, ours: Sequence[Measured], theirs: Sequence[Measured]) -> Row:
    ratios = [each.seconds / other.seconds for each, other in zip(ours, theirs, strict=True)]
    medians = [statistics.median(each.seconds * 1e3 for each in side) for side in (ours, theirs)]
    detail = f"{medians[0]:.0f} against {medians[1]:.0f} ms; {len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}"
    samples = {"ratio": ratios, "ours_s": [each.seconds for each in ours], "theirs_s": [each.seconds for each in theirs]}
    return measured(BY_NAME[name], statistics.median(ratios), detail, samples)


def _client(address: str, size: int) -> forebay.Client:
    """With a pool that holds the whole checkpoint, as a trainer that must not wait would have it."""
    pool = {"background_bytes": size + 4 * BLOCK}
    known = inspect.signature(forebay.Client).parameters
    return forebay.Client(address, progress=False, **{key: value for key, value in pool.items() if key in known})
