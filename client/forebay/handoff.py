"""forebay.directory: a checkpoint for libraries that know directories only (Orbax, DeepSpeed, Megatron, NeMo).

    with forebay.directory(run, step) as path:                        # an empty directory; committed as the step at the end
        checkpointer.save(path / "state", state)
    with forebay.directory(run, "latest", mode="r") as path:          # the files of a complete step, for as long as the block
        state = checkpointer.restore(path / "state")

Tested with Orbax itself. Of DeepSpeed and Megatron only the layout that their ranks write is tested, with files of other bytes.

Owns when such a directory is handed over, and that its files stay until they are acknowledged. Does not own where it lies
(scratch.py) nor which files can be shards (directories.py).
"""

import contextlib
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from forebay import directories
from forebay.api import Client, checked_streams
from forebay.errors import ForebayError, InvalidArgument, NotFound
from forebay.progress import byte_counter
from forebay.scratch import Scratch
from forebay.types import CommitReceipt, RestoreSummary, SaveSummary
from forebay.waiting import check_level
from forebay.writer import CheckpointWriter, metadata_json

_DESCRIPTORS = Path("/proc/self/fd")
_SHOWN = 3  # names in a message


def directory(
    run: str,
    step: int | str,
    *,
    mode: str = "w",
    writers: int = 1,
    writer: int = 0,
    session: str | None = None,
    metadata: Mapping[str, Any] | None = None,
    wait: str = "cache",
    timeout: float | None = None,
    final: bool = False,
    only: Callable[[str], bool] | None = None,
    source: str = "auto",
    under: str | os.PathLike[str] | None = None,
    streams: int = directories.STREAMS,
    lane: str = "auto",
    address: str | None = None,
    client: Client | None = None,
) -> "Directory":
    """A directory that becomes a checkpoint, or holds one: a context manager that gives its path. One block each.

    With mode "w", the default, the directory is empty. When the block ends, every file in it is put as a shard under its path,
    and committed as `writer`'s part of the step; `session`, `metadata`, `wait`, `timeout`, `final` and `lane` are as in
    Client.checkpoint() and commit(). Each rank has a directory of its own, also on one host, and hands over what it wrote
    there: a name belongs to one writer, and the second one's is AlreadyExists, whatever it holds. Through gateways of several
    nodes it is found when their parts meet on a tier: the checkpoint is then never complete, and whoever waits for a tier, of
    writer 0 at once, gets Incomplete with the name. A rank of several may have written nothing.
    Where the block raises, nothing was sent and the files are removed. Where the hand-over fails, nothing becomes visible, the
    files are kept, and the error says where: they are yours to save again and to remove.

    With mode "r" it holds the files of a complete step, or of "latest", each byte checked; `only` chooses them by name, and
    `source` is as in open(). What is changed in it is not saved. It goes when the block ends, so load what you need inside.

    Files come back with their names and bytes, not with their modes, times or links: a link to a file inside is saved as that
    file. A directory without a file leaves no trace: put a file into it where it must come back. Sockets, links that lead out,
    files that this process still has open for writing, and files that change while they are put are InvalidArgument.

    The directory lies below `under`, which must have room for all files (they are in the gateway's cache a second time, until
    the hand-over is acknowledged); by default below that of the temporary directory and /var/tmp which has most space free,
    not counting file systems in memory. What a killed process leaves is removed when the next directory is made there.

    `client` is used where given, else one is made for `address`. Raises InvalidArgument; entering raises what the wait level or
    the restore does, OSError, and ForebayError where there is too little space.
    """
    place = _Place(client, address, under, checked_streams(streams))
    if mode == "w":
        if only is not None or source != "auto":
            raise InvalidArgument("`only` and `source` are for mode 'r'")
        if not isinstance(step, int):
            raise InvalidArgument(f"step {step!r} cannot be written, only a number; pass mode='r' to read the latest")
        options = {"writers": writers, "writer": writer, "session": session, "lane": lane}
        commit = {"metadata": metadata, "wait": wait, "timeout": timeout, "final": final}
        metadata_json(metadata or {})
        return _Written(place, run, step, options, commit)
    if mode != "r":
        raise InvalidArgument(f"mode must be 'w' or 'r', not {mode!r}")
    if (writers, writer, session, metadata, wait, timeout, final) != (1, 0, None, None, "cache", None, False):
        raise InvalidArgument("mode 'r' saves nothing: what is said about the save has no meaning")
    return _Restored(place, run, step, only, source, lane)


@dataclass(frozen=True, slots=True)
class _Place:
    """What both kinds stand on."""

    client: Client | None
    address: str | None
    under: str | os.PathLike[str] | None
    streams: int


class Directory(ABC):
    """What directory() gives. `summary` says what was saved, or restored; `step` is a number once it is known."""

    def __init__(self, place: _Place, run: str, step: int | str) -> None:
        self._place = place
        self._scratch: Scratch | None = None
        self._ends = contextlib.ExitStack()
        self._pid = os.getpid()
        self.run = run
        self.step = step

    def __enter__(self) -> Path:
        if self._scratch is not None:
            raise InvalidArgument("a directory is for one block: ask for another one")
        self._pid = os.getpid()
        with contextlib.ExitStack() as stack:
            client = self._place.client or stack.enter_context(Client(self._place.address))
            self._scratch = self._begin(client)
            self._ends = stack.pop_all()
        return self._scratch.path

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pid != os.getpid():  # a child that was forked inside the block leaves its parent's files alone
            return
        assert self._scratch is not None
        with self._ends:
            try:
                if error is None:
                    self._end(self._scratch)
            finally:
                self._scratch.remove()  # unless _end() has kept it

    @abstractmethod
    def _begin(self, client: Client) -> Scratch:
        """The directory, as the block finds it."""

    def _end(self, scratch: Scratch) -> None:
        """The block has ended without an error."""


