"""Named places between two durable acts, where a test can kill, fail or stop the process.

Off unless FOREBAY_FAILPOINTS is set when the process starts: "name=kill", "name=error:EIO", "name=3*kill" (at the third pass),
"name=sleep:2.5"; several joined with ';'. Off, a hit costs one look at an empty dictionary.
"""

import errno
import os
import signal
import threading
import time

ENVIRONMENT = "FOREBAY_FAILPOINTS"


class _Point:
    def __init__(self, text: str) -> None:
        count, star, action = text.partition("*")
        self.remaining = int(count) if star else 1
        self.action = action if star else text
        self.lock = threading.Lock()

    def fire(self) -> None:
        with self.lock:
            self.remaining -= 1
            if self.remaining != 0:
                return
        verb, _, argument = self.action.partition(":")
        if verb == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif verb == "error":
            number = getattr(errno, argument)
            raise OSError(number, f"failpoint: {os.strerror(number)}")
        elif verb == "sleep":
            time.sleep(float(argument))
        else:
            raise ValueError(f"unknown failpoint action {self.action!r}")


def _parse(text: str) -> dict[str, _Point]:
    points = {}
    for entry in filter(None, text.split(";")):
        name, _, action = entry.partition("=")
        points[name.strip()] = _Point(action.strip())
    return points


_points = _parse(os.environ.get(ENVIRONMENT, ""))


def hit(name: str) -> None:
    """Pass the place `name`."""
    if _points and (point := _points.get(name)) is not None:
        point.fire()
