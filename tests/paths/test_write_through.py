"""The cache's disk fails: shards go through to the first required tier, and every acknowledgement says so.

Here the disk fails for the gateway's own process, by what its cache raises; tests/crash kills it in the middle.
"""

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import grpc.aio
import pytest

import forebay
from forebay import AlreadyExists, Unavailable, Unsupported
from forebay.cli import doctor
from forebay_gateway.base import failpoints
from forebay_gateway.core.errors import Corrupt, PermissionDenied
from forebay_gateway.core.layout import shard_key
from forebay_gateway.doctor.run import Told, through_check
from forebay_gateway.paths import through
from forebay_gateway.paths.wholeness import past_the_cache
from forebay_gateway.tiers.posix.tier import PosixTier
from forebay_wire import frames
from forebay_wire.checksums import crc32c
from forebay_wire.v1 import gateway_pb2 as pb
from paths.kit import client_of, serving, tier, until
from paths.through_kit import RUN, SHARDS, SMALL, Disk, check_settled, data, failing, notes, on


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


@pytest.fixture
def roots(tmp_path: Path) -> tuple[Path, Path]:
    for name in ("pfs", "second"):
        (tmp_path / name).mkdir()
    return tmp_path / "pfs", tmp_path / "second"


async def save(client: forebay.AsyncClient, step: int) -> forebay.CommitReceipt:
    """Plain ones, many small ones, and one whose size nobody knows."""

    def pieces() -> Iterator[bytes]:
        yield data(3, 100_000)
        yield data(4, 200_001)

    async with client.checkpoint(RUN, step, session="s") as part:
        for name, content in SHARDS.items():
            assert (await part.put(name, content)).level == "pfs"
        assert (await part.put("unsized", pieces())).level == "pfs"
        assert {receipt.level for receipt in await part.put_many(SMALL)} == {"pfs"}
        return await part.commit({"step": step})


async def restored(client: forebay.AsyncClient, step: int, source: str = "auto") -> None:
    wanted = {**SHARDS, **SMALL, "unsized": data(3, 100_000) + data(4, 200_001)}
    reader = await client.open(RUN, step, source=source)
    assert set(await reader.names()) == set(wanted)
    for name, content in wanted.items():
        assert await reader.read(name) == content, name


async def test_a_checkpoint_goes_through_and_reaches_every_tier_once_the_disk_works_again(
    tmp_path: Path, roots: tuple[Path, Path], disk: Disk
) -> None:
    pfs, second = roots
    async with failing(tmp_path, tier(pfs), tier(second, "second")) as (gateway, client):
        done = await save(client, 1)
        assert (done.level, done.through, done.checkpoint_complete) == ("pfs", "pfs", True)
        assert list((tmp_path / "cache-a" / "data").rglob("*.shard")) == []
        assert gateway.node.budget.used == gateway.node.budget.reserved == 0
        assert "pfs" in gateway.node.tiers and (await client.pressure()).through == "pfs"
        await client.wait(RUN, 1, "pfs", timeout=30)
        await restored(client, 1)
        with pytest.raises(forebay.DeadlineExceeded):
            await client.wait(RUN, 1, "second", timeout=0.5)
        status = await client.status()
        assert status.pressure.through == "pfs" and "write-through to pfs" in status.pressure.reason
        assert status.pressure.level == "hard" and status.health == "critical"
        assert any(alarm.what.startswith("write-through to pfs: the cache's disk fails") for alarm in status.alarms)
        assert not any("refused" in alarm.what for alarm in status.alarms)
        told = await asyncio.to_thread(doctor._told, gateway.node.config, Told)
        assert told is not None and through_check(told).status == "WARN"
        assert through_check(told).value.startswith("write-through to pfs: the cache's disk fails")
        assert {each.name: each.pending_copies > 0 for each in status.tiers} == {"pfs": False, "second": True}
        async with serving(tmp_path / "b", tier(pfs), node="b") as other, client_of(other) as reader:
            disk.fails = False  # it is the other gateway's too
            await until(lambda: other.node.tiers["pfs"].usable)
            await restored(reader, 1, "pfs")
            await restored(reader, 1)
        await until(lambda: not gateway.node.budget.disk.reason)
        await client.wait(RUN, 1, "all", timeout=60)
        await restored(client, 1, "second")
        await until(lambda: not notes(gateway))
        assert len(list((tmp_path / "cache-a" / "data").rglob("part-*.json"))) == 1
        assert (await client.pressure()).through == ""
        assert [found async for found in client.care.fsck(deep=True)] == []
        check_settled(gateway)


