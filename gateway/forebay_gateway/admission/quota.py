"""What each run holds of the cache while it waits for a tier, against its `[[policy]] quota`.

Owns the sums: bytes reserved and not yet verified where they must be, by run. Does not own who tells (paths/admit.py: the
catalog's own changes), nor the space of all runs together (budget.py). Runs without a quota are counted too: they may be given
one at any time.
"""

from collections import Counter
from collections.abc import Callable

from forebay_gateway.core.errors import InvalidArgument


class Quotas:
    """All runs. `limit_of` gives a run's quota in bytes, or None."""

    def __init__(self, limit_of: Callable[[str], int | None]) -> None:
        self.limit_of = limit_of
        self._reserved: Counter[str] = Counter()
        self._dirty: Counter[str] = Counter()
        self._sessions: dict[int, tuple[str, int]] = {}  # those with dirty bytes: their run, and how many

    def check_fits(self, run: str, size: int) -> None:
        """Raise InvalidArgument for what the quota never has room for."""
        limit = self._limit(run)
        if limit is not None and size > limit:
            raise InvalidArgument("the shard is larger than its run's quota", run=run, needs_bytes=size, quota_bytes=limit)

    def _limit(self, run: str) -> int | None:
        return self.limit_of(run) if run else None  # without a run: no save, and no glob's business

    def held(self, run: str) -> int:
        """Bytes that count now."""
        return self._reserved[run] + self._dirty[run]

    def over(self, run: str, size: int) -> int:
        """By how many bytes `size` more would be too many; 0 where they may come."""
        limit = self._limit(run)
        return 0 if limit is None else max(0, self.held(run) + size - limit)

    def reserve(self, run: str, size: int) -> None:
        """Count what was promised; a negative size gives it back."""
        _add(self._reserved, run, size)

    def run_of(self, session_id: int) -> str | None:
        """The run of a session that has dirty bytes."""
        known = self._sessions.get(session_id)
        return None if known is None else known[0]

    def moved(self, session_id: int, run: str, delta: int) -> None:
        """So many bytes more of the session's are sealed and wait for a tier; fewer where `delta` is negative."""
        _, before = self._sessions.get(session_id, (run, 0))
        after = max(0, before + delta)
        if after:
            self._sessions[session_id] = (run, after)
        else:
            self._sessions.pop(session_id, None)
        _add(self._dirty, run, after - before)


def _add(sums: Counter[str], run: str, delta: int) -> None:
    sums[run] += delta
    if not sums[run]:
        del sums[run]
