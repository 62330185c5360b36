"""Named places between two durable acts, where a test can kill, fail or stop the process.

Off unless FOREBAY_FAILPOINTS is set when the process starts: "name=kill", "name=error:EIO", "name=3*kill" (at the third pass),
"name=all*error:ENOSPC" (at every pass), "name=sleep:2.5"; several joined with ';'. Without a count it acts at the first pass
only. A text that makes no sense fails at start. Off, a hit costs one look at an empty dictionary.
"""

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Iterator

ENVIRONMENT = "FOREBAY_FAILPOINTS"


class _Point:
    def __init__(self, text: str) -> None:
        count, star, action = text.partition("*")
        self.always = bool(star) and count == "all"
        self.remaining = int(count) if star and not self.always else 1
        self.verb, _, argument = (action if star else text).partition(":")
        self.number, self.delay_s = 0, 0.0
        if self.verb == "error":
            self.number = getattr(errno, argument)
        elif self.verb == "sleep":
            self.delay_s = float(argument)
        elif self.verb != "kill":
            raise ValueError(f"unknown failpoint action {text!r}")
        self.lock = threading.Lock()

    def _due(self) -> bool:
        with self.lock:
            self.remaining -= 1
            return self.always or self.remaining == 0

    def fire(self) -> None:
        if not self._due():
            return
        if self.verb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.verb == "error":
            raise OSError(self.number, f"failpoint: {os.strerror(self.number)}")
        else:
            time.sleep(self.delay_s)


def _parse(text: str) -> dict[str, _Point]:
    points = {}
    for entry in filter(None, text.split(";")):
        name, _, action = entry.partition("=")
        points[name.strip()] = _Point(action.strip())
    return points


_points: dict[str, _Point] = {}


def arm(text: str) -> None:
    """These failpoints, and no others. Raises ValueError for a text that makes no sense."""
    found = _parse(text)
    _points.clear()
    _points.update(found)


arm(os.environ.get(ENVIRONMENT, ""))


def hit(name: str) -> None:
    """Pass the place `name`."""
    if _points and (point := _points.get(name)) is not None:
        point.fire()


@contextlib.contextmanager
def armed(text: str) -> Iterator[None]:
    """For tests inside one process: these failpoints, and no others, while the block runs."""
    before = dict(_points)
    arm(text)
    try:
        yield
    finally:
        _points.clear()
        _points.update(before)
