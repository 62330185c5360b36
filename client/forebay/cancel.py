"""Ending an operation from outside: the RPCs under way and the sleeps between attempts.

Owns the scope that an operation runs in; AsyncClient and parallel restores make one, and every RPC and pause below it obeys.
Without a scope nothing can be cancelled and nothing costs anything.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from forebay.errors import ForebayError


class Cancelled(ForebayError):
    """The operation was ended from outside. Seen only by code that ended it."""

    kind = "cancelled"


class Cancellable(Protocol):
    """What an RPC under way offers."""

    def cancel(self) -> object:
        """End it."""


class Scope:
    """Everything that one operation has under way. Thread-safe; one made inside another ends with it, and has to be closed."""

    def __init__(self) -> None:
        self._parent = _current.get()
        self._lock = threading.Lock()
        self._calls: dict[int, Cancellable] = {}
        self._ended = threading.Event()
        if self._parent is not None:
            self._parent.add(self)

    def close(self) -> None:
        """The operation is over: an outer scope forgets this one."""
        if self._parent is not None:
            self._parent.remove(self)

    @property
    def cancelled(self) -> bool:
        """Whether cancel() was called."""
        return self._ended.is_set()

    def cancel(self) -> None:
        """End what is under way and all that would begin."""
        with self._lock:
            self._ended.set()
            calls = list(self._calls.values())
        for call in calls:
            call.cancel()

    def add(self, call: Cancellable) -> None:
        """Watch a call; one that comes too late is ended at once."""
        with self._lock:
            self._calls[id(call)] = call
            late = self._ended.is_set()
        if late:
            call.cancel()

    def remove(self, call: Cancellable) -> None:
        """The call is over."""
        with self._lock:
            self._calls.pop(id(call), None)

    def sleep(self, delay_s: float) -> None:
        """Sleep, or raise Cancelled as soon as the scope ends."""
        if self._ended.wait(delay_s):
            raise Cancelled("cancelled")

    @contextmanager
    def entered(self) -> Iterator["Scope"]:
        """Make this the scope of the calls below."""
        token = _current.set(self)
        try:
            yield self
        finally:
            _current.reset(token)


_current: ContextVar[Scope | None] = ContextVar("forebay_cancel_scope", default=None)


def check() -> None:
    """Raise Cancelled where the current scope has ended."""
    scope = _current.get()
    if scope is not None and scope.cancelled:
        raise Cancelled("cancelled")


def sleep(delay_s: float) -> None:
    """Sleep inside the current scope."""
    scope = _current.get()
    if scope is None:
        time.sleep(delay_s)
    else:
        scope.sleep(delay_s)


def in_scope() -> bool:
    """Whether something may end this operation from outside."""
    return _current.get() is not None


@contextmanager
def watching(call: Cancellable) -> Iterator[None]:
    """Let the current scope end `call`; on the way out the call is ended in any case (a no-op where it has finished)."""
    scope = _current.get()
    if scope is not None:
        scope.add(call)
    try:
        yield
    finally:
        if scope is not None:
            scope.remove(call)
        call.cancel()
