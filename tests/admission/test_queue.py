"""Who is next, who waits and for how long: the order alone, then with a budget on a fake clock."""

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any, cast

import pytest

from forebay_gateway.admission.budget import Budget, Reservation
from forebay_gateway.admission.queue import FairQueue, Waiter
from forebay_gateway.admission.quota import Quotas
from forebay_gateway.admission.waiting import PLACE_KEPT_S, WAIT_S_MAX, WAITERS_MAX, WaitingRoom
from forebay_gateway.base.clock import FakeClock
from forebay_gateway.core.errors import CacheFull, InvalidArgument

MIB = 1 << 20


def waiter(run: str, size: int, writer: int = 0) -> Waiter:
    return Waiter(run, writer, size, cast(Any, None))  # nobody waits for it


def anyone(_: Waiter) -> bool:
    return True


def order(queue: FairQueue, count: int | None = None) -> list[tuple[str, int]]:
    served: list[tuple[str, int]] = []
    while (count is None or len(served) < count) and (head := queue.next(anyone)) is not None:
        queue.served(head)
        served.append((head.run, head.writer))
    return served


def test_runs_take_turns_however_much_one_asks_for() -> None:
    queue = FairQueue()
    for _ in range(20):
        queue.add(waiter("large", 10))
    for _ in range(2):
        queue.add(waiter("small", 10))
    assert [run for run, _ in order(queue, 6)] == ["large", "small", "large", "small", "large", "large"]
    assert len(queue) == 16 and queue.size == 160


def test_turns_are_of_bytes_not_of_requests() -> None:
    queue = FairQueue()
    for _ in range(100):
        queue.add(waiter("many", 1))
    for _ in range(10):
        queue.add(waiter("few", 10))
    got = [run for run, _ in order(queue, 55)]
    assert got.count("few") == 5 and got.count("many") == 50


def test_writers_of_a_run_take_turns_too() -> None:
    queue = FairQueue()
    for writer in (0, 0, 0, 0, 1, 2):
        queue.add(waiter("run", 10, writer))
    assert [writer for _, writer in order(queue)] == [0, 1, 2, 0, 0, 0]


def test_who_is_next_stays_next_whoever_comes() -> None:
    queue = FairQueue()
    large = waiter("large", 1000)
    queue.add(large)
    assert queue.next(anyone) is large
    queue.add(waiter("small", 1))
    assert queue.next(anyone) is large is queue.next(anyone)


def test_who_may_not_go_is_passed_over_and_keeps_its_place() -> None:
    queue = FairQueue()
    for run in ("a", "b", "a", "b"):
        queue.add(waiter(run, 10))
    assert [head.run for head in (queue.next(lambda each: each.run == "b"),) if head] == ["b"]
    assert queue.next(lambda each: False) is None
    assert [run for run, _ in order(queue)].count("a") == 2


def test_everyone_is_served_once_in_any_history() -> None:
    random = Random(7)
    for _ in range(50):
        queue, waiting, served = FairQueue(), set(), 0
        for _ in range(200):
            act = random.random()
            if act < 0.5:
                new = waiter(random.choice("abc"), random.randint(1, 50), random.randint(0, 3))
                queue.add(new)
                waiting.add(new)
            elif act < 0.6 and waiting:
                gone = random.choice(sorted(waiting, key=id))
                queue.remove(gone)
                queue.remove(gone)
                waiting.discard(gone)
            elif (head := queue.next(anyone)) is not None:
                queue.served(head)
                assert head in waiting
                waiting.discard(head)
                served += 1
            assert set(queue) == waiting and len(queue) == len(waiting)
            assert queue.size == sum(each.size for each in waiting)
        while (head := queue.next(anyone)) is not None:
            queue.served(head)
            waiting.discard(head)
        assert not waiting and not len(queue)


class Room:
    """A budget of 100 MiB that is full, a drain that the test moves, and the waiting room before it."""

    def __init__(self, quota_of: Callable[[str], int | None] = lambda run: None) -> None:
        self.clock = FakeClock()
        self.hope = True
        self.evictable = 0
        self.quotas = Quotas(quota_of)
        self.budget = Budget(
            100 * MIB,
            soft=0.6,
            hard=0.9,
            refuse=1.0,
            reopen=1.0,
            used=100 * MIB,
            drain_rate=lambda: 10.0 * MIB,
            quotas=self.quotas,
        )
        self.room = WaitingRoom(self.budget, self.clock, lambda: self.hope, self.make_room)

    async def make_room(self, size: int) -> bool:
        missing = self.budget.missing_bytes(size)
        if not 0 < missing <= self.evictable:
            return missing == 0
        self.evictable -= missing
        self.budget.freed(missing)
        return True

    def ask(self, size: int, run: str = "run", writer: int = 0, wait_s: float = 20.0) -> "asyncio.Task[Reservation]":
        return asyncio.ensure_future(self.room.admit(size * MIB, run, writer, wait_s))

    async def after(self, seconds: float = 0.0) -> None:
        for _ in range(20):
            await asyncio.sleep(0)
        if seconds:
            await self.clock.advance(seconds)


