"""What lies in the catalog's LMDB file: every database, every key, every value.

Owns names, key layouts and codecs. Does not own which rows belong together in one act (mutations) nor how they are looked up
(queries). LMDB keys are at most 511 bytes and names may have 1,024, so names enter keys as the first 16 bytes of their
SHA-256; the row behind such a key carries the whole name and is compared with it. Numbers in keys are big-endian, so that
byte order is number order. Rows are msgpack arrays of the structs in core/records, each followed by its CRC32C: LMDB has no
checksum, and of a number in a row nothing else may know. Sums are packed u64.
"""

import hashlib
import struct
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

import lmdb
import msgspec

from forebay_gateway.core.errors import Damaged, InvalidArgument
from forebay_gateway.core.records import (
    CheckpointRow,
    CopyRow,
    PartRow,
    Row,
    SessionRow,
    ShardKey,
    ShardRow,
    UploadRow,
)
from forebay_wire.checksums import crc32c

FORMAT_VERSION = 3
KEY_BYTES_MAX = 511  # LMDB's own limit

if TYPE_CHECKING:
    Database: TypeAlias = lmdb._Database
    Transaction: TypeAlias = lmdb.Transaction[bytes]
else:  # the binding's classes are generic in its stubs only
    Database, Transaction = lmdb._Database, lmdb.Transaction


class CatalogDamaged(Damaged):
    """The catalog's file or a row in it cannot be trusted; it is to be rebuilt from the cache's files."""

    def __init__(self, what: str, **details: Any) -> None:
        self.what = what
        super().__init__(f"the catalog is damaged: {what}; rebuild it from the cache with `forebay rebuild`", **details)


@dataclass(frozen=True, slots=True)
class Databases:
    """Handles of all named databases; each comment gives key -> value. Every field becomes a database of that name."""

    meta: Database  # one of the META_* keys -> as said there
    settings: Database  # name -> bytes with their CRC32C: small named values of the gateway's other parts
    tiers: Database  # tier name -> tier number u16; a number is never given to another name
    runs: Database  # run16 -> run
    checkpoints: Database  # run16 step:u64 -> CheckpointRow; a run's checkpoints lie side by side, by step
    deleting: Database  # run16 step:u64 -> empty; index of checkpoints marked for deletion
    sessions: Database  # session:u64 -> SessionRow
    session_names: Database  # SHA-256(run NUL step NUL session)[:16] -> session:u64
    publish: Database  # tier:u16 order:u64 session:u64 -> empty; index of sessions that are PENDING on the tier
    publish_order: Database  # session:u64 tier:u16 -> order:u64 under which `publish` holds it
    parts: Database  # session:u64 writer:u32 -> PartRow
    open_parts: Database  # session:u64 writer:u32 -> empty; index of parts that are OPEN
    shards: Database  # session:u64 shard:u64 -> ShardRow
    part_shards: Database  # session:u64 writer:u32 shard:u64 -> empty; index of a writer's shards
    names: Database  # session:u64 SHA-256(name)[:16] -> shard:u64; of one in a pack: the pack's, then its number in it u32
    packs: Database  # session:u64 shard:u64 -> the pack's index, as in the pack itself (forebay_wire.packs)
    chunks: Database  # session:u64 shard:u64 -> packed CRC32C of each chunk, as on disk
    evictable: Database  # order:u64 session:u64 shard:u64 -> empty; index of EVICTABLE shards
    fetched: Database  # session:u64 shard:u64 -> order:u64 of a shard that came into the cache from a tier
    copies: Database  # session:u64 shard:u64 tier:u16 -> CopyRow
    pending: Database  # tier:u16 order:u64 session:u64 shard:u64 -> empty; the drain queue
    progress: Database  # session:u64 writer:u32 tier:u16 -> verified copies, copies, verified bytes, bytes: 4 u64
    session_sums: Database  # session:u64 -> SessionSums: 9 u64
    session_progress: Database  # session:u64 tier:u16 -> the sum of its parts' `progress`: 4 u64
    complete: Database  # run16 step:u64 -> empty; index of checkpoints with a whole session (core/policy.is_whole)
    incomplete: Database  # run16 step:u64 -> empty; index of those without one, and with one that is unfinished
    cache_only: Database  # session:u64 -> empty; index of sessions that are on no tier, and on the way to none, by policy
    unsettled: Database  # session:u64 shard:u64 -> empty; index of shards that are EVICTING or QUARANTINED
    uploads: Database  # session:u64 shard:u64 tier:u16 -> UploadRow


DATABASE_NAMES = tuple(field.name for field in fields(Databases))

