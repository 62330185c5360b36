"""Host memory for snapshots: one anonymous mapping, handed out in page-aligned regions and used again while it is warm.

Owns the mapping, faulting it in, who gets memory next, and the fork rule: a child sees zeros in place of these pages, so that a
fork neither copies them nor slows the parent's next snapshot. Does not own what is written into a region (snapshot.py).
"""

import ctypes
import mmap
import re
import threading
import time
from collections import deque
from collections.abc import Callable

from forebay import cancel
from forebay.errors import DeadlineExceeded, InvalidArgument

ENVIRONMENT = "FOREBAY_BACKGROUND_BYTES"
DEFAULT_BYTES = 4 << 30
PAGE_BYTES = 4096
_HUGE_PAGE_BYTES = 2 << 20
_UNITS = {"": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "TIB": 1 << 40}

# From <linux/mman.h>; the mmap module of Python 3.11 names none of them.
_MAP_NORESERVE = 0x4000
_MADV_HUGEPAGE = 14
_MADV_WIPEONFORK = 18
_MADV_POPULATE_WRITE = 23

_madvise = ctypes.CDLL(None).madvise  # a foreign call releases the GIL, which mmap.madvise does not
_madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def parse_size(text: str) -> int:
    """Bytes of "4294967296", "4GiB" or "4 GiB". Raises InvalidArgument."""
    match = re.fullmatch(r"([0-9]{1,18})\s*([KMGT]iB)?", text.strip(), re.ASCII | re.IGNORECASE)
    if match is None:
        raise InvalidArgument(f"{ENVIRONMENT}={text!r} is no size; write bytes, or a number with KiB, MiB, GiB or TiB")
    return int(match[1]) * _UNITS[(match[2] or "").upper()]


class Mapping:
    """Private anonymous memory that costs nothing until it is touched. It goes when its last view does. Raises OSError where
    there is none."""

    def __init__(self, size: int) -> None:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._memory = mmap.mmap(-1, size + _HUGE_PAGE_BYTES, flags=flags)
        self.size = size
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        skipped = -start % _HUGE_PAGE_BYTES
        self.address = start + skipped
        self.view = memoryview(self._memory)[skipped : skipped + size]
        # Both are hints: without the first, copying is slower; without the second, a fork is.
        _madvise(self.address, size, _MADV_HUGEPAGE)
        _madvise(self.address, size, _MADV_WIPEONFORK)
        self._touched = bytearray(-(-size // _HUGE_PAGE_BYTES))  # by huge page; written by whoever has the region

    def fault_in(self, start: int, stop: int) -> None:
        """Have pages behind [start, stop), which the caller owns and has not filled yet."""
        first, last = start // _HUGE_PAGE_BYTES, -(-stop // _HUGE_PAGE_BYTES)
        if all(self._touched[first:last]):
            return
        aligned = start - start % PAGE_BYTES
        if _madvise(self.address + aligned, stop - aligned, _MADV_POPULATE_WRITE) != 0:  # Linux before 5.14
            self.view[start:stop:PAGE_BYTES] = bytes(len(range(start, stop, PAGE_BYTES)))
        # Huge pages that are only partly inside may have neighbours without a page.
        for unit in range(-(-start // _HUGE_PAGE_BYTES), stop // _HUGE_PAGE_BYTES):
            self._touched[unit] = 1


class Region:
    """Memory of the pool from take() to release(); begins at a page."""

    def __init__(self, pool: "BufferPool", mapping: Mapping, offset: int, size: int) -> None:
        self._pool = pool
        self._mapping = mapping
        self._offset = offset
        self._held = True
        self.size = size
        self.address = mapping.address + offset
        self.view = mapping.view[offset : offset + size]

    def fault_in(self, start: int, stop: int) -> None:
        """Have pages behind [start, stop), in which nothing is stored yet."""
        self._mapping.fault_in(self._offset + start, self._offset + stop)

    def release(self) -> None:
        """Give it back. Once is enough."""
        if self._held:
            self._held = False
            self._pool._give_back(self._offset, _paged(self.size))


class BufferPool:
    """At most `size` bytes, taken in the order in which they were asked for. Thread-safe."""

    def __init__(self, size: int) -> None:
        self.size = size - size % PAGE_BYTES
        self._changed = threading.Condition()
        self._mapping: Mapping | None = None
        self._free = [(0, self.size)] if self.size else []  # (offset, size), by offset, never adjacent
        self._queue: deque[object] = deque()
        self._closed = False

    @property
    def free_bytes(self) -> int:
        """Bytes that nobody holds."""
        with self._changed:
            return sum(size for _, size in self._free)

    def take(self, size: int, timeout_s: float, label: str, still_wanted: Callable[[], None] = lambda: None) -> Region:
        """A region of `size` bytes as soon as one is free and all who asked before have theirs.

        `still_wanted` is called whenever something has changed, and raises where waiting has become pointless. Raises
        InvalidArgument for more than the whole pool, DeadlineExceeded.
        """
        if size > self.size:
            raise InvalidArgument(
                f"{label}: {size} bytes do not fit into the buffers for background saves, which have {self.size}: save it with "
                f"checkpoint() and without background=True, or give the client more, such as background_bytes={2 * size}"
            )
        deadline_s = time.monotonic() + timeout_s
        ticket = object()
        with cancel.watching(_Waker(self._changed)), self._changed:
            self._queue.append(ticket)
            try:
                while True:
                    cancel.check()
                    still_wanted()
                    if self._closed:
                        raise InvalidArgument(f"{label}: the client is closed")
                    if self._queue[0] is ticket and (offset := self._fit(_paged(size))) is not None:
                        return Region(self, self._mapped(), offset, size)
                    remaining_s = deadline_s - time.monotonic()
                    if remaining_s <= 0:
                        raise DeadlineExceeded(
                            f"{label}: no buffer became free in time; uploads in the background lag behind "
                            f"size={size} background_bytes={self.size} timeout_s={timeout_s}"
                        )
                    self._changed.wait(remaining_s)
            finally:
                self._queue.remove(ticket)
                self._changed.notify_all()  # the next one may fit

    def close(self) -> None:
        """Nobody gets memory any more; the mapping goes with its last region."""
        with self._changed:
            self._closed = True
            self._mapping = None
            self._changed.notify_all()

    def _mapped(self) -> Mapping:
        if self._mapping is None:
            try:
                self._mapping = Mapping(self.size)
            except (OSError, OverflowError) as error:
                raise InvalidArgument(f"background_bytes={self.size}: so much memory cannot be mapped: {error}") from error
        return self._mapping

    def _fit(self, size: int) -> int | None:
        # The lowest place first: what has been used before is warm.
        for index, (offset, free) in enumerate(self._free):
            if free >= size:
                self._free[index : index + 1] = [(offset + size, free - size)] if free > size else []
                return offset
        return None

    def _give_back(self, offset: int, size: int) -> None:
        with self._changed:
            free: list[tuple[int, int]] = []
            for start, length in sorted([*self._free, (offset, size)]):
                if free and free[-1][0] + free[-1][1] == start:
                    free[-1] = (free[-1][0], free[-1][1] + length)
                else:
                    free.append((start, length))
            self._free = free
            self._changed.notify_all()


class _Waker:
    """Lets a cancelled scope wake who waits."""

    def __init__(self, condition: threading.Condition) -> None:
        self._condition = condition

    def cancel(self) -> None:
        with self._condition:
            self._condition.notify_all()


def _paged(size: int) -> int:
    return max(-(-size // PAGE_BYTES), 1) * PAGE_BYTES
