"""The pool: threads that end before their caller goes on, buffers that are counted whoever holds them."""

import asyncio
import errno
import gc
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from forebay_gateway.base import failpoints
from forebay_gateway.cache import io
from forebay_gateway.cache.footer import BLOCK
from forebay_gateway.cache.io import Buffer, IoPool, disk_error, disk_errors, read_blocks, settle, write_blocks
from forebay_gateway.core.errors import CacheFull, Unavailable
from forebay_wire.memory import address_of

SIZE = 64 << 10


@pytest.fixture
def pool() -> Iterator[IoPool]:
    pool = IoPool(threads=2, buffer_size=SIZE, buffers=8, wait_s_max=10)
    yield pool
    pool.close()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_run_gives_results_and_errors(pool: IoPool) -> None:
    assert await pool.run(divmod, 7, 2) == (3, 1)
    assert await pool.run(threading.get_ident) != threading.get_ident()
    with pytest.raises(ZeroDivisionError):
        await pool.run(divmod, 1, 0)


async def test_a_cancelled_run_ends_after_its_thread(pool: IoPool) -> None:
    ended: list[bool] = []
    began = threading.Event()

    def act() -> None:
        began.set()
        time.sleep(0.2)
        ended.append(True)
        raise OSError("seen by nobody")

    task = asyncio.create_task(pool.run(act))
    while not began.is_set():
        await asyncio.sleep(0.005)
    for _ in range(3):  # however often it is cancelled
        task.cancel()
        await turns()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_a_run_cancelled_in_the_queue_never_begins(pool: IoPool) -> None:
    release = threading.Event()
    blockers = [asyncio.create_task(pool.run(release.wait, 5)) for _ in range(2)]
    await asyncio.sleep(0.05)
    ran: list[int] = []
    task = asyncio.create_task(pool.run(ran.append, 1))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    release.set()
    await asyncio.gather(*blockers)
    await pool.run(int)
    assert ran == []


async def test_finish_runs_even_if_cancelled_in_the_queue(pool: IoPool) -> None:
    release = threading.Event()
    blockers = [asyncio.create_task(pool.run(release.wait, 5)) for _ in range(2)]
    await asyncio.sleep(0.05)
    ran: list[int] = []
    task = asyncio.create_task(pool.finish(lambda: ran.append(1)))
    await turns()
    task.cancel()
    await turns()
    release.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ran == [1]
    await asyncio.gather(*blockers)


async def test_settle_keeps_a_cancellation_for_the_end() -> None:
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(settle((future,)))
    await turns()
    task.cancel()
    await turns()
    assert not task.done()
    future.set_exception(OSError("seen"))
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_acquire_waits_when_all_are_out_in_order(pool: IoPool) -> None:
    held = [await pool.acquire() for _ in range(8)]
    assert pool.free_buffers == 0
    order: list[int] = []

    async def take(number: int) -> None:
        buffer = await pool.acquire()
        order.append(number)
        held.append(buffer)

    tasks = [asyncio.create_task(take(number)) for number in range(3)]
    await turns()
    assert order == []
    pool.release(held.pop(0))
    await turns()
    assert order == [0]
    pool.release(held.pop(0))
    pool.release(held.pop(0))
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    for buffer in held:
        pool.release(buffer)
    assert pool.free_buffers == 8


async def test_memory_is_reused_and_aligned(pool: IoPool) -> None:
    seen: set[int] = set()
    for _ in range(20):
        held = [await pool.acquire() for _ in range(8)]
        seen |= {id(buffer) for buffer in held}
        assert all(address_of(buffer.view) % BLOCK == 0 for buffer in held)
        for buffer in held:
            pool.release(buffer)
    assert len(seen) == 8
    assert pool.memory_bytes_max == 8 * SIZE


async def test_resident_memory_stays_bounded() -> None:
    pool = IoPool(threads=1, buffer_size=4 << 20, buffers=8)
    before = psutil.Process().memory_info().rss
    for _ in range(200):
        buffer = await pool.acquire()
        buffer.view[:] = bytes(1) * len(buffer.view)
        view = buffer.lend(100)
        del view
    assert psutil.Process().memory_info().rss - before < pool.memory_bytes_max + (8 << 20)
    pool.close()


async def test_readers_leave_buffers_to_writers(pool: IoPool) -> None:
    held = [await pool.acquire(keep_free=pool.reserved) for _ in range(6)]
    reader = asyncio.create_task(pool.acquire(keep_free=pool.reserved))
    await turns()
    assert not reader.done()
    held += [await pool.acquire(), await pool.acquire()]  # a writer overtakes the waiting reader
    for buffer in held[:3]:
        pool.release(buffer)
    held[:3] = [await reader]
    for buffer in held:
        pool.release(buffer)
    assert pool.free_buffers == 8


