"""What must not grow with all that a node holds: looks, starts, messages, memory."""

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from catalog.kit import check_sums
from forebay import writer as client_writer
from forebay_gateway.build import Gateway
from forebay_gateway.cache.layout import CLEAN
from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.layout import parse_run_key, run_key
from forebay_gateway.core.records import ShardKey, ShardRow
from forebay_gateway.core.states import ShardState
from forebay_gateway.paths import find, handover, recover
from forebay_gateway.paths.commit import CommitPath, Expected
from forebay_gateway.paths.complete import Completion
from forebay_gateway.paths.pages import SHARDS_A_PAGE
from forebay_gateway.paths.write import PartRef, WritePath
from forebay_gateway.rpc import gateway_service
from forebay_wire.manifest import ShardEntry, pack_chunk_crcs
from forebay_wire.packs import PackIndex
from forebay_wire.v1 import gateway_pb2 as pb
from paths.kit import client_of, serving, tier, until


async def save(client: forebay.AsyncClient, run: str = "run", step: int = 1, wait: str = "pfs") -> None:
    async with client.checkpoint(run, step, session=f"of-{step}") as part:
        await part.put("a.bin", b"a" * 100_000)
        await part.commit(metadata={"step": step}, wait=wait, timeout=60)


def only_file(gateway_cache: Path) -> Path:
    (path,) = gateway_cache.glob("data/*/*.shard")
    return path


