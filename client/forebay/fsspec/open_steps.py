"""Steps that this process is writing: what is in them so far, and their commit.

Owns what a commit waits for and refuses, and that all instances of the file system in a process see the same open steps. Does
not own when a step is committed (filesystem.py). Nothing of an open step is at the gateway: its session begins with its commit,
so that a step that is given up leaves nothing behind.
"""

import atexit
import logging
import os
import threading
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ulid import ULID

from forebay.api import Client
from forebay.checkpoint_id import SCHEME
from forebay.directories import in_parallel
from forebay.errors import NotFound
from forebay.fsspec.contents import Content
from forebay.fsspec.errors import BadPath, FileMissing, StepCommitted, StepIncomplete
from forebay.fsspec.paths import step_path
from forebay.fsspec.tree import Tree
from forebay.session import launch_session
from forebay.types import CommitReceipt, Missing
from forebay.writer import SMALL_BYTES_MAX, CheckpointWriter

_log = logging.getLogger("forebay")


@dataclass(frozen=True, slots=True)
class CommitOptions:
    """How a step is sent and committed: as in Client.checkpoint() and CheckpointWriter.commit()."""

    metadata: Mapping[str, Any] | None = None
    final: bool = False
    lane: str = "auto"
    streams: int = 4


class OpenStep:
    """One step that is being written. All that changes it holds `lock`."""

    def __init__(self, run: str, step: int, supersedes: str | None = None, tree: Tree[Content] | None = None) -> None:
        """`supersedes` is the session that is complete now and may be replaced."""
        self.run = run
        self.step = step
        self.supersedes = supersedes
        self.tree: Tree[Content] = Tree() if tree is None else tree
        self.made = False  # by mkdir: it is there though it may be empty
        self.ended = False
        self.lock = threading.RLock()
        self.failed: dict[str, str] = {}  # files whose writing failed, and why
        self._writing: Counter[str] = Counter()

    def __str__(self) -> str:
        return SCHEME + step_path(self.run, self.step)

    @property
    def visible(self) -> bool:
        """Whether this process sees it."""
        return not self.ended and (self.made or bool(self.tree))

    @property
    def is_written(self) -> bool:
        """Whether a file of it is open for writing."""
        return any(self._writing.values())

    def begin(self, name: str) -> None:
        """A file is being written."""
        with self.lock:
            self.check_open()
            self.tree.check_can_hold(name)
            self._writing[name] += 1

    def end(self, name: str, content: Content | None, reason: str = "") -> None:
        """It is written, or was given up for a reason: then the step cannot be committed until the name was written again, or
        removed. Raises as put()."""
        with self.lock:
            self._writing[name] -= 1
            if content is None:
                self.failed[name] = reason
                return
            try:
                self.put(name, content)
            except Exception as error:
                self.failed[name] = f"could not be kept ({error})"
                raise

    def put(self, name: str, content: Content) -> None:
        """A file, in place of what has the name. Raises StepCommitted, IsADirectoryError, NotADirectoryError."""
        with self.lock:
            self.check_open()
            self.tree.add(name, content)
            self.failed.pop(name, None)

    def remove(self, name: str) -> None:
        """Take a file out, or what is left of one whose writing failed. Raises FileMissing."""
        with self.lock:
            self.check_open()
            if self.failed.pop(name, None) is None or name in self.tree.files:
                self.tree.remove(name)

    def check_open(self) -> None:
        """Raise StepCommitted once it was committed or given up."""
        if self.ended:
            raise StepCommitted(f"{self}: the step was committed or given up meanwhile")

    def commit(self, client: Client, options: CommitOptions, *, beside_writers: bool) -> CommitReceipt:
        """Send all files as writer 0 of 1 of a session of their own, and commit it; the step ends here.

        A step that fails stays open as it was. `beside_writers`: files that are still being written, or failed, are left out
        rather than refused. Raises StepIncomplete, StepCommitted, BadPath, and as CheckpointWriter.put() and commit().
        """
        with self.lock:
            self.check_open()
            if not beside_writers:
                self._check_whole()
            if not self.tree.files:
                raise BadPath(f"{self}: nothing was written, so there is nothing to commit")
            self._check_others(client)
            launch = launch_session()
            session = f"{launch}-{ULID()}" if launch else str(ULID())
            with client.checkpoint(self.run, self.step, session=session, lane=options.lane) as part:
                _put_all(part, self.tree.files, options.streams)
                receipt = part.commit(options.metadata, final=options.final)
            self.ended = True
            self.supersedes = session
            return receipt

    def _check_whole(self) -> None:
        lacking = {name: "is still open for writing" for name, count in self._writing.items() if count} | self.failed
        if lacking:
            said = "; ".join(f"{name!r} {why}" for name, why in list(lacking.items())[:5])
            raise StepIncomplete(
                f"{self} cannot be committed: {said}. Write these again, or remove them",
                missing=[Missing(0, tuple(lacking), "open")],
            )

    def _check_others(self, client: Client) -> None:
        complete = complete_session(client, self.run, self.step)
        if complete is not None and complete != self.supersedes:
            raise StepCommitted(f"{self} was committed by another meanwhile session={complete}")


