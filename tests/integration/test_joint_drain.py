"""Two gateways, one job on both: a cadence and skips hold for the whole checkpoint, on a directory and on a real S3 server,
whoever is killed between a word for all nodes and what it stands for."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Incomplete
from forebay.demo.gateways import GatewayProcess, posix_tier
from integration.conftest import Bucket, MakeGateway
from integration.kit import eventually, files_below
from soak.figures import died
from soak.form import some

RUN = "team/wide"
EVERY_2 = f'[[policy]]\nrun = "{RUN}"\nevery = 2\n'
TRANSIENT = f'[[policy]]\nrun = "{RUN}"\ntransient = true\n'
SOON = "takeover_after = 1"  # how long a node waits for the others before it asks whether they left out what it brought
# A node's word for all, and what of its own is on the tier by then where another one has left it out.
WORD = ["verdict.before_write", "verdict.written"]
LEAVINGS = ["leavings.records_gone", "leavings.shards_gone"]


def save(gateway: GatewayProcess, step: int, writer: int, writers: int = 2, **commit: Any) -> forebay.CommitReceipt:
    with (
        forebay.Client(gateway.address, retry_timeout=60.0) as client,
        client.checkpoint(RUN, step, writers, writer, "s") as part,
    ):
        part.put(f"w{writer}", bytes([step]) * 200_000)
        receipt: forebay.CommitReceipt = part.commit(**commit)
        return receipt


def state(gateway: GatewayProcess, step: int, tier: str = "pfs") -> str:
    """Where the step stands on the tier as this node sees it."""
    with forebay.Client(gateway.address, retry_timeout=30.0) as client:
        return next(level.state for level in client.describe(RUN, step).levels if level.level == tier)


def reaches(gateways: tuple[GatewayProcess, ...], step: int, wanted: str, tier: str = "pfs") -> None:
    """On every node."""
    for gateway in gateways:
        eventually(lambda gateway=gateway: state(gateway, step, tier), lambda seen: seen == wanted)  # type: ignore[misc]


@contextlib.contextmanager
def two(make: MakeGateway, tiers: list[str], keys: str = EVERY_2, others: str | None = None) -> Iterator[Any]:
    """Gateways a, of writer 0, and b; started."""
    a = make("a", [*tiers, keys], node_keys=SOON)
    b = make("b", [*tiers, keys if others is None else others], node_keys=SOON)
    a.start()
    b.start()
    yield a, b


def of_step(names: list[str], step: int) -> list[str]:
    return [name for name in names if f"step-{step:012d}/" in name]


def check_a_cadence(a: GatewayProcess, b: GatewayProcess, tier: str, there: Callable[[], list[str]], target: Path) -> None:
    for step in (1, 2, 3):
        save(a, step, 0)
        save(b, step, 1)
        reaches((a, b), 2 if step == 3 else step, {1: "complete", 2: "draining", 3: "skipped"}[step], tier)
    reaches((a, b), 3, "complete", tier)
    eventually(lambda: of_step(there(), 2), lambda left: left == [])  # neither bytes nor documents
    for gateway in (a, b):
        with forebay.Client(gateway.address) as client:
            assert client.latest(RUN) == 3
            with pytest.raises(Incomplete, match=r"left out on.*step 3 is newer"):
                client.wait(RUN, 2, tier, timeout=10)
            assert client.queue().skipped[tier] == 1
            assert "2 nodes, 1 of 2 in this one's" in client.describe(RUN, 2).reason
            client.restore_dir(RUN, 3, target / gateway.node)
    assert "left out on every tier" in b.cli("info", RUN, "2").stdout


def test_a_cadence_of_two_nodes_on_a_directory(make: MakeGateway, root: Path, tmp_path: Path) -> None:
    with two(make, [posix_tier(root)]) as (a, b):
        check_a_cadence(a, b, "pfs", lambda: list(files_below(root)), tmp_path)
        with forebay.Client(b.address) as client:  # on the node that decided nothing
            client.pin(RUN, 2)
            client.wait(RUN, 2, "pfs", timeout=120)
        reaches((a, b), 2, "complete")


def test_a_cadence_of_two_nodes_on_an_object_store(make: MakeGateway, bucket: Bucket, tmp_path: Path) -> None:
    with two(make, [bucket.tier()]) as (a, b):
        check_a_cadence(a, b, "object", bucket.keys, tmp_path)


@pytest.mark.parametrize("point", WORD)
@pytest.mark.parametrize("goes", [True, False])
def test_a_kill_of_who_decides_around_its_word_makes_no_half(make: MakeGateway, root: Path, point: str, goes: bool) -> None:
    with two(make, [posix_tier(root)]) as (a, b):
        save(a, 1, 0)
        save(b, 1, 1)
        reaches((a, b), 1, "complete")
        assert a.terminate() == 0
        a.start(failpoints=f"{point}=kill" if goes else f"{point}=2*kill")  # the third goes before the second is skipped
        for step in (2, 3):
            save(a, step, 0, final=goes and step == 2)
            save(b, step, 1)
            if goes and step == 2:
                assert a.wait_exit() == -9
                a.start()
        if not goes:
            assert a.wait_exit() == -9
            b.kill()  # and who follows loses what it has read
            b.start()
            a.start()
            for writer, gateway in enumerate((a, b)):
                save(gateway, 4, writer)  # the third may be out by now, and the second has to be seen to be superseded
        reaches((a, b), 2, "complete" if goes else "skipped")
        reaches((a, b), 3, "draining" if goes else "complete")
        # What a node has announced goes just after it says that the step is left out.
        eventually(lambda: of_step(list(files_below(root)), 2), lambda left: bool(left) == goes)
    died(f"{point}-{goes}", point)


@pytest.mark.parametrize("point", some(LEAVINGS, LEAVINGS[0]))
def test_a_kill_while_what_was_left_out_goes_again_leaves_nothing(make: MakeGateway, root: Path, point: str) -> None:
    with two(make, [posix_tier(root)], others="") as (a, b):
        save(a, 1, 0)
        save(b, 1, 1)
        reaches((a, b), 1, "complete")
        assert b.terminate() == 0
        b.start(failpoints=f"{point}=kill")
        for step in (2, 3):
            save(a, step, 0)
            save(b, step, 1)  # by its rules it goes
        assert b.wait_exit(90.0) == -9
        b.start()
        reaches((a, b), 2, "skipped")
        reaches((a, b), 3, "complete")
        eventually(lambda: of_step(list(files_below(root)), 2), lambda left: left == [])
        with forebay.Client(b.address) as client:  # its bytes are in the cache as before
            assert client.describe(RUN, 2).size == 200_000
    died(point, point)


def test_a_transient_job_of_two_nodes_says_what_it_is(make: MakeGateway, root: Path) -> None:
    with two(make, [posix_tier(root)], TRANSIENT) as (a, b):
        for writer, gateway in enumerate((a, b)):
            receipt = save(gateway, 1, writer)
            assert (receipt.transient, receipt.checkpoint_complete) == (True, False)
        for gateway in (a, b):
            with forebay.Client(gateway.address) as client:
                client.wait(RUN, 1, "cache", timeout=30)  # each part is safe in a cache
                found = client.describe(RUN, 1)
                assert "cannot be restored as a whole" in found.reason
                assert (found.state, found.missing) == ("incomplete", ())
                with pytest.raises(Incomplete, match="cannot be restored as a whole"):
                    client.open(RUN, 1)
        assert of_step([name for name in files_below(root) if not name.startswith(".forebay")], 1) == []
