"""One shard over the fd lane: its bytes into the cache's own file, from the caller's memory where that is page-aligned.

Owns one attempt: pieces, their checksums, and the writes. Does not own repeating (writer.py). Checksums are of the very memory
that is then written, in the same thread, while it is warm. Bytes that change in the caller's own memory between the two do not
match their checksum; the gateway notices when it next reads them, and never forwards them.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from forebay.connection import Connection
from forebay.errors import CacheFull, Corrupt, ForebayError, InvalidArgument, Unavailable, Unsupported
from forebay.lanes.fd import FULL_ERRNOS, PIECE_BYTES, Lease, NotOffered
from forebay.lanes.memory import BLOCK, align
from forebay.lanes.parallel import Bounce, Workers
from forebay.lanes.stream import OnBytes, check_chunk_size, check_receipt
from forebay.lanes.sums import Sums
from forebay.sources import BufferSource, BuffersSource, PathSource, Piece, Source
from forebay_wire.memory import address_of, copy
from forebay_wire.v1 import gateway_pb2 as pb

# Enough that the disk always has a write to do while other threads compute checksums, or copy as well.
THREADS_ALIGNED = 3
THREADS_BOUNCE = 4
RETRY_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Block:
    """A piece at its offset: `data` is what counts, `padded` what is written."""

    offset: int
    data: memoryview
    padded: memoryview


class Pieces(Protocol):
    """A source, cut up for several threads."""

    threads: int

    def take(self, bounce: Bounce) -> Block | None:
        """The next piece, for the calling thread; None at the end. Valid until that thread takes another."""
        ...


class FdPut:
    """One attempt to put a shard of known size. `size` says how many bytes were reported by `on_bytes`."""

    def __init__(self, header: pb.PutHeader, source: Source, on_bytes: OnBytes | None) -> None:
        self._header = header
        self._source = source
        self._on_bytes = on_bytes
        self._lock = threading.Lock()
        self.began = False
        self.size = 0

    def run(self, connection: Connection) -> pb.Receipt | None:
        """Returns once the shard is durable in the gateway's cache; None where this writer has put that name before, which is
        for the stream lane to compare. Raises NotOffered, and what a put raises."""
        name, size = self._header.name, self._header.size
        doing = f"put {name!r}"
        with Lease(connection, doing) as lease:
            request = pb.OpenShardRequest(
                ticket=lease.ticket,
                part=self._header.part,
                name=name,
                size=size,
                admit_timeout_s=self._header.admit_timeout_s,
            )
            try:
                opened: pb.OpenShardResponse = lease.call(lambda stubs: stubs.gateway.OpenShard, request)
            except Unsupported as error:  # the gateway has no file for it now, since its cache's disk fails
                raise NotOffered(error.message) from error
            if opened.HasField("existing"):
                return None
            check_chunk_size(opened.layout.chunk_size, doing)
            self.began = True
            sums = self._write(lease, opened, doing)
            crc = sums.total()
            if (known := self._source.known_crc32c(0, size)) not in (None, crc):
                raise Corrupt(f"{doing}: its bytes were damaged while they waited crc32c={crc:08x} expected={known:08x}")
            seal = pb.SealShardRequest(lease=opened.lease, size=size, crc32c=crc, chunk_crcs=sums.packed())
            sealed: pb.SealShardResponse = lease.call(lambda stubs: stubs.gateway.SealShard, seal)
        connection.heard(sealed)
        check_receipt(sealed.receipt, name, size, crc)
        return sealed.receipt

    def _write(self, lease: Lease, opened: pb.OpenShardResponse, doing: str) -> Sums:
        layout, size = opened.layout, self._header.size
        sums = Sums(size, layout.chunk_size)
        descriptor = lease.descriptor(opened.token, layout)
        try:
            with _pieces_of(self._source, size, layout.direct_io, self._header.name) as pieces:

                def step(bounce: Bounce) -> bool:
                    if (block := pieces.take(bounce)) is None:
                        return False
                    sums.add(block.offset, block.data)
                    _write_all(descriptor, block, doing, lease)
                    lease.alive()
                    self._count(block.data.nbytes)
                    return True

                Workers(step, min(PIECE_BYTES, align(size))).run(min(pieces.threads, -(-size // PIECE_BYTES)))
        finally:
            os.close(descriptor)  # before the seal: it is the only one
        return sums

    def _count(self, size: int) -> None:
        with self._lock:
            self.size += size
            if self._on_bytes is not None:
                self._on_bytes(size)


@contextmanager
def _pieces_of(source: Source, size: int, direct_io: bool, name: str) -> Iterator[Pieces]:
    if isinstance(source, BufferSource):
        yield _BufferPieces(source.view, direct_io)
    elif isinstance(source, BuffersSource):
        yield _GatheredPieces(source)
    elif isinstance(source, PathSource):
        with source.path.open("rb", buffering=0) as file:
            yield _FilePieces(file.fileno(), size, str(source.path))
    else:
        yield _SerialPieces(source.chunks(PIECE_BYTES), size, name)


class _BufferPieces:
    """Of memory: as it lies where direct I/O takes it, else copied."""

    def __init__(self, view: memoryview, direct_io: bool) -> None:
        self._view = view
        self._offsets = iter(range(0, view.nbytes, PIECE_BYTES))
        self._lock = threading.Lock()
        self._any = not direct_io
        aligned = self._any or address_of(view) % BLOCK == 0
        self._in_place = aligned
        self.threads = THREADS_ALIGNED if aligned else THREADS_BOUNCE

    def take(self, bounce: Bounce) -> Block | None:
        """See Pieces."""
        with self._lock:
            offset = next(self._offsets, None)
        if offset is None:
            return None
        data = self._view[offset : offset + PIECE_BYTES]
        if self._any or (self._in_place and data.nbytes % BLOCK == 0):
            return Block(offset, data, data)
        buffer = bounce()
        copy(buffer, data)
        return _padded(offset, buffer, data.nbytes)


class _GatheredPieces:
    """Of memory in several pieces: each thread joins what it writes."""

    threads = THREADS_BOUNCE

    def __init__(self, source: BuffersSource) -> None:
        self._source = source
        self._offsets = iter(range(0, source.size, PIECE_BYTES))
        self._lock = threading.Lock()

    def take(self, bounce: Bounce) -> Block | None:
        """See Pieces."""
        with self._lock:
            offset = next(self._offsets, None)
        if offset is None:
            return None
        buffer, length, at = bounce(), min(PIECE_BYTES, self._source.size - offset), 0
        for piece in self._source.pieces(offset, length):
            copy(buffer[at:], piece)
            at += piece.nbytes
        return _padded(offset, buffer, length)


class _FilePieces:
    """Of a file by its descriptor: each thread reads where it writes."""

    threads = THREADS_BOUNCE

    def __init__(self, descriptor: int, size: int, label: str) -> None:
        self._descriptor = descriptor
        self._size = size
        self._label = label
        self._offsets = iter(range(0, size, PIECE_BYTES))
        self._lock = threading.Lock()

    def take(self, bounce: Bounce) -> Block | None:
        """See Pieces."""
        with self._lock:
            offset = next(self._offsets, None)
        if offset is None:
            return None
        buffer, length = bounce(), min(PIECE_BYTES, self._size - offset)
        filled = 0
        while filled < length:
            count = os.preadv(self._descriptor, [buffer[filled:length]], offset + filled)
            if not count:
                at = offset + filled
                raise InvalidArgument(f"{self._label}: ended at byte {at}; it became shorter while it was read")
            filled += count
        return _padded(offset, buffer, length)


class _SerialPieces:
    """Of a source that is read in order: one thread reads at a time, the others write."""

    threads = THREADS_BOUNCE

    def __init__(self, pieces: Iterator[Piece], size: int, name: str) -> None:
        self._pieces = pieces
        self._size = size
        self._name = name
        self._offset = 0
        self._lock = threading.Lock()

    def take(self, bounce: Bounce) -> Block | None:
        """See Pieces."""
        with self._lock:
            offset, piece = self._offset, next(self._pieces, None)
            if piece is None:
                if offset != self._size:
                    raise InvalidArgument(f"shard {self._name!r}: it had {self._size} bytes and now has {offset}")
                return None
            buffer, data = bounce(), memoryview(piece)
            self._offset += data.nbytes
            if self._offset > self._size:
                raise InvalidArgument(f"shard {self._name!r}: it had {self._size} bytes and now has more")
            copy(buffer, data)
        return _padded(offset, buffer, data.nbytes)


def _padded(offset: int, buffer: memoryview, length: int) -> Block:
    if padding := align(length) - length:
        buffer[length : length + padding] = bytes(padding)
    return Block(offset, buffer[:length], buffer[: align(length)])


def _write_all(descriptor: int, block: Block, doing: str, lease: Lease) -> None:
    """Whole blocks; a short write goes on from the last whole one. What the disk refuses the gateway is told."""
    done = 0
    try:
        while done < block.padded.nbytes:
            count = os.pwrite(descriptor, block.padded[done:], block.offset + done)
            end = done + count == block.padded.nbytes
            if count < BLOCK and not end:
                raise OSError(0, f"only {count} bytes were taken")
            done = done + count if end else (done + count) // BLOCK * BLOCK
    except OSError as error:
        if error.errno not in FULL_ERRNOS:
            lease.write_failed()
        raise _disk_error(error, doing) from error


def _disk_error(error: OSError, doing: str) -> ForebayError:
    reason = f"{doing}: the cache's file cannot be written: {error.strerror or error}"
    if error.errno in FULL_ERRNOS:
        return CacheFull(reason, retry_after_s=RETRY_AFTER_S)
    return Unavailable(reason, retry_after_s=RETRY_AFTER_S)
