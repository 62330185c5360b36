"""The cache's bytes: used, reserved, and whether new shards are taken.

Owns the arithmetic and the watermarks: what counts for the slowing of writers above `soft` (the curve is curve.py's), and that
between `refuse` and `reopen` nothing changes, so that a bursty drain does not make it flap. Does not own the disk, nor what may
be evicted: the caller makes room and asks again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from forebay_gateway.admission.curve import pace_s
from forebay_gateway.admission.disk import DiskHealth
from forebay_gateway.admission.quota import Quotas
from forebay_gateway.core.errors import CacheFull, InvalidArgument
from forebay_gateway.core.quantities import size_text

RETRY_S_MIN, RETRY_S_MAX = 0.25, 30.0


@dataclass(frozen=True, slots=True)
class Pressure:
    """How full, in one word and one clause."""

    level: str  # "ok", "soft", "hard", "refusing"
    reason: str
    fill: float
    retry_after_s: float | None
    writers_bytes_per_s: float | None = None  # to which all writers together are slowed; None: they are not
    through: str = ""  # the tier that new shards go through to, since the cache's disk fails


class Reservation:
    """Bytes promised to one stream of a run. Ends by settle() or release(); both are idempotent together."""

    def __init__(self, budget: "Budget", size: int, run: str) -> None:
        self._budget = budget
        self.run = run
        self._unwritten = 0
        self.size = size

    def grow(self, size: int) -> None:
        """Reserve more, for a stream whose length is not known; raises CacheFull."""
        self._budget._take(size, self.run, is_new=False)
        self.size += size

    def beside(self, size: int) -> "Reservation":
        """Space for a second file of the same shard, whose first one goes then: nothing more of its run's. Raises CacheFull."""
        self._budget._take(size, "", is_new=False)
        return Reservation(self._budget, size, "")

    def check_grows(self, size: int) -> None:
        """Raise InvalidArgument where no waiting would make room for so much more."""
        self._budget.check_fits(self.size + size, self.run)

    def unwritten(self, size: int) -> None:
        """So many of these bytes the disk has not given yet: they are in what it calls free."""
        self._budget.unwritten += size - self._unwritten
        self._unwritten = size

    def settle(self, disk_size: int) -> None:
        """The bytes are a file now."""
        self._budget._used += disk_size
        self.release()

    def release(self) -> None:
        """Nothing came of it."""
        size, self.size = self.size, 0
        self.unwritten(0)
        if size:
            self._budget._give_back(size, self.run)


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
        dirty: Callable[[], int] = lambda: 0,
        quotas: Quotas | None = None,
        max_dirty_age_s: float = 0.0,
    ) -> None:
        """`dirty` gives the bytes of sealed files that some required tier lacks; the catalog's own sum, exact and cheap."""
        self.capacity = capacity
        self._soft, self._hard, self._refuse, self._reopen = soft, hard, refuse, reopen
        self._used = used
        self._reserved = 0
        self._refusing = False
        self.disk = DiskHealth()
        self.disk_reason = ""
        self.disk_needs = 0
        self.disk_refusals = 0
        self._drain_rate = drain_rate
        self._dirty = dirty
        self.quotas = quotas or Quotas(lambda run: None)
        self.max_dirty_age_s = max_dirty_age_s
        self.dirty_age_s = 0.0  # of the oldest shard that some required tier lacks
        self.unwritten = 0  # bytes promised that the disk still calls free
        self.waiting = self.waiting_bytes = 0  # requests in the queue
        self.on_room: Callable[[], None] = lambda: None
        self.through: Callable[[], str] = lambda: ""  # the tier that can take shards in the cache's place now

    @property
    def used(self) -> int:
        """Bytes of sealed cache files."""
        return self._used

    @property
    def reserved(self) -> int:
        """Bytes promised to streams under way."""
        return self._reserved

    @property
    def limit(self) -> int:
        """Bytes that all shards together may come to before new ones are refused."""
        return int(self.capacity * self._refuse)

    @property
    def fill(self) -> float:
        """Used and reserved, of capacity."""
        return (self._used + self._reserved) / self.capacity

    @property
    def dirty(self) -> int:
        """Bytes that some required tier lacks and is to get."""
        return self._dirty()

    @property
    def too_old(self) -> bool:
        """Whether something waits for longer than `max_dirty_age`."""
        return 0 < self.max_dirty_age_s <= self.dirty_age_s

    def reserve(self, size: int, run: str = "") -> Reservation:
        """Promise `size` bytes, or raise CacheFull with a retry time; InvalidArgument if they could never fit. Without a run
        they count against no quota."""
        self.check_fits(size, run)
        self._take(size, run)
        return Reservation(self, size, run)

    def check_fits(self, size: int, run: str = "") -> None:
        """Raise InvalidArgument for what no waiting would make room for."""
        self.quotas.check_fits(run, size)
        if size > self.limit:
            raise InvalidArgument(
                "the shard does not fit into this cache", needs_bytes=size, capacity_bytes=self.capacity, refuse=self._refuse
            )

    def over_quota(self, run: str, size: int) -> int:
        """By how many bytes `size` more would be too many for the run; 0 where they may come."""
        return self.quotas.over(run, size)

    def freed(self, disk_size: int) -> None:
        """A cache file is gone."""
        self._used -= disk_size
        self._look_again()
        self.on_room()

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

    def pace_s(self) -> float:
        """Seconds that writers should take for each byte now; 0 below the soft watermark, without a look-up.

        What counts is what is not safe elsewhere yet: dirty bytes, and those on their way. Verified ones can be evicted at once
        and are no reason to slow anybody.
        """
        held = self._used + self._reserved
        if held <= self.capacity * self._soft and not self.too_old:
            return 0.0
        hard = self.capacity * self._hard
        if self.too_old:
            return pace_s(hard, 0, hard, 0.0)
        # Between the catalog's commit and settle() a shard is in both sums.
        unsafe = min(held, self._dirty() + self._reserved)
        return pace_s(unsafe, self.capacity * self._soft, hard, self._drain_rate())

    def pressure(self) -> Pressure:
        """For acks and status."""
        self._look_again()
        fill = self.fill
        pace = self.pace_s()
        writers = 1.0 / pace if pace else None
        slowed = "; writers are slowed until more of it is safe on its tiers" if pace else ""
        reason = f"cache {fill:.0%} full"
        if self.disk.reason and (tier := self.through()):
            reason = f"write-through to {tier}: {self.disk.reason}"
            return Pressure("hard", reason, fill, None, writers, tier)
        if self.disk.reason or self.disk_reason:
            return Pressure("refusing", self.disk.reason or self.disk_reason, fill, self._retry_after_s(0), writers)
        if self._refusing:
            reason = f"{reason}; taking shards again below {self._reopen:.0%}"
            return Pressure("refusing", reason, fill, self._retry_after_s(0), writers)
        if self.too_old:
            age = f"the oldest shard has waited {self.dirty_age_s:.0f} s for a tier"
            limit = f"max_dirty_age is {self.max_dirty_age_s:.0f} s: writers are slowed as at the hard watermark"
            return Pressure("hard", f"{age}, {limit}", fill, None, writers)
        level = "hard" if fill >= self._hard else "soft" if fill >= self._soft else "ok"
        return Pressure(level, reason + slowed, fill, None, writers)

    def refusal(self, size: int, run: str = "", *, waited_s: float = 0.0) -> CacheFull:
        """Why `size` bytes are not taken now, and when to come again."""
        if over := self.over_quota(run, size):
            error = CacheFull(
                f"run {run!r} holds all of its quota of the cache; what it holds must drain first",
                retry_after_s=self._drained_in_s(over),
                held_bytes=self.quotas.held(run),
                needs_bytes=size,
            )
        else:
            error = CacheFull(
                "the cache takes no new shard now; what it holds must drain first",
                retry_after_s=self._retry_after_s(size),
                fill=f"{self.fill:.2f}",
                needs_bytes=size,
            )
        error.waited_s = waited_s
        return error

    def _look_again(self) -> None:
        if self._refusing and self.fill < self._reopen:
            self._refusing = False

    def _take(self, size: int, run: str, *, is_new: bool = True) -> None:
        """What was let in before goes on up to `refuse`: cut off between the marks, it would have to come again as a whole."""
        if self.over_quota(run, size):
            raise self.refusal(size, run)
        self._look_again()
        if (self._refusing and is_new) or self._used + self._reserved + size > self.capacity * self._refuse:
            self._refusing = True
            raise self.refusal(size, run)
        self._reserved += size
        self.quotas.reserve(run, size)

    def _give_back(self, size: int, run: str) -> None:
        self._reserved -= size
        self.quotas.reserve(run, -size)
        self.on_room()

    def _retry_after_s(self, size: int) -> float:
        """When enough should have drained for those who wait already, and for this."""
        over = self._used + self._reserved + self.waiting_bytes + size - self.capacity * self._reopen
        return self._drained_in_s(over)

    def _drained_in_s(self, size: float) -> float:
        """From the measured rate; a short guess while nothing has drained yet."""
        rate = self._drain_rate()
        estimate = size / rate if rate > 0 else 1.0
        return min(RETRY_S_MAX, max(RETRY_S_MIN, estimate))


def disk_full_reason(free: int, reserve: int) -> str:
    """What people are told."""
    return f"the cache's disk is full: {size_text(free)} are free, {size_text(reserve)} are kept for the catalog"
