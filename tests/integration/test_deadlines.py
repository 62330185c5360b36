"""Waits and commits that have a deadline: what is missing is named, and the part stays committed."""

from pathlib import Path

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess
from forebay.errors import DeadlineExceeded, Incomplete
from integration.conftest import MakeGateway
from integration.kit import Job, assert_clear, assert_refused, eventually


@pytest.fixture
def gateway(make: MakeGateway) -> GatewayProcess:
    return make(node_keys='complete_within = "2s"').start()


def test_a_commit_that_waits_for_a_writer_who_does_not_come(make: MakeGateway, tmp_path: Path) -> None:
    gateway = make().start()
    job = Job(writers=2)
    with pytest.raises(DeadlineExceeded) as caught:
        job.save(gateway, 0, wait="pfs", timeout=1.5)
    assert_clear(caught.value, DeadlineExceeded, "writer 1")
    assert [missing.writer for missing in caught.value.missing] == [1]
    result = gateway.cli("wait", job.run, "7", "pfs", "--timeout", "0.5", check=False)
    assert_refused(result, 8, "writer 1")
    # It stays committed: the late writer completes it.
    job.save(gateway, 1, wait="pfs", timeout=30)
    job.assert_restores(gateway, tmp_path / "restored", "pfs")


def test_a_checkpoint_that_stays_incomplete_is_an_alarm_and_ends_waits(gateway: GatewayProcess, tmp_path: Path) -> None:
    job = Job(writers=3)
    job.save(gateway, 0)
    with forebay.Client(gateway.address) as client:
        assert not [alarm for alarm in client.status().alarms if job.run in alarm.what]
        with job.part(client, 1) as part:
            part.put("begun.bin", b"begun")
            with pytest.raises(Incomplete) as caught:
                client.wait(job.run, job.step, "pfs", timeout=30)
            assert_clear(caught.value, Incomplete, "1 (open)", "2 (absent)")
            assert [(m.writer, m.state) for m in caught.value.missing] == [(1, "open"), (2, "absent")]
            alarms = eventually(lambda: [alarm.what for alarm in client.status().alarms if job.run in alarm.what])
            assert "step 7" in alarms[0]
            assert "1 (open)" in alarms[0]
    result = gateway.cli("wait", job.run, "7", "all", "--timeout", "20", check=False)
    assert_refused(result, 4, "writers 1")
    assert job.run in gateway.cli("status").stdout
    # Late is not never.
    job.save(gateway, 1)
    job.save(gateway, 2, wait="pfs", timeout=30)
    job.assert_restores(gateway, tmp_path / "restored")
    assert not [alarm for alarm in gateway.status()["alarms"] if job.run in alarm["what"]]


def test_a_silent_writer_loses_what_it_never_committed(make: MakeGateway) -> None:
    gateway = make(node_keys='abandon_after = "1s"').start()
    job = Job(writers=2)
    job.save(gateway, 0)
    with forebay.Client(gateway.address) as client:
        part = job.part(client, 1)
        part.put("never-committed.bin", bytes(100_000))
        eventually(lambda: len(list(gateway.cache.glob("data/*/*.shard"))), lambda count: count == len(job.shards(0)))
        found = client.describe(job.run, job.step)
        assert [(missing.writer, missing.state) for missing in found.missing] == [(1, "absent")]
        # A commit of what is gone says so; it does not promise what is not there.
        with pytest.raises(Incomplete, match=r"never-committed\.bin"):
            part.commit()
