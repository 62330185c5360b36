"""Before data flows: space for it, in its turn, and no faster than the tiers can follow.

    is the disk sound, has it room beside the catalog's reserve   -> else refused
    space by the budget; verified shards go where that makes room -> a reservation
    else a wait in the fair queue, as long as the drain moves     -> a reservation, or CacheFull with a time to come back
    above the soft watermark                                      -> each byte takes its time

Owns these acts' order. Does not own the arithmetic (admission/), nor what is written then.
"""

import contextlib
from collections.abc import Collection, Mapping

from forebay_gateway.admission.budget import Budget, Reservation, disk_full_reason
from forebay_gateway.admission.curve import CHUNK_SLEEP_S_MAX, GRANT_SLEEP_S_MAX, Throttle
from forebay_gateway.admission.quota import Quotas
from forebay_gateway.admission.waiting import WaitingRoom
from forebay_gateway.base.clock import Clock
from forebay_gateway.catalog import Catalog
from forebay_gateway.core.config_sections import Config
from forebay_gateway.core.errors import CacheFull, DiskFailed, DiskFull, InvalidArgument
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.safety import expendable_bytes
from forebay_gateway.tiers.monitor import MonitoredTier

DISK_FULL_RETRY_S = 5.0
DISK_FAILS_RETRY_S = 5.0
EXPENDABLE_AGAIN_S = 1.0
REST_FACTOR = 20  # a look at what may go takes at most this part of one core, however much there is


class Admitter:
    """All writers of this gateway."""

    def __init__(self, node: Node, evictor: Evictor) -> None:
        self._node = node
        self._evictor = evictor
        self._room = WaitingRoom(node.budget, node.clock, self._has_hope, evictor.make_room)
        self._throttle = Throttle(node.clock, node.budget.pace_s)

    async def reserve(self, size: int, run: str, writer: int, wait_s: float = 0.0) -> Reservation:
        """Space, after evicting verified data where that helps and waiting up to `wait_s` seconds. Raises CacheFull, DiskFull,
        DiskFailed; InvalidArgument for what never fits."""
        self._node.budget.check_fits(size, run)
        await self._check_disk(size)
        try:
            reservation = await self._room.admit(size, run, writer, wait_s)
        except CacheFull as error:
            stuck = {tier.name: "held" if tier.held else tier.state.value for tier in self._stuck_tiers()}
            if not stuck or self._node.budget.over_quota(run, size):
                raise
            words = "the cache takes no new shard now, and what it holds does not drain"
            refusal = CacheFull(words, retry_after_s=error.retry_after_s, **error.details, **stuck)
            refusal.waited_s = error.waited_s
            raise refusal from None
        try:
            await self._check_disk(size)  # others have had their turn meanwhile
        except BaseException:
            reservation.release()
            raise
        reservation.unwritten(size)
        return reservation

    def refused(self, error: CacheFull, run: str, step: int, session: str, size: int) -> CacheFull:
        """What a writer of that session is told. Its shards make room only once the whole checkpoint is complete on its tiers:
        where what this node holds of it leaves no room for the next one, waiting alone does not help."""
        if type(error) is not CacheFull:  # a full disk has words of its own
            return error
        with self._node.catalog.read() as txn:
            row = txn.find_session(run, step, session)
            held = 0 if row is None else txn.session_sums(row.id).cached_size
        quota = self._node.budget.quotas.limit_of(run)
        limit = self._node.budget.limit if quota is None else min(quota, self._node.budget.limit)
        if not held or held + size <= limit:
            return error
        refusal = CacheFull(
            f"the checkpoint's parts on this node do not fit into {'this cache' if quota is None else 'the quota of its run'}, "
            "and none of them makes room before all are on the tiers; use more nodes, or give it more space",
            retry_after_s=error.retry_after_s,
            **error.details,
            checkpoint_bytes=held,
            limit_bytes=limit,
        )
        refusal.waited_s = error.waited_s
        return refusal

    async def grow(self, reservation: Reservation, size: int, at_once: int = 0) -> None:
        """`size` bytes more, for a stream whose length is not known, and `at_once` where so many could ever fit. Verified data
        goes where that helps. Raises as reserve(). It does not wait: what it holds might be what others wait for."""
        with contextlib.suppress(InvalidArgument):
            reservation.check_grows(at_once)
            size = max(size, at_once)
        reservation.check_grows(size)
        await self._check_disk(size)
        try:
            reservation.grow(size)
        except CacheFull:
            if self._node.budget.over_quota(reservation.run, size):
                raise
            await self._evictor.make_room(size)
            reservation.grow(size)
        reservation.unwritten(size)  # what it had before is written

    async def slow_chunk(self, size: int, run: str) -> None:
        """The time that a chunk takes before its writer has credit for the next one."""
        await self._throttle.slow(size, run, CHUNK_SLEEP_S_MAX)

    async def slow_grant(self, size: int, run: str) -> None:
        """Likewise before a lease is granted, or many small shards are written: for all of their bytes at once."""
        await self._throttle.slow(size, run, GRANT_SLEEP_S_MAX)

    def _has_hope(self) -> bool:
        """Whether waiting may help: something has to go to the tiers, and it goes."""
        node = self._node
        if self._stuck_tiers() or node.budget.disk.reason:
            return False
        with node.catalog.read() as txn:
            queues = txn.totals().tiers
        return any(
            tier.rate.bytes_per_s > 0 and tier.name in queues and queues[tier.name].copies
            for tier in node.tiers.values()
            if tier.required
        )

    def _stuck_tiers(self) -> list[MonitoredTier]:
        return [tier for tier in self._node.tiers.values() if tier.required and (tier.held or not tier.usable)]

    async def _check_disk(self, size: int) -> None:
        """The disk may be fuller than the capacity says; the catalog must always have room to grow. What was promised to others
        and is not written yet is not free."""
        node = self._node
        if node.budget.disk.reason:
            reason = f"{node.budget.disk.reason}; no shard is taken until it takes a write again"
            raise DiskFailed(reason, retry_after_s=DISK_FAILS_RETRY_S)
        reserve = node.config.cache.catalog_reserve
        missing = size + reserve + node.budget.unwritten - node.cache.free_on_disk
        if missing <= 0:
            return
        if await self._evictor.evict(missing) < missing:
            reason = disk_full_reason(node.cache.free_on_disk, reserve)
            raise DiskFull(reason, retry_after_s=DISK_FULL_RETRY_S, needs_bytes=size)


