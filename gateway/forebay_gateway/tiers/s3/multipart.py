"""A large object in parts: begin, send, complete; or give up and leave nothing.

Owns part sizes, their order of acts and the doubt after a lost answer. Does not own single requests (client.py), nor a whole
put's repetition (retrying): only parts are repeated here, since their bytes are at hand and identical.
"""

import asyncio
import base64
import contextlib
import hashlib
import random
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from forebay_gateway.base import failpoints
from forebay_gateway.core.errors import Corrupt, ForebayError, NotFound, Unavailable
from forebay_gateway.tiers.base import PutOptions, Source
from forebay_gateway.tiers.retrying import Retries, RetryPolicy
from forebay_gateway.tiers.s3.body import Body
from forebay_gateway.tiers.s3.client import S3Client
from forebay_gateway.tiers.s3.errors import code_of
from forebay_gateway.tiers.s3.limit import AdaptiveLimit
from forebay_gateway.tiers.s3.parts import part_size
from forebay_gateway.tiers.window import Window
from forebay_wire.checksums import crc32c_of_chunks

# All parts of one transfer that are in memory at a time, where a single part is not larger already.
MEMORY_BYTES = 64 << 20

_PART_POLICY = RetryPolicy(attempts=4, first_s=0.2, cap_s=5.0, total_s=60.0)
_COMPLETE_POLICY = RetryPolicy(attempts=5, first_s=0.5, cap_s=5.0, total_s=120.0)
_ABORT_TIMEOUT_S = 15.0
# Repeating one request of the upload cannot help; the whole put begins anew.
_HOPELESS = frozenset({"NoSuchUpload", "InvalidPart", "InvalidPartOrder"})


