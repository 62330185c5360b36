"""A shard from a client's stream into the cache, up to the acknowledgement `cache`.

    begin: names checked, space reserved      -> the client may send
    chunk: CRC checked, written to the disk   -> in order, on credit
    finish: footer, fsync, rename, directory fsync, catalog synced -> receipt

Owns the order of these acts and what is undone when one fails. What was not acknowledged leaves nothing behind.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from forebay_gateway.admission.budget import Reservation
from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import disk_size
from forebay_gateway.cache.writer import SealedFile, ShardWriter
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.errors import AlreadyExists, CacheFull, Corrupt, ForebayError, InvalidArgument, NotFound, Unavailable
from forebay_gateway.core.layout import announce_key, shard_key
from forebay_gateway.core.records import NamedShard, PartState, ShardKey, ShardRow
from forebay_gateway.core.states import ShardEvent, ShardState, next_shard_state
from forebay_gateway.movers.jobs import Identity
from forebay_gateway.paths.admit import Admitter
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.node import Node
from forebay_wire.checksums import combine, crc32c
from forebay_wire.names import InvalidName, check_run, check_session, check_shard_name, check_step
from forebay_wire.packs import PackIndex, pack_name

log = logging.getLogger("forebay.write")

MAX_WRITERS = 1 << 20
GROWTH_BYTES_MAX = 64 << 20  # reserved at a time for a stream whose length is not known; less in a small cache
S3_KEY_BYTES_MAX = 1024  # https://docs.aws.amazon.com/AmazonS3/latest/userguide/object-keys.html


@dataclass(frozen=True, slots=True)
class PartRef:
    """One writer of one session of one checkpoint."""

    run: str
    step: int
    session: str
    writer: int
    writers: int

    def check(self) -> None:
        """Raise InvalidArgument that says which rule is broken."""
        try:
            check_run(self.run)
            check_step(self.step)
            check_session(self.session)
        except InvalidName as error:
            raise InvalidArgument(str(error)) from error
        if not 1 <= self.writers <= MAX_WRITERS:
            raise InvalidArgument(f"writers must be 1 to {MAX_WRITERS}", writers=self.writers)
        if self.writer >= self.writers:
            raise InvalidArgument("writer must be below writers", writer=self.writer, writers=self.writers)


@dataclass(frozen=True, slots=True)
class Receipt:
    """What is durable now, and where."""

    name: str
    size: int
    crc32c: int
    level: str = "cache"


@dataclass(frozen=True, slots=True)
class Admission:
    """A shard that may come in: its key, its space, its name. Ends by settle() or give_back()."""

    key: ShardKey
    reservation: Reservation
    claim: contextlib.ExitStack

    def settle(self, disk_bytes: int) -> None:
        """The shard is a sealed file of that length now."""
        self.reservation.settle(disk_bytes)
        self.claim.close()

    def give_back(self) -> None:
        """Nothing came of it."""
        self.reservation.release()
        self.claim.close()


class WritePath:
    """All streams of this gateway."""

    def __init__(self, node: Node, evictor: Evictor) -> None:
        self._node = node
        self.admitter = Admitter(node, evictor)
        self._receiving: dict[tuple[int, str], int] = {}  # (session, shard name): writer that streams it now
        self._streaming: Counter[tuple[int, int]] = Counter()  # (session, writer): streams under way
        self._last_heard_s: dict[tuple[int, int], float] = {}  # (session, writer): monotonic
        self.open_streams = 0
        self._idle = asyncio.Event()
        self._idle.set()
        prefixes = [f"{tier.prefix}/" if tier.prefix else "" for tier in node.config.tiers if tier.kind == "s3"]
        self._key_bytes_max = S3_KEY_BYTES_MAX - max(len(prefix.encode()) for prefix in prefixes) if prefixes else 1 << 30
        self.growth_bytes = min(GROWTH_BYTES_MAX, max(4 * node.config.cache.chunk_size, node.budget.capacity // 64))

    # -- one shard by stream -------------------------------------------------------------------------------------------

    async def begin(self, part: PartRef, name: str, size: int | None, wait_s: float = 0.0) -> "Incoming | Existing":
        """Check and reserve, waiting for space up to `wait_s` seconds; nothing is left behind when it raises."""
        with self._node.disk_refusals_shown():
            return await self._begin(part, name, size, wait_s)

    async def _begin(self, part: PartRef, name: str, size: int | None, wait_s: float) -> "Incoming | Existing":
        admitted = await self.admit(part, name, size, wait_s)
        if isinstance(admitted, Existing):
            return admitted
        chunk_size = self._node.config.cache.chunk_size
        try:
            writer = await ShardWriter.create(self._node.cache, self._node.io, admitted.key, size=size, chunk_size=chunk_size)
        except BaseException:
            admitted.give_back()
            raise
        if size is not None:
            admitted.reservation.unwritten(0)  # the file has its blocks
        return Incoming(self, part, name, size, admitted, writer)

    async def admit(self, part: PartRef, name: str, size: int | None, wait_s: float = 0.0) -> "Admission | Existing":
        """Names checked, the name claimed, space reserved; whoever brings the bytes, on whatever lane, begins here."""
        self.checked_name(part, name)
        session_id = await self.open_part(part)
        if (existing := self.existing(session_id, part, name)) is not None:
            return Existing(self.receipt(existing))
        claim = self.claim(session_id, part, name)
        try:
            chunk_size = self._node.config.cache.chunk_size
            wanted = disk_size(self._first_bytes(part.run) if size is None else size, chunk_size)
            reservation = await self.reserve(wanted, part, wait_s)
        except BaseException:
            claim.close()
            raise
        return Admission(ShardKey(session_id, self._node.catalog.new_id()), reservation, claim)

    def _first_bytes(self, run: str) -> int:
        """For a stream whose length is not known: a small quota must not keep all such streams out."""
        quota = self._node.budget.quotas.limit_of(run)
        return self.growth_bytes if quota is None else min(self.growth_bytes, quota // 4)

    def claim(self, session_id: int, part: PartRef, name: str) -> contextlib.ExitStack:
        """One stream a name at a time."""
        key = (session_id, name)
        if (holder := self._receiving.get(key)) is not None:
            if holder != part.writer:
                raise AlreadyExists(f"shard {name!r} is being written by another writer", writer=holder)
            raise Unavailable(f"shard {name!r} is being written by another stream", retry_after_s=0.5, writer=holder)
        self._receiving[key] = part.writer
        self._streaming[session_id, part.writer] += 1
        self.open_streams += 1
        self._idle.clear()
        self._tell_movers()

        def give_back() -> None:
            del self._receiving[key]
            self._streaming[session_id, part.writer] -= 1
            if not self._streaming[session_id, part.writer]:
                del self._streaming[session_id, part.writer]
            self.open_streams -= 1
            if not self.open_streams:
                self._idle.set()
                self._tell_movers()

        stack = contextlib.ExitStack()
        stack.callback(give_back)
        return stack

    def under_way(self, session_id: int) -> list[str]:
        """Names of the session's shards that are on their way in now."""
        return [name for session, name in self._receiving if session == session_id]

    def _tell_movers(self) -> None:
        """Whether drains should step back; above the soft watermark it is they that saves wait for."""
        node = self._node
        node.movers.saves(bool(self.open_streams) and not node.preemptions and node.budget.pressure().level == "ok")

    async def settled(self, timeout_s: float) -> None:
        """Until every stream is sealed or undone, at most `timeout_s`. Others tell them to end."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._idle.wait(), timeout_s)

    # -- shared --------------------------------------------------------------------------------------------------------

    def checked_name(self, part: PartRef, name: str) -> str:
        """The shard's name, or InvalidArgument; also for one that some tier could never take: it could be acknowledged, and
        would then stay in the cache for good."""
        part.check()
        check_name(name)
        shard = shard_key(part.run, part.step, part.session, name)
        announcement = announce_key(part.run, part.step, part.session, part.writer)
        pack = shard_key(part.run, part.step, part.session, pack_name(part.writer, "0" * 16))
        length = max(len(key.encode()) for key in (shard, announcement, pack))
        if length > self._key_bytes_max:
            raise InvalidArgument(
                f"run and shard name together are too long for an object store's keys: {name!r}",
                key_bytes=length,
                limit_bytes=self._key_bytes_max,
            )
        return name

    async def open_part(self, part: PartRef) -> int:
        """The session's number, its rows created where this is the first that is heard of it."""
        part.check()
        with self._node.catalog.read() as txn:
            session = txn.find_session(part.run, part.step, part.session)
            checkpoint = txn.checkpoint(part.run, part.step)
            known = session is not None and txn.part(session.id, part.writer) is not None
        if checkpoint is not None and checkpoint.deleting:
            raise Unavailable("this checkpoint is being deleted", retry_after_s=1.0, run=part.run, step=part.step)
        if session is None or not known or session.writers != part.writers:
            new_id = self._node.catalog.new_id()

            def act(txn: WriteTxn) -> int:
                row = txn.open_session(part.run, part.step, part.session, part.writers, session_id=new_id)
                txn.open_part(row.id, part.writer)
                return row.id

            session_id = await self._node.catalog.write(act)
            self._node.changes.tell()
        else:
            session_id = session.id
        now_s = self._node.clock.monotonic()
        self._last_heard_s[session_id, part.writer] = now_s
        self._node.first_seen_s.setdefault(session_id, now_s)
        return session_id

    def silent_for_s(self, session_id: int, writer: int) -> float:
        """Seconds since this part was last heard of; counted from the gateway's start for parts of an earlier process."""
        key = (session_id, writer)
        if key in self._streaming:
            return 0.0
        now_s = self._node.clock.monotonic()
        return now_s - self._last_heard_s.setdefault(key, now_s)

    def forget(self, session_id: int, writer: int) -> None:
        """The part is committed or gone."""
        self._last_heard_s.pop((session_id, writer), None)

    def remember_only(self, parts: Collection[tuple[int, int]]) -> None:
        """Forget all that are not among these (session, writer) and do not stream: asked about after their end, or gone."""
        for key in [key for key in self._last_heard_s if key not in parts and key not in self._streaming]:
            del self._last_heard_s[key]

    def existing(self, session_id: int, part: PartRef, name: str) -> NamedShard | None:
        """What this writer has put under the name; raises AlreadyExists where it is another writer's, or the part is closed."""
        with self._node.catalog.read() as txn:
            row = txn.named(session_id, name)
            state = txn.part(session_id, part.writer)
        if row is not None and row.writer != part.writer:
            raise AlreadyExists(f"shard {name!r} of this checkpoint was put by another writer", writer=row.writer)
        if row is None and state is not None and state.state is PartState.COMMITTED:
            raise AlreadyExists(
                f"the part is committed and holds no shard {name!r}; save again under a new session",
                run=part.run,
                step=part.step,
                writer=part.writer,
            )
        return row

    def receipt(self, shard: NamedShard) -> Receipt:
        """Of a shard that was put before."""
        return Receipt(shard.name, shard.size, shard.crc32c, self._node.level_of(shard.row))

    async def reserve(self, size: int, part: PartRef, wait_s: float = 0.0) -> Reservation:
        """Space for a writer's bytes. See Admitter.reserve."""
        try:
            return await self.admitter.reserve(size, part.run, part.writer, wait_s)
        except CacheFull as error:
            raise self.admitter.refused(error, part.run, part.step, part.session, size) from None
        finally:
            self._tell_movers()

    async def grow(self, reservation: Reservation, size: int) -> None:
        """For a stream whose length is not known. Raises CacheFull."""
        try:
            await self.admitter.grow(reservation, size, self.growth_bytes)
        finally:
            self._tell_movers()

    async def record(
        self, writer: int, rows: Sequence[tuple[ShardRow, bytes]], indexes: Mapping[ShardKey, PackIndex] | None = None
    ) -> None:
        """The files are durable; make the catalog say so, synced: rows with chunk tables, and the `indexes` of those that are
        packs. The files are dropped where it refuses."""

        def act(txn: WriteTxn) -> None:
            for row, chunks in rows:
                part = txn.part(row.session_id, writer)
                if part is None:
                    raise NotFound("the part was aborted while this shard was on its way", writer=writer)
                if part.state is PartState.COMMITTED:
                    raise AlreadyExists("the part was committed while this shard was on its way", writer=writer)
                txn.seal(row, chunks, (indexes or {}).get(row.key))

        try:
            await self._node.catalog.write(act)
        except BaseException:
            if not self._node.catalog.is_failed:  # else it may hold them; recovery compares
                await self.drop_files([row.key for row, _ in rows])
            raise
        self._node.budget.disk.worked()

    async def drop_files(self, keys: Sequence[ShardKey]) -> None:
        """Of shards that were not acknowledged; why they were not is what the caller hears."""
        paths = [self._node.cache.shard_path(key) for key in keys]
        failpoints.hit("write.refused")
        try:
            await self._node.io.run(self._node.cache.unlink_many, paths)
        except ForebayError as error:
            log.warning("cannot remove files that no acknowledgement covers; the next start looks again error=%s", error)


