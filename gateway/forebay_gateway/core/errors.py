"""What can go wrong, as types. A type exists only where a caller acts differently on it.

Owns the kinds that travel to clients (rpc/status maps each to a gRPC code) and the wording rule: a sentence, then key=value.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar


@dataclass(frozen=True, slots=True)
class MissingPart:
    """A writer that a checkpoint lacks: `shards` names what it lacks, empty means the whole part."""

    writer: int
    shards: tuple[str, ...] = ()
    state: str = "absent"


class ForebayError(Exception):
    """Base of every error the gateway answers with. `details` end the message as key=value."""

    kind: ClassVar[str] = "internal"

    def __init__(self, message: str, *, retry_after_s: float | None = None, **details: Any) -> None:
        self.sentence = message
        self.details = details
        self.retry_after_s = retry_after_s
        super().__init__(" ".join([message, *(f"{key}={value}" for key, value in details.items())]))


class InvalidArgument(ForebayError):
    """The request breaks a rule; the same request fails again."""

    kind = "invalid_argument"


class NotFound(ForebayError):
    """Authoritatively absent. Never raised because something could not be reached."""

    kind = "not_found"


class AlreadyExists(ForebayError):
    """Something else already has this name."""

    kind = "already_exists"


class Incomplete(ForebayError):
    """A part or a checkpoint lacks something; `missing` says what."""

    kind = "incomplete"

    def __init__(self, message: str, *, missing: tuple[MissingPart, ...] = (), **details: Any) -> None:
        super().__init__(message, **details)
        self.missing = missing


class Corrupt(ForebayError):
    """Bytes do not match their checksum, and no good copy was left to go on from."""

    kind = "corrupt"


class CacheFull(ForebayError):
    """No space may be reserved now; `retry_after_s` says when to ask again, `waited_s` how long it was waited for already."""

    kind = "cache_full"
    waited_s = 0.0


class DiskFull(CacheFull):
    """The disk under cache and catalog itself has no space, whatever the budget says: shown in status until that has passed."""


class Unavailable(ForebayError):
    """A tier, a mover or this gateway cannot serve this now. It says nothing about whether data exists."""

    kind = "unavailable"


class DiskFailed(Unavailable):
    """The cache's disk did not take a write, not for want of space."""


class PermissionDenied(ForebayError):
    """The caller, or the gateway towards a tier, lacks the right."""

    kind = "permission_denied"


class DeadlineExceeded(ForebayError):
    """The time the caller gave is over."""

    kind = "deadline_exceeded"


class Unsupported(ForebayError):
    """This build or configuration has no such operation; the message names operation and tier."""

    kind = "unsupported"


class StartupError(ForebayError):
    """The gateway must not start; the message says what to do."""

    kind = "failed_precondition"


class Damaged(StartupError):
    """What this node keeps for itself cannot be trusted any more. Never a tier's doing."""


@dataclass(frozen=True, slots=True)
class ErrorRecord:
    """An error as it crosses from a mover process to the front."""

    kind: str
    message: str
    retry_after_s: float | None = None
    details: dict[str, Any] = field(default_factory=dict)


_BY_KIND: dict[str, type[ForebayError]] = {
    cls.kind: cls
    for cls in (
        InvalidArgument,
        NotFound,
        AlreadyExists,
        Incomplete,
        Corrupt,
        CacheFull,
        Unavailable,
        PermissionDenied,
        DeadlineExceeded,
        Unsupported,
    )
}


def to_record(error: BaseException) -> ErrorRecord:
    """Flatten an error for another process; what is not ours becomes kind "internal" with its type's name."""
    if isinstance(error, ForebayError):
        details = {key: str(value) for key, value in error.details.items()}
        return ErrorRecord(error.kind, error.sentence, error.retry_after_s, details)
    return ErrorRecord("internal", f"{type(error).__name__}: {error}")


def from_record(record: ErrorRecord) -> ForebayError:
    """The error again, on the other side."""
    cls = _BY_KIND.get(record.kind, ForebayError)
    error = cls(record.message, **record.details)
    error.retry_after_s = record.retry_after_s
    return error
