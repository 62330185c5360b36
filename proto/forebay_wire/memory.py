"""Where a buffer's bytes lie, and copies that let other threads run: for direct I/O on either side of the wire.

Owns CPython's buffer structure. Does not own memory.
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


# Prototypes of our own: those that hang on ctypes.pythonapi are shared with whatever else runs in a trainer's process.
_get_buffer = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.POINTER(_PyBuffer), ctypes.c_int)(
    ("PyObject_GetBuffer", ctypes.pythonapi)
)
_release_buffer = ctypes.PYFUNCTYPE(None, ctypes.POINTER(_PyBuffer))(("PyBuffer_Release", ctypes.pythonapi))


def address_of(view: memoryview) -> int:
    """Where the view's memory lies, also where it is read-only. It stays there as long as the view is not released."""
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
