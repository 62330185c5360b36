"""Puts in the background: snapshotted now, sent later.

Owns, for each client, the buffers and threads of such puts; for each part which of them are under way, and the rule that one
that failed is told at every later call until its name has been put again. Does not own how a shard is sent (writer.py hands
that in) nor commits in the background (background_checkpoint.py). A forked child begins with nothing of its parent's.
"""

import os
import threading
import time
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ALL_COMPLETED, FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import Context
from typing import Protocol

from forebay import cancel
from forebay.buffers import DEFAULT_BYTES, ENVIRONMENT, PAGE_BYTES, BufferPool, Region, parse_size
from forebay.errors import Corrupt, DeadlineExceeded, InvalidArgument
from forebay.pending import finished
from forebay.snapshot import BLOCK_BYTES, Copier, SnapshotSource
from forebay.sources import BufferSource, FilledSource, Source
from forebay.types import Receipt

# Shards sent at a time. The trainer needs the cores; more streams would not make one disk faster.
UPLOADS = 2
COMMITS = 8
TIMEOUT_S = 300.0
# Small shards of one put_many share a region up to this size, so that the first are under way while the last are copied.
BATCH_BYTES_MAX = 8 << 20
# Nothing is sent while the trainer snapshots, nor between the puts of one loop: sending would take the cores from it.
QUIET_S = 0.02

Send = Callable[[Mapping[str, Source]], dict[str, Receipt]]


class Commit(Protocol):
    """A commit in the background, as the client keeps it until its outcome is known to somebody."""

    @property
    def durable(self) -> "Future[None]":
        """Done once it has committed or failed."""

    def unseen(self) -> BaseException | None:
        """Its error, where it has failed and nobody has been told."""

    def tell(self) -> BaseException:
        """The error as the client raises it; from then on it has been told."""

    def over(self) -> bool:
        """Whether nothing of it is under way any more."""

    def leave(self) -> None:
        """Stop waiting for a level beyond the commit."""


