"""How many uploads, or ranges of a download, at a time: more while the object store keeps up, half when it does not (AIMD).

Owns the number and the waiting. Does not own what counts as "does not keep up": the caller says so by Unavailable.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from forebay_gateway.base.clock import Clock
from forebay_gateway.core.errors import Unavailable
from forebay_gateway.tiers.base import StorageFull

# Failures of requests that were under way together count once.
_HALVE_PAUSE_S = 1.0
# An act this many times slower than usual is a sign of overload before errors come.
_SLOW_FACTOR = 4.0


class AdaptiveLimit:
    """Between 1 and `most` slots; begins at `most`, since a job rather meets a quiet store than a busy one.

    Uploads wait for slots. Who reads looks at their number before he begins a further range, and says how each ended.
    """

    def __init__(self, most: int, clock: Clock) -> None:
        self._most = most
        self._clock = clock
        self._limit = float(most)
        self._busy = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._halved_s = -_HALVE_PAUSE_S
        self._usual_s: float | None = None

    @property
    def slots(self) -> int:
        """Allowed at a time now."""
        return max(1, int(self._limit))

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[None]:
        """One upload; its outcome moves the limit."""
        await self._enter()
        start_s = self._clock.monotonic()
        try:
            yield
            self._succeeded(self._clock.monotonic() - start_s)
        except Unavailable as error:
            self.failed(error)
            raise
        finally:
            self._busy -= 1
            self._wake()

    def failed(self, error: Unavailable) -> None:
        """The store did not keep up, unless it is only full."""
        if not isinstance(error, StorageFull):
            self._halve()

    def kept_up(self) -> None:
        """It did: a slot more for every so many acts as there are slots."""
        self._limit = min(float(self._most), self._limit + 1.0 / self._limit)

    async def _enter(self) -> None:
        while self._busy >= self.slots:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            except asyncio.CancelledError:
                if waiter in self._waiting:
                    self._waiting.remove(waiter)
                self._wake()  # the turn may have come already: hand it on
                raise
        self._busy += 1

    def _wake(self) -> None:
        free = self.slots - self._busy
        while free > 0 and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                free -= 1

    def _succeeded(self, taken_s: float) -> None:
        usual_s = taken_s if self._usual_s is None else self._usual_s
        self._usual_s = usual_s + 0.1 * (taken_s - usual_s)
        if taken_s > _SLOW_FACTOR * usual_s and taken_s > 1.0:
            self._halve()
        else:
            self.kept_up()

    def _halve(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._halved_s >= _HALVE_PAUSE_S:
            self._halved_s = now_s
            self._limit = max(1.0, self._limit / 2)
