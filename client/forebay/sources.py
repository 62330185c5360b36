"""What can be put: bytes-like objects, arrays, tensors, files and iterables, all as chunks of one size.

Owns reading and re-cutting. A source never holds more than one chunk of its own. Does not own checksums or sending.
"""

import io
import os
import stat
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

from forebay.errors import InvalidArgument

Piece = bytes | bytearray | memoryview


class Source(ABC):
    """Data of one shard. `size` is None where it is not known before the end."""

    size: int | None
    replayable: bool  # whether chunks() can start again

    @abstractmethod
    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        """All data, in pieces of exactly `chunk_size` bytes but for the last. A piece is valid until the next is taken."""

    def known_crc32c(self, offset: int, size: int) -> int | None:
        """The CRC32C of a range where it was taken before: then this one is sent with the bytes. None: take it now."""
        return None


class BufferSource(Source):
    """Bytes in memory."""

    replayable = True

    def __init__(self, view: memoryview) -> None:
        self.view = view
        self.size: int = view.nbytes

    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        for offset in range(0, self.size, chunk_size):
            yield self.view[offset : offset + chunk_size]


class BuffersSource(Source):
    """Bytes in memory in several pieces that follow one another, any range of which can be had without the ones before."""

    replayable = True

    def __init__(self, views: Iterable[memoryview]) -> None:
        self._views = [view for view in views if view.nbytes]
        self._starts = list(accumulate((view.nbytes for view in self._views), initial=0))
        self.size: int = self._starts.pop()

    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        return _recut(self._views, chunk_size, "a buffer")

    def pieces(self, offset: int, length: int) -> Iterator[memoryview]:
        """Where the bytes of a range lie."""
        index = bisect_right(self._starts, offset) - 1
        while length:
            begin = offset - self._starts[index]
            piece = self._views[index][begin : begin + length]
            yield piece
            offset, length, index = offset + piece.nbytes, length - piece.nbytes, index + 1


class FilledSource(Source):
    """Data that is made anew each time it is read, of a size that is known: a snapshot takes it straight into its buffer."""

    replayable = True

    @property
    @abstractmethod
    def label(self) -> str:
        """What to call it in an error."""

    @abstractmethod
    def fill(self, view: memoryview) -> int:
        """Write all of it into `view`, which is writable and has `size` bytes; how many were written."""

    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        view = memoryview(bytearray(self.size or 0))
        self.filled(view)  # when the first piece is taken: what it raises is an error of the data
        yield from BufferSource(view).chunks(chunk_size)

    def filled(self, view: memoryview) -> None:
        """fill(), checked. Raises InvalidArgument where it gave another number of bytes than it said."""
        if (written := self.fill(view)) != self.size:
            raise InvalidArgument(f"{self.label}: it was to have {self.size} bytes and has {written}; it changed meanwhile")


class PathSource(Source):
    """A regular file, opened each time it is read."""

    replayable = True

    def __init__(self, path: Path) -> None:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"{path}: not a regular file")
        self.path = path
        self.size: int = status.st_size

    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        with self.path.open("rb", buffering=0) as file:
            yield from _exactly(file, self.size, chunk_size, str(self.path))


class FileSource(Source):
    """An open binary file, from where it stands to its end. Replayable where it can seek."""

    def __init__(self, file: BinaryIO, label: str) -> None:
        self._file = file
        self._label = label
        self.replayable = bool(getattr(file, "seekable", lambda: False)())
        self.size = None
        if self.replayable:
            self._start = file.tell()
            self.size = max(0, file.seek(0, os.SEEK_END) - self._start)
            file.seek(self._start)

    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        if self.size is None:
            return _recut(iter(lambda: self._read(chunk_size), b""), chunk_size, self._label)
        self._file.seek(self._start)
        return _exactly(self._file, self.size, chunk_size, self._label)

    def _read(self, size: int) -> Any:
        data = self._file.read(size)
        if data is None:
            raise InvalidArgument(f"{self._label}: a non-blocking file cannot be put")
        return data


class IterableSource(Source):
    """An iterable of buffers. A list or tuple of them is replayable, and its size is known."""

    def __init__(self, pieces: Iterable[Any], label: str) -> None:
        self._pieces = pieces
        self._label = label
        self.replayable = isinstance(pieces, list | tuple)
        self.size = sum(view_of(piece, label).nbytes for piece in pieces) if self.replayable else None

    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        return _recut(self._pieces, chunk_size, self._label)


def source_of(data: Any, label: str) -> Source:
    """The source of anything that put() takes; `label` names it in errors. Raises InvalidArgument, or OSError for a path."""
    if isinstance(data, Source):
        return data
    if isinstance(data, str | os.PathLike):
        return PathSource(Path(data))
    view = _buffer_view(data, label)
    if view is not None:
        return BufferSource(view)
    if hasattr(data, "read"):
        if isinstance(data, io.TextIOBase):
            raise InvalidArgument(f"{label}: a text file cannot be put; open it in binary mode")
        return FileSource(data, label)
    if isinstance(data, Iterable):
        return IterableSource(data, label)
    raise InvalidArgument(
        f"{label}: cannot put a value of type {type(data).__name__}; give bytes, an array or CPU tensor, a path, a "
        f"binary file, or an "
        "iterable of buffers"
    )


