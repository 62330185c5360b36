"""The stream lane: shards as chunk messages over gRPC.

Owns one attempt of each call: what is sent, in which order, and the checks on what comes back. Does not own repeating
(writer.py, reader.py). gRPC pulls requests from a thread of its own; what it pulls is made ready on another one.
"""

import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar

import grpc

from forebay import cancel
from forebay.connection import Connection
from forebay.errors import Corrupt, ForebayError, InvalidArgument, Unavailable
from forebay.sources import BufferSource, Piece, Source
from forebay_wire import frames
from forebay_wire.checksums import combine, crc32c
from forebay_wire.manifest import MAX_CHUNK_SIZE, MIN_CHUNK_SIZE
from forebay_wire.v1 import gateway_pb2 as pb

# PutMany requests sent and not yet answered. Two keep the gateway busy while one travels; more only use memory.
REQUESTS_IN_FLIGHT = 3

# Messages made before gRPC asks for them: while one travels, the next is read, checksummed and framed.
MESSAGES_AHEAD = 2

OnBytes = Callable[[int], None]
T = TypeVar("T")


class Ahead(Generic[T]):
    """Calls `produce` on a thread of its own, at most `depth` results ahead of their consumer; None is the last result."""

    def __init__(self, produce: Callable[[], T | None], depth: int) -> None:
        self._produce = produce
        self._slots = threading.Semaphore(depth)
        self._ready: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="forebay-ahead", daemon=True).start()

    def _run(self) -> None:
        result: T | None
        while True:
            self._slots.acquire()
            result = self._produce()
            self._ready.put(result)
            if result is None:
                return
            result = None  # not held while waiting

    def next(self) -> T | None:
        """The next result; None at the end."""
        result = self._ready.get()
        self._slots.release()
        return result

    def hurry(self) -> None:
        """Wake a thread that waits for its consumer: what it produces next should be the end."""
        self._slots.release()


class ChunkMismatch(Corrupt):
    """A chunk arrived that is not the one asked for, or not the bytes that were sent."""


class PutStream:
    """The requests of one PutShard call. `began` says whether data was taken from the source."""

    def __init__(self, header: pb.PutHeader, source: Source, on_bytes: OnBytes | None) -> None:
        self._header = header
        self._source = source
        self._on_bytes = on_bytes
        self._go: queue.SimpleQueue[pb.Accepted | None] = queue.SimpleQueue()
        self._stopped = threading.Event()
        self._reading = threading.Lock()
        self._ahead: Ahead[bytes] | None = None
        self.on_error: Callable[[], object] = lambda: None
        self.error: Exception | None = None
        self.began = False
        self.size = 0
        self.crc32c = 0

    def accept(self, accepted: pb.Accepted) -> None:
        """Let data flow."""
        self._go.put(accepted)

    def stop(self) -> None:
        """No more requests. When it returns, a replayable source is not read any more and may be read anew."""
        self._stopped.set()
        self._go.put(None)
        if self._ahead is not None:
            self._ahead.hurry()
        if self._source.replayable:  # another may block for as long as its producer likes, and is never read twice
            with self._reading:
                pass

    def run(self, connection: Connection) -> pb.Receipt:
        """Send the shard. Returns once it is durable in the gateway's cache and the receipt matches what was sent."""
        return _put_shard(connection, self, self._header.name)

    def requests(self) -> Iterator[bytes]:
        """Header, then after accept() chunks and trailer. An error of the source is kept in `error` and ends the call."""
        yield frames.encode_put_header(self._header)
        accepted = self._go.get()
        if accepted is None:
            return
        self.began = True
        # What the gateway already has is not sent again: only its size and checksum are compared.
        send = not accepted.HasField("existing")
        pieces = self._source.chunks(accepted.chunk_size)
        produce: Callable[[], bytes | None] = partial(self._next, pieces, accepted.chunk_size, send)
        if self._header.HasField("size") and self._header.size <= accepted.chunk_size:
            following = produce  # one chunk: nothing to overlap with
        else:
            self._ahead = Ahead(produce, MESSAGES_AHEAD)
            following = self._ahead.next
        while (message := following()) is not None:
            if message:
                yield message
        if self.error is not None:
            self.on_error()
        elif not self._stopped.is_set():
            yield frames.encode_put_trailer(self.size, self.crc32c)

    def _next(self, pieces: Iterator[Piece], chunk_size: int, send: bool) -> bytes | None:
        """The next chunk's message, empty where it is not to be sent; None at the end."""
        with self._reading:
            if self._stopped.is_set():
                return None
            try:
                chunk = next(pieces, None)
                if chunk is None:
                    return None
                offset, crc = self._count(chunk, chunk_size)
                message = frames.encode_put_chunk(offset, crc, chunk) if send else b""
                if self._on_bytes is not None:
                    self._on_bytes(len(chunk))
                return message
            except Exception as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
                self.error = error
                return None

    def _count(self, chunk: Piece, chunk_size: int) -> tuple[int, int]:
        offset = self.size
        known = self._source.known_crc32c(offset, len(chunk))
        crc = crc32c(chunk) if known is None else known
        # Full chunks combine by a cached table; the last, of any length, is cheaper to read again.
        full = len(chunk) == chunk_size
        self.crc32c = combine(self.crc32c, crc, chunk_size) if full else crc32c(chunk, self.crc32c)
        self.size += len(chunk)
        return offset, crc


