"""What the catalog says against what is there. Reports, and changes nothing.

    indexes against rows -> cache files by name and length, and what rows count for them (deep: every byte) -> part files
    -> sums against a recount -> for each session and tier: the documents, a head for each copy (deep: every byte) -> uploads
    on record -> quarantine -> what nobody here owns

Owns the comparisons; each finding names its remedy, which is repair.py's to carry out. While the gateway serves, what looks
wrong is looked at twice: a stream may be between its file and its row.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path

from forebay_gateway.cache.footer import disk_size
from forebay_gateway.cache.layout import CATALOG, FoundFile
from forebay_gateway.catalog import CatalogDamaged, ReadTxn, index_problems
from forebay_gateway.catalog.trial import trial
from forebay_gateway.core.errors import Corrupt, ForebayError, NotFound, Unavailable, Unsupported
from forebay_gateway.core.layout import shard_key
from forebay_gateway.core.records import CopyRow, PartRow, PartState, SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyState, ShardState
from forebay_gateway.movers.jobs import ShardItem
from forebay_gateway.paths.care.documents import BadDocument, check_documents, is_named_elsewhere, local_record, same_part
from forebay_gateway.paths.care.finding import Finding, Severity
from forebay_gateway.paths.care.gc import Collector, as_finding
from forebay_gateway.paths.care.proof import batches, check_cached, check_copies
from forebay_gateway.paths.drain import shard_item
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.node import Node
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import ManifestError, NewerVersion, PartRecord, what_is_wrong

LOOK_TWICE_S = 0.5
ROWS_A_READ = 2000  # in one snapshot, which holds up the event loop
RECOUNT_SHARDS_MAX = 200_000  # while serving: a recount is one snapshot
HEADS_AT_ONCE = 8
INDEX_SHOWN_MAX = 20
REBUILD = "make the catalog anew from the cache's files, at the next start or by `forebay rebuild --apply --force`"
CACHED = (ShardState.SEALED, ShardState.EVICTABLE)


class Checker:
    """One fsck. `serving` says that streams may be under way meanwhile."""

    def __init__(self, node: Node, evictor: Evictor, collector: Collector, *, serving: bool) -> None:
        self._node, self._evictor, self._collector, self._serving = node, evictor, collector, serving

    async def check(self, deep: bool) -> AsyncGenerator[Finding, None]:
        """All findings, as they are made, to where the catalog cannot be read any further; what it says against itself comes
        first: by it all others are judged."""
        try:
            async with aclosing(self._check(deep)) as findings:
                async for finding in findings:
                    yield finding
        except (CatalogDamaged, NotFound) as error:  # the latter: a row of which something else is not there
            yield Finding("index", "catalog", f"nothing more can be compared: {error.sentence}", remedy=REBUILD)

    async def _check(self, deep: bool) -> AsyncGenerator[Finding, None]:
        async for finding in self._indexes():
            yield finding
        async for finding in self._cache_files(deep):
            yield finding
        async for finding in self._part_files():
            yield finding
        for finding in await self._sums():
            yield finding
        for session in self._sessions():
            for tier in self._node.tiers.values():
                async for finding in self._on_tier(session, tier, deep):
                    yield _of_replaced(finding) if session.is_superseded else finding
        away = self._node.unreachable_tiers()
        for tier in away:
            what = f"the tier cannot be reached, so its copies were not looked at: {tier.reason}"
            yield Finding("tier_unreachable", tier.name, what, Severity.NOTE)
        for finding in self._uploads():
            yield finding
        told = {tier.name for tier in away}
        for item in await self._collector.survey(0.0):
            if item.kind != "not_asked" or item.where not in told:
                yield as_finding(item)

    def _sessions(self) -> list[SessionRow]:
        with self._node.catalog.read() as txn:
            found = []
            for session in txn.sessions():
                checkpoint = txn.checkpoint(session.run, session.step)
                if checkpoint is not None and not checkpoint.deleting:
                    found.append(session)
        return found

    # -- the cache -----------------------------------------------------------------------------------------------------

    async def _cache_files(self, deep: bool) -> AsyncGenerator[Finding, None]:
        files, others = await self._scan()
        seen: set[ShardKey] = set()
        async for page in self._rows():
            seen.update(row.key for row in page)
            suspects = [row for row in page if file_problem(row, files.get(row.key))]
            if suspects and self._serving:
                await self._node.clock.sleep(LOOK_TWICE_S)
            for row in suspects:
                if (finding := await self._file_finding(row.key)) is not None:
                    yield finding
            healthy = [row for row in page if row.state in CACHED and not file_problem(row, files.get(row.key))]
            for row in healthy if deep else ():
                if (finding := await self._deep(row)) is not None:
                    yield finding
        for key in sorted(set(files) - seen):
            if (finding := await self._unknown_file(key, files[key])) is not None:
                yield finding
        for file in others:
            if file.kind == "foreign":
                what = "a file that is not ours lies in the cache; it is never touched"
                yield Finding("foreign_file", "cache", what, Severity.NOTE, path=self._shown(file))
            elif file.kind == "incoming" and not self._serving:
                what = "a shard that was on its way when the gateway ended"
                yield Finding(
                    "incoming_file", "cache", what, Severity.NOTE, path=self._shown(file), remedy="the next start drops it"
                )

    async def _scan(self) -> tuple[dict[ShardKey, FoundFile], list[FoundFile]]:
        found = await self._node.io.run(lambda: list(self._node.cache.scan()))
        shards = {
            ShardKey(file.session_id, file.shard_id): file
            for file in found
            if file.kind == "shard" and file.session_id is not None and file.shard_id is not None
        }
        return shards, [file for file in found if file.kind in ("foreign", "incoming")]

    async def _rows(self) -> AsyncGenerator[list[ShardRow], None]:
        after: ShardKey | None = None
        while True:
            page: list[ShardRow] = []
            with self._node.catalog.read() as txn:
                for row in txn.all_shards(after):
                    page.append(row)
                    if len(page) >= ROWS_A_READ:
                        break
            if not page:
                return
            yield page
            after = page[-1].key
            await asyncio.sleep(0)

    def _shown(self, file: FoundFile) -> str:
        return str(file.path.relative_to(self._node.cache.path))

    async def _file_finding(self, key: ShardKey) -> Finding | None:
        """The problem of one row as it is now."""
        path = self._node.cache.shard_path(key)
        length = await self._node.io.run(lambda: path.stat().st_size if path.is_file() else None)
        with self._node.catalog.read() as txn:
            row, session = txn.shard(key), txn.session(key.session_id)
            if row is None or session is None or is_going(txn, session):
                return None
            file = None if length is None else FoundFile("shard", path, length, key.session_id, key.shard_id)
            problem = file_problem(row, file)
            if problem is None:
                return None
            kind, what = problem
            return self._on_shard(txn, session, row, kind, what)

    def _on_shard(self, txn: ReadTxn, session: SessionRow, row: ShardRow, kind: str, what: str) -> Finding:
        sources = good_tiers(txn, row, self._node.tiers)
        part = txn.part(row.session_id, row.writer)
        if kind == "disk_size":
            remedy = "count the file as it is"
        elif part is None or part.state is PartState.OPEN:
            remedy = "drop it: its part is not committed, and its writer is told to put it again"
        elif sources:
            remedy = f"fetch it from {' or '.join(sources)} into a fresh file"
        else:
            remedy, what = "", f"{what}; no tier holds a verified copy"
        return Finding(
            kind,
            "cache",
            what,
            run=session.run,
            step=session.step,
            session=session.session,
            name=row.name,
            path=str(self._node.cache.shard_path(row.key).relative_to(self._node.cache.path)),
            remedy=remedy,
            key=row.key,
            writer=row.writer,
        )

    async def _deep(self, row: ShardRow) -> Finding | None:
        with self._node.catalog.read() as txn:
            session = txn.session(row.session_id)
        if session is None:
            return None
        try:
            await check_cached(self._node, self._evictor, session, row)
        except Corrupt as error:
            with self._node.catalog.read() as txn:
                now = txn.shard(row.key)
                if now is None or now.state not in CACHED or is_going(txn, session):
                    return None
                return self._on_shard(txn, session, now, "file_damaged", str(error))
        except (Unavailable, Unsupported) as error:
            return Finding(
                "file_unreadable", "cache", str(error), name=row.name, run=session.run, step=session.step, key=row.key
            )
        return None

    async def _unknown_file(self, key: ShardKey, file: FoundFile) -> Finding | None:
        if self._serving:
            await self._node.clock.sleep(LOOK_TWICE_S)
        with self._node.catalog.read() as txn:
            row = txn.shard(key)
        if (row is not None and row.disk_size) or not await self._node.io.run(file.path.is_file):
            return None
        remedy = "adopt it from its footer, or drop it where no acknowledgement covers it"
        return Finding("file_unknown", "cache", "a sealed file without a row", path=self._shown(file), remedy=remedy, key=key)

    async def _part_files(self) -> AsyncGenerator[Finding, None]:
        for session in self._sessions():
            with self._node.catalog.read() as txn:
                parts = [part for part in txn.parts(session.id) if part.state is PartState.COMMITTED and not part.is_adopted]
            for part in parts:
                path = self._node.cache.part_path(session.id, part.writer, part.commit_seq)
                meant = local_record(self._node, session, part)
                problem, newer = await self._node.io.run(partial(part_file_problem, path, meant))
                if problem and self._still_committed(session, part):
                    finding = Finding(
                        "part_file",
                        "cache",
                        problem,
                        Severity.NOTE if newer else Severity.ERROR,
                        run=session.run,
                        step=session.step,
                        session=session.session,
                        path=str(path.relative_to(self._node.cache.path)),
                        remedy="" if newer else "write it again from the catalog",
                        key=ShardKey(session.id, 0),
                        writer=part.writer,
                    )
                    yield _of_replaced(finding) if session.is_superseded else finding

    def _still_committed(self, session: SessionRow, part: PartRow) -> bool:
        with self._node.catalog.read() as txn:
            now = txn.part(session.id, part.writer)
            return now is not None and now.commit_seq == part.commit_seq and not is_going(txn, session)

    # -- the catalog ---------------------------------------------------------------------------------------------------

    async def _sums(self) -> list[Finding]:
        with self._node.catalog.read() as txn:
            shown = txn.totals()
            if self._serving and shown.shards > RECOUNT_SHARDS_MAX:
                what = f"the sums over {shown.shards} shards are not recounted while the gateway serves; use --offline"
                return [Finding("not_recounted", "catalog", what, Severity.NOTE)]
            counted = txn.recount()
        if shown == counted:
            return []
        what = f"the catalog's sums are {shown} and should be {counted}"
        return [Finding("counters", "catalog", what, remedy="set them to the recount")]

    async def _indexes(self) -> AsyncGenerator[Finding, None]:
        """Pages that do not fit their tree, rows that a flipped bit left readable, entries that lead to the wrong rows."""
        if why := await trial(self._node.cache.path / CATALOG):
            yield Finding("index", "catalog", f"the catalog's file is damaged: {why}", remedy=REBUILD)
        count = 0
        async with aclosing(index_problems(self._node.catalog)) as problems:
            async for problem in problems:
                count += 1
                if count <= INDEX_SHOWN_MAX:
                    yield Finding("index", "catalog", f"the catalog contradicts itself: {problem}", remedy=REBUILD)
        if count > INDEX_SHOWN_MAX:
            what = f"the catalog contradicts itself in {count - INDEX_SHOWN_MAX} more places"
            yield Finding("index", "catalog", what, remedy=REBUILD)

    def _uploads(self) -> list[Finding]:
        """Uploads on record whose copy is not being written: what began them is gone."""
        found = []
        with self._node.catalog.read() as txn:
            for key, tier, upload in txn.uploads():
                copy = txn.copy(key, tier)
                if tier in self._node.tiers and (copy is None or copy.state is not CopyState.WRITING):
                    what = "an upload that was begun and not ended"
                    found.append(
                        Finding(
                            "upload",
                            tier,
                            what,
                            Severity.NOTE,
                            path=upload.key,
                            remedy="abort it",
                            key=key,
                            token=upload.upload_id,
                        )
                    )
        return found

    # -- the tiers -----------------------------------------------------------------------------------------------------

    async def _on_tier(self, session: SessionRow, tier: MonitoredTier, deep: bool) -> AsyncGenerator[Finding, None]:
        with self._node.catalog.read() as txn:
            rows = [(row, copy) for row in txn.shards(session.id) if (copy := txn.copy(row.key, tier.name)) is not None]
            bad = [
                self._copy_finding(txn, session, row, tier, "copy_quarantined", copy.error or "the copy is in quarantine")
                for row, copy in rows
                if copy.state is CopyState.QUARANTINED
            ]
        for finding in bad:
            yield finding
        if not tier.usable:
            return
        try:
            problems = await check_documents(self._node, session, tier)
            absent = next((problem for problem in problems if problem.kind == "manifest" and problem.absent), None)
            documents = [_document_finding(session, tier, problem) for problem in problems]
            if absent is not None:
                found = [finding async for finding in self._copies(session, tier, rows, deep)]
                for finding in await self._without_manifest(session, tier, absent, documents, rows, found):
                    yield finding
                return
            for finding in documents:
                yield finding
            async for finding in self._copies(session, tier, rows, deep):
                yield finding
        except ForebayError as error:
            tier.failed(error)
            yield Finding("tier_unreachable", tier.name, f"the tier failed while it was asked: {error}", Severity.NOTE)

    async def _without_manifest(
        self,
        session: SessionRow,
        tier: MonitoredTier,
        absent: BadDocument,
        documents: Sequence[Finding],
        rows: Sequence[tuple[ShardRow, CopyRow]],
        copies: Sequence[Finding],
    ) -> list[Finding]:
        """The manifest makes it complete for all nodes, so it is written after the copies. Where these are gone too, and no
        other tier has one, somebody may have deleted the checkpoint: then nothing of it is put there again."""
        missing = any(finding.kind == "copy_missing" for finding in copies)
        if missing and not await is_named_elsewhere(self._node, session, absent, tier):
            return [_of_deleted(finding) for finding in (*documents, *copies)]
        if missing or any(copy.state is not CopyState.VERIFIED for _, copy in rows):
            documents = [_not_yet(finding) if finding.kind == "manifest" else finding for finding in documents]
        return [*documents, *copies]

    async def _copies(
        self, session: SessionRow, tier: MonitoredTier, rows: Sequence[tuple[ShardRow, CopyRow]], deep: bool
    ) -> AsyncGenerator[Finding, None]:
        verified = [row for row, copy in rows if copy.state is CopyState.VERIFIED]
        whole: list[tuple[ShardRow, ShardItem]] = []
        for begin in range(0, len(verified), HEADS_AT_ONCE):
            group = verified[begin : begin + HEADS_AT_ONCE]
            heads = await asyncio.gather(*(self._head(session, row, tier) for row in group))
            found = []
            with self._node.catalog.read() as txn:
                for row, problem in zip(group, heads, strict=True):
                    if txn.shard(row.key) is None:
                        continue
                    if problem is None:
                        whole.append((row, shard_item(txn, session, row)))
                    else:
                        found.append(self._copy_finding(txn, session, row, tier, *problem))
            for finding in found:
                yield finding
        for batch in batches(whole) if deep else ():
            errors = await check_copies(self._node, tier, [item for _, item in batch])
            for (row, _), error in zip(batch, errors, strict=True):
                if error is not None:
                    kind = {True: "copy_damaged", False: "copy_unreadable"}[isinstance(error, Corrupt | NotFound)]
                    with self._node.catalog.read() as txn:
                        finding = self._copy_finding(txn, session, row, tier, kind, str(error))
                    yield finding

    async def _head(self, session: SessionRow, row: ShardRow, tier: MonitoredTier) -> tuple[str, str] | None:
        key = shard_key(session.run, session.step, session.session, row.name)
        try:
            info = await tier.tier.head(key)
        except NotFound:
            return "copy_missing", "the copy is gone"
        if info.size != row.size:
            return "copy_damaged", f"the copy has {info.size} bytes and should have {row.size}"
        return None

    def _copy_finding(
        self, txn: ReadTxn, session: SessionRow, row: ShardRow, tier: MonitoredTier, kind: str, what: str
    ) -> Finding:
        sources = [name for name in good_tiers(txn, row, self._node.tiers) if name != tier.name]
        if kind == "copy_unreadable":
            remedy = ""
        elif row.is_cached:
            remedy = "put it again from the cache"
        elif sources:
            remedy = f"fetch it from {' or '.join(sources)} and put it again"
        else:
            remedy, what = "", f"{what}; no other good copy is known"
        return Finding(
            kind,
            tier.name,
            what,
            run=session.run,
            step=session.step,
            session=session.session,
            name=row.name,
            path=shard_key(session.run, session.step, session.session, row.name),
            remedy=remedy,
            key=row.key,
            writer=row.writer,
        )


def _document_finding(session: SessionRow, tier: MonitoredTier, problem: BadDocument) -> Finding:
    return Finding(
        problem.kind,
        tier.name,
        problem.what,
        Severity.NOTE if problem.newer else Severity.ERROR,
        run=session.run,
        step=session.step,
        session=session.session,
        path=problem.key,
        remedy="" if problem.newer else "write it again from another tier or the catalog",
        key=ShardKey(session.id, 0),
        writer=problem.writer,
        token=problem.tag,
    )


def _of_deleted(finding: Finding) -> Finding:
    """Manifest and copies are gone from the tier, and no other tier has the manifest."""
    if finding.kind not in ("manifest", "part_record", "copy_missing"):
        return finding
    beside = "copies with it" if finding.kind == "manifest" else "so is the manifest"
    what = (
        f"{finding.what}, and {beside}: another node may have deleted the checkpoint. `forebay rm` it here too; or, to bring "
        "it back, `forebay restore` it, as long as a copy is left, and save it again"
    )
    return replace(finding, what=what, remedy="")


def _not_yet(finding: Finding) -> Finding:
    """Of a manifest, while there are copies that it would name and that are not there."""
    return replace(finding, what=f"{finding.what}; repair it once its copies are there, so that nobody misses them", remedy="")


def _of_replaced(finding: Finding) -> Finding:
    """A newer session stands in its place on every tier; a gc that was cut off may have begun to delete it."""
    what = f"{finding.what}; nobody restores from this session, a newer one has superseded it"
    return replace(finding, what=what, severity=Severity.NOTE, remedy="")


def file_problem(row: ShardRow, file: FoundFile | None) -> tuple[str, str] | None:
    """(kind, sentence) of what is wrong with a row's file, or with what the row counts for it, by lengths alone."""
    if row.state is ShardState.QUARANTINED:
        return "quarantined", "the cache file is damaged and in quarantine" if row.disk_size else "the cache file is lost"
    if row.state is ShardState.EVICTED and row.disk_size:
        return "disk_size", f"the catalog counts {row.disk_size} bytes for a cache file that was evicted"
    if row.state not in CACHED:
        return None
    if file is None:
        return "file_missing", "the cache file is gone"
    expected = disk_size(row.size, row.chunk_size)
    if file.size != expected:
        return "file_length", f"the cache file has {file.size} bytes and should have {expected}"
    if row.disk_size != expected:
        return "disk_size", f"the catalog counts {row.disk_size} bytes for a cache file of {expected}"
    return None


def part_file_problem(path: Path, meant: PartRecord) -> tuple[str, bool]:
    """What is wrong with a part file, empty for a good one; whether a newer release wrote it, which is to stay. Blocking."""
    try:
        found = PartRecord.from_json(path.read_bytes())
    except FileNotFoundError:
        return "a committed part's file is gone; without it a rebuild of the catalog would not know the commit", False
    except ManifestError as error:
        return what_is_wrong("a committed part's file", error), isinstance(error, NewerVersion)
    except OSError as error:
        return f"a committed part's file cannot be read: {error}", False
    return "" if same_part(found, meant) else "a committed part's file names other shards than the catalog", False


def good_tiers(txn: ReadTxn, row: ShardRow, tiers: Iterable[str] | Mapping[str, MonitoredTier]) -> list[str]:
    """Configured tiers with a VERIFIED copy."""
    copies = txn.copies(row.key)
    return [name for name in tiers if (copy := copies.get(name)) is not None and copy.state is CopyState.VERIFIED]


def is_going(txn: ReadTxn, session: SessionRow) -> bool:
    """Whether its checkpoint is being deleted."""
    checkpoint = txn.checkpoint(session.run, session.step)
    return checkpoint is None or checkpoint.deleting
