"""What stands in for a real tier and for the mover's process, beside a node that is otherwise whole.

A tier is a dictionary that can be away. A stream to it behaves as that of a parallel file system (tiers/posix/stream.py): a
temporary object beside the target, noted first; nothing under the name before it is whole and proved; and an answer that may
get lost behind the rename.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any

from forebay_gateway.base import failpoints
from forebay_gateway.base.durable import TEMP_PREFIX
from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.core.errors import Unavailable
from forebay_gateway.movers.jobs import ItemDone, ItemFailed, Job, JobDone, Limits, Progress, Setup, ToFront, UploadBegun
from forebay_gateway.movers.pool import MoverProcess, Reports
from forebay_gateway.movers.worker import JobRunner
from forebay_gateway.tiers.base import ObjectInfo, PutOptions, Source, Tier
from forebay_gateway.tiers.memory import MemoryStore, MemoryTier
from forebay_gateway.tiers.stream import Checksums, Publish, ShardStream, StreamOptions

PLAIN = PutOptions()


class Away(MemoryTier):
    """A tier that can be away: then no verb has an answer, and nothing is said about what is there."""

    def __init__(self, name: str, store: MemoryStore, outages: set[str]) -> None:
        super().__init__(name, store)
        self._outages = outages

    def look(self) -> None:
        """Raise Unavailable while it is away."""
        if self.name in self._outages:
            raise Unavailable("the tier is away", tier=self.name)

    async def probe(self) -> Any:
        self.look()
        return await super().probe()

    async def put(self, key: str, source: Source, options: PutOptions = PLAIN) -> ObjectInfo:
        self.look()
        return await super().put(key, source, options)

    async def verify(self, key: str, source: Source, options: PutOptions = PLAIN) -> ObjectInfo:
        self.look()
        return await super().verify(key, source, options)

    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        self.look()
        return await super().put_small(key, data, if_absent=if_absent, if_match=if_match)

    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> tuple[bytes, ObjectInfo]:
        self.look()
        return await super().get_small(key, limit_bytes)

    async def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        self.look()
        async for piece in super().read(key, offset, length):
            yield piece

    async def head(self, key: str) -> ObjectInfo:
        self.look()
        return await super().head(key)

    async def delete(self, key: str) -> None:
        self.look()
        await super().delete(key)

    async def list(self, prefix: str) -> Any:
        self.look()
        found = await super().list(prefix)
        return replace(found, objects=tuple(info for info in found.objects if not _is_temporary(info.key)))

    async def point(self, key: str, target: str) -> None:
        self.look()
        await super().point(key, target)

    async def settle(self, key: str) -> None:
        self.look()

    async def abort_upload(self, key: str, upload_id: str) -> None:
        self.look()
        assert upload_id.startswith(TEMP_PREFIX), upload_id
        self.store.objects.pop(_beside(key, upload_id), None)

    async def sweep(self, key: str) -> None:
        self.look()


def _beside(key: str, name: str) -> str:
    return f"{key.rpartition('/')[0]}/{name}"


def _is_temporary(key: str) -> bool:
    return key.rpartition("/")[2].startswith(TEMP_PREFIX)


class TemporaryThenName(ShardStream):
    """A stream to an Away; its acts, and what each leaves behind where the next one does not come, are those of PosixStream."""

    def __init__(self, tier: Away, key: str, options: StreamOptions) -> None:
        self._tier, self._key, self._options = tier, key, options
        self._name = f"{TEMP_PREFIX}{next(tier.store.versions)}"
        self._path = _beside(key, self._name)
        self._data = bytearray()
        self._finished = False

    async def begin(self) -> None:
        await self._options.on_upload(self._name)
        self._tier.look()
        self._tier._store(self._path, b"")
        failpoints.hit("model.temporary")

    async def write(self, crc: int, data: memoryview) -> None:
        self._tier.look()
        self._data += data
        self._tier._store(self._path, bytes(self._data))
        failpoints.hit("model.written")

    async def finish(self, proof: Checksums, publish: Publish) -> ObjectInfo:
        tier, key = self._tier, self._key
        tier.look()
        there = await tier.verify(self._path, proof)
        await publish(replace(there, key=key))
        tier.look()
        failpoints.hit("posix.before_rename")
        tier.look()
        tier.store.objects[key] = tier.store.objects.pop(self._path)  # the very version that it was
        failpoints.hit("posix.before_dir_fsync")
        tier.look()  # it has its name, and who asked does not hear of it
        self._finished = True
        return await tier.head(key)

    async def discard(self) -> bool:
        if self._finished:
            return True
        try:
            await self._tier.abort_upload(self._key, self._name)
        except Unavailable:
            return False
        return True


def open_stream(tier: Tier, key: str, options: StreamOptions) -> ShardStream:
    """What factory.open_stream is for real tiers."""
    assert isinstance(tier, Away)
    return TemporaryThenName(tier, key, options)


class MoversHere:
    """MoverPool without processes: the same jobs by the same code, their reports in the same order."""

    def __init__(self, setup: Setup, opened: Callable[[TierConfig], Tier]) -> None:
        self._ids = itertools.count(1)
        self._told: dict[int, asyncio.Queue[ToFront]] = {}
        self._runner = JobRunner(setup, lambda message: self._told[message.id].put_nowait(message), opened)

    def next_job_id(self) -> int:
        return next(self._ids)

    def processes(self) -> list[MoverProcess]:
        return []

    def limit(self, limits: Limits) -> None:
        self._runner.limit(limits)

    def saves(self, under_way: bool) -> None:
        self._runner.turn.saves(under_way)

    async def drain(self, tier: str, job: Job, reports: Reports) -> None:
        await self.fetch(job, reports)

    async def fetch(self, job: Job, reports: Reports) -> None:
        inbox = self._told[job.id] = asyncio.Queue()
        running = asyncio.create_task(self._runner.run(job))
        try:
            while not isinstance(message := await inbox.get(), JobDone):
                match message:
                    case UploadBegun():
                        await reports.upload_begun(message.index, message.upload_id)
                        self._runner.acknowledged(job.id, message.index)
                    case ItemDone():
                        await reports.item_done(message.index, message)
                    case ItemFailed():
                        await reports.item_failed(message.index, message)
                    case Progress():
                        reports.progress(message.size)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            del self._told[job.id]

    async def stop(self, grace_s: float) -> None:
        await self._runner.close()
