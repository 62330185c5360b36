"""The catalog's face: snapshots for reading, one pinned writer thread with group commit for writing.

Owns when acts run, share a transaction and become durable. Does not own the file (storage) nor what acts do (mutations).

    write(act): bounded queue -> writer thread: up to GROUP_ACTS acts or GROUP_S of work in one LMDB transaction, each act in a
    nested one -> synced commit -> the futures resolve. An act that raises is rolled back alone. A full map is doubled and the
    group run again, so an act must change nothing but its transaction.
"""

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import lmdb

from forebay_gateway.base import failpoints
from forebay_gateway.base.clock import Clock, SystemClock
from forebay_gateway.catalog import schema
from forebay_gateway.catalog.mutations import WriteTxn
from forebay_gateway.catalog.queries import ReadTxn
from forebay_gateway.catalog.rows import RisingNumber
from forebay_gateway.catalog.schema import CatalogDamaged, Transaction
from forebay_gateway.catalog.storage import Limits, Storage, as_damage
from forebay_gateway.core.errors import CacheFull, DiskFull, Unavailable

log = logging.getLogger("forebay.catalog")

T = TypeVar("T")

GROUP_ACTS_MAX = 256
GROUP_S = 0.020  # of work in one transaction: bounds how long an act waits for the ones before it
QUEUED_ACTS_MAX = 4096  # a few MiB of closures; at some 10,000 acts a second it is emptied in less than a second
READER_CHECK_S = 60.0
DEFAULT_MAP_SIZE = 1 << 30
DEFAULT_MAX_MAP_SIZE = 64 << 30
DEFAULT_RESERVE_BYTES = 16 << 20
FULL_RETRY_S = 60.0


class _Job:
    """An act on its way: what it gave, or why it did not."""

    __slots__ = ("act", "dirty", "error", "frees", "future", "has_slot", "value")

    def __init__(self, act: Callable[[WriteTxn], Any], future: "asyncio.Future[Any]", frees: bool) -> None:
        self.act = act
        self.frees = frees
        self.future = future
        self.has_slot = True
        self.dirty: dict[int, int] = {}
        self.value: Any = None
        self.error: BaseException | None = None


