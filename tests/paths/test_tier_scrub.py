"""A tier is read back slowly: what rotted there without a sign is found, quarantined and replaced; the cursor is durable."""

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

import forebay
from forebay.types import TierScrub
from forebay_gateway.build import Gateway
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.layout import shard_key
from forebay_gateway.core.records import ShardRow
from forebay_gateway.core.states import CopyState
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.tiers.base import ObjectInfo
from forebay_wire.checksums import crc32c
from paths.kit import client_of, serving, tier, until

SIZE, SHARDS = 100_000, 5
CONTENT = {f"s{number}": bytes([number]) * SIZE for number in range(SHARDS)}


@asynccontextmanager
async def scrubbing(directory: Path, rate: str, every: str = '"off"') -> AsyncIterator[tuple[Gateway, forebay.AsyncClient]]:
    """Two tiers, of which pfs is read back."""
    one, other = directory / "pfs", directory / "other"
    for path in (one, other):
        path.mkdir(exist_ok=True)
    keys = f"scrub_rate = {json.dumps(rate)}\nscrub_every = {every}\n"
    async with (
        serving(directory, tier(one) + keys, tier(other, "other") + 'scrub_rate = "off"\n') as gateway,
        client_of(gateway) as client,
    ):
        yield gateway, client


async def save(client: forebay.AsyncClient) -> None:
    async with client.checkpoint("run", 1, session="s") as part:
        for name, data in CONTENT.items():
            await part.put(name, data)
        await part.commit()
    for level in ("pfs", "other"):
        await client.wait("run", 1, level, timeout=30)


async def asked(gateway: Gateway, action: str = "status") -> TierScrub:
    """What `forebay scrub --tier pfs` says."""

    def ask() -> TierScrub:
        with forebay.Client(gateway.node.config.node.listen[0], progress=False) as client:
            return next(each for each in client.care.scrub(action, "pfs").tiers if each.tier == "pfs")

    return await asyncio.to_thread(ask)


async def one_pass(gateway: Gateway) -> TierScrub:
    before = await asked(gateway, "start")
    while (now := await asked(gateway)).passes == before.passes:
        await asyncio.sleep(0.05)
    return now


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[SIZE // 2] ^= 4
    path.write_bytes(data)


def state_of(gateway: Gateway, name: str) -> CopyState:
    with gateway.node.catalog.read() as txn:
        (row,) = [row for row in txn.all_shards() if row.name == name]
        copy = txn.copy(row.key, "pfs")
        assert copy is not None
        return copy.state


@pytest.mark.expected_logs("a copy on a tier is bad", "the cache holds no")
@pytest.mark.parametrize("evicted", [False, True])
async def test_rot_is_found_and_replaced(tmp_path: Path, evicted: bool) -> None:
    """From the cache, or where that has evicted it by way of the other tier."""
    async with scrubbing(tmp_path, "1GiB") as (gateway, client):
        await save(client)
        clean = await one_pass(gateway)
        assert (clean.copies, clean.bytes, clean.bad, clean.unreadable) == (SHARDS, SHARDS * SIZE, 0, 0)
        if evicted:
            await until(lambda: len(evictable(gateway)) == SHARDS)
            with gateway.node.catalog.read() as txn:
                (session,) = txn.sessions()
            await Evictor(gateway.node).evict_session(session.id)
            assert evictable(gateway) == []
        path = tmp_path / "pfs" / shard_key("run", 1, "s", "s3")
        flip(path)
        assert (await one_pass(gateway)).bad == 1
        await until(lambda: state_of(gateway, "s3") is CopyState.VERIFIED and path.read_bytes() == CONTENT["s3"])
        assert (await one_pass(gateway)).bad == 0


def evictable(gateway: Gateway) -> list[ShardRow]:
    with gateway.node.catalog.read() as txn:
        return list(txn.evictable())


@pytest.mark.expected_logs("a copy on a tier is bad")
async def test_a_tier_that_shows_another_checksum_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the very tag that was proved, so nothing but the checksum tells: the pass over the cache asks for heads alone."""
    async with (
        serving(tmp_path, tier(tmp_path / "pfs"), cache_keys='scrub_rate = "1GiB"\nscrub_every = "off"') as gateway,
        client_of(gateway) as client,
    ):
        async with client.checkpoint("run", 1, session="s") as part:
            for name, data in CONTENT.items():
                await part.put(name, data)
            await part.commit()
        await client.wait("run", 1, "pfs", timeout=30)
        front = gateway.node.tiers["pfs"].tier
        head = front.head

        async def showing(key: str) -> ObjectInfo:
            info = await head(key)
            name = key.rpartition("/")[2]
            return replace(info, crc32c=crc32c(CONTENT[name]) ^ (name == "s3")) if name in CONTENT else info

        monkeypatch.setattr(front, "head", showing)
        before = await client.care.scrub("start")
        while (now := await client.care.scrub()).passes == before.passes:
            await asyncio.sleep(0.05)
        assert (now.copies, now.copies_bad, now.bad) == (SHARDS, 1, 0)


async def test_it_is_paced_stopped_and_resumed_where_it_was(tmp_path: Path) -> None:
    async with scrubbing(tmp_path, "100KiB") as (gateway, client):
        await save(client)
        await asked(gateway, "start")
        while not (await asked(gateway)).copies:
            await asyncio.sleep(0.02)
        stopped = await asked(gateway, "stop")
        assert stopped.state == "stopped"
        assert 0 < stopped.copies < SHARDS
        with pytest.raises(forebay.InvalidArgument, match="no scrub is running"):
            await asked(gateway, "stop")
    async with scrubbing(tmp_path, "100KiB") as (gateway, client):
        assert await asked(gateway) == stopped
        began_s = time.monotonic()
        await asked(gateway, "start")
        with pytest.raises(forebay.Unavailable, match="running already"):
            await asked(gateway, "start")
        while (now := await asked(gateway)).state == "running":
            await asyncio.sleep(0.05)
        assert (now.passes, now.copies) == (1, SHARDS)  # none twice, none left out
        left = (SHARDS - stopped.copies - 1) * SIZE  # the last one has no pause behind it
        assert time.monotonic() - began_s > left / 102400 - 1


async def test_a_tier_that_is_away_waits_and_a_pass_comes_by_itself(tmp_path: Path) -> None:
    async with scrubbing(tmp_path, "1GiB", every="1") as (gateway, client):
        await save(client)
        while not (await asked(gateway)).passes:
            await asyncio.sleep(0.05)
        with pytest.raises(forebay.InvalidArgument, match="nowhere"):
            await asyncio.to_thread(scrub_nowhere, gateway)


def scrub_nowhere(gateway: Gateway) -> None:
    with forebay.Client(gateway.node.config.node.listen[0], progress=False) as client:
        client.care.scrub("start", "nowhere")


@pytest.mark.expected_logs("cannot read a copy")
async def test_a_flipped_checksum_in_the_catalog_condemns_no_copy(tmp_path: Path) -> None:
    """By such a row good bytes everywhere would be called bad."""
    async with scrubbing(tmp_path, "1GiB") as (gateway, client):
        await save(client)

        def spoil(txn: WriteTxn) -> None:
            (row,) = [row for row in txn.all_shards() if row.name == "s1"]
            txn._put_shard(row, msgspec.structs.replace(row, crc32c=row.crc32c ^ 1))

        await gateway.node.catalog.write(spoil)
        done = await one_pass(gateway)
        assert (done.bad, done.unreadable, done.copies) == (0, 1, SHARDS - 1)
        assert state_of(gateway, "s1") is CopyState.VERIFIED
