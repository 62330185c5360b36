"""The cache's disk fails call by call: every answer is an honest acknowledgement or a typed error that leaves nothing behind.

strace makes system calls of a real gateway fail while a client saves, commits, drains and the cache evicts. FOREBAY_SOAK=1
tries every call with every error at many places; without it about a dozen combinations stand for them.
"""

import contextlib
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from crash.disks import DiskBench, Faults
from crash.kit import LARGE, MIDDLE, RUN, SMALL, TEMP, until
from forebay import AlreadyExists, CacheFull, CheckpointWriter, Client, ForebayError, Unavailable, Unsupported
from soak.figures import reported
from soak.form import SOAK

SIZES = {"large": LARGE, "middle": MIDDLE, "empty": 0}
MANY = {"more": SMALL, "tiny": 1}
AHEAD = 40  # ids and commit numbers that a run may come to use
SHOWN_WITHIN_S = 5.0
NAMED = ("shards", "leases")  # faults at files whose names are known ahead

ERRORS = ("EIO", "ENOSPC", "EDQUOT")
PLACES = ("1", "2", "3", "5", "1+", "3+")  # each thread counts its own calls
FEW = {
    "shards": (
        ("pwrite64", "EIO", "2"),
        ("pwrite64", "ENOSPC", "1+"),
        ("write", "EIO", "1"),
        ("write", "EDQUOT", "1+"),
        ("fsync", "EIO", "1"),
        ("fsync", "ENOSPC", "1+"),
        ("fallocate", "EDQUOT", "1+"),
        ("rename", "EIO", "1"),
        ("unlink", "EIO", "1+"),
    ),
    # The gateway's own calls about files that a client writes; fcntl proves that nobody writes any more.
    "leases": (
        ("pwrite64", "EIO", "1"),
        ("fsync", "ENOSPC", "1+"),
        ("fallocate", "ENOSPC", "1+"),
        ("fcntl", "EIO", "1"),
        ("rename", "EIO", "1+"),
    ),
    "directories": (("fsync", "EIO", "1"), ("fsync", "EIO", "1+")),
    "catalog": (("pwrite64,pwritev", "EIO", "1"), ("fdatasync", "ENOSPC", "2")),
}
EVERY = {
    (where, call): tuple((call, error, place) for error in ERRORS for place in PLACES)
    for where, runs in FEW.items()
    for call in dict.fromkeys(call for call, _, _ in runs)
}
# One gateway for each group, as long as it lives.
GROUPS = (
    {f"{where}-{call}": (where, runs) for (where, call), runs in EVERY.items()}
    if SOAK
    else {where: (where, runs[:: 1 if len(runs) < 4 else 2]) for where, runs in FEW.items()}
)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@dataclass
class Tally:
    """What the runs of one test came to."""

    runs: int = 0
    faults: int = 0
    refused: int = 0
    ended: int = 0

    def figures(self) -> dict[str, int]:
        return {"tried": self.runs, "faults": self.faults, "refused": self.refused, "gateways_ended": self.ended}


@pytest.mark.timeout(60 + 30 * 18)
@pytest.mark.parametrize("group", GROUPS)
def test_a_failing_call_is_told_and_loses_nothing(tmp_path: Path, stack: ExitStack, group: str) -> None:
    where, runs = GROUPS[group]
    bench = DiskBench(tmp_path, tmp_path, cache_keys="soft = 0.01")
    stack.callback(bench.gateway.close)
    bench.gateway.start()
    tally = Tally()
    with reported(f"disk-faults-{group.replace(',', '-')}", lambda: {**tally.figures(), **bench.figures()}):
        for step, (call, error, place) in enumerate(runs, start=1):
            print(f"step {step}: {call} at {where} fails with {error} at call {place}")
            before = tally.faults
            run_once(bench, tmp_path, step, where, call, error, place, tally)
            assert tally.faults > before or SOAK, f"{call} was never made"
        steps = set(range(1, tally.runs + 1))
        bench.check_settled(steps)
        bench.gateway.start()
        with bench.client() as client:
            for step in steps:
                bench.compare(client, step)


def ends_soon(bench: DiskBench) -> bool:
    """Whether the gateway is about to end: the fault may have struck just as the tracer let go, uncounted."""
    assert bench.gateway.process is not None
    try:
        bench.gateway.process.wait(1.0)
    except subprocess.TimeoutExpired:
        return False
    return True


