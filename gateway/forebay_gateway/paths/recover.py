"""Start-up: what a crash left, made whole again by the crash table (ARCHITECTURE.md).

    incoming files: dropped -> EVICTING rows: unlinked again -> rows whose file is bad: a verified copy, else quarantined
    -> sealed files without a row: adopted from their footer -> part files without a committed row: committed again -> marks
    -> later, tier by tier: copies that were under way are proved or queued again, orphan uploads aborted

Owns the repairs and their order. Reads file names and sizes only; a footer is read for files that the catalog does not know.
"""

import json
import logging
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from forebay_gateway.cache.footer import Footer, disk_size, find_footer
from forebay_gateway.cache.layout import FoundFile
from forebay_gateway.catalog import ReadTxn, WriteTxn, is_damage
from forebay_gateway.core.errors import (
    AlreadyExists,
    Corrupt,
    ForebayError,
    InvalidArgument,
    NotFound,
    StartupError,
    Unavailable,
)
from forebay_gateway.core.layout import announce_key, manifest_key, part_key
from forebay_gateway.core.records import PartState, PendingCopy, ShardKey, ShardRow
from forebay_gateway.core.states import CopyEvent, CopyState, ShardEvent, ShardState
from forebay_gateway.movers.jobs import CheckJob, ItemDone, ItemFailed, ShardItem
from forebay_gateway.paths.complete import mark_evictable
from forebay_gateway.paths.drain import clear_upload, fail, proved, shard_item
from forebay_gateway.paths.evict import finish_evicting
from forebay_gateway.paths.node import Node
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import ManifestError, PartRecord, ShardEntry

log = logging.getLogger("forebay.recover")

BEGUN_STATES = (CopyState.WRITING, CopyState.WRITTEN)
# What a tier says of one object. Any other failure says nothing about it, and it is asked again.
TELLING_KINDS = frozenset({"not_found", "corrupt", "invalid_argument", "unsupported"})
# What files and rows say of a file that the catalog does not know. Any other failure (a full disk, a sector that cannot be read
# now) says nothing about it: it may be an acknowledged shard, or the proof of a commit, and stays.
JUDGEMENTS = (Corrupt, InvalidArgument, AlreadyExists, NotFound)
CHECKS_A_JOB = 128
LOOKS_A_READ = 4096  # queue entries in one read, which holds up the event loop


async def recover(node: Node) -> None:
    """Bring cache and catalog into agreement; runs before the first request is served."""
    found = await node.io.run(lambda: list(node.cache.scan()))
    ids = [number for file in found for number in (file.session_id, file.shard_id) if number is not None]
    node.catalog.raise_ids(max(ids, default=0))
    await node.io.run(node.cache.unlink_many, [file.path for file in found if file.kind == "incoming"])
    files = {
        ShardKey(file.session_id, file.shard_id): file
        for file in found
        if file.kind == "shard" and file.session_id is not None and file.shard_id is not None
    }
    dirty = await _check_rows(node, files)
    await _adopt_files(node, files)
    await _commit_parts(node, [file for file in found if file.kind == "part"])
    await _restore_marks(node)
    for session_id in dirty:  # perhaps complete everywhere, and killed before that was said of its shards
        await mark_evictable(node, session_id)
    for file in found:
        if file.kind == "foreign":
            log.warning("a file that is not ours lies in the cache and is left alone path=%s", file.path)


async def _restore_marks(node: Node) -> None:
    """What an operator had asked for, where the catalog does not know it any more."""
    restored = await node.marks.restore()
    if restored.problem or (restored.lost and node.rebuilt):
        log.warning("%s", restored.sentence)
        node.alarms["marks"] = (restored.sentence, "pin again what is to stay, and delete again what was to go")


async def _check_rows(node: Node, files: dict[ShardKey, FoundFile]) -> set[int]:
    """EVICTING: unlink again. Any other row whose file is gone or of the wrong length: use a verified copy, else alarm.

    Returns the sessions with shards that may not be evicted.
    """
    with node.catalog.read() as txn:
        rows = [row for row in txn.all_shards() if row.disk_size or row.state is ShardState.QUARANTINED]
    evicting = [row for row in rows if row.state is ShardState.EVICTING]
    if evicting:
        await finish_evicting(node, evicting)
    for row in rows:
        bad = row.is_cached and not _file_fits(files.get(row.key), row)
        if bad:
            left = await node.catalog.write(partial(_file_lost, row, row.key in files))
            node.budget.freed(row.disk_size - left)
        if bad or row.state is ShardState.QUARANTINED:
            _tell_lost(node, row)
            node.ask_mend(row.key)
    for key in [key for key, file in files.items() if not file.size]:
        log.warning("an empty file lies among the shards key=%s", key)
    return {row.session_id for row in rows if row.state is ShardState.SEALED}


