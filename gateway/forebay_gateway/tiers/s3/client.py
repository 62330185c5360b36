"""One connection pool to one bucket: makes calls, bounds their time, translates their errors.

Owns the aiobotocore client and its settings. Does not own what the calls are for (tier.py, multipart.py, probe.py), nor
repeating them: botocore's own retries are off, since only the callers know what may be repeated.
"""

import asyncio
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from aiobotocore.config import AioConfig
from aiobotocore.session import get_session

from forebay_gateway.base.clock import Clock
from forebay_gateway.core.errors import AlreadyExists, ForebayError, InvalidArgument, NotFound, Unavailable
from forebay_gateway.tiers.keys import check_key
from forebay_gateway.tiers.s3.errors import MISSING_BUCKET, code_of, translate

# Beside the transfers: heads, documents, an abort.
_SPARE_CONNECTIONS = 6

# What no answer of a store lacks. One without it came from something else on the way, or broke off.
_HELD_BY_ANSWERS = {
    "put_object": ("ETag",),
    "head_object": ("ETag", "ContentLength"),
    "get_object": ("ETag", "ContentLength"),
    "create_multipart_upload": ("UploadId",),
    "upload_part": ("ETag",),
    "complete_multipart_upload": ("ETag",),
    "list_objects_v2": ("IsTruncated",),
    "list_multipart_uploads": ("IsTruncated",),
}
# And none of the entries that it lists.
_HELD_BY_ENTRIES: dict[str, dict[str, tuple[str, ...]]] = {
    "list_objects_v2": {"Contents": ("Key", "Size", "ETag"), "CommonPrefixes": ("Prefix",)},
    "list_multipart_uploads": {"Uploads": ("Key", "UploadId", "Initiated")},
}
# Only these ask about one object that may be absent.
_MAY_MISS = frozenset({"head_object", "get_object", "delete_object"})


@dataclass(frozen=True, slots=True)
class S3Timeouts:
    """`call_s` bounds a whole call: what the store may think, beside its bytes at the slowest pace that still counts as alive;
    `read_s` bounds the silence inside it."""

    connect_s: float = 5.0
    read_s: float = 60.0
    call_s: float = 90.0
    slowest_bytes_per_s: int = 256 << 10

    def whole_s(self, size_bytes: int) -> float:
        """Of a call that carries so many bytes."""
        return self.call_s + size_bytes / self.slowest_bytes_per_s


@dataclass(frozen=True, slots=True)
class S3Settings:
    """Where the bucket is. Credentials come from the standard AWS chain."""

    bucket: str
    prefix: str = ""
    endpoint: str | None = None
    region: str | None = None
    addressing: str = "auto"
    sign_payload: bool = False
    part_size: int | None = None  # bytes; None: from the object's size
    concurrency: int = 4
    timeouts: S3Timeouts = S3Timeouts()


