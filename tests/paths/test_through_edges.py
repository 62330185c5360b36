"""Shards past a failing cache, beside what else happens: other writers of the checkpoint, a deletion, a scrub, the fd lane."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay import Unavailable
from forebay.lanes import fd_put
from forebay_gateway.admission.disk import FAILURES_IN_A_ROW
from forebay_gateway.base import failpoints
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.errors import ForebayError, InvalidArgument, NotFound
from forebay_gateway.core.layout import shard_key
from forebay_gateway.paths import through
from forebay_gateway.paths.care import scrub
from forebay_gateway.tiers.posix.tier import PosixTier
from forebay_wire.checksums import crc32c
from paths.kit import client_of, serving, tier, until
from paths.through_kit import MIB, RUN, SHARDS, Disk, check_settled, data, failing, notes, on


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def pfs(tmp_path: Path) -> Path:
    (tmp_path / "pfs").mkdir()
    return tmp_path / "pfs"


async def test_the_sign_of_completeness_waits_for_the_parts_of_others(tmp_path: Path, pfs: Path, disk: Disk) -> None:
    async with failing(tmp_path, tier(pfs), retry_timeout=0.0) as (gateway, client):
        first, other = (client.checkpoint(RUN, 1, 2, writer, session="s") for writer in range(2))
        await first.put("a", SHARDS["one"])
        for _ in range(2):  # nothing is known of it, then it is open
            with pytest.raises(Unavailable, match="of which the part of writer 1 is not on pfs yet"):
                await first.put(".metadata", b"x")
            await other.put("b", SHARDS["one"])
        assert not any(name.endswith(".metadata") for name in on(pfs))
        await other.commit()
        await first.put(".metadata", b"x")
        await first.commit(wait="pfs", timeout=30)
        await until(lambda: notes(gateway) == ["unfiled:1-0", "unfiled:1-1"])


async def test_the_sign_of_completeness_waits_for_parts_that_another_node_records(
    tmp_path: Path, pfs: Path, disk: Disk
) -> None:
    async with failing(tmp_path, tier(pfs), retry_timeout=0.0) as (_, client):
        first = client.checkpoint(RUN, 1, 2, 0, session="s")
        with pytest.raises(Unavailable, match="of which the part of writer 1 is not on pfs yet"):
            await first.put(".metadata", b"x")
        disk.fails = False  # it is the other gateway's too
        async with serving(tmp_path / "b", tier(pfs), node="b") as other, client_of(other) as beside:
            async with beside.checkpoint(RUN, 1, 2, 1, session="s") as part:
                await part.put("b", SHARDS["one"])
                await part.commit()
            await until(lambda: any(name.endswith("parts/1.json") for name in on(pfs)))
            await first.put(".metadata", b"x")
            await first.commit(wait="pfs", timeout=30)


async def test_the_sign_of_completeness_waits_for_what_is_under_way(tmp_path: Path, pfs: Path, disk: Disk) -> None:
    async with failing(tmp_path, tier(pfs), retry_timeout=0.0) as (gateway, client):
        under_way = await gateway._through.begin(through.PartRef(RUN, 1, "s", 0, 1), "a", 10)
        assert isinstance(under_way, through.Passage)
        part = client.checkpoint(RUN, 1, session="s")
        with pytest.raises(Unavailable, match="of which 'a' is not on pfs yet"):
            await part.put_many({".metadata": b"x", "b": b"b"})
        await under_way.discard()
        await until(
            lambda: not notes(gateway)
        )  # of 'b', whose name is refused, for a client to try again, while that is deleted
        await part.put_many({".metadata": b"x", "b": b"b"})
        await part.commit(wait="pfs", timeout=30)


async def test_what_lands_in_a_checkpoint_that_is_being_deleted_goes_too(tmp_path: Path, pfs: Path, disk: Disk) -> None:
    async with failing(tmp_path, tier(pfs), retry_timeout=0.0) as (gateway, client):
        await client.checkpoint(RUN, 1, session="s").put("a", SHARDS["one"])
        under_way = await gateway._through.begin(through.PartRef(RUN, 1, "s", 0, 1), "b", 3)
        assert isinstance(under_way, through.Passage)
        await under_way.chunk(0, crc32c(b"abc"), memoryview(b"abc"))
        await gateway.node.catalog.write(lambda txn: txn.mark_deleting(RUN, 1))  # and the tier was already dealt with
        with pytest.raises(NotFound, match="deleted while this shard was on its way"):
            await under_way.finish(3, crc32c(b"abc"))
        await until(lambda: not any("/b" in name for name in on(pfs)) and not notes(gateway))


async def test_no_part_file_comes_behind_a_deletion(
    tmp_path: Path, pfs: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would prove a commit to the next start, which would bring the checkpoint back."""
    async with failing(tmp_path, tier(pfs), retry_timeout=0.0) as (gateway, client):
        async with client.checkpoint(RUN, 1, session="s") as part:
            await part.put("a", SHARDS["one"])
            await part.commit(wait="pfs", timeout=30)
        loop, write_part = asyncio.get_running_loop(), CacheDir.write_part
        deletion: list[asyncio.Future[object]] = []

        def begun(*given: object) -> object:
            """On a thread: the deletion has all the time it wants before the file is written."""
            made = asyncio.run_coroutine_threadsafe(client.delete(RUN, 1), loop)
            deletion.append(asyncio.wrap_future(made, loop=loop))
            asyncio.run_coroutine_threadsafe(marked(), loop).result()
            return write_part(*given)  # type: ignore[arg-type]

        async def marked() -> None:
            def is_going() -> bool:
                with gateway.node.catalog.read() as txn:
                    row = txn.checkpoint(RUN, 1)
                return row is None or row.deleting

            await until(is_going)

        monkeypatch.setattr(CacheDir, "write_part", begun)
        disk.fails = False
        await until(lambda: bool(deletion))
        await deletion[0]

        def is_gone() -> bool:
            with gateway.node.catalog.read() as txn:
                return txn.checkpoint(RUN, 1) is None

        await until(is_gone)
        await until(lambda: not notes(gateway))
        assert list((tmp_path / "cache-a" / "data").rglob("part-*.json")) == []
        check_settled(gateway)


