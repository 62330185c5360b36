"""AsyncClient: the verbs of Client, with await.

Owns the mapping of each verb to a thread (threads.py), on which the same code runs; cancelling the awaiting task ends the RPC
under way. Does not own anything about the verbs themselves.
"""

import asyncio
from collections.abc import AsyncIterator, Generator, Iterable, Mapping
from functools import partial
from os import PathLike
from types import TracebackType
from typing import Any, Literal, cast, overload

from forebay import cancel
from forebay.aio_background import AsyncBackgroundCheckpoint, AsyncPending
from forebay.aio_care import AsyncCare
from forebay.api import Client
from forebay.background import TIMEOUT_S
from forebay.lanes.fd_map import MappedShard
from forebay.reader import Reader
from forebay.threads import OPERATIONS_MAX, Threads
from forebay.types import (
    Checkpoint,
    CommitReceipt,
    Deletion,
    Preempted,
    Pressure,
    QueueList,
    Receipt,
    Reloaded,
    RestoreSummary,
    Run,
    SaveSummary,
    Shard,
    Status,
    WaitProgress,
)
from forebay.waiting import OnProgress
from forebay.writer import CheckpointWriter

ASYNC_OPERATIONS_MAX = OPERATIONS_MAX


class AsyncClient:
    """Client with await: same verbs, same arguments. Cancelling an awaiting task ends the RPC under way.

    Up to ASYNC_OPERATIONS_MAX operations run at once; more wait their turn. Iterables given to put() are read on
    another thread.
    """

    def __init__(
        self,
        address: str | None = None,
        admit_timeout: float = 60.0,
        *,
        retry_timeout: float = 60.0,
        progress: bool = True,
        background_bytes: int | None = None,
        background_timeout: float = TIMEOUT_S,
    ) -> None:
        self._client = Client(
            address,
            admit_timeout,
            retry_timeout=retry_timeout,
            progress=progress,
            background_bytes=background_bytes,
            background_timeout=background_timeout,
        )
        self._threads = Threads()

    def __getstate__(self) -> Client:
        return self._client

    def __setstate__(self, client: Client) -> None:
        self._client = client
        self._threads = Threads()

    async def close(self) -> None:
        """As Client.close; operations under way fail."""
        try:
            await asyncio.to_thread(self._client.close)
        finally:
            await asyncio.to_thread(self._threads.close)

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            await self.close()
        except Exception:
            if error is None:
                raise  # else the block's own error is the one to show; this one has been logged

    def checkpoint(
        self, run: str, step: int, writers: int = 1, writer: int = 0, session: str | None = None, lane: str = "auto"
    ) -> "AsyncCheckpointWriter":
        """As Client.checkpoint; used with `async with`."""
        return AsyncCheckpointWriter(self._client.checkpoint(run, step, writers, writer, session, lane), self._threads)

    def async_checkpoint(
        self,
        run: str,
        step: int,
        writers: int = 1,
        writer: int = 0,
        session: str | None = None,
        lane: str = "auto",
        *,
        in_flight: int = 1,
    ) -> AsyncBackgroundCheckpoint:
        """As Client.async_checkpoint; used with `async with`, which waits for those before, or awaited."""
        begin = partial(self._client.async_checkpoint, run, step, writers, writer, session, lane, in_flight=in_flight)
        return AsyncBackgroundCheckpoint(begin, self._threads)

    async def prefault_background(self, size: int | None = None) -> None:
        """As Client.prefault_background."""
        await self._threads.run(self._client.prefault_background, size)

    async def save_dir(self, path: str | PathLike[str], run: str, step: int, **options: Any) -> SaveSummary:
        """As Client.save_dir."""
        return await self._threads.run(self._client.save_dir, path, run, step, **options)

    async def latest(self, run: str, level: str = "any") -> int | None:
        """As Client.latest."""
        return await self._threads.run(self._client.latest, run, level)

    async def runs(self) -> list[Run]:
        """As Client.runs."""
        return await self._threads.run(self._client.runs)

    async def checkpoints(self, run: str) -> list[Checkpoint]:
        """As Client.checkpoints."""
        return await self._threads.run(self._client.checkpoints, run)

    async def describe(self, run: str, step: int) -> Checkpoint:
        """As Client.describe."""
        return await self._threads.run(self._client.describe, run, step)

    async def wait(
        self, run: str, step: int, level: str, timeout: float | None = None, progress: OnProgress | None = None
    ) -> WaitProgress:
        """As Client.wait; `progress` is called on the event loop's thread."""
        loop = asyncio.get_running_loop()
        report = None if progress is None else (lambda seen: loop.call_soon_threadsafe(progress, seen))
        return await self._threads.run(self._client.wait, run, step, level, timeout, report)

    @property
    def last_pressure(self) -> Pressure | None:
        """As Client.last_pressure."""
        return self._client.last_pressure

    async def pressure(self) -> Pressure:
        """As Client.pressure."""
        return await self._threads.run(self._client.pressure)

    async def preempt(self, deadline: float, run: str = "") -> tuple[Preempted, ...]:
        """As Client.preempt."""
        return await self._threads.run(self._client.preempt, deadline, run)

    async def open(self, run: str, step: int, *, source: str = "auto", lane: str = "auto") -> "AsyncReader":
        """As Client.open."""
        return AsyncReader(await self._threads.run(self._client.open, run, step, source=source, lane=lane), self._threads)

    async def restore_dir(
        self, run: str, step_or_latest: int | str, path: str | PathLike[str], **options: Any
    ) -> RestoreSummary:
        """As Client.restore_dir."""
        return await self._threads.run(self._client.restore_dir, run, step_or_latest, path, **options)

    async def pin(self, run: str, step: int) -> None:
        """As Client.pin."""
        await self._threads.run(self._client.pin, run, step)

    async def unpin(self, run: str, step: int, *, all_nodes: bool = False) -> None:
        """As Client.unpin."""
        await self._threads.run(self._client.unpin, run, step, all_nodes=all_nodes)

    async def delete(self, run: str, step: int, *, force: bool = False, dry_run: bool = False) -> Deletion:
        """As Client.delete."""
        return await self._threads.run(self._client.delete, run, step, force=force, dry_run=dry_run)

    @property
    def care(self) -> AsyncCare:
        """As Client.care."""
        return AsyncCare(self._client.care, self._threads)

    async def status(self) -> Status:
        """As Client.status."""
        return await self._threads.run(self._client.status)

    async def hold(self, tier: str = "") -> list[str]:
        """As Client.hold."""
        return await self._threads.run(self._client.hold, tier)

    async def release(self, tier: str = "") -> list[str]:
        """As Client.release."""
        return await self._threads.run(self._client.release, tier)

    async def queue(self) -> QueueList:
        """As Client.queue."""
        return await self._threads.run(self._client.queue)

    async def change_queue(self, action: str, *ids: str) -> list[str]:
        """As Client.change_queue."""
        return await self._threads.run(self._client.change_queue, action, *ids)

    async def reload_config(self) -> Reloaded:
        """As Client.reload_config."""
        return await self._threads.run(self._client.reload_config)

    async def config(self) -> str:
        """As Client.config."""
        return await self._threads.run(self._client.config)


