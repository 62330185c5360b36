"""Every durable act of the gateway against the ledger: when it returns, no power loss could take it back."""

import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from base.ledger import Ledger
from conformance.tier_kit import BytesSource, blob
from forebay_gateway.base import durable
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.catalog import Catalog
from forebay_gateway.core.records import ShardKey
from forebay_gateway.paths.care.rebuild import set_aside
from forebay_gateway.tiers.posix.tier import PosixTier


def make_dirs(root: Path) -> None:
    durable.make_dirs(root / "a" / "b" / "c", root)


def create_file(root: Path) -> None:
    durable.create_file(root / "x", b"x", "t")


def replace_file(root: Path) -> None:
    durable.replace_file(root / "x", b"x", "t")


def a_new_cache(root: Path) -> None:
    CacheDir.open(root / "deep" / "cache", "a").release()


def a_session_and_its_end(root: Path) -> None:
    cache = CacheDir.open(root / "cache", "a")
    try:
        cache.make_session_dir(7)
        cache.write_part(7, 0, 1, b"{}")
        cache.remove_part_files(7)
        cache.make_session_dir(8)
        path = cache.shard_path(ShardKey(8, 9))
        path.touch()
        cache.unlink(path)
        cache.drop_session_dir(7)
    finally:
        cache.release()


def a_catalog_set_aside(root: Path) -> None:
    (root / "catalog").mkdir()
    durable.sync_dir(root)
    durable.replace_file(root / "catalog" / "data.mdb", b"x", "t")
    set_aside(root, "why")


ACTS: list[Callable[[Path], None]] = [
    make_dirs,
    create_file,
    replace_file,
    a_new_cache,
    a_session_and_its_end,
    a_catalog_set_aside,
]


@pytest.mark.parametrize("act", ACTS)
def test_an_act_is_durable_when_it_returns(tmp_path: Path, act: Callable[[Path], None]) -> None:
    with Ledger(tmp_path).watching() as ledger:
        act(tmp_path)
    assert ledger.problems() == []


async def test_a_new_catalog_is_durable_when_it_is_open(tmp_path: Path) -> None:
    with Ledger(tmp_path).watching() as ledger:
        catalog = await Catalog.open(tmp_path / "catalog", tiers=["pfs"], node="a")
        try:
            assert ledger.problems() == []
        finally:
            await catalog.close()


async def put(tier: PosixTier) -> None:
    await tier.put("run/a", BytesSource(blob(200_000)))


async def create(tier: PosixTier) -> None:
    await tier.put_small("run/a", b"x", if_absent=True)


async def replace(tier: PosixTier) -> None:
    await tier.put_small("run/a", b"x")
    await tier.put_small("run/a", b"y")


async def replace_matching(tier: PosixTier) -> None:
    info = await tier.put_small("run/a", b"x")
    await tier.put_small("run/a", b"y", if_match=info.tag)


async def point(tier: PosixTier) -> None:
    await tier.put_small("run/b/x", b"x")
    await tier.point("run/current", "b")


async def delete(tier: PosixTier) -> None:
    for name in ("a", "b"):
        await tier.put_small(f"run/{name}", b"x")
    await tier.delete("run/a")


async def delete_again(tier: PosixTier) -> None:
    """What an earlier try unlinked and could not sync."""
    for name in ("a", "b"):
        await tier.put_small(f"run/{name}", b"x")
    (tier.root / "run" / "a").unlink()
    await tier.delete("run/a")


async def settle(tier: PosixTier) -> None:
    """What an earlier call may have left unsynced when its answer was lost."""
    await tier.put_small("run/a", b"x")
    os.rename(tier.root / "run" / "a", tier.root / "run" / "b")
    await tier.settle("run/b")


TIER_ACTS: list[Callable[[PosixTier], Awaitable[None]]] = [
    put,
    create,
    replace,
    replace_matching,
    point,
    delete,
    delete_again,
    settle,
]


@pytest.mark.parametrize("act", TIER_ACTS)
async def test_an_act_on_a_tier_is_durable_when_it_returns(tmp_path: Path, act: Callable[[PosixTier], Awaitable[None]]) -> None:
    with Ledger(tmp_path, emptied=False).watching() as ledger:
        tier = PosixTier("pfs", tmp_path / "pfs")  # the root is made too
        try:
            await tier.probe()
            await act(tier)
        finally:
            await tier.close()
    assert ledger.problems() == []
