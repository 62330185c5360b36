"""Who is at the other end of an fd lane's connection, by the kernel's word: who made it, who sends over it, who may.

Owns credentials of Unix sockets. Does not own connections (fd_socket.py), nor what a token is good for (paths/lease.py).
"""

import asyncio
import errno
import os
import socket
import stat
import struct
from dataclasses import dataclass
from pathlib import Path

from forebay_gateway.core.errors import PermissionDenied, Unavailable

_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid; unix(7), SO_PEERCRED and SCM_CREDENTIALS
_SO_PEERGROUPS = 59  # asm-generic/socket.h; Linux 4.13
_GROUPS_BYTES_MAX = 1024  # what socket.getsockopt takes: 256 groups
_ACL = "system.posix_acl_access"


@dataclass(frozen=True, slots=True)
class Credentials:
    """Of a process; in another PID namespace than ours it has number 0."""

    pid: int
    uid: int
    gid: int


def ask_who_sends(listener: socket.socket) -> None:
    """From here on the kernel says of each message who sent it, over every connection that the listener takes: they inherit it.
    Asked of a connection once it is there, it would come too late for a client that sends at once."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def maker_of(connection: socket.socket) -> Credentials:
    """Who connected."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return Credentials(*_CREDENTIALS.unpack(found))


async def receive(connection: socket.socket, size: int) -> tuple[bytes, Credentials | None]:
    """Up to `size` bytes of one sender, and who that is; b"" at the end. Raises OSError. `connection` does not block."""
    while True:
        try:
            # With room for credentials alone: descriptors that a client sends along the kernel drops.
            data, ancillary, _, _ = connection.recvmsg(size, socket.CMSG_SPACE(_CREDENTIALS.size))
        except BlockingIOError:
            await _readable(connection)
            continue
        for level, kind, value in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_CREDENTIALS):
                return data, Credentials(*_CREDENTIALS.unpack(value[: _CREDENTIALS.size]))
        return data, None


async def _readable(connection: socket.socket) -> None:
    loop, ready = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(connection, ready.set)
    try:
        await ready.wait()
    finally:
        loop.remove_reader(connection)


def same(maker: Credentials, sender: Credentials | None) -> bool:
    """Whether the process that sends is the one that connected, and still of that user: not a child, nor who was handed it."""
    return sender is not None and (sender.pid, sender.uid) == (maker.pid, maker.uid)


def check_may_connect(connection: socket.socket, maker: Credentials, path: Path) -> None:
    """Raise PermissionDenied unless the socket's owner and mode let that user connect now; blocking.

    The kernel asked when the connection was made. It may be older than the mode.
    """
    try:
        found, listed = path.stat(), os.listxattr(path)
    except OSError as error:
        raise Unavailable("the fd lane's socket is gone", retry_after_s=1.0, path=path) from error
    # What an access list says of a user, the kernel alone can tell.
    if maker.uid in (0, found.st_uid) or found.st_mode & stat.S_IWOTH or _ACL in listed:
        return
    if not found.st_mode & stat.S_IWGRP or not _in_group(connection, maker, found.st_gid):
        raise PermissionDenied("this user may not use the fd lane's socket", uid=maker.uid, path=path)


def _in_group(connection: socket.socket, maker: Credentials, gid: int) -> bool:
    if gid == maker.gid:
        return True
    try:
        packed = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERGROUPS, _GROUPS_BYTES_MAX)
    except OSError as error:
        if error.errno != errno.ERANGE:
            raise Unavailable("the kernel does not tell a client's groups", retry_after_s=1.0) from error
        return True  # more groups than we can ask for: the kernel's word of the connection's beginning stands
    return gid in struct.unpack(f"{len(packed) // 4}I", packed)
