"""How slowly writers go between the soft and the hard watermark: seconds a byte, and the sleep that makes it so.

Owns the curve, and how writers share its pace. Does not own what the bytes are (budget.py), nor who sleeps (paths/).

The curve is the ZFS write throttle's, `delay = scale * (dirty - min) / (max - dirty)`
(https://openzfs.github.io/openzfs-docs/Performance%20and%20Tuning/ZFS%20Transaction%20Delay.html): nothing at `min`, without
bound at `max`, and `scale` in the middle. With the time that the drain takes for a byte as the scale, writers bring as much as
drains half way between the watermarks, more before and less after it; so the fill settles where both are equal.

Three bounds, each against what has gone wrong elsewhere (openzfs PR#12868, #13289): the drain's rate is smoothed, so that no
burst makes it swing; no sleep is longer than its cap, and none is carried over; the clock is the monotonic one.
"""

from collections.abc import Callable

from forebay_gateway.base.clock import Clock

ASSUMED_DRAIN_BYTES_PER_S = (
    64 << 20
)  # while the drain shows less: a figure of 0 would stop writers at the soft watermark already
SLOWEST_BYTES_PER_S = 4 << 20  # at the hard watermark, for all writers together; beyond it it is `refuse` that stops them
CHUNK_SLEEP_S_MAX = 1.0  # below the shortest `stream_timeout`, and what a drain's recovery may go unnoticed
ACTIVE_S = 1.0  # a run that sent nothing for that long has no share of the pace
GRANT_SLEEP_S_MAX = 5.0  # of a lease, or of a request with many small shards: more bytes at once than a chunk


def pace_s(waiting: float, soft: float, hard: float, drain_bytes_per_s: float) -> float:
    """Seconds that each byte should take with `waiting` bytes between the watermarks `soft` and `hard`; 0 below `soft`."""
    slowest_s = 1.0 / SLOWEST_BYTES_PER_S
    if waiting <= soft:
        return 0.0
    if waiting >= hard:
        return slowest_s
    scale_s = 1.0 / max(drain_bytes_per_s, ASSUMED_DRAIN_BYTES_PER_S)
    return min(slowest_s, scale_s * (waiting - soft) / (hard - waiting))


class Throttle:
    """One pace for all writers, in equal shares for the runs that send.

    Within a run each begins where the one before it ends, so that many writers are no faster than one. A run's share does not
    grow where another leaves some of its own: then the fill falls, and with it the pace.
    """

    def __init__(self, clock: Clock, pace: Callable[[], float]) -> None:
        self._clock = clock
        self._pace = pace
        self._free_s: dict[str, float] = {}  # by run: when those of it that sleep now have had their time

    async def slow(self, size: int, run: str, sleep_s_max: float) -> None:
        """Sleep for `size` bytes of a run, at most `sleep_s_max`; not at all while there is no pressure."""
        if not (pace := self._pace()):
            return
        now_s = self._clock.monotonic()
        for other in [other for other, free_s in self._free_s.items() if free_s < now_s - ACTIVE_S]:
            del self._free_s[other]
        begin_s = max(now_s, self._free_s.setdefault(run, now_s))
        # What the cap cuts off is forgotten, not owed: debts would add up to a sleep that no drain's recovery ends.
        end_s = min(begin_s + size * pace * len(self._free_s), now_s + sleep_s_max)
        self._free_s[run] = end_s
        await self._clock.sleep(end_s - now_s)
