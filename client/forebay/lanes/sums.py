"""Checksums of a shard whose pieces are seen by several threads, in any order.

Owns the table. A unit is what one CRC is computed over: a chunk, or a part of one that is larger than a piece.
"""

from array import array

from forebay.lanes.fd import PIECE_BYTES
from forebay_wire.checksums import crc32c, crc32c_of_chunks
from forebay_wire.manifest import chunk_count, pack_chunk_crcs


class Sums:
    """The chunk CRCs of `size` bytes. Pieces begin at multiples of PIECE_BYTES from a chunk's beginning."""

    def __init__(self, size: int, chunk_size: int) -> None:
        self._size = size
        self._chunk_size = chunk_size
        self._unit = min(chunk_size, PIECE_BYTES)
        self._units = array("I", bytes(4 * chunk_count(size, self._unit)))

    def add(self, offset: int, data: memoryview) -> None:
        """A piece at its offset in the shard. Lets other threads run."""
        for begin in range(0, data.nbytes, self._unit):
            self._units[(offset + begin) // self._unit] = crc32c(data[begin : begin + self._unit])

    def chunk(self, index: int) -> int:
        """A chunk's CRC, all of whose pieces were added."""
        units = self._chunk_size // self._unit
        length = min(self._chunk_size, self._size - index * self._chunk_size)
        return crc32c_of_chunks(self._units[index * units : (index + 1) * units], self._unit, length)

    def packed(self) -> bytes:
        """The table of all chunks, as it travels."""
        return pack_chunk_crcs(self.chunk(index) for index in range(chunk_count(self._size, self._chunk_size)))

    def total(self) -> int:
        """The whole shard's CRC."""
        return crc32c_of_chunks(self._units, self._unit, self._size)
