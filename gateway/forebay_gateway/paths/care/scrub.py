"""Damage found before somebody needs the bytes: the whole cache read once in a while, slowly, and the tiers asked too.

    next shard behind the cursor -> its chunks, a second's worth a step -> footer and chunk table -> a head for each copy on a
    tier; one that changed is verified there -> cursor durable -> ... -> the end: the next pass is due scrub_every later

Owns pace, cursor and schedule. Bad bytes are quarantined as at a read, and mend.py brings good ones. Uncommitted shards are
left to their commit and drain. The wall clock says when the next pass is due, and nothing more.
"""

import logging
from collections.abc import Callable

import msgspec

from forebay_gateway.core.errors import Corrupt, ForebayError, InvalidArgument, NotFound, Unavailable
from forebay_gateway.core.layout import manifest_key
from forebay_gateway.core.records import CopyRow, PartState, SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyState
from forebay_gateway.movers.jobs import ShardItem
from forebay_gateway.paths.care.proof import check_cached, check_copies
from forebay_gateway.paths.drain import shard_item
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.tiers.monitor import MonitoredTier

log = logging.getLogger("forebay.scrub")

SETTING = "scrub"
STEP_S = 1.0  # of the configured rate, in one step
SHARDS_A_STEP = 16  # so that many small shards do not ask the tiers faster than this every STEP_S
SAVE_S = 5.0  # at most this much work is repeated after a crash
LOOK_S = 60.0


class ScrubState(msgspec.Struct, kw_only=True):
    """What is kept in the catalog, and shown. Counts are of the pass under way, else of the last one."""

    running: bool = False
    paused: bool = False  # by an operator, until the next start
    after: tuple[int, int] | None = None  # the cursor: the last shard that is done
    begun_wall_s: float = 0.0
    ended_wall_s: float = 0.0  # of the last pass; before the first: when this gateway was first started
    passes: int = 0
    shards: int = 0
    bytes: int = 0
    bad: int = 0
    copies: int = 0
    copies_bad: int = 0
    copies_not_asked: int = 0  # of tiers that could not be reached


