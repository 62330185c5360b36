"""What is taken in: a sealed file that a crash left where its row says "evicted", the files of a catalog that is lost, what a
manifest on a tier says."""

import shutil
from pathlib import Path

import pytest

from forebay_gateway.cache.layout import FoundFile
from forebay_gateway.core.states import ShardState
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.recover import adopt_or_drop
from paths.kit import client_of, serving, tier, until


@pytest.mark.expected_logs("dropped a file that no acknowledgement covers")
async def test_a_fetch_that_was_not_recorded(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("run", 1, session="s") as part:
            for name in "ab":
                await part.put(name, name.encode() * 100_000)
            await part.commit()
        await client.wait("run", 1, "pfs", timeout=30)
        node = gateway.node

        def rows() -> dict[str, ShardState]:
            with node.catalog.read() as txn:
                return {row.name: row.state for row in txn.all_shards()}

        with node.catalog.read() as txn:
            keys = {row.name: row.key for row in txn.all_shards()}
        await until(lambda: set(rows().values()) == {ShardState.EVICTABLE})
        paths = {name: node.cache.shard_path(key) for name, key in keys.items()}
        for path in paths.values():
            shutil.copy(path, path.with_suffix(".kept"))
        await Evictor(node).evict_session(keys["a"].session_id)
        for source, taken in (("b", False), ("a", True)):  # the other one's bytes, sound in themselves, and its own
            paths["a"].parent.mkdir(exist_ok=True)
            shutil.copy(paths[source].with_suffix(".kept"), paths["a"])
            await adopt_or_drop(node, FoundFile("shard", paths["a"], paths["a"].stat().st_size, *keys["a"]))
            assert paths["a"].exists() is taken
            assert rows() == {"a": ShardState.EVICTABLE if taken else ShardState.EVICTED, "b": ShardState.EVICTED}
        reader = await client.open("run", 1)
        assert await reader.read("a") == b"a" * 100_000


@pytest.mark.expected_logs("the catalog is rebuilt", "dropped a")
async def test_of_two_directories_of_one_session_the_one_that_was_committed_counts(tmp_path: Path) -> None:
    """As when a row was lost, and what a tier had of it came into the cache once more, with younger numbers."""
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("a", b"a" * 100_000)
            await part.commit({"loss": 0.5})
        await client.wait("run", 1, "pfs", timeout=30)
    data = tmp_path / "cache-a" / "data"
    (first,) = data.iterdir()
    (file,) = first.glob("*.shard")
    second = data / f"{77:016x}"
    second.mkdir()
    shutil.copy(file, second / f"{78:016x}.shard")
    shutil.rmtree(tmp_path / "cache-a" / "catalog")
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        assert file.exists() and not list(second.glob("*.shard"))
        assert (await client.describe("run", 1)).metadata == {"loss": 0.5}


async def test_a_manifest_brings_its_metadata(tmp_path: Path) -> None:
    """To a node that has nothing of the checkpoint: which one to start from may hang on it."""
    (tmp_path / "other").mkdir()
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("a", b"a" * 100_000)
            await part.commit({"loss": 0.5})
        await client.wait("run", 1, "pfs", timeout=30)
    async with serving(tmp_path / "other", tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await until(lambda: bool(gateway.node.usable_tiers()))
        assert (await client.describe("run", 1)).metadata == {"loss": 0.5}
        assert [each.metadata for each in await client.checkpoints("run")] == [{"loss": 0.5}]