class Existing:
    """This writer has put this name before: only an equal shard is acknowledged again."""

    def __init__(self, receipt: Receipt) -> None:
        self.receipt = receipt
        self._offset = 0
        self._crc = 0

    def compare(self, size: int, crc: int) -> Receipt:
        """The receipt again, or AlreadyExists."""
        if (size, crc) != (self.receipt.size, self.receipt.crc32c):
            raise AlreadyExists(
                f"shard {self.receipt.name!r} is there with other content",
                size=self.receipt.size,
                crc32c=f"{self.receipt.crc32c:08x}",
                offered_size=size,
                offered_crc32c=f"{crc:08x}",
            )
        return self.receipt

    async def chunk(self, offset: int, crc: int, data: memoryview) -> None:
        """For clients that send the bytes all the same: they are checked, then compared at the end by their CRC."""
        if crc32c(data) != crc:
            raise Corrupt("a chunk arrived damaged", offset=offset)
        if not data.nbytes:
            raise InvalidArgument("a chunk of a wrong length", offset=offset, length=0)
        if offset != self._offset:
            raise InvalidArgument("chunks must come in order, each once", expected_offset=self._offset, offset=offset)
        self._offset += len(data)
        self._crc = combine(self._crc, crc, len(data))

    async def finish(self, size: int, crc: int) -> Receipt:
        """The receipt again if what was offered is equal."""
        if self._offset and (self._offset, self._crc) != (size, crc):
            raise InvalidArgument("the trailer does not fit the chunks", size=size, received_bytes=self._offset)
        return self.compare(size, crc)

    async def discard(self) -> None:
        """Nothing to undo."""


