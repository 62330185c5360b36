"""What can be seen: runs, steps, files; their sizes, checksums and bytes.

Owns which view a path has: this process's open step, else the complete checkpoint, else (of a path above steps) runs. A gateway
that cannot be asked is an error, never "not there", also where fsspec's own methods would take any error for absence. Does not
own what changes anything (filesystem.py).
"""

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from fsspec.spec import AbstractFileSystem

from forebay import address as addresses
from forebay.api import STREAMS_MAX, Client
from forebay.checkpoint_id import SCHEME
from forebay.errors import ForebayError, InvalidArgument, NotFound
from forebay.fsspec.contents import Content, StoredShard
from forebay.fsspec.errors import BadPath, FileMissing, NotSupported, host_errors, in_host_terms
from forebay.fsspec.open_steps import OpenSteps, of_gateway
from forebay.fsspec.paths import Place, parse, step_path
from forebay.fsspec.tree import Tree
from forebay.reader import Reader

VIEWS_MAX = 16  # complete checkpoints whose listing is kept
RANGES_AT_A_TIME = 8

Info = dict[str, Any]


class ReadingFileSystem(AbstractFileSystem):
    """The reading half of ForebayFileSystem."""

    _client: Client
    _address: str | None
    _source: str
    _lane: str
    _views: dict[tuple[str, int], tuple[Reader, Tree[Content]]]

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        stripped = super()._strip_protocol(path)
        return stripped if isinstance(stripped, list) else stripped.lstrip("/")

    # What lies where

    @host_errors()
    def info(self, path: str, **kwargs: Any) -> Info:
        """`name`, `size`, `type` ("file" or "directory"), and of a file whether it is `committed`; then also `crc32c` and
        `session`. Raises FileNotFoundError, ConnectionError, ValueError for a bad path."""
        place = self._place(path)
        if place.step is not None:
            try:
                return self._info_of(place, self._tree(place), place.name)
            except NotFound as error:
                if self._is_above_runs(place.path):
                    return _directory(place.path)
                raise error
        if place.path and not self._is_above_runs(place.path):
            raise FileMissing(f"there is no run {SCHEME}{place.path}")
        return _directory(place.path)

    @host_errors()
    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        """What lies directly below, sorted by name. Of a run: its complete steps, and those that this process is writing.
        Raises as info()."""
        place = self._place(path)
        found = self._listed(place)
        found.sort(key=lambda info: str(info["name"]))
        return found if detail else [info["name"] for info in found]

    def walk(self, path: str, maxdepth: int | None = None, topdown: bool = True, on_error: Any = "omit", **kwargs: Any) -> Any:
        """As fsspec; "omit" omits what is not there, and no other failure."""
        chosen = _raise_unless_absent if on_error == "omit" else on_error
        return super().walk(path, maxdepth=maxdepth, topdown=topdown, on_error=chosen, **kwargs)

    @host_errors()
    def find(self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any) -> Any:
        """As fsspec; one look at a step, whatever lies in it."""
        place = self._place(path)
        if place.step is None:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **kwargs)
        if maxdepth is not None and maxdepth < 1:
            raise ValueError("maxdepth must be at least 1")
        try:
            tree = self._tree(place)
        except NotFound:
            if self._is_above_runs(place.path):
                return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **kwargs)
            return {} if detail else []
        names = [place.name] if place.name in tree.files else list(tree.below(place.name, maxdepth))
        if withdirs and tree.is_directory(place.name):
            names.append(place.name)
        infos = [self._info_of(place, tree, name) for name in names if withdirs or name in tree.files]
        found = {info["name"]: info for info in sorted(infos, key=lambda info: str(info["name"]))}
        return found if detail else list(found)

    def exists(self, path: str, **kwargs: Any) -> bool:
        """Whether it is there. Raises ConnectionError where that cannot be known."""
        try:
            self.info(path, **kwargs)
        except (FileNotFoundError, BadPath):
            return False
        return True

    def isdir(self, path: str) -> bool:
        """Whether it is a directory: a step, one inside a step, or the beginning of a run's name. Raises ConnectionError."""
        return self._type(path) == "directory"

    def isfile(self, path: str) -> bool:
        """Whether it is a file. Raises ConnectionError."""
        return self._type(path) == "file"

    @host_errors()
    def checksum(self, path: str) -> int:
        """Of size and CRC32C: equal bytes have equal ones, written or committed. Raises FileNotFoundError."""
        content = self._content(self._place(path))
        return content.size << 32 | content.checksum()

    def created(self, path: str) -> Any:
        """Raises NotImplementedError: Forebay orders by commits and keeps no wall-clock times."""
        raise NotSupported(f"{path}: a checkpoint's files have no times; compare checksum(), or the steps' numbers")

    modified = created

    # Bytes

    @host_errors()
    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        """The bytes, or those from `start` to `end`, which are as in a slice. Reads no others. Raises FileNotFoundError,
        IsADirectoryError, ConnectionError."""
        return _slice_of(self._content(self._place(path)), start, end)

    def cat_ranges(
        self, paths: Any, starts: Any, ends: Any, max_gap: int | None = None, on_error: str = "return", **kwargs: Any
    ) -> list[Any]:
        """As fsspec, several ranges at a time. `max_gap` is a hint that nothing depends on."""
        if not isinstance(paths, list):
            raise TypeError("paths is a list")
        starts, ends = ([bound] * len(paths) if not isinstance(bound, list) else bound for bound in (starts, ends))
        if not len(paths) == len(starts) == len(ends):
            raise ValueError("paths, starts and ends differ in length")
        trees: dict[str, Tree[Content]] = {}
        contents = {path: self._content_or_error(path, trees) for path in dict.fromkeys(paths)}

        def read(item: tuple[str, int | None, int | None]) -> Any:
            content = contents[item[0]]
            try:
                return content if isinstance(content, Exception) else _slice_of(content, item[1], item[2])
            except ForebayError as error:
                return in_host_terms(error)

        with ThreadPoolExecutor(RANGES_AT_A_TIME, thread_name_prefix="forebay-fsspec") as pool:
            found = list(pool.map(read, zip(paths, starts, ends, strict=True)))
        if on_error != "return":
            for failure in found:
                if isinstance(failure, Exception):
                    raise failure
        return found

    # Where the bytes are

    @property
    def fsid(self) -> str:
        """The same for every instance that speaks to the same gateway."""
        return "forebay-" + ",".join(addresses.candidates(self._address))

    @property
    def _steps(self) -> OpenSteps:
        return of_gateway(addresses.candidates(self._address))

    def _place(self, path: str) -> Place:
        return parse(self._strip_protocol(path))

    def _tree(self, place: Place) -> Tree[Content]:
        """The files of a step that this process sees. Raises NotFound, Incomplete, Unavailable."""
        assert place.step is not None
        if isinstance(place.step, int):
            step = self._steps.get(place.run, place.step)
            if step is not None and step.visible:
                return step.tree
        return self._view(place.run, self._number(place))[1]

    def _number(self, place: Place) -> int:
        if isinstance(place.step, int):
            return place.step
        latest = self._client.latest(place.run)
        if latest is None:
            raise NotFound(f"run {place.run!r} has no complete checkpoint")
        return latest

    def _view(self, run: str, step: int) -> tuple[Reader, Tree[Content]]:
        """A complete checkpoint. The gateway is asked which session that is; the listing of one never changes, and is kept."""
        reader = self._client.open(run, step, source=self._source, lane=self._lane)
        known = self._views.get((run, step))
        if known is not None and known[0].checkpoint.session == reader.checkpoint.session:
            return known
        view = reader, Tree[Content]({shard.name: StoredShard(reader, shard) for shard in reader.shards()})
        self._views[run, step] = view
        for key in list(self._views)[:-VIEWS_MAX]:
            self._views.pop(key, None)
        return view

    def _content(self, place: Place, trees: dict[str, Tree[Content]] | None = None) -> Content:
        if place.step is None:
            raise FileMissing(f"{SCHEME}{place.path} is no file: it names no step; a file is {SCHEME}RUN/STEP/NAME")
        tree = None if trees is None else trees.get(place.root)
        if tree is None:
            tree = self._tree(place)
            if trees is not None:
                trees[place.root] = tree
        content = tree.files.get(place.name)
        if content is not None:
            return content
        if tree.is_directory(place.name):
            raise IsADirectoryError(f"{SCHEME}{place.path} is a directory")
        raise FileMissing(f"there is no file {SCHEME}{place.path}")

    def _content_or_error(self, path: str, trees: dict[str, Tree[Content]]) -> Content | Exception:
        try:
            return self._content(self._place(path), trees)
        except ForebayError as error:
            return in_host_terms(error)
        except OSError as error:
            return error

    # Listing

    def _type(self, path: str) -> str | None:
        try:
            return str(self.info(path)["type"])
        except (FileNotFoundError, BadPath):
            return None

    def _listed(self, place: Place) -> list[Info]:
        if place.step is not None:
            try:
                tree = self._tree(place)
            except NotFound:
                if not self._is_above_runs(place.path):
                    raise
                return self._below_prefix(place.path)
            if place.name in tree.files:
                return [self._info_of(place, tree, place.name)]
            self._info_of(place, tree, place.name)  # raises where there is nothing
            return [self._info_of(place, tree, name) for name in tree.children(place.name)]
        if place.path and not self._is_above_runs(place.path):
            raise FileMissing(f"there is no run {SCHEME}{place.path}")
        return self._below_prefix(place.path)

    def _below_prefix(self, path: str) -> list[Info]:
        prefix = f"{path}/" if path else ""
        runs = list(self._runs())
        names = {prefix + run[len(prefix) :].partition("/")[0] for run in runs if run.startswith(prefix)}
        if path in runs:
            names |= {step_path(path, step) for step in self._complete_steps(path)}
            names |= {step_path(path, step.step) for step in self._steps.visible() if step.run == path}
        return [_directory(name) for name in names]

    def _complete_steps(self, run: str) -> list[int]:
        try:
            return [checkpoint.step for checkpoint in self._client.checkpoints(run) if checkpoint.complete]
        except NotFound:
            return []  # it is being written, or only a directory

    def _is_above_runs(self, path: str) -> bool:
        return any(run == path or run.startswith(f"{path}/") for run in self._runs())

    def _runs(self) -> Iterator[str]:
        """Names of runs, and of directories that may become some; the gateway's come last, as it has to be asked."""
        yield from list(self._steps.prefixes)
        yield from (step.run for step in self._steps.visible())
        yield from (run.run for run in self._client.runs())

    def _info_of(self, place: Place, tree: Tree[Content], name: str) -> Info:
        content = tree.files.get(name)
        if content is not None:
            return {"name": place.below(name), "size": content.size, "type": "file", **content.facts}
        if not tree.is_directory(name):
            raise FileMissing(f"there is no {SCHEME}{place.below(name)}")
        return _directory(place.below(name))


def _directory(path: str) -> Info:
    return {"name": path, "size": 0, "type": "directory"}


def _slice_of(content: Content, start: int | None, end: int | None) -> bytes:
    low, high, _ = slice(start, end).indices(content.size)
    return content.read(low, high - low) if low < high else b""


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def checked_options(options: Iterable[str], known: Iterable[str]) -> None:
    """Raise BadPath for a storage option that nobody knows."""
    if unknown := sorted(set(options) - set(known)):
        raise BadPath(f"there is no storage option {unknown[0]!r}; there are {', '.join(sorted(known))}")


def checked_streams(streams: object) -> int:
    """Raise BadPath unless it is a number of streams."""
    if isinstance(streams, bool) or not isinstance(streams, int) or not 1 <= streams <= STREAMS_MAX:
        raise in_host_terms(InvalidArgument(f"streams must be 1 to {STREAMS_MAX}, not {streams!r}"))
    return streams
