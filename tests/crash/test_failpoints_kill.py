"""SIGKILL at every failpoint there is, in the middle of a job's whole life: save, abort, commit, drain, evict, restore, delete.

The points are collected from the source, so that one which this life does not pass fails here. The process that dies may be
the gateway or a mover (movers inherit the variable); after a mover the gateway is killed as well. The next start is without
failpoints.
"""

import itertools
import re
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from crash.kit import LARGE, MIDDLE, RUN, SMALL, Bench, Job, delete, movers_died, until
from forebay import Client, ForebayError, NotFound
from forebay_gateway.cache.layout import CLEAN
from soak.figures import SOURCE, failpoints, reported
from soak.form import every, some

TESTS = Path(__file__).parents[1]
SIZES = {"weights/a.bin": LARGE, "b": MIDDLE, "c": SMALL, "d": SMALL - 1, "empty": 0}
# A pack, and small ones that are joined with it at the commit.
TINY = [{f"t/{n:02}": 30 * n for n in range(64)}, *({f"u{batch}/{n}": 500 for n in range(2)} for batch in range(8))]


FRESH = [
    "durable.before_fsync",
    "durable.before_rename",
    "durable.before_dir_fsync",
    "durable.before_link",
    "posix.document_replaced",
    "catalog.noted",
]
# Of points that lie on several ways, later passes too: a tier's documents, then part files.
LATER = [f"durable.before_fsync={count}" for count in (5, 6, 7)]
# The tier's trial at the start passes these a few times, on documents that nobody needs.
LATER += ["posix.document_placed=5", "posix.pointed=2", "posix.unlinked=8"]
# What only a start passes, and only after a kill at another point (or two in one process) has left something to do.
LEFT = {
    "drain.upload_aborted": "",  # the mover dies, and the gateway when it tidies up after it
    "recover.adopted": "seal.done",
    "recover.committed": "commit.before_catalog",
    "recover.copy_proved": "drain.before_catalog",
    "recover.copy_swept": "drain.started",
    "recover.incoming_gone": "seal.before_fsync",
    "recover.upload_aborted": "drain.upload_recorded",
}
# Points that no life passes by itself, and the tests that do.
ELSEWHERE = {
    "catalog.noted": "crash/test_failpoints_kill.py",
    "delete.superseded_marked": "integration/test_care_interrupts.py",
    "durable.before_link": "crash/test_failpoints_kill.py",
    **dict.fromkeys(
        [
            "expire.before_gone",
            "expire.gone",
            "expire.kept_aside",
            "expire.manifest_gone",
            "expire.noted",
            "expire.shards_gone",
            "expire.tombstone_gone",
        ],
        "integration/test_retention.py",
    ),
    "handover.mark_taken": "crash/test_failpoints_kill.py",
    "handover.token_left": "crash/test_failpoints_kill.py",
    "leavings.records_gone": "integration/test_joint_drain.py",
    "leavings.shards_gone": "integration/test_joint_drain.py",
    "mend.fetched": "integration/test_care_interrupts.py",
    "posix.document_replaced": "integration/test_care_interrupts.py",
    "posix.lock_taken_over": "integration/test_care_interrupts.py",
    "rebuild.set_aside": "integration/test_care_interrupts.py",
    "recover.lost": "crash/test_failpoints_kill.py",
    "release.before_unlink": "integration/test_care_interrupts.py",
    "release.object_gone": "integration/test_care_interrupts.py",
    "repair.copy_marked": "integration/test_care_interrupts.py",
    "repair.document_written": "integration/test_care_interrupts.py",
    "repair.file_marked": "integration/test_care_interrupts.py",
    "verdict.before_write": "integration/test_joint_drain.py",
    "verdict.written": "integration/test_joint_drain.py",
    "write.refused": "crash/test_failpoints_kill.py",
    **dict.fromkeys(
        [
            "cache.try",
            "through.before_publish",
            "through.done",
            "through.left",
            "through.noted",
            "through.published",
            "through.tidied",
        ],
        "crash/test_write_through.py",
    ),
}
CHAIN = every([f"{name}=1" for name in failpoints() if name not in {*LEFT, *ELSEWHERE}] + LATER, 14)
LINKS = 10  # of one chain: they share one gateway's disk
# These lie in the writer, and in a fetch it is a mover that passes them.
FETCH = every([name for name in failpoints() if name.startswith(("create.", "write.b", "seal."))], 12)


