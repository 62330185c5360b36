"""The disk loses power under load: what was acknowledged is on it, what was not leaves nothing that a reader can see.

A file system in a file is shut down without a flush of its log, as a power cut would leave it; SIGKILL alone cannot show a sync
that is missing. Saves, commits, drains, evictions and deletions go on all the while; the record of what was acknowledged is
kept by the trainers, which outlive the gateway. A tenth of FOREBAY_CRASH_ROUNDS, at least 2, says how often the
power goes, FOREBAY_CRASH_SEED repeats a run's choices.
"""

import random
import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pytest

from crash.disks import MIB, DiskBench, LoopDisk, NoSync, run
from crash.kit import LARGE, MIDDLE, RUN, SMALL
from crash.load import Load
from forebay import Corrupt, ForebayError, Incomplete
from soak.figures import reported
from soak.form import given, some

ROUNDS = max(2, int(given("FOREBAY_CRASH_ROUNDS", "0")) // 10)  # of each variant; a round takes long
DISK_BYTES = 320 * MIB  # the least that xfs takes
VARIANTS = {
    "ext4-tier-elsewhere": ("ext4", False, "auto"),
    "ext4-tier-on-the-same-disk-buffered": ("ext4", True, "off"),
    "xfs-tier-on-the-same-disk": ("xfs", True, "auto"),
    "xfs-tier-elsewhere-buffered": ("xfs", False, "off"),
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def bench_on(stack: ExitStack, directory: Path, disk: LoopDisk, same_disk: bool, direct_io: str, soft: float) -> DiskBench:
    stack.callback(disk.close)
    tier = disk.path / "pfs" if same_disk else None
    bench = DiskBench(directory, disk.path, tier=tier, cache_keys=f'soft = {soft}\ndirect_io = "{direct_io}"')
    stack.callback(bench.gateway.close)
    return bench


def cut_power(bench: DiskBench, disk: LoopDisk, rng: random.Random) -> None:
    """The gateway goes on for a moment on a dead disk: nothing that it says then may be an acknowledgement."""
    disk.lose_power()
    time.sleep(rng.uniform(0.0, 0.3))
    bench.kill()
    disk.unmount()
    disk.mount_anew()


def check_promises(bench: DiskBench) -> None:
    """Every shard of every promised checkpoint, every byte."""
    bench.check_visible()
    with bench.client() as client:
        for step in sorted(bench.log.promised):
            try:
                bench.compare(client, step)
            except ForebayError:
                if step not in bench.log.deleting:
                    raise


@pytest.mark.timeout(120 + 40 * ROUNDS)
@pytest.mark.parametrize("variant", some([*VARIANTS], "ext4-tier-on-the-same-disk-buffered"))
def test_power_loss_under_load(tmp_path: Path, stack: ExitStack, variant: str) -> None:
    seed = int(given("FOREBAY_CRASH_SEED", str(random.SystemRandom().randrange(1 << 32))))
    print(f"FOREBAY_CRASH_SEED={seed} rounds={ROUNDS}")
    rng = random.Random(seed)
    kind, same_disk, direct_io = VARIANTS[variant]
    disk = LoopDisk(tmp_path, kind, DISK_BYTES)
    bench = bench_on(stack, tmp_path, disk, same_disk, direct_io, soft=0.2)
    bench.gateway.start()
    load = Load(bench, rng)
    with reported(f"power-loss-{variant}", bench.figures, seed=seed, crash_rounds=0) as figures:
        for _ in range(ROUNDS):
            time.sleep(rng.uniform(0.2, 3.0))
            cut_power(bench, disk, rng)
            load.check_alive()
            bench.gateway.start()
            check_promises(bench)
            figures["crash_rounds"] += 1
        bench.check_settled(load.finish())


DROPPED = {
    "no sync at all": (("files", "directories", "catalog"), "auto"),
    "no sync of files": (("files",), "off"),
    "no sync of directories": (("directories",), "auto"),
    "every sync": ((), "off"),
}


@pytest.mark.parametrize("dropped", some([*DROPPED], "no sync of files", "no sync of directories", "every sync"))
def test_without_syncs_the_loss_is_seen(tmp_path: Path, stack: ExitStack, dropped: str) -> None:
    """The test above can fail: a gateway whose syncs do nothing loses what it acknowledged. With every sync the same steps
    lose nothing, so it is the syncs."""
    what, direct_io = DROPPED[dropped]
    disk = LoopDisk(tmp_path, "ext4", DISK_BYTES)
    bench = bench_on(stack, tmp_path, disk, False, direct_io, soft=0.5)
    bench.gateway.environment = NoSync(tmp_path).environment(*what)
    bench.gateway.start()
    with bench.client() as client:
        for step in range(1, 8):  # later the catalog only writes to blocks that it has, which commits no journal
            bench.save(client, step, {"middle": MIDDLE, "small": SMALL})
            client.wait(RUN, step, "pfs", timeout=60)
        client.hold()  # else a copy on the tier, which keeps its power, would make good for a loss
        part = client.checkpoint(RUN, 8, session="job-1")
        bench.put(part, "early", MIDDLE)
        run("sync", "-f", str(disk.path))
        bench.put(part, "late", LARGE)
        cut_power(bench, disk, random.Random(0))
        bench.gateway.environment = {}
        bench.gateway.start()
        with pytest.raises((Incomplete, Corrupt)) if what else nullcontext():
            bench.commit(part)  # the job goes on where it was
            bench.compare(client, 8)
