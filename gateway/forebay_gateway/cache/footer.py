"""The tail of a cache file: one 4,096-byte footer and the chunk CRC table. Makes a file readable without the catalog.

Owns the format, version 1, and finding it again from the end of a file. Does not own names on disk or writing.

    data | zeros to 4,096 | footer, 4,096 | chunk CRCs, 4 bytes little-endian each, zeros to 4,096

Footer: fixed head (`_HEAD`), then run, session and name as UTF-8, zeros, and in its last 4 bytes the CRC32C of all before.
The table needs no CRC of its own: its entries combine to the shard's CRC, and a change of any one of them changes that.
"""

import mmap
import os
from dataclasses import dataclass
from struct import Struct
from typing import Protocol

from forebay_gateway.core.errors import Corrupt, Unsupported
from forebay_wire.checksums import crc32c, crc32c_of_chunks
from forebay_wire.manifest import MAX_CHUNK_SIZE, MIN_CHUNK_SIZE, chunk_count, unpack_chunk_crcs

BLOCK = 4096  # alignment of everything in a cache file; O_DIRECT needs it on any disk in use
MAGIC = b"FBshard\x00"
VERSION = 1

# magic, version, chunk size, step, writer, writers, size, chunk count, shard CRC, lengths of run, session, name
_HEAD = Struct("<8sIIQIIQQIHHH")
_CRC = Struct("<I")
_TEXT_BYTES_MAX = BLOCK - _HEAD.size - _CRC.size


