"""Is a copy good: every byte of a cache file, or of shards on a tier, against the checksums in the catalog.

Owns the checks and nothing else: what a bad copy leads to is the caller's matter. Bytes on tiers are read by movers.
"""

import os
from collections.abc import Sequence
from contextlib import aclosing
from pathlib import Path

from forebay_gateway.cache.footer import find_footer
from forebay_gateway.cache.packs import read_index
from forebay_gateway.cache.reader import ShardReader
from forebay_gateway.core.errors import Corrupt, ForebayError, Unavailable
from forebay_gateway.core.records import SessionRow, ShardRow
from forebay_gateway.movers.jobs import CheckJob, ItemDone, ItemFailed, ShardItem
from forebay_gateway.paths.drain import shard_item
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.node import Node
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.checksums import crc32c_of_chunks
from forebay_wire.manifest import chunk_count, unpack_chunk_crcs
from forebay_wire.packs import PackIndex

# A check takes its place in the lane that drains to the tier: short jobs, so that neither waits long for the other.
ITEMS_A_JOB = 32
BYTES_A_JOB = 256 << 20


async def check_cached(node: Node, evictor: Evictor, session: SessionRow, row: ShardRow, first: int = 0, stop: int = -1) -> int:
    """Read chunks `first` to `stop` (-1: to the end, and then the footer) of the cache file; bytes read.

    Raises Corrupt saying what differs, Unavailable where the disk fails.
    """
    with node.catalog.read() as txn:
        item = shard_item(txn, session, row)
    _check_row(item)
    evictor.hold(row.key)
    try:
        return await _read(node, session, row, item, first, stop)
    finally:
        evictor.let_go(row.key)


def _check_row(item: ShardItem) -> None:
    """Raise Unavailable where it is no copy's fault: by such a row good bytes everywhere would be called bad."""
    count = chunk_count(item.size, item.chunk_size)
    sound = len(item.chunks) == 4 * count
    if not sound or crc32c_of_chunks(unpack_chunk_crcs(item.chunks), item.chunk_size, item.size) != item.crc32c:
        raise Unavailable("the catalog's checksums of this shard contradict each other; rebuild the catalog", key=item.key)


async def _read(node: Node, session: SessionRow, row: ShardRow, item: ShardItem, first: int, stop: int) -> int:
    path = node.cache.shard_path(row.key)
    reader = await ShardReader.open(
        node.cache,
        node.io,
        path,
        size=item.size,
        chunk_size=item.chunk_size,
        crc32c=item.crc32c,
        chunks=item.chunks,
        direct_io=node.cache.direct_io,
    )
    total = 0
    try:
        count = len(reader.chunk_crcs)
        end = count if stop < 0 else min(stop, count)
        async with aclosing(reader.chunks_from(first, end)) as chunks:
            async for _, chunk in chunks:
                total += len(chunk)
    finally:
        await reader.close()
    if end == count:
        await node.io.run(_check_tail, path, node.cache.direct_io, session, row, item.chunks)
        if row.is_pack:
            with node.catalog.read() as txn:
                index = txn.pack_index(row.key)
            await node.io.run(_check_index, path, row, index)
    return total


def _check_tail(path: Path, direct_io: bool, session: SessionRow, row: ShardRow, chunks: bytes) -> None:
    """Footer and chunk table, which a rebuild of the catalog would rely on."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct_io else 0))
    except FileNotFoundError as error:
        raise Corrupt("the cache file is gone", path=path) from error
    try:
        footer, table = find_footer(descriptor, os.fstat(descriptor).st_size)
    finally:
        os.close(descriptor)
    found = (footer.run, footer.step, footer.session, footer.writer, footer.writers, footer.name, footer.size, footer.crc32c)
    meant = (session.run, session.step, session.session, row.writer, session.writers, row.name, row.size, row.crc32c)
    if found != meant or footer.chunk_size != row.chunk_size:
        raise Corrupt("the cache file's footer is another shard's", path=path)
    if table != chunks:
        raise Corrupt("the cache file's chunk table differs from the catalog's", path=path)


def _check_index(path: Path, row: ShardRow, index: PackIndex) -> None:
    """What the catalog says of a pack's content, against the pack itself, whose bytes are proved by now."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = read_index(descriptor, row.size)
    finally:
        os.close(descriptor)
    if found != index:
        raise Unavailable("the catalog's index of this pack is not the pack's own; rebuild the catalog", name=row.name)


def batches(items: Sequence[tuple[ShardRow, ShardItem]]) -> list[list[tuple[ShardRow, ShardItem]]]:
    """In order, none longer or larger than a job should be."""
    made: list[list[tuple[ShardRow, ShardItem]]] = []
    size = BYTES_A_JOB
    for entry in items:
        if size >= BYTES_A_JOB or len(made[-1]) >= ITEMS_A_JOB:
            made.append([])
            size = 0
        made[-1].append(entry)
        size += entry[1].size
    return made


async def check_copies(
    node: Node, tier: MonitoredTier, items: Sequence[ShardItem], *, beside: bool = False
) -> list[ForebayError | None]:
    """Every byte of these shards on the tier, by a mover: for each None, or what is wrong with it. `beside` leaves the tier's
    drain alone, and takes a place among the fetches.

    An error that is neither Corrupt nor NotFound says that it could not be checked. Raises Unavailable where none could be.
    """
    errors: list[ForebayError | None] = [None] * len(items)
    sound = []
    for index, item in enumerate(items):
        try:
            _check_row(item)
            sound.append(index)
        except Unavailable as error:
            errors[index] = error
    if sound:
        reports = _Reports(len(sound))
        job = CheckJob(
            node.movers.next_job_id(), tier.name, tier.capabilities, tuple(items[index] for index in sound), read=True
        )
        await (node.movers.fetch(job, reports) if beside else node.movers.drain(tier.name, job, reports))
        for index, error_of_copy in zip(sound, reports.errors, strict=True):
            errors[index] = error_of_copy
    return errors


class _Reports:
    """Hears one check job."""

    def __init__(self, count: int) -> None:
        self.errors: list[ForebayError | None] = [None] * count

    async def upload_begun(self, index: int, upload_id: str) -> None:
        raise AssertionError("a check uploads nothing")

    async def item_done(self, index: int, report: ItemDone) -> None:
        """Good, as it is taken to be until a failure is told; a mover that dies fails the whole job."""

    async def item_failed(self, index: int, report: ItemFailed) -> None:
        failure = report.failure
        self.errors[index] = failure.error

    def progress(self, size: int) -> None:
        """Nobody counts."""