def compared(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of each start from now on: how many sessions it compared with their files before it served."""
    counts: list[int] = []
    compare = recover._compare

    async def counting(node: Any, session_ids: Any) -> Any:
        counts.append(len(session_ids))
        return await compare(node, session_ids)

    monkeypatch.setattr(recover, "_compare", counting)
    return counts


# -- starts ------------------------------------------------------------------------------------------------------------


async def test_after_an_orderly_stop_a_start_compares_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
    assert (tmp_path / "cache-a" / CLEAN).exists()
    counts = compared(monkeypatch)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        assert counts == []
        assert not (tmp_path / "cache-a" / CLEAN).exists()  # or a kill would be taken for an orderly stop
        assert (await client.describe("run", 1)).state == "complete"
        monkeypatch.setattr("forebay_gateway.build.leave_mark", lambda cache, token: None)  # as a kill does
    async with serving(tmp_path, tier(tmp_path / "pfs")):
        assert counts == [1]


async def test_the_mark_counts_only_for_the_catalog_it_was_left_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
    handover.leave_mark(tmp_path / "cache-a", "of another stop")
    counts = compared(monkeypatch)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway:
        assert counts == [1]
        with gateway.node.catalog.read() as txn:
            assert txn.setting(handover.SETTING) is None
    os.utime(tmp_path / "cache-a" / handover.CATALOG_FILE)  # somebody has touched it
    async with serving(tmp_path, tier(tmp_path / "pfs")):
        assert counts == [1, 1]


async def test_no_mark_where_work_was_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway:
        monkeypatch.setattr(WritePath, "settled", lambda self, timeout_s: asyncio.sleep(0))
        assert gateway._writes is not None
        gateway._writes.open_streams = 1
    assert not (tmp_path / "cache-a" / CLEAN).exists()


@pytest.mark.expected_logs("cache file is gone or damaged")
@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(b"short")], ids=["gone", "short"])
async def test_files_are_looked_at_later_after_an_orderly_stop(tmp_path: Path, damage: Callable[[Path], Any]) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs"), node_keys="") as gateway, client_of(gateway) as client:
        await save(client)
        path = only_file(gateway.node.cache.path)
        key = ShardKey(int(path.parent.name, 16), int(path.stem, 16))
    damage(path)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:

        def state() -> ShardState | None:
            with gateway.node.catalog.read() as txn:
                row = txn.shard(key)
            return None if row is None else row.state

        await until(lambda: state() is ShardState.EVICTED)
        assert bytes(await (await client.open("run", 1)).read("a.bin")) == b"a" * 100_000
        with gateway.node.catalog.read() as txn:
            check_sums(txn)


async def test_a_listing_asks_the_tiers_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The session is known by then, and the copies of many shards in one pack are looked up once."""
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("run", 1) as part:
            await part.put("plain.bin", b"p" * 100_000)
            await part.put_many({f"small/{number:03d}": b"s" for number in range(200)})
            await part.commit(wait="pfs", timeout=60)
        asked: list[Any] = []
        looked_up: list[ShardKey] = []
        everywhere, copies_of = find.Finder.everywhere, ReadTxn.copies_of

        async def counting(self: find.Finder, run: str, step: int) -> find.Found:
            asked.append(step)
            return await everywhere(self, run, step)

        def noting(self: ReadTxn, keys: Any) -> Any:
            looked_up.extend(keys)
            return copies_of(self, keys)

        monkeypatch.setattr(find.Finder, "everywhere", counting)
        monkeypatch.setattr(ReadTxn, "copies_of", noting)
        found = await client.describe("run", 1)
        assert asked == [1]
        assert len(looked_up) == 2
        assert {dict(shard.copies)["pfs"] for shard in found.shards} == {"verified"} and len(found.shards) == 201


async def test_a_long_part_is_read_a_page_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No snapshot on the event loop sees more than a page of it, in a commit and a listing."""
    count = 3 * SHARDS_A_PAGE
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        node, writes = gateway.node, gateway._writes
        assert writes is not None
        part = PartRef("run", 1, "s", 0, 1)
        session_id = await writes.open_part(part)
        first = min([node.catalog.new_id() for _ in range(count)])
        names = [f"{number:06d}" for number in range(count)]

        def fill(txn: WriteTxn) -> None:
            for number, name in enumerate(names):
                row = ShardRow(session_id, first + number, 0, name, 1, 65536, 7, ShardState.SEALED, 0)
                txn.seal(row, pack_chunk_crcs([7]))

        await node.catalog.write(fill)
        node.tiers["pfs"].held = True  # there are no files to drain
        looks: dict[int, int] = {}  # snapshot: rows and values that were read in it
        views: list[ReadTxn] = []  # kept, so that no two have one id
        get, scan = ReadTxn._get, ReadTxn._scan

        def look(txn: ReadTxn) -> None:
            if type(txn) is ReadTxn:
                if id(txn) not in looks:
                    views.append(txn)
                looks[id(txn)] = looks.get(id(txn), 0) + 1

        def counted_get(self: ReadTxn, *arguments: Any) -> Any:
            look(self)
            return get(self, *arguments)

        def counted_scan(self: ReadTxn, *arguments: Any, **more: Any) -> Any:
            for entry in scan(self, *arguments, **more):
                look(self)
                yield entry

        monkeypatch.setattr(ReadTxn, "_get", counted_get)
        monkeypatch.setattr(ReadTxn, "_scan", counted_scan)
        await CommitPath(node, writes).commit(part, [Expected(name, 1, 7) for name in names], "{}")
        assert len((await client.describe("run", 1)).shards) == count
        assert len(looks) > 9
        assert max(looks.values()) < 2.5 * SHARDS_A_PAGE  # of a row by an index two are read


def test_a_gateway_without_an_object_store_does_not_load_its_client() -> None:
    """It is half of what would be imported at each start, and by each mover."""
    code = "import sys, forebay_gateway.serve, forebay_gateway.movers.worker; sys.exit('botocore' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# -- completion --------------------------------------------------------------------------------------------------------


async def test_completion_looks_only_at_what_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many checkpoints that wait for another writer must not be gone through for each copy of another one."""
    monkeypatch.setattr("forebay_gateway.paths.complete.LOOK_AT_ALL_S", 3600.0)
    monkeypatch.setattr("forebay_gateway.paths.complete.WATCH_S_MIN", 3600.0)
    monkeypatch.setattr("forebay_gateway.paths.complete.WATCH_S_MAX", 3600.0)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        for step in range(30):
            async with client.checkpoint("waits", step, writers=2, writer=0, session="s") as part:
                await part.put("a.bin", b"a")
                await part.commit()
        await until(lambda: not _queued(gateway))
        await asyncio.sleep(0.5)
        seen: list[tuple[str, int]] = []
        advance = Completion._advance

        async def watched(self: Completion, session: Any) -> bool:
            seen.append((session.run, session.step))
            return await advance(self, session)

        monkeypatch.setattr(Completion, "_advance", watched)
        await save(client, "moves", 1)
        assert set(seen) == {("moves", 1)}


def _known(gateway: Gateway) -> list[str]:
    with gateway.node.catalog.read() as txn:
        return txn.runs()


def _queued(gateway: Gateway) -> int:
    with gateway.node.catalog.read() as txn:
        return txn.totals().tiers["pfs"].copies


# -- messages ----------------------------------------------------------------------------------------------------------


async def test_a_commit_in_several_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_writer, "COMMIT_BATCH", 3)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("run", 1) as part:
            await part.put_many({f"shard-{number}": b"x" * number for number in range(10)})
            await part.commit(metadata={"loss": 1}, wait="pfs", timeout=60)
        found = await client.describe("run", 1)
        assert found.shard_count == 10
        assert found.metadata == {"loss": 1}


