"""A request body made of chunk views, without joining them.

Owns the way bytes leave: botocore takes it for a file (length, seek, read for signing), aiohttp for an asynchronous iterable.
Both start at the beginning each time, so a repeated request sends the same bytes.
"""

from collections.abc import AsyncIterator, Sequence

# The socket takes pieces of this size without asyncio keeping and moving a long remainder.
_PIECE_BYTES = 256 << 10


class Body:
    """Views in order. They stay valid as long as the body is held."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views = tuple(views)
        self._size = sum(view.nbytes for view in self._views)
        self._at = 0

    def __len__(self) -> int:
        return self._size

    def __bool__(self) -> bool:
        return True

    async def __aiter__(self) -> AsyncIterator[memoryview]:
        for view in self._views:
            for at in range(0, view.nbytes, _PIECE_BYTES):
                yield view[at : at + _PIECE_BYTES]

    def seek(self, offset: int, whence: int = 0) -> int:
        """As of a file."""
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def tell(self) -> int:
        """As of a file."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """As of a file; used only where bodies are signed."""
        end = self._size if size is None or size < 0 else min(self._size, self._at + size)
        parts = []
        start = 0
        for view in self._views:
            low, high = max(self._at - start, 0), min(end - start, view.nbytes)
            if low < high:
                parts.append(view[low:high])
            start += view.nbytes
        self._at = max(self._at, end)
        return b"".join(parts)
