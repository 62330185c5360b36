"""Packs that came out small, joined into larger ones before their part is committed: many small requests make few files.

    the part's small packs read, checked -> one new pack, durable -> one catalog transaction: it stands for all of them -> their
    files go

Owns this order: until the transaction is synced the old packs are what counts, from then on the new one. A crash leaves files
that recovery drops, since the shards in them have another place (without a catalog the newest pack comes first). Joining is a
service to the tiers; what stands in its way is left alone.
"""

import logging
from collections.abc import Sequence
from contextlib import aclosing

from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import disk_size
from forebay_gateway.cache.packs import PACK_CHUNK_SIZE, pack_size
from forebay_gateway.cache.reader import ShardReader
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.core.records import ShardKey, ShardRow
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import all_shards
from forebay_gateway.paths.small import PACK_BYTES_MAX, PACK_SHARDS_MAX, SmallShard, Written, new_pack
from forebay_gateway.paths.write import PartRef, WritePath
from forebay_wire.packs import PackIndex

log = logging.getLogger("forebay.join")

JOIN_BELOW_BYTES = 2 << 20
JOIN_PACKS_MIN = 8  # fewer small ones are few


class Joiner:
    """Joins the packs of parts that are about to be committed."""

    def __init__(self, node: Node, writes: WritePath, joined_from: int = JOIN_PACKS_MIN) -> None:
        self._node, self._writes, self._joined_from = node, writes, joined_from

    async def join(self, session_id: int, part: PartRef) -> bool:
        """What can be joined; whether anything was. Never raises for what stands in the way: the part is as good as before."""
        rows = [row for row in await all_shards(self._node, session_id, part.writer) if row.is_pack and row.is_cached]
        small = [row for row in rows if row.size < JOIN_BELOW_BYTES]
        if len(small) < self._joined_from:
            return False
        joined = False
        for batch in batches(small):
            try:
                await self._join(session_id, part, batch)
                joined = True
            except ForebayError as error:
                log.info("packs stay as small as they are run=%s step=%s reason=%s", part.run, part.step, error)
                break
        return joined

    async def _join(self, session_id: int, part: PartRef, rows: Sequence[ShardRow]) -> None:
        shards = [shard for row in rows for shard in await self._read(row)]
        size = disk_size(pack_size(shard.facts for shard in shards), PACK_CHUNK_SIZE)
        reservation = await self._writes.reserve(size, part)
        try:
            written = await new_pack(self._node, ShardKey(session_id, self._node.catalog.new_id()), part, shards)
            failpoints.hit("join.before_catalog")
            await self._replace(rows, written)
        except BaseException:
            reservation.release()
            raise
        reservation.settle(written.row.disk_size)
        self._node.budget.freed(sum(row.disk_size for row in rows))
        failpoints.hit("join.before_unlink")
        await self._writes.drop_files([row.key for row in rows])

    async def _replace(self, rows: Sequence[ShardRow], written: Written) -> None:
        old = [row.key for row in rows]

        def act(txn: WriteTxn) -> None:
            assert written.index is not None
            txn.replace_packs(old, written.row, written.chunks, written.index)

        try:
            await self._node.catalog.write(act)
        except BaseException:
            if not self._node.catalog.is_failed:  # else it may hold the new one; recovery compares
                await self._writes.drop_files([written.row.key])
            raise

    async def _read(self, row: ShardRow) -> list[SmallShard]:
        """The shards of a pack, in the order in which they lie. Raises Corrupt, Unavailable."""
        with self._node.catalog.read() as txn:
            chunks, index = txn.chunks(row.key), txn.pack_index(row.key)
        reader = await ShardReader.open(
            self._node.cache,
            self._node.io,
            self._node.cache.shard_path(row.key),
            size=row.size,
            chunk_size=row.chunk_size,
            crc32c=row.crc32c,
            chunks=chunks,
            direct_io=self._node.cache.direct_io,
        )
        data = bytearray()
        try:
            async with aclosing(reader.chunks_from(0, len(reader.chunk_crcs))) as pieces:
                async for _, piece in pieces:
                    data += piece
        finally:
            await reader.close()
        return shards_in(index, memoryview(data))


def shards_in(index: PackIndex, data: memoryview) -> list[SmallShard]:
    """What lies in a pack's bytes."""
    placed = sorted(index, key=lambda shard: shard.offset)
    return [SmallShard(each.name, each.crc32c, data[each.offset : each.offset + each.size]) for each in placed]


def batches(rows: Sequence[ShardRow]) -> list[list[ShardRow]]:
    """What becomes one pack each, oldest first; one that would stay alone is left out."""
    made: list[list[ShardRow]] = []
    size = count = 0
    for row in rows:
        if not made or size + row.size > PACK_BYTES_MAX or count + row.packed > PACK_SHARDS_MAX:
            made.append([])
            size = count = 0
        made[-1].append(row)
        size, count = size + row.size, count + row.packed
    return [batch for batch in made if len(batch) > 1]
