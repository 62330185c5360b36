"""Many small shards, durable.

Owns the row small-shards.
"""

import os
from collections.abc import Iterator
from pathlib import Path

from bench.harness import RUN, Job, gateway, in_turn, measure
from bench.rows import BY_NAME, Measured, Row, measured

SIZE = 4096


def put_many(job: Job) -> Iterator[Row]:
    """put_many and commit against a file each, created, written and fsynced."""
    job.room(4 * job.shards * SIZE)
    block = os.urandom(SIZE * job.shards)
    shards = {f"opt/{number:06d}": block[number * SIZE : (number + 1) * SIZE] for number in range(job.shards)}
    with job.place() as place, gateway(place, capacity=64 * job.shards * SIZE) as node:

        def ours(count: int = job.shards) -> Measured:
            step = node.next_step()

            def act() -> None:
                with node.client.checkpoint(RUN, step) as checkpoint:
                    checkpoint.put_many(dict(list(shards.items())[:count]))
                    checkpoint.commit(wait="cache")

            taken = measure(act, node.pid)
            node.drop(step)
            return taken

        ours(max(1, job.shards // 20))
        mine, theirs = in_turn(job.pairs, ours, lambda: _files(place / "files", shards))
    ratios = [other.seconds / each.seconds for each, other in zip(mine, theirs, strict=True)]
    rates = [sorted(job.shards / each.seconds for each in side)[job.pairs // 2] for side in (mine, theirs)]
    spec = BY_NAME["small-shards"]
    note = "" if job.shards == 10_000 else f"only {job.shards:,}"
    detail = f"{rates[0]:,.0f} against {rates[1]:,.0f} a second; {job.pairs} pairs, {min(ratios):.2f} to {max(ratios):.2f}"
    samples = {"ratio": ratios, "ours_s": [each.seconds for each in mine], "theirs_s": [each.seconds for each in theirs]}
    yield measured(spec, sorted(ratios)[job.pairs // 2], detail, samples, note)


def _files(directory: Path, shards: dict[str, bytes]) -> Measured:
    def act() -> None:
        for name, content in shards.items():
            descriptor = os.open(directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.write(descriptor, content)
            os.fsync(descriptor)
            os.close(descriptor)

    (directory / "opt").mkdir(parents=True)
    taken = measure(act)
    for name in shards:
        (directory / name).unlink()
    (directory / "opt").rmdir()
    directory.rmdir()
    return taken
