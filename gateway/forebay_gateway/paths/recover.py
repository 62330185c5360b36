"""Start-up: what a crash left, made whole again by the crash table (ARCHITECTURE.md).

    incoming files: dropped -> EVICTING rows: unlinked again -> rows whose file is bad: a verified copy, else quarantined
    -> sealed files without a row: adopted from their footer -> part files without a committed row: committed again -> marks
    -> later, tier by tier: copies that were under way are proved or queued again, orphan uploads aborted

Owns the repairs and their order. Reads file names and sizes only; a footer is read for files that the catalog does not know.
"""

import asyncio
import json
import logging
import os
from collections.abc import Collection, Iterable, Sequence
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import Footer, disk_size, find_footer
from forebay_gateway.cache.layout import FoundFile
from forebay_gateway.cache.packs import read_index
from forebay_gateway.catalog import ReadTxn, WriteTxn, evicted_row, is_damage
from forebay_gateway.core.errors import (
    AlreadyExists,
    Corrupt,
    ForebayError,
    InvalidArgument,
    NotFound,
    StartupError,
    Unavailable,
    Unsupported,
)
from forebay_gateway.core.layout import announce_key, manifest_key, part_key, run_key, verdicts_key
from forebay_gateway.core.records import PartState, PendingCopy, ShardKey, ShardRow
from forebay_gateway.core.schedule_rows import kind_named
from forebay_gateway.core.states import CopyEvent, CopyState, ShardEvent, ShardState
from forebay_gateway.movers.jobs import CheckJob, ItemDone, ItemFailed, ShardItem
from forebay_gateway.paths.commit import where_to
from forebay_gateway.paths.drain import clear_upload, fail, proved, shard_item
from forebay_gateway.paths.evict import finish_evicting
from forebay_gateway.paths.evictable import mark_evictable
from forebay_gateway.paths.handover import take_clean
from forebay_gateway.paths.joint import may_leave_out, rules_of
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import pages
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import ManifestError, NewerVersion, PartRecord, what_is_wrong
from forebay_wire.packs import PackIndex, is_pack_name

log = logging.getLogger("forebay.recover")

BEGUN_STATES = (CopyState.WRITING, CopyState.WRITTEN)
# What a tier says of one object. Any other failure says nothing about it, and it is asked again.
TELLING_KINDS = frozenset({"not_found", "corrupt", "invalid_argument", "unsupported"})
# What files and rows say of a file that the catalog does not know. Any other failure (a full disk, a sector that cannot be read
# now) says nothing about it: it may be an acknowledged shard, or the proof of a commit, and stays.
JUDGEMENTS = (Corrupt, InvalidArgument, AlreadyExists, NotFound)
CHECKS_A_JOB = 128
CHECK_PAUSE_S = 0.05
LOOKS_A_READ = 500  # queue entries in one read, which holds up the event loop; each costs four look-ups


async def recover(node: Node) -> set[int]:
    """Bring cache and catalog into agreement; runs before the first request is served.

    After an orderly stop nothing is to be brought: the sessions whose files are then to be looked at while the gateway serves
    (check_session) are returned.
    """
    is_clean = await take_clean(node)
    top = await node.io.run(lambda: list(node.cache.scan_top()))
    directories = set(await node.io.run(node.cache.session_ids))
    node.catalog.raise_ids(max([*directories, *(file.shard_id or 0 for file in top)], default=0))
    await node.io.run(node.cache.unlink_many, [file.path for file in top if file.kind == "incoming"])
    failpoints.hit("recover.incoming_gone")
    foreign = [file for file in top if file.kind == "foreign"]
    with node.catalog.read() as txn:
        unsettled = txn.unsettled()
        with_files = set(txn.sessions_with(lambda sums: sums.cached))
    if evicting := [row for row in unsettled if row.state is ShardState.EVICTING]:
        await finish_evicting(node, evicting)
    quarantined = [row for row in unsettled if row.state is ShardState.QUARANTINED]
    for row in quarantined:
        _tell_lost(node, row)
        node.ask_mend(row.key)
    looked_at = with_files | directories | {row.session_id for row in quarantined}
    if not is_clean:
        foreign += await _compare(node, sorted(looked_at))
    await _restore_marks(node)
    with node.catalog.read() as txn:
        dirty = txn.sessions_with(lambda sums: sums.sealed)
    for session_id in dirty:  # perhaps complete everywhere, and killed before that was said of its shards
        await mark_evictable(node, session_id)
    for file in foreign:
        log.warning("a file that is not ours lies in the cache and is left alone path=%s", file.path)
    return looked_at if is_clean else set()