class AsyncCheckpointWriter:
    """CheckpointWriter with await."""

    def __init__(self, writer: CheckpointWriter, threads: Threads) -> None:
        self._writer = writer
        self._threads = threads

    @property
    def session(self) -> str:
        """The session that this part belongs to."""
        return self._writer.session

    @property
    def receipts(self) -> Mapping[str, Receipt]:
        """What is durable so far, by name."""
        return self._writer.receipts

    @overload
    async def put(self, name: str, data: Any, *, background: Literal[False] = False) -> Receipt: ...
    @overload
    async def put(self, name: str, data: Any, *, background: Literal[True]) -> AsyncPending[Receipt]: ...
    async def put(self, name: str, data: Any, *, background: bool = False) -> Receipt | AsyncPending[Receipt]:
        """As CheckpointWriter.put."""
        if not background:
            return await self._threads.run(self._writer.put, name, data)
        return AsyncPending(await self._threads.run(self._writer.put, name, data, background=True), self._threads)

    @overload
    async def put_many(self, shards: Mapping[str, Any], *, background: Literal[False] = False) -> list[Receipt]: ...
    @overload
    async def put_many(self, shards: Mapping[str, Any], *, background: Literal[True]) -> AsyncPending[list[Receipt]]: ...
    async def put_many(
        self, shards: Mapping[str, Any], *, background: bool = False
    ) -> list[Receipt] | AsyncPending[list[Receipt]]:
        """As CheckpointWriter.put_many."""
        if not background:
            return await self._threads.run(self._writer.put_many, shards)
        return AsyncPending(await self._threads.run(self._writer.put_many, shards, background=True), self._threads)

    async def commit(
        self,
        metadata: Mapping[str, Any] | None = None,
        wait: str = "cache",
        timeout: float | None = None,
        *,
        final: bool = False,
    ) -> CommitReceipt:
        """As CheckpointWriter.commit."""
        return await self._threads.run(partial(self._writer.commit, metadata, wait, timeout, final=final))

    async def abort(self) -> int:
        """As CheckpointWriter.abort."""
        return await self._threads.run(self._writer.abort)

    async def __aenter__(self) -> "AsyncCheckpointWriter":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._threads.run(self._writer.__exit__, kind, error, trace)


