"""Many readers of one shard that the cache has not: the tier is read once, and all get the bytes."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from forebay_gateway.core.records import ShardRow
from forebay_gateway.core.states import ShardState
from forebay_gateway.paths.read import ReadPath
from paths.kit import client_of, serving, tier, until

DATA = os.urandom(3 << 20)
READERS = 8


@pytest.mark.parametrize("lanes", [("stream",), ("fd",), ("stream", "fd")])
async def test_readers_of_one_evicted_shard_read_the_tier_once(
    lanes: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, jobs = 0, 0
    all_ask = asyncio.Event()
    fetch = ReadPath.fetch

    async def counted(path: ReadPath, *arguments: Any) -> bool:
        nonlocal asked
        asked += 1
        if asked == READERS:
            all_ask.set()
        return await fetch(path, *arguments)

    monkeypatch.setattr(ReadPath, "fetch", counted)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        part = client.checkpoint("run", 1, session="s")
        await part.put("x", DATA)
        await part.commit()
        await client.wait("run", 1, "pfs")

        def row() -> ShardRow:
            with gateway.node.catalog.read() as txn:
                return next(iter(txn.all_shards()))

        await until(lambda: row().state is ShardState.EVICTABLE)
        await asyncio.to_thread(client._client.care.evict, "run", 1)
        assert row().state is ShardState.EVICTED
        to_mover = gateway.node.movers.fetch

        async def held(*arguments: Any) -> None:
            nonlocal jobs
            jobs += 1
            await all_ask.wait()  # so that nobody comes when it is over
            await to_mover(*arguments)

        monkeypatch.setattr(gateway.node.movers, "fetch", held)
        monkeypatch.setattr(gateway.node.tiers["pfs"].tier, "read", None)  # the front itself reads none of it
        readers = [await client.open("run", 1, lane=lanes[number % len(lanes)]) for number in range(READERS)]
        assert await asyncio.gather(*(reader.read("x") for reader in readers)) == [DATA] * READERS
        assert (asked, jobs) == (READERS, 1) and row().is_cached
