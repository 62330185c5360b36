"""A directory of a (parallel) file system as a tier: plain files under their own names.

Owns the order of acts that makes a file count: temporary name beside the target, write, fsync, close, read back and check every
chunk, rename, fsync of the directory. Does not own documents (documents.py), threads and errors (acts.py), descriptors and
buffers (files.py), nor the lock of a document (lock.py).

`.forebay/tier.json` marks the root (acts.py). Only probe() makes the marker, and only in an empty or new directory.
"""

import asyncio
import contextlib
import errno
import itertools
import os
import secrets
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

from forebay_gateway.base import durable, failpoints
from forebay_gateway.core.errors import Corrupt, ForebayError, InvalidArgument, NotFound, Unavailable
from forebay_gateway.core.layout import CONTROL_DIR
from forebay_gateway.tiers.base import Capabilities, Leftover, Listing, ObjectInfo, PutOptions, Source
from forebay_gateway.tiers.keys import directory_of
from forebay_gateway.tiers.posix.acts import info_of
from forebay_gateway.tiers.posix.documents import Documents
from forebay_gateway.tiers.posix.files import READ_PIECE_BYTES, Buffers, OpenFile
from forebay_gateway.tiers.posix.lock import LOCK_PREFIX, filesystem_now_s, is_over
from forebay_gateway.tiers.posix.probe import probe
from forebay_gateway.tiers.readback import check_chunk, check_size
from forebay_gateway.tiers.window import Window

_PLAIN = PutOptions()

# Two direct writes of 4 MiB in flight reach what the device gives (DESIGN section 5); a third chunk is read meanwhile.
_WRITES = 2
_LAST_LOCKS_MAX = 4  # a manifest has one, and while it is taken over a claim to it
_HIDDEN_PREFIX = ".forebay-"  # what names of temporary files and of locks begin with


class PosixTier(Documents):
    """The whole of it; its arguments are those of Acts."""

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
        if (left := self._left.get(key)) is not None:
            with contextlib.suppress(NotFound):
                await self._run("unlink", key, self._remove, left)
            self._left.pop(key, None)
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
            await self._discard(key, temp)
            raise

    def _open_temp(self, file: OpenFile) -> None:
        self._in_directory(file.path.parent, file.open)

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
        return info_of(key, path.stat())

    async def verify(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        return info_of(key, await self._read_back(self._path(key), key, source, options))

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
                    size = min(READ_PIECE_BYTES, end - offset)
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

    async def _discard(self, key: str, temp: Path) -> None:
        try:
            await self._run("unlink", key, self._remove, temp)
        except NotFound:
            pass  # it has its name by now, or was never made
        except ForebayError:
            self._left[key] = temp

    # Names

    async def head(self, key: str) -> ObjectInfo:
        return info_of(key, await self._run("stat", key, self._stat_file, self._path(key)))

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
                failpoints.hit("posix.before_rmdir")
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
                        objects.append(info_of(key, entry.stat()))
        return Listing(tuple(sorted(objects, key=lambda info: info.key)), tuple(sorted(directories)))

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

    async def leftovers(self, prefix: str) -> tuple[Leftover, ...]:
        return await self._run("list", prefix, self._find_leftovers, directory_of(prefix))

    def _find_leftovers(self, directory: str) -> tuple[Leftover, ...]:
        self._check_root()
        found: list[tuple[Path, float, bool]] = []
        for path in (self.root / directory).rglob(f"{_HIDDEN_PREFIX}*"):
            is_lock = path.name.startswith(LOCK_PREFIX)
            if not is_lock and not path.name.startswith(durable.TEMP_PREFIX):
                continue
            with contextlib.suppress(FileNotFoundError):  # its writer ended it meanwhile
                if is_lock and not is_over(path, self._clock, self._is_left):
                    continue
                found.append((path, path.lstat().st_mtime, is_lock))
        now_s = self._now_s() if found else 0.0
        return tuple(
            Leftover(path.relative_to(self.root).as_posix(), path.name, max(0.0, now_s - changed_s), is_lock)
            for path, changed_s, is_lock in found
        )

    def _now_s(self) -> float:
        """By the file system's clock; by this machine's where nothing can be written there now."""
        try:
            return filesystem_now_s(self.root / CONTROL_DIR / f"{durable.TEMP_PREFIX}{self.temp_tag}{secrets.token_hex(8)}")
        except OSError:
            return self._clock.wall()

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


def _entries(directory: Path) -> "os._ScandirIterator[str]":
    try:
        return os.scandir(directory)
    except NotADirectoryError as error:
        raise FileNotFoundError(errno.ENOENT, "no directory", str(directory)) from error
