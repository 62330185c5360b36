"""Every byte of one checkpoint, wherever it lies, against its checksums.

    each shard: its cache file, footer included; its copy on each tier, read back by a mover -> good, bad, absent, unreachable

A bad copy is quarantined at once, and mended where the configuration says so. Owns the walk; the checks are proof.py's.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from enum import StrEnum

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import Corrupt, ForebayError, NotFound, Unavailable
from forebay_gateway.core.records import PartState, SessionRow, ShardRow
from forebay_gateway.core.states import CopyState, ShardState
from forebay_gateway.movers.jobs import ShardItem
from forebay_gateway.paths.care.documents import check_documents
from forebay_gateway.paths.care.proof import batches, check_cached, check_copies
from forebay_gateway.paths.drain import shard_item
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import all_shards
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.tiers.monitor import MonitoredTier


class Verdict(StrEnum):
    """On one copy."""

    GOOD = "good"
    BAD = "bad"
    ABSENT = "absent"
    PENDING = "pending"  # not there yet, and in the queue
    UNREACHABLE = "unreachable"  # nobody could look


@dataclass(frozen=True, slots=True)
class CopyReport:
    """One copy of one shard."""

    name: str
    where: str
    verdict: Verdict
    size: int
    reason: str = ""


class Verifier:
    """Reads checkpoints for their own sake."""

    def __init__(self, node: Node, finder: Finder, reads: ReadPath, evictor: Evictor) -> None:
        self._node, self._finder, self._reads, self._evictor = node, finder, reads, evictor

    async def verify(self, run: str, step: int, source: str) -> AsyncGenerator[CopyReport, None]:
        """A report a copy. `source` is "cache", a tier's name, or "all". Raises NotFound, Unavailable, InvalidArgument."""
        tiers = [] if source == "cache" else list(self._node.tiers.values())
        if source not in ("", "all", "cache"):
            tiers = [self._node.tier(source)]
        session = (await self._finder.complete(run, step)).session
        await self._finder.learn_copies(session, [tier for tier in tiers if tier.usable])
        rows = sorted(await all_shards(self._node, session.id), key=lambda row: row.name)
        if source in ("", "all", "cache"):
            for row in rows:
                yield await self._cached(session, row)
        for tier in tiers:
            async for report in self._on_tier(session, rows, tier):
                yield report

    async def _cached(self, session: SessionRow, row: ShardRow) -> CopyReport:
        with self._node.catalog.read() as txn:
            row = txn.shard(row.key) or row
            part = txn.part(row.session_id, row.writer)
        if row.state is ShardState.QUARANTINED:
            return CopyReport(row.name, "cache", Verdict.BAD, row.size, "in quarantine")
        if not row.is_cached:
            return CopyReport(row.name, "cache", Verdict.ABSENT, row.size, "evicted")
        try:
            await check_cached(self._node, self._evictor, session, row)
        except Corrupt as error:
            if part is not None and part.state is PartState.COMMITTED:
                with self._node.catalog.read() as txn:
                    item = shard_item(txn, session, row)
                await self._reads.cache_is_bad(item, error)
            return CopyReport(row.name, "cache", Verdict.BAD, row.size, str(error))
        except ForebayError as error:
            return CopyReport(row.name, "cache", Verdict.UNREACHABLE, row.size, str(error))
        return CopyReport(row.name, "cache", Verdict.GOOD, row.size)

    async def _on_tier(
        self, session: SessionRow, rows: list[ShardRow], tier: MonitoredTier
    ) -> AsyncGenerator[CopyReport, None]:
        there: list[tuple[ShardRow, ShardItem]] = []
        lacks_manifest = False
        if tier.usable:
            try:
                problems = await check_documents(self._node, session, tier)
            except Unavailable as error:
                tier.failed(error)
                problems = []
            for problem in problems:
                lacks_manifest = lacks_manifest or (problem.kind == "manifest" and problem.absent)
                verdict = Verdict.UNREACHABLE if problem.newer else Verdict.BAD
                yield CopyReport(problem.key.rpartition("/")[2], tier.name, verdict, 0, problem.what)
        for row in rows:
            with self._node.catalog.read() as txn:
                known = _known(txn, row, tier)
                if known is None:
                    there.append((row, shard_item(txn, session, row)))
                    continue
            yield known
        for batch in batches(there):
            for report in await self._read_back(batch, tier, lacks_manifest):
                yield report

    async def _read_back(
        self, batch: list[tuple[ShardRow, ShardItem]], tier: MonitoredTier, lacks_manifest: bool
    ) -> list[CopyReport]:
        try:
            errors = await check_copies(self._node, tier, [item for _, item in batch])
        except ForebayError as error:
            return [CopyReport(row.name, tier.name, Verdict.UNREACHABLE, row.size, str(error)) for row, _ in batch]
        reports = []
        for (row, _), problem in zip(batch, errors, strict=True):
            verdict = Verdict.GOOD
            if isinstance(problem, Corrupt | NotFound):
                verdict = Verdict.BAD
                # Without its manifest the checkpoint may have been deleted there by another node: not to be put again blindly.
                if not (lacks_manifest and isinstance(problem, NotFound)):
                    await self._reads.copy_is_bad(row.key, tier, problem)
            elif problem is not None:
                verdict = Verdict.UNREACHABLE
            reports.append(CopyReport(row.name, tier.name, verdict, row.size, "" if problem is None else str(problem)))
        return reports


def _known(txn: ReadTxn, row: ShardRow, tier: MonitoredTier) -> CopyReport | None:
    """What needs no look at the tier."""
    copy = txn.copy(row.key, tier.name)
    if copy is None or copy.state is CopyState.SKIPPED:
        return CopyReport(row.name, tier.name, Verdict.ABSENT, row.size, "not meant to be there")
    if copy.state is CopyState.QUARANTINED:
        return CopyReport(row.name, tier.name, Verdict.BAD, row.size, "in quarantine")
    if copy.state is not CopyState.VERIFIED:
        return CopyReport(row.name, tier.name, Verdict.PENDING, row.size, copy.error)
    if not tier.usable:
        return CopyReport(row.name, tier.name, Verdict.UNREACHABLE, row.size, tier.reason)
    return None
