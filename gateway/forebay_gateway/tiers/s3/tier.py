"""A bucket of an object store as a tier.

Owns which request serves which verb. Does not own connections (client.py), large objects (multipart.py), the probe (probe.py),
nor what errors mean (errors.py). It asks the probe's record before it relies on anything a store may lack.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, ClassVar

from forebay_gateway.base.clock import Clock, SystemClock
from forebay_gateway.core.errors import (
    AlreadyExists,
    Corrupt,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from forebay_gateway.tiers.base import Capabilities, Leftover, Listing, ObjectInfo, PutOptions, Source, Tier
from forebay_gateway.tiers.keys import directory_of
from forebay_gateway.tiers.readback import check_size, check_stream
from forebay_gateway.tiers.s3.body import Body
from forebay_gateway.tiers.s3.client import S3Client, S3Settings
from forebay_gateway.tiers.s3.errors import clock_skew_s, code_of
from forebay_gateway.tiers.s3.limit import AdaptiveLimit
from forebay_gateway.tiers.s3.multipart import (
    Upload,
    abort,
    check_echo,
    encode_crc,
    full_object_crc,
    sweep_uploads,
    uploads_below,
)
from forebay_gateway.tiers.s3.parts import part_size
from forebay_gateway.tiers.s3.probe import PUT_CHECKSUM, probe
from forebay_wire.checksums import crc32c

_PLAIN = PutOptions()
_READ_BYTES = 1 << 20
_READS = 4
DELETES_A_REQUEST = 1000  # https://docs.aws.amazon.com/AmazonS3/latest/API/API_DeleteObjects.html

log = logging.getLogger("forebay.s3")


class S3Tier(Tier):
    """Keys lie below the configured prefix. `tag` is the ETag."""

    kind: ClassVar[str] = "s3"
    lists_uploads_at_once: ClassVar[bool] = True

    def __init__(self, name: str, settings: S3Settings, *, clock: Clock | None = None, owner: str = "") -> None:
        super().__init__(name)
        self._owner = owner
        self.client = S3Client(name, settings, clock or SystemClock())
        self._deletes_many = True  # until the store says otherwise
        self._unclean: set[str] = set()  # keys of which an upload may be left behind
        self._limit = AdaptiveLimit(settings.concurrency, self.client.clock)
        self._reads = AdaptiveLimit(min(_READS, settings.concurrency), self.client.clock)

    @property
    def reads_at_once(self) -> int:
        """Fewer while the store does not keep up."""
        return self._reads.slots

    async def probe(self) -> Capabilities:
        self.capabilities = await probe(self.client, self._owner)
        return self.capabilities

    def _proved(self, what: str) -> bool:
        """Whether the probe proved a capability; before the probe nothing is proved."""
        if self.capabilities is None:
            return False
        return what in self.capabilities.notes or bool(getattr(self.capabilities, what, False))

    # Shards

    async def put(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        await self.client.before_write()
        if source.size <= part_size(source.size, source.chunk_size, self.client.settings.part_size) or not self._multipart():
            return await self._put_whole(key, source, options)
        await self._clean_up_before(key)
        upload = Upload(self.client, self._limit, key, source, full_crc=self._proved("server_checksum"))
        try:
            etag = await upload.run(options)
        except BaseException:
            if upload.may_be_left:
                self._unclean.add(key)
            raise
        return ObjectInfo(key, source.size, etag)

    async def _clean_up_before(self, key: str) -> None:
        """An earlier try's upload is ended first: the next one is recorded in its place."""
        if key not in self._unclean:
            return
        # A store that does not let us list uploads must take new ones all the same.
        with contextlib.suppress(PermissionDenied, Unsupported, InvalidArgument):
            await sweep_uploads(self.client, key)
        self._unclean.discard(key)

    def _multipart(self) -> bool:
        return self.capabilities is None or self.capabilities.multipart

    async def _put_whole(self, key: str, source: Source, options: PutOptions) -> ObjectInfo:
        async with self._limit.slot():
            body = Body([await source.read_chunk(index) for index in range(len(source.chunk_crcs))])
            check_size(self.name, key, source, len(body))
            answer = await self._put_object(key, body, source.crc32c)
        if options.on_progress is not None:
            options.on_progress(len(body))
        return ObjectInfo(key, source.size, answer["ETag"])

    async def _put_object(self, key: str, body: Body, crc: int, **condition: Any) -> dict[str, Any]:
        if self._proved(PUT_CHECKSUM):
            condition["ChecksumCRC32C"] = encode_crc(crc)
        answer = await self.client.call("put_object", key, body_bytes=len(body), Body=body, **condition)
        check_echo(self.name, key, condition.get("ChecksumCRC32C"), answer)
        return answer

    async def verify(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        info = await self.head(key)
        check_size(self.name, key, source, info.size)
        if info.crc32c is None:
            await check_stream(self.name, key, source, self.read(key, 0, source.size), options.read_back)
        elif info.crc32c != source.crc32c:
            raise Corrupt(
                "the object store's checksum differs from the source's",
                tier=self.name,
                key=key,
                expected=f"{source.crc32c:08x}",
                actual=f"{info.crc32c:08x}",
            )
        return info

    async def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        pieces = self._read(key, offset, length)
        try:
            async with contextlib.aclosing(pieces):
                async for piece in pieces:
                    yield piece
        except Unavailable as error:
            self._reads.failed(error)
            raise
        self._reads.kept_up()

    async def _read(self, key: str, offset: int, length: int) -> AsyncGenerator[bytes, None]:
        if length == 0:
            if (info := await self.head(key)).size < offset:
                raise Corrupt("the object is shorter than asked for", tier=self.name, key=key, size=info.size)
            return
        answer = await self.client.call("get_object", key, Range=f"bytes={offset}-{offset + length - 1}")
        body = answer["Body"]
        try:
            self._check_range(key, answer, offset, length)
            received = 0
            while received < length:
                piece = await self._receive(key, body)
                if not piece:
                    raise Unavailable("the answer ended early", tier=self.name, key=key, offset=offset + received)
                received += len(piece)
                yield piece
        finally:
            # Unread bytes are not drained: closing gives the connection's place in the pool back at once.
            body.close()

    async def _receive(self, key: str, body: Any) -> bytes:
        try:
            async with asyncio.timeout(self.client.settings.timeouts.call_s):
                piece: bytes = await body.read(_READ_BYTES)
            return piece
        except Exception as error:
            raise self.client.translated(error, key, "get_object") from error

    def _check_range(self, key: str, answer: dict[str, Any], offset: int, length: int) -> None:
        size = answer.get("ContentLength")
        if "ContentRange" not in answer and (offset or size != length):
            raise Unsupported("the object store does not serve byte ranges", tier=self.name, key=key)
        if size != length:
            whole = answer.get("ContentRange", "").rpartition("/")[2]
            if whole.isdigit() and int(whole) >= offset + length:
                raise Unavailable("the answer holds another range", tier=self.name, key=key, offset=offset, got=size)
            raise Corrupt("the object is shorter than asked for", tier=self.name, key=key, offset=offset, got=size)

    # Documents

    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        condition = self._condition(key, if_absent, if_match)
        await self.client.before_write()
        body = Body([memoryview(data)])
        try:
            answer = await self._put_object(key, body, crc32c(data), **condition)
        except NotFound as error:
            if if_match is None:
                raise Unavailable("the object store does not find where to write", tier=self.name, key=key) from error
            raise AlreadyExists("the object has another version: it is gone", tier=self.name, key=key) from error
        except AlreadyExists as error:
            await self._check_conflict(key, error)
            raise
        if not self._proved(PUT_CHECKSUM):
            found, info = await self.get_small(key, len(data) + 1)
            if found != data and info.tag == answer["ETag"]:
                raise Corrupt("a document read back differs from what was written", tier=self.name, key=key)
        return ObjectInfo(key, len(data), answer["ETag"])

    def _condition(self, key: str, if_absent: bool, if_match: str | None) -> dict[str, str]:
        what = "conditional_create" if if_absent else "conditional_replace"
        if (if_absent or if_match is not None) and not self._proved(what):
            raise Unsupported("the object store was not proved to do conditional writes", tier=self.name, key=key, what=what)
        if if_absent:
            return {"IfNoneMatch": "*"}
        return {} if if_match is None else {"IfMatch": if_match}

    async def _check_conflict(self, key: str, error: AlreadyExists) -> None:
        """409 says that a rival request was under way, not that it won: without an object there is nothing that exists."""
        if code_of(error.__cause__) != "ConditionalRequestConflict":
            return
        try:
            await self.head(key)
        except NotFound:
            raise Unavailable("a rival write was under way", retry_after_s=0.2, tier=self.name, key=key) from error

    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> tuple[bytes, ObjectInfo]:
        answer = await self.client.call("get_object", key, ChecksumMode="ENABLED")
        if int(answer["ContentLength"]) > limit_bytes:
            answer["Body"].close()
            raise InvalidArgument("the document is larger than asked for", tier=self.name, key=key, limit_bytes=limit_bytes)
        data = await self.client.receive(key, answer, limit_bytes)
        if len(data) != int(answer["ContentLength"]):
            raise Unavailable("the answer ended early", tier=self.name, key=key, got=len(data))
        info = self._info(key, answer)
        if info.crc32c is not None and info.crc32c != crc32c(data):
            # The store says of its own bytes that they are others: these were damaged on the way.
            raise Unavailable("a document arrived damaged", tier=self.name, key=key, expected=f"{info.crc32c:08x}")
        return data, info

    # Names

    async def head(self, key: str) -> ObjectInfo:
        return self._info(key, await self.client.call("head_object", key, ChecksumMode="ENABLED"))

    def _info(self, key: str, answer: dict[str, Any]) -> ObjectInfo:
        written = answer.get("LastModified")
        modified_s = None if written is None else written.timestamp()
        return ObjectInfo(key, int(answer["ContentLength"]), str(answer["ETag"]), full_object_crc(answer), modified_s)

    async def delete(self, key: str) -> None:
        try:
            await self.client.call("delete_object", key)
        except NotFound as error:  # stores answer so only for what is not there; some do not answer so at all
            with contextlib.suppress(NotFound):
                await self.head(key)
                raise Unavailable("the object store denies an object that it shows", tier=self.name, key=key) from error

    async def delete_many(self, keys: Sequence[str]) -> None:
        for begin in range(0, len(keys), DELETES_A_REQUEST):
            left = keys[begin : begin + DELETES_A_REQUEST]
            if self._deletes_many:
                left = await self._delete_together(left)
            await super().delete_many(left)

    async def _delete_together(self, keys: Sequence[str]) -> Sequence[str]:
        """One request; the keys that its answer does not call deleted, to be deleted one by one, which says what is wrong."""
        by_name = {self.client.object_key(key): key for key in keys}
        wanted = {"Objects": [{"Key": name} for name in by_name], "Quiet": False}
        try:
            answer = await self.client.call("delete_objects", Delete=wanted)
        except (Unsupported, InvalidArgument, PermissionDenied) as error:  # some stores do not have it, or not for these rights
            log.info("objects are deleted one by one tier=%s reason=%s", self.name, error)
            self._deletes_many = False
            return keys
        # A quiet answer is one without errors, and so is an empty one: what is gone is taken from names alone.
        gone = {each.get("Key") for each in answer.get("Deleted", ())} - {each.get("Key") for each in answer.get("Errors", ())}
        return [key for name, key in by_name.items() if name not in gone]

    async def list(self, prefix: str) -> Listing:
        start = self.client.object_prefix(directory_of(prefix))
        skip = len(self.client.object_prefix(""))
        objects: list[ObjectInfo] = []
        directories: set[str] = set()
        token: str | None = None
        while True:
            more: dict[str, Any] = {"ContinuationToken": token} if token else {}
            answer = await self.client.call("list_objects_v2", Prefix=start, Delimiter="/", **more)
            for entry in answer.get("Contents", ()):
                if entry["Key"] != start:  # some tools leave a placeholder for the directory itself
                    objects.append(ObjectInfo(entry["Key"][skip:], int(entry["Size"]), str(entry["ETag"])))
            directories.update(entry["Prefix"][len(start) :].rstrip("/") for entry in answer.get("CommonPrefixes", ()))
            token = answer.get("NextContinuationToken")
            if not answer.get("IsTruncated") or not token:
                return Listing(tuple(sorted(objects, key=lambda info: info.key)), tuple(sorted(directories)))

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await abort(self.client, key, upload_id)

    async def sweep(self, key: str) -> None:
        if self._multipart():
            await sweep_uploads(self.client, key)

    async def leftovers(self, prefix: str) -> tuple[Leftover, ...]:
        if not self._multipart():
            return ()
        skip = len(self.client.object_prefix(""))
        start = self.client.object_prefix(directory_of(prefix))
        found = [upload async for upload in uploads_below(self.client, start)]
        now_s = await self._now_s() if found else 0.0
        return tuple(
            Leftover(upload["Key"][skip:], upload["UploadId"], max(0.0, now_s - upload["Initiated"].timestamp()))
            for upload in found
        )

    async def _now_s(self) -> float:
        """By the store's clock; by this machine's where it shows none."""
        answer, wall_s = await self.client.check_bucket(), self.client.clock.wall()
        return wall_s + (clock_skew_s(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}), wall_s) or 0.0)

    async def close(self) -> None:
        """Close all connections."""
        await self.client.close()