class Background:
    """One client's buffers, threads and commits, all made when first needed."""

    def __init__(self, size: int | None, timeout_s: float) -> None:
        if size is None:
            size = parse_size(text) if (text := os.environ.get(ENVIRONMENT)) else DEFAULT_BYTES
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise InvalidArgument(f"background_bytes must be a size in bytes, not {size!r}")
        self.size = size
        self.timeout_s = timeout_s
        self._parts: weakref.WeakSet[PartPuts] = weakref.WeakSet()
        self._inherited: list[object] = []
        self._closed = False
        self._begin()
        _all.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._calm = threading.Condition()
        self._copying = 0
        self._copied_s = 0.0
        self.pool = BufferPool(self.size)
        self.copier = Copier()
        self._uploads: ThreadPoolExecutor | None = None
        self._commit_threads: ThreadPoolExecutor | None = None
        self._commits: list[Commit] = []

    def forked(self) -> None:
        """This is a child: what the parent has under way is none of its business. Only this thread exists."""
        # Kept, since an executor that is collected would speak to its threads.
        self._inherited.append((self.pool, self.copier, self._uploads, self._commit_threads, self._commits))
        self._begin()
        for part in self._parts:
            part.forked()

    def fault_in(self, size: int | None) -> None:
        """Have memory behind `size` bytes of the buffers (all of them, where None)."""
        size = self.size if size is None else size
        if not 0 <= size <= self.size:
            raise InvalidArgument(f"size={size}: the buffers for background saves have {self.size} bytes")
        if size:
            region = self.pool.take(size, self.timeout_s, "fault buffers in")
            try:
                self.copier.fault_in(region)
            finally:
                region.release()

    @contextmanager
    def copying(self) -> Iterator[None]:
        """The trainer waits for a copy meanwhile."""
        with self._calm:
            self._copying += 1
        try:
            yield
        finally:
            with self._calm:
                self._copying -= 1
                self._copied_s = time.monotonic()
                self._calm.notify_all()

    def await_calm(self) -> None:
        """Return once the trainer has gone on, or waits for buffers."""
        with self._calm:
            while (remaining_s := self._copied_s + QUIET_S - time.monotonic()) > 0 or self._copying:
                self._calm.wait(None if self._copying else remaining_s)

    def upload(self, part: "PartPuts", act: Callable[[], dict[str, Receipt]]) -> "Future[dict[str, Receipt]]":
        """Send something on one of the threads, `part`'s."""
        with self._lock:
            self._check_open()
            if self._uploads is None:
                self._uploads = ThreadPoolExecutor(UPLOADS, thread_name_prefix="forebay-background")
            self._parts.add(part)
            return self._uploads.submit(act)

    def commit(self, commit: Commit, act: Callable[[], None]) -> "Future[None]":
        """Commit something on a thread of its own kind, and keep `commit` until its outcome is known."""
        with self._lock:
            self._check_open()
            if self._commit_threads is None:
                self._commit_threads = ThreadPoolExecutor(COMMITS, thread_name_prefix="forebay-commit")
            self._commits.append(commit)
            return self._commit_threads.submit(act)

    def admit(self, in_flight: int, doing: str) -> None:
        """Wait until fewer than `in_flight` commits are under way, then raise the first failure that nobody has seen.

        Raises DeadlineExceeded.
        """
        deadline_s = time.monotonic() + self.timeout_s
        while len(under_way := [each.durable for each in self._kept() if not each.durable.done()]) >= in_flight:
            if not finished(under_way, max(0.0, deadline_s - time.monotonic()), when=FIRST_COMPLETED):
                raise DeadlineExceeded(
                    f"{doing}: {len(under_way)} checkpoints before it are still being saved in the background "
                    f"timeout_s={self.timeout_s}"
                )
        self._raise_unseen()

    def close(self) -> None:
        """Finish what has been committed in the background and end all else. Raises the first failure nobody has seen."""
        try:
            finished([each.durable for each in self._kept()], None, when=ALL_COMPLETED)
        finally:
            with self._lock:
                self._closed = True
                threads = [each for each in (self._uploads, self._commit_threads) if each is not None]
            for commit in self._kept():
                commit.leave()
            for part in list(self._parts):
                part.cancel()
            for executor in threads:
                executor.shutdown()
            self.copier.close()
            self.pool.close()
        self._raise_unseen()

    def _kept(self) -> list[Commit]:
        with self._lock:
            self._commits = [each for each in self._commits if not each.over() or each.unseen() is not None]
            return list(self._commits)

    def _raise_unseen(self) -> None:
        for commit in self._kept():
            if commit.unseen() is not None:
                raise commit.tell()

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidArgument("the client is closed")


_all: weakref.WeakSet[Background] = weakref.WeakSet()


def _forked() -> None:
    for background in list(_all):
        background.forked()


os.register_at_fork(after_in_child=_forked)