async def test_what_was_put_before_is_acknowledged_again_with_the_level_where_it_is(
    tmp_path: Path, roots: tuple[Path, Path], disk: Disk
) -> None:
    disk.fails = False
    async with serving(tmp_path, tier(roots[0])) as gateway, client_of(gateway) as client:
        await client.hold()
        async with client.checkpoint(RUN, 1, session="s") as part:
            assert (await part.put("cached", SHARDS["large"])).level == "cache"
            await client.release()
            disk.fails = True
            for _ in range(3):
                gateway.node.budget.disk.failed("cannot write")
            await until(lambda: gateway.node.tiers["pfs"].usable)
            for _ in range(2):
                assert (await part.put("through", SHARDS["one"])).level == "pfs"
                assert (await part.put("cached", SHARDS["large"])).level == "cache"
                assert [each.level for each in await part.put_many({"cached": SHARDS["large"], "few": b"x"})] == [
                    "cache",
                    "pfs",
                ]
            with pytest.raises(AlreadyExists):
                await part.put("through", b"other")
            done = await part.commit()
            assert (done.level, done.through) == ("cache+pfs", "pfs")
            assert (await part.commit()).level == "cache+pfs"
        await client.wait(RUN, 1, "pfs", timeout=30)
        disk.fails = False
        await until(lambda: not gateway.node.budget.disk.reason and not notes(gateway))
        check_settled(gateway)


async def test_who_waits_for_the_cache_hears_that_it_is_not_there(tmp_path: Path, roots: tuple[Path, Path], disk: Disk) -> None:
    async with failing(tmp_path, tier(roots[0])) as (gateway, client):
        async with client.checkpoint(RUN, 1, 2, 0, session="s") as part:  # the other writer is not there yet
            await part.put("x", SHARDS["one"])
            await part.commit()
        async with client.checkpoint(RUN, 1, 2, 1, session="s") as part:
            await part.put("y", SHARDS["one"])
            with gateway.node.catalog.read() as txn:
                session = txn.find_session(RUN, 1, "s")
                assert session is not None and "2 of 2 files went through" in past_the_cache(txn, session)
            await part.commit()
        reached = await client.wait(RUN, 1, "cache", timeout=30)
        assert reached.reached
        (level,) = (level for level in (await client.describe(RUN, 1)).levels if level.level == "cache")
        assert level.state == "evicted" and level.bytes_done == 0


async def test_two_writers_make_one_checkpoint(tmp_path: Path, roots: tuple[Path, Path], disk: Disk) -> None:
    async with failing(tmp_path, tier(roots[0])) as (_, client):
        for writer in range(2):
            assert await client.latest(RUN) is None
            async with client.checkpoint(RUN, 1, 2, writer, session="s") as part:
                await part.put(f"w{writer}", SHARDS["large"])
                assert (await part.commit()).checkpoint_complete == bool(writer)
        await client.wait(RUN, 1, "pfs", timeout=30)
        reader = await client.open(RUN, 1)
        assert [await reader.read(f"w{writer}") for writer in range(2)] == [SHARDS["large"]] * 2


async def test_an_aborted_part_leaves_nothing_on_the_tier(tmp_path: Path, roots: tuple[Path, Path], disk: Disk) -> None:
    pfs = roots[0]
    async with failing(tmp_path, tier(pfs)) as (gateway, client):
        part = client.checkpoint(RUN, 1, session="s")
        await part.put("a", SHARDS["large"])
        await part.put("b", SHARDS["one"])
        await part.put_many(SMALL)
        replaced = pfs / shard_key(RUN, 1, "s", "b")
        replaced.unlink()
        replaced.write_bytes(b"another's, by now")
        assert await part.abort() == 72
        await until(lambda: not notes(gateway))
        assert list(on(pfs).values()) == [b"another's, by now"]  # not the version that was put here
        done = await save(client, 1)  # under the same names
        assert done.level == "pfs"
        await client.wait(RUN, 1, "pfs", timeout=30)
        await restored(client, 1)


