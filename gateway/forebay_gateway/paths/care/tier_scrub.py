"""Rot on a tier that no version and no checksum of the server's shows: every byte of every copy read once in a long while.

    next shard of ours behind the cursor that the tier should hold -> read there by a mover, a batch a step -> cursor durable

Owns what is read, and in which order; pace, cursor and schedule are passes.py's. Each node reads what it put there itself. A
bad copy is quarantined as at a read, and mend.py puts a good one in its place. One shard is read in one go, however large; the
pause after it keeps to the rate.
"""

import logging

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.config_sections import DAY_S
from forebay_gateway.core.errors import Corrupt, ForebayError, NotFound
from forebay_gateway.core.layout import manifest_key
from forebay_gateway.core.records import SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyState
from forebay_gateway.movers.jobs import ShardItem
from forebay_gateway.paths.care.passes import Pass
from forebay_gateway.paths.care.proof import BYTES_A_JOB, ITEMS_A_JOB, check_copies
from forebay_gateway.paths.drain import shard_item
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.tiers.monitor import MonitoredTier

log = logging.getLogger("forebay.scrub")

EVERY_S = {"s3": 180 * DAY_S}  # an object store scrubs by itself, and bytes from it may cost money
EVERY_S_ELSE = 30 * DAY_S
AWAY_S = 15.0
ROWS_A_READ = 2000  # in one snapshot, which holds up the event loop

_Batch = list[tuple[SessionRow, ShardRow, ShardItem]]


class TierScrubber(Pass):
    """One worker for each tier."""

    def __init__(self, node: Node, reads: ReadPath, tier: MonitoredTier) -> None:
        super().__init__(node, f"the scrub of tier {tier.name}", f"scrub:{tier.name}", "the tier's scrub_rate")
        self._reads, self._tier = reads, tier

    @property
    def rate(self) -> int:
        return self._node.tier_config(self._tier.name).scrub_rate

    @property
    def every_s(self) -> float:
        config = self._node.tier_config(self._tier.name)
        return EVERY_S.get(config.kind, EVERY_S_ELSE) if config.scrub_every is None else config.scrub_every

    def _reset(self) -> None:
        """Nothing but the cursor."""

    def _wait_s(self) -> float | None:
        return None if self._tier.usable else AWAY_S

    async def _work(self, budget: int) -> tuple[int, bool]:
        batch, last, more = self._next(min(budget, BYTES_A_JOB))
        size = sum(row.size for _, row, _ in batch)
        if batch:
            try:
                problems = await check_copies(self._node, self._tier, [item for *_, item in batch], beside=True)
            except ForebayError as error:  # none was read: the cursor stays
                log.info("%s waits error=%s", self._name, error)
                return int(self.rate * AWAY_S), True
            for (session, row, _), problem in zip(batch, problems, strict=True):
                await self._judge(session, row, problem)
        if last is not None:
            self.state.after = (last.session_id, last.shard_id)
        return size, more

    def _next(self, budget: int) -> tuple[_Batch, ShardKey | None, bool]:
        """Copies to read, the last row looked at, and whether there are others behind it."""
        after = None if self.state.after is None else ShardKey(*self.state.after)
        batch: _Batch = []
        size = 0
        with self._node.catalog.read() as txn:
            for looked, row in enumerate(txn.all_shards(after), start=1):
                if (session := self._ours(txn, row)) is not None:
                    batch.append((session, row, shard_item(txn, session, row)))
                    size += row.size
                after = row.key
                if size >= budget or len(batch) >= ITEMS_A_JOB or looked >= ROWS_A_READ:
                    return batch, after, True
        return batch, after, False

    def _ours(self, txn: ReadTxn, row: ShardRow) -> SessionRow | None:
        """The session of a shard that this node put on the tier, and that should be there."""
        copy, part = txn.copy(row.key, self._tier.name), txn.part(row.session_id, row.writer)
        if copy is None or copy.state is not CopyState.VERIFIED or part is None or part.is_adopted:
            return None
        session = txn.session(row.session_id)
        checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
        return None if checkpoint is None or checkpoint.deleting else session

    async def _judge(self, session: SessionRow, row: ShardRow, problem: ForebayError | None) -> None:
        state = self.state
        if isinstance(problem, NotFound) and not await self._is_published(session):
            return  # deleted there by another node, perhaps: fsck tells
        if problem is not None and not isinstance(problem, Corrupt | NotFound):
            state.copies_not_asked += 1
            log.warning("%s cannot read a copy, it goes on behind it name=%s error=%s", self._name, row.name, problem)
            return
        state.copies += 1
        state.bytes += row.size
        if problem is not None and self._is_verified(row.key):
            state.copies_bad += 1
            await self._reads.copy_is_bad(row.key, self._tier, problem)

    def _is_verified(self, key: ShardKey) -> bool:
        """Still: else it was deleted or replaced while it was read."""
        with self._node.catalog.read() as txn:
            copy = txn.copy(key, self._tier.name)
        return copy is not None and copy.state is CopyState.VERIFIED

    async def _is_published(self, session: SessionRow) -> bool:
        try:
            await self._tier.tier.head(manifest_key(session.run, session.step))
        except NotFound:
            return False
        except ForebayError as error:
            self._tier.failed(error)
            return False
        return True
