"""Many small shards, durable; and back again.

Owns the rows small-shards and small-restore.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench.harness import RUN, Job, drop_caches, gateway, in_turn, measure
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
    yield _row("small-shards", job, mine, theirs)


def read_many(job: Job) -> Iterator[Row]:
    """All of them into memory, from the disk, every checksum compared, against plain files of the same bytes read there."""
    job.room(4 * job.shards * SIZE)
    block = os.urandom(SIZE * job.shards)
    shards = {f"opt/{number:06d}": block[number * SIZE : (number + 1) * SIZE] for number in range(job.shards)}
    with job.place() as place, gateway(place, capacity=64 * job.shards * SIZE) as node:
        step = node.next_step()
        with node.client.checkpoint(RUN, step) as checkpoint:
            checkpoint.put_many(shards)
            checkpoint.commit(wait="cache")
        files = {name: place / "files" / name for name in shards}
        (place / "files/opt").mkdir(parents=True)
        for name, content in shards.items():
            files[name].write_bytes(content)
        packs = [path for path in (node.process.cache / "data").rglob("*") if path.is_file()]
        found: dict[str, bytes] = {}

        def ours() -> Measured:
            how.append(drop_caches(*packs))
            found.clear()
            return measure(lambda: found.update(node.client.open(RUN, step, source="cache").read_many()), node.pid)

        def theirs() -> Measured:
            drop_caches(*files.values())
            return measure(lambda: sum(len(path.read_bytes()) for path in files.values()))

        how: list[str] = []
        ours()
        mine, others = in_turn(job.pairs, ours, theirs)
        if found != shards:
            raise AssertionError("restored bytes differ")
    yield _row("small-restore", job, mine, others, how[0])


def _row(name: str, job: Job, mine: Sequence[Measured], theirs: Sequence[Measured], how: str = "") -> Row:
    ratios = [other.seconds / each.seconds for each, other in zip(mine, theirs, strict=True)]
    rates = [sorted(job.shards / each.seconds for each in side)[job.pairs // 2] for side in (mine, theirs)]
    notes = [how, "" if job.shards == 10_000 else f"only {job.shards:,}"]
    detail = f"{rates[0]:,.0f} against {rates[1]:,.0f} a second; {job.pairs} pairs, {min(ratios):.2f} to {max(ratios):.2f}"
    samples = {"ratio": ratios, "ours_s": [each.seconds for each in mine], "theirs_s": [each.seconds for each in theirs]}
    return measured(BY_NAME[name], sorted(ratios)[job.pairs // 2], detail, samples, ", ".join(filter(None, notes)))


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
