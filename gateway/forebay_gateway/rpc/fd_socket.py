"""The Unix sockets over which descriptors are handed to clients, one beside each socket of gRPC (gateway.proto says how).

Owns listening, connections and their bounds, and the bytes in between. Does not own what a token is good for (paths/lease.py),
nor what the kernel knows of who is at the other end (fd_peers.py). Nothing blocks the loop: sockets are non-blocking, and all
messages are a few bytes long.
"""

import asyncio
import contextlib
import logging
import os
import socket
from pathlib import Path

from forebay_gateway.core.errors import ForebayError, InvalidArgument, PermissionDenied
from forebay_gateway.paths.lease import Leases, Peer
from forebay_gateway.rpc.fd_peers import Credentials, ask_who_sends, check_may_connect, maker_of, receive, same
from forebay_gateway.rpc.status import detail_of
from forebay_wire.fd_lane import REPLY, SECRET_BYTES, SOCKET_PATH_BYTES_MAX, WRITE_FAILED, fd_socket_path

log = logging.getLogger("forebay.fd")

CONNECTIONS_MAX = 256  # each costs two descriptors at most; who finds no place uses the stream lane
_READ_BYTES = 256
_ACCEPT_AGAIN_S = 0.2


class FdSocket:
    """All connections of this gateway's fd lane. start() for each socket, then close()."""

    def __init__(self, leases: Leases, mode: int) -> None:
        self._leases = leases
        self._mode = mode
        self._listening: list[asyncio.Task[None]] = []
        self._connections: dict[asyncio.Task[None], socket.socket] = {}

    def start(self, beside: Path) -> Path | None:
        """Listen beside a socket that is this gateway's alone; the path, None where it would be too long."""
        path = Path(fd_socket_path(str(beside)))
        if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
            log.info("no fd lane: its socket's path would be too long path=%s", path)
            return None
        path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX)
        try:
            listener.setblocking(False)
            ask_who_sends(listener)
            listener.bind(str(path))
            path.chmod(self._mode)  # before anybody can connect
            listener.listen(CONNECTIONS_MAX)
        except BaseException:
            listener.close()
            raise
        self._listening.append(asyncio.create_task(self._accept(listener, path), name=f"fd lane {path.name}"))
        return path

    async def close(self) -> None:
        """No new connections; those that are there end, and their leases with them."""
        for task in self._listening:
            task.cancel()
        await asyncio.gather(*self._listening, return_exceptions=True)
        for connection in self._connections.values():
            _shut(connection)
        if self._connections:
            await asyncio.wait(set(self._connections))

    async def _accept(self, listener: socket.socket, path: Path) -> None:
        loop = asyncio.get_running_loop()
        with listener:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listener)
                except OSError as error:  # out of descriptors, or the client has gone again
                    log.warning("cannot take a connection for descriptors error=%s", error)
                    await asyncio.sleep(_ACCEPT_AGAIN_S)
                    continue
                if len(self._connections) >= CONNECTIONS_MAX:
                    connection.close()
                    continue
                task = asyncio.create_task(self._serve(connection, path))
                self._connections[task] = connection
                task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        del self._connections[task]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a connection of the fd lane failed unexpectedly", exc_info=error)

    async def _serve(self, connection: socket.socket, path: Path) -> None:
        with connection:
            connection.setblocking(False)
            maker = maker_of(connection)
            peer = Peer(maker.uid, maker.pid, lambda: _shut(connection))
            self._leases.join(peer)
            try:
                with contextlib.suppress(OSError):  # the client has gone, or does not read
                    connection.send(peer.ticket)
                    await self._talk(connection, peer, maker, path)
            finally:
                await self._leases.leave(peer)

    async def _talk(self, connection: socket.socket, peer: Peer, maker: Credentials, path: Path) -> None:
        token = b""
        while True:
            data, sender = await receive(connection, _READ_BYTES)
            if not data:
                return
            if len(token) == SECRET_BYTES:
                if same(maker, sender):
                    if WRITE_FAILED in data:
                        self._leases.write_failed(peer)
                    await self._leases.heard(peer)
                continue
            token += data
            if len(token) < SECRET_BYTES:
                continue
            try:
                if len(token) > SECRET_BYTES:
                    raise InvalidArgument("more than a token was sent before its answer")
                if not same(maker, sender):
                    log.warning("a token came from another process than the connection uid=%s pid=%s", peer.uid, peer.pid)
                    raise PermissionDenied("the token did not come from the process that made the connection", uid=peer.uid)
                await asyncio.to_thread(check_may_connect, connection, maker, path)
                descriptor = self._leases.trade(peer, token)
            except ForebayError as error:
                detail = detail_of(error).SerializeToString()
                connection.send(REPLY.pack(len(detail)) + detail)
                return
            socket.send_fds(connection, [REPLY.pack(0)], [descriptor])
            self._leases.handed(peer)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is not connected any more
        connection.shutdown(socket.SHUT_RDWR)
