"""A tier that goes away and comes back: the queue only gets longer, completes by itself, and nothing counts as absent."""

import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier, s3_tier
from forebay.demo.seaweedfs import SeaweedFS
from integration.conftest import MakeGateway
from integration.kit import Job, eventually, files_below, some_bytes

MIB = 1 << 20
SLOW: dict[str, Any] = {"bandwidth": "2MiB", "concurrency": 1}


class LongJob(Job):
    """Six seconds of drain, shard by shard."""

    def shards(self, writer: int) -> dict[str, bytes]:
        return {f"part-{index}.bin": some_bytes(2 * MIB, (self.step, index)) for index in range(6)}


def tier_of(gateway: GatewayProcess) -> dict[str, object]:
    """The only tier, as status says it."""
    [tier] = gateway.status()["tiers"]
    return dict(tier)


def in_the_middle(gateway: GatewayProcess, job: Job) -> None:
    """Until some copies are verified and others wait."""
    count = len(job.everything)
    eventually(lambda: tier_of(gateway)["pending_copies"], lambda pending: isinstance(pending, int) and 0 < pending < count)


def assert_safe_meanwhile(gateway: GatewayProcess, job: Job, tier: str, target: Path) -> None:
    """The tier is away: said with its reason; the queue stands; all data is served; no copy is taken for absent."""
    found = eventually(lambda: tier_of(gateway), lambda tier: tier["state"] == "away")
    assert found["reason"]
    pending = found["pending_copies"]
    states = {name: copies[tier] for name, copies in job.copies(gateway).items()}
    assert set(states.values()) <= {"verified", "pending", "writing"}
    verified = {name for name, state in states.items() if state == "verified"}
    assert verified  # from before it went away, and it is not doubted now
    later = Job(run=job.run, step=job.step + 1, writers=1)
    later.save(gateway, 0)
    assert int(str(tier_of(gateway)["pending_copies"])) >= int(str(pending)) + len(later.everything)
    job.assert_restores(gateway, target / "meanwhile")
    after = {name for name, copies in job.copies(gateway).items() if copies[tier] == "verified"}
    assert after >= verified


def assert_goes_on(gateway: GatewayProcess, job: Job, tier: str, target: Path) -> None:
    """By itself: complete on the tier, bit-exact from there."""
    for step in (job.step, job.step + 1):
        each = job if step == job.step else Job(run=job.run, step=step, writers=1)
        each.wait(gateway, tier)
        each.assert_restores(gateway, target / f"step-{step}", tier)
    status = eventually(gateway.status, lambda status: not status["alarms"])
    assert status["health"] == "ok"
    assert status["cache"]["dirty_bytes"] == 0


def test_the_object_store_stops_in_the_middle_of_a_drain(make: MakeGateway, tmp_path: Path) -> None:
    job = LongJob(writers=1)
    with SeaweedFS(tmp_path / "weed") as server:
        tier = s3_tier(server.endpoint, server.bucket, **SLOW)
        gateway = make(tiers=[tier], environment=server.environment).start()
        job.save(gateway, 0)
        in_the_middle(gateway, job)
        server.stop()
        assert_safe_meanwhile(gateway, job, "object", tmp_path)
        server.start()
        assert_goes_on(gateway, job, "object", tmp_path)
        gateway.close()


def test_the_posix_root_is_moved_away_and_back(make: MakeGateway, root: Path, tmp_path: Path) -> None:
    job = LongJob(writers=1)
    gateway = make(tiers=[posix_tier(root, **SLOW)]).start()
    job.save(gateway, 0)
    in_the_middle(gateway, job)
    elsewhere = tmp_path / "elsewhere"
    root.rename(elsewhere)
    assert_safe_meanwhile(gateway, job, "pfs", tmp_path)
    assert not root.exists()  # a mount point without its file system is not filled
    root.mkdir()  # and neither is one that is there, empty
    with forebay.Client(gateway.address) as client, pytest.raises(forebay.DeadlineExceeded):
        client.wait(job.run, job.step, "pfs", timeout=2)
    assert files_below(root) == {}
    root.rmdir()
    elsewhere.rename(root)
    assert_goes_on(gateway, job, "pfs", tmp_path)


def test_a_mover_that_is_killed_costs_a_retry_only(make: MakeGateway, root: Path, tmp_path: Path) -> None:
    job = LongJob(writers=1)
    gateway = make(tiers=[posix_tier(root, **SLOW)]).start()
    job.save(gateway, 0)
    in_the_middle(gateway, job)
    [pid] = [mover["pid"] for mover in gateway.status()["movers"] if mover["name"].startswith("drain")]
    psutil.Process(pid).send_signal(signal.SIGKILL)
    job.wait(gateway, "pfs")
    job.assert_restores(gateway, tmp_path / "restored", "pfs")
    [mover] = [mover for mover in gateway.status()["movers"] if mover["name"].startswith("drain")]
    assert mover["restarts"] == 1
    assert mover["pid"] != pid
    assert not [name for name in files_below(root / job.run) if ".tmp" in name or name.startswith(".")]


def test_an_unmounted_root_is_not_an_empty_tier_after_a_restart(make: MakeGateway, root: Path, tmp_path: Path) -> None:
    """The mount point stands there empty when the gateway starts again: nothing is put below it, and the tier is away."""
    gateway = make(tiers=[posix_tier(root)]).start()
    job = Job(writers=1)
    job.save(gateway, 0)
    job.wait(gateway, "pfs")
    gateway.terminate()
    root.rename(tmp_path / "elsewhere")
    root.mkdir()
    gateway.start()
    found = eventually(lambda: tier_of(gateway), lambda tier: tier["state"] == "away")
    assert "tier.json" in str(found["reason"])
    later = Job(step=job.step + 1, writers=1)
    later.save(gateway, 0)
    assert list(root.iterdir()) == []
    root.rmdir()
    (tmp_path / "elsewhere").rename(root)
    later.wait(gateway, "pfs")
