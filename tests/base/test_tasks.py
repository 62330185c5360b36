"""Workers and crews: pauses, wakes, the first failure, and a graceful stop."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

import pytest

from forebay_gateway.base.clock import FakeClock
from forebay_gateway.base.tasks import Crew, Worker, uncut, uncut_left

if TYPE_CHECKING:
    from conftest import ExpectedLogs


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_an_uncut_act_goes_on_when_its_caller_is_cancelled(caplog: pytest.LogCaptureFixture) -> None:
    gate, ended = asyncio.Event(), []

    async def act(fails: bool) -> int:
        await gate.wait()
        if fails:
            raise OSError("nobody is there to hear it")
        ended.append(1)
        return 7

    callers = [asyncio.create_task(uncut(act(fails))) for fails in (False, True)]
    await settle()
    for caller in callers:
        caller.cancel()
    assert [type(each) for each in await asyncio.gather(*callers, return_exceptions=True)] == [asyncio.CancelledError] * 2
    gate.set()
    with caplog.at_level("INFO", "forebay.tasks"):
        await settle()
    assert ended == [1]
    assert "nobody is there to hear it" in caplog.text
    assert await uncut(act(False)) == 7
    with pytest.raises(OSError, match="nobody"):
        await uncut(act(True))


class Steps:
    """A step that counts, and then does what `then` says."""

    def __init__(self, then: Callable[[int], Awaitable[float | None]] | None = None) -> None:
        self.count = 0
        self._then = then

    async def __call__(self) -> float | None:
        self.count += 1
        return await self._then(self.count) if self._then else None


async def running(crew: Crew) -> "asyncio.Task[None]":
    task = asyncio.create_task(crew.run_until_failure())
    await settle()
    return task


async def test_a_worker_pauses_as_its_step_says_or_idles() -> None:
    async def then(count: int) -> float | None:
        return 5.0 if count == 1 else None

    clock, steps, crew = FakeClock(), Steps(then), Crew()
    crew.add(Worker("w", steps, clock, idle_s=60))
    task = await running(crew)
    assert steps.count == 1
    await clock.advance(4.9)
    assert steps.count == 1
    await clock.advance(0.2)
    assert steps.count == 2
    await clock.advance(59)
    assert steps.count == 2
    await clock.advance(2)
    assert steps.count == 3
    await crew.stop(1)
    await task


async def test_a_wake_runs_a_step_at_once_and_many_run_one() -> None:
    clock, steps, crew = FakeClock(), Steps(), Crew()
    worker = Worker("w", steps, clock, idle_s=60)
    crew.add(worker)
    task = await running(crew)
    for _ in range(5):
        worker.wake()
    await settle()
    assert steps.count == 2
    await crew.stop(1)
    await task


async def test_a_wake_during_a_step_is_not_lost() -> None:
    gate = asyncio.Event()

    async def then(count: int) -> float | None:
        await gate.wait()
        return None

    steps, crew = Steps(then), Crew()
    worker = Worker("w", steps, FakeClock(), idle_s=60)
    crew.add(worker)
    task = await running(crew)
    worker.wake()
    gate.set()
    await settle()
    assert steps.count == 2
    await crew.stop(1)
    await task


@pytest.mark.expected_logs("background task failed")
async def test_the_first_failure_ends_all_and_is_told_once(expected_logs: "ExpectedLogs") -> None:
    ended = []

    async def fails(count: int) -> float | None:
        if count == 2:
            raise OSError(5, "disk gone")
        return 1.0

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("forever")

    clock, crew = FakeClock(), Crew()
    crew.add(Worker("breaks", Steps(fails), clock, idle_s=60))
    crew.add("forever", forever)
    task = await running(crew)
    await clock.advance(2)
    with pytest.raises(OSError, match="disk gone"):
        await task
    assert ended == ["forever"]
    (record,) = expected_logs.records
    assert (record.levelname, record.__dict__["task"]) == ("CRITICAL", "breaks")
    with pytest.raises(RuntimeError):
        crew.add("late", forever)


@pytest.mark.expected_logs("background task failed")
async def test_a_failure_after_the_first_does_not_hide_it() -> None:
    async def first() -> None:
        raise ValueError("first")

    async def second() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            raise KeyError("second")

    crew = Crew()
    crew.add("second", second)
    crew.add("first", first)
    with pytest.raises(ValueError, match="first"):
        await crew.run_until_failure()


@pytest.mark.expected_logs("another background task failed while all were stopping")
async def test_later_failures_are_logged(expected_logs: "ExpectedLogs") -> None:
    async def stubborn() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise KeyError("on the way out") from None

    async def first() -> None:
        raise ValueError("first")

    crew = Crew()
    crew.add("stubborn", stubborn)
    crew.add("first", first)
    expected_logs.allow("background task failed")
    with pytest.raises(ValueError, match="first"):
        await crew.run_until_failure()
    assert [record.__dict__["task"] for record in expected_logs.records] == ["first", "stubborn"]


async def test_stop_lets_a_step_finish() -> None:
    gate, done = asyncio.Event(), []

    async def then(count: int) -> float | None:
        await gate.wait()
        done.append(count)
        return 0.0

    crew = Crew()
    crew.add(Worker("w", Steps(then), FakeClock(), idle_s=60))
    task = await running(crew)
    stopping = asyncio.create_task(crew.stop(deadline_s=30))
    await settle()
    assert not stopping.done()
    gate.set()
    await stopping
    await task
    assert done == [1]


async def test_stop_cancels_a_step_that_takes_too_long() -> None:
    cancelled = []

    async def then(count: int) -> float | None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.append(count)
            raise
        return None

    crew = Crew()
    crew.add(Worker("w", Steps(then), FakeClock(), idle_s=60))
    task = await running(crew)
    await crew.stop(deadline_s=0.02)
    await task
    assert cancelled == [1]
    await crew.stop(deadline_s=0.02)


async def test_work_added_while_running_and_work_that_ends() -> None:
    ran = []

    async def once() -> None:
        ran.append(1)

    crew = Crew()
    task = await running(crew)
    crew.add("once", once)
    await settle()
    assert ran == [1]
    assert not task.done()
    await crew.stop(1)
    await task


async def test_stopped_before_it_ran() -> None:
    steps, crew = Steps(), Crew()
    crew.add(Worker("w", steps, FakeClock(), idle_s=60))
    await crew.stop(1)
    await crew.run_until_failure()
    assert steps.count == 0


async def test_cancelling_the_owner_cancels_the_crew() -> None:
    ended = []

    async def forever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(1)

    crew = Crew()
    crew.add("forever", forever)
    task = await running(crew)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [1]


async def test_a_caller_that_stays_goes_only_with_the_end_of_the_act() -> None:
    """What it holds, such as a lock, is held as long as the act is under way."""
    gate, held = asyncio.Event(), True

    async def caller() -> None:
        nonlocal held
        try:
            await uncut(gate.wait(), stay=True)
        finally:
            held = False

    task = asyncio.create_task(caller())
    await asyncio.sleep(0)
    task.cancel()
    for _ in range(5):
        await asyncio.sleep(0)
    assert held
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not held and not uncut_left()
