"""Packs: many small shards of one writer in one file, each addressable.

Owns the reserved names, the index and where it stands in a pack's bytes, version 1. Does not own how packs are written or read.

    head: magic, version, index length, CRC32C of head and index | index | the shards' bytes, in any order, without gaps between

The index is the same bytes in the pack, in a gateway's catalog and, as a list, in the documents on a tier: the number of
shards; a record of four numbers each (offset in the pack, size, CRC32C, end of its name among the names), sorted by name; then
the names.
"""

import re
from collections.abc import Iterable, Iterator
from struct import Struct
from typing import NamedTuple

from forebay_wire.checksums import crc32c
from forebay_wire.names import RESERVED_PREFIX, InvalidName, check_shard_name

PACK_DIR = f"{RESERVED_PREFIX}/packs"
MAGIC = b"FBpack\x00\x00"
VERSION = 1
MAX_PACK_BYTES = 1 << 30
MAX_PACK_SHARDS = 1 << 20
HEAD_BYTES = 20

_NAME = re.compile(rf"{re.escape(PACK_DIR)}/(0|[1-9][0-9]{{0,9}})-([0-9a-f]{{16}})\.pack\Z")
_HEAD = Struct("<8sII")
_U32 = Struct("<I")
_RECORD = Struct("<IIII")


class PackError(ValueError):
    """A head or an index that is damaged, or of a version this code does not read."""


class NewerPack(PackError):
    """A whole one that a later release wrote: not ours to judge."""


class PackedShard(NamedTuple):
    """One shard in a pack: where its bytes lie, and what they must be."""

    name: str
    size: int
    crc32c: int
    offset: int


def pack_name(writer: int, token: str) -> str:
    """The name of a pack of `writer`; `token` is 16 hex digits that no other pack of the session has."""
    name = f"{PACK_DIR}/{writer}-{token}.pack"
    if not is_pack_name(name):
        raise ValueError(f"no name of a pack: {name!r}")
    return name


def is_pack_name(name: str) -> bool:
    """Whether it names a pack. No shard of a client's can have such a name: it is reserved."""
    return _NAME.match(name) is not None


