"""The file of one shard on its way in: made, allocated, lent out, sealed under its name, or dropped.

Owns the name and the descriptor from creation until the file is sealed or gone, whoever writes the bytes: ShardWriter for the
stream lane, the client itself for the fd lane. Does not own checksums or when the bytes are complete. All methods block.

Crash design: bytes go to incoming/, which is never read. seal() ends in footer, fsync(file), rename, fsync(directory), in this
order, so that a name in data/ always means a whole synced file. An fsync that failed is never repeated: the kernel may have
dropped the dirty pages and would report success next time.
"""

import contextlib
import errno
import fcntl
import io
import logging
import os
import signal
from collections.abc import Iterator

from forebay_gateway.base import durable, failpoints
from forebay_gateway.cache.io import disk_errors, write_blocks
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.errors import AlreadyExists, ForebayError, InvalidArgument
from forebay_gateway.core.records import ShardKey

log = logging.getLogger(__name__)

# What posix_fallocate says where the file system has no such thing: space is then only promised by admission.
_NO_FALLOCATE = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF)
RANGES_MAX = 16 << 10  # of written bytes that are looked at; what is written in a sensible order has a few


class IncomingFile:
    """One file. Used by one thread at a time, but for write_blocks on `descriptor`. Ends by seal() or drop()."""

    def __init__(self, cache: CacheDir, key: ShardKey) -> None:
        self._cache = cache
        self._key = key
        self._file: io.FileIO | None = None
        self._made = self._renamed = False  # there may be a file of ours under `path`; it is in data/
        self._shows_holes = False  # the file system tells what was written from what was only allocated
        self.path = cache.incoming_path(key.shard_id)  # whatever name the file has now

    @property
    def descriptor(self) -> int:
        """Open for writing."""
        if self._file is None:
            raise ForebayError("the shard's file is closed", path=self.path)
        return self._file.fileno()

    def create(self, length: int | None) -> None:
        """Make the file, `length` bytes of it allocated. Raises CacheFull, Unavailable, AlreadyExists."""
        with disk_errors("create the shard's file", self.path):
            failpoints.hit("create.before_open")
            try:
                self._open(os.O_CREAT | os.O_EXCL)
            except FileExistsError as error:
                raise AlreadyExists("an incoming file of this shard is there already", path=self.path) from error
            if length is not None:
                failpoints.hit("create.before_allocate")
                self._allocate(length)
                self._shows_holes = _next(self.descriptor, 0, os.SEEK_DATA) is None

    def _open(self, flags: int) -> None:
        direct = os.O_DIRECT if self._cache.direct_io else 0
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | flags | direct, 0o600)
        self._made = True
        self._file = io.FileIO(descriptor, "wb", closefd=True)

    def _allocate(self, length: int) -> None:
        try:
            os.posix_fallocate(self.descriptor, 0, length)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            os.ftruncate(self.descriptor, length)

    def seal(self, tail: memoryview, offset: int) -> None:
        """Durable under its name: `tail` (footer and table) at `offset`, nothing behind it, then the synced order."""
        descriptor, length = self.descriptor, offset + tail.nbytes
        with disk_errors("seal the shard", self.path):
            failpoints.hit("seal.before_footer")
            write_blocks(descriptor, tail, offset)
            if os.fstat(descriptor).st_size != length:
                os.ftruncate(descriptor, length)
            failpoints.hit("seal.before_fsync")
            os.fsync(descriptor)
            self.close()
            failpoints.hit("seal.before_rename")
            self._rename()
            failpoints.hit("seal.before_dir_fsync")
            durable.sync_dir(self.path.parent)
            failpoints.hit("seal.done")

    def _rename(self) -> None:
        target = self._cache.shard_path(self._key)
        self._cache.make_session_dir(self._key.session_id)
        try:
            self.path.rename(target)
        except FileNotFoundError:
            # Dropped as empty by somebody since this process made sure of it. A second time it is an error.
            self._cache.forget_session_dir(self._key.session_id)
            self._cache.make_session_dir(self._key.session_id)
            self.path.rename(target)
        self.path, self._renamed = target, True

    def close(self) -> None:
        """Let go of the descriptor; the file stays."""
        file, self._file = self._file, None
        if file is not None:
            file.close()

    def drop(self) -> None:
        """Gone, whatever it was: no descriptor and no name is left. Never raises for what the disk says."""
        with contextlib.suppress(OSError):  # nothing in it is wanted any more
            self.close()
        try:
            if self._made and not self._renamed:
                self.path.unlink(missing_ok=True)  # unsynced: what is in incoming/ never counts
            elif self._made:
                self._cache.unlink(self.path)
        except (OSError, ForebayError) as error:
            log.warning("cannot remove a dropped shard's file; the next start does path=%s error=%s", self.path, error)

    # --- written by somebody else

    def check_written(self, size: int, length: int) -> bool:
        """Whether all of `size` bytes were written, as far as the file system tells; `length` is what the file was made with.

        Raises InvalidArgument where the file is not of that length: then somebody wrote behind it, or cut it off.
        """
        with disk_errors("look at the shard's file", self.path), self._reading() as descriptor:
            found = os.fstat(descriptor).st_size
            if found != length:
                raise InvalidArgument("the shard's file has a length that it was not given", length=found, expected=length)
            return size == 0 or os.lseek(descriptor, 0, os.SEEK_HOLE) >= size

    def written_bytes(self, size: int) -> int | None:
        """How many of the first `size` bytes were written, None where the file system does not tell. Of what lies in more than
        RANGES_MAX pieces the first count."""
        if not self._shows_holes:
            return None
        with disk_errors("look at the shard's file", self.path), self._reading() as descriptor:
            total = end = 0
            for _ in range(RANGES_MAX):
                begin = _next(descriptor, end, os.SEEK_DATA)
                if begin is None or begin >= size:
                    break
                end = min(size, _next(descriptor, begin, os.SEEK_HOLE) or size)
                total += end - begin
            return total

    def has_writer(self) -> bool:
        """Whether anybody may still change the file: it is open for writing, mapped so, or on its way in a socket. The kernel
        grants a read lease (fcntl(2), F_SETLEASE) only where nobody may; where it has no leases nobody knows: True."""
        with disk_errors("look at the shard's file", self.path), self._reading() as descriptor:
            # Whoever opens the file in this moment breaks the lease, and SIGIO, the default, would end the process.
            fcntl.fcntl(descriptor, fcntl.F_SETSIG, signal.SIGURG)
            try:
                fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EINVAL, errno.ENOSYS, errno.EACCES, errno.EPERM):
                    raise
                return True
            fcntl.fcntl(descriptor, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        return False

    @contextlib.contextmanager
    def _reading(self) -> Iterator[int]:
        descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def reopen(self) -> None:
        """Open for writing again, after close()."""
        with disk_errors("open the shard's file", self.path):
            self._open(0)


def _next(descriptor: int, offset: int, what: int) -> int | None:
    """Where the next data, or the next hole, begins; None where there is none."""
    try:
        return os.lseek(descriptor, offset, what)
    except OSError as error:
        if error.errno == errno.ENXIO:
            return None
        raise
