"""When to save: often enough for how often jobs fail, no more often than storage carries, within bounds that the user sets.

Owns the decision. Does not own saving, nor asking the gateway (Client.pressure()).
"""

import time
from collections.abc import Callable

from forebay.plan.interval import daly_s
from forebay.types import Pressure

SMOOTHING = 0.3  # the share of a new measurement
STRAINED = ("hard", "refusing")


class AdaptiveInterval:
    """Says when the next save is due.

    The interval is the longest of three, within `min_s` and `max_s`:

    - what failures ask for: J. T. Daly's estimate of the optimum (Future Generation Computer Systems 22(3), 2006), which
      refines J. W. Young's sqrt(2 C M) (Communications of the ACM 17(9), 1974), from the measured cost C of a save and the
      job's mean time between failures M, `mtbf_s`. Without `mtbf_s`: saves take at most the share `overhead` of the time;
    - what the drain carries: the size of a save over the rate of the slowest tier, which is then busy for the share `headroom`.
      A tier's rate counts while something waits for it: an idle drain shows none;
    - while the cache is above its hard watermark, or refuses: twice as long with each observation, until it is not.

    All ranks of a job have to decide alike: ask on one, and broadcast the answer. Times are seconds of `clock`, a monotonic
    one.

        when = forebay.AdaptiveInterval(min_s=60, max_s=3600, mtbf_s=6 * 3600)
        for step, batch in enumerate(batches):
            train(batch)
            if when.due():
                began_s = time.monotonic()
                size = save(step)  # the bytes that this node saved
                when.saved(time.monotonic() - began_s, size)
                when.observe(client.pressure())
    """

    def __init__(
        self,
        *,
        min_s: float = 60.0,
        max_s: float = 3600.0,
        mtbf_s: float | None = None,
        headroom: float = 0.8,
        overhead: float = 0.05,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ValueError for bounds that make no sense."""
        if not 0 < min_s <= max_s < float("inf"):
            raise ValueError(f"bounds must be 0 < min_s <= max_s, not min_s={min_s} max_s={max_s}")
        if mtbf_s is not None and not mtbf_s > 0:
            raise ValueError(f"mtbf_s must be above 0, or None where it is not known, not {mtbf_s}")
        if not 0 < headroom <= 1 or not 0 < overhead < 1:
            raise ValueError(f"headroom and overhead are shares of the time, not headroom={headroom} overhead={overhead}")
        self.min_s = min_s
        self.max_s = max_s
        self.mtbf_s = mtbf_s
        self._headroom = headroom
        self._overhead = overhead
        self._clock = clock
        self._last_s = clock()
        self._cost_s: float | None = None
        self._size: float | None = None
        self._rates: dict[str, float] = {}
        self._strain = 1.0

    def due(self, now: float | None = None) -> bool:
        """Whether to save now. The first is due one interval after this object was made."""
        return (self._clock() if now is None else now) - self._last_s >= self.interval_s

    def saved(self, cost_s: float, size: int, now: float | None = None) -> None:
        """A save has ended: it kept training for `cost_s` seconds, and this node saved `size` bytes. Raises ValueError."""
        if not cost_s >= 0 or size < 0:
            raise ValueError(f"a save costs at least 0 s and has at least 0 bytes, not cost_s={cost_s} size={size}")
        self._last_s = self._clock() if now is None else now
        self._cost_s = _smoothed(self._cost_s, cost_s)
        self._size = float(size)  # the newest: a model's state has one size

    def observe(self, pressure: Pressure) -> None:
        """What the gateway says: Client.last_pressure after a save, Client.pressure(), or a commit's receipt."""
        for tier in pressure.tiers:
            if tier.pending_bytes > 0 and tier.drain_bytes_per_s > 0:
                self._rates[tier.tier] = _smoothed(self._rates.get(tier.tier), tier.drain_bytes_per_s)
        self._strain = min(2 * self._strain, self.max_s / self.min_s) if pressure.level in STRAINED else 1.0

    @property
    def interval_s(self) -> float:
        """Seconds between the end of one save and the beginning of the next."""
        return self._decision()[0]

    @property
    def reason(self) -> str:
        """What set it: "failures", "cost" (no `mtbf_s`), "drain", "pressure", "min_s" or "max_s"."""
        return self._decision()[1]

    @property
    def sustainable_s(self) -> float | None:
        """The shortest interval that the drain carries, as far as was seen; None: nothing was."""
        if not self._rates or not self._size:
            return None
        return self._size / (self._headroom * min(self._rates.values()))

    def _decision(self) -> tuple[float, str]:
        wanted_s, reason = 0.0, "min_s"
        if self._cost_s is not None:
            if self.mtbf_s is not None:
                wanted_s, reason = daly_s(self._cost_s, self.mtbf_s), "failures"
            else:
                wanted_s, reason = self._cost_s * (1 - self._overhead) / self._overhead, "cost"
        if (carried_s := self.sustainable_s or 0.0) > wanted_s:
            wanted_s, reason = carried_s, "drain"
        if wanted_s < self.min_s:
            wanted_s, reason = self.min_s, "min_s"
        if self._strain > 1:
            wanted_s, reason = wanted_s * self._strain, "pressure"
        return (self.max_s, "max_s") if wanted_s > self.max_s else (wanted_s, reason)


def _smoothed(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)
