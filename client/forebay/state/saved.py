"""Files of torch.save: written into a buffer without another in between, and read from a checkpoint range by range.

Owns these two ends. Does not own what is saved nor what may be loaded (weights_only is the caller's to say).
"""

import io
import pickle
from typing import Any

import torch

from forebay.errors import InvalidArgument
from forebay.reader import Reader
from forebay.sources import CountingFile, FilledSource

BUFFER_BYTES = 1 << 20


class SavedFile(FilledSource):
    """What torch.save makes of `value`, made when it is read. Raises InvalidArgument for what cannot be pickled."""

    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        self._value = value
        counter = CountingFile()
        with torch.serialization.skip_data():
            self._save(counter)
        self.size: int = counter.size

    @property
    def label(self) -> str:
        return f"shard {self._name!r}"

    def fill(self, view: memoryview) -> int:
        target = _Into(view)
        self._save(target)
        return target.size

    def _save(self, file: Any) -> None:
        try:
            torch.save(self._value, file)
        except (pickle.PicklingError, TypeError, AttributeError) as error:  # what pickle raises depends on the object
            raise InvalidArgument(f"{self.label}: it holds something that cannot be saved: {error}") from error


class _Into:
    """A file that is a buffer of a fixed size. What is too much is counted and dropped: torch's writer takes no error well."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = 0

    def write(self, data: Any) -> int:
        """Copy it behind what is there."""
        piece = memoryview(data).cast("B")
        if self.size + piece.nbytes <= self._view.nbytes:
            self._view[self.size : self.size + piece.nbytes] = piece
        self.size += piece.nbytes
        return piece.nbytes

    def flush(self) -> None:
        """Nothing to do."""


class _ShardFile(io.RawIOBase):
    def __init__(self, reader: Reader, name: str) -> None:
        self._reader = reader
        self._name = name
        self._size = reader.shard(name).size
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        if start + offset < 0:
            raise ValueError(f"{self._name!r}: seek to {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        length = min(view.nbytes, max(0, self._size - self._at))
        if length:
            self._reader.readinto(self._name, view[:length], self._at)
        self._at += length
        return length


def opened(reader: Reader, name: str) -> io.BufferedReader:
    """A shard as a file; each range is read, and checked, when it is asked for. Its reads raise as Reader.read()."""
    return io.BufferedReader(_ShardFile(reader, name), BUFFER_BYTES)
