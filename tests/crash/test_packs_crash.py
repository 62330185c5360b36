"""What a crash or damage can leave of packs, one state a test; made for real, if need be by editing files meanwhile."""

import json
import shutil
import signal
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from crash.kit import RUN, Bench, content, until
from forebay import AlreadyExists, Corrupt, ForebayError, Incomplete
from forebay_gateway.cache.footer import find_footer
from forebay_gateway.catalog import ReadTxn
from forebay_wire.packs import is_pack_name
from soak.form import every, some

TINY = {f"t/{n:03}": 40 * n for n in range(100)}
PAIRS = [{f"u{batch}/{n}": 700 for n in range(2)} for batch in range(9)]


def packs(bench: Bench) -> list[Path]:
    """Files of packs in the cache, by their own footers."""
    found = []
    for path in sorted((bench.cache / "data").glob("*/*.shard")):
        with path.open("rb") as file:
            footer, _ = find_footer(file.fileno(), path.stat().st_size)
        if is_pack_name(footer.name):
            found.append(path)
    return found


def held(bench: Bench, *batches: dict[str, int]) -> None:
    """Saved with the drain held, killed."""
    bench.gateway.start()
    with bench.client() as client:
        client.hold("")
        bench.save(client, 1, {}, TINY, *batches)
    bench.gateway.kill()


def released(bench: Bench) -> None:
    """Started, drained, and as it should be at every level."""
    bench.gateway.start()
    with bench.client() as client:
        bench.compare(client, 1, "cache")
        client.release("")
    bench.check_settled({1})


def put_and_die(bench: Bench, failpoint: str) -> None:
    """A part with one acknowledged pack, and a second one under way when the gateway dies."""
    bench.gateway.start()
    with bench.client() as client:
        bench.put_many(client.checkpoint(RUN, 1, session="job-1"), TINY)
    bench.gateway.kill()
    bench.gateway.start(failpoints=f"{failpoint}=kill")
    with bench.client(retry_s=0.0) as client, pytest.raises(ForebayError):
        client.checkpoint(RUN, 1, session="job-1").put_many({f"late/{n}": bytes(100) for n in range(64)})
    assert bench.gateway.wait_exit() == -signal.SIGKILL


# From its rename on a pack is whole, and adopted although nobody was told of it; before, it goes.
ADOPTED = ("seal.before_dir_fsync", "small.before_catalog")


@pytest.mark.parametrize("failpoint", every(["seal.before_fsync", "write.before_chunk", *ADOPTED], 3))
def test_a_group_that_was_cut_short_harms_none_before_it(bench: Bench, failpoint: str) -> None:
    """Every acknowledged shard is there; the others can be put again, whatever is left of them."""
    put_and_die(bench, failpoint)
    bench.gateway.start()
    with bench.client() as client:
        part = client.checkpoint(RUN, 1, session="job-1")
        bench.put_many(part, TINY)  # the same bytes again: nothing is written, and the receipts are those of before
        if failpoint in ADOPTED:  # equal bytes are acknowledged now
            assert len(packs(bench)) == 2
            assert len(part.put_many({f"late/{n}": bytes(100) for n in range(64)})) == 64
            assert len(packs(bench)) == 2
            part.abort()
            assert packs(bench) == []
            return
        bench.put_many(part, {f"late/{n}": 100 for n in range(64)})
        assert len(packs(bench)) == 2
        bench.commit(part)
    bench.check_settled({1})


@pytest.mark.parametrize("cut", some([1, 4096, 5000, -4096], 5000))
def test_a_torn_pack_is_dropped_and_what_was_acknowledged_before_stays(bench: Bench, cut: int) -> None:
    """Without its last bytes, or with too many: no footer stands where it should."""
    put_and_die(bench, "small.before_catalog")
    torn = packs(bench)[-1]
    with torn.open("r+b") as file:
        file.truncate(torn.stat().st_size - cut)
    bench.gateway.start()
    assert not torn.exists()
    with bench.client() as client:
        part = client.checkpoint(RUN, 1, session="job-1")
        bench.put_many(part, TINY)
        bench.commit(part)
        bench.compare(client, 1, "cache")
    bench.check_settled({1})


def test_an_acknowledged_pack_that_is_torn_is_told_to_its_writer(bench: Bench) -> None:
    bench.gateway.start()
    with bench.client() as client:
        part = client.checkpoint(RUN, 1, session="job-1")
        bench.put_many(part, TINY)
        bench.gateway.kill()
        (torn,) = packs(bench)
        with torn.open("r+b") as file:
            file.truncate(4096)
        bench.gateway.start()
        with pytest.raises(Incomplete, match="100 shard"):
            bench.commit(part)
        bench.put_many(part, TINY)
        bench.commit(part)
        bench.compare(client, 1, "cache")
    bench.check_settled({1})


def test_packs_are_found_again_without_a_catalog(bench: Bench) -> None:
    held(bench)
    shutil.rmtree(bench.cache / "catalog")
    released(bench)


