"""A shard from a client's stream straight to a tier, while the cache's disk fails: it never lies in the cache.

    begin: names checked, the first required tier that can take it -> the client may send
    chunk: CRC checked, on its way to the tier -> in order, on credit: the tier is the back-pressure
    finish: whole and proved on the tier, as a drained copy is -> catalog synced: a row with that copy -> receipt that says so

Owns the order of these acts, which tier it is, and how many shards go at once. What is left of one that fails is passing.py's
to end. The further tiers get theirs as a lost copy does: fetched into the cache once the disk works again. In this process,
since the bytes are here and a mover would get them only by one copy more.
"""

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator, Sequence
from typing import Any

from msgspec.structs import replace

from forebay_gateway.base import failpoints
from forebay_gateway.base.tasks import uncut
from forebay_gateway.cache.packs import PACK_CHUNK_SIZE, assembled
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.errors import (
    Corrupt,
    DiskFailed,
    ForebayError,
    InvalidArgument,
    Unavailable,
    Unsupported,
)
from forebay_gateway.core.layout import shard_key
from forebay_gateway.core.records import ShardKey
from forebay_gateway.paths.admit import DISK_FAILS_RETRY_S
from forebay_gateway.paths.last import check_its_turn
from forebay_gateway.paths.node import SHARD_BYTES, Node
from forebay_gateway.paths.passing import (
    PASSING,
    Passing,
    Tidier,
    landed,
    note_name,
    note_passing,
    take_back,
    version_of,
)
from forebay_gateway.paths.small import SmallShard, all_or_none
from forebay_gateway.paths.write import Existing, PartRef, Receipt, WritePath, check_sizes
from forebay_gateway.tiers.base import ObjectInfo, Tier
from forebay_gateway.tiers.factory import open_stream, takes_stream
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_gateway.tiers.stream import Checksums, ShardStream, StreamOptions
from forebay_wire.checksums import crc32c, crc32c_of_chunks
from forebay_wire.manifest import pack_chunk_crcs
from forebay_wire.names import is_commit_last
from forebay_wire.packs import PackIndex, encode_head, pack_name

STREAMS_MAX = 4  # at a time: each may hold three parts of an object store's upload, 48 MiB
SMALL_AT_ONCE = 8  # of one request with small shards
BUSY_RETRY_S = 1.0

Opened = Callable[[Tier, str, StreamOptions], ShardStream]


