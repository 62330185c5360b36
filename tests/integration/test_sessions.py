"""A step that is saved more than once: by the same launch again, by a restarted job, by one that should be dead."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess
from forebay.errors import AlreadyExists
from forebay_wire.manifest import Manifest
from forebay_wire.names import session8
from integration.conftest import Bucket, MakeGateway
from integration.kit import Cluster, Job, assert_clear, assert_refused, eventually, files_below

Pair = Cluster[Bucket]


def sessions_on_tiers(pair: Pair, job: Job) -> list[str]:
    """Whose manifest stands on each tier."""
    key = f"{job.directory}/manifest.json"
    return [Manifest.from_json(document).session for document in ((pair.root / key).read_bytes(), pair.bucket.get(key))]


def waiting_copies(client: forebay.Client) -> int:
    """Of all tiers."""
    return sum(tier.pending_copies for tier in client.status().tiers)


def incomplete_runs(client: forebay.Client) -> list[str]:
    """As status lists them."""
    return [item.run for item in client.status().incomplete]


def current(pair: Pair, job: Job) -> str:
    """Where the POSIX tier's link points."""
    return str((pair.root / job.directory / "current").readlink())


def test_the_same_session_again(pair: Pair, job: Job, tmp_path: Path) -> None:
    """Identical: done already. Different: refused, and what stands stays."""
    job.save_and_wait(pair)
    before = files_below(pair.root / job.run)
    job.save_and_wait(pair)
    other = replace(job, size=job.size + 1)
    for writer, gateway in enumerate((pair.a, pair.b, pair.a)):
        with pytest.raises(AlreadyExists) as caught:
            other.save(gateway, writer)
        assert_clear(caught.value, AlreadyExists)
    assert files_below(pair.root / job.run) == before
    state = tmp_path / "state"
    (state / "rank0").mkdir(parents=True)
    (state / "rank0" / "model.bin").write_bytes(b"other bytes")
    arguments = ("--run", job.run, "--step", "7", "--writers", "3", "--writer", "0", "--session", job.session)
    assert_refused(pair.a.cli("save", str(state), *arguments, check=False), 1, "other content")
    job.assert_restores(pair.b, tmp_path / "restored")


def test_a_restarted_job_replaces_the_step_when_it_is_complete(doomed: Pair, job: Job, tmp_path: Path) -> None:
    pair, old, new = doomed, job, replace(job, session="launch-2")
    old.save_and_wait(pair)
    assert sessions_on_tiers(pair, job) == ["launch-1", "launch-1"]

    # While the new one is not complete the old one stays what a reader gets.
    new.save(pair.a, 0)
    new.save(pair.b, 1)
    for gateway in pair:
        with forebay.Client(gateway.address) as client:
            found = client.describe(old.run, old.step)
            assert (found.session, found.state) == ("launch-1", "complete")
            assert client.latest(old.run) == 7
    assert sessions_on_tiers(pair, job) == ["launch-1", "launch-1"]
    old.assert_restores(pair.a, tmp_path / "old")

    new.save(pair.a, 2)
    for gateway in pair:
        new.wait(gateway)
        with forebay.Client(gateway.address) as client:
            assert client.describe(new.run, new.step).session == "launch-2"
    assert sessions_on_tiers(pair, job) == ["launch-2", "launch-2"]
    assert current(pair, job) == session8("launch-2")
    for gateway, name in zip(pair, "ab", strict=True):
        new.assert_restores(gateway, tmp_path / f"new-{name}")

    # And for a node that meets it only now.
    pair.a.kill()
    pair.a.wipe()
    pair.a.start()
    with forebay.Client(pair.a.address) as client:
        eventually(lambda: {tier.state for tier in client.status().tiers}, lambda states: states == {"ok"})
    new.assert_restores(pair.a, tmp_path / "wiped")


def test_a_job_that_should_be_dead_does_not_replace_its_successor(pair: Pair, job: Job, tmp_path: Path) -> None:
    """The old launch's last writer commits after the new launch is complete: too late."""
    old, new = job, replace(job, session="launch-2")
    waiting: list[int] = []
    for gateway in pair:
        with forebay.Client(gateway.address) as client:
            waiting.append(waiting_copies(client))
    old.save(pair.a, 0)
    old.save(pair.b, 1)
    new.save_and_wait(pair)
    old.save(pair.a, 2)
    for gateway, before in zip(pair, waiting, strict=True):
        with forebay.Client(gateway.address) as client:
            # Both gateways are done with it: nothing of it waits, and what stands is the new one.
            eventually(partial(waiting_copies, client), before.__eq__)
            eventually(partial(incomplete_runs, client), lambda runs: job.run not in runs)
            assert client.describe(new.run, new.step).session == "launch-2"
    assert sessions_on_tiers(pair, job) == ["launch-2", "launch-2"]
    assert current(pair, job) == session8("launch-2")
    for gateway, name in zip(pair, "ab", strict=True):
        new.assert_restores(gateway, tmp_path / name)


def test_two_jobs_of_one_step_never_mix(pair: Pair, job: Job, tmp_path: Path) -> None:
    """Half of each is complete for neither."""
    one, two = replace(job, writers=2), replace(job, writers=2, session="launch-2")
    one.save(pair.a, 0)
    two.save(pair.b, 1)
    for gateway in pair:
        with forebay.Client(gateway.address) as client:
            with pytest.raises(forebay.DeadlineExceeded):
                client.wait(one.run, one.step, "pfs", timeout=2)
            assert client.latest(one.run) is None
    assert not list((pair.root / job.run).rglob("manifest.json"))
    two.save(pair.b, 0)
    two.wait(pair.b)
    two.assert_restores(pair.a, tmp_path / "restored")


def test_two_jobs_that_were_given_one_session(make: MakeGateway) -> None:
    """On two nodes, each as its only writer: the second is told once both have met on the tier, and is not complete."""
    a, b = make("a").start(), make("b").start()

    def save(gateway: GatewayProcess, content: bytes) -> None:
        with forebay.Client(gateway.address) as client, client.checkpoint("job", 1, session="launch") as part:
            part.put("model.bin", content)
            part.commit(wait="pfs")

    save(a, b"one job's")
    with pytest.raises(forebay.Incomplete, match="node a has completed the same session with other content"):
        save(b, b"another's")
    with forebay.Client(b.address) as client:
        (level,) = (level for level in client.describe("job", 1).levels if level.level == "pfs")
        assert level.state != "complete"
    b.kill()  # an ordered end would wait for what never completes


def test_a_gateway_restart_in_the_middle_of_a_session(make: MakeGateway, tmp_path: Path) -> None:
    """Killed between two puts: the client goes on where it was; nothing acknowledged is sent again."""
    gateway = make().start()
    job = Job(writers=1)
    shards = job.shards(0)
    with forebay.Client(gateway.address, retry_timeout=30) as client, job.part(client, 0) as part:
        part.put("rank0/model.bin", shards["rank0/model.bin"])
        gateway.kill()
        gateway.start()
        part.put_many({name: data for name, data in shards.items() if name != "rank0/model.bin"})
        gateway.kill()
        gateway.start()
        part.commit(job.metadata, wait="pfs", timeout=60)
    job.assert_restores(gateway, tmp_path / "restored", "pfs")
    shutil.rmtree(tmp_path / "restored")
    job.assert_restores(gateway, tmp_path / "restored", "cache")
