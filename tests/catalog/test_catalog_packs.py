"""Packs in the catalog: every shard found by its name, one space of names, and nothing left when a pack goes."""

import pytest
from msgspec.structs import replace

from catalog.kit import CHUNK_SIZE, begin, commit, dump, entry, put, sealed, verify
from forebay_gateway.catalog import Catalog, CatalogDamaged, WriteTxn
from forebay_gateway.catalog.storage import READERS_MAX
from forebay_gateway.core.errors import AlreadyExists, Corrupt, NotFound
from forebay_gateway.core.records import SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import ShardState
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import Manifest, PackEntry, PartRecord, ShardEntry, pack_chunk_crcs
from forebay_wire.packs import PackIndex, encode_head, pack_name

NAME = pack_name(0, "00000000000000aa")


def index_of(*names: str, size: int = 10) -> PackIndex:
    return PackIndex.laid_out((name, size, number) for number, name in enumerate(names))


def pack_row(key: ShardKey, index: PackIndex, name: str = NAME, writer: int = 0) -> ShardRow:
    size = len(encode_head(index)) + index.size
    return replace(sealed(key, name, writer=writer, size=size), packed=len(index), packed_size=index.size)


async def put_pack(catalog: Catalog, session: SessionRow, *names: str, name: str = NAME, writer: int = 0) -> ShardRow:
    index = index_of(*names)
    row = pack_row(ShardKey(session.id, catalog.new_id()), index, name, writer)
    await catalog.write(lambda txn: txn.seal(row, b"\0\0\0\0", index))
    return row


def pack_entry(*names: str, name: str = NAME) -> PackEntry:
    index = index_of(*names)
    data = encode_head(index) + bytes(index.size)
    return PackEntry(ShardEntry(name, len(data), crc32c(data), CHUNK_SIZE, pack_chunk_crcs([crc32c(data)])), index)


async def test_a_shard_is_found_in_its_pack(catalog: Catalog) -> None:
    session = await begin(catalog)
    row = await put_pack(catalog, session, "b", "a", "c/d")
    await put(catalog, session, "plain")
    with catalog.read() as txn:
        found = txn.named(session.id, "a")
        assert found is not None and found.row == row and found.packed is not None
        assert (found.name, found.size, found.crc32c, found.writer) == ("a", 10, 1, 0)
        assert [shard.name for shard in txn.inside(row)] == ["a", "b", "c/d"]
        plain = txn.named(session.id, "plain")
        assert plain is not None and plain.packed is None and list(txn.inside(plain.row)) == [plain]
        assert txn.named(session.id, "absent") is None and txn.named(session.id + 1, "a") is None
        assert txn.named(session.id, NAME) is None  # a pack is no shard
        assert txn.shard_by_name(session.id, NAME) == row and txn.shard_by_name(session.id, "a") is None
        with pytest.raises(NotFound, match="pack"):
            txn.pack_index(plain.row.key)


async def test_lists_of_more_packs_than_lmdb_has_readers(catalog: Catalog) -> None:
    """A list of a checkpoint steps through all of its packs at once, each found by a snapshot of its own that has ended."""
    session = await begin(catalog)
    row = await put_pack(catalog, session, "a", "b")
    lists = []
    for _ in range(READERS_MAX + 10):
        with catalog.read() as txn:
            shards = txn.inside(row)
            assert next(shards).name == "a"
        lists.append(shards)
    assert [shard.name for shards in lists for shard in shards] == ["b"] * len(lists)


async def test_names_are_one_space(catalog: Catalog) -> None:
    session = await begin(catalog)
    await put_pack(catalog, session, "a", "b")
    await put(catalog, session, "plain")
    before = {}
    with catalog.read() as txn:
        before = dump(txn)
    for names in (("x", "b"), ("plain", "x")):
        with pytest.raises(AlreadyExists, match="of this name"):
            await put_pack(catalog, session, *names, name=pack_name(0, "00000000000000bb"))
    with pytest.raises(AlreadyExists, match="of this name"):
        await put(catalog, session, "a")
    with catalog.read() as txn:
        assert dump(txn) == before
    other = await begin(catalog, session="other")
    await put_pack(catalog, other, "a", "b")


async def test_a_pack_is_sealed_with_its_index_alone(catalog: Catalog) -> None:
    session = await begin(catalog)
    index = index_of("a", "b")
    row = pack_row(ShardKey(session.id, catalog.new_id()), index)
    for wrong, given in ((row, None), (row, index_of("a")), (replace(row, packed=0), index)):
        with pytest.raises(ValueError, match="sealed with its index"):
            await catalog.write(lambda txn, wrong=wrong, given=given: txn.seal(wrong, b"", given))  # type: ignore[misc]


