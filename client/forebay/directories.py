"""Directories as checkpoints, and back.

Owns the walk, the parallel transfer, and how files appear in a target directory: whole, checked, under their own name, and
never through a symbolic link. Does not own commit rules (writer.py) or resuming (reader.py).
"""

import contextlib
import os
import secrets
import stat
import threading
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

from forebay.cancel import Cancelled, Scope
from forebay.errors import ForebayError, InvalidArgument, os_text
from forebay.pending import finished
from forebay.types import Shard
from forebay.writer import SMALL_BYTES_MAX, CheckpointWriter
from forebay_wire.names import InvalidName, check_shard_name, file_and_directory, is_commit_last

STREAMS = 4
# Reserved by the naming rule: no shard can have such a name.
TEMP_PREFIX = ".forebay-tmp-"
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC

OnBytes = Callable[[int], None]
_Item = TypeVar("_Item")


def walk(root: Path) -> dict[str, tuple[Path, int]]:
    """Every regular file below `root`: shard name -> (path, size in bytes). Empty directories leave no trace.

    Raises InvalidArgument for what cannot be a shard, naming it: a special file, a link that leads out of `root` or to a
    directory, a name that breaks a rule; and where there is no file at all.
    """
    if not root.is_dir():
        raise InvalidArgument(f"{root}: not a directory")
    real_root = root.resolve()
    found: dict[str, tuple[Path, int]] = {}
    for path in _entries(root):
        name = path.relative_to(root).as_posix()
        try:
            check_shard_name(name)
        except InvalidName as error:
            raise InvalidArgument(f"{path}: {error}") from error
        found[name] = (path, _regular_size(path, real_root))
    if not found:
        raise InvalidArgument(f"{root}: holds no files")
    return found


def _entries(directory: Path) -> Iterator[Path]:
    for entry in sorted(os.scandir(directory), key=lambda entry: entry.name):
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(Path(entry.path))
        else:
            yield Path(entry.path)


def _regular_size(path: Path, real_root: Path) -> int:
    if path.is_symlink():
        try:
            target = path.resolve()
        except (OSError, RuntimeError) as error:  # a loop is a RuntimeError up to Python 3.12
            raise InvalidArgument(f"{path}: a symbolic link that leads nowhere: {error}") from error
        if not target.is_relative_to(real_root):
            raise InvalidArgument(f"{path}: a symbolic link that leads out of the directory, to {target}")
        if target.is_dir():
            raise InvalidArgument(f"{path}: a symbolic link to a directory")
        if not target.exists():
            raise InvalidArgument(f"{path}: a symbolic link to nothing")
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise InvalidArgument(f"{path}: not a regular file")
    return status.st_size


def put_files(writer: CheckpointWriter, files: dict[str, tuple[Path, int]], streams: int, on_bytes: OnBytes) -> None:
    """Put all files: small ones together, large ones `streams` at a time, and last of all what stands for a whole checkpoint.
    Raises the first failure."""
    small: dict[str, Path] = {}
    last = [(name, path) for name, (path, _) in files.items() if is_commit_last(name)]
    large: list[tuple[str, Path]] = []
    for name, (path, size) in files.items():
        if is_commit_last(name):
            continue
        if size <= SMALL_BYTES_MAX:
            small[name] = path
        else:
            large.append((name, path))
    if small:
        writer.put_many(small, on_bytes=on_bytes)
    in_parallel(lambda item: writer.put(*item, on_bytes=on_bytes), large, streams)
    for name, path in last:
        writer.put(name, path, on_bytes=on_bytes)


def in_parallel(act: Callable[[_Item], object], items: Iterable[_Item], streams: int) -> None:
    """Do `act` for every item, `streams` at a time; an item is taken when a stream is free for it. The first failure ends the
    others and is raised."""
    queue = iter(items)
    lock = threading.Lock()
    scope = Scope()

    def work() -> None:
        while not scope.cancelled:
            with lock:
                item = next(queue, None)
            if item is None:
                return
            act(item)

    with contextlib.closing(scope), scope.entered(), ThreadPoolExecutor(streams, thread_name_prefix="forebay") as pool:
        whole = False
        try:  # an interrupt may come at any of these lines, and a pool that is left waits for its workers
            workers = [pool.submit(copy_context().run, work) for _ in range(streams)]
            finished(workers, None)
            whole = all(worker.done() and worker.exception() is None for worker in workers)
        finally:
            if not whole:
                scope.cancel()
    errors = [error for worker in workers if (error := worker.exception()) is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, Cancelled)), errors[0])


@dataclass(frozen=True, slots=True)
class _Pending:
    """A whole file under its temporary name, in the directory where it will lie."""

    directory: int
    temp: str
    final: str


