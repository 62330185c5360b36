"""The S3 tier where stores are more than their contract: large objects, lost answers, wrong keys, throttling. All against the
real server, some through a proxy that breaks answers."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from aiohttp import web

from conformance.tier_kit import BytesSource, blob, collect, s3_settings
from faults.proxy import Fault, FaultyProxy, faulty_proxy
from forebay.demo.seaweedfs import SeaweedFS, free_ports
from forebay_gateway.base.clock import SystemClock
from forebay_gateway.core.errors import (
    AlreadyExists,
    Corrupt,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from forebay_gateway.tiers.base import Capabilities, PutOptions
from forebay_gateway.tiers.retrying import RetryingTier, RetryPolicy
from forebay_gateway.tiers.s3 import multipart as s3_multipart
from forebay_gateway.tiers.s3.tier import S3Tier
from forebay_wire.checksums import crc32c

pytestmark = pytest.mark.s3

MIB = 1 << 20
PART = 5 * MIB
QUICK = RetryPolicy(attempts=3, first_s=0.01, cap_s=0.05, total_s=20.0)


@pytest.fixture
def bare(s3_server: SeaweedFS, prefix: str) -> S3Tier:
    return S3Tier("object", s3_settings(s3_server, prefix, part_size=PART))


@pytest.fixture
async def s3(bare: S3Tier, proved: dict[str, Capabilities]) -> AsyncIterator[S3Tier]:
    await _prove(bare, proved)
    yield bare
    await bare.close()


@pytest.fixture
async def proxied(
    s3_server: SeaweedFS, prefix: str, proved: dict[str, Capabilities]
) -> AsyncIterator[tuple[S3Tier, FaultyProxy]]:
    async with faulty_proxy(s3_server.endpoint) as proxy:
        tier = S3Tier("object", s3_settings(s3_server, prefix, part_size=PART, endpoint=proxy.endpoint))
        await _prove(tier, proved)
        proxy.seen.clear()
        yield tier, proxy
        await tier.close()


async def _prove(tier: S3Tier, proved: dict[str, Capabilities]) -> None:
    if "s3" not in proved:
        proved["s3"] = await tier.probe()
    tier.capabilities = proved["s3"]


def _uploads(server: SeaweedFS, prefix: str) -> list[Any]:
    client = server.client()
    found = client.list_multipart_uploads(Bucket=server.bucket).get("Uploads", [])
    client.close()
    return [entry for entry in found if entry["Key"].startswith(prefix)]


def _completes(request: web.Request) -> bool:
    return request.method == "POST" and "uploadId" in request.query


async def test_probe_proves_what_the_server_can(bare: S3Tier) -> None:
    found = await bare.probe()
    assert (found.multipart, found.server_checksum, found.conditional_create, found.conditional_replace) == (True,) * 4
    assert found.list_after_put
    assert found.clock_skew_s is not None
    assert abs(found.clock_skew_s) < 5
    assert found.notes == {"put_checksum": "crc32c"}
    await bare.close()


async def test_large_object_in_parts(s3: S3Tier, s3_server: SeaweedFS, prefix: str) -> None:
    data = blob(70 * MIB + 12_345)
    source = BytesSource(data, chunk_size=MIB)
    uploads: list[tuple[str, int]] = []
    sent: list[int] = []

    async def record(upload_id: str) -> None:
        uploads.append((upload_id, source.reads))

    info = await s3.put("run/large", source, PutOptions(record, sent.append))
    ((upload_id, read_before),) = uploads
    assert upload_id
    assert read_before == 0, "the upload's id must be recorded before its first part is read"
    assert (sum(sent), len(sent), info.size) == (len(data), 15, len(data))
    proof = await s3.verify("run/large", source)
    assert (proof.crc32c, proof.tag) == (source.crc32c, info.tag)
    assert await collect(s3.read("run/large", 0, len(data))) == data
    assert _uploads(s3_server, prefix) == []


@pytest.mark.parametrize("parts", [2, 4])
async def test_memory_of_an_upload_is_bounded(s3: S3Tier, monkeypatch: pytest.MonkeyPatch, parts: int) -> None:
    """By bytes, and by the tier's concurrency (4) where parts are small."""
    monkeypatch.setattr(s3_multipart, "MEMORY_BYTES", parts * PART if parts < 4 else 100 * PART)
    source = BytesSource(blob(60 * MIB), chunk_size=MIB)
    sent = most = 0

    def progress(size: int) -> None:
        nonlocal sent
        sent += size

    def look(index: int) -> None:
        nonlocal most
        most = max(most, source.reads * MIB - sent)

    source.on_read = look
    await s3.put("bounded", source, PutOptions(on_progress=progress))
    assert PART < most <= parts * PART


