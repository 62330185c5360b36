"""A shard in several ranges at a time: order, damage, short answers, bounds, and what an early end leaves."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest

from conformance.tier_kit import CHUNK, BytesSource, blob, decorated, s3_settings
from forebay.demo.seaweedfs import SeaweedFS
from forebay_gateway.cache.io import IoPool
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.errors import Corrupt, ForebayError, Unavailable
from forebay_gateway.core.records import ShardKey
from forebay_gateway.movers.fetch import chunks_of, fetch
from forebay_gateway.movers.jobs import FetchJob, FetchSource, Identity, ShardItem
from forebay_gateway.tiers import ranges
from forebay_gateway.tiers.memory import MemoryTier
from forebay_gateway.tiers.ranges import AHEAD_BYTES, RANGE_BYTES, ReadAhead, ranged_chunks
from forebay_gateway.tiers.s3.tier import S3Tier
from forebay_wire.manifest import pack_chunk_crcs

PER_RANGE = 4
CHUNKS = 5 * PER_RANGE + 2
DATA = blob((CHUNKS - 1) * CHUNK + 1234)
SOURCE = BytesSource(DATA)
ITEM = ShardItem(1, 2, "shard", len(DATA), CHUNK, SOURCE.crc32c, pack_chunk_crcs(list(SOURCE.chunk_crcs)))
CHUNKS_EXPECTED = [DATA[at : at + CHUNK] for at in range(0, len(DATA), CHUNK)]


class Ranged(MemoryTier):
    """Notes each read, and holds those back whose first chunk has a gate."""

    def __init__(self, name: str = "far", width: int = 4) -> None:
        super().__init__(name)
        self.width = width
        self.reads: list[int] = []  # by their first chunk
        self.gates: dict[int, asyncio.Event] = {}
        self.errors: dict[int, ForebayError] = {}
        self.open = self.most = 0
        self.served: set[int] = set()

    @property
    def reads_at_once(self) -> int:
        return self.width

    async def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        first = offset // CHUNK
        self.reads.append(first)
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if first in self.gates:
                await self.gates[first].wait()
            if first in self.errors:
                raise self.errors[first]
            async for piece in super().read(key, offset, length):
                await asyncio.sleep(0)
                yield piece
            self.served.add(first)
        finally:
            self.open -= 1

    def damage(self, chunk: int) -> None:
        data = bytearray(DATA)
        data[chunk * CHUNK + 7] ^= 1
        self._store("shard", bytes(data))


@pytest.fixture(autouse=True)
def small_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranges, "RANGE_BYTES", PER_RANGE * CHUNK)


async def filled(name: str = "far", width: int = 4) -> Ranged:
    tier = Ranged(name, width)
    await tier.put("shard", BytesSource(DATA))
    return tier


async def whole(tier: Ranged, ahead: ReadAhead, first: int = 0, stop: int = CHUNKS) -> list[bytes]:
    chunks = ranged_chunks(tier, "shard", len(DATA), CHUNK, SOURCE.chunk_crcs, first, stop, ahead)
    async with aclosing(chunks):
        return [bytes(chunk) async for chunk in chunks]


async def until_served(tier: Ranged, *wanted: int) -> None:
    while not tier.served >= set(wanted):
        await asyncio.sleep(0)


@pytest.mark.parametrize(("first", "stop"), [(0, CHUNKS), (3, CHUNKS), (5, 6), (7, 7), (1, 18)])
@pytest.mark.parametrize("width", [1, 2, 4, 100])
async def test_all_chunks_in_order(first: int, stop: int, width: int) -> None:
    tier, ahead = await filled(width=width), ReadAhead()
    assert await whole(tier, ahead, first, stop) == CHUNKS_EXPECTED[first:stop]
    assert tier.reads == list(range(first, stop, PER_RANGE))
    assert tier.most == min(width, len(tier.reads))
    assert (tier.open, ahead.free_bytes) == (0, AHEAD_BYTES)


async def test_ranges_that_come_out_of_order() -> None:
    tier = await filled()
    tier.gates = {first: asyncio.Event() for first in (0, 4, 8)}
    reading = asyncio.create_task(whole(tier, ReadAhead()))
    await until_served(tier, 12)
    assert tier.reads == [0, 4, 8, 12]  # its memory is bounded: no fifth before the first is used up
    for first in (8, 4, 0):
        assert not reading.done()
        tier.gates[first].set()
        await until_served(tier, first)
    assert await reading == CHUNKS_EXPECTED


async def test_no_more_than_the_tier_bears_now() -> None:
    """A store that sheds load is asked by one range, as soon as it has said so."""
    tier, ahead = await filled(), ReadAhead()
    chunks = ranged_chunks(tier, "shard", len(DATA), CHUNK, SOURCE.chunk_crcs, 0, CHUNKS, ahead)
    async with aclosing(chunks):
        await anext(chunks)
        assert len(tier.reads) == 4
        tier.width = 1
        got = [bytes(chunk) async for chunk in chunks]
    assert got == CHUNKS_EXPECTED[1:]
    assert tier.reads == list(range(0, CHUNKS, PER_RANGE))
    tier.most = 0
    assert await whole(tier, ahead) == CHUNKS_EXPECTED and tier.most == 1


async def test_memory_is_shared_and_who_gets_none_goes_on() -> None:
    ahead = ReadAhead(4 * PER_RANGE * CHUNK)
    tiers = [await filled() for _ in range(5)]
    assert await asyncio.gather(*(whole(tier, ahead) for tier in tiers)) == [CHUNKS_EXPECTED] * 5
    assert ahead.free_bytes == 4 * PER_RANGE * CHUNK
    tight, tier = ReadAhead(0), await filled()
    assert await whole(tier, tight) == CHUNKS_EXPECTED
    assert (tier.most, tight.free_bytes) == (1, 0)


async def fetched(*tiers: Ranged) -> tuple[list[bytes], list[tuple[str, Exception]]]:
    failures: list[tuple[str, Exception]] = []
    sources = [(tier.name, tier) for tier in tiers]
    chunks = chunks_of(ITEM, sources, lambda name, error: failures.append((name, error)), ReadAhead())
    async with aclosing(chunks):
        got = [(crc, bytes(chunk)) async for crc, chunk in chunks]
    assert [crc for crc, _ in got] == list(SOURCE.chunk_crcs)
    return [data for _, data in got], failures


async def test_a_bad_chunk_in_a_middle_range() -> None:
    """What is before it counts, though later ranges came first; the next tier goes on at that very chunk."""
    near, next_one = await filled("near"), await filled("next")
    near.damage(9)
    near.gates[0] = asyncio.Event()

    async def let_go() -> None:
        await until_served(near, 4, 12)
        near.gates[0].set()

    (got, failures), _ = await asyncio.gather(fetched(near, next_one), let_go())
    assert got == CHUNKS_EXPECTED
    ((name, error),) = failures
    assert name == "near" and isinstance(error, Corrupt) and error.details["offset"] == 9 * CHUNK
    assert next_one.reads == [9, 13, 17, 21]
    assert (near.open, next_one.open) == (0, 0)


@pytest.mark.parametrize("chunk", [0, 8, 20])
async def test_a_range_that_fails(chunk: int) -> None:
    near, next_one = await filled("near"), await filled("next")
    near.errors[chunk] = Unavailable("away")
    got, failures = await fetched(near, next_one)
    assert got == CHUNKS_EXPECTED and [name for name, _ in failures] == ["near"]
    assert next_one.reads[0] == chunk and near.open == 0


async def test_several_failures_are_one_and_none_is_lost_sight_of() -> None:
    """Of ranges that fail together the first in order is told; of the others nothing is logged at their end."""
    near, next_one = await filled("near"), await filled("next")
    near.errors = {first: Unavailable(f"away {first}") for first in (4, 8, 12)}
    _, failures = await fetched(near, next_one)
    assert [str(error) for _, error in failures] == [str(near.errors[4])] and next_one.reads[0] == 4


async def test_a_short_answer() -> None:
    near, next_one = await filled("near"), await filled("next")
    original = near.read

    async def short(key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        async for piece in original(key, offset, length):
            yield piece[: CHUNK + 100] if offset == 8 * CHUNK else piece

    near.read = short  # type: ignore[method-assign]
    got, failures = await fetched(near, next_one)
    assert got == CHUNKS_EXPECTED and next_one.reads[0] == 9
    ((_, error),) = failures
    assert isinstance(error, Corrupt) and "too few bytes" in str(error)


@pytest.mark.parametrize("how", ["cancelled", "failed"])
async def test_an_early_end_leaves_nothing(tmp_path: Path, how: str) -> None:
    """Cancelled while it waits for a range, or without any source left: no read, no file and no memory stays."""
    CacheDir.open(tmp_path / "cache", "a").release()
    cache, pool, ahead = CacheDir.attach(tmp_path / "cache"), IoPool(buffer_size=CHUNK), ReadAhead()
    cache.make_session_dir(1)
    tier = await filled()
    await tier.probe()
    assert tier.capabilities is not None
    job = FetchJob(1, ITEM, Identity("r", 1, "s", 0, 1, "shard"), (FetchSource("far", tier.capabilities),))
    if how == "cancelled":
        tier.gates = {4: asyncio.Event(), 12: asyncio.Event()}
    else:
        tier.errors[4], tier.gates = Unavailable("away"), {8: asyncio.Event()}
    moved: list[int] = []
    task = asyncio.create_task(fetch(cache, pool, job, [("far", tier)], lambda *_: None, moved.append, ahead))
    try:
        if how == "cancelled":
            while len(moved) < PER_RANGE or 8 not in tier.served:
                await asyncio.sleep(0)
            assert tier.open == 2 and ahead.free_bytes < AHEAD_BYTES
            task.cancel()
        with pytest.raises(asyncio.CancelledError if how == "cancelled" else Unavailable):
            await task
        assert len(moved) == PER_RANGE and tier.open == 0 and ahead.free_bytes == AHEAD_BYTES
        assert pool.free_buffers == pool.buffers
        assert not cache.incoming_path(ITEM.shard_id).exists() and not cache.shard_path(ShardKey(1, 2)).exists()
    finally:
        pool.close()


@pytest.mark.parametrize("wrapped", [False, True])
async def test_an_object_store_is_read_by_four_and_by_fewer_after_trouble(
    s3_server: SeaweedFS, monkeypatch: pytest.MonkeyPatch, wrapped: bool
) -> None:
    bare = S3Tier("object", s3_settings(s3_server, f"ranges-{wrapped}"))
    tier = decorated(bare) if wrapped else bare
    assert tier.reads_at_once == 4 and S3Tier("one", s3_settings(s3_server, "x", concurrency=1)).reads_at_once == 1
    source = BytesSource(DATA)
    call, asked, widths, busy = bare.client.call, [], [], [Unavailable("slow down")]

    async def counted(operation: str, *arguments: object, **parameters: object) -> dict[str, object]:
        if operation == "get_object":
            asked.append(parameters["Range"])
            widths.append(tier.reads_at_once)
            if busy:
                raise busy.pop()
        return await call(operation, *arguments, **parameters)  # type: ignore[arg-type]

    try:
        await tier.put("shard", source)
        monkeypatch.setattr(bare.client, "call", counted)
        found: list[bytes] = []
        try:
            chunks = ranged_chunks(tier, "shard", len(DATA), CHUNK, source.chunk_crcs, 0, CHUNKS, ReadAhead())
            async with aclosing(chunks):
                found = [bytes(chunk) async for chunk in chunks]
        except Unavailable:
            assert not wrapped and tier.reads_at_once == 2  # nobody asks again
        if wrapped:
            assert min(widths) == 2 and widths[-1] > 2  # and more again as it keeps up
            assert found == CHUNKS_EXPECTED and len(asked) == len(set(asked)) + 1 == 7
    finally:
        await tier.close()


def test_a_range_holds_whole_chunks() -> None:
    assert RANGE_BYTES * 4 <= AHEAD_BYTES and RANGE_BYTES % (4 << 20) == 0
