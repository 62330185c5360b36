"""A whole object as checked chunks, by several ranges at a time: one answer of an object store is slower than the network is.

    ranges in order of need, each a read of its own -> chunks, checked, kept until it is their turn -> handed on in order

Owns how many ranges are under way, and what they keep in memory. Does not own the check (chunks.py), nor what a failure means:
it is raised at its own chunk, after all before it, whatever later ranges have brought by then.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from forebay_gateway.tiers.base import Tier
from forebay_gateway.tiers.chunks import verified_chunks

RANGE_BYTES = 16 << 20
AHEAD_BYTES = 64 << 20


class ReadAhead:
    """Memory of all ranges of one process. Nobody waits for it: who gets none goes on with one range, which needs no leave."""

    def __init__(self, size: int = AHEAD_BYTES) -> None:
        self._free = size

    def charge(self, size: int) -> None:
        """For a range that has to be, whatever is free."""
        self._free -= size

    def try_charge(self, size: int) -> bool:
        """For one that may be; False where there is no room for it."""
        if size > self._free:
            return False
        self.charge(size)
        return True

    def give_back(self, size: int) -> None:
        """A range is used up, or given up."""
        self._free += size

    @property
    def free_bytes(self) -> int:
        """What nobody has; below 0 where ranges that had to be took more."""
        return self._free


class _Range:
    """One read under way. It is never held up, so that a slow consumer costs no connection; its bytes are counted before."""

    def __init__(self, chunks: AsyncGenerator[memoryview, None], size: int) -> None:
        self.size = size
        self._arrived: asyncio.Queue[memoryview | None] = asyncio.Queue()  # bounded by the range's own length
        self._task = asyncio.create_task(self._fill(chunks))
        self._task.add_done_callback(lambda _: self._arrived.put_nowait(None))

    async def _fill(self, chunks: AsyncGenerator[memoryview, None]) -> None:
        async with aclosing(chunks):
            async for chunk in chunks:
                self._arrived.put_nowait(chunk)

    async def next(self) -> memoryview | None:
        """The next chunk, None after the last; raises what ended the read."""
        chunk = await self._arrived.get()
        if chunk is None:
            self._task.result()
        return chunk

    async def end(self) -> None:
        """It holds no connection, file or memory any more."""
        self._task.cancel()
        await asyncio.wait({self._task})
        if not self._task.cancelled():
            self._task.exception()  # seen: nobody came so far, or its reader has it


async def ranged_chunks(
    tier: Tier, key: str, size: int, chunk_size: int, crcs: Sequence[int], first: int, stop: int, ahead: ReadAhead
) -> AsyncGenerator[memoryview, None]:
    """As verified_chunks, by at most `tier.reads_at_once` ranges at a time. Beyond one they take their memory from `ahead`."""
    per_range = max(1, RANGE_BYTES // chunk_size)
    ranges: deque[_Range] = deque()
    begun = first

    def begin() -> bool:
        nonlocal begun
        end = min(begun + per_range, stop)
        length = (end - begun) * chunk_size
        if not ranges:
            ahead.charge(length)
        elif len(ranges) >= tier.reads_at_once or not ahead.try_charge(length):
            return False
        ranges.append(_Range(verified_chunks(tier, key, size, chunk_size, crcs, begun, end), length))
        begun = end
        return True

    try:
        while begun < stop or ranges:
            while begun < stop and begin():
                pass
            if (chunk := await ranges[0].next()) is not None:
                yield chunk
            else:
                ahead.give_back(ranges.popleft().size)
    finally:
        await _end_all(ranges, ahead)


async def _end_all(ranges: deque[_Range], ahead: ReadAhead) -> None:
    ends = asyncio.gather(*(each.end() for each in ranges))
    try:
        await asyncio.shield(ends)  # a second cancellation must not leave one running
    finally:
        for each in ranges:
            ahead.give_back(each.size)
