"""What an object store can do, found out by doing it below `.forebay/probe/`. Nothing is believed from a version or a header.

Owns the trial and its cleaning up. The record it makes is what tier.py and multipart.py ask.
"""

import contextlib
import secrets
from dataclasses import dataclass, field
from typing import Any

from forebay_gateway.core.errors import AlreadyExists, Corrupt, ForebayError, InvalidArgument, NotFound, Unsupported
from forebay_gateway.core.layout import CONTROL_DIR
from forebay_gateway.tiers.base import Capabilities
from forebay_gateway.tiers.s3.body import Body
from forebay_gateway.tiers.s3.client import S3Client
from forebay_gateway.tiers.s3.errors import clock_skew_s
from forebay_gateway.tiers.s3.multipart import abort, encode_crc, full_object_crc, sweep_uploads
from forebay_gateway.tiers.s3.parts import MAX_PARTS, MIN_PART_BYTES
from forebay_wire.checksums import crc32c

# In Capabilities.notes where the store refuses a single put whose CRC32C is wrong.
PUT_CHECKSUM = "put_checksum"

# How a store may turn down what it does not know, and how it must turn down wrong bytes.
_LACKING = (Unsupported, InvalidArgument)
_REFUSED = (Corrupt, InvalidArgument)


@dataclass(slots=True)
class _Trial:
    client: S3Client
    directory: str = field(default_factory=lambda: f"{CONTROL_DIR}/probe/{secrets.token_hex(8)}")
    notes: dict[str, str] = field(default_factory=dict)
    keys: list[str] = field(default_factory=list)

    def key(self, name: str) -> str:
        key = f"{self.directory}/{name}"
        self.keys.append(key)
        return key

    async def put(self, key: str, data: bytes, **parameters: Any) -> str:
        answer = await self.client.call("put_object", key, Body=Body([memoryview(data)]), **parameters)
        return str(answer["ETag"])

    async def get(self, key: str) -> bytes:
        answer = await self.client.call("get_object", key)
        return await self.client.receive(key, answer, 1 << 20)


async def probe(client: S3Client, owner: str = "") -> Capabilities:
    """Raises Unavailable where the store is away, PermissionDenied for a wrong key, InvalidArgument for a wrong bucket."""
    skew_s = await _reach(client)
    trial = _Trial(client)
    if owner:  # what an earlier process of this node left when it was killed in the middle of its probe
        trial.directory = f"{CONTROL_DIR}/probe/{owner}"
        await _clean_earlier(trial)
    try:
        document = trial.key("document")
        etag = await _round_trip(trial, document)
        if await _put_checksum(trial):
            trial.notes[PUT_CHECKSUM] = "crc32c"
        listed = await _listed(trial, document)
        create, replace = await _conditional_create(trial, document), await _conditional_replace(trial, document, etag)
        multipart, full_crc = await _multipart(trial)
    finally:
        await _clean(trial)
    return Capabilities(
        conditional_create=create,
        conditional_replace=replace,
        server_checksum=full_crc,
        multipart=multipart,
        list_after_put=listed,
        links=False,
        direct_io=False,
        max_parts=MAX_PARTS,
        clock_skew_s=skew_s,
        notes=trial.notes,
    )


async def _reach(client: S3Client) -> float | None:
    """A listing first: unlike a HEAD its errors say what is wrong. Then the bucket, since some stores list a missing one."""
    await client.call("list_objects_v2", Prefix=client.object_prefix(CONTROL_DIR), MaxKeys=1)
    answer = await client.check_bucket()
    return clock_skew_s(answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}), client.clock.wall())


async def _round_trip(trial: _Trial, key: str) -> str:
    data = secrets.token_bytes(1000)
    etag = await trial.put(key, data)
    if await trial.get(key) != data:
        raise Corrupt("an object read back differs from what was written", tier=trial.client.tier, key=key)
    return etag


async def _put_checksum(trial: _Trial) -> bool:
    key, data = trial.key("checksum"), b"checked"
    try:
        await trial.put(key, data, ChecksumCRC32C=encode_crc(crc32c(data)))
    except _LACKING as error:
        trial.notes["no_put_checksum"] = str(error)
        return False
    try:
        await trial.put(key, b"damaged", ChecksumCRC32C=encode_crc(crc32c(data)))
    except _REFUSED:
        return await trial.get(key) == data
    trial.notes["no_put_checksum"] = "a wrong CRC32C was accepted"
    return False


async def _listed(trial: _Trial, key: str) -> bool:
    prefix = f"{trial.client.object_prefix(trial.directory)}"
    answer = await trial.client.call("list_objects_v2", Prefix=prefix, Delimiter="/")
    return trial.client.object_key(key) in [entry["Key"] for entry in answer.get("Contents", ())]


