"""Messages on their way to clients: each has a deadline, and all together a bound in bytes.

Owns how long a client may leave a message unread, and how much memory unread messages take. gRPC keeps a message that was begun
until its client reads it or goes, whatever the call's handler does; so bytes count here for exactly that long.
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
        self._freed = asyncio.Condition()

    async def send(self, context: Context, message: Any, stalled: "list[int]") -> None:
        """Hand one message to the client. What it leaves unread is added to `stalled`; give that to release() when the call is
        over. Raises DeadlineExceeded once nothing was read for the timeout, Unavailable where others leave no memory."""
        size = len(message) if isinstance(message, bytes) else message.ByteSize()
        await self._reserve(size)
        stalled.append(size)
        try:
            async with asyncio.timeout(self._timeout_s):
                await context.write(message)
        except TimeoutError:
            raise DeadlineExceeded("the client does not read what it asked for", unread_s=self._timeout_s) from None
        await self.release(stalled)

    async def release(self, stalled: "list[int]") -> None:
        """The client has read, or has gone."""
        self._bytes -= sum(stalled)
        stalled.clear()
        async with self._freed:
            self._freed.notify_all()

    async def _reserve(self, size: int) -> None:
        if self._bytes + size > self._bytes_max:
            try:
                async with asyncio.timeout(self._timeout_s), self._freed:
                    await self._freed.wait_for(lambda: self._bytes + size <= self._bytes_max)
            except TimeoutError:
                raise Unavailable(
                    "other clients leave too many answers unread", retry_after_s=RETRY_AFTER_S, unread_bytes=self._bytes
                ) from None
        self._bytes += size
