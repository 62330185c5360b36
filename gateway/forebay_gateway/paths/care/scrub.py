"""Damage found before somebody needs the bytes: the whole cache read once in a while, slowly, and the tiers asked too.

    next shard behind the cursor -> its chunks, a second's worth a step -> footer and chunk table -> a head for each copy on a
    tier; one that changed, or whose own checksum differs, is verified there -> cursor durable -> ... -> the end

Owns what is looked at, and in which order; pace, cursor and schedule are passes.py's. Bad bytes are quarantined as at a read,
and mend.py brings good ones. Uncommitted shards are left to their commit and drain. Rot on a tier that neither version nor
checksum shows is found by tier_scrub.py, which reads every byte.
"""

import logging

from forebay_gateway.core.errors import Corrupt, ForebayError, NotFound, Unavailable, Unsupported
from forebay_gateway.core.layout import manifest_key
from forebay_gateway.core.records import CopyRow, PartState, SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyState
from forebay_gateway.movers.jobs import ShardItem
from forebay_gateway.paths.care.passes import Pass
from forebay_gateway.paths.care.proof import check_cached, check_copies
from forebay_gateway.paths.drain import shard_item
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.passing import version_of
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.tiers.monitor import MonitoredTier

log = logging.getLogger("forebay.scrub")

SETTING = "scrub"
SHARDS_A_STEP = 16  # so that many small shards do not ask the tiers faster than this every second


class Scrubber(Pass):
    """One worker."""

    def __init__(self, node: Node, reads: ReadPath, evictor: Evictor) -> None:
        super().__init__(node, "the scrub of the cache", SETTING, "cache.scrub_rate")
        self._reads, self._evictor = reads, evictor
        self._chunk = 0  # within the shard behind the cursor
        self._published: dict[tuple[str, int], bool] = {}  # (tier, session): whether the manifest stands there

    @property
    def rate(self) -> int:
        return self._node.config.cache.scrub_rate

    @property
    def every_s(self) -> float:
        return self._node.config.cache.scrub_every

    def _reset(self) -> None:
        self._chunk = 0
        self._published.clear()

    # -- the walk ------------------------------------------------------------------------------------------------------

    async def _work(self, budget: int) -> tuple[int, bool]:
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
        except (Unavailable, Unsupported) as error:
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
            elif info.crc32c not in (None, row.crc32c):
                problem = Corrupt("the tier's own checksum is another", key=item.key, expected=f"{row.crc32c:08x}")
            elif copy.tag and copy.tag not in (
                info.tag,
                version_of(info),
            ):  # written again since it was proved: by whom, and with what?
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
