"""Loop lag over a window, and a rate that neither jumps with bursts nor keeps its last figure."""

import asyncio
import time

import pytest

from forebay_gateway.base.clock import FakeClock, SystemClock
from forebay_gateway.base.metrics import LoopLag, Rate


async def test_lag_is_a_quantile_of_the_last_minute() -> None:
    clock = FakeClock()
    lag = LoopLag(clock)
    assert lag.p99_s == 0.0
    for index in range(100):
        lag.add(index / 1000)
    assert lag.p99_s == pytest.approx(0.098)
    assert lag.quantile_s(0.5) == pytest.approx(0.049)
    assert lag.quantile_s(1.0) == pytest.approx(0.099)
    await clock.advance(59)
    assert lag.p99_s > 0
    await clock.advance(2)
    assert lag.p99_s == 0.0


def test_lag_keeps_a_bounded_number_of_samples() -> None:
    lag = LoopLag(FakeClock(), interval_s=1.0, window_s=10.0)
    lag.add(9.0)
    for _ in range(10):
        lag.add(0.001)
    assert lag.quantile_s(1.0) == 0.001


async def test_a_blocked_loop_is_seen() -> None:
    lag = LoopLag(SystemClock(), interval_s=0.01)
    task = asyncio.create_task(lag.run())
    await asyncio.sleep(0.03)
    time.sleep(0.1)
    await asyncio.sleep(0.03)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert lag.p99_s > 0.05


async def test_a_steady_flow_shows_its_rate_from_the_first_seconds_on() -> None:
    clock = FakeClock()
    rate = Rate(clock)
    assert rate.bytes_per_s == 0.0
    for second in range(120):
        for _ in range(10):
            rate.add(10_000)
            await clock.advance(0.1)
        if second >= 1:
            assert rate.bytes_per_s == pytest.approx(100_000, rel=0.1)


async def test_bursts_show_their_mean() -> None:
    clock = FakeClock()
    rate = Rate(clock)
    for _ in range(60):
        rate.add(5_000_000)
        await clock.advance(5)
    shown = []
    for _ in range(5):
        await clock.advance(1)
        shown.append(rate.bytes_per_s)
    assert max(shown) < 2_000_000
    assert min(shown) > 300_000


async def test_a_flow_that_stops_fades_to_nothing() -> None:
    clock = FakeClock()
    rate = Rate(clock)
    rate.add(1_000_000)
    await clock.advance(1)
    before = rate.bytes_per_s
    await clock.advance(20)
    assert 0 < rate.bytes_per_s < before / 5
    await clock.advance(600)
    assert rate.bytes_per_s == 0.0


async def test_a_long_pause_does_not_overflow() -> None:
    clock = FakeClock()
    rate = Rate(clock)
    rate.add(1)
    await clock.advance(1e9)
    rate.add(1_000_000)
    assert rate.bytes_per_s == pytest.approx(100_000)


async def test_a_pause_leaves_the_rate_as_it_was() -> None:
    """When a queue is empty there is no flow; how fast the next shard goes, its end still tells."""
    clock = FakeClock()
    rate = Rate(clock)
    for _ in range(30):
        rate.add(1000)
        await clock.advance(1)
    before = rate.bytes_per_s
    rate.pause()
    await clock.advance(3600)
    assert rate.bytes_per_s == before
    assert rate.quiet_s > 3600
    rate.resume()
    assert rate.bytes_per_s == before
    await clock.advance(300)
    assert rate.bytes_per_s < before / 1000


async def test_for_how_long_nothing_went_by() -> None:
    """Also right after a fast flow, whose rate takes minutes to fade to nothing."""
    clock = FakeClock()
    rate = Rate(clock)
    await clock.advance(5)
    assert rate.quiet_s == 5
    rate.add(1 << 40)
    await clock.advance(31)
    assert rate.bytes_per_s > 0
    assert rate.quiet_s == 31
    rate.add(0)
    assert rate.quiet_s == 0
