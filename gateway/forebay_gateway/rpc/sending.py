"""Messages on their way to clients: each has a deadline, and all together a bound in bytes.

Owns how long a client may leave a message unread, and how much memory unread messages take. gRPC keeps a message that was begun
until its client reads it or goes, whatever the call's handler does; so bytes count here for exactly that long. A message is
there before its size is known: so those that wait to be counted are bounded too.
"""

import asyncio
from typing import Any

import grpc.aio

from forebay_gateway.core.errors import DeadlineExceeded, Unavailable
from forebay_wire.frames import MAX_MESSAGE_BYTES

Context = grpc.aio.ServicerContext[Any, Any]

SENDING_BYTES_MAX = max(256 << 20, 2 * MAX_MESSAGE_BYTES)
RETRY_AFTER_S = 2.0


class Sending:
    """All streams of answers of this gateway."""

    def __init__(self, timeout_s: float, bytes_max: int = SENDING_BYTES_MAX) -> None:
        self._timeout_s = timeout_s
        self._bytes_max = bytes_max
        self._bytes = 0
        self._waiting = 0  # bytes of messages that are made and not counted yet
        self._freed = asyncio.Condition()

    @property
    def plenty(self) -> bool:
        """Whether unread messages take so little that calls may make one more ahead."""
        return 4 * self._bytes < self._bytes_max

    async def reserve(self, size: int) -> None:
        """Count a message of so many bytes; waits until there is room. Raises Unavailable where others leave none, at once
        where half as much waits already."""
        if self._bytes + size > self._bytes_max:
            if self._waiting and 2 * (self._waiting + size) > self._bytes_max:
                raise self._no_room()
            self._waiting += size
            try:
                async with asyncio.timeout(self._timeout_s), self._freed:
                    await self._freed.wait_for(lambda: self._bytes + size <= self._bytes_max)
            except TimeoutError:
                raise self._no_room() from None
            finally:
                self._waiting -= size
        self._bytes += size

    def _no_room(self) -> Unavailable:
        return Unavailable("other clients leave too many answers unread", retry_after_s=RETRY_AFTER_S, unread_bytes=self._bytes)

    async def write(self, context: Context, message: Any) -> None:
        """Hand one message to the client. Raises DeadlineExceeded once nothing was read for the timeout."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await context.write(message)
        except TimeoutError:
            raise DeadlineExceeded("the client does not read what it asked for", unread_s=self._timeout_s) from None

    async def release(self, size: int) -> None:
        """The client has read so many bytes, or has gone."""
        self._bytes -= size
        async with self._freed:
            self._freed.notify_all()


class Answers:
    """The messages of one call: while one is sent its successor is made, where there is plenty of memory. Both count."""

    def __init__(self, sending: Sending, context: Context) -> None:
        self._sending = sending
        self._context = context
        self._held = 0
        self._writing: asyncio.Task[None] | None = None

    async def send(self, message: Any) -> None:
        """Begin to send a message, once the one before is sent. Raises Unavailable, DeadlineExceeded."""
        size = len(message) if isinstance(message, bytes) else message.ByteSize()
        await self._sending.reserve(size)
        self._held += size
        await self.sent()
        self._writing = asyncio.create_task(self._write(message, size))
        if not self._sending.plenty:
            await self.sent()

    async def sent(self) -> None:
        """Until all is sent. Raises DeadlineExceeded."""
        if self._writing is not None:
            await self._writing
            self._writing = None

    async def close(self) -> None:
        """The call is over; what its client has left unread goes with it."""
        if self._writing is not None:
            self._writing.cancel()
            await asyncio.gather(self._writing, return_exceptions=True)
        held, self._held = self._held, 0
        await self._sending.release(held)

    async def _write(self, message: Any, size: int) -> None:
        await self._sending.write(self._context, message)
        self._held -= size
        await self._sending.release(size)
