"""The lock file beside a document: one conditional replace at a time among all nodes of a shared file system.

Owns `.forebay-lock-<hash>`: made with O_EXCL, holding owner, token and time to live; and taking over one whose owner is gone.
Does not own what is done under it. Everything here blocks and runs in the tier's threads.

Age is the difference of two modification times given by the file system itself (the lock's and a fresh file's), so nodes need
no common clock. A stale lock is taken over by whoever creates `<lock>.<token of the stale lock>` first: exactly one can, and
it renames that file over the lock. An owner regards itself as expired at half the time to live, measured by its own monotonic
clock, and then neither writes nor unlinks; so it never acts on a lock that others may already have taken. A node that was
killed knows its own lock again by the tag, and takes it over in the same way without waiting.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forebay_gateway.base import failpoints
from forebay_gateway.base.clock import Clock
from forebay_gateway.base.durable import TEMP_PREFIX, sync_dir

LOCK_PREFIX = ".forebay-lock-"
_TOKEN = re.compile(r"[0-9a-f]{16}")
_CLAIM = re.compile(r"\.forebay-lock-[0-9a-f]{16}\.(?:[0-9a-f]{16}|damaged)")
# A lock cut short by a power loss names nobody; it ages like any other.
_DAMAGED = "damaged"
_DAMAGED_TTL_S = 60.0


def _nobody_s(tag: str) -> bool:
    return False


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


def try_lock(
    document: Path, owner: str, ttl_s: float, clock: Clock, tag: str = "", is_left: Callable[[str], bool] = _nobody_s
) -> HeldLock | None:
    """The lock of `document`, or None while someone else holds it. `tag` names the temporary files, none but this call's; one
    that a killed process has left is known by it and swept. The lock holds it too: `is_left` says of another's tag whether its
    process has ended, and its lock need not be waited for."""
    attempt = _Attempt(lock_path(document), owner, ttl_s, clock, tag, is_left)
    return attempt.lock if attempt.create() or attempt.take_over() else None


def clear_left(path: Path, owner: str, ttl_s: float, clock: Clock, tag: str, is_left: Callable[[str], bool]) -> bool:
    """Remove the lock `path`, or a claim to one, if its time has run out or `is_left` says so of its tag; whether it is gone.

    Taken over first, as whoever needs it would: a lock that somebody else takes at this moment is never removed under them.
    """
    attempt = _Attempt(path, owner, ttl_s, clock, tag, is_left)
    try:
        if attempt.stale_token(path) is None:
            return False
        if _CLAIM.fullmatch(path.name):  # who made it acts on it at once, or finds it gone and takes that for a lost race
            path.unlink(missing_ok=True)
        elif attempt.take_over():
            attempt.lock.release(clock)
    except FileNotFoundError:
        return True
    return not path.exists()


def is_over(path: Path, clock: Clock, is_left: Callable[[str], bool]) -> bool:
    """Whether the lock or claim at `path` may be removed, for a list: by this machine's clock. Raises FileNotFoundError."""
    _, ttl_s, tag = _content(path)
    return is_left(tag) or clock.wall() - path.stat().st_mtime > ttl_s


class _Attempt:
    """One try to own a lock: what it writes, and what it owns then."""

    def __init__(self, path: Path, owner: str, ttl_s: float, clock: Clock, tag: str, is_left: Callable[[str], bool]) -> None:
        token = secrets.token_hex(8)
        self._path, self._is_left = path, is_left
        self._temp = path.parent / f"{TEMP_PREFIX}{tag or secrets.token_hex(8)}"
        body = {"owner": owner, "tag": tag, "token": token, "ttl_s": ttl_s, "expires": clock.wall() + ttl_s}
        self._body = json.dumps(body).encode()
        self.lock = HeldLock(path, token, clock.monotonic() + ttl_s / 2)

    def create(self) -> bool:
        return self._create(self._path)

    def _create(self, path: Path) -> bool:
        """Make `path` with its content in one act: whoever sees it can read whose it is."""
        descriptor = os.open(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(self._body)
            try:
                os.link(self._temp, path)
            except FileExistsError:
                return False
            return True
        finally:
            self._temp.unlink(missing_ok=True)

    def take_over(self) -> bool:
        path = self._path
        try:
            stale = self.stale_token(path)
            if stale is None:
                return False
            claim = path.parent / f"{path.name}.{stale}"
            if not self._create(claim):
                # Someone claims it already. A claim left behind by a dead one is cleared when it is stale itself.
                if self.stale_token(claim) is not None:
                    claim.unlink(missing_ok=True)
                return False
            if _read_token(path) != stale:  # its owner came back to life and let go of it
                claim.unlink(missing_ok=True)
                return False
            os.replace(claim, path)
            failpoints.hit("posix.lock_taken_over")
            sync_dir(path.parent)
            return True
        except FileNotFoundError:
            return False  # released between two looks; the caller tries again

    def stale_token(self, path: Path) -> str | None:
        """The token of the lock at `path` if its time is over, else None. Raises FileNotFoundError where there is none."""
        token, ttl_s, tag = _content(path)
        if self._is_left(tag):
            return token
        age_s = filesystem_now_s(self._temp) - path.stat().st_mtime
        return token if age_s > ttl_s else None


def _read_token(path: Path) -> str | None:
    with contextlib.suppress(FileNotFoundError):
        return _content(path)[0]
    return None


def _content(path: Path) -> tuple[str, float, str]:
    """Token, time to live in seconds, and tag. Raises FileNotFoundError."""
    try:
        body = json.loads(path.read_bytes())
        # The token becomes part of a file name, so nothing but what we write is taken.
        token = body["token"] if _TOKEN.fullmatch(body["token"]) else _DAMAGED
        return token, float(body["ttl_s"]), str(body.get("tag", ""))
    except (ValueError, KeyError, TypeError):
        return _DAMAGED, _DAMAGED_TTL_S, ""


def filesystem_now_s(temp: Path) -> float:
    """By the clock that its files' times are of; `temp` is made for it and goes again. Raises OSError."""
    descriptor = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        return os.fstat(descriptor).st_mtime
    finally:
        os.close(descriptor)
        temp.unlink(missing_ok=True)