async def test_parts_of_wrong_bytes_are_refused_and_leave_nothing(s3: S3Tier, s3_server: SeaweedFS, prefix: str) -> None:
    with pytest.raises(Corrupt):
        await s3.put("bad", BytesSource(blob(12 * MIB), chunk_size=MIB, wrong=True))
    with pytest.raises(NotFound):
        await s3.head("bad")
    assert _uploads(s3_server, prefix) == []


async def test_cancelled_upload_leaves_nothing(s3: S3Tier, s3_server: SeaweedFS, prefix: str) -> None:
    source = BytesSource(blob(20 * MIB), chunk_size=MIB)
    began = asyncio.Event()

    async def record(upload_id: str) -> None:
        began.set()

    task = asyncio.create_task(s3.put("cancelled", source, PutOptions(on_upload=record)))
    await began.wait()
    await asyncio.sleep(0.02)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert _uploads(s3_server, prefix) == []


async def test_recorded_upload_can_be_given_up(s3: S3Tier, s3_server: SeaweedFS, prefix: str) -> None:
    upload = (await s3.client.call("create_multipart_upload", "orphan"))["UploadId"]
    assert len(_uploads(s3_server, prefix)) == 1
    for _ in range(2):
        await s3.abort_upload("orphan", upload)
        assert _uploads(s3_server, prefix) == []


@pytest.mark.parametrize("shift_s", [-2 * 86_400, 2 * 86_400])
async def test_the_age_of_an_upload_is_the_store_s(s3: S3Tier, monkeypatch: pytest.MonkeyPatch, shift_s: int) -> None:
    """A machine whose clock is days ahead would take another one's upload for old."""
    await s3.client.call("create_multipart_upload", "d/begun")
    now_s = time.time()
    monkeypatch.setattr(s3.client.clock, "wall", lambda: now_s + shift_s, raising=False)
    (found,) = await s3.leftovers("d")
    assert found.age_s < 3600
    await s3.abort_upload(found.key, found.id)


async def test_without_server_checksums_everything_is_read_back(s3: S3Tier) -> None:
    assert s3.capabilities is not None
    s3.capabilities = dataclasses.replace(s3.capabilities, server_checksum=False, notes={})
    data = bytearray(blob(11 * MIB))
    await s3.put("plain", BytesSource(bytes(data), chunk_size=MIB))
    assert (await s3.head("plain")).crc32c is None
    await s3.verify("plain", BytesSource(bytes(data), chunk_size=MIB))
    data[10 * MIB + 3] ^= 0x40
    with pytest.raises(Corrupt):
        await s3.verify("plain", BytesSource(bytes(data), chunk_size=MIB))
    await s3.put_small("doc", b"document")
    assert (await s3.get_small("doc"))[0] == b"document"


async def test_composite_checksum_proves_nothing(s3: S3Tier, s3_server: SeaweedFS, prefix: str) -> None:
    data = blob(6 * MIB)
    client, where = s3_server.client(), {"Bucket": s3_server.bucket, "Key": f"{prefix}/composite"}
    upload = client.create_multipart_upload(**where, ChecksumAlgorithm="CRC32C")["UploadId"]
    crc = s3_multipart.encode_crc(BytesSource(data).crc32c)
    part = client.upload_part(**where, UploadId=upload, PartNumber=1, Body=data, ChecksumCRC32C=crc)
    parts = [{"PartNumber": 1, "ETag": part["ETag"], "ChecksumCRC32C": crc}]
    client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})
    assert client.head_object(**where, ChecksumMode="ENABLED")["ChecksumCRC32C"].endswith("-1")
    client.close()
    assert (await s3.head("composite")).crc32c is None
    await s3.verify("composite", BytesSource(data, chunk_size=MIB))


