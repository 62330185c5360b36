"""Many small shards back to a reader at once: the packs they lie in, each read once, from its beginning to its end.

    names -> packs and places -> neighbours -> one read -> each shard's own checksum -> a group on its way, the next one read

Owns which shards travel together. Does not own falling over: what a pack in the cache does not give (a plain shard, a damaged
one, a pack that is gone, or on a tier and not worth a fetch) is left out, and nothing is said or marked. Its reader asks for it
alone, and read.py sees for itself what is wrong.
"""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from forebay_gateway.cache.io import settle
from forebay_gateway.cache.packs import PackReader
from forebay_gateway.core.errors import InvalidArgument, Unavailable
from forebay_gateway.core.records import SessionRow, ShardRow
from forebay_gateway.core.states import CopyState, ShardState
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import SHARDS_A_PAGE
from forebay_gateway.paths.read import CACHED_STATES, ReadPath, is_worth_fetching
from forebay_gateway.paths.small import SMALL_BYTES, SMALL_SHARDS_MAX
from forebay_wire.packs import PackedShard

GROUP_BYTES_MAX = 1 << 20  # of a pack, read at once and sent in one message; a shard in a pack is shorter
GROUP_SHARDS_MAX = 1000  # they may all be empty, and have long names
GAP_BYTES_MAX = 64 << 10  # read and not wanted: less than a read of its own costs

Group = list[tuple[PackedShard, bytes]]


@dataclass
class _Pack:
    row: ShardRow
    shards: list[PackedShard] = field(default_factory=list)


class ManyPath:
    """All reads of many small shards."""

    def __init__(self, node: Node, reads: ReadPath, evictor: Evictor) -> None:
        self._node = node
        self._reads = reads
        self._evictor = evictor

    async def read(
        self, run: str, step: int, session: str, names: Sequence[str], source: str, may_read_ahead: Callable[[], bool]
    ) -> AsyncGenerator[Group, None]:
        """Those of the shards that packs in the cache give, as they lie there. `source` is "auto" or "cache".

        A group is the caller's to clear: until the next one is asked for it would else be held here. `may_read_ahead` says
        whether there is memory for more than one.

        Raises InvalidArgument, NotFound, Incomplete, Unavailable.
        """
        if len(names) > SMALL_SHARDS_MAX:
            raise InvalidArgument(f"a request has at most {SMALL_SHARDS_MAX} names; send several", names=len(names))
        if source not in ("", "auto", "cache"):
            raise InvalidArgument("many shards at once come out of the cache alone; read them one by one", source=source)
        found = await self._reads.session(run, step, session)
        for pack in await self._packs(found, names):
            pack.shards.sort(key=lambda shard: shard.offset)
            if source != "cache":
                await self._fetch(found, pack)
            async with aclosing(self._groups(pack, may_read_ahead)) as groups:
                async for group in groups:
                    yield group

    async def _packs(self, session: SessionRow, names: Sequence[str]) -> list[_Pack]:
        """Where the shards lie, each once."""
        packs: dict[int, _Pack] = {}
        wanted = list(dict.fromkeys(names))
        for begin in range(0, len(wanted), SHARDS_A_PAGE):
            with self._node.catalog.read() as txn:
                for row, shard in txn.packed(session.id, wanted[begin : begin + SHARDS_A_PAGE]):
                    if shard.size < SMALL_BYTES and shard.offset + shard.size <= row.size:
                        packs.setdefault(row.shard_id, _Pack(row)).shards.append(shard)
            await asyncio.sleep(0)
        return list(packs.values())

    async def _fetch(self, session: SessionRow, pack: _Pack) -> None:
        """Bring an evicted pack into the cache, where so much is wanted of it."""
        key = pack.row.key
        self._reads.note_asked(key, len(pack.shards))
        with self._node.catalog.read() as txn:
            row = txn.shard(key)
        if row is None or row.state is not ShardState.EVICTED:
            return
        if is_worth_fetching(row, sum(shard.size for shard in pack.shards)) or self._reads.asked_often(key):
            await self._reads.fetch(session, row, self._reads.item(session, row))

    def _may_read(self, pack: _Pack) -> bool:
        """Whether there is a file to read: a quarantined one too where nothing is better, since each shard is proved alone."""
        with self._node.catalog.read() as txn:
            row = txn.shard(pack.row.key)
            if row is None or row.state is not ShardState.QUARANTINED:
                return row is not None and row.state in CACHED_STATES
            return all(copy.state is not CopyState.VERIFIED for copy in txn.copies(row.key).values())

    async def _groups(self, pack: _Pack, may_read_ahead: Callable[[], bool]) -> AsyncGenerator[Group, None]:
        """What is good of one pack; the file is held against eviction meanwhile."""
        self._evictor.hold(pack.row.key)
        file = PackReader(self._node.cache, self._node.io, self._node.cache.shard_path(pack.row.key))
        try:
            if not self._may_read(pack):
                return
            await file.open()
            async with aclosing(_one_ahead(file, neighbours(pack.shards), may_read_ahead)) as groups:
                async for group in groups:
                    yield group
        except Unavailable:  # the disk, or no memory in time: read one by one, the shards wait or come from a tier
            return
        finally:
            try:
                await file.close()
            finally:
                self._evictor.let_go(pack.row.key)


async def _one_ahead(
    file: PackReader, parts: Iterator[list[PackedShard]], may_read_ahead: Callable[[], bool]
) -> AsyncGenerator[Group, None]:
    """Read each; while one is sent, the next is read where it may be."""
    reading: list[asyncio.Task[Group]] = []
    try:
        for part in parts:
            reading.append(asyncio.create_task(file.read(part)))
            while len(reading) > may_read_ahead():
                if group := await reading.pop(0):
                    yield group
        while reading:
            if group := await reading.pop(0):
                yield group
    finally:
        for task in reading:
            task.cancel()
        await settle(reading)


def neighbours(shards: Sequence[PackedShard]) -> Iterator[list[PackedShard]]:
    """Shards of one pack, by offset, in parts that are worth one read each and fit into one message."""
    part: list[PackedShard] = []
    end = 0
    for shard in shards:
        if part and (
            shard.offset + shard.size - part[0].offset > GROUP_BYTES_MAX
            or shard.offset - end > GAP_BYTES_MAX
            or len(part) >= GROUP_SHARDS_MAX
        ):
            yield part
            part = []
        part.append(shard)
        end = max(end, shard.offset + shard.size)
    if part:
        yield part
