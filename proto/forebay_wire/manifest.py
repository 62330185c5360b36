"""The JSON documents that lie beside the shards: a writer's part record and the checkpoint's manifest.

Owns their format: version 1, and version 2 for those that name packs, which a release that knows none must not take for
complete. A part record says that one writer's shards are there; a manifest says that the checkpoint is
complete, and carries all that a reader needs to check every byte. Both carry a CRC32C over themselves.

A document is a JSON object; "crc32c" is the CRC32C (8 hex digits) of the same object without that key, serialized with sorted
keys and without white space, as UTF-8. "chunks" is base64 of the chunk CRCs, each 4 bytes little-endian. "packs" lists packs
like shards, each with its "entries": [name, size, CRC32C as 8 hex digits, offset in the pack].
"""

import base64
import binascii
import json
import re
import sys
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from forebay_wire.checksums import crc32c, crc32c_of_chunks
from forebay_wire.names import InvalidName, check_run, check_session, check_shard_name, check_step, file_and_directory
from forebay_wire.packs import MAX_PACK_BYTES, MAX_PACK_SHARDS, PackedShard, PackError, PackIndex, is_pack_name

FORMAT_VERSION = 1
PACKS_VERSION = 2  # of documents that name packs; all others are as FORMAT_VERSION has them
MIN_CHUNK_SIZE = 64 << 10
MAX_CHUNK_SIZE = 64 << 20
SHARDS_A_PIECE = 256
LONG_DOCUMENT_BYTES = 64 << 10
_DECODER = json.JSONDecoder()
_OF_OBJECTS = frozenset({"parts", "packs"})  # lists whose objects are long themselves
_LONG_LISTS = _OF_OBJECTS | {"shards", "entries"}
_SPACE = re.compile(r"[ \t\n\r]*")


class ManifestError(ValueError):
    """A document that is damaged, or of a version this code does not read."""


def pack_chunk_crcs(crcs: Iterable[int]) -> bytes:
    """Chunk CRCs as they lie on disk: 4 bytes little-endian each."""
    table = array("I", crcs)
    if sys.byteorder == "big":
        table.byteswap()
    return table.tobytes()


def unpack_chunk_crcs(table: bytes) -> "array[int]":
    """The inverse of pack_chunk_crcs."""
    crcs = array("I")
    crcs.frombytes(table)
    if sys.byteorder == "big":
        crcs.byteswap()
    return crcs