class Through:
    """All shards of this gateway that go through."""

    def __init__(self, node: Node, writes: WritePath, opened: Opened = open_stream) -> None:
        """`opened` gives a stream to one object of a tier that is open."""
        self.node, self.writes, self.opened = node, writes, opened
        self.tidier = Tidier(node, writes)
        self._slots = asyncio.Semaphore(STREAMS_MAX)
        self._configs = {config.name: config for config in node.config.tiers}

    # -- which tier ----------------------------------------------------------------------------------------------------

    def tier(self) -> str:
        """To which tier shards go through now, of runs without a policy of their own; empty where none can take any."""
        return next((tier.name for tier in self._usable(None)), "")

    def refuse_lease(self, part: PartRef, size: int) -> None:
        """Raise Unsupported where a shard would go through: the cache has no file for its client to write; DiskFailed where it
        could not."""
        if self.node.budget.disk.reason:
            (tier, *_) = self._choice(self.node.only_tiers(part.run), size, self.node.config.cache.chunk_size)
            raise Unsupported(f"the cache's disk fails, and shards go through to {tier.name!r} by the stream lane alone")

    def _usable(self, only: tuple[str, ...] | None) -> Iterator[MonitoredTier]:
        for tier in self.node.tiers.values():
            kind = self._configs[tier.name].kind
            if tier.required and tier.usable and not tier.held and kind != "memory" and (only is None or tier.name in only):
                yield tier

    def _choice(self, only: tuple[str, ...] | None, size: int | None, chunk_size: int) -> list[MonitoredTier]:
        """Of the tiers that a policy names (None: all) those that can take the shard now, the first one first. Raises
        DiskFailed that says why none can."""
        usable = list(self._usable(only))
        found = [tier for tier in usable if takes_stream(self._configs[tier.name], tier.tier, size, chunk_size)]
        if found:
            return found
        if only == ():
            why = "by policy the run stays in the cache"
        elif usable:
            why = f"{usable[0].name} takes no shard whose size is not known or is above that of one request"
        else:
            required = [tier for tier in self.node.tiers.values() if tier.required and (only is None or tier.name in only)]
            states = ", ".join(f"{tier.name} is {'held' if tier.held else tier.state.value}" for tier in required)
            why = f"no required tier can take it in its place ({states or 'its policy names none'})"
        reason = f"{self.node.budget.disk.reason}, and {why}; no such shard is taken until the disk takes a write again"
        raise DiskFailed(reason, retry_after_s=DISK_FAILS_RETRY_S)

    # -- one shard by stream -------------------------------------------------------------------------------------------

    async def begin(self, part: PartRef, name: str, size: int | None, wait_s: float = 0.0) -> "Passage | Existing":
        """Check, wait up to `wait_s` seconds for a place, and open it on a tier; nothing is left when it raises."""
        self.writes.checked_name(part, name)
        session_id = await self.writes.open_part(part)
        if (existing := self.writes.existing(session_id, part, name)) is not None:
            return Existing(self.writes.receipt(existing))
        with contextlib.ExitStack() as held:
            held.enter_context(self.writes.claim(session_id, part, name))
            await self._place(wait_s, held)
            chunk_size = self.node.config.cache.chunk_size
            passage = await self.open(session_id, part, name, size, chunk_size)
            passage.held = held.pop_all()
            return passage

    async def _place(self, wait_s: float, held: contextlib.ExitStack) -> None:
        """Its turn among all that go through, first come, first served."""
        if self._slots.locked():
            busy = f"the cache's disk fails, and {STREAMS_MAX} other shards are on their way to a tier"
            try:
                async with asyncio.timeout(wait_s):
                    await self._slots.acquire()
            except TimeoutError:
                raise Unavailable(busy, retry_after_s=BUSY_RETRY_S) from None
        else:
            await self._slots.acquire()  # at once
        held.callback(self._slots.release)

    async def open(
        self,
        session_id: int,
        part: PartRef,
        name: str,
        size: int | None,
        chunk_size: int,
        index: PackIndex | None = None,
        together: Collection[str] = (),
    ) -> "Passage":
        """On the first tier that takes it; `together` with these of one request. Raises DiskFailed, or Unavailable of the last
        one."""
        key = ShardKey(session_id, self.node.catalog.new_id())
        last: ForebayError | None = None
        with self.node.catalog.read() as txn:
            session = txn.session(session_id)
        only = self.node.only_tiers(part.run) if session is None else self.node.restriction_of(session)
        for tier in self._choice(only, size, chunk_size):
            if is_commit_last(name):
                await check_its_turn(self.node, self.writes, part, session_id, name, tier, together or {name})
            passage = Passage(self, tier, key, part, name, size, chunk_size, index)
            try:
                await passage.begin()
            except Unavailable as error:
                last = error
            else:
                return passage
        assert last is not None
        raise last

    # -- many small ones -----------------------------------------------------------------------------------------------

    async def put_group(
        self,
        session_id: int,
        part: PartRef,
        packs: Sequence[Sequence[SmallShard]],
        plain: Sequence[SmallShard],
        wait_s: float,
        held: contextlib.ExitStack,
    ) -> str:
        """All on a tier, then in the catalog in one transaction, or none. Where they are."""
        passages: list[Passage] = []
        slots = asyncio.Semaphore(SMALL_AT_ONCE)

        async def send(act: Coroutine[Any, Any, None]) -> None:
            async with slots:
                await act

        async def all_of(acts: Iterable[Coroutine[Any, Any, None]]) -> None:
            waiting = list(acts)
            try:
                await all_or_none([send(act) for act in waiting])
            finally:
                for act in waiting:
                    act.close()  # those that were never begun

        with held:
            await self._place(wait_s, held)
            names = {shard.name for shards in (*packs, plain) for shard in shards}
            last = [shard for shard in plain if is_commit_last(shard.name)]
            first = [shard for shard in plain if not is_commit_last(shard.name)]
            try:
                await all_of(
                    [
                        *(self._send_pack(passages, session_id, part, pack) for pack in packs),
                        *(self._send_plain(passages, session_id, part, shard, names) for shard in first),
                    ]
                )
                await all_of([self._send_plain(passages, session_id, part, shard, names) for shard in last])
                await land(self, passages)
            except BaseException:
                for passage in passages:
                    await passage.discard()
                raise
        return "+".join(dict.fromkeys(passage.tier.name for passage in passages))

    async def _send_plain(
        self, passages: "list[Passage]", session_id: int, part: PartRef, shard: SmallShard, together: Collection[str]
    ) -> None:
        chunk_size, size = self.node.config.cache.chunk_size, len(shard.data)
        pieces = (shard.data[at : at + chunk_size] for at in range(0, size, chunk_size))
        passage = await self.open(session_id, part, shard.name, size, chunk_size, together=together)
        passages.append(passage)
        await passage.send(pieces, size, shard.crc32c)

    async def _send_pack(self, passages: "list[Passage]", session_id: int, part: PartRef, shards: Sequence[SmallShard]) -> None:
        facts = [shard.facts for shard in shards]
        index = await self.node.aside(SHARD_BYTES * len(shards), lambda: PackIndex.laid_out(facts))
        head = encode_head(index)
        bodies = [(crc32c(head), memoryview(head)), *((shard.crc32c, shard.data) for shard in shards)]
        size, name = len(head) + index.size, pack_name(part.writer, secrets.token_hex(8))
        passage = await self.open(session_id, part, name, size, PACK_CHUNK_SIZE, index)
        passages.append(passage)
        await passage.send(assembled(bodies, PACK_CHUNK_SIZE), size, None)