def _put_shard(connection: Connection, stream: PutStream, name: str) -> pb.Receipt:
    doing = f"put {name!r}"
    call = connection.start(lambda stubs: stubs.put_shard, stream.requests(), doing)
    stream.on_error = call.cancel
    with cancel.watching(call):
        try:
            accepted = _expect(next(call), "accepted", doing).accepted
            check_chunk_size(accepted.chunk_size, doing)
            stream.accept(accepted)
            answer = _expect(next(call), "receipt", doing)
            connection.heard(answer)
            receipt = answer.receipt
        except (StopIteration, grpc.RpcError) as error:
            if stream.error is not None:  # what went wrong on this side comes before what the gateway then said of it
                raise stream.error from None
            raise _reason(connection, error, doing) from error
        finally:
            stream.stop()
    check_receipt(receipt, name, stream.size, stream.crc32c)
    return receipt


def _reason(connection: Connection, ended: Exception, doing: str) -> ForebayError:
    if isinstance(ended, grpc.RpcError):
        return connection.translate(ended, doing)
    return Unavailable(f"{doing}: the gateway ended the stream before its last receipt")


def _expect(response: pb.PutShardResponse, frame: str, doing: str) -> pb.PutShardResponse:
    if response.WhichOneof("frame") != frame:
        raise ForebayError(f"{doing}: the gateway answered with {response.WhichOneof('frame')} where {frame} was due")
    return response


def check_chunk_size(chunk_size: int, doing: str) -> None:
    """Raise where no gateway may ask for that."""
    if not MIN_CHUNK_SIZE <= chunk_size <= MAX_CHUNK_SIZE or chunk_size & (chunk_size - 1):
        raise ForebayError(f"{doing}: the gateway asks for chunks of {chunk_size} bytes, which is no power of two in range")


def check_receipt(receipt: pb.Receipt, name: str, size: int, crc: int) -> None:
    """Raise Corrupt unless the receipt is for what was sent."""
    if (receipt.name, receipt.size, receipt.crc32c) != (name, size, crc):
        raise Corrupt(
            f"put {name!r}: the gateway's receipt is not for what was sent "
            f"sent_size={size} receipt_size={receipt.size} sent_crc32c={crc:08x} receipt_crc32c={receipt.crc32c:08x}"
        )


@dataclass(frozen=True, slots=True)
class SmallShard:
    """A shard that travels with others. Its bytes are read when its request is built."""

    name: str
    source: Source
    size: int

    def message(self) -> pb.SmallShard:
        """The shard with its checksum. Raises InvalidArgument where the data changed since its size was taken."""
        # A buffer's own copy into the message is checked, not the buffer: it may change in between.
        if isinstance(self.source, BufferSource):
            data = bytes(self.source.view)
        else:
            data = b"".join(bytes(piece) for piece in self.source.chunks(MIN_CHUNK_SIZE))
        if len(data) != self.size:
            raise InvalidArgument(f"shard {self.name!r}: it had {self.size} bytes and now has {len(data)}")
        known = self.source.known_crc32c(0, self.size)
        return pb.SmallShard(name=self.name, crc32c=crc32c(data) if known is None else known, data=data)


