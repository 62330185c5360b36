"""Messages on their way in: few at a time, bounded in bytes, and nobody who has nothing to send holds others up."""

import asyncio

import pytest

from forebay_gateway.rpc import receiving
from forebay_gateway.rpc.receiving import Receiving

SIZE = 100


async def message() -> bytes:
    await asyncio.sleep(0)
    return bytes(SIZE)


async def test_messages_that_are_held_keep_others_from_being_read() -> None:
    room = Receiving(bytes_max=2 * SIZE, reading_max=2)
    highest, done = 0, 0
    leave = asyncio.Event()

    async def one() -> None:
        nonlocal highest, done
        async with room.next(message, len):
            highest = max(highest, room.held_bytes)
            await leave.wait()
        done += 1

    tasks = [asyncio.create_task(one()) for _ in range(20)]
    for _ in range(50):
        await asyncio.sleep(0)
    assert 2 * SIZE <= room.held_bytes <= 3 * SIZE and done == 0
    leave.set()
    await asyncio.gather(*tasks)
    assert highest <= 3 * SIZE and (done, room.held_bytes) == (20, 0)


async def test_a_silent_client_does_not_keep_others_from_sending(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "READ_ALONE_S", 0.01)
    room = Receiving(bytes_max=10 * SIZE, reading_max=1)

    async def silence() -> bytes:
        await asyncio.Event().wait()
        return b""

    async def quiet() -> None:
        async with room.next(silence, len):
            raise AssertionError("nothing was sent")

    waiting = [asyncio.create_task(quiet()) for _ in range(3)]
    await asyncio.sleep(0)
    async with room.next(message, len) as found:
        assert len(found) == SIZE
    for task in waiting:
        task.cancel()
    assert await asyncio.gather(*waiting, return_exceptions=True) != []
    async with room.next(message, len) as found:
        assert len(found) == SIZE
    assert room.held_bytes == 0


async def test_an_error_is_raised_and_leaves_nothing_behind() -> None:
    room = Receiving(bytes_max=SIZE, reading_max=1)

    async def broken() -> bytes:
        raise ValueError("broken")

    for _ in range(5):
        with pytest.raises(ValueError, match="broken"):
            async with room.next(broken, len):
                pass
        with pytest.raises(KeyError):
            async with room.next(message, len):
                raise KeyError
    assert room.held_bytes == 0


async def test_what_waits_for_something_else_keeps_half_of_the_room_and_no_more() -> None:
    room = Receiving(bytes_max=4 * SIZE)
    async with room.next(message, len), room.next(message, len):
        assert room.patience_s(30.0) == 30.0
        async with room.next(message, len):
            assert room.patience_s(30.0) == receiving.KEPT_S_MAX
            assert room.patience_s(0.5) == 0.5
