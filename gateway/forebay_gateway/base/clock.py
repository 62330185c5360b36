"""Time, injected. The only module that may read the machine's clocks.

Order and durations come from `monotonic`; `wall` is for people's eyes and for signing requests, never for order.
"""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """What components take instead of the time module."""

    def monotonic(self) -> float:
        """Seconds from an arbitrary start, never going back."""

    def wall(self) -> float:
        """Seconds since the epoch, as this machine believes."""

    async def sleep(self, delay_s: float) -> None:
        """Let `delay_s` seconds pass."""


class SystemClock:
    """The machine's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s)


class FakeClock:
    """A clock that tests move by hand; sleepers wake in the order of their deadlines."""

    def __init__(self, start_s: float = 1000.0) -> None:
        self._now_s = start_s
        self._sleepers: list[tuple[float, int, asyncio.Future[None]]] = []
        self._count = 0

    def monotonic(self) -> float:
        return self._now_s

    def wall(self) -> float:
        return 1_700_000_000.0 + self._now_s

    async def sleep(self, delay_s: float) -> None:
        if delay_s <= 0:
            await asyncio.sleep(0)
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._count += 1
        self._sleepers.append((self._now_s + delay_s, self._count, future))
        await future

    async def advance(self, delta_s: float) -> None:
        """Move time on, waking sleepers one by one and letting each run."""
        end_s = self._now_s + delta_s
        while True:
            due = sorted(entry for entry in self._sleepers if entry[0] <= end_s)
            if not due:
                break
            entry = due[0]
            self._sleepers.remove(entry)
            self._now_s = max(self._now_s, entry[0])
            if not entry[2].done():
                entry[2].set_result(None)
            for _ in range(20):
                await asyncio.sleep(0)
        self._now_s = end_s