class Passage:
    """A shard on its way to a tier. Ends by finish() or discard(); discard is idempotent."""

    def __init__(
        self,
        through: Through,
        tier: MonitoredTier,
        key: ShardKey,
        part: PartRef,
        name: str,
        size: int | None,
        chunk_size: int,
        index: PackIndex | None,
    ) -> None:
        self._through, self._node, self.tier = through, through.node, tier
        self.part, self._name, self._size, self._chunk_size = part, name, size, chunk_size
        self.held = contextlib.ExitStack()
        on_tier = shard_key(part.run, part.step, part.session, name)
        encoded = b"" if index is None else index.encoded
        self.passing = Passing(
            *key, part.writer, name, on_tier, run=part.run, step=part.step, session=part.session, index=encoded
        )
        self.note = note_name(PASSING, tier.name, key)
        self._stream = through.opened(tier.tier, on_tier, StreamOptions(size, chunk_size, self._note_upload))
        self._offset = 0
        self._crcs: list[int] = []
        self._noted = self._is_bad = self._ended = False
        self.version = ""  # of the object, once it is whole and proved
        self._sealing: asyncio.Future[Receipt] | None = None

    async def begin(self) -> None:
        """Open it on the tier; nothing is left where it raises Unavailable."""
        try:
            with self._on_tier():
                await self._through.tidier.make_way(self.tier, self.passing.key)
                await self._stream.begin()
        except BaseException:
            await self._undo()
            raise

    @contextlib.contextmanager
    def _on_tier(self) -> Iterator[None]:
        """What the tier says is of the way, not of the shard: its sender may try again, perhaps on another tier."""
        try:
            yield
        except ForebayError as error:
            self.tier.failed(error)
            self._is_bad = isinstance(error, Corrupt)
            raise Unavailable(
                f"the cache's disk fails, and shard {self._name!r} did not get through to {self.tier.name}: {error.sentence}",
                retry_after_s=max(BUSY_RETRY_S, error.retry_after_s or 0.0),
            ) from error

    async def _note_upload(self, upload_id: str) -> None:
        self._node.passing.discard(self.passing.upload_id)
        self.passing = replace(self.passing, upload_id=upload_id)
        if upload_id:
            self._node.passing.add(upload_id)
        await self._write_note()
        failpoints.hit("through.noted")

    async def _write_note(self) -> None:
        self._through.tidier.under_way.add(self.note)
        self._noted = True
        tier, passing = self.tier.name, self.passing
        await self._node.catalog.write(lambda txn: note_passing(txn, tier, passing))

    async def chunk(self, offset: int, crc: int, data: memoryview) -> None:
        """The next chunk; returns when there is credit for one more."""
        if offset != self._offset or offset % self._chunk_size:
            raise InvalidArgument(
                f"shard {self._name!r}: chunks must come in order, each once and all but the last whole",
                expected_offset=self._offset,
                offset=offset,
            )
        end = offset + len(data)
        if not 0 < len(data) <= self._chunk_size:
            raise InvalidArgument("a chunk of a wrong length", offset=offset, length=len(data), chunk_size=self._chunk_size)
        if self._size is not None and end > self._size:
            raise InvalidArgument(f"shard {self._name!r}: more bytes than announced", size=self._size, received_bytes=end)
        if crc32c(data) != crc:
            raise Corrupt("a chunk arrived damaged", offset=offset)
        self._offset = end
        self._crcs.append(crc)
        with self._on_tier():
            await self._stream.write(crc, data)

    async def send(self, pieces: Iterable[memoryview], size: int, crc: int | None) -> None:
        """All of it at once, whole and proved on the tier; `crc` None takes that of its chunks. land() is left."""
        for piece in pieces:
            await self.chunk(self._offset, crc32c(piece), piece)
        await self._publish(size, crc32c_of_chunks(self._crcs, self._chunk_size, size) if crc is None else crc)

    async def finish(self, size: int, crc: int) -> Receipt:
        """On the tier, proved, and in the catalog; or an error and nothing left."""
        check_sizes(self._name, size, self._offset, self._size)
        # From here on a client that goes away changes nothing: the catalog's answer decides what happens to the object.
        self._sealing = asyncio.ensure_future(self._seal(size, crc))
        return await asyncio.shield(self._sealing)

    async def _seal(self, size: int, crc: int) -> Receipt:
        try:
            await self._publish(size, crc)
            await land(self._through, [self])
        except BaseException:
            await self._undo()
            raise
        return Receipt(self._name, size, crc, self.tier.name)

    async def _publish(self, size: int, crc: int) -> None:
        """Whole under its name on the tier, and proved there."""
        combined = crc32c_of_chunks(self._crcs, self._chunk_size, size)
        if combined != crc:
            raise Corrupt("the shard does not match its checksum", expected=f"{crc:08x}", actual=f"{combined:08x}")
        proof = Checksums(size, self._chunk_size, crc, tuple(self._crcs))
        whole = replace(
            self.passing,
            whole=True,
            size=size,
            chunk_size=self._chunk_size,
            crc32c=crc,
            chunks=pack_chunk_crcs(self._crcs),
        )

        async def publish(info: ObjectInfo | None) -> None:
            self.passing = whole if info is None else replace(whole, version=version_of(info))
            await self._write_note()
            failpoints.hit("through.before_publish")

        with self._on_tier():
            info = await self._stream.finish(proof, publish)
        self.version = version_of(info)
        self.tier.worked()
        failpoints.hit("through.published")

    async def discard(self) -> None:
        """Undo everything that is not acknowledged; waits for a finish() that is under way."""
        if self._sealing is not None:
            await asyncio.wait({self._sealing})
            self._sealing.exception()
        else:
            await uncut(self._undo())

    async def _undo(self) -> None:
        if self._ended:
            return
        try:
            gone = await self._stream.discard()
            if self.version:  # it is there, and the catalog did not take it
                await self._node.catalog.write(lambda txn: take_back(txn, self.tier.name, self.passing, self.version))
            elif self._is_bad and self.passing.whole:
                with contextlib.suppress(ForebayError):  # a bad object of that name serves nobody
                    await self.tier.tier.delete(self.passing.key)
                    await self._through.tidier.forget(self.note)
            elif self._noted and gone and not self.passing.whole:
                await self._through.tidier.forget(self.note)
        finally:
            self.end()
            self._through.tidier.left()

    def end(self) -> None:
        """It is over, one way or the other."""
        self._ended = True
        self._through.tidier.under_way.discard(self.note)
        self._node.passing.discard(self.passing.upload_id)
        self.held.close()


async def land(through: Through, passages: Sequence[Passage]) -> None:
    """What is whole and proved on its tier becomes shards of its part, in one transaction. Raises as catalog.landing."""
    each = [(passage.tier.name, passage.passing, passage.version) for passage in passages]

    def act(txn: WriteTxn) -> None:
        for tier, passing, version in each:
            landed(txn, tier, passing, version)

    await through.node.catalog.write(act)
    failpoints.hit("through.done")
    for passage in passages:
        passage.end()
