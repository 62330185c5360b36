"""A shard from the tiers into the cache: each chunk checked on arrival, the next tier tried at the same chunk on a failure.

Owns the fall-over inside one fetch. Which tiers to try, and in what order, is the front's decision.
"""

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from forebay_gateway.cache.io import IoPool
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.cache.writer import ShardWriter
from forebay_gateway.core.errors import Corrupt, ForebayError, NotFound, Unavailable
from forebay_gateway.core.records import ShardKey
from forebay_gateway.movers.jobs import FetchJob, ShardItem
from forebay_gateway.tiers.base import Tier
from forebay_gateway.tiers.ranges import ReadAhead, ranged_chunks
from forebay_wire.manifest import unpack_chunk_crcs

FailureSink = Callable[[str, Exception], None]


async def fetch(
    cache: CacheDir,
    pool: IoPool,
    job: FetchJob,
    sources: Sequence[tuple[str, Tier]],
    failed: FailureSink,
    moved: Callable[[int], None],
    ahead: ReadAhead,
) -> int:
    """Bring the shard into the cache, sealed; returns the size of its file. `failed` hears of every source that failed.

    Raises Corrupt or Unavailable when no source is left; nothing of it stays in the cache then.
    """
    item, identity = job.item, job.identity
    writer = await ShardWriter.create(
        cache, pool, ShardKey(item.session_id, item.shard_id), size=item.size, chunk_size=item.chunk_size
    )
    try:
        async with aclosing(chunks_of(item, sources, failed, ahead)) as chunks:
            async for crc, chunk in chunks:
                await writer.write_chunk(crc, chunk)
                moved(len(chunk))
        sealed = await writer.seal(identity, size=item.size, crc32c=item.crc32c)
    except BaseException:
        await writer.discard()
        raise
    return sealed.disk_size


async def chunks_of(
    item: ShardItem, sources: Sequence[tuple[str, Tier]], failed: FailureSink, ahead: ReadAhead
) -> AsyncGenerator[tuple[int, memoryview], None]:
    """(CRC32C, bytes) of every chunk in order, from the first source that can go on."""
    crcs = unpack_chunk_crcs(item.chunks)
    at = 0
    errors: list[ForebayError] = []
    for name, tier in sources:
        try:
            found = ranged_chunks(tier, item.key, item.size, item.chunk_size, crcs, at, len(crcs), ahead)
            async with aclosing(found) as chunks:
                async for chunk in chunks:
                    yield crcs[at], chunk
                    at += 1
            return
        except ForebayError as error:  # whatever it is: it says nothing about the next tier
            errors.append(error)
            failed(name, error)
    if at == len(crcs):
        return
    tried = ",".join(name for name, _ in sources)
    if errors and all(isinstance(error, Corrupt | NotFound) for error in errors):
        raise Corrupt("no tier holds good bytes of this shard", key=item.key, chunk=at, tried=tried)
    raise Unavailable("no tier could serve this shard", key=item.key, chunk=at, tried=tried)
