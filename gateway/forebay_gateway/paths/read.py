"""Bytes back to a reader: from this node's cache, else from the tiers, every chunk checked before it is handed on.

    sources by nearness -> chunks, checked -> on a mismatch or an error: quarantine or mark, and go on from the next source
    at the same chunk -> only when none is left: Corrupt or Unavailable, naming what was tried

A shard that is wanted whole and not in the cache is fetched into it by a mover first (one fetch for all who ask), then served
like any other; a small range, or a full cache, streams through. So do the first few shards read out of a pack; then the pack is
fetched. Owns that choice and the fall-over.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import disk_size
from forebay_gateway.cache.reader import ShardReader
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.errors import (
    CacheFull,
    Corrupt,
    ForebayError,
    InvalidArgument,
    NotFound,
    Unavailable,
)
from forebay_gateway.core.layout import manifest_key, shard_key
from forebay_gateway.core.records import CopyRow, NamedShard, PublishState, SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyEvent, CopyState, ShardEvent, ShardState
from forebay_gateway.movers.jobs import FetchJob, FetchSource, Identity, ItemDone, ItemFailed, ShardItem
from forebay_gateway.paths.drain import shard_item
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.removed import was_removed
from forebay_gateway.paths.safety import arrived, copy_lost
from forebay_gateway.paths.wholeness import is_complete
from forebay_gateway.tiers.chunks import verified_chunks
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import unpack_chunk_crcs
from forebay_wire.packs import PackedShard

log = logging.getLogger("forebay.read")

SMALL_RANGE_BYTES = 16 << 20  # a range below this is not worth fetching a larger shard for
ASKED_OFTEN = 8  # shards read out of a pack on a tier: the rest of it will be wanted too
ASKED_PACKS_MAX = 4096
CACHED_STATES = (ShardState.SEALED, ShardState.EVICTABLE)


class Removed(NotFound):
    """Absent since retention took it, or somebody deleted it: no damage. kind stays "not_found"."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Verified bytes at their offset in the shard, with their own CRC32C."""

    offset: int
    crc32c: int
    data: memoryview
    _chunk: memoryview  # what `data` is a part of; those who handed it on hold it too

    def release(self) -> None:
        """Give the memory back now: a buffer of the pool would else be held until the next piece is asked for."""
        self.data.release()
        self._chunk.release()


