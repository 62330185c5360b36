"""How fast a directory takes a checkpoint and gives it back: written in sequence, synced, read without the page cache.

Owns the own probe: two requests of 4 MiB in flight around the page cache, as the gateway's POSIX tier and fd lane write. fio,
where it is installed, is in fio.py.
"""

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from forebay_gateway.cache.io import read_blocks, write_blocks
from forebay_gateway.doctor.watch import Watch

BLOCK_BYTES = 4 << 20
ALIGN_BYTES = 4096
_IN_FLIGHT = 2
_SYNC_EVERY_BYTES = 256 << 20


class Pattern:
    """Page-aligned random bytes: what a file system that compresses cannot make smaller."""

    def __init__(self) -> None:
        memory = mmap.mmap(-1, BLOCK_BYTES)
        memory[:] = os.urandom(BLOCK_BYTES)
        self.view = memoryview(memory)


def takes_direct(directory: Path) -> bool:
    """Whether a file there can be written around the page cache."""
    path = directory / "direct"
    memory = mmap.mmap(-1, ALIGN_BYTES)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT, 0o600)
        try:
            os.pwrite(descriptor, memory, 0)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        return False
    finally:
        path.unlink(missing_ok=True)
    return True


def write(path: Path, size: int, direct: bool, pattern: Pattern, watch: Watch) -> float:
    """Bytes a second of a new file of `size` bytes (whole blocks of 4,096), until its fsync has returned."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | (os.O_DIRECT if direct else 0)
    descriptor = os.open(path, flags, 0o600)
    try:

        def each(at: int, length: int) -> None:
            write_blocks(descriptor, pattern.view[:length], at)
            if not direct and at % _SYNC_EVERY_BYTES == 0:
                os.fdatasync(descriptor)  # else the one at the end stands still for as long as all of it takes

        began_s = time.perf_counter()
        _each_block(size, watch, each)
        os.fsync(descriptor)
        watch.tick()
        return size / (time.perf_counter() - began_s)
    finally:
        os.close(descriptor)


def read(path: Path, direct: bool, watch: Watch) -> float:
    """Bytes a second of the whole file. Where the file system has no O_DIRECT its pages are dropped first."""
    size = path.stat().st_size
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct else 0))
    try:
        if not direct:
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)

        buffers = [memoryview(mmap.mmap(-1, BLOCK_BYTES)) for _ in range(_IN_FLIGHT)]

        def each(at: int, length: int) -> None:
            into = buffers[at // BLOCK_BYTES % _IN_FLIGHT]  # each lane its own
            if read_blocks(descriptor, into[: -(-length // ALIGN_BYTES) * ALIGN_BYTES], at) < length:
                raise OSError(errno.EIO, "the file is shorter than what was written", str(path))

        began_s = time.perf_counter()
        _each_block(size, watch, each)
        return size / (time.perf_counter() - began_s)
    finally:
        os.close(descriptor)


def _each_block(size: int, watch: Watch, act: Callable[[int, int], object]) -> None:
    """`act` for each block, some at a time; all threads have ended when this returns or raises."""
    errors: list[BaseException] = []

    def lane(first: int) -> None:
        try:
            for at in range(first * BLOCK_BYTES, size, _IN_FLIGHT * BLOCK_BYTES):
                watch.tick()
                act(at, min(BLOCK_BYTES, size - at))
        except BaseException as error:  # noqa: BLE001 raised again below
            errors.append(error)

    # Not a pool: the interpreter waits for a pool's threads when it ends, also for one that hangs in a mount.
    threads = [threading.Thread(target=lane, args=(first,), daemon=True) for first in range(_IN_FLIGHT)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
