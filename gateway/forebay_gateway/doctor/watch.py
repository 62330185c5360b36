"""Work that can be stopped, and that is given up when it stands still: each place is measured on a thread of its own.

Owns threads and patience. A signal is met by the main thread alone, so what a measurement made is always removed by the
measurement itself, on its thread, whatever ended it.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from forebay_gateway.core.errors import Unavailable

T = TypeVar("T")

POLL_S = 0.05
CLEAN_UP_S = 30.0  # for removing what was made, once stopped


class Stopped(Exception):
    """Somebody asked to stop."""


class Watch:
    """Between the one who measures (`tick`, at every step) and the one who waits."""

    def __init__(self) -> None:
        self._stop = threading.Event()
        self._moved_s = time.monotonic()

    def tick(self) -> None:
        """Something was done. Raises Stopped where no more shall be."""
        self._moved_s = time.monotonic()
        if self._stop.is_set():
            raise Stopped

    def stop(self) -> None:
        """Ask for the end."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        """Whether the end was asked for."""
        return self._stop.is_set()

    @property
    def still_s(self) -> float:
        """Seconds since the last step."""
        return time.monotonic() - self._moved_s

    def pause(self, delay_s: float) -> None:
        """Sleep, but not beyond a stop."""
        self._stop.wait(delay_s)
        self.tick()


def watched(act: Callable[[Watch], T], still_s_max: float) -> T:
    """The result of `act`, run on another thread. Raises what it raises; Unavailable where it stands still for too long: a
    mount that hangs keeps its thread, and nobody waits for it. An interrupt stops it, waits for its clean-up, and goes on."""
    watch, done = Watch(), threading.Event()
    results: list[T] = []
    errors: list[BaseException] = []

    def work() -> None:
        try:
            results.append(act(watch))
        except BaseException as error:  # noqa: BLE001 it is raised again by the one who waits
            errors.append(error)
        finally:
            done.set()

    thread = threading.Thread(target=work, name="forebay-doctor", daemon=True)
    try:
        thread.start()
        while not done.wait(POLL_S):
            if watch.still_s > still_s_max:
                raise Unavailable("no answer: nothing moved", waited_s=still_s_max)
    except BaseException:
        watch.stop()
        if thread.ident is not None:
            done.wait(min(CLEAN_UP_S, still_s_max))
        raise
    if errors:
        raise errors[0]
    return results[0]


def run_async(work: Callable[[], Coroutine[Any, Any, T]], watch: Watch) -> T:
    """The result of a coroutine, run in a loop of its own and cancelled by a stop."""
    return asyncio.run(_stoppable(work, watch))


async def _stoppable(work: Callable[[], Coroutine[Any, Any, T]], watch: Watch) -> T:
    task = asyncio.create_task(work())
    cancelled = False
    while not task.done():
        await asyncio.wait({task}, timeout=POLL_S)
        if watch.stopped and not cancelled:
            cancelled = task.cancel()
    if cancelled:
        if not task.cancelled():
            task.exception()  # seen; the stop is what counts
        raise Stopped
    return task.result()
