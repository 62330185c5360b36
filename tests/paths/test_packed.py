"""Packs inside a gateway: an index that does not fit its bytes, names that lead nowhere, joins that fail, evicted packs."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

import forebay
from forebay_gateway.base import failpoints
from forebay_gateway.build import Gateway
from forebay_gateway.catalog import WriteTxn, schema
from forebay_gateway.core.records import ShardRow
from forebay_gateway.core.states import ShardState
from forebay_gateway.paths import join, small
from forebay_wire.packs import PackIndex
from paths.kit import client_of, serving, tier, until

SHARDS = {f"s/{n:03}": os.urandom(100 + n) for n in range(100)}


def rows(gateway: Gateway) -> list[ShardRow]:
    with gateway.node.catalog.read() as txn:
        return list(txn.all_shards())


async def save(client: forebay.AsyncClient, shards: dict[str, bytes] = SHARDS, step: int = 1) -> None:
    part = client.checkpoint("run", step, session="s")
    await part.put_many(shards)
    await part.commit()


async def change_index(gateway: Gateway, change: Callable[[PackIndex], PackIndex]) -> None:
    """As a flipped page of the catalog would: the index it has is no longer the pack's own."""
    (row,) = rows(gateway)

    def act(txn: WriteTxn) -> None:
        index = change(txn.pack_index(row.key))
        txn._put(txn._db.packs, schema.shard_key(row.key), index.encoded)

    await gateway.node.catalog.write(act)


def swapped(index: PackIndex) -> PackIndex:
    """The first two shards in each other's place."""
    first, second, *others = index
    moved = [first._replace(offset=second.offset), second._replace(offset=first.offset)]
    return PackIndex.of([*moved, *others])


async def test_bytes_that_are_another_shard_s_are_never_handed_out(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
        await change_index(gateway, swapped)
        reader = await client.open("run", 1)
        for name in ("s/000", "s/001"):
            for span in ((0, None), (10, 20)):
                with pytest.raises(forebay.Corrupt, match="rebuild the catalog"):
                    await reader.read(name, *span)
        assert await reader.read("s/002") == SHARDS["s/002"]
        found = [finding async for finding in _findings(client, deep=True)]
        assert {finding.kind for finding in found if finding.severity == "error"} == {"file_unreadable", "part_file", "index"}
        with gateway.node.catalog.read() as txn:
            (part,) = txn.parts(rows(gateway)[0].session_id)
        path = gateway.node.cache.part_path(part.session_id, part.writer, part.commit_seq)
        before = path.read_bytes()
        for finding in await asyncio.to_thread(lambda: list(client._client.care.repair(apply=True))):
            assert "repaired" not in finding.outcome
        assert path.read_bytes() == before  # the only good index there is outside of the pack
        assert "not the pack's own" in next(finding.what for finding in found if finding.kind == "file_unreadable")


async def test_a_name_that_leads_nowhere_is_found(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
        await client.wait("run", 1, "pfs")
        (row,) = rows(gateway)
        assert [finding async for finding in _findings(client) if finding.severity == "error"] == []
        await gateway.node.catalog.write(lambda txn: txn._delete(txn._db.names, schema.name_key(row.session_id, "s/007")))
        (found,) = [finding async for finding in _findings(client) if finding.severity == "error"]
        assert (found.kind, found.where) == ("index", "catalog") and "s/007" in found.what and "rebuild" in found.remedy


async def _findings(client: forebay.AsyncClient, deep: bool = False):  # type: ignore[no-untyped-def]
    for finding in await asyncio.to_thread(lambda: list(client._client.care.fsck(deep=deep))):
        yield finding


async def test_a_group_is_taken_whole_or_not_at_all(tmp_path: Path) -> None:
    """The pack is durable, a plain shard of the same request fails: neither is there, and no byte is counted."""
    mixed = SHARDS | {"big": os.urandom(1 << 20)}
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        part = client.checkpoint("run", 1, session="s")
        part._writer._connection.policy = forebay.retry.RetryPolicy(0.0, 0.0)
        with failpoints.armed("seal.before_fsync=2*error:EIO"), pytest.raises(forebay.Unavailable):
            await part.put_many(mixed)
        assert rows(gateway) == [] and gateway.node.budget.used == gateway.node.budget.reserved == 0
        assert list((gateway.node.cache.path / "data").glob("*/*.shard")) == []
        await part.put_many(mixed)
        assert len(rows(gateway)) == 2
        await part.commit()
        assert gateway.node.budget.used == sum(row.disk_size for row in rows(gateway))


async def test_a_join_that_fails_leaves_the_part_as_good_as_before(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        part = client.checkpoint("run", 1, session="s")
        await part.put_many(SHARDS)
        more = {f"m/{n}": os.urandom(50) for n in range(20)}
        for n in range(0, 20, 2):
            await part.put_many({f"m/{k}": more[f"m/{k}"] for k in (n, n + 1)})
        before = rows(gateway)
        assert len(before) == 11
        with failpoints.armed("seal.before_fsync=error:EIO"):
            await part.commit()
        assert sorted(row.name for row in rows(gateway)) == sorted(row.name for row in before)
        assert gateway.node.budget.reserved == 0
        assert gateway.node.budget.used == sum(row.disk_size for row in rows(gateway))
        reader = await client.open("run", 1)
        assert {name: await reader.read(name) for name in more} == more


async def test_joined_packs_hold_what_they_held(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        part = client.checkpoint("run", 1, session="s")
        shards = {f"j/{n:03}": os.urandom(n * 11) for n in range(200)}
        await part.put_many(dict(list(shards.items())[:64]))
        for n in range(64, 200, 8):
            await part.put_many(dict(list(shards.items())[n : n + 8]))
        await part.commit()
        (row,) = rows(gateway)
        assert (row.packed, row.packed_size) == (200, sum(map(len, shards.values())))
        files = list((gateway.node.cache.path / "data").glob("*/*.shard"))
        assert [path.stat().st_size for path in files] == [row.disk_size] == [gateway.node.budget.used]
        reader = await client.open("run", 1)
        assert {name: await reader.read(name) for name in shards} == shards


def test_packs_are_joined_up_to_a_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(join, "PACK_BYTES_MAX", 100)
    row = ShardRow(1, 1, 0, "x", 40, 1 << 16, 0, ShardState.SEALED, 0)
    assert [len(batch) for batch in join.batches([row] * 5)] == [2, 2]
    many = replace(row, size=1, packed=join.PACK_SHARDS_MAX // 3)
    assert [len(batch) for batch in join.batches([many] * 8)] == [3, 3, 2]


async def test_a_request_larger_than_a_pack_makes_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(small, "PACK_BYTES_MAX", 4000)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
        packs = rows(gateway)
        assert sum(row.packed for row in packs) == 100 and len(packs) > 3
        assert all(row.packed_size <= 4000 for row in packs)
        await client.wait("run", 1, "pfs")
        reader = await client.open("run", 1)
        assert {name: await reader.read(name) for name in SHARDS} == SHARDS


async def test_an_evicted_pack_is_read_from_its_tier(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
        await client.wait("run", 1, "pfs")
        await until(lambda: rows(gateway)[0].state.value == "evictable")
        moved = await asyncio.to_thread(client._client.care.evict, "run", 1)
        assert moved.shards == 100 and gateway.node.budget.used == 0
        reader = await client.open("run", 1)
        assert await reader.read("s/050") == SHARDS["s/050"]
        assert await reader.read("s/051", 5, 10) == SHARDS["s/051"][5:15]
        moved = await asyncio.to_thread(client._client.care.warm_up, "run", 1)
        assert moved.shards == 100
