"""Requests that do not fit now wait for their turn, until their time is over.

Owns the waiting: who may wait, for how long, and that whoever goes leaves nothing behind. Does not own the order (queue.py),
the space (budget.py), nor how room is made (paths/admit.py).
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any

from forebay_gateway.admission.budget import Budget, Reservation
from forebay_gateway.admission.queue import FairQueue, Waiter
from forebay_gateway.base.clock import Clock
from forebay_gateway.core.errors import CacheFull

WAITERS_MAX = 1024  # more than a node has ranks; to find the next looks at each. Who comes later is refused, and comes again
WAIT_S_MAX = 30.0  # then the client hears, and asks anew: a call that says nothing for longer looks dead
PLACE_KEPT_S = 6.0  # for who is to ask anew, a little longer than a client pauses: small requests would overtake a large one
LOOK_AGAIN_S = 1.0  # while waiting: whether there is hope yet, and whether something can be evicted
LOOKS_APART_S = 0.5  # of all who wait together: each look goes over all of them


class WaitingRoom:
    """All of a gateway. `has_hope` says whether the drain moves; `make_room` evicts for so many bytes where it can."""

    def __init__(
        self, budget: Budget, clock: Clock, has_hope: Callable[[], bool], make_room: Callable[[int], Awaitable[bool]]
    ) -> None:
        self._budget = budget
        self._clock = clock
        self._has_hope = has_hope
        self._make_room = make_room
        self._queue = FairQueue()
        self._away: deque[Waiter] = deque()  # whose clients are to come again, who left first in front
        self._looked_s = float("-inf")
        budget.on_room = self.serve

    async def admit(self, size: int, run: str, writer: int, wait_s: float) -> Reservation:
        """Space for `size` bytes, in its turn, within `wait_s` seconds. Raises CacheFull, at once where waiting is in vain;
        InvalidArgument for what never fits."""
        self._budget.check_fits(size, run)
        if not len(self._queue) and (made := await self._now(size, run)) is not None:
            return made
        waiter = self._placed(run, writer, size)
        began_s = self._clock.monotonic()
        self._count()
        try:
            self.serve()
            await self._wait(waiter, began_s, min(wait_s, WAIT_S_MAX))
            return waiter.future.result()
        except BaseException as error:
            if waiter.future.done() and not waiter.future.cancelled():
                waiter.future.result().release()  # given in the same moment
            elif isinstance(error, CacheFull) and error.waited_s >= WAIT_S_MAX < wait_s:
                self._keep_place(waiter)
            raise
        finally:
            if waiter.kept_until_s is None:
                self._queue.remove(waiter)
            self._count()
            self.serve()  # it may have stood before others

    def _placed(self, run: str, writer: int, size: int) -> Waiter:
        """At the end of its flow, or where it stood when its call's time was over."""
        future: asyncio.Future[Reservation] = asyncio.get_running_loop().create_future()
        if (waiter := self._queue.away(run, writer, size)) is not None:
            waiter.future, waiter.kept_until_s = future, None
            return waiter
        waiter = Waiter(run, writer, size, future)
        self._queue.add(waiter)
        return waiter

    def _keep_place(self, waiter: Waiter) -> None:
        waiter.kept_until_s = self._clock.monotonic() + PLACE_KEPT_S
        self._away.append(waiter)
        asyncio.get_running_loop().call_later(PLACE_KEPT_S, self.serve)

    def _give_up_places(self) -> None:
        now_s = self._clock.monotonic()
        while self._away and ((until_s := self._away[0].kept_until_s) is None or until_s <= now_s):
            waiter = self._away.popleft()
            if until_s is not None:  # else it came again
                self._queue.remove(waiter)

    def serve(self) -> None:
        """Give space to those whose turn it is, as long as there is some."""
        self._give_up_places()
        while (waiter := self._next()) is not None and waiter.kept_until_s is None:
            if waiter.future.done():  # its call was cancelled, and has not had its turn to leave
                self._queue.remove(waiter)
                continue
            try:
                made = self._budget.reserve(waiter.size, waiter.run)
            except CacheFull:
                break
            self._queue.served(waiter)
            waiter.future.set_result(made)
        self._count()

    async def _now(self, size: int, run: str) -> Reservation | None:
        try:
            return self._budget.reserve(size, run)
        except CacheFull:
            if self._budget.over_quota(run, size) or not await self._make_room(size):
                return None
        if len(self._queue):  # others have come while room was made
            return None
        try:
            return self._budget.reserve(size, run)
        except CacheFull:
            return None

    async def _wait(self, waiter: Waiter, began_s: float, wait_s: float) -> None:
        waited_s = 0.0
        while not waiter.future.done():
            if waited_s >= wait_s or len(self._queue) > WAITERS_MAX or not self._has_hope():
                raise self._budget.refusal(waiter.size, waiter.run, waited_s=waited_s)
            await self._pause(waiter, min(LOOK_AGAIN_S, wait_s - waited_s))
            if not waiter.future.done():
                await self._look_for_room()
            waited_s = self._clock.monotonic() - began_s

    async def _look_for_room(self) -> None:
        """For whose turn it is, whoever of those that wait comes to look."""
        now_s = self._clock.monotonic()
        if now_s - self._looked_s < LOOKS_APART_S:
            return
        self._looked_s = now_s
        if (head := self._next()) is not None:
            await self._make_room(head.size)
            self.serve()

    async def _pause(self, waiter: Waiter, pause_s: float) -> None:
        sleeping: asyncio.Future[Any] = asyncio.ensure_future(self._clock.sleep(pause_s))
        try:
            watched: set[asyncio.Future[Any]] = {sleeping, waiter.future}
            await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        finally:
            sleeping.cancel()

    def _next(self) -> Waiter | None:
        return self._queue.next(lambda waiter: not self._budget.over_quota(waiter.run, waiter.size))

    def _count(self) -> None:
        self._budget.waiting, self._budget.waiting_bytes = len(self._queue), self._queue.size
