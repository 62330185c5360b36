"""Every index against its rows, both ways: a sound catalog has nothing to tell; nothing is lost, added or changed unseen."""

from collections.abc import Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from catalog.kit import begin, commit, entry, manifest, opened, put, sealed, verify
from forebay_gateway.catalog import Catalog, ReadTxn, WriteTxn, index_problems, indexes, schema
from forebay_gateway.catalog.schema import CatalogDamaged
from forebay_gateway.core.records import PublishState, ShardKey, UploadRow
from forebay_gateway.core.states import CopyState, ShardEvent, ShardState
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import pack_chunk_crcs
from forebay_wire.packs import PackIndex, encode_head


async def problems(catalog: Catalog) -> list[str]:
    async with aclosing(index_problems(catalog)) as found:
        return [problem async for problem in found]


async def some_of_everything(catalog: Catalog) -> list[ShardKey]:
    """An open part, a committed one with copies in every place, a fetched and a bad shard, an adopted checkpoint, a deletion, a
    pack in a session that is not whole, one that stays in the cache."""
    session = await begin(catalog)
    keys = [ShardKey(session.id, catalog.new_id()) for _ in range(5)]

    def act(txn: WriteTxn) -> None:
        for key in keys:
            data = str(key).encode() * 10
            row = sealed(key, f"n{key.shard_id}", size=len(data), crc=crc32c(data), writer=1 if key == keys[4] else 0)
            txn.seal(row, pack_chunk_crcs([crc32c(data)]))

    await catalog.write(act)
    await commit(catalog, session)

    def move(txn: WriteTxn) -> None:
        for key in keys[:3]:
            verify(txn, key)
            txn.shard_event(key, ShardEvent.ALL_VERIFIED)
        for event in (ShardEvent.EVICT, ShardEvent.UNLINKED):
            txn.shard_event(keys[0], event)
        txn.shard_event(keys[0], ShardEvent.FETCHED, disk_size=8192)
        txn.record_upload(keys[3], "pfs", UploadRow("key", "id"))
        txn.set_publish(session.id, "object", PublishState.COMPLETE)

    await catalog.write(move)
    document = manifest([[entry("x", b"x")], [entry("y", b"y")]], run="other", step=9)
    await catalog.write(lambda txn: txn.adopt_manifest(document, "pfs", session_id=catalog.new_id(), new_id=catalog.new_id))
    await catalog.write(lambda txn: txn.mark_deleting("other", 9))
    begun = await begin(catalog, step=2)
    bodies = [(f"packed-{number}", bytes([number]) * (10 + number)) for number in range(3)]
    index = PackIndex.laid_out((name, len(body), crc32c(body)) for name, body in bodies)
    data = encode_head(index) + b"".join(body for _, body in bodies)
    pack = sealed(
        ShardKey(begun.id, catalog.new_id()), ".forebay/packs/0-0123456789abcdef.pack", size=len(data), crc=crc32c(data)
    )
    pack = replace(pack, packed=len(index), packed_size=index.size)
    await catalog.write(lambda txn: txn.seal(pack, pack_chunk_crcs([crc32c(data)]), index))
    await catalog.write(lambda txn: txn.shard_event(keys[1], ShardEvent.MISMATCH))
    local = await begin(catalog, step=8, writers=1)
    await catalog.write(lambda txn: txn.commit_part(local.id, 0, "{}", (), only=()))
    return keys


# Nothing else knows that there was one of these.
INDEXES = sorted(set(indexes.CHECKED) - {"uploads", "fetched", "settings"})


@pytest.mark.parametrize("name", INDEXES)
async def test_no_entry_can_be_lost(tmp_path: Path, name: str) -> None:
    async with opened(tmp_path / "c") as catalog:
        await some_of_everything(catalog)
        assert await problems(catalog) == []
        with catalog.read() as txn:
            kept = dict(txn._scan(getattr(txn._db, name)))
        assert kept
        for key, value in kept.items():
            await catalog.write(lambda txn, key=key: txn._delete(getattr(txn._db, name), key))
            assert await problems(catalog), key
            await catalog.write(lambda txn, key=key, value=value: txn._put(getattr(txn._db, name), key, value))
        assert await problems(catalog) == []


