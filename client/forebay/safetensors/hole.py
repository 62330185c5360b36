"""Files for safetensors to look at whose data is a hole: what header.py and write.py both stand on."""

import contextlib
import os
from collections.abc import Iterator

PACKED = {"F4": 2}  # elements in a byte, of types whose framework's shape counts bytes


@contextlib.contextmanager
def hole(data: bytes, size: int) -> Iterator[str]:
    """The path of a file in memory of `size` bytes that begins with `data`, for the block. What is not data costs nothing."""
    descriptor = os.memfd_create("forebay-safetensors", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, data[:size], 0)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)
