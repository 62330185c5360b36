"""When a step is committed: by a transaction, by word, or by what arrives in it.

Owns that decision, which step a write goes to, and that what is committed does not change. Does not own the commit itself
(open_steps.py) nor what is written (filesystem.py).
"""

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from forebay.checkpoint_id import SCHEME
from forebay.fsspec.errors import NotSupported, StepCommitted, host_errors
from forebay.fsspec.open_steps import CommitOptions, OpenStep, complete_session
from forebay.fsspec.paths import Place
from forebay.fsspec.reading import ReadingFileSystem
from forebay.types import CommitReceipt

COMMIT_MODES = ("auto", "close", "explicit")
LAST_NAME = ".metadata"  # what DCP writes last, once all else is there


class CommittingFileSystem(ReadingFileSystem):
    """What ForebayFileSystem knows of commits."""

    _commit_mode: str
    _replace: bool
    _wait: str
    _timeout_s: float | None
    _streams: int
    _together: threading.local

    @host_errors()
    def commit(
        self,
        path: str,
        *,
        metadata: Mapping[str, Any] | None = None,
        wait: str | None = None,
        timeout: float | None = None,
        final: bool = False,
    ) -> CommitReceipt:
        """Commit the step that `path` is, or lies in: from here on it is complete and does not change.

        `metadata`, `wait`, `timeout` and `final` are as in CheckpointWriter.commit(); by default as the instance has them.
        Raises FileNotFoundError where nothing of it is open here, and where a file of it is not finished (StepIncomplete, which
        names it), StepCommitted where another has committed it meanwhile, ConnectionError, TimeoutError. A step whose commit
        fails stays open.
        """
        step = self._steps.open(*self._place(path).key)
        options = CommitOptions(metadata, final, self._lane, self._streams)
        return self._commit(step, options, wait, timeout, beside_writers=False)

    @host_errors()
    def discard(self, path: str) -> None:
        """Drop the open step that `path` is, or lies in. Raises FileNotFoundError."""
        self._steps.close(self._steps.open(*self._place(path).key))

    def uncommitted(self) -> list[str]:
        """The steps that this process has written to and not committed, as RUN/STEP."""
        return sorted(str(step).removeprefix(SCHEME) for step in self._steps.visible())

    def _commit(
        self,
        step: OpenStep,
        options: CommitOptions | None = None,
        wait: str | None = None,
        timeout: float | None = None,
        *,
        beside_writers: bool,
    ) -> CommitReceipt:
        began_s = time.monotonic()
        options = options or CommitOptions(lane=self._lane, streams=self._streams)
        steps = self._steps
        with step.lock:  # who waits for it finds the step open, or closed as a whole
            receipt = step.commit(self._client, options, beside_writers=beside_writers)
            if self._commit_mode == "close" and step.supersedes is not None:
                steps.own[step.run, step.step] = step.supersedes
            steps.close(step)
        level = self._wait if wait is None else wait
        if level in ("", "cache"):
            return receipt
        timeout = self._timeout_s if timeout is None else timeout
        left_s = None if timeout is None else max(0.0, timeout - (time.monotonic() - began_s))
        self._client.wait(step.run, step.step, level, left_s)
        return dataclasses.replace(receipt, level=level)

    def _changed(self, step: OpenStep, arrived: str = "") -> None:
        """A finished file arrived in a step, or one left it: commit, where that is due."""
        batch: dict[OpenStep, None] | None = getattr(self._together, "steps", None)
        if self._intrans:
            return
        if self._commit_mode == "close":
            if batch is not None:
                batch[step] = None
            elif step.tree.files:
                self._commit(step, beside_writers=True)
            else:
                self._drop(step)
        elif self._commit_mode == "auto" and arrived == LAST_NAME:
            if (ranks := _ranks()) > 1:
                raise NotSupported(
                    f"{step}: {LAST_NAME} is there, but this job has {ranks} ranks, and what the others wrote is not: save "
                    "with forebay.torch.ForebayStorageWriter; or fs.commit(), where this rank alone wrote the step"
                )
            self._commit(step, beside_writers=False)

    def _drop(self, step: OpenStep) -> None:
        """The last file of a step left it, where each change is committed."""
        if step.supersedes is not None:
            self._client.delete(step.run, step.step)
            self._steps.own.pop((step.run, step.step), None)
        if not step.visible or step.supersedes is not None:
            self._steps.close(step)

    @contextlib.contextmanager
    def _one_commit(self) -> Iterator[None]:
        """What changes in the block is committed once, at its end, where each change is; not after an error."""
        if getattr(self._together, "steps", None) is not None:
            yield
            return
        steps: dict[OpenStep, None] = {}
        self._together.steps = steps
        try:
            with host_errors():
                yield
        finally:
            self._together.steps = None
        with host_errors():
            for step in steps:
                if not step.ended:
                    self._changed(step)

    def _writable(self, place: Place) -> OpenStep:
        """The open step of a place; it is opened where the contract lets it be written. Raises StepCommitted, BadPath,
        Unavailable."""
        run, number = place.key
        steps = self._steps
        while (step := steps.get(run, number)) is None:
            complete = complete_session(self._client, run, number)
            with steps.lock:
                if steps.get(run, number) is None:
                    steps.steps[run, number] = self._opened(run, number, complete)
        with step.lock:
            if step.ended:  # by a commit that was under way
                return self._writable(place)
        if self._intrans:
            self.transaction.touch(step)
        return step

    def _opened(self, run: str, number: int, complete: str | None) -> OpenStep:
        if complete is None:
            return OpenStep(run, number)
        if self._commit_mode == "close" and self._steps.own.get((run, number)) == complete:
            return OpenStep(run, number, complete, self._view(run, number)[1].copy())
        if self._replace:
            return OpenStep(run, number, complete)
        raise StepCommitted(
            f"{SCHEME}{run}/{number} is committed, and its files do not change; write another step, or, with the storage "
            f"option replace=True, this one anew session={complete}"
        )


def _ranks() -> int:
    """Of the job that this process belongs to."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_world_size())
    said = os.environ.get("WORLD_SIZE", "")
    return int(said) if said.isascii() and said.isdigit() else 1
