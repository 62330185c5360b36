"""One flipped bit in a pack: found by whoever reads there, no shard handed out wrong, mended from a good copy."""

import contextlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest

import forebay
from forebay_gateway.cache.footer import BLOCK, align, find_footer
from forebay_wire.packs import is_pack_name
from integration.care_kit import FlipCount, Pair, fsck, quarantine_ids, read_back, repair, scrub, verdicts
from integration.kit import Job, cache_files, eventually, held, some_bytes
from soak.figures import reported
from soak.form import every, some

TINY = {f"t/{number:03}": some_bytes(500 + number, number) for number in range(80)}
INSIDE = {"head": 9, "index": 100, "shard": 20_000}  # offset in the pack's bytes, wherever it lies
IN_CACHE = {
    **{place: lambda size, at=at: at for place, at in INSIDE.items()},  # type: ignore[misc]
    "last shard": lambda size: size - 1,
    "footer": lambda size: align(size) + 60,
    "chunk table": lambda size: align(size) + BLOCK + 3,
}
TIERS = ("pfs", "object")


class Flips(FlipCount):
    """Of all tests here."""


@pytest.fixture(scope="module", autouse=True)
def figures() -> Iterator[None]:
    with reported("pack-flips", Flips.figures):
        yield


class Packed(Job):
    """A job whose one writer saves small shards alone."""

    def shards(self, writer: int) -> dict[str, bytes]:
        return TINY


@pytest.fixture
def packed(pair: Pair, job: Job) -> Iterator[Packed]:
    made = Packed(run=job.run, writers=1)
    made.save(pair.a, 0)
    made.wait(pair.a)
    yield made
    with forebay.Client(pair.a.address) as client, contextlib.suppress(forebay.NotFound):
        client.delete(made.run, made.step, force=True)


def pack_of(pair: Pair, job: Job) -> tuple[Path, str, int]:
    """(file in the cache, name, size) of the job's pack."""
    for path in cache_files(pair.a):
        with path.open("rb") as file:
            footer, _ = find_footer(file.fileno(), path.stat().st_size)
        if footer.run == job.run and is_pack_name(footer.name):
            return path, footer.name, footer.size
    raise AssertionError("it has no pack")


def restored(pair: Pair, job: Job, source: str) -> int:
    """Every shard that the source gives is equal; how many it does not give."""
    refused = 0
    with forebay.Client(pair.a.address, retry_timeout=0.0) as client:
        reader = client.open(job.run, job.step, source=source)
        for name, data in TINY.items():
            try:
                assert reader.read(name) == data, name
            except (forebay.Corrupt, forebay.Unavailable, forebay.NotFound):
                refused += 1
    return refused


CACHE_CASES = list(product(IN_CACHE, ["verify", "scrub", "fsck", "restore"]))


@pytest.mark.parametrize(("place", "how"), some(CACHE_CASES, ("shard", "restore"), ("index", "scrub"), ("chunk table", "fsck")))
def test_in_the_cache(pair: Pair, packed: Packed, tmp_path: Path, place: str, how: str) -> None:
    path, name, size = pack_of(pair, packed)
    Flips.flip(path, IN_CACHE[place](size))
    if how == "verify":
        assert verdicts(pair, packed)[name, "cache"] == "bad"
    elif how == "scrub":
        assert scrub(pair).bad == 1
    elif how == "fsck":
        (found,) = fsck(pair, packed, deep=True)
        assert (found.kind, found.where, found.name) == ("file_damaged", "cache", name)
    else:
        assert restored(pair, packed, "auto") == 0  # from the next copy
        if place in ("shard", "last shard"):
            assert quarantine_ids(pair, packed), "the read met it, and it is not in quarantine"
        else:  # nothing that a read of shards needs
            assert verdicts(pair, packed)[name, "cache"] == "bad"
    Flips.found += 1
    (done,) = repair(pair, packed, deep=how == "fsck")
    assert (done.where, done.outcome) == ("cache", "repaired")
    assert verdicts(pair, packed) == {}
    packed.assert_restores(pair.a, tmp_path / "restored", source="cache")


TIER_CASES = list(product(TIERS, INSIDE, ["verify", "reading back", "fsck", "restore"]))


@pytest.mark.parametrize(("tier", "place", "how"), some(TIER_CASES, ("pfs", "index", "fsck"), ("object", "shard", "restore")))
def test_on_a_tier(pair: Pair, packed: Packed, tmp_path: Path, tier: str, place: str, how: str) -> None:
    _, name, _ = pack_of(pair, packed)
    {"pfs": Flips.on_pfs, "object": Flips.on_object}[tier](pair, packed.key(name), INSIDE[place])
    if how == "verify":
        assert verdicts(pair, packed, tier) == {(name, tier): "bad"}
    elif how == "reading back":
        assert read_back(pair, tier).bad == 1
    elif how == "fsck":
        assert [(found.kind, found.where) for found in fsck(pair, packed, deep=True)] == [("copy_damaged", tier)]
    else:
        # Those of its chunk, which holds the head and the index of a pack this small, too; once it was met, all of the copy's.
        assert restored(pair, packed, tier) >= 1
    Flips.found += 1
    if how == "restore":
        verdicts(pair, packed, tier)
    (done,) = repair(pair, packed, deep=how == "fsck")
    assert (done.where, done.outcome) == (tier, "repaired")
    eventually(lambda: verdicts(pair, packed), lambda bad: bad == {})
    packed.assert_restores(pair.a, tmp_path / "restored", source=tier)


@pytest.mark.parametrize("place", every([*INSIDE, "last shard"], 4))
def test_a_drain_does_not_forward_it(pair: Pair, job: Job, place: str) -> None:
    """It is the only copy: no tier gets it, it is told of, and no shard comes back wrong."""
    packed = Packed(run=job.run, writers=1)
    with held(pair.a):
        packed.save(pair.a, 0)
        path, name, size = pack_of(pair, packed)
        Flips.flip(path, IN_CACHE[place](size))
    assert list(eventually(lambda: quarantine_ids(pair, packed))) == ["cache"]
    Flips.found += 1
    assert not (pair.root / packed.key(name)).exists()
    assert packed.key(name) not in pair.bucket.keys()  # noqa: SIM118  a method of the bucket
    with contextlib.suppress(forebay.Incomplete, forebay.Corrupt, forebay.NotFound):
        restored(pair, packed, "auto")
    with forebay.Client(pair.a.address) as client:
        client.delete(packed.run, packed.step, force=True)
