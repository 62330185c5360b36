"""Which runs, shard names and sessions are allowed, and how a session is shortened in a path.

Owns validation at the door, for client and gateway alike, and which names stand for a whole checkpoint. Does not own paths on a
tier (core/layout in the gateway).
"""

import hashlib
import unicodedata
from collections.abc import Collection

MAX_SEGMENT_BYTES = 255
MAX_NAME_BYTES = 1024
MAX_STEP = 2**64 - 1
RESERVED_PREFIX = ".forebay"
COMMIT_LAST_NAMES = frozenset({".metadata"})  # DCP's reader takes this file for the sign that the checkpoint is whole


class InvalidName(ValueError):
    """A name that breaks a rule; the message says which."""


def _quoted(name: str) -> str:
    shown = name if len(name) <= 80 else name[:77] + "..."
    return ascii(shown)


def _check_bytes(kind: str, name: str, limit_bytes: int) -> None:
    try:
        length_bytes = len(name.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise InvalidName(f"{kind} {_quoted(name)} is not valid UTF-8 (lone surrogate)") from error
    if length_bytes == 0:
        raise InvalidName(f"{kind} is empty; it needs 1 to {limit_bytes} bytes")
    if length_bytes > limit_bytes:
        raise InvalidName(f"{kind} {_quoted(name)} has {length_bytes} bytes; at most {limit_bytes} are allowed")
    for character in name:
        if unicodedata.category(character) == "Cc":
            raise InvalidName(f"{kind} {_quoted(name)} holds the control character U+{ord(character):04X}")


def _check_path(kind: str, name: str) -> None:
    _check_bytes(kind, name, MAX_NAME_BYTES)
    for segment in name.split("/"):
        if segment == "":
            raise InvalidName(f"{kind} {_quoted(name)} has an empty segment (leading, trailing or double '/')")
        if segment in (".", ".."):
            raise InvalidName(f"{kind} {_quoted(name)} has the segment {segment!r}, which is not allowed")
        if len(segment.encode("utf-8")) > MAX_SEGMENT_BYTES:
            raise InvalidName(f"{kind} {_quoted(name)} has a segment longer than {MAX_SEGMENT_BYTES} bytes")
        if segment.startswith(RESERVED_PREFIX):
            raise InvalidName(f"{kind} {_quoted(name)} has a segment beginning with {RESERVED_PREFIX!r}, which is reserved")


def is_commit_last(name: str) -> bool:
    """Whether a shard is put on a tier only after all others of its checkpoint are verified there."""
    return name.rpartition("/")[2] in COMMIT_LAST_NAMES


def check_run(run: str) -> str:
    """Return `run` if it is a valid run name (path-like), else raise InvalidName."""
    _check_path("run", run)
    for segment in run.split("/"):
        # A run below another run's step directory would mix two checkpoints' files on a tier.
        if segment.startswith("step-") and segment[5:].isdigit():
            raise InvalidName(f"run {_quoted(run)} has the segment {segment!r}, which is the name of a step directory")
    return run


def check_shard_name(name: str) -> str:
    """Return `name` if it is a valid shard name, else raise InvalidName."""
    _check_path("shard name", name)
    return name


def file_and_directory(names: Collection[str]) -> tuple[str, str] | None:
    """Two of the names of which the first would have to be a directory for the second ("a" and "a/b"), None without such."""
    for name in names:
        at = name.find("/")
        while at >= 0:
            if name[:at] in names:
                return name[:at], name
            at = name.find("/", at + 1)
    return None


def check_session(session: str) -> str:
    """Return `session` if it is valid (1 to 255 bytes, no control characters), else raise InvalidName."""
    _check_bytes("session", session, MAX_SEGMENT_BYTES)
    return session


def check_step(step: int) -> int:
    """Return `step` if it is an unsigned 64-bit integer, else raise InvalidName."""
    if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEP:
        raise InvalidName(f"step {step!r} is not an unsigned 64-bit integer")
    return step


def session8(session: str) -> str:
    """The session's directory on a tier: first 8 hex digits of the SHA-256 of its name."""
    return hashlib.sha256(session.encode("utf-8")).hexdigest()[:8]
