"""Many small shards of one request into the cache, up to the acknowledgement `cache`: in one pack where they are many.

    names and CRCs checked, space reserved -> one pack, or a file each -> fsynced -> one catalog transaction -> receipts

Owns which shards are packed, and that a request is taken whole or not at all. A pack is written once, like any shard, and never
opened again: a group that fails takes nothing with it that was acknowledged before. Does not own the file (cache/packs), nor
what becomes of many packs that came out small (join.py).
"""

import asyncio
import contextlib
import secrets
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from msgspec.structs import replace

from forebay_gateway.admission.budget import Reservation
from forebay_gateway.base import failpoints
from forebay_gateway.base.tasks import uncut
from forebay_gateway.cache.footer import disk_size
from forebay_gateway.cache.packs import PACK_CHUNK_SIZE, pack_size, write_pack
from forebay_gateway.cache.writer import ShardWriter
from forebay_gateway.core.errors import Corrupt, InvalidArgument
from forebay_gateway.core.records import ShardKey, ShardRow
from forebay_gateway.paths.node import SHARD_BYTES, Node
from forebay_gateway.paths.pages import page_of
from forebay_gateway.paths.write import Existing, PartRef, Receipt, WritePath, identity, shard_row
from forebay_wire.checksums import crc32c
from forebay_wire.names import is_commit_last
from forebay_wire.packs import PackIndex, pack_name

SMALL_SHARDS_MAX = 5000  # in one request: they are looked up, claimed and written as one group
SMALL_BYTES = 1 << 20  # a shard below this may be packed
PACK_SHARDS_MIN = 64  # fewer, in a request and in its part so far, stay plain files: other software reads them on a tier
PACK_BYTES_MAX = 32 << 20  # it is fetched, joined and proved as a whole
PACK_SHARDS_MAX = 16 << 10  # its names enter the catalog in one transaction
WRITES_AT_ONCE = 16

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SmallShard:
    """A whole shard in one message."""

    name: str
    crc32c: int
    data: memoryview

    @property
    def facts(self) -> tuple[str, int, int]:
        """(name, size, CRC32C)."""
        return self.name, len(self.data), self.crc32c


@dataclass(frozen=True, slots=True)
class Written:
    """A file that is durable and not yet in the catalog."""

    row: ShardRow
    chunks: bytes
    index: PackIndex | None = None


Divert = Callable[
    [int, PartRef, Sequence[Sequence[SmallShard]], Sequence[SmallShard], float, contextlib.ExitStack], Coroutine[Any, Any, str]
]