async def test_cancelled_waiters_lose_no_buffer(pool: IoPool) -> None:
    held = [await pool.acquire() for _ in range(8)]
    waiting = asyncio.create_task(pool.acquire())
    granted = asyncio.create_task(pool.acquire())
    await turns()
    waiting.cancel()
    await turns()
    pool.release(held.pop())
    pool._grant()  # granted, and cancelled before it ran again
    granted.cancel()
    for task in (waiting, granted):
        with pytest.raises(asyncio.CancelledError):
            await task
    for buffer in held:
        pool.release(buffer)
    await turns()
    assert pool.free_buffers == 8
    assert pool._waiters == []


async def test_who_is_cancelled_in_that_moment_is_granted_nothing(pool: IoPool) -> None:
    """His future is cancelled at once, and he leaves the queue only at his task's next turn."""
    held = [await pool.acquire() for _ in range(8)]
    waiting = [asyncio.create_task(pool.acquire()) for _ in range(3)]
    await turns()
    waiting[0].cancel()
    pool.release(held.pop())
    pool._grant()  # as whoever acquires, or a release on another thread, does
    while held:
        pool.release(held.pop())
    first, *others = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(first, asyncio.CancelledError)
    for buffer in others:
        assert isinstance(buffer, Buffer)
        pool.release(buffer)
    assert pool.free_buffers == 8


async def test_starvation_is_an_error_not_a_hang() -> None:
    pool = IoPool(buffer_size=SIZE, buffers=4, wait_s_max=0.05)
    held = [await pool.acquire() for _ in range(4)]
    with pytest.raises(Unavailable, match="buffer"):
        await pool.acquire()
    for buffer in held:
        pool.release(buffer)
    assert pool.free_buffers == 4
    pool.close()


