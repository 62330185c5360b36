"""The file: growth and its end, space, ownership, damage."""

import asyncio
import contextlib
import errno
import os
import struct
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import lmdb
import pytest

from catalog.kit import TIERS, begin, commit, dump, opened, put, sealed
from forebay_gateway.catalog import Catalog, CatalogDamaged, WriteTxn, pages, schema, storage, structure
from forebay_gateway.core.errors import DiskFull, StartupError, Unavailable
from forebay_gateway.core.records import SessionRow, ShardKey

TINY = {"map_size": 256 << 10, "reserve_bytes": 256 << 10}
PAGE = 4096


async def fill(catalog: Catalog, session: SessionRow, count: int, table_bytes: int = 2000) -> list[Any]:
    """Seal `count` shards at once; what each gave or raised."""

    async def one() -> ShardKey:
        key = ShardKey(session.id, catalog.new_id())
        await catalog.write(lambda txn: txn.seal(sealed(key, f"n{key.shard_id}"), b"x" * table_bytes))
        return key

    return await asyncio.gather(*(one() for _ in range(count)), return_exceptions=True)


async def test_the_map_grows_while_readers_run(tmp_path: Path) -> None:
    async with opened(tmp_path / "c", **TINY) as catalog:
        session = await begin(catalog)
        stop = threading.Event()
        reads: list[int] = []

        def read() -> None:
            while not stop.is_set():
                with catalog.read() as txn:
                    rows = list(txn.shards(session.id))
                    assert all(len(txn.chunks(row.key)) == 2000 for row in rows[-20:])
                    assert txn.totals().shards == len(rows)
                    reads.append(len(rows))

        readers = [asyncio.create_task(asyncio.to_thread(read)) for _ in range(2)]
        results = await fill(catalog, session, 2000)
        stop.set()
        await asyncio.gather(*readers)
        assert all(isinstance(result, ShardKey) for result in results)
        assert catalog.stats()["map_bytes"] >= 8 << 20
        assert (reads and reads == sorted(reads)) or len(set(reads)) > 1
        with catalog.read() as txn:
            assert txn.totals().shards == 2000 and txn.totals() == txn.recount()


READER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], readonly=True, map_size=int(sys.argv[2]), max_dbs=64, subdir=True)
for line in sys.stdin:
    try:
        txn = env.begin()
    except lmdb.MapResizedError:
        env.set_mapsize(0)  # take the size that the writer has given it
        txn = env.begin()
        print("resized", end=" ")
    with txn:
        names = [key for key, _ in txn.cursor()]
        count = txn.stat(env.open_db(b"shards", txn=txn, create=False))["entries"]
        rows = sum(1 for _ in txn.cursor(env.open_db(b"shards", txn=txn, create=False)))
        print(count, rows, flush=True)