class Dirty:
    """Bytes in the cache that wait for a required tier: as the catalog counts them, less what no tier is to hold and may go at
    any time. That is looked up at most once a second, and more seldom where it takes long."""

    def __init__(self, catalog: Catalog, clock: Clock, required: Collection[str]) -> None:
        self._catalog, self._clock, self._required = catalog, clock, required
        self._expendable, self._look_again_s = 0, float("-inf")

    def __call__(self) -> int:
        now_s = self._clock.monotonic()
        with self._catalog.read() as txn:
            if now_s >= self._look_again_s:
                self._expendable = expendable_bytes(txn, self._required)
                took_s = self._clock.monotonic() - now_s
                self._look_again_s = now_s + max(EXPENDABLE_AGAIN_S, REST_FACTOR * took_s)
            return max(0, txn.totals().dirty - self._expendable)


def budget_of(
    config: Config, catalog: Catalog, tiers: Mapping[str, MonitoredTier], capacity: int, used: int, clock: Clock
) -> Budget:
    """The cache's bytes, with what the catalog and the tiers say of them."""

    def drain_rate() -> float:
        """Of the slowest required tier that has something to take; one that waits for nothing holds nobody up."""
        with catalog.read() as txn:
            queues = txn.totals().tiers
        required = [tier for tier in tiers.values() if tier.required]
        busy = [tier for tier in required if tier.name in queues and queues[tier.name].copies]
        return min((tier.rate.bytes_per_s for tier in busy or required), default=0.0)

    return Budget(
        capacity,
        soft=config.cache.soft,
        hard=config.cache.hard,
        refuse=config.cache.refuse,
        reopen=config.cache.reopen,
        used=used,
        drain_rate=drain_rate,
        dirty=Dirty(catalog, clock, [tier.name for tier in config.tiers if tier.required]),
        quotas=Quotas(lambda run: None),  # see watch_quotas
        max_dirty_age_s=config.cache.max_dirty_age,
    )


def watch_quotas(node: Node) -> None:
    """Hold each run to the quota that its policy names by then, and count what runs hold, from now on by the catalog's changes.
    To be called before shards are taken.

    What is there already is counted by sums of sessions, without the padding of files: what drains then comes to 0.
    """
    quotas = node.budget.quotas
    quotas.limit_of = lambda run: node.policy(run).quota  # as the configuration says now: it may be read again
    with node.catalog.read() as txn:
        for session_id in txn.sessions_with(lambda sums: sums.sealed):
            session, sums = txn.session(session_id), txn.session_sums(session_id)
            if session is not None and sums.cached:
                quotas.moved(session_id, session.run, sums.cached_size * sums.sealed // sums.cached)

    def moved(session_id: int, delta: int) -> None:
        if (run := quotas.run_of(session_id)) is None:
            with node.catalog.read() as txn:
                session = txn.session(session_id)
            if session is None:
                return
            run = session.run
        quotas.moved(session_id, run, delta)
        if delta < 0 and quotas.limit_of(run) is not None:
            node.budget.on_room()

    node.catalog.on_dirty(moved)
