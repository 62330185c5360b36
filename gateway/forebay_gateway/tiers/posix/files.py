"""Blocking file work of the POSIX tier: direct writes and reads with aligned memory, and what stands in for them.

Owns descriptors and buffers. Everything here blocks and runs in the tier's threads. Raises OSError; translation is posix.py's.

O_DIRECT bypasses the page cache, so a read-back comes from the device or the server. Where a file system refuses it, pages
are dropped after fsync (posix_fadvise DONTNEED) to the same end.
"""

import contextlib
import errno
import mmap
import os
import queue
import threading
from collections.abc import Iterator
from pathlib import Path
from stat import S_ISREG

from forebay_gateway.base import failpoints
from forebay_wire.checksums import crc32c

READ_PIECE_BYTES = 4 << 20  # of what is read where nobody says in which pieces
ALIGN_BYTES = 4096  # of memory, offset and length; covers logical block sizes of 512 and 4096


def aligned_up(size: int) -> int:
    """The next multiple of ALIGN_BYTES."""
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES


class Buffers:
    """Page-aligned buffers of one size, made when needed and used again; as many as were ever in use at once."""

    def __init__(self, size: int) -> None:
        self._size = max(ALIGN_BYTES, aligned_up(size))
        self._free: queue.SimpleQueue[mmap.mmap] = queue.SimpleQueue()

    @contextlib.contextmanager
    def borrow(self) -> Iterator[mmap.mmap]:
        """One buffer for the time of the block."""
        try:
            buffer = self._free.get_nowait()
        except queue.Empty:
            buffer = mmap.mmap(-1, self._size)
        try:
            yield buffer
        finally:
            self._free.put(buffer)


class OpenFile:
    """A descriptor that is closed only when no thread is inside it any more.

    An act that outlives its timeout (a hung mount) may still be in a system call; closing under it would let the descriptor's
    number be used for another file.
    """

    def __init__(self, path: Path, flags: int, direct: bool) -> None:
        self.path = path
        self.direct = direct
        self._flags = flags | os.O_CLOEXEC
        self._lock = threading.Lock()
        self._busy = 0
        self._closing = False
        self._descriptor = -1

    def open(self) -> None:
        """Open; `direct` is False afterwards where the file system has no O_DIRECT."""
        descriptor = self._open_any()
        with self._lock:
            given_up = self._closing  # while this thread was still opening
            if not given_up:
                self._descriptor = descriptor
        if given_up:
            os.close(descriptor)
            raise OSError(errno.EBADF, "the file is closed")

    def open_existing(self) -> os.stat_result:
        """Open a regular file. A directory in its place, or a file in the place of its directory, is an absent file."""
        try:
            self.open()
        except (NotADirectoryError, IsADirectoryError) as error:
            raise _absent(self.path) from error
        stat = self.stat()
        if not S_ISREG(stat.st_mode):
            raise _absent(self.path)
        return stat

    def _open_any(self) -> int:
        flags = self._flags
        if self.direct:
            try:
                return os.open(self.path, flags | os.O_DIRECT, 0o644)
            except OSError as error:
                if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
                self.direct = False
                flags &= ~os.O_EXCL  # some file systems create the file before they refuse O_DIRECT
        return os.open(self.path, flags, 0o644)

    @contextlib.contextmanager
    def _use(self) -> Iterator[int]:
        with self._lock:
            if self._closing or self._descriptor < 0:
                raise OSError(errno.EBADF, "the file is not open")
            self._busy += 1
        try:
            yield self._descriptor
        finally:
            with self._lock:
                self._busy -= 1
            self._close_if_idle()

    def _close_if_idle(self) -> None:
        with self._lock:
            if not self._closing or self._busy or self._descriptor < 0:
                return
            descriptor, self._descriptor = self._descriptor, -1
        os.close(descriptor)

    def close(self) -> None:
        """Close now, or as soon as the last act ends. Raises what close(2) says: some file systems report a full disk here."""
        failpoints.hit("posix.before_close")
        with self._lock:
            self._closing = True
        self._close_if_idle()

    def write_chunk(self, view: memoryview, offset: int, buffers: Buffers) -> None:
        """All of `view` at `offset`, which is a multiple of ALIGN_BYTES. A direct tail is padded; `finish` cuts it off."""
        with self._use() as descriptor:
            failpoints.hit("posix.before_write")
            if not self.direct:
                _write_all(descriptor, view, offset)
                return
            if len(view) % ALIGN_BYTES == 0:
                try:
                    _write_all(descriptor, view, offset)
                    return
                except OSError as error:
                    if error.errno != errno.EINVAL:  # EINVAL: the memory is not aligned
                        raise
            with buffers.borrow() as buffer:
                padded = aligned_up(len(view))
                buffer[: len(view)] = view
                buffer[len(view) : padded] = bytes(padded - len(view))
                _write_all(descriptor, memoryview(buffer)[:padded], offset)

    def finish(self, size: int) -> None:
        """Cut to `size`, make durable, and drop the pages. Never called a second time on a file on which it failed."""
        with self._use() as descriptor:
            os.ftruncate(descriptor, size)
            failpoints.hit("posix.before_fsync")
            os.fsync(descriptor)
            if not self.direct:
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def chunk_crc(self, offset: int, length: int, buffers: Buffers) -> int:
        """CRC32C of `length` bytes from the disk at `offset`; of fewer where the file ends before."""
        with self._use() as descriptor, buffers.borrow() as buffer:
            wanted = aligned_up(length) if self.direct else length
            filled = 0
            with memoryview(buffer) as view:
                while filled < length:
                    got = os.preadv(descriptor, [view[filled:wanted]], offset + filled)
                    filled += got
                    # A direct read that is not a whole number of blocks has met the end of the file.
                    if got == 0 or (self.direct and got % ALIGN_BYTES):
                        break
                if filled < length and offset + filled < os.fstat(descriptor).st_size:
                    raise OSError(errno.EIO, "the file system read less than is there", str(self.path))
                return crc32c(view[: min(filled, length)])

    def drop_cache(self) -> None:
        """Let later buffered reads come from the disk."""
        with self._use() as descriptor:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

    def stat(self) -> os.stat_result:
        """Of the open file, which NFS revalidates at open (a plain stat may come from a cache)."""
        with self._use() as descriptor:
            return os.fstat(descriptor)

    def read(self, length: int, offset: int) -> bytes:
        """Up to `length` bytes; fewer only at the end of the file."""
        with self._use() as descriptor:
            parts = []
            while length > 0 and (part := os.pread(descriptor, length, offset)):
                parts.append(part)
                length, offset = length - len(part), offset + len(part)
            return parts[0] if len(parts) == 1 else b"".join(parts)


def _absent(path: Path) -> FileNotFoundError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))


def _write_all(descriptor: int, view: memoryview, offset: int) -> None:
    while view:
        written = os.pwrite(descriptor, view, offset)
        view, offset = view[written:], offset + written
