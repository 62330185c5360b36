"""The fd lane below the client: a connection, its ticket, and whatever a client may do with a descriptor."""

import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import forebay
from forebay.demo.gateways import GatewayProcess
from forebay.errors import from_detail
from forebay.lanes.memory import aligned
from forebay_wire.checksums import crc32c
from forebay_wire.fd_lane import REPLY, SECRET_BYTES, fd_socket_path
from forebay_wire.manifest import pack_chunk_crcs
from forebay_wire.v1 import gateway_pb2 as pb
from integration.kit import CHUNK, PATIENCE_S, Raw, some_bytes

BLOCK = 4096
MIB = 1 << 20
BIG = some_bytes(9 * MIB + 12_345, "fd lane")


def in_pages(data: bytes, shift: int = 0) -> memoryview:
    """The same bytes, `shift` bytes behind the beginning of a page."""
    view = aligned(len(data) + shift)[shift : shift + len(data)]
    view[:] = data
    return view


def saved(gateway: GatewayProcess, data: bytes = BIG) -> None:
    """Complete, and on the tier."""
    with forebay.Client(gateway.address) as client, client.checkpoint("r", 1, session="s") as part:
        part.put("x", data)
        part.commit(wait="pfs", timeout=30)


def fd_socket(gateway: GatewayProcess) -> Path:
    """Where descriptors are handed out."""
    return Path(fd_socket_path(str(gateway.socket)))


def table(data: bytes) -> bytes:
    """The chunk CRCs of a shard, as they travel."""
    return pack_chunk_crcs(crc32c(data[at : at + CHUNK]) for at in range(0, len(data), CHUNK))


def write(descriptor: int, data: bytes, offset: int = 0) -> None:
    """Through the page cache, so that any length will do: whoever has a descriptor may change its flags."""
    import fcntl

    fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) & ~os.O_DIRECT)
    os.pwrite(descriptor, data, offset)


class RawLease:
    """A connection and what was opened over it. close() drops the connection."""

    def __init__(self, gateway: GatewayProcess, raw: Raw) -> None:
        self._raw = raw
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(PATIENCE_S)
        self.socket.connect(str(fd_socket(gateway)))
        self.ticket = self.socket.recv(SECRET_BYTES, socket.MSG_WAITALL)
        self.opened = pb.OpenShardResponse()

    def open(self, part: pb.PartRef, data: bytes, name: str = "shard.bin", size: int | None = None) -> "RawLease":
        """Reserve the file."""
        request = pb.OpenShardRequest(ticket=self.ticket, part=part, name=name, size=len(data) if size is None else size)
        self.opened = self._raw.call("OpenShard", request, pb.OpenShardResponse)
        return self

    def open_read(self, run: str, name: str, length: int, source: str = "") -> pb.OpenReadResponse:
        """Ask for a shard's file."""
        request = pb.OpenReadRequest(ticket=self.ticket, run=run, step=1, name=name, length=length, source=source)
        answer: pb.OpenReadResponse = self._raw.call("OpenRead", request, pb.OpenReadResponse)
        return answer

    def trade(self, token: bytes | None = None) -> int:
        """The descriptor, or what the gateway answers."""
        self.socket.sendall(self.opened.token if token is None else token)
        data, descriptors, _, _ = socket.recv_fds(self.socket, REPLY.size, 1)
        (length,) = REPLY.unpack(data)
        if length:
            assert not descriptors
            raise from_detail(pb.ErrorDetail.FromString(self.socket.recv(length, socket.MSG_WAITALL)), "trade")
        (descriptor,) = descriptors
        return descriptor

    @contextlib.contextmanager
    def descriptor(self) -> Iterator[int]:
        """Traded, and closed at the end."""
        descriptor = self.trade()
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def seal(self, data: bytes, crc: int | None = None, chunks: bytes | None = None) -> pb.SealShardResponse:
        """Seal as if these bytes had been written."""
        request = pb.SealShardRequest(
            lease=self.opened.lease,
            size=len(data),
            crc32c=crc32c(data) if crc is None else crc,
            chunk_crcs=table(data) if chunks is None else chunks,
        )
        answer: pb.SealShardResponse = self._raw.call("SealShard", request, pb.SealShardResponse)
        return answer

    def is_over(self) -> bool:
        """Whether the gateway has ended the connection; waits for it."""
        return not self.socket.recv(1)

    def close(self) -> None:
        """Go without a word."""
        self.socket.close()

    def __enter__(self) -> "RawLease":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
