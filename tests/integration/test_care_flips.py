"""One flipped bit in every place where bytes lie: found, kept apart, mended from a good copy; or said, where none is left."""

import contextlib
import json
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import pytest

import forebay
from forebay_gateway.cache.footer import BLOCK, align
from forebay_gateway.core.layout import manifest_key, part_key
from integration.care_kit import FlipCount, Pair, fsck, quarantine_ids, read_back, repair, scrub, verdicts
from integration.kit import CHUNK, Job, cache_file_of, eventually
from soak.figures import reported
from soak.form import some

NAME = "rank0/model.bin"
CACHE_PLACES = {
    "data": lambda size: 5 * CHUNK + 7,
    "last byte": lambda size: size - 1,
    "footer": lambda size: align(size) + 60,
    "footer's checksum": lambda size: align(size) + BLOCK - 2,
    "chunk table": lambda size: align(size) + BLOCK + 9,
}


class Flips(FlipCount):
    """Of all tests here."""


@pytest.fixture(scope="module", autouse=True)
def figures() -> Iterator[None]:
    with reported("care-flips", Flips.figures):
        yield


def flip(path: Path, offset: int) -> None:
    Flips.flip(path, offset)


@pytest.fixture
def saved(pair: Pair, job: Job) -> Iterator[Job]:
    """A checkpoint on node a, drained to both tiers; gone after the test, so that fsck of the next has less to read."""
    job.writers = 1
    job.save(pair.a, 0)
    job.wait(pair.a)
    yield job
    with forebay.Client(pair.a.address) as client, contextlib.suppress(forebay.NotFound):
        client.delete(job.run, job.step, force=True)


def flip_in_cache(pair: Pair, job: Job, place: str) -> None:
    data = job.shards(0)[NAME]
    flip(cache_file_of(pair.a, data), CACHE_PLACES[place](len(data)))


def by_verify(pair: Pair, job: Job) -> None:
    assert verdicts(pair, job)[NAME, "cache"] == "bad"


def by_scrub(pair: Pair, job: Job) -> None:
    assert scrub(pair).bad == 1


def by_fsck(pair: Pair, job: Job) -> None:
    assert fsck(pair, job) == []  # the length is right
    (found,) = fsck(pair, job, deep=True)
    assert (found.kind, found.where, found.name) == ("file_damaged", "cache", NAME)
    assert "pfs or object" in found.remedy
    assert job.copies(pair.a)[NAME]["cache"] != "quarantined"  # it reports, and changes nothing


@pytest.mark.parametrize("place", CACHE_PLACES)
@pytest.mark.parametrize("find", [by_verify, by_scrub, by_fsck])
def test_a_bit_in_a_cache_file(pair: Pair, saved: Job, tmp_path: Path, place: str, find: Callable[[Pair, Job], None]) -> None:
    flip_in_cache(pair, saved, place)
    find(pair, saved)
    Flips.found += 1
    (done,) = repair(pair, saved, deep=find is by_fsck)
    assert (done.where, done.outcome) == ("cache", "repaired")
    assert verdicts(pair, saved) == {}
    saved.assert_restores(pair.a, tmp_path / "restored", source="cache")
    assert fsck(pair, saved, deep=True) == []


def damage_pfs(pair: Pair, key: str, offset: int) -> None:
    Flips.on_pfs(pair, key, offset)


def damage_object(pair: Pair, key: str, offset: int) -> None:
    Flips.on_object(pair, key, offset)


TIERS = {"pfs": damage_pfs, "object": damage_object}


WAYS = ("verify", "fsck", "scrub", "reading back")


@pytest.mark.parametrize(("tier", "how"), some([*product(TIERS, WAYS)], *zip(("pfs", "object") * 2, WAYS, strict=True)))
def test_a_bit_in_a_shard_on_a_tier(pair: Pair, saved: Job, tmp_path: Path, tier: str, how: str) -> None:
    TIERS[tier](pair, saved.key(NAME), 9 * CHUNK + 1)
    if how == "verify":
        assert verdicts(pair, saved, tier) == {(NAME, tier): "bad"}
    elif how == "reading back":
        assert read_back(pair, tier).bad == 1
        assert set(quarantine_ids(pair, saved)) == {tier}
    elif how == "scrub":
        assert scrub(pair).copies_bad == 1  # its version is another than the proved one
    else:
        (found,) = fsck(pair, saved, deep=True)
        assert (found.kind, found.where, found.remedy) == ("copy_damaged", tier, "put it again from the cache")
    Flips.found += 1
    (done,) = repair(pair, saved, deep=how == "fsck")
    assert (done.where, done.outcome) == (tier, "repaired")
    eventually(lambda: saved.copies(pair.a)[NAME][tier], lambda state: state == "verified")
    assert verdicts(pair, saved) == {}
    saved.assert_restores(pair.a, tmp_path / "restored", source=tier)


@pytest.mark.parametrize("tier", TIERS)
def test_a_bad_copy_whose_cache_file_is_gone_comes_by_way_of_the_other_tier(pair: Pair, saved: Job, tier: str) -> None:
    pair.a.cli("evict", saved.run, "7", "--yes")
    TIERS[tier](pair, saved.key(NAME), 3)
    assert verdicts(pair, saved, tier) == {(NAME, tier): "bad"}
    Flips.found += 1
    (done,) = repair(pair, saved)
    assert done.outcome == "repaired", done
    eventually(lambda: saved.copies(pair.a)[NAME][tier], lambda state: state == "verified")
    assert verdicts(pair, saved, tier) == {}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("document", ["manifest", "part_record"])