class Catalog:
    """The open catalog. Its coroutines belong to the event loop on which it was opened, and so do reads, which are short."""

    def __init__(
        self,
        storage: Storage,
        loop: asyncio.AbstractEventLoop,
        clock: Clock,
        on_failure: Callable[[BaseException], None] | None,
    ) -> None:
        self._storage = storage
        self._loop = loop
        self._clock = clock
        self._on_failure = on_failure
        self._ids = RisingNumber(storage.meta_number(schema.META_ID_FLOOR))
        self._commits = RisingNumber(storage.meta_number(schema.META_COMMIT_SEQ))
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._slots = asyncio.Semaphore(QUEUED_ACTS_MAX)
        self._closed = False
        self._failure: BaseException | None = None
        self._dirty_listener: Callable[[int, int], None] | None = None
        self._no_space = ""
        self._writes = self._groups = self._last_group = 0
        self._readers_checked_s = clock.monotonic()
        self._thread = threading.Thread(target=self._serve, name="catalog-writer", daemon=True)

    @classmethod
    async def open(
        cls,
        path: Path,
        *,
        tiers: Sequence[str],
        node: str,
        map_size: int = DEFAULT_MAP_SIZE,
        max_map_size: int = DEFAULT_MAX_MAP_SIZE,
        reserve_bytes: int = DEFAULT_RESERVE_BYTES,
        on_failure: Callable[[BaseException], None] | None = None,
        clock: Clock | None = None,
    ) -> "Catalog":
        """Open or create the catalog in the directory `path`, for this process alone.

        `on_failure` is called on the event loop when a commit failed: nothing can be written any more and the process must end.
        `reserve_bytes` of disk are kept allocated ahead of need. Raises StartupError; CatalogDamaged where it must be rebuilt.
        """
        limits = Limits(map_size, max(map_size, max_map_size), reserve_bytes)
        storage = await asyncio.to_thread(Storage.open, path, tiers, node, limits)
        catalog = cls(storage, asyncio.get_running_loop(), clock or SystemClock(), on_failure)
        catalog._thread.start()
        return catalog

    @property
    def is_failed(self) -> bool:
        """Whether a commit failed: what it held may be durable or not, and only the next start can tell."""
        return self._failure is not None

    @property
    def no_space(self) -> str:
        """Why the last write was refused for want of disk space; empty once one found space again."""
        return self._no_space

    async def close(self) -> None:
        """Run what was queued, then let go of the file. Later writes raise Unavailable."""
        if self._closed:
            return
        self._closed = True
        self._queue.put(None)
        await asyncio.to_thread(self._thread.join)
        self._storage.close()

    # Reading.

    def read(self) -> AbstractContextManager[ReadTxn]:
        """A snapshot: `with catalog.read() as txn`. Holding it across an await ends it and raises RuntimeError.

        A read on another thread must be short too: it holds up the growth of the map, and with it reads on the event loop.
        Raises CatalogDamaged where LMDB or a row's decoding stumbles.
        """
        if self._closed and not self._thread.is_alive():
            raise Unavailable("the catalog is closed")
        return self._storage.read()

    def stats(self) -> dict[str, int]:
        """What status shows: sizes in bytes, and what the writer thread has done since start."""
        return {
            "map_bytes": self._storage.map_bytes(),
            "used_bytes": self._storage.used_bytes(),
            "file_bytes": self._storage.file_bytes,
            "writes": self._writes,
            "groups": self._groups,
            "last_group_acts": self._last_group,
            "queued_acts": self._queue.qsize(),
            "stale_readers": self._storage.stale_readers,
        }

    # Numbers.

    def new_id(self) -> int:
        """An id for a session or a shard, never given before. Any thread may call it."""
        return self._ids.take()

    def raise_ids(self, floor: int) -> None:
        """Never give an id up to `floor`: a file bears it."""
        self._ids.raise_to(floor)

    def on_damage(self, listener: Callable[[CatalogDamaged], None]) -> None:
        """Call `listener` on the event loop with what is wrong, whenever a read or an act meets it."""
        self._storage.on_damage = lambda error: self._tell(listener, error)

    # Writing: the event loop's side.

    def on_dirty(self, listener: Callable[[int, int], None]) -> None:
        """Call `listener` with each session whose dirty bytes an act has changed, and by how much; once that is durable, and
        before the act's caller goes on."""
        self._dirty_listener = listener

    async def write(self, act: Callable[[WriteTxn], T], *, frees: bool = False) -> T:
        """Run `act` on the writer thread and return its value once the transaction that holds it is synced.

        What the act raises is raised here, and then it changed nothing. If the caller is cancelled, the act still runs to its
        end. Raises Unavailable when the catalog is full, closed, or failed, DiskFull when it is out of disk space. `frees` says
        that the act makes space: it may use the blocks that are kept for such acts.
        """
        self._check_usable()
        job = _Job(act, self._loop.create_future(), frees)
        try:
            await self._slots.acquire()
        except asyncio.CancelledError:
            job.has_slot = False
            job.future.cancel()
            if not self._closed:
                self._queue.put(job)
            raise
        try:
            self._check_usable()
        except Unavailable:
            self._slots.release()
            raise
        self._queue.put(job)
        value: T = await job.future
        return value

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise _failed(self._failure)
        if self._closed:
            raise Unavailable("the catalog is closed")

    def _resolve(self, jobs: Sequence[_Job]) -> None:
        for job in jobs:
            if job.has_slot:
                self._slots.release()
            if job.error is None and self._dirty_listener is not None:
                for session_id, delta in job.dirty.items():
                    self._dirty_listener(session_id, delta)
            if job.future.done():
                if job.error is not None:
                    log.warning("a catalog change failed after its caller had gone error=%r", job.error)
            elif job.error is None:
                job.future.set_result(job.value)
            elif isinstance(job.error, StopIteration):
                job.future.set_exception(RuntimeError("an act raised StopIteration"))
            else:
                job.future.set_exception(job.error)

    # Writing: the writer thread's side.

    def _serve(self) -> None:
        waiting: list[_Job] = []
        while self._collect(waiting):
            settled = self._settle(waiting)
            done, waiting = waiting[:settled], waiting[settled:]
            self._tell(self._resolve, done)
            self._check_readers()

    def _collect(self, waiting: list[_Job]) -> bool:
        """Add what is queued to `waiting`, waiting only where that is empty; False at the end of all work."""
        while len(waiting) < GROUP_ACTS_MAX:
            try:
                job = self._queue.get(block=not waiting)
            except queue.Empty:
                return True
            if job is None:
                self._queue.put(None)  # again found when what is waiting has run
                return bool(waiting)
            waiting.append(job)
        return True

    def _settle(self, jobs: list[_Job]) -> int:
        """Bring the first jobs to their end, durable or refused; how many that were."""
        if self._failure is not None:
            return self._refuse(jobs, _failed(self._failure))
        try:
            try:
                self._storage.reserve_space()
            except DiskFull as error:
                self._no_space = str(error)
                return self._settle_without_space(jobs, error)
            self._no_space = ""
            return self._commit(jobs)
        except lmdb.MapFullError:
            return self._settle_full(jobs)
        except lmdb.TxnFullError:
            if len(jobs) > 1:
                return sum(self._settle([job]) for job in jobs)
            return self._refuse(jobs, Unavailable("the change is too large for one catalog transaction"))
        except BaseException as error:  # noqa: BLE001 - a dead writer thread must fail its callers, never leave them waiting
            self._fail(error)
            return self._refuse(jobs, _failed(error))

    def _settle_without_space(self, jobs: list[_Job], error: DiskFull) -> int:
        if jobs[0].frees and self._storage.has_last_blocks():
            return self._commit(jobs[:1])
        refused = next((index for index, job in enumerate(jobs) if index and job.frees), len(jobs))
        return self._refuse(jobs[:refused], error)

    def _settle_full(self, jobs: list[_Job]) -> int:
        try:
            grown = self._storage.grow()
        except lmdb.Error as error:
            self._fail(error)
            return self._refuse(jobs, _failed(error))
        if grown:
            return self._settle(jobs)
        if len(jobs) > 1:  # others may be small enough, or free something
            return sum(self._settle([job]) for job in jobs)
        return self._refuse(jobs, Unavailable("the catalog is full", retry_after_s=FULL_RETRY_S))

    def _commit(self, jobs: list[_Job]) -> int:
        """One LMDB transaction with the first jobs; how many. Raises what makes the transaction as a whole fail."""
        deadline_s = self._clock.monotonic() + GROUP_S
        ran = 0
        with self._storage.begin_write() as txn:
            for job in jobs:
                if ran and self._clock.monotonic() >= deadline_s:
                    break
                self._run(job, txn)
                ran += 1
            failpoints.hit("catalog.before_commit")
        failpoints.hit("catalog.after_commit")
        self._groups += 1
        self._writes += ran
        self._last_group = ran
        return ran

    def _run(self, job: _Job, group: Transaction) -> None:
        job.value = job.error = None
        try:
            with self._storage.begin_write(group) as txn:
                view = WriteTxn(txn, self._storage.databases, self._storage.tiers, self._commits)
                try:
                    job.value = job.act(view)
                    view.finish()
                    job.dirty = view.dirty
                finally:
                    view.end("the act has ended")
                self._ids.raise_to(view.highest_id)
        except lmdb.Error:
            raise
        except BaseException as error:  # noqa: BLE001 - it goes to the caller, whatever it is
            job.error = as_damage(error) or error
            if isinstance(error, CatalogDamaged):
                self._storage.on_damage(error)

    def _refuse(self, jobs: Sequence[_Job], error: Unavailable | CacheFull) -> int:
        for job in jobs:
            job.value = None
            job.error = type(error)(error.sentence, retry_after_s=error.retry_after_s)
            job.error.__cause__ = error.__cause__
        return len(jobs)

    def _fail(self, error: BaseException) -> None:
        log.critical("the catalog failed, nothing can be written any more error=%r", error)
        self._failure = error
        if self._on_failure is not None:
            self._tell(self._on_failure, error)

    def _tell(self, callback: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed without close(): nobody waits any more
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _check_readers(self) -> None:
        now_s = self._clock.monotonic()
        if now_s - self._readers_checked_s >= READER_CHECK_S:
            self._readers_checked_s = now_s
            with contextlib.suppress(lmdb.Error, OSError):
                self._storage.check_readers()
                self._storage.drop_mapped()  # this thread alone moves the map


def _failed(error: BaseException) -> Unavailable:
    failed = Unavailable(f"the catalog failed and the gateway has to be restarted ({error})")
    failed.__cause__ = error
    return failed
