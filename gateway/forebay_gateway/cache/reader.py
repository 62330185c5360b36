"""Reads one sealed shard from the cache: around the page cache, every chunk checked before it is handed out.

Owns the descriptor while it is open and the read-ahead. Does not own what a mismatch leads to (paths/). Conforms to the
Source that tiers take.
"""

import asyncio
import io
import os
from collections import deque
from collections.abc import AsyncGenerator
from pathlib import Path

from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import align, disk_size
from forebay_gateway.cache.io import Buffer, IoPool, disk_errors, read_blocks, settle
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.errors import Corrupt, InvalidArgument, Unavailable
from forebay_wire.checksums import crc32c as checksum
from forebay_wire.manifest import chunk_count, unpack_chunk_crcs


class ShardReader:
    """One sealed shard. Any number of tasks may read at once; close() waits for them."""

    def __init__(self, cache: CacheDir | None, pool: IoPool, path: Path, size: int, chunk_size: int, crc32c: int) -> None:
        self._shown = path.relative_to(cache.path) if cache is not None and path.is_relative_to(cache.path) else path
        self._pool = pool
        self._path = path
        self._size = size
        self._chunk_size = chunk_size
        self._crc32c = crc32c
        self._chunk_crcs: tuple[int, ...] = ()
        self._file: io.FileIO | None = None
        self._under_way: set[asyncio.Task[memoryview]] = set()

    @classmethod
    async def open(
        cls,
        cache: CacheDir | None,
        pool: IoPool,
        path: Path,
        *,
        size: int,
        chunk_size: int,
        crc32c: int,
        chunks: bytes,
        direct_io: bool,
    ) -> "ShardReader":
        """Open the file of a shard whose checksums the caller knows; `chunks` is the packed chunk CRC table.

        Raises Corrupt where the file is gone or not of the length it must have, Unavailable where the disk fails.
        """
        reader = cls(cache, pool, path, size, chunk_size, crc32c)
        if len(chunks) != 4 * chunk_count(size, chunk_size):
            raise Corrupt("the chunk CRC table does not fit the shard's size", path=reader._shown, size=size)
        reader._chunk_crcs = tuple(unpack_chunk_crcs(chunks))
        try:
            await pool.run(reader._open_blocking, direct_io)
        except BaseException:
            await reader.close()
            raise
        return reader

    @property
    def size(self) -> int:
        """Bytes."""
        return self._size

    @property
    def chunk_size(self) -> int:
        """Bytes in every chunk but the last."""
        return self._chunk_size

    @property
    def crc32c(self) -> int:
        """Of the whole shard."""
        return self._crc32c

    @property
    def chunk_crcs(self) -> tuple[int, ...]:
        """CRC32C of each chunk."""
        return self._chunk_crcs

    async def read_chunk(self, index: int) -> memoryview:
        """Chunk `index`, checked, read-only. Its memory goes back to the pool when the last view of it is dropped.

        Raises Corrupt (path, chunk and offset named), Unavailable.
        """
        return await self._begin(index)

    async def chunks_from(self, first: int, stop: int, ahead: int = 2) -> AsyncGenerator[tuple[int, memoryview], None]:
        """Chunks `first` up to, not including, `stop`, in order. Up to `ahead` more are read meanwhile, as long as half of the
        pool's buffers are free: a slow consumer then holds one buffer, not many."""
        queue: deque[asyncio.Task[memoryview]] = deque()
        begun = first
        try:
            for index in range(first, stop):
                while begun < min(index + 1 + ahead, stop) and (begun == index or self._pool.plenty):
                    queue.append(self._begin(begun))
                    begun += 1
                yield index, await queue.popleft()
        finally:
            await _abandon(queue)

    async def close(self) -> None:
        """Close the file, after the reads under way. Idempotent. Views handed out stay valid."""
        file, self._file = self._file, None
        try:
            await settle(self._under_way)
        finally:
            if file is not None:
                await self._pool.finish(file.close)

    def _begin(self, index: int) -> "asyncio.Task[memoryview]":
        if not 0 <= index < len(self._chunk_crcs):
            raise InvalidArgument("no such chunk", path=self._shown, chunk=index, chunks=len(self._chunk_crcs))
        if self._file is None:
            raise Unavailable("the shard's file is closed", path=self._shown)
        task = asyncio.create_task(self._read(self._file, index))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)
        return task

    async def _read(self, file: io.FileIO, index: int) -> memoryview:
        length = min(self._chunk_size, self._size - index * self._chunk_size)
        buffer = await self._pool.acquire(length, keep_free=self._pool.reserved)
        try:
            await self._pool.run(self._read_blocking, file, buffer, index, length)
        except BaseException:
            self._pool.release(buffer)
            raise
        return buffer.lend(length)

    # --- on pool threads

    def _open_blocking(self, direct_io: bool) -> None:
        with disk_errors("open the shard's file", self._shown):
            failpoints.hit("read.before_open")
            try:
                descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct_io else 0))
            except FileNotFoundError as error:
                raise Corrupt("the cache file is gone", path=self._shown) from error
            self._file = io.FileIO(descriptor, "rb", closefd=True)
            length, expected = os.fstat(descriptor).st_size, disk_size(self._size, self._chunk_size)
        if length != expected:
            raise Corrupt("the cache file has a wrong length", path=self._shown, length=length, expected=expected)

    def _read_blocking(self, file: io.FileIO, buffer: Buffer, index: int, length: int) -> None:
        offset = index * self._chunk_size
        with disk_errors("read a chunk", self._shown):
            failpoints.hit("read.before_chunk")
            count = read_blocks(file.fileno(), buffer.view[: align(length)], offset)
        if count < length:
            raise Corrupt("the cache file ends too early", path=self._shown, chunk=index, offset=offset, got=count)
        actual, expected = checksum(buffer.view[:length]), self._chunk_crcs[index]
        if actual != expected:
            raise Corrupt(
                "a chunk in the cache is damaged",
                path=self._shown,
                chunk=index,
                offset=offset,
                expected=f"{expected:08x}",
                actual=f"{actual:08x}",
            )


async def _abandon(queue: "deque[asyncio.Task[memoryview]]") -> None:
    """End the reads nobody will take. Emptied, because an error's traceback may keep the queue, and so its chunks, alive."""
    for index in range(len(queue)):  # by index: a loop variable would be kept alive as well
        queue[index].cancel()
    try:
        await settle(queue)
    finally:
        queue.clear()