async def test_conditions_that_were_not_proved_are_unsupported(s3: S3Tier) -> None:
    info = await s3.put_small("doc", b"1")
    s3.capabilities = None
    with pytest.raises(Unsupported):
        await s3.put_small("new", b"1", if_absent=True)
    with pytest.raises(Unsupported):
        await s3.put_small("doc", b"2", if_match=info.tag)


@pytest.mark.parametrize(("name", "value"), [("AWS_ACCESS_KEY_ID", "nobody"), ("AWS_SECRET_ACCESS_KEY", "wrong")])
async def test_wrong_key_is_denied(bare: S3Tier, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(PermissionDenied, match=r"InvalidAccessKeyId|SignatureDoesNotMatch"):
        await bare.probe()
    for act in (bare.head("x"), bare.put_small("x", b"1"), bare.get_small("x"), bare.list("")):
        with pytest.raises(PermissionDenied):
            await act
    await bare.close()


async def test_no_key_at_all_is_denied(bare: S3Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("HOME", "/nonexistent")
    with pytest.raises(PermissionDenied, match="no credentials"):
        await bare.probe()
    await bare.close()


async def test_wrong_bucket_is_neither_absence_nor_made(s3_server: SeaweedFS, prefix: str) -> None:
    tier = S3Tier("object", s3_settings(s3_server, prefix, bucket="no-such-bucket"))
    for act in (
        tier.probe(),
        tier.head("x"),
        tier.get_small("x"),
        tier.put_small("x", b"1"),
        tier.put("x", BytesSource(b"1")),
        tier.verify("x", BytesSource(b"1")),
    ):
        with pytest.raises(InvalidArgument, match="bucket does not exist"):
            await act
    client = s3_server.client()
    assert "no-such-bucket" not in [bucket["Name"] for bucket in client.list_buckets()["Buckets"]]
    client.close()
    await tier.close()


async def test_no_server_is_unavailable(s3_server: SeaweedFS, prefix: str) -> None:
    (port,) = free_ports(1)
    tier = S3Tier("object", s3_settings(s3_server, prefix, endpoint=f"http://127.0.0.1:{port}"))
    for act in (
        tier.probe(),
        tier.head("x"),
        tier.get_small("x"),
        tier.put_small("x", b"1"),
        tier.put("x", BytesSource(b"1")),
        tier.list("x"),
        tier.delete("x"),
        collect(tier.read("x", 0, 1)),
    ):
        with pytest.raises(Unavailable):
            await act
    await tier.close()


async def test_cancelled_reads_leave_no_connection_taken(s3: S3Tier) -> None:
    data = blob(12 * MIB)
    await s3.put("x", BytesSource(data, chunk_size=MIB))

    async def read_some() -> None:
        async for _ in s3.read("x", 0, len(data)):
            await asyncio.sleep(0.002)

    for turn in range(20):
        tasks = [asyncio.create_task(read_some()) for _ in range(10)]
        await asyncio.sleep(0.005 * (turn % 7))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    # More than the pool holds: every place that a cancelled read kept would be missed here.
    async with asyncio.timeout(10):
        await asyncio.gather(*(s3.head("x") for _ in range(40)))
    (session,) = s3.client._client._endpoint.http_session._sessions.values()
    assert not session.connector._acquired


# Broken answers


async def test_lost_answer_to_complete_is_found_done(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    tier, proxy = proxied
    proxy.faults = [Fault("lose", _completes)]
    source = BytesSource(blob(11 * MIB), chunk_size=MIB)
    await tier.put("x", source)
    assert sum(each.startswith("POST") and "uploadId" in each for each in proxy.seen) == 1, "completed blindly twice"
    await tier.verify("x", source)


async def test_no_such_upload_after_completion_is_success(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    tier, proxy = proxied
    proxy.faults = [Fault("answer", _completes, status=404, code="NoSuchUpload", after=True)]
    source = BytesSource(blob(11 * MIB), chunk_size=MIB)
    await tier.put("x", source)
    await tier.verify("x", source)


async def test_no_such_upload_beside_another_object_is_no_success(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    tier, proxy = proxied
    await tier.put("x", BytesSource(blob(11 * MIB, 1), chunk_size=MIB))
    proxy.faults = [Fault("answer", _completes, status=404, code="NoSuchUpload")]
    with pytest.raises(Unavailable):
        await tier.put("x", BytesSource(blob(11 * MIB, 2), chunk_size=MIB))
    await tier.verify("x", BytesSource(blob(11 * MIB, 1), chunk_size=MIB))


async def test_error_inside_a_200_is_an_error(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    tier, proxy = proxied
    proxy.faults = [Fault("answer", _completes, status=200, code="InternalError")]
    source = BytesSource(blob(11 * MIB), chunk_size=MIB)
    await tier.put("x", source)
    assert proxy.faults[0].times == 0
    await tier.verify("x", source)


async def test_error_inside_every_200_fails_and_leaves_nothing(
    proxied: tuple[S3Tier, FaultyProxy], s3_server: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, proxy = proxied
    monkeypatch.setattr(s3_multipart, "_COMPLETE_POLICY", QUICK)
    proxy.faults = [Fault("answer", _completes, status=200, code="InternalError", times=99)]
    with pytest.raises(Unavailable):
        await tier.put("x", BytesSource(blob(11 * MIB), chunk_size=MIB))
    with pytest.raises(NotFound):
        await tier.head("x")
    assert _uploads(s3_server, prefix) == []


async def test_part_that_breaks_is_sent_again_alike(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    tier, proxy = proxied
    proxy.faults = [Fault("refuse", lambda request: request.query.get("partNumber") == "2", times=2)]
    source = BytesSource(blob(16 * MIB), chunk_size=MIB)
    await tier.put("x", source)
    assert proxy.count("partNumber=2") == 3
    assert proxy.count("partNumber=1") == 1
    await tier.verify("x", source)


async def test_part_that_never_arrives_fails_the_put_and_leaves_nothing(
    proxied: tuple[S3Tier, FaultyProxy], s3_server: SeaweedFS, prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier, proxy = proxied
    monkeypatch.setattr(s3_multipart, "_PART_POLICY", QUICK)
    proxy.faults = [Fault("refuse", lambda request: request.query.get("partNumber") == "3", times=99)]
    with pytest.raises(Unavailable):
        await tier.put("x", BytesSource(blob(21 * MIB), chunk_size=MIB))
    assert _uploads(s3_server, prefix) == []


async def test_lost_answer_to_a_conditional_create_is_our_own(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    tier, proxy = proxied
    retrying = RetryingTier(tier, SystemClock(), QUICK)
    proxy.faults = [Fault("lose", lambda request: request.method == "PUT")]
    info = await retrying.put_small("doc", b"mine", if_absent=True)
    assert info.tag == (await tier.head("doc")).tag
    with pytest.raises(AlreadyExists):
        await retrying.put_small("doc", b"other", if_absent=True)


async def test_lost_request_of_a_conditional_create_is_repeated(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    tier, proxy = proxied
    proxy.faults = [Fault("refuse", lambda request: request.method == "PUT")]
    await RetryingTier(tier, SystemClock(), QUICK).put_small("doc", b"mine", if_absent=True)
    assert (await tier.get_small("doc"))[0] == b"mine"


async def test_broken_reads_go_on_where_they_stopped(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    tier, proxy = proxied
    data = blob(4 * MIB)
    await tier.put("x", BytesSource(data, chunk_size=MIB))
    proxy.faults = [Fault("cut", lambda request: request.method == "GET", times=4)]
    assert await collect(RetryingTier(tier, SystemClock(), QUICK).read("x", 0, len(data))) == data
    proxy.faults = [Fault("cut", lambda request: request.method == "GET")]
    with pytest.raises(Unavailable):
        await collect(tier.read("x", 0, len(data)))


async def test_throttling_carries_its_retry_time(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    tier, proxy = proxied
    proxy.faults = [Fault("answer", lambda request: True, headers={"Retry-After": "7"}), Fault("answer", lambda request: True)]
    with pytest.raises(Unavailable, match="slow down") as seen:
        await tier.put("x", BytesSource(b"1"))
    assert seen.value.retry_after_s == 7
    with pytest.raises(Unavailable) as seen:
        await tier.get_small("x")
    assert seen.value.retry_after_s == 1


async def test_no_checksum_goes_out_that_nobody_asked_for(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    """botocore's own, in trailers too, are refused by stores that know none; the bytes are compared with ours all the same."""
    tier, proxy = proxied
    assert tier.capabilities is not None
    tier.capabilities = dataclasses.replace(tier.capabilities, server_checksum=False, notes={})
    proxy.headers.clear()
    small, large = BytesSource(blob(300_001)), BytesSource(blob(6 * MIB), chunk_size=MIB)
    for key, source in (("small", small), ("large", large)):
        await tier.put(key, source)
        await tier.verify(key, source)
    await tier.put_small("document", b"{}")
    assert (await tier.get_small("document"))[0] == b"{}"
    await tier.delete("document")
    calls = {call for call, _ in proxy.headers}
    assert calls >= {"PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "GetObject", "DeleteObject"}
    for call, headers in proxy.headers:
        own = [name for name in headers if name.lower().startswith(("x-amz-checksum", "x-amz-sdk-checksum", "x-amz-trailer"))]
        asks = call == "HeadObject" or (call == "GetObject" and "Range" not in headers)  # for what the store may know
        assert own == ["x-amz-checksum-mode"] * asks, (call, own)
        assert "aws-chunked" not in headers.get("Content-Encoding", ""), call
    with pytest.raises(Corrupt):
        await tier.verify("small", BytesSource(blob(300_001, 2)))


async def test_bodies_are_signed_only_when_asked(s3_server: SeaweedFS, prefix: str) -> None:
    async with faulty_proxy(s3_server.endpoint) as proxy:
        for signed in (False, True):
            tier = S3Tier("object", s3_settings(s3_server, prefix, endpoint=proxy.endpoint, sign_payload=signed))
            proxy.hashes.clear()
            await tier.put("x", BytesSource(blob(100_000)))
            assert (proxy.hashes[-1] == "UNSIGNED-PAYLOAD") is not signed
            await tier.verify("x", BytesSource(blob(100_000)))
            await tier.close()


async def test_bare_404_from_something_else_is_not_absence(proxied: tuple[S3Tier, FaultyProxy]) -> None:
    """A misrouted endpoint answers 404 to everything: that is no word about a key."""
    tier, proxy = proxied
    proxy.faults = [Fault("answer", lambda request: True, status=404, code="", times=99)]
    for act in (tier.head("x"), tier.get_small("x"), collect(tier.read("x", 0, 5)), tier.list("x"), tier.delete("x")):
        with pytest.raises(InvalidArgument, match="bucket does not exist"):
            await act


async def test_the_server_s_checksum_is_compared_with_the_source_s(s3: S3Tier) -> None:
    data = blob(11 * MIB)  # in parts: of those it keeps one over the whole object
    await s3.put("x", BytesSource(data))
    assert (await s3.verify("x", BytesSource(data))).crc32c == crc32c(data)
    with pytest.raises(Corrupt, match="checksum differs"):
        await s3.verify("x", BytesSource(data, wrong=True))


async def test_a_document_that_arrives_damaged_is_not_believed(s3: S3Tier, monkeypatch: pytest.MonkeyPatch) -> None:
    await s3.put_small("doc", b"a document")
    real, info = s3.client.receive, s3._info

    async def damaged(*arguments: Any) -> bytes:
        data = await real(*arguments)
        return bytes([data[0] ^ 1]) + data[1:]

    told = crc32c(b"a document")  # what a server says that keeps checksums of documents too
    monkeypatch.setattr(s3, "_info", lambda key, answer: dataclasses.replace(info(key, answer), crc32c=told))
    assert (await s3.get_small("doc"))[0] == b"a document"
    monkeypatch.setattr(s3.client, "receive", damaged)
    with pytest.raises(Unavailable, match="arrived damaged"):
        await s3.get_small("doc")
