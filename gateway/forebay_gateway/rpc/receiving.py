"""Large messages from clients, on their way in: all together have a bound in bytes.

Owns how many streams may take in a message at once, and how much memory messages that came in and are not dealt with may take.
A message is as large as its client likes, up to gRPC's limit, and its length is known only once it is there; so few streams
read at the same time, and none while what came in before fills the budget. Flow control then holds the clients.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from forebay_wire.frames import MAX_MESSAGE_BYTES

RECEIVED_BYTES_MAX = MAX_MESSAGE_BYTES
READING_MAX = 2
KEPT_S_MAX = 2.0
READ_ALONE_S = 0.25  # a client that has nothing to send yet must not keep others from sending

T = TypeVar("T")


class Receiving:
    """All streams that take in large messages. Used from one event loop."""

    def __init__(self, bytes_max: int = RECEIVED_BYTES_MAX, reading_max: int = READING_MAX) -> None:
        self._bytes_max, self._reading_max = bytes_max, reading_max
        self._held = 0
        self._reading = 0
        self._changed = asyncio.Event()

    @property
    def held_bytes(self) -> int:
        """Of messages that were received and not dealt with."""
        return self._held

    def patience_s(self, wait_s: float) -> float:
        """For how long a message may be kept while it waits for something else, `wait_s` at most. What waits must not keep all
        others out: beyond half of the memory it is given back soon, and comes again."""
        return wait_s if 2 * self._held <= self._bytes_max else min(wait_s, KEPT_S_MAX)

    @asynccontextmanager
    async def next(self, receive: Callable[[], Coroutine[Any, Any, T]], size_of: Callable[[T], int]) -> AsyncIterator[T]:
        """The next message that `receive` gives, counted until the block ends."""
        while self._reading >= self._reading_max or self._held >= self._bytes_max:
            await self._changed.wait()
        received = [await self._read(receive)]
        size = size_of(received[0])
        self._held += size
        try:
            yield received.pop()  # its memory is the block's alone, and may be given up before it ends
        finally:
            self._held -= size
            self._tell()

    async def _read(self, receive: Callable[[], Coroutine[Any, Any, T]]) -> T:
        self._reading += 1
        reading = asyncio.create_task(receive())
        try:
            try:
                await asyncio.wait({reading}, timeout=READ_ALONE_S)
            finally:
                self._reading -= 1
                self._tell()
            return await reading
        finally:
            if not reading.done():
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