def view_of(data: Any, label: str) -> memoryview:
    """A flat byte view of a buffer, array or CPU tensor, without a copy. Raises InvalidArgument for anything else."""
    view = _buffer_view(data, label)
    if view is None:
        raise InvalidArgument(f"{label}: a {type(data).__name__} is no buffer")
    return view


def _buffer_view(data: Any, label: str) -> memoryview | None:
    if type(data).__module__.partition(".")[0] == "torch" and hasattr(data, "untyped_storage"):
        return _tensor_view(data, label)
    try:
        view = memoryview(data)
    except TypeError:
        return _array_view(data, label) if hasattr(data, "__array_interface__") else None
    except (ValueError, BufferError) as error:
        # Arrays of a type the buffer protocol has no letter for (dates, bfloat16) still have plain bytes.
        if hasattr(data, "__array_interface__"):
            return _array_view(data, label)
        raise InvalidArgument(f"{label}: its buffer cannot be read: {error}") from error
    return _flat(view, label)


def _flat(view: memoryview, label: str) -> memoryview:
    if not view.c_contiguous:
        raise InvalidArgument(f"{label}: the buffer is not C-contiguous; make a contiguous copy first")
    if "O" in view.format:
        raise InvalidArgument(f"{label}: an array of Python objects has no bytes to store")
    if view.nbytes == 0:
        return memoryview(b"")
    try:
        return view if view.format == "B" and view.ndim == 1 else view.cast("B")
    except TypeError:
        # Structured formats cannot be cast; numpy can look at the same memory as bytes.
        if hasattr(view.obj, "__array_interface__"):
            return _array_view(view.obj, label)
        raise InvalidArgument(f"{label}: a buffer of format {view.format!r} cannot be read as bytes") from None


def _array_view(data: Any, label: str) -> memoryview:
    import numpy

    array = numpy.asarray(data)
    if array.dtype.hasobject:
        raise InvalidArgument(f"{label}: an array of Python objects has no bytes to store")
    if not array.flags.c_contiguous:
        raise InvalidArgument(f"{label}: the array is not C-contiguous; make a contiguous copy first")
    if array.nbytes == 0:
        return memoryview(b"")
    return memoryview(array.reshape(-1).view(numpy.uint8).data)


def _tensor_view(tensor: Any, label: str) -> memoryview:
    if tensor.device.type != "cpu":
        raise InvalidArgument(f"{label}: the tensor is on {tensor.device}; copy it to the CPU first (tensor.cpu())")
    import torch  # type: ignore[import-not-found, unused-ignore]

    if tensor.layout != torch.strided or not tensor.is_contiguous():
        raise InvalidArgument(f"{label}: the tensor is not contiguous; call .contiguous() first")
    if tensor.numel() == 0:
        return memoryview(b"")
    # Viewed as bytes because numpy has no bfloat16 and no 8-bit floats.
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
    return memoryview(flat.numpy())


def _exactly(file: Any, size: int, chunk_size: int, label: str) -> Iterator[Piece]:
    """Chunks of the next `size` bytes of a file, through one buffer."""
    buffer = memoryview(bytearray(min(chunk_size, size)))
    remaining = size
    while remaining:
        piece = buffer[: min(chunk_size, remaining)]
        _fill(file, piece, label, size - remaining)
        remaining -= len(piece)
        yield piece


def _fill(file: Any, piece: memoryview, label: str, offset: int) -> None:
    filled = 0
    read_into = getattr(file, "readinto", None)
    while filled < len(piece):
        if read_into is not None:
            count = read_into(piece[filled:])
        else:
            data = file.read(len(piece) - filled)
            count = len(data)
            piece[filled : filled + count] = data
        if not count:
            raise InvalidArgument(f"{label}: ended at byte {offset + filled}; it became shorter while it was read")
        filled += count


def _recut(pieces: Iterable[Any], chunk_size: int, label: str) -> Iterator[Piece]:
    """The same bytes in chunks of `chunk_size`; what is already whole in one piece is not copied."""
    held = bytearray()
    for piece in pieces:
        view = view_of(piece, label)
        at = 0
        while at < view.nbytes:
            if not held and view.nbytes - at >= chunk_size:
                yield view[at : at + chunk_size]
                at += chunk_size
                continue
            taken = view[at : at + chunk_size - len(held)]
            held += taken
            at += len(taken)
            if len(held) == chunk_size:
                yield held
                held = bytearray()
    if held:
        yield held


class CountingFile:
    """A file, for a library that writes one, that keeps nothing but its length."""

    def __init__(self) -> None:
        self.size = 0
        self.skipped_at = 0  # where the last gap begins

    def write(self, data: Any) -> int:
        """Count."""
        length = memoryview(data).nbytes
        self.size += length
        return length

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Over data that is skipped."""
        assert whence == io.SEEK_CUR
        self.skipped_at = self.size
        self.size += offset
        return self.size

    def tell(self) -> int:
        """The length so far."""
        return self.size

    def flush(self) -> None:
        """Nothing to do."""
