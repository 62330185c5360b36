"""Messages on their way to clients: one is sent while the next is made; both count, and are let go of whatever happens."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest

from forebay_gateway.core.errors import Corrupt
from forebay_gateway.rpc.sending import Answers, Sending
from forebay_gateway.rpc.status import streams

MESSAGE = bytes(1000)


class Client:
    """A call's context: a write ends once read() allows it."""

    def __init__(self, reads: int = 0) -> None:
        self.got: list[Any] = []
        self.status: tuple[grpc.StatusCode, str] | None = None
        self._reads = asyncio.Semaphore(reads)

    def read(self, count: int = 1) -> None:
        for _ in range(count):
            self._reads.release()

    async def write(self, message: Any) -> None:
        assert self.status is None, "nothing is sent after the end"
        await self._reads.acquire()
        self.got.append(message)

    async def abort(self, code: grpc.StatusCode, message: str, _metadata: object) -> None:
        self.status = (code, message)
        raise grpc.aio.AbortError


class Service:
    """Answers with `count` messages, then fails where an error is given."""

    def __init__(self, count: int, error: Exception | None = None, timeout_s: float = 30.0, bytes_max: int = 1 << 20) -> None:
        self.sending = Sending(timeout_s, bytes_max)
        self.made = 0
        self.closed = False
        self._count, self._error = count, error

    @streams
    async def Answer(self, request: object, context: Any) -> AsyncGenerator[bytes, None]:
        try:
            for _ in range(self._count):
                self.made += 1
                yield MESSAGE
            if self._error is not None:
                raise self._error
        finally:
            self.closed = True


async def settled() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_the_next_is_made_while_one_is_sent_and_no_more() -> None:
    service, client = Service(5), Client()
    call = asyncio.create_task(service.Answer(None, client))  # type: ignore[arg-type]
    await settled()
    assert (service.made, client.got, service.sending._bytes) == (2, [], 2 * len(MESSAGE))
    client.read()
    await settled()
    assert (service.made, len(client.got), service.sending._bytes) == (3, 1, 2 * len(MESSAGE))
    client.read(4)
    await call
    assert (len(client.got), service.sending._bytes, client.status) == (5, 0, None)


async def test_what_was_made_comes_before_the_error() -> None:
    service, client = Service(2, Corrupt("bad")), Client(reads=1)
    call = asyncio.create_task(service.Answer(None, client))  # type: ignore[arg-type]
    await settled()
    assert service.closed and client.status is None
    client.read()
    with pytest.raises(grpc.aio.AbortError):
        await call
    assert len(client.got) == 2 and client.status == (grpc.StatusCode.DATA_LOSS, "bad")
    assert service.sending._bytes == 0


async def test_a_client_that_does_not_read_is_left() -> None:
    service, client = Service(5, timeout_s=0.05), Client(reads=1)
    with pytest.raises(grpc.aio.AbortError):
        await service.Answer(None, client)  # type: ignore[arg-type]
    assert client.status is not None and client.status[0] is grpc.StatusCode.DEADLINE_EXCEEDED
    assert service.closed and service.made == 3 and service.sending._bytes == 0


async def test_a_call_that_is_cancelled_leaves_nothing() -> None:
    service, client = Service(5), Client(reads=1)
    call = asyncio.create_task(service.Answer(None, client))  # type: ignore[arg-type]
    await settled()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert service.closed and service.sending._bytes == 0
    client.read(3)
    await settled()
    assert len(client.got) == 1  # the write under way ended with the call


async def test_nothing_is_made_ahead_where_memory_is_short() -> None:
    service, client = Service(3, bytes_max=4 * len(MESSAGE)), Client()
    call = asyncio.create_task(service.Answer(None, client))  # type: ignore[arg-type]
    await settled()
    assert (service.made, service.sending._bytes) == (1, len(MESSAGE))
    client.read(3)
    await call
    assert (service.made, len(client.got), service.sending._bytes) == (3, 3, 0)


async def test_messages_that_others_leave_unread_have_a_bound() -> None:
    sending = Sending(0.05, bytes_max=2 * len(MESSAGE))
    calls = [Answers(sending, Client()) for _ in range(3)]  # type: ignore[arg-type]
    came = await asyncio.gather(*(call.send(MESSAGE) for call in calls), return_exceptions=True)
    assert sorted(type(error).__name__ for error in came) == ["DeadlineExceeded", "DeadlineExceeded", "Unavailable"]
    assert sending._bytes == 2 * len(MESSAGE)  # gRPC keeps them until their calls end
    reading = Answers(sending, Client(reads=1))  # type: ignore[arg-type]
    waiting = asyncio.create_task(reading.send(MESSAGE))
    await settled()
    assert not waiting.done()
    for call in calls:
        await call.close()
    await waiting
    await reading.close()
    assert sending._bytes == 0


async def test_messages_that_wait_to_be_counted_are_bounded_too() -> None:
    """They are there already, each as large as one that is sent."""
    service = Service(1, bytes_max=4 * len(MESSAGE))
    sending, clients = service.sending, [Client() for _ in range(20)]
    calls = [asyncio.create_task(service.Answer(None, client)) for client in clients]  # type: ignore[arg-type]
    await settled()
    refused = [client for client in clients if client.status is not None]
    assert [client.status[0] for client in refused if client.status] == [grpc.StatusCode.UNAVAILABLE] * (20 - 4 - 2)
    assert (sending._bytes, sending._waiting) == (4 * len(MESSAGE), 2 * len(MESSAGE))
    for client in clients:
        client.read()
    await asyncio.gather(*calls, return_exceptions=True)
    assert (sending._bytes, sending._waiting, sum(len(client.got) for client in clients)) == (0, 0, 6)
