"""SIGKILL while shards go past a failing cache to the first tier, a directory or an object store: nothing acknowledged is lost,
nothing is left on a tier, and once the disk works again every tier has all of it.
"""

import contextlib
from collections.abc import Callable, Iterator

import pytest

from crash.kit import LARGE, MIDDLE, NODE, RUN, SESSION, SMALL, Bench, Job, content, until
from forebay import ForebayError, Unavailable
from forebay.demo.gateways import GatewayProcess, posix_tier, s3_tier
from soak.figures import died
from soak.form import some

SIZES = {"weights/a.bin": LARGE, "b": MIDDLE, "c": SMALL, "d": SMALL - 1, "empty": 0}
TINY = {f"t/{n:02}": 30 * n for n in range(70)}  # a pack
# What the gateway's process meets wherever it makes a file in its cache, and where it tries the disk again.
FAULTS = ";".join(f"{name}=all*error:EIO" for name in ("create.before_open", "cache.try"))
KILLS = ["through.noted", "through.before_publish", "through.published", "through.done"]


WAYS = ["pfs", "object"]
# Each moment on one of the ways, and each way, in the short form; the model's histories go through all of them there.
KILLED = some([(way, kill) for kill in KILLS for way in WAYS], *zip(WAYS * 2, KILLS, strict=True))
TIDIED = some([(way, kill) for kill in KILLS[:2] for way in WAYS], ("object", "through.noted"))
HARDER = some(WAYS, "object")  # of the two, where only one is tried


@pytest.fixture(params=WAYS)
def first(request: pytest.FixtureRequest) -> str:
    """The tier that shards go through to: a temporary file and a rename, or uploads in parts."""
    return str(request.param)


@pytest.fixture
def bench(make_bench: Callable[..., Bench], first: str) -> Bench:
    made = make_bench()
    if first == "object":
        store = s3_tier(made.server.endpoint, made.server.bucket, prefix=made.prefix, part_size="5MiB")
        made.gateway = GatewayProcess(
            made.gateway.directory,
            NODE,
            [store, posix_tier(made.pfs)],
            capacity="160MiB",
            cache_keys='chunk_size = "1MiB"\nsoft = 0.01',
            environment=made.server.environment,
        )
    return made


def start_failing(bench: Bench, first: str, kill: str = "") -> None:
    """With a disk that was seen to fail."""
    bench.gateway.start(failpoints=f"{FAULTS};{kill}=kill" if kill else FAULTS)
    with bench.client(retry_s=0.0, admit_s=0.0) as client:
        until(lambda: all(tier.state == "ok" for tier in client.status().tiers), "the tiers are there")

        def goes_through() -> bool:
            if client.pressure().through == first:
                return True
            with contextlib.suppress(Unavailable):
                other = client.checkpoint("other", 1, session="s")
                other.put("x", b"x")
                other.abort()  # it was seen just before, by a try of the gateway's own: this shard went through
            return False

        until(goes_through, "the disk is seen to fail")


def save_and_wait(bench: Bench, first: str) -> None:
    with bench.client() as client:
        bench.save(client, 1, SIZES, TINY)
        client.wait(RUN, 1, first, timeout=90)


@pytest.mark.parametrize("first", HARDER, indirect=True)
def test_what_went_through_is_everywhere_once_the_disk_works_again(bench: Bench, first: str) -> None:
    start_failing(bench, first)
    save_and_wait(bench, first)
    assert bench.shard_files() == {}
    with bench.client() as client:
        found = bench.checkpoint(client, 1)
        assert found is not None and found.complete
        bench.compare(client, 1)
        bench.compare(client, 1, first)
    save_unsized(bench, 2)
    text = bench.gateway.cli("status").stdout
    assert f"write-through to {first}: the cache's disk fails" in text, text
    assert bench.gateway.status()["pressure"]["through"] == first
    assert bench.gateway.terminate() == 0
    bench.gateway.start()
    bench.check_settled({1, 2})


