"""The S3 tier under every fault of its matrix: the right class, the right number of requests, and nothing that is called done
and is not there, as a plain client sees it on the real server."""

import dataclasses
import itertools
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import pytest_asyncio

from conformance.tier_kit import BytesSource, blob, s3_settings
from faults.proxy import FOREVER, Fault, FaultyProxy, call_of, faulty_proxy
from faults.results import SOAK, cell
from faults.s3_matrix import ATTEMPTS, NO_BODY_SENT, Cell, Kind, cells, probe_cells
from forebay.demo.seaweedfs import SeaweedFS
from forebay_gateway.base.clock import SystemClock
from forebay_gateway.core.errors import ForebayError, Unavailable
from forebay_gateway.tiers.base import Capabilities, PutOptions, Tier
from forebay_gateway.tiers.chunks import verified_chunks
from forebay_gateway.tiers.retrying import RetryingTier, RetryPolicy
from forebay_gateway.tiers.s3 import errors as s3_errors
from forebay_gateway.tiers.s3 import multipart as s3_multipart
from forebay_gateway.tiers.s3.client import S3Timeouts
from forebay_gateway.tiers.s3.tier import S3Tier

pytestmark = [pytest.mark.s3, pytest.mark.asyncio(loop_scope="module")]

MIB = 1 << 20
POLICY = RetryPolicy(attempts=ATTEMPTS, first_s=0.01, cap_s=0.02, total_s=30.0)
# Refused connections do not count as attempts that a test can see, but they must outlast the port's closed time.
PATIENT = RetryPolicy(attempts=8, first_s=0.05, cap_s=0.1, total_s=30.0)
TIMEOUTS = S3Timeouts(connect_s=0.5, read_s=0.8, call_s=1.3, slowest_bytes_per_s=64 << 20)
PREFIX = "matrix"
LARGE, SMALL = blob(6 * MIB + 77), blob(300_001)

_numbers = itertools.count(1)


@dataclass
class Bench:
    """A tier behind the proxy, and the server without it."""

    server: SeaweedFS
    plain: Any
    proxy: FaultyProxy
    tier: S3Tier

    def bytes_of(self, key: str) -> bytes | None:
        """As plain botocore gets them; None for what is not there."""
        try:
            answer = self.plain.get_object(Bucket=self.server.bucket, Key=f"{PREFIX}/{key}")
        except self.plain.exceptions.NoSuchKey:
            return None
        with answer["Body"] as body:
            data: bytes = body.read()
        return data

    def uploads(self, key: str) -> list[str]:
        """Unfinished uploads of exactly this key."""
        found = self.plain.list_multipart_uploads(Bucket=self.server.bucket, Prefix=f"{PREFIX}/{key}").get("Uploads", [])
        return [entry["UploadId"] for entry in found]

    def put(self, key: str, data: bytes) -> None:
        self.plain.put_object(Bucket=self.server.bucket, Key=f"{PREFIX}/{key}", Body=data)

    def begin(self, key: str) -> str:
        upload: str = self.plain.create_multipart_upload(Bucket=self.server.bucket, Key=f"{PREFIX}/{key}")["UploadId"]
        return upload


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def bench(s3_server: SeaweedFS) -> AsyncIterator[Bench]:
    plain = s3_server.client()
    async with faulty_proxy(s3_server.endpoint) as proxy:
        tier = _tier(s3_server, proxy)
        await tier.probe()
        yield Bench(s3_server, plain, proxy, tier)
        await tier.close()
    plain.close()


def _tier(server: SeaweedFS, proxy: FaultyProxy) -> S3Tier:
    settings = s3_settings(server, PREFIX, part_size=5 * MIB, endpoint=proxy.endpoint, timeouts=TIMEOUTS)
    return S3Tier("object", settings)