class S3Client:
    """Opened at the first call; used from one event loop."""

    def __init__(self, tier: str, settings: S3Settings, clock: Clock) -> None:
        self.tier = tier
        self.settings = settings
        self.clock = clock
        self._prefix = f"{settings.prefix.strip('/')}/" if settings.prefix.strip("/") else ""
        self._stack = AsyncExitStack()
        self._opening = asyncio.Lock()
        self._client: Any = None
        self._bucket_seen = False

    def object_key(self, key: str) -> str:
        """The key in the bucket of a tier's key."""
        return self._prefix + check_key(key)

    def object_prefix(self, directory: str) -> str:
        """What keys directly below a tier's directory ("" for the root) begin with."""
        return f"{self._prefix}{directory}/" if directory else self._prefix

    def _config(self) -> AioConfig:
        return AioConfig(
            connect_timeout=self.settings.timeouts.connect_s,
            read_timeout=self.settings.timeouts.read_s,
            max_pool_connections=self.settings.concurrency * 2 + _SPARE_CONNECTIONS,
            retries={"total_max_attempts": 1, "mode": "standard"},
            # The defaults since botocore 1.36 add trailers that S3-compatible stores refuse; we send our own checksums.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": self.settings.addressing, "payload_signing_enabled": self.settings.sign_payload},
        )

    async def _open(self) -> Any:
        async with self._opening:
            if self._client is None:
                session = get_session()
                creator = session.create_client(
                    "s3", region_name=self.settings.region, endpoint_url=self.settings.endpoint, config=self._config()
                )
                self._client = await self._stack.enter_async_context(creator)
            return self._client

    async def call(self, operation: str, key: str = "", *, body_bytes: int = 0, **parameters: Any) -> dict[str, Any]:
        """Like `attempt`, for requests that any store knows: an answer that the request cannot have is Unavailable.

        Nothing but a condition can fail with AlreadyExists, nothing but a question about an object with NotFound.
        """
        try:
            return await self.attempt(operation, key, body_bytes=body_bytes, **parameters)
        except (AlreadyExists, NotFound) as error:
            if not parameters.keys().isdisjoint(("IfMatch", "IfNoneMatch")):
                raise
            if isinstance(error, NotFound) and operation in _MAY_MISS:
                raise
            raise Unavailable(
                f"the object store gave no sensible answer: {error.sentence}", **error.details
            ) from error.__cause__

    async def attempt(self, operation: str, key: str = "", *, body_bytes: int = 0, **parameters: Any) -> dict[str, Any]:
        """One request about `key` ("" for the bucket). Raises what the error table says, and Unavailable where the answer lacks
        what the answer of an object store has.

        Times out as a whole, so that neither a stalled upload nor a full pool can hang.
        """
        if key:
            parameters["Key"] = self.object_key(key)
        try:
            client = self._client or await self._open()
            async with asyncio.timeout(self.settings.timeouts.whole_s(body_bytes)):
                answer: dict[str, Any] = await getattr(client, operation)(Bucket=self.settings.bucket, **parameters)
        except Exception as error:
            raise await self._settled(translate(error, self.tier, key, operation, self.clock.wall()), error, key) from error
        if lacks := _lacking(operation, answer):
            if operation == "get_object":
                answer["Body"].close()
            sentence = "the answer is not that of an object store"
            raise Unavailable(sentence, tier=self.tier, key=key, operation=operation, lacks=lacks)
        self._bucket_seen = True
        return answer

    async def _settled(self, error: ForebayError, cause: Exception, key: str) -> ForebayError:
        """A bare 404 (a HEAD has no body) says nothing about which is absent, key or bucket: ask for the bucket."""
        if code_of(cause) == "NoSuchBucket":
            return InvalidArgument(MISSING_BUCKET, tier=self.tier, bucket=self.settings.bucket)
        if not isinstance(error, NotFound) or code_of(cause) in ("NoSuchKey", "NoSuchVersion"):
            return error
        if key:
            await self.check_bucket()
            return error
        return InvalidArgument(MISSING_BUCKET, tier=self.tier, bucket=self.settings.bucket)

    async def check_bucket(self) -> dict[str, Any]:
        """The bucket's answer; raises InvalidArgument where it does not exist."""
        return await self.call("head_bucket")

    async def before_write(self) -> None:
        """Make sure once that the bucket is there: some stores make a missing one on the first write."""
        if not self._bucket_seen:
            await self.check_bucket()

    async def receive(self, key: str, answer: dict[str, Any], limit_bytes: int) -> bytes:
        """The whole body of a GetObject answer, at most `limit_bytes`; the connection is free again in any case."""
        body = answer["Body"]
        try:
            async with asyncio.timeout(self.settings.timeouts.whole_s(limit_bytes)):
                data: bytes = await body.read()
            return data
        except Exception as error:
            raise self.translated(error, key, "get_object") from error
        finally:
            body.close()

    def translated(self, error: Exception, key: str, operation: str) -> Exception:
        """The error to raise from one that came while a body was read."""
        return translate(error, self.tier, key, operation, self.clock.wall())

    async def close(self) -> None:
        """Close all connections. A later call opens new ones."""
        client, self._client = self._client, None
        if client is not None:
            await self._stack.aclose()
            self._stack = AsyncExitStack()


def _lacking(operation: str, answer: dict[str, Any]) -> str:
    """The first member that is not there and must be; empty where all are."""
    for name in _HELD_BY_ANSWERS.get(operation, ()):
        if answer.get(name) in (None, ""):
            return name
    for listed, names in _HELD_BY_ENTRIES.get(operation, {}).items():
        for entry in answer.get(listed, ()):
            for name in names:
                if entry.get(name) in (None, ""):
                    return f"{listed}.{name}"
    return ""
