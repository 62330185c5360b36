"""Bytes from a tier as checked chunks: the one place where what a tier hands over meets the manifest's checksums.

Owns the regrouping of a tier's pieces into chunks and their check. Does not own what happens on a mismatch.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from forebay_gateway.core.errors import Corrupt
from forebay_gateway.tiers.base import Tier
from forebay_wire.checksums import crc32c


async def verified_chunks(
    tier: Tier, key: str, size: int, chunk_size: int, crcs: Sequence[int], first: int, stop: int
) -> AsyncGenerator[memoryview, None]:
    """Chunks `first` to `stop` (exclusive) of the object, each checked before it is handed out.

    Raises Corrupt at the first chunk whose CRC32C differs twice, and whatever the tier's read raises.
    """
    if first >= stop:
        return
    begin, end = first * chunk_size, min(stop * chunk_size, size)
    index, buffer, filled = first, bytearray(min(chunk_size, end - begin)), 0
    async with aclosing(_read(tier, key, begin, end - begin)) as pieces:
        async for piece in pieces:
            view = memoryview(piece)
            while view:
                taken = min(len(view), len(buffer) - filled)
                buffer[filled : filled + taken] = view[:taken]
                filled += taken
                view = view[taken:]
                if filled < len(buffer):
                    continue
                if crc32c(buffer) != crcs[index]:
                    buffer = await _read_again(tier, key, index * chunk_size, len(buffer))
                    if crc32c(buffer) != crcs[index]:
                        raise Corrupt("bytes on the tier do not match", tier=tier.name, key=key, offset=index * chunk_size)
                yield memoryview(buffer)
                index += 1
                # A new buffer: the consumer may still hold the old one.
                buffer, filled = bytearray(max(0, min(chunk_size, end - index * chunk_size))), 0
    if index < stop:
        raise Corrupt("the tier handed over too few bytes", tier=tier.name, key=key, offset=index * chunk_size + filled)


async def _read_again(tier: Tier, key: str, offset: int, length: int) -> bytearray:
    """A chunk that did not match, once more: bytes damaged on their way do not make the tier's copy bad."""
    buffer = bytearray()
    async with aclosing(_read(tier, key, offset, length)) as pieces:
        async for piece in pieces:
            buffer += piece
    return buffer


async def _read(tier: Tier, key: str, offset: int, length: int) -> AsyncGenerator[bytes, None]:
    async for piece in tier.read(key, offset, length):
        yield piece