"""


async def test_the_map_grows_while_another_process_reads(tmp_path: Path) -> None:
    """One that opened the small map: each look is whole, and it sees what was written after the growth."""
    async with opened(tmp_path / "c", **TINY) as catalog:
        session = await begin(catalog)
        small = catalog.stats()["map_bytes"]
        command = [sys.executable, "-c", READER, str(tmp_path / "c"), str(small)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
            assert reader.stdin is not None and reader.stdout is not None

            def look() -> list[str]:
                assert reader.stdin is not None and reader.stdout is not None
                print("look", file=reader.stdin, flush=True)
                return reader.stdout.readline().split()

            assert await asyncio.to_thread(look) == ["0", "0"]
            looks = []
            for done in range(200, 2001, 200):
                results = await fill(catalog, session, 200)
                assert all(isinstance(result, ShardKey) for result in results)
                looks.append(await asyncio.to_thread(look))
                assert looks[-1][-2:] == [str(done), str(done)]
            reader.stdin.close()
        assert reader.returncode == 0
        assert catalog.stats()["map_bytes"] > small
        assert any(seen[0] == "resized" for seen in looks), "the reader never met a map that had grown"


async def test_one_act_larger_than_the_map_grows_it(tmp_path: Path) -> None:
    async with opened(tmp_path / "c", **TINY) as catalog:
        await catalog.write(lambda txn: txn.set_setting("big", b"x" * (3 << 20)))
        with catalog.read() as txn:
            assert len(txn.setting("big") or b"") == 3 << 20
    async with opened(tmp_path / "c", **TINY) as catalog:  # the smaller size asked for does not hide what is there
        with catalog.read() as txn:
            assert len(txn.setting("big") or b"") == 3 << 20
        await catalog.write(lambda txn: txn.set_setting("more", b"x" * (3 << 20)))
    # A map of just what is used has no page for the number of a new tier: it grows at open, too.
    async with opened(tmp_path / "c", **TINY, tiers=(*TIERS, *(f"tier-{n}" for n in range(2000)))) as catalog:
        with catalog.read() as txn:
            assert len(txn.totals().tiers) == 2002 and len(txn.setting("more") or b"") == 3 << 20


async def test_a_full_catalog_refuses_and_keeps_what_was_acknowledged(tmp_path: Path) -> None:
    async with opened(tmp_path / "c", **TINY, max_map_size=1 << 20) as catalog:
        session = await begin(catalog)
        results = await fill(catalog, session, 1000)
        refused = [result for result in results if not isinstance(result, ShardKey)]
        kept = [result for result in results if isinstance(result, ShardKey)]
        assert len(kept) > 50 and refused
        for result in refused:
            assert isinstance(result, Unavailable) and "the catalog is full" in str(result)
            assert result.retry_after_s
        assert catalog.stats()["map_bytes"] == 1 << 20
        with catalog.read() as txn:
            assert [row.key for row in txn.shards(session.id)] == kept
            assert all(txn.chunks(key) == b"x" * 2000 for key in kept)
            assert txn.totals() == txn.recount()
    async with opened(tmp_path / "c", **TINY, max_map_size=1 << 20) as catalog:  # it opens as it is
        with catalog.read() as txn:
            assert [row.key for row in txn.shards(session.id)] == kept
    # Space comes back with a larger limit, or as rows go.
    async with opened(tmp_path / "c", **TINY, max_map_size=4 << 20) as catalog:
        with catalog.read() as txn:
            assert [row.key for row in txn.shards(session.id)] == kept
        assert all(isinstance(result, ShardKey) for result in await fill(catalog, session, 100))
        await catalog.write(lambda txn: txn.drop_session(session.id))
        session = await begin(catalog, session="next")
        assert all(isinstance(result, ShardKey) for result in await fill(catalog, session, len(kept)))


async def test_in_a_full_catalog_an_act_that_fits_is_not_refused_with_its_group(tmp_path: Path) -> None:
    async with opened(tmp_path / "c", **TINY, max_map_size=1 << 20) as catalog:
        big = [catalog.write(lambda txn: txn.set_setting("big", b"x" * (2 << 20))) for _ in range(3)]
        small = [catalog.write(lambda txn, n=n: txn.set_setting(f"small-{n}", b"x")) for n in range(3)]
        results = await asyncio.gather(big[0], small[0], big[1], small[1], big[2], small[2], return_exceptions=True)
        assert [type(result) for result in results] == [Unavailable, type(None)] * 3
        with catalog.read() as txn:
            assert [txn.setting(f"small-{n}") for n in range(3)] == [b"x"] * 3


async def test_a_full_disk_shows_before_a_commit_and_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened(tmp_path / "c", reserve_bytes=256 << 10) as catalog:
        session = await begin(catalog)
        full = True
        real = os.posix_fallocate

        def fallocate(descriptor: int, offset: int, length: int) -> None:
            if full:
                raise OSError(errno.ENOSPC, "No space left on device")
            real(descriptor, offset, length)

        monkeypatch.setattr(storage.os, "posix_fallocate", fallocate)
        before = catalog.stats()["file_bytes"]
        kept, refused = [], None
        for _ in range(2000):
            (result,) = await fill(catalog, session, 1)
            if not isinstance(result, ShardKey):
                refused = result
                break
            kept.append(result)
        assert isinstance(refused, DiskFull) and "no space is left" in str(refused) and refused.retry_after_s
        # It went on as long as blocks were there, and never asked the file system for one inside a commit.
        assert len(kept) > 20 and os.stat(tmp_path / "c" / "data.mdb").st_size == before
        with catalog.read() as txn:
            assert [row.key for row in txn.shards(session.id)] == kept
    async with opened(tmp_path / "c", reserve_bytes=256 << 10) as catalog:  # a restart does not need the space either
        with catalog.read() as txn:
            assert [row.key for row in txn.shards(session.id)] == kept
        assert isinstance((await fill(catalog, session, 1))[0], DiskFull)
        full = False
        (result,) = await fill(catalog, session, 1)
        assert isinstance(result, ShardKey)


@pytest.mark.parametrize("tiers", [TIERS, (*TIERS, "new")])
async def test_blocks_that_cannot_be_had_cut_off_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiers: tuple[str, ...]
) -> None:
    """The first transaction of a new catalog, or of a new tier, goes behind what was the file's end when it was opened."""

    def fallocate(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if tiers != TIERS:
        async with opened(tmp_path / "c"):
            pass
        os.truncate(tmp_path / "c" / "data.mdb", used_bytes(tmp_path / "c"))
    monkeypatch.setattr(storage.os, "posix_fallocate", fallocate)
    catalog = storage.Storage.open(tmp_path / "c", tiers, "node-1", storage.Limits(8 << 20, 8 << 20, 1 << 20))
    try:
        assert os.stat(tmp_path / "c" / "data.mdb").st_size >= catalog.used_bytes()
    finally:
        catalog.close()


def used_bytes(path: Path) -> int:
    with contextlib.closing(lmdb.open(str(path), max_dbs=64, readonly=True)) as env:
        return (env.info()["last_pgno"] + 1) * PAGE


async def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(mount)], capture_output=True, check=False)
    if made.returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        failures: list[BaseException] = []
        async with opened(mount / "c", reserve_bytes=1 << 20, on_failure=failures.append) as catalog:
            session = await begin(catalog)
            ballast = mount / "ballast"
            with ballast.open("wb") as file, contextlib.suppress(OSError):
                while file.write(b"x" * 65536):
                    file.flush()
            assert os.statvfs(mount).f_bavail == 0
            results = [(await fill(catalog, session, 1))[0] for _ in range(800)]
            kept = [result for result in results if isinstance(result, ShardKey)]
            assert len(kept) > 50 and isinstance(results[-1], DiskFull) and "no space is left" in str(results[-1])
            ballast.unlink()
            assert all(isinstance(result, ShardKey) for result in await fill(catalog, session, 50))
            with catalog.read() as txn:
                assert txn.totals().shards == len(kept) + 50 and txn.totals() == txn.recount()
        assert failures == []
    finally:
        subprocess.run(["umount", str(mount)], check=True)


