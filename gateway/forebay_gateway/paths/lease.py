"""The fd lane: a client on this host writes the cache's own file, or reads it, up to the acknowledgement `cache`.

    open: names checked, space reserved, file made and allocated            -> a token, for the connection that asked
    trade: the token, over that connection, once                            -> the file's only writable descriptor
    seal: nobody can write any more (else: a checked copy takes its place), the table combines to the shard's CRC
          -> footer, fsync, rename, directory fsync, catalog synced         -> receipt
    read: the shard is in the cache, or fetched                             -> a read-only descriptor, held against eviction

A lease belongs to one connection over a Unix socket, of which the kernel says who made it (SO_PEERCRED), and ends with it at
the latest: a client that dies holds nothing. Owns that life, and what is undone. Does not own sockets (rpc/fd_socket.py).

Chunk CRCs are computed by the client, where the bytes are born, and are not computed again here: whoever reads the file next
(the drain, a restore, the scrub) checks them before a byte is handed on.
"""

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hmac import compare_digest
from pathlib import Path

from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import align, disk_size, encode
from forebay_gateway.cache.incoming import IncomingFile
from forebay_gateway.cache.io import disk_errors
from forebay_gateway.cache.reader import ShardReader
from forebay_gateway.cache.writer import SealedFile, ShardWriter, footer_of
from forebay_gateway.core.errors import Corrupt, ForebayError, InvalidArgument, PermissionDenied, Unavailable, Unsupported
from forebay_gateway.core.records import ShardKey
from forebay_gateway.core.states import ShardEvent, ShardState, next_shard_state
from forebay_gateway.movers.jobs import ShardItem
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.node import SHARD_BYTES, Node
from forebay_gateway.paths.read import ReadPath, is_worth_fetching
from forebay_gateway.paths.write import Admission, Existing, PartRef, Receipt, WritePath, identity, shard_row
from forebay_wire.checksums import crc32c_of_chunks
from forebay_wire.fd_lane import SECRET_BYTES
from forebay_wire.manifest import chunk_count, unpack_chunk_crcs

log = logging.getLogger("forebay.lease")


IDLE_S_MAX = 10.0  # a connection that has opened no lease
TOKEN_S_MAX = 10.0  # a token that was not traded
LOST_RETRY_S = 1.0
LOOK_S_MIN = 0.5  # between two looks at how far a file is
# A descriptor that its holder closes at the end of a system call may be counted a moment longer.
GRACE_PAUSES_S = (0.001, 0.005, 0.02, 0.05, 0.1)


