"""How long and how often a failed attempt is repeated. Owns the pauses; who may repeat what is decided by the caller.

Delays grow exponentially with jitter, so that the ranks of a job do not return in step. A retry time that the gateway named is
honoured, but not where it has let the call wait in its queue already: coming late costs the turn there. Time spent on CacheFull
and on Unavailable is counted apart, each against its own limit, what was waited in the gateway included. Whoever waits for a
gateway that is away is told once, by the log.
"""

import logging
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from forebay import cancel
from forebay.errors import CacheFull, ForebayError, Unavailable

FIRST_DELAY_S = 0.1
DELAY_S_MAX = 5.0
TELL_AFTER_S = 2.0  # a gateway that restarts is back sooner, most times
TELL_AGAIN_S = 30.0

_log = logging.getLogger("forebay")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Seconds to wait for space (`admit_timeout_s`) and for a gateway that is away (`retry_timeout_s`); 0 means one attempt."""

    admit_timeout_s: float = 60.0
    retry_timeout_s: float = 60.0

    def begin(self) -> "Attempts":
        """Start counting for one operation."""
        return Attempts(self)


class _Teller:
    """Says that something is waited for: once for all the streams and threads that meet the same outage."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._told_s = float("-inf")

    def tell(self, now_s: float, line: str) -> None:
        """Log a line, unless one was logged within the last half minute."""
        with self._lock:
            if now_s - self._told_s < TELL_AGAIN_S:
                return
            self._told_s = now_s
        _log.warning("%s", line)


_teller = _Teller()


class Attempts:
    """The attempts of one operation. Not thread-safe."""

    def __init__(
        self,
        policy: RetryPolicy,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = cancel.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._policy = policy
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter
        self._since_s: dict[bool, float] = {}  # first failure, by whether it was CacheFull
        self._failures = 0

    @property
    def admit_left_s(self) -> float:
        """For how long the gateway may let the next attempt wait for space."""
        since_s = self._since_s.get(True)
        waited_s = 0.0 if since_s is None else self._clock() - since_s
        return max(0.0, self._policy.admit_timeout_s - waited_s)

    def progressed(self) -> None:
        """Something durable was reached since the last failure: the next failure starts a new count."""
        self._since_s.clear()
        self._failures = 0

    def pause(self, error: ForebayError) -> None:
        """Sleep before the next attempt. Raises `error` where it is no passing one, or its time is over."""
        if not isinstance(error, CacheFull | Unavailable):
            raise error
        full = isinstance(error, CacheFull)
        limit_s = self._policy.admit_timeout_s if full else self._policy.retry_timeout_s
        now_s = self._clock()
        waited_s = now_s - self._since_s.setdefault(full, now_s - _waited_s(error))
        self._failures += 1
        if waited_s >= limit_s:
            raise error.extended(f"waited_s={waited_s:.1f} attempts={self._failures}") if self._failures > 1 else error
        if not full and waited_s >= TELL_AFTER_S <= limit_s - waited_s:  # one that is about to end tells itself
            _teller.tell(now_s, f"trying again for up to {limit_s - waited_s:.0f} s more: {error.message}")
        self._sleep(min(self._delay_s(error), limit_s - waited_s))

    def _delay_s(self, error: ForebayError) -> float:
        growth = 2.0 ** min(self._failures - 1, 16)
        backoff_s = min(DELAY_S_MAX, FIRST_DELAY_S * growth) * (0.5 + 0.5 * self._jitter())
        if error.retry_after_s is None or _waited_s(error):
            return backoff_s
        return max(backoff_s, error.retry_after_s * (1 + 0.25 * self._jitter()))


def _waited_s(error: ForebayError) -> float:
    return error.waited_s if isinstance(error, CacheFull) else 0.0
