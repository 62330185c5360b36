"""What can go wrong, as a caller sees it. A type exists only where a caller acts differently on it.

Owns the translation of a failed RPC into these types; the RpcError stays as the cause. Does not own retries (retry.py) or exit
codes (cli/exits.py).
"""

import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from forebay.types import Missing

if TYPE_CHECKING:
    import grpc

DETAIL_KEY = "forebay-error-bin"  # trailing metadata: a serialized ErrorDetail


class ForebayError(Exception):
    """Base of every error of this package. `message` is one line for people."""

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, retry_after_s: float | None = None, missing: Iterable[Missing] = ()) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
        self.missing = tuple(missing)

    @property
    def message(self) -> str:
        """The error's one line."""
        return str(self.args[0])

    def extended(self, addition: str) -> "ForebayError":
        """This error, its line ending in `addition` as well."""
        self.args = (f"{self.message} {addition}",)
        return self


class NotFound(ForebayError):
    """Authoritatively absent. Never raised because something could not be reached."""

    kind = "not_found"


class AlreadyExists(ForebayError):
    """Other bytes already have this name in this session."""

    kind = "already_exists"


class InvalidArgument(ForebayError):
    """The request breaks a rule; the same request fails again."""

    kind = "invalid_argument"


class Incomplete(ForebayError):
    """A part or a checkpoint lacks something; `missing` says what."""

    kind = "incomplete"


class Corrupt(ForebayError):
    """Bytes do not match their checksum, and no good copy was left to go on from."""

    kind = "corrupt"


class CacheFull(ForebayError):
    """The gateway has no space now; `retry_after_s` says when to ask again, `waited_s` how long the last try waited there."""

    kind = "cache_full"
    waited_s = 0.0


class Unavailable(ForebayError):
    """The gateway, or a tier behind it, cannot serve this now. It says nothing about whether data exists."""

    kind = "unavailable"


class PermissionDenied(ForebayError):
    """The caller, or the gateway towards a tier, lacks the right."""

    kind = "permission_denied"


class DeadlineExceeded(ForebayError):
    """The time given is over; `missing` says what had not arrived, where that is known."""

    kind = "deadline_exceeded"


class Unsupported(ForebayError):
    """This gateway or configuration has no such operation."""

    kind = "unsupported"


_TYPES: tuple[type[ForebayError], ...] = (
    NotFound,
    AlreadyExists,
    InvalidArgument,
    Incomplete,
    Corrupt,
    CacheFull,
    Unavailable,
    PermissionDenied,
    DeadlineExceeded,
    Unsupported,
)
_BY_KIND = {cls.kind: cls for cls in _TYPES}

# For answers without an ErrorDetail: they come from gRPC itself, or from something between client and gateway.
_BY_CODE: dict[str, type[ForebayError]] = {
    "NOT_FOUND": NotFound,
    "ALREADY_EXISTS": AlreadyExists,
    "INVALID_ARGUMENT": InvalidArgument,
    "OUT_OF_RANGE": InvalidArgument,
    "FAILED_PRECONDITION": Incomplete,
    "DATA_LOSS": Corrupt,
    "UNAVAILABLE": Unavailable,
    "ABORTED": Unavailable,
    "CANCELLED": Unavailable,  # the gateway went away in the middle of the call
    "PERMISSION_DENIED": PermissionDenied,
    "UNAUTHENTICATED": PermissionDenied,
    "DEADLINE_EXCEEDED": DeadlineExceeded,
    "UNIMPLEMENTED": Unsupported,
}
_BROKEN_STREAM = ("RST_STREAM", "Stream removed", "GOAWAY", "Connection reset", "Socket closed")


def how_to_install(extra: str) -> str:
    """What to do where a package is missing that only an extra of Forebay needs: true of its source tree and of a release."""
    return f"install Forebay's extra '{extra}' (in its tree: pip install '.[{extra}]')"


def os_text(error: OSError) -> str:
    """What the system said, for people: without the number that Python puts before it."""
    if not error.strerror:
        return str(error)
    named = [os.fsdecode(name) for name in (error.filename, error.filename2) if isinstance(name, str | bytes | os.PathLike)]
    return f"{' -> '.join(named)}: {error.strerror}" if named else error.strerror


def _detail(error: "grpc.RpcError") -> Any:
    from google.protobuf.message import DecodeError

    from forebay_wire.v1 import gateway_pb2 as pb

    trailing = getattr(error, "trailing_metadata", lambda: None)()
    for key, value in trailing or ():
        if key == DETAIL_KEY and isinstance(value, bytes):
            try:
                return pb.ErrorDetail.FromString(value)
            except DecodeError:
                return None
    return None


def from_detail(detail: Any, doing: str) -> ForebayError:
    """The error that an ErrorDetail means."""
    missing = [Missing(entry.writer, tuple(entry.shards), entry.state) for entry in detail.missing]
    retry_after_s = detail.retry_after_s if detail.HasField("retry_after_s") else None
    cls = _BY_KIND.get(detail.kind, ForebayError)
    error = cls(f"{doing}: {detail.message}", retry_after_s=retry_after_s, missing=missing)
    if isinstance(error, CacheFull):
        error.waited_s = detail.waited_s
    return error


def from_rpc(error: "grpc.RpcError", doing: str) -> ForebayError:
    """The error that a failed RPC means; `doing` is a clause such as "put 'a.bin'". Raise it `from error`."""
    detail = _detail(error)
    if detail is not None:
        return from_detail(detail, doing)
    code = getattr(error, "code", lambda: None)()
    name = code.name if code is not None else "UNKNOWN"
    text = " ".join(str(getattr(error, "details", lambda: "")() or "").split())
    if name == "RESOURCE_EXHAUSTED" and "larger than max" not in text:
        return CacheFull(f"{doing}: {text}")
    if name in ("UNKNOWN", "INTERNAL") and any(mark in text for mark in _BROKEN_STREAM):
        return Unavailable(f"{doing}: the connection broke: {text}")
    return _BY_CODE.get(name, ForebayError)(f"{doing}: {text or 'no reason given'} code={name}")