class Scrubber:
    """One worker."""

    def __init__(self, node: Node, reads: ReadPath, evictor: Evictor) -> None:
        self._node, self._reads, self._evictor = node, reads, evictor
        self._rate = node.config.cache.scrub_rate
        self._every_s = node.config.cache.scrub_every
        self._chunk = 0  # within the shard behind the cursor
        self._saved_s = float("-inf")
        self._wake: Callable[[], None] = lambda: None
        self._published: dict[tuple[str, int], bool] = {}  # (tier, session): whether the manifest stands there
        with node.catalog.read() as txn:
            self.state = decode_state(txn.setting(SETTING))

    @property
    def next_in_s(self) -> float | None:
        """Seconds until the next pass begins by itself; None where none will."""
        if not self._rate or not self._every_s or self.state.running or self.state.paused:
            return None
        left_s = self.state.ended_wall_s + self._every_s - self._node.clock.wall()
        return max(0.0, min(self._every_s, left_s))

    def on_start(self, wake: Callable[[], None]) -> None:
        """Call `wake` when an operator starts a pass."""
        self._wake = wake

    async def start(self) -> None:
        """Begin a pass, or go on with the one that was stopped. Raises InvalidArgument, Unavailable."""
        if not self._rate:
            raise InvalidArgument("cache.scrub_rate is off, so this gateway does not scrub; set it and start again")
        if self.state.running:
            raise Unavailable("a scrub is running already; `forebay scrub --status` shows how far it is", retry_after_s=60.0)
        if self.state.after is None:
            self._begin()
        self.state.running, self.state.paused = True, False
        await self._save()
        self._wake()

    async def stop(self) -> None:
        """Pause; the cursor stays. Raises InvalidArgument where nothing runs or would."""
        if self.state.paused or not (self.state.running or self.next_in_s is not None):
            raise InvalidArgument("no scrub is running")
        self.state.running, self.state.paused = False, True
        await self._save()

    async def step(self) -> float | None:
        """A second's worth; the pause in seconds that keeps to the rate."""
        if not self.state.running:
            if not self.state.ended_wall_s:
                self.state.ended_wall_s = self._node.clock.wall()
                await self._save()
            due_s = self.next_in_s
            if due_s is None or due_s > 0:
                return LOOK_S if due_s is None else min(LOOK_S, due_s)
            self._begin()
        began_s = self._node.clock.monotonic()
        size, more = await self._work(int(self._rate * STEP_S))
        if not more:
            await self._end()
            return None
        if self._node.clock.monotonic() - self._saved_s >= SAVE_S:
            await self._save()
        return max(0.05, size / self._rate - (self._node.clock.monotonic() - began_s))

    def _begin(self) -> None:
        done = self.state
        self.state = ScrubState(running=True, begun_wall_s=self._node.clock.wall(), passes=done.passes)
        self.state.ended_wall_s = done.ended_wall_s
        self._chunk = 0
        self._published.clear()
        log.info("scrub begins rate_bytes_per_s=%s", self._rate)

    async def _end(self) -> None:
        state = self.state
        state.running, state.after = False, None
        state.passes += 1
        state.ended_wall_s = self._node.clock.wall()
        await self._save()
        log.info("scrub ended shards=%s bytes=%s bad=%s copies_bad=%s", state.shards, state.bytes, state.bad, state.copies_bad)

    async def _save(self) -> None:
        data = msgspec.json.encode(self.state)
        self._saved_s = self._node.clock.monotonic()
        await self._node.catalog.write(lambda txn: txn.set_setting(SETTING, data))

    # -- the walk ------------------------------------------------------------------------------------------------------

    async def _work(self, budget: int) -> tuple[int, bool]:
        """Read up to about `budget` bytes; how many, and whether something is left."""
        size = 0
        for _ in range(SHARDS_A_STEP):
            found = self._next()
            if found is None:
                return size, False
            row, session, committed = found
            if committed and row.is_cached:
                count, whole = await self._slice(session, row, budget - size)
                size += count
                if not whole:
                    break
            if committed:
                await self._ask_tiers(session, row)
            self.state.after, self._chunk = (row.session_id, row.shard_id), 0
            if size >= budget:
                break
        return size, True

    def _next(self) -> tuple[ShardRow, SessionRow, bool] | None:
        after = None if self.state.after is None else ShardKey(*self.state.after)
        with self._node.catalog.read() as txn:
            for row in txn.all_shards(after):
                session = txn.session(row.session_id)
                part = txn.part(row.session_id, row.writer)
                checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
                if session is not None and checkpoint is not None and not checkpoint.deleting:
                    return row, session, part is not None and part.state is PartState.COMMITTED
        return None

    async def _slice(self, session: SessionRow, row: ShardRow, budget: int) -> tuple[int, bool]:
        """Some chunks of one file: bytes, and whether the shard is done with."""
        count = -(-row.size // row.chunk_size)
        stop = self._chunk + max(1, budget // row.chunk_size)
        last = stop >= count
        try:
            size = await check_cached(self._node, self._evictor, session, row, self._chunk, -1 if last else stop)
        except Corrupt as error:
            if self._still_cached(row.key):
                self.state.bad += 1
                await self._reads.cache_is_bad(self._item(session, row), error)
            return min(budget, row.size), True
        except Unavailable as error:
            log.warning("scrub cannot read a shard, it goes on behind it name=%s error=%s", row.name, error)
            return 0, True
        self.state.bytes += size
        self.state.shards += last
        self._chunk = stop
        return size, last

    def _still_cached(self, key: ShardKey) -> bool:
        """Else it was evicted or deleted while it was read, and its file's absence says nothing."""
        with self._node.catalog.read() as txn:
            row = txn.shard(key)
        return row is not None and row.is_cached

    def _item(self, session: SessionRow, row: ShardRow) -> ShardItem:
        with self._node.catalog.read() as txn:
            return shard_item(txn, session, row)

    # -- the tiers -----------------------------------------------------------------------------------------------------

    async def _ask_tiers(self, session: SessionRow, row: ShardRow) -> None:
        with self._node.catalog.read() as txn:
            if txn.shard(row.key) is None:
                return
            copies = txn.copies(row.key)
            item = shard_item(txn, session, row)
        for tier in self._node.tiers.values():
            copy = copies.get(tier.name)
            if copy is None or copy.state is not CopyState.VERIFIED:
                continue
            if not tier.usable:
                self.state.copies_not_asked += 1
                continue
            try:
                await self._ask(session, row, item, copy, tier)
            except ForebayError as error:
                tier.failed(error)
                self.state.copies_not_asked += 1

    async def _ask(self, session: SessionRow, row: ShardRow, item: ShardItem, copy: CopyRow, tier: MonitoredTier) -> None:
        if not await self._is_published(session, tier):
            return  # deleted there by another node, perhaps: fsck tells
        problem: ForebayError | None = None
        try:
            info = await tier.tier.head(item.key)
            if info.size != row.size:
                problem = Corrupt("the tier holds another size", key=item.key, expected=row.size, actual=info.size)
            elif copy.tag and info.tag != copy.tag:  # written again since it was proved: by whom, and with what?
                problem = (await check_copies(self._node, tier, [item]))[0]
        except NotFound as error:
            problem = error
        self.state.copies += 1
        if isinstance(problem, Corrupt | NotFound):
            self.state.copies_bad += 1
            await self._reads.copy_is_bad(row.key, tier, problem)
        elif problem is not None:
            raise problem

    async def _is_published(self, session: SessionRow, tier: MonitoredTier) -> bool:
        known = self._published.get((tier.name, session.id))
        if known is None:
            try:
                await tier.tier.head(manifest_key(session.run, session.step))
                known = True
            except NotFound:
                known = False
            if len(self._published) > 1000:
                self._published.clear()
            self._published[tier.name, session.id] = known
        return known


def decode_state(data: bytes | None) -> ScrubState:
    """What an earlier process left; a state that cannot be read begins anew."""
    if data is None:
        return ScrubState()
    try:
        return msgspec.json.decode(data, type=ScrubState)
    except msgspec.MsgspecError:
        return ScrubState()