@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_document_on_a_tier(pair: Pair, saved: Job, tier: str, document: str, how: str) -> None:
    keys = {
        "manifest": manifest_key(saved.run, saved.step),
        "part_record": part_key(saved.run, saved.step, saved.session, 0),
    }
    key = keys[document]
    before = (pair.root / key).read_bytes() if tier == "pfs" else pair.bucket.get(key)
    if how == "flipped":
        TIERS[tier](pair, key, len(before) // 2)
    elif tier == "pfs":
        (pair.root / key).unlink()
    else:
        pair.bucket.delete(key)
    assert verdicts(pair, saved, tier) == {(key.rpartition("/")[2], tier): "bad"}
    (found,) = fsck(pair, saved)
    assert (found.kind, found.where, found.path) == (document, tier, key)
    Flips.found += how == "flipped"
    (done,) = repair(pair, saved)
    assert done.outcome == "repaired"
    after = (pair.root / key).read_bytes() if tier == "pfs" else pair.bucket.get(key)
    assert json.loads(after)["session"] == saved.session
    assert (verdicts(pair, saved), fsck(pair, saved)) == ({}, [])


@pytest.mark.parametrize("how", ["flipped", "gone"])
def test_a_part_file_in_the_cache(pair: Pair, saved: Job, how: str) -> None:
    (path,) = [path for path in pair.a.cache.glob("data/*/part-0-*.json") if json.loads(path.read_bytes())["run"] == saved.run]
    before = path.read_bytes()
    flip(path, len(before) // 2) if how == "flipped" else path.unlink()
    (found,) = fsck(pair, saved)
    assert found.kind == "part_file"
    Flips.found += how == "flipped"
    (done,) = repair(pair, saved)
    assert done.outcome == "repaired"
    assert path.read_bytes() == before


def test_a_cache_file_that_is_gone(pair: Pair, saved: Job, tmp_path: Path) -> None:
    cache_file_of(pair.a, saved.shards(0)[NAME]).unlink()
    (found,) = fsck(pair, saved)
    assert (found.kind, found.name) == ("file_missing", NAME)
    dry = json.loads(pair.a.cli("repair", "--json").stdout)
    assert [entry["outcome"] for entry in dry if entry["run"] == saved.run] == [""]
    assert [found.kind for found in fsck(pair, saved)] == ["file_missing"]  # a dry run did nothing
    (done,) = repair(pair, saved)
    assert done.outcome == "repaired"
    saved.assert_restores(pair.a, tmp_path / "restored", source="cache")


def test_no_good_copy_is_left_and_everybody_says_so(pair: Pair, saved: Job) -> None:
    flip_in_cache(pair, saved, "data")
    for tier, damage in TIERS.items():
        damage(pair, saved.key(NAME), 9 * CHUNK if tier == "pfs" else 2 * CHUNK)
    bad = verdicts(pair, saved)
    assert bad == {(NAME, where): "bad" for where in ("cache", "pfs", "object")}
    Flips.found += len(bad)
    done = repair(pair, saved, deep=True)
    assert {finding.where for finding in done} == {"cache", "pfs", "object"}
    assert all(finding.remedy == "" and finding.outcome == "" and "no " in finding.what for finding in done)
    assert pair.a.cli("repair", "--apply", check=False).returncode == 4
    assert verdicts(pair, saved) == {(NAME, where): "bad" for where in ("cache", "pfs", "object")}  # not one byte made up
    ids = quarantine_ids(pair, saved)
    assert set(ids) == {"cache", "pfs", "object"}
    with forebay.Client(pair.a.address) as client:
        for id_ in ids.values():
            with pytest.raises(forebay.InvalidArgument, match="no good copy"):
                client.care.release(id_)
        assert cache_file_of_length(pair, saved)  # still there, for whoever wants to look at it
        client.care.release(ids["cache"], force=True)
        assert not cache_file_of_length(pair, saved)
        client.delete(saved.run, saved.step, force=True)


def cache_file_of_length(pair: Pair, job: Job) -> bool:
    """Whether a file of the large shard (all but the flipped bit) is in the cache."""
    head = job.shards(0)[NAME][:CHUNK]
    return any(path.read_bytes()[:CHUNK] == head for path in pair.a.cache.glob("data/*/*.shard"))


def test_release_where_a_good_copy_is(pair: Pair, saved: Job) -> None:
    flip_in_cache(pair, saved, "data")
    verdicts(pair, saved)
    id_ = quarantine_ids(pair, saved)["cache"]
    shown = json.loads(pair.a.cli("quarantine", "show", id_, "--json").stdout)
    assert (shown["name"], shown["good"]) == (NAME, ["pfs", "object"])
    assert "damaged" in shown["reason"]
    dry = json.loads(pair.a.cli("quarantine", "release", id_, "--json").stdout)
    assert dry == {**shown, "released": False}
    assert "would release" in pair.a.cli("quarantine", "release", id_, "--force").stdout
    assert quarantine_ids(pair, saved) == {"cache": id_} and saved.copies(pair.a)[NAME]["cache"] == "quarantined"
    pair.a.cli("quarantine", "release", id_, "--yes")
    Flips.found += 1
    assert saved.copies(pair.a)[NAME]["cache"] == "evicted"
    assert verdicts(pair, saved)[NAME, "cache"] == "absent"
    damage_pfs(pair, saved.key(NAME), 5)
    verdicts(pair, saved)
    pair.a.cli("quarantine", "release", quarantine_ids(pair, saved)["pfs"], "--yes")
    Flips.found += 1
    eventually(lambda: saved.copies(pair.a)[NAME]["pfs"], lambda state: state == "verified")
    assert quarantine_ids(pair, saved) == {}
