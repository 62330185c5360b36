"""How a blocking act runs on a directory of a (parallel) file system: in threads, within a time, its errors translated.

All file work runs in the tier's own threads, so a hung mount costs threads and gives Unavailable; the event loop never blocks.
`.forebay/tier.json` marks the root: without it the root is away (not mounted, or removed), never empty. An absent file is
NotFound only beside its marker, and nothing is written below a root that lacks it.

Owns the threads and these rules. Does not own what the acts are: of documents (documents.py), of shards and names (tier.py).
"""

import asyncio
import contextlib
import errno
import functools
import os
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar, TypeVar

from forebay_gateway.base import durable
from forebay_gateway.base.clock import Clock, SystemClock
from forebay_gateway.base.recent import Recent
from forebay_gateway.core.errors import NotFound, Unavailable
from forebay_gateway.tiers.base import ObjectInfo, Tier
from forebay_gateway.tiers.keys import check_key
from forebay_gateway.tiers.posix.errors import translate
from forebay_gateway.tiers.posix.files import OpenFile
from forebay_gateway.tiers.posix.marker import Marker

T = TypeVar("T")

_CANCEL_GRACE_S = 2.0
LEFT_MAX = 4096


class Acts(Tier):
    """`path` is the root. `known_id` is the id of its marker where a probe elsewhere has seen it: another one is then away."""

    kind: ClassVar[str] = "posix"

    def __init__(
        self,
        name: str,
        path: Path,
        *,
        concurrency: int = 4,
        clock: Clock | None = None,
        known_id: str | None = None,
        direct: bool = True,
        metadata_timeout_s: float = 30.0,
        data_timeout_s: float = 120.0,
        lock_ttl_s: float = 60.0,
        owner: str = "",
    ) -> None:
        super().__init__(name)
        self.root = path
        # Half-written documents bear the node's name, so that its next process knows them ("@" is in no node id).
        self.temp_tag = f"{owner}@" if owner else ""
        self._temps: set[str] = set()  # of these, those that are being written now
        # Temporary files of shards that could not be removed after an attempt, by key: before the next one, as whoever records
        # them knows the newest alone.
        self._left: Recent[str, Path] = Recent(LEFT_MAX)
        self.marker = Marker(name, path, known_id, self.temp_tag)
        self.direct = direct
        self._clock = clock or SystemClock()
        self._metadata_timeout_s = metadata_timeout_s
        self._data_timeout_s = data_timeout_s
        self._lock_ttl_s = lock_ttl_s
        self._owner = f"{os.uname().nodename}:{os.getpid()}"
        self._pool = ThreadPoolExecutor(max_workers=2 + 2 * concurrency, thread_name_prefix=f"tier-{name}")

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    async def _bounded(self, act: str, key: str, work: Awaitable[T], timeout_s: float | None = None) -> T:
        """The result of `work`, or Unavailable after the timeout; the thread in it is then left to itself."""
        limit_s = self._metadata_timeout_s if timeout_s is None else timeout_s
        future = asyncio.ensure_future(work)
        future.add_done_callback(lambda done: done.cancelled() or done.exception())  # also where nobody waits any more
        try:
            done, _ = await asyncio.wait({future}, timeout=limit_s)
        except asyncio.CancelledError:
            # Whoever cleans up now should not meet the thread at work.
            await asyncio.wait({future}, timeout=_CANCEL_GRACE_S)
            raise
        if not done:
            raise Unavailable("the file system does not answer", tier=self.name, key=key, act=act, timeout_s=limit_s)
        return future.result()

    def _thread(self, function: Callable[..., T], *args: object) -> Awaitable[T]:
        return asyncio.get_running_loop().run_in_executor(self._pool, functools.partial(function, *args))

    async def _run(self, act: str, key: str, function: Callable[..., T], *args: object, timeout_s: float | None = None) -> T:
        return await self._guard(act, key, lambda: self._thread(function, *args), timeout_s)

    async def _guard(self, act: str, key: str, work: Callable[[], Awaitable[T]], timeout_s: float | None = None) -> T:
        """The result of `work` with errors of the operating system translated. ENOENT counts when it comes twice, the second
        time after the directory was looked at afresh, with the marker there: clients of network file systems cache absence."""
        try:
            try:
                return await self._bounded(act, key, work(), timeout_s)
            except FileNotFoundError:
                await self._bounded(act, key, self._thread(self._look_afresh, key))
            try:
                return await self._bounded(act, key, work(), timeout_s)
            except FileNotFoundError as error:
                await self._bounded(act, key, self._thread(self._check_root))
                raise NotFound("no such file", tier=self.name, key=key) from error
        except OSError as error:  # also of the looks at the root
            raise translate(error, self.name, key, act) from error

    def _check_root(self) -> None:
        if self.marker.id is None and self.capabilities is not None:  # probed by another process
            self.marker.id = self.capabilities.notes.get("marker")
        self.marker.check()

    def _look_afresh(self, key: str) -> None:
        self._check_root()
        directory = (self.root / key).parent
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            os.close(os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))

    def _in_directory(self, directory: Path, act: Callable[[], T]) -> T:
        """`act` with `directory` made. Someone's delete may prune it in between, so this tries a few times."""
        for _ in range(8):
            self._check_root()
            try:
                durable.make_dirs(directory, self.root)
                return act()
            except FileNotFoundError:
                continue
        raise OSError(errno.EAGAIN, "the directory is removed again and again", str(directory))

    async def _close(self, file: OpenFile) -> None:
        """Let go of a descriptor whose close can report nothing of use."""
        with contextlib.suppress(OSError, Unavailable):
            await self._bounded("close", "", self._thread(file.close))

    async def close(self) -> None:
        """Threads end when their last act does; one that hangs in a mount is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def info_of(key: str, stat: os.stat_result) -> ObjectInfo:
    """What a file is, as others hear of it."""
    return ObjectInfo(key, stat.st_size, tag_of(stat), modified_s=stat.st_mtime)


def tag_of(stat: os.stat_result) -> str:
    """Its version. Every one is a new inode, made while the one it replaces is still there."""
    return f"{stat.st_mtime_ns:x}-{stat.st_ino:x}-{stat.st_size:x}"
