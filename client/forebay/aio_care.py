"""AsyncCare: the verbs of Care, with await.

Owns nothing but the mapping; a report is fetched one at a time, and closing an iterator ends its command at the gateway.
"""

from collections.abc import AsyncGenerator, Callable, Generator, Iterator
from functools import partial
from typing import TypeVar, cast

from forebay import cancel
from forebay.care import Care
from forebay.threads import Threads
from forebay.types import CopyReport, Fate, Finding, Garbage, Moved, Quarantined, ScrubStatus

_Record = TypeVar("_Record")


class AsyncCare:
    """Of one gateway. Iterators end their command at the gateway when they are closed (contextlib.aclosing), or cancelled."""

    def __init__(self, care: Care, threads: Threads) -> None:
        self._care = care
        self._threads = threads

    def verify(self, run: str, step: int, source: str = "all") -> AsyncGenerator[CopyReport, None]:
        """As Care.verify."""
        return self._each(partial(self._care.verify, run, step, source))

    async def scrub(self, action: str = "status") -> ScrubStatus:
        """As Care.scrub."""
        return await self._threads.run(self._care.scrub, action)

    def fsck(self, *, deep: bool = False) -> AsyncGenerator[Finding, None]:
        """As Care.fsck."""
        return self._each(partial(self._care.fsck, deep=deep))

    def repair(self, *, apply: bool = False, deep: bool = False) -> AsyncGenerator[Finding, None]:
        """As Care.repair."""
        return self._each(partial(self._care.repair, apply=apply, deep=deep))

    def quarantine(self, id: str = "") -> AsyncGenerator[Quarantined, None]:
        """As Care.quarantine."""
        return self._each(partial(self._care.quarantine, id))

    async def release(self, id: str, *, force: bool = False, dry_run: bool = False) -> Quarantined:
        """As Care.release."""
        return await self._threads.run(self._care.release, id, force=force, dry_run=dry_run)

    def collect(self, *, apply: bool = False, older_than_s: float = 86400.0) -> AsyncGenerator[Garbage, None]:
        """As Care.collect."""
        return self._each(partial(self._care.collect, apply=apply, older_than_s=older_than_s))

    def retain(self, run: str = "", *, apply: bool = False) -> AsyncGenerator[Fate, None]:
        """As Care.retain."""
        return self._each(partial(self._care.retain, run, apply=apply))

    async def evict(self, run: str, step: int, *, dry_run: bool = False) -> Moved:
        """As Care.evict."""
        return await self._threads.run(self._care.evict, run, step, dry_run=dry_run)

    async def warm_up(self, run: str, step: int) -> Moved:
        """As Care.warm_up."""
        return await self._threads.run(self._care.warm_up, run, step)

    async def drain(self) -> int:
        """As Care.drain."""
        return await self._threads.run(self._care.drain)

    async def _each(self, begin: Callable[[], Iterator[_Record]]) -> AsyncGenerator[_Record, None]:
        scope = cancel.Scope()  # one for all records: the RPC outlives each single step
        records = cast("Generator[_Record, None, None]", begin())
        try:
            while (found := await self._threads.run_in(scope, partial(next, records, None))) is not None:
                yield found
        finally:
            records.close()  # ends its RPC
