"""The mover process: `python -m forebay_gateway.movers.worker FD`.

Takes jobs over a socket pair, moves the bytes, proves them, reports each item. Owns no state: what it knows of a shard came
with the job. It never writes the catalog, and ends when the front's end of the socket closes.
"""

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import msgspec

from forebay_gateway.base.clock import SystemClock
from forebay_gateway.base.logs import setup_logging
from forebay_gateway.cache.io import IoPool
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.cache.reader import ShardReader
from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.core.errors import Corrupt, ForebayError, Unavailable, to_record
from forebay_gateway.core.records import ShardKey
from forebay_gateway.movers import fetch
from forebay_gateway.movers.jobs import (
    Ack,
    Cancel,
    CheckJob,
    DrainJob,
    Failure,
    FetchJob,
    ItemDone,
    ItemFailed,
    Job,
    JobDone,
    Limits,
    Progress,
    Saves,
    Setup,
    ShardItem,
    ToFront,
    UploadBegun,
    receive_in_mover,
    send,
)
from forebay_gateway.movers.turn import Turn
from forebay_gateway.tiers.base import Capabilities, ObjectInfo, PutOptions, Source, StorageFull, Tier
from forebay_gateway.tiers.chunks import verified_chunks
from forebay_gateway.tiers.factory import open_tier
from forebay_gateway.tiers.ranges import ReadAhead
from forebay_gateway.tiers.readback import check_size
from forebay_gateway.tiers.s3.parts import part_size
from forebay_gateway.tiers.throttled import set_limits
from forebay_wire.manifest import unpack_chunk_crcs

log = logging.getLogger("forebay.mover")

BUFFERS_BYTES_MIN = 96 << 20