def run_once(bench: DiskBench, directory: Path, step: int, where: str, call: str, error: str, place: str, tally: Tally) -> None:
    """A save while `call` fails, then what is left of it, then the same save again."""
    tally.runs += 1
    with bench.client(retry_s=0.0, admit_s=0.0) as client:
        # After many faults shards go past the cache, until it is seen to work again.
        until(lambda: not client.pressure().through, "the disk is tried again", 60.0)
        part = client.checkpoint(RUN, step, session="job-1", lane="fd" if where == "leases" else "stream")
        if where in NAMED:
            bench.put(part, "first", SMALL)  # the session's directory is there, and its number known
        with Faults(bench.gateway.pid, call, error, place, paths_of(bench, where), directory) as faults:
            errors = save_as_far_as_it_goes(bench, client, part)
            tally.refused += len(errors)
            if where != "catalog" and error in ("ENOSPC", "EDQUOT") and any(isinstance(each, CacheFull) for each in errors):
                until(lambda: client.status().pressure.level == "refusing", "the full disk shows", SHOWN_WITHIN_S)
        tally.faults += faults.injected
        faults.check_no_second_fsync()
        if where == "catalog" and (faults.injected or ends_soon(bench)):
            assert bench.gateway.wait_exit() == 1
            assert "the catalog failed" in bench.gateway.tail()
            tally.ended += 1
            bench.gateway.start()
        assert bench.gateway.process is not None and bench.gateway.process.poll() is None, bench.gateway.tail()
        assert "internal error" not in " ".join(map(str, errors))
        if errors and step % 2 == 0 and step not in bench.log.promised:
            give_up(bench, step)
    sizes = {**SIZES, **MANY, **({"first": SMALL} if where in NAMED else {})}
    with bench.client() as client, client.checkpoint(RUN, step, session="job-1") as part:
        until(lambda: client.status().pressure.level != "refusing", "space is there again", 2 * SHOWN_WITHIN_S)
        for name, size in sizes.items():
            bench.put(part, name, size)  # what was acknowledged is found to be there
        bench.commit(part)
        if call == "unlink":
            until(lambda: "large" in evicted(client, step), "what could not be evicted is evicted now")
        bench.compare(client, step)
    bench.check_visible()


def save_as_far_as_it_goes(bench: DiskBench, client: Client, part: CheckpointWriter) -> list[ForebayError]:
    """Every act of a save, none repeated; the errors there were, each of a kind that says what to do."""
    errors: list[ForebayError] = []

    def told(act: Callable[[], object]) -> None:
        try:
            act()
        except (CacheFull, Unavailable) as error:
            errors.append(error)
        except Unsupported as error:
            assert "by the stream lane alone" in str(error)  # said of the fd lane, which this save insists on
            errors.append(error)

    for name, size in SIZES.items():
        told(partial(bench.put, part, name, size))
    told(partial(bench.put_many, part, MANY))
    if not errors:
        told(partial(bench.commit, part))
    if not errors:
        told(partial(client.wait, RUN, part.step, "pfs", timeout=30))
        told(partial(until, lambda: is_evicted(client, part.step), "eviction, or its failure", 5.0))
    return errors


def is_evicted(client: Client, step: int) -> bool:
    """What is large, which is chosen first; or it cannot be, and the operator is told."""
    return "large" in evicted(client, step) or any("'evict' fails" in alarm.what for alarm in client.status().alarms)


def evicted(client: Client, step: int) -> set[str]:
    return {shard.name for shard in client.describe(RUN, step).shards if shard.state == "evicted"}


def paths_of(bench: DiskBench, where: str) -> list[Path]:
    """The names that the next save will use; strace knows paths only as a whole."""
    data, incoming = bench.cache / "data", bench.cache / "incoming"
    if where == "catalog":
        return [bench.cache / "catalog" / "data.mdb"]
    sessions = sorted(data.iterdir())
    if where == "directories":
        first = int(sessions[-1].name, 16) + 1 if sessions else 1
        return [data, incoming, *(data / f"{number:016x}" for number in range(first, first + AHEAD))]
    session = sessions[-1]
    first = min(int(path.stem, 16) for path in session.glob("*.shard"))
    paths = []
    for number in range(first, first + AHEAD):
        paths += [incoming / f"{number:016x}.tmp", session / f"{number:016x}.shard"]
    for number in range(1, 100):
        paths += [session / f"part-0-{number}.json", session / f"{TEMP}part-0-{number}.json"]
    return paths


def give_up(bench: DiskBench, step: int) -> None:
    """The job aborts it. A commit that was made although its answer was an error cannot be aborted any more."""
    with bench.client() as client, contextlib.suppress(AlreadyExists):
        client.checkpoint(RUN, step, session="job-1").abort()
        bench.log.give_up(step)


@pytest.mark.parametrize("calls", ["fsync", "fsync,unlink"], ids=["the commit fails", "and its file cannot be removed"])
def test_a_commit_that_failed_and_was_aborted_never_comes_back(tmp_path: Path, stack: ExitStack, calls: str) -> None:
    """Its part's file was there already when the directory's sync failed: to the next start it would prove a commit."""
    bench = DiskBench(tmp_path, tmp_path)
    stack.callback(bench.gateway.close)
    bench.gateway.start()
    with bench.client(retry_s=0.0) as client:
        part = client.checkpoint(RUN, 1, session="job-1")
        bench.put(part, "large", LARGE)
        (session,) = (bench.cache / "data").iterdir()
        paths = [session, *(session / f"part-0-{number}.json" for number in range(1, AHEAD))]
        with Faults(bench.gateway.pid, calls, "EIO", "1+", paths, tmp_path) as faults, pytest.raises(Unavailable, match="EIO"):
            bench.commit(part)
        assert faults.injected
        assert len(list(session.glob("part-*.json"))) == ("unlink" in calls)
    give_up(bench, 1)
    assert list((bench.cache / "data").iterdir()) == []
    bench.gateway.kill()
    bench.gateway.start()
    with bench.client() as client:
        assert bench.checkpoint(client, 1) is None
        bench.save(client, 1, SIZES)
    bench.check_settled({1})
