"""What an answer, or no answer, of an object store means. One table.

Owns the classification of botocore's and aiohttp's errors. Does not own telling a missing key from a missing bucket where the
answer does not say it (client.py asks for the bucket), nor what is done about an error.
"""

import asyncio
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

import aiohttp
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    FlexibleChecksumError,
    HTTPClientError,
    NoCredentialsError,
    ParamValidationError,
    PartialCredentialsError,
)

from forebay_gateway.core.errors import (
    AlreadyExists,
    Corrupt,
    ForebayError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from forebay_gateway.tiers.base import StorageFull

_SLOW_DOWN_S = 1.0
_RETRY_AFTER_S_MAX = 60.0

_DENIED = (PermissionDenied, "the object store refuses this key: check credentials and their rights")
_SLOW = (Unavailable, "the object store asks to slow down")
_FULL = (StorageFull, "the object store has no space or quota left")
_BROKEN = (Unavailable, "the object store failed")
_DAMAGED = (Corrupt, "the object store received other bytes than were sent")
_CONDITION = (AlreadyExists, "the condition does not hold: something else has this name or version")
MISSING_BUCKET = "the bucket does not exist: check the tier's bucket, endpoint and region"

_BY_CODE: dict[str, tuple[type[ForebayError], str]] = {
    "NoSuchKey": (NotFound, "no such object"),
    "NoSuchVersion": (NotFound, "no such object"),
    "NoSuchBucket": (InvalidArgument, MISSING_BUCKET),
    "PermanentRedirect": (InvalidArgument, "the bucket is in another region: set the tier's region"),
    "AuthorizationHeaderMalformed": (InvalidArgument, "the request was signed for another region: set the tier's region"),
    "InvalidBucketName": (InvalidArgument, "the tier's bucket is no valid bucket name"),
    "KeyTooLongError": (InvalidArgument, "the key is too long for the object store"),
    "EntityTooLarge": (InvalidArgument, "the object is larger than the object store allows"),
    "AccessDenied": _DENIED,
    "AllAccessDisabled": _DENIED,
    "AccountProblem": _DENIED,
    "ExpiredToken": _DENIED,
    "InvalidAccessKeyId": _DENIED,
    "InvalidToken": _DENIED,
    "SignatureDoesNotMatch": _DENIED,
    "RequestTimeTooSkewed": (Unavailable, "this node's clock differs too much from the object store's"),
    "SlowDown": _SLOW,
    "SlowDownRead": _SLOW,
    "SlowDownWrite": _SLOW,
    "RequestLimitExceeded": _SLOW,
    "Throttling": _SLOW,
    "ThrottlingException": _SLOW,
    "TooManyRequests": _SLOW,
    "ServiceUnavailable": _SLOW,
    "QuotaExceeded": _FULL,
    "XMinioStorageFull": _FULL,
    "InsufficientCapacity": _FULL,
    "StorageFull": _FULL,
    "BadDigest": _DAMAGED,
    "InvalidDigest": _DAMAGED,
    "XAmzContentChecksumMismatch": _DAMAGED,
    "XAmzContentSHA256Mismatch": _DAMAGED,
    "InvalidRange": (Corrupt, "the object is shorter than asked for"),
    "PreconditionFailed": _CONDITION,
    "ConditionalRequestConflict": _CONDITION,
    # Not an absent object: the whole put begins anew.
    "NoSuchUpload": (Unavailable, "the multipart upload is gone"),
    # What the store answered to a part was not what it kept: likewise.
    "InvalidPart": (Unavailable, "the parts are not those that the object store holds"),
    "InvalidPartOrder": (Unavailable, "the parts are not those that the object store holds"),
    # Not a failed condition: two conditional requests met, neither outcome is known.
    "OperationAborted": _BROKEN,
    "RequestTimeout": (Unavailable, "the object store waited too long for bytes"),
    "IncompleteBody": (Unavailable, "the object store received too few bytes"),
    "NotImplemented": (Unsupported, "the object store does not have this operation"),
    "MethodNotAllowed": (Unsupported, "the object store does not have this operation"),
}

_BY_STATUS: dict[int, tuple[type[ForebayError], str]] = {
    400: (InvalidArgument, "the object store calls the request wrong"),
    401: _DENIED,
    403: _DENIED,
    404: (NotFound, "no such object"),
    408: _BROKEN,
    409: _CONDITION,
    412: _CONDITION,
    416: (Corrupt, "the object is shorter than asked for"),
    429: _SLOW,
    501: (Unsupported, "the object store does not have this operation"),
    503: _SLOW,
    507: _FULL,
}


def code_of(error: BaseException | None) -> str:
    """The object store's own code of an error, "" where it gave none."""
    return str(error.response.get("Error", {}).get("Code", "")) if isinstance(error, ClientError) else ""


def translate(error: Exception, tier: str, key: str, operation: str, wall_s: float) -> ForebayError:
    """The error to raise from `error`. `wall_s` is this node's clock, to show how far the server's is away."""
    if isinstance(error, ForebayError):
        return error
    where: dict[str, Any] = {"tier": tier, "key": key, "operation": operation}
    if isinstance(error, ClientError):
        return _from_answer(error.response, where, wall_s)
    if isinstance(error, NoCredentialsError | PartialCredentialsError):
        return PermissionDenied("no credentials in the AWS chain", **where, cause=str(error))
    if isinstance(error, FlexibleChecksumError):  # botocore looks at CRC32C itself where awscrt is installed
        return Unavailable("what arrived does not match the object store's own checksum of it", **where)
    if isinstance(error, ParamValidationError | ValueError):
        return InvalidArgument("the request cannot be made", **where, cause=" ".join(str(error).split()))
    if isinstance(error, TimeoutError | asyncio.TimeoutError):
        return Unavailable("the object store does not answer in time", **where)
    # Refused, reset, no route, no name, TLS, a body that broke off, an answer that is no XML: all may pass.
    if isinstance(error, HTTPClientError | BotoCoreError | aiohttp.ClientError | OSError):
        return Unavailable("the object store cannot be reached", **where, cause=f"{type(error).__name__}: {error}")
    return Unavailable("the object store's answer cannot be understood", **where, cause=f"{type(error).__name__}: {error}")


def _from_answer(response: Mapping[str, Any], where: dict[str, Any], wall_s: float) -> ForebayError:
    code = str(response.get("Error", {}).get("Code", ""))
    metadata = response.get("ResponseMetadata", {})
    status = int(metadata.get("HTTPStatusCode", 0))
    headers = metadata.get("HTTPHeaders", {})
    cls, sentence = _BY_CODE.get(code) or _BY_STATUS.get(status) or _BROKEN
    details: dict[str, Any] = {**where, "status": status, "code": code or "none"}
    if code == "RequestTimeTooSkewed" and (skew_s := clock_skew_s(headers, wall_s)) is not None:
        details["skew_s"] = f"{skew_s:.0f}"
    error = cls(sentence, **details)
    if issubclass(cls, Unavailable):
        error.retry_after_s = _retry_after_s(headers, throttled=(cls, sentence) == _SLOW)
    return error


def _retry_after_s(headers: Mapping[str, str], throttled: bool) -> float | None:
    text = headers.get("retry-after", "")
    if text.isdigit():
        return min(float(text), _RETRY_AFTER_S_MAX)
    return _SLOW_DOWN_S if throttled else None


def clock_skew_s(headers: Mapping[str, str], wall_s: float) -> float | None:
    """Seconds by which the server's clock is ahead of this node's, None where it shows none."""
    try:
        return parsedate_to_datetime(headers["date"]).timestamp() - wall_s
    except (KeyError, ValueError, TypeError):
        return None
