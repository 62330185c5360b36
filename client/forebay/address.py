"""Where the gateway listens: an explicit address, else FOREBAY_ADDRESS, else the default sockets.

Owns parsing and choosing. Does not own channels (connection.py).
"""

import os
import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from forebay.errors import InvalidArgument, Unavailable

ENVIRONMENT = "FOREBAY_ADDRESS"
SYSTEM_SOCKET = "/run/forebay/gateway.sock"
CONNECT_TIMEOUT_S = 3.0
_ADVICE = f"start one with 'forebay serve', or set {ENVIRONMENT}"


def default_sockets(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> tuple[str, ...]:
    """The default socket paths, the one that this user's gateway would listen on first."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    user_socket = (f"{runtime}/forebay/gateway.sock",) if runtime else ()
    root = (os.geteuid() if uid is None else uid) == 0
    return (SYSTEM_SOCKET, *user_socket) if root else (*user_socket, SYSTEM_SOCKET)


def parse(address: str) -> str:
    """A gRPC target for "unix:///path", "unix:/path" or "host:port"; raises InvalidArgument."""
    if address.startswith("unix:"):
        path = address.removeprefix("unix:")
        path = "/" + path.lstrip("/") if path.startswith("//") else path
        if len(path) < 2 or "\0" in path:
            raise InvalidArgument(f"address {address!r} names no socket; write unix:///path/to/gateway.sock")
        return f"unix:{path}"
    host, colon, port = address.rpartition(":")
    if not colon or not host or "/" in host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InvalidArgument(f"address {address!r} cannot be used; write unix:///path/to/gateway.sock or host:port")
    return f"{host}:{port}"


def candidates(address: str | None, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The gRPC targets to try, in order."""
    chosen = address or environ.get(ENVIRONMENT, "")
    return (parse(chosen),) if chosen else tuple(f"unix:{path}" for path in default_sockets(environ))


def resolve(address: str | None, environ: Mapping[str, str] = os.environ) -> str:
    """The target to open a channel to: the only candidate, else the first where someone listens. Raises Unavailable."""
    targets = candidates(address, environ)
    if len(targets) == 1:
        return targets[0]
    problems = []
    for target in targets:
        found = problem(target)
        if found is None:
            return target
        problems.append(found)
    raise Unavailable(f"no gateway on this node ({'; '.join(problems)}): {_ADVICE}")


def require_listener(address: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Raise Unavailable, saying what to do, unless someone listens there now. For people, who would not wait for retries."""
    found = problem(resolve(address, environ))
    if found is not None:
        raise Unavailable(f"no gateway answers ({found}): {_ADVICE}")


def hint(target: str) -> str:
    """A clause for the message of a call that could not reach `target`; empty where the socket is there."""
    if not target.startswith("unix:"):
        return ""
    path = Path(target.removeprefix("unix:"))
    return "" if path.exists() else f"(there is no socket {path}: {_ADVICE})"


def problem(target: str) -> str | None:
    """Why nobody can be reached there, None where somebody can."""
    try:
        if target.startswith("unix:"):
            path = target.removeprefix("unix:")
            if not stat.S_ISSOCK(Path(path).stat().st_mode):
                return f"{path}: not a socket"
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT_TIMEOUT_S)
                probe.connect(path)
        else:
            host, _, port = target.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        return f"{target.removeprefix('unix:')}: {error.strerror or error}"
    return None
