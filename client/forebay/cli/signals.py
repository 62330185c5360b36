"""Signals of a command that must clean up before it ends.

Owns what the first one does, that a second one does not break the clean-up off, and that a third one does.
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ended_once() -> Iterator[None]:
    """SIGTERM (of `timeout`, of a batch system) and SIGHUP end it as Ctrl-C does. A second one counts for nothing, as what is
    half done is being cleared away; whoever sends a third wants out. One that was ignored from the start stays so (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    count = 0

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal count
        count += 1
        if count == 1:
            raise KeyboardInterrupt
        if count > 2:
            os._exit(128 + number)

    before = {each: signal.getsignal(each) for each in _ENDING if signal.getsignal(each) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
