"""What the bytes of an item mean: as torch's FileSystemReader takes them, and with fewer copies where they are many.

Owns reading one range and unpickling what lies in it. Does not own which ranges are read, nor where values go (reader.py).
"""

import contextlib
import dataclasses
import io
import mmap
import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.distributed._shard._utils import narrow_tensor_by_index
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from forebay.reader import Reader
from forebay.torch.versions import transformed

MAPPED_BYTES_MIN = 1 << 20  # below this a mapping costs more than the copies that it saves


@dataclasses.dataclass(frozen=True, slots=True)
class Placed:
    """An item, and where it lies in its file."""

    item: ReadItem
    offset: int
    length: int
    transforms: Sequence[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Bytes of one file, and the items that lie in them."""

    name: str
    offset: int
    length: int
    items: tuple[Placed, ...]


def values_of(reader: Reader, wanted: Range) -> list[tuple[ReadItem, Any]]:
    """Each item's value: bytes, or a tensor that is narrowed to what the plan needs of it. Raises as Reader.read()."""
    first = wanted.items[0]
    alone = len(wanted.items) == 1 and first.item.type != LoadItemType.BYTE_IO and not first.transforms
    if alone and wanted.length >= MAPPED_BYTES_MIN:
        with contextlib.suppress(NoMapping):
            return [(first.item, _narrowed(_mapped(reader, wanted), first.item))]
    data = reader.read(wanted.name, wanted.offset, wanted.length)
    return [(placed.item, _value(placed, _inside(data, placed, wanted.offset))) for placed in wanted.items]


def _inside(data: bytes, placed: Placed, start: int) -> io.BytesIO:
    at = placed.offset - start
    if placed.length == len(data):
        return io.BytesIO(data)  # shared, not copied
    return io.BytesIO(memoryview(data)[at : at + placed.length])


def _value(placed: Placed, stream: io.BytesIO) -> Any:
    plain = transformed(placed.item, placed.transforms, stream)
    if plain is not stream and (placed.item.type == LoadItemType.BYTE_IO or not plain.seekable()):
        plain = io.BytesIO(plain.read(-1))
    if placed.item.type == LoadItemType.BYTE_IO:
        return plain
    return _narrowed(torch.load(plain, map_location="cpu", weights_only=True), placed.item)


def _narrowed(tensor: torch.Tensor, item: ReadItem) -> torch.Tensor:
    return narrow_tensor_by_index(tensor, item.storage_offsets, item.lengths)


class NoMapping(Exception):
    """It has to be read the plain way."""


def _mapped(reader: Reader, wanted: Range) -> torch.Tensor:
    """A tensor whose data is what was read: torch maps a file that lies in memory, and neither copies it nor sums it up again,
    as its bytes have been checked on the way here."""
    with memory_file(wanted.length) as descriptor:
        with mmap.mmap(descriptor, wanted.length) as memory:
            reader.readinto(wanted.name, memory, wanted.offset)
        try:
            return torch.load(f"/proc/self/fd/{descriptor}", map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError as error:  # of torch's format before zip files, which it cannot map
            raise NoMapping from error


@contextlib.contextmanager
def memory_file(size: int) -> Iterator[int]:
    """A file that lies in memory, of `size` bytes that take none of it yet. Raises NoMapping."""
    try:
        descriptor = os.memfd_create("forebay-dcp", os.MFD_CLOEXEC)
    except OSError as error:  # a sandbox may not allow it
        raise NoMapping from error
    try:
        os.ftruncate(descriptor, size)
        yield descriptor
    finally:
        os.close(descriptor)
