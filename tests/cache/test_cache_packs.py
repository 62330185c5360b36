"""Packs on a real disk: bytes put together and checked, and an index that is read back from the file or not believed."""

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.disk import KEY, Rig, some_bytes
from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import disk_size, find_footer
from forebay_gateway.cache.packs import PACK_CHUNK_SIZE, PackReader, assembled, pack_size, read_index, write_pack
from forebay_gateway.core.errors import Corrupt, DiskFull, Unavailable
from forebay_gateway.movers.jobs import Identity
from forebay_wire.checksums import crc32c
from forebay_wire.packs import PackedShard, PackIndex, encode_head, pack_name

IDENTITY = Identity("team/run", 7, "session-1", 3, 8, pack_name(3, "0123456789abcdef"))
Body = tuple[int, memoryview]


def shards(*sizes: int) -> dict[str, bytes]:
    return {f"s/{number:03}": some_bytes(size, number) for number, size in enumerate(sizes)}


def parts(content: dict[str, bytes]) -> tuple[PackIndex, list[Body]]:
    index = PackIndex.laid_out((name, len(data), crc32c(data)) for name, data in content.items())
    return index, [(crc32c(data), memoryview(data)) for data in content.values()]


@pytest.mark.parametrize("sizes", [(1,), (0, 0), (0, 5, 4096, 1), (PACK_CHUNK_SIZE,), (300_000, 7, 1_000_000, 0, 3)])
async def test_the_file_holds_head_and_bodies_and_says_so_itself(rig: Rig, sizes: tuple[int, ...]) -> None:
    content = shards(*sizes)
    index, bodies = parts(content)
    sealed = await write_pack(rig.cache, rig.pool, KEY, IDENTITY, index, bodies)
    data = encode_head(index) + b"".join(content.values())
    path = rig.cache.shard_path(KEY)
    assert path.read_bytes()[: len(data)] == data
    assert (sealed.size, sealed.crc32c) == (len(data), crc32c(data))
    assert sealed.size == pack_size((name, len(each), 0) for name, each in content.items())
    assert sealed.disk_size == path.stat().st_size == disk_size(len(data), PACK_CHUNK_SIZE)
    with path.open("rb") as file:
        footer, chunks = find_footer(file.fileno(), sealed.disk_size)
        assert (footer.name, footer.run, footer.writer, chunks) == (IDENTITY.name, "team/run", 3, sealed.chunks)
        found = read_index(file.fileno(), footer.size)
    assert {each.name: data[each.offset : each.offset + each.size] for each in found} == content


async def test_a_body_that_is_not_what_it_should_be_leaves_nothing(rig: Rig) -> None:
    index, bodies = parts(shards(100, 500_000, 100))
    bodies[1] = (bodies[1][0] ^ 1, bodies[1][1])
    with pytest.raises(Corrupt, match="does not match"):
        await write_pack(rig.cache, rig.pool, KEY, IDENTITY, index, bodies)
    rig.assert_nothing_left()


@pytest.mark.parametrize("point", ["create.before_open", "write.before_chunk", "seal.before_fsync", "seal.before_dir_fsync"])
async def test_a_disk_that_fails_leaves_nothing(rig: Rig, point: str) -> None:
    index, bodies = parts(shards(100, 500_000))
    for error, kind in (("EIO", Unavailable), ("ENOSPC", DiskFull)):
        with failpoints.armed(f"{point}=error:{error}"), pytest.raises(kind):
            await write_pack(rig.cache, rig.pool, KEY, IDENTITY, index, bodies)
        rig.assert_nothing_left()


async def test_each_shard_is_proved_alone(rig: Rig) -> None:
    """Whatever is damaged or cut off, its neighbours are as good as before."""
    content = shards(100, 0, 5000, 70_000, 3)
    index, bodies = parts(content)
    await write_pack(rig.cache, rig.pool, KEY, IDENTITY, index, bodies)
    path = rig.cache.shard_path(KEY)
    places = sorted(index, key=lambda shard: shard.offset)
    assert await _read(rig, places) == content
    assert await _read(rig, places[2:4]) == dict(list(content.items())[2:4])
    with path.open("r+b") as file:
        file.seek(places[2].offset + 4999)
        file.write(bytes((content["s/002"][4999] ^ 1,)))
    assert await _read(rig, places) == {name: data for name, data in content.items() if name != "s/002"}
    os.truncate(path, places[3].offset + 69_999)
    assert set(await _read(rig, places)) == {"s/000", "s/001"}
    path.unlink()
    with pytest.raises(Unavailable):
        await _read(rig, places)
    assert rig.pool.free_buffers == rig.pool.buffers


async def _read(rig: Rig, places: list[PackedShard]) -> dict[str, bytes]:
    reader = PackReader(rig.cache, rig.pool, rig.cache.shard_path(KEY))
    try:
        await reader.open()
        return {shard.name: data for shard, data in await reader.read(places)}
    finally:
        await reader.close()


@given(st.lists(st.binary(max_size=300), max_size=20), st.sampled_from([16, 64, 100]))
def test_pieces_are_joined_without_a_gap(pieces: list[bytes], chunk_size: int) -> None:
    found = [bytes(chunk) for chunk in assembled([(crc32c(piece), memoryview(piece)) for piece in pieces], chunk_size)]
    assert b"".join(found) == b"".join(pieces)
    assert all(len(chunk) == chunk_size for chunk in found[:-1])


@pytest.mark.parametrize("at", [0, 8, 12, 17, 30, 60])
def test_an_index_with_a_flipped_bit_is_not_believed(tmp_path: Path, at: int) -> None:
    index, _ = parts(shards(10, 20, 30))
    data = bytearray(encode_head(index) + bytes(60))
    data[at] ^= 16
    (tmp_path / "pack").write_bytes(data)
    descriptor = os.open(tmp_path / "pack", os.O_RDONLY)
    try:
        with pytest.raises(Corrupt, match="pack cannot be read"):
            read_index(descriptor, len(data))
    finally:
        os.close(descriptor)
