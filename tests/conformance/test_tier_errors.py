"""The tables that say what an answer or an errno means."""

import errno
from typing import Any

import aiohttp
import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    FlexibleChecksumError,
    NoCredentialsError,
    ParamValidationError,
    ReadTimeoutError,
)

from conformance.tier_kit import CHUNK
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
from forebay_gateway.tiers.posix import errors as posix_errors
from forebay_gateway.tiers.s3 import errors as s3_errors
from forebay_gateway.tiers.s3.body import Body
from forebay_gateway.tiers.s3.multipart import encode_crc, full_object_crc
from forebay_gateway.tiers.s3.parts import MAX_PARTS, MIN_PART_BYTES, part_size

NOW_S = 1_800_000_000.0


def _answer(code: str, status: int, headers: dict[str, str] | None = None) -> ClientError:
    response: Any = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status, "HTTPHeaders": headers or {}}}
    return ClientError(response, "PutObject")


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("NoSuchKey", 404, NotFound),
        ("404", 404, NotFound),
        ("NoSuchBucket", 404, InvalidArgument),
        ("NoSuchUpload", 404, Unavailable),
        ("InvalidAccessKeyId", 403, PermissionDenied),
        ("SignatureDoesNotMatch", 403, PermissionDenied),
        ("AccessDenied", 403, PermissionDenied),
        ("403", 403, PermissionDenied),
        ("RequestTimeTooSkewed", 403, Unavailable),
        ("SlowDown", 503, Unavailable),
        ("503", 503, Unavailable),
        ("Whatever", 429, Unavailable),
        ("InternalError", 500, Unavailable),
        ("", 502, Unavailable),
        ("RequestTimeout", 400, Unavailable),
        ("OperationAborted", 409, Unavailable),
        ("BadDigest", 400, Corrupt),
        ("XAmzContentChecksumMismatch", 400, Corrupt),
        ("InvalidRange", 416, Corrupt),
        ("PreconditionFailed", 412, AlreadyExists),
        ("ConditionalRequestConflict", 409, AlreadyExists),
        ("412", 412, AlreadyExists),
        ("NotImplemented", 501, Unsupported),
        ("XMinioStorageFull", 507, StorageFull),
        ("QuotaExceeded", 403, StorageFull),
        ("MalformedXML", 400, InvalidArgument),
    ],
)
def test_answers(code: str, status: int, kind: type[ForebayError]) -> None:
    error = s3_errors.translate(_answer(code, status), "object", "k", "put_object", NOW_S)
    assert type(error) is kind
    assert f"tier=object key=k operation=put_object status={status}" in str(error)


@pytest.mark.parametrize(
    ("cause", "kind"),
    [
        (EndpointConnectionError(endpoint_url="http://x"), Unavailable),
        (ConnectTimeoutError(endpoint_url="http://x"), Unavailable),
        (ReadTimeoutError(endpoint_url="http://x"), Unavailable),
        (aiohttp.ClientPayloadError("broke off"), Unavailable),
        (ConnectionResetError("reset"), Unavailable),
        (TimeoutError(), Unavailable),
        (RuntimeError("an answer nobody understands"), Unavailable),
        (NoCredentialsError(), PermissionDenied),
        (FlexibleChecksumError(error_msg="x"), Unavailable),
        (ParamValidationError(report="x"), InvalidArgument),
        (ValueError("Invalid endpoint"), InvalidArgument),
    ],
)
def test_no_answers(cause: Exception, kind: type[ForebayError]) -> None:
    assert type(s3_errors.translate(cause, "object", "k", "head_object", NOW_S)) is kind


def test_skew_is_shown() -> None:
    headers = {"date": "Fri, 15 Jan 2027 09:00:00 GMT"}
    error = s3_errors.translate(_answer("RequestTimeTooSkewed", 403, headers), "object", "k", "put_object", NOW_S)
    assert "skew_s=3600" in str(error)
    assert s3_errors.clock_skew_s({}, NOW_S) is None
    assert s3_errors.clock_skew_s({"date": "garbage"}, NOW_S) is None


@pytest.mark.parametrize(("text", "expected"), [("3", 3.0), ("99999", 60.0), ("soon", 1.0), ("", 1.0)])
def test_retry_time(text: str, expected: float) -> None:
    error = s3_errors.translate(_answer("SlowDown", 503, {"retry-after": text}), "object", "k", "put_object", NOW_S)
    assert error.retry_after_s == expected


@pytest.mark.parametrize(
    ("number", "kind"),
    [
        (errno.ENOSPC, StorageFull),
        (errno.EDQUOT, StorageFull),
        (errno.ESTALE, Unavailable),
        (errno.EIO, Unavailable),
        (errno.ETIMEDOUT, Unavailable),
        (errno.EHOSTDOWN, Unavailable),
        (errno.ENOTCONN, Unavailable),
        (errno.EACCES, PermissionDenied),
        (errno.EPERM, PermissionDenied),
        (errno.EROFS, PermissionDenied),
        (errno.ENAMETOOLONG, InvalidArgument),
    ],
)
def test_errnos(number: int, kind: type[ForebayError]) -> None:
    error = posix_errors.translate(OSError(number, "x"), "pfs", "k", "write")
    assert type(error) is kind
    assert f"errno={errno.errorcode[number]}" in str(error)


@pytest.mark.parametrize("size", [0, 1, 5 << 20, 1 << 30, 170 << 30, 5 << 40])
@pytest.mark.parametrize("chunk", [64 << 10, 4 << 20, 64 << 20])
@pytest.mark.parametrize("wished", [None, 5 << 20, 7_000_000])
def test_part_sizes(size: int, chunk: int, wished: int | None) -> None:
    part = part_size(size, chunk, wished)
    assert part % chunk == 0
    assert part >= MIN_PART_BYTES
    assert -(-size // part) <= MAX_PARTS


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ({"ChecksumCRC32C": encode_crc(0xE3069283), "ChecksumType": "FULL_OBJECT"}, 0xE3069283),
        ({"ChecksumCRC32C": encode_crc(0xE3069283)}, None),
        ({"ChecksumCRC32C": encode_crc(1), "ChecksumType": "COMPOSITE"}, None),
        ({"ChecksumCRC32C": encode_crc(1) + "-3", "ChecksumType": "FULL_OBJECT"}, None),
        ({"ChecksumCRC32C": "no base64!", "ChecksumType": "FULL_OBJECT"}, None),
        ({"ChecksumType": "FULL_OBJECT"}, None),
        ({}, None),
    ],
)
def test_a_checksum_counts_only_with_its_type(answer: dict[str, str], expected: int | None) -> None:
    assert full_object_crc(answer) == expected


@pytest.mark.parametrize("step", [1, 7, 100, 1 << 20])
async def test_bodies_send_the_same_bytes_each_time(step: int) -> None:
    data = bytes(range(256)) * 1000
    body = Body([memoryview(data)[:1000], memoryview(b""), memoryview(data)[1000:CHUNK], memoryview(data)[CHUNK:]])
    assert len(body) == len(data)
    for _ in range(2):
        assert b"".join([bytes(piece) async for piece in body]) == data
    for _ in range(2):
        body.seek(0)
        parts = iter(lambda: body.read(step), b"")
        assert b"".join(parts) == data
    body.seek(0, 2)
    assert (body.tell(), body.read()) == (len(data), b"")
