"""Acts that are cut short or overtaken: a client that goes away, a stream that ends late, a file evicted under a reader."""

import asyncio
from pathlib import Path

import pytest

from forebay_gateway.build import Gateway
from forebay_gateway.core.errors import Corrupt, InvalidArgument
from forebay_gateway.core.records import SessionRow, ShardRow
from forebay_gateway.paths.commit import METADATA_DEPTH_MAX, CommitPath, check_metadata
from forebay_gateway.paths.drain import shard_item
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.write import PartRef, WritePath
from forebay_wire.names import session8
from paths.kit import client_of, serving, tier, until


def files(gateway: Gateway) -> list[Path]:
    return [path for path in (gateway.node.cache.path / "data").rglob("*") if path.is_file()]


def rows_of(gateway: Gateway, run: str) -> tuple[SessionRow, list[ShardRow]]:
    with gateway.node.catalog.read() as txn:
        checkpoint = txn.checkpoint(run, 1)
        assert checkpoint is not None
        session = txn.session(checkpoint.session_ids[-1])
        assert session is not None
        return session, list(txn.shards(session.id))


async def test_an_abort_whose_client_goes_away_still_ends(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        node = gateway.node
        await client.checkpoint("run", 1, session="s").put("a", bytes(100_000))
        assert node.budget.used
        commits = CommitPath(node, WritePath(node, Evictor(node)))
        for _ in range(3):  # the first goes away in the middle of it, the others while it still works
            task = asyncio.ensure_future(commits.abort(PartRef("run", 1, "s", 0, 1)))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        await until(lambda: node.budget.used == 0 and not files(gateway))


async def test_two_aborts_at_once(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        node = gateway.node
        await client.checkpoint("run", 1, session="s").put("a", bytes(100_000))
        commits = CommitPath(node, WritePath(node, Evictor(node)))
        dropped = await asyncio.gather(*(commits.abort(PartRef("run", 1, "s", 0, 1)) for _ in range(3)))
        assert sorted(dropped) == [0, 0, 1]


async def test_a_deletion_takes_what_was_sealed_after_it_looked(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("run", 1) as part:
            await part.put("a", bytes(100_000))
            await part.commit(wait="pfs", timeout=30)
        session, _ = rows_of(gateway, "run")
        retention = Retention(gateway.node, Finder(gateway.node))
        await retention._out_of_cache([session], [])  # as it was when the deletion looked: nothing there yet
        assert not files(gateway)
        assert gateway.node.budget.used == 0


async def test_a_deletion_does_not_count_twice_what_was_evicted_after_it_looked(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("run", 1) as part:
            await part.put("a", bytes(100_000))
            await part.commit(wait="pfs", timeout=30)
        session, shards = rows_of(gateway, "run")
        await until(lambda: all(row.state == "evictable" for row in rows_of(gateway, "run")[1]))
        await Evictor(gateway.node).evict_session(session.id)
        await Retention(gateway.node, Finder(gateway.node))._out_of_cache([session], shards)
        assert gateway.node.budget.used == 0


async def test_a_file_that_was_evicted_before_it_was_opened_is_no_damage(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        node = gateway.node
        async with client.checkpoint("run", 1) as part:
            await part.put("a", bytes(100_000))
            await part.commit(wait="pfs", timeout=30)
        await until(lambda: all(row.state == "evictable" for row in rows_of(gateway, "run")[1]))
        session, (row,) = rows_of(gateway, "run")
        with node.catalog.read() as txn:
            item = shard_item(txn, session, row)
        await Evictor(node).evict_session(session.id)
        await ReadPath(node, Finder(node), Evictor(node)).cache_is_bad(item, Corrupt("the file is gone"))
        assert not node.alarms


async def test_the_sign_of_completeness_waits_for_a_part_that_has_nothing_yet(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        late = client.checkpoint("run", 1, writers=2, writer=1, session="s")
        gate = asyncio.Event()
        loop = asyncio.get_running_loop()

        def slow() -> object:
            yield bytes(1000)
            asyncio.run_coroutine_threadsafe(gate.wait(), loop).result(30)

        put = asyncio.create_task(late.put("late.bin", slow()))
        async with client.checkpoint("run", 1, writers=2, writer=0, session="s") as part:
            await part.put_many({"early.bin": bytes(5000), ".metadata": b"m"})
            await part.commit()
        step = tmp_path / "pfs" / "run" / "step-000000000001" / session8("s")
        await until((step / "early.bin").exists)
        await asyncio.sleep(1.0)  # many looks of the drain
        assert not (step / ".metadata").exists()
        gate.set()
        await put
        await late.commit(wait="pfs", timeout=30)
        assert (step / ".metadata").exists()


async def test_names_that_an_object_store_could_not_take_are_refused(tmp_path: Path) -> None:
    bucket = (
        '[[tier]]\nname = "object"\nkind = "s3"\nbucket = "bucket"\nprefix = "some/prefix"\nregion = "x"\n'
        'endpoint = "http://127.0.0.1:9"\nrequired = false\n'
    )
    async with serving(tmp_path, tier(tmp_path / "pfs"), bucket) as gateway:
        writes = WritePath(gateway.node, Evictor(gateway.node))
        name = "/".join(["n" * 200] * 4)
        await (await writes.begin(PartRef("r", 1, "s", 0, 1), name, 0)).discard()
        with pytest.raises(InvalidArgument, match="too long for an object store"):
            await writes.begin(PartRef("/".join(["r" * 100] * 2), 1, "s", 0, 1), name, 0)
        with pytest.raises(InvalidArgument, match="too long for an object store"):
            await writes.begin(PartRef("/".join(["r" * 240] * 4), 1, "s", 0, 1), "a", 0)


async def test_who_may_connect(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")):
        assert (tmp_path / "a.sock").stat().st_mode & 0o777 == 0o660


def nested(depth: int) -> str:
    return '{"a":' * depth + "1" + "}" * depth


@pytest.mark.parametrize("text", ["", "{}", '{"a": [1, 2.5, null, "\\u00e9"]}', nested(METADATA_DEPTH_MAX)])
def test_metadata(text: str) -> None:
    assert check_metadata(text) == (text or "{}")


@pytest.mark.parametrize(
    "text",
    [
        "[1]",
        "{",
        '{"a": NaN}',
        '{"a": -Infinity}',
        '{"a": 1e999}',
        '{"a": "\\ud800"}',
        nested(METADATA_DEPTH_MAX + 1),
        nested(100_000),
    ],
)
def test_metadata_that_no_document_could_hold(text: str) -> None:
    with pytest.raises(InvalidArgument, match="metadata"):
        check_metadata(text)
