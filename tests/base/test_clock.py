"""The fake clock that other tests stand on."""

import asyncio

from forebay_gateway.base.clock import FakeClock, SystemClock


async def test_sleepers_wake_in_the_order_of_their_deadlines() -> None:
    clock, woken = FakeClock(), []

    async def sleeper(name: str, delay_s: float) -> None:
        await clock.sleep(delay_s)
        woken.append((name, clock.monotonic()))

    start_s = clock.monotonic()
    async with asyncio.TaskGroup() as group:
        for name, delay_s in (("c", 3), ("a", 1), ("b", 2), ("a2", 1)):
            group.create_task(sleeper(name, delay_s))
        await asyncio.sleep(0)
        await clock.advance(0.5)
        assert woken == []
        await clock.advance(10)
    assert woken == [("a", start_s + 1), ("a2", start_s + 1), ("b", start_s + 2), ("c", start_s + 3)]
    assert clock.monotonic() == start_s + 10.5


async def test_who_sleeps_again_wakes_within_the_same_advance() -> None:
    clock, ticks = FakeClock(0.0), []

    async def ticker() -> None:
        while True:
            await clock.sleep(1)
            ticks.append(clock.monotonic())

    task = asyncio.create_task(ticker())
    await asyncio.sleep(0)
    await clock.advance(3.5)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert ticks == [1.0, 2.0, 3.0]
    await clock.advance(5)  # a cancelled sleeper is no longer woken
    assert ticks == [1.0, 2.0, 3.0]


async def test_no_delay_still_lets_others_run() -> None:
    clock, ran = FakeClock(), []
    task = asyncio.create_task(asyncio.sleep(0, ran.append(1)))
    await clock.sleep(0)
    await clock.sleep(-1)
    await task
    assert ran == [1]


async def test_the_system_clock() -> None:
    clock = SystemClock()
    before_s = clock.monotonic()
    await clock.sleep(0.01)
    assert clock.monotonic() - before_s >= 0.009
    assert clock.wall() > 1_600_000_000
