"""A JSON document that carries a CRC32C over itself, read and written in pieces where it is long.

Owns the text and its checksum. Does not own what a document says (manifest.py, entries.py).

"crc32c" is the CRC32C (8 hex digits) of the same object without that key, serialized with sorted keys and without white space,
as UTF-8.
"""

import json
import re
from collections.abc import Iterator
from typing import Any

from forebay_wire.checksums import crc32c

FORMAT_VERSION = 1
PACKS_VERSION = 2  # of documents that name packs; all others are as FORMAT_VERSION has them
SHARDS_A_PIECE = 256
LONG_DOCUMENT_BYTES = 64 << 10
_DECODER = json.JSONDecoder()
_OF_OBJECTS = frozenset({"parts", "packs"})  # lists whose objects are long themselves
_LONG_LISTS = _OF_OBJECTS | {"shards", "entries"}
_SPACE = re.compile(r"[ \t\n\r]*")


class ManifestError(ValueError):
    """A document that is damaged, or of a version this code does not read."""


class NewerVersion(ManifestError):
    """A whole document that a later release wrote: not ours to judge, to drop or to write over."""


def what_is_wrong(name: str, error: ManifestError) -> str:
    """A clause for people on a document that cannot be read: `name` is damaged, or a later release's."""
    said = "was written by a newer release" if isinstance(error, NewerVersion) else "is damaged"
    return f"{name} {said}: {error}"


def seal(body: dict[str, Any]) -> bytes:
    """The document, its checksum first."""
    content = _canonical(body)
    return _checksum_head(crc32c(content)) + content[1:]  # "crc32c" sorts before all other keys


def open_document(document: bytes, expected_format: str) -> dict[str, Any]:
    """What it says, without its checksum. Raises ManifestError for what is damaged, or of another format or version."""
    try:
        body = loads(document)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"not JSON: {error}") from error
    if not isinstance(body, dict) or body.get("format") != expected_format:
        raise ManifestError(f"not a {expected_format} document")
    _check_sum(document, body, expected_format)  # first: a bit that flipped in the version makes no newer document
    version = body.get("version")
    if version != (PACKS_VERSION if _names_packs(body) else FORMAT_VERSION):
        reads = f"this release reads {FORMAT_VERSION}, and {PACKS_VERSION} of documents with packs"
        is_newer = isinstance(version, int) and version > PACKS_VERSION
        raise (NewerVersion if is_newer else ManifestError)(f"{expected_format} version {version!r}; {reads}")
    return body


def _check_sum(document: bytes, body: dict[str, Any], expected_format: str) -> None:
    """Takes the checksum out of `body`."""
    expected = body.pop("crc32c", None)
    head = _checksum_head(0)
    as_written = crc32c(memoryview(document)[len(head) :], crc32c(b"{"))
    if document.startswith(_checksum_head(as_written)):
        return
    try:  # white space, or another order of keys
        actual = f"{crc32c(_canonical(body)):08x}"
    except (ValueError, UnicodeEncodeError) as error:
        raise ManifestError(f"{expected_format}: {error}") from error
    if expected != actual:
        raise ManifestError(f"{expected_format}: damaged, its checksum is {actual} and should be {expected}")


def _canonical(body: dict[str, Any]) -> bytes:
    return "".join(_pieces(body)).encode("utf-8")


def _dumps(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _pieces(body: dict[str, Any]) -> Iterator[str]:
    """The same text in pieces: one call over a long document would hold up all other threads until it is done."""
    comma = "{"
    for key in sorted(body):
        value = body[key]
        yield f"{comma}{_dumps(key)}:"
        comma = ","
        if key in _OF_OBJECTS and isinstance(value, list) and value and all(isinstance(each, dict) for each in value):
            for index, each in enumerate(value):
                yield "," if index else "["
                yield from _pieces(each)
            yield "]"
        elif key in ("shards", "entries") and isinstance(value, list) and value:
            for begin in range(0, len(value), SHARDS_A_PIECE):
                yield "," if begin else "["
                yield _dumps(value[begin : begin + SHARDS_A_PIECE])[1:-1]
            yield "]"
        else:
            yield _dumps(value)
    yield "}" if body else "{}"


def _checksum_head(crc: int) -> bytes:
    return b'{"crc32c":"%08x",' % crc


def loads(document: bytes) -> Any:
    """As json.loads; a long document shard by shard, so that other threads have their turn."""
    if len(document) < LONG_DOCUMENT_BYTES:
        return json.loads(document)
    text = document.decode(json.detect_encoding(document), "surrogatepass")
    body, end = _read(text, _skip(text, 0), "")
    if _skip(text, end) != len(text):
        raise ValueError("extra data after the document")
    return body


def _read(text: str, at: int, key: str) -> tuple[Any, int]:
    """The value at `at` and where it ends; `key` says what it belongs to, "" for the document or a part of it."""
    opening = text[at : at + 1]
    if key == "" and opening == "{":
        return _read_object(text, at)
    if key in _LONG_LISTS and opening == "[":
        return _read_array(text, at, "" if key in _OF_OBJECTS else "shard")
    return _DECODER.raw_decode(text, at)


def _read_object(text: str, at: int) -> tuple[dict[str, Any], int]:
    found: dict[str, Any] = {}
    at = _skip(text, at + 1)
    if text[at : at + 1] == "}":
        return found, at + 1
    while True:
        if text[at : at + 1] != '"':
            raise ValueError(f"a key is expected at character {at}")
        key, at = _DECODER.raw_decode(text, at)
        at = _skip(text, _after(text, at, ":"))
        found[key], at = _read(text, at, key or " ")
        at = _skip(text, at)
        if text[at : at + 1] == "}":
            return found, at + 1
        at = _skip(text, _after(text, at, ","))


def _read_array(text: str, at: int, key: str) -> tuple[list[Any], int]:
    found: list[Any] = []
    at = _skip(text, at + 1)
    if text[at : at + 1] == "]":
        return found, at + 1
    while True:
        value, at = _read(text, at, key)
        found.append(value)
        at = _skip(text, at)
        if text[at : at + 1] == "]":
            return found, at + 1
        at = _skip(text, _after(text, at, ","))


def _skip(text: str, at: int) -> int:
    """Behind white space."""
    match = _SPACE.match(text, at)
    return at if match is None else match.end()


def _after(text: str, at: int, sign: str) -> int:
    at = _skip(text, at)
    if text[at : at + 1] != sign:
        raise ValueError(f"{sign!r} is expected at character {at}")
    return at + 1


def _names_packs(body: dict[str, Any]) -> bool:
    parts = body.get("parts")
    return "packs" in body or (isinstance(parts, list) and any(isinstance(part, dict) and "packs" in part for part in parts))