class Peer:
    """One connection of a client. `hang_up` ends it; its owner then calls Leases.leave."""

    def __init__(self, uid: int, pid: int, hang_up: Callable[[], None]) -> None:
        self.uid, self.pid = uid, pid
        self.ticket = secrets.token_bytes(SECRET_BYTES)
        self.lease: WriteLease | ReadLease | None = None
        self.opening = False
        self.gone = False
        self._hang_up = hang_up
        self._timer: asyncio.TimerHandle | None = None

    def allow(self, seconds: float | None) -> None:
        """Let it live for that long, from now; None: as long as it likes."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if seconds is not None and not self.gone:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._hang_up)

    def hang_up(self) -> None:
        """End the connection."""
        self._hang_up()


@dataclass(frozen=True, slots=True)
class Sealed:
    """What became of a lease; `copied` where somebody still held the file open, or its bytes had to be looked at."""

    receipt: Receipt
    copied: bool
    run: str


class Leases:
    """All of this gateway."""

    def __init__(self, node: Node, writes: WritePath, reads: ReadPath, evictor: Evictor) -> None:
        self.node = node
        self.writes = writes
        self._reads = reads
        self._evictor = evictor
        self._peers: dict[bytes, Peer] = {}
        self._open: dict[bytes, WriteLease] = {}

    # -- connections ---------------------------------------------------------------------------------------------------

    def join(self, peer: Peer) -> None:
        """A new connection; it has a little time to open a lease."""
        self._peers[peer.ticket] = peer
        peer.allow(IDLE_S_MAX)

    async def heard(self, peer: Peer) -> None:
        """The client says that it goes on. One that writes is believed as far as its file bears it out."""
        if peer.lease is not None and not peer.lease.ending and await peer.lease.goes_on():
            self._allow(peer)

    def write_failed(self, peer: Peer) -> None:
        """The client says that the disk has refused a write to its file: as if this process had met it, once for each lease. A
        disk that is sound after all is taken for that as soon as it has taken the next small write (health.py)."""
        if isinstance(peer.lease, WriteLease) and not peer.lease.ending and not peer.lease.has_failed:
            peer.lease.has_failed = True
            self.node.budget.disk.failed("it refused a write to the file of a shard, as its client says (fd lane)")

    def _allow(self, peer: Peer) -> None:
        if peer.lease is not None and not peer.lease.ending:
            peer.allow(self.node.config.node.stream_timeout)

    async def leave(self, peer: Peer) -> None:
        """The connection has ended, and with it its lease. A seal under way is waited for, and decides."""
        peer.gone = True
        peer.allow(None)
        self._peers.pop(peer.ticket, None)
        if peer.lease is not None:
            await peer.lease.end()

    def trade(self, peer: Peer, token: bytes) -> int:
        """The descriptor that the token stands for; raises PermissionDenied. The caller sends it, then calls handed()."""
        lease = peer.lease
        if lease is None or lease.ending or not lease.token or not compare_digest(lease.token, token):
            log.warning("a wrong token was offered for a descriptor uid=%s pid=%s", peer.uid, peer.pid)
            raise PermissionDenied("the token is not, or no longer, good for a descriptor over this connection", uid=peer.uid)
        lease.token = b""
        return lease.descriptor

    def handed(self, peer: Peer) -> None:
        """The client has the descriptor now; ours goes, so that what it does not hold nobody holds."""
        if peer.lease is not None:
            peer.lease.handed()
            failpoints.hit("lease.handed")
        self._allow(peer)

    @contextlib.contextmanager
    def _opening(self, ticket: bytes) -> "Iterator[Peer]":
        """The connection that a call names: one lease each, and no deadline while it is being made."""
        peer = self._peers.get(ticket)
        if peer is None:
            raise Unavailable("the ticket is of no connection that is open here", retry_after_s=0.1)
        if peer.opening or peer.lease is not None:
            raise InvalidArgument("the connection has its lease already")
        peer.opening = True
        peer.allow(None)
        try:
            yield peer
            peer.allow(TOKEN_S_MAX)
        except BaseException:
            peer.allow(IDLE_S_MAX)  # for another try
            raise
        finally:
            peer.opening = False

    # -- writing -------------------------------------------------------------------------------------------------------

    async def open_shard(
        self, ticket: bytes, part: PartRef, name: str, size: int, wait_s: float = 0.0
    ) -> "WriteLease | Existing":
        """Check, reserve, make the file; nothing is left behind when it raises. Under pressure the grant takes its time."""
        with self._opening(ticket) as peer, self.node.disk_refusals_shown():
            admitted = await self.writes.admit(part, name, size, wait_s)
            if isinstance(admitted, Existing):
                return admitted
            lease = WriteLease(self, part, name, size, admitted)
            try:
                await self.node.io.run(lease.file.create, disk_size(size, lease.chunk_size))
                admitted.reservation.unwritten(0)  # the file has its blocks
                await self.writes.admitter.slow_grant(size, part.run)
                if peer.gone:
                    raise Unavailable("the connection ended while its file was made", name=name)
            except BaseException:
                await lease.end()
                raise
            peer.lease = self._open[lease.id] = lease
            lease.on_end = peer.hang_up
            lease.alive = lambda: peer.allow(None)
            return lease

    async def seal(self, lease_id: bytes, size: int, crc: int, chunks: bytes) -> Sealed:
        """Durable, or an error and nothing left; in both cases the lease is over."""
        lease = self._open.get(lease_id)
        if lease is None:
            # Not NotFound, which is the word for a part that was aborted: opened again, the shard may well be taken.
            raise Unavailable(
                "there is no such lease: it was sealed, given up, or is of a gateway that has ended", retry_after_s=LOST_RETRY_S
            )
        return await lease.seal(size, crc, chunks)

    def forget(self, lease: "WriteLease") -> None:
        """It is over."""
        self._open.pop(lease.id, None)

    # -- reading -------------------------------------------------------------------------------------------------------

    async def open_read(
        self, ticket: bytes, run: str, step: int, session: str, name: str, offset: int, length: int, source: str
    ) -> "ReadLease":
        """The shard's file, which stays while the lease lives. Raises Unsupported where the bytes have to come by stream."""
        with self._opening(ticket) as peer:
            if source not in ("", "auto", "cache"):
                raise Unsupported("only the cache's files can be read over the fd lane", source=source)
            shard, found = await self._reads.locate(run, step, session, name)
            if shard.packed is not None:
                raise Unsupported("a shard in a pack comes by stream", name=name)
            row = shard.row
            if offset + length > row.size:
                raise InvalidArgument(f"the range ends behind the shard {name!r}", offset=offset, length=length, size=row.size)
            item = self._reads.item(found, row)
            if not self._reads.cached(row.key):
                wanted = source != "cache" and row.state is ShardState.EVICTED and is_worth_fetching(row, length)
                if not wanted or not await self._reads.fetch(found, row, item):
                    raise Unsupported("the shard is not in the cache", name=name)
            lease = ReadLease(self._evictor, row.key, item)
            try:
                if not self._reads.cached(row.key):  # evicted again, before it was held
                    raise Unsupported("the shard is not in the cache any more", name=name)
                await self.node.io.run(lease.open, self.node.cache.shard_path(row.key), self.node.cache.direct_io)
                if peer.gone:
                    raise Unavailable("the connection ended while its lease was made", name=name)
            except BaseException:
                await lease.end()
                raise
            peer.lease = lease
            return lease