@pytest.mark.parametrize("name", INDEXES)
async def test_no_entry_can_come_from_nowhere(tmp_path: Path, name: str) -> None:
    """As a flipped bit in a key would make one."""
    async with opened(tmp_path / "c") as catalog:
        await some_of_everything(catalog)
        with catalog.read() as txn:
            kept = dict(txn._scan(getattr(txn._db, name)))
        for key, value in kept.items():
            for at in range(len(key)):
                other = key[:at] + bytes([key[at] ^ 1]) + key[at + 1 :]
                if other in kept:
                    continue
                await catalog.write(lambda txn, other=other, value=value: txn._put(getattr(txn._db, name), other, value))
                assert await problems(catalog), (key, at)
                await catalog.write(lambda txn, other=other: txn._delete(getattr(txn._db, name), other))


CHANGES: dict[str, Callable[[WriteTxn, Any], None]] = {
    "name": lambda txn, row: _put_shard(txn, replace(row, name=row.name + "x")),
    "writer": lambda txn, row: _put_shard(txn, replace(row, writer=row.writer ^ 1)),
    "size": lambda txn, row: _put_shard(txn, replace(row, size=row.size ^ 1)),
    "chunk size": lambda txn, row: _put_shard(txn, replace(row, chunk_size=row.chunk_size >> 12)),
    "checksum": lambda txn, row: _put_shard(txn, replace(row, crc32c=row.crc32c ^ 4)),
    "state": lambda txn, row: _put_shard(
        txn, replace(row, state=ShardState.SEALED if row.state is ShardState.EVICTABLE else ShardState.EVICTABLE)
    ),
    "copy": lambda txn, row: _put_copy(txn, row),
    "session's name": lambda txn, row: _put_session(txn, row, session="t"),
    "session's step": lambda txn, row: _put_session(txn, row, step=3),
    "session's writers": lambda txn, row: _put_session(txn, row, writers=1),
    "chunk table": lambda txn, row: txn._put(
        txn._db.chunks, schema.shard_key(row.key), bytes([txn.chunks(row.key)[0] ^ 1]) + txn.chunks(row.key)[1:]
    ),
    "part's order": lambda txn, row: _put_part(txn, row),
}


def _put_shard(txn: WriteTxn, row: Any) -> None:
    txn._put(txn._db.shards, schema.shard_key(row.key), schema.SHARD.encode(row))


def _put_copy(txn: WriteTxn, row: Any) -> None:
    copy = txn.copy(row.key, "pfs")
    assert copy is not None
    other = CopyState.PENDING if copy.state is CopyState.VERIFIED else CopyState.VERIFIED
    key = schema.copy_key(row.key, txn._tiers.number("pfs"))
    txn._put(txn._db.copies, key, schema.COPY.encode(replace(copy, state=other)))


def _put_session(txn: WriteTxn, row: Any, **fields: Any) -> None:
    session = txn.session(row.session_id)
    assert session is not None
    txn._put(txn._db.sessions, schema.u64(session.id), schema.SESSION.encode(replace(session, **fields)))


def _put_part(txn: WriteTxn, row: Any) -> None:
    part = txn.part(row.session_id, row.writer)
    assert part is not None
    key = schema.part_key(part.session_id, part.writer)
    txn._put(txn._db.parts, key, schema.PART.encode(replace(part, commit_seq=part.commit_seq + 7)))


@pytest.mark.parametrize("change", CHANGES)
async def test_a_row_that_changed_and_still_decodes_is_seen(tmp_path: Path, change: str) -> None:
    async with opened(tmp_path / "c") as catalog:
        keys = await some_of_everything(catalog)
        with catalog.read() as txn:
            row = txn.shard(keys[1])
        await catalog.write(lambda txn: CHANGES[change](txn, row))
        assert await problems(catalog)


FIELDS = ("shard_count", "size", "packs", "packs_size", "packed", "packed_size")


