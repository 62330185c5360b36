"""Where the gateway listens: an explicit address, else FOREBAY_ADDRESS, else the default sockets.

Owns parsing, choosing, and why nobody can be reached at an address. Does not own channels (connection.py).
"""

import errno
import grp
import os
import pwd
import socket
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay import cancel
from forebay.errors import ForebayError, InvalidArgument, PermissionDenied, Unavailable
from forebay_wire.sockets import SYSTEM_SOCKET, fallback_socket, not_private, session_socket

ENVIRONMENT = "FOREBAY_ADDRESS"
CONNECT_TIMEOUT_S = 3.0
TELL_AFTER_S = 2.0  # people wonder by then what it waits for
_LOOK_AGAIN_S = 0.1
_SETTLE_S = 0.3  # a gateway that starts opens its socket to its group only once it is there
_ADVICE = f"start one with 'forebay serve', or set {ENVIRONMENT}"


@dataclass(frozen=True, slots=True)
class Problem:
    """Why nobody can be reached at an address; `denied`: somebody is there, perhaps, and this user may not connect."""

    text: str
    denied: bool = False

    def __str__(self) -> str:
        return self.text


def default_sockets(environ: Mapping[str, str] = os.environ, uid: int | None = None) -> tuple[str, ...]:
    """The default socket paths, the one that this user's gateway would listen on first."""
    uid = os.geteuid() if uid is None else uid
    own = tuple(filter(None, (session_socket(environ),)))
    return (SYSTEM_SOCKET, *own) if uid == 0 else (*own, fallback_socket(uid), SYSTEM_SOCKET)


def parse(address: str) -> str:
    """A gRPC target for "unix:///path", "unix:/path", "/path" or "host:port"; raises InvalidArgument."""
    if address.startswith("/"):
        address = f"unix:{address}"
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
    """The target to open a channel to: the only candidate, else the first where someone listens. Raises Unavailable,
    PermissionDenied where this user may not connect to any."""
    targets = candidates(address, environ)
    if len(targets) == 1:
        return targets[0]
    problems = []
    for target in targets:
        found = problem(target)
        if found is None:
            return target
        problems.append(found)
    raise _error("no gateway on this node", problems)


def require_listener(address: str | None, environ: Mapping[str, str] = os.environ) -> None:
    """Raise Unavailable, saying what to do, unless someone listens there now; PermissionDenied as resolve(). For people, who
    would not wait for retries."""
    found = problem(resolve(address, environ))
    if found is not None:
        raise _error("no gateway answers", [found])


def await_listener(
    address: str | None,
    wait_s: float,
    tell: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """As require_listener(), but one that is not there yet has `wait_s` seconds to come; `tell` gets one line meanwhile."""
    began_s, told = clock(), False
    while True:
        try:
            require_listener(address)
            return
        except Unavailable as error:
            waited_s = clock() - began_s
            if waited_s >= wait_s:
                error.extended(f"waited_s={waited_s:.1f}")
                raise
            if waited_s >= TELL_AFTER_S and not told:
                told = True
                tell(f"waiting up to {wait_s:.0f} s for the gateway: {error.message}")
        sleep(_LOOK_AGAIN_S)


def _error(what: str, problems: list[Problem]) -> ForebayError:
    """A socket that is there and closed to this user is what has to be mended, whatever is said of the others."""
    if any(found.denied for found in problems):
        found = sorted(problems, key=lambda found: not found.denied)
        return PermissionDenied(f"this user may not use the gateway: {'; '.join(map(str, found))}")
    return Unavailable(f"{what} ({'; '.join(map(str, problems))}): {_ADVICE}")


def _settled(look: Callable[[str], Problem | None], target: str) -> Problem | None:
    """What `look` finds; that this user is denied only if it still holds a moment later."""
    found = look(target)
    if found is None or not found.denied:
        return found
    cancel.sleep(_SETTLE_S)
    return look(target)


def hint(target: str) -> Problem | None:
    """What can be seen of the socket without a connection, for a call that could not reach `target`: it is not there, or not
    for this user. None where that is not why."""
    return _settled(_hint, target)


def _hint(target: str) -> Problem | None:
    if not target.startswith("unix:"):
        return None
    path = target.removeprefix("unix:")
    try:
        Path(path).stat()
    except PermissionError:
        return _denied(path)
    except OSError:
        return Problem(f"there is no socket {path}: {_ADVICE}")
    return None if os.access(path, os.W_OK, effective_ids=True) else _denied(path)


def problem(target: str) -> Problem | None:
    """Why nobody can be reached there, None where somebody can."""
    return _settled(_problem, target)


def _problem(target: str) -> Problem | None:
    path = target.removeprefix("unix:")
    try:
        if target.startswith("unix:"):
            if path == fallback_socket(os.geteuid()) and (why := not_private(Path(path).parent, os.geteuid())):
                return Problem(f"{path}: {why}")
            if not stat.S_ISSOCK(Path(path).stat().st_mode):
                return Problem(f"{path}: not a socket")
            with socket.socket(socket.AF_UNIX) as probe:
                probe.settimeout(CONNECT_TIMEOUT_S)
                probe.connect(path)
        else:
            host, _, port = target.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()
    except OSError as error:
        if error.errno == errno.EACCES and target.startswith("unix:"):
            return _denied(path)
        return Problem(f"{path}: {error.strerror or error}")
    return None


def _denied(path: str) -> Problem:
    """Whose socket it is, and what to do about it."""
    me = _name(pwd.getpwuid, os.geteuid())
    try:
        found = Path(path).stat()
    except OSError:
        return Problem(f"{path}: user {me} may not look into a directory above it; run this as the gateway's user", True)
    owner, group = _name(pwd.getpwuid, found.st_uid), _name(grp.getgrgid, found.st_gid)
    mode = stat.S_IMODE(found.st_mode)
    return Problem(
        f"{path} is of user {owner} and group {group} (mode {mode:o}), and user {me} may not connect: join that group and log "
        f"in again, or run this as {owner}",
        True,
    )


def _name(look_up: Callable[[int], tuple[object, ...]], number: int) -> str:
    try:
        return str(look_up(number)[0])
    except KeyError:
        return str(number)