async def _conditional_create(trial: _Trial, existing: str) -> bool:
    before = await trial.get(existing)
    created = trial.key("created")
    try:
        await trial.put(created, b"created", IfNoneMatch="*")
    except (AlreadyExists, NotFound, *_LACKING) as error:
        trial.notes["no_conditional_create"] = str(error)
        return False
    return await _refused(trial, existing, before, "no_conditional_create", IfNoneMatch="*")


async def _conditional_replace(trial: _Trial, existing: str, etag: str) -> bool:
    try:
        await trial.put(existing, b"replaced", IfMatch=etag)
    except (AlreadyExists, NotFound, *_LACKING) as error:
        trial.notes["no_conditional_replace"] = str(error)
        return False
    return await _refused(trial, existing, b"replaced", "no_conditional_replace", IfMatch=etag)


async def _refused(trial: _Trial, key: str, before: bytes, note: str, **condition: str) -> bool:
    try:
        await trial.put(key, b"must not land", **condition)
    except AlreadyExists:
        return await trial.get(key) == before
    except (NotFound, *_LACKING) as error:
        trial.notes[note] = str(error)
        return False
    trial.notes[note] = "a condition that did not hold was ignored"
    return False


async def _multipart(trial: _Trial) -> tuple[bool, bool]:
    """Whether parts work at all, and whether the full object's CRC32C is checked, kept and shown with its type."""
    try:
        if await _parts(trial, full_crc=True):
            return True, True
    except (NotFound, Corrupt, *_LACKING) as error:
        trial.notes["no_server_checksum"] = str(error)
    try:
        await _parts(trial, full_crc=False)
    except (NotFound, Corrupt, *_LACKING) as error:
        trial.notes["no_multipart"] = str(error)
        return False, False
    return True, False


async def _parts(trial: _Trial, full_crc: bool) -> bool:
    """Two parts, so that the store has to combine their checksums."""
    client, key = trial.client, trial.key(f"parts-{full_crc}")
    bodies = [secrets.token_bytes(1024) * (MIN_PART_BYTES // 1024), secrets.token_bytes(1000)]
    whole = crc32c(bodies[1], crc32c(bodies[0]))
    kind: dict[str, Any] = {"ChecksumAlgorithm": "CRC32C", "ChecksumType": "FULL_OBJECT"} if full_crc else {}
    upload = (await client.attempt("create_multipart_upload", key, **kind))["UploadId"]
    try:
        parts = []
        for number, data in enumerate(bodies, start=1):
            checksum: dict[str, Any] = {"ChecksumCRC32C": encode_crc(crc32c(data))} if full_crc else {}
            body = Body([memoryview(data)])
            answer = await client.call("upload_part", key, UploadId=upload, PartNumber=number, Body=body, **checksum)
            parts.append({"PartNumber": number, "ETag": answer["ETag"], **checksum})
        return await _complete(trial, key, upload, parts, whole if full_crc else None)
    except BaseException:
        with contextlib.suppress(ForebayError):
            await abort(client, key, upload)
        raise


async def _complete(trial: _Trial, key: str, upload: str, parts: list[dict[str, Any]], crc: int | None) -> bool:
    async def complete(**checksum: Any) -> None:
        await trial.client.call("complete_multipart_upload", key, UploadId=upload, MultipartUpload={"Parts": parts}, **checksum)

    if crc is None:
        await complete()
        return False
    try:
        await complete(ChecksumCRC32C=encode_crc(crc ^ 1), ChecksumType="FULL_OBJECT")
    except _REFUSED:
        await complete(ChecksumCRC32C=encode_crc(crc), ChecksumType="FULL_OBJECT")
    else:
        trial.notes["no_server_checksum"] = "a wrong CRC32C of the full object was accepted"
        return False
    answer = await trial.client.call("head_object", key, ChecksumMode="ENABLED")
    if full_object_crc(answer) == crc:
        return True
    trial.notes["no_server_checksum"] = "the full object's CRC32C is not shown, or not with its type"
    return False


async def _clean_earlier(trial: _Trial) -> None:
    client, prefix = trial.client, trial.client.object_prefix(trial.directory)
    skip = len(client.object_prefix(""))
    answer = await client.call("list_objects_v2", Prefix=prefix)
    for entry in answer.get("Contents", ()):
        await client.call("delete_object", entry["Key"][skip:])
    for full_crc in (True, False):
        with contextlib.suppress(ForebayError):  # a store without multipart uploads has none left behind
            await sweep_uploads(client, f"{trial.directory}/parts-{full_crc}")


async def _clean(trial: _Trial) -> None:
    for key in trial.keys:
        with contextlib.suppress(ForebayError):
            await trial.client.call("delete_object", key)
