"""Measurements of this process: how late the event loop runs, and how fast bytes flow.

Owns the arithmetic. Does not own what is measured or where figures are shown.
"""

import math
from collections import deque

from forebay_gateway.base.clock import Clock

__all__ = ["LoopLag", "Rate"]


class LoopLag:
    """How much later than asked the loop wakes a sleeper: samples of the last `window_s` seconds.

    Run `run()` as a background task. Bounded: at most window_s / interval_s samples are kept.
    """

    def __init__(self, clock: Clock, *, interval_s: float = 0.1, window_s: float = 60.0) -> None:
        self._clock = clock
        self._interval_s = interval_s
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque(maxlen=math.ceil(window_s / interval_s))

    async def run(self) -> None:
        """Sample until cancelled."""
        while True:
            before_s = self._clock.monotonic()
            await self._clock.sleep(self._interval_s)
            self.add(self._clock.monotonic() - before_s - self._interval_s)

    def add(self, lag_s: float) -> None:
        """Take a sample now."""
        self._samples.append((self._clock.monotonic(), max(0.0, lag_s)))

    def quantile_s(self, fraction: float) -> float:
        """The nearest-rank quantile of the window's samples in seconds; 0 while there are none."""
        oldest_s = self._clock.monotonic() - self._window_s
        lags_s = sorted(lag_s for at_s, lag_s in self._samples if at_s >= oldest_s)
        return lags_s[max(0, math.ceil(fraction * len(lags_s)) - 1)] if lags_s else 0.0

    @property
    def p99_s(self) -> float:
        """99 of 100 wake-ups of the last minute were at most this late."""
        return self.quantile_s(0.99)


class Rate:
    """Bytes a second, exponentially smoothed over about `time_constant_s`, on the monotonic clock.

    A burst of n bytes adds n / time_constant_s, which then fades with that constant: the integral over time equals the bytes
    added. A bursty flow therefore shows its mean, and a flow that stops fades to nothing instead of keeping its last figure.
    """

    def __init__(self, clock: Clock, time_constant_s: float = 10.0) -> None:
        self._clock = clock
        self._time_constant_s = time_constant_s
        self._start_s: float | None = None
        self._last_s = 0.0
        self._per_s = 0.0
        self._moved_s = clock.monotonic()
        self._paused_s: float | None = None

    def pause(self) -> None:
        """There is nothing to move: the rate stays as it was last, instead of fading to what says nothing of the next work."""
        if self._paused_s is None:
            self._fade()
            self._paused_s = self._clock.monotonic()

    def resume(self) -> None:
        """Work begins."""
        if self._paused_s is not None:
            idle_s = self._clock.monotonic() - self._paused_s
            self._paused_s = None
            self._last_s += idle_s
            if self._start_s is not None:
                self._start_s += idle_s

    def add(self, size: int) -> None:
        """`size` bytes have just gone by; 0 for work that moves none."""
        self._fade()
        self._moved_s = self._clock.monotonic()
        self._per_s += size / self._time_constant_s

    @property
    def quiet_s(self) -> float:
        """Seconds since anything went by; since the start where nothing has."""
        return self._clock.monotonic() - self._moved_s

    @property
    def bytes_per_s(self) -> float:
        """The rate now; corrected for the time before the first byte, so that it is right from the first second on."""
        if self._start_s is None:
            return 0.0
        self._fade()
        # A mean over less than a second of life says nothing: count it as one second.
        age_s = max(1.0, self._last_s - self._start_s)
        return self._per_s / -math.expm1(-age_s / self._time_constant_s)

    def _fade(self) -> None:
        if self._paused_s is not None:
            return
        now_s = self._clock.monotonic()
        if self._start_s is None:
            self._start_s = self._last_s = now_s
        elapsed_s = now_s - self._last_s
        self._last_s = now_s
        self._per_s *= math.exp(-elapsed_s / self._time_constant_s)
        if self._per_s < 1.0:  # below one byte a second it is nothing, and must not linger as an endless tail
            self._per_s = 0.0
