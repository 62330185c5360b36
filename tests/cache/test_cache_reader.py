"""Reading a shard: every byte checked, buffers never shared by two readers, nothing left open."""

import asyncio
import gc
import os
import random
from contextlib import aclosing
from pathlib import Path

import pytest

from cache.disk import CHUNK, KEY, SIZES, Rig, open_descriptors, pieces_of, some_bytes
from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import align
from forebay_gateway.cache.reader import ShardReader
from forebay_gateway.core.errors import Corrupt, InvalidArgument, Unavailable
from forebay_gateway.core.records import ShardKey
from forebay_gateway.tiers.base import Source
from forebay_wire.checksums import crc32c


def flip(path: Path, at: int, bit: int) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        byte = os.pread(descriptor, 1, at)[0]
        os.pwrite(descriptor, bytes((byte ^ 1 << bit,)), at)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("size", SIZES)
async def test_round_trip(rig: Rig, size: int) -> None:
    data = some_bytes(size)
    reader = await rig.open(await rig.put(data))
    source: Source = reader  # what tiers take
    assert (source.size, source.chunk_size, source.crc32c) == (size, CHUNK, crc32c(data))
    assert source.chunk_crcs == tuple(crc32c(piece) for piece in pieces_of(data))
    count = len(source.chunk_crcs)
    for index in reversed(range(count)):
        view = await source.read_chunk(index)
        assert view == pieces_of(data)[index]
        assert view.readonly
        del view
    for ahead in (0, 1, 5):
        got = [(index, bytes(view)) async for index, view in reader.chunks_from(0, count, ahead)]
        assert got == [(index, bytes(piece)) for index, piece in enumerate(pieces_of(data))]
    for wrong in (-1, count):
        with pytest.raises(InvalidArgument, match="no such chunk"):
            await source.read_chunk(wrong)
    await reader.close()
    assert rig.pool.free_buffers == rig.pool.buffers


async def test_ranges(rig: Rig) -> None:
    data = some_bytes(6 * CHUNK)
    reader = await rig.open(await rig.put(data))
    assert [index async for index, _ in reader.chunks_from(2, 5)] == [2, 3, 4]
    assert [index async for index, _ in reader.chunks_from(3, 3)] == []
    await reader.close()


async def test_flipped_bits_are_found_in_their_chunk_alone(rig: Rig) -> None:
    data = some_bytes(3 * CHUNK - 100)
    reader = await rig.open(await rig.put(data))
    path = rig.cache.shard_path(KEY)
    choose = random.Random(5)
    edges = [0, CHUNK - 1, CHUNK, 2 * CHUNK - 1, 2 * CHUNK, len(data) - 1]
    for at in edges + [choose.randrange(len(data)) for _ in range(60)]:
        bit, bad = choose.randrange(8), at // CHUNK
        flip(path, at, bit)
        shown = path.relative_to(rig.cache.path)
        with pytest.raises(Corrupt, match=f"path={shown} chunk={bad} offset={bad * CHUNK} "):
            await reader.read_chunk(bad)
        assert await reader.read_chunk((bad + 1) % 3) == pieces_of(data)[(bad + 1) % 3]
        flip(path, at, bit)
        assert await reader.read_chunk(bad) == pieces_of(data)[bad]
    await reader.close()
    assert rig.pool.free_buffers == rig.pool.buffers


async def test_damage_ends_a_stream_at_the_damaged_chunk(rig: Rig) -> None:
    data = some_bytes(5 * CHUNK)
    sealed = await rig.put(data)
    flip(rig.cache.shard_path(KEY), 3 * CHUNK + 7, 0)
    reader = await rig.open(sealed)
    seen = []
    with pytest.raises(Corrupt, match="chunk=3"):
        async for index, view in reader.chunks_from(0, 5):
            seen.append(index)
            del view
    assert seen == [0, 1, 2]
    await reader.close()
    assert rig.pool.free_buffers == rig.pool.buffers


async def test_padding_is_nobodys_data(rig: Rig) -> None:
    data = some_bytes(100)
    sealed = await rig.put(data)
    flip(rig.cache.shard_path(KEY), 101, 0)
    reader = await rig.open(sealed)
    assert await reader.read_chunk(0) == data
    await reader.close()


async def test_files_of_a_wrong_length(rig: Rig) -> None:
    sealed = await rig.put(some_bytes(2 * CHUNK))
    path = rig.cache.shard_path(KEY)
    for length in (sealed.disk_size - 1, sealed.disk_size + 4096, 0, align(sealed.size)):
        os.truncate(path, length)
        with pytest.raises(Corrupt, match=f"length={length} expected={sealed.disk_size}"):
            await rig.open(sealed)
    path.unlink()
    with pytest.raises(Corrupt, match="gone"):
        await rig.open(sealed)
    rig.assert_nothing_left()


async def test_a_file_truncated_while_open(rig: Rig) -> None:
    sealed = await rig.put(some_bytes(2 * CHUNK))
    reader = await rig.open(sealed)
    os.truncate(rig.cache.shard_path(KEY), CHUNK + 4096)
    with pytest.raises(Corrupt, match=f"too early.*offset={CHUNK} got=4096"):
        await reader.read_chunk(1)
    await reader.close()


async def test_an_unlinked_file_stays_readable_while_open(rig: Rig) -> None:
    data = some_bytes(2 * CHUNK)
    reader = await rig.open(await rig.put(data))
    rig.cache.unlink(rig.cache.shard_path(KEY))
    assert await reader.read_chunk(1) == data[CHUNK:]
    await reader.close()


