"""The files of one step by name, and the directories that these names and mkdir make.

Owns what is a file, what a directory, and that nothing is both. Does not own what files hold.
"""

import errno
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Generic, TypeVar

from forebay.fsspec.errors import FileMissing, FileThere

_Content = TypeVar("_Content")


class Tree(Generic[_Content]):
    """Names are relative to the step; "" is the step. Reading is safe beside one thread that changes it."""

    def __init__(self, files: Mapping[str, _Content] | None = None) -> None:
        self.files: dict[str, _Content] = {}
        self.made: set[str] = set()  # by mkdir: they are there though they may be empty
        self._inside: Counter[str] = Counter()
        for name, content in (files or {}).items():
            self.add(name, content)

    def copy(self) -> "Tree[_Content]":
        """The same now, on its own from here on."""
        copied = Tree(self.files)
        copied.made = set(self.made)
        return copied

    def is_directory(self, name: str) -> bool:
        """Whether it is one."""
        return not name or name in self.made or self._inside[name] > 0

    def check_can_hold(self, name: str) -> None:
        """Raise IsADirectoryError or NotADirectoryError unless `name` can be a file."""
        if self.is_directory(name):
            raise IsADirectoryError(errno.EISDIR, "it is a directory", name)
        for parent in parents(name):
            if parent in self.files:
                raise NotADirectoryError(errno.ENOTDIR, "a file is in the way", parent)

    def add(self, name: str, content: _Content) -> None:
        """Put a file there, in place of what has the name. Raises as check_can_hold()."""
        self.check_can_hold(name)
        if name not in self.files:
            self._inside.update(parents(name))
        self.files[name] = content

    def remove(self, name: str) -> None:
        """Take a file away. Raises FileMissing."""
        if name not in self.files:
            raise FileMissing(f"there is no file {name!r}")
        del self.files[name]
        self._inside.subtract(parents(name))

    def make(self, name: str, *, with_parents: bool) -> None:
        """A directory. Raises FileThere, NotADirectoryError, FileMissing for a parent that is not there."""
        if name in self.files or self.is_directory(name):
            raise FileThere(f"{name!r} is there already")
        self.check_can_hold(name)
        above = [parent for parent in parents(name) if not self.is_directory(parent)]
        if above and not with_parents:
            raise FileMissing(f"there is no directory {above[0]!r}")
        self.made.update([name, *above])

    def unmake(self, name: str) -> None:
        """Take an empty directory away. Raises FileMissing, OSError where it is not empty."""
        if not self.is_directory(name):
            raise FileMissing(f"there is no directory {name!r}")
        if any(self.children(name)):
            raise OSError(errno.ENOTEMPTY, "the directory is not empty", name)
        self.made.discard(name)

    def children(self, name: str) -> Iterator[str]:
        """What lies directly in a directory, by full name, each once."""
        return self.below(name, 1)

    def below(self, name: str, depth: int | None = None) -> Iterator[str]:
        """Files and directories below a directory, `depth` levels of them or all, each once."""
        prefix = f"{name}/" if name else ""
        seen = set()
        for path in (*self.files, *self.made):
            if not path.startswith(prefix):
                continue
            segments = path[len(prefix) :].split("/")
            for length in range(1, len(segments) + 1)[:depth]:
                found = prefix + "/".join(segments[:length])
                if found not in seen:
                    seen.add(found)
                    yield found

    def __bool__(self) -> bool:
        return bool(self.files or self.made)


def parents(name: str) -> list[str]:
    """The directories that a name lies in, the nearest first; not the step."""
    found = []
    while "/" in name:
        name = name.rpartition("/")[0]
        found.append(name)
    return found
