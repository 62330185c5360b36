"""Does the cache's disk still take what is written: a switch that opens after failures in a row and closes at a success.

Owns the count. Does not own the disk, nor who tries it again (paths/health.py). A full disk is none of its business: it works.
"""

FAILURES_IN_A_ROW = 3  # of different shards; one bad moment, or one bad sector, is not the disk


class DiskHealth:
    """The disk of the cache. `reason` is empty while it is taken for sound."""

    def __init__(self) -> None:
        self._failures = 0
        self.reason = ""

    def failed(self, reason: str) -> None:
        """A write or an fsync failed; not for want of space."""
        self._failures += 1
        if self._failures >= FAILURES_IN_A_ROW:
            self.reason = f"the cache's disk fails: {reason}"

    def worked(self) -> None:
        """Something was written and synced."""
        self._failures = 0
        self.reason = ""