async def test_one_that_does_not_fit_waits_and_is_served_as_soon_as_it_does() -> None:
    room = Room()
    asked = room.ask(10)
    await room.after(5.0)
    assert not asked.done() and room.budget.waiting == 1 and room.budget.waiting_bytes == 10 * MIB
    room.budget.freed(5 * MIB)
    await room.after()
    assert not asked.done()
    room.budget.freed(6 * MIB)
    await room.after()
    assert asked.result().size == 10 * MIB
    assert (room.budget.waiting, room.budget.waiting_bytes) == (0, 0)


async def test_nobody_waits_longer_than_asked_nor_than_the_cap() -> None:
    room = Room()
    short, long = room.ask(10, wait_s=3.0), room.ask(10, wait_s=1000.0)
    await room.after(2.9)
    assert not short.done()
    await room.after(0.2)
    error = short.exception()
    assert isinstance(error, CacheFull) and error.waited_s == pytest.approx(3.0) and error.retry_after_s is not None
    await room.after(WAIT_S_MAX)
    assert isinstance(long.exception(), CacheFull)
    await room.after(PLACE_KEPT_S)
    room.room.serve()
    assert room.budget.waiting == 0


@pytest.mark.parametrize("wait_s", [0.0, 20.0])
async def test_at_once_where_no_time_is_given_or_nothing_drains(wait_s: float) -> None:
    room = Room()
    room.hope = wait_s == 0.0
    asked = room.ask(10, wait_s=wait_s)
    await room.after()
    error = asked.exception()
    assert isinstance(error, CacheFull) and error.waited_s == 0.0
    assert room.budget.waiting == 0


async def test_when_the_drain_stops_who_waits_is_told_within_a_second() -> None:
    room = Room()
    asked = room.ask(10)
    await room.after(5.0)
    room.hope = False
    await room.after(1.1)
    assert isinstance(asked.exception(), CacheFull)


async def test_what_never_fits_is_refused_at_once() -> None:
    room = Room()
    with pytest.raises(InvalidArgument):
        await room.room.admit(101 * MIB, "run", 0, 20.0)


async def test_who_comes_later_does_not_overtake_by_being_small() -> None:
    room = Room()
    large = room.ask(50)
    await room.after()
    small = room.ask(1, wait_s=0.0)
    room.budget.freed(20 * MIB)
    await room.after()
    assert isinstance(small.exception(), CacheFull) and not large.done()
    room.budget.freed(30 * MIB)
    await room.after()
    assert large.done()


async def test_who_has_to_ask_anew_keeps_its_place() -> None:
    """Or small requests took all that drains while a large one's client pauses, again and again."""
    room = Room()
    large, small = room.ask(50, wait_s=100.0), room.ask(5, "b", wait_s=100.0)
    await room.after(WAIT_S_MAX + 0.1)
    assert isinstance(large.exception(), CacheFull) and isinstance(small.exception(), CacheFull)
    small = room.ask(5, "b", wait_s=70.0)
    room.budget.freed(40 * MIB)
    await room.after(PLACE_KEPT_S / 2)
    assert not small.done()
    large = room.ask(50, wait_s=70.0)
    room.budget.freed(10 * MIB)
    await room.after()
    assert large.done() and large.exception() is None and not small.done()
    room.budget.freed(5 * MIB)
    await room.after()
    assert small.done() and small.exception() is None and room.budget.waiting == 0


async def test_a_place_is_kept_for_a_few_seconds_and_no_longer() -> None:
    room = Room(lambda run: 1 * MIB if run == "b" else None)
    room.quotas.reserve("b", MIB)
    gone, also = room.ask(50, wait_s=100.0), room.ask(1, "b", wait_s=100.0)  # a run at its quota is never next
    await room.after(WAIT_S_MAX + 0.1)
    assert isinstance(gone.exception(), CacheFull) and isinstance(also.exception(), CacheFull)
    small = room.ask(5, "c")
    room.budget.freed(5 * MIB)
    await room.after(PLACE_KEPT_S - 0.5)
    assert not small.done()
    await room.after(1.5)
    assert small.done() and small.exception() is None
    assert room.budget.waiting == 0


