"""The cache directory: names on disk, the lock that keeps it one process's own, durable directories and part files.

Owns the paths below `cache.path` and their life. Does not own what shard files hold (footer, writer, reader) nor which of
them count (the catalog). All methods block: call them from a pool thread, or before the loop runs.

    forebay.lock                                     flock'ed for the life of the gateway; holds its pid and node
    FORMAT                                           "forebay-cache 1"; a newer number refuses to start
    marks.json                                       pins, holds, deletions under way (cache/marks)
    CLEAN, FATAL                                     how the process before this one ended
    incoming/<shard_id>.tmp                          being written; nothing in here was ever acknowledged
    data/<session_id>/<shard_id>.shard               sealed, immutable
    data/<session_id>/part-<writer>-<commit_seq>.json   a committed part (forebay_wire.manifest)

Ids are 16 hex digits. catalog/, and catalog.damaged-<n>/ of earlier rebuilds, lie beside them and are not touched here.
"""

import contextlib
import errno
import fcntl
import mmap
import os
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from forebay_gateway.base import durable, failpoints, fatal
from forebay_gateway.cache.footer import BLOCK
from forebay_gateway.cache.io import disk_errors
from forebay_gateway.cache.marks import MARKS
from forebay_gateway.cache.mounts import check_local, existing_ancestor
from forebay_gateway.core.errors import StartupError
from forebay_gateway.core.records import ShardKey

__all__ = ["CacheDir", "FoundFile", "check_local"]

FORMAT_NAME = "forebay-cache"
FORMAT_VERSION = 1
LOCK = "forebay.lock"
FORMAT = "FORMAT"
INCOMING = "incoming"
DATA = "data"
CATALOG = "catalog"
ASIDE_PREFIX = "catalog.damaged-"  # a catalog that could not be used any more, kept for whoever wants to look at it
CLEAN = "CLEAN"  # what an orderly stop left, see paths/handover
FATAL = "FATAL"  # the last word of a process that died of a signal of its own making, see base/fatal
_KNOWN_AT_TOP = frozenset({LOCK, FORMAT, CLEAN, FATAL, MARKS, INCOMING, DATA, CATALOG, "lost+found"})
_PRIVATE_DIR = 0o700  # weights are no one else's business on a shared node

_INCOMING_NAME = re.compile(r"([0-9a-f]{16})\.tmp\Z")
_SESSION_NAME = re.compile(r"[0-9a-f]{16}\Z")
_SHARD_NAME = re.compile(r"([0-9a-f]{16})\.shard\Z")
_SHARD_NAME_LENGTH = 22
_PART_NAME = re.compile(r"part-(0|[1-9][0-9]*)-(0|[1-9][0-9]*)\.json\Z")


@dataclass(frozen=True, slots=True)
class FoundFile:
    """A name found below the cache directory. "incoming" is anything of ours that was never acknowledged, part files half
    written included (those have no shard_id); "foreign" is not ours and is never deleted."""

    kind: Literal["incoming", "shard", "part", "foreign"]
    path: Path
    size: int
    session_id: int | None = None
    shard_id: int | None = None
    writer: int | None = None
    commit_seq: int | None = None


