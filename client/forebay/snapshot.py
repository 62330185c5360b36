"""Copying data into a region of the pool, with its checksum: from then on the caller may change it.

Owns the copying pass and the source that it makes. Each block is checksummed while it is still in the CPU's cache, so that the
trainer waits for little more than the copy; large data is copied by several threads. What is checksummed is the copy, and these
checksums, not new ones, travel with the bytes: a buffer that is damaged while it waits is found at the gateway's door.
"""

import ctypes
import itertools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

from forebay.buffers import Region
from forebay.errors import InvalidArgument
from forebay.sources import BufferSource, FilledSource, Source, source_of
from forebay_wire.checksums import crc32c, crc32c_of_chunks
from forebay_wire.memory import address_of

# A block stays in a core's L2 between copy and checksum. Smaller ones cost more calls, and more waits for the GIL.
BLOCK_BYTES = 1 << 20
_TURN_BYTES = 8 * BLOCK_BYTES  # what a thread takes at a time
_THREADS_MAX = 4  # more do not copy faster: memory bandwidth is the limit


class SnapshotSource(BufferSource):
    """A copy with known checksums, one a block."""

    def __init__(self, view: memoryview, block_crcs: list[int] | None = None) -> None:
        super().__init__(view)
        self._block_crcs = block_crcs or [0]
        self._crc32c: int | None = None

    @property
    def crc32c(self) -> int:
        """Of the whole shard."""
        if self._crc32c is None:
            self._crc32c = _combined(self._block_crcs, self.size)
        return self._crc32c

    def known_crc32c(self, offset: int, size: int) -> int | None:
        """As Source; known for whole blocks, and for the last."""
        stop = offset + size
        if offset % BLOCK_BYTES or (stop % BLOCK_BYTES and stop != self.size):
            return None
        return _combined(self._block_crcs[offset // BLOCK_BYTES : -(-stop // BLOCK_BYTES)], size)


def snapshotted(data: Any, label: str) -> Source:
    """The source of what can be snapshotted: everything whose size is known before it is read. Raises InvalidArgument."""
    source = source_of(data, label)
    if source.size is None:
        raise InvalidArgument(
            f"{label}: the size of a {type(data).__name__} is not known before its end, so it cannot be put in the background: "
            "put it without background=True, or give bytes, an array, a CPU tensor, a list of buffers, a path, a seekable file"
        )
    return source


class Copier:
    """Makes snapshots. Its threads start with the first large one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None
        self._more_threads = min(len(os.sched_getaffinity(0)), _THREADS_MAX) - 1

    def copy(self, source: Source, region: Region, start: int, label: str) -> SnapshotSource:
        """`source`, of known size, copied to `start` in a region. Raises what reading it raises."""
        size = source.size or 0
        view = region.view[start : start + size]
        if isinstance(source, BufferSource):
            return SnapshotSource(view, self._copy_memory(source.view, view, region, start))
        if isinstance(source, FilledSource):
            self._in_turns(size, lambda first, last: region.fault_in(start + first, start + last))
            source.filled(view)
            return SnapshotSource(view, self._checksums(view))
        crcs = []
        at = 0
        for piece in source.chunks(BLOCK_BYTES):
            if at + len(piece) <= size:
                view[at : at + len(piece)] = piece
                crcs.append(crc32c(view[at : at + len(piece)]))
            at += len(piece)
        if at != size:
            raise InvalidArgument(f"{label}: it had {size} bytes when its snapshot began, and {at} when it was read")
        return SnapshotSource(view, crcs)

    def fault_in(self, region: Region) -> None:
        """Have pages behind a whole region."""
        self._in_turns(region.size, region.fault_in)

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            threads, self._threads = self._threads, None
        if threads is not None:
            threads.shutdown()

    def _checksums(self, view: memoryview) -> list[int]:
        crcs = [0] * -(-view.nbytes // BLOCK_BYTES)

        def act(first: int, last: int) -> None:
            for at in range(first, last, BLOCK_BYTES):
                crcs[at // BLOCK_BYTES] = crc32c(view[at : min(at + BLOCK_BYTES, last)])

        self._in_turns(view.nbytes, act)
        return crcs

    def _copy_memory(self, data: memoryview, view: memoryview, region: Region, start: int) -> list[int]:
        crcs = [0] * -(-data.nbytes // BLOCK_BYTES)
        origin, target = address_of(data), region.address + start

        def act(first: int, last: int) -> None:
            region.fault_in(start + first, start + last)
            for at in range(first, last, BLOCK_BYTES):
                size = min(BLOCK_BYTES, last - at)
                ctypes.memmove(target + at, origin + at, size)
                crcs[at // BLOCK_BYTES] = crc32c(view[at : at + size])

        self._in_turns(data.nbytes, act)
        return crcs

    def _in_turns(self, size: int, act: Callable[[int, int], None]) -> None:
        """Call act(first, last) for all of [0, size), on this thread and, where it is worth it, on others."""
        turns = itertools.count()

        def work() -> None:
            while (first := next(turns) * _TURN_BYTES) < size:
                act(first, min(size, first + _TURN_BYTES))

        parts: list[Future[None]] = []
        try:
            for _ in range(min(self._more_threads, (size - 1) // _TURN_BYTES)):
                parts.append(self._executor().submit(work))
            work()
        finally:
            # One that has not begun is not needed; the others let go of the caller's data first.
            wait([part for part in parts if not part.cancel()])
        for part in parts:
            if not part.cancelled():
                part.result()

    def _executor(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(self._more_threads, thread_name_prefix="forebay-snapshot")
            return self._threads


def _combined(block_crcs: list[int], size: int) -> int:
    # Tables for a last block of an odd length take a while: not for small shards, which are one block.
    return block_crcs[0] if len(block_crcs) == 1 else crc32c_of_chunks(block_crcs, BLOCK_BYTES, size)