class ShardIdentity(Protocol):
    """Which shard of which checkpoint a file holds. Footer is one; so is any record with these fields."""

    @property
    def run(self) -> str: ...
    @property
    def step(self) -> int: ...
    @property
    def session(self) -> str: ...
    @property
    def writer(self) -> int: ...
    @property
    def writers(self) -> int: ...
    @property
    def name(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Footer:
    """A footer's content. Sizes are bytes; `crc32c` is the whole shard's."""

    run: str
    step: int
    session: str
    writer: int
    writers: int
    name: str
    size: int
    chunk_size: int
    crc32c: int

    @property
    def chunk_count(self) -> int:
        """Chunks in the shard."""
        return chunk_count(self.size, self.chunk_size)

    @property
    def disk_size(self) -> int:
        """Length of the cache file."""
        return disk_size(self.size, self.chunk_size)


def align(size: int) -> int:
    """`size` rounded up to whole blocks."""
    return -(-size // BLOCK) * BLOCK


def disk_size(size: int, chunk_size: int) -> int:
    """Length of the cache file of a shard of `size` bytes."""
    return align(size) + BLOCK + align(4 * chunk_count(size, chunk_size))


def encode(footer: Footer, chunk_crcs: bytes) -> bytes:
    """Footer and table as they follow the padded data. Raises ValueError where the table or the names do not fit."""
    if len(chunk_crcs) != 4 * footer.chunk_count:
        raise ValueError(f"{len(chunk_crcs)} bytes of chunk CRCs for {footer.chunk_count} chunks")
    texts = [text.encode("utf-8") for text in (footer.run, footer.session, footer.name)]
    if sum(map(len, texts)) > _TEXT_BYTES_MAX:
        raise ValueError(f"run, session and name take more than {_TEXT_BYTES_MAX} bytes")
    head = _HEAD.pack(
        MAGIC,
        VERSION,
        footer.chunk_size,
        footer.step,
        footer.writer,
        footer.writers,
        footer.size,
        footer.chunk_count,
        footer.crc32c,
        *map(len, texts),
    )
    body = b"".join((head, *texts)).ljust(BLOCK - _CRC.size, b"\0")
    return body + _CRC.pack(crc32c(body)) + chunk_crcs.ljust(align(len(chunk_crcs)), b"\0")


def decode(block: bytes) -> Footer:
    """The footer in one block; raises Corrupt for anything that is not exactly one, Unsupported for a newer release's."""
    if len(block) != BLOCK or not block.startswith(MAGIC):
        raise Corrupt("not a footer")
    if _CRC.unpack_from(block, BLOCK - _CRC.size)[0] != crc32c(block[: BLOCK - _CRC.size]):
        raise Corrupt("a footer does not match its checksum")
    _, version, chunk_size, step, writer, writers, size, count, crc, *lengths = _HEAD.unpack_from(block)
    if version > VERSION:
        raise Unsupported("its footer was written by a newer release", version=version, this_release_reads=VERSION)
    if version != VERSION:
        raise Corrupt("a footer of another version", version=version, reads=VERSION)
    if not MIN_CHUNK_SIZE <= chunk_size <= MAX_CHUNK_SIZE or chunk_size & (chunk_size - 1):
        raise Corrupt("a footer with an impossible chunk size", chunk_size=chunk_size)
    if count != chunk_count(size, chunk_size) or sum(lengths) > _TEXT_BYTES_MAX:
        raise Corrupt("a footer that contradicts itself", size=size, chunk_count=count)
    texts, at = [], _HEAD.size
    try:
        for length in lengths:
            texts.append(block[at : at + length].decode("utf-8"))
            at += length
    except UnicodeDecodeError as error:
        raise Corrupt("a footer with a name that is not UTF-8") from error
    run, session, name = texts
    return Footer(run, step, session, writer, writers, name, size, chunk_size, crc)


def find_footer(descriptor: int, file_size: int) -> tuple[Footer, bytes]:
    """The footer and the packed chunk CRCs of a cache file of `file_size` bytes. Blocking; any open mode, O_DIRECT too.

    Tries every table length that fits the file, from the shortest. A block counts as the footer only if its magic and CRC
    hold, the file length that it implies is exact, and the table combines to the shard's CRC: data that looks like a
    footer lies at the wrong distance from the end. Raises Corrupt where none counts, Unsupported where the only one that may is
    a newer release's, OSError where the disk fails.
    """
    reason, newer = "no footer", None
    if file_size >= BLOCK and file_size % BLOCK == 0:
        table_blocks_max = align(4 * chunk_count(file_size, MIN_CHUNK_SIZE)) // BLOCK
        for table_blocks in range(min(table_blocks_max, file_size // BLOCK - 1) + 1):
            at = file_size - (table_blocks + 1) * BLOCK
            block = _read(descriptor, at, BLOCK)
            if not block.startswith(MAGIC):
                continue
            try:
                footer = decode(block)
                if footer.disk_size != file_size:
                    raise Corrupt("a footer that belongs to a file of another length", implied=footer.disk_size)
                return footer, _table(footer, _read(descriptor, at + BLOCK, table_blocks * BLOCK))
            except Corrupt as error:
                reason = str(error)
            except Unsupported as error:
                newer = error
    if newer is not None:
        raise newer
    raise Corrupt("the file is no sealed shard", length=file_size, because=f"({reason})")


def _table(footer: Footer, padded: bytes) -> bytes:
    length = 4 * footer.chunk_count
    chunks = padded[:length]
    if len(padded) != align(length) or any(padded[length:]):
        raise Corrupt("the chunk CRC table has the wrong length")
    if crc32c_of_chunks(unpack_chunk_crcs(chunks), footer.chunk_size, footer.size) != footer.crc32c:
        raise Corrupt("the chunk CRC table does not combine to the shard's CRC")
    return chunks


def _read(descriptor: int, offset: int, length: int) -> bytes:
    """Exactly `length` bytes, by way of aligned memory, so that O_DIRECT descriptors work too."""
    if length == 0:
        return b""
    with mmap.mmap(-1, length) as memory:
        count = os.preadv(descriptor, [memory], offset)
        if count != length:
            raise Corrupt("the file became shorter while it was read", offset=offset, wanted=length, got=count)
        return memory[:]