class Trial:
    """One act: prepared behind the proxy's back, done through it, and looked at on the server."""

    def __init__(self, bench: Bench, tier: Tier, act: str) -> None:
        self.bench, self.tier, self.act = bench, tier, act
        self.key = f"{next(_numbers)}/object"
        self.upload = ""
        self.begun: list[str] = []  # uploads, as the catalog records them
        self.keys = [self.key, f"{self.key}-2", f"{self.key} & <3>"]  # of a deletion of many
        if act == "delete many":
            bench.tier._deletes_many = True  # whatever an earlier fault made it believe
            for key in self.keys:
                bench.put(key, SMALL)
        if act in ("delete", "list"):
            bench.put(self.key, SMALL)
        elif act in ("abort", "sweep"):
            self.upload = bench.begin(self.key)

    async def prepare(self) -> None:
        if self.act in ("verify", "get"):  # in parts: the server then shows a checksum of the full object
            await self.bench.tier.put(self.key, BytesSource(LARGE, chunk_size=MIB))
        elif self.act == "read":
            await self.bench.tier.put(self.key, BytesSource(SMALL))

    async def do(self) -> None:
        """Ends only where the tier says that it is done, and it is."""
        tier, key = self.tier, self.key
        match self.act:
            case "put" | "large":
                source = BytesSource(SMALL) if self.act == "put" else BytesSource(LARGE, chunk_size=MIB)
                if self.begun:  # as the drain does before it tries again: only the newest has a record
                    await tier.abort_upload(key, self.begun[-1])
                await tier.put(key, source, PutOptions(on_upload=self._record))
                await tier.verify(key, source)
            case "document" | "first write":
                await tier.put_small(key, SMALL)
            case "create":
                await tier.put_small(key, SMALL, if_absent=True)
            case "abort":
                await tier.abort_upload(key, self.upload)
            case "verify":
                await tier.verify(key, BytesSource(LARGE, chunk_size=MIB))
            case "get":
                data, _ = await tier.get_small(key)
                assert data == LARGE
            case "read":
                assert await self._read() == SMALL
            case "delete":
                await tier.delete(key)
            case "delete many":
                await tier.delete_many(self.keys)
            case "list":
                listing = await tier.list(key.rpartition("/")[0])
                assert [(info.key, info.size) for info in listing.objects] == [(key, len(SMALL))]
            case "sweep":
                await tier.sweep(key)
        self.check_done()

    async def _record(self, upload_id: str) -> None:
        self.begun.append(upload_id)

    async def _read(self) -> bytes:
        source = BytesSource(SMALL)
        chunks = verified_chunks(self.tier, self.key, source.size, source.chunk_size, source.chunk_crcs, 0, 5)
        async with aclosing(chunks):
            return b"".join([bytes(chunk) async for chunk in chunks])

    def check_done(self) -> None:
        if self.act in ("put", "document", "create", "first write", "large"):
            assert self.bench.bytes_of(self.key) == (LARGE if self.act == "large" else SMALL)
        elif self.act == "delete":
            assert self.bench.bytes_of(self.key) is None
        elif self.act == "delete many":
            assert [key for key in self.keys if self.bench.bytes_of(key) is not None] == []
        if self.act in ("abort", "sweep", "large"):
            assert self.bench.uploads(self.key) == [], "an upload was left behind"

    def check_whole(self) -> None:
        """After a failure: nothing, or all (the work was done and only its answer lost)."""
        assert self.bench.bytes_of(self.key) in (None, SMALL, LARGE)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_errors, "_SLOW_DOWN_S", 0.05)
    monkeypatch.setattr(s3_multipart, "_PART_POLICY", POLICY)
    monkeypatch.setattr(s3_multipart, "_COMPLETE_POLICY", POLICY)
    monkeypatch.setattr(s3_multipart, "_ABORT_TIMEOUT_S", 2.0)


@asynccontextmanager
async def _opened(bench: Bench, each: Cell, policy: RetryPolicy | None) -> AsyncIterator[Tier]:
    """Parts and completions have retries of their own: those are counted without others around them."""
    tier = bench.tier
    if each.act.call == "HeadBucket":  # asked for once, by a tier that has not seen its bucket
        tier = _tier(bench.server, bench.proxy)
        tier.capabilities = bench.tier.capabilities
    try:
        yield tier if policy is None else RetryingTier(tier, SystemClock(), policy)
    finally:
        if tier is not bench.tier:
            await tier.close()


@pytest.mark.parametrize("each", cells(), ids=str)
async def test_fault_that_lasts(bench: Bench, quick: None, each: Cell) -> None:
    own_retries = each.act.call in ("UploadPart", "CompleteMultipartUpload")
    with cell("s3 lasting", each):
        async with _opened(bench, each, None if own_retries else POLICY) as tier:
            trial = Trial(bench, tier, each.act.name)
            await trial.prepare()
            bench.proxy.forget()
            bench.proxy.faults = [each.fault(lasts=True)]
            try:
                await _fails_as_it_should(bench, trial, each)
            finally:
                await bench.proxy.clear()
            trial.check_whole()
            await _works_again(bench, tier, trial, each)


