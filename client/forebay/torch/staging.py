"""What `dcp.async_save` copies before it lets the trainer go on: into memory that is warm, since the save before used it.

Owns the copy of a state dict and the memory behind it. Does not own what is saved of it, nor when (DCP). DCP's own stager takes
new memory for each save, and most of the time that it blocks goes into getting pages for it.
"""

import copy
import ctypes
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import STATE_DICT_TYPE
from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.tensor import DTensor

from forebay.buffers import PAGE_BYTES, Mapping

_AS_IT_IS = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_ALIGNED_BYTES = 64  # a cache line, and what torch aligns to


class WarmStager(AsyncStager):
    """Copies the tensors of a state dict, so that what is changed afterwards does not change what is saved.

    The memory of a copy is used again once all of its tensors are gone, which is when DCP has saved them; a save that begins
    before takes memory of its own. It is kept for the next save, as much as the largest copy so far took, until close().
    Tensors on the CPU share it; those from a GPU go into pinned memory, which torch keeps. Any other object is deep-copied.
    """

    _synchronize_after_execute = False

    def __init__(self) -> None:
        self._free: deque[Mapping] = deque()

    def stage(self, state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
        """The copy; complete when this returns. Raises OSError where there is no memory, and what copy.deepcopy raises."""
        size = sum(_padded(tensor) for tensor in _warm_tensors(state_dict))
        warm = _Room(self._take(size), self._free).copied if size else _cold
        staged: STATE_DICT_TYPE = _copied(state_dict, warm)
        return staged

    @property
    def should_synchronize_after_execute(self) -> bool:
        """DCP asks: the copy is complete already."""
        return False

    def synchronize_staging(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Let go of memory that no save uses."""
        self._free.clear()

    def _take(self, size: int) -> Mapping:
        """What is free and large enough; what is too small goes, or it would lie there for good."""
        while True:
            try:
                mapping = self._free.pop()  # another thread may give some back meanwhile
            except IndexError:
                return Mapping(-(-size // PAGE_BYTES) * PAGE_BYTES)
            if mapping.size >= size:
                return mapping


class _Room:
    """A mapping that is filled with copies of tensors. When the last of these is gone, it is free again."""

    def __init__(self, mapping: Mapping, free: deque[Mapping]) -> None:
        self._owner = (ctypes.c_ubyte * mapping.size).from_address(mapping.address)  # each tensor's storage holds it
        weakref.finalize(self._owner, free.append, mapping).atexit = False
        self._used = 0
        mapping.fault_in(0, mapping.size)

    def copied(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, of the same strides where these leave no gaps."""
        like = torch.empty_like(tensor, device="meta")
        flat = torch.frombuffer(self._owner, dtype=tensor.dtype, count=tensor.numel(), offset=self._used)
        self._used += _padded(tensor)
        made = flat.as_strided(like.size(), like.stride())
        if like.stride() != tensor.stride():
            return made.copy_(tensor)
        # Without gaps: one copy, which several threads of torch would only slow down. A foreign call releases the GIL.
        ctypes.memmove(made.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        return made


def _padded(tensor: torch.Tensor) -> int:
    return int(-(-tensor.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES)


def _is_warm(tensor: torch.Tensor) -> bool:
    """Whether its copy may lie in a mapping."""
    plain = type(tensor) in _PLAIN and tensor.is_cpu and tensor.layout == torch.strided
    return plain and tensor.nbytes > 0 and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg())


def _warm_tensors(value: Any) -> Iterator[torch.Tensor]:
    """Those of a state dict for which _copied() calls `warm`."""
    if isinstance(value, DTensor):
        value = value._local_tensor if value.device.type == "cpu" else None
    if isinstance(value, torch.Tensor):
        if _is_warm(value):
            yield value
    elif isinstance(value, dict):
        for inside in value.values():
            yield from _warm_tensors(inside)
    elif type(value) in (list, tuple):
        for inside in value:
            yield from _warm_tensors(inside)


def _copied(value: Any, warm: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(value, _AS_IT_IS):
        return value
    if isinstance(value, dict):
        return {key: _copied(inside, warm) for key, inside in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(inside, warm) for inside in value)
    if not isinstance(value, torch.Tensor):
        return copy.deepcopy(value)
    if _is_warm(value):
        return warm(value.detach())
    if isinstance(value, DTensor) and value.device.type == "cpu":
        shell = value.detach()  # a new one around the same local tensor
        shell._local_tensor = _copied(value._local_tensor, warm)
        return shell
    return _cold(value)


def _cold(tensor: torch.Tensor) -> torch.Tensor:
    """Of tensors that are none of the plain kind on the CPU."""
    plain = type(tensor) in _PLAIN
    if plain and tensor.is_cuda and tensor.layout == torch.strided:
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor.detach())
    if tensor.device.type not in ("cpu", "meta"):
        return tensor.to(device="cpu")
    return tensor.detach().clone() if plain else copy.deepcopy(tensor)