async def test_blocks_are_really_there_ahead_of_need(tmp_path: Path) -> None:
    async with opened(tmp_path / "c", reserve_bytes=1 << 20) as catalog:
        await fill(catalog, await begin(catalog), 300)
        state = os.stat(tmp_path / "c" / "data.mdb")
        stats = catalog.stats()
        assert stats["file_bytes"] == state.st_size and state.st_size - stats["used_bytes"] >= 512 << 10
        assert state.st_blocks * 512 >= state.st_size  # allocated, no hole


async def test_reopening_keeps_everything(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as catalog:
        session = await begin(catalog)
        await put(catalog, session, "a", "b")
        await commit(catalog, session)
        with catalog.read() as txn:
            before = dump(txn)
    async with opened(tmp_path / "c") as catalog:
        with catalog.read() as txn:
            assert dump(txn) == before


async def test_only_one_may_have_it_open(tmp_path: Path) -> None:
    async with opened(tmp_path / "c"):
        with pytest.raises(StartupError, match="in use"):
            await Catalog.open(tmp_path / "c", tiers=TIERS, node="node-1")
    async with opened(tmp_path / "c"):
        pass


async def test_another_node_s_catalog_is_refused(tmp_path: Path) -> None:
    async with opened(tmp_path / "c"):
        pass
    with pytest.raises(StartupError, match="another node") as caught:
        await Catalog.open(tmp_path / "c", tiers=TIERS, node="node-2")
    assert not isinstance(caught.value, CatalogDamaged)
    async with opened(tmp_path / "c"):  # the failed start left no lock behind
        pass


NEWER = schema.with_checksum(schema.u64(schema.FORMAT_VERSION + 1))
OLDER = schema.u64(2)  # the first to carry a checksum was 3


@pytest.mark.parametrize("version", [NEWER, OLDER], ids=["newer", "older"])
async def test_another_format_is_refused(tmp_path: Path, version: bytes) -> None:
    async with opened(tmp_path / "c") as catalog:
        await catalog.write(lambda txn: txn._put(txn._db.meta, schema.META_FORMAT, version))
    with pytest.raises(StartupError, match="another release") as caught:
        await Catalog.open(tmp_path / "c", tiers=TIERS, node="node-1")
    assert not isinstance(caught.value, CatalogDamaged)


@pytest.mark.parametrize("key", [schema.META_FORMAT, schema.META_NODE])
async def test_a_flipped_bit_in_what_it_is_and_whose_is_damage_and_no_other_release_or_node(tmp_path: Path, key: bytes) -> None:
    async with opened(tmp_path / "c") as catalog:

        def flip(txn: WriteTxn) -> None:
            value = bytearray(txn._get(txn._db.meta, key) or b"")
            value[0] ^= 0x80
            txn._put(txn._db.meta, key, bytes(value))

        await catalog.write(flip)
    with pytest.raises(CatalogDamaged):
        await Catalog.open(tmp_path / "c", tiers=TIERS, node="node-1")


async def test_a_tier_s_name_that_is_no_text_is_damage(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as catalog:
        await catalog.write(lambda txn: txn._put(txn._db.tiers, b"p\xe6s", b"\0\1"))
    with pytest.raises(CatalogDamaged):
        await Catalog.open(tmp_path / "c", tiers=TIERS, node="node-1")


async def test_a_path_that_cannot_be_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StartupError, match="cannot be opened"):
        await Catalog.open(tmp_path / "file", tiers=TIERS, node="node-1")


async def test_a_stranger_s_lmdb_file_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    with lmdb.open(str(tmp_path / "c"), max_dbs=2) as foreign:
        foreign.open_db(b"theirs")
    with pytest.raises(CatalogDamaged, match="holds no catalog"):
        await Catalog.open(tmp_path / "c", tiers=TIERS, node="node-1")


# Damage.


@pytest.fixture
async def data_file(tmp_path: Path) -> Path:
    """The closed file of a catalog with some thousand pages in use."""
    async with opened(tmp_path / "c") as catalog:
        session = await begin(catalog)
        await fill(catalog, session, 400, table_bytes=9000)  # overflow pages too
        await commit(catalog, session)
    return tmp_path / "c" / "data.mdb"


async def refused(data_file: Path) -> str:
    with pytest.raises(CatalogDamaged) as caught:
        await Catalog.open(data_file.parent, tiers=TIERS, node="node-1")
    assert "forebay rebuild" in str(caught.value) and isinstance(caught.value, StartupError)
    return str(caught.value)


@pytest.mark.parametrize("length", [1, 100, PAGE, PAGE + 50, 2 * PAGE, 3 * PAGE, 40 * PAGE + 7, "half", "one page"])
async def test_a_truncated_file_is_damage(data_file: Path, length: int | str) -> None:
    used = newest_last_page(data_file)
    at = {"half": used // 2 * PAGE, "one page": used * PAGE}.get(str(length), length)
    os.truncate(data_file, int(at))
    assert "cut off" in await refused(data_file)


async def test_an_empty_or_missing_file_is_damage_once_there_was_a_catalog(data_file: Path) -> None:
    os.truncate(data_file, 0)
    assert "gone or empty" in await refused(data_file)
    data_file.unlink()
    assert "gone or empty" in await refused(data_file)


async def test_only_the_reserve_cut_off_is_no_damage(data_file: Path) -> None:
    os.truncate(data_file, (newest_last_page(data_file) + 1) * PAGE)
    async with opened(data_file.parent) as catalog:
        with catalog.read() as txn:
            assert txn.totals().shards == 400 and txn.totals() == txn.recount()


@pytest.mark.parametrize("content", [b"\xff", b"garbage!", b"\0"])
async def test_garbage_is_damage(data_file: Path, content: bytes) -> None:
    length = data_file.stat().st_size
    data_file.write_bytes((content * length)[:length])
    await refused(data_file)


@pytest.mark.parametrize("page", [0, 1])
async def test_a_flipped_byte_in_a_header_field_is_damage(data_file: Path, page: int) -> None:
    """Page number, flags, magic, version, page size, both roots, last page and transaction: high and low bytes."""
    good = data_file.read_bytes()
    base = page * PAGE
    roots = (base + 16 + 24 + 40, base + 16 + 24 + 48 + 40)
    fields = [base, base + 7, base + 10, base + 16, base + 19, base + 24 + 16 + 1, roots[0] + 7, roots[1] + 6]
    fields += [base + 16 + 24 + 96 + 7, base + 16 + 24 + 104 + 7, base + 16 + 24 + 104]
    for offset in fields:
        damaged = bytearray(good)
        damaged[offset] ^= 0x5A
        data_file.write_bytes(damaged)
        await refused(data_file)
    version = bytearray(good)
    struct.pack_into("=I", version, base + 20, 2)
    data_file.write_bytes(version)
    with pytest.raises(StartupError, match="incompatible version of LMDB"):
        await Catalog.open(data_file.parent, tiers=TIERS, node="node-1")
    data_file.write_bytes(good)
    async with opened(data_file.parent):
        pass


async def test_the_walk_finds_every_page_that_lmdb_counts(data_file: Path) -> None:
    """The walk is only as good as its reach: pages it visits, from LMDB's own statistics."""
    seen: set[int] = set()
    descriptor = os.open(data_file, os.O_RDONLY)
    reads = os.pread

    def counting(fd: int, length: int, offset: int) -> bytes:
        seen.add(offset // PAGE)
        return reads(fd, length, offset)

    structure.os.pread, restore = counting, reads  # type: ignore[assignment]
    try:
        structure.check_trees(descriptor, pages.newest_meta(descriptor))
    finally:
        structure.os.pread = restore
        os.close(descriptor)
    with lmdb.open(str(data_file.parent), max_dbs=40, readonly=True) as opened_env:
        expected = overflow = 0
        with opened_env.begin() as txn:
            stats = [txn.stat()]
            stats += [txn.stat(opened_env.open_db(name.encode(), txn=txn, create=False)) for name in schema.DATABASE_NAMES]
        for stat in stats:
            expected += stat["branch_pages"] + stat["leaf_pages"]
            overflow += stat["overflow_pages"]
    heads = overflow // 3  # 9,000 bytes and a header need three pages, of which the walk visits the first
    assert overflow == 3 * 400
    free_list = len(seen - {0, 1}) - expected - heads
    assert 0 <= free_list <= 20  # the free list's own tree is in no statistic


async def test_a_creation_cut_short_begins_again(tmp_path: Path) -> None:
    """Power went between the file's creation and its first synced transaction: blank pages, and no owner noted."""
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "data.mdb").write_bytes(b"\0" * 2 * PAGE)
    async with opened(tmp_path / "c") as catalog:
        await begin(catalog)
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "data.mdb").touch()
    async with opened(tmp_path / "d") as catalog:
        await begin(catalog)


async def test_every_lmdb_error_at_open_becomes_a_start_up_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage = (lmdb.InvalidError, lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.VersionMismatchError)
    for error in (
        *damage,
        lmdb.Error,
        lmdb.PanicError,
        lmdb.DiskError,
        lmdb.MemoryError,
        lmdb.LockError,
        lmdb.ReadersFullError,
    ):

        def fail(*_: object, error: type[lmdb.Error] = error, **__: object) -> None:
            raise error("x")

        monkeypatch.setattr(storage.lmdb, "open", fail)
        with pytest.raises(StartupError) as caught:
            await Catalog.open(tmp_path / "c", tiers=TIERS, node="n")
        assert isinstance(caught.value, CatalogDamaged) == (error in damage)
        assert caught.value.__cause__ is not None


async def test_damage_met_while_reading_is_named(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as catalog:
        with pytest.raises(CatalogDamaged, match="cannot read"), catalog.read():
            raise lmdb.CorruptedError("x")

        def act(txn: WriteTxn) -> None:
            txn.end("x")

        with pytest.raises(RuntimeError):
            await catalog.write(lambda txn: (act(txn), txn.runs()))


def newest_last_page(data_file: Path) -> int:
    descriptor = os.open(data_file, os.O_RDONLY)
    try:
        return pages.newest_meta(descriptor).last_page
    finally:
        os.close(descriptor)


async def test_a_pass_over_all_rows_does_not_stay_resident(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def resident_kib() -> int:
        text = Path("/proc/self/smaps").read_text().split(str(tmp_path / "c" / "data.mdb"))[1]
        return int(text.split("Rss:")[1].split()[0])

    async with opened(tmp_path / "c", map_size=64 << 20) as catalog:
        session = await begin(catalog)
        await put(catalog, session, *(f"shard-{number}" for number in range(5000)))
        with catalog.read() as txn:
            rows = list(txn.all_shards())
        before = resident_kib()
        # Whatever else this process has mapped.
        monkeypatch.setattr("forebay_gateway.catalog.storage.MAPPED_BYTES_MAX", 1 << 40)
        catalog._storage.drop_mapped()
        assert resident_kib() == before > 400  # few pages may stay
        monkeypatch.setattr("forebay_gateway.catalog.storage.MAPPED_BYTES_MAX", 0)
        catalog._storage.drop_mapped()
        assert resident_kib() < before / 4
        with catalog.read() as txn:
            assert list(txn.all_shards()) == rows and txn.totals() == txn.recount()