class CacheDir:
    """One cache directory. `direct_io` says whether O_DIRECT was proved to work; `note` what an operator should know."""

    def __init__(self, path: Path, file_system: str) -> None:
        self.path = path
        self.file_system = file_system
        self.direct_io = False
        self.note = ""
        self._lock: int | None = None
        self._known_sessions: set[int] = set()
        self._session_mutex = threading.Lock()

    @classmethod
    def open(cls, path: Path, node: str) -> "CacheDir":
        """The gateway's way in: make what is missing, take the lock, check the format, probe O_DIRECT.

        Raises StartupError: another process holds it (named by pid), a network file system, a newer format, no access.
        """
        path = path.absolute()
        cache = cls(path, check_local(path))
        try:
            durable.make_dirs(path, existing_ancestor(path), _PRIVATE_DIR)
            cache._lock = _take_lock(path / LOCK, node)
            cache._check_format(create=True)
            for name in (INCOMING, DATA):
                (path / name).mkdir(_PRIVATE_DIR, exist_ok=True)
            durable.sync_dir(path)
            cache.direct_io = _probe_write(path / INCOMING / f"{durable.TEMP_PREFIX}probe")
        except OSError as error:
            cache.release()
            raise StartupError(f"cannot open the cache: {error.strerror}", path=error.filename or path) from error
        except BaseException:
            cache.release()
            raise
        if not cache.direct_io:
            cache.note = f"{cache.file_system} refuses O_DIRECT: writes pass through the page cache and are still synced"
        return cache

    @classmethod
    def attach(cls, path: Path) -> "CacheDir":
        """A mover's way in, beside the gateway that holds the lock: takes none and creates nothing."""
        path = path.absolute()
        cache = cls(path, check_local(path))
        try:
            cache._check_format(create=False)
            cache.direct_io = _probe_read(path / FORMAT)
        except OSError as error:
            raise StartupError(f"cannot attach to the cache: {error.strerror}", path=error.filename or path) from error
        return cache

    @staticmethod
    def check_not_network(path: Path) -> str:
        """The type of the file system of `path`; raises StartupError where neither cache nor catalog may lie on it."""
        return check_local(path)

    @property
    def capacity_of_disk(self) -> int:
        """Bytes of the whole file system, as it is now."""
        stat = os.statvfs(self.path)
        return stat.f_blocks * stat.f_frsize

    @property
    def free_on_disk(self) -> int:
        """Bytes this process may still write. Raises Unavailable where the disk fails."""
        with disk_errors("ask for its free space", self.path):
            stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize

    def try_writing(self) -> None:
        """Write and sync a little, and remove it again. Blocking. Raises DiskFull, DiskFailed, Unavailable."""
        with disk_errors("write", self.path):
            failpoints.hit("cache.try")
            durable.write_temp(self.path / INCOMING, bytes(BLOCK), "try").unlink()

    def release(self) -> None:
        """Let go of the lock. Idempotent. The lock file stays: removing it would let two processes lock two files."""
        if self._lock is not None:
            fatal.disarm(self.path / FATAL)
            os.close(self._lock)
            self._lock = None

    # --- names

    def session_path(self, session_id: int) -> Path:
        """Where the session's sealed files lie."""
        return self.path / DATA / f"{session_id:016x}"

    def shard_path(self, key: ShardKey) -> Path:
        """The sealed file."""
        return self.session_path(key.session_id) / f"{key.shard_id:016x}.shard"

    def part_path(self, session_id: int, writer: int, commit_seq: int) -> Path:
        """The committed part's document."""
        return self.session_path(session_id) / f"part-{writer}-{commit_seq}.json"

    def incoming_path(self, shard_id: int) -> Path:
        """The file while it is being written."""
        return self.path / INCOMING / f"{shard_id:016x}.tmp"

    # --- sessions and parts

    def make_session_dir(self, session_id: int) -> Path:
        """The session's directory, durable. Cheap once this process has made sure of it."""
        path = self.session_path(session_id)
        if session_id not in self._known_sessions:
            with self._session_mutex, disk_errors("make a session's directory", path):
                path.mkdir(_PRIVATE_DIR, exist_ok=True)
                # Also where it was there before: who made it may have been killed before this.
                durable.sync_dir(path.parent)
                self._known_sessions.add(session_id)
        return path

    def forget_session_dir(self, session_id: int) -> None:
        """Look again next time: another process may have dropped the directory."""
        self._known_sessions.discard(session_id)

    def drop_session_dir(self, session_id: int) -> None:
        """Remove the directory if it is empty; remains, without an error, while anything is in it."""
        path = self.session_path(session_id)
        with self._session_mutex, disk_errors("remove a session's directory", path):
            self._known_sessions.discard(session_id)
            try:
                path.rmdir()
            except OSError as error:
                if error.errno not in (errno.ENOENT, errno.ENOTEMPTY, errno.EEXIST):
                    raise
                return
            failpoints.hit("cache.session_dir_gone")
            durable.sync_dir(path.parent)

    def write_part(self, session_id: int, writer: int, commit_seq: int, document: bytes) -> None:
        """The committed part's document, whole and durable when this returns."""
        self.make_session_dir(session_id)
        path = self.part_path(session_id, writer, commit_seq)
        with disk_errors("write the part's file", path):
            durable.replace_file(path, document, path.name)

    def remove_part_files(self, session_id: int, writer: int | None = None) -> None:
        """All part documents of one writer, or of the whole session together with half-written ones."""
        gone = []
        directory = self.session_path(session_id)
        for entry in _entries(directory):
            found = _classify_data(entry, session_id)
            half_written = found.kind == "incoming" and writer is None
            if half_written or (found.kind == "part" and writer in (None, found.writer)):
                gone.append(found.path)
        self.unlink_many(gone, directory)

    # --- files

    def unlink(self, path: Path) -> None:
        """Gone for good when this returns; also when it was not there."""
        self.unlink_many((path,))

    def unlink_many(self, paths: Iterable[Path], *directories: Path) -> None:
        """Likewise for many, each directory (`directories` too) synced once. After an error some may be left: do it again."""
        touched = set(directories)
        gone = False
        with disk_errors("remove files", self.path):
            try:
                for path in paths:
                    touched.add(path.parent)  # also where it is gone: an earlier try may have failed before the sync
                    with contextlib.suppress(FileNotFoundError):
                        path.unlink()
                        gone = True
                if gone:
                    failpoints.hit("cache.unlinked")
            finally:
                for directory in touched:
                    with contextlib.suppress(FileNotFoundError):
                        durable.sync_dir(directory)

    def scan(self) -> Iterator[FoundFile]:
        """Every file below the cache directory but the lock, the format and the catalog. Names and sizes, no contents."""
        yield from self.scan_top()
        for session_id in self.session_ids():
            for inner in _entries(self.session_path(session_id)):
                yield from _found(inner, _classify_data(inner, session_id))

    def session_ids(self) -> list[int]:
        """Of the sessions that have a directory."""
        found = _entries(self.path / DATA)
        return sorted(int(entry.name, 16) for entry in found if _is_session(entry))

    def scan_session(self, session_id: int) -> tuple[dict[int, int], list[FoundFile]]:
        """One session's shard files, shard id: size in bytes, and whatever else is in its directory. No more than a name and a
        size is made of a shard: there may be a million of them."""
        sizes: dict[int, int] = {}
        others: list[FoundFile] = []
        for entry in _entries(self.session_path(session_id)):
            if len(entry.name) == _SHARD_NAME_LENGTH and _SHARD_NAME.match(entry.name) and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    sizes[int(entry.name[:16], 16)] = entry.stat(follow_symlinks=False).st_size
            else:
                others += _found(entry, _classify_data(entry, session_id))
        return sizes, others

    def scan_top(self) -> Iterator[FoundFile]:
        """The files outside of the sessions' directories."""
        for entry in _entries(self.path):
            if entry.name not in _KNOWN_AT_TOP and not entry.name.startswith((durable.TEMP_PREFIX, ASIDE_PREFIX)):
                yield from _found(entry, FoundFile("foreign", Path(entry.path), 0))
        for entry in _entries(self.path / INCOMING):
            yield from _found(entry, _classify_incoming(entry))
        for entry in _entries(self.path / DATA):
            if not _is_session(entry):
                yield from _found(entry, FoundFile("foreign", Path(entry.path), 0))

    def _check_format(self, *, create: bool) -> None:
        path = self.path / FORMAT
        try:
            text = path.read_text("ascii", errors="replace").strip()
        except FileNotFoundError:
            if not create:
                raise
            if any((self.path / name).exists() for name in (INCOMING, DATA)):
                raise StartupError(
                    "the directory has no FORMAT file and is not empty: no forebay cache", path=self.path
                ) from None
            durable.replace_file(path, f"{FORMAT_NAME} {FORMAT_VERSION}\n".encode("ascii"), FORMAT)
            return
        name, _, version = text.partition(" ")
        if name != FORMAT_NAME or not version.isdigit():
            raise StartupError("not a forebay cache: its FORMAT file says something else", path=path)
        if int(version) != FORMAT_VERSION:
            raise StartupError(
                "the cache was written by another release of forebay", path=path, format=version, reads=FORMAT_VERSION
            )