class ReadPath:
    """All reads of this gateway."""

    def __init__(self, node: Node, finder: Finder, evictor: Evictor) -> None:
        self._node = node
        self._finder = finder
        self._evictor = evictor
        self._fetches: dict[ShardKey, asyncio.Task[bool]] = {}
        self._asked: Counter[ShardKey] = Counter()  # packs, by how many of their shards were read since they were fetched

    async def read(
        self, run: str, step: int, session: str, name: str, offset: int, length: int | None, source: str
    ) -> AsyncGenerator[Piece, None]:
        """The bytes of a range, in order. `source` is "auto", "cache" or a tier's name, which alone is then asked."""
        shard, found = await self.locate(run, step, session, name)
        end = shard.size if length is None else offset + length
        if offset > shard.size or end > shard.size:
            raise InvalidArgument(f"the range ends behind the shard {name!r}", offset=offset, length=length, size=shard.size)
        if source not in ("", "auto", "cache"):
            self._node.tier(source)
        if end == offset:
            return
        if shard.packed is not None:
            yield await self._from_pack(shard.row, shard.packed, found, offset, end, source or "auto")
            return
        stream = _Stream(self, shard.row, self.item(found, shard.row), found, offset, end)
        async with aclosing(stream.pieces(source or "auto")) as pieces:
            async for piece in pieces:
                yield piece

    async def _from_pack(
        self, row: ShardRow, packed: PackedShard, session: SessionRow, offset: int, end: int, source: str
    ) -> Piece:
        """A shard in a pack is small: it is read whole, so that its own checksum too is proved before a byte of it goes out."""
        self.note_asked(row.key, 1)
        stream = _Stream(self, row, self.item(session, row), session, packed.offset, packed.offset + packed.size, packed.name)
        whole = bytearray()
        async with aclosing(stream.pieces(source)) as pieces:
            async for piece in pieces:
                whole += piece.data
                piece.release()
        if crc32c(whole) != packed.crc32c:
            raise Corrupt("the catalog's index of a pack does not fit its bytes; rebuild the catalog", name=packed.name)
        data = memoryview(whole)[offset:end]
        return Piece(offset, crc32c(data), data, memoryview(whole))

    def note_asked(self, key: ShardKey, count: int) -> None:
        """So many shards of this pack were asked for."""
        if len(self._asked) >= ASKED_PACKS_MAX and key not in self._asked:
            self._asked.clear()
        self._asked[key] += count

    def asked_often(self, key: ShardKey) -> bool:
        """Whether so many shards of this pack were asked for that it is better fetched whole; then counted anew."""
        if self._asked[key] < ASKED_OFTEN:
            return False
        del self._asked[key]
        return True

    async def locate(self, run: str, step: int, session: str, name: str) -> tuple[NamedShard, SessionRow]:
        """The shard of a complete session ("": of the one that is complete); raises NotFound, Incomplete, Unavailable."""
        found = await self.session(run, step, session)
        with self._node.catalog.read() as txn:
            shard = txn.named(found.id, name)
        if shard is None:
            raise NotFound(f"the checkpoint has no shard {name!r}", run=run, step=step)
        return shard, found

    async def session(self, run: str, step: int, session: str) -> SessionRow:
        """The complete session of that name ("": the one that is complete); raises NotFound, Incomplete, Unavailable."""
        found: SessionRow | None = None
        if session:
            with self._node.catalog.read() as txn:
                found = txn.find_session(run, step, session)
                checkpoint = txn.checkpoint(run, step)
                if found is not None and (checkpoint is None or checkpoint.deleting or not is_complete(txn, found)):
                    found = None
        if found is None:
            found = (await self._finder.complete(run, step)).session
            if session and found.session != session:
                raise NotFound(f"session {session!r} of this step is not complete", run=run, step=step)
        self._node.read_s[found.id] = self._node.clock.monotonic()
        return found

    def item(self, session: SessionRow, row: ShardRow) -> ShardItem:
        """The shard with its checksums."""
        with self._node.catalog.read() as txn:
            return shard_item(txn, session, row)

    # -- the cache -----------------------------------------------------------------------------------------------------

    def cached(self, key: ShardKey) -> bool:
        """Whether the cache's own file may be used."""
        with self._node.catalog.read() as txn:
            row = txn.shard(key)
        return row is not None and row.state in CACHED_STATES

    def quarantined(self, key: ShardKey) -> bool:
        """Whether the cache's own file is known to be bad."""
        with self._node.catalog.read() as txn:
            row = txn.shard(key)
        return row is not None and row.state is ShardState.QUARANTINED

    async def from_cache(self, item: ShardItem, first: int, stop: int) -> AsyncGenerator[memoryview, None]:
        """Chunks `first` to `stop` from the cache file; the file is held against eviction meanwhile."""
        key = ShardKey(item.session_id, item.shard_id)
        self._evictor.hold(key)
        try:
            reader = await ShardReader.open(
                self._node.cache,
                self._node.io,
                self._node.cache.shard_path(key),
                size=item.size,
                chunk_size=item.chunk_size,
                crc32c=item.crc32c,
                chunks=item.chunks,
                direct_io=self._node.cache.direct_io,
            )
            try:
                async with aclosing(reader.chunks_from(first, stop)) as chunks:
                    async for _, chunk in chunks:
                        yield chunk
            finally:
                await reader.close()
        finally:
            self._evictor.let_go(key)

    async def cache_is_bad(self, item: ShardItem, error: Corrupt) -> None:
        """First sight of damage: no one reads this file again."""
        key = ShardKey(item.session_id, item.shard_id)

        def act(txn: WriteTxn) -> bool:
            row = txn.shard(key)
            if row is None or row.state not in CACHED_STATES:
                return False  # evicted before it was opened, or seen to be bad by another
            txn.shard_event(key, ShardEvent.MISMATCH)
            return True

        if not await self._node.catalog.write(act):
            return
        self._node.ask_mend(key)
        log.warning("a shard in the cache is damaged and quarantined key=%s error=%s", item.key, error)
        self._node.alarms[f"quarantine-{key.session_id}-{key.shard_id}"] = (
            f"the cache's copy of {item.key} is damaged: {error}",
            "nothing to do where a tier holds a verified copy; else save the step again",
        )

    # -- the tiers -----------------------------------------------------------------------------------------------------

    async def tiers_with(self, session: SessionRow, key: ShardKey) -> list[MonitoredTier]:
        """Usable tiers that hold a verified copy, nearest first."""
        copies = self.copies(key)
        unknown = [tier for tier in self._node.usable_tiers() if tier.name not in copies]
        if unknown:
            await self._finder.learn_copies(session, unknown)
            copies = self.copies(key)
        return [
            tier
            for tier in self._node.usable_tiers()
            if (copy := copies.get(tier.name)) is not None and copy.state is CopyState.VERIFIED
        ]

    def copies(self, key: ShardKey) -> dict[str, CopyRow]:
        """All copies known here, good or bad."""
        with self._node.catalog.read() as txn:
            return txn.copies(key)

    def may_hold(self, key: ShardKey, name: str) -> bool:
        """Whether the tier cannot be asked now, or its copy is still being proved: then nobody knows that it holds none."""
        with self._node.catalog.read() as txn:
            copy = txn.copies(key).get(name)
        begun = copy is not None and copy.state in (CopyState.WRITING, CopyState.WRITTEN)
        return begun or any(tier.name == name for tier in self._node.unreachable_tiers())

    def unreachable(self) -> list[MonitoredTier]:
        """Tiers that may hold a copy we cannot see now."""
        return self._node.unreachable_tiers()

    async def copy_is_bad(self, key: ShardKey, tier: MonitoredTier, error: ForebayError) -> ForebayError:
        """Mark what a read found: a mismatch quarantines the copy, an authoritative absence makes it pending again. Returns
        what is believed: an absence counts only when the tier says it twice."""
        if isinstance(error, NotFound):
            error = await self._asked_again(key, tier, error)
        if not isinstance(error, Corrupt | NotFound):
            tier.failed(error)
            return error
        if isinstance(error, NotFound) and await self._was_removed(key, tier):
            return Removed("the checkpoint was removed from the tier", tier=tier.name)
        event = CopyEvent.MISMATCH if isinstance(error, Corrupt) else CopyEvent.GONE

        required = self._node.required_tiers
        if await self._node.catalog.write(lambda txn: copy_lost(txn, key, tier.name, event, str(error), required)):
            log.warning("a copy on a tier is bad tier=%s error=%s", tier.name, error)
        self._node.ask_mend(key)
        return error

    async def _was_removed(self, key: ShardKey, tier: MonitoredTier) -> bool:
        """Whether its absence is no damage, by the run's ledger, or as the manifest is gone too: another node may have deleted
        the checkpoint, and fsck tells. Then it is not put there again."""
        with self._node.catalog.read() as txn:
            session = txn.session(key.session_id)
        if session is None or await was_removed(self._node, tier, session):
            return session is not None
        if session.publish.get(tier.name) is not PublishState.COMPLETE:
            return False
        try:
            await tier.tier.head(manifest_key(session.run, session.step))
        except NotFound:
            return True
        except ForebayError as error:
            tier.failed(error)
        return False

    async def _asked_again(self, key: ShardKey, tier: MonitoredTier, error: NotFound) -> ForebayError:
        with self._node.catalog.read() as txn:
            session, row = txn.session(key.session_id), txn.shard(key)
        if session is None or row is None:
            return error
        try:
            await tier.tier.head(shard_key(session.run, session.step, session.session, row.name))
        except ForebayError as answer:
            return answer
        return Unavailable("the tier denied a copy that it shows", retry_after_s=1.0, tier=tier.name, name=row.name)

    async def fetch(self, session: SessionRow, row: ShardRow, item: ShardItem) -> bool:
        """Bring the shard into the cache, once for all who ask; False where that cannot be now."""
        task = self._fetches.get(row.key)
        if task is None:
            task = asyncio.create_task(self._fetch(session, row, item))
            self._fetches[row.key] = task
            task.add_done_callback(lambda _task: self._fetches.pop(row.key, None))
        return await asyncio.shield(task)

    async def _fetch(self, session: SessionRow, row: ShardRow, item: ShardItem) -> bool:
        sources = await self.tiers_with(session, row.key)
        if not sources or self._node.budget.disk.reason:
            return False
        size = disk_size(item.size, item.chunk_size)
        try:
            if self._node.budget.waiting or not await self._evictor.make_room(size):
                return False  # saves wait for space: the bytes stream through
            reservation = self._node.budget.reserve(size)
        except (CacheFull, InvalidArgument):
            return False
        reports = _FetchReports(self, row.key, {tier.name: tier for tier in sources})
        job = FetchJob(
            self._node.movers.next_job_id(),
            item,
            Identity(session.run, session.step, session.session, row.writer, session.writers, row.name),
            tuple(FetchSource(tier.name, tier.capabilities) for tier in sources),
        )
        try:
            await self._node.io.run(self._node.cache.make_session_dir, row.session_id)
            await self._node.movers.fetch(job, reports)
            if reports.disk_size is None:
                return False
            fetched, required = reports.disk_size, self._node.required_tiers
            failpoints.hit("fetch.before_catalog")
            replaced = await self._node.catalog.write(lambda txn: arrived(txn, row.key, fetched, required))
            reservation.settle(fetched)
            if replaced:
                self._node.budget.freed(replaced)
        except NotFound as error:
            log.info("a fetch came too late key=%s error=%s", item.key, error)
            await self._node.io.run(self._node.cache.unlink, self._node.cache.shard_path(row.key))
            return False
        except (CacheFull, Unavailable) as error:
            log.info("a fetch did not finish key=%s error=%s", item.key, error)
            await self._drop_fetched(row.key)
            return False
        finally:
            reservation.release()
        return True

    async def _drop_fetched(self, key: ShardKey) -> None:
        """What a fetch that was not recorded has left. A mover that died had no time to; the next fetch needs the name."""
        cache = self._node.cache
        with self._node.catalog.read() as txn:
            row = txn.shard(key)
        paths = [cache.incoming_path(key.shard_id)]
        if row is None or row.state is ShardState.EVICTED:
            paths.append(cache.shard_path(key))
        try:
            await self._node.io.run(cache.unlink_many, paths)
        except ForebayError as error:
            log.warning("cannot remove what a fetch left; the next start does error=%s", error)


