"""One shape for every background worker, and the crew that owns them.

Owns how workers start, are woken, fail and stop. Does not own what a step does. The first failure ends all: it is logged
once, with its cause, and goes up from `run_until_failure`; a dead worker never leaves the others waiting for it.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any, TypeVar

from forebay_gateway.base.clock import Clock

__all__ = ["Crew", "Worker", "uncut", "uncut_ended", "uncut_left"]

log = logging.getLogger("forebay.tasks")


T = TypeVar("T")
_Run = Callable[[], Coroutine[Any, Any, Any]]


_uncut: "set[asyncio.Task[Any]]" = set()  # acts under way, whoever asked for them


def uncut_left() -> bool:
    """Whether an act that must go on to its end has not come to it."""
    return bool(_uncut)


async def _cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    others = [task for task in tasks if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def uncut(act: Coroutine[Any, Any, T], *, stay: bool = False) -> T:
    """The result of `act`, which goes on to its end also where the caller is cancelled; what it raises then is logged.

    With `stay` a cancelled caller is let go only then, so that what it holds (a lock) is held as long.
    """
    task = asyncio.ensure_future(act)
    _uncut.add(task)
    task.add_done_callback(_uncut.discard)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        task.add_done_callback(_unheard)
        if stay:
            await asyncio.wait([task])
        raise


def detached(act: Coroutine[Any, Any, Any]) -> None:
    """Run `act` to its end, as uncut() does, for nobody who waits; what it raises is logged. On the event loop."""
    task = asyncio.ensure_future(act)
    _uncut.add(task)
    task.add_done_callback(_uncut.discard)
    task.add_done_callback(_unheard)


async def uncut_ended(timeout_s: float) -> None:
    """Until every act under way on this loop has come to its end, at most `timeout_s`: before what they stand on is closed."""
    loop = asyncio.get_running_loop()
    if acts := [task for task in _uncut if task.get_loop() is loop]:
        await asyncio.wait(acts, timeout=timeout_s)


def _unheard(task: "asyncio.Task[Any]") -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.info("an act failed after its caller had gone error=%r", error)


class Worker:
    """Repeats `step`, which returns seconds until the next one (None: `idle_s`). `wake` runs it at once.

    A wake that comes while a step runs is kept: one more step follows.
    """

    def __init__(self, name: str, step: Callable[[], Awaitable[float | None]], clock: Clock, idle_s: float) -> None:
        self.name = name
        self._step = step
        self._clock = clock
        self._idle_s = idle_s
        self._woken = asyncio.Event()
        self._stopping = False

    def wake(self) -> None:
        """Run a step now, or once more after the one under way. A hint: call it as often as you like."""
        self._woken.set()

    def finish(self) -> None:
        """Let the step under way end, then return from `run`."""
        self._stopping = True
        self._woken.set()

    async def run(self) -> None:
        """Step until `finish` or a failure; what a step raises is raised here."""
        while not self._stopping:
            self._woken.clear()
            pause_s = await self._step()
            await self._pause(self._idle_s if pause_s is None else pause_s)

    async def _pause(self, pause_s: float) -> None:
        waits = [asyncio.create_task(wait) for wait in (self._clock.sleep(pause_s), self._woken.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await _cancel(waits)


class Crew:
    """Owns background tasks. Add before or while `run_until_failure` runs; `stop` ends all."""

    def __init__(self) -> None:
        self._waiting: list[tuple[str, _Run]] = []
        self._workers: list[Worker] = []
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._outcome: asyncio.Future[BaseException | None] | None = None  # None: stopped
        self._stopped = False

    @property
    def is_running(self) -> bool:
        """Whether its tasks were started, none has failed, and nobody has stopped them."""
        return self._outcome is not None and not self._outcome.done() and not self._stopped

    def add(self, worker: "Worker | str", run: _Run | None = None) -> None:
        """Take a Worker, or a name and a coroutine function; a coroutine that returns has done its work and is no failure."""
        if self._stopped:
            raise RuntimeError("the crew was stopped; it takes no more work")
        if isinstance(worker, Worker):
            self._workers.append(worker)
            name, start = worker.name, worker.run
        elif run is not None:
            name, start = worker, run
        else:
            raise TypeError("a name needs a coroutine function")
        if self._outcome is None:
            self._waiting.append((name, start))
        else:
            self._start(name, start)

    def _start(self, name: str, run: _Run) -> None:
        task = asyncio.create_task(run(), name=name)
        self._tasks[task] = name
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[Any]") -> None:
        name = self._tasks.pop(task)
        if task.cancelled() or (error := task.exception()) is None:
            return
        if self._outcome is None or self._outcome.done():
            log.error("another background task failed while all were stopping", extra={"task": name, "error": repr(error)})
            return
        log.critical("background task failed", extra={"task": name}, exc_info=error)
        self._outcome.set_result(error)

    async def run_until_failure(self) -> None:
        """Run all until `stop` (returns) or the first failure (cancels the others and raises it)."""
        if self._stopped:
            return
        self._outcome = asyncio.get_running_loop().create_future()
        for name, run in self._waiting:
            self._start(name, run)
        self._waiting.clear()
        try:
            error = await self._outcome
        finally:
            self._stopped = True
            await _cancel(self._tasks)
        if error is not None:
            raise error

    async def stop(self, deadline_s: float) -> bool:
        """Let steps under way finish for up to `deadline_s` seconds, cancel what is left, wait for it. Idempotent. Whether all
        steps came to their end, and none had failed."""
        self._stopped = True
        for worker in self._workers:
            worker.finish()
        names = {worker.name for worker in self._workers}
        steps = [task for task, name in self._tasks.items() if name in names and task is not asyncio.current_task()]
        late: set[asyncio.Task[Any]] = set()
        if steps:
            _, late = await asyncio.wait(steps, timeout=deadline_s)
        await _cancel(self._tasks)
        if self._outcome is not None and not self._outcome.done():
            self._outcome.set_result(None)
        failed = self._outcome is not None and self._outcome.done() and self._outcome.result() is not None
        return self._outcome is not None and not late and not failed
