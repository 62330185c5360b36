"""Threads for blocking disk work, and page-aligned memory for O_DIRECT, both bounded.

Owns how many disk calls run at once, how much memory chunks take on their way, and what a disk error means to a caller.
Does not own files. Every byte is counted: memory never exceeds `buffers * buffer_size`, whoever holds it.
"""

import asyncio
import contextlib
import ctypes
import errno
import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from forebay_gateway.cache.footer import BLOCK, align
from forebay_gateway.core.errors import DiskFailed, DiskFull, ForebayError, Unavailable
from forebay_wire.memory import copy

T = TypeVar("T")
P = ParamSpec("P")

RETRY_AFTER_S = 5.0
BUFFERS_MIN = 4
# What a disk that is going says, and a file system that has given it up (remounted read-only, shut down).
DISK_ERRNOS = frozenset({errno.EIO, errno.EROFS, errno.ENXIO, errno.ENODEV, errno.EUCLEAN, errno.ETIMEDOUT, errno.EREMOTEIO})


class Buffer:
    """Page-aligned memory of a pool. Either filled and released by its holder, or lent out as a view that returns it."""

    __slots__ = ("_array", "_memory", "_pool", "cost", "view")

    def __init__(self, pool: "IoPool", size: int, cost: int) -> None:
        self._pool = pool
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # A fork while O_DIRECT reads into private memory may leave the bytes in the child's copy of the page.
        self._memory.madvise(mmap.MADV_DONTFORK)
        self._array = ctypes.c_ubyte * size
        self.view = memoryview(self._memory)
        self.cost = cost

    def fill(self, data: memoryview) -> memoryview:
        """Copy `data` to the front, zero up to a whole block, return what was filled. Lets other threads run meanwhile."""
        length, padded = data.nbytes, align(data.nbytes)
        if length >= 1 << 16:
            copy(self.view, data)  # a slice assignment would keep the interpreter lock for the copy
        else:
            self.view[:length] = data
        if padded != length:
            self.view[length:padded] = bytes(padded - length)
        return self.view[:padded]

    def lend(self, length: int) -> memoryview:
        """The first `length` bytes, read-only. The buffer returns to its pool when this view and all made from it are gone."""
        lease = self._array.from_buffer(self._memory)
        weakref.finalize(lease, self._pool.release, self).atexit = False
        return memoryview(lease).cast("B")[:length].toreadonly()


@dataclass(eq=False, slots=True)
class _Waiter:
    future: "asyncio.Future[Buffer]"
    cost: int  # bytes, as keep_free
    size: int
    keep_free: int