async def _compare(node: Node, session_ids: Sequence[int]) -> list[FoundFile]:
    """Rows against files, a session at a time: a million of both must not be in memory at once. Returns foreign files."""
    strangers: list[FoundFile] = []
    parts: list[FoundFile] = []
    foreign: list[FoundFile] = []
    half_written: list[Path] = []
    for session_id in session_ids:
        sizes, others = await node.io.run(node.cache.scan_session, session_id)
        node.catalog.raise_ids(max(sizes, default=0))
        by_kind = {"part": parts, "foreign": foreign}
        for file in others:
            if file.kind == "incoming":
                half_written.append(file.path)
            else:
                by_kind[file.kind].append(file)
        known: set[int] = set()
        async for rows in pages(node, session_id):
            known.update(row.shard_id for row in rows if row.disk_size)
            for row in rows:
                if row.is_cached and not _size_fits(sizes.get(row.shard_id), row):
                    await _lose(node, row, row.shard_id in sizes)
                    known.discard(row.shard_id)
        for shard_id in sizes.keys() - known:
            key = ShardKey(session_id, shard_id)
            strangers.append(FoundFile("shard", node.cache.shard_path(key), sizes[shard_id], *key))
        for shard_id in [shard_id for shard_id, size in sizes.items() if not size]:
            log.warning("an empty file lies among the shards key=%s", ShardKey(session_id, shard_id))
    await node.io.run(node.cache.unlink_many, half_written)
    await _adopt_files(node, strangers, {file.session_id for file in parts})
    await _commit_parts(node, parts)
    return foreign


async def _restore_marks(node: Node) -> None:
    """What an operator had asked for, where the catalog does not know it any more."""
    restored = await node.marks.restore()
    if restored.problem or restored.lost or (restored.waiting and node.rebuilt):
        log.warning("%s", restored.sentence)
        node.alarms["marks"] = (restored.sentence, "look at what is pinned (`forebay ls`), and delete again what was to go")


async def check_session(node: Node, session_id: int) -> None:
    """What a start after an orderly stop does not do before it serves: rows whose file is gone or of the wrong length. Files
    that come and go meanwhile are their owners' business."""
    sizes, _ = await node.io.run(node.cache.scan_session, session_id)
    async for rows in pages(node, session_id):
        for row in rows:
            if row.is_cached and not _size_fits(sizes.get(row.shard_id), row):
                size = await node.io.run(_size_now, node.cache.shard_path(row.key))  # sealed or fetched since the look
                with node.catalog.read() as txn:
                    still = txn.shard(row.key)
                if still == row and not _size_fits(size, row):
                    await _lose(node, row, size is not None)


class StartCheck:
    """Background: the sessions whose files a clean start did not look at, one after the other."""

    def __init__(self, node: Node, session_ids: Iterable[int]) -> None:
        self._node = node
        self._left = sorted(session_ids, reverse=True)

    async def step(self) -> float | None:
        """One session; the pause in seconds until the next."""
        if self._left:
            await check_session(self._node, self._left[-1])
            self._left.pop()
        return CHECK_PAUSE_S if self._left else None