async def test_a_name_whose_directory_was_not_synced_is_settled_before_it_counts(
    tmp_path: Path, pfs: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled, settle = [], PosixTier.settle

    async def seen(of: PosixTier, key: str) -> None:
        await settle(of, key)
        settled.append(key)

    async with failing(tmp_path, tier(pfs), retry_timeout=0.0) as (gateway, client):
        monkeypatch.setattr(PosixTier, "settle", seen)
        part = client.checkpoint(RUN, 1, session="s")
        with failpoints.armed("posix.before_dir_fsync=error:EIO"), pytest.raises(Unavailable, match="did not get through"):
            await part.put("a", SHARDS["one"])
        await until(lambda: not notes(gateway))
        assert settled == [shard_key(RUN, 1, "s", "a")]
        assert (await part.put("a", SHARDS["one"])).level == "pfs"  # as it is there already
        assert settled == [shard_key(RUN, 1, "s", "a")]


async def test_what_came_there_for_a_part_that_was_aborted_goes_again(
    tmp_path: Path, pfs: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its writer was told that it failed, and that is not certain: the rename was done."""
    goes_on, verify = asyncio.Event(), PosixTier.verify

    async def later(*given: Any) -> Any:
        await goes_on.wait()
        return await verify(*given)

    async with failing(tmp_path, tier(pfs), retry_timeout=0.0) as (gateway, client):
        monkeypatch.setattr(PosixTier, "verify", later)
        part = client.checkpoint(RUN, 1, session="s")
        with failpoints.armed("posix.before_dir_fsync=error:EIO"), pytest.raises(Unavailable, match="did not get through"):
            await part.put("a", SHARDS["one"])
        assert list(on(pfs).values()) == [SHARDS["one"]]
        await part.abort()
        goes_on.set()
        await until(lambda: not notes(gateway))
        assert on(pfs) == {}


async def test_what_cannot_be_tidied_stands_in_nobody_s_way(
    tmp_path: Path, pfs: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A note of another object, which the tier is slow to prove, and one that it never takes back."""
    at_work, goes_on = asyncio.Event(), asyncio.Event()

    async def verify(*given: object) -> None:
        at_work.set()
        await goes_on.wait()
        raise InvalidArgument("nothing can be said of this one")

    async with failing(tmp_path, tier(pfs), retry_timeout=0.0) as (gateway, client):
        with monkeypatch.context() as patched:
            patched.setattr(PosixTier, "verify", verify)
            part = client.checkpoint(RUN, 1, session="s")
            with failpoints.armed("posix.before_dir_fsync=error:EIO"), pytest.raises(Unavailable, match="did not get through"):
                await part.put("a", SHARDS["one"])
            await at_work.wait()
            async with asyncio.timeout(20):
                assert (await part.put("b", SHARDS["one"])).level == "pfs"
            goes_on.set()
            await until(lambda: not notes(gateway))
        assert (await part.put("a", SHARDS["large"])).level == "pfs"
        await part.commit(wait="pfs", timeout=30)


async def test_a_scrub_does_not_read_a_tier_for_what_went_through_as_it_is(
    tmp_path: Path, pfs: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    async def check_copies(*given: object) -> list[ForebayError | None]:
        asked.append(given)
        return [None]

    async with failing(tmp_path, tier(pfs), retry_timeout=0.0) as (gateway, client):
        async with client.checkpoint(RUN, 1, session="s") as part:
            await part.put("a", data(1, 2 * MIB))
            await part.commit(wait="pfs", timeout=30)
        disk.fails = False
        await until(lambda: not gateway.node.budget.disk.reason)
        assert await (await client.open(RUN, 1)).read("a") == data(1, 2 * MIB)
        await until(lambda: list((tmp_path / "cache-a" / "data").rglob("*.shard")))
        monkeypatch.setattr(scrub, "check_copies", check_copies)
        await client.care.scrub("start")
        async with asyncio.timeout(30):
            while not (await client.care.scrub()).copies:
                await asyncio.sleep(0.05)
        assert not asked


async def test_a_write_that_the_disk_refuses_to_a_client_counts(
    tmp_path: Path, pfs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pwrite(*given: object) -> int:
        raise OSError(5, "Input/output error")

    async with serving(tmp_path, tier(pfs)) as gateway, client_of(gateway, retry_timeout=0.0) as client:
        await until(lambda: gateway.node.tiers["pfs"].usable)
        monkeypatch.setattr(CacheDir, "try_writing", lambda cache: (_ for _ in ()).throw(NotFound("still")))
        disk, reasons = gateway.node.budget.disk, list[str]()
        counted = disk.failed
        monkeypatch.setattr(disk, "failed", lambda reason: (reasons.append(reason), counted(reason)))
        with monkeypatch.context() as patched:
            patched.setattr(fd_put.os, "pwrite", pwrite)
            part = client.checkpoint(RUN, 1, session="s", lane="fd")
            for _ in range(FAILURES_IN_A_ROW):
                with pytest.raises(Unavailable, match="the cache's file cannot be written: Input/output error"):
                    await part.put("a", data(1, 2 * MIB))
            with pytest.raises(forebay.Unsupported, match="stream lane alone"):
                await part.put("a", data(1, 2 * MIB))
        assert ["as its client says" in reason for reason in reasons][:FAILURES_IN_A_ROW] == [True] * FAILURES_IN_A_ROW
