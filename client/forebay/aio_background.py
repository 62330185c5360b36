"""Saving in the background, with await.

Owns nothing but the mapping to threads: a snapshot waits for buffers and copies, which must not hold the event loop up.
"""

from collections.abc import Callable, Generator, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Generic, Protocol, TypeVar

from forebay.background_checkpoint import BackgroundCheckpoint
from forebay.errors import InvalidArgument
from forebay.threads import Threads
from forebay.types import CommitReceipt, Receipt

_Value = TypeVar("_Value")
_Value_co = TypeVar("_Value_co", covariant=True)


class Handle(Protocol[_Value_co]):
    """What Pending and PendingCommit have in common."""

    def done(self) -> bool:
        """Whether it has ended."""

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Its error."""

    def result(self, timeout: float | None = None) -> _Value_co:
        """Its value."""


class AsyncPending(Generic[_Value]):
    """What something in the background will come to. Cancelling an await leaves it under way."""

    def __init__(self, handle: Handle[_Value], threads: Threads) -> None:
        self._handle = handle
        self._threads = threads

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._handle.done()

    async def exception(self, timeout: float | None = None) -> BaseException | None:
        """As Pending.exception."""
        return await self._threads.run(self._handle.exception, timeout)

    async def result(self, timeout: float | None = None) -> _Value:
        """As Pending.result."""
        return await self._threads.run(self._handle.result, timeout)


class AsyncBackgroundCheckpoint:
    """BackgroundCheckpoint with await. Begun by `async with`, or by awaiting it."""

    def __init__(self, begin: Callable[[], BackgroundCheckpoint], threads: Threads) -> None:
        self._begin = begin
        self._begun: BackgroundCheckpoint | None = None
        self._threads = threads

    @property
    def session(self) -> str:
        """The session that this part belongs to."""
        return self._part.session

    @property
    def receipts(self) -> Mapping[str, Receipt]:
        """What is durable so far, by name."""
        return self._part.receipts

    async def put(self, name: str, data: Any) -> AsyncPending[Receipt]:
        """As BackgroundCheckpoint.put."""
        return AsyncPending(await self._threads.run(self._part.put, name, data), self._threads)

    async def put_many(self, shards: Mapping[str, Any]) -> AsyncPending[list[Receipt]]:
        """As BackgroundCheckpoint.put_many."""
        return AsyncPending(await self._threads.run(self._part.put_many, shards), self._threads)

    async def commit(
        self,
        metadata: Mapping[str, Any] | None = None,
        wait: str = "cache",
        timeout: float | None = None,
        *,
        final: bool = False,
    ) -> AsyncPending[CommitReceipt]:
        """As BackgroundCheckpoint.commit."""
        return AsyncPending(
            await self._threads.run(partial(self._part.commit, metadata, wait, timeout, final=final)), self._threads
        )

    async def abort(self) -> int:
        """As BackgroundCheckpoint.abort."""
        return await self._threads.run(self._part.abort)

    def __await__(self) -> Generator[Any, None, "AsyncBackgroundCheckpoint"]:
        return self.__aenter__().__await__()

    async def __aenter__(self) -> "AsyncBackgroundCheckpoint":
        if self._begun is None:
            self._begun = await self._threads.run(self._begin)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._threads.run(self._part.__exit__, kind, error, trace)

    @property
    def _part(self) -> BackgroundCheckpoint:
        if self._begun is None:
            raise InvalidArgument("a checkpoint in the background begins with 'async with', or with await")
        return self._begun
