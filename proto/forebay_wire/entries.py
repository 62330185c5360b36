"""Shards and packs as the documents list them: name, size and all checksums, each checked against the others.

Owns these entries, in memory and as JSON. Does not own the documents around them (manifest.py), nor what lies in a pack
(packs.py).

"chunks" is base64 of the chunk CRCs, each 4 bytes little-endian. A pack is listed like a shard, with its "entries": [name,
size, CRC32C as 8 hex digits, offset in the pack].
"""

import base64
import binascii
import sys
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from forebay_wire.checksums import crc32c_of_chunks
from forebay_wire.document import ManifestError
from forebay_wire.names import InvalidName, check_shard_name
from forebay_wire.packs import MAX_PACK_BYTES, MAX_PACK_SHARDS, PackedShard, PackError, PackIndex, is_pack_name

MIN_CHUNK_SIZE = 64 << 10
MAX_CHUNK_SIZE = 64 << 20


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


def shard_to_json(shard: ShardEntry) -> dict[str, Any]:
    """As a document lists it."""
    return {
        "name": shard.name,
        "size": shard.size,
        "crc32c": f"{shard.crc32c:08x}",
        "chunk_size": shard.chunk_size,
        "chunks": base64.b64encode(shard.chunks).decode("ascii"),
    }


def pack_to_json(pack: PackEntry) -> dict[str, Any]:
    """As a document lists it."""
    return {
        **shard_to_json(pack.file),
        "entries": [[shard.name, shard.size, f"{shard.crc32c:08x}", shard.offset] for shard in pack.index],
    }


def shard_from_json(body: dict[str, Any]) -> ShardEntry:
    """Read and checked. Raises ManifestError, KeyError, TypeError, ValueError."""
    shard = _entry_from_json(body)
    shard.check()
    return shard


def pack_from_json(body: dict[str, Any]) -> PackEntry:
    """As shard_from_json."""
    entries = list_of(body["entries"])
    if not 1 <= len(entries) <= MAX_PACK_SHARDS or unsigned(body["size"]) > MAX_PACK_BYTES:
        raise ManifestError(f"a pack of {len(entries)} shards and {body['size']} bytes")
    shards = []
    for entry in entries:
        name, size, crc, offset = list_of(entry)
        shards.append(PackedShard(text(name), unsigned(size), _crc(crc), unsigned(offset)))
    try:
        index = PackIndex.of(shards)
    except UnicodeEncodeError as error:
        raise ManifestError(f"a packed shard's name is not valid UTF-8: {error}") from error
    pack = PackEntry(_entry_from_json(body), index)
    pack.check()
    return pack


def _entry_from_json(body: dict[str, Any]) -> ShardEntry:
    try:
        chunks = base64.b64decode(body["chunks"], validate=True)
    except binascii.Error as error:
        raise ManifestError(f"chunk table: {error}") from error
    return ShardEntry(
        name=text(body["name"]),
        size=unsigned(body["size"]),
        crc32c=int(body["crc32c"], 16),
        chunk_size=unsigned(body["chunk_size"]),
        chunks=chunks,
    )


def _crc(value: Any) -> int:
    number = int(text(value), 16)
    if not 0 <= number < 1 << 32:
        raise ManifestError(f"{value!r} is not a CRC32C")
    return number


def unsigned(value: Any) -> int:
    """An integer of 0 or more. Raises ManifestError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ManifestError(f"{value!r} is not an unsigned integer")
    return value


def text(value: Any) -> str:
    """Raises ManifestError for what is none."""
    if not isinstance(value, str):
        raise ManifestError(f"{value!r} is not text")
    return value


def list_of(value: Any) -> list[Any]:
    """Raises ManifestError for what is none."""
    if not isinstance(value, list):
        raise ManifestError(f"{value!r} is not a list")
    return value
