"""Proof by reading back: bytes of a tier against a source's chunk checksums.

Owns cutting a stream into chunks and comparing. Does not own where the bytes come from, nor whether a cache was in between.
"""

from collections.abc import AsyncIterator, Callable

from forebay_gateway.core.errors import Corrupt
from forebay_gateway.tiers.base import Source
from forebay_wire.checksums import crc32c


def check_chunk(tier: str, key: str, source: Source, index: int, actual: int) -> None:
    """Raise Corrupt unless `actual` is the CRC32C of chunk `index`."""
    expected = source.chunk_crcs[index]
    if actual != expected:
        raise Corrupt(
            "the tier's bytes differ from the source's checksum",
            tier=tier,
            key=key,
            chunk=index,
            expected=f"{expected:08x}",
            actual=f"{actual:08x}",
        )


def check_size(tier: str, key: str, source: Source, size: int) -> None:
    """Raise Corrupt unless `size` is the source's."""
    if size != source.size:
        raise Corrupt("the tier holds another size", tier=tier, key=key, expected=source.size, actual=size)


async def check_stream(
    tier: str, key: str, source: Source, pieces: AsyncIterator[bytes], checked: Callable[[], None] = lambda: None
) -> None:
    """Consume all pieces, `checked` after each chunk; raise Corrupt at the first that differs, or where bytes are missing or
    too many."""
    index = running = filled = total = 0
    async for piece in pieces:
        view = memoryview(piece)
        total += len(view)
        if total > source.size:
            break
        while view:
            part = view[: source.chunk_size - filled]
            running = crc32c(part, running)
            filled += len(part)
            view = view[len(part) :]
            if filled == source.chunk_size:
                check_chunk(tier, key, source, index, running)
                checked()
                index, running, filled = index + 1, 0, 0
    check_size(tier, key, source, total)
    if filled:
        check_chunk(tier, key, source, index, running)