def _take_lock(path: Path, node: str) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(descriptor, BLOCK, 0).decode("utf-8", errors="replace").strip() or "pid=unknown"
        os.close(descriptor)
        raise StartupError(f"another process has this cache open: {holder}", lock=path) from None
    except BaseException:
        os.close(descriptor)
        raise
    # Information for people only: on a full disk the lock holds without it.
    with contextlib.suppress(OSError):
        text = f"pid={os.getpid()} node={node}\n".encode()
        os.pwrite(descriptor, text, 0)
        os.ftruncate(descriptor, len(text))
    return descriptor


def _probe_write(path: Path) -> bool:
    """Whether 4 KiB really go through O_DIRECT here."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_DIRECT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            path.unlink(missing_ok=True)
            return False
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True  # a full cache must start too; the probe of an earlier start, or the first write, will tell
        raise
    try:
        with mmap.mmap(-1, BLOCK) as memory:
            return os.pwrite(descriptor, memory, 0) == BLOCK
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return True
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        os.close(descriptor)
        path.unlink(missing_ok=True)


def _probe_read(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECT | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    try:
        with mmap.mmap(-1, BLOCK) as memory:
            return os.preadv(descriptor, [memory], 0) > 0
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
            return False
        raise
    finally:
        os.close(descriptor)


def _entries(directory: Path) -> "Iterator[os.DirEntry[str]]":
    with disk_errors("list a directory", directory), contextlib.suppress(FileNotFoundError), os.scandir(directory) as entries:
        yield from entries


def _is_session(entry: "os.DirEntry[str]") -> bool:
    return _SESSION_NAME.match(entry.name) is not None and entry.is_dir(follow_symlinks=False)


def _classify_incoming(entry: "os.DirEntry[str]") -> FoundFile:
    path = Path(entry.path)
    if match := _INCOMING_NAME.match(entry.name):
        return FoundFile("incoming", path, 0, shard_id=int(match.group(1), 16))
    return FoundFile("incoming" if entry.name.startswith(durable.TEMP_PREFIX) else "foreign", path, 0)


def _classify_data(entry: "os.DirEntry[str]", session_id: int) -> FoundFile:
    path = Path(entry.path)
    if match := _SHARD_NAME.match(entry.name):
        return FoundFile("shard", path, 0, session_id, shard_id=int(match.group(1), 16))
    if match := _PART_NAME.match(entry.name):
        return FoundFile("part", path, 0, session_id, writer=int(match.group(1)), commit_seq=int(match.group(2)))
    if entry.name.startswith(durable.TEMP_PREFIX):
        return FoundFile("incoming", path, 0, session_id)
    return FoundFile("foreign", path, 0, session_id)


def _found(entry: "os.DirEntry[str]", found: FoundFile) -> Iterator[FoundFile]:
    """With its size; nothing where it went away meanwhile; foreign where it is no plain file."""
    with disk_errors("look at a file", found.path), contextlib.suppress(FileNotFoundError):
        size = entry.stat(follow_symlinks=False).st_size
        kind = found.kind if entry.is_file(follow_symlinks=False) else "foreign"
        yield FoundFile(kind, found.path, size, found.session_id, found.shard_id, found.writer, found.commit_seq)
