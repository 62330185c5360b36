"""What the front and a mover say to each other, and how it travels: msgpack, 4-byte length first, over a socket pair.

Owns the messages and the framing. A job names everything a mover needs; a mover keeps no state between jobs.
"""

import asyncio
from typing import Union

import msgspec

from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.core.errors import ErrorRecord, ForebayError, from_record
from forebay_gateway.tiers.base import Capabilities, StorageFull

MAX_MESSAGE_BYTES = 256 << 20


class ShardItem(msgspec.Struct, frozen=True):
    """One shard to move: where it lies in the cache, its key on a tier, and what its bytes must be."""

    session_id: int
    shard_id: int
    key: str
    size: int
    chunk_size: int
    crc32c: int
    chunks: bytes


class Identity(msgspec.Struct, frozen=True):
    """What the footer of a fetched shard says."""

    run: str
    step: int
    session: str
    writer: int
    writers: int
    name: str


class Failure(msgspec.Struct, frozen=True):
    """An error on its way to the front (core.errors.ErrorRecord). `where` is "cache" when the source itself is bad; `full` says
    that the tier has no space, which no kind says."""

    kind: str
    message: str
    retry_after_s: float | None
    details: dict[str, str]
    where: str = ""
    full: bool = False

    @property
    def error(self) -> ForebayError:
        """The error again."""
        if self.full:
            return StorageFull(self.message, retry_after_s=self.retry_after_s, **self.details)
        return from_record(ErrorRecord(self.kind, self.message, self.retry_after_s, self.details))


class Setup(msgspec.Struct, frozen=True, tag=True):
    """First message to a new mover."""

    name: str
    cache_path: str
    chunk_size: int
    tiers: tuple[TierConfig, ...]
    log_level: str
    log_format: str


class DrainJob(msgspec.Struct, frozen=True, tag=True):
    """Copy these shards from the cache to one tier, and prove each there."""

    id: int
    tier: str
    capabilities: Capabilities
    items: tuple[ShardItem, ...]


class FetchSource(msgspec.Struct, frozen=True):
    """A tier that should hold the shard."""

    tier: str
    capabilities: Capabilities


class FetchJob(msgspec.Struct, frozen=True, tag=True):
    """Copy one shard from the first source that has good bytes into the cache, going on at the same chunk on a failure."""

    id: int
    item: ShardItem
    identity: Identity
    sources: tuple[FetchSource, ...]


class CheckJob(msgspec.Struct, frozen=True, tag=True):
    """Prove copies against their checksums; nothing is written. `read` wants every byte read, whatever the tier's own
    checksums say."""

    id: int
    tier: str
    capabilities: Capabilities
    items: tuple[ShardItem, ...]
    read: bool = False


class Ack(msgspec.Struct, frozen=True, tag=True):
    """The front has recorded an upload; parts may be sent."""

    id: int
    index: int


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Nobody wants this job's result any more."""

    id: int


class Saves(msgspec.Struct, frozen=True, tag=True):
    """Whether the front receives shards now: a mover's drains step back for them, see turn.py."""

    under_way: bool


class Limits(msgspec.Struct, frozen=True, tag=True):
    """What may go to a tier from now on: bytes and requests a second, where None is no limit, and transfers at a time."""

    tier: str
    bandwidth: int | None
    iops: int | None
    concurrency: int


class UploadBegun(msgspec.Struct, frozen=True, tag=True):
    """The tier gave an upload an id; the mover waits for the Ack."""

    id: int
    index: int
    upload_id: str


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Bytes moved since the last one."""

    id: int
    size: int


class ItemDone(msgspec.Struct, frozen=True, tag=True):
    """The item is whole and proved where it should be."""

    id: int
    index: int
    tag_on_tier: str = ""
    disk_size: int = 0


class ItemFailed(msgspec.Struct, frozen=True, tag=True):
    """The item is not there; `source` names the tier the failure belongs to, where there are several."""

    id: int
    index: int
    failure: Failure
    source: str = ""


class JobDone(msgspec.Struct, frozen=True, tag=True):
    """No further message about this job follows."""

    id: int


Job = DrainJob | FetchJob | CheckJob
ToMover = Union[Setup, DrainJob, FetchJob, CheckJob, Ack, Cancel, Saves, Limits]  # noqa: UP007  msgspec reads it at run time
ToFront = Union[UploadBegun, Progress, ItemDone, ItemFailed, JobDone]  # noqa: UP007

_encoder = msgspec.msgpack.Encoder()
_to_mover = msgspec.msgpack.Decoder(ToMover)
_to_front = msgspec.msgpack.Decoder(ToFront)


async def _receive(reader: asyncio.StreamReader) -> bytes | None:
    try:
        head = await reader.readexactly(4)
        return await reader.readexactly(int.from_bytes(head, "big"))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


async def receive_in_mover(reader: asyncio.StreamReader) -> ToMover | None:
    """The front's next message; None when the front is gone."""
    data = await _receive(reader)
    return None if data is None else _to_mover.decode(data)


async def receive_in_front(reader: asyncio.StreamReader) -> ToFront | None:
    """The mover's next message; None when the mover is gone."""
    data = await _receive(reader)
    return None if data is None else _to_front.decode(data)


def send(writer: asyncio.StreamWriter, message: ToMover | ToFront) -> None:
    """Queue a message; the messages are small or few, so the transport's buffer bounds itself by the job queue."""
    data = _encoder.encode(message)
    writer.write(len(data).to_bytes(4, "big") + data)