def chunk_count(size: int, chunk_size: int) -> int:
    """Chunks in a shard of `size` bytes; an empty shard has none."""
    return -(-size // chunk_size)


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """One shard: name, size in bytes, CRC32C, and the packed CRC32C table of its chunks."""

    name: str
    size: int
    crc32c: int
    chunk_size: int
    chunks: bytes = field(repr=False)

    def check(self) -> None:
        """Raise ManifestError unless name, sizes and checksums agree with each other."""
        try:
            check_shard_name(self.name)
        except InvalidName as error:
            raise ManifestError(str(error)) from error
        self.check_sums()

    def check_sums(self) -> None:
        """As check(), of all but the name."""
        if not MIN_CHUNK_SIZE <= self.chunk_size <= MAX_CHUNK_SIZE or self.chunk_size & (self.chunk_size - 1):
            raise ManifestError(f"shard {self.name!r}: chunk size {self.chunk_size} is no power of two in range")
        if self.size < 0 or len(self.chunks) != 4 * chunk_count(self.size, self.chunk_size):
            raise ManifestError(f"shard {self.name!r}: the chunk table does not fit the size {self.size}")
        if crc32c_of_chunks(unpack_chunk_crcs(self.chunks), self.chunk_size, self.size) != self.crc32c:
            raise ManifestError(f"shard {self.name!r}: chunk CRCs do not combine to the shard's CRC")

    def chunk_crcs(self) -> "array[int]":
        """CRC32C of each chunk, in order."""
        return unpack_chunk_crcs(self.chunks)


@dataclass(frozen=True, slots=True)
class PackEntry:
    """One pack: the file as a shard of a reserved name, and what lies where in it."""

    file: ShardEntry
    index: PackIndex = field(repr=False)

    def check(self) -> None:
        """Raise ManifestError unless name, sizes, checksums and index agree with each other."""
        if not is_pack_name(self.file.name):
            raise ManifestError(f"{self.file.name!r} is no name of a pack")
        self.file.check_sums()
        try:
            self.index.check(self.file.size)
        except PackError as error:
            raise ManifestError(f"pack {self.file.name!r}: {error}") from error


@dataclass(frozen=True, slots=True)
class PartRecord:
    """All shards of one writer, put and verified. `shards` are those with a file of their own, `packs` hold the others."""

    run: str
    step: int
    session: str
    writer: int
    writers: int
    node: str
    shards: tuple[ShardEntry, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    packs: tuple[PackEntry, ...] = ()
    kind: str = ""  # "final" or "preemption"; "" for a periodic one, and in documents of releases that knew no kinds
    tiers: tuple[str, ...] | None = (
        None  # in a cache's part file: what a policy restricts it to, none: it is transient; None: all
    )

    def files(self) -> Iterator[tuple[ShardEntry, PackIndex | None]]:
        """Every file there is of it: shards, then packs with their index."""
        yield from ((shard, None) for shard in self.shards)
        yield from ((pack.file, pack.index) for pack in self.packs)

    def names(self) -> Iterator[str]:
        """Of every shard, wherever it lies."""
        yield from (shard.name for shard in self.shards)
        for pack in self.packs:
            yield from (shard.name for shard in pack.index)

    def to_json(self) -> bytes:
        """The record as a document."""
        return _seal(
            {
                "format": "forebay.part",
                "version": _version((self,)),
                "run": self.run,
                "step": self.step,
                "session": self.session,
                "writer": self.writer,
                "writers": self.writers,
                "node": self.node,
                "metadata": self.metadata,
                **({"kind": self.kind} if self.kind else {}),
                **({} if self.tiers is None else {"tiers": list(self.tiers)}),
                **_files_to_json(self),
            }
        )

    @classmethod
    def from_json(cls, document: bytes) -> "PartRecord":
        """Parse and check a document; raises ManifestError."""
        body = _open(document, "forebay.part")
        try:
            part = cls(
                run=check_run(_text(body["run"])),
                step=check_step(body["step"]),
                session=check_session(_text(body["session"])),
                writer=_unsigned(body["writer"]),
                writers=_unsigned(body["writers"]),
                node=_text(body["node"]),
                shards=tuple(_shard_from_json(shard) for shard in _list(body["shards"])),
                metadata=_object(body["metadata"]),
                packs=_packs_from_json(body),
                kind=_text(body.get("kind", "")),
                tiers=tuple(map(_text, _list(body["tiers"]))) if "tiers" in body else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"part record: {_clause(error)}") from error
        if part.writer >= part.writers:
            raise ManifestError(f"part record: writer {part.writer} of {part.writers}")
        if part.packs:
            _check_distinct((part,))
        return part


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint: every part of one session."""

    run: str
    step: int
    session: str
    writers: int
    node: str
    parts: tuple[PartRecord, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_parts(cls, parts: Iterable[PartRecord], node: str) -> "Manifest":
        """Join the parts of one session; raises ManifestError where they do not make one whole checkpoint."""
        ordered = tuple(sorted(parts, key=lambda part: part.writer))
        if not ordered:
            raise ManifestError("a manifest needs at least one part")
        first = ordered[0]
        manifest = cls(first.run, first.step, first.session, first.writers, node, ordered, first.metadata)
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ManifestError unless the parts make one whole checkpoint with distinct shard names."""
        # The count first: a document may claim any number of writers.
        if len(self.parts) != self.writers or any(part.writer != index for index, part in enumerate(self.parts)):
            raise ManifestError(f"manifest: parts do not cover writers 0 to {self.writers - 1}")
        for part in self.parts:
            if (part.run, part.step, part.session, part.writers) != (self.run, self.step, self.session, self.writers):
                raise ManifestError(f"manifest: part {part.writer} belongs to another checkpoint or session")
        seen = _check_distinct(self.parts)
        if (clash := file_and_directory(seen)) is not None:
            raise ManifestError(f"manifest: shards {clash[0]!r} and {clash[1]!r} cannot both be files on a tier")

    def shards(self) -> Iterator[tuple[int, ShardEntry]]:
        """(writer, shard) of every shard with a file of its own."""
        for part in self.parts:
            for shard in part.shards:
                yield part.writer, shard

    def files(self) -> Iterator[tuple[int, ShardEntry, PackIndex | None]]:
        """(writer, file, its index where it is a pack) of every part."""
        for part in self.parts:
            for file, index in part.files():
                yield part.writer, file, index

    def to_json(self) -> bytes:
        """The manifest as a document."""
        return _seal(
            {
                "format": "forebay.manifest",
                "version": _version(self.parts),
                "run": self.run,
                "step": self.step,
                "session": self.session,
                "writers": self.writers,
                "node": self.node,
                "metadata": self.metadata,
                "parts": [
                    {
                        "writer": part.writer,
                        "node": part.node,
                        **({"kind": part.kind} if part.kind else {}),
                        **_files_to_json(part),
                    }
                    for part in self.parts
                ],
            }
        )

    @classmethod
    def from_json(cls, document: bytes) -> "Manifest":
        """Parse and check a document; raises ManifestError."""
        body = _open(document, "forebay.manifest")
        try:
            run, step = check_run(_text(body["run"])), check_step(body["step"])
            session, writers = check_session(_text(body["session"])), _unsigned(body["writers"])
            metadata = _object(body["metadata"])
            parts = tuple(
                PartRecord(
                    run=run,
                    step=step,
                    session=session,
                    writer=_unsigned(part["writer"]),
                    writers=writers,
                    node=_text(part["node"]),
                    shards=tuple(_shard_from_json(shard) for shard in _list(part["shards"])),
                    metadata=metadata if index == 0 else {},
                    packs=_packs_from_json(part),
                    kind=_text(part.get("kind", "")),
                )
                for index, part in enumerate(_list(body["parts"]))
            )
            manifest = cls(run, step, session, writers, _text(body["node"]), parts, metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"manifest: {_clause(error)}") from error
        manifest.check()
        return manifest


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


def _seal(body: dict[str, Any]) -> bytes:
    content = _canonical(body)
    return _checksum_head(crc32c(content)) + content[1:]  # "crc32c" sorts before all other keys


def _checksum_head(crc: int) -> bytes:
    return b'{"crc32c":"%08x",' % crc


def _open(document: bytes, expected_format: str) -> dict[str, Any]:
    try:
        body = _loads(document)
    except (ValueError, RecursionError) as error:
        raise ManifestError(f"not JSON: {error}") from error
    if not isinstance(body, dict) or body.get("format") != expected_format:
        raise ManifestError(f"not a {expected_format} document")
    if body.get("version") != (PACKS_VERSION if _names_packs(body) else FORMAT_VERSION):
        reads = f"this release reads {FORMAT_VERSION}, and {PACKS_VERSION} of documents with packs"
        raise ManifestError(f"{expected_format} version {body.get('version')!r}; {reads}")
    expected = body.pop("crc32c", None)
    head = _checksum_head(0)
    as_written = crc32c(memoryview(document)[len(head) :], crc32c(b"{"))
    if document.startswith(_checksum_head(as_written)):
        return body
    try:  # white space, or another order of keys
        actual = f"{crc32c(_canonical(body)):08x}"
    except (ValueError, UnicodeEncodeError) as error:
        raise ManifestError(f"{expected_format}: {error}") from error
    if expected != actual:
        raise ManifestError(f"{expected_format}: damaged, its checksum is {actual} and should be {expected}")
    return body


def _loads(document: bytes) -> Any:
    """json.loads; a long document shard by shard, so that other threads have their turn."""
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


def _shard_to_json(shard: ShardEntry) -> dict[str, Any]:
    return {
        "name": shard.name,
        "size": shard.size,
        "crc32c": f"{shard.crc32c:08x}",
        "chunk_size": shard.chunk_size,
        "chunks": base64.b64encode(shard.chunks).decode("ascii"),
    }


def _files_to_json(part: PartRecord) -> dict[str, Any]:
    files: dict[str, Any] = {"shards": [_shard_to_json(shard) for shard in part.shards]}
    if part.packs:
        files["packs"] = [
            {
                **_shard_to_json(pack.file),
                "entries": [[shard.name, shard.size, f"{shard.crc32c:08x}", shard.offset] for shard in pack.index],
            }
            for pack in part.packs
        ]
    return files


def _version(parts: Iterable[PartRecord]) -> int:
    return PACKS_VERSION if any(part.packs for part in parts) else FORMAT_VERSION


def _names_packs(body: dict[str, Any]) -> bool:
    parts = body.get("parts")
    return "packs" in body or (isinstance(parts, list) and any(isinstance(part, dict) and "packs" in part for part in parts))


def _check_distinct(parts: Iterable[PartRecord]) -> dict[str, int]:
    """The writer of every shard and pack by its name; raises ManifestError where a name comes twice."""
    seen: dict[str, int] = {}
    for part in parts:
        packs = (pack.file.name for pack in part.packs)
        for name in (*part.names(), *packs):
            if name in seen:
                raise ManifestError(f"manifest: writers {seen[name]} and {part.writer} both put {name!r}")
            seen[name] = part.writer
    return seen


def _packs_from_json(body: dict[str, Any]) -> tuple[PackEntry, ...]:
    return tuple(_pack_from_json(pack) for pack in _list(body.get("packs", [])))


def _pack_from_json(body: dict[str, Any]) -> PackEntry:
    entries = _list(body["entries"])
    if not 1 <= len(entries) <= MAX_PACK_SHARDS or _unsigned(body["size"]) > MAX_PACK_BYTES:
        raise ManifestError(f"a pack of {len(entries)} shards and {body['size']} bytes")
    shards = []
    for entry in entries:
        name, size, crc, offset = _list(entry)
        shards.append(PackedShard(_text(name), _unsigned(size), _crc(crc), _unsigned(offset)))
    try:
        index = PackIndex.of(shards)
    except UnicodeEncodeError as error:
        raise ManifestError(f"a packed shard's name is not valid UTF-8: {error}") from error
    pack = PackEntry(_entry_from_json(body), index)
    pack.check()
    return pack


def _shard_from_json(body: dict[str, Any]) -> ShardEntry:
    shard = _entry_from_json(body)
    shard.check()
    return shard


def _entry_from_json(body: dict[str, Any]) -> ShardEntry:
    try:
        chunks = base64.b64decode(body["chunks"], validate=True)
    except binascii.Error as error:
        raise ManifestError(f"chunk table: {error}") from error
    return ShardEntry(
        name=_text(body["name"]),
        size=_unsigned(body["size"]),
        crc32c=int(body["crc32c"], 16),
        chunk_size=_unsigned(body["chunk_size"]),
        chunks=chunks,
    )


def _crc(value: Any) -> int:
    number = int(_text(value), 16)
    if not 0 <= number < 1 << 32:
        raise ManifestError(f"{value!r} is not a CRC32C")
    return number


def _unsigned(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ManifestError(f"{value!r} is not an unsigned integer")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ManifestError(f"{value!r} is not text")
    return value


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ManifestError(f"{value!r} is not an object")
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ManifestError(f"{value!r} is not a list")
    return value


def _clause(error: Exception) -> str:
    return f"key {error} is missing" if isinstance(error, KeyError) else str(error)