def encode_crc(crc: int) -> str:
    """A CRC32C as S3 writes it: base64 of 4 bytes, big-endian."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode("ascii")


def full_object_crc(answer: dict[str, Any]) -> int | None:
    """The CRC32C of the whole object from an answer; None unless the store says that it is one of the full object."""
    text = answer.get("ChecksumCRC32C", "")
    if answer.get("ChecksumType") != "FULL_OBJECT" or not text or "-" in text:
        return None
    try:
        raw = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return int.from_bytes(raw, "big") if len(raw) == 4 else None


def check_echo(tier: str, key: str, sent: str | None, answer: dict[str, Any]) -> None:
    """Raise Corrupt where the store says that it received bytes of another checksum than the one sent with them."""
    echoed_crc = answer.get("ChecksumCRC32C")
    if sent is not None and echoed_crc not in (None, "", sent):
        raise Corrupt(
            "the object store received other bytes than were sent", tier=tier, key=key, sent=sent, received=echoed_crc
        )


@dataclass(slots=True)
class Upload:
    """One multipart upload. `full_crc`: the store takes and keeps a CRC32C of the full object (its probe proved it)."""

    client: S3Client
    limit: AdaptiveLimit
    key: str
    source: Source
    full_crc: bool
    id: str = ""
    may_be_left: bool = False  # on the store, after run() has failed
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)

    async def run(self, options: PutOptions) -> str:
        """The ETag of the complete object. After any failure nothing is left, as far as the store can be reached."""
        await self._create()
        try:
            if options.on_upload is not None:
                await options.on_upload(self.id)
            failpoints.hit("s3.upload_begun")
            await self._send(options)
            failpoints.hit("s3.before_complete")
            etag = await self._complete()
        except BaseException:
            await self._abandon()
            raise
        failpoints.hit("s3.completed")
        return etag

    async def _create(self) -> None:
        parameters: dict[str, Any] = {}
        if self.full_crc:
            parameters = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"}
        self.may_be_left = True  # a lost answer leaves an upload whose id nobody heard
        answer = await self.client.call("create_multipart_upload", self.key, **parameters)
        self.id = answer["UploadId"]

    async def _send(self, options: PutOptions) -> None:
        size = part_size(self.source.size, self.source.chunk_size, self.client.settings.part_size)
        width = max(1, min(self.client.settings.concurrency, MEMORY_BYTES // size))
        chunks = size // self.source.chunk_size
        async with Window(width) as window:
            for number, first in enumerate(range(0, len(self.source.chunk_crcs), chunks), start=1):
                await window.add(self._part(number, first, chunks, options))

    async def _part(self, number: int, first: int, chunks: int, options: PutOptions) -> None:
        retries = Retries(_PART_POLICY, self.client.clock, random.Random())
        crcs = self.source.chunk_crcs[first : first + chunks]

        async def send() -> int:
            async with self.limit.slot():
                body = Body([await self.source.read_chunk(first + index) for index in range(len(crcs))])
                await self._send_part(number, crcs, body)
                return len(body)

        while True:
            try:
                sent = await send()
                break
            except Unavailable as error:
                if code_of(error.__cause__) in _HOPELESS:
                    raise
                await retries.pause(error)
        failpoints.hit("s3.part_sent")
        if options.on_progress is not None:
            options.on_progress(sent)

    async def _send_part(self, number: int, crcs: tuple[int, ...], body: Body) -> None:
        checksum: dict[str, Any] = {}
        if self.full_crc:
            checksum["ChecksumCRC32C"] = encode_crc(crc32c_of_chunks(crcs, self.source.chunk_size, len(body)))
        answer = await self.client.call(
            "upload_part", self.key, body_bytes=len(body), UploadId=self.id, PartNumber=number, Body=body, **checksum
        )
        check_echo(self.client.tier, self.key, checksum.get("ChecksumCRC32C"), answer)
        self.parts[number] = {"PartNumber": number, "ETag": answer["ETag"], **checksum}

    async def _complete(self) -> str:
        """One request at a time; after a lost answer the object itself is asked before the request is made again."""
        retries = Retries(_COMPLETE_POLICY, self.client.clock, random.Random())
        while True:
            try:
                return await self._complete_once()
            except Unavailable as error:
                if (etag := await self._landed()) is not None:
                    return etag
                if code_of(error.__cause__) in _HOPELESS:
                    raise
                await retries.pause(error)

    async def _complete_once(self) -> str:
        parameters: dict[str, Any] = {}
        if self.full_crc:
            parameters = {"ChecksumCRC32C": encode_crc(self.source.crc32c), "ChecksumType": "FULL_OBJECT"}
        parts = [self.parts[number] for number in sorted(self.parts)]
        answer = await self.client.call(
            "complete_multipart_upload", self.key, UploadId=self.id, MultipartUpload={"Parts": parts}, **parameters
        )
        crc = full_object_crc(answer)
        if crc is not None and crc != self.source.crc32c:
            raise Corrupt("the object store put other bytes together", tier=self.client.tier, key=self.key, actual=f"{crc:08x}")
        return str(answer["ETag"])

    async def _landed(self) -> str | None:
        """The object's ETag if it is, beyond doubt, this upload's result."""
        try:
            answer = await self.client.call("head_object", self.key, ChecksumMode="ENABLED")
        except (NotFound, Unavailable):
            return None
        etag = str(answer.get("ETag", ""))
        if answer.get("ContentLength") != self.source.size:
            return None
        crc = full_object_crc(answer)
        same = crc == self.source.crc32c if crc is not None else etag.strip('"') == self._expected_etag()
        return etag if same else None

    def _expected_etag(self) -> str:
        """S3's ETag of a multipart object: MD5 of the parts' MD5s, and their number."""
        etags = [str(self.parts[number]["ETag"]).strip('"') for number in sorted(self.parts)]
        try:
            joined = bytes.fromhex("".join(etags))
        except ValueError:
            return ""
        return f"{hashlib.md5(joined, usedforsecurity=False).hexdigest()}-{len(etags)}"

    async def _abandon(self) -> None:
        """Best effort, also while being cancelled: what stays behind is swept by its recorded id, or by its key."""
        task = asyncio.ensure_future(abort(self.client, self.key, self.id))
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        with contextlib.suppress(ForebayError, TimeoutError):
            await asyncio.wait_for(asyncio.shield(task), _ABORT_TIMEOUT_S)
            self.may_be_left = False


async def abort(client: S3Client, key: str, upload_id: str) -> None:
    """Give an upload up; gone when it returns, also when it was not there."""
    try:
        await client.call("abort_multipart_upload", key, UploadId=upload_id)
    except ForebayError as error:
        if code_of(error.__cause__) != "NoSuchUpload":
            raise


async def sweep_uploads(client: S3Client, key: str) -> None:
    """Give up every upload of this key; none is there when it returns."""
    wanted = client.object_key(key)
    # Prefix is all one can ask for: the answer also names uploads of longer keys.
    async for upload in uploads_below(client, wanted):
        if upload["Key"] == wanted:
            await abort(client, key, upload["UploadId"])


async def uploads_below(client: S3Client, prefix: str) -> AsyncIterator[dict[str, Any]]:
    """Every upload whose key in the bucket begins with `prefix`, as the store describes it."""
    markers: dict[str, Any] = {}
    while True:
        answer = await client.call("list_multipart_uploads", Prefix=prefix, **markers)
        for upload in answer.get("Uploads", ()):
            yield upload
        markers = {"KeyMarker": answer.get("NextKeyMarker"), "UploadIdMarker": answer.get("NextUploadIdMarker")}
        if not answer.get("IsTruncated") or not all(markers.values()):
            return
