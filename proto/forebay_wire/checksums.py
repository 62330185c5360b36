"""CRC32C: of bytes, and of the concatenation of pieces whose CRCs are known.

Owns the arithmetic. Does not own where checksums are kept or when they are checked.
"""

from collections.abc import Iterable
from functools import lru_cache

from crc32c import crc32c as _crc32c

__all__ = ["combine", "crc32c", "crc32c_of_chunks", "crc32c_of_pieces"]

_POLYNOMIAL = 0x82F63B78  # CRC-32C (Castagnoli), bit-reflected; RFC 3720 appendix B.4


def crc32c(data: bytes | bytearray | memoryview, value: int = 0) -> int:
    """CRC32C of `data`, continuing from `value`. Releases the GIL for large buffers."""
    return _crc32c(data, value)


def _times(matrix: list[int], vector: int) -> int:
    total, row = 0, 0
    while vector:
        if vector & 1:
            total ^= matrix[row]
        vector >>= 1
        row += 1
    return total


@lru_cache(maxsize=256)
def _shift_tables(length: int) -> tuple[list[int], list[int], list[int], list[int]]:
    """Byte-indexed tables of the GF(2) operator that appends `length` zero bytes to a CRC."""
    # The operator for one zero bit, then squared up; the method of zlib's crc32_combine (Mark Adler).
    operator = [_POLYNOMIAL, *(1 << row for row in range(31))]
    for _ in range(3):  # 1 bit -> 8 bits
        operator = [_times(operator, column) for column in operator]
    result = [1 << row for row in range(32)]
    remaining = length
    while remaining:
        if remaining & 1:
            result = [_times(operator, column) for column in result]
        operator = [_times(operator, column) for column in operator]
        remaining >>= 1
    first, second, third, fourth = ([_times(result, byte << shift) for byte in range(256)] for shift in (0, 8, 16, 24))
    return first, second, third, fourth


def combine(first: int, second: int, second_length: int) -> int:
    """CRC32C of A+B from the CRCs of A and B and the length of B in bytes."""
    if second_length == 0:
        return first
    low, mid, high, top = _shift_tables(second_length)
    return low[first & 0xFF] ^ mid[first >> 8 & 0xFF] ^ high[first >> 16 & 0xFF] ^ top[first >> 24] ^ second


def crc32c_of_chunks(chunk_crcs: Iterable[int], chunk_size: int, size: int) -> int:
    """CRC32C of a shard of `size` bytes from the CRCs of its chunks, without reading it again."""
    total, remaining = 0, size
    for crc in chunk_crcs:
        length = min(chunk_size, remaining)
        total = combine(total, crc, length)
        remaining -= length
    return total


def crc32c_of_pieces(pieces: Iterable[tuple[int, int]]) -> int:
    """CRC32C of the concatenation of pieces, each given by its CRC and its length in bytes: of many lengths, whose tables would
    each be made for one use, so a length is taken apart into powers of two."""
    total = 0
    for crc, length in pieces:
        bit = 1
        while bit <= length:
            if length & bit:
                total = combine(total, 0, bit)
            bit <<= 1
        total ^= crc
    return total
