"""Reading a complete checkpoint: whole shards, byte ranges, streams.

Owns resuming: a broken stream goes on at the offset reached, a damaged chunk is asked for once more. Does not own which copy is
read (the gateway chooses) nor files (directories.py). A reader stays with the session that was complete when it was opened, so
that a newer save of the same step never mixes into it.
"""

import contextlib
import io
import logging
import threading
from collections.abc import Generator, Iterable, Iterator
from typing import Any

from forebay import cancel
from forebay.connection import Connection
from forebay.convert import record
from forebay.errors import Corrupt, ForebayError, InvalidArgument, NotFound, Unavailable, Unsupported
from forebay.lanes import fd_map, fd_read, many, stream
from forebay.lanes.fd import FD_BYTES_MIN, NotOffered
from forebay.lanes.stream import OnBytes
from forebay.sources import BuffersSource, view_of
from forebay.types import Checkpoint, Shard
from forebay_wire.checksums import combine, crc32c
from forebay_wire.frames import ChunkFrame
from forebay_wire.memory import copy
from forebay_wire.v1 import gateway_pb2 as pb

_log = logging.getLogger("forebay")


def list_shards(connection: Connection, run: str, step: int, session: str) -> tuple[Shard, ...]:
    """All shards of a checkpoint, as the gateway lists them."""
    doing = f"list the shards of {run}/{step}"
    request = pb.ListShardsRequest(run=run, step=step, session=session)
    pages = connection.pages(lambda stubs: stubs.gateway.ListShards, request, doing)
    return tuple(record(shard, Shard) for page in pages for shard in page.shards)


