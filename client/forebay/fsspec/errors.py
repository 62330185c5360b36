"""Errors in the host's terms: each is the package's own type and the built-in one that users of fsspec expect.

Owns the pairs. Does not own when they are raised.
"""

import contextlib
import errno
import io
from collections.abc import Iterator

from forebay import errors


class FileMissing(errors.NotFound, FileNotFoundError):
    """There is no such file, directory or step."""


class StepIncomplete(errors.Incomplete, FileNotFoundError):
    """The step is not complete, and so not there yet; or it cannot be committed as it is. `missing` says what it lacks."""


class FileThere(errors.AlreadyExists, FileExistsError):
    """There is such a file or directory already."""


class StepCommitted(errors.AlreadyExists, PermissionError):
    """The step is committed: its files do not change any more."""


class Denied(errors.PermissionDenied, PermissionError):
    """The caller, or the gateway towards a tier, lacks the right."""


class BadPath(errors.InvalidArgument, OSError, ValueError):
    """The path, or another argument, breaks a rule; the message says which."""


class Damaged(errors.Corrupt, OSError):
    """Bytes do not match their checksum, and no good copy was left."""


class NoSpace(errors.CacheFull, OSError):
    """The gateway has no space now."""


class GatewayAway(errors.Unavailable, ConnectionError):
    """The gateway, or a tier behind it, cannot serve this now."""


class TimedOut(errors.DeadlineExceeded, TimeoutError):
    """The time given is over."""


class NotSupported(errors.Unsupported, io.UnsupportedOperation, NotImplementedError):
    """There is no such operation here."""


_PAIRS: tuple[tuple[type[errors.ForebayError], type[errors.ForebayError], int], ...] = (
    (errors.NotFound, FileMissing, errno.ENOENT),
    (errors.Incomplete, StepIncomplete, errno.ENOENT),
    (errors.AlreadyExists, FileThere, errno.EEXIST),
    (errors.PermissionDenied, Denied, errno.EACCES),
    (errors.InvalidArgument, BadPath, errno.EINVAL),
    (errors.Corrupt, Damaged, errno.EIO),
    (errors.CacheFull, NoSpace, errno.ENOSPC),
    (errors.Unavailable, GatewayAway, errno.ECONNREFUSED),
    (errors.DeadlineExceeded, TimedOut, errno.ETIMEDOUT),
    (errors.Unsupported, NotSupported, errno.ENOTSUP),
)


class Failed(errors.ForebayError, OSError):
    """What has no type of its own."""


def in_host_terms(error: errors.ForebayError) -> errors.ForebayError:
    """The same error as an OSError. What is one already is returned as it is."""
    if isinstance(error, OSError):
        return error
    kind, number = next(((kind, number) for own, kind, number in _PAIRS if isinstance(error, own)), (Failed, errno.EIO))
    translated = kind(error.message, retry_after_s=error.retry_after_s, missing=error.missing)
    if isinstance(translated, OSError):
        translated.errno = number
    return translated


@contextlib.contextmanager
def host_errors() -> Iterator[None]:
    """What the block, or the function it decorates, raises of this package's errors is raised in the host's terms."""
    try:
        yield
    except errors.ForebayError as error:
        translated = in_host_terms(error)
        if translated is error:
            raise
        raise translated from error
