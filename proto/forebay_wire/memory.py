"""Where a buffer lies in memory: for copies that let other threads run, and for direct I/O, which asks for alignment.

Owns the one place that looks under Python's buffers. ctypes keeps one object for each of the interpreter's own functions, for
all who use it, so its declaration has to be in one place.
"""

import ctypes


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
