"""SIGKILL at every failpoint there is, in the middle of a job's whole life: save, commit, drain, evict, restore, delete.

The points are collected from the source, so that one which this life does not pass fails here. The process that dies may be
the gateway or a mover (movers inherit the variable); after a mover the gateway is killed as well. The next start is without
failpoints.
"""

import itertools
import re
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay_gateway
from crash.kit import LARGE, MIDDLE, RUN, SMALL, Bench, Job, delete, movers_died, until
from forebay import Client
from soak.form import every, some

SOURCE = Path(forebay_gateway.__file__).parent
SIZES = {"weights/a.bin": LARGE, "b": MIDDLE, "c": SMALL, "d": SMALL - 1, "empty": 0}
# A pack, and small ones that are joined with it at the commit.
TINY = [{f"t/{n:02}": 30 * n for n in range(64)}, *({f"u{batch}/{n}": 500 for n in range(2)} for batch in range(8))]


def failpoints() -> list[str]:
    """All names that the gateway's source passes."""
    found = {name for path in SOURCE.rglob("*.py") for name in re.findall(r'failpoints\.hit\("([^"]+)"\)', path.read_text())}
    return sorted(found)


FRESH = ["durable.before_fsync", "durable.before_rename", "durable.before_dir_fsync", "durable.before_link"]
# Of points that lie on several ways, later passes too: a tier's documents, then part files.
LATER = [f"durable.before_fsync={count}" for count in (5, 6, 7)]
CHAIN = every([f"{name}=1" for name in failpoints() if name != "durable.before_link"] + LATER, 2)
LINKS = 10  # of one chain: they share one gateway's disk
# These lie in the writer, and in a fetch it is a mover that passes them.
FETCH = every([name for name in failpoints() if name.startswith(("create.", "write.", "seal."))], 3)


def test_the_source_is_read() -> None:
    calls = sum(path.read_text().count("failpoints.hit(") for path in SOURCE.rglob("*.py"))
    literal = sum(len(re.findall(r'failpoints\.hit\("[^"]+"\)', path.read_text())) for path in SOURCE.rglob("*.py"))
    assert calls == literal, "a failpoint whose name is no literal cannot be found"
    assert len(failpoints()) > 30


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
    for link in CHAIN[first : first + LINKS]:
        name, count = link.split("=")
        bench.gateway.start(failpoints=f"{name}={count}*kill", ready=False)
        wait_for_a_death(bench, life.job, link)
    bench.gateway.start()
    bench.check_settled(life.finish())


@pytest.mark.parametrize("name", some(FRESH, "durable.before_fsync", "durable.before_link"))
def test_a_kill_at_the_very_first_start_is_forgotten(bench: Bench, name: str) -> None:
    bench.gateway.start(failpoints=f"{name}=kill", ready=False)
    assert bench.gateway.wait_exit() == -9
    bench.gateway.start()
    with bench.client() as client:
        bench.save(client, 1, {"x": SMALL})
    bench.check_settled({1})


def test_a_kill_of_the_mover_in_a_fetch_leaves_nothing(bench: Bench) -> None:
    prepare(bench)
    for name in FETCH:
        bench.gateway.start(failpoints=f"{name}=kill")
        with bench.client() as client:
            bench.compare(client, 1)  # the gateway goes on from a tier
            assert movers_died(client) > 0, name
        bench.gateway.kill()
    bench.gateway.start()
    assert list((bench.cache / "incoming").iterdir()) == []
    bench.check_settled({1})


@pytest.mark.parametrize("name", ["read.before_open", "read.before_chunk"])
def test_a_kill_of_the_gateway_in_a_read_changes_nothing(make_bench: Callable[..., Bench], name: str) -> None:
    bench = make_bench(soft=0.5)
    prepare(bench)
    bench.gateway.start(failpoints=f"{name}=kill")
    with bench.client() as client:
        job = Job(lambda: bench.compare(client, 1))
        job.start()
        assert bench.gateway.wait_exit() == -9
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