class WriteLease:
    """A file that its client writes. Ends by seal() or end(), which is idempotent."""

    def __init__(self, leases: Leases, part: PartRef, name: str, size: int, admitted: Admission) -> None:
        self._leases = leases
        self._node = leases.node
        self._part, self._name, self._size = part, name, size
        self._admitted = admitted
        self._state = ShardState.RECEIVING
        self._sealing: asyncio.Future[Sealed] | None = None
        self._durable = False  # under its name in data/
        self._ended = self.has_failed = False
        self._seen_bytes = 0  # written, when that was last enough to go on
        self._looked_s = float("-inf")
        self.chunk_size = self._node.config.cache.chunk_size
        self.file = IncomingFile(self._node.cache, admitted.key)
        self.id = secrets.token_bytes(SECRET_BYTES)
        self.token = secrets.token_bytes(SECRET_BYTES)
        self.on_end: Callable[[], None] = lambda: None
        self.alive: Callable[[], None] = lambda: None

    @property
    def ending(self) -> bool:
        """Whether its client has nothing more to do."""
        return self._ended or self._sealing is not None

    @property
    def descriptor(self) -> int:
        """To be handed to the client."""
        return self.file.descriptor

    def handed(self) -> None:
        """It was."""
        self.file.close()

    async def goes_on(self) -> bool:
        """Whether a chunk more, or the rest, was written since this was last true; where the file system does not tell: True.

        As on the stream lane: words, or single bytes, must not hold space for ever.
        """
        now_s = self._node.clock.monotonic()
        if now_s - self._looked_s < min(LOOK_S_MIN, self._node.config.node.stream_timeout / 8):
            return False
        self._looked_s = now_s
        try:
            written = await self._node.io.run(self.file.written_bytes, self._size)
        except ForebayError as error:  # it is gone: the lease ended meanwhile
            log.info("cannot look how far a shard is name=%s error=%s", self._name, error)
            return False
        if written is None:
            return True
        left = self._size - self._seen_bytes
        if not left or written - self._seen_bytes < min(self.chunk_size, left):
            return False
        self._seen_bytes = written
        return True

    async def seal(self, size: int, crc: int, chunks: bytes) -> Sealed:
        """See Leases.seal. From here on a client that goes away changes nothing."""
        if self.ending:
            raise InvalidArgument(f"shard {self._name!r} is being sealed already")
        self.alive()
        self._sealing = asyncio.ensure_future(self._seal(size, crc, chunks))
        return await asyncio.shield(self._sealing)

    async def end(self) -> None:
        """Undo everything that is not acknowledged; waits for a seal that is under way."""
        if self._sealing is not None:
            await asyncio.wait({self._sealing})
            self._sealing.exception()
        else:
            await self._undo()

    async def _seal(self, size: int, crc: int, chunks: bytes) -> Sealed:
        try:
            await self._node.aside(SHARD_BYTES * (len(chunks) // 4), lambda: self._check(size, crc, chunks))
            with self._node.disk_refusals_shown():
                whole = await self._node.io.run(self.file.check_written, size, disk_size(size, self.chunk_size))
                copied = not whole or not await self._is_quiet()
                key, sealed = await (self._copy(crc, chunks) if copied else self._finish(crc, chunks))
                self._durable = True
                await self._leases.writes.record(
                    self._part.writer, [(shard_row(key, self._part, self._name, self.chunk_size, sealed), chunks)]
                )
        except BaseException:
            await self._undo()
            raise
        self._state = next_shard_state(self._state, ShardEvent.SEAL)
        self._admitted.settle(sealed.disk_size)
        self._over()
        return Sealed(Receipt(self._name, size, crc), copied, self._part.run)

    def _check(self, size: int, crc: int, chunks: bytes) -> None:
        if size != self._size:
            raise InvalidArgument(f"shard {self._name!r}: sizes differ", sealed=size, announced=self._size)
        if self.token:
            raise InvalidArgument(f"shard {self._name!r}: its descriptor was never fetched, so nothing was written")
        if len(chunks) != 4 * chunk_count(size, self.chunk_size):
            raise InvalidArgument(f"shard {self._name!r}: the chunk CRC table does not fit the size", table_bytes=len(chunks))
        combined = crc32c_of_chunks(unpack_chunk_crcs(chunks), self.chunk_size, size)
        if combined != crc:
            raise Corrupt(
                f"shard {self._name!r}: the chunk CRCs do not combine to its own",
                expected=f"{crc:08x}",
                actual=f"{combined:08x}",
            )

    async def _is_quiet(self) -> bool:
        """Whether nobody can change the file any more."""
        for pause_s in (*GRACE_PAUSES_S, None):
            failpoints.hit("lease.before_proof")
            if not await self._node.io.run(self.file.has_writer):
                return True
            if pause_s is not None:
                await self._node.clock.sleep(pause_s)
        return False

    async def _finish(self, crc: int, chunks: bytes) -> tuple[ShardKey, SealedFile]:
        """The file as it is."""
        tail = encode(footer_of(identity(self._part, self._name), self._size, self.chunk_size, crc), chunks)
        buffer = await self._node.io.acquire(len(tail))
        try:
            await self._node.io.run(self._finish_blocking, buffer.fill(memoryview(tail)))
        finally:
            self._node.io.release(buffer)
        return self._admitted.key, SealedFile(disk_size(self._size, self.chunk_size), chunks, crc, self._size)

    def _finish_blocking(self, tail: memoryview) -> None:
        failpoints.hit("lease.before_reopen")
        self.file.reopen()
        self.file.seal(tail, align(self._size))

    async def _copy(self, crc: int, chunks: bytes) -> tuple[ShardKey, SealedFile]:
        """A file of its own that nobody else has ever had open, every chunk checked on its way."""
        node, size = self._node, self._size
        key = ShardKey(self._admitted.key.session_id, node.catalog.new_id())
        log.info("sealing a checked copy of a file that may still be written to name=%s size=%s", self._name, size)
        beside = self._admitted.reservation.beside(disk_size(size, self.chunk_size))
        try:
            sealed = await self._copied(key, crc, chunks)
            await node.io.finish(self.file.drop)
        finally:
            beside.release()
        return key, sealed

    async def _copied(self, key: ShardKey, crc: int, chunks: bytes) -> SealedFile:
        node, size = self._node, self._size
        reader = await ShardReader.open(
            node.cache,
            node.io,
            self.file.path,
            size=size,
            chunk_size=self.chunk_size,
            crc32c=crc,
            chunks=chunks,
            direct_io=node.cache.direct_io,
        )
        try:
            writer = await ShardWriter.create(node.cache, node.io, key, size=size, chunk_size=self.chunk_size)
            try:
                for index, chunk_crc in enumerate(reader.chunk_crcs):
                    await writer.write_chunk(chunk_crc, await reader.read_chunk(index))
                sealed = await writer.seal(identity(self._part, self._name), size=size, crc32c=crc)
            except Corrupt as error:
                raise Corrupt(f"shard {self._name!r}: the file does not hold the bytes to be sealed", because=error) from error
            finally:
                await writer.discard()
        finally:
            await reader.close()
        return sealed

    async def _undo(self) -> None:
        if self._ended:
            return
        self._ended = True
        self._state = next_shard_state(self._state, ShardEvent.ABANDON)
        try:
            if not self._durable:  # else the catalog's refusal has decided what becomes of it
                await self._node.io.finish(self.file.drop)
        finally:
            self._admitted.give_back()
            self._over()

    def _over(self) -> None:
        self._ended = True
        self._leases.forget(self)
        self.on_end()


class ReadLease:
    """A cached file that its client reads. Ends by end(), which is idempotent."""

    def __init__(self, evictor: Evictor, key: ShardKey, item: ShardItem) -> None:
        self._evictor = evictor
        self._key = key
        self._descriptor: int | None = None
        self._ended = False
        self.item = item
        self.token = secrets.token_bytes(SECRET_BYTES)
        evictor.hold(key)

    @property
    def ending(self) -> bool:
        """Whether its client has nothing more to do."""
        return self._ended

    @property
    def descriptor(self) -> int:
        """To be handed to the client."""
        assert self._descriptor is not None
        return self._descriptor

    async def goes_on(self) -> bool:
        """Its client's word is all there is: a read leaves no trace."""
        return True

    def open(self, path: Path, direct_io: bool) -> None:
        """Blocking. A file that is not as it should be is for the stream lane, which quarantines it and goes on elsewhere."""
        with disk_errors("open the shard's file", path):
            try:
                self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | (os.O_DIRECT if direct_io else 0))
            except FileNotFoundError as error:
                raise Unsupported("the shard's file is gone", name=self.item.key) from error
            if os.fstat(self._descriptor).st_size != disk_size(self.item.size, self.item.chunk_size):
                raise Unsupported("the shard's file has a wrong length", name=self.item.key)

    def handed(self) -> None:
        """The client has it."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    async def end(self) -> None:
        """The file may be evicted again. What the client still holds open it may still read."""
        if not self._ended:
            self._ended = True
            self.handed()
            self._evictor.let_go(self._key)
