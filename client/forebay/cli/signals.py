"""Signals of a command that must clean up before it ends.

Owns what the first one does, and that a further one does not break the clean-up off.
"""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ended_once() -> Iterator[None]:
    """SIGTERM (of `timeout`, of a batch system) and SIGHUP end it as Ctrl-C does; only the first counts. One that was ignored
    from the start stays so (nohup)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = False

    def end(number: int, frame: FrameType | None) -> None:
        nonlocal ending
        if not ending:
            ending = True
            raise KeyboardInterrupt

    before = {each: signal.getsignal(each) for each in _ENDING if signal.getsignal(each) != signal.SIG_IGN}
    for each in before:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
