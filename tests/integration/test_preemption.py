"""A node that is about to go: the newest complete checkpoint gets out first, and the answer says how far it came."""

import threading
import time
from pathlib import Path

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay.errors import NotFound
from integration.conftest import MakeGateway
from integration.kit import SMALL_CHUNKS, eventually, some_bytes

MIB = 1 << 20
OLD, SIZE = 6, 4 * MIB
SLOW = "4MiB"


def save(client: forebay.Client, run: str, step: int, size: int = SIZE, **part: int) -> None:
    with client.checkpoint(run, step, session="s", **part) as saved:
        saved.put(f"data-{part.get('writer', 0)}.bin", some_bytes(size, (run, step)))
        saved.commit()


@pytest.fixture
def gateway(make: MakeGateway, root: Path) -> GatewayProcess:
    """Its tier takes one checkpoint a second."""
    return make(tiers=[posix_tier(root, bandwidth=SLOW)], cache_keys=SMALL_CHUNKS).start()


def out(client: forebay.Client, run: str, step: int) -> bool:
    return next(level.state for level in client.describe(run, step).levels if level.level == "pfs") == "complete"


def test_the_newest_complete_checkpoint_goes_first(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client:
        client.hold()
        for step in range(OLD):
            save(client, "run", step)
        save(client, "run", OLD)
        client.release()
        (newest,) = client.preempt(30.0)
        assert (newest.run, newest.step, newest.complete) == ("run", OLD, True)
        assert newest.reached == ("cache", "pfs")
        assert newest.missed == ()
        assert not all(out(client, "run", step) for step in range(OLD))  # the others waited


def test_what_was_not_reached_is_said_with_the_reason(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client:
        client.hold()
        save(client, "run", 1)
        began_s = time.monotonic()
        (answer,) = client.preempt(0.5, "run")
        assert 0.4 < time.monotonic() - began_s < 10
        assert answer.reached == ("cache",)
        (missed,) = answer.missed
        assert (missed.level, missed.bytes_left) == ("pfs", SIZE)
        assert missed.reason
        client.release()
        client.wait("run", 1, "pfs", timeout=30)
        assert client.preempt(5.0) == ()
        assert client.preempt(5.0, "run")[0].missed == ()
        with pytest.raises(NotFound, match="'never'"):
            client.preempt(1.0, "never")


def test_a_part_of_a_newer_one_goes_too_and_the_complete_one_first(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client:
        client.hold()
        for step in range(3):
            save(client, "run", step)
        save(client, "run", 3, writers=2, writer=1)
        client.release()
        part, complete = client.preempt(4.0)
        assert (part.step, part.complete) == (3, False)
        assert (complete.step, complete.complete, complete.missed) == (2, True, ())
        eventually(lambda: client.describe("run", 3).levels[1].bytes_done == SIZE)


def test_a_save_that_comes_meanwhile_is_the_newest(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client, forebay.Client(gateway.address) as trainer:
        client.hold()
        save(client, "run", 1)
        answers: list[tuple[forebay.Preempted, ...]] = []
        asking = threading.Thread(target=lambda: answers.append(client.preempt(20.0)))
        asking.start()
        save(trainer, "run", 2)
        trainer.release()
        asking.join(30)
        assert answers[0][0].step == 2
        assert answers[0][0].missed == ()


def test_sigterm_lets_the_newest_checkpoint_out(make: MakeGateway, root: Path) -> None:
    gateway = make(tiers=[posix_tier(root, bandwidth=SLOW)], cache_keys=SMALL_CHUNKS).start()
    with forebay.Client(gateway.address) as client:
        client.hold()
        for step in range(OLD + 1):
            save(client, "run", step)
        client.release()
    assert gateway.terminate() == 0
    done = sorted(path.parent.name for path in root.glob("run/step-*/manifest.json"))
    assert f"step-{OLD:012}" in done
    assert len(done) <= OLD


def test_sigterm_does_not_wait_for_a_tier_that_takes_nothing(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client:
        client.hold()
        save(client, "run", 1)
    began_s = time.monotonic()
    assert gateway.terminate() == 0
    assert time.monotonic() - began_s < 10
