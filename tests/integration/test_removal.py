"""`rm`: a dry run first, then gone from every level; what is pinned, not yet safe, or not ours stays."""

import json
from pathlib import Path

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess
from integration.conftest import Bucket
from integration.kit import Cluster, Job, assert_refused, eventually, files_below, held

Pair = Cluster[Bucket]


@pytest.fixture
def saved(pair: Pair, job: Job) -> Job:
    job.writers = 1
    job.save_and_wait([pair.a])
    return job


def shard_files(gateway: GatewayProcess) -> set[Path]:
    return set(gateway.cache.glob("data/*/*"))


def test_a_dry_run_removes_nothing(pair: Pair, saved: Job, tmp_path: Path) -> None:
    told = json.loads(pair.a.cli("rm", saved.run, "7", "--json").stdout)
    size = sum(map(len, saved.everything.values()))
    assert told == {
        "run": saved.run,
        "step": 7,
        "deleted": False,
        "shards": len(saved.everything),
        "size": size,
        "levels": ["cache", "pfs", "object"],
    }
    assert "would delete" in pair.a.cli("rm", saved.run, "7").stdout
    for source in ("cache", "pfs", "object"):
        saved.assert_restores(pair.a, tmp_path / source, source)


def test_gone_from_every_level_and_foreign_files_stay(pair: Pair, saved: Job) -> None:
    before = shard_files(pair.a)
    kept = Job(run=saved.run, step=8, writers=1)
    kept.save_and_wait([pair.a])
    foreign = pair.root / saved.directory / "notes.txt"
    foreign.write_text("mine")
    beside = pair.root / saved.key("rank0/mine.txt")
    beside.write_text("mine too")
    pair.bucket.put(f"{saved.directory}/notes.txt", b"mine")
    told = json.loads(pair.a.cli("rm", saved.run, "7", "--yes", "--json").stdout)
    assert (told["deleted"], set(told["levels"])) == (True, {"cache", "pfs", "object"})

    assert set(files_below(pair.root / saved.directory)) == {"notes.txt", str(beside.relative_to(pair.root / saved.directory))}
    assert pair.bucket.keys(saved.directory) == [f"{saved.directory}/notes.txt"]
    assert not (pair.root / saved.directory / "current").is_symlink()
    assert shard_files(pair.a) & before == set() or len(shard_files(pair.a)) < len(before) + len(kept.everything)
    for gateway in pair:
        with forebay.Client(gateway.address) as client:
            assert [found.step for found in client.checkpoints(saved.run)] == [8]
            with pytest.raises(forebay.NotFound):
                client.open(saved.run, 7)
    assert_refused(pair.a.cli("rm", saved.run, "7", "--yes", check=False), 3, "step 7")
    # The name is free again.
    again = Job(run=saved.run, step=7, writers=1, session="second life")
    again.save_and_wait([pair.a])


def test_a_pinned_checkpoint_is_refused(pair: Pair, saved: Job, tmp_path: Path) -> None:
    pair.a.cli("pin", saved.run, "7")
    for flags in (("--yes",), ("--yes", "--force"), ()):
        assert_refused(pair.a.cli("rm", saved.run, "7", *flags, check=False), 2, "pinned")
    saved.assert_restores(pair.a, tmp_path / "restored", "pfs")
    pair.a.cli("unpin", saved.run, "7")
    pair.a.cli("rm", saved.run, "7", "--yes")


def test_the_only_copy_goes_by_force_alone(pair: Pair, job: Job, tmp_path: Path) -> None:
    job.writers = 1
    with forebay.Client(pair.a.address) as client:

        def pending() -> list[int]:
            return [tier.pending_copies for tier in client.status().tiers]

        before = pending()
        with held(pair.a):
            job.save(pair.a, 0)
            assert_refused(pair.a.cli("rm", job.run, "7", "--yes", check=False), 2, "force")
            job.assert_restores(pair.a, tmp_path / "restored", "cache")
            pair.a.cli("rm", job.run, "7", "--yes", "--force")
        assert client.latest(job.run) is None
        eventually(pending, lambda now: now == before)
    assert not (pair.root / job.directory).exists() or files_below(pair.root / job.directory) == {}
    assert pair.bucket.keys(job.directory) == []


def test_an_incomplete_checkpoint_goes_by_force(pair: Pair, job: Job) -> None:
    job.save(pair.a, 1)
    assert_refused(pair.a.cli("rm", job.run, "7", "--yes", check=False), 2, "force")
    pair.a.cli("rm", job.run, "7", "--yes", "--force")
    with forebay.Client(pair.a.address) as client, pytest.raises(forebay.NotFound):
        client.describe(job.run, 7)
