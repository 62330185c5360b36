"""Addresses and copies of buffers, with the gateway and the client in one process."""

import ctypes
import mmap

import numpy
import pytest

from forebay.lanes.memory import BLOCK, aligned
from forebay_gateway.cache.io import IoPool
from forebay_wire.memory import address_of, copy


def test_addresses() -> None:
    assert IoPool  # the gateway's use of the same functions of the interpreter is loaded too
    view = aligned(3 * BLOCK)
    assert address_of(view) % BLOCK == 0
    assert address_of(view[5:]) == address_of(view) + 5
    assert address_of(view[5:].toreadonly()) == address_of(view) + 5
    array = numpy.arange(10, dtype=numpy.uint8)
    assert address_of(memoryview(array)) == array.ctypes.data
    data = bytearray(b"abc")
    assert address_of(memoryview(data)) == ctypes.addressof(ctypes.c_char.from_buffer(data))


def test_copies_stay_inside() -> None:
    with mmap.mmap(-1, BLOCK) as memory, memoryview(memory) as target:
        copy(target[10:13], memoryview(b"abc"))
        assert bytes(target[9:14]) == b"\0abc\0"
        for wrong in (target[:2], target[:3].toreadonly()):
            with pytest.raises(ValueError, match="do not go into"):
                copy(wrong, memoryview(b"abc"))
            wrong.release()
