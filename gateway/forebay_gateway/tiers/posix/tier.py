"""A directory of a (parallel) file system as a tier: plain files under their own names.

Owns the order of acts that makes a file count: temporary name beside the target, write, fsync, close, read back and check every
chunk, rename, fsync of the directory. Does not own descriptors and buffers (files.py), the lock of a document (lock.py),
nor what an errno means (errors.py).

`.forebay/tier.json` marks the root. Without it the root is away (not mounted, or removed), never empty: an absent file is
NotFound only beside its marker, and nothing is written below a root that lacks it. Only probe() makes the marker, and only in
an empty or new directory.

All file work runs in the tier's own threads, so a hung mount costs threads and gives Unavailable; the event loop never blocks.
"""

import asyncio
import contextlib
import errno
import functools
import itertools
import os
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, TypeVar

import aiofiles
import aiofiles.os

from forebay_gateway.base import durable, failpoints
from forebay_gateway.base.clock import Clock, SystemClock
from forebay_gateway.core.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, Unavailable
from forebay_gateway.tiers.base import Capabilities, Leftover, Listing, ObjectInfo, PutOptions, Source, Tier
from forebay_gateway.tiers.keys import check_key, directory_of
from forebay_gateway.tiers.posix.errors import translate
from forebay_gateway.tiers.posix.files import Buffers, OpenFile
from forebay_gateway.tiers.posix.lock import LOCK_PREFIX, HeldLock, clear_left, is_over, lock_path, try_lock
from forebay_gateway.tiers.posix.marker import Marker
from forebay_gateway.tiers.posix.probe import probe
from forebay_gateway.tiers.readback import check_chunk, check_size
from forebay_gateway.tiers.window import Window
from forebay_wire.checksums import crc32c

_PLAIN = PutOptions()

T = TypeVar("T")

# Two direct writes of 4 MiB in flight reach what the device gives (DESIGN section 5); a third chunk is read meanwhile.
_WRITES = 2
_READ_PIECE_BYTES = 4 << 20
_CANCEL_GRACE_S = 2.0
_LAST_LOCKS_MAX = 4  # a manifest has one, and while it is taken over a claim to it
_HIDDEN_PREFIX = ".forebay-"  # what names of temporary files and of locks begin with


