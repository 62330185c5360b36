"""What is under way when the gateway is told to end comes to its end first: nothing is cut between its file and its row."""

import asyncio
import contextlib
from pathlib import Path

import pytest

import forebay
from forebay_gateway.base import failpoints
from forebay_gateway.build import Gateway
from forebay_gateway.catalog import Catalog
from forebay_gateway.core.records import PartState
from paths.kit import client_of, serving, tier

SLOW = "durable.before_fsync=all*sleep:0.7;seal.before_fsync=all*sleep:0.7"


async def ended_while(gateway: Gateway, act: "asyncio.Task[object]", busy: str, path: Path) -> None:
    """The gateway is stopped, without any grace for calls, once a file of the act is being written."""
    async with asyncio.timeout(10):
        while not list(path.rglob(busy)):
            await asyncio.sleep(0.005)
    await gateway.stop(0.0)
    with contextlib.suppress(forebay.ForebayError):
        await act


@pytest.mark.expected_logs("an act failed after")
async def test_a_commit_under_way_ends_in_the_catalog(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    with failpoints.armed(SLOW):
        async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
            part = client.checkpoint("run", 1, session="s")
            await part.put("x", b"x" * 100_000)
            commit = asyncio.create_task(part.commit())
            await ended_while(gateway, commit, ".forebay-tmp-part-*", tmp_path / "cache-a" / "data")
    assert await of_catalog(tmp_path) == (PartState.COMMITTED, ["x"])


async def test_small_shards_under_way_end_in_the_catalog(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    with failpoints.armed(SLOW):
        async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
            part = client.checkpoint("run", 1, session="s")
            put = asyncio.create_task(part.put_many({"a": b"a", "b": b"bb"}))
            await ended_while(gateway, put, "*.tmp", tmp_path / "cache-a" / "incoming")
    assert await of_catalog(tmp_path) == (PartState.OPEN, ["a", "b"])


async def of_catalog(directory: Path) -> tuple[PartState, list[str]]:
    """What the next start would find, before it recovers anything."""
    catalog = await Catalog.open(directory / "cache-a" / "catalog", tiers=["pfs"], node="a")
    try:
        with catalog.read() as txn:
            (session,) = txn.sessions()
            part = txn.part(session.id, 0)
            assert part is not None
            return part.state, sorted(row.name for row in txn.shards(session.id))
    finally:
        await catalog.close()
