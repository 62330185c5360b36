"""Tensors out of a safetensors file that lies in a checkpoint: all of them, one, or some rows of one.

Owns which bytes are read for what is asked, and the memory they come to. Every byte is checked against its checksum before it
is handed out. Does not own the header's meaning (header.py) nor how bytes travel (the client).
"""

import contextlib
from types import TracebackType
from typing import Any

import numpy
import safetensors

from forebay.api import Client
from forebay.errors import Unsupported
from forebay.reader import Reader
from forebay.safetensors.header import Entry, Header
from forebay.safetensors.place import client_of, place_of

_FRAMEWORKS = {"pt": "pt", "torch": "pt", "pytorch": "pt", "np": "np", "numpy": "np"}


def load_file(
    run: str,
    step: int | str | None = None,
    name: str | None = None,
    device: str | int = "cpu",
    *,
    framework: str = "pt",
    source: str = "auto",
    lane: str = "auto",
    address: str | None = None,
    client: Client | None = None,
) -> dict[str, Any]:
    """All tensors of a file, by name: torch tensors on `device`, or numpy arrays with framework "np".

    `run` and `step` (or "latest"), or a path "forebay://RUN/STEP/NAME" in place of `run`; `name` is "model.safetensors" by
    default; `source` and `lane` as in Client.open(). The file is read once, into each tensor's own memory. Raises
    SafetensorError for what is no such file, else as Client.open() and Reader.read().
    """
    with safe_open(run, step, name, framework, device, source=source, lane=lane, address=address, client=client) as file:
        return file.get_tensors()


def safe_open(
    run: str,
    step: int | str | None = None,
    name: str | None = None,
    framework: str = "pt",
    device: str | int = "cpu",
    *,
    mapped: bool = False,
    source: str = "auto",
    lane: str = "auto",
    address: str | None = None,
    client: Client | None = None,
) -> "TensorFile":
    """A file whose tensors are read when they are asked for, each by its own bytes alone; a context manager, like
    safetensors.safe_open. Arguments as in load_file().

    With `mapped` tensors on the CPU are not copied but lie in a private mapping of the cache's own file: Unsupported where the
    fd lane does not reach it (another host, or not in the cache). What get_tensor() hands out of it has been read and checked
    once, in whole chunks; pages that the kernel drops and reads again later are not checked again. Such a tensor may outlive
    the block: its mapping, and the gateway's promise not to evict the file, last until the last tensor of it is gone. Bytes
    that do not match are read in another way, which finds a good copy. Writing to such a tensor changes this process's memory
    only.
    """
    if framework not in _FRAMEWORKS:
        if framework in ("tf", "tensorflow", "jax", "flax", "mlx", "paddle"):
            raise Unsupported(f"framework {framework!r}: read as 'pt' or 'np' and convert")
        raise safetensors.SafetensorError(f"framework {framework} is invalid")
    run, chosen, name = place_of(run, step, name)
    with contextlib.ExitStack() as stack:
        used = stack.enter_context(client_of(client, address))
        reader = used.open(run, used.step_of(run, chosen), source=source, lane=lane)
        return TensorFile(reader, name, _FRAMEWORKS[framework], device, mapped, stack.pop_all())


