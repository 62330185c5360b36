"""Threads under an event loop: where the operations of an AsyncClient run.

Owns the rule that a cancelled operation ends its RPCs and returns only after its thread has let go of the caller's data.
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from forebay import cancel

# Each operation under way takes one, a wait as long as it lasts.
OPERATIONS_MAX = 64

_Result = TypeVar("_Result")


class Threads:
    """Where an AsyncClient's operations run; started at first use."""

    def __init__(self) -> None:
        self._pool: ThreadPoolExecutor | None = None

    async def run(self, act: Callable[..., _Result], *args: Any, **kwargs: Any) -> _Result:
        """Run `act` on a thread. Cancelled, end its RPCs and return only when the thread is done with the caller's data."""
        return await self.run_in(cancel.Scope(), partial(act, *args, **kwargs))

    async def run_in(self, scope: cancel.Scope, act: Callable[[], _Result]) -> _Result:
        """run() in a scope that may hold more than this one act."""
        if self._pool is None:
            self._pool = ThreadPoolExecutor(OPERATIONS_MAX, thread_name_prefix="forebay-async")

        def inside() -> _Result:
            with scope.entered():
                return act()

        future = asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, inside)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            scope.cancel()
            await _settled(future)
            raise

    def close(self) -> None:
        """Wait for the threads to end."""
        if self._pool is not None:
            self._pool.shutdown()


async def _settled(future: asyncio.Future[Any]) -> None:
    while not future.done():
        try:
            await asyncio.wait([future])
        except asyncio.CancelledError:
            continue  # asked again; the answer is the same
    if not future.cancelled():
        future.exception()  # seen, so that it is not reported as lost