def complete_session(client: Client, run: str, step: int) -> str | None:
    """The session that is complete at the gateway, None where none is. Raises Unavailable."""
    try:
        found = client._describe(run, step)
    except NotFound:
        return None
    return found.session if found.complete else None


def _put_all(part: CheckpointWriter, files: Mapping[str, Content], streams: int) -> None:
    small = {name: content.data() for name, content in files.items() if content.size <= SMALL_BYTES_MAX}
    large = [(name, content.data()) for name, content in files.items() if content.size > SMALL_BYTES_MAX]
    if small:
        part.put_many(small)
    in_parallel(lambda item: part.put(*item), large, streams)


class OpenSteps:
    """Those of one process at one gateway."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.steps: dict[tuple[str, int], OpenStep] = {}
        self.own: dict[tuple[str, int], str] = {}  # the sessions of steps that are committed anew with each file
        self.prefixes: set[str] = set()  # directories above steps, made by mkdir

    def get(self, run: str, step: int) -> OpenStep | None:
        """The open step, None where there is none."""
        return self.steps.get((run, step))

    def visible(self) -> list[OpenStep]:
        """All that the process sees."""
        return [step for step in list(self.steps.values()) if step.visible]

    def close(self, step: OpenStep) -> None:
        """It is committed, or given up."""
        with self.lock:
            step.ended = True
            if self.steps.get((step.run, step.step)) is step:
                del self.steps[step.run, step.step]

    def open(self, run: str, step: int) -> OpenStep:
        """The open step. Raises FileMissing."""
        found = self.get(run, step)
        if found is None:
            raise FileMissing(f"{SCHEME}{step_path(run, step)}: nothing of this step is being written in this process")
        return found


_by_gateway: dict[tuple[str, ...], OpenSteps] = {}
_lock = threading.Lock()


def of_gateway(targets: tuple[str, ...]) -> OpenSteps:
    """The open steps of this process at the gateway that listens there."""
    with _lock:
        return _by_gateway.setdefault(targets, OpenSteps())


def _forget() -> None:
    # In a forked child: what its parent has open is the parent's.
    global _by_gateway, _lock
    _by_gateway, _lock = {}, threading.Lock()


def _warn() -> None:
    left = [step for steps in _by_gateway.values() for step in steps.visible() if step.tree.files]
    for step in left:
        _log.warning(
            "%s was written (%d files) and never committed: nothing of it was saved. Use `with fs.transaction`, fs.commit(), "
            "or the storage option commit='close'",
            step,
            len(step.tree.files),
        )


os.register_at_fork(after_in_child=_forget)
atexit.register(_warn)