class PartPuts:
    """The background puts of one part."""

    def __init__(self, background: Background, label: str) -> None:
        self._background = background
        self._label = label
        self.forked()

    def forked(self) -> None:
        """Begin with nothing."""
        self._lock = threading.Lock()
        self._under_way: dict[Future[dict[str, Receipt]], _Job] = {}
        self._failed: dict[str, BaseException] = {}
        self._over = False
        self._scope = Context().run(cancel.Scope)  # ends with the part, not with the operation that put something first

    def check(self, names: Collection[str] = ()) -> None:
        """Raise the first failure, but for one of `names`, which are being put again."""
        with self._lock:
            error = next((error for name, error in self._failed.items() if name not in names), None)
        if error is not None:
            raise error

    def _check_wanted(self, names: Collection[str]) -> None:
        """Raise where waiting for a buffer has become pointless."""
        self._check_open()
        self.check(names)

    def _check_open(self) -> None:
        if self._over:
            raise cancel.Cancelled(f"{self._label}: the part was aborted")

    def durable(self, names: Collection[str]) -> None:
        """These have landed: if they failed before, that is history."""
        with self._lock:
            for name in names:
                self._failed.pop(name, None)

    def begin(self, sources: Mapping[str, Source], send: Send) -> "list[Future[dict[str, Receipt]]]":
        """Snapshot shards, waiting for free buffers, and send them later. Raises what reading them raises, DeadlineExceeded."""
        return [self._submit(*self._snapshot(batch), send) for batch in _batches(sources, self._background.pool.size)]

    def settle(self, deadline_s: float | None) -> None:
        """Return once nothing is under way. Raises DeadlineExceeded naming what is; a failure ends the wait."""
        while under_way := self._jobs():
            remaining_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if not finished(list(under_way), remaining_s):
                names = [name for job in self._jobs().values() for name in job.names]
                shown = ", ".join(map(repr, names[:5])) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
                raise DeadlineExceeded(f"{self._label}: shards put in the background are still under way: {shown}")
            self.check()

    def cancel(self) -> None:
        """End what is under way; when it returns nothing is being sent."""
        with self._lock:
            self._over = True
        self._scope.cancel()
        wait([future for future in self._jobs() if not future.cancel()])

    def _jobs(self) -> "dict[Future[dict[str, Receipt]], _Job]":
        with self._lock:
            return dict(self._under_way)

    def _snapshot(self, sources: Mapping[str, Source]) -> tuple[Region | None, dict[str, SnapshotSource]]:
        places, size = _layout(sources)
        if not size:
            return None, {name: SnapshotSource(memoryview(b"")) for name in sources}
        label = f"put {next(iter(sources))!r}"
        region = self._background.pool.take(size, self._background.timeout_s, label, lambda: self._check_wanted(sources))
        copier = self._background.copier
        # A slow file must not hold uploads up.
        in_memory = all(isinstance(source, BufferSource | FilledSource) for source in sources.values())
        try:
            with self._background.copying() if in_memory else nullcontext():
                copies = {
                    name: copier.copy(source, region, places[name], f"shard {name!r}") for name, source in sources.items()
                }
            return region, copies
        except BaseException:
            region.release()
            raise

    def _submit(self, region: Region | None, copies: dict[str, SnapshotSource], send: Send) -> "Future[dict[str, Receipt]]":
        job = _Job(self, region, copies, send)
        try:
            with self._lock:
                self._check_open()
                future = self._background.upload(self, job.run)
                self._under_way[future] = job
        except BaseException:
            job.release()
            raise
        future.add_done_callback(self._ended)
        return future

    def _ended(self, future: "Future[dict[str, Receipt]]") -> None:
        with self._lock:
            job = self._under_way.pop(future)
        job.release()  # not under the lock: who waits for a buffer holds the pool's, and asks for this one

    def carry_out(self, job: "_Job") -> dict[str, Receipt]:
        """On a thread of the background: send a job's shards."""
        try:
            self._background.await_calm()
            with self._scope.entered():
                cancel.check()
                return job.send()
        except BaseException as error:
            with self._lock:
                self._failed.update((name, error) for name in job.names)
            raise


class _Job:
    """Shards in one region, on their way."""

    def __init__(self, part: PartPuts, region: Region | None, copies: dict[str, SnapshotSource], send: Send) -> None:
        self._part = part
        self._region = region
        self._copies = copies
        self._send = send
        self.names = tuple(copies)

    def run(self) -> dict[str, Receipt]:
        try:
            return self._part.carry_out(self)
        finally:
            self.release()  # before the future is done: whoever waits for it finds the buffer free

    def send(self) -> dict[str, Receipt]:
        receipts = self._send(self._copies)
        for name, copy in self._copies.items():
            if receipts[name].crc32c != copy.crc32c:
                raise Corrupt(
                    f"put {name!r}: what was sent is not what was snapshotted "
                    f"snapshot_crc32c={copy.crc32c:08x} receipt_crc32c={receipts[name].crc32c:08x}"
                )
        return receipts

    def release(self) -> None:
        self._copies = {}
        if self._region is not None:
            self._region.release()


def _batches(sources: Mapping[str, Source], pool_bytes: int) -> Iterator[dict[str, Source]]:
    """Large shards alone, small ones together."""
    limit = min(BATCH_BYTES_MAX, pool_bytes)
    batch: dict[str, Source] = {}
    held = 0
    for name, source in sources.items():
        size = source.size or 0
        if batch and held + size + PAGE_BYTES > limit:
            yield batch
            batch, held = {}, 0
        batch[name] = source
        held += size
    if batch:
        yield batch


def _layout(sources: Mapping[str, Source]) -> tuple[dict[str, int], int]:
    """Where in a region each shard goes, and the region's size. Large ones begin at a page, for direct I/O."""
    places: dict[str, int] = {}
    at = 0
    for name, source in sources.items():
        size = source.size or 0
        if size > BLOCK_BYTES:
            at += -at % PAGE_BYTES
        places[name] = at
        at += size
    return places, at
