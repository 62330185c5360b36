"""A bounded number of acts at a time inside one transfer.

Owns the tasks it starts: leaving the block waits for all of them, and after a failure no more begin and the rest are cancelled.
Does not own the bound across transfers.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any


class Window:
    """`async with Window(width) as window: await window.add(act())`. The first failure is raised by `add` or at the end."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._tasks: set[asyncio.Task[Any]] = set()

    async def add(self, act: Coroutine[Any, Any, Any]) -> None:
        """Start `act` once fewer than `width` are under way."""
        try:
            while len(self._tasks) >= self._width:
                await self._reap(asyncio.FIRST_COMPLETED)
        except BaseException:
            act.close()
            raise
        self._tasks.add(asyncio.create_task(act))

    async def _reap(self, until: str) -> None:
        done, self._tasks = await asyncio.wait(self._tasks, return_when=until)
        failed = [task for task in done if task.cancelled() or task.exception() is not None]
        for task in failed:
            task.result()

    async def __aenter__(self) -> "Window":
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            while error is None and self._tasks:
                await self._reap(asyncio.FIRST_EXCEPTION)
        finally:
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.gather(*self._tasks, return_exceptions=True)