class Incoming:
    """A shard on its way in. Ends by finish() or discard(); discard is idempotent."""

    def __init__(
        self,
        path: WritePath,
        part: PartRef,
        name: str,
        size: int | None,
        admitted: Admission,
        writer: ShardWriter,
    ) -> None:
        self._path, self._part, self._name, self._size = path, part, name, size
        self._admitted, self._writer = admitted, writer
        self._chunk_size = path._node.config.cache.chunk_size
        self._offset = 0
        self._state = ShardState.RECEIVING
        self._sealing: asyncio.Future[Receipt] | None = None

    async def chunk(self, offset: int, crc: int, data: memoryview) -> None:
        """The next chunk; returns when there is credit for one more."""
        if offset != self._offset:
            raise InvalidArgument(
                f"shard {self._name!r}: chunks must come in order, each once", expected_offset=self._offset, offset=offset
            )
        end = offset + len(data)
        if self._size is not None and end > self._size:
            raise InvalidArgument(f"shard {self._name!r}: more bytes than announced", size=self._size, received_bytes=end)
        with self._path._node.disk_refusals_shown():
            if self._size is None and (more := disk_size(end, self._chunk_size) - self._admitted.reservation.size) > 0:
                await self._path.grow(self._admitted.reservation, more)
            self._offset = end
            await self._writer.write_chunk(crc, data)
        await self._path.admitter.slow_chunk(len(data), self._part.run)

    async def finish(self, size: int, crc: int) -> Receipt:
        """Durable, or an error and nothing left."""
        check_sizes(self._name, size, self._offset, self._size)
        # From here on a client that goes away changes nothing: the catalog's answer decides what happens to the file.
        self._sealing = asyncio.ensure_future(self._seal(size, crc))
        return await asyncio.shield(self._sealing)

    async def _seal(self, size: int, crc: int) -> Receipt:
        try:
            with self._path._node.disk_refusals_shown():
                sealed = await self._writer.seal(identity(self._part, self._name), size=size, crc32c=crc)
                row = shard_row(self._admitted.key, self._part, self._name, self._chunk_size, sealed)
                await self._path.record(self._part.writer, [(row, sealed.chunks)])
        except BaseException:
            await self._undo()
            raise
        self._state = next_shard_state(self._state, ShardEvent.SEAL)
        self._admitted.settle(sealed.disk_size)
        return Receipt(self._name, size, crc)

    async def discard(self) -> None:
        """Undo everything that is not acknowledged; waits for a seal that is under way."""
        if self._sealing is not None:
            await asyncio.wait({self._sealing})
            self._sealing.exception()
        else:
            await self._undo()

    async def _undo(self) -> None:
        if self._state is not ShardState.RECEIVING:
            return
        self._state = next_shard_state(self._state, ShardEvent.ABANDON)
        try:
            await self._writer.discard()
        finally:
            self._admitted.give_back()


def check_name(name: str) -> str:
    """The shard's name, or InvalidArgument."""
    try:
        return check_shard_name(name)
    except InvalidName as error:
        raise InvalidArgument(str(error)) from error


def check_sizes(name: str, size: int, received: int, announced: int | None) -> None:
    """What the trailer says is what came, and what the header said where it did."""
    if size != received or (announced is not None and size != announced):
        raise InvalidArgument(
            f"shard {name!r}: sizes differ",
            trailer_size=size,
            received_bytes=received,
            announced="none" if announced is None else announced,
        )


def identity(part: PartRef, name: str) -> Identity:
    """What the footer says."""
    return Identity(part.run, part.step, part.session, part.writer, part.writers, name)


def shard_row(key: ShardKey, part: PartRef, name: str, chunk_size: int, sealed: SealedFile) -> ShardRow:
    """The catalog's row of a sealed file."""
    return ShardRow(
        session_id=key.session_id,
        shard_id=key.shard_id,
        writer=part.writer,
        name=name,
        size=sealed.size,
        chunk_size=chunk_size,
        crc32c=sealed.crc32c,
        state=ShardState.SEALED,
        disk_size=sealed.disk_size,
    )
