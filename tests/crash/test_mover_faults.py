"""The movers' calls fail: the cache cannot be read, the tier takes no bytes or says so only at fsync. Nothing counts as
VERIFIED that is not there bit-exact, and the drain ends once the fault has.

strace makes system calls of a real gateway's movers fail while they drain. FOREBAY_SOAK=1 tries every call with every error at
many places; without it a handful stand for them.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from crash.disks import DiskBench, Faults
from crash.kit import LARGE, MIDDLE, RUN, SMALL, content, until
from forebay import Client
from soak.figures import reported
from soak.form import SOAK

SIZES = {"large": LARGE, "middle": MIDDLE, "small": SMALL, "empty": 0}
READS = "pread64,preadv,preadv2"
# A mover writes and syncs nothing but what goes to the tier, under names that nobody knows ahead; what it reads back it reads
# after the cache's files.
FEW = (
    ("cache", READS, "EIO", "1"),
    ("tier", READS, "EIO", "3+"),
    ("tier", "pwrite64", "ENOSPC", "2+"),
    ("tier", "fsync", "EDQUOT", "1+"),
    ("tier", "rename", "EIO", "1"),
)
CALLS = {"cache": (READS, "openat"), "tier": (READS, "pwrite64", "ftruncate", "fsync", "rename")}
EVERY = tuple(
    (where, call, error, when)
    for where, calls in CALLS.items()
    for call in calls
    for error in ("EIO", "ENOSPC", "EDQUOT")
    for when in ("1", "2", "3", "5", "1+", "3+")
)
RUNS = EVERY if SOAK else FEW
WITHIN_S = 30.0


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[DiskBench]:
    with ExitStack() as stack:
        made = DiskBench(tmp_path, tmp_path, capacity="4GiB" if SOAK else "256MiB")
        stack.callback(made.gateway.close)
        made.gateway.start()
        yield made


@pytest.mark.timeout(90 + 20 * len(RUNS))
def test_a_drain_whose_calls_fail_ends_when_they_do_not(bench: DiskBench, tmp_path: Path) -> None:
    with reported("mover-faults", bench.figures, tried=0, faults=0) as figures, bench.client() as client:
        bench.save(client, 0, SIZES)
        client.wait(RUN, 0, "pfs", timeout=60)  # the movers run from here on
        for step, (where, call, error, when) in enumerate(RUNS, start=1):
            print(f"step {step}: {call} at the {where} fails with {error} at call {when}")
            client.hold("")
            bench.save(client, step, SIZES)
            paths = sorted((bench.cache / "data").rglob("*.shard")) if where == "cache" else []
            with Faults(mover_of(bench), call, error, when, paths, tmp_path) as faults:
                client.release("")
                until(lambda: faults.injected or (SOAK and verified(client, step)), f"{call} fails", WITHIN_S)  # noqa: B023
                check_verified(bench, client, step)
            figures["tried"] += 1
            figures["faults"] += faults.injected
            client.wait(RUN, step, "pfs", timeout=90)
            check_verified(bench, client, step, whole=True)
        bench.check_settled(set(range(len(RUNS) + 1)))


def mover_of(bench: DiskBench) -> int:
    """The process that drains to the tier, which is the only tier."""
    (mover,) = [
        each for each in psutil.Process(bench.gateway.pid).children() if "forebay_gateway.movers.worker" in each.cmdline()
    ]
    return mover.pid


def directory_of(bench: DiskBench, step: int) -> Path:
    """The session's on the tier; all steps are of one session, so it has the same name in each step."""
    (session,) = {
        path.name for path in (bench.pfs / RUN / "step-000000000000").iterdir() if path.is_dir() and not path.is_symlink()
    }
    return bench.pfs / RUN / f"step-{step:012d}" / session


def copies(client: Client, step: int) -> dict[str, str]:
    return {shard.name: shard.copies["pfs"] for shard in client.describe(RUN, step).shards}


def verified(client: Client, step: int) -> bool:
    return set(copies(client, step).values()) == {"verified"}


def check_verified(bench: DiskBench, client: Client, step: int, whole: bool = False) -> None:
    """Every copy that counts is on the tier, bit-exact."""
    found = copies(client, step)
    for name, state in found.items():
        if state == "verified":
            assert (directory_of(bench, step) / name).read_bytes() == content((step, name), SIZES[name]), (step, name)
    assert not whole or set(found.values()) == {"verified"}
