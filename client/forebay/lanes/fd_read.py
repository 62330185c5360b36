"""Reading a shard over the fd lane: from the cache's own file, straight into the caller's memory where that is page-aligned.

Owns one lease's reads and their checks against the chunk table, which combines to the checksum that the checkpoint was saved
with. Does not own what happens to bytes that do not match: they are named to the caller, who gets them by the stream lane,
where the gateway sees the damage itself and goes on from another copy (reader.py).
"""

import contextlib
import os
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from forebay import cancel
from forebay.connection import Connection
from forebay.errors import ForebayError, Unavailable, Unsupported
from forebay.lanes.fd import PIECE_BYTES, Lease
from forebay.lanes.memory import BLOCK, align, aligned, give_to_children
from forebay.lanes.parallel import Bounce, Workers
from forebay.lanes.stream import OnBytes, check_chunk_size
from forebay.lanes.sums import Sums
from forebay.sources import BuffersSource
from forebay.types import Shard
from forebay_wire.checksums import crc32c, crc32c_of_chunks
from forebay_wire.manifest import chunk_count, unpack_chunk_crcs
from forebay_wire.memory import address_of, copy
from forebay_wire.v1 import gateway_pb2 as pb

THREADS_ALIGNED = 3
THREADS_BOUNCE = 4
PIECES_AHEAD = 2  # of a stream
STREAM_CHUNK_BYTES_MAX = 16 << 20  # with larger chunks a stream's pieces would take too much memory

Range = tuple[int, int]  # first byte, byte after the last


class Damaged(ForebayError):
    """Bytes of the cache's file do not match; everything before `at` did and was handed out."""

    def __init__(self, at: int) -> None:
        super().__init__(f"the cache's file is damaged at byte {at}")
        self.at = at


@contextlib.contextmanager
def opened(connection: Connection, request: pb.OpenReadRequest, shard: Shard) -> Iterator["OpenFile"]:
    """The shard's file in the gateway's cache. Raises NotOffered, Unsupported where it is not to be had, Unavailable."""
    doing = f"read {request.name!r}"
    with Lease(connection, doing) as lease:
        request.ticket = lease.ticket
        answer: pb.OpenReadResponse = lease.call(lambda stubs: stubs.gateway.OpenRead, request)
        check_chunk_size(answer.layout.chunk_size, doing)
        crcs = unpack_chunk_crcs(answer.chunk_crcs)
        if len(crcs) != chunk_count(shard.size, answer.layout.chunk_size) or (answer.size, answer.crc32c) != (
            shard.size,
            shard.crc32c,
        ):
            raise Unsupported(f"{doing}: the gateway's file is not of the shard that it lists")
        if crc32c_of_chunks(crcs, answer.layout.chunk_size, shard.size) != shard.crc32c:
            raise Unsupported(f"{doing}: the gateway's chunk table does not make the shard's checksum")
        descriptor = lease.descriptor(answer.token, answer.layout)
        try:
            yield OpenFile(lease, descriptor, answer.layout, shard.size, list(crcs))
        finally:
            os.close(descriptor)


class Sink:
    """Where a range goes."""

    threads = THREADS_BOUNCE

    def place(self, offset: int, length: int, direct_io: bool) -> memoryview | None:
        """The memory for these bytes of the shard, where they can be read straight into it."""
        return None

    def put(self, offset: int, data: memoryview) -> None:
        """Bytes of the shard that place() had no memory for. From any thread."""
        raise NotImplementedError


class MemorySink(Sink):
    """The caller's memory, for the bytes of the shard from `offset`."""

    def __init__(self, view: memoryview, offset: int) -> None:
        self._view = view
        self._offset = offset
        self._aligned = view.nbytes > 0 and (address_of(view) - offset) % BLOCK == 0
        self.threads = THREADS_ALIGNED if self._aligned else THREADS_BOUNCE

    def place(self, offset: int, length: int, direct_io: bool) -> memoryview | None:
        """See Sink."""
        begin = offset - self._offset
        inside = begin >= 0 and begin + length <= self._view.nbytes
        fits = not direct_io or (self._aligned and length % BLOCK == 0)
        return self._view[begin : begin + length] if inside and fits else None

    def put(self, offset: int, data: memoryview) -> None:
        """See Sink."""
        copy(self._view[offset - self._offset :], data)


class BuffersSink(Sink):
    """The caller's memory in several pieces, which follow one another in the shard from `offset`."""

    def __init__(self, buffers: BuffersSource, offset: int) -> None:
        self._buffers = buffers
        self._offset = offset

    def put(self, offset: int, data: memoryview) -> None:
        """See Sink."""
        for piece in self._buffers.pieces(offset - self._offset, data.nbytes):
            copy(piece, data[: piece.nbytes])
            data = data[piece.nbytes :]


