"""Handles of what is still under way in the background.

Owns waiting for futures inside a cancel scope, and how their ends look to a caller. Does not own what is under way.
"""

import os
import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from typing import Generic, TypeVar

from forebay import cancel
from forebay.errors import DeadlineExceeded, InvalidArgument
from forebay.types import Receipt

# How soon a cancelled scope is noticed, and a signal that another thread was given: that wakes no lock the main one waits for.
_LOOK_S = 0.1

_Value = TypeVar("_Value")


class Pending(Generic[_Value]):
    """What a put in the background will come to. Thread-safe."""

    def __init__(self, doing: str, futures: Sequence["Future[dict[str, Receipt]]"], value: Callable[[], _Value]) -> None:
        self._doing = doing
        self._futures = futures
        self._value = value
        self._pid = os.getpid()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return all(future.done() for future in self._futures)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Its error once it has ended, None where it went well. Raises DeadlineExceeded after `timeout` seconds."""
        if self._pid != os.getpid():
            raise InvalidArgument(f"{self._doing}: it belongs to the process that this one was forked from")
        if not finished(self._futures, timeout):
            raise DeadlineExceeded(f"{self._doing}: still under way timeout_s={timeout}")
        return next((error for future in self._futures if (error := _error(future, self._doing)) is not None), None)

    def result(self, timeout: float | None = None) -> _Value:
        """What the put would have returned, once it is durable. Raises what it would have raised, and DeadlineExceeded."""
        if (error := self.exception(timeout)) is not None:
            raise error
        return self._value()


def finished(futures: "Collection[Future[_Value]]", timeout_s: float | None, *, when: str = FIRST_EXCEPTION) -> bool:
    """Wait for all futures, or for the first by `when`; False where time is over. Obeys the current cancel scope."""
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    while True:
        cancel.check()
        remaining_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        slice_s = _LOOK_S if remaining_s is None else min(_LOOK_S, remaining_s)
        done, left = wait(futures, slice_s, return_when=when)
        if not left or (when == FIRST_COMPLETED and done) or (when == FIRST_EXCEPTION and any(map(_failed, done))):
            return True
        if remaining_s == slice_s:
            return False


def _failed(future: "Future[_Value]") -> bool:
    return future.cancelled() or future.exception() is not None


def _error(future: "Future[_Value]", doing: str) -> BaseException | None:
    if not future.done():
        return None
    return cancel.Cancelled(f"{doing}: the part was aborted") if future.cancelled() else future.exception()