async def everything_committed(catalog: Catalog) -> Any:
    """The part whose one shard is a pack, in a checkpoint that nobody deletes."""
    await some_of_everything(catalog)
    with catalog.read() as txn:
        (session,) = [session for session in txn.sessions() if session.step == 2]
    await commit(catalog, session)
    assert await problems(catalog) == []
    return session


@pytest.mark.parametrize("field", FIELDS)
async def test_a_part_that_counts_other_shards_is_seen(tmp_path: Path, field: str) -> None:
    """Also where all sums were made from it, as a commit that counted wrongly would have."""
    async with opened(tmp_path / "c") as catalog:
        session = await everything_committed(catalog)

        def change(txn: WriteTxn) -> None:
            part = txn.part(session.id, 0)
            assert part is not None
            txn._put_part(replace(part, **{field: getattr(part, field) + 1}))

        await catalog.write(change)
        (problem,) = await problems(catalog)
        assert problem.startswith("parts ") and "committed with" in problem


async def test_an_open_part_counts_nothing_yet(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as catalog:
        session = await begin(catalog)
        await catalog.write(lambda txn: txn._put_part(replace(txn._part(session.id, 0), shard_count=1)))
        (problem,) = await problems(catalog)
        assert "it is open" in problem


@pytest.mark.parametrize("how", ["deleting", "superseded"])
async def test_what_is_being_deleted_may_count_more_than_is_left(tmp_path: Path, how: str) -> None:
    """Rows go a page at a time, and a check may come between two."""
    async with opened(tmp_path / "c") as catalog:
        session = await everything_committed(catalog)
        with catalog.read() as txn:
            (row,) = txn.shards(session.id)
        await catalog.write(lambda txn: txn.drop_shard(row.key))
        assert len(await problems(catalog)) == 1

        def goes(txn: WriteTxn) -> None:
            if how == "deleting":
                txn.mark_deleting(session.run, session.step)
            else:
                for tier in ("pfs", "object"):
                    txn.set_publish(session.id, tier, PublishState.SUPERSEDED)

        await catalog.write(goes)
        assert await problems(catalog) == []


async def test_pages_meet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However short they are, nothing between two is left out."""
    async with opened(tmp_path / "c") as catalog:
        keys = await some_of_everything(catalog)
        await catalog.write(lambda txn: [txn._delete(txn._db.chunks, schema.shard_key(key)) for key in keys])
        whole = await problems(catalog)
        assert len(whole) == len(keys)
        monkeypatch.setattr(indexes, "ENTRIES_A_PAGE", 1)
        assert await problems(catalog) == whole


async def test_every_bit_of_a_pack_s_index_counts(tmp_path: Path) -> None:
    """By a wrong number in it a good part file, or a part record on a tier, would be written over with wrong ones."""
    async with opened(tmp_path / "c") as catalog:
        await some_of_everything(catalog)
        with catalog.read() as txn:
            ((key, encoded),) = txn._scan(txn._db.packs)
        for at in range(len(encoded)):
            for bit in (1, 128):
                flipped = encoded[:at] + bytes([encoded[at] ^ bit]) + encoded[at + 1 :]
                await catalog.write(lambda txn, flipped=flipped: txn._put(txn._db.packs, key, flipped))
                assert await problems(catalog), (at, bit)
        await catalog.write(lambda txn: txn._put(txn._db.packs, key, encoded))
        assert await problems(catalog) == []


async def test_an_adoption_that_was_cut_off_is_no_contradiction(tmp_path: Path) -> None:
    """A long manifest is taken in by several acts, its parts last; a kill between them leaves shards without their part."""
    async with opened(tmp_path / "c") as catalog:
        document = manifest([[entry("x", b"x"), entry("y", b"y")]], run="other", step=9)
        session = await catalog.write(lambda txn: txn.begin_adoption(document, catalog.new_id()))
        assert await problems(catalog) == []
        (first, _) = document.files()
        await catalog.write(lambda txn: txn.adopt_shards(session.id, "pfs", [first], catalog.new_id))
        assert await problems(catalog) == []
        await catalog.write(lambda txn: txn.adopt_shards(session.id, "pfs", document.files(), catalog.new_id))
        await catalog.write(lambda txn: txn.finish_adoption(session.id, document, "pfs"))
        assert await problems(catalog) == []


async def test_a_row_under_the_key_of_another_ends_a_walk(tmp_path: Path) -> None:
    """Who goes on behind the row's own number would come by the same rows for ever."""
    async with opened(tmp_path / "c") as catalog:
        session = await begin(catalog)
        first, *_ = await put(catalog, session, "a", "b", "c")

        def misplace(txn: WriteTxn) -> None:
            row, checkpoint = txn.shard(first), txn.checkpoint("team/run", 1)
            txn._put(txn._db.shards, schema.shard_key(ShardKey(session.id, 99)), schema.SHARD.encode(row))
            txn._put(txn._db.checkpoints, schema.checkpoint_key("team/run", 2), schema.CHECKPOINT.encode(checkpoint))

        await catalog.write(misplace)
        walks: list[Callable[[ReadTxn], Iterator[Any]]] = [
            lambda txn: txn.all_shards(),
            lambda txn: txn.shards(session.id),
            lambda txn: txn.checkpoints("team/run"),
        ]
        for walk in walks:
            with catalog.read() as txn, pytest.raises(CatalogDamaged, match="stands under the key of another"):
                list(walk(txn))


async def test_keys_that_do_not_ascend_end_a_walk(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as catalog:
        session = await begin(catalog)
        keys = await put(catalog, session, *"abcde")
        await commit(catalog, session)
        await catalog.write(lambda txn: [verify(txn, key) or txn.shard_event(key, ShardEvent.ALL_VERIFIED) for key in keys[:3]])
    data = tmp_path / "c" / "data.mdb"
    content = data.read_bytes()
    for number, other in ((keys[2], keys[0]), (keys[4], keys[1])):  # those of rows and of indexes, wherever they stand
        content = content.replace(schema.shard_key(number), schema.shard_key(ShardKey(session.id, other.shard_id - 1)))
    data.write_bytes(content)
    async with opened(tmp_path / "c") as catalog:
        walks: list[Callable[[ReadTxn], Iterator[Any]]] = [
            lambda txn: txn.all_shards(),
            lambda txn: txn.shards(session.id),
            lambda txn: txn.evictable(),
            lambda txn: txn.pending("pfs"),
        ]
        for walk in walks:
            with catalog.read() as txn, pytest.raises(CatalogDamaged):
                list(walk(txn))
        told = await problems(catalog)
        assert any(problem.startswith("shards: ") and "do not ascend" in problem for problem in told), told


@pytest.mark.timeout(20)
async def test_a_walk_that_passes_sessions_over_ends_at_the_highest_key_too(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as catalog:
        highest = schema.evictable_key(1, ShardKey(2**64 - 1, 2**64 - 1))
        await catalog.write(lambda txn: txn._put(txn._db.evictable, highest, b""))
        with catalog.read() as txn:
            assert list(txn.evictable(lambda session_id: True)) == []


async def test_what_lists_checkpoints_passes_over_an_entry_without_its_row(tmp_path: Path) -> None:
    """`status` lists them, for people who may want to know anything but that."""
    async with opened(tmp_path / "c") as catalog:
        await some_of_everything(catalog)
        with catalog.read() as txn:
            before = list(txn.incomplete())
        assert before
        await catalog.write(lambda txn: txn._put(txn._db.incomplete, schema.checkpoint_key("no/run", 1), b""))
        with catalog.read() as txn:
            assert list(txn.incomplete()) == before
        assert any(problem.startswith("incomplete ") for problem in await problems(catalog))


async def test_a_tier_s_number_that_has_changed_is_damage_to_a_recount(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as catalog:
        keys = await some_of_everything(catalog)
        with catalog.read() as txn:
            copy = txn.copy(keys[3], "pfs")
        assert copy is not None
        await catalog.write(lambda txn: txn._put(txn._db.copies, schema.copy_key(keys[3], 9), schema.COPY.encode(copy)))
        with catalog.read() as txn, pytest.raises(CatalogDamaged, match="unknown tier number"):
            txn.recount()
