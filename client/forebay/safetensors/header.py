"""The header of a safetensors file that lies elsewhere: what is in it, as safetensors itself reads it.

Owns where each tensor's bytes lie. The header is given to safetensors as a file of the same length whose data is a hole, so
that its rules, its errors and its types are its own and not a copy of them. Does not own reading the data.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import safetensors

from forebay.safetensors.hole import PACKED, hole

_LENGTH_BYTES = 8
_FIRST_READ_BYTES = 64 << 10  # most headers, length included
_HEADER_BYTES_MAX = 100_000_000  # safetensors' own limit; it says so when it is given the length alone


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor: its bytes in the file, and its shape as its framework counts it."""

    begin: int
    end: int
    shape: tuple[int, ...]
    dtype: str


class Header:
    """Of one file. Raises SafetensorError where it is none, or is not of the file's length."""

    def __init__(self, read: Callable[[int, int], bytes], size: int, framework: str) -> None:
        """`read(offset, length)` gives bytes of a file of `size` bytes."""
        data = read(0, min(size, _FIRST_READ_BYTES))
        length = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        if len(data) < length <= min(size, _HEADER_BYTES_MAX):
            data += read(len(data), length - len(data))
        data = data[:length]
        with hole(data, size) as path, safetensors.safe_open(path, framework) as file:
            self.names: list[str] = list(file.keys())
            self.offset_names: list[str] = list(file.offset_keys())
            self.metadata: dict[str, str] | None = file.metadata()
        found = json.loads(data[_LENGTH_BYTES:])
        self._framework = framework
        self._types: dict[str, Any] = {}
        self._entries = {name: _entry(found[name], length) for name in self.names}

    def entry(self, name: str) -> Entry:
        """Raises SafetensorError where there is no such tensor, in safetensors' words."""
        if name not in self._entries:
            raise safetensors.SafetensorError(f"File does not contain tensor {name}")
        return self._entries[name]

    def logical_shape(self, name: str) -> list[int]:
        """As it stands in the header."""
        entry = self.entry(name)
        packed = PACKED.get(entry.dtype, 1)
        return [*entry.shape[:-1], entry.shape[-1] * packed] if entry.shape else []

    def type_of(self, name: str) -> Any:
        """The framework's type of a tensor's elements. Raises what safetensors raises where the framework has none."""
        code = self.entry(name).dtype
        if code not in self._types:
            text = json.dumps({"x": {"dtype": code, "shape": [0], "data_offsets": [0, 0]}}).encode()
            data = len(text).to_bytes(_LENGTH_BYTES, "little") + text
            with hole(data, len(data)) as path, safetensors.safe_open(path, self._framework) as file:
                self._types[code] = file.get_tensor("x").dtype
        return self._types[code]


def _entry(found: dict[str, Any], data_begin: int) -> Entry:
    begin, end = found["data_offsets"]
    shape = list(found["shape"])
    if shape:
        shape[-1] //= PACKED.get(found["dtype"], 1)
    return Entry(data_begin + begin, data_begin + end, tuple(shape), found["dtype"])