async def test_what_is_no_commit_in_several_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    part = pb.PartRef(run="run", step=1, session="s", writer=0, writers=1)
    some = [pb.ExpectedShard(name=f"{number}") for number in range(3)]
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        connection = client._client._connection

        def commit(*messages: pb.CommitPartRequest) -> Any:
            return connection._call_once(lambda stubs: stubs.gateway.CommitPart, list(messages), "commit", 10.0)

        named = pb.CommitPartRequest(part=part)
        with pytest.raises(forebay.InvalidArgument, match="first message"):
            await asyncio.to_thread(commit)
        for second in (named, pb.CommitPartRequest(metadata_json="{}")):
            with pytest.raises(forebay.InvalidArgument, match="only the first message"):
                await asyncio.to_thread(commit, named, second)
        monkeypatch.setattr(gateway_service, "COMMIT_SHARDS_MAX", 5)
        first, more = pb.CommitPartRequest(part=part, shards=some), pb.CommitPartRequest(shards=some)
        with pytest.raises(forebay.InvalidArgument, match="at most 5"):
            await asyncio.to_thread(commit, first, more)
        with gateway.node.catalog.read() as txn:
            assert txn.runs() == []


async def test_a_listing_in_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway_service, "PAGE_BYTES", 300)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        for step in range(7):
            await save(client, step=step, wait="cache")
        request = pb.ListCheckpointsRequest(run="run")
        connection = client._client._connection
        pages = await asyncio.to_thread(connection.pages, lambda stubs: stubs.gateway.ListCheckpoints, request, "list")
        assert 1 < len(pages) < 7
        assert [found.step for found in await client.checkpoints("run")] == list(range(7))
        with pytest.raises(forebay.NotFound):
            await client.checkpoints("other")


def test_what_is_taken_in_at_once_is_counted_by_shards() -> None:
    """A thousand packs may hold millions: whoever waits for an acknowledgement would wait for all of them."""
    shard = ShardEntry("x", 0, 0, 1 << 16, b"")
    index = PackIndex.laid_out((f"{number:03}", 0, 0) for number in range(400))
    large = PackIndex.laid_out((f"{number:04}", 0, 0) for number in range(3000))
    files = [(0, shard, None)] * 500 + [(0, shard, index)] * 3 + [(0, shard, large), (0, shard, None)]
    assert [len(batch) for batch in find._batches(files)] == [501, 2, 1, 1]


async def test_a_long_manifest_is_taken_in_by_several_acts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "ADOPTED_AT_ONCE", 2)
    monkeypatch.setattr("forebay_gateway.paths.node.ASIDE_BYTES_MIN", 0)  # on a thread
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("run", 1) as part:
            await part.put_many({f"shard-{number}": bytes([number]) * 1000 for number in range(7)})
            await part.commit(wait="pfs", timeout=60)
        assert not _queued(gateway)
    async with serving(tmp_path, tier(tmp_path / "pfs"), node="b") as other, client_of(other) as client:
        await until(other.node.usable_tiers)
        written: list[int] = []
        write = other.node.catalog.write

        async def counting(act: Callable[[WriteTxn], Any], **options: Any) -> Any:
            written.append(1)
            return await write(act, **options)

        monkeypatch.setattr(other.node.catalog, "write", counting)
        found = await client.describe("run", 1)
        assert (found.state, found.shard_count) == ("complete", 7)
        assert len(written) >= 6  # begun, four times shards, finished
        with other.node.catalog.read() as txn:
            check_sums(txn)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.expected_logs("very many directories")