def _file_fits(file: FoundFile | None, row: ShardRow) -> bool:
    return file is not None and file.size == disk_size(row.size, row.chunk_size)


def _file_lost(row: ShardRow, in_place: bool, txn: WriteTxn) -> int:
    """The cache's copy is no more; how many bytes of it the cache still counts (a damaged file that is kept for its owner)."""
    part = txn.part(row.session_id, row.writer)
    if part is not None and part.state is PartState.OPEN:
        txn.drop_shard(row.key)  # its writer is told at the commit that it has to be put again
        return 0
    moved = txn.shard_event(row.key, ShardEvent.MISMATCH, disk_size=row.disk_size if in_place else 0)
    if _is_on_a_tier(txn, row):
        txn.shard_event(row.key, ShardEvent.EVICT)
        moved = txn.shard_event(row.key, ShardEvent.UNLINKED)
    elif not _is_going(txn, row):
        txn.set_reason(row.session_id, f"shard {row.name!r} is lost: its cache file is bad, and no tier holds a copy")
    return moved.disk_size


def _tell_lost(node: Node, row: ShardRow) -> None:
    with node.catalog.read() as txn:
        if _is_going(txn, row):
            return
        on_a_tier = _is_on_a_tier(txn, row)
    if on_a_tier:
        log.warning("a shard's cache file is gone or damaged; a tier holds it name=%s key=%s", row.name, row.key)
        return
    log.error("a shard's cache file is gone or damaged and no tier holds it name=%s key=%s", row.name, row.key)
    node.alarms[f"lost-{row.session_id}-{row.shard_id}"] = (
        f"shard {row.name!r}: its cache file is gone or damaged and no tier holds a copy",
        "save this step again; `forebay info` names the checkpoint",
    )


def _is_on_a_tier(txn: ReadTxn, row: ShardRow) -> bool:
    return any(copy.state is CopyState.VERIFIED for copy in txn.copies(row.key).values())


def _may_be_on_a_tier(txn: ReadTxn, row: ShardRow) -> bool:
    return any(copy.state in (CopyState.VERIFIED, *BEGUN_STATES) for copy in txn.copies(row.key).values())


def _is_going(txn: ReadTxn, row: ShardRow) -> bool:
    """Whether it belongs to a deletion that has to go on: then a missing file is no loss."""
    session = txn.session(row.session_id)
    checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
    return checkpoint is None or checkpoint.deleting


async def _adopt_files(node: Node, files: dict[ShardKey, FoundFile]) -> None:
    """Sealed files that the catalog does not know."""
    with node.catalog.read() as txn:
        strangers = [file for key, file in files.items() if (row := txn.shard(key)) is None or not row.disk_size]
    for file in strangers:
        await adopt_or_drop(node, file)


async def adopt_or_drop(node: Node, file: FoundFile) -> None:
    """A sealed file without a row: by its footer it is an acknowledged shard, or nothing that anybody was promised.

    Raises StartupError where that cannot be told now.
    """
    try:
        footer, chunks = await node.io.run(_read_footer, file.path)
        await node.catalog.write(partial(_adopt, file, footer, chunks), frees=True)  # also with the catalog's last blocks
        node.budget.adopted(file.size)
        log.info("adopted a sealed file from its footer name=%s run=%s step=%s", footer.name, footer.run, footer.step)
    except FileNotFoundError:
        return  # it went since the look: unlinked again, as what was being evicted
    except JUDGEMENTS as error:
        log.warning("dropped a file that no acknowledgement covers path=%s reason=%s", file.path, error)
        await node.io.run(node.cache.unlink, file.path)
    except (ForebayError, OSError) as error:
        raise _unjudged(file, error) from error


