"""The cache's bytes: used, reserved, and whether new shards are taken.

Owns the arithmetic and the two thresholds `refuse` and `reopen`, between which nothing changes (so that a bursty drain does not
make it flap). Does not own the disk, nor what may be evicted: the caller makes room and asks again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from forebay_gateway.core.errors import CacheFull, InvalidArgument

RETRY_S_MIN, RETRY_S_MAX = 0.25, 30.0


@dataclass(frozen=True, slots=True)
class Pressure:
    """How full, in one word and one clause."""

    level: str  # "ok", "soft", "hard", "refusing"
    reason: str
    fill: float
    retry_after_s: float | None


class Reservation:
    """Bytes promised to one stream. Ends by settle() or release(); both are idempotent together."""

    def __init__(self, budget: "Budget", size: int) -> None:
        self._budget = budget
        self.size = size

    def grow(self, size: int) -> None:
        """Reserve more, for a stream whose length is not known; raises CacheFull."""
        self._budget._take(size)
        self.size += size

    def settle(self, disk_size: int) -> None:
        """The bytes are a file now."""
        size, self.size = self.size, 0
        self._budget._reserved -= size
        self._budget._used += disk_size

    def release(self) -> None:
        """Nothing came of it."""
        size, self.size = self.size, 0
        self._budget._reserved -= size


class Budget:
    """All of them. Used from the event loop only."""

    def __init__(
        self,
        capacity: int,
        *,
        soft: float,
        hard: float,
        refuse: float,
        reopen: float,
        used: int,
        drain_rate: Callable[[], float],
    ) -> None:
        self.capacity = capacity
        self._soft, self._hard, self._refuse, self._reopen = soft, hard, refuse, reopen
        self._used = used
        self._reserved = 0
        self._refusing = False
        self.disk_reason = ""
        self.disk_needs = 0
        self.disk_refusals = 0
        self._drain_rate = drain_rate

    @property
    def used(self) -> int:
        """Bytes of sealed cache files."""
        return self._used

    @property
    def reserved(self) -> int:
        """Bytes promised to streams under way."""
        return self._reserved

    @property
    def fill(self) -> float:
        """Used and reserved, of capacity."""
        return (self._used + self._reserved) / self.capacity

    def reserve(self, size: int) -> Reservation:
        """Promise `size` bytes, or raise CacheFull with a retry time; InvalidArgument if they could never fit."""
        self.check_fits(size)
        self._take(size)
        return Reservation(self, size)

    def check_fits(self, size: int) -> None:
        """Raise InvalidArgument for what no waiting would make room for."""
        if size > self.capacity * self._refuse:
            raise InvalidArgument(
                "the shard does not fit into this cache", needs_bytes=size, capacity_bytes=self.capacity, refuse=self._refuse
            )

    def freed(self, disk_size: int) -> None:
        """A cache file is gone."""
        self._used -= disk_size
        self._look_again()

    def adopted(self, disk_size: int) -> None:
        """Recovery found a file that was not counted."""
        self._used += disk_size

    def missing_bytes(self, size: int) -> int:
        """How much must go before `size` bytes are taken: down to `reopen` while refusing, else to `refuse`."""
        limit = self._reopen if self._refusing else self._refuse
        return max(0, int(self._used + self._reserved + size - self.capacity * limit))

    def above_soft_bytes(self) -> int:
        """How much lies above the soft watermark."""
        return max(0, int(self._used + self._reserved - self.capacity * self._soft))

    def disk_full(self, reason: str, needs_bytes: int = 0) -> None:
        """The disk itself refused, and `needs_bytes` free would do (0: it did not say); shown until disk_usable()."""
        self.disk_reason, self.disk_needs = reason, needs_bytes
        self.disk_refusals += 1

    def disk_usable(self) -> None:
        """It has space again."""
        self.disk_reason, self.disk_needs = "", 0

    def pressure(self) -> Pressure:
        """For acks and status."""
        self._look_again()
        fill = self.fill
        percent = f"cache {fill:.0%} full"
        if self.disk_reason:
            return Pressure("refusing", self.disk_reason, fill, self._retry_after_s(0))
        if self._refusing:
            reason = f"{percent}; taking shards again below {self._reopen:.0%}"
            return Pressure("refusing", reason, fill, self._retry_after_s(0))
        if fill >= self._hard:
            return Pressure("hard", percent, fill, None)
        if fill >= self._soft:
            return Pressure("soft", percent, fill, None)
        return Pressure("ok", percent, fill, None)

    def _look_again(self) -> None:
        if self._refusing and self.fill < self._reopen:
            self._refusing = False

    def _take(self, size: int) -> None:
        self._look_again()
        if self._refusing or self._used + self._reserved + size > self.capacity * self._refuse:
            self._refusing = True
            raise CacheFull(
                "the cache takes no new shard now; what it holds must drain first",
                retry_after_s=self._retry_after_s(size),
                fill=f"{self.fill:.2f}",
                needs_bytes=size,
            )
        self._reserved += size

    def _retry_after_s(self, size: int) -> float:
        """When enough should have drained, from the measured rate; a short guess while nothing has drained yet."""
        rate = self._drain_rate()
        over = self._used + self._reserved + size - self.capacity * self._reopen
        estimate = over / rate if rate > 0 else 1.0
        return min(RETRY_S_MAX, max(RETRY_S_MIN, estimate))


def disk_full_reason(free: int, reserve: int) -> str:
    """What people are told."""
    return f"the cache's disk is full: {free} bytes are free, {reserve} are kept for the catalog"
