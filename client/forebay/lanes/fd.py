"""The fd lane's connection: a ticket, a token for a descriptor, signs of life, and the end (gateway.proto says how).

Owns one lease's connection. Does not own what is done with the descriptor (fd_put.py, fd_read.py) nor repeating (writer.py,
reader.py). The connection is closed in every case, and with it the lease: the gateway drops what was not sealed.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

from forebay import address as addresses
from forebay import cancel
from forebay.connection import Connection, Stubs
from forebay.errors import ForebayError, PermissionDenied, Unavailable, Unsupported, from_detail
from forebay.retry import RetryPolicy
from forebay_wire.fd_lane import REPLY, SECRET_BYTES, SIGN_OF_LIFE, SOCKET_PATH_BYTES_MAX, WRITE_FAILED, fd_socket_path
from forebay_wire.v1 import gateway_pb2 as pb

LANES = ("auto", "stream", "fd")
FD_BYTES_MIN = 1 << 20  # below this "auto" takes the stream lane: a lease costs more than a message saves
ANSWER_S_MAX = 10.0  # the gateway's answers over the socket are a few bytes that it has ready
PIECE_BYTES = 4 << 20  # of one read or write; larger ones are no faster, smaller ones are slower
FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT)
_ONCE = RetryPolicy(admit_timeout_s=0.0, retry_timeout_s=0.0)


class NotOffered(Unsupported):
    """This gateway has no fd lane for this client: another host, another release, or a socket that is not to be reached."""


class NoPlace(Unavailable):
    """The gateway takes no further connection on its fd lane now; streams it takes."""


class Lease:
    """A connection for one lease. Its methods but `alive` are for the thread that made it."""

    def __init__(self, connection: Connection, doing: str) -> None:
        """Connect. Raises NotOffered, NoPlace, Unavailable."""
        self._connection = connection
        self._doing = doing
        self._lock = threading.Lock()
        self._next_sign_s = 0.0
        self._sign_every_s = 1.0
        self._socket = _connect(connection, doing)
        try:
            self.ticket = self._receive(SECRET_BYTES)
        except Unavailable as error:
            self._socket.close()
            raise NoPlace(error.message, retry_after_s=error.retry_after_s) from error
        except BaseException:
            self._socket.close()
            raise

    def __enter__(self) -> "Lease":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the lease; what it held of the gateway's is free again when this returns, so that another try may begin."""
        with self._socket, contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
            while self._socket.recv(SECRET_BYTES):
                pass

    def call(self, method: Callable[[Stubs], Any], request: object) -> Any:
        """One call about this lease, once, for as long as it takes. Raises NotOffered where the gateway does not know it."""
        try:
            return self._connection.call(method, request, self._doing, timeout_s=None, policy=_ONCE)
        except Unsupported as error:
            if "code=UNIMPLEMENTED" in error.message:  # gRPC's own word, without a detail of the gateway's
                raise NotOffered(error.message) from error
            raise

    def descriptor(self, token: bytes, layout: pb.FileLayout) -> int:
        """What the token stands for; the caller closes it. Raises what the gateway answers, Unavailable where it went away."""
        try:
            self._socket.sendall(token)
            data, descriptors, _, _ = socket.recv_fds(self._socket, REPLY.size, 1, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise self._lost(error) from error
        try:
            (length,) = REPLY.unpack(data.ljust(REPLY.size, b"\xff"))
            if length == 0 and descriptors:
                self._sign_every_s = min(1.0, layout.progress_s / 4)
                return descriptors.pop()
            raise from_detail(pb.ErrorDetail.FromString(self._receive(length)), self._doing) if data else self._lost(None)
        finally:
            for descriptor in descriptors:
                os.close(descriptor)

    def alive(self) -> None:
        """Something was written or read: tell the gateway now and then. From any thread. Raises Unavailable once it is gone."""
        now_s = time.monotonic()
        with self._lock:
            if now_s < self._next_sign_s:
                return
            self._next_sign_s = now_s + self._sign_every_s
        try:
            self._socket.send(SIGN_OF_LIFE, socket.MSG_DONTWAIT)
        except BlockingIOError:
            pass  # it has plenty unread
        except OSError as error:
            raise self._lost(error) from error

    def write_failed(self) -> None:
        """Tell the gateway that its disk has refused a write: through its own descriptors it may not have met that yet."""
        with contextlib.suppress(OSError):  # it is gone, or reads nothing: then it has worse to know
            self._socket.send(WRITE_FAILED, socket.MSG_DONTWAIT)

    def disown(self) -> None:
        """In a forked child: the lease is its parent's, and does not end when this process's copy of the connection goes."""
        self._socket.close()

    def _receive(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            try:
                more = self._socket.recv(size - len(data))
            except OSError as error:
                raise self._lost(error) from error
            if not more:
                raise self._lost(None)
            data += more
        return data

    def _lost(self, error: OSError | None) -> ForebayError:
        cancel.check()
        reason = "it ended the connection" if error is None else error.strerror or str(error)
        return Unavailable(f"{self._doing}: the gateway does not answer on the fd lane: {reason}")


def _connect(connection: Connection, doing: str) -> socket.socket:
    target = connection.stubs().target
    if not target.startswith("unix:"):
        raise NotOffered(f"{doing}: the fd lane needs a gateway on this host's Unix socket, not {target}")
    path = fd_socket_path(target.removeprefix("unix:"))
    if len(os.fsencode(path)) > SOCKET_PATH_BYTES_MAX:
        raise NotOffered(f"{doing}: the gateway's socket has too long a path for an fd lane beside it")
    for last in (False, True):
        made = socket.socket(socket.AF_UNIX)
        try:
            made.settimeout(ANSWER_S_MAX)
            made.connect(path)
        except BlockingIOError as error:
            made.close()
            raise NoPlace(f"{doing}: too many connect to the fd lane at once", retry_after_s=0.1) from error
        except OSError as error:
            made.close()
            # A gateway that is away has neither socket; one that has just come has both.
            if (problem := addresses.problem(target)) is not None:
                kind = PermissionDenied if problem.denied else Unavailable
                raise kind(f"{doing}: {problem}") from error
            if last:
                raise NotOffered(f"{doing}: there is no fd lane at {path}: {error.strerror or error}") from error
        else:
            return made
    raise AssertionError("the last try raises")
