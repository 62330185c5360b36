"""Addresses to serve on: a Unix socket or a port, claimed, or refused with a sentence that says why.

Owns the look whether somebody else serves there. Does not own what is served (build.py), nor the fd lane's socket.
"""

import asyncio
import contextlib
import os
import socket
from pathlib import Path

import grpc.aio

from forebay_gateway.core.errors import StartupError
from forebay_wire.sockets import fallback_socket, not_private

SOCKET_MODE = 0o660  # to connect is to write: the gateway's own user and its group may, whatever the umask


async def bind(server: grpc.aio.Server, address: str) -> None:
    """Listen on an address, or StartupError that says why not."""
    if (path := socket_path(address)) is not None:  # claimed by the caller
        target = f"unix:{path}"
    else:
        target = address
        await asyncio.to_thread(_check_port, address)
    try:
        server.add_insecure_port(target)
    except RuntimeError as error:
        raise StartupError(
            f"cannot listen on {address}: it is in use, or this user may not; choose another in node.listen", cause=error
        ) from error
    if path is not None:
        await asyncio.to_thread(path.chmod, SOCKET_MODE)


def socket_path(address: str) -> Path | None:
    """The file of a unix address, None for a TCP one."""
    if address.startswith("unix:"):
        return Path("/" + address.removeprefix("unix:").lstrip("/"))
    return None


def _check_port(address: str) -> None:
    """Raise StartupError where the port cannot be had. gRPC would write a record of its own besides, and not say why."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]") or None, int(port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, place in found[:1]:
            with socket.socket(family, kind, protocol) as probe:
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as gRPC does
                probe.bind(place)
                probe.listen()
    except OSError as error:
        raise StartupError(f"cannot listen on {address}: {error.strerror}; choose another in node.listen") from error


def claim_socket(path: Path) -> None:
    """Remove a socket that nobody serves any more; refuse one that somebody does, and a directory that cannot be had."""
    try:
        _make_directory(path)
        there = path.exists()
    except OSError as error:
        raise StartupError(
            f"cannot make the socket {path}: {error.strerror}: {error.filename or path.parent}; set node.listen, or "
            "FOREBAY_NODE_LISTEN=unix:///path/gateway.sock, to a place of this user's, and FOREBAY_ADDRESS likewise for clients"
        ) from error
    if not there:
        return
    if not path.is_socket():
        raise StartupError(f"{path} is there and is no socket; remove it or choose another node.listen")
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except OSError as error:
            raise StartupError(f"cannot use the socket {path}: {error}") from error
    raise StartupError(f"another gateway serves {path}; stop it or choose another node.listen")


def _make_directory(path: Path) -> None:
    """The socket's directory. The fallback's, where anybody could have made it, has to be this user's alone."""
    if path != Path(fallback_socket(os.getuid())):
        path.parent.mkdir(parents=True, exist_ok=True)
        return
    with contextlib.suppress(FileExistsError):
        path.parent.mkdir(0o700)
    if why := not_private(path.parent, os.getuid()):
        raise StartupError(
            f"cannot use the default socket: {why}; remove it, or set XDG_RUNTIME_DIR or node.listen to a place of this user's"
        )
