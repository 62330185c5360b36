"""Reading a complete checkpoint: whole shards, byte ranges, streams.

Owns resuming: a broken stream goes on at the offset reached, a damaged chunk is asked for once more. Does not own which copy is
read (the gateway chooses) nor files (directories.py). A reader stays with the session that was complete when it was opened, so
that a newer save of the same step never mixes into it.
"""

import io
import threading
from collections.abc import Iterator
from typing import Any

from forebay import cancel
from forebay.connection import Connection
from forebay.convert import record
from forebay.errors import Corrupt, ForebayError, InvalidArgument, NotFound
from forebay.lanes import stream
from forebay.sources import view_of
from forebay.types import Checkpoint, Shard
from forebay_wire.checksums import combine, crc32c
from forebay_wire.frames import ChunkFrame
from forebay_wire.v1 import gateway_pb2 as pb


def list_shards(connection: Connection, run: str, step: int, session: str) -> tuple[Shard, ...]:
    """All shards of a checkpoint, as the gateway lists them."""
    doing = f"list the shards of {run}/{step}"
    request = pb.ListShardsRequest(run=run, step=step, session=session)
    pages = connection.pages(lambda stubs: stubs.gateway.ListShards, request, doing)
    return tuple(record(shard, Shard) for page in pages for shard in page.shards)


class Reader:
    """A complete checkpoint, open for reading. Thread-safe; holds no connection of its own."""

    def __init__(self, connection: Connection, checkpoint: Checkpoint, source: str = "auto") -> None:
        self._connection = connection
        self._source = source
        self._lock = threading.Lock()
        self._shards: dict[str, Shard] | None = None
        self.checkpoint = checkpoint

    def __getstate__(self) -> tuple[Any, ...]:
        return self._connection, self._source, self._shards, self.checkpoint

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._connection, self._source, self._shards, self.checkpoint = state
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
        sink = io.BytesIO()  # hands its buffer over without a copy
        for chunk in self.stream(name, offset, length):
            sink.write(chunk)
        return sink.getvalue()

    def readinto(self, name: str, buffer: Any, offset: int = 0) -> int:
        """Fill `buffer` (writable, contiguous) exactly, from `offset`; returns its size in bytes. Raises as read()."""
        view = view_of(buffer, f"buffer for {name!r}")
        if view.readonly and view.nbytes:
            raise InvalidArgument(f"buffer for {name!r}: it is read-only")
        at = 0
        for chunk in self.stream(name, offset, view.nbytes):
            view[at : at + chunk.nbytes] = chunk
            at += chunk.nbytes
        return at

    def stream(self, name: str, offset: int = 0, length: int | None = None) -> Iterator[memoryview]:
        """The range as checked chunks, in order; holds one chunk at a time. Raises as read()."""
        shard = self.shard(name)
        length = shard.size - offset if length is None else length
        if offset < 0 or length < 0 or offset + length > shard.size:
            raise InvalidArgument(f"{name!r} has {shard.size} bytes; {length} from {offset} are not inside it")
        frames = self._resuming(name, offset, length)
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
