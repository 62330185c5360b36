"""A few threads on one shard, the caller's own among them.

Owns that none of them touches the caller's memory or descriptor any more when run() returns or raises, whatever interrupts it.
"""

import threading
from collections.abc import Callable

from forebay import cancel
from forebay.lanes.memory import aligned

Bounce = Callable[[], memoryview]


class Workers:
    """Threads that do `step` until it returns False, one fails, or the operation is cancelled. Each has one page-aligned buffer
    of `bounce_bytes`, made when it is first asked for."""

    def __init__(self, step: Callable[[Bounce], bool], bounce_bytes: int) -> None:
        self._step = step
        self._bounce_bytes = bounce_bytes
        self._ended = threading.Event()
        self._errors: list[BaseException] = []

    def run(self, threads: int) -> None:
        """Do all steps; raises the first error, and Cancelled."""
        others: list[threading.Thread] = []
        with cancel.watching(self):
            try:
                for _ in range(threads - 1):
                    thread = threading.Thread(target=self._work, name="forebay-fd", daemon=True)
                    thread.start()
                    others.append(thread)
                self._work()
            finally:
                self._ended.set()
                self._join(others)
        cancel.check()
        if self._errors:
            raise self._errors[0]

    def cancel(self) -> None:
        """Begin no further step."""
        self._ended.set()

    def _work(self) -> None:
        buffer: memoryview | None = None

        def bounce() -> memoryview:
            nonlocal buffer
            if buffer is None:
                buffer = aligned(self._bounce_bytes)
            return buffer

        try:
            while not self._ended.is_set() and self._step(bounce):
                pass
        except BaseException as error:  # noqa: BLE001 - raised by run(), on the caller's thread
            self._errors.append(error)
            self._ended.set()

    def _join(self, threads: list[threading.Thread]) -> None:
        for thread in threads:
            while thread.is_alive():
                try:
                    thread.join()
                except BaseException as error:  # noqa: BLE001 - an interrupt has to wait: the memory is in use
                    self._errors.insert(0, error)
