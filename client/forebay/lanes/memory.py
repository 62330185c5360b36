"""Memory for direct I/O: where a buffer lies, page-aligned buffers of our own, and copies that let other threads run.

Owns addresses. Does not own files.
"""

import ctypes
import mmap

BLOCK = 4096  # O_DIRECT takes addresses, offsets and lengths that are multiples of this on any disk in use


class _PyBuffer(ctypes.Structure):
    """Py_buffer, as CPython's stable ABI fixes it since 3.11."""

    _fields_ = (
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


_get_buffer = ctypes.pythonapi.PyObject_GetBuffer
_get_buffer.argtypes = (ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)
_get_buffer.restype = ctypes.c_int
_release_buffer = ctypes.pythonapi.PyBuffer_Release
_release_buffer.argtypes = (ctypes.POINTER(_PyBuffer),)
_release_buffer.restype = None


def align(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def address_of(view: memoryview) -> int:
    """Where the view's memory lies. It stays there as long as the view is not released."""
    found = _PyBuffer()
    _get_buffer(view, ctypes.byref(found), 0)
    try:
        return int(found.buf or 0)
    finally:
        _release_buffer(ctypes.byref(found))


def copy(target: memoryview, source: memoryview) -> None:
    """All of `source` to the front of `target`. A slice assignment would keep the interpreter lock for the whole copy."""
    if target.readonly or source.nbytes > target.nbytes:
        raise ValueError(f"{source.nbytes} bytes do not go into {target.nbytes}, or it is read-only")
    ctypes.memmove(address_of(target), address_of(source), source.nbytes)


def aligned(size: int) -> memoryview:
    """Zeroed memory of whole blocks, page-aligned; freed when the last view of it goes. A forked child does not have it: direct
    reads under way would else end in whichever process's copy of a page."""
    memory = mmap.mmap(-1, max(align(size), BLOCK), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.madvise(mmap.MADV_DONTFORK)
    return memoryview(memory)


def give_to_children(view: memoryview) -> None:
    """Aligned memory that is handed out: nothing is read into it any more, and a child may look at what its parent got."""
    assert isinstance(view.obj, mmap.mmap)
    view.obj.madvise(mmap.MADV_DOFORK)
