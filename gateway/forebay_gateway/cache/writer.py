"""Writes one shard into the cache: checked, aligned, around the page cache, and durable under its name after seal().

Owns the chunks: their order, their checksums, and how many are under way. Does not own the file's life (incoming.py), admission
(space is reserved before this is called), the catalog's row, or what happens to sealed files.
"""

import asyncio
from array import array
from dataclasses import dataclass, field

from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import Footer, ShardIdentity, align, disk_size, encode
from forebay_gateway.cache.incoming import IncomingFile
from forebay_gateway.cache.io import Buffer, IoPool, disk_errors, settle, write_blocks
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.errors import Corrupt, InvalidArgument, Unavailable
from forebay_gateway.core.records import ShardKey
from forebay_wire.checksums import crc32c as checksum
from forebay_wire.checksums import crc32c_of_chunks
from forebay_wire.manifest import pack_chunk_crcs


@dataclass(frozen=True, slots=True)
class SealedFile:
    """A shard file that is durable under its name. Sizes are bytes; `chunks` is the packed chunk CRC table."""

    disk_size: int
    chunks: bytes = field(repr=False)
    crc32c: int
    size: int


class ShardWriter:
    """One shard into the cache. Owned by one task, which ends it with seal() or discard(); discard() is idempotent and safe
    at any time: it does nothing after a seal that succeeded (a sealed file goes by CacheDir.unlink)."""

    def __init__(self, cache: CacheDir, pool: IoPool, key: ShardKey, size: int | None, chunk_size: int, window: int) -> None:
        self._pool = pool
        self._size_promised = size
        self._chunk_size = chunk_size
        self._window = max(1, window)
        self._file = IncomingFile(cache, key)
        self._crcs = array("I")
        self._received = 0
        self._under_way: set[asyncio.Future[None]] = set()
        self._failure: BaseException | None = None
        self._ended = False

    @classmethod
    async def create(
        cls, cache: CacheDir, pool: IoPool, key: ShardKey, *, size: int | None, chunk_size: int, window: int = 4
    ) -> "ShardWriter":
        """A new incoming file, its space allocated where `size` is known. At most `window` chunks are under way at once.

        Raises CacheFull, Unavailable, and AlreadyExists where an incoming file of this shard was left behind.
        """
        writer = cls(cache, pool, key, size, chunk_size, window)
        try:
            await pool.run(writer._create_blocking)
        except BaseException:
            await writer.discard()
            raise
        return writer

    @property
    def bytes_received(self) -> int:
        """Bytes of all chunks taken so far."""
        return self._received

    async def write_chunk(self, crc: int, data: memoryview) -> None:
        """Take the next chunk; returns once it has a buffer and is under way. `data` must not change afterwards.

        Every chunk but the last has exactly chunk_size bytes: InvalidArgument otherwise. The CRC is checked on the aligned
        copy before it is written: Corrupt. That, CacheFull or Unavailable of a chunk is raised by a later call or by seal().
        """
        data = data.cast("B") if data.format != "B" else data
        self._check_may_take(data.nbytes)
        while len(self._under_way) >= self._window:
            await asyncio.wait(self._under_way, return_when=asyncio.FIRST_COMPLETED)
            self._reap()
        buffer = await self._pool.acquire(max(data.nbytes, 1))
        # No await from here on: the buffer has an owner at every point.
        try:
            self._reap()
            future = self._pool.start(self._write_blocking, buffer, data, crc, self._received)
        except BaseException:
            self._pool.release(buffer)
            raise
        self._under_way.add(future)
        self._received += data.nbytes
        self._crcs.append(crc)

    async def seal(self, identity: ShardIdentity, *, size: int, crc32c: int) -> SealedFile:
        """Make the shard durable under its name. On any failure, cancellation included, no file is left.

        Raises InvalidArgument (size), Corrupt (the chunks' CRCs do not combine to `crc32c`), CacheFull, Unavailable.
        """
        if self._ended:
            raise Unavailable("the shard's file is sealed or dropped already", path=self._file.path)
        buffer: Buffer | None = None
        try:
            await settle(self._under_way)
            self._reap()
            self._check_whole(size, crc32c)
            chunks = pack_chunk_crcs(self._crcs)
            tail = encode(footer_of(identity, size, self._chunk_size, crc32c), chunks)
            buffer = await self._pool.acquire(len(tail))
            await self._pool.run(self._file.seal, buffer.fill(memoryview(tail)), align(size))
            self._ended = True
        except BaseException:
            await self.discard()
            raise
        finally:
            if buffer is not None:
                self._pool.release(buffer)
        return SealedFile(disk_size(size, self._chunk_size), chunks, crc32c, size)

    async def discard(self) -> None:
        """Drop the file, after the writes under way: no descriptor, no name and no buffer is left."""
        if self._ended:
            return
        self._ended = True
        try:
            await settle(self._under_way)
        finally:
            await self._pool.finish(self._file.drop)

    # --- rules

    def _check_may_take(self, length: int) -> None:
        if self._ended:
            raise Unavailable("the shard's file is sealed or dropped already", path=self._file.path)
        self._reap()
        if not 0 < length <= self._chunk_size:
            raise InvalidArgument(
                "a chunk of a wrong length", offset=self._received, length=length, chunk_size=self._chunk_size
            )
        if self._received % self._chunk_size:
            raise InvalidArgument("a chunk after a short one, which must be the last", offset=self._received)
        if self._size_promised is not None and self._received + length > self._size_promised:
            raise InvalidArgument(
                "more bytes than the shard was announced with", size=self._size_promised, received=self._received + length
            )

    def _check_whole(self, size: int, crc32c: int) -> None:
        if size != self._received:
            raise InvalidArgument("the shard is not of the size it should have", size=size, received=self._received)
        if self._size_promised is not None and size != self._size_promised:
            raise InvalidArgument("the shard was announced with another size", size=size, announced=self._size_promised)
        combined = crc32c_of_chunks(self._crcs, self._chunk_size, size)
        if combined != crc32c:
            raise Corrupt("the shard does not match its checksum", expected=f"{crc32c:08x}", actual=f"{combined:08x}")

    def _reap(self) -> None:
        """Take note of the writes that ended; raises the first failure there was. Looks at the futures themselves: their
        callbacks run one turn of the loop later, and seal() must not come in between."""
        for future in [future for future in self._under_way if future.done()]:
            self._under_way.remove(future)
            error = Unavailable("the gateway is stopping") if future.cancelled() else future.exception()
            self._failure = self._failure or error
        if self._failure is not None:
            raise self._failure

    # --- on pool threads

    def _create_blocking(self) -> None:
        size = self._size_promised
        self._file.create(None if size is None else disk_size(size, self._chunk_size))

    def _write_blocking(self, buffer: Buffer, data: memoryview, crc: int, offset: int) -> None:
        try:
            padded = buffer.fill(data)
            actual = checksum(padded[: data.nbytes])  # of the copy, so that the copying is checked too
            if actual != crc:
                raise Corrupt("a chunk arrived damaged", offset=offset, expected=f"{crc:08x}", actual=f"{actual:08x}")
            with disk_errors("write a chunk", self._file.path):
                failpoints.hit("write.before_chunk")
                write_blocks(self._file.descriptor, padded, offset)
        finally:
            self._pool.release(buffer)  # here, so that an idle stream holds none


def footer_of(identity: ShardIdentity, size: int, chunk_size: int, crc32c: int) -> Footer:
    """What the footer of this shard says."""
    return Footer(
        identity.run,
        identity.step,
        identity.session,
        identity.writer,
        identity.writers,
        identity.name,
        size,
        chunk_size,
        crc32c,
    )
