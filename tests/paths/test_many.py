"""Many small shards at once: as they lie in their packs, each proved alone; what packs do not give is read one by one."""

import asyncio
import os
from pathlib import Path

import pytest

import forebay
from forebay.lanes import many as client_many
from forebay_gateway.base import failpoints
from forebay_gateway.build import Gateway
from forebay_gateway.cache.packs import PackReader
from forebay_gateway.core.records import ShardKey, ShardRow
from forebay_gateway.core.states import ShardState
from forebay_gateway.paths import many
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.read import ReadPath
from forebay_wire.packs import PackedShard
from forebay_wire.v1 import gateway_pb2 as pb
from paths.kit import client_of, serving, tier, until

SHARDS = {f"s/{n:03}": os.urandom(n * 97 % 5000) for n in range(300)}
PLAIN = {"large": os.urandom(1 << 20), ".metadata": b"last"}


async def save(client: forebay.AsyncClient, shards: dict[str, bytes] = SHARDS) -> None:
    part = client.checkpoint("run", 1, session="s")
    await part.put_many(shards)
    await part.commit()


def packs(gateway: Gateway) -> list[ShardRow]:
    with gateway.node.catalog.read() as txn:
        return [row for row in txn.all_shards() if row.is_pack]


def damage(gateway: Gateway, *names: str) -> None:
    """Flip a byte of each of these shards where it lies in the cache's pack."""
    (row,) = packs(gateway)
    with gateway.node.catalog.read() as txn:
        places = {shard.name: shard for shard in txn.pack_index(row.key)}
    with gateway.node.cache.shard_path(row.key).open("r+b") as file:
        for name in names:
            file.seek(places[name].offset + places[name].size // 2)
            (byte,) = file.read(1)
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes((byte ^ 1,)))


class Calls:
    """Which shards were asked for one by one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.single: list[str] = []
        locate = ReadPath.locate

        async def noted(path, run, step, session, name):  # type: ignore[no-untyped-def]
            self.single.append(name)
            return await locate(path, run, step, session, name)

        monkeypatch.setattr(ReadPath, "locate", noted)


async def everything(reader: forebay.aio.AsyncReader, names: list[str] | None = None) -> dict[str, bytes]:
    found: dict[str, bytes] = {}
    async for name, data in reader.read_many(names):
        assert name not in found
        found[name] = data
    return found


@pytest.mark.parametrize("lane", ["stream", "fd"])
async def test_shards_of_packs_come_together(lane: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "GROUP_BYTES_MAX", 20_000)
    monkeypatch.setattr(client_many, "NAMES_MAX", 120)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client, SHARDS | PLAIN)
        calls = Calls(monkeypatch)
        reader = await client.open("run", 1, lane=lane)
        assert await everything(reader) == SHARDS | PLAIN
        assert set(calls.single) <= {*PLAIN}
        some = list(SHARDS)[5:290:7]
        assert await everything(reader, some) == {name: SHARDS[name] for name in some}
        with pytest.raises(forebay.NotFound, match="nothing"):
            await everything(reader, [*some, "nothing"])
        await client.restore_dir("run", 1, tmp_path / "out", lane=lane)
        assert set(calls.single) <= {*PLAIN}
    found = {path.relative_to(tmp_path / "out").as_posix(): path.read_bytes() for path in (tmp_path / "out").rglob("*.*")}
    assert found[".metadata"] == b"last"
    assert {name: (tmp_path / "out" / name).read_bytes() for name in SHARDS | PLAIN} == SHARDS | PLAIN


@pytest.mark.expected_logs
@pytest.mark.parametrize("lane", ["stream", "fd"])
async def test_damage_costs_the_shards_it_hit(lane: str, tmp_path: Path) -> None:
    """No other copy is there: its neighbours come, also once the pack is quarantined, and the error names it."""
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await client.hold()
        await save(client)
        damage(gateway, "s/100")
        reader = await client.open("run", 1, lane=lane)
        for _ in range(2):
            found: dict[str, bytes] = {}
            with pytest.raises(forebay.Corrupt, match="s/100"):
                async for name, data in reader.read_many():
                    found[name] = data
            assert found == {name: data for name, data in SHARDS.items() if name != "s/100"}
            assert packs(gateway)[0].state is ShardState.QUARANTINED
        with pytest.raises(forebay.Corrupt, match="s/100"):
            await client.restore_dir("run", 1, tmp_path / "out", lane=lane)
        assert list((tmp_path / "out").rglob("*")) == []


@pytest.mark.expected_logs
@pytest.mark.parametrize("lane", ["stream", "fd"])
async def test_what_is_damaged_comes_from_a_tier(lane: str, tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
        await client.wait("run", 1, "pfs")
        damage(gateway, "s/007", "s/200")
        reader = await client.open("run", 1, lane=lane)
        assert await everything(reader) == SHARDS
        assert gateway.node.alarms
        await until(lambda: packs(gateway)[0].is_cached)  # mended from the tier
        assert await everything(reader) == SHARDS


async def test_an_evicted_pack_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
        await client.wait("run", 1, "pfs")
        await until(lambda: packs(gateway)[0].state is ShardState.EVICTABLE)
        await asyncio.to_thread(client._client.care.evict, "run", 1)
        calls = Calls(monkeypatch)
        reader = await client.open("run", 1)
        some = list(SHARDS)[:20]
        from_cache = await client.open("run", 1, source="cache")
        with pytest.raises(forebay.NotFound):
            await everything(from_cache, some)
        assert packs(gateway)[0].state is ShardState.EVICTED
        calls.single.clear()
        assert await everything(reader, some) == {name: SHARDS[name] for name in some}
        assert packs(gateway)[0].is_cached and calls.single == []


@pytest.mark.expected_logs
async def test_a_disk_that_fails_leaves_it_to_single_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "GROUP_BYTES_MAX", 20_000)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
        reader = await client.open("run", 1)
        for point in ("read.before_open=error:EIO", "read.before_chunk=3*error:EIO"):
            with failpoints.armed(point):
                assert await everything(reader) == SHARDS
        assert packs(gateway)[0].is_cached


async def test_streams_that_are_given_up_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many, "GROUP_BYTES_MAX", 5_000)
    evictors = []
    hold = Evictor.hold

    def noted(evictor: Evictor, key: ShardKey) -> None:
        evictors.append(evictor)
        hold(evictor, key)

    monkeypatch.setattr(Evictor, "hold", noted)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
        reader = await client.open("run", 1)
        await everything(reader)
        before, free = open_files(), gateway.node.io.free_buffers

        async def give_up() -> None:
            items = reader.read_many()
            async for _ in items:
                break
            await items.aclose()  # type: ignore[attr-defined]

        for _ in range(10):
            await asyncio.gather(*(give_up() for _ in range(10)))
        await until(lambda: not evictors[0]._readers and gateway.node.io.free_buffers == free)
        await until(lambda: open_files() <= before)
        assert await everything(reader) == SHARDS


def open_files() -> int:
    return sum(name.endswith(".shard") for name in map(_target, os.listdir("/proc/self/fd")))


def _target(number: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return ""


async def test_a_checkpoint_deleted_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What comes is right; what does not come is said to be gone."""
    monkeypatch.setattr(many, "GROUP_BYTES_MAX", 5_000)
    monkeypatch.setattr(client_many, "NAMES_MAX", 100)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
        reader = await client.open("run", 1)
        found: dict[str, bytes] = {}
        with pytest.raises(forebay.NotFound):
            async for name, data in reader.read_many():
                if not found:
                    await client.delete("run", 1, force=True)
                found[name] = data
        assert 0 < len(found) < len(SHARDS)
        assert found == {name: SHARDS[name] for name in found}


