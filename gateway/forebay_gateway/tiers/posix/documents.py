"""Small documents on a POSIX tier, whole or not there: created where nothing is, or replaced as they were read.

Owns their order of acts: temporary file, read back, link or rename, fsync of the directory; a lock around a conditional one.
Does not own the lock itself (lock.py), threads and errors (acts.py), nor shards (tier.py).
"""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import aiofiles
import aiofiles.os

from forebay_gateway.base import durable, failpoints
from forebay_gateway.core.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, Unavailable
from forebay_gateway.tiers.base import ObjectInfo
from forebay_gateway.tiers.posix.acts import Acts, info_of, tag_of
from forebay_gateway.tiers.posix.files import READ_PIECE_BYTES, Buffers, OpenFile
from forebay_gateway.tiers.posix.lock import HeldLock, clear_left, lock_path, try_lock
from forebay_wire.checksums import crc32c


class Documents(Acts):
    """The verbs of documents, and of the link beside them."""

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
            info = info_of(key, temp.stat())
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
            buffers = Buffers(min(len(data), READ_PIECE_BYTES))
            view = memoryview(data)
            for at in range(0, len(data), READ_PIECE_BYTES):
                part = view[at : at + READ_PIECE_BYTES]
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
            if tag_of(file.open_existing()) != tag:
                raise AlreadyExists("the file has another version", tier=self.name, key=key)
        finally:
            file.close()
        with self._temp() as tag:
            return self._replace_temp(key, path, self._written(path.parent, data, tag), lock)

    def _replace_temp(self, key: str, path: Path, temp: Path, lock: HeldLock) -> ObjectInfo:
        try:
            info = info_of(key, temp.stat())
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
        return data, info_of(key, stat)

    async def _document(self, path: Path, limit_bytes: int) -> tuple[bytes, os.stat_result]:
        try:
            async with aiofiles.open(path, "rb", executor=self._pool) as file:
                stat = await aiofiles.os.stat(file.fileno(), executor=self._pool)
                return await file.read(limit_bytes + 1), stat
        except (IsADirectoryError, NotADirectoryError) as error:
            raise FileNotFoundError(errno.ENOENT, "no regular file", str(path)) from error

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

    def _clear_lock(self, path: Path) -> bool:
        with self._temp() as tag:
            return clear_left(path, self._owner, self._lock_ttl_s, self._clock, tag, self._is_left)

    def _is_left(self, tag: str) -> bool:
        """Whether an earlier process of this node wrote it: what this one writes is in `_temps`."""
        return bool(self.temp_tag) and tag.startswith(self.temp_tag) and tag not in self._temps
