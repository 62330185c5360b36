"""Tensors as one safetensors file, on its way to a gateway.

Owns the header's sizes and offsets and the order of the bytes. Which order, which names of types and what may be saved at all
is asked of safetensors itself, with empty tensors in place of the real ones; so the bytes are those that its own save_file()
writes, with one difference: entries of `metadata` are sorted, where safetensors' order changes from one call to the next.
"""

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import numpy
import safetensors

from forebay.api import Client
from forebay.errors import InvalidArgument
from forebay.safetensors.hole import PACKED, hole
from forebay.safetensors.place import client_of, place_of
from forebay.sources import BuffersSource, IterableSource, Piece, Source, view_of
from forebay.types import CommitReceipt

_METADATA = "__metadata__"
_ALIGNMENT = 8  # of the first tensor, in bytes: the header is padded with spaces to it

Tensors = Mapping[str, Any]


def save_file(
    tensors: Tensors,
    run: str,
    step: int | None = None,
    name: str | None = None,
    metadata: Mapping[str, str] | None = None,
    *,
    writers: int = 1,
    writer: int = 0,
    session: str | None = None,
    wait: str = "cache",
    timeout: float | None = None,
    final: bool = False,
    lane: str = "auto",
    address: str | None = None,
    client: Client | None = None,
) -> CommitReceipt:
    """Save a dictionary of torch tensors or of numpy arrays as the shard `name` (default "model.safetensors"), and commit it.

    `run` and `step`, or a path "forebay://RUN/STEP/NAME" in place of `run`. `metadata` stands in the file's header, as with
    safetensors.torch.save_file(); all else is as in Client.checkpoint() and commit(). This is the whole part of its writer: for
    several files in one checkpoint put serialized() of each. Raises what safetensors raises for what it cannot save
    (SafetensorError, ValueError, RuntimeError for tensors that share memory), and as put() and commit().
    """
    run, chosen, name = place_of(run, step, name)
    if not isinstance(chosen, int):
        raise InvalidArgument(f"step {chosen!r} cannot be written, only a number")
    source = serialized(tensors, metadata)
    with client_of(client, address) as used, used.checkpoint(run, chosen, writers, writer, session, lane) as part:
        part.put(name, source)
        return part.commit(wait=wait, timeout=timeout, final=final)


def serialized(tensors: Tensors, metadata: Mapping[str, str] | None = None) -> Source:
    """Tensors as one file, for put(): `checkpoint.put("a.safetensors", serialized(tensors))`.

    Nothing is copied: what lies in the CPU's memory is sent from where it lies, and must not change meanwhile. A tensor on
    another device, or an array of the other byte order, is copied when its turn comes, one at a time. Raises as save_file().
    """
    if _METADATA in tensors:
        raise InvalidArgument(f"a tensor cannot have the name {_METADATA!r}: the file could not be read again")
    torch = sys.modules.get("torch")
    arrays = bool(tensors) and all(isinstance(each, numpy.ndarray) for each in tensors.values())
    plain = dict(tensors)
    given = None if metadata is None else dict(metadata)
    if arrays or torch is None:
        return _source(plain, _stencil_of_arrays(plain, given), given, _array_bytes, lambda array: bool(array.dtype.isnative))
    return _source(plain, _stencil_of_tensors(plain, given), given, _tensor_bytes, lambda tensor: tensor.device.type == "cpu")


def _source(
    tensors: dict[str, Any],
    stencil: dict[str, Any],
    metadata: dict[str, str] | None,
    bytes_of: Callable[[str, Any], memoryview],
    lies_here: Callable[[Any], bool],
) -> Source:
    names = [name for name in stencil if name in tensors]
    header = _header({name: stencil[name]["dtype"] for name in names}, tensors, metadata)
    if all(lies_here(tensor) for tensor in tensors.values()):
        return BuffersSource([memoryview(header), *(bytes_of(name, tensors[name]) for name in names)])
    return _CopiedSource(header, {name: tensors[name] for name in names}, bytes_of)


def _header(dtypes: dict[str, str], tensors: dict[str, Any], metadata: dict[str, str] | None) -> bytes:
    entries: dict[str, Any] = {} if metadata is None else {_METADATA: dict(sorted(metadata.items()))}
    offset = 0
    for name, dtype in dtypes.items():
        shape = [int(size) for size in tensors[name].shape]
        if shape and dtype in PACKED:
            shape[-1] *= PACKED[dtype]
        end = offset + _size_of(tensors[name])
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    header = len(text).to_bytes(8, "little") + text
    with hole(header, len(header) + offset) as path, safetensors.safe_open(path, "np"):
        return header  # one that safetensors can read: it has rules for shapes that the empty tensors did not break


def _size_of(tensor: Any) -> int:
    return int(prod(tensor.shape) * tensor.dtype.itemsize)


def _stencil_of_tensors(tensors: dict[str, Any], metadata: dict[str, str] | None) -> dict[str, Any]:
    """What safetensors says of such tensors: types and order, from empty ones. Raises what it raises for the real ones."""
    import safetensors.torch as host
    import torch

    host._evaluate_tensors_for_save(tensors)
    for name, tensor in tensors.items():
        if not tensor.is_contiguous():
            host.save({name: tensor})  # says so in its own words, before it looks at a byte
    return _parsed(host.save({name: torch.empty(0, dtype=tensor.dtype) for name, tensor in tensors.items()}, metadata))


def _stencil_of_arrays(arrays: dict[str, Any], metadata: dict[str, str] | None) -> dict[str, Any]:
    import safetensors.numpy as host

    for name, array in arrays.items():
        if not isinstance(array, numpy.ndarray):
            raise InvalidArgument(f"tensor {name!r}: a {type(array).__name__} is neither an array nor a torch tensor")
        if not array.flags.c_contiguous:  # safetensors would write other elements
            raise InvalidArgument(f"tensor {name!r}: the array is not C-contiguous; make a contiguous copy first")
    empty = {name: numpy.empty(0, dtype=array.dtype.newbyteorder("=")) for name, array in arrays.items()}
    return _parsed(host.save(empty, metadata))


def _parsed(data: bytes) -> dict[str, Any]:
    text = data[8 : 8 + int.from_bytes(data[:8], "little")]
    if text.startswith(b"{}"):  # no tensors: with metadata, what safetensors 0.8 writes then is no JSON
        return {}
    found: dict[str, Any] = json.loads(text)
    return found


def _tensor_bytes(name: str, tensor: Any) -> memoryview:
    return view_of(tensor.detach().cpu(), f"tensor {name!r}")


def _array_bytes(name: str, array: Any) -> memoryview:
    return view_of(array if array.dtype.isnative else array.byteswap(), f"tensor {name!r}")


class _CopiedSource(Source):
    """Tensors that have to be copied to be sent: one at a time."""

    replayable = True

    def __init__(self, header: bytes, tensors: dict[str, Any], bytes_of: Callable[[str, Any], memoryview]) -> None:
        self._header = header
        self._tensors = tensors
        self._bytes_of = bytes_of
        self.size = len(header) + sum(map(_size_of, tensors.values()))

    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        """See Source."""
        return IterableSource(self._pieces(), "a tensor").chunks(chunk_size)

    def _pieces(self) -> Iterator[memoryview]:
        yield memoryview(self._header)
        for name, tensor in self._tensors.items():
            yield self._bytes_of(name, tensor)
