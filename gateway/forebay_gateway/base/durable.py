"""Durable writes, once: write, fsync, rename or link, fsync the directory.

Owns the order of these acts for every small file the gateway writes, and directory syncs for all. Blocking: call from a
thread. An fsync that failed is never repeated on the same file: the error goes up and the file is dropped.
"""

import contextlib
import os
from pathlib import Path

from forebay_gateway.base import failpoints

TEMP_PREFIX = ".forebay-tmp-"


def sync_dir(path: Path) -> None:
    """Make the directory's entries durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_dirs(path: Path, root: Path, mode: int = 0o777) -> None:
    """Create `path` below `root` (which exists), every new entry durable. What was there already is not synced again."""
    missing = []
    at = path
    while at != root and not at.is_dir():
        missing.append(at)
        at = at.parent
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):
            directory.mkdir(mode)
        sync_dir(directory.parent)


def write_temp(directory: Path, data: bytes, tag: str) -> Path:
    """A synced temporary file in `directory`; `tag` keeps concurrent writers apart. Removed again on error."""
    temp = directory / f"{TEMP_PREFIX}{tag}"
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
    try:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            failpoints.hit("durable.before_fsync")
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    return temp


def replace_file(path: Path, data: bytes, tag: str) -> None:
    """Whole new content or the old one, durable when it returns."""
    temp = write_temp(path.parent, data, tag)
    try:
        failpoints.hit("durable.before_rename")
        os.replace(temp, path)
    except BaseException:
        temp.unlink(missing_ok=True)
        raise
    failpoints.hit("durable.before_dir_fsync")
    sync_dir(path.parent)


def create_file(path: Path, data: bytes, tag: str) -> None:
    """Whole content under a name that nobody had, atomically; raises FileExistsError and changes nothing otherwise."""
    temp = write_temp(path.parent, data, tag)
    try:
        failpoints.hit("durable.before_link")
        os.link(temp, path)
    finally:
        temp.unlink(missing_ok=True)
    failpoints.hit("durable.before_dir_fsync")
    sync_dir(path.parent)
