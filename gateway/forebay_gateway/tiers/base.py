"""The contract of a tier. Seven verbs and a probe; each says first what it guarantees.

Owns the shapes. Does not own retry, throttling or metrics (decorators of the same contract), nor what keys mean (core/layout).

Errors, for every verb: NotFound only on the tier's own authoritative word; Unavailable for anything that may pass (refused,
timed out, throttled, ESTALE, 5xx), with retry_after_s where the tier gave one; PermissionDenied; Corrupt where the tier proves
that bytes arrived damaged; StorageFull where it has no space or quota left; AlreadyExists for a failed condition.
"""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Protocol

from forebay_gateway.core.errors import Unavailable

DELETES_AT_ONCE = 16


class StorageFull(Unavailable):
    """ENOSPC, EDQUOT, or an object store's quota: passes when space returns. kind stays "unavailable"."""


class Source(Protocol):
    """A shard to be copied. Every chunk is read from the disk and its CRC32C checked again before it is handed out."""

    @property
    def size(self) -> int:
        """Bytes."""

    @property
    def chunk_size(self) -> int:
        """Bytes in every chunk but the last."""

    @property
    def crc32c(self) -> int:
        """Of the whole shard."""

    @property
    def chunk_crcs(self) -> tuple[int, ...]:
        """CRC32C of each chunk."""

    async def read_chunk(self, index: int) -> memoryview:
        """Chunk `index`, checked. The view stays valid until it is dropped. Raises Corrupt, Unavailable."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a tier was proved to do by its probe. Code asks this record and never guesses; status shows it."""

    conditional_create: bool  # put_small(if_absent=True) is atomic among all nodes
    conditional_replace: bool  # put_small(if_match=...) likewise
    server_checksum: bool  # verify() can use a full-object CRC32C that the server computed
    multipart: bool
    list_after_put: bool
    links: bool  # point() makes a symbolic link
    direct_io: bool
    max_parts: int = 10_000
    clock_skew_s: float | None = None
    notes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """What a tier says of an object. `tag` is an opaque version for if_match (S3: ETag)."""

    key: str
    size: int
    tag: str
    crc32c: int | None = None  # full-object, and only where it is proved: the server says so, or this call read it back
    modified_s: float | None = (
        None  # when it was written, by the tier's own clock; to be compared with nothing but others of it
    )


@dataclass(frozen=True, slots=True)
class Listing:
    """One level below a prefix: objects directly there, and names of directories (common prefixes, without '/')."""

    objects: tuple[ObjectInfo, ...]
    directories: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Leftover:
    """A multipart upload or a temporary file that somebody began, or a document's lock whose time has run out:
    `abort_upload(key, id)` ends it. `age_s` by the tier's own clock, or by this machine's where the tier shows none: for a
    cut-off of hours, not for order."""

    key: str
    id: str
    age_s: float
    is_lock: bool = False


UploadRecorder = Callable[[str], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class PutOptions:
    """`on_upload` is awaited with the UploadId before the first part is sent, where the tier has such a thing."""

    on_upload: UploadRecorder | None = None
    on_progress: Callable[[int], None] | None = None  # bytes sent since the last call; 0 for a chunk that was read back

    def read_back(self) -> None:
        """A chunk of the tier's bytes was compared."""
        if self.on_progress is not None:
            self.on_progress(0)


class Tier(ABC):
    """One configured tier. Not thread-safe: used from one event loop."""

    kind: ClassVar[str]
    lists_uploads_at_once: ClassVar[bool] = False  # leftovers("") is one listing of uploads, not a walk over every file

    def __init__(self, name: str) -> None:
        self.name = name
        self.capabilities: Capabilities | None = None

    @property
    def reads_at_once(self) -> int:
        """How many ranges of one object are worth reading at a time now; may change with what earlier reads met."""
        return 1

    @abstractmethod
    async def probe(self) -> Capabilities:
        """Prove what the tier can do, with small objects below `.forebay/probe/` that it removes. Sets capabilities."""

    @abstractmethod
    async def put(self, key: str, source: Source, options: PutOptions = PutOptions()) -> ObjectInfo:
        """Whole object or nothing, durable when it returns; replaces what was there. Streams; memory is bounded."""

    @abstractmethod
    async def verify(self, key: str, source: Source, options: PutOptions = PutOptions()) -> ObjectInfo:
        """Proof that the tier's bytes equal the source's checksums: the server's own full-object CRC32C, else a read-back of
        every chunk, told to `options`. Raises Corrupt on a difference, NotFound, Unavailable."""

    @abstractmethod
    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        """Whole document or nothing, durable and verified when it returns. With a condition: AlreadyExists where it does not
        hold, and then nothing was changed."""

    @abstractmethod
    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> tuple[bytes, ObjectInfo]:
        """A whole document and its version."""

    @abstractmethod
    def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        """Exactly `length` bytes from `offset`, in pieces of the tier's choosing, unverified: the caller checks. Fewer bytes
        than asked are an error (Corrupt), never a short success."""

    @abstractmethod
    async def head(self, key: str) -> ObjectInfo:
        """What is there now."""

    @abstractmethod
    async def delete(self, key: str) -> None:
        """Gone when it returns; also when it was not there."""

    async def delete_many(self, keys: Sequence[str]) -> None:
        """All of them gone when it returns; after an error some may be left: do it again. For whole checkpoints."""
        for begin in range(0, len(keys), DELETES_AT_ONCE):
            await asyncio.gather(*(self.delete(key) for key in keys[begin : begin + DELETES_AT_ONCE]))

    @abstractmethod
    async def list(self, prefix: str) -> Listing:
        """One directory level. Not for hot paths. An absent directory lists as empty."""

    async def point(self, key: str, target: str) -> None:
        """Make `key` a symbolic link to `target`, atomically replaced; a no-op on tiers without links."""

    async def settle(self, key: str) -> None:
        """What is there under this name is durable when it returns, also where the write that made it failed at its last act.
        A no-op on tiers that show nothing before it is durable."""

    async def abort_upload(self, key: str, upload_id: str) -> None:
        """Give up a recorded multipart upload (or temporary file); gone when it returns, also when it was not there."""

    async def sweep(self, key: str) -> None:
        """Remove what interrupted writes of `key` left and nobody recorded: multipart uploads of it, and temporary documents
        of this node beside it. Only for a key that no one writes now."""

    async def leftovers(self, prefix: str) -> tuple[Leftover, ...]:
        """All uploads and temporary files below a directory, whoever began them, those under way too. Not for hot paths."""
        return ()

    @abstractmethod
    async def close(self) -> None:
        """Let go of connections and threads."""
