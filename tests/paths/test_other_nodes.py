"""What one node says of checkpoints that another has saved, and of two tries of one step."""

from pathlib import Path

import pytest

import forebay
from forebay_gateway.build import Gateway
from forebay_gateway.core.records import CheckpointRow
from forebay_gateway.paths import health
from forebay_gateway.paths.view import view
from paths.kit import client_of, serving, tier, until


def tiers(directory: Path) -> list[str]:
    return [tier(directory / name, name) for name in ("pfs", "second")]


async def save(gateway: Gateway, run: str, session: str | None = None) -> None:
    async with client_of(gateway) as client, client.checkpoint(run, 5, session=session) as part:
        await part.put("a.bin", b"a" * 100_000)
        await part.commit(wait="all", timeout=30)


async def test_a_node_asks_each_tier_about_a_checkpoint_it_did_not_save(tmp_path: Path) -> None:
    async with serving(tmp_path, *tiers(tmp_path)) as gateway:
        for run in ("waits", "asks", "looks", "lists", ".hidden/run"):
            await save(gateway, run)
    async with serving(tmp_path, *tiers(tmp_path), node="b") as other, client_of(other) as client:
        await until(lambda: len(other.node.usable_tiers()) == 2)
        await client.wait("waits", 5, "second", timeout=10)
        assert await client.latest("asks", level="second") == 5
        levels = {level.level: level.state for level in (await client.describe("looks", 5)).levels}
        assert levels == {"cache": "evicted", "pfs": "complete", "second": "complete"}
        (listed,) = await client.checkpoints("lists")
        assert {level.level: level.state for level in listed.levels} == levels
        assert [run.run for run in await client.runs()] == [".hidden/run", "asks", "lists", "looks", "waits"]


async def test_a_level_that_is_no_tier_is_an_error_even_where_nothing_is_saved(tmp_path: Path) -> None:
    async with serving(tmp_path, *tiers(tmp_path)) as gateway, client_of(gateway) as client:
        assert await client.latest("nothing", level="pfs") is None
        with pytest.raises(forebay.InvalidArgument, match="no tier is named"):
            await client.latest("nothing", level="third")


async def test_a_commit_waits_for_its_own_session(tmp_path: Path) -> None:
    """An older try of the step that this node hears of late must not be taken for the new one."""
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway:
        await save(gateway, "run", session="first")
    async with serving(tmp_path, tier(tmp_path / "pfs"), node="b") as other, client_of(other) as client:
        await until(other.node.usable_tiers)
        async with client.checkpoint("run", 5, writers=2, writer=0, session="second") as part:
            await part.put("a.bin", b"b" * 100_000)
            assert (await client.describe("run", 5)).session == "first"  # heard of after the second began
            with pytest.raises(forebay.DeadlineExceeded) as caught:
                await part.commit(wait="pfs", timeout=2)
            assert [missing.writer for missing in caught.value.missing] == [1]


async def test_a_wait_for_what_nobody_knows_ends(tmp_path: Path) -> None:
    keys = 'complete_within = "1s"'
    async with serving(tmp_path, tier(tmp_path / "pfs"), node_keys=keys) as gateway, client_of(gateway) as client:
        await until(gateway.node.usable_tiers)
        with pytest.raises(forebay.NotFound):
            await client.wait("nobody", 1, "pfs", timeout=20)


@pytest.mark.expected_logs("not drained before the stop")
async def test_status_does_not_read_the_shards_of_what_only_waits_for_a_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await client.hold()
        for run in ("one", "two"):
            async with client.checkpoint(run, 1) as part:
                await part.put("a", b"bytes")
                await part.commit()
        async with client.checkpoint("lacks", 1, writers=2, writer=0, session="s") as part:
            await part.put("a", b"bytes")
            await part.commit()
        looked = []

        def seen(node: object, txn: object, row: CheckpointRow) -> object:
            looked.append(row.run)
            return view(node, txn, row)  # type: ignore[arg-type]

        monkeypatch.setattr(health, "view", seen)
        found = await client.status()
        assert (found.checkpoints_complete, found.checkpoints_incomplete) == (2, 1)
        assert [item.run for item in found.incomplete] == looked == ["lacks"]


@pytest.mark.parametrize("count", [5, 100])  # plain shards, and packs: of other names than those that count
async def test_what_its_writer_left_open_here_is_not_in_the_way(tmp_path: Path, count: int) -> None:
    """A writer puts through one gateway, loses it, and saves the same session through another: both can restore it."""
    shards = {f"s/{number}": bytes([number]) * (number + 1) for number in range(count)}
    async with (
        serving(tmp_path, tier(tmp_path / "pfs"), node="a") as first,
        serving(tmp_path, tier(tmp_path / "pfs"), node="b") as second,
        client_of(first) as client,
        client_of(second) as other,
    ):
        begun = client.checkpoint("run", 1, session="s")
        await begun.put_many(shards)
        async with other.checkpoint("run", 1, session="s") as part:
            await part.put_many(shards)
            await part.commit(wait="pfs", timeout=60)
        for each, gateway in ((client, first), (other, second)):
            reader = await each.open("run", 1)
            assert {name: await reader.read(name) for name in shards} == shards
            found = await each.describe("run", 1)
            assert (found.state, found.shard_count, found.size) == ("complete", count, sum(map(len, shards.values())))
            with gateway.node.catalog.read() as txn:
                assert gateway.node.budget.used == txn.totals().used == txn.recount().used
        assert await begun.commit() is not None  # the same content, so it is committed already
