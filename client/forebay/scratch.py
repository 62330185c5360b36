"""Directories of this host for files on their way to a checkpoint or out of one.

Owns where they lie, the lock that says that a directory's process is alive, and their end: removed, kept for a person to look
at, or swept by the next process where theirs was killed. Does not own what lies in them (handoff.py).

    <under>/forebay-<uid>/lock                    held while directories are made, swept and renamed
    <under>/forebay-<uid>/live-<host>.<token>/    `lock`, held by its process, and `files`, which is handed out
    <under>/forebay-<uid>/kept-<host>.<token>/    what could not be handed over; never swept
    <under>/forebay-<uid>/dead-<host>.<token>/    being removed
"""

import contextlib
import fcntl
import logging
import os
import platform
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from forebay.errors import ForebayError, InvalidArgument

_ALTERNATIVE = "/var/tmp"  # on a disk where /tmp is memory
_MEMORY = ("tmpfs", "ramfs")
# Where a free lock proves that its process is gone, whichever host that ran on: nobody else can reach these.
_LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "overlay", *_MEMORY)
_MOUNTS = Path("/proc/self/mountinfo")

_log = logging.getLogger("forebay")


class Scratch:
    """A directory of this process, empty at first, at `path`. Ends by remove() or keep(), after which nothing happens."""

    def __init__(self, under: str | os.PathLike[str] | None = None, needed_bytes: int = 0) -> None:
        """Below `under`, else where most is free. Sweeps what killed processes left there.

        Raises ForebayError where `needed_bytes` do not fit, InvalidArgument for a directory that cannot be used, OSError.
        """
        parent = Path(_roomiest() if under is None else under).absolute()
        _check_room(parent, needed_bytes, chosen=under is None)
        self._base = _base_below(parent)
        self._pid = os.getpid()
        self._name = f"{platform.node()}.{secrets.token_hex(8)}"
        with _locked(self._base / "lock"):
            dead = _take_stale(self._base)
            live = self._base / f"live-{self._name}"
            live.mkdir()
            (live / "files").mkdir()
            self._lock: int | None = os.open(live / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self.path = live / "files"
        for each in dead:
            shutil.rmtree(each, ignore_errors=True)  # what is left of it is the next one's to sweep

    def remove(self) -> None:
        """The directory and all that is in it; what cannot be removed is logged, and tried again by the next sweep."""
        if (dead := self._renamed("dead")) is not None:
            shutil.rmtree(dead, ignore_errors=True)
            if dead.exists():
                _log.warning("%s could not be removed", dead)

    def keep(self) -> Path:
        """Leave the files where a sweep does not see them; where that is."""
        kept = self._renamed("kept")
        return self.path if kept is None else kept / "files"

    def _renamed(self, prefix: str) -> Path | None:
        if self._lock is None or self._pid != os.getpid():  # a forked child's copy is its parent's
            return None
        ended = self._base / f"{prefix}-{self._name}"
        with _locked(self._base / "lock"):
            self.path.parent.rename(ended)
        lock, self._lock = self._lock, None
        os.close(lock)
        return ended


def _base_below(parent: Path) -> Path:
    base = parent / f"forebay-{os.geteuid()}"
    with contextlib.suppress(FileExistsError):
        base.mkdir(mode=0o700)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        raise InvalidArgument(f"{base}: not a directory of this user's; pass under= another place")
    return base


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _take_stale(base: Path) -> list[Path]:
    """What processes that are gone have left, renamed so that nobody else takes it too. The base's lock is held."""
    found = list(base.glob("dead-*"))
    anywhere = _mount_of(base)[1] in _LOCAL
    for live in base.glob("live-*"):
        if not anywhere and not live.name.startswith(f"live-{platform.node()}."):
            continue  # a lock on a shared file system may be unknown to other hosts
        if _is_free(live / "lock"):
            found.append(live.rename(base / f"dead-{live.name.removeprefix('live-')}"))
    return found


def _is_free(lock: Path) -> bool:
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return True  # its process was killed between making the directory and this, holding the base's lock
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    finally:
        os.close(descriptor)
    return True


def _roomiest() -> Path:
    """Of the usual places the one with most space free; memory only where there is nothing else."""
    places = [Path(each) for each in (tempfile.gettempdir(), _ALTERNATIVE) if os.access(each, os.W_OK | os.X_OK)]
    on_disk = [place for place in places if _mount_of(place)[1] not in _MEMORY] or places
    if not on_disk:
        raise InvalidArgument(f"neither {tempfile.gettempdir()} nor {_ALTERNATIVE} can be written to; pass under=")
    return max(on_disk, key=_free_bytes)


def _check_room(parent: Path, needed_bytes: int, *, chosen: bool) -> None:
    if not parent.is_dir():
        raise InvalidArgument(f"{parent}: not a directory")
    free_bytes = _free_bytes(parent)
    if free_bytes < needed_bytes:
        advice = "pass under= a directory with more" if chosen else "choose another one"
        raise ForebayError(f"{parent}: too little space is free: {advice} needed={needed_bytes} free={free_bytes}")


def _free_bytes(path: Path) -> int:
    status = os.statvfs(path)
    return status.f_bavail * status.f_frsize


def _mount_of(path: Path) -> tuple[str, str]:
    """The mount point that a path lies below, and the type of its file system; empty where that cannot be told."""
    real, found = path.resolve(), ("", "")
    with contextlib.suppress(OSError):
        for line in _MOUNTS.read_text().splitlines():
            before, _, after = line.partition(" - ")
            point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4])
            if real.is_relative_to(point) and len(point) >= len(found[0]):
                found = (point, after.split()[0])
    return found