async def _works_again(bench: Bench, tier: Tier, trial: Trial, each: Cell) -> None:
    """When it is over, everything works; a busy machine may take longer over one answer than these timeouts allow."""
    for left in (3, 2, 1, 0):
        again = Trial(bench, tier, each.act.name) if each.act.name in ("create", "delete", "delete many", "abort") else trial
        try:
            await again.do()
            return
        except Unavailable:
            if not left:
                raise


async def _fails_as_it_should(bench: Bench, trial: Trial, each: Cell) -> None:
    expected = each.outcome
    if expected.error is None:
        await trial.do()
    else:
        with pytest.raises(ForebayError) as seen:
            await trial.do()
        assert type(seen.value) is expected.error, repr(seen.value)
        assert "tier=object" in str(seen.value)
    if expected.requests is not None:
        # Of a pooled connection that turns out dead the HTTP client makes one harmless repetition itself.
        dead = each.kind.name in ("reset-before", "reset-after", "lose") and each.act.call in NO_BODY_SENT
        most = expected.requests * (2 if dead and each.act.call != "CreateMultipartUpload" else 1)
        assert expected.requests <= _struck(bench.proxy, each) <= most


def _struck(proxy: FaultyProxy, each: Cell) -> int:
    """Requests that the fault was meant for."""
    if each.act.call == "UploadPart":
        return proxy.count("partNumber=2")
    return proxy.calls.count(each.act.call)


@pytest.mark.parametrize("each", [each for each in cells() if each.outcome.helps][:: 1 if SOAK else 3], ids=str)
async def test_fault_that_strikes_once_is_overcome(bench: Bench, quick: None, each: Cell) -> None:
    policy = PATIENT if each.kind.name == "refused" else POLICY
    with cell("s3 once", each):
        async with _opened(bench, each, policy) as tier:
            trial = Trial(bench, tier, each.act.name)
            await trial.prepare()
            bench.proxy.forget()
            bench.proxy.faults = [each.fault(lasts=False)]
            try:
                await trial.do()
                assert bench.proxy.faults[0].times == 0, "the fault has not struck"
                if each.kind.name != "refused":
                    assert _struck(bench.proxy, each) <= 2
            finally:
                await bench.proxy.clear()


@pytest.mark.parametrize("lasts", [False, True], ids=["once", "lasting"])
@pytest.mark.parametrize(("call", "kind"), probe_cells(), ids=lambda value: getattr(value, "name", value))
async def test_probe_never_claims_more_than_is_true(bench: Bench, quick: None, call: str, kind: Kind, lasts: bool) -> None:
    """A fault during the probe: it fails as a tier does, or what it says holds. What else it raised would end the gateway."""
    with cell("s3 probe", call, kind.name, "lasting" if lasts else "once"):
        tier = _tier(bench.server, bench.proxy)
        bench.proxy.faults = [kind.fault(lambda request: call_of(request) == call, FOREVER if lasts else 1)]
        try:
            found: Capabilities | None = await tier.probe()
        except ForebayError:
            found = None
        finally:
            await bench.proxy.clear()
        assert (tier.capabilities is None) == (found is None)
        await tier.probe()
        assert tier.capabilities == _without_skew(tier.capabilities, bench.tier.capabilities)
        await tier.close()


async def test_probe_does_not_believe_a_store_that_shows_another_checksum(bench: Bench) -> None:
    """It takes the right one and refuses a wrong one, but what it shows afterwards proves nothing."""
    tier = _tier(bench.server, bench.proxy)
    bench.proxy.faults = [Fault("checksum", lambda request: call_of(request) == "HeadObject", FOREVER)]
    try:
        found = await tier.probe()
    finally:
        await bench.proxy.clear()
        await tier.close()
    assert not found.server_checksum and "not shown" in found.notes["no_server_checksum"]
    assert bench.tier.capabilities is not None and bench.tier.capabilities.server_checksum


def _without_skew(one: Capabilities | None, other: Capabilities | None) -> Capabilities:
    assert one is not None
    assert other is not None
    return dataclasses.replace(other, clock_skew_s=one.clock_skew_s)
