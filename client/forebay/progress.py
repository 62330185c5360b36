"""Progress bars: on a terminal, for what takes longer than a second. On a pipe there are none.

Owns when and how a bar shows; callers only count bytes. rich is loaded when a bar is really drawn.
"""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

SHOW_AFTER_S = 1.0


class _Bar:
    def __init__(self, description: str, total_bytes: int | None) -> None:
        self._description = description
        self._total = total_bytes
        self._lock = threading.Lock()
        self._done = 0
        self._over = False
        self._shown: tuple[Progress, TaskID] | None = None
        self._timer = threading.Timer(SHOW_AFTER_S, self._show)
        self._timer.daemon = True
        self._timer.start()

    def advance(self, size: int) -> None:
        """`size` bytes more are done (fewer, where it is negative: they have to be sent again)."""
        with self._lock:
            self._done += size
            if self._shown is not None:
                bar, task = self._shown
                bar.update(task, completed=self._done)

    def close(self) -> None:
        """Take the bar away; what the command prints is the result."""
        self._timer.cancel()
        with self._lock:
            self._over = True
            if self._shown is not None:
                self._shown[0].stop()

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

        columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
        text = TextColumn("{task.description}", markup=False)
        with self._lock:
            if self._over:
                return
            # What the program prints stays its own: rich would send its standard output to our standard error.
            console = Console(stderr=True)
            bar = Progress(text, *columns, console=console, transient=True, redirect_stdout=False, redirect_stderr=False)
            self._shown = bar, bar.add_task(self._description, total=self._total, completed=self._done)
            bar.start()


@contextmanager
def byte_counter(description: str, total_bytes: int | None, enabled: bool = True) -> Iterator[Callable[[int], None]]:
    """A function to call with bytes done; behind it a bar, where standard error is a terminal."""
    if not enabled or not sys.stderr.isatty():
        yield lambda size: None
        return
    bar = _Bar(description, total_bytes)
    try:
        yield bar.advance
    finally:
        bar.close()
