"""Packs in the cache: many small shards written as one file, and the index read back from it.

Owns how a pack's bytes are put together and checked on the way. Does not own the format (forebay_wire.packs), nor the file:
that is a shard's like any other (writer.py, footer.py), whole and synced under its name or not there at all. So a pack is never
open: what was not acknowledged together is never in one file with what was.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path

from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import BLOCK, ShardIdentity, align
from forebay_gateway.cache.io import IoPool, disk_errors, read_blocks
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.cache.writer import SealedFile, ShardWriter
from forebay_gateway.core.errors import Corrupt, Unsupported
from forebay_gateway.core.records import ShardKey
from forebay_wire.checksums import crc32c, crc32c_of_chunks
from forebay_wire.packs import (
    HEAD_BYTES,
    NewerPack,
    PackedShard,
    PackError,
    PackIndex,
    decode_head,
    encode_head,
    head_bytes,
    index_bytes,
)

# A byte of a packed shard is proved by its whole chunk: 4 KiB out of a pack costs a read of this much, from the disk or a tier.
PACK_CHUNK_SIZE = 256 << 10


def pack_size(shards: Iterable[tuple[str, int, int]]) -> int:
    """Bytes of a pack of these (name, size, CRC32C)."""
    given = list(shards)
    return head_bytes(given) + sum(size for _, size, _ in given)


async def write_pack(
    cache: CacheDir,
    pool: IoPool,
    key: ShardKey,
    identity: ShardIdentity,
    index: PackIndex,
    bodies: Iterable[tuple[int, memoryview]],
) -> SealedFile:
    """A pack, durable under its name. `bodies` are (CRC32C, bytes) in the order of the index's offsets.

    Raises Corrupt where one does not match its CRC32C, and as ShardWriter; no file is left then.
    """
    head = encode_head(index)
    size = len(head) + index.size
    writer = await ShardWriter.create(cache, pool, key, size=size, chunk_size=PACK_CHUNK_SIZE)
    try:
        crcs = []
        for chunk in assembled([(crc32c(head), memoryview(head)), *bodies], PACK_CHUNK_SIZE):
            crcs.append(crc32c(chunk))
            await writer.write_chunk(crcs[-1], chunk)
        return await writer.seal(identity, size=size, crc32c=crc32c_of_chunks(crcs, PACK_CHUNK_SIZE, size))
    except BaseException:
        await writer.discard()
        raise


def assembled(pieces: Iterable[tuple[int, memoryview]], chunk_size: int) -> Iterator[memoryview]:
    """The pieces joined, as chunks. Each piece's CRC32C is checked on the joined bytes, of which the chunks' own are made: no
    byte is ever without one."""
    buffer, filled = bytearray(chunk_size), 0
    for expected, piece in pieces:
        crc, rest = 0, piece
        while rest:
            taken = min(len(rest), chunk_size - filled)
            buffer[filled : filled + taken] = rest[:taken]
            crc = crc32c(memoryview(buffer)[filled : filled + taken], crc)
            filled, rest = filled + taken, rest[taken:]
            if filled == chunk_size:
                yield memoryview(buffer)
                buffer, filled = bytearray(chunk_size), 0  # a new one: the old one is on its way to the disk
        if crc != expected:
            raise Corrupt("a small shard does not match its checksum", expected=f"{expected:08x}", actual=f"{crc:08x}")
    if filled:
        yield memoryview(buffer)[:filled]


class PackReader:
    """The shards of one sealed pack, each proved by its own checksum and not by its chunks': so damage costs those that it hit,
    and none of their neighbours. Used by one task."""

    def __init__(self, cache: CacheDir, pool: IoPool, path: Path) -> None:
        self._pool = pool
        self._path = path
        self._shown = path.relative_to(cache.path)
        self._flags = os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if cache.direct_io else 0)
        self._descriptor = -1

    async def open(self) -> None:
        """Raises Unavailable, also where the file is gone."""
        await self._pool.run(self._open_blocking)

    async def read(self, shards: Sequence[PackedShard]) -> list[tuple[PackedShard, bytes]]:
        """Those of these neighbours, which come by offset, whose bytes are good; read at once. Raises Unavailable."""
        begin = shards[0].offset // BLOCK * BLOCK
        length = align(max(shard.offset + shard.size for shard in shards) - begin)
        buffer = await self._pool.acquire(length, keep_free=self._pool.reserved)
        try:
            return await self._pool.run(self._read_blocking, buffer.view[:length], begin, shards)
        finally:
            self._pool.release(buffer)

    async def close(self) -> None:
        """Close the file. Idempotent."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            await self._pool.finish(partial(os.close, descriptor))

    def _open_blocking(self) -> None:
        with disk_errors("open a pack", self._shown):
            failpoints.hit("read.before_open")
            self._descriptor = os.open(self._path, self._flags)

    def _read_blocking(self, block: memoryview, begin: int, shards: Sequence[PackedShard]) -> list[tuple[PackedShard, bytes]]:
        with disk_errors("read a pack", self._shown):
            failpoints.hit("read.before_chunk")
            count = read_blocks(self._descriptor, block, begin)
        good = []
        for shard in shards:
            at = shard.offset - begin
            data = bytes(block[at : min(at + shard.size, count)])
            if len(data) == shard.size and crc32c(data) == shard.crc32c:
                good.append((shard, data))
        return good


def read_index(descriptor: int, size: int) -> PackIndex:
    """The index of a pack of `size` bytes from its own file. Blocking; not for O_DIRECT. Raises Corrupt, Unsupported, or
    OSError."""
    try:
        head = os.pread(descriptor, HEAD_BYTES, 0)
        return decode_head(head + os.pread(descriptor, index_bytes(head), HEAD_BYTES), size)
    except NewerPack as error:
        raise Unsupported(f"it was written by a newer release: {error}") from error
    except PackError as error:
        raise Corrupt(f"the pack cannot be read: {error}") from error
