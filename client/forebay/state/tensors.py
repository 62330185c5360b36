"""Tensors of a state in files of the safetensors format, which other programs read from a tier as they lie there.

Owns which tensor goes into which file, the files' bytes, and reading them back. Does not own what tensors mean (document.py).
The format (https://github.com/huggingface/safetensors): 8 bytes, little-endian, the length of a JSON header; the header, each
tensor's dtype, shape and place; then the tensors, without holes. Larger elements come first, so that each is aligned.
"""

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from forebay.directories import in_parallel
from forebay.errors import Corrupt
from forebay.reader import Reader
from forebay.sources import FilledSource, IterableSource, Piece, view_of
from forebay.state.document import Json

FILE_BYTES_MAX = 512 << 20  # a larger tensor has a file of its own; what a restore holds besides the state is a few files
HEADER_BYTES_MAX = 100_000_000  # the format's own limit
SUFFIX = ".safetensors"
_STREAMS = 4

_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
_DTYPES = {name: getattr(torch, dtype) for dtype, name in _NAMES.items() if hasattr(torch, dtype)}
_KNOWN = {dtype: name for name, dtype in _DTYPES.items()}


class TensorsFile(FilledSource):
    """One file, made of tensors when it is read; on the CPU and contiguous they are read where they lie."""

    def __init__(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        self.name = name
        self._tensors = sorted(tensors.items(), key=lambda item: -item[1].element_size())  # stable
        header: dict[str, Json] = {}
        at = 0
        for key, tensor in self._tensors:
            known = _KNOWN.get(tensor.dtype)
            shape: list[Json] = list(tensor.shape) if known else [tensor.nbytes]
            header[key] = {"dtype": known or "U8", "shape": shape, "data_offsets": [at, at + tensor.nbytes]}
            at += tensor.nbytes
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._head = len(text).to_bytes(8, "little") + text
        self.size: int = len(self._head) + at

    @property
    def label(self) -> str:
        return f"shard {self.name!r}"

    def chunks(self, chunk_size: int) -> Iterator[Piece]:
        return IterableSource(self._pieces(), self.label).chunks(chunk_size)

    def fill(self, view: memoryview) -> int:
        view[: len(self._head)] = self._head
        at = len(self._head)
        for _, tensor in self._tensors:
            if tensor.nbytes:
                # torch copies: from any device and any strides, on several threads. Unaligned, it copies bytes.
                target = torch.frombuffer(view[at : at + tensor.nbytes], dtype=torch.uint8)
                target.copy_(_flat(tensor))
            at += tensor.nbytes
        return at

    def _pieces(self) -> Iterator[Any]:
        yield self._head
        for _, tensor in self._tensors:
            yield view_of(_flat(tensor).cpu(), self.label)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


class Files:
    """Gathers a part's tensors into files. One that a part has twice (tied weights) is stored once."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._files: list[dict[str, torch.Tensor]] = []
        self._held_bytes = 0
        self._taken: dict[tuple[Any, ...], dict[str, Json]] = {}
        self._names: set[str] = set()

    def add(self, name: str, tensor: torch.Tensor) -> dict[str, Json]:
        """As document.Store."""
        view = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg())
        same = (tensor.data_ptr(), *view)
        if tensor.nbytes and same in self._taken:
            return self._taken[same]
        if not self._files or self._held_bytes + tensor.nbytes > FILE_BYTES_MAX:
            self._files.append({})
            self._held_bytes = 0
        while name in self._names or name == "__metadata__":
            name += "_"
        self._names.add(name)
        self._files[-1][name] = tensor
        self._held_bytes += tensor.nbytes
        node: dict[str, Json] = {"$": "tensor", "file": self._name(len(self._files) - 1), "name": name}
        if tensor.dtype not in _KNOWN:
            shape: list[Json] = list(tensor.shape)
            node |= {"dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape}
        self._taken[same] = node
        return node

    def _name(self, index: int) -> str:
        return f"{self._part}{SUFFIX}" if index == 0 else f"{self._part}-{index + 1:05d}{SUFFIX}"

    def sources(self) -> dict[str, TensorsFile]:
        """By file name; what lies in them is read when they are sent or snapshotted."""
        return {self._name(index): TensorsFile(self._name(index), held) for index, held in enumerate(self._files)}


@dataclass(frozen=True, slots=True)
class _Entry:
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    stop: int


class Loaded:
    """The tensors of some files, each with memory of its own, on the CPU."""

    def __init__(self, reader: Reader, files: Iterable[str]) -> None:
        self._found: dict[tuple[str, str], torch.Tensor] = {}
        self._given: set[tuple[str, str]] = set()

        def read(name: str) -> None:
            self._found.update(((name, key), tensor) for key, tensor in _read(reader, name))

        in_parallel(read, sorted(files), _STREAMS)

    def fetch(self, node: Mapping[str, Any]) -> torch.Tensor:
        """As document.Fetch. What was stored once and is asked for again is a copy: it may change by itself from here on."""
        key = (node["file"], node["name"])
        tensor = self._found[key].clone() if key in self._given else self._found[key]
        self._given.add(key)
        if "dtype" in node:
            dtype = getattr(torch, node["dtype"])
            return tensor.view(dtype).reshape(node["shape"]) if tensor.numel() else torch.empty(node["shape"], dtype=dtype)
        return tensor


def _read(reader: Reader, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    size = reader.shard(name).size
    length = int.from_bytes(reader.read(name, 0, min(8, size)), "little")
    if not 2 <= length <= min(HEADER_BYTES_MAX, size - 8):
        raise Corrupt(f"{name!r}: its header is to have {length} bytes, of {size} in all")
    entries = _entries(name, reader.read(name, 8, length), size - 8 - length)
    data = torch.empty(size - 8 - length, dtype=torch.uint8)
    if data.numel():
        reader.readinto(name, data.numpy(), 8 + length)
    for key, entry in entries.items():
        flat = data[entry.start : entry.stop].clone()  # or each tensor would keep its whole file in memory
        yield key, flat.view(entry.dtype).reshape(entry.shape) if flat.numel() else torch.empty(entry.shape, dtype=entry.dtype)


def _entries(name: str, header: bytes, size: int) -> dict[str, _Entry]:
    try:
        found = {
            key: _Entry(_DTYPES[entry["dtype"]], tuple(entry["shape"]), *entry["data_offsets"])
            for key, entry in json.loads(header).items()
            if key != "__metadata__"
        }
        for key, entry in found.items():
            fits = 0 <= entry.start <= entry.stop <= size and entry.start % entry.dtype.itemsize == 0
            if not fits or math.prod(entry.shape) * entry.dtype.itemsize != entry.stop - entry.start:
                raise ValueError(f"{key!r} does not lie where it is said to")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Corrupt(f"{name!r} is no file of safetensors: {error}") from error
    return found


def files_of(nodes: Sequence[Json]) -> set[str]:
    """The files that documents lead to."""
    found: set[str] = set()
    left: list[Json] = list(nodes)
    while left:
        node = left.pop()
        if isinstance(node, list):
            left.extend(node)
        elif isinstance(node, dict):
            if node.get("$") == "tensor" and isinstance(node.get("file"), str):
                found.add(str(node["file"]))
            left.extend(node.values())
    return found
