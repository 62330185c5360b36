"""What a file holds: bytes that this process has written and not committed, or a shard of a complete checkpoint.

Owns the place of written bytes until their step is committed: in memory where they are few, else in a file of the host's
temporary directory. They are kept because a gateway takes no shard back, renames none, and shows none before the commit: all
things that users of a file system ask for. Does not own which file has which name (tree.py).
"""

import contextlib
import os
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from forebay.errors import InvalidArgument
from forebay.reader import Reader
from forebay.sources import Piece, Source
from forebay.types import Shard
from forebay_wire.checksums import crc32c

MEMORY_BYTES_MAX = 64 << 10  # of one file; a step may have thousands
_PIECE_BYTES = 1 << 20


class Content(Protocol):
    """The bytes of one file. They do not change."""

    @property
    def size(self) -> int:
        """In bytes."""

    @property
    def facts(self) -> dict[str, Any]:
        """What info() says of it besides name, size and type."""

    def read(self, offset: int, length: int) -> bytes:
        """A range that is inside. Raises as Reader.read()."""

    def readinto(self, buffer: memoryview, offset: int) -> None:
        """The same into a writable buffer, as much as fits there exactly."""

    def checksum(self) -> int:
        """The CRC32C of all bytes."""

    def data(self) -> Any:
        """What CheckpointWriter.put() takes of it: bytes, a path, or a source that can be read again."""


class StoredShard:
    """A shard of a complete checkpoint. Each read goes to the gateway, for the bytes that it is of and no others."""

    def __init__(self, reader: Reader, shard: Shard) -> None:
        self._reader = reader
        self._shard = shard

    @property
    def size(self) -> int:
        """See Content."""
        return self._shard.size

    @property
    def facts(self) -> dict[str, Any]:
        """See Content."""
        return {"committed": True, "crc32c": self._shard.crc32c, "session": self._reader.checkpoint.session}

    def read(self, offset: int, length: int) -> bytes:
        """See Content."""
        return self._reader.read(self._shard.name, offset, length)

    def readinto(self, buffer: memoryview, offset: int) -> None:
        """See Content."""
        self._reader.readinto(self._shard.name, buffer, offset)

    def checksum(self) -> int:
        """See Content."""
        return self._shard.crc32c

    def data(self) -> Source:
        """See Content."""
        return _ShardSource(self._reader, self._shard)


class _ShardSource(Source):
    """A shard that is read from one checkpoint while it is put into another."""

    replayable = True

    def __init__(self, reader: Reader, shard: Shard) -> None:
        self._reader = reader
        self._shard = shard
        self.size: int = shard.size

    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        for offset in range(0, self.size, chunk_size):
            yield self._reader.read(self._shard.name, offset, min(chunk_size, self.size - offset))


class Spool:
    """Bytes being written, and then written. One thread at a time writes; what is finished may be read by many.

    `directory` is where larger ones go; None is the host's temporary directory. A process that ends removes its own; one that
    is killed leaves them to whoever cleans that directory.
    """

    def __init__(self, directory: str | None = None) -> None:
        self._directory = directory
        self._memory = bytearray()
        self._file: BinaryIO | None = None
        self._path: Path | None = None
        self._crc32c: int | None = None
        self._at = 0
        self.size = 0

    # Writing

    def write(self, data: Any) -> int:
        """At the position, which moves on. Raises OSError."""
        view = memoryview(data).cast("B") if memoryview(data).nbytes else memoryview(b"")
        if self._path is None and max(self.size, self._at + view.nbytes) > MEMORY_BYTES_MAX:
            self._to_file()
        if self._file is not None:
            self._file.seek(self._at)
            self._file.write(view)
        else:
            assert self._path is None, "it is finished"
            self._memory.extend(bytes(max(0, self._at - self.size)))  # as in a file: what was skipped is zero
            self._memory[self._at : self._at + view.nbytes] = view
        self._at += view.nbytes
        self.size = max(self.size, self._at)
        return view.nbytes

    def seek(self, position: int) -> None:
        """Where the next write goes; it may be beyond the end."""
        self._at = position

    def tell(self) -> int:
        """The position."""
        return self._at

    def truncate(self, size: int) -> None:
        """Cut it, or fill it up with zeros. Raises OSError."""
        if self._path is None and size > MEMORY_BYTES_MAX:
            self._to_file()
        if self._file is not None:
            self._file.truncate(size)
        else:
            del self._memory[size:]
            self._memory.extend(bytes(size - len(self._memory)))
        self.size = size

    def append(self, content: Content) -> None:
        """Another file's bytes. Raises as Content.read()."""
        for offset in range(0, content.size, _PIECE_BYTES):
            self.write(content.read(offset, min(_PIECE_BYTES, content.size - offset)))

    def finish(self) -> None:
        """Nothing more is written. Raises OSError."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def discard(self) -> None:
        """It was not worth keeping."""
        with contextlib.suppress(OSError):
            self.finish()
        self._memory = bytearray()
        if self._path is not None:
            self._remove()

    def _to_file(self) -> None:
        descriptor, name = tempfile.mkstemp(prefix="forebay-", dir=self._directory)
        self._path = Path(name)
        self._remove = weakref.finalize(self, _remove, self._path, os.getpid())
        self._file = os.fdopen(descriptor, "w+b", buffering=0)
        self._file.write(self._memory)
        self._memory = bytearray()

    # Reading; see Content

    @property
    def facts(self) -> dict[str, Any]:
        """See Content."""
        return {"committed": False}

    def read(self, offset: int, length: int) -> bytes:
        """See Content."""
        data = bytearray(length)
        self.readinto(memoryview(data), offset)
        return bytes(data)

    def readinto(self, buffer: memoryview, offset: int) -> None:
        """See Content."""
        if self._path is None:
            buffer[:] = self._memory[offset : offset + buffer.nbytes]
            return
        with self._path.open("rb", buffering=0) as file:
            file.seek(offset)
            filled = 0
            while filled < buffer.nbytes:
                count = file.readinto(buffer[filled:])
                if not count:
                    raise InvalidArgument(f"{self._path}: ended at byte {offset + filled}; somebody has changed it")
                filled += count

    def checksum(self) -> int:
        """See Content."""
        if self._crc32c is None:
            found = 0
            for offset in range(0, self.size, _PIECE_BYTES):
                found = crc32c(self.read(offset, min(_PIECE_BYTES, self.size - offset)), found)
            self._crc32c = found
        return self._crc32c

    def data(self) -> bytes | Path:
        """See Content."""
        return bytes(self._memory) if self._path is None else self._path


def _remove(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # a child that was forked leaves its parent's files alone
        path.unlink(missing_ok=True)