META_FORMAT = b"format"  # u64 and its CRC32C, FORMAT_VERSION of the release that wrote the file
META_NODE = b"node"  # the node's id, UTF-8, and its CRC32C
META_TOTALS = b"totals"  # used, dirty, shards: 3 u64, see Totals
META_QUEUE = b"queue"  # followed by tier:u16 -> copies, bytes in that tier's queue: 2 u64
META_COMMIT_SEQ = b"commit_seq"  # u64, highest order given to a part or to a fetched shard
META_ID_FLOOR = b"id_floor"  # u64, highest session or shard id that ever had a row, or a note

TOTALS_LENGTH = 3
QUEUE_LENGTH = 2
PROGRESS_LENGTH = 4
SESSION_LENGTH = 9

_U16 = struct.Struct(">H")
_U64 = struct.Struct(">Q")
_PART = struct.Struct(">QI")
_PART_SHARD = struct.Struct(">QIQ")
_PROGRESS = struct.Struct(">QIH")
_SHARD = struct.Struct(">QQ")
_COPY = struct.Struct(">QQH")
_PACKED = struct.Struct(">QI")
_PENDING = struct.Struct(">HQQQ")
_PUBLISH = struct.Struct(">HQQ")
_PUBLISH_ORDER = struct.Struct(">QH")
_EVICTABLE = struct.Struct(">QQQ")