async def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)

        def ask(**fields: object) -> list[pb.ReadManyResponse]:
            request = pb.ReadManyRequest(**({"run": "run", "step": 1, "names": list(SHARDS)} | fields))  # type: ignore[arg-type]
            connection = client._client._connection
            return connection.pages(lambda stubs: stubs.gateway.ReadMany, request, "ask")

        async def refused(error: type[forebay.ForebayError], match: str, **fields: object) -> None:
            with pytest.raises(error, match=match):
                await asyncio.to_thread(ask, **fields)

        await refused(forebay.InvalidArgument, "at most", names=["x"] * 5001)
        await refused(forebay.InvalidArgument, "one by one", source="pfs")
        await refused(forebay.InvalidArgument, "run", run="../x")
        await refused(forebay.NotFound, "no", step=2)
        await refused(forebay.NotFound, "other", session="other")
        twice = await asyncio.to_thread(ask, names=["s/001", "s/002", "s/001", "no", "", "a" * 9999])
        assert sorted(shard.name for message in twice for shard in message.shards) == ["s/001", "s/002"]


def test_neighbours_are_read_together_within_bounds() -> None:
    at, shards = 100, []
    for number in range(4000):
        size = (number % 7) * 100
        shards.append(PackedShard(f"{number}", size, 0, at))
        at += size + (200_000 if number == 10 else 0)
    parts = list(many.neighbours(shards))
    assert [shard for part in parts for shard in part] == shards
    assert len(parts[0]) == 11
    for part in parts:
        assert len(part) <= many.GROUP_SHARDS_MAX
        assert part[-1].offset + part[-1].size - part[0].offset <= many.GROUP_BYTES_MAX
    assert len(parts) < 10
    assert list(many.neighbours([])) == []


async def test_nobody_reads_ahead_where_memory_is_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a call has read and not sent is counted nowhere."""
    monkeypatch.setattr(many, "GROUP_BYTES_MAX", 20_000)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await save(client)
        read, begun = PackReader.read, list[int]()

        async def noted(file: PackReader, shards: list[PackedShard]) -> many.Group:
            begun.append(len(shards))
            return await read(file, shards)

        monkeypatch.setattr(PackReader, "read", noted)
        finder, evictor = Finder(gateway.node), Evictor(gateway.node)
        path = many.ManyPath(gateway.node, ReadPath(gateway.node, finder, evictor), evictor)
        for plenty in (False, True):
            begun.clear()
            sizes = []
            async for group in path.read("run", 1, "", list(SHARDS), "", lambda plenty=plenty: plenty):  # type: ignore[misc]
                sizes.append(len(group))
                await asyncio.sleep(0.01)
                assert len(begun) - len(sizes) <= plenty
            assert (sum(sizes), len(sizes) > 10) == (len(SHARDS), True)
