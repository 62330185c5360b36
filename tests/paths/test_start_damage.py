"""A start that fails in a way that a sound catalog does not explain: looked at, and made anew where it is damaged."""

from collections.abc import Awaitable, Callable
from pathlib import Path

import lmdb
import pytest

from forebay_gateway import build
from forebay_gateway.base import failpoints
from forebay_gateway.base.tasks import uncut_ended
from forebay_gateway.catalog import CatalogDamaged, WriteTxn, schema
from forebay_gateway.paths.care.rebuild import damage_met, is_of_the_catalog
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.recover import recover
from paths.kit import client_of, serving, tier, until

DATA = b"w" * 100_000


def once(first: Callable[[Node], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Recovery meets it at the first try, and not again."""
    left = [first]

    async def recover_once(node: Node) -> set[int]:
        if left:
            await left.pop()(node)
        return await recover(node)

    monkeypatch.setattr(build, "recover", recover_once)


async def saved(directory: Path) -> None:
    async with serving(directory, tier(directory / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("w", DATA)
            await part.commit({"loss": 0.5})
        await client.wait("run", 1, "pfs", timeout=30)


async def restores(directory: Path) -> str:
    """What the gateway says of its catalog, once it has given back what was saved."""
    async with serving(directory, tier(directory / "pfs")) as gateway, client_of(gateway) as client:
        assert await (await client.open("run", 1)).read("w") == DATA
        assert (await client.describe("run", 1)).metadata == {"loss": 0.5}
        return gateway.node.alarms.get("catalog-rebuilt", ("", ""))[0]


@pytest.mark.expected_logs("the catalog is rebuilt", "the catalog failed")
async def test_what_only_a_write_meets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await saved(tmp_path)

    async def write(node: Node) -> None:
        def act(txn: WriteTxn) -> None:
            raise lmdb.CorruptedError("mdb_del: MDB_CORRUPTED: Located page was wrong type")

        await node.catalog.write(act)

    once(write, monkeypatch)
    assert "MDB_CORRUPTED" in await restores(tmp_path)


@pytest.mark.expected_logs("the catalog is rebuilt", "a sound catalog does not explain")
async def test_an_error_that_an_entry_explains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await saved(tmp_path)

    async def stumble(node: Node) -> None:
        await node.catalog.write(lambda txn: txn._delete(txn._db.names, schema.name_key(1, "w")))
        raise KeyError("w")

    once(stumble, monkeypatch)
    assert "contradicts itself" in await restores(tmp_path)


@pytest.mark.expected_logs("a sound catalog does not explain")
async def test_a_sound_catalog_is_not_made_anew_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    await saved(tmp_path)

    async def stumble(node: Node) -> None:
        raise KeyError("w")

    once(stumble, monkeypatch)
    with pytest.raises(KeyError):
        async with serving(tmp_path, tier(tmp_path / "pfs")):
            pass
    assert await restores(tmp_path) == ""
    assert not list((tmp_path / "cache-a").glob("catalog.damaged-*"))


async def test_damage_counts_against_no_tier(tmp_path: Path) -> None:
    """Who looks for a checkpoint on a tier meets it in the catalog: the tier is as good as before."""
    (tmp_path / "pfs").mkdir()
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway:
        (pfs,) = gateway.node.tiers.values()
        await until(lambda: pfs.usable)
        with pytest.raises(CatalogDamaged):
            pfs.failed(CatalogDamaged("a value is no ShardRow"))
        assert pfs.usable


@pytest.mark.expected_logs("the catalog is damaged")
async def test_a_note_that_the_disk_refused_is_tried_again(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    note, damage = tmp_path / "cache-a" / "catalog" / "suspect", CatalogDamaged("a value is no ShardRow")
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway:
        with failpoints.armed("durable.before_fsync=all*error:ENOSPC"):
            damage_met(gateway.node, damage)
            await uncut_ended(5.0)
        assert not note.exists() and "catalog-damaged" in gateway.node.alarms
        damage_met(gateway.node, damage)
        await uncut_ended(5.0)
        assert note.exists()


@pytest.mark.expected_logs("a sound catalog does not explain")
async def test_a_rebuild_that_is_not_done_is_no_damage(tmp_path: Path) -> None:
    await saved(tmp_path)
    cache = tmp_path / "cache-a"
    (cache / "catalog" / "rebuilding").write_text("asked for\n")
    assert not await is_of_the_catalog(KeyError("w"), cache, ["pfs"], "a")
    assert not (cache / "catalog" / "suspect").exists()