class _Written(Directory):
    """Mode "w"."""

    def __init__(self, place: _Place, run: str, step: int, part: Mapping[str, Any], commit: Mapping[str, Any]) -> None:
        super().__init__(place, run, step)
        self._options = part
        self._commit = dict(commit)
        self._part: CheckpointWriter | None = None
        self.summary: SaveSummary | None = None

    def _begin(self, client: Client) -> Scratch:
        part = client.checkpoint(self.run, int(self.step), **self._options)
        check_level(client._connection, part.run, part.step, self._commit["wait"])  # not after an hour of writing
        self._client, self._part = client, part
        return Scratch(self._place.under)

    def _end(self, scratch: Scratch) -> None:
        started_s = time.monotonic()
        part, wait, timeout = self._part, self._commit["wait"], self._commit["timeout"]
        assert part is not None
        try:
            receipt = self._hand_over(part, scratch.path)
        except BaseException as error:
            if _holds_files(scratch.path):  # else there is nothing to come back for
                _say_kept(error, scratch.keep())
            raise
        scratch.remove()  # acknowledged: waiting for more needs no second copy
        if wait not in ("", "cache"):
            left_s = None if timeout is None else max(0.0, timeout - (time.monotonic() - started_s))
            receipt = part.commit(wait=wait, timeout=left_s)
        self.summary = SaveSummary(
            run=part.run,
            step=part.step,
            session=part.session,
            writer=self._options["writer"],
            shards=receipt.shard_count,
            size=receipt.size,
            level=receipt.level,
            checkpoint_complete=receipt.checkpoint_complete,
            elapsed_s=time.monotonic() - started_s,
            transient=receipt.transient,
        )

    def _hand_over(self, part: CheckpointWriter, path: Path) -> CommitReceipt:
        _refuse_open_files(path)
        empty = self._options["writers"] > 1 and all(each.is_dir() for each in path.rglob("*"))
        files = {} if empty else directories.walk(path)
        before = _stamps(path)
        total = sum(size for _, size in files.values())
        with part:
            with byte_counter(f"save {part.run}/{part.step}", total, self._client._progress) as count:
                directories.put_files(part, files, self._place.streams, count)
            if changed := sorted(name for name, _ in before.items() ^ _stamps(path).items()):
                shown = ", ".join(repr(name) for name in dict.fromkeys(changed[: 2 * _SHOWN]))
                raise InvalidArgument(f"files changed while they were put, which must not be: {shown}")
            return part.commit(self._commit["metadata"], "cache", self._commit["timeout"], final=self._commit["final"])


class _Restored(Directory):
    """Mode "r"."""

    def __init__(
        self, place: _Place, run: str, step: int | str, only: Callable[[str], bool] | None, source: str, lane: str
    ) -> None:
        super().__init__(place, run, step)
        self._only = only
        self._source = source
        self._lane = lane
        self.summary: RestoreSummary | None = None

    def _begin(self, client: Client) -> Scratch:
        started_s = time.monotonic()
        self.step = client.step_of(self.run, self.step)
        reader = client.open(self.run, self.step, source=self._source, lane=self._lane)
        shards = [shard for shard in reader.shards() if self._only is None or self._only(shard.name)]
        if not shards:
            raise NotFound(f"`only` chose none of the {len(reader.names())} files of {self.run}/{self.step}")
        size = sum(shard.size for shard in shards)
        scratch = Scratch(self._place.under, size)
        try:
            with contextlib.closing(directories.Target(scratch.path, durable=False)) as target:
                with byte_counter(f"restore {self.run}/{self.step}", size, client._progress) as count:
                    directories.restore_files(reader, target, shards, self._place.streams, count)
                target.publish()
        except BaseException:
            scratch.remove()
            raise
        session, took_s = reader.checkpoint.session, time.monotonic() - started_s
        self.summary = RestoreSummary(self.run, self.step, session, len(shards), size, str(scratch.path), took_s)
        return scratch


def _holds_files(root: Path) -> bool:
    """Whether there is anything but directories, as far as can be seen."""
    try:
        return any(path.is_symlink() or not path.is_dir() for path in root.rglob("*"))
    except OSError:
        return True


def _stamps(root: Path) -> dict[str, tuple[int, int, int]]:
    """What shows that a file is another one than before: size, time of its last change, inode."""
    found = {}
    for path in root.rglob("*"):
        if not path.is_dir():
            status = path.stat()
            found[path.relative_to(root).as_posix()] = (status.st_size, status.st_mtime_ns, status.st_ino)
    return found


def _refuse_open_files(root: Path) -> None:
    """Raise InvalidArgument for a file that this process can still write to: what it buffers would be missing."""
    for entry in _DESCRIPTORS.iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            path, info = entry.readlink(), (_DESCRIPTORS.parent / "fdinfo" / entry.name).read_text()
            flags = re.search(r"^flags:\s*([0-7]+)", info, re.MULTILINE)
            if path.is_relative_to(root) and flags and int(flags[1], 8) & os.O_ACCMODE != os.O_RDONLY:
                name = path.relative_to(root).as_posix()
                raise InvalidArgument(f"{name!r} is still open for writing: close it inside the block")


def _say_kept(error: BaseException, kept: Path) -> None:
    if isinstance(error, ForebayError):
        error.extended(f"(the files are kept in {kept}; remove it when you have saved them)")
    else:
        error.add_note(f"the files are kept in {kept}; remove it when you have saved them")