class AsyncReader:
    """Reader with await."""

    def __init__(self, reader: Reader, threads: Threads) -> None:
        self._reader = reader
        self._threads = threads

    @property
    def checkpoint(self) -> Checkpoint:
        """What is being read."""
        return self._reader.checkpoint

    async def names(self) -> list[str]:
        """As Reader.names."""
        return await self._threads.run(self._reader.names)

    async def shards(self) -> list[Shard]:
        """As Reader.shards."""
        return await self._threads.run(self._reader.shards)

    async def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """As Reader.read."""
        return await self._threads.run(self._reader.read, name, offset, length)

    async def readinto(self, name: str, buffer: Any, offset: int = 0) -> int:
        """As Reader.readinto. The buffer is not touched any more once this has returned or raised, cancelled too."""
        return await self._threads.run(self._reader.readinto, name, buffer, offset)

    async def scatter(self, name: str, buffers: Iterable[Any], offset: int = 0) -> int:
        """As Reader.scatter. The buffers are not touched any more once this has returned or raised, cancelled too."""
        return await self._threads.run(self._reader.scatter, name, buffers, offset)

    async def mapped(self, name: str) -> MappedShard:
        """As Reader.mapped."""
        return await self._threads.run(self._reader.mapped, name)

    async def read_many(self, names: Iterable[str] | None = None) -> AsyncIterator[tuple[str, bytes]]:
        """As Reader.read_many."""
        scope = cancel.Scope()
        groups = await self._threads.run_in(scope, partial(self._reader.read_groups, names))
        try:
            while (group := await self._threads.run_in(scope, partial(next, groups, None))) is not None:
                for item in group:
                    yield item
        finally:
            cast("Generator[list[tuple[str, bytes]], None, None]", groups).close()  # ends its RPC

    async def stream(self, name: str, offset: int = 0, length: int | None = None) -> AsyncIterator[memoryview]:
        """As Reader.stream."""
        scope = cancel.Scope()  # one for all chunks: the RPC outlives each single step
        chunks = await self._threads.run_in(scope, partial(self._reader.stream, name, offset, length))
        try:
            while (chunk := await self._threads.run_in(scope, partial(next, chunks, None))) is not None:
                yield chunk
        finally:
            cast("Generator[memoryview, None, None]", chunks).close()  # ends its RPC
