"""The curve between the watermarks, and the pace that writers share, on a fake clock."""

import asyncio

import pytest

from forebay_gateway.admission.curve import ASSUMED_DRAIN_BYTES_PER_S, SLOWEST_BYTES_PER_S, Throttle, pace_s
from forebay_gateway.base.clock import FakeClock

MIB = 1 << 20
SOFT, HARD = 600, 900
FAST = 512 * MIB  # a drain's bytes a second


def test_nothing_below_soft_the_drain_s_rate_half_way_the_slowest_at_hard() -> None:
    assert pace_s(0, SOFT, HARD, FAST) == pace_s(SOFT, SOFT, HARD, FAST) == 0.0
    assert 1 / pace_s(750, SOFT, HARD, FAST) == pytest.approx(FAST)
    assert 1 / pace_s(HARD, SOFT, HARD, FAST) == 1 / pace_s(2 * HARD, SOFT, HARD, FAST) == SLOWEST_BYTES_PER_S


def test_it_rises_all_the_way_and_never_falls() -> None:
    paces = [pace_s(waiting, SOFT, HARD, FAST) for waiting in range(SOFT, HARD + 1)]
    assert paces == sorted(paces)
    assert paces[0] == 0.0 < paces[1]


def test_a_drain_that_shows_nothing_does_not_stop_writers_at_the_soft_watermark() -> None:
    assert 1 / pace_s(750, SOFT, HARD, 0.0) == pytest.approx(ASSUMED_DRAIN_BYTES_PER_S)


def test_watermarks_that_are_equal() -> None:
    assert pace_s(600, 600, 600, FAST) == 0.0
    assert pace_s(601, 600, 600, FAST) == 1 / SLOWEST_BYTES_PER_S


def test_the_fill_settles_where_writers_and_drain_are_equal() -> None:
    """Writers that would bring 10 times what drains, the drain in bursts: after the first minute the fill stays between the
    watermarks, and what comes in is what goes out."""
    capacity, drain, step_s = 100_000 * MIB, 1000 * MIB, 0.1
    waiting, came = 0.0, 0.0
    seen = []
    for tick in range(12_000):
        pace = pace_s(waiting, 0.6 * capacity, 0.9 * capacity, drain)
        taken = step_s * min(10 * drain, 1 / pace if pace else float("inf"))
        waiting += taken
        if tick % 50 == 49:  # every 5 seconds all that was drained since
            waiting = max(0.0, waiting - 50 * step_s * drain)
        if tick >= 6000:
            came += taken
            seen.append(waiting / capacity)
    assert min(seen) > 0.6 and max(seen) < 0.9
    assert came / (6000 * step_s) == pytest.approx(drain, rel=0.02)


async def test_without_pressure_nobody_sleeps_nor_asks_the_clock() -> None:
    class NoClock(FakeClock):
        async def sleep(self, delay_s: float) -> None:
            raise AssertionError

        def monotonic(self) -> float:
            raise AssertionError

    await Throttle(NoClock(), lambda: 0.0).slow(1 << 40, "run", 1.0)


async def test_many_writers_are_no_faster_than_one_and_no_sleep_is_longer_than_its_cap() -> None:
    clock = FakeClock()
    throttle = Throttle(clock, lambda: 0.1 / MIB)
    passed: list[float] = []

    async def writer() -> None:
        while True:
            await throttle.slow(MIB, "run", 1.0)
            passed.append(clock.monotonic())

    writers = [asyncio.ensure_future(writer()) for _ in range(4)]
    try:
        await asyncio.sleep(0)
        await clock.advance(10.0)
        assert len(passed) == pytest.approx(100, abs=4)
    finally:
        for each in writers:
            each.cancel()


async def test_what_the_cap_cuts_off_is_not_owed() -> None:
    """A hundred sleeps of a minute are cut to a second each, all at once; the next one after pressure has gone is none."""
    clock = FakeClock()
    pace = [60.0 / MIB]
    throttle = Throttle(clock, lambda: pace[0])
    slept = [asyncio.ensure_future(throttle.slow(MIB, "run", 1.0)) for _ in range(100)]
    await asyncio.sleep(0)
    await clock.advance(1.0)
    assert all(each.done() for each in slept)
    pace[0] = 1e-9 / MIB
    last = asyncio.ensure_future(throttle.slow(MIB, "run", 1.0))
    await asyncio.sleep(0)
    await clock.advance(0.001)
    assert last.done()


async def test_a_run_beside_one_with_ten_times_its_writers_takes_twice_its_time_and_no_more() -> None:
    async def chunks_in_ten_seconds(writers: dict[str, int]) -> dict[str, int]:
        clock, passed = FakeClock(), dict.fromkeys(writers, 0)
        throttle = Throttle(clock, lambda: 0.1 / MIB)

        async def writer(run: str) -> None:
            while True:
                await throttle.slow(MIB, run, 1.0)
                passed[run] += 1

        tasks = [asyncio.ensure_future(writer(run)) for run, count in writers.items() for _ in range(count)]
        await asyncio.sleep(0)
        await clock.advance(10.0)
        for each in tasks:
            each.cancel()
        return passed

    assert (await chunks_in_ten_seconds({"small": 1}))["small"] == pytest.approx(100, abs=2)
    beside = await chunks_in_ten_seconds({"large": 10, "small": 1})
    assert beside["small"] == pytest.approx(50, abs=2)
    assert beside["large"] <= 10 * 10 + 2  # the cap: ten sleeps of a second each


async def test_a_run_that_has_gone_leaves_its_share() -> None:
    clock = FakeClock()
    throttle = Throttle(clock, lambda: 0.1 / MIB)
    for run in ("one", "other"):
        each = asyncio.ensure_future(throttle.slow(MIB, run, 1.0))
        await asyncio.sleep(0)
        await clock.advance(2.0)
        assert each.done()
    began_s = clock.monotonic()
    each = asyncio.ensure_future(throttle.slow(MIB, "one", 1.0))
    await asyncio.sleep(0)
    await clock.advance(0.11)
    assert each.done() and clock.monotonic() - began_s < 0.2
