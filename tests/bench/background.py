"""Saving in the background: how long the trainer stands still.

Owns the row async-save.
"""

import inspect
import statistics
from collections.abc import Iterator
from typing import Any

import numpy

import forebay
from bench.harness import BLOCK, RUN, TIMEOUT_S, Job, data, gateway, in_turn, measure, not_in_this_build
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

        copied = numpy.frombuffer(source, numpy.uint8), numpy.frombuffer(target, numpy.uint8)
        with not_in_this_build("async save"):
            ours()
        mine, theirs = in_turn(job.pairs, ours, lambda: measure(lambda: numpy.copyto(copied[1], copied[0])))
    ratios = [each.seconds / other.seconds for each, other in zip(mine, theirs, strict=True)]
    medians = [statistics.median(each.seconds * 1e3 for each in side) for side in (mine, theirs)]
    detail = f"{medians[0]:.0f} against {medians[1]:.0f} ms; {len(ratios)} pairs, {min(ratios):.2f} to {max(ratios):.2f}"
    samples = {"ratio": ratios, "ours_s": [each.seconds for each in mine], "theirs_s": [each.seconds for each in theirs]}
    yield measured(BY_NAME["async-save"], statistics.median(ratios), detail, samples)


def _client(address: str, size: int) -> forebay.Client:
    """With a pool that holds the whole checkpoint, as a trainer that must not wait would have it."""
    pool = {"background_bytes": size + 4 * BLOCK}
    known = inspect.signature(forebay.Client).parameters
    return forebay.Client(address, progress=False, **{key: value for key, value in pool.items() if key in known})