class TensorFile:
    """What safe_open() gives; its methods are those of safetensors' own."""

    def __init__(
        self, reader: Reader, name: str, framework: str, device: str | int, mapped: bool, ends: contextlib.ExitStack
    ) -> None:
        self._ends = ends
        self._open = True
        with contextlib.ExitStack() as stack:
            stack.callback(self.close)
            size = reader.shard(name).size
            self._reader = reader
            self._name = name
            self._device = device
            self._torch = framework == "pt"
            self._header = Header(lambda offset, length: reader.read(name, offset, length), size, framework)
            self._mapping = reader.mapped(name) if mapped else None
            stack.pop_all()

    def close(self) -> None:
        """End it; what was handed out stays."""
        self._open = False
        self._mapping = None
        self._ends.close()

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def keys(self) -> list[str]:
        """The tensors' names, sorted."""
        return list(self._opened().names)

    def offset_keys(self) -> list[str]:
        """The tensors' names, in the order of their bytes."""
        return list(self._opened().offset_names)

    def metadata(self) -> dict[str, str] | None:
        """What was saved as metadata; None where nothing was."""
        return self._opened().metadata

    def get_tensor(self, name: str) -> Any:
        """One tensor. Raises SafetensorError where there is none of that name, else as Reader.read()."""
        entry = self._opened().entry(name)
        return self._moved(self._rows(name, entry, entry.begin, entry.end, entry.shape))

    def get_tensors(self) -> dict[str, Any]:
        """All tensors by name; without a mapping the file is read once, from its first tensor to its last."""
        names = self._opened().offset_names
        if self._mapping is not None:
            return {name: self.get_tensor(name) for name in names}
        entries = {name: self._header.entry(name) for name in names}
        tensors = {name: self._empty(name, entry.shape) for name, entry in entries.items()}
        if tensors:
            first = min(entry.begin for entry in entries.values())
            self._reader.scatter(self._name, tensors.values(), first)
        for name in names:
            tensors[name] = self._moved(tensors[name])
        return tensors

    def get_slice(self, name: str) -> "TensorSlice":
        """A tensor to take a part of by indexing. Raises SafetensorError where there is none of that name."""
        self._opened().entry(name)
        return TensorSlice(self, name)

    def _opened(self) -> Header:
        if not self._open:
            raise safetensors.SafetensorError("File is closed")
        return self._header

    def _part(self, name: str, index: Any) -> Any:
        entry = self._opened().entry(name)
        self._check(entry, index, name)
        first, *rest = index if isinstance(index, tuple) and index else (index,)
        rows = _rows_of(first, entry.shape)
        if rows is None:
            return self.get_tensor(name)[index]
        row_bytes = (entry.end - entry.begin) // max(1, entry.shape[0])
        low, high = (rows[0], rows[-1] + 1) if len(rows) else (0, 0)
        begin, end = entry.begin + low * row_bytes, entry.begin + high * row_bytes
        read = self._rows(name, entry, begin, end, (high - low, *entry.shape[1:]))
        within = 0 if isinstance(first, int) else slice(None, None, rows.step)
        return self._moved(read[(within, *rest)])

    def _check(self, entry: Entry, index: Any, name: str) -> None:
        """Raise for an index that the framework or safetensors refuses, before a byte is read."""
        if self._torch:
            import torch

            torch.empty(entry.shape, device="meta", dtype=torch.uint8)[index]
        else:
            _check_for_numpy(index, entry.shape)

    def _rows(self, name: str, entry: Entry, begin: int, end: int, shape: tuple[int, ...]) -> Any:
        """The tensor of these bytes, on the CPU."""
        if self._mapping is not None and end > begin:
            view = self._mapping.view(begin, end)
            if view is not None:
                return self._over(view, name, shape)
        tensor = self._empty(name, shape)
        if end > begin:
            self._reader.readinto(self._name, tensor, begin)
        return tensor

    def _empty(self, name: str, shape: tuple[int, ...]) -> Any:
        kind = self._header.type_of(name)
        if not self._torch:
            return numpy.empty(shape, dtype=kind)
        import torch

        return torch.empty(shape, dtype=kind)

    def _over(self, view: memoryview, name: str, shape: tuple[int, ...]) -> Any:
        kind = self._header.type_of(name)
        if not self._torch:
            return numpy.frombuffer(view, dtype=numpy.uint8).view(kind).reshape(shape)
        import torch

        return torch.frombuffer(view, dtype=torch.uint8).view(kind).reshape(shape)

    def _moved(self, tensor: Any) -> Any:
        return tensor.to(self._device) if self._torch and self._device != "cpu" else tensor


class TensorSlice:
    """A tensor of which indexing reads only the rows that are asked for: an integer or a slice in the first place, whatever the
    framework takes behind it. Any other index reads the whole tensor."""

    def __init__(self, file: TensorFile, name: str) -> None:
        self._file = file
        self._name = name

    def get_shape(self) -> list[int]:
        """As the file has it."""
        return self._file._opened().logical_shape(self._name)

    def get_dtype(self) -> str:
        """safetensors' name of the elements' type, such as "BF16"."""
        return self._file._opened().entry(self._name).dtype

    def __getitem__(self, index: Any) -> Any:
        return self._file._part(self._name, index)


def _rows_of(first: Any, shape: tuple[int, ...]) -> range | None:
    """The rows that the first part of an index takes, ascending; None where all are needed."""
    if not shape or isinstance(first, bool):
        return None
    if isinstance(first, int):
        row = first % shape[0]
        return range(row, row + 1)
    return range(*first.indices(shape[0])) if isinstance(first, slice) else None


def _check_for_numpy(index: Any, shape: tuple[int, ...]) -> None:
    """What safetensors refuses of an index into a numpy tensor."""
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [part for part in parts if part is not Ellipsis]
    if len(parts) > len(shape):
        raise safetensors.SafetensorError(f"{index}: more slicing indexes than dimensions in tensor")
    for part in parts:
        if isinstance(part, slice):
            if part.step is not None and part.step <= 0:
                raise safetensors.SafetensorError(f"Slice step must be a positive integer, got {part.step}")
        elif not isinstance(part, int):
            raise safetensors.SafetensorError("Unsupported slice index: expected slice, int, or ellipsis")
    if Ellipsis not in (index if isinstance(index, tuple) else (index,)):
        for axis, (part, size) in enumerate(zip(parts, shape, strict=False)):
            if isinstance(part, int) and not -size <= part < size:
                raise safetensors.SafetensorError(f"Invalid index {part} for dimension {axis} of size {size}")
