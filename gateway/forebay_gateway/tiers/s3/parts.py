"""How long the parts of a multipart upload are.

Owns the arithmetic, and needs no S3 client: movers of every tier size their buffers by it.
"""

MIN_PART_BYTES = 5 << 20
MAX_PARTS = 10_000
PART_BYTES = 16 << 20


def part_size(size: int, chunk_size: int, wished: int | None) -> int:
    """Bytes in each part but the last: whole chunks, at least 5 MiB, and at most 10,000 parts in all."""
    least = max(wished or PART_BYTES, MIN_PART_BYTES, -(-size // MAX_PARTS))
    return -(-least // chunk_size) * chunk_size
