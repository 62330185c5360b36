"""Shards and copies on the move, by event and by adoption: rows, queue, sums and indexes go along."""

from itertools import count

import pytest

from catalog.kit import begin, commit, dump, entry, manifest, put, sealed, verify
from forebay_gateway.catalog import Catalog
from forebay_gateway.core.errors import Corrupt, NotFound
from forebay_gateway.core.records import (
    CopyRow,
    Origin,
    PartState,
    PublishState,
    ShardKey,
)
from forebay_gateway.core.states import CopyEvent, CopyState, IllegalTransition, ShardEvent, ShardState


async def test_copy_events_move_queue_progress_and_attempts(catalog: Catalog) -> None:
    session = await begin(catalog)
    (key,) = await put(catalog, session, "a")
    await commit(catalog, session, tiers=("pfs",))

    async def event(name: CopyEvent, **details: str) -> CopyRow:
        return await catalog.write(lambda txn: txn.copy_event(key, "pfs", name, **details))

    def queued() -> bool:
        with catalog.read() as txn:
            assert txn.totals() == txn.recount()
            return bool(list(txn.pending("pfs")))

    await event(CopyEvent.START)
    assert await event(CopyEvent.FAIL, error="slow") == CopyRow(CopyState.PENDING, 1, "slow")
    assert await event(CopyEvent.START) == CopyRow(CopyState.WRITING, 1, "slow")
    assert await event(CopyEvent.PUT, tag="v1") == CopyRow(CopyState.WRITTEN, 1, "slow", "v1")
    assert queued()
    assert await event(CopyEvent.VERIFY) == CopyRow(CopyState.VERIFIED, 1, "", "v1")
    assert not queued()
    with catalog.read() as txn:
        assert txn.part_progress(session.id, 0, "pfs") == (1, 1, 100, 100)
    assert await event(CopyEvent.GONE) == CopyRow(CopyState.PENDING, 1)
    assert queued()
    await event(CopyEvent.SKIP)
    assert not queued()
    with catalog.read() as txn:
        assert txn.part_progress(session.id, 0, "pfs") == (0, 0, 0, 0)
    await event(CopyEvent.UNSKIP)
    await catalog.write(lambda txn: verify(txn, key, "pfs"))
    assert (await event(CopyEvent.MISMATCH, error="bad")).state is CopyState.QUARANTINED
    assert queued()
    await event(CopyEvent.REQUEUE)
    with pytest.raises(IllegalTransition):
        await event(CopyEvent.VERIFY)
    with pytest.raises(NotFound):
        await catalog.write(lambda txn: txn.copy_event(key, "object", CopyEvent.START))
    with pytest.raises(NotFound):
        await catalog.write(lambda txn: txn.copy_event(ShardKey(1, 99), "pfs", CopyEvent.START))
    assert queued()


async def test_shard_events_move_dirty_used_and_evictable(catalog: Catalog) -> None:
    session = await begin(catalog)
    (key,) = await put(catalog, session, "a")
    await commit(catalog, session)

    async def event(name: ShardEvent, disk_size: int | None = None) -> tuple[ShardState, int, int, int]:
        row = await catalog.write(lambda txn: txn.shard_event(key, name, disk_size=disk_size))
        with catalog.read() as txn:
            assert txn.totals() == txn.recount()
            assert txn.shard(key) == row
            return row.state, txn.totals().used, txn.totals().dirty, len(list(txn.evictable()))

    assert await event(ShardEvent.ALL_VERIFIED) == (ShardState.EVICTABLE, 8192, 0, 1)
    assert await event(ShardEvent.REQUIRE) == (ShardState.SEALED, 8192, 8192, 0)
    assert await event(ShardEvent.ALL_VERIFIED) == (ShardState.EVICTABLE, 8192, 0, 1)
    assert await event(ShardEvent.EVICT) == (ShardState.EVICTING, 8192, 0, 0)
    assert await event(ShardEvent.UNLINKED) == (ShardState.EVICTED, 0, 0, 0)
    with catalog.read() as txn:
        assert list(txn.cached()) == []
    with pytest.raises(ValueError, match="disk_size"):
        await event(ShardEvent.FETCHED)
    assert await event(ShardEvent.FETCHED, 4096) == (ShardState.EVICTABLE, 4096, 0, 1)
    assert await event(ShardEvent.MISMATCH) == (ShardState.QUARANTINED, 4096, 0, 0)
    assert await event(ShardEvent.REPAIRED, 8192) == (ShardState.SEALED, 8192, 8192, 0)
    with pytest.raises(IllegalTransition):
        await event(ShardEvent.UNLINKED)
    with pytest.raises(NotFound):
        await catalog.write(lambda txn: txn.shard_event(ShardKey(session.id, 99), ShardEvent.EVICT))


async def test_evictable_goes_by_commit_and_by_fetch(catalog: Catalog) -> None:
    session = await begin(catalog)
    (second,) = await put(catalog, session, "second", writer=1)
    (first,) = await put(catalog, session, "first", writer=0)
    await commit(catalog, session, 0)
    await commit(catalog, session, 1)
    for key in (second, first):
        await catalog.write(lambda txn, key=key: txn.shard_event(key, ShardEvent.ALL_VERIFIED))
    with catalog.read() as txn:
        assert [row.key for row in txn.evictable()] == [first, second]
    for event, size in ((ShardEvent.EVICT, None), (ShardEvent.UNLINKED, None), (ShardEvent.FETCHED, 4096)):
        await catalog.write(lambda txn, event=event, size=size: txn.shard_event(first, event, disk_size=size))
    with catalog.read() as txn:  # what was just fetched is not the next to go
        assert [row.key for row in txn.evictable()] == [second, first]
    for event in (ShardEvent.EVICT, ShardEvent.UNLINKED):
        await catalog.write(lambda txn, event=event: txn.shard_event(first, event))
    with catalog.read() as txn:
        assert dump(txn)["fetched"] == {}