def save_unsized(bench: Bench, step: int) -> None:
    """A shard whose size nobody knows before its end: in an object store three parts."""
    body = content((step, "unsized"), (12 << 20) + 77)
    pieces = (body[at : at + 300_001] for at in range(0, len(body), 300_001))
    with bench.client() as client, client.checkpoint(RUN, step, session=SESSION) as part:
        receipt = part.put("unsized", pieces)
        bench.log.acknowledged[step, "unsized"] = (receipt.size, receipt.crc32c)
        bench.commit(part)


@pytest.mark.parametrize(("first", "kill"), KILLED, indirect=["first"])
def test_a_kill_on_the_way_leaves_nothing(bench: Bench, first: str, kill: str) -> None:
    start_failing(bench, first, kill)
    job = Job(lambda: save_and_wait(bench, first))
    job.start()
    assert bench.gateway.wait_exit() == -9
    bench.gateway.start()  # with a disk that works
    job.finish(120.0)
    bench.check_settled({1})
    died(f"{first}-{kill}", "cache.try", kill)


@pytest.mark.parametrize("first", HARDER, indirect=True)
def test_a_kill_and_a_start_on_a_disk_that_still_fails(bench: Bench, first: str) -> None:
    start_failing(bench, first, "through.published")
    job = Job(lambda: save_and_wait(bench, first))
    job.start()
    assert bench.gateway.wait_exit() == -9
    start_failing(bench, first)
    job.finish(120.0)
    bench.gateway.kill()
    bench.gateway.start()
    bench.check_settled({1})


@pytest.mark.parametrize(("first", "kill"), TIDIED, indirect=["first"])
def test_a_kill_while_what_a_kill_has_left_is_tidied(bench: Bench, first: str, kill: str) -> None:
    start_failing(bench, first, kill)
    with bench.client(retry_s=0.0) as client, contextlib.suppress(ForebayError):
        client.checkpoint(RUN, 1, session=SESSION).put("weights/a.bin", b"x" * LARGE)
    assert bench.gateway.wait_exit() == -9
    bench.gateway.start(failpoints="through.tidied=kill", ready=False)
    assert bench.gateway.wait_exit() == -9
    bench.gateway.start()
    until(lambda: bench.uploads() == [] and bench.steps_on_tiers() == set(), "nothing is left")  # nobody puts it again
    save_and_wait(bench, first)
    bench.check_settled({1})
    died(f"{first}-{kill}-tidied", kill, "through.tidied")


def test_what_a_kill_has_left_is_tidied_while_its_shard_comes_again(bench: Bench, first: str) -> None:
    start_failing(bench, first, "through.before_publish")
    body = content((1, "weights/a.bin"), LARGE)
    with bench.client(retry_s=0.0) as client, contextlib.suppress(ForebayError):
        client.checkpoint(RUN, 1, session=SESSION).put("weights/a.bin", body)
    assert bench.gateway.wait_exit() == -9
    assert bench.uploads() or bench.temporary_files()
    bench.gateway.start()

    def pieces() -> Iterator[bytes]:
        yield body[:MIDDLE]
        until(lambda: not bench.uploads() and not bench.temporary_files(), "what was begun is ended, however long this takes")
        yield body[MIDDLE:]

    with bench.client() as client, client.checkpoint(RUN, 1, session=SESSION) as part:
        receipt = part.put("weights/a.bin", pieces())
        bench.log.acknowledged[1, "weights/a.bin"] = (receipt.size, receipt.crc32c)
        bench.commit(part)
    bench.check_settled({1})


def test_a_kill_while_an_aborted_part_leaves_its_tier(bench: Bench, first: str) -> None:
    start_failing(bench, first, "through.left")
    with bench.client(retry_s=0.0) as client:
        part = client.checkpoint(RUN, 1, session=SESSION)
        part.put("a", b"x" * MIDDLE)
        part.put_many({name: b"y" * size for name, size in TINY.items()})
        with contextlib.suppress(ForebayError):
            part.abort()
    assert bench.gateway.wait_exit() == -9
    bench.gateway.start()
    until(lambda: bench.steps_on_tiers() == set(), "nothing is left")
    save_and_wait(bench, first)
    bench.check_settled({1})
    died(f"{first}-left", "through.left")
