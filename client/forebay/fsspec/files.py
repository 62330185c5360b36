"""Open files: one to read ranges of a content, one to write a new content.

Owns buffering, and which closed file counts: one that is closed while an error goes through the block that wrote it, in a
forked child, or by nobody but the garbage collector, was not finished and is given up. Does not own what happens to a finished
one.
"""

import io
import logging
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fsspec.spec import AbstractBufferedFile

from forebay.fsspec.contents import Content, Spool
from forebay.fsspec.errors import host_errors
from forebay.fsspec.open_steps import OpenStep

if TYPE_CHECKING:
    from forebay.fsspec.filesystem import ForebayFileSystem

BLOCK_BYTES = 4 << 20

_log = logging.getLogger("forebay")


class ReadFile(AbstractBufferedFile):
    """A file for reading. It stays with the content that it was opened on, whatever gets its name later. Not thread-safe."""

    def __init__(
        self, fs: "ForebayFileSystem", path: str, content: Content, block_size: int | None, cache_options: Any, **kwargs: Any
    ) -> None:
        kwargs.pop("size", None)  # of a file that was pickled
        super().__init__(fs, path, "rb", block_size or BLOCK_BYTES, cache_options=cache_options, size=content.size, **kwargs)
        self._content = content

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self.size)
        with host_errors():
            return self._content.read(start, end - start) if start < end else b""

    def readinto(self, buffer: Any) -> int:
        """As io.RawIOBase; what is at least a block goes where it belongs without a copy."""
        view = memoryview(buffer).cast("B")
        if self.closed:
            raise ValueError("I/O operation on closed file.")
        length = max(0, min(view.nbytes, int(self.size) - int(self.loc)))
        if length < self.blocksize:
            data = bytes(self.read(length))
            view[: len(data)] = data
            return len(data)
        with host_errors():
            self._content.readinto(view[:length], self.loc)
        self.loc += length
        return length


class WriteFile(io.BufferedIOBase):
    """A file for writing, which may seek. It is in its step, for this process to see, once it is closed."""

    def __init__(
        self, path: str, step: OpenStep, name: str, spool: Spool, mode: str, keep: Callable[[OpenStep, str, Spool], None]
    ) -> None:
        """`keep` is called with a finished file, to put it into its step. Raises as OpenStep.begin()."""
        self.path = path
        self.step = step
        self.name = name
        self.mode = mode
        self._spool = spool
        self._keep = keep
        self._pid = os.getpid()
        self._error_before = sys.exception()
        step.begin(name)
        self._begun = True

    # What io asks for

    def writable(self) -> bool:
        """Yes."""
        return True

    def seekable(self) -> bool:
        """Yes."""
        return True

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._spool.size

    def write(self, data: Any) -> int:
        """As io.BufferedIOBase: all of it. Raises OSError, ValueError once closed."""
        self._check()
        return self._spool.write(data)

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """As io.IOBase."""
        self._check()
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._spool.tell(), io.SEEK_END: self._spool.size}
        if whence not in base:
            raise ValueError(f"invalid whence ({whence}, should be 0, 1 or 2)")
        if base[whence] + offset < 0:
            raise ValueError("Seek before start of file")
        self._spool.seek(base[whence] + offset)
        return self._spool.tell()

    def tell(self) -> int:
        """As io.IOBase."""
        self._check()
        return self._spool.tell()

    def truncate(self, size: int | None = None) -> int:
        """As io.IOBase."""
        self._check()
        size = self._spool.tell() if size is None else size
        self._spool.truncate(size)
        return size

    def flush(self, force: bool = False) -> None:
        """Nothing to do: what is written stays with this process until the commit."""
        self._check()

    def close(self) -> None:
        """Finish the file, unless an error goes through the block that wrote it. Raises OSError, and as a commit where closing
        commits."""
        error = sys.exception()
        if error is not None and error is not self._error_before:
            if not self.closed:
                _log.warning("%s/%s is given up: %s while it was written", self.step, self.name, type(error).__name__)
            self._give_up(f"was not finished ({type(error).__name__} while it was written)")
        elif not self.closed:
            self._finish()

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._give_up(f"was not finished ({kind.__name__} while it was written)")

    def __del__(self) -> None:
        # io would close it, and so make a file of what may be half of one.
        if getattr(self, "_begun", False) and not self.closed:
            if self._pid == os.getpid():
                _log.warning("%s/%s was never closed, and is given up", self.step, self.name)
            self._give_up("was never closed")

    # What fsspec's transactions ask for

    def commit(self) -> None:
        """Its step is committed, not the file."""

    def discard(self) -> None:
        """Give it up, unless it is closed."""
        self._give_up("was given up")

    def _finish(self) -> None:
        super().close()
        if self._pid != os.getpid():
            return
        with host_errors():
            try:
                self._spool.finish()
            except OSError as error:
                self._spool.discard()
                self.step.end(self.name, None, f"could not be kept ({error})")
                raise
            self._keep(self.step, self.name, self._spool)

    def _give_up(self, reason: str) -> None:
        if self.closed:
            return
        super().close()
        if self._pid == os.getpid():
            self._spool.discard()
            self.step.end(self.name, None, reason)

    def _check(self) -> None:
        if self.closed:
            raise ValueError("I/O operation on closed file.")


class CompressedFile(io.BufferedIOBase):
    """What is written here is compressed into a file; both are closed together, which compressors leave to the collector."""

    def __init__(self, file: WriteFile, compressor: Any) -> None:
        self._file = file
        self._compressor = compressor

    def writable(self) -> bool:
        """Yes."""
        return True

    def write(self, data: Any) -> int:
        """As io.BufferedIOBase. Raises OSError, ValueError once closed."""
        return int(self._compressor.write(data))

    def close(self) -> None:
        """Finish both, as WriteFile.close()."""
        if not self.closed:
            super().close()
            try:
                self._compressor.close()
            finally:
                self._file.close()

    def __del__(self) -> None:
        """The file inside knows what to do where nobody has closed it."""