def _unjudged(file: FoundFile, error: Exception) -> Exception:
    """It may have been promised, and nobody can tell now: without it others of its part would be taken for evicted."""
    if is_damage(error):
        return error
    return StartupError(
        f"a file that the catalog does not know cannot be taken in ({error}); it may hold an acknowledged shard or a commit: "
        "mend the disk, or move the file away to go on without it, and start again",
        path=file.path,
    )


def _read_footer(path: Path) -> tuple[Footer, bytes]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return find_footer(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)


def _check_stays(txn: ReadTxn, run: str, step: int) -> None:
    checkpoint = txn.checkpoint(run, step)
    if checkpoint is not None and checkpoint.deleting:
        raise InvalidArgument("its checkpoint is being deleted", run=run, step=step)


def _adopt(file: FoundFile, footer: Footer, chunks: bytes, txn: WriteTxn) -> None:
    assert file.session_id is not None
    assert file.shard_id is not None
    _check_stays(txn, footer.run, footer.step)
    session = txn.open_session(footer.run, footer.step, footer.session, footer.writers, session_id=file.session_id)
    if session.id != file.session_id:
        raise InvalidArgument("the file lies in another session's directory", session_id=session.id)
    key = ShardKey(file.session_id, file.shard_id)
    row = txn.shard(key)
    if row is not None and row.state is ShardState.EVICTED and row.crc32c == footer.crc32c and row.size == footer.size:
        txn.shard_event(key, ShardEvent.FETCHED, disk_size=file.size)  # a fetch that was not recorded
        return
    part = txn.open_part(session.id, footer.writer)
    if part.state is PartState.COMMITTED:
        raise InvalidArgument("its part was committed without it")
    txn.seal(
        ShardRow(
            session_id=session.id,
            shard_id=file.shard_id,
            writer=footer.writer,
            name=footer.name,
            size=footer.size,
            chunk_size=footer.chunk_size,
            crc32c=footer.crc32c,
            state=ShardState.SEALED,
            disk_size=file.size,
        ),
        chunks,
    )


async def _commit_parts(node: Node, files: Sequence[FoundFile]) -> None:
    """A part file is the proof of a commit: commit again what the catalog forgot."""
    for file in sorted(files, key=lambda file: file.commit_seq or 0):
        if file.session_id is None or file.writer is None:
            continue
        with node.catalog.read() as txn:
            part = txn.part(file.session_id, file.writer)
        if part is not None and part.state is PartState.COMMITTED:
            continue
        try:
            record = PartRecord.from_json(await node.io.run(file.path.read_bytes))
            new_ids = [node.catalog.new_id() for _ in record.shards]
            await node.catalog.write(partial(_commit, node, file, record, new_ids), frees=True)
            log.info("committed a part again from its file run=%s step=%s writer=%s", record.run, record.step, record.writer)
        except (ManifestError, *JUDGEMENTS) as error:
            log.warning("dropped a part file that its shards do not bear out path=%s reason=%s", file.path, error)
            await node.io.run(node.cache.unlink, file.path)
        except (ForebayError, OSError) as error:
            raise _unjudged(file, error) from error


def _commit(node: Node, file: FoundFile, record: PartRecord, new_ids: Sequence[int], txn: WriteTxn) -> None:
    """Shards without a file were evicted. Whether they, and all others, are on the tiers is asked there before any is put."""
    assert file.session_id is not None
    _check_stays(txn, record.run, record.step)
    there = {row.name: (row.size, row.crc32c) for row in txn.shards(file.session_id, record.writer)}
    wanted = {shard.name: (shard.size, shard.crc32c) for shard in record.shards}
    if not there.items() <= wanted.items():
        raise Corrupt("the shards in the cache are not those of the part file")
    session = txn.open_session(record.run, record.step, record.session, record.writers, session_id=file.session_id)
    txn.open_part(session.id, record.writer)
    for shard_id, shard in zip(new_ids, record.shards, strict=True):
        if shard.name not in there:
            _add_evicted(txn, ShardKey(session.id, shard_id), record.writer, shard)
    txn.commit_part(session.id, record.writer, json.dumps(record.metadata), node.tier_names, file.commit_seq)
    for row in list(txn.shards(session.id, record.writer)):
        for tier, copy in txn.copies(row.key).items():
            if copy.state is CopyState.PENDING:
                txn.copy_event(row.key, tier, CopyEvent.START)