def _size_now(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _size_fits(size: int | None, row: ShardRow) -> bool:
    return size == disk_size(row.size, row.chunk_size)


async def _lose(node: Node, row: ShardRow, in_place: bool) -> None:
    """A row whose file is gone or of the wrong length: use a verified copy, else alarm."""
    left = await node.catalog.write(partial(_file_lost, row, in_place))
    failpoints.hit("recover.lost")
    node.budget.freed(row.disk_size - left)
    _tell_lost(node, row)
    node.ask_mend(row.key)


def _file_lost(row: ShardRow, in_place: bool, txn: WriteTxn) -> int:
    """The cache's copy is no more; how many bytes of it the cache still counts (a damaged file that is kept for its owner)."""
    if txn.shard(row.key) != row:
        return row.disk_size  # it has moved on since the look
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


async def _adopt_files(node: Node, strangers: Sequence[FoundFile], committed: Collection[int | None]) -> None:
    """Sealed files that the catalog does not know; `committed` are the sessions with the file of a part."""
    # Of two directories of one session the one in which it was committed here counts; the other holds what came from a tier.
    # Newest first: a pack that was made by joining others comes before what is left of them, and holds all that they held.
    for file in sorted(strangers, key=lambda file: (file.session_id in committed, file.shard_id or 0), reverse=True):
        with node.catalog.read() as txn:
            row = txn.shard(ShardKey(file.session_id or 0, file.shard_id or 0))
        if row is None or not row.disk_size:
            await adopt_or_drop(node, file)


async def adopt_or_drop(node: Node, file: FoundFile) -> None:
    """A sealed file without a row: by its footer it is an acknowledged shard, or nothing that anybody was promised.

    Raises StartupError where that cannot be told now.
    """
    try:
        footer, chunks, index = await node.io.run(read_footer, file.path)
        await node.catalog.write(partial(_adopt, file, footer, chunks, index), frees=True)  # also with the last blocks
        failpoints.hit("recover.adopted")
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
    first = "start the release that wrote it" if isinstance(error, Unsupported) else "mend the disk"
    return StartupError(
        f"a file that the catalog does not know cannot be taken in ({error}); it may hold an acknowledged shard or a commit: "
        f"{first}, or move the file away to go on without it, and start again",
        path=file.path,
    )


def read_footer(path: Path) -> tuple[Footer, bytes, PackIndex | None]:
    """Footer and chunk table; of a pack its index too. Blocking. Raises Corrupt, Unsupported for a newer release's, OSError."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        footer, chunks = find_footer(descriptor, os.fstat(descriptor).st_size)
        return footer, chunks, read_index(descriptor, footer.size) if is_pack_name(footer.name) else None
    finally:
        os.close(descriptor)


def _check_stays(txn: ReadTxn, run: str, step: int) -> None:
    checkpoint = txn.checkpoint(run, step)
    if checkpoint is not None and checkpoint.deleting:
        raise InvalidArgument("its checkpoint is being deleted", run=run, step=step)


def _adopt(file: FoundFile, footer: Footer, chunks: bytes, index: PackIndex | None, txn: WriteTxn) -> None:
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
            packed=0 if index is None else len(index),
            packed_size=0 if index is None else index.size,
        ),
        chunks,
        index,
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
            new_ids = [node.catalog.new_id() for _ in record.files()]
            await node.catalog.write(partial(_commit, node, file, record, new_ids), frees=True)
            failpoints.hit("recover.committed")
            log.info("committed a part again from its file run=%s step=%s writer=%s", record.run, record.step, record.writer)
        except NewerVersion as error:
            raise _unjudged(file, Unsupported(what_is_wrong("it", error))) from error
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
    wanted = {shard.name: (shard.size, shard.crc32c) for shard, _ in record.files()}
    if not there.items() <= wanted.items():
        raise Corrupt("the shards in the cache are not those of the part file")
    session = txn.open_session(record.run, record.step, record.session, record.writers, session_id=file.session_id)
    txn.open_part(session.id, record.writer)
    for shard_id, (shard, index) in zip(new_ids, record.files(), strict=True):
        if shard.name not in there:
            _add_evicted(txn, evicted_row(ShardKey(session.id, shard_id), record.writer, shard, index), shard.chunks, index)
    known = record.tiers is None or not record.tiers or set(record.tiers) & set(node.tier_names)
    only, tiers = where_to(node, txn, session.id, record.tiers if known else None)
    kind = kind_named(record.kind)
    txn.commit_part(session.id, record.writer, json.dumps(record.metadata), tiers, file.commit_seq, kind=kind, only=only)
    for row in list(txn.shards(session.id, record.writer)):
        for tier, copy in txn.copies(row.key).items():
            if copy.state is CopyState.PENDING:
                txn.copy_event(row.key, tier, CopyEvent.START)


def _add_evicted(txn: WriteTxn, row: ShardRow, chunks: bytes, index: PackIndex | None) -> None:
    txn.seal(replace(row, state=ShardState.SEALED), chunks, index)
    for event in (ShardEvent.MISMATCH, ShardEvent.EVICT, ShardEvent.UNLINKED):
        txn.shard_event(row.key, event)


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
        failpoints.hit("recover.upload_aborted")
        await node.catalog.write(partial(clear_upload, key, tier.name))
    for run in dict.fromkeys(session.run for session in sessions):
        await tier.tier.sweep(run_key(run))
        if may_leave_out(rules_of(node, tier.name, run)):
            await tier.tier.sweep(verdicts_key(run))
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
        await asyncio.sleep(0)


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
        await self._tier.tier.settle(self._items[index].key)  # the kill may have come before the tier's last act
        failpoints.hit("recover.copy_proved")
        await self._node.catalog.write(lambda txn: proved(txn, key, name, report.tag_on_tier))

    async def item_failed(self, index: int, report: ItemFailed) -> None:
        key, name = self._keys[index], self._tier.name
        if report.failure.kind not in TELLING_KINDS:
            raise Unavailable(report.failure.message, retry_after_s=report.failure.retry_after_s)

        await self._tier.tier.sweep(self._items[index].key)
        failpoints.hit("recover.copy_swept")

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