async def test_runs_are_found_in_a_tier_full_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "WALK_LISTS_MAX", 8)
    long = "/".join(("n" * 200, "m" * 200, "ü" * 60))
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        for run in ("team/a", long):
            await save(client, run)
    for number in range(50):
        (tmp_path / "pfs" / f"0-others-{number}" / "deep" / "er").mkdir(parents=True)
    async with serving(tmp_path, tier(tmp_path / "pfs"), node="b") as other, client_of(other) as client:
        await until(other.node.usable_tiers)
        lists: list[str] = []
        listing = other.node.tiers["pfs"].tier.list

        async def counting(prefix: str) -> Any:
            lists.append(prefix)
            return await listing(prefix)

        monkeypatch.setattr(other.node.tiers["pfs"].tier, "list", counting)
        runs = await client.runs()
        assert [run.run for run in runs] == sorted(["team/a", long])
        assert [run.latest_step for run in runs] == [1, 1]
        assert len(lists) < 8 + 20


def test_every_name_of_a_run_has_its_own_key_and_comes_back() -> None:
    names = [
        "a",
        "a/b",
        "a%2Fb",
        "é" * 80,
        "x" * 199,
        "x" * 200,
        "x" * 201,
        "x" * 400,
        "/".join(["y" * 255] * 4),
        ".hidden/run",
    ]
    keys = [run_key(name) for name in names]
    assert len(set(keys)) == len(names)
    assert [parse_run_key(key) for key in keys] == names
    assert all(len(segment.encode()) <= 255 for key in keys for segment in key.split("/"))
    for wrong in (".forebay/runs/a", ".forebay/runs/.json", ".forebay/nodes/a.json", "a.json", ".forebay/runs/%.json"):
        assert parse_run_key(wrong) is None


# -- deletions, memory -------------------------------------------------------------------------------------------------


async def test_a_deletion_of_very_many_writers_asks_what_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("run", 1, writers=100_000, writer=7, session="s") as part:
            await part.put("a.bin", b"a")
            await part.commit()
        await until(lambda: not _queued(gateway))
        await until(lambda: list((tmp_path / "pfs").rglob("parts/7.json")))
        await until(lambda: list((tmp_path / "pfs" / ".forebay" / "announce").rglob("7.json")))
        deleted: list[str] = []
        found = gateway.node.tiers["pfs"].tier
        delete_many = found.delete_many

        async def counting(keys: Any) -> None:
            deleted.extend(keys)
            await delete_many(keys)

        monkeypatch.setattr(found, "delete_many", counting)
        await client.delete("run", 1, force=True)
        await until(lambda: len(deleted) >= 3)  # at once, or when a look at the session that is under way has ended
        await until(lambda: not _known(gateway))
        assert len(deleted) == 3
        left = [path for path in (tmp_path / "pfs").rglob("*") if path.is_file() and ".forebay" not in path.parts]
        assert left == []
        assert not list((tmp_path / "pfs" / ".forebay" / "announce").rglob("*.json"))


async def test_nothing_is_remembered_of_parts_that_ended(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        writes = gateway._writes
        assert writes is not None
        await save(client)
        async with client.checkpoint("run", 1, session="of-1") as part:  # the same again, after its commit
            await part.put("a.bin", b"a" * 100_000)
        async with client.checkpoint("run", 2, session="open") as part:
            await part.put("a.bin", b"a")
            assert len(writes._last_heard_s) == 2
            with gateway.node.catalog.read() as txn:
                writes.remember_only({(each.session_id, each.writer) for each in txn.open_parts()})
            assert len(writes._last_heard_s) == 1