async def test_adopting_a_manifest_makes_it_restorable(catalog: Catalog) -> None:
    document = manifest([[entry("a", b"aa"), entry("b", b"bb")], [entry("c", b"cc")]])
    ids = count(1000)
    session = await catalog.write(lambda txn: txn.adopt_manifest(document, "object", session_id=500, new_id=lambda: next(ids)))
    assert (session.id, session.origin, session.publish) == (500, Origin.TIER, {"object": PublishState.COMPLETE})
    with catalog.read() as txn:
        rows = list(txn.shards(500))
        assert [(row.name, row.writer, row.state, row.disk_size) for row in rows] == [
            ("a", 0, ShardState.EVICTED, 0),
            ("b", 0, ShardState.EVICTED, 0),
            ("c", 1, ShardState.EVICTED, 0),
        ]
        assert txn.chunks(rows[2].key) == entry("c", b"cc").chunks
        assert txn.copies(rows[0].key) == {"object": CopyRow(CopyState.VERIFIED)}
        assert [(part.state, part.shard_count, part.size) for part in txn.parts(500)] == [
            (PartState.COMMITTED, 2, 4),
            (PartState.COMMITTED, 1, 2),
        ]
        assert txn.part_progress(500, 0, "object") == (2, 2, 4, 4)
        assert txn.totals() == txn.recount() and txn.totals().shards == 3
        before = dump(txn)
    await catalog.write(lambda txn: txn.adopt_manifest(document, "object", session_id=501, new_id=lambda: next(ids)))
    with catalog.read() as txn:
        assert dump(txn) == before
    assert catalog.new_id() > 1002  # ids that came from elsewhere are never given again


async def test_adopting_over_local_shards_checks_them(catalog: Catalog) -> None:
    session = await begin(catalog, writers=1)
    good = entry("a", b"aa")
    key = ShardKey(session.id, catalog.new_id())
    await catalog.write(lambda txn: txn.seal(sealed(key, "a", size=2, crc=good.crc32c), good.chunks))
    await commit(catalog, session)
    with catalog.read() as txn:
        before = dump(txn)
    for other in (entry("a", b"ab"), entry("a", b"aaa")):
        with pytest.raises(Corrupt, match="'a'"):
            await catalog.write(
                lambda txn, other=other: txn.adopt_manifest(
                    manifest([[entry("new", b"n"), other]]), "pfs", session_id=90, new_id=catalog.new_id
                )
            )
        with catalog.read() as txn:
            assert dump(txn) == before
    row = await catalog.write(lambda txn: txn.adopt_manifest(manifest([[good]]), "pfs", session_id=90, new_id=catalog.new_id))
    assert (row.id, row.origin) == (session.id, Origin.LOCAL)
    with catalog.read() as txn:
        shard = txn.shard(key)
        assert shard is not None and shard.state is ShardState.SEALED and shard.disk_size == 8192
        assert {tier: copy.state for tier, copy in txn.copies(key).items()} == {
            "pfs": CopyState.VERIFIED,
            "object": CopyState.PENDING,
        }
        assert list(txn.pending("pfs")) == [] and txn.totals() == txn.recount()


async def test_adopting_does_not_clear_a_quarantine(catalog: Catalog) -> None:
    document = manifest([[entry("a", b"aa")]])
    session = await catalog.write(lambda txn: txn.adopt_manifest(document, "pfs", session_id=9, new_id=catalog.new_id))
    with catalog.read() as txn:
        (row,) = txn.shards(session.id)
    await catalog.write(lambda txn: txn.copy_event(row.key, "pfs", CopyEvent.MISMATCH, error="bad"))
    await catalog.write(lambda txn: txn.adopt_manifest(document, "pfs", session_id=9, new_id=catalog.new_id))
    with catalog.read() as txn:
        copy = txn.copy(row.key, "pfs")
    assert copy is not None and copy.state is CopyState.QUARANTINED


async def test_committing_after_an_adoption_moves_the_queue_entries_along(catalog: Catalog) -> None:
    session = await begin(catalog, writers=1)
    good = entry("a", b"aa")
    key = ShardKey(session.id, catalog.new_id())
    await catalog.write(lambda txn: txn.seal(sealed(key, "a", size=2, crc=good.crc32c), good.chunks))
    await catalog.write(lambda txn: txn.adopt_manifest(manifest([[good]]), "pfs", session_id=9, new_id=catalog.new_id))
    await catalog.write(lambda txn: txn.copy_event(key, "pfs", CopyEvent.GONE))
    await catalog.write(lambda txn: txn.shard_event(key, ShardEvent.ALL_VERIFIED))
    row = await commit(catalog, session)
    with catalog.read() as txn:
        assert [(item.order, item.key) for item in txn.pending("pfs")] == [(row.commit_seq, key)]
        assert [shard.key for shard in txn.evictable()] == [key]
    await catalog.write(lambda txn: txn.drop_session(session.id))
    with catalog.read() as txn:
        assert list(txn.pending("pfs")) == [] and list(txn.evictable()) == []
