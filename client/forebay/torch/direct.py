"""Reading an item straight into the tensor that it is for: what torch.save wrote around the data is told by the tensor alone.

Owns that guess and its proof: the bytes around the data, which came with it, must say that this tensor lies just there. Does
not own the way of items for which that cannot be done (values.py).
"""

import os
import secrets
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner
from torch.serialization import skip_data

from forebay.reader import Reader
from forebay.sources import CountingFile, view_of
from forebay.torch.values import MAPPED_BYTES_MIN, NoMapping, Range, memory_file

_MARK_BYTES = 16


@dataclass(frozen=True, slots=True)
class Filled:
    """A tensor that has its bytes already."""

    tensor: torch.Tensor


def target_of(planner: LoadPlanner, wanted: Range) -> torch.Tensor | None:
    """The tensor for a range's only item, where the range can be that tensor's memory and what torch.save puts around it."""
    placed = wanted.items[0]
    lone = len(wanted.items) == 1 and placed.item.type != LoadItemType.BYTE_IO and not placed.transforms
    if not lone or wanted.length < MAPPED_BYTES_MIN or not _hands_out_targets(planner):
        return None
    target = planner.resolve_tensor(placed.item).detach()
    plain = type(target) is torch.Tensor and target.is_cpu and target.layout == torch.strided and target.nbytes >= _MARK_BYTES
    if (
        not plain
        or target.is_quantized
        or target.is_conj()
        or target.is_neg()
        or not 0 < wanted.length - target.nbytes < 1 << 16
    ):
        return None
    return target if torch.empty_like(target, device="meta").stride() == target.stride() else None  # it has no gaps


def _hands_out_targets(planner: LoadPlanner) -> bool:
    """Whether what it resolves is where the bytes stay. One that does something at commit may hand out one tensor for many."""
    kind = type(planner)
    return all(getattr(kind, name) is getattr(DefaultLoadPlanner, name) for name in ("resolve_tensor", "commit_tensor"))


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors without gaps share memory."""
    first, second = sorted((tensor.data_ptr(), tensor.nbytes) for tensor in (one, other))
    return bool(first[0] + first[1] > second[0])


def filled(reader: Reader, wanted: Range, target: torch.Tensor) -> bool:
    """Read the range; False where its item was not laid out as guessed, and what `target` then holds means nothing.

    Raises as Reader.read().
    """
    size, start = _layout(target)
    if size != wanted.length:
        return False
    head, tail = bytearray(start), bytearray(size - start - target.nbytes)
    try:
        with memory_file(size) as descriptor:  # with a hole for the data: it takes no memory
            reader.scatter(wanted.name, [head, _memory(target), tail], wanted.offset)
            return _describe(descriptor, target, head, tail)
    except NoMapping:
        return False


def _layout(target: torch.Tensor) -> tuple[int, int]:
    """How many bytes torch.save makes of such a tensor, and at which of them its data begins."""
    like = torch.empty_like(target)  # with a storage of its own; its memory is never touched
    counter = CountingFile()
    with skip_data():
        torch.save(like, counter)
    return counter.size, counter.skipped_at


def _describe(descriptor: int, target: torch.Tensor, head: bytearray, tail: bytearray) -> bool:
    mark = secrets.token_bytes(_MARK_BYTES)
    os.pwrite(descriptor, head + mark, 0)
    os.pwrite(descriptor, tail, len(head) + target.nbytes)
    try:
        found = torch.load(f"/proc/self/fd/{descriptor}", map_location="cpu", weights_only=True, mmap=True)
    except Exception:  # noqa: BLE001 - whatever it is: the plain way finds out, and says it
        return False
    if not isinstance(found, torch.Tensor) or (found.dtype, found.size()) != (target.dtype, target.size()):
        return False
    return found.stride() == target.stride() and bytes(_memory(found)[:_MARK_BYTES]) == mark


def _memory(tensor: torch.Tensor) -> memoryview:
    """Of a tensor without gaps."""
    storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
    begin = tensor.storage_offset() * tensor.element_size()
    return view_of(storage, "a tensor's storage")[begin : begin + tensor.nbytes]
