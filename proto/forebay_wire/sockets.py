"""Where a gateway listens unless it is told otherwise, as both ends know it.

Owns these paths and whether a directory below /tmp is its user's alone: there anybody may have made it first, to be taken for a
gateway. Who listens and who connects is the gateway's and the client's own business.
"""

import os
import stat
from collections.abc import Mapping
from pathlib import Path

SYSTEM_SOCKET = "/run/forebay/gateway.sock"


def session_socket(environ: Mapping[str, str]) -> str:
    """Below $XDG_RUNTIME_DIR; empty where that is not set, or no absolute path."""
    runtime = environ.get("XDG_RUNTIME_DIR", "")
    return f"{runtime.rstrip('/')}/forebay/gateway.sock" if runtime.startswith("/") else ""


def fallback_socket(uid: int) -> str:
    """Of a user without a session and without a right to /run: a container, a batch job. /tmp itself, not $TMPDIR, which is
    another one for each job."""
    return f"/tmp/forebay-{uid}/gateway.sock"


def may_use_system_socket() -> bool:
    """Whether this user could make the system's socket: root, or a service whose unit made the directory."""
    directory = Path(SYSTEM_SOCKET).parent
    return os.access(directory if directory.exists() else directory.parent, os.W_OK | os.X_OK, effective_ids=True)


def not_private(directory: Path, uid: int) -> str:
    """Why a directory is not this user's alone; empty where it is. Raises OSError where it cannot be looked at."""
    found = directory.lstat()
    if not stat.S_ISDIR(found.st_mode):
        return f"{directory} is no directory"
    if found.st_uid != uid:
        return f"{directory} is of uid {found.st_uid}, not of this user (uid {uid})"
    if found.st_mode & 0o077:
        return f"{directory} is open to others (mode {stat.S_IMODE(found.st_mode):o}, not 700)"
    return ""