class _FetchReports:
    """Hears one fetch job."""

    def __init__(self, path: ReadPath, key: ShardKey, tiers: dict[str, MonitoredTier]) -> None:
        self._path = path
        self._key = key
        self._tiers = tiers
        self.disk_size: int | None = None

    async def upload_begun(self, index: int, upload_id: str) -> None:
        raise AssertionError("a fetch uploads nothing")

    async def item_done(self, index: int, report: ItemDone) -> None:
        self.disk_size = report.disk_size

    async def item_failed(self, index: int, report: ItemFailed) -> None:
        failure = report.failure
        error = failure.error
        if report.source:
            await self._path.copy_is_bad(self._key, self._tiers[report.source], error)
        else:
            log.info("a fetch failed error=%s", error)

    def progress(self, size: int) -> None:
        """Nobody counts."""


class _Stream:
    """One read under way: where it is, and what has been tried."""

    def __init__(
        self, path: ReadPath, row: ShardRow, item: ShardItem, session: SessionRow, offset: int, end: int, name: str = ""
    ) -> None:
        self._path, self._row, self._item, self._session = path, row, item, session
        self._name = name or row.name
        self._offset, self._end = offset, end
        self._at = offset // item.chunk_size  # the next chunk
        self._stop = -(-end // item.chunk_size)
        self._errors: dict[str, ForebayError] = {}

    async def pieces(self, source: str) -> AsyncGenerator[Piece, None]:
        """All pieces, whatever it takes."""
        if source in ("auto", "cache"):
            async with aclosing(self._try_cache(fetch=source == "auto")) as pieces:
                async for piece in pieces:
                    yield piece
        if self._at < self._stop and source != "cache":
            tiers = await self._path.tiers_with(self._session, self._row.key)
            for tier in tiers if source == "auto" else [tier for tier in tiers if tier.name == source]:
                async with aclosing(self._try_tier(tier)) as pieces:
                    async for piece in pieces:
                        yield piece
                if self._at >= self._stop:
                    break
        if self._at < self._stop:
            raise self._failure(source)

    async def _try_cache(self, fetch: bool) -> AsyncGenerator[Piece, None]:
        if not self._path.cached(self._row.key):
            if not fetch or self._row.state is not ShardState.EVICTED or not self._worth_fetching():
                return
            if not await self._path.fetch(self._session, self._row, self._item):
                return
        try:
            async with aclosing(self._path.from_cache(self._item, self._at, self._stop)) as chunks:
                async for chunk in chunks:
                    yield self._piece(chunk)
        except Corrupt as error:
            self._errors["cache"] = error
            await self._path.cache_is_bad(self._item, error)
        except Unavailable as error:
            self._errors["cache"] = error
            log.warning("the cache could not be read, going on from a tier key=%s error=%s", self._item.key, error)

    def _worth_fetching(self) -> bool:
        return is_worth_fetching(self._row, self._end - self._offset) or self._path.asked_often(self._row.key)

    async def _try_tier(self, tier: MonitoredTier) -> AsyncGenerator[Piece, None]:
        item = self._item
        crcs = unpack_chunk_crcs(item.chunks)
        try:
            chunks = verified_chunks(tier.tier, item.key, item.size, item.chunk_size, crcs, self._at, self._stop)
            async with aclosing(chunks):
                async for chunk in chunks:
                    yield self._piece(chunk)
        except ForebayError as error:
            self._errors[tier.name] = await self._path.copy_is_bad(self._row.key, tier, error)

    def _piece(self, chunk: memoryview) -> Piece:
        """The wanted part of the next chunk. The CRC of a whole chunk is known; of a part it is computed from checked bytes."""
        begin = self._at * self._item.chunk_size
        low, high = max(self._offset, begin), min(self._end, begin + len(chunk))
        data = chunk[low - begin : high - begin]
        if len(data) == len(chunk):
            crc = int.from_bytes(self._item.chunks[4 * self._at : 4 * self._at + 4], "little")
        else:
            crc = crc32c(data)
        self._at += 1
        return Piece(low, crc, data, chunk)

    def _note_quarantined(self, source: str) -> None:
        """Copies that this stream did not read itself: a fetch, or an earlier reader, has seen that they are bad."""
        for name, copy in self._path.copies(self._row.key).items():
            if copy.state is CopyState.QUARANTINED and source in ("auto", name):
                self._errors.setdefault(name, Corrupt("the copy is quarantined"))
        if source in ("auto", "cache") and self._path.quarantined(self._row.key):
            self._errors.setdefault("cache", Corrupt("the cache's copy is quarantined"))

    def _failure(self, source: str) -> ForebayError:
        self._note_quarantined(source)
        tried = ", ".join(f"{name}: {error.sentence}" for name, error in self._errors.items()) or "no copy is there"
        details: dict[str, Any] = {"name": self._name, "chunk": self._at}
        if self._errors and all(isinstance(error, Removed) for error in self._errors.values()) and not self._path.unreachable():
            return NotFound("this checkpoint was removed while it was read; read another one", **details)
        if self._errors and all(isinstance(error, Corrupt | NotFound) for error in self._errors.values()):
            away = self._path.unreachable()
            if source != "auto" or not away:
                return Corrupt(f"no good copy of the shard is left ({tried})", **details)
        if source not in ("auto", "") and not self._errors and not self._path.may_hold(self._row.key, source):
            return NotFound(f"{source} holds no copy of this shard", **details)
        return Unavailable(f"no copy of the shard can be read now ({tried})", retry_after_s=2.0, **details)


def is_worth_fetching(row: ShardRow, wanted_bytes: int) -> bool:
    """Whether that much of the shard justifies bringing all of it into the cache."""
    return wanted_bytes >= SMALL_RANGE_BYTES or wanted_bytes * 2 >= row.size
