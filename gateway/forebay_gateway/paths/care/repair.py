"""What fsck found, mended where it can be: each finding's remedy carried out, one after the other.

Owns which act a kind of finding leads to. Each act looks again before it does anything, goes on to its end also where
the caller goes away, and leaves the finding as it was where it fails; so an interrupted repair is repeated without harm.
"""

from collections.abc import AsyncGenerator
from dataclasses import replace
from functools import partial

from forebay_gateway.base import failpoints
from forebay_gateway.base.tasks import uncut
from forebay_gateway.cache.footer import disk_size
from forebay_gateway.cache.io import disk_errors
from forebay_gateway.catalog import CatalogDamaged, WriteTxn
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.core.records import PartState, ShardKey, ShardRow
from forebay_gateway.core.states import CopyEvent, ShardEvent, ShardState
from forebay_gateway.paths.care.documents import BadDocument, local_record, write_again
from forebay_gateway.paths.care.finding import Finding
from forebay_gateway.paths.care.fsck import Checker
from forebay_gateway.paths.care.mend import Mender
from forebay_gateway.paths.care.rebuild import note_damage
from forebay_gateway.paths.drain import clear_upload
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.recover import adopt_or_drop
from forebay_gateway.paths.safety import copy_lost

REPAIRED = "repaired"
LEFT_TO_OTHERS = ("incoming_file", "orphan_upload", "orphan_lock", "superseded_session")  # start-up's, gc's