def test_an_open_part_with_packs_is_found_again_without_a_catalog(bench: Bench) -> None:
    bench.gateway.start()
    with bench.client() as client:
        part = client.checkpoint(RUN, 1, session="job-1")
        bench.put_many(part, TINY)
        bench.gateway.kill()
        shutil.rmtree(bench.cache / "catalog")
        bench.gateway.start()
        bench.put_many(part, TINY)
        with pytest.raises(AlreadyExists, match="other content"):
            part.put("t/001", b"other bytes")
        bench.put_many(part, {"t/late": 10})
        bench.commit(part)
        bench.compare(client, 1, "cache")
    bench.check_settled({1})


@pytest.mark.parametrize(
    ("failpoint", "catalog"),
    some(
        list(product(("join.before_catalog", "join.before_unlink"), ("kept", "lost"))),
        ("join.before_unlink", "kept"),
        ("join.before_unlink", "lost"),
    ),
)
def test_a_join_that_was_cut_short(bench: Bench, failpoint: str, catalog: str) -> None:
    """Before the transaction and after it, old packs and new one lie side by side; each shard counts once."""
    bench.gateway.start(failpoints=f"{failpoint}=kill")
    with bench.client() as client:
        part = client.checkpoint(RUN, 1, session="job-1")
        for batch in (TINY, *PAIRS):
            bench.put_many(part, batch)
        assert len(packs(bench)) == 10
    with bench.client(retry_s=0.0) as client, pytest.raises(ForebayError):
        client.checkpoint(RUN, 1, session="job-1").commit()  # names nothing: refused before anything is joined
    with bench.client(retry_s=0.0) as client, pytest.raises(ForebayError):
        again = client.checkpoint(RUN, 1, session="job-1")
        for batch in (TINY, *PAIRS):
            bench.put_many(again, batch)
        again.commit()
    assert bench.gateway.wait_exit() == -signal.SIGKILL
    assert len(packs(bench)) == 11
    if failpoint == "join.before_unlink":
        packs(bench)[0].unlink()  # the first of the old ones: it died in the middle of that
    if catalog == "lost":
        shutil.rmtree(bench.cache / "catalog")
    bench.gateway.start()
    assert len(packs(bench)) == (10 if (failpoint, catalog) == ("join.before_catalog", "kept") else 1)
    with bench.client() as client:
        again = client.checkpoint(RUN, 1, session="job-1")
        for batch in (TINY, *PAIRS):
            bench.put_many(again, batch)
        bench.commit(again)
        assert len(packs(bench)) == 1
        bench.compare(client, 1, "cache")
    bench.check_settled({1})


def test_joined_packs_come_back_from_files_alone(bench: Bench) -> None:
    held(bench, *PAIRS)
    assert len(packs(bench)) == 1
    shutil.rmtree(bench.cache / "catalog")
    released(bench)


@pytest.mark.parametrize("where", some(["head", "index", "data", "footer"], "data"))
def test_a_flipped_bit_is_found_and_mended_from_a_tier(bench: Bench, where: str) -> None:
    bench.gateway.start()
    with bench.client() as client:
        bench.save(client, 1, {}, TINY)
        client.wait(RUN, 1, "all", timeout=60)
    bench.gateway.terminate()
    (path,) = packs(bench)
    at = {"head": 9, "index": 100, "data": 20_000, "footer": path.stat().st_size - 8192 + 100}[where]
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)
        file.seek(at)
        file.write(bytes([byte[0] ^ 4]))
    bench.gateway.start()
    with bench.client() as client:
        reports = list(client.care.verify(RUN, 1, "cache"))
        assert [report.state for report in reports if is_pack_name(report.name)] == ["bad"], reports
        bench.compare(client, 1)
    bench.check_settled({1})


def test_a_flipped_bit_without_another_copy_is_never_handed_out(bench: Bench) -> None:
    held(bench)
    (path,) = packs(bench)
    with path.open("r+b") as file:
        file.seek(20_000)
        file.write(b"\0\0\0\0")
    bench.gateway.start()
    with bench.client(retry_s=0.0) as client:
        until(lambda: all(tier.capabilities for tier in client.status().tiers), "tiers are proved")
        reader = client.open(RUN, 1)
        outcomes = set()
        for name in list(TINY)[1:]:
            try:
                assert reader.read(name) == content((1, name), TINY[name])
                outcomes.add("good")
            except Corrupt:
                outcomes.add("corrupt")
        assert "corrupt" in outcomes


def test_documents_name_packs_and_their_shards(bench: Bench) -> None:
    held(bench)

    def look(txn: ReadTxn) -> Any:
        return [row for session in txn.sessions() for row in txn.shards(session.id)]

    (row,) = bench.rows(look)
    (part_file,) = (bench.cache / "data").glob("*/part-*.json")
    body = json.loads(part_file.read_bytes())
    assert body["version"] == 2 and body["shards"] == []
    assert [pack["name"] for pack in body["packs"]] == [row.name]
    assert {name: size for name, size, _, _ in body["packs"][0]["entries"]} == TINY
    assert (row.packed, row.packed_size) == (100, sum(TINY.values()))
    released(bench)