class FileSink(Sink):
    """A file of the caller's, for a whole shard. Written through the page cache: a restored file is about to be read."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def put(self, offset: int, data: memoryview) -> None:
        """See Sink."""
        while data.nbytes:
            count = os.pwrite(self._descriptor, data, offset)
            data, offset = data[count:], offset + count


class OpenFile:
    """A shard's file, open for reading. One read at a time."""

    def __init__(self, lease: Lease, descriptor: int, layout: pb.FileLayout, size: int, crcs: list[int]) -> None:
        self.lease = lease
        self.descriptor = descriptor
        self._size = size
        self.crcs = crcs
        self.chunk_size = layout.chunk_size
        self.direct_io = layout.direct_io

    def read(self, low: int, high: int, sink: Sink, on_bytes: OnBytes | None = None) -> list[Range]:
        """Bytes `low` to `high` into the sink, in any order. Returns the ranges that do not match their checksums: what the
        sink got of them is to be replaced. Raises Unavailable where the disk fails, OSError of the sink."""
        first, last = low // self.chunk_size, -(-high // self.chunk_size)
        begin, end = first * self.chunk_size, min(self._size, last * self.chunk_size)
        sums = Sums(self._size, self.chunk_size)
        offsets = iter(range(begin, end, PIECE_BYTES))
        lock = threading.Lock()

        def step(bounce: Bounce) -> bool:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return False
            length = min(PIECE_BYTES, end - offset)
            straight = sink.place(offset, length, self.direct_io)
            block = bounce()[: align(length)] if straight is None else straight
            self._fill(block, offset, length)
            sums.add(offset, block[:length])
            wanted = block[max(low - offset, 0) : max(min(high - offset, length), 0)]  # of a large chunk perhaps nothing
            if straight is None and wanted.nbytes:
                sink.put(max(low, offset), wanted)
            if on_bytes is not None:
                with lock:
                    on_bytes(wanted.nbytes)
            return True

        Workers(step, min(PIECE_BYTES, align(end - begin))).run(min(sink.threads, -(-(end - begin) // PIECE_BYTES)))
        bad = [index for index in range(first, last) if sums.chunk(index) != self.crcs[index]]
        return [(max(low, index * self.chunk_size), min(high, (index + 1) * self.chunk_size)) for index in bad]

    def stream(self, low: int, high: int) -> Iterator[memoryview]:
        """Bytes `low` to `high` in order, each piece checked and in memory of its own. Raises Damaged, Unavailable."""
        unit = max(self.chunk_size, PIECE_BYTES)
        starts = iter(range(low // self.chunk_size * self.chunk_size, high, unit))
        ahead: deque[tuple[int, Future[memoryview]]] = deque()
        with ThreadPoolExecutor(PIECES_AHEAD, thread_name_prefix="forebay-fd") as pool:

            def begin() -> None:
                if (start := next(starts, None)) is not None:
                    ahead.append((start, pool.submit(self._checked, start, min(self._size, start + unit))))

            try:
                for _ in range(PIECES_AHEAD):
                    begin()
                while ahead:
                    cancel.check()
                    start, future = ahead.popleft()
                    piece = future.result()
                    del future  # it would hold the piece
                    begin()
                    yield piece[max(low - start, 0) : high - start]
                    del piece
            finally:
                for _, waiting in ahead:
                    waiting.cancel()

    def _checked(self, begin: int, end: int) -> memoryview:
        block = aligned(end - begin)[: align(end - begin)]
        for offset in range(begin, end, PIECE_BYTES):
            length = min(PIECE_BYTES, end - offset)
            self._fill(block[offset - begin :][: align(length)], offset, length)
        for offset in range(begin, end, self.chunk_size):
            chunk = block[offset - begin : min(end, offset + self.chunk_size) - begin]
            if crc32c(chunk) != self.crcs[offset // self.chunk_size]:
                raise Damaged(begin)
        give_to_children(block)
        return block[: end - begin]

    def _fill(self, block: memoryview, offset: int, length: int) -> None:
        """`length` bytes of the file, which is longer by whole blocks: footer and table follow."""
        done = 0
        try:
            while done < length:
                count = os.preadv(self.descriptor, [block[done:]], offset + done)
                if done + count >= length:
                    break
                if count < BLOCK:
                    raise OSError(0, f"it ends at byte {offset + done + count}")
                done = (done + count) // BLOCK * BLOCK
        except OSError as error:
            raise Unavailable(f"the cache's file cannot be read: {error.strerror or error}") from error
        with contextlib.suppress(Unavailable):  # the gateway went away: the file is still open, and its bytes are checked here
            self.lease.alive()