async def test_a_tier_that_lets_nothing_be_deleted_takes_shards_all_the_same(
    tmp_path: Path, roots: tuple[Path, Path], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def delete(*given: object) -> None:
        raise PermissionDenied("no right to delete")

    async with failing(tmp_path, tier(roots[0])) as (gateway, client):
        monkeypatch.setattr(PosixTier, "delete", delete)
        part = client.checkpoint(RUN, 1, session="s")
        await part.put("a", SHARDS["one"])
        await part.abort()
        await until(lambda: not notes(gateway))
        assert gateway.node.tiers["pfs"].usable and list(on(roots[0]).values()) == [SHARDS["one"]]
        await part_of(client, 2)


async def part_of(client: forebay.AsyncClient, step: int) -> None:
    """One more that goes through."""
    async with client.checkpoint(RUN, step, session="s") as part:
        assert (await part.put("a", SHARDS["one"])).level == "pfs"
        await part.commit(wait="pfs", timeout=30)


async def test_a_damaged_chunk_is_refused_and_nothing_stays(tmp_path: Path, roots: tuple[Path, Path], disk: Disk) -> None:
    async with failing(tmp_path, tier(roots[0])) as (gateway, _):
        part = pb.PartRef(run=RUN, step=1, session="s", writer=0, writers=1)
        body, good = data(5, 64 << 10), crc32c(data(5, 64 << 10))
        whole = crc32c(body + body)
        for crc, trailer, words in (
            (good ^ 1, whole, "arrived damaged"),
            (good, whole ^ 1, "match its checksum"),
            (good, whole, ""),
        ):
            async with grpc.aio.insecure_channel(gateway.node.config.node.listen[0]) as channel:
                call = channel.stream_stream("/forebay.v1.Gateway/PutShard")()
                await call.write(frames.encode_put_header(pb.PutHeader(part=part, name="x", size=2 * len(body))))
                await call.read()
                await call.write(frames.encode_put_chunk(0, good, memoryview(body)))
                await call.write(frames.encode_put_chunk(len(body), crc, memoryview(body)))
                await call.write(frames.encode_put_trailer(2 * len(body), trailer))
                await call.done_writing()
                if words:
                    with pytest.raises(grpc.aio.AioRpcError, match=words):
                        await call.read()
                        await call.read()
                    await until(lambda: not notes(gateway))
                    assert on(roots[0]) == {}
                else:
                    answer = pb.PutShardResponse.FromString(await call.read())
                    assert answer.receipt.level == "pfs" and answer.pressure.through == "pfs"
        assert on(roots[0]) == {shard_key(RUN, 1, "s", "x"): body + body}


async def test_bytes_that_the_tier_does_not_give_back_are_not_acknowledged(
    tmp_path: Path, roots: tuple[Path, Path], disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def read_back(*given: object) -> None:
        raise Corrupt("the tier's bytes differ")

    async with failing(tmp_path, tier(roots[0])) as (gateway, client):
        with monkeypatch.context() as patched:
            patched.setattr(PosixTier, "_read_back", read_back)
            part = client.checkpoint(RUN, 1, session="s")
            with pytest.raises(Unavailable, match="did not get through to pfs"):
                await part.put("x", SHARDS["large"])
        await until(lambda: not notes(gateway))
        assert on(roots[0]) == {}
        await part.put("x", SHARDS["large"])
        await part.commit(wait="pfs", timeout=30)


async def test_a_tier_that_goes_away_in_the_middle_gives_way_to_the_next(
    tmp_path: Path, roots: tuple[Path, Path], disk: Disk
) -> None:
    pfs, second = roots
    away = tmp_path / "away"

    def pieces() -> Iterator[bytes]:
        yield from (data(6, 64 << 10) for _ in range(20))
        pfs.rename(away)
        yield from (data(6, 64 << 10) for _ in range(20))

    async with failing(tmp_path, tier(pfs), tier(second, "second")) as (gateway, client):
        part = client.checkpoint(RUN, 1, session="s")
        with pytest.raises(Unavailable, match="did not get through to pfs"):
            await part.put("x", pieces())  # cannot be read twice
        assert on(second) == {}
        assert (await part.put("x", SHARDS["large"])).level == "second"
        assert (await part.commit()).through == "second"
        await client.wait(RUN, 1, "second", timeout=30)
        assert (await client.pressure()).through == "second"
        away.rename(pfs)
        disk.fails = False
        await client.wait(RUN, 1, "all", timeout=60)
        await until(lambda: not notes(gateway))
        assert not any(".forebay-tmp-" in name for name in (*on(pfs), *on(second)))
        check_settled(gateway)


async def test_where_nothing_can_take_a_shard_it_is_refused_with_the_reason(
    tmp_path: Path, roots: tuple[Path, Path], disk: Disk
) -> None:
    transient = '[[policy]]\nrun = "scratch/**"\ntransient = true\n'
    async with failing(tmp_path, tier(roots[0]), transient) as (gateway, client):
        with pytest.raises(Unavailable, match="by policy the run stays in the cache"):
            await client.checkpoint("scratch/x", 1, session="s").put("x", b"x")
        with pytest.raises(Unavailable, match="by policy the run stays in the cache"):
            await client.checkpoint("scratch/x", 1, session="s", lane="fd").put("x", SHARDS["large"])
        with pytest.raises(Unsupported, match="stream lane alone"):
            await client.checkpoint(RUN, 1, session="s", lane="fd").put("x", SHARDS["large"])
        await client.hold()
        assert (await client.pressure()).level == "refusing"
        with pytest.raises(Unavailable, match="no required tier can take it in its place"):
            await client.checkpoint(RUN, 1, session="s").put("x", SHARDS["large"])
        assert on(roots[0]) == {} and not notes(gateway)


async def test_the_sign_of_completeness_goes_last(tmp_path: Path, roots: tuple[Path, Path], disk: Disk) -> None:
    disk.fails = False
    async with serving(tmp_path, tier(roots[0])) as gateway, client_of(gateway) as client:
        part = client.checkpoint(RUN, 1, session="s")
        await part.put("cached", SHARDS["one"])
        await until(lambda: gateway.node.tiers["pfs"].usable)
        disk.fails = True
        for _ in range(3):
            gateway.node.budget.disk.failed("cannot write")
        with pytest.raises(Unavailable, match="only after all others of its checkpoint, of which 'cached'"):
            await part.put(".metadata", b"x")
        await part.abort()
        part = client.checkpoint(RUN, 2, session="s")
        await part.put_many({".metadata": b"x", "a": b"a", "b": b"b"})
        await part.commit(wait="pfs", timeout=30)


async def test_only_so_many_go_at_a_time(tmp_path: Path, roots: tuple[Path, Path], disk: Disk) -> None:
    async with failing(tmp_path, tier(roots[0])) as (gateway, _):
        path = gateway._through
        part = through.PartRef(RUN, 1, "s", 0, 1)
        under_way = [await path.begin(part, f"x{n}", 10) for n in range(through.STREAMS_MAX)]
        with pytest.raises(through.Unavailable, match="other shards are on their way"):
            await path.begin(part, "more", 10, 0.05)
        await under_way[0].discard()
        more = await path.begin(part, "more", 10, 0.05)
        for each in (*under_way, more):
            await each.discard()
        assert on(roots[0]) == {}
        check_settled(gateway)


@pytest.mark.expected_logs("a call failed unexpectedly")
@pytest.mark.parametrize("point", ["through.before_publish", "through.published", "through.done"])
async def test_an_error_between_two_acts_leaves_nothing(
    tmp_path: Path, roots: tuple[Path, Path], disk: Disk, point: str
) -> None:
    async with failing(tmp_path, tier(roots[0])) as (gateway, client):
        part = client.checkpoint(RUN, 1, session="s")
        with failpoints.armed(f"{point}=error:EIO"), contextlib.suppress(forebay.ForebayError):
            await part.put("x", SHARDS["large"])
        await part.put("x", SHARDS["large"])
        await part.put_many(SMALL)
        await part.commit(wait="pfs", timeout=30)
        await until(lambda: not notes(gateway) or notes(gateway) == ["unfiled:1-0"])
        assert not any(".forebay-tmp-" in name for name in on(roots[0]))
        reader = await client.open(RUN, 1)
        assert await reader.read("x") == SHARDS["large"]