async def test_a_table_that_does_not_fit(rig: Rig) -> None:
    sealed = await rig.put(some_bytes(2 * CHUNK))
    with pytest.raises(Corrupt, match="table"):
        await ShardReader.open(
            None,
            rig.pool,
            rig.cache.shard_path(KEY),
            size=sealed.size,
            chunk_size=CHUNK,
            crc32c=sealed.crc32c,
            chunks=sealed.chunks[:-4],
            direct_io=False,
        )


@pytest.mark.parametrize("point", ["read.before_open", "read.before_chunk"])
async def test_a_failing_disk_is_unavailable_not_corrupt(rig: Rig, point: str) -> None:
    sealed = await rig.put(some_bytes(2 * CHUNK))
    with failpoints.armed(f"{point}=error:EIO"), pytest.raises(Unavailable, match="EIO"):
        async with aclosing_reader(await rig.open(sealed)) as reader:
            await reader.read_chunk(0)
    rig.cache.unlink(rig.cache.shard_path(KEY))
    rig.assert_nothing_left()


class aclosing_reader:
    def __init__(self, reader: ShardReader) -> None:
        self.reader = reader

    async def __aenter__(self) -> ShardReader:
        return self.reader

    async def __aexit__(self, *_: object) -> None:
        await self.reader.close()


async def test_direct_io_is_really_used(rig: Rig) -> None:
    sealed = await rig.put(some_bytes(CHUNK))
    reader = await rig.open(sealed)
    path = str(rig.cache.shard_path(KEY))
    (descriptor,) = (name.split()[0] for name in open_descriptors() if name.endswith(f" {path}"))
    with open(f"/proc/self/fdinfo/{descriptor}") as info:
        flags = int(next(line for line in info if line.startswith("flags:")).split()[1], 8)
    assert bool(flags & os.O_DIRECT) == rig.cache.direct_io
    assert flags & os.O_CLOEXEC
    await reader.close()


async def test_concurrent_readers_never_share_a_buffer(rig: Rig) -> None:
    datas = [some_bytes(12 * CHUNK + 1 + number, number) for number in range(4)]
    readers = []
    for number, data in enumerate(datas):
        readers.append(await rig.open(await rig.put(data, ShardKey(1, number)), ShardKey(1, number)))

    async def read(seed: int) -> None:
        choose = random.Random(seed)
        for _ in range(40):
            which = choose.randrange(4)
            index = choose.randrange(13)
            view = await readers[which].read_chunk(index)
            for _ in range(choose.randrange(3)):
                await asyncio.sleep(choose.random() * 0.001)
            # in a thread, while other readers go on
            assert await asyncio.to_thread(bytes, view) == datas[which][index * CHUNK : (index + 1) * CHUNK]
            del view

    async def stream(which: int) -> None:
        got = bytearray()
        async for _, view in readers[which].chunks_from(0, 13, 3):
            await asyncio.sleep(0)
            got += view
        assert bytes(got) == datas[which]

    await asyncio.gather(*(read(seed) for seed in range(10)), *(stream(which) for which in range(4)))
    for reader in readers:
        await reader.close()
    gc.collect()
    async with asyncio.timeout(10):  # a thread lets go of its last view a moment after its answer
        while rig.pool.free_buffers < rig.pool.buffers:
            await asyncio.sleep(0.001)


async def test_read_ahead_is_bounded_and_yields_to_others(rig: Rig) -> None:
    reader = await rig.open(await rig.put(some_bytes(14 * CHUNK)))

    async def held_after(ahead: int) -> int:
        async with aclosing(reader.chunks_from(0, 14, ahead)) as chunks:
            _, view = await anext(chunks)
            await asyncio.sleep(0.05)
            out = rig.pool.buffers - rig.pool.free_buffers
            del view
        return out

    assert await held_after(0) == 1
    assert await held_after(2) == 3
    assert rig.pool.free_buffers == rig.pool.buffers
    held = [await rig.pool.acquire() for _ in range(8)]
    assert await held_after(5) == 8 + 1  # half is out: no read-ahead
    for buffer in held:
        rig.pool.release(buffer)
    await reader.close()


async def test_a_consumer_that_stops_early_leaves_nothing(rig: Rig) -> None:
    sealed = await rig.put(some_bytes(10 * CHUNK))
    before = open_descriptors()
    for _ in range(20):
        reader = await rig.open(sealed)
        async with aclosing(reader.chunks_from(0, 10, 4)) as chunks:
            await anext(chunks)
        await reader.close()
    assert open_descriptors() == before
    assert rig.pool.free_buffers == rig.pool.buffers


async def test_cancelled_reads_leave_nothing(rig: Rig) -> None:
    sealed = await rig.put(some_bytes(10 * CHUNK))
    before = open_descriptors()
    choose = random.Random(2)
    for _ in range(60):

        async def consume() -> None:
            reader = await rig.open(sealed)
            try:
                async with aclosing(reader.chunks_from(0, 10)) as chunks:
                    async for _ in chunks:
                        await asyncio.sleep(0)
            finally:
                await reader.close()

        task = asyncio.create_task(consume())
        await asyncio.sleep(choose.random() * 0.004)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    del task  # its error's traceback holds the chunk it was cancelled at
    await asyncio.sleep(0)  # callbacks under way hold it too
    gc.collect()
    assert open_descriptors() == before
    assert rig.pool.free_buffers == rig.pool.buffers


async def test_close_waits_for_reads_and_is_idempotent(rig: Rig) -> None:
    data = some_bytes(CHUNK)
    reader = await rig.open(await rig.put(data))
    with failpoints.armed("read.before_chunk=sleep:0.1"):
        reading = asyncio.create_task(reader.read_chunk(0))
        await asyncio.sleep(0.02)
        await reader.close()
    assert await reading == data
    await reader.close()
    with pytest.raises(Unavailable, match="closed"):
        await reader.read_chunk(0)