class Mover:
    """The process's end of the socket: jobs in, reports out."""

    def __init__(self, setup: Setup, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer
        self._runner = JobRunner(setup, partial(send, writer))
        self._jobs: dict[int, asyncio.Task[None]] = {}

    async def run(self) -> None:
        """Serve until the front is gone."""
        try:
            while (message := await receive_in_mover(self._reader)) is not None:
                match message:
                    case DrainJob() | FetchJob() | CheckJob():
                        task = asyncio.create_task(self._runner.run(message))
                        self._jobs[message.id] = task
                        task.add_done_callback(partial(self._ended, message.id))
                    case Ack(id=job_id, index=index):
                        self._runner.acknowledged(job_id, index)
                    case Saves(under_way=under_way):
                        self._runner.turn.saves(under_way)
                    case Limits():
                        self._runner.limit(message)
                    case Cancel(id=job_id):
                        if (running := self._jobs.get(job_id)) is not None:
                            running.cancel()
        finally:
            await self._close()

    async def _close(self) -> None:
        tasks = list(self._jobs.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._runner.close()
        self._writer.close()
        with contextlib.suppress(OSError):  # the front has gone, and what was still to be told to it with it
            await self._writer.wait_closed()

    def _ended(self, job_id: int, _task: asyncio.Task[None]) -> None:
        self._jobs.pop(job_id, None)


@dataclass(eq=False, slots=True)
class _Opened:
    """A tier in use. Another takes its place, for the jobs that begin then, where its configuration changed."""

    tier: Tier
    config: TierConfig
    jobs: int = 0


class JobRunner:
    """Does jobs, whoever hands them over: every item is reported to `tell`, and a JobDone after the last."""

    def __init__(self, setup: Setup, tell: Callable[[ToFront], None], opened: Callable[[TierConfig], Tier] = open_tier) -> None:
        self._setup = setup
        self._tell = tell
        self._open_tier = opened
        self._cache = CacheDir.attach(Path(setup.cache_path))
        self._pool = IoPool.within(buffer_bytes(setup.tiers, setup.chunk_size), setup.chunk_size)
        self._ahead = ReadAhead()  # of all fetches; a mover that fetches drains nothing
        self._configs = {config.name: config for config in setup.tiers}
        self._tiers: dict[str, _Opened] = {}
        self._acks: dict[tuple[int, int], asyncio.Future[None]] = {}
        self.turn = Turn(SystemClock())

    async def close(self) -> None:
        """Let go of tiers and threads; no job runs any more."""
        for opened in self._tiers.values():
            await _close(opened.tier)
        self._pool.close()

    def limit(self, limits: Limits) -> None:
        """What may be done on the tier now: its pace holds for transfers under way, `concurrency` from the next job on."""
        config = msgspec.structs.replace(
            self._configs[limits.tier],
            bandwidth=limits.bandwidth,
            iops=limits.iops,
            concurrency=limits.concurrency,
            fleet_bandwidth=None,  # the bandwidth is this node's share of it already
        )
        self._configs[limits.tier] = config
        self._pool.grow(buffer_bytes(self._configs.values(), self._setup.chunk_size))
        if (opened := self._tiers.get(limits.tier)) is not None:
            set_limits(opened.tier, limits.bandwidth, limits.iops)

    def acknowledged(self, job_id: int, index: int) -> None:
        """The front has recorded the item's upload."""
        if (ack := self._acks.pop((job_id, index), None)) is not None and not ack.done():
            ack.set_result(None)

    async def run(self, job: Job) -> None:
        """One job to its end."""
        try:
            match job:
                case DrainJob():
                    await self._each(job, self._drain_item)
                case CheckJob():
                    await self._each(job, self._check_item)
                case FetchJob():
                    await self._fetch(job)
        finally:
            self._tell(JobDone(job.id))

    @asynccontextmanager
    async def _using(self, name: str, capabilities: Capabilities) -> AsyncIterator[Tier]:
        """The tier for one job, as it is configured when the job begins."""
        opened, config = self._tiers.get(name), self._configs[name]
        if opened is None or opened.config.concurrency != config.concurrency:  # its threads and connections are as many
            replaced, opened = opened, _Opened(self._open_tier(config), config)
            self._tiers[name] = opened
        else:
            replaced = None
        opened.tier.capabilities = capabilities
        opened.jobs += 1
        try:
            if replaced is not None and not replaced.jobs:
                await _close(replaced.tier)
            yield opened.tier
        finally:
            opened.jobs -= 1
            if not opened.jobs and self._tiers.get(name) is not opened:
                await _close(opened.tier)

    async def _each(
        self,
        job: DrainJob | CheckJob,
        act: Callable[[DrainJob | CheckJob, int, ShardItem, Tier], Awaitable[ObjectInfo]],
    ) -> None:
        slots = asyncio.Semaphore(self._configs[job.tier].concurrency)

        async def one(index: int, item: ShardItem, tier: Tier) -> None:
            async with slots:
                try:
                    info = await act(job, index, item, tier)
                except Exception as error:  # noqa: BLE001  every failure is reported, none ends the process
                    self._tell(ItemFailed(job.id, index, failure_of(error), job.tier))
                else:
                    self._tell(ItemDone(job.id, index, tag_on_tier=info.tag))

        async with self._using(job.tier, job.capabilities) as tier, asyncio.TaskGroup() as group:
            for index, item in enumerate(job.items):
                group.create_task(one(index, item, tier))

    async def _drain_item(self, job: DrainJob | CheckJob, index: int, item: ShardItem, tier: Tier) -> ObjectInfo:
        async def record(upload_id: str) -> None:
            ack: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._acks[job.id, index] = ack
            self._tell(UploadBegun(job.id, index, upload_id))
            await ack

        source = await self._open(item)
        try:
            options = PutOptions(on_upload=record, on_progress=lambda size: self._tell(Progress(job.id, size)))
            info = await tier.put(item.key, Yielding(source, self.turn), options)
            if info.crc32c != item.crc32c:  # put did not prove the bytes by itself
                info = await tier.verify(item.key, source, options)
            return info
        finally:
            await source.close()

    async def _check_item(self, job: DrainJob | CheckJob, _index: int, item: ShardItem, tier: Tier) -> ObjectInfo:
        # Without a checksum of the server's own, verify() reads every byte.
        if not (isinstance(job, CheckJob) and job.read and job.capabilities.server_checksum):
            return await tier.verify(item.key, Expected(item))
        info = await tier.head(item.key)
        check_size(tier.name, item.key, Expected(item), info.size)
        crcs = unpack_chunk_crcs(item.chunks)
        async with aclosing(verified_chunks(tier, item.key, item.size, item.chunk_size, crcs, 0, len(crcs))) as chunks:
            async for _ in chunks:
                pass
        return info

    async def _open(self, item: ShardItem) -> ShardReader:
        key = ShardKey(item.session_id, item.shard_id)
        try:
            return await ShardReader.open(
                self._cache,
                self._pool,
                self._cache.shard_path(key),
                size=item.size,
                chunk_size=item.chunk_size,
                crc32c=item.crc32c,
                chunks=item.chunks,
                direct_io=self._cache.direct_io,
            )
        except Corrupt as error:
            error.details["where"] = "cache"
            raise

    async def _fetch(self, job: FetchJob) -> None:
        def failed(tier_name: str, error: Exception) -> None:
            self._tell(ItemFailed(job.id, 0, failure_of(error), tier_name))

        def moved(size: int) -> None:
            self._tell(Progress(job.id, size))

        try:
            async with AsyncExitStack() as stack:
                sources = [
                    (source.tier, await stack.enter_async_context(self._using(source.tier, source.capabilities)))
                    for source in job.sources
                ]
                disk_size = await fetch.fetch(self._cache, self._pool, job, sources, failed, moved, self._ahead)
        except Exception as error:  # noqa: BLE001  reported to the front
            self._tell(ItemFailed(job.id, 0, failure_of(error)))
        else:
            self._tell(ItemDone(job.id, 0, disk_size=disk_size))


async def _close(tier: Tier) -> None:
    with contextlib.suppress(ForebayError, OSError):
        await tier.close()


def buffer_bytes(tiers: Iterable[TierConfig], chunk_size: int) -> int:
    """Enough that every transfer of the busiest tier can hold a whole part: with less they could wait for each other.

    A quarter of a pool is kept for writers (cache/io), so a third is added.
    """
    parts = [config.concurrency * part_size(0, chunk_size, config.part_size) for config in tiers]
    return max(BUFFERS_BYTES_MIN, max(parts, default=0) * 4 // 3 + 4 * chunk_size)


class Yielding:
    """A shard whose next chunk is read when it is the drain's turn."""

    def __init__(self, source: Source, turn: Turn) -> None:
        self._source = source
        self._turn = turn
        self.size = source.size
        self.chunk_size = source.chunk_size
        self.crc32c = source.crc32c
        self.chunk_crcs = source.chunk_crcs

    async def read_chunk(self, index: int) -> memoryview:
        """As the source's; what is wrong with it is said to be the cache's, not the tier's."""
        await self._turn.mine()
        try:
            return await self._source.read_chunk(index)
        except Corrupt as error:
            error.details["where"] = "cache"
            raise


class Expected:
    """Checksums without bytes, for proving a copy when the cache's own file is not needed."""

    def __init__(self, item: ShardItem) -> None:
        self.size = item.size
        self.chunk_size = item.chunk_size
        self.crc32c = item.crc32c
        self.chunk_crcs = tuple(unpack_chunk_crcs(item.chunks))

    async def read_chunk(self, index: int) -> memoryview:
        """Never asked for by verify."""
        raise Unavailable("this source has checksums only", chunk=index)


def failure_of(error: Exception) -> Failure:
    """An error as a message."""
    if not isinstance(error, ForebayError):
        log.error("unexpected failure", exc_info=error)
    record = to_record(error)
    details = {key: str(value) for key, value in record.details.items()}
    where = details.pop("where", "")
    return Failure(record.kind, record.message, record.retry_after_s, details, where, isinstance(error, StorageFull))


async def _main(descriptor: int) -> None:
    reader, writer = await asyncio.open_connection(sock=socket.socket(fileno=descriptor), limit=1 << 20)
    setup = await receive_in_mover(reader)
    if not isinstance(setup, Setup):
        return
    setup_logging(setup.log_level, setup.log_format)
    await Mover(setup, reader, writer).run()


if __name__ == "__main__":
    # The front decides when to stop; a Ctrl-C in its terminal reaches the whole group.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    asyncio.run(_main(int(sys.argv[1])))
