"""Retrying, throttling and metering on a fake clock, over a tier in memory that fails as told; and the factory."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conformance.tier_kit import CHUNK, BytesSource, blob, collect
from forebay_gateway.base.clock import FakeClock
from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.core.errors import AlreadyExists, Corrupt, ForebayError, NotFound, PermissionDenied, Unavailable
from forebay_gateway.tiers.base import ObjectInfo, StorageFull, Tier
from forebay_gateway.tiers.factory import open_tier
from forebay_gateway.tiers.memory import MemoryTier
from forebay_gateway.tiers.metered import MeteredTier, TierMeter
from forebay_gateway.tiers.posix.tier import PosixTier
from forebay_gateway.tiers.retrying import RetryingTier, RetryPolicy
from forebay_gateway.tiers.s3.limit import AdaptiveLimit
from forebay_gateway.tiers.s3.tier import S3Tier
from forebay_gateway.tiers.throttled import ThrottledTier, TokenBucket
from forebay_gateway.tiers.wrapper import TierWrapper


class Failing(MemoryTier):
    """Raises the next of `errors` before an act, or after it where `after` is set (a lost answer)."""

    def __init__(self, *errors: ForebayError, after: bool = False) -> None:
        super().__init__("failing")
        self.errors = list(errors)
        self.after = after
        self.calls = 0
        self.cut_at: int | None = None

    def _fail(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)

    async def head(self, key: str) -> ObjectInfo:
        self._fail()
        return await super().head(key)

    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        if not self.after:
            self._fail()
        info = await super().put_small(key, data, if_absent=if_absent, if_match=if_match)
        if self.after:
            self._fail()
        return info

    async def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        self.calls += 1
        async for piece in super().read(key, offset, length):
            yield piece[: self.cut_at]
            if self.cut_at is not None and self.errors:
                raise self.errors.pop(0)


async def _run_out(clock: FakeClock, task: "asyncio.Task[object]", step_s: float = 0.05) -> float:
    """Seconds of fake time until `task` is done."""
    start_s = clock.monotonic()
    while not task.done():
        await asyncio.sleep(0)
        await clock.advance(step_s)
    return clock.monotonic() - start_s


def _retrying(tier: Tier, clock: FakeClock, **changes: float) -> RetryingTier:
    return RetryingTier(tier, clock, RetryPolicy(**changes), random.Random(1))  # type: ignore[arg-type]


async def test_only_unavailable_is_retried() -> None:
    clock = FakeClock()
    for error in (NotFound("no"), PermissionDenied("no"), Corrupt("no"), StorageFull("full")):
        tier = Failing(error)
        with pytest.raises(type(error)):
            await _retrying(tier, clock).head("x")
        assert tier.calls == 1


async def test_unavailable_passes_within_the_bounds() -> None:
    clock = FakeClock()
    tier = Failing(Unavailable("1"), Unavailable("2"), Unavailable("3"))
    await MemoryTier("m", tier.store).put_small("x", b"1")
    task = asyncio.create_task(_retrying(tier, clock, attempts=4, first_s=1.0, cap_s=2.0, total_s=60.0).head("x"))
    taken_s = await _run_out(clock, task)
    assert task.result().size == 1
    assert 0.5 + 1.0 + 1.0 <= taken_s <= 1.0 + 2.0 + 2.0 + 0.2


async def test_attempts_and_time_are_bounded() -> None:
    clock = FakeClock()
    tier = Failing(*(Unavailable(str(number)) for number in range(99)))
    task = asyncio.create_task(_retrying(tier, clock, attempts=3, first_s=0.1).head("x"))
    await _run_out(clock, task)
    assert (tier.calls, str(task.exception())) == (3, "2")
    tier.calls = 0
    task = asyncio.create_task(_retrying(tier, clock, attempts=99, first_s=1.0, cap_s=4.0, total_s=10.0).head("x"))
    assert await _run_out(clock, task) <= 10.0
    assert isinstance(task.exception(), Unavailable)
    assert 2 < tier.calls < 9


async def test_the_tiers_own_hint_is_honoured() -> None:
    clock = FakeClock()
    tier = Failing(Unavailable("slow down", retry_after_s=5.0))
    await MemoryTier("m", tier.store).put_small("x", b"1")
    task = asyncio.create_task(_retrying(tier, clock, total_s=20.0).head("x"))
    assert 5.0 <= await _run_out(clock, task) <= 5.2
    tier.errors = [Unavailable("slow down", retry_after_s=50.0)]
    with pytest.raises(Unavailable):  # it asks for more time than there is: said at once
        await _retrying(tier, clock, total_s=20.0).head("x")


async def test_read_goes_on_at_the_offset_it_reached() -> None:
    clock = FakeClock()
    data = blob(3 << 20)
    tier = Failing(*(Unavailable(str(number)) for number in range(7)))
    await MemoryTier("m", tier.store).put("x", BytesSource(data))
    tier.cut_at = 100_000
    task = asyncio.create_task(collect(_retrying(tier, clock, attempts=2).read("x", 5, 700_000)))
    await _run_out(clock, task)
    assert task.result() == data[5:700_005]
    assert tier.calls == 8


@pytest.mark.parametrize("if_absent", [True, False])
async def test_lost_answer_to_a_conditional_put_is_looked_up(if_absent: bool) -> None:
    clock = FakeClock()
    tier = Failing(Unavailable("lost"), after=True)
    match = None if if_absent else (await MemoryTier("m", tier.store).put_small("x", b"old")).tag
    task = asyncio.create_task(_retrying(tier, clock).put_small("x", b"new", if_absent=if_absent, if_match=match))
    await _run_out(clock, task)
    assert task.result() == await MemoryTier("m", tier.store).head("x")
    assert tier.calls == 1, "the put must not be repeated once it is known to have landed"


async def test_lost_answer_is_not_taken_for_anothers_success() -> None:
    clock = FakeClock()
    tier = Failing(Unavailable("lost"))
    await MemoryTier("m", tier.store).put_small("x", b"another's")
    task = asyncio.create_task(_retrying(tier, clock).put_small("x", b"new", if_absent=True))
    await _run_out(clock, task)
    assert isinstance(task.exception(), AlreadyExists)


async def test_write_that_lands_after_the_look_is_still_our_own() -> None:
    """The request was given up, was not seen to have landed, and then it lands: the next attempt meets its own data."""

    class Late(Failing):
        async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
            if self.calls == 1:
                await MemoryTier("m", self.store).put_small(key, data)
            return await super().put_small(key, data, if_absent=if_absent, if_match=if_match)

    clock = FakeClock()
    tier = Late(Unavailable("timed out"))
    task = asyncio.create_task(_retrying(tier, clock).put_small("x", b"new", if_absent=True))
    await _run_out(clock, task)
    assert (tier.calls, task.result().size) == (2, 3)


async def test_bandwidth_paces_what_is_sent_and_not_what_is_read() -> None:
    clock = FakeClock()
    tier = ThrottledTier(MemoryTier("m"), clock, bandwidth=10 * CHUNK)
    source = BytesSource(blob(40 * CHUNK))
    task = asyncio.create_task(tier.put("x", source))
    assert 3.5 <= await _run_out(clock, task) <= 4.3
    start_s = clock.monotonic()
    assert len(await collect(tier.read("x", 0, source.size))) == source.size
    await tier.verify("x", source)
    assert clock.monotonic() == start_s


async def test_iops_pace_verbs() -> None:
    clock = FakeClock()
    tier = ThrottledTier(MemoryTier("m"), clock, iops=10)
    await MemoryTier("m", tier.inner.store).put_small("x", b"1")  # type: ignore[attr-defined]

    async def many() -> None:
        for _ in range(40):
            await tier.head("x")

    assert 3.5 <= await _run_out(clock, asyncio.create_task(many())) <= 4.3


async def test_a_bucket_saves_up_only_a_little_and_sleeps_in_slices() -> None:
    clock = FakeClock()
    bucket = TokenBucket(100.0, clock)
    await clock.advance(1000.0)
    slept: list[float] = []
    real = clock.sleep

    async def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        await real(delay_s)

    clock.sleep = sleep  # type: ignore[method-assign]

    async def take() -> None:
        for _ in range(10):
            await bucket.take(100.0)

    assert await _run_out(clock, asyncio.create_task(take())) >= 8.5
    assert max(slept) <= 0.5


async def test_meter_counts_calls_bytes_errors_and_latency() -> None:
    clock = FakeClock()
    meter = TierMeter(clock)
    tier = MeteredTier(MemoryTier("m"), meter)
    await tier.put("x", BytesSource(blob(1000)))
    assert len(await collect(tier.read("x", 10, 500))) == 500
    with pytest.raises(NotFound):
        await tier.head("absent")
    with meter.measure("slow"):
        await asyncio.gather(clock.sleep(2.0), clock.advance(2.0))
    assert (meter.verbs["put"].calls, meter.verbs["put"].bytes) == (1, 1000)
    assert (meter.verbs["read"].calls, meter.verbs["read"].bytes) == (1, 500)
    assert (meter.verbs["head"].calls, meter.verbs["head"].errors) == (1, {"not_found": 1})
    slow = meter.verbs["slow"]
    assert (slow.latency_s_total, slow.latency_s_max, slow.latency_counts.index(1)) == (2.0, 2.0, 7)


async def test_limit_halves_on_trouble_and_grows_back() -> None:
    clock = FakeClock()
    limit = AdaptiveLimit(8, clock)

    async def use(error: Exception | None = None) -> None:
        async with limit.slot():
            await asyncio.sleep(0)
            if error is not None:
                raise error

    await asyncio.gather(*(use(Unavailable("slow down")) for _ in range(8)), return_exceptions=True)
    assert limit.slots == 4, "failures of one burst count once"
    await clock.advance(2.0)
    for error in (NotFound("no"), StorageFull("full")):
        with pytest.raises(ForebayError):
            await use(error)
    assert limit.slots == 4
    await asyncio.gather(*(use() for _ in range(100)))
    assert limit.slots == 8


async def test_limit_bounds_and_survives_cancellation() -> None:
    limit = AdaptiveLimit(2, FakeClock())
    inside = most = 0
    release = asyncio.Event()

    async def use() -> None:
        nonlocal inside, most
        async with limit.slot():
            inside += 1
            most = max(most, inside)
            try:
                await release.wait()
            finally:
                inside -= 1

    tasks = [asyncio.create_task(use()) for _ in range(10)]
    await asyncio.sleep(0)
    for task in tasks[::2]:
        task.cancel()
    await asyncio.sleep(0)
    release.set()
    await asyncio.gather(*tasks, return_exceptions=True)
    async with asyncio.timeout(1):
        await asyncio.gather(use(), use(), use())
    assert most == 2


def test_factory_joins_what_the_configuration_asks_for(tmp_path: Path) -> None:
    def layers(tier: Tier) -> list[type[Tier]]:
        return [type(tier), *(layers(tier.inner) if isinstance(tier, TierWrapper) else [])]

    clock = FakeClock()
    plain = open_tier(TierConfig(name="m", kind="memory"), clock)
    assert layers(plain) == [RetryingTier, ThrottledTier, MemoryTier]
    paced = open_tier(TierConfig(name="p", kind="posix", path=str(tmp_path), iops=5), clock, TierMeter(clock))
    assert layers(paced) == [MeteredTier, RetryingTier, ThrottledTier, PosixTier]
    assert (paced.name, paced.kind) == ("p", "posix")
    s3 = open_tier(TierConfig(name="o", kind="s3", bucket="ckpt", endpoint="http://127.0.0.1:1"), clock)
    assert layers(s3) == [RetryingTier, ThrottledTier, S3Tier]


async def test_capabilities_reach_the_bottom() -> None:
    bottom = MemoryTier("m")
    wrapped = MeteredTier(RetryingTier(bottom, FakeClock()), TierMeter(FakeClock()))
    found = await MemoryTier("other").probe()
    wrapped.capabilities = found
    assert bottom.capabilities is found
    assert await wrapped.probe() is wrapped.capabilities