def test_the_source_is_read() -> None:
    calls = sum(path.read_text().count("failpoints.hit(") for path in SOURCE.rglob("*.py"))
    literal = sum(len(re.findall(r'failpoints\.hit\("[^"]+"\)', path.read_text())) for path in SOURCE.rglob("*.py"))
    assert calls == literal, "a failpoint whose name is no literal cannot be found"
    assert len(failpoints()) > 60
    assert set(failpoints()) >= {*LEFT, *ELSEWHERE}
    for name, file in ELSEWHERE.items():
        text = (TESTS / file).read_text()
        assert text.count(f'"{name}') > file.count("failpoints_kill"), f"{file} passes no {name}"


class Life:
    """All that can happen to checkpoints, again and again; waits for the gateway whenever it is away."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._enough = threading.Event()
        self.job = Job(self._live)
        self.job.start()
        self._reader = Job(self._look)
        self._reader.start()

    def finish(self) -> set[int]:
        """Let the round under way end; which steps are to be there."""
        self._enough.set()
        self.job.finish(120.0)
        self._reader.finish(60.0)
        return self._bench.log.promised - self._bench.log.deleting

    NEVER = 1_000_000  # and above: steps that are aborted and never saved

    def _look(self) -> None:
        """A reader all the while, also in the first moment after each restart."""
        while not self._enough.wait(0.2):
            self._bench.check_visible()

    def _live(self) -> None:
        with self._bench.client() as client:
            for step in itertools.count(1):
                self._round(client, step)
                if self._enough.is_set():
                    return

    def _round(self, client: Client, step: int) -> None:
        self._bench.abort(client, step, SIZES)
        self._bench.abort(client, self.NEVER + step, {"tiny": 1, "c": SMALL})
        self._bench.save(client, step, SIZES, *TINY)
        client.wait(RUN, step, "all", timeout=90)
        until(lambda: evicted(client, step), "the large shard is evicted", 60.0)
        self._bench.compare(client, step)
        if step > 1:
            self._bench.log.deleting.add(step - 1)
            delete(client, step - 1)


def evicted(client: Client, step: int) -> bool:
    return next(shard.state for shard in client.describe(RUN, step).shards if shard.size == LARGE) == "evicted"


def wait_for_a_death(bench: Bench, job: Job, link: str) -> None:
    """Until the gateway or one of its movers died of the failpoint; then nothing of the gateway runs any more."""
    process = bench.gateway.process
    assert process is not None
    with bench.client(retry_s=0.0) as client:

        def died() -> bool:
            if process.poll() is not None:
                return True
            try:
                return movers_died(client) > 0
            except Exception:
                return False

        def seen() -> bool:
            return died() or not job.is_alive()

        until(seen, f"somebody dies at {link}", 60.0)
        assert died(), f"nothing passed {link}: {job.error!r}"
    if process.poll() is None:
        bench.gateway.kill()
    else:
        assert bench.gateway.wait_exit() == -9, bench.gateway.tail()


@pytest.mark.parametrize("first", range(0, len(CHAIN), LINKS))
def test_a_kill_at_any_failpoint_loses_nothing(bench: Bench, first: int) -> None:
    bench.gateway.start()
    life = Life(bench)
    bench.gateway.kill()
    with reported_kills(f"failpoints-{first}", bench) as figures:
        for link in CHAIN[first : first + LINKS]:
            name, count = link.split("=")
            bench.gateway.start(failpoints=f"{name}={count}*kill", ready=False)
            wait_for_a_death(bench, life.job, link)
            passed(figures, name)
        bench.gateway.start()
        bench.check_settled(life.finish())


def reported_kills(name: str, bench: Bench) -> AbstractContextManager[dict[str, Any]]:
    return reported(name, bench.figures, crash_rounds=0, failpoints_passed=[], failpoints_known=failpoints())


def passed(figures: dict[str, Any], *names: str) -> None:
    """Somebody died at each of them."""
    figures["crash_rounds"] += len(names)
    figures["failpoints_passed"] += names


def test_a_kill_in_what_a_kill_has_left_loses_nothing(bench: Bench) -> None:
    with reported_kills("failpoints-left", bench) as figures:
        left = every([*LEFT.items()], 7)
        for step, (name, before) in enumerate(left, start=1):
            bench.gateway.start(failpoints=f"{before}=kill" if before else f"s3.upload_begun=kill;{name}=kill")
            job = Job(lambda step=step: save_and_wait(bench, step))  # type: ignore[misc]
            job.start()
            assert bench.gateway.wait_exit() == -9, name
            passed(figures, before or "s3.upload_begun")
            if before:
                bench.gateway.start(failpoints=f"{name}=kill", ready=False)
                assert bench.gateway.wait_exit() == -9, name
            passed(figures, name)
            bench.gateway.start()
            job.finish(90.0)
            assert bench.gateway.terminate() == 0
        bench.gateway.start()
        bench.check_settled(set(range(1, len(left) + 1)))


def save_and_wait(bench: Bench, step: int) -> None:
    with bench.client() as client:
        bench.save(client, step, SIZES)
        client.wait(RUN, step, "all", timeout=90)


def test_a_kill_around_an_orderly_stop_loses_nothing(make_bench: Callable[..., Bench]) -> None:
    """Between the token and the mark; between the mark's end and the token's; and where a start has just seen a loss."""
    bench = make_bench(soft=0.5)
    with reported_kills("failpoints-stop", bench) as figures:
        bench.gateway.start(failpoints="handover.token_left=kill")
        save_and_wait(bench, 1)
        assert bench.gateway.terminate() == -9
        assert not (bench.cache / CLEAN).exists()
        passed(figures, "handover.token_left")
        bench.gateway.start()
        assert bench.gateway.terminate() == 0
        bench.gateway.start(failpoints="handover.mark_taken=kill", ready=False)
        assert bench.gateway.wait_exit() == -9
        passed(figures, "handover.mark_taken")
        for path in (bench.cache / "data").glob("*/*.shard"):
            path.unlink()
        bench.gateway.start(failpoints="recover.lost=kill", ready=False)
        assert bench.gateway.wait_exit() == -9
        passed(figures, "recover.lost")
        bench.gateway.start()
        bench.check_settled({1})


def test_a_kill_where_an_aborted_shard_is_dropped_leaves_nothing(bench: Bench) -> None:
    """Its part is aborted while it is sealed: the catalog refuses it, and its file is still there at the kill."""
    with reported_kills("failpoints-refused", bench) as figures:
        bench.gateway.start(failpoints="seal.done=sleep:2;write.refused=kill")
        with bench.client(retry_s=0.0) as client:
            part = client.checkpoint(RUN, 1, session="job-1", lane="stream")
            job = Job(lambda: bench.put(part, "a", LARGE))
            job.start()
            until(lambda: list((bench.cache / "data").glob("*/*.shard")), "the file is sealed")
            client.checkpoint(RUN, 1, session="job-1").abort()
            assert bench.gateway.wait_exit() == -9
            with pytest.raises(ForebayError):
                job.finish(30.0)
        passed(figures, "write.refused")
        bench.gateway.start()
        with bench.client() as client:
            client.checkpoint(RUN, 1, session="job-1").abort()
            with pytest.raises(NotFound):
                client.open(RUN, 1)
            bench.save(client, 1, SIZES)
        bench.check_settled({1})


@pytest.mark.parametrize("name", some(FRESH, "durable.before_link", "posix.document_replaced"))
def test_a_kill_at_the_very_first_start_is_forgotten(bench: Bench, name: str) -> None:
    with reported_kills(f"failpoints-first-{name}", bench) as figures:
        bench.gateway.start(failpoints=f"{name}=kill", ready=False)
        assert bench.gateway.wait_exit() == -9
        passed(figures, name)
        bench.gateway.start()
        with bench.client() as client:
            bench.save(client, 1, {"x": SMALL})
        bench.check_settled({1})


def test_a_kill_of_the_mover_in_a_fetch_leaves_nothing(bench: Bench) -> None:
    prepare(bench)
    with reported_kills("failpoints-fetch", bench) as figures:
        for name in FETCH:
            bench.gateway.start(failpoints=f"{name}=kill")
            with bench.client() as client:
                bench.compare(client, 1)  # the gateway goes on from a tier
                assert movers_died(client) > 0, name
            bench.gateway.kill()
            passed(figures, name)
        bench.gateway.start()
        assert list((bench.cache / "incoming").iterdir()) == []
        bench.check_settled({1})


@pytest.mark.parametrize("name", some(["read.before_open", "read.before_chunk"], "read.before_chunk"))
def test_a_kill_of_the_gateway_in_a_read_changes_nothing(make_bench: Callable[..., Bench], name: str) -> None:
    bench = make_bench(soft=0.5)
    prepare(bench)
    with reported_kills(f"failpoints-{name}", bench) as figures:
        bench.gateway.start(failpoints=f"{name}=kill")
        with bench.client() as client:
            job = Job(lambda: bench.compare(client, 1))
            job.start()
            assert bench.gateway.wait_exit() == -9
            passed(figures, name)
            bench.gateway.start()
            job.finish(60.0)
        bench.check_settled({1})


def prepare(bench: Bench) -> None:
    """One checkpoint, drained, and evicted where the cache is to be that small; the gateway is down."""
    bench.gateway.start()
    with bench.client() as client:
        bench.save(client, 1, SIZES)
        client.wait(RUN, 1, "all", timeout=60)
        until(lambda: evicted(client, 1) or client.pressure().level == "ok", "the large shard is evicted")
    bench.gateway.terminate()
