"""State dicts as JSON, their tensors beside it.

Owns what may stand in a state dict and how it is written down: JSON's own values as they are, all else as an object whose "$"
says what it is. Does not own where tensors go (tensors.py). Nothing is pickled, so that reading a document runs no code of it.
"""

import base64
import collections
import datetime
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch

from forebay.errors import Corrupt, InvalidArgument

DEPTH_MAX = 100

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
_PLAIN = (torch.Tensor, torch.nn.Parameter, getattr(torch.nn, "Buffer", torch.nn.Parameter))
_ARRAY_KINDS = "biufcSUmM"  # numpy's letters for what has plain bytes


class Store(Protocol):
    """Where tensors go while a document is written."""

    def add(self, name: str, tensor: torch.Tensor) -> dict[str, Json]:
        """Take a tensor; what leads to it again."""
        ...


Fetch = Callable[[Mapping[str, Any]], torch.Tensor]


def encode(value: Any, where: str, store: Store) -> Json:
    """A state dict as JSON; `where` is what to call it. Raises InvalidArgument naming what cannot be saved, and where it is."""
    return _Encoder(store, where).encode(value, "", 0)


class _Encoder:
    def __init__(self, store: Store, where: str) -> None:
        self._store = store
        self._where = where

    def encode(self, value: Any, path: str, depth: int) -> Json:
        if depth > DEPTH_MAX:
            raise InvalidArgument(f"{self._at(path)}: nested deeper than {DEPTH_MAX}, or it holds itself")
        kind = type(value)
        if value is None or kind in (bool, int):
            return value  # type: ignore[no-any-return]
        if kind is str:  # JSON would make one character of two halves
            return value if _is_text(value) else {"$": "str", "base64": _text(value.encode("utf-8", "surrogatepass"))}
        if kind is float:
            return value if math.isfinite(value) else {"$": "float", "value": repr(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind in (list, tuple, set, frozenset, torch.Size, collections.deque):
            return self._sequence(value, path, depth)
        if kind in (dict, collections.OrderedDict, collections.defaultdict, collections.Counter):
            return self._mapping(value, path, depth)
        return self._other(value, path)

    def _at(self, path: str) -> str:
        return f"{self._where}: {path}" if path else self._where

    def _tensor(self, tensor: torch.Tensor, path: str) -> Json:
        if type(tensor) not in _PLAIN:
            hint = "; torch.distributed.checkpoint saves it (forebay.torch)" if hasattr(tensor, "placements") else ""
            raise InvalidArgument(f"{self._at(path)}: a {type(tensor).__name__} is not a plain tensor{hint}")
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            said = "quantized" if tensor.is_quantized else f"on {tensor.device} with layout {tensor.layout}"
            raise InvalidArgument(f"{self._at(path)}: a tensor {said} has no plain bytes")
        return self._store.add(path or "value", tensor.detach())

    def _sequence(self, value: Iterable[Any], path: str, depth: int) -> Json:
        kind = type(value)
        inside = sorted(value, key=repr) if kind in (set, frozenset) else value
        items = [self.encode(each, _below(path, index), depth + 1) for index, each in enumerate(inside)]
        if kind is list:
            return items
        return {"$": {torch.Size: "size"}.get(kind, kind.__name__), "items": items}

    def _mapping(self, value: Mapping[Any, Any], path: str, depth: int) -> Json:
        kind = type(value)
        plain = kind in (dict, collections.defaultdict)
        if plain and all(type(key) is str and _is_text(key) for key in value) and "$" not in value:
            return {key: self.encode(each, _below(path, key), depth + 1) for key, each in value.items()}
        items: list[Json] = [
            [self.encode(key, f"{path} (a key)", depth + 1), self.encode(each, _below(path, key), depth + 1)]
            for key, each in value.items()
        ]
        made: dict[str, Json] = {"$": "dict" if plain else kind.__name__, "items": items}
        if (versions := getattr(value, "_metadata", None)) is not None:  # of a module's state dict: the modules' versions
            made["metadata"] = self.encode(versions, _below(path, "_metadata"), depth + 1)
        return made

    def _other(self, value: Any, path: str) -> Json:
        match value:
            case bytes() | bytearray():
                return {"$": type(value).__name__, "base64": _text(value)}
            case complex() if type(value) is complex:
                return {"$": "complex", "value": [self.encode(part, path, 0) for part in (value.real, value.imag)]}
            case torch.dtype() | torch.device():
                return {"$": type(value).__name__, "value": str(value).removeprefix("torch.")}
            case datetime.timedelta():
                return {"$": "timedelta", "value": [value.days, value.seconds, value.microseconds]}
        if type(value).__module__ == "numpy" and hasattr(value, "dtype") and value.dtype.kind in _ARRAY_KINDS:
            import numpy

            array = numpy.ascontiguousarray(value)
            shape: list[Json] = list(numpy.shape(value))
            scalar = isinstance(value, numpy.generic)
            return {
                "$": "scalar" if scalar else "array",
                "dtype": array.dtype.str,
                "shape": shape,
                "base64": _text(array.tobytes()),
            }
        raise InvalidArgument(
            f"{self._at(path)}: a value of type {type(value).__module__}.{type(value).__qualname__} cannot be saved; a state "
            "may hold tensors, arrays, numbers, text, bytes, None, and lists, tuples, sets and dicts of these"
        )


def decode(node: Json, fetch: Fetch) -> Any:
    """The state dict again. Raises Corrupt for what encode() does not make."""
    try:
        return _decode(node, fetch)
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise Corrupt(f"the state's document cannot be understood: {error!r}") from error


def _decode(node: Any, fetch: Fetch) -> Any:
    if isinstance(node, list):
        return [_decode(each, fetch) for each in node]
    if not isinstance(node, dict):
        return node
    if "$" not in node:
        return {key: _decode(each, fetch) for key, each in node.items()}
    kind = node["$"]
    if kind == "tensor":
        return fetch(node)
    if kind in _SEQUENCES:
        return _SEQUENCES[kind](_decode(each, fetch) for each in node["items"])
    if kind in _MAPPINGS:
        made = _MAPPINGS[kind]({_decode(key, fetch): _decode(each, fetch) for key, each in node["items"]})
        if "metadata" in node:
            made._metadata = _decode(node["metadata"], fetch)
        return made
    return _VALUES[kind](node)


def _array(node: Mapping[str, Any]) -> Any:
    import numpy

    if (dtype := numpy.dtype(node["dtype"])).kind not in _ARRAY_KINDS:
        raise ValueError(node["dtype"])
    array = numpy.frombuffer(_bytes(node), dtype).reshape(node["shape"]).copy()
    return array[()] if node["$"] == "scalar" else array


def _dtype(node: Mapping[str, Any]) -> torch.dtype:
    if not isinstance(found := getattr(torch, node["value"]), torch.dtype):
        raise ValueError(node["value"])
    return found


_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "size": torch.Size,
    "deque": collections.deque,
}
_MAPPINGS: dict[str, Callable[[Mapping[Any, Any]], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": collections.Counter,
}
_VALUES: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "float": lambda node: float(node["value"]),
    "complex": lambda node: complex(*(_decode(part, _no_tensor) for part in node["value"])),
    "str": lambda node: _bytes(node).decode("utf-8", "surrogatepass"),
    "bytes": lambda node: _bytes(node),
    "bytearray": lambda node: bytearray(_bytes(node)),
    "dtype": _dtype,
    "device": lambda node: torch.device(node["value"]),
    "timedelta": lambda node: datetime.timedelta(*node["value"]),
    "array": _array,
    "scalar": _array,
}


def _no_tensor(node: Mapping[str, Any]) -> torch.Tensor:
    raise ValueError(node)


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _below(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _text(data: bytes | bytearray | memoryview) -> str:
    return base64.b64encode(data).decode("ascii")


def _bytes(node: Mapping[str, Any]) -> bytes:
    return base64.b64decode(node["base64"], validate=True)


class Inline:
    """Tensors in the document itself: for few and small ones."""

    def add(self, name: str, tensor: torch.Tensor) -> dict[str, Json]:
        """As Store."""
        flat = tensor.cpu().contiguous().resolve_conj().resolve_neg().reshape(-1).view(torch.uint8)
        shape: list[Json] = list(tensor.shape)
        return {"$": "tensor", "dtype": str(tensor.dtype).removeprefix("torch."), "shape": shape, "base64": _text(flat.numpy())}


def inline(node: Mapping[str, Any]) -> torch.Tensor:
    """What Inline wrote."""
    data = bytearray(_bytes(node))
    dtype = _dtype({"value": node["dtype"]})
    return torch.frombuffer(data, dtype=dtype).reshape(node["shape"]) if data else torch.empty(node["shape"], dtype=dtype)