class Repairer:
    """Applies remedies."""

    def __init__(self, node: Node, checker: Checker, mender: Mender) -> None:
        self._node, self._checker, self._mender = node, checker, mender

    async def repair(self, apply: bool, deep: bool) -> AsyncGenerator[Finding, None]:
        """Every finding; with `apply` its `outcome` says what came of the remedy."""
        distrusted = False
        async for finding in self._checker.check(deep):
            distrusted = distrusted or finding.kind == "index"
            if not apply or not finding.remedy or finding.kind in LEFT_TO_OTHERS:
                yield finding
                continue
            if distrusted and finding.kind != "index":
                # By a wrong row a good part file would be overwritten, and a rebuild would then find no commit.
                yield replace(finding, outcome="not while the catalog contradicts itself")
                continue
            try:
                outcome = await uncut(self._act(finding), stay=True)
            except (ForebayError, OSError) as error:
                outcome = str(error)
            yield replace(finding, outcome=outcome or REPAIRED)
        self._node.changes.tell()

    async def _act(self, finding: Finding) -> str:
        """Carry the remedy out; empty, or why it could not be."""
        match finding.kind:
            case "file_missing" | "file_length" | "file_damaged" | "quarantined":
                return await self._cache_file(finding)
            case "file_unknown":
                return await self._adopt(finding)
            case "part_file":
                return await self._part_file(finding)
            case "disk_size":
                return await self._disk_size(finding)
            case "counters":
                return await self._sums()
            case "index":
                await self._node.io.run(note_damage, self._node.cache.path, CatalogDamaged(finding.what))
                return "noted: the next start makes the catalog anew"
            case "copy_quarantined" | "copy_missing" | "copy_damaged":
                return await self._copy(finding)
            case "manifest" | "part_record":
                return await self._document(finding)
            case "upload":
                return await self._upload(finding)
        return "there is no remedy for it in this release"

    async def _cache_file(self, finding: Finding) -> str:
        key = _key(finding)
        path = self._node.cache.shard_path(key)
        there = await self._node.io.run(path.is_file)
        before = await self._node.catalog.write(lambda txn: _file_is_bad(txn, key, there))
        failpoints.hit("repair.file_marked")
        if before is None:
            return ""
        if before.freed:
            self._node.budget.freed(before.freed)
        if before.dropped:
            await self._node.io.run(self._node.cache.unlink, path)
            return ""
        return (await self._mender.mend(key)).reason

    async def _adopt(self, finding: Finding) -> str:
        files = await self._node.io.run(lambda: list(self._node.cache.scan()))
        key = _key(finding)
        found = next((file for file in files if (file.session_id, file.shard_id) == key and file.kind == "shard"), None)
        if found is not None:
            await adopt_or_drop(self._node, found)
        return ""

    async def _part_file(self, finding: Finding) -> str:
        key = _key(finding)
        with self._node.catalog.read() as txn:
            session, part = txn.session(key.session_id), txn.part(key.session_id, finding.writer)
        if session is None or part is None or part.state is not PartState.COMMITTED:
            return ""
        document = replace(local_record(self._node, session, part), tiers=session.tiers).to_json()
        write = partial(self._node.cache.write_part, session.id, part.writer, part.commit_seq, document)

        def act() -> None:
            with disk_errors("write a part file", self._node.cache.part_path(session.id, part.writer, part.commit_seq)):
                write()

        await self._node.io.run(act)
        return ""

    async def _disk_size(self, finding: Finding) -> str:
        """By the row's own numbers: the file was seen to have that length."""
        key = _key(finding)

        def act(txn: WriteTxn) -> int:
            row = txn.shard(key)
            if row is None or not (row.is_cached or row.state is ShardState.EVICTED):
                return 0
            expected = disk_size(row.size, row.chunk_size) if row.is_cached else 0
            txn.set_disk_size(key, expected)
            return expected - row.disk_size

        self._node.budget.adopted(await self._node.catalog.write(act))
        return ""

    async def _sums(self) -> str:
        counted = await self._node.catalog.write(lambda txn: txn.rewrite_totals())
        self._node.budget.adopted(counted.used - self._node.budget.used)
        return ""

    async def _copy(self, finding: Finding) -> str:
        key, tier, required = _key(finding), finding.where, self._node.required_tiers
        event = CopyEvent.GONE if finding.kind == "copy_missing" else CopyEvent.MISMATCH
        await self._node.catalog.write(lambda txn: copy_lost(txn, key, tier, event, finding.what, required))
        failpoints.hit("repair.copy_marked")
        return (await self._mender.mend(key)).reason

    async def _document(self, finding: Finding) -> str:
        with self._node.catalog.read() as txn:
            session = txn.session(_key(finding).session_id)
        if session is None:
            return ""
        bad = BadDocument(finding.kind, finding.path, finding.what, not finding.token, finding.writer, finding.token)
        outcome = await write_again(self._node, session, bad, self._node.tier(finding.where))
        failpoints.hit("repair.document_written")
        return outcome

    async def _upload(self, finding: Finding) -> str:
        await self._node.tier(finding.where).tier.abort_upload(finding.path, finding.token)
        await self._node.catalog.write(partial(clear_upload, _key(finding), finding.where))
        return ""


class _Before:
    """What marking a cache file as bad did."""

    def __init__(self, freed: int, dropped: bool) -> None:
        self.freed, self.dropped = freed, dropped


def _file_is_bad(txn: WriteTxn, key: ShardKey, there: bool) -> _Before | None:
    """QUARANTINED, or dropped where its part is open; None where nothing is bad any more."""
    row = txn.shard(key)
    if row is None:
        return None
    part = txn.part(row.session_id, row.writer)
    if part is None or part.state is PartState.OPEN:
        txn.drop_shard(key)
        return _Before(row.disk_size, dropped=True)
    if row.is_cached:
        return _Before(_marked(txn, row, there), dropped=False)
    return _Before(0, dropped=False)


def _marked(txn: WriteTxn, row: ShardRow, there: bool) -> int:
    txn.shard_event(row.key, ShardEvent.MISMATCH, disk_size=row.disk_size if there else 0)
    return 0 if there else row.disk_size


def _key(finding: Finding) -> ShardKey:
    if finding.key is None:
        raise ValueError(f"a finding of kind {finding.kind} without its shard")
    return finding.key