class PackIndex:
    """What lies where in a pack, read from its encoded form as it is asked for. Immutable."""

    __slots__ = ("_count", "_names_at", "encoded")

    def __init__(self, encoded: bytes) -> None:
        """Take an encoded index; raises PackError where its length cannot be. check() looks at every record."""
        if len(encoded) < _U32.size:
            raise PackError("a pack's index is cut off")
        (self._count,) = _U32.unpack_from(encoded)
        self._names_at = _U32.size + self._count * _RECORD.size
        self.encoded = encoded
        if not 1 <= self._count <= MAX_PACK_SHARDS or len(encoded) < self._names_at:
            raise PackError(f"a pack's index of {len(encoded)} bytes cannot hold {self._count} shards")
        if self._names_at + self._record(self._count - 1)[3] != len(encoded):
            raise PackError("a pack's index has the wrong length")

    @classmethod
    def of(cls, shards: Iterable[PackedShard]) -> "PackIndex":
        """Encode an index; the shards may come in any order. Raises PackError for numbers that do not fit."""
        ordered = sorted(shards)
        records, names, end = [], [], 0
        for shard in ordered:
            name = shard.name.encode("utf-8")
            end += len(name)
            if max(shard.offset, shard.size, end) >= 1 << 32:
                raise PackError(f"shard {shard.name!r}: too large for a pack")
            records.append(_RECORD.pack(shard.offset, shard.size, shard.crc32c, end))
            names.append(name)
        return cls(b"".join((_U32.pack(len(ordered)), *records, *names)))

    @classmethod
    def laid_out(cls, shards: Iterable[tuple[str, int, int]]) -> "PackIndex":
        """The index of a pack whose (name, size, CRC32C) follow each other in this order behind the head."""
        given = list(shards)
        at = head_bytes(given)
        placed = []
        for name, size, crc in given:
            placed.append(PackedShard(name, size, crc, at))
            at += size
        if at > MAX_PACK_BYTES:
            raise PackError(f"{at} bytes are too many for a pack")
        return cls.of(placed)

    def __len__(self) -> int:
        return int(self._count)

    def __getitem__(self, ordinal: int) -> PackedShard:
        """The shard with this number in the order of names. Raises PackError."""
        if not 0 <= ordinal < self._count:
            raise PackError(f"a pack of {self._count} shards has none with the number {ordinal}")
        offset, size, crc, end = self._record(ordinal)
        begin = self._record(ordinal - 1)[3] if ordinal else 0
        try:
            name = self.encoded[self._names_at + begin : self._names_at + end].decode("utf-8")
        except UnicodeDecodeError as error:
            raise PackError("a pack's index has a name that is not UTF-8") from error
        return PackedShard(name, size, crc, offset)

    def __iter__(self) -> Iterator[PackedShard]:
        return (self[ordinal] for ordinal in range(self._count))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PackIndex) and self.encoded == other.encoded

    def __hash__(self) -> int:
        return hash(self.encoded)

    @property
    def size(self) -> int:
        """Bytes of all shards together, without the head."""
        return sum(self._record(ordinal)[1] for ordinal in range(self._count))

    def check(self, pack_bytes: int) -> None:
        """Raise PackError unless every shard has a valid name of its own, in order, and lies inside a pack of this size."""
        before, end, first = "", 0, HEAD_BYTES + len(self.encoded)
        for ordinal in range(self._count):
            if self._record(ordinal)[3] <= end:
                raise PackError("a pack's index has names that overlap")
            end = self._record(ordinal)[3]
            shard = self[ordinal]
            try:
                check_shard_name(shard.name)
            except InvalidName as error:
                raise PackError(str(error)) from error
            if shard.name <= before:
                raise PackError(f"a pack's index names {shard.name!r} twice, or out of order")
            if shard.offset < first or shard.offset + shard.size > pack_bytes:
                raise PackError(f"shard {shard.name!r} does not lie inside its pack")
            before = shard.name

    def _record(self, ordinal: int) -> tuple[int, int, int, int]:
        offset, size, crc, end = _RECORD.unpack_from(self.encoded, _U32.size + ordinal * _RECORD.size)
        return offset, size, crc, end


def head_bytes(shards: Iterable[tuple[str, int, int]]) -> int:
    """Length of head and index of a pack of these (name, size, CRC32C)."""
    return HEAD_BYTES + _U32.size + sum(_RECORD.size + len(name.encode("utf-8")) for name, _, _ in shards)


def encode_head(index: PackIndex) -> bytes:
    """Head and index as a pack begins with them."""
    head = _HEAD.pack(MAGIC, VERSION, len(index.encoded))
    return head + _U32.pack(crc32c(index.encoded, crc32c(head))) + index.encoded


def index_bytes(head: bytes) -> int:
    """From a pack's first HEAD_BYTES: the length of the index that follows. Raises PackError."""
    if len(head) < HEAD_BYTES:
        raise PackError("the pack ends inside its head")
    magic, _, found = _HEAD.unpack_from(head)
    length = int(found)
    if magic != MAGIC:
        raise PackError("not a pack")
    if not _U32.size < length <= MAX_PACK_BYTES:
        raise PackError("the pack's head has an impossible length")
    return length


def decode_head(data: bytes, pack_bytes: int) -> PackIndex:
    """The checked index in a pack's first bytes, of a pack of this size. Raises PackError."""
    length = index_bytes(data)
    encoded = data[HEAD_BYTES : HEAD_BYTES + length]
    if len(encoded) != length:
        raise PackError("the pack ends inside its index")
    if _U32.unpack_from(data, _HEAD.size)[0] != crc32c(encoded, crc32c(data[: _HEAD.size])):
        raise PackError("the pack's head or index is damaged")
    version = int(_HEAD.unpack_from(data)[1])
    if version != VERSION:  # after its checksum: a bit that flipped here makes no newer pack
        raise (NewerPack if version > VERSION else PackError)(f"a pack of version {version}; this release reads {VERSION}")
    index = PackIndex(encoded)
    index.check(pack_bytes)
    return index
