"""A cache directory on the real disk, its pool, and short ways to put a shard in and look at what lies there."""

import os
import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from forebay_gateway.cache.footer import BLOCK, Footer, align, encode
from forebay_gateway.cache.io import IoPool
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.cache.reader import ShardReader
from forebay_gateway.cache.writer import SealedFile, ShardWriter
from forebay_gateway.core.records import ShardKey
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import pack_chunk_crcs

CHUNK = 64 << 10
KEY = ShardKey(0x1A, 0x2B)
SIZES = (0, 1, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, 5 * CHUNK + 12345)


def some_bytes(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def pieces_of(data: bytes, chunk_size: int = CHUNK) -> list[memoryview]:
    view = memoryview(data)
    return [view[at : at + chunk_size] for at in range(0, len(data), chunk_size)]


def footer_of(data: bytes, chunk_size: int = CHUNK) -> Footer:
    return Footer("team/run", 7, "session-1", 3, 8, "layer/ü.bin", len(data), chunk_size, crc32c(data))


def file_of(data: bytes, chunk_size: int = CHUNK) -> bytes:
    """The whole cache file of a shard, built without the code under test but for the footer."""
    table = pack_chunk_crcs(crc32c(piece) for piece in pieces_of(data, chunk_size))
    return data.ljust(align(len(data)), b"\0") + encode(footer_of(data, chunk_size), table)


def open_descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            found.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")
        except FileNotFoundError:
            continue
    return found


@dataclass
class Rig:
    cache: CacheDir
    pool: IoPool

    async def create(self, size: int | None, key: ShardKey = KEY, window: int = 4) -> ShardWriter:
        return await ShardWriter.create(self.cache, self.pool, key, size=size, chunk_size=CHUNK, window=window)

    async def put(self, data: bytes, key: ShardKey = KEY, announced: bool = True) -> SealedFile:
        writer = await self.create(len(data) if announced else None, key)
        for piece in pieces_of(data):
            await writer.write_chunk(crc32c(piece), piece)
        return await writer.seal(footer_of(data), size=len(data), crc32c=crc32c(data))

    async def open(self, sealed: SealedFile, key: ShardKey = KEY) -> ShardReader:
        return await ShardReader.open(
            self.cache,
            self.pool,
            self.cache.shard_path(key),
            size=sealed.size,
            chunk_size=CHUNK,
            crc32c=sealed.crc32c,
            chunks=sealed.chunks,
            direct_io=self.cache.direct_io,
        )

    def files(self) -> list[str]:
        """Every shard file there is, in whatever state, relative to the cache."""
        kinds = ("incoming", "data")
        return [
            str(path.relative_to(self.cache.path))
            for kind in kinds
            for path in (self.cache.path / kind).rglob("*")
            if path.is_file()
        ]

    def assert_nothing_left(self) -> None:
        assert self.files() == []
        assert self.pool.free_buffers == self.pool.buffers
        assert not [entry for entry in open_descriptors() if str(self.cache.path) in entry and "forebay.lock" not in entry]


@pytest.fixture(params=["direct", "buffered"])
async def rig(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Rig]:
    """Once around the page cache, once through it."""
    cache = CacheDir.open(tmp_path / "cache", "node-1")
    if request.param == "direct" and not cache.direct_io:
        cache.release()
        pytest.skip("this disk refuses O_DIRECT")
    cache.direct_io = request.param == "direct"
    pool = IoPool(threads=4, buffer_size=CHUNK, buffers=16, wait_s_max=20)
    yield Rig(cache, pool)
    pool.close()
    cache.release()


@pytest.fixture
def plain_file(tmp_path: Path) -> Iterator["PlainFile"]:
    file = PlainFile(tmp_path / "file")
    yield file
    os.close(file.descriptor)


class PlainFile:
    """A file whose bytes a test sets."""

    def __init__(self, path: Path) -> None:
        self.descriptor = os.open(path, os.O_RDWR | os.O_CREAT)

    def set(self, content: bytes, at: int = 0) -> int:
        os.ftruncate(self.descriptor, at)
        os.pwrite(self.descriptor, content, at)
        return at + len(content)

    def flip(self, at: int, bit: int) -> None:
        byte = os.pread(self.descriptor, 1, at)[0]
        os.pwrite(self.descriptor, bytes((byte ^ 1 << bit,)), at)


assert BLOCK == 4096