def _add_evicted(txn: WriteTxn, key: ShardKey, writer: int, shard: ShardEntry) -> None:
    row = ShardRow(*key, writer, shard.name, shard.size, shard.chunk_size, shard.crc32c, ShardState.SEALED, 0)
    txn.seal(row, shard.chunks)
    for event in (ShardEvent.MISMATCH, ShardEvent.EVICT, ShardEvent.UNLINKED):
        txn.shard_event(key, event)


# -- copies that were under way when the last process ended ------------------------------------------------------------


async def recover_copies(node: Node, tier: MonitoredTier) -> None:
    """Prove or queue again every copy that an earlier process had begun on this tier; abort its orphan uploads.

    Raises Unavailable or PermissionDenied while the tier cannot be asked; it is then called again.
    """
    with node.catalog.read() as txn:
        uploads = [(key, upload) for key, name, upload in txn.uploads() if name == tier.name]
        sessions = list(txn.unpublished(tier.name))
    for key, upload in uploads:
        await tier.tier.abort_upload(upload.key, upload.upload_id)
        await node.catalog.write(partial(clear_upload, key, tier.name))
    for session in sessions:
        await tier.tier.sweep(manifest_key(session.run, session.step))
        await tier.tier.sweep(part_key(session.run, session.step, session.session, 0))
        await tier.tier.sweep(announce_key(session.run, session.step, session.session, 0))
    after: PendingCopy | None = None
    while True:
        items, after = _begun(node, tier, after)
        if items:
            job = CheckJob(node.movers.next_job_id(), tier.name, tier.capabilities, tuple(items))
            await node.movers.drain(tier.name, job, _CheckReports(node, tier, items))
        if after is None:
            return


def _begun(node: Node, tier: MonitoredTier, after: PendingCopy | None) -> tuple[list[ShardItem], PendingCopy | None]:
    """The next copies that were begun, and where to go on looking; None at the queue's end."""
    items: list[ShardItem] = []
    with node.catalog.read() as txn:
        for looked, entry in enumerate(txn.pending(tier.name, after), start=1):
            copy, row, session = txn.copy(entry.key, tier.name), txn.shard(entry.key), txn.session(entry.key.session_id)
            if row is not None and session is not None and copy is not None and copy.state in BEGUN_STATES:
                items.append(shard_item(txn, session, row))
            if len(items) >= CHECKS_A_JOB or looked >= LOOKS_A_READ:
                return items, entry
    return items, None


class _CheckReports:
    """Hears a check job: proved copies are VERIFIED, all others go back to the queue."""

    def __init__(self, node: Node, tier: MonitoredTier, items: Sequence[ShardItem]) -> None:
        self._node, self._tier, self._items = node, tier, items
        self._keys = [ShardKey(item.session_id, item.shard_id) for item in items]

    async def upload_begun(self, index: int, upload_id: str) -> None:
        raise AssertionError("a check uploads nothing")

    async def item_done(self, index: int, report: ItemDone) -> None:
        key, name = self._keys[index], self._tier.name
        await self._node.catalog.write(lambda txn: proved(txn, key, name, report.tag_on_tier))

    async def item_failed(self, index: int, report: ItemFailed) -> None:
        key, name = self._keys[index], self._tier.name
        if report.failure.kind not in TELLING_KINDS:
            raise Unavailable(report.failure.message, retry_after_s=report.failure.retry_after_s)

        await self._tier.tier.sweep(self._items[index].key)

        def act(txn: WriteTxn) -> ShardRow | None:
            copy, row = txn.copy(key, name), txn.shard(key)
            if copy is not None and copy.state is CopyState.WRITTEN:
                txn.copy_event(key, name, CopyEvent.GONE)
            else:
                fail(txn, [key], name, "begun before a restart, and not whole on the tier")
            if row is None or row.state is not ShardState.EVICTED or _may_be_on_a_tier(txn, row):
                return None
            txn.set_reason(key.session_id, f"shard {row.name!r} is lost: it is not in the cache, and no tier holds a copy")
            return row

        if (lost := await self._node.catalog.write(act)) is not None:
            _tell_lost(self._node, lost)

    def progress(self, size: int) -> None:
        """Nobody counts."""
