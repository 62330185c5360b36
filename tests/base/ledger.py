"""What a power loss could undo: a ledger of directory entries that changed and were not synced since, and of files that got
their name before their bytes were down.

Watches this process's own calls (os.open, rename, replace, link, symlink, unlink, mkdir, rmdir, fsync). Entries under names
that never count (temporary ones, `incoming/`, lock files) are not looked at.
"""

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from forebay_gateway.base.durable import TEMP_PREFIX


def _counts(name: str) -> bool:
    return not name.startswith((TEMP_PREFIX, ".forebay-lock", "forebay.lock"))


class Ledger:
    """While the block runs. `problems()` says what is not durable."""

    def __init__(self, root: Path, *, emptied: bool = True) -> None:
        """`emptied` False: an empty directory that comes back does no harm."""
        self._root, self._emptied = str(root), emptied
        self._unsynced: dict[str, str] = {}  # directory: the last change in it
        self._synced: set[int] = set()  # inodes
        self._written: dict[int, str] = {}  # inode: a file under a name that counts
        self._early: list[str] = []
        self._lock = threading.Lock()

    def problems(self) -> list[str]:
        with self._lock:
            late = [f"{path} was written, and is not synced" for path in self._written.values()]
            return [
                *self._early,
                *late,
                *(f"{what}, and {directory} is not synced" for directory, what in self._unsynced.items()),
            ]

    def _changed(self, path: Any, what: str, dir_fd: int | None = None) -> None:
        text = os.fspath(path)
        if dir_fd is not None:
            text = os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), text)
        directory, _, name = os.path.abspath(text).rpartition("/")
        if directory.startswith(self._root) and _counts(name) and "incoming" not in directory:
            with self._lock:
                self._unsynced[directory] = f"{what} {name}"

    def _named(self, path: Any, to: Any, dir_fd: int | None = None) -> None:
        if not _counts(os.fspath(to).rpartition("/")[2]):
            return
        found = os.stat(path, dir_fd=dir_fd, follow_symlinks=False)
        with self._lock:
            if stat.S_ISREG(found.st_mode) and found.st_size and found.st_ino not in self._synced:
                self._early.append(f"{path} is named, and its bytes are not synced")

    def _opened(self, path: Any, descriptor: int, options: dict[str, Any]) -> None:
        with self._lock:
            self._synced.discard(os.fstat(descriptor).st_ino)  # numbers are given again
        self._changed(path, "made", options.get("dir_fd"))

    def _fsynced(self, descriptor: int) -> None:
        found = os.fstat(descriptor)
        with self._lock:
            if stat.S_ISDIR(found.st_mode):
                self._unsynced.pop(os.readlink(f"/proc/self/fd/{descriptor}"), None)
            else:
                self._synced.add(found.st_ino)
                self._written.pop(found.st_ino, None)

    def _wrote(self, descriptor: int) -> None:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(self._root) and _counts(path.rpartition("/")[2]):
            with self._lock:
                self._written[os.fstat(descriptor).st_ino] = path

    @contextlib.contextmanager
    def watching(self) -> Iterator["Ledger"]:
        with contextlib.ExitStack() as stack:
            for name in (
                "open",
                "rename",
                "replace",
                "link",
                "symlink",
                "unlink",
                "mkdir",
                "rmdir",
                "fsync",
                "write",
                "pwrite",
            ):
                stack.enter_context(mock.patch.object(os, name, self._wrapped(name, getattr(os, name))))
            yield self

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            moves = name in ("rename", "replace")
            if moves or name == "link":
                self._named(arguments[0], arguments[1], options.get("src_dir_fd"))
            is_new = name == "open" and arguments[1] & os.O_CREAT and not os.path.lexists(arguments[0])
            result = real(*arguments, **options)
            if name == "fsync":
                self._fsynced(arguments[0])
            elif name in ("write", "pwrite"):
                self._wrote(arguments[0])
            elif name == "open":
                if is_new:
                    self._opened(arguments[0], result, options)
            else:
                if moves:
                    self._changed(arguments[0], "renamed", options.get("src_dir_fd"))
                to = arguments[1] if moves or name in ("link", "symlink") else arguments[0]
                if name == "rmdir" and not self._emptied:
                    return result
                self._changed(to, name, options.get("dst_dir_fd", options.get("dir_fd")))
            return result

        return call