async def test_a_pack_that_goes_takes_its_names_along(catalog: Catalog) -> None:
    session = await begin(catalog)
    with catalog.read() as txn:
        before = dump(txn, without_meta=True)
    row = await put_pack(catalog, session, "a", "b")
    assert await catalog.write(lambda txn: txn.drop_shard(row.key)) == row
    with catalog.read() as txn:
        assert dump(txn, without_meta=True) == before
    await put_pack(catalog, session, "a", "b")
    rows = await catalog.write(lambda txn: txn.drop_part(session.id, 0))
    assert [each.visible_count for each in rows] == [2]
    with catalog.read() as txn:
        assert dump(txn)["packs"] == {} and dump(txn)["names"] == {}


async def test_packs_are_replaced_in_one_act(catalog: Catalog) -> None:
    session = await begin(catalog)
    old = [
        await put_pack(catalog, session, *names, name=pack_name(0, f"{number:016x}"))
        for number, names in enumerate((("a", "b"), ("c", "d")))
    ]
    index = index_of("a", "b", "c", "d")
    row = pack_row(ShardKey(session.id, catalog.new_id()), index)
    keys = [each.key for each in old]
    with pytest.raises(NotFound):
        await catalog.write(lambda txn: txn.replace_packs([*keys, ShardKey(session.id, 999)], row, b"\0" * 4, index))
    assert await catalog.write(lambda txn: txn.replace_packs(keys, row, b"\0" * 4, index)) == old
    with catalog.read() as txn:
        assert list(txn.shards(session.id)) == [row]
        assert [txn.named(session.id, name).row for name in "abcd"] == [row] * 4  # type: ignore[union-attr]
        assert txn.totals() == txn.recount()


async def test_a_part_counts_shards_and_not_packs(catalog: Catalog) -> None:
    session = await begin(catalog, writers=1)
    row = await put_pack(catalog, session, "a", "b", "c")
    await put(catalog, session, "plain", size=100)
    await commit(catalog, session)
    with catalog.read() as txn:
        part = txn.part(session.id, 0)
        assert part is not None
        assert (part.shard_count, part.size) == (2, row.size + 100)
        assert (part.visible_count, part.visible_size) == (4, 130)
        assert txn.part_progress(session.id, 0, "pfs") == (0, 2, 0, row.size + 100)


def manifest_with(*packs: PackEntry, plain: tuple[ShardEntry, ...] = ()) -> Manifest:
    return Manifest.of_parts([PartRecord("team/run", 1, "s", 0, 1, "node-2", plain, {}, packs)], "node-2")


async def test_a_manifest_with_packs_is_taken_in(catalog: Catalog) -> None:
    pack = pack_entry("a", "b")
    manifest = manifest_with(pack, plain=(entry("plain", b"x" * 50),))

    def act(txn: WriteTxn) -> SessionRow:
        return txn.adopt_manifest(manifest, "pfs", session_id=catalog.new_id(), new_id=catalog.new_id)

    session = await catalog.write(act)
    with catalog.read() as txn:
        found = txn.named(session.id, "b")
        assert found is not None and found.row.state is ShardState.EVICTED and found.row.name == NAME
        assert txn.pack_index(found.row.key) == pack.index
        part = txn.part(session.id, 0)
        assert part is not None and (part.visible_count, part.visible_size, part.shard_count) == (3, 70, 2)
        before = dump(txn)
    assert (await catalog.write(act)).id == session.id  # again: nothing new
    with catalog.read() as txn:
        assert {name: rows for name, rows in dump(txn).items() if name != "meta"} == {
            name: rows for name, rows in before.items() if name != "meta"
        }


async def test_a_manifest_that_lays_shards_elsewhere_is_corrupt(catalog: Catalog) -> None:
    session = await begin(catalog, writers=1)
    await put_pack(catalog, session, "a", "b")
    other = manifest_with(pack_entry("a", name=pack_name(0, "00000000000000bb")))
    with pytest.raises(Corrupt, match="disagree on where"):
        await catalog.write(lambda txn: txn.adopt_manifest(other, "pfs", session_id=1000, new_id=catalog.new_id))


async def test_an_evicted_pack_keeps_its_index(catalog: Catalog) -> None:
    session = await begin(catalog, writers=1)
    row = await put_pack(catalog, session, "a")
    await commit(catalog, session)
    await catalog.write(lambda txn: verify(txn, row.key))
    with catalog.read() as txn:
        assert txn.named(session.id, "a") is not None


async def test_damage_in_an_index_or_a_name_is_said_to_be_damage(catalog: Catalog) -> None:
    session = await begin(catalog)
    await put_pack(catalog, session, "a", "b")
    for database, value in (("packs", b"\x05\0\0\0"), ("names", b"123")):

        def spoil(txn: WriteTxn, database: str = database, value: bytes = value) -> None:
            for key in dump(txn)[database]:
                txn._put(getattr(txn._db, database), key, value)

        await catalog.write(spoil)
        with catalog.read() as txn, pytest.raises(CatalogDamaged):
            txn.named(session.id, "a")
