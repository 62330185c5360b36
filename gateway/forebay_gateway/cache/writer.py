"""Writes one shard into the cache: checked, aligned, around the page cache, and durable under its name after seal().

Owns the incoming file from its creation until it is sealed or gone. Does not own admission (space is reserved before this
is called), the catalog's row, or what happens to sealed files.

Crash design: bytes go to incoming/, which is never read. seal() ends in footer, fsync(file), rename, fsync(directory), in this
order, so that a name in data/ always means a whole synced file. An fsync that failed is never repeated: the kernel may have
dropped the dirty pages and would report success next time.
"""

import asyncio
import contextlib
import errno
import io
import logging
import os
from array import array
from dataclasses import dataclass, field

from forebay_gateway.base import durable, failpoints
from forebay_gateway.cache.footer import Footer, ShardIdentity, align, disk_size, encode
from forebay_gateway.cache.io import Buffer, IoPool, disk_errors, settle, write_blocks
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.errors import AlreadyExists, Corrupt, ForebayError, InvalidArgument, Unavailable
from forebay_gateway.core.records import ShardKey
from forebay_wire.checksums import crc32c as checksum
from forebay_wire.checksums import crc32c_of_chunks
from forebay_wire.manifest import pack_chunk_crcs

log = logging.getLogger(__name__)

# What posix_fallocate says where the file system has no such thing: space is then only promised by admission.
_NO_FALLOCATE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)


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
        self._cache = cache
        self._pool = pool
        self._key = key
        self._size_promised = size
        self._chunk_size = chunk_size
        self._window = max(1, window)
        self._path = cache.incoming_path(key.shard_id)  # whatever name the file has now
        self._file: io.FileIO | None = None
        self._made = self._renamed = False  # there may be a file of ours under `_path`; it is in data/
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
            raise Unavailable("the shard's file is sealed or dropped already", path=self._path)
        buffer: Buffer | None = None
        try:
            await settle(self._under_way)
            self._reap()
            self._check_whole(size, crc32c)
            chunks = pack_chunk_crcs(self._crcs)
            tail = encode(_footer(identity, size, self._chunk_size, crc32c), chunks)
            buffer = await self._pool.acquire(len(tail))
            await self._pool.run(self._seal_blocking, buffer.fill(memoryview(tail)), align(size))
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
            await self._pool.finish(self._drop_blocking)

    # --- rules

    def _check_may_take(self, length: int) -> None:
        if self._ended:
            raise Unavailable("the shard's file is sealed or dropped already", path=self._path)
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
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if self._cache.direct_io else 0)
        with disk_errors("create the shard's file", self._path):
            failpoints.hit("create.before_open")
            try:
                descriptor = os.open(self._path, flags, 0o600)
            except FileExistsError as error:
                raise AlreadyExists("an incoming file of this shard is there already", path=self._path) from error
            self._made = True
            self._file = io.FileIO(descriptor, "wb", closefd=True)
            if self._size_promised is not None:
                failpoints.hit("create.before_allocate")
                self._allocate(descriptor, disk_size(self._size_promised, self._chunk_size))

    def _allocate(self, descriptor: int, length: int) -> None:
        try:
            os.posix_fallocate(descriptor, 0, length)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise

    def _write_blocking(self, buffer: Buffer, data: memoryview, crc: int, offset: int) -> None:
        try:
            padded = buffer.fill(data)
            actual = checksum(padded[: data.nbytes])  # of the copy, so that the copying is checked too
            if actual != crc:
                raise Corrupt("a chunk arrived damaged", offset=offset, expected=f"{crc:08x}", actual=f"{actual:08x}")
            with disk_errors("write a chunk", self._path):
                failpoints.hit("write.before_chunk")
                write_blocks(self._open_file().fileno(), padded, offset)
        finally:
            self._pool.release(buffer)  # here, so that an idle stream holds none

    def _seal_blocking(self, tail: memoryview, offset: int) -> None:
        file = self._open_file()
        descriptor, length = file.fileno(), offset + tail.nbytes
        with disk_errors("seal the shard", self._path):
            failpoints.hit("seal.before_footer")
            write_blocks(descriptor, tail, offset)
            if os.fstat(descriptor).st_size != length:
                os.ftruncate(descriptor, length)
            failpoints.hit("seal.before_fsync")
            os.fsync(descriptor)
            self._file = None
            file.close()
            failpoints.hit("seal.before_rename")
            self._rename_blocking()
            failpoints.hit("seal.before_dir_fsync")
            durable.sync_dir(self._path.parent)
            failpoints.hit("seal.done")

    def _rename_blocking(self) -> None:
        target = self._cache.shard_path(self._key)
        self._cache.make_session_dir(self._key.session_id)
        try:
            self._path.rename(target)
        except FileNotFoundError:
            # Dropped as empty by somebody since this process made sure of it. A second time it is an error.
            self._cache.forget_session_dir(self._key.session_id)
            self._cache.make_session_dir(self._key.session_id)
            self._path.rename(target)
        self._path, self._renamed = target, True

    def _drop_blocking(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with contextlib.suppress(OSError):  # nothing in it is wanted any more
                file.close()
        try:
            if self._made and not self._renamed:
                self._path.unlink(missing_ok=True)  # unsynced: what is in incoming/ never counts
            elif self._made:
                self._cache.unlink(self._path)
        except (OSError, ForebayError) as error:
            log.warning("cannot remove a dropped shard's file; the next start does path=%s error=%s", self._path, error)

    def _open_file(self) -> io.FileIO:
        if self._file is None:
            raise ForebayError("the shard's file is closed", path=self._path)
        return self._file


def _footer(identity: ShardIdentity, size: int, chunk_size: int, crc32c: int) -> Footer:
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
