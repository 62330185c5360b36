"""Is a tier there, and what did it prove to do: one record a tier, fed by the probe and by every job's outcome.

Owns the tier's state as people see it. "away" only makes queues longer; it never means that something is absent.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from enum import StrEnum

from forebay_gateway.base.clock import Clock
from forebay_gateway.base.metrics import Rate
from forebay_gateway.core.errors import (
    AlreadyExists,
    Corrupt,
    Damaged,
    DiskFull,
    ForebayError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from forebay_gateway.tiers.base import Capabilities, StorageFull, Tier

log = logging.getLogger("forebay.tiers")

PROBE_PAUSE_S_MIN, PROBE_PAUSE_S_MAX = 0.5, 15.0
# What a tier answers about one key, document or request; a tier that answers is there. (A probe that ends so has failed all
# the same.)
OF_ONE_OBJECT = (AlreadyExists, Corrupt, InvalidArgument, NotFound, Unsupported)


class TierState(StrEnum):
    """What people see."""

    STARTING = "starting"
    OK = "ok"
    AWAY = "away"
    FULL = "full"
    DENIED = "denied"


class MonitoredTier:
    """A tier of the front, for control work (documents, heads, listings), and its health."""

    def __init__(self, tier: Tier, *, required: bool, clock: Clock) -> None:
        self.tier = tier
        self.name = tier.name
        self.required = required
        self.held = False
        self.state = TierState.STARTING
        self.reason = "not probed yet"
        self.rate = Rate(clock)
        self._pause_s = PROBE_PAUSE_S_MIN
        self.after_probe: Callable[[Capabilities], Awaitable[None]] | None = None
        self.looked_at = asyncio.Event()  # once, whatever came of it
        self._listeners: list[Callable[[], None]] = []
        self._failure_listeners: list[Callable[[], None]] = []

    @property
    def usable(self) -> bool:
        """Whether jobs may be given to it: it was proved, and was there when last heard of."""
        return self.state is TierState.OK and self.tier.capabilities is not None

    @property
    def takes_deletions(self) -> bool:
        """Whether something may be deleted there: also where it has no space, which is how it gets some."""
        return self.usable or (self.state is TierState.FULL and self.tier.capabilities is not None)

    @property
    def capabilities(self) -> Capabilities:
        """The proved record; raises Unavailable before the first successful probe."""
        if self.tier.capabilities is None:
            raise Unavailable("the tier has not been reached yet", tier=self.name, reason=self.reason)
        return self.tier.capabilities

    def on_return(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the tier becomes usable."""
        self._listeners.append(listener)

    def on_failure(self, listener: Callable[[], None]) -> None:
        """Call `listener` whenever the tier stops being usable."""
        self._failure_listeners.append(listener)

    async def step(self) -> float | None:
        """One look by the background worker: probe while it is not usable. Returns the pause in seconds."""
        if self.usable:
            return PROBE_PAUSE_S_MAX
        try:
            proved = await self.tier.probe()
            if not proved.conditional_create:
                raise Unavailable(
                    "the tier cannot create a document only where none is (conditional put, or a hard link), which a "
                    "checkpoint's completion needs; it is not used",
                    tier=self.name,
                )
            if self.after_probe is not None:
                await self.after_probe(proved)
        except ForebayError as error:
            self._is_not_there(error)
        else:
            self.worked()
            return PROBE_PAUSE_S_MAX
        finally:
            self.looked_at.set()
        pause_s, self._pause_s = self._pause_s, min(PROBE_PAUSE_S_MAX, self._pause_s * 2)
        return pause_s

    def worked(self) -> None:
        """Something succeeded on it."""
        was = self.state
        if self.tier.capabilities is None:
            return
        self.state, self.reason, self._pause_s = TierState.OK, "", PROBE_PAUSE_S_MIN
        if was is not TierState.OK:
            log.info("tier is there tier=%s", self.name)
            for listener in self._listeners:
                listener()

    def failed(self, error: BaseException) -> None:
        """Something failed on it. Errors that belong to one object alone, or to this node's disk, do not count against it.

        Damaged is raised again: who met it may not go on.
        """
        if isinstance(error, Damaged):
            raise error
        if not isinstance(error, (*OF_ONE_OBJECT, DiskFull)):
            self._is_not_there(error)

    def _is_not_there(self, error: BaseException) -> None:
        was = self.state
        if isinstance(error, StorageFull):
            self.state = TierState.FULL
        elif isinstance(error, PermissionDenied):
            self.state = TierState.DENIED
        else:
            self.state = TierState.AWAY
        self.reason = str(error)
        if was is TierState.OK:
            for listener in self._failure_listeners:
                listener()
        if was is not self.state:
            log.info("tier is %s tier=%s reason=%s", self.state.value, self.name, self.reason)