async def test_larger_chunks_count_as_several(pool: IoPool) -> None:
    large = await pool.acquire(3 * SIZE - 5)
    assert len(large.view) == 3 * SIZE
    assert pool.free_buffers == 5
    pool.release(large)
    assert pool.free_buffers == 8
    whole = await pool.acquire(100 * SIZE)  # more than the pool: alone then
    assert pool.free_buffers == 0
    pool.release(whole)
    nearly = await pool.acquire(SIZE // 2 + 1)
    assert len(nearly.view) == SIZE
    pool.release(nearly)


async def test_small_chunks_count_as_what_they_are(pool: IoPool) -> None:
    """A part of a pack is many small chunks at once: were each a whole buffer, it would wait for itself."""
    async with asyncio.timeout(5):
        held = [await pool.acquire(BLOCK, keep_free=pool.reserved) for _ in range(6 * SIZE // BLOCK)]
    assert {len(buffer.view) for buffer in held} == {BLOCK}
    assert all(address_of(buffer.view) % BLOCK == 0 for buffer in held)
    assert pool.free_buffers == 2
    assert not pool.plenty
    more = asyncio.create_task(pool.acquire(1, keep_free=pool.reserved))
    await turns()
    assert not more.done()
    for buffer in held:
        pool.release(buffer)
    pool.release(await more)
    assert pool.free_buffers == 8


async def test_small_chunks_and_idle_buffers_share_the_memory(pool: IoPool) -> None:
    for buffer in [await pool.acquire() for _ in range(8)]:
        pool.release(buffer)
    held = [await pool.acquire(BLOCK) for _ in range(2 * SIZE // BLOCK)]
    assert len(pool._idle) == 6
    for buffer in held:
        pool.release(buffer)


async def test_a_large_request_is_not_starved_by_small_ones(pool: IoPool) -> None:
    held = [await pool.acquire() for _ in range(8)]
    large = asyncio.create_task(pool.acquire(4 * SIZE))
    await turns()
    small = asyncio.create_task(pool.acquire())
    await turns()
    for _ in range(3):
        pool.release(held.pop())
    await turns()
    assert not small.done()
    pool.release(held.pop())
    pool.release(await large)
    pool.release(await small)
    for buffer in held:
        pool.release(buffer)
    assert pool.free_buffers == 8


async def test_a_lent_view_returns_its_buffer_when_the_last_of_it_is_gone(pool: IoPool) -> None:
    buffer = await pool.acquire()
    buffer.view[:5] = b"hello"
    view = buffer.lend(5)
    assert view.readonly
    assert view == b"hello"
    assert view.format == "B"
    piece = view[1:3]
    del view
    gc.collect()
    assert pool.free_buffers == 7
    assert piece == b"el"
    thread = threading.Thread(target=lambda held: held.clear(), args=([piece],))
    del piece
    thread.start()
    thread.join()
    del thread
    assert pool.free_buffers == 8
    again = buffer.lend(5)
    del again
    pool._collect()


async def test_a_view_outlives_its_pool() -> None:
    pool = IoPool(buffer_size=SIZE, buffers=4)
    buffer = await pool.acquire()
    buffer.fill(memoryview(b"kept"))
    view = buffer.lend(4)
    pool.close()
    pool.close()
    del buffer, pool
    gc.collect()
    assert view == b"kept"


@pytest.mark.parametrize("length", [1, 100, 4095, 4096, 65_535, 65_536, 65_537, 100_001, 131_072])
@pytest.mark.parametrize("shift", [0, 1, 29])
async def test_fill_copies_exactly_and_pads(pool: IoPool, length: int, shift: int) -> None:
    buffer = Buffer(pool, 2 * SIZE, 2)
    buffer.view[:] = b"\xff" * (2 * SIZE)
    data = os.urandom(shift + length)
    filled = buffer.fill(memoryview(data)[shift:])
    padded = -(-length // BLOCK) * BLOCK
    assert filled == data[shift:] + bytes(padded - length)
    assert bytes(buffer.view[padded:]) == b"\xff" * (2 * SIZE - padded)


def test_the_pool_is_sized_by_memory() -> None:
    pool = IoPool.within(128 << 20, 4 << 20)
    assert (pool.buffers, pool.buffer_size, pool.memory_bytes_max) == (32, 4 << 20, 128 << 20)
    pool.close()
    least = IoPool.within(1, 4 << 20)
    assert least.buffers == io.BUFFERS_MIN
    least.close()
    for wrong in ({"buffers": 1}, {"buffer_size": 1000}, {"buffer_size": 0}):
        with pytest.raises(ValueError, match="pool"):
            IoPool(**wrong)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disks(number: int) -> None:
    error = disk_error(OSError(number, "x"), "write", Path("p"))
    assert isinstance(error, CacheFull)
    assert error.retry_after_s == 5


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS, errno.EMFILE])
def test_failing_disks(number: int) -> None:
    with pytest.raises(Unavailable, match=errno.errorcode[number]) as caught, disk_errors("write", Path("p")):
        raise OSError(number, "x")
    assert isinstance(caught.value.__cause__, OSError)


def test_short_writes_go_on_from_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []
    data = memoryview(bytes(4 * BLOCK))

    def pwrite(descriptor: int, piece: memoryview, offset: int) -> int:
        calls.append((offset, len(piece)))
        return len(piece) if len(calls) > 2 else BLOCK + 512

    monkeypatch.setattr(os, "pwrite", pwrite)
    write_blocks(0, data, 8 * BLOCK)
    assert calls == [(8 * BLOCK, 4 * BLOCK), (9 * BLOCK, 3 * BLOCK), (10 * BLOCK, 2 * BLOCK)]
    monkeypatch.setattr(os, "pwrite", lambda *_: 512)
    with pytest.raises(OSError, match="512"):
        write_blocks(0, data, 0)


def test_short_reads_go_on_and_end_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    into = memoryview(bytearray(4 * BLOCK))
    answers = iter([BLOCK + 512, 2 * BLOCK, 100])
    offsets: list[int] = []

    def preadv(descriptor: int, pieces: list[memoryview], offset: int) -> int:
        offsets.append(offset)
        return next(answers)

    monkeypatch.setattr(os, "preadv", preadv)
    assert read_blocks(0, into, 0) == 3 * BLOCK + 100
    assert offsets == [0, BLOCK, 3 * BLOCK]


def test_failpoints() -> None:
    with failpoints.armed("a=2*error:EIO;b=all*error:ENOSPC"):
        failpoints.hit("a")
        with pytest.raises(OSError, match="failpoint") as caught:
            failpoints.hit("a")
        assert caught.value.errno == errno.EIO
        failpoints.hit("a")
        for _ in range(3):
            with pytest.raises(OSError, match="space"):
                failpoints.hit("b")
        failpoints.hit("c")
    failpoints.hit("b")
    for wrong in ("a=explode", "a=error:ENOTHING", "a=x*kill", "a=sleep:long"):
        with pytest.raises((ValueError, AttributeError)), failpoints.armed(wrong):
            pass