class IoPool:
    """Used from one event loop; only `release` may be called from any thread.

    A chunk larger than `buffer_size` counts as several buffers, one that is half of it or less as what it is: a transfer that
    needs many small ones at once (a part of a pack, of a shard saved with smaller chunks) gets as many bytes as one of few
    large ones. Writers may take every buffer; readers leave a quarter for them (`reserved`), so that slow restores never hold
    up a save; read-ahead only happens while half of the memory is free.
    """

    def __init__(self, threads: int = 4, buffer_size: int = 4 << 20, buffers: int = 16, wait_s_max: float = 60.0) -> None:
        if buffers < BUFFERS_MIN or buffer_size % BLOCK or buffer_size <= 0:
            raise ValueError(f"a pool needs {BUFFERS_MIN} or more buffers, each of whole {BLOCK}-byte blocks")
        self.buffers = buffers
        self.buffer_size = buffer_size
        self.reserved = buffers // 4
        self.wait_s_max = wait_s_max
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="forebay-io")
        self._out = 0  # bytes
        self._idle: list[Buffer] = []
        self._returned: deque[Buffer] = deque()  # appended by any thread, emptied on the loop
        self._waiters: list[_Waiter] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @classmethod
    def within(cls, memory_bytes: int, chunk_size: int, threads: int = 4) -> "IoPool":
        """As many buffers of `chunk_size` as `memory_bytes` holds; the least that works where that is too few."""
        return cls(threads, chunk_size, max(BUFFERS_MIN, memory_bytes // chunk_size))

    def grow(self, memory_bytes: int) -> None:
        """Have at least as much memory from now on; it never has less again, since waiters were told what may be asked for."""
        if (buffers := memory_bytes // self.buffer_size) > self.buffers:
            self.buffers, self.reserved = buffers, buffers // 4
            self._grant()

    @property
    def memory_bytes_max(self) -> int:
        """What all buffers together may take."""
        return self.buffers * self.buffer_size

    @property
    def free_buffers(self) -> int:
        """Whole buffers that nobody holds anything of."""
        self._collect()
        return (self.memory_bytes_max - self._out) // self.buffer_size

    @property
    def plenty(self) -> bool:
        """True while more than half of the memory is free: time to read ahead."""
        self._collect()
        return 2 * self._out < self.memory_bytes_max

    def start(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> "asyncio.Future[T]":
        """Begin `act` on a pool thread. Whoever takes the future sees to it that it ends before what it uses is closed."""
        return asyncio.wrap_future(self._executor.submit(act, *args, **kwargs))

    async def run(self, act: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """`act` on a pool thread. When this returns, also by cancellation, `act` has ended or will never begin: a thread
        that goes on after its caller gave up would use a descriptor that may by then be another file's."""
        job = self._executor.submit(act, *args, **kwargs)
        future = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if not job.cancel():
                await settle((future,))
            raise

    async def finish(self, act: Callable[[], None]) -> None:
        """Like run(), for what must happen: a cancellation is raised only after `act` has run."""
        future = self.start(act)
        await settle((future,))
        future.result()

    async def acquire(self, size: int | None = None, *, keep_free: int = 0) -> Buffer:
        """A buffer of `size` bytes or more, once more than `keep_free` buffers are free; first come, first served.
        Raises Unavailable after `wait_s_max`: then somebody keeps what he should have given back, or the disk hangs."""
        size = align(size or self.buffer_size)
        kept = keep_free * self.buffer_size
        whole = -(-size // self.buffer_size) * self.buffer_size
        cost = min(size if self._is_small(size) else whole, self.memory_bytes_max - kept)
        self._loop = asyncio.get_running_loop()
        waiter = _Waiter(self._loop.create_future(), cost, size, kept)
        # First into the queue, then granted: a release on another thread sees the waiter, or its buffer is seen here.
        self._waiters.append(waiter)
        self._grant()
        if not waiter.future.done():
            await self._wait(waiter)
        return waiter.future.result()

    def release(self, buffer: Buffer) -> None:
        """Give a buffer back. From any thread, and from a finalizer."""
        # A finalizer may run in the middle of any other code of this class, so it only does what cannot be in the way.
        self._returned.append(buffer)
        if self._waiters and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._grant)

    def close(self) -> None:
        """Wait for the threads and let go of the memory that is not lent out. Idempotent."""
        self._closed = True
        self._executor.shutdown(wait=True, cancel_futures=True)
        self._collect()
        self._idle.clear()

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            self._out -= buffer.cost
            if len(buffer.view) == self.buffer_size and not self._closed:
                self._idle.append(buffer)

    def _is_small(self, size: int) -> bool:
        return 2 * size <= self.buffer_size

    def _grant(self) -> None:
        self._collect()
        floor = self.memory_bytes_max  # once a waiter is refused, none that may take no more than he may overtake him
        for waiter in list(self._waiters):
            if waiter.future.done():  # cancelled in this moment: he has not had his turn to leave
                self._waiters.remove(waiter)
                continue
            if waiter.keep_free >= floor:
                continue
            if self._out + waiter.cost + waiter.keep_free > self.memory_bytes_max:
                floor = waiter.keep_free
                continue
            self._waiters.remove(waiter)
            self._out += waiter.cost
            waiter.future.set_result(self._buffer(waiter))

    def _buffer(self, waiter: _Waiter) -> Buffer:
        """What was granted to him: one that lies idle, else a new one, for which idle ones make room."""
        pooled = waiter.size <= self.buffer_size and not self._is_small(waiter.size)
        if pooled and self._idle:
            return self._idle.pop()
        while self._idle and self._out + len(self._idle) * self.buffer_size > self.memory_bytes_max:
            self._idle.pop()
        return Buffer(self, self.buffer_size if pooled else waiter.size, waiter.cost)

    async def _wait(self, waiter: _Waiter) -> None:
        try:
            async with asyncio.timeout(self.wait_s_max):
                await waiter.future
        except BaseException as error:
            if waiter.future.cancelled():
                with contextlib.suppress(ValueError):
                    self._waiters.remove(waiter)
                self._grant()  # he may have stood in the way of others
            else:
                self.release(waiter.future.result())  # granted in the same moment
            if isinstance(error, TimeoutError):
                raise Unavailable(
                    "every chunk buffer is in use", retry_after_s=RETRY_AFTER_S, buffers=self.buffers, waited_s=self.wait_s_max
                ) from error
            raise


async def settle(futures: "Collection[asyncio.Future[Any]]") -> None:
    """Wait until all are done, whatever they end with. A cancellation meanwhile is raised at the end, not before."""
    cancelled: asyncio.CancelledError | None = None
    while pending := [future for future in futures if not future.done()]:
        try:
            await asyncio.wait(pending)
        except asyncio.CancelledError as error:
            cancelled = error
    for future in futures:
        if not future.cancelled():
            future.exception()  # seen: what it means is for its owner to say
    if cancelled is not None:
        raise cancelled


def disk_error(error: OSError, act: str, path: Path) -> ForebayError:
    """What an operating system error on the cache's disk means to a caller."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DiskFull(f"the cache's disk is full: cannot {act}", retry_after_s=RETRY_AFTER_S, path=path)
    reason = errno.errorcode.get(error.errno or 0, str(error))
    failed = DiskFailed if error.errno in DISK_ERRNOS else Unavailable
    return failed(f"the cache's disk failed: cannot {act}", retry_after_s=RETRY_AFTER_S, path=path, errno=reason)


@contextlib.contextmanager
def disk_errors(act: str, path: Path) -> Iterator[None]:
    """Operating system errors inside become DiskFull or Unavailable, cause kept."""
    try:
        yield
    except OSError as error:
        raise disk_error(error, act, path) from error


def write_blocks(descriptor: int, data: memoryview, offset: int) -> None:
    """All of `data` (aligned, whole blocks) at `offset`. Blocking. A short write goes on from the last whole block."""
    done = 0
    while done < data.nbytes:
        count = os.pwrite(descriptor, data[done:], offset + done)
        if count < BLOCK and done + count < data.nbytes:
            raise OSError(errno.EIO, f"only {count} bytes were taken")
        done = done + count if done + count == data.nbytes else (done + count) // BLOCK * BLOCK


def read_blocks(descriptor: int, into: memoryview, offset: int) -> int:
    """Fill `into` (aligned, whole blocks) from `offset`. Blocking. Returns fewer bytes only where the file ends."""
    done = 0
    while done < into.nbytes:
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if done + count == into.nbytes or count < BLOCK:
            return done + count
        done = (done + count) // BLOCK * BLOCK
    return done