class SmallPath:
    """All requests with small shards."""

    def __init__(self, node: Node, writes: WritePath, packed_from: int = PACK_SHARDS_MIN) -> None:
        self._node = node
        self._writes = writes
        self._packed_from = packed_from
        self.divert: Divert | None = None  # where they go while the cache's disk fails, see through.py

    async def put(self, part: PartRef, shards: Sequence[SmallShard], wait_s: float = 0.0) -> list[Receipt]:
        """All of them durable, or none taken. One catalog transaction for the group. Waits for space up to `wait_s` seconds."""
        names = Counter(shard.name for shard in shards)
        if len(names) != len(shards):
            raise InvalidArgument("a request names a shard twice", name=names.most_common(1)[0][0])
        await self._in_pages(self._checked(part, shard) for shard in shards)
        with self._node.disk_refusals_shown():
            session_id = await self._writes.open_part(part)
            known = await self._in_pages(self._same_already(session_id, part, shard) for shard in shards)
            fresh = [shard for shard, level in zip(shards, known, strict=True) if not level]
            level = await self._put_group(session_id, part, fresh, wait_s) if fresh else ""
        return [Receipt(*shard.facts, before or level) for shard, before in zip(shards, known, strict=True)]

    async def _in_pages(self, looks: Iterator[T]) -> list[T]:
        """All that it gives; a request of many shards must not hold the event loop."""
        found: list[T] = []
        ended = False
        while not ended:
            some, ended = page_of(self._node.clock, looks)
            found += some
            await asyncio.sleep(0)
        return found

    def _checked(self, part: PartRef, shard: SmallShard) -> str:
        if crc32c(shard.data) != shard.crc32c:
            raise Corrupt(f"shard {shard.name!r} arrived damaged", crc32c=f"{shard.crc32c:08x}")
        return self._writes.checked_name(part, shard.name)

    def _same_already(self, session_id: int, part: PartRef, shard: SmallShard) -> str:
        """Where it is since it was put before; empty where it was not."""
        existing = self._writes.existing(session_id, part, shard.name)
        if existing is None:
            return ""
        return Existing(self._writes.receipt(existing)).compare(len(shard.data), shard.crc32c).level

    async def _put_group(self, session_id: int, part: PartRef, shards: Sequence[SmallShard], wait_s: float) -> str:
        """Where they are then."""
        chunk_size = self._node.config.cache.chunk_size
        packs, plain = self._split(session_id, part, shards)
        with contextlib.ExitStack() as stack:
            claim = self._writes.claim
            await self._in_pages(stack.enter_context(claim(session_id, part, shard.name)) for shard in shards)
            if self.divert is not None and self._node.budget.disk.reason:
                return await uncut(self.divert(session_id, part, packs, plain, wait_s, stack.pop_all()))
            sizes = [disk_size(len(shard.data), chunk_size) for shard in plain]
            sizes += [disk_size(pack_size(shard.facts for shard in pack), PACK_CHUNK_SIZE) for pack in packs]
            reservation = await self._writes.reserve(sum(sizes), part, wait_s)
            stack.callback(reservation.release)  # no effect once it is settled
            await self._writes.admitter.slow_grant(sum(sizes), part.run)
            # Shielded: a client that goes away must not cut the group between its files and the catalog.
            await uncut(self._write_group(session_id, part, packs, plain, reservation, stack.pop_all()))
            return "cache"

    async def _write_group(
        self,
        session_id: int,
        part: PartRef,
        packs: Sequence[Sequence[SmallShard]],
        plain: Sequence[SmallShard],
        reservation: Reservation,
        held: contextlib.ExitStack,
    ) -> None:
        with held:
            written = await self._write_files(session_id, part, packs, plain)
            failpoints.hit("small.before_catalog")
            await self._record(part, written)
            failpoints.hit("small.done")
            reservation.settle(sum(each.row.disk_size for each in written))

    def _split(
        self, session_id: int, part: PartRef, shards: Sequence[SmallShard]
    ) -> tuple[list[list[SmallShard]], list[SmallShard]]:
        """What goes into packs, each at most PACK_BYTES_MAX long, and what gets a file of its own."""
        may = [shard for shard in shards if self._may_be_packed(shard)]
        if len(may) < 2 or (len(may) < self._packed_from and self._small_so_far(session_id, part) < self._packed_from):
            return [], list(shards)
        packs: list[list[SmallShard]] = [[]]
        size = 0
        for shard in may:
            if size + len(shard.data) > PACK_BYTES_MAX:
                packs.append([])
                size = 0
            packs[-1].append(shard)
            size += len(shard.data)
        return packs, [shard for shard in shards if not self._may_be_packed(shard)]

    def _may_be_packed(self, shard: SmallShard) -> bool:
        return self._node.config.cache.pack == "auto" and len(shard.data) < SMALL_BYTES and not is_commit_last(shard.name)

    def _small_so_far(self, session_id: int, part: PartRef) -> int:
        """Small shards that the part has already; counted no further than it matters."""
        count = 0
        with self._node.catalog.read() as txn:
            for row in txn.shards(session_id, part.writer):
                count += row.packed if row.is_pack else row.size < SMALL_BYTES
                if count >= self._packed_from:
                    break
        return count

    async def _write_files(
        self, session_id: int, part: PartRef, packs: Sequence[Sequence[SmallShard]], plain: Sequence[SmallShard]
    ) -> list[Written]:
        written: list[Written] = []
        slots = asyncio.Semaphore(WRITES_AT_ONCE)

        async def write(act: Coroutine[Any, Any, Written]) -> None:
            async with slots:
                written.append(await act)

        acts = [self._write_pack(session_id, part, pack) for pack in packs]
        acts += [self._write_plain(session_id, part, shard) for shard in plain]
        try:
            await all_or_none([write(act) for act in acts])
        except BaseException:
            for act in acts:
                act.close()  # those that were never begun
            await self._writes.drop_files([each.row.key for each in written])
            raise
        return written

    async def _write_plain(self, session_id: int, part: PartRef, shard: SmallShard) -> Written:
        chunk_size = self._node.config.cache.chunk_size
        key = ShardKey(session_id, self._node.catalog.new_id())
        size = len(shard.data)
        writer = await ShardWriter.create(self._node.cache, self._node.io, key, size=size, chunk_size=chunk_size)
        try:
            for offset in range(0, size, chunk_size):
                piece = shard.data[offset : offset + chunk_size]
                await writer.write_chunk(shard.crc32c if len(piece) == size else crc32c(piece), piece)
            sealed = await writer.seal(identity(part, shard.name), size=size, crc32c=shard.crc32c)
        except BaseException:
            await writer.discard()
            raise
        return Written(shard_row(key, part, shard.name, chunk_size, sealed), sealed.chunks)

    async def _write_pack(self, session_id: int, part: PartRef, shards: Sequence[SmallShard]) -> Written:
        return await new_pack(self._node, ShardKey(session_id, self._node.catalog.new_id()), part, shards)

    async def _record(self, part: PartRef, written: Sequence[Written]) -> None:
        indexes = {each.row.key: each.index for each in written if each.index is not None}
        await self._writes.record(part.writer, [(each.row, each.chunks) for each in written], indexes)


def check_group(count: int) -> None:
    """Raise InvalidArgument for more small shards than one request may have."""
    if count > SMALL_SHARDS_MAX:
        raise InvalidArgument(f"a request has at most {SMALL_SHARDS_MAX} shards; send several", shards=count)


async def new_pack(node: Node, key: ShardKey, part: PartRef, shards: Sequence[SmallShard]) -> Written:
    """One pack of these, durable under its name. Raises as write_pack(); no file is left then."""
    index = await node.aside(SHARD_BYTES * len(shards), lambda: PackIndex.laid_out(shard.facts for shard in shards))
    name = pack_name(part.writer, secrets.token_hex(8))
    bodies = [(shard.crc32c, shard.data) for shard in shards]
    sealed = await write_pack(node.cache, node.io, key, identity(part, name), index, bodies)
    row = shard_row(key, part, name, PACK_CHUNK_SIZE, sealed)
    return Written(replace(row, packed=len(index), packed_size=index.size), sealed.chunks, index)


async def all_or_none(acts: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Run all together; on the first error the others are cancelled and awaited before it is raised."""
    running = [asyncio.ensure_future(act) for act in acts]
    try:
        await asyncio.gather(*running)
    except BaseException:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise
