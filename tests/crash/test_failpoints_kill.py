"""SIGKILL at every failpoint there is, in the middle of a job's whole life: save, commit, drain, evict, restore, delete.

The points are collected from the source, so that one which this life does not pass fails here. The process that dies may be
the gateway or a mover (movers inherit the variable); after a mover the gateway is killed as well. The next start is without
failpoints.
"""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import forebay_gateway
from crash.kit import LARGE, MIDDLE, RUN, SMALL, Bench, Job, delete, movers_died, until, wait_ready_or_dead
from forebay import Client

SOURCE = Path(forebay_gateway.__file__).parent
STEP, DOOMED = 1, 2
SIZES = {"weights/a.bin": LARGE, "b": MIDDLE, "c": SMALL, "d": SMALL - 1, "empty": 0}


def failpoints() -> list[str]:
    """All names that the gateway's source passes."""
    found = {name for path in SOURCE.rglob("*.py") for name in re.findall(r'failpoints\.hit\("([^"]+)"\)', path.read_text())}
    return sorted(found)


# Passes beyond the first of points that lie on several ways: the format and part files of the cache, documents of a tier.
LATER = [f"{name}={count}" for name in ("durable.before_fsync", "durable.before_dir_fsync") for count in (2, 4, 7)]
# These lie in the writer too, and in a fetch it is a mover that passes them.
FETCH = [name for name in failpoints() if name.startswith(("create.", "write.", "seal."))]
READ = ["read.before_open", "read.before_chunk"]


def test_the_source_is_read() -> None:
    calls = sum(path.read_text().count("failpoints.hit(") for path in SOURCE.rglob("*.py"))
    literal = sum(len(re.findall(r'failpoints\.hit\("[^"]+"\)', path.read_text())) for path in SOURCE.rglob("*.py"))
    assert calls == literal, "a failpoint whose name is no literal cannot be found"
    assert len(failpoints()) > 30


def life(bench: Bench) -> None:
    """All that can happen to a checkpoint; waits for the gateway whenever it is away."""
    with bench.client() as client:
        bench.save(client, STEP, SIZES)
        client.wait(RUN, STEP, "all", timeout=90)
        bench.save(client, DOOMED, {"x": SMALL, "y": MIDDLE})
        client.wait(RUN, DOOMED, "all", timeout=90)
        until(lambda: evicted(client), "the large shard is evicted", 60.0)
        bench.compare(client, STEP)
        bench.log.deleting.add(DOOMED)
        delete(client, DOOMED)


def evicted(client: Client) -> bool:
    return next(shard.state for shard in client.describe(RUN, STEP).shards if shard.size == LARGE) == "evicted"


def wait_for_a_death(bench: Bench, job: Job) -> None:
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

        until(seen, "somebody dies", 60.0)
        assert died(), f"nothing passed the failpoint: {job.error!r}"
    if process.poll() is None:
        bench.gateway.kill()
    else:
        assert bench.gateway.wait_exit() == -9, bench.gateway.tail()


@pytest.mark.parametrize("point", [*(f"{name}=1" for name in failpoints()), *LATER])
def test_a_kill_at_a_failpoint_loses_nothing(bench: Bench, point: str) -> None:
    name, count = point.split("=")
    bench.gateway.start(failpoints=f"{name}={count}*kill", ready=False)
    job = Job(lambda: life(bench))
    job.start()
    wait_for_a_death(bench, job)
    bench.gateway.start()
    bench.check_visible()
    job.finish(100.0)
    bench.check_settled({STEP})


@pytest.mark.parametrize("name", FETCH)
def test_a_kill_of_the_mover_in_a_fetch_leaves_nothing(bench: Bench, name: str) -> None:
    prepare(bench, lambda client: until(lambda: evicted(client), "the large shard is evicted"))
    bench.gateway.start(failpoints=f"{name}=kill")
    with bench.client() as client:
        bench.compare(client, STEP)  # the gateway goes on from a tier
        assert movers_died(client) > 0
    bench.gateway.kill()
    finish(bench)


@pytest.mark.parametrize("name", READ)
def test_a_kill_of_the_gateway_in_a_read_changes_nothing(make_bench: Callable[..., Bench], name: str) -> None:
    bench = make_bench(soft=0.5)
    prepare(bench, lambda client: None)
    bench.gateway.start(failpoints=f"{name}=kill", ready=False)
    assert wait_ready_or_dead(bench.gateway)
    with bench.client() as client:
        job = Job(lambda: bench.compare(client, STEP))
        job.start()
        assert bench.gateway.wait_exit() == -9
        bench.gateway.start()
        job.finish(60.0)
    bench.check_settled({STEP})


def prepare(bench: Bench, then: Callable[[Client], object]) -> None:
    """One checkpoint, drained; the gateway is down."""
    bench.gateway.start()
    with bench.client() as client:
        bench.save(client, STEP, SIZES)
        client.wait(RUN, STEP, "all", timeout=60)
        then(client)
    bench.gateway.terminate()


def finish(bench: Bench) -> None:
    bench.gateway.start()
    assert list((bench.cache / "incoming").iterdir()) == []
    bench.check_visible()
    bench.check_settled({STEP})
