"""A note that a process leaves when it dies of a signal of its own making: SIGSEGV, SIGBUS, SIGFPE, SIGABRT, SIGILL.

LMDB maps its file and believes it, so damage in it can end the process where no code of ours runs any more. Owns the note;
what the next start makes of it is not its business. SIGKILL, power loss and errors leave none.
"""

import contextlib
import faulthandler
import logging
from pathlib import Path
from typing import BinaryIO

log = logging.getLogger("forebay.fatal")

_TEXT_MAX = 4096


class _Armed:
    """One a process, since signal handlers are."""

    path: Path | None = None
    file: BinaryIO | None = None


def left(path: Path) -> str:
    """What an earlier process left at `path`; empty where it left nothing. Blocking."""
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        return file.read(_TEXT_MAX).decode(errors="replace").strip()
    return ""


def arm(path: Path) -> None:
    """From now on this process leaves its last word at `path`, which is emptied. Where Python's own report is asked for
    (PYTHONFAULTHANDLER, a test runner), that stands; where the file cannot be made, there is none. Blocking."""
    try:
        file = path.open("wb", buffering=0)
    except OSError as error:
        log.warning("a fatal signal would leave no note path=%s error=%s", path, error)
        return
    if faulthandler.is_enabled() and _Armed.file is None:
        file.close()
        return
    faulthandler.enable(file, all_threads=False)
    if _Armed.file is not None:
        _Armed.file.close()
    _Armed.path, _Armed.file = path, file


def disarm(path: Path) -> None:
    """The process ends in order, as far as `path` goes. Nothing where it was not armed for it. Blocking."""
    if _Armed.file is None or path != _Armed.path:
        return
    faulthandler.disable()
    _Armed.file.close()
    _Armed.path = _Armed.file = None
    with contextlib.suppress(OSError):  # an empty one says nothing
        path.unlink(missing_ok=True)