class PosixTier(Tier):
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
        self.marker = Marker(name, path, known_id, self.temp_tag)
        self.direct = direct
        self._clock = clock or SystemClock()
        self._metadata_timeout_s = metadata_timeout_s
        self._data_timeout_s = data_timeout_s
        self._lock_ttl_s = lock_ttl_s
        self._owner = f"{os.uname().nodename}:{os.getpid()}"
        self._pool = ThreadPoolExecutor(max_workers=2 + 2 * concurrency, thread_name_prefix=f"tier-{name}")

    # How a blocking act runs

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

    # Probe

    async def probe(self) -> Capabilities:
        await self._run("adopt", "", self.marker.adopt)
        self.capabilities = await probe(self)
        return self.capabilities

    async def try_direct(self, key: str) -> bool:
        """Whether the file system takes O_DIRECT for the file at `key`."""
        file = OpenFile(self._path(key), os.O_RDONLY, direct=True)
        try:
            await self._run("open", key, file.open)
            await self._run("read", key, file.chunk_crc, 0, 1, Buffers(1))
            return file.direct
        except (Unavailable, InvalidArgument):  # opened, but refused at the first read
            return False
        finally:
            await self._close(file)

    # Shards

    async def put(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        path = self._path(key)
        temp = path.parent / f"{durable.TEMP_PREFIX}{secrets.token_hex(8)}"
        if options.on_upload is not None:
            await options.on_upload(temp.name)
        file = OpenFile(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.direct)
        try:
            await self._run("open", key, self._open_temp, file)
            await self._copy(file, key, source, options)
            await self._run("fsync", key, file.finish, source.size, timeout_s=self._data_timeout_s)
            await self._run("close", key, file.close)
            await self._read_back(temp, key, source, options)
            info = await self._run("rename", key, self._publish, temp, path, key)
            return replace(info, crc32c=source.crc32c)  # proved by the read-back above
        except BaseException:
            await self._close(file)
            await self._discard(temp)
            raise

    def _open_temp(self, file: OpenFile) -> None:
        self._in_directory(file.path.parent, file.open)

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

    async def _copy(self, file: OpenFile, key: str, source: Source, options: PutOptions) -> None:
        buffers = Buffers(source.chunk_size)
        total = 0
        async with Window(_WRITES) as window:
            for index in range(len(source.chunk_crcs)):
                view = await source.read_chunk(index)
                total += len(view)
                await window.add(self._write(file, key, view, index * source.chunk_size, buffers, options))
        check_size(self.name, key, source, total)

    async def _write(
        self, file: OpenFile, key: str, view: memoryview, offset: int, buffers: Buffers, options: PutOptions
    ) -> None:
        await self._run("write", key, file.write_chunk, view, offset, buffers, timeout_s=self._data_timeout_s)
        if options.on_progress is not None:
            options.on_progress(len(view))

    async def _read_back(self, path: Path, key: str, source: Source, options: PutOptions) -> os.stat_result:
        """Every chunk of `path` from the disk against the source's checksums."""
        file = OpenFile(path, os.O_RDONLY, self.direct)
        try:
            stat = await self._run("open", key, file.open_existing)
            check_size(self.name, key, source, stat.st_size)
            if not file.direct:
                await self._run("drop cache", key, file.drop_cache)
            buffers = Buffers(source.chunk_size)
            async with Window(_WRITES) as window:
                for index in range(len(source.chunk_crcs)):
                    await window.add(self._check(file, key, source, index, buffers, options))
            return stat
        finally:
            await self._close(file)

    async def _check(self, file: OpenFile, key: str, source: Source, index: int, buffers: Buffers, options: PutOptions) -> None:
        offset = index * source.chunk_size
        length = min(source.chunk_size, source.size - offset)
        crc = await self._run("read", key, file.chunk_crc, offset, length, buffers, timeout_s=self._data_timeout_s)
        check_chunk(self.name, key, source, index, crc)
        options.read_back()

    def _publish(self, temp: Path, path: Path, key: str) -> ObjectInfo:
        self._check_root()
        failpoints.hit("posix.before_rename")
        os.replace(temp, path)
        failpoints.hit("posix.before_dir_fsync")
        durable.sync_dir(path.parent)
        return _info(key, path.stat())

    async def verify(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        return _info(key, await self._read_back(self._path(key), key, source, options))

    async def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        file = OpenFile(self._path(key), os.O_RDONLY, direct=False)
        ahead: asyncio.Task[bytes] | None = None
        try:
            stat = await self._run("open", key, file.open_existing)
            if offset + length > stat.st_size:
                raise Corrupt("the file is shorter than asked for", tier=self.name, key=key, size=stat.st_size)
            end = offset + length
            while offset < end or ahead is not None:
                following = None
                if offset < end:
                    size = min(_READ_PIECE_BYTES, end - offset)
                    following = asyncio.create_task(self._read_piece(file, key, offset, size))
                    offset += size
                piece, ahead = ahead, following
                if piece is not None:
                    yield await piece
        finally:
            if ahead is not None:
                ahead.cancel()
                await asyncio.gather(ahead, return_exceptions=True)
            await self._close(file)

    async def _read_piece(self, file: OpenFile, key: str, offset: int, length: int) -> bytes:
        data = await self._run("read", key, file.read, length, offset, timeout_s=self._data_timeout_s)
        if len(data) != length:
            raise Corrupt("the file ended while it was read", tier=self.name, key=key, offset=offset + len(data))
        return data

    async def _close(self, file: OpenFile) -> None:
        """Let go of a descriptor whose close can report nothing of use."""
        with contextlib.suppress(OSError, Unavailable):
            await self._bounded("close", "", self._thread(file.close))

    async def _discard(self, temp: Path) -> None:
        with contextlib.suppress(OSError, Unavailable):
            await self._bounded("unlink", temp.name, self._thread(self._remove, temp))

    # Documents

    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        path = self._path(key)
        if if_match is not None:
            return await self._replace_matching(key, path, data, if_match)
        return await self._run("create" if if_absent else "replace", key, self._put_document, key, path, data, if_absent)

    def _put_document(self, key: str, path: Path, data: bytes, if_absent: bool) -> ObjectInfo:
        with self._temp() as tag:
            return self._put_temp(key, path, data, if_absent, tag)

    def _put_temp(self, key: str, path: Path, data: bytes, if_absent: bool, tag: str) -> ObjectInfo:
        temp = self._in_directory(path.parent, lambda: self._written(path.parent, data, tag))
        try:
            info = _info(key, temp.stat())
            if not if_absent:
                os.replace(temp, path)
            else:
                failpoints.hit("posix.before_link")
                os.link(temp, path)
        except FileExistsError as error:
            raise AlreadyExists("the file is already there", tier=self.name, key=key) from error
        finally:
            temp.unlink(missing_ok=True)
        failpoints.hit("posix.document_placed")
        durable.sync_dir(path.parent)
        return info

    @contextlib.contextmanager
    def _temp(self) -> Iterator[str]:
        """The tag of a temporary document's name, which is not swept meanwhile."""
        tag = f"{self.temp_tag}{secrets.token_hex(8)}"
        self._temps.add(tag)
        try:
            yield tag
        finally:
            self._temps.discard(tag)

    def _written(self, directory: Path, data: bytes, tag: str) -> Path:
        """A temporary file that is durable and was read back from the disk."""
        temp = durable.write_temp(directory, data, tag)
        file = OpenFile(temp, os.O_RDONLY, self.direct)
        try:
            file.open()
            if not file.direct:
                file.drop_cache()
            buffers = Buffers(min(len(data), _READ_PIECE_BYTES))
            view = memoryview(data)
            for at in range(0, len(data), _READ_PIECE_BYTES):
                part = view[at : at + _READ_PIECE_BYTES]
                if file.chunk_crc(at, len(part), buffers) != crc32c(part):
                    raise Corrupt("a document read back differs from what was written", tier=self.name, offset=at)
        except BaseException:
            temp.unlink(missing_ok=True)
            raise
        finally:
            file.close()
        return temp

    async def _replace_matching(self, key: str, path: Path, data: bytes, tag: str) -> ObjectInfo:
        try:
            with self._temp() as mine:
                lock = await self._lock(key, path, mine)
                try:
                    return await self._run("replace", key, self._replace_locked, key, path, data, tag, lock)
                finally:
                    with contextlib.suppress(OSError, Unavailable):  # then it ages, and is taken over
                        await self._bounded("unlock", key, self._thread(lock.release, self._clock))
        except NotFound as error:
            raise AlreadyExists("the file has another version: it is gone", tier=self.name, key=key) from error

    async def _lock(self, key: str, path: Path, mine: str) -> HeldLock:
        end_s = self._clock.monotonic() + 2 * self._lock_ttl_s
        while True:
            lock = await self._run("lock", key, try_lock, path, self._owner, self._lock_ttl_s, self._clock, mine, self._is_left)
            if lock is not None:
                return lock
            if self._clock.monotonic() > end_s:
                raise Unavailable("another node holds the file's lock", retry_after_s=1.0, tier=self.name, key=key)
            await self._clock.sleep(0.01 + secrets.randbelow(40) / 1000)

    async def drop_lock(self, key: str) -> None:
        """Take away the lock of a document that only this node replaces: a process of it that was killed held it."""
        with contextlib.suppress(NotFound):
            await self._run("unlock", key, lambda: lock_path(self._path(key)).unlink(missing_ok=True))

    def _replace_locked(self, key: str, path: Path, data: bytes, tag: str, lock: HeldLock) -> ObjectInfo:
        file = OpenFile(path, os.O_RDONLY, direct=False)
        try:
            if _tag(file.open_existing()) != tag:
                raise AlreadyExists("the file has another version", tier=self.name, key=key)
        finally:
            file.close()
        with self._temp() as tag:
            return self._replace_temp(key, path, self._written(path.parent, data, tag), lock)

    def _replace_temp(self, key: str, path: Path, temp: Path, lock: HeldLock) -> ObjectInfo:
        try:
            info = _info(key, temp.stat())
            if not lock.is_safe(self._clock):
                raise Unavailable("the file's lock ran out before the write was done", tier=self.name, key=key)
            os.replace(temp, path)
        finally:
            temp.unlink(missing_ok=True)
        failpoints.hit("posix.document_replaced")
        durable.sync_dir(path.parent)
        return info

    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> tuple[bytes, ObjectInfo]:
        path = self._path(key)
        data, stat = await self._guard("read", key, lambda: self._document(path, limit_bytes))
        if len(data) > limit_bytes:
            raise InvalidArgument("the document is larger than asked for", tier=self.name, key=key, limit_bytes=limit_bytes)
        if len(data) < stat.st_size:
            raise Unavailable("the file system read less than is there", tier=self.name, key=key, got=len(data))
        return data, _info(key, stat)

    async def _document(self, path: Path, limit_bytes: int) -> tuple[bytes, os.stat_result]:
        try:
            async with aiofiles.open(path, "rb", executor=self._pool) as file:
                stat = await aiofiles.os.stat(file.fileno(), executor=self._pool)
                return await file.read(limit_bytes + 1), stat
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, "no regular file", str(path)) from error

    # Names

    async def head(self, key: str) -> ObjectInfo:
        return _info(key, await self._run("stat", key, self._stat_file, self._path(key)))

    def _stat_file(self, path: Path) -> os.stat_result:
        # Opened, since network file systems look at a file afresh when it is opened, not when it is asked for by name.
        file = OpenFile(path, os.O_RDONLY | os.O_NONBLOCK, direct=False)
        try:
            return file.open_existing()
        finally:
            file.close()

    async def delete(self, key: str) -> None:
        path = self._path(key)
        with contextlib.suppress(NotFound):
            await self._run("delete", key, self._remove, path)

    def _remove(self, path: Path) -> None:
        """Unlink, durable, and prune the directories that this left empty, or with locks that nobody holds."""
        try:
            path.unlink()
        except (IsADirectoryError, NotADirectoryError):
            return  # no file has this name
        except FileNotFoundError:
            durable.sync_dir(path.parent)  # perhaps an earlier try unlinked it, and this is what failed
            raise
        failpoints.hit("posix.unlinked")
        directory = path.parent
        durable.sync_dir(directory)
        with contextlib.suppress(OSError):  # ENOTEMPTY, or another's rmdir came first
            while directory != self.root:
                self._clear_last_locks(directory)
                directory.rmdir()
                directory = directory.parent

    def _clear_last_locks(self, directory: Path) -> None:
        """Where nothing else is left in it, they go with their documents."""
        with _entries(directory) as entries:
            names = list(itertools.islice((entry.name for entry in entries), _LAST_LOCKS_MAX + 1))
        if len(names) <= _LAST_LOCKS_MAX and all(name.startswith(LOCK_PREFIX) for name in names):
            for name in names:
                self._clear_lock(directory / name)

    async def list(self, prefix: str) -> Listing:
        directory = directory_of(prefix)
        try:
            return await self._run("list", directory or ".", self._scan, directory)
        except NotFound:
            return Listing((), ())

    def _scan(self, directory: str) -> Listing:
        self._check_root()
        objects, directories = [], []
        with _entries(self.root / directory) as entries:
            for entry in entries:
                if entry.name.startswith((durable.TEMP_PREFIX, LOCK_PREFIX)):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    directories.append(entry.name)
                elif not entry.is_symlink():
                    with contextlib.suppress(FileNotFoundError):  # deleted while we look
                        key = f"{directory}/{entry.name}" if directory else entry.name
                        objects.append(_info(key, entry.stat()))
        return Listing(tuple(sorted(objects, key=lambda info: info.key)), tuple(sorted(directories)))

    async def point(self, key: str, target: str) -> None:
        if self.capabilities is not None and not self.capabilities.links:
            return
        await self._run("link", key, self._point, self._path(key), target)

    def _point(self, path: Path, target: str) -> None:
        with self._temp() as tag:
            temp = path.parent / f"{durable.TEMP_PREFIX}{tag}"
            self._in_directory(path.parent, lambda: temp.symlink_to(target))
            try:
                os.replace(temp, path)
            finally:
                temp.unlink(missing_ok=True)
        failpoints.hit("posix.pointed")
        durable.sync_dir(path.parent)

    async def settle(self, key: str) -> None:
        await self._run("fsync", key, durable.sync_dir, self._path(key).parent)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        if not upload_id.startswith((durable.TEMP_PREFIX, LOCK_PREFIX)) or "/" in upload_id:
            raise InvalidArgument("not the name of a temporary file", tier=self.name, key=key, upload_id=upload_id)
        path = self._path(key).parent / upload_id
        if upload_id.startswith(LOCK_PREFIX):
            if not await self._run("unlock", key, self._clear_lock, path):
                raise Unavailable("the lock is held, or somebody takes it over at this moment", tier=self.name, key=key)
            return
        with contextlib.suppress(NotFound):
            await self._run("delete", key, self._remove, path)

    def _clear_lock(self, path: Path) -> bool:
        with self._temp() as tag:
            return clear_left(path, self._owner, self._lock_ttl_s, self._clock, tag, self._is_left)

    def _is_left(self, tag: str) -> bool:
        """Whether an earlier process of this node wrote it: what this one writes is in `_temps`."""
        return bool(self.temp_tag) and tag.startswith(self.temp_tag) and tag not in self._temps

    async def leftovers(self, prefix: str) -> tuple[Leftover, ...]:
        return await self._run("list", prefix, self._find_leftovers, directory_of(prefix))

    def _find_leftovers(self, directory: str) -> tuple[Leftover, ...]:
        self._check_root()
        found = []
        for path in (self.root / directory).rglob(f"{_HIDDEN_PREFIX}*"):
            is_lock = path.name.startswith(LOCK_PREFIX)
            if not is_lock and not path.name.startswith(durable.TEMP_PREFIX):
                continue
            with contextlib.suppress(FileNotFoundError):  # its writer ended it meanwhile
                if is_lock and not is_over(path, self._clock, self._is_left):
                    continue
                age_s = self._clock.wall() - path.lstat().st_mtime
                found.append(Leftover(path.relative_to(self.root).as_posix(), path.name, max(0.0, age_s), is_lock))
        return tuple(found)

    async def sweep(self, key: str) -> None:
        if self.temp_tag:
            with contextlib.suppress(NotFound):
                await self._run("sweep", key, self._sweep, self._path(key).parent)

    def _sweep(self, directory: Path) -> None:
        self._check_root()
        mine = f"{durable.TEMP_PREFIX}{self.temp_tag}"
        with _entries(directory) as entries:
            names = [entry.name for entry in entries if entry.name.startswith((mine, LOCK_PREFIX))]
        for name in names:
            if name.startswith(LOCK_PREFIX):  # one that its owner still holds stays
                self._clear_lock(directory / name)
            elif self._is_left(name.removeprefix(durable.TEMP_PREFIX)):
                (directory / name).unlink(missing_ok=True)

    async def close(self) -> None:
        """Threads end when their last act does; one that hangs in a mount is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _entries(directory: Path) -> "os._ScandirIterator[str]":
    try:
        return os.scandir(directory)
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, "no directory", str(directory)) from error


def _tag(stat: os.stat_result) -> str:
    # Every version is a new inode, made while the one it replaces is still there.
    return f"{stat.st_mtime_ns:x}-{stat.st_ino:x}-{stat.st_size:x}"


def _info(key: str, stat: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, stat.st_size, _tag(stat), modified_s=stat.st_mtime)
