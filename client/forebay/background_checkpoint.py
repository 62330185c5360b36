"""Whole checkpoints in the background: put and commit return at once, and the trainer goes on.

Owns the commit's life: puts settled, part committed, then perhaps a level waited for; and what becomes of its error: it is
logged when it happens, raised by the handle, else by the client's next async_checkpoint() or close(). Does not own puts
(background.py) or the commit itself (writer.py).
"""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextvars import Context
from types import TracebackType
from typing import Any

from forebay import cancel
from forebay.background import Background
from forebay.connection import Connection
from forebay.errors import DeadlineExceeded, ForebayError, InvalidArgument
from forebay.pending import Pending, finished
from forebay.types import CommitReceipt, Receipt
from forebay.waiting import wait_for
from forebay.writer import CheckpointWriter, metadata_json

_log = logging.getLogger("forebay")


class PendingCommit:
    """What a commit in the background will come to. Thread-safe."""

    def __init__(self, doing: str) -> None:
        self._doing = doing
        self._pid = os.getpid()
        self._seen = False
        self._scope = Context().run(cancel.Scope)
        self._outcome: Future[CommitReceipt] = Future()
        self.durable: Future[None] = Future()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._outcome.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Its error once it has ended, None where it went well. Raises DeadlineExceeded after `timeout` seconds."""
        if self._pid != os.getpid():
            raise InvalidArgument(f"{self._doing}: it belongs to the process that this one was forked from")
        if not finished([self._outcome], timeout):
            raise DeadlineExceeded(f"{self._doing}: still under way timeout_s={timeout}")
        self._seen = True
        return self._outcome.exception()

    def result(self, timeout: float | None = None) -> CommitReceipt:
        """What commit would have returned. Raises what it would have raised; then nothing of the part is kept, unless only the
        level was not reached in time. Raises DeadlineExceeded after `timeout` seconds: it goes on."""
        if (error := self.exception(timeout)) is not None:
            raise error
        return self._outcome.result()

    def add_done_callback(self, act: Callable[["PendingCommit"], object]) -> None:
        """Call `act` with this handle once it has ended, on whatever thread ends it; at once where it has."""
        self._outcome.add_done_callback(lambda _: act(self))

    def failed(self) -> BaseException | None:
        """Its error so far, as a callback asks: whoever waits for it, or calls next, is told all the same."""
        return self._outcome.exception() if self._outcome.done() else None

    def wait(self, timeout: float | None = None) -> None:
        """Return once it has ended, well or not. Raises DeadlineExceeded after `timeout` seconds."""
        if not finished([self._outcome], timeout):
            raise DeadlineExceeded(f"{self._doing}: still under way timeout_s={timeout}")

    def unseen(self) -> BaseException | None:
        """Its error, where it has failed and nobody has been told."""
        return None if self._seen or not self.done() else self._outcome.exception()

    def tell(self) -> BaseException:
        """The error, saying whose it is; from here on it has been told."""
        self._seen = True
        error = self._outcome.exception()
        if not isinstance(error, ForebayError):
            return error or ForebayError(f"{self._doing}: failed")
        told = type(error)(f"{self._doing}: {error.message}", retry_after_s=error.retry_after_s, missing=error.missing)
        told.__cause__ = error
        return told

    def over(self) -> bool:
        """Whether nothing of it is under way any more."""
        return self.done()

    def leave(self) -> None:
        """Stop waiting for a level beyond the commit."""
        self._scope.cancel()

    def succeed(self, receipt: CommitReceipt) -> None:
        """It has reached what was asked for."""
        self._outcome.set_result(receipt)

    def fail(self, error: BaseException) -> None:
        """It has not. Logged as well: a job that ends now makes no further call that could raise it."""
        _log.warning("%s: failed: %s", self._doing, error)
        self._outcome.set_exception(error)

    def reach(
        self, connection: Connection, part: CheckpointWriter, level: str, timeout_s: float | None, done: CommitReceipt
    ) -> None:
        """Wait for a level, the part being committed."""
        try:
            with self._scope.entered():
                wait_for(connection, part.run, part.step, level, timeout_s, session=part.session)
        except cancel.Cancelled:
            self._seen = True  # whoever closes the client knows
            self._outcome.set_exception(
                cancel.Cancelled(f"{self._doing}: committed, and the client was closed before {level!r} was reached")
            )
        except BaseException as error:  # noqa: BLE001 - the handle and the next call raise it
            self.fail(error)
        else:
            self.succeed(dataclasses.replace(done, level=level))


class BackgroundCheckpoint:
    """One writer's part whose puts and commit all run in the background. Made by Client.async_checkpoint.

    Leaving the block without commit() aborts the part; leaving it after commit() does not wait.
    """

    def __init__(self, connection: Connection, background: Background, part: CheckpointWriter) -> None:
        self._connection = connection
        self._background = background
        self._part = part
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._commit: PendingCommit | None = None

    @property
    def run(self) -> str:
        """The run's name."""
        return self._part.run

    @property
    def step(self) -> int:
        """The step."""
        return self._part.step

    @property
    def session(self) -> str:
        """The session that this part belongs to."""
        return self._part.session

    @property
    def receipts(self) -> Mapping[str, Receipt]:
        """What is durable so far, by name."""
        return self._part.receipts

    def put(self, name: str, data: Any) -> Pending[Receipt]:
        """As CheckpointWriter.put with background=True."""
        self._check_open("put")
        return self._part.put(name, data, background=True)

    def put_many(self, shards: Mapping[str, Any]) -> Pending[list[Receipt]]:
        """As CheckpointWriter.put_many with background=True."""
        self._check_open("put_many")
        return self._part.put_many(shards, background=True)

    def commit(
        self,
        metadata: Mapping[str, Any] | None = None,
        wait: str = "cache",
        timeout: float | None = None,
        *,
        final: bool = False,
    ) -> PendingCommit:
        """Commit once every put is durable; returns at once. Arguments as CheckpointWriter.commit. Repeated: the same handle.

        A put that has failed already is raised here. A commit that fails drops the part.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        text = metadata_json(metadata or {})  # now: the caller may change it
        with self._lock:
            if self._commit is not None:
                return self._commit
            self._part.check_background()
            commit = PendingCommit(f"commit of {self.run}/{self.step} in the background")
            self._background.commit(commit, lambda: self._carry_out(commit, text, wait, deadline_s, final))
            self._commit = commit
            return commit

    def abort(self) -> int:
        """Drop what was put; returns how many shards. No effect after commit()."""
        with self._lock:
            committing = self._commit is not None
        return 0 if committing else self._part.abort()

    def __enter__(self) -> "BackgroundCheckpoint":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        # A child that was forked inside the block leaves its parent's part alone.
        if self._commit is None and self._pid == os.getpid():
            self._part.give_up()

    def _carry_out(self, commit: PendingCommit, text: str, wait: str, deadline_s: float | None, final: bool) -> None:
        try:
            receipt = self._part.commit_json(text, deadline_s, final=final)
        except BaseException as error:  # noqa: BLE001 - the handle and the next call raise it
            with contextlib.suppress(Exception):
                self._part.give_up()
            commit.fail(error)
        else:
            self._go_on(commit, receipt, wait, deadline_s)
        finally:
            commit.durable.set_result(None)

    def _go_on(self, commit: PendingCommit, receipt: CommitReceipt, wait: str, deadline_s: float | None) -> None:
        if wait in ("", "cache"):
            commit.succeed(receipt)
            return
        remaining_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        # A thread of its own, which an exiting process does not wait for: tiers may take as long as they like.
        threading.Thread(
            target=commit.reach,
            args=(self._connection, self._part, wait, remaining_s, receipt),
            name="forebay-wait",
            daemon=True,
        ).start()

    def _check_open(self, verb: str) -> None:
        if self._commit is not None:
            raise InvalidArgument(f"{verb}: the commit of {self.run}/{self.step} has begun")
