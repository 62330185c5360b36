"""ForebayFileSystem: `forebay://RUN/STEP/NAME` for fsspec; here, its options, and all that changes files and directories.

Owns what each verb does inside an open step. Does not own what is seen (reading.py) nor when a step is committed
(committing.py).
"""

import threading
from glob import has_magic
from typing import Any

from fsspec.compression import compr
from fsspec.core import get_compression

from forebay.api import Client
from forebay.checkpoint_id import SCHEME
from forebay.errors import NotFound
from forebay.fsspec.committing import COMMIT_MODES, CommittingFileSystem
from forebay.fsspec.contents import Content, Spool
from forebay.fsspec.errors import BadPath, FileMissing, FileThere, NotSupported, host_errors
from forebay.fsspec.files import CompressedFile, ReadFile, WriteFile
from forebay.fsspec.open_steps import OpenStep
from forebay.fsspec.paths import Place
from forebay.fsspec.reading import checked_options, checked_streams
from forebay.fsspec.transaction import StepTransaction

_OF_FSSPEC = ("use_listings_cache", "listings_expiry_time", "max_paths", "loop")


class ForebayFileSystem(CommittingFileSystem):
    """fsspec over this node's gateway. Picklable, usable in a forked child and from several threads.

    Paths are RUN/STEP/NAME; a step is a number, `step-N`, or, to read, "latest". Complete steps of all runs are there to read,
    in any order, range by range. To write, a step is open from its first write on: its files lie with this process, which sees,
    overwrites, renames and removes them, and nobody else sees anything; large ones take room in the host's temporary directory.
    A step becomes visible as a whole, as one checkpoint of one writer, by its commit:

    - `with fs.transaction:` commits the steps that the block wrote at its end; an error leaves everything as it was before.
    - `fs.commit(path)` commits one step, `fs.discard(path)` drops it, `fs.uncommitted()` lists what is open.
    - `commit="auto"` (the default) also commits a step when a file `.metadata` arrives at its top, which DCP's FsspecWriter
      writes last. It refuses to in a job of several ranks, each of which would have written a part that nobody else has: use
      forebay.torch there. `commit="explicit"` never commits by itself.
    - `commit="close"`, for programs that know of no commit, commits a step with each file that is closed (or renamed, or
      removed): right where one file is a checkpoint. Where there are more, each closed file makes the step complete as it is
      then, and sends the older ones anew; put(), pipe() and copy() of several commit once.

    A committed step does not change: StepCommitted, a PermissionError, says so. `replace=True` lets a step that is complete be
    written anew, under a new session; the old one is there until the new one is. With "close" a process may add to the steps
    that it has committed itself. A file whose `with` block raises is given up, and its step cannot be committed until the name
    is written again or removed. A step that is open when the process ends was not saved; the log says so.

    `address`, `lane`, `source`, `admit_timeout` and `retry_timeout` are as in forebay.Client and Client.open(), `wait` and
    `timeout` as in CheckpointWriter.commit(). `streams` large files are sent at a time. `spool_dir` is where files wait for the
    commit; None is the host's temporary directory. Instances of a process share open steps. There is no asynchronous form:
    forebay.AsyncClient has one.

    Errors are this package's own and the host's at once: NotFound is a FileNotFoundError, Unavailable a ConnectionError, and so
    on (errors.py).
    """

    protocol = "forebay"
    root_marker = ""
    transaction_type = StepTransaction

    @host_errors()
    def __init__(
        self,
        address: str | None = None,
        *,
        commit: str = "auto",
        replace: bool = False,
        wait: str = "cache",
        timeout: float | None = None,
        lane: str = "auto",
        source: str = "auto",
        streams: int = 4,
        spool_dir: str | None = None,
        admit_timeout: float = 60.0,
        retry_timeout: float = 60.0,
        asynchronous: bool = False,
        **storage_options: Any,
    ) -> None:
        super().__init__(**storage_options)
        checked_options(storage_options, _OF_FSSPEC)
        if asynchronous:
            raise NotSupported("forebay:// has no asynchronous form; use forebay.AsyncClient, or the instance in a thread")
        if commit not in COMMIT_MODES:
            raise BadPath(f"commit must be one of {', '.join(COMMIT_MODES)}, not {commit!r}")
        self._address = address
        self._client = Client(address, admit_timeout, retry_timeout=retry_timeout, progress=False)
        self._commit_mode = commit
        self._replace = replace
        self._wait = wait
        self._timeout_s = timeout
        self._lane = lane
        self._source = source
        self._streams = checked_streams(streams)
        self._spool_dir = spool_dir
        self._views = {}
        self._together = threading.local()

    # Files

    def open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        cache_options: Any = None,
        compression: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """As fsspec: for reading, or for writing a file that is in its step once it is closed. Raises FileNotFoundError,
        IsADirectoryError, StepCommitted, ConnectionError, ValueError for a bad path."""
        if compression is None or "b" not in mode or "r" in mode:
            return super().open(path, mode, block_size, cache_options, compression, **kwargs)
        file = super().open(path, mode, block_size, cache_options, **kwargs)
        kind = get_compression(self._strip_protocol(path), compression)
        return file if kind is None else CompressedFile(file, compr[kind](file, mode=mode[0]))

    @host_errors()
    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **kwargs: Any,
    ) -> ReadFile | WriteFile:
        place = self._place(path)
        if mode == "rb":
            return ReadFile(self, path, self._content(place), block_size, cache_options, **kwargs)
        if mode not in ("wb", "xb", "ab"):
            raise NotSupported(f"{SCHEME}{path}: mode {mode!r}; there are rb, wb, xb and ab")
        if not place.name:
            place.key  # noqa: B018 - says what the path lacks, where that is the step
            raise IsADirectoryError(f"{SCHEME}{path} is a step, not a file in one")
        if mode == "xb" and self.exists(path):
            raise FileThere(f"{SCHEME}{path} is there already")
        step = self._writable(place)
        spool = Spool(self._spool_dir)
        try:
            if mode == "ab" and (before := step.tree.files.get(place.name)) is not None:
                spool.append(before)
            return WriteFile(path, step, place.name, spool, mode, self._keep)
        except BaseException:
            spool.discard()
            raise

    def _keep(self, step: OpenStep, name: str, spool: Spool) -> None:
        with step.lock:
            if not step.ended or self._commit_mode != "close":
                step.end(name, spool)
                self._changed(step, name)
                return
        # Another file's commit ended it, and this file goes into the step as it is now.
        step = self._writable(Place("", step.run, step.step))
        step.begin(name)
        self._keep(step, name, spool)

    @host_errors()
    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        """Write a file. `mode` "create": raises FileExistsError where it is there."""
        with self.open(path, "xb" if mode == "create" else "wb", **kwargs) as file:
            file.write(value)

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> None:
        """As fsspec; several files are committed together where closing commits."""
        with self._one_commit():
            super().pipe(path, value, **kwargs)

    def put(self, lpath: Any, rpath: Any, recursive: bool = False, **kwargs: Any) -> None:
        """As fsspec; several files are committed together where closing commits."""
        with self._one_commit():
            super().put(lpath, rpath, recursive=recursive, **kwargs)

    def copy(self, path1: Any, path2: Any, recursive: bool = False, **kwargs: Any) -> None:
        """As fsspec; several files are committed together where closing commits."""
        with self._one_commit():
            super().copy(path1, path2, recursive=recursive, **kwargs)

    @host_errors()
    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Copy a file, or make a directory like it. No bytes move before the commit. Raises FileNotFoundError."""
        source = self._place(path1)
        if self.isdir(path1):
            self.makedirs(path2, exist_ok=True)
            return
        content = self._content(source)
        target = self._place(path2)
        self._put(target, content)

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """Move inside open steps, a file at once: one that is renamed to what commits its step is never there under both names.
        Raises FileNotFoundError, StepCommitted."""
        with host_errors(), self._one_commit():
            source = self._place(path1)
            if has_magic(source.path) or str(path2).endswith("/") or not self.isfile(path1) or self.isdir(path2):
                super().mv(path1, path2, recursive=recursive, maxdepth=maxdepth)
                return
            content = self._content(source)
            target = self._place(path2)
            if source.path == target.path:
                return
            step = self._writable(source)
            self._writable(target).tree.check_can_hold(target.name)
            step.remove(source.name)
            self._changed(step)
            self._put(target, content)

    def _put(self, target: Place, content: Content) -> None:
        if not target.name:
            raise IsADirectoryError(f"{SCHEME}{target.path} is a step, not a file in one")
        step = self._writable(target)
        step.put(target.name, content)
        self._changed(step, target.name)

    # Directories

    @host_errors()
    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """A directory; a step is opened by it. It is there for this process, and until a file is in it for nobody else.
        Raises FileExistsError, FileNotFoundError for a parent, StepCommitted."""
        place = self._place(path)
        if place.step is None or not place.name:
            if self.exists(path):
                raise FileThere(f"{SCHEME}{place.path} is there already")
            if place.step is None:
                self._steps.prefixes.add(place.path)
            else:
                self._writable(place).made = True
            return
        step = self._writable(place)
        with step.lock:
            step.check_open()
            step.tree.make(place.name, with_parents=create_parents)

    @host_errors()
    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """As mkdir(), with what lies above."""
        if not exist_ok or not self.isdir(path):
            self.mkdir(path, create_parents=True)

    @host_errors()
    def rmdir(self, path: str) -> None:
        """Take an empty directory away. Raises FileNotFoundError, OSError where it is not empty, StepCommitted."""
        place = self._place(path)
        if not self.isdir(path):
            raise FileMissing(f"there is no directory {SCHEME}{place.path}")
        if place.step is None:
            if place.path not in self._steps.prefixes or self.ls(path):
                raise NotSupported(f"{SCHEME}{place.path}: runs are there as long as they have steps; remove these")
            self._steps.prefixes.discard(place.path)
            return
        step = self._writable(place)
        with step.lock:
            step.tree.unmake(place.name)
            if not place.name:
                self._steps.close(step)

    @host_errors()
    def rm_file(self, path: str) -> None:
        """Take a file out of an open step. Raises FileNotFoundError, IsADirectoryError, StepCommitted."""
        place = self._place(path)
        failed = isinstance(place.step, int) and (step := self._steps.get(*place.key)) and place.name in step.failed
        if not failed:
            self._content(place)  # raises where there is none
        step = self._writable(place)
        step.remove(place.name)
        self._changed(step)

    _rm = rm_file

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """Take files out of open steps, and directories with `recursive`. With it a whole step goes: an open one is given up, a
        complete one deleted at the gateway and on all tiers, as by Client.delete(). Raises FileNotFoundError, StepCommitted."""
        with host_errors(), self._one_commit():
            for each in path if isinstance(path, list | tuple) else [path]:
                place = self._place(each)
                if recursive and place.step is not None and not place.name and maxdepth is None and not has_magic(place.path):
                    self._rm_step(place)
                else:
                    self._rm_expanded(each, recursive, maxdepth)

    def _rm_step(self, place: Place) -> None:
        run, number = place.key
        step = self._steps.get(run, number)
        if step is not None and step.visible:
            if self._intrans:
                self.transaction.touch(step)
            self._steps.close(step)
            if step.supersedes is None or self._commit_mode != "close":
                return
        try:
            self._client.delete(run, number)
        except NotFound as error:
            raise FileMissing(f"there is no step {SCHEME}{place.path}") from error
        self._steps.own.pop((run, number), None)

    def _rm_expanded(self, path: str, recursive: bool, maxdepth: int | None) -> None:
        place = self._place(path)
        if recursive and place.step is None and not has_magic(place.path):
            raise NotSupported(f"{SCHEME}{place.path}: a run is not removed as a whole; remove its steps")
        if not has_magic(place.path) and not recursive:
            paths = [place.path]
        else:
            paths = self.expand_path(path, recursive=recursive, maxdepth=maxdepth)
        for each in reversed(paths):
            if self.isdir(each):
                self.rmdir(each)
            elif not recursive or self.exists(each):  # a directory that nobody made went with its last file
                self.rm_file(each)
