"""The doctor's own files: one directory for each place and run, with a name that tells whose it is.

Owns that directory and its removal; nothing outside of it is ever written or removed. A name says which process on which boot
of which machine made it, so that what a killed doctor left is known, and one that is at work is left alone.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from forebay_gateway.base.clock import SystemClock
from forebay_gateway.base.durable import TEMP_PREFIX
from forebay_gateway.core.layout import CONTROL_DIR

# doctor-<boot>-<pid namespace>-<pid>-<start of the process>-<random>
_NAME = re.compile(r"doctor-([0-9a-f]{12})-(\d+)-(\d+)-(\d+)-[0-9a-f]{8}\Z")
_OLD_S = 86_400.0  # no doctor runs for a day: what another boot or machine left is removed then
_TRIES = 8


def new_name() -> str:
    """A name that no other run has, on whatever machine."""
    pid = os.getpid()
    return f"doctor-{_boot()}-{_pid_namespace()}-{pid}-{_started(pid)}-{secrets.token_hex(4)}"


def is_left_over(name: str) -> bool:
    """Whether it is of a process of this boot and this namespace that is no more."""
    found = _NAME.match(name)
    if found is None or (found[1], int(found[2])) != (_boot(), _pid_namespace()):
        return False
    return _started(int(found[3])) != int(found[4])


def _boot() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").replace("-", "")[:12]


def _pid_namespace() -> int:
    return Path("/proc/self/ns/pid").stat().st_ino


def _started(pid: int) -> int:
    """When a process began, in clock ticks since boot; 0 where there is none. Field 22 of proc_pid_stat(5)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    return int(text.rpartition(")")[2].split()[19])


@contextlib.contextmanager
def in_cache(cache: Path) -> Iterator[Path]:
    """A directory in the cache. The prefix is one that a gateway takes for nobody's data."""
    with _own(cache, TEMP_PREFIX) as made:
        yield made


@contextlib.contextmanager
def in_tier(root: Path) -> Iterator[Path]:
    """A directory below a POSIX tier's `.forebay/probe/`, where a gateway's own trials lie.

    Raises NotADirectoryError where a link or a file is in its way: by a link another directory would be written and swept.
    """
    above = root / CONTROL_DIR / "probe"
    for each in (above.parent, above):
        if each.is_symlink() or (each.exists() and not each.is_dir()):
            raise NotADirectoryError(
                errno.ENOTDIR, f"{each.relative_to(root)} is a link or a file, so nothing is written", each
            )
    try:
        with _own(above, "") as made:
            yield made
    finally:
        with contextlib.suppress(OSError):  # not empty, or another's rmdir came first
            above.rmdir()
            above.parent.rmdir()


@contextlib.contextmanager
def _own(above: Path, prefix: str) -> Iterator[Path]:
    made = _make(above, prefix)
    try:
        _sweep(above, prefix)
        yield made
    finally:
        shutil.rmtree(made)


def _make(above: Path, prefix: str) -> Path:
    for _ in range(_TRIES):
        try:
            if not prefix:
                above.mkdir(parents=True, exist_ok=True)
            made = above / f"{prefix}{new_name()}"
            made.mkdir(0o700)
            return made
        except FileNotFoundError:  # another's clean-up took the empty directory above
            if prefix:
                raise
    raise FileNotFoundError(2, "the directory is removed again and again", str(above))


def _sweep(above: Path, prefix: str) -> None:
    """What killed doctors left."""
    for path in above.glob(f"{prefix}doctor-*"):
        name = path.name.removeprefix(prefix)
        if _NAME.match(name) and (is_left_over(name) or _is_old(path)):
            shutil.rmtree(path, ignore_errors=True)


def _is_old(path: Path) -> bool:
    try:
        changed_s = path.stat().st_mtime
    except OSError:
        return False
    return SystemClock().wall() - changed_s > _OLD_S