async def test_one_that_is_cancelled_leaves_the_queue_and_others_go() -> None:
    room = Room()
    large, small = room.ask(50, "a"), room.ask(5, "b")
    await room.after()
    room.budget.freed(10 * MIB)
    await room.after()
    assert not small.done()
    large.cancel()
    await room.after()
    assert large.cancelled() and small.result().size == 5 * MIB
    assert room.budget.waiting == 0


async def test_space_given_to_one_that_was_cancelled_in_the_same_moment_is_given_back() -> None:
    room = Room()
    asked = room.ask(10)
    await room.after()
    room.budget.freed(10 * MIB)  # given, and not yet known to the call
    asked.cancel()
    await room.after()
    assert asked.cancelled()
    assert room.budget.reserved == 0


async def test_the_queue_is_bounded() -> None:
    room = Room()
    asked = [room.ask(1, writer=number % 8) for number in range(WAITERS_MAX + 3)]
    await room.after()
    assert sum(each.done() for each in asked) == 3
    for each in asked:
        each.cancel()
    await room.after()
    assert room.budget.waiting == 0


async def test_verified_data_makes_room_for_whose_turn_it_is() -> None:
    room = Room()
    room.evictable = 10 * MIB
    assert (await room.room.admit(10 * MIB, "run", 0, 0.0)).size == 10 * MIB
    asked = room.ask(10)
    await room.after()
    room.evictable = 10 * MIB  # verified meanwhile, and nobody has told
    await room.after(1.1)
    assert asked.done()


async def test_a_run_at_its_quota_waits_for_itself_and_holds_nobody_up() -> None:
    room = Room(lambda run: 20 * MIB if run == "held" else None)
    room.budget.freed(90 * MIB)
    room.quotas.moved(1, "held", 20 * MIB)
    held = room.ask(10, "held")
    await room.after()
    other = room.ask(10, "other", wait_s=0.0)
    await room.after()
    assert other.done() and other.exception() is None and not held.done()
    room.quotas.moved(1, "held", -10 * MIB)
    room.budget.on_room()
    await room.after()
    assert held.done()


async def saves(room: Room, run: str, writer: int, count: int, took: list[float]) -> None:
    """One after the other, each 5 MiB; each is drained in the order in which it came."""
    for _ in range(count):
        began_s = room.clock.monotonic()
        while True:
            try:
                reservation = await room.room.admit(5 * MIB, run, writer, 60.0)
                break
            except CacheFull:
                continue
        reservation.settle(5 * MIB)
        took.append(room.clock.monotonic() - began_s)


async def test_ten_times_the_demand_of_another_run_costs_a_save_at_most_twice_its_time() -> None:
    async def alone_or_beside(others: int) -> float:
        room, took = Room(), list[float]()
        crowd = [asyncio.ensure_future(saves(room, "large", writer, 10_000, [])) for writer in range(others)]
        await room.after()
        small = asyncio.ensure_future(saves(room, "small", 0, 20, took))
        await room.after()
        while not small.done():
            await room.after(0.5)
            room.budget.freed(5 * MIB)  # 10 MiB a second
            await room.after()
        for each in crowd:
            each.cancel()
        return sum(took) / len(took)

    alone_s = await alone_or_beside(0)
    assert alone_s > 0
    assert await alone_or_beside(10) <= 2 * alone_s + 0.01


async def test_many_who_wait_do_not_each_look_over_all_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    room, looks = Room(), 0
    real = FairQueue.next

    def counted(queue: FairQueue, may_go: Callable[[Waiter], bool]) -> Waiter | None:
        nonlocal looks
        looks += 1
        return real(queue, may_go)

    asked = [room.ask(1, writer=number) for number in range(200)]
    await room.after()
    monkeypatch.setattr(FairQueue, "next", counted)
    for _ in range(10):
        await room.after(1.0)
    assert not any(each.done() for each in asked) and looks <= 4 * 10
    room.evictable = MIB  # also for the one whose turn it is, whoever looks
    await room.after(2.0)
    assert sum(each.done() for each in asked) == 1
    for each in asked:
        each.cancel()
    await room.after()