class Reader:
    """A complete checkpoint, open for reading. Thread-safe; holds no connection of its own."""

    def __init__(self, connection: Connection, checkpoint: Checkpoint, source: str = "auto", lane: str = "auto") -> None:
        self._connection = connection
        self._source = source
        self._lane = lane
        self._lock = threading.Lock()
        self._shards: dict[str, Shard] | None = None
        self.checkpoint = checkpoint

    def __getstate__(self) -> tuple[Any, ...]:
        return self._connection, self._source, self._lane, self._shards, self.checkpoint

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._connection, self._source, self._lane, self._shards, self.checkpoint = state
        self._lock = threading.Lock()

    def names(self) -> list[str]:
        """The names of all shards, sorted."""
        return sorted(self._listing())

    def shards(self) -> list[Shard]:
        """All shards, sorted by name."""
        return [shard for _, shard in sorted(self._listing().items())]

    def shard(self, name: str) -> Shard:
        """One shard's size and checksum. Raises NotFound."""
        try:
            return self._listing()[name]
        except KeyError:
            raise NotFound(f"checkpoint {self.checkpoint.run}/{self.checkpoint.step} has no shard {name!r}") from None

    def read(self, name: str, offset: int = 0, length: int | None = None) -> bytes:
        """A shard's bytes from `offset`, `length` of them or all to the end; never fewer.

        Raises InvalidArgument for a range that is not inside the shard, NotFound, Corrupt, Unavailable.
        """
        length = self._checked_length(self.shard(name), offset, length)
        if not self._may_go_by_fd(length):
            sink = io.BytesIO()  # hands its buffer over without a copy
            for chunk in self._streamed(self.shard(name), offset, length):
                sink.write(chunk)
            return sink.getvalue()
        sink = io.BytesIO(bytes(length))
        with sink.getbuffer() as view:
            self.readinto(name, view, offset)
        return sink.getvalue()

    def readinto(self, name: str, buffer: Any, offset: int = 0) -> int:
        """Fill `buffer` (writable, contiguous) exactly, from `offset`; returns its size in bytes. Raises as read()."""
        view = view_of(buffer, f"buffer for {name!r}")
        if view.readonly and view.nbytes:
            raise InvalidArgument(f"buffer for {name!r}: it is read-only")
        shard = self.shard(name)
        self._checked_length(shard, offset, view.nbytes)
        for at, chunk in self._into(fd_read.MemorySink(view, offset), shard, offset, offset + view.nbytes, None):
            copy(view[at - offset :], chunk)
        return view.nbytes

    def scatter(self, name: str, buffers: Iterable[Any], offset: int = 0) -> int:
        """Fill all buffers (writable, contiguous), one after another, with what follows `offset`; returns their size in bytes.

        The range is read once, however many they are. Raises as read().
        """
        views = [view_of(buffer, f"buffer for {name!r}") for buffer in buffers]
        if any(view.readonly and view.nbytes for view in views):
            raise InvalidArgument(f"a buffer for {name!r} is read-only")
        shard, target = self.shard(name), BuffersSource(views)
        self._checked_length(shard, offset, target.size)
        sink = fd_read.BuffersSink(target, offset)
        for at, chunk in self._into(sink, shard, offset, offset + target.size, None):
            sink.put(at, chunk)
        return target.size

    def mapped(self, name: str) -> fd_map.MappedShard:
        """The whole shard as it lies in the gateway's cache, mapped into this process. Raises NotFound, Unavailable, and
        Unsupported where the fd lane cannot bring it: another host, a reader limited to another source, a shard in a pack, an
        empty one.
        """
        shard = self.shard(name)
        if self._lane == "stream" or not shard.size or self._source not in ("auto", "cache"):
            raise Unsupported(f"{name!r} cannot be mapped: only the fd lane maps, from the gateway's cache on this host")
        return fd_map.MappedShard(self._connection, self._open_request(shard, 0, shard.size), shard)

    def write_to(self, name: str, descriptor: int, on_bytes: OnBytes | None = None) -> None:
        """The whole shard into an open file of the caller's, from its beginning. Raises as read(), and OSError."""
        shard = self.shard(name)
        sink = fd_read.FileSink(descriptor)
        for at, chunk in self._into(sink, shard, 0, shard.size, on_bytes):
            sink.put(at, chunk)

    def read_many(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, bytes]]:
        """Whole shards, those named or all: (name, bytes), each once, in any order; `dict(reader.read_many())` has all at once.

        Small shards travel together and come first, some thousands a request; a few MiB of them are held at a time. Raises as
        read(), for the first shard that cannot be had; what was handed out before is good.
        """
        return (item for items in self.read_groups(names) for item in items)

    def read_groups(self, names: Iterable[str] | None = None) -> Iterator[list[tuple[str, bytes]]]:
        """As read_many(), in lists of as many as came together: about 1 MiB, or one larger shard."""
        wanted = {name: self.shard(name) for name in (self.names() if names is None else names)}
        return self._groups(wanted)

    def _groups(self, left: dict[str, Shard]) -> Iterator[list[tuple[str, bytes]]]:
        with contextlib.closing(self.packed(left.values())) as groups:
            for group in groups:
                for shard, _ in group:
                    del left[shard.name]
                yield [(shard.name, data) for shard, data in group]
        for name in left:
            yield [(name, self.read(name))]

    def packed(self, shards: Iterable[Shard]) -> Generator[many.Group, None, None]:
        """Those of the shards that come together, out of packs in the gateway's cache, checked; each other one is for read().

        Raises NotFound, Unavailable.
        """
        small = {shard.name: shard for shard in shards if shard.size < many.SIZE_MAX}
        if len(small) < many.SHARDS_MIN or self._source not in ("auto", "cache"):
            return
        attempts = self._connection.policy.begin()
        for batch in many.batches(small):
            left = dict.fromkeys(batch)
            while left:
                cancel.check()
                try:
                    for group in many.read_many(self._connection, self._many_request(left), small):
                        for shard, _ in group:
                            del left[shard.name]
                        attempts.progressed()
                        yield group
                    break  # what has not come lies elsewhere
                except Unsupported as error:
                    _log.debug("reading one by one: %s", error)
                    return
                except ForebayError as error:
                    attempts.pause(error)

    def stream(self, name: str, offset: int = 0, length: int | None = None) -> Iterator[memoryview]:
        """The range as checked chunks, in order; holds one chunk at a time. Raises as read()."""
        shard = self.shard(name)
        length = self._checked_length(shard, offset, length)
        return self._pieces(shard, offset, length) if self._may_go_by_fd(length) else self._streamed(shard, offset, length)

    @staticmethod
    def _checked_length(shard: Shard, offset: int, length: int | None) -> int:
        length = shard.size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > shard.size:
            raise InvalidArgument(f"{shard.name!r} has {shard.size} bytes; {length} from {offset} are not inside it")
        return length

    # By the fd lane: what it cannot bring comes by the stream lane, which falls over to other copies and knows patience.

    def _may_go_by_fd(self, length: int) -> bool:
        """Whether the fd lane can bring it; "auto" uses it for what is worth a lease."""
        if self._lane == "stream" or not length or self._source not in ("auto", "cache"):
            return False
        return self._lane == "fd" or length >= FD_BYTES_MIN

    def _file(self, stack: contextlib.ExitStack, shard: Shard, offset: int, length: int) -> fd_read.OpenFile | None:
        """The shard's file until the stack ends; None where the stream lane has to do."""
        if not self._may_go_by_fd(length):
            return None
        try:
            return stack.enter_context(fd_read.opened(self._connection, self._open_request(shard, offset, length), shard))
        except NotOffered:
            if self._lane == "fd":
                raise
        except (Unsupported, Unavailable) as error:
            _log.debug("reading by the stream lane: %s", error)
        return None

    def _open_request(self, shard: Shard, offset: int, length: int) -> pb.OpenReadRequest:
        return pb.OpenReadRequest(
            run=self.checkpoint.run,
            step=self.checkpoint.step,
            session=self.checkpoint.session,
            name=shard.name,
            offset=offset,
            length=length,
            source=self._source,
        )

    def _into(
        self, sink: fd_read.Sink, shard: Shard, low: int, high: int, on_bytes: OnBytes | None
    ) -> Iterator[tuple[int, memoryview]]:
        """Fill the sink with the range as far as the fd lane can; what is still to be put there, with its place."""
        lacking, seen = [(low, high)], 0

        def count(size: int) -> None:
            nonlocal seen
            seen += size
            if on_bytes is not None:
                on_bytes(size)

        with contextlib.ExitStack() as stack:
            if (file := self._file(stack, shard, low, high - low)) is not None:
                try:
                    lacking = file.read(low, high, sink, count)
                except Unavailable as error:
                    _log.debug("reading by the stream lane: %s", error)
        again = sum(end - begin for begin, end in lacking) - (high - low - seen)  # reported, and to be reported once more
        if on_bytes is not None and again:
            on_bytes(-again)
        for begin, end in lacking:
            at = begin
            for chunk in self._streamed(shard, begin, end - begin):
                yield at, chunk
                at += chunk.nbytes
                if on_bytes is not None:
                    on_bytes(chunk.nbytes)

    def _pieces(self, shard: Shard, offset: int, length: int) -> Iterator[memoryview]:
        at, end = offset, offset + length
        with contextlib.ExitStack() as stack:
            file = self._file(stack, shard, offset, length)
            if file is not None and file.chunk_size <= fd_read.STREAM_CHUNK_BYTES_MAX:
                try:
                    for piece in file.stream(at, end):
                        at += piece.nbytes
                        yield piece
                except (fd_read.Damaged, Unavailable) as error:
                    _log.debug("reading by the stream lane: %s", error)
        if at < end:
            yield from self._streamed(shard, at, end - at)

    # By the stream lane

    def _streamed(self, shard: Shard, offset: int, length: int) -> Iterator[memoryview]:
        frames = self._resuming(shard.name, offset, length)
        return _whole(frames, shard) if length == shard.size else (frame.data for frame in frames)

    def _listing(self) -> dict[str, Shard]:
        with self._lock:
            if self._shards is None:
                found = list_shards(self._connection, self.checkpoint.run, self.checkpoint.step, self.checkpoint.session)
                if len(found) != self.checkpoint.shard_count:
                    raise Corrupt(
                        f"checkpoint {self.checkpoint.run}/{self.checkpoint.step}: the gateway lists {len(found)} shards of "
                        f"{self.checkpoint.shard_count}"
                    )
                self._shards = {shard.name: shard for shard in found}
            return self._shards

    def _resuming(self, name: str, offset: int, length: int) -> Iterator[ChunkFrame]:
        at, end = offset, offset + length
        attempts = self._connection.policy.begin()
        mismatch_at = -1
        while at < end:
            cancel.check()
            try:
                for frame in stream.read_shard(self._connection, self._request(name, at, end - at)):
                    at += frame.data.nbytes
                    yield frame
                    attempts.progressed()
            except stream.ChunkMismatch as error:
                if mismatch_at == at:
                    raise Corrupt(f"{error.message}; asking again gave the same") from error
                mismatch_at = at
            except ForebayError as error:
                attempts.pause(error)

    def _many_request(self, names: Iterable[str]) -> pb.ReadManyRequest:
        return pb.ReadManyRequest(
            run=self.checkpoint.run,
            step=self.checkpoint.step,
            session=self.checkpoint.session,
            names=names,
            source=self._source,
        )

    def _request(self, name: str, offset: int, length: int) -> pb.ReadShardRequest:
        return pb.ReadShardRequest(
            run=self.checkpoint.run,
            step=self.checkpoint.step,
            name=name,
            offset=offset,
            length=length,
            session=self.checkpoint.session,
            source=self._source,
        )


def _whole(frames: Iterator[ChunkFrame], shard: Shard) -> Iterator[memoryview]:
    """The chunks of a whole shard; raises Corrupt at the end where they do not make the checksum it was saved with."""
    crc = 0
    for frame in frames:
        length = frame.data.nbytes
        # Full chunks are powers of two and combine by a cached table; others are cheaper to read again.
        crc = crc32c(frame.data, crc) if length & (length - 1) else combine(crc, frame.crc32c, length)
        yield frame.data
    if crc != shard.crc32c:
        raise Corrupt(f"{shard.name!r}: its bytes do not match its checksum crc32c={crc:08x} expected={shard.crc32c:08x}")