class Target:
    """A directory that files are restored into. Everything is done relative to open directories, so that no symbolic link
    inside is followed, whoever puts one there and when."""

    def __init__(self, path: Path, durable: bool) -> None:
        self._made = [each for each in (path, *path.parents) if not each.exists()]
        path.mkdir(parents=True, exist_ok=True)
        self._durable = durable
        self._lock = threading.Lock()
        self._directories: dict[str, int] = {}
        self._created: list[tuple[int, str]] = []
        self._pending: list[_Pending] = []
        # The target itself may be a link: the caller named it.
        self._directories[""] = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)

    def write(self, shard: Shard, fill: Callable[[int], None]) -> None:
        """A temporary file with the shard's bytes, which `fill` writes to its descriptor. Removed again on error."""
        parent, _, final = shard.name.rpartition("/")
        directory = self._directory(parent)
        self._check_free(directory, final, shard.name)
        temp = f"{TEMP_PREFIX}{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(temp, flags, 0o666, dir_fd=directory)
        with self._lock:
            self._pending.append(_Pending(directory, temp, final))
        try:
            fill(descriptor)
            if self._durable:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)

    @staticmethod
    def _sync(directory: Path) -> None:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def publish(self) -> None:
        """Give every file its name. Until here nothing that was there before has changed."""
        self._created.clear()
        made, self._made = self._made, []
        while self._pending:
            pending = self._pending[-1]
            try:
                os.rename(pending.temp, pending.final, src_dir_fd=pending.directory, dst_dir_fd=pending.directory)
            except OSError as error:
                lacking = len(self._pending)
                raise ForebayError(f"naming {pending.final!r} failed, {lacking} files are missing: {os_text(error)}") from error
            self._pending.pop()
        if self._durable:
            for directory in self._directories.values():
                os.fsync(directory)
            for path in made:  # the target itself is an entry too
                self._sync(path.parent)

    def close(self) -> None:
        """Remove what was not published."""
        for pending in self._pending:
            with contextlib.suppress(OSError):
                os.unlink(pending.temp, dir_fd=pending.directory)
        for parent, name in reversed(self._created):
            with contextlib.suppress(OSError):  # not empty: someone else has put something there
                os.rmdir(name, dir_fd=parent)
        for descriptor in self._directories.values():
            os.close(descriptor)
        self._directories.clear()
        for path in self._made:
            with contextlib.suppress(OSError):
                path.rmdir()

    def _directory(self, relative: str) -> int:
        with self._lock:
            at, path = self._directories[""], ""
            for segment in filter(None, relative.split("/")):
                path = f"{path}/{segment}" if path else segment
                if path not in self._directories:
                    self._directories[path] = self._open_child(at, segment, path)
                at = self._directories[path]
            return at

    def _open_child(self, parent: int, segment: str, path: str) -> int:
        try:
            os.mkdir(segment, dir_fd=parent)
            self._created.append((parent, segment))
        except FileExistsError:
            pass
        try:
            return os.open(segment, _DIRECTORY, dir_fd=parent)
        except OSError as error:
            raise InvalidArgument(f"{path!r} in the target is a link or a file where a directory must be") from error

    @staticmethod
    def _check_free(directory: int, final: str, name: str) -> None:
        try:
            status = os.stat(final, dir_fd=directory, follow_symlinks=False)
        except FileNotFoundError:
            return
        if stat.S_ISDIR(status.st_mode):
            raise InvalidArgument(f"{name!r} in the target is a directory where a file must be")


class Streams(Protocol):
    """Whatever gives shards by name."""

    def write_to(self, name: str, descriptor: int, on_bytes: OnBytes) -> None:
        """The shard's bytes, each checked before, into an open file from its beginning."""
        ...

    def packed(self, shards: Iterable[Shard]) -> Generator[list[tuple[Shard, bytes]], None, None]:
        """Those of the shards that come many at a time, checked."""
        ...


def restore_files(reader: Streams, target: Target, shards: Iterable[Shard], streams: int, on_bytes: OnBytes) -> None:
    """Write shards into the target under temporary names. Raises the first failure, naming the shard."""
    left = {shard.name: shard for shard in shards}
    _check_distinct(set(left))

    def write(shard: Shard, fill: Callable[[int], None]) -> None:
        try:
            check_shard_name(shard.name)  # a listing is not to be trusted with paths
            target.write(shard, fill)
        except ForebayError as error:
            raise error.extended(f"(restoring {shard.name!r})") from error.__cause__
        except OSError as error:
            raise ForebayError(f"restoring {shard.name!r} failed: {os_text(error)}") from error
        except InvalidName as error:
            raise ForebayError(f"restoring {shard.name!r} failed: {error}") from error

    def restore_group(group: list[tuple[Shard, bytes]]) -> None:
        for shard, data in group:
            write(shard, partial(_write_all, data))
            del left[shard.name]
        on_bytes(sum(shard.size for shard, _ in group))

    def restore(shard: Shard) -> None:
        write(shard, lambda descriptor: reader.write_to(shard.name, descriptor, on_bytes))

    with contextlib.closing(reader.packed(list(left.values()))) as groups:
        in_parallel(restore_group, groups, streams)
    in_parallel(restore, list(left.values()), streams)


def _write_all(data: bytes, descriptor: int) -> None:
    view, at = memoryview(data), 0
    while at < len(view):
        at += os.pwrite(descriptor, view[at:], at)


def _check_distinct(names: set[str]) -> None:
    if (clash := file_and_directory(names)) is not None:
        raise InvalidArgument(f"shards {clash[0]!r} and {clash[1]!r} cannot both be files: read them one by one")
