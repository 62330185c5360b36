"""A shard put on a tier while its bytes arrive, for the time in which they lie nowhere else: the contract.

Owns the shapes. Does not own what a kind of tier makes of it (posix/stream.py, s3/stream.py). Unlike Tier.put the source cannot
be read again: what fails is given up as a whole, and its sender begins again. At most a few chunks are in memory.
"""

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from forebay_gateway.core.errors import Unavailable
from forebay_gateway.tiers.base import ObjectInfo, UploadRecorder

# Told what the object will be under its name, None where the tier says so only then.
Publish = Callable[[ObjectInfo | None], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Checksums:
    """What a shard's bytes must be, without the bytes: a Source for proofs alone. Sizes are bytes."""

    size: int
    chunk_size: int
    crc32c: int
    chunk_crcs: tuple[int, ...]

    async def read_chunk(self, index: int) -> memoryview:
        """Never asked for by a proof."""
        raise Unavailable("the bytes of this shard are not here", chunk=index)


@dataclass(frozen=True, slots=True)
class StreamOptions:
    """`on_upload` is awaited before anything is on the tier that has to be ended: with the name of a temporary file or the id
    of an upload; with "" before an upload is begun whose id is told only then."""

    size: int | None  # bytes; None where they are counted at the end
    chunk_size: int
    on_upload: UploadRecorder


class ShardStream(ABC):
    """One shard on its way. Owned by one task: begin(), write() for each chunk, finish(); discard() ends it at any time."""

    @abstractmethod
    async def begin(self) -> None:
        """Make ready. Raises as Tier.put."""

    @abstractmethod
    async def write(self, crc: int, data: memoryview) -> None:
        """The next chunk, checked by the caller; returns when there is room for one more. `data` must not change afterwards.
        Raises what has become of earlier ones, as Tier.put."""

    @abstractmethod
    async def finish(self, proof: Checksums, publish: Publish) -> ObjectInfo:
        """Whole, durable, and proved on the tier as Tier.verify does. `publish` is awaited just before the object may come to
        have its name. Raises as Tier.put and Tier.verify; whether the object is there is then not known."""

    @abstractmethod
    async def discard(self) -> bool:
        """Give up what is not finished; whether nothing that was told to `on_upload` is left on the tier."""