class PutManyStream:
    """The requests of one PutMany call, a few ahead of their answers."""

    def __init__(self, part: pb.PartRef, batches: Sequence[Sequence[SmallShard]], admit_timeout_s: float) -> None:
        self._part = part
        self._admit_timeout_s = admit_timeout_s
        self._batches = batches
        self._slots = threading.Semaphore(REQUESTS_IN_FLIGHT)
        self._stopped = threading.Event()
        self._reading = threading.Lock()
        self.on_error: Callable[[], object] = lambda: None
        self.error: Exception | None = None
        self.sent: list[list[tuple[str, int, int]]] = []

    def answered(self) -> None:
        """One request more may be on its way."""
        self._slots.release()

    def stop(self) -> None:
        """No more requests; when it returns, no data is being read."""
        self._stopped.set()
        self._slots.release()
        with self._reading:
            pass

    def requests(self) -> Iterator[pb.PutManyRequest]:
        """One request for each batch."""
        for index, batch in enumerate(self._batches):
            self._slots.acquire()
            shards = self._read(batch)
            if shards is None:
                self.on_error()
                return
            self.sent.append([(shard.name, len(shard.data), shard.crc32c) for shard in shards])
            part = self._part if index == 0 else None
            yield pb.PutManyRequest(part=part, shards=shards, admit_timeout_s=self._admit_timeout_s)

    def _read(self, batch: Sequence[SmallShard]) -> list[pb.SmallShard] | None:
        with self._reading:
            if self._stopped.is_set():
                return None
            try:
                return [shard.message() for shard in batch]
            except Exception as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
                self.error = error
                return None


def put_many(
    connection: Connection,
    part: pb.PartRef,
    batches: Sequence[Sequence[SmallShard]],
    on_receipts: Callable[[list[pb.Receipt]], None],
    admit_timeout_s: float,
) -> None:
    """Send batches of small shards; `on_receipts` is called for each batch, in order, once it is durable. Each may wait for
    space in the gateway up to `admit_timeout_s` seconds."""
    doing = f"put {sum(map(len, batches))} small shards"
    stream = PutManyStream(part, batches, admit_timeout_s)
    call = connection.start(lambda stubs: stubs.gateway.PutMany, stream.requests(), doing)
    stream.on_error = call.cancel
    with cancel.watching(call):
        try:
            for index in range(len(batches)):
                answer = next(call)
                connection.heard(answer)
                receipts = list(answer.receipts)
                stream.answered()
                sent = stream.sent[index]
                if len(receipts) != len(sent):
                    raise ForebayError(f"{doing}: {len(receipts)} receipts came for {len(sent)} shards")
                for receipt, (name, size, crc) in zip(receipts, sent, strict=True):
                    check_receipt(receipt, name, size, crc)
                on_receipts(receipts)
        except (StopIteration, grpc.RpcError) as error:
            if stream.error is not None:  # what went wrong on this side comes before what the gateway then said of it
                raise stream.error from None
            raise _reason(connection, error, doing) from error
        finally:
            stream.stop()


def read_shard(connection: Connection, request: pb.ReadShardRequest) -> Iterator[frames.ChunkFrame]:
    """Exactly the range asked for, in order, each chunk checked before it is handed out.

    Raises ChunkMismatch, Unavailable where the stream ends early, and what the gateway answers.
    """
    doing = f"read {request.name!r}"
    at, end = request.offset, request.offset + request.length
    call = connection.start(lambda stubs: stubs.read_shard, request, doing)
    with cancel.watching(call):
        try:
            for message in connection.messages(call, doing):
                frame = frames.decode_read_response(message)
                if frame.offset != at or at + frame.data.nbytes > end:
                    raise ChunkMismatch(f"{doing}: bytes {frame.offset} to {frame.offset + frame.data.nbytes} came at {at}")
                if crc32c(frame.data) != frame.crc32c:
                    raise ChunkMismatch(f"{doing}: a chunk arrived damaged offset={at} size={frame.data.nbytes}")
                at += frame.data.nbytes
                yield frame
        except frames.FrameError as error:
            raise ChunkMismatch(f"{doing}: {error}") from error
        except grpc.RpcError as error:
            raise connection.translate(error, doing) from error
    if at != end:
        raise Unavailable(f"{doing}: the stream ended at byte {at} of {end}")
