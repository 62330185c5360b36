"""This process's memory: the C heap, told to keep what it has, mapped files, which need not stay resident, and the garbage
collector, which need not look at what stays.

Owns these calls. gRPC allocates and frees a message of a chunk's size several times for each chunk. By default glibc gives
such blocks back to the kernel and takes fresh, zeroed pages for the next: on the stream lane, 0.3 CPU seconds a gigabyte.
"""

import ctypes
import gc
import logging

log = logging.getLogger("forebay.heap")

_MADV_DONTNEED = 4  # sys/mman.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
KEEP_BYTES = 128 << 20
MMAP_ABOVE_BYTES = 72 << 20  # above the largest message


def keep_freed_memory() -> bool:
    """Keep up to 128 MiB of freed heap for reuse; False where the C library has no such setting (musl)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        log.info("this C library cannot be told to keep freed memory; the stream lane costs a little more")
        return False
    return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_ABOVE_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES))


def unmap_resident(address: int, length: int) -> None:
    """Let go of the resident pages of a file that is mapped read-only; a later read brings them back. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.madvise(ctypes.c_void_p(address), ctypes.c_size_t(length), _MADV_DONTNEED):
        raise OSError(ctypes.get_errno(), "madvise")


def keep_loaded() -> None:
    """Once all is loaded: modules and classes stay until the end, and going through them in each full collection would hold the
    event loop for 30 ms, in the middle of whatever is under way."""
    gc.collect()
    gc.freeze()
