"""The lock file beside a document: one conditional replace at a time among all nodes of a shared file system.

Owns `.forebay-lock-<hash>`: made with O_EXCL, holding owner, token and time to live; and taking over one whose owner is gone.
Does not own what is done under it. Everything here blocks and runs in the tier's threads.

Age is the difference of two modification times given by the file system itself (the lock's and a fresh file's), so nodes need
no common clock. A stale lock is taken over by whoever creates `<lock>.<token of the stale lock>` first: exactly one can, and
it renames that file over the lock. An owner regards itself as expired at half the time to live, measured by its own monotonic
clock, and then neither writes nor unlinks; so it never acts on a lock that others may already have taken.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forebay_gateway.base.clock import Clock
from forebay_gateway.base.durable import TEMP_PREFIX, sync_dir

LOCK_PREFIX = ".forebay-lock-"
_TOKEN = re.compile(r"[0-9a-f]{16}")
# A lock cut short by a power loss names nobody; it ages like any other.
_DAMAGED = "damaged"
_DAMAGED_TTL_S = 60.0


def lock_path(path: Path) -> Path:
    """The lock of the document `path`; hashed, since its name may already be as long as a name can be."""
    return path.parent / f"{LOCK_PREFIX}{hashlib.sha256(os.fsencode(path.name)).hexdigest()[:16]}"


@dataclass(frozen=True, slots=True)
class HeldLock:
    """A lock that this process owns."""

    path: Path
    token: str
    safe_until_s: float  # monotonic

    def is_safe(self, clock: Clock) -> bool:
        """Whether the owner may still act: no one else regards the lock as stale yet."""
        return clock.monotonic() < self.safe_until_s and _read_token(self.path) == self.token

    def release(self, clock: Clock) -> None:
        """Unlink, unless it may no longer be ours: then it is left to be taken over."""
        if self.is_safe(clock):
            self.path.unlink(missing_ok=True)


def try_lock(document: Path, owner: str, ttl_s: float, clock: Clock, tag: str = "") -> HeldLock | None:
    """The lock of `document`, or None while someone else holds it. `tag` names the temporary files, none but this call's; one
    that a killed process has left is known by it and swept."""
    path = lock_path(document)
    token = secrets.token_hex(8)
    temp = path.parent / f"{TEMP_PREFIX}{tag or secrets.token_hex(8)}"
    body = json.dumps({"owner": owner, "token": token, "ttl_s": ttl_s, "expires": clock.wall() + ttl_s}).encode()
    safe_until_s = clock.monotonic() + ttl_s / 2
    if _create(path, body, temp) or _take_over(path, body, temp):
        return HeldLock(path, token, safe_until_s)
    return None


def _create(path: Path, body: bytes, temp: Path) -> bool:
    """Make `path` with its content in one act: whoever sees it can read whose it is."""
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(body)
        try:
            os.link(temp, path)
        except FileExistsError:
            return False
        return True
    finally:
        temp.unlink(missing_ok=True)


def _take_over(path: Path, body: bytes, temp: Path) -> bool:
    try:
        stale = _stale_token(path, temp)
        if stale is None:
            return False
        claim = path.parent / f"{path.name}.{stale}"
        if not _create(claim, body, temp):
            # Someone claims it already. A claim left behind by a dead one is cleared when it is stale itself.
            if _stale_token(claim, temp) is not None:
                claim.unlink(missing_ok=True)
            return False
        if _read_token(path) != stale:  # its owner came back to life and let go of it
            claim.unlink(missing_ok=True)
            return False
        os.replace(claim, path)
        sync_dir(path.parent)
        return True
    except FileNotFoundError:
        return False  # released between two looks; the caller tries again


def _read_token(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        try:
            return _token_of(json.loads(path.read_bytes()))
        except (ValueError, KeyError, TypeError):
            return _DAMAGED
    return None


def _token_of(body: Any) -> str:
    # The token becomes part of a file name, so nothing but what we write is taken.
    token = body["token"]
    return token if _TOKEN.fullmatch(token) else _DAMAGED


def _stale_token(path: Path, temp: Path) -> str | None:
    """The token of the lock at `path` if its time is over, else None. Raises FileNotFoundError where there is none."""
    try:
        body = json.loads(path.read_bytes())
        token, ttl_s = _token_of(body), float(body["ttl_s"])
    except (ValueError, KeyError, TypeError):
        token, ttl_s = _DAMAGED, _DAMAGED_TTL_S
    age_s = _filesystem_now_s(temp) - path.stat().st_mtime
    return token if age_s > ttl_s else None


def _filesystem_now_s(temp: Path) -> float:
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        temp.unlink(missing_ok=True)
