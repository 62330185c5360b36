"""What every path stands on: the node's parts in one record, and the hints that wake whoever waits.

Owns nothing but the wiring's shape; build.py fills it. Events are hints only: whoever waits looks into the catalog again.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from forebay_gateway.admission.budget import Budget
from forebay_gateway.base.clock import Clock
from forebay_gateway.base.recent import Recent
from forebay_gateway.cache.io import IoPool
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.catalog import Catalog
from forebay_gateway.core.config_sections import Config, PolicyConfig, TierConfig
from forebay_gateway.core.errors import DiskFailed, DiskFull, InvalidArgument
from forebay_gateway.core.policy import policy_of
from forebay_gateway.core.records import Origin, SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyState
from forebay_gateway.movers.pool import Movers
from forebay_gateway.paths.marks import MarkKeeper
from forebay_gateway.tiers.monitor import MonitoredTier

MEND_HINTS_MAX = 4096
SESSIONS_REMEMBERED_MAX = 65536
ASIDE_BYTES_MIN = 128 << 10  # of JSON: a few milliseconds
SHARD_BYTES = 150  # a shard's share in a document, about
FILES = ""  # in the place of a tier's name: the cache, for part files

T = TypeVar("T")


class Changes:
    """Something about checkpoints changed: wakes waiters and workers."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        self._session_listeners: list[Callable[[int], None]] = []

    def listen(self, listener: Callable[[], None]) -> None:
        """Call `listener` at every change."""
        self._listeners.append(listener)

    def listen_sessions(self, listener: Callable[[int], None]) -> None:
        """Call `listener` with each session of which something is told."""
        self._session_listeners.append(listener)

    def tell(self, session_id: int | None = None) -> None:
        """Wake everybody. With a session, those who look at sessions one by one need to look at no other."""
        if session_id is not None:
            for each in self._session_listeners:
                each(session_id)
        self._event.set()
        self._event = asyncio.Event()
        for listener in self._listeners:
            listener()

    async def wait(self, timeout_s: float) -> None:
        """Until the next change, or `timeout_s` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._event.wait(), timeout_s)


@dataclass
class Node:
    """This gateway's parts."""

    id: str
    config: Config
    clock: Clock
    catalog: Catalog
    cache: CacheDir
    io: IoPool
    budget: Budget
    tiers: dict[str, MonitoredTier]  # in the order of the configuration: nearest first
    movers: Movers
    marks: MarkKeeper
    clean_mark: str = ""  # what the process before this one left at its orderly stop, see handover.py
    changes: Changes = field(default_factory=Changes)
    # session: monotonic, in this process. One that is forgotten counts from when it is seen again.
    first_seen_s: Recent[int, float] = field(default_factory=lambda: Recent(SESSIONS_REMEMBERED_MAX))
    read_s: Recent[int, float] = field(
        default_factory=lambda: Recent(SESSIONS_REMEMBERED_MAX)
    )  # session: monotonic, last asked
    # session: its manifest is on none of the tiers that had it, by the last look there, see find.py
    gone: Recent[int, None] = field(default_factory=lambda: Recent(SESSIONS_REMEMBERED_MAX))
    # session: tiers on which the node of its writer 0 leaves nothing of the run out, as that has said.
    unruled: Recent[int, frozenset[str]] = field(default_factory=lambda: Recent(SESSIONS_REMEMBERED_MAX))
    alarms: dict[str, tuple[str, str]] = field(default_factory=dict)  # key: (what, what to do)
    # (tier or FILES, session): how many are writing its documents there; a deletion waits for them
    publishing: Counter[tuple[str, int]] = field(default_factory=Counter)
    releasing: set[tuple[ShardKey, str]] = field(default_factory=set)  # (shard, tier) whose bad copy is being deleted there
    on_complete: list[Callable[[str, str, int], None]] = field(default_factory=list)  # told (tier, run, step) at each manifest
    aside_turn: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(1))
    resting: dict[str, Callable[[int], bool]] = field(default_factory=dict)  # tier: whether a part waits by rule, see order.py
    preemptions: int = 0  # under way: all that can wait waits for them
    passing: set[str] = field(default_factory=set)  # temporary files and uploads of shards that go through, see through.py
    left_behind: Callable[[], None] = lambda: None  # something landed on a tier, and no row stands for it any more
    on_disk_return: list[Callable[[], None]] = field(default_factory=list)  # told when the cache's disk takes writes again
    to_mend: dict[ShardKey, None] = field(default_factory=dict)  # seen to lack a good copy somewhere, in the order seen

    @contextlib.contextmanager
    def publishes(self, where: str, session_id: int) -> Iterator[None]:
        """Meanwhile no deletion of the session takes what is at `where`, a tier or FILES. Enter it without an await behind the
        look that says that it is not going: a deletion marks it first."""
        self.publishing[where, session_id] += 1
        try:
            yield
        finally:
            self.publishing[where, session_id] -= 1
            if not self.publishing[where, session_id]:
                del self.publishing[where, session_id]

    async def aside(self, size: int, act: Callable[[], T]) -> T:
        """What `act` gives. Where it has much to do, measured by the `size` in bytes of the document that it reads or makes, it
        runs on a thread, one at a time: the event loop has to answer others meanwhile."""
        if size < ASIDE_BYTES_MIN:
            return act()
        async with self.aside_turn:
            return await asyncio.to_thread(act)

    @property
    def rebuilt(self) -> bool:
        """Whether this process has made the catalog anew."""
        return "catalog-rebuilt" in self.alarms

    @property
    def tier_names(self) -> tuple[str, ...]:
        """Of all configured tiers."""
        return tuple(self.tiers)

    @property
    def required_tiers(self) -> tuple[str, ...]:
        """A shard is safe to evict once all of these hold it."""
        return tuple(name for name, tier in self.tiers.items() if tier.required)

    def policy(self, run: str) -> PolicyConfig:
        """What holds for the run now."""
        return policy_of(run, self.config.policies)

    def only_tiers(self, run: str) -> tuple[str, ...] | None:
        """What the run's policy restricts its checkpoints to: None for all tiers, empty for the cache alone."""
        policy = self.policy(run)
        if policy.transient:
            return ()
        return None if policy.tiers is None else tuple(name for name in self.tiers if name in policy.tiers)

    def restriction_of(self, session: SessionRow) -> tuple[str, ...] | None:
        """The same of one session: what held at its first commit, whatever the policy says since. What was found on a tier is
        restricted by nothing."""
        return self.only_tiers(session.run) if is_undecided(session) else session.tiers

    def level_of(self, row: ShardRow) -> str:
        """Where a shard is that was acknowledged: the cache, else the nearest tier with a proved copy."""
        if row.is_cached:
            return "cache"
        with self.catalog.read() as txn:
            copies = txn.copies(row.key)
        on = (name for name in self.tiers if name in copies and copies[name].state is CopyState.VERIFIED)
        return next(on, "cache")

    def usable_tiers(self) -> list[MonitoredTier]:
        """Those that may be asked now, nearest first."""
        return [tier for tier in self.tiers.values() if tier.usable]

    async def tiers_looked_at(self, timeout_s: float) -> None:
        """Until each tier was looked at once since the start, or the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                for tier in self.tiers.values():
                    await tier.looked_at.wait()

    def unreachable_tiers(self) -> list[MonitoredTier]:
        """Those that may hold things we cannot see now."""
        return [tier for tier in self.tiers.values() if not tier.usable]

    def ask_mend(self, key: ShardKey) -> None:
        """A hint to care/mend: this shard is bad, or not here and wanted by a queue. Dropped when many wait: who needs it
        asks again."""
        if len(self.to_mend) < MEND_HINTS_MAX:
            self.to_mend[key] = None

    @contextlib.contextmanager
    def disk_refusals_shown(self) -> Iterator[None]:
        """What the disk refuses inside shows in status too, not only to the caller."""
        try:
            yield
        except DiskFull as error:
            self.budget.disk_full(str(error))
            raise
        except DiskFailed as error:
            if not self.budget.disk.reason:  # else it is the refusal itself
                self.budget.disk.failed(error.sentence)
            raise

    def tier_config(self, name: str) -> TierConfig:
        """What holds for the tier now: some of it may change while the gateway serves, see reload.py."""
        return next(config for config in self.config.tiers if config.name == name)

    def tier(self, name: str) -> MonitoredTier:
        """By name; raises InvalidArgument that lists the names."""
        try:
            return self.tiers[name]
        except KeyError:
            known = ", ".join(self.tiers) or "none"
            raise InvalidArgument(f"no tier is named {name!r}; configured: {known}") from None


def is_undecided(session: SessionRow) -> bool:
    """Whether its first commit will say to which tiers it goes. What was found on a tier is restricted by nothing."""
    return not session.commit_seq and session.origin is not Origin.TIER