def _short_hash(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8")).digest()[:16]


def u64(number: int) -> bytes:
    """A session's key, and the form of every single number among the values."""
    return _U64.pack(number)


def number_of(data: bytes) -> int:
    """The inverse of u64."""
    return int.from_bytes(data, "big")


def tier_prefix(tier: int) -> bytes:
    """What the keys of one tier begin with in `publish` and `pending`; also the value in `tiers`."""
    return _U16.pack(tier)


def queue_key(tier: int) -> bytes:
    """The meta key of the sums over one tier's queue."""
    return META_QUEUE + _U16.pack(tier)


def run_key(run: str) -> bytes:
    """run16."""
    return _short_hash(run)


def checkpoint_key(run: str, step: int) -> bytes:
    """run16 step."""
    return _short_hash(run) + _U64.pack(step)


def session_name_key(run: str, step: int, session: str) -> bytes:
    """Names hold no NUL, so that joined names are as distinct as their triples."""
    return _short_hash(f"{run}\0{step}\0{session}")


def part_key(session_id: int, writer: int) -> bytes:
    """session writer."""
    return _PART.pack(session_id, writer)


def part_shard_key(session_id: int, writer: int, shard_id: int) -> bytes:
    """session writer shard."""
    return _PART_SHARD.pack(session_id, writer, shard_id)


def shard_of_part_shard_key(key: bytes) -> ShardKey:
    """The shard a key in `part_shards` stands for."""
    session_id, _, shard_id = _PART_SHARD.unpack(key)
    return ShardKey(session_id, shard_id)


def progress_key(session_id: int, writer: int, tier: int) -> bytes:
    """session writer tier."""
    return _PROGRESS.pack(session_id, writer, tier)


def shard_key(key: ShardKey) -> bytes:
    """session shard."""
    return _SHARD.pack(*key)


def shard_of_key(key: bytes) -> ShardKey:
    """The shard of a key in `shards`, `chunks`, `fetched` or `unsettled`."""
    return ShardKey(*_SHARD.unpack(key))


def name_key(session_id: int, name: str) -> bytes:
    """session name16."""
    return _U64.pack(session_id) + _short_hash(name)


def packed_value(shard_id: int, ordinal: int) -> bytes:
    """The value in `names` of a shard in a pack."""
    return _PACKED.pack(shard_id, ordinal)


def named_of_value(value: bytes) -> tuple[int, int | None]:
    """(shard id, number in it where it is a pack) of a value in `names`."""
    if len(value) == _U64.size:
        return number_of(value), None
    if len(value) != _PACKED.size:
        raise CatalogDamaged("a name leads nowhere", length_bytes=len(value))
    shard_id, ordinal = _PACKED.unpack(value)
    return shard_id, ordinal


def copy_key(key: ShardKey, tier: int) -> bytes:
    """session shard tier, in `copies` and `uploads`."""
    return _COPY.pack(*key, tier)


def copy_of_key(key: bytes) -> tuple[ShardKey, int]:
    """(shard, tier number) of a key in `copies` or `uploads`."""
    session_id, shard_id, tier = _COPY.unpack(key)
    return ShardKey(session_id, shard_id), tier


def pending_key(tier: int, order: int, key: ShardKey) -> bytes:
    """tier order session shard."""
    return _PENDING.pack(tier, order, *key)


def pending_of_key(key: bytes) -> tuple[int, ShardKey]:
    """(order, shard) of a key in `pending`."""
    _, order, session_id, shard_id = _PENDING.unpack(key)
    return order, ShardKey(session_id, shard_id)


def publish_key(tier: int, order: int, session_id: int) -> bytes:
    """tier order session."""
    return _PUBLISH.pack(tier, order, session_id)


def session_of_publish_key(key: bytes) -> int:
    """The session a key in `publish` stands for."""
    return number_of(key[10:])


def publish_of_key(key: bytes) -> tuple[int, int, int]:
    """(tier number, order, session id) of a key in `publish`."""
    tier, order, session_id = _PUBLISH.unpack(key)
    return tier, order, session_id


def session_tier_key(session_id: int, tier: int) -> bytes:
    """session tier, in `publish_order` and `session_progress`."""
    return _PUBLISH_ORDER.pack(session_id, tier)


def evictable_key(order: int, key: ShardKey) -> bytes:
    """order session shard."""
    return _EVICTABLE.pack(order, *key)


def shard_of_evictable_key(key: bytes) -> ShardKey:
    """The shard a key in `evictable` stands for."""
    _, session_id, shard_id = _EVICTABLE.unpack(key)
    return ShardKey(session_id, shard_id)


def behind_session_of_evictable_key(key: bytes) -> bytes:
    """Where to go on behind all entries of the same order and session."""
    order, session_id, _ = _EVICTABLE.unpack(key)
    return _EVICTABLE.pack(order, session_id, 2**64 - 1)


def pack_sums(sums: tuple[int, ...]) -> bytes:
    """Sums as a value: one u64 each."""
    return struct.pack(f">{len(sums)}Q", *sums)


def unpack_sums(data: bytes | None, length: int) -> tuple[int, ...]:
    """The inverse of pack_sums; an absent value is all zero."""
    if data is None:
        return (0,) * length
    if len(data) != 8 * length:
        raise CatalogDamaged("a sum has the wrong length", length_bytes=len(data))
    return struct.unpack(f">{length}Q", data)


_R = TypeVar("_R", bound=Row)

_CHECKSUM_BYTES = 4
# What crc32c gives of any bytes with their own CRC32C, low byte first, behind them (a property of CRCs).
_CHECKSUM_HOLDS = crc32c(bytes(_CHECKSUM_BYTES))


def with_checksum(data: bytes) -> bytes:
    """A value that LMDB keeps for us, and its CRC32C behind it."""
    return data + crc32c(data).to_bytes(_CHECKSUM_BYTES, "little")


def checked(data: bytes, what: str) -> bytes:
    """The inverse of with_checksum; raises CatalogDamaged, which names `what` it is."""
    if crc32c(data) != _CHECKSUM_HOLDS:
        raise CatalogDamaged(f"a value is no {what} (its checksum does not hold)")
    return data[:-_CHECKSUM_BYTES]


class Codec(Generic[_R]):
    """Bytes to rows of one type, and back. A value that is none, or other than it was written, raises CatalogDamaged."""

    def __init__(self, row_type: type[_R]) -> None:
        self._name = row_type.__name__
        self._decoder = msgspec.msgpack.Decoder(row_type)
        self._encode: Callable[[_R], bytes] = msgspec.msgpack.Encoder().encode

    def encode(self, row: _R) -> bytes:
        """The row with its checksum."""
        return with_checksum(self._encode(row))

    def decode(self, data: bytes) -> _R:
        """The row."""
        body = checked(data, self._name)
        try:
            return self._decoder.decode(body)
        except msgspec.MsgspecError as error:
            raise CatalogDamaged(f"a value is no {self._name} ({error})") from error


CHECKPOINT = Codec(CheckpointRow)
SESSION = Codec(SessionRow)
PART = Codec(PartRow)
SHARD = Codec(ShardRow)
COPY = Codec(CopyRow)
UPLOAD = Codec(UploadRow)


class TierNumbers:
    """Tier names and their numbers; fixed from open to close. Tiers that left the configuration are among them."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self._numbers = numbers
        self._names = {number: name for name, number in numbers.items()}

    def number(self, tier: str) -> int:
        """Of a name; InvalidArgument for a name that was never configured."""
        try:
            return self._numbers[tier]
        except KeyError:
            raise InvalidArgument(f"no tier is named {tier!r}", known=",".join(self._numbers)) from None

    def name(self, number: int) -> str:
        """Of a number that stands in a key."""
        try:
            return self._names[number]
        except KeyError:
            raise CatalogDamaged("a key holds an unknown tier number", number=number) from None

    def items(self) -> list[tuple[str, int]]:
        """(name, number) of every tier, by number."""
        return sorted(self._numbers.items(), key=lambda item: item[1])
