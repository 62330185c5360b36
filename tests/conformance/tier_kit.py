"""What the tier tests share: a source in memory, and the ways to open each tier."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from forebay.demo.seaweedfs import SeaweedFS
from forebay_gateway.base.clock import SystemClock
from forebay_gateway.tiers.base import Tier
from forebay_gateway.tiers.memory import MemoryTier
from forebay_gateway.tiers.metered import MeteredTier, TierMeter
from forebay_gateway.tiers.posix.tier import PosixTier
from forebay_gateway.tiers.retrying import RetryingTier, RetryPolicy
from forebay_gateway.tiers.s3.client import S3Settings
from forebay_gateway.tiers.s3.tier import S3Tier
from forebay_gateway.tiers.throttled import ThrottledTier
from forebay_wire.checksums import crc32c

CHUNK = 64 << 10


def blob(size: int, seed: int = 1) -> bytes:
    return random.Random(seed).randbytes(size)


class BytesSource:
    """A shard in memory. `wrong` claims other checksums than the bytes have; `reads` counts chunks handed out."""

    def __init__(self, data: bytes, chunk_size: int = CHUNK, wrong: bool = False) -> None:
        self._data = memoryview(data)
        self.size = len(data)
        self.chunk_size = chunk_size
        flip = 1 if wrong else 0
        self.crc32c = crc32c(data) ^ flip
        self.chunk_crcs = tuple(crc32c(self._data[at : at + chunk_size]) ^ flip for at in range(0, len(data), chunk_size))
        self.reads = 0
        self.on_read: Callable[[int], None] = lambda index: None

    async def read_chunk(self, index: int) -> memoryview:
        self.on_read(index)
        await asyncio.sleep(0)
        self.reads += 1
        return self._data[index * self.chunk_size : (index + 1) * self.chunk_size]


async def collect(pieces: AsyncIterator[bytes]) -> bytes:
    return b"".join([piece async for piece in pieces])


def decorated(tier: Tier) -> Tier:
    clock = SystemClock()
    paced = ThrottledTier(tier, clock, bandwidth=1 << 30, iops=100_000)
    policy = RetryPolicy(attempts=3, first_s=0.01, cap_s=0.05, total_s=5.0)
    return MeteredTier(RetryingTier(paced, clock, policy), TierMeter(clock))


def s3_settings(server: SeaweedFS, prefix: str, **changes: object) -> S3Settings:
    values = {"bucket": server.bucket, "prefix": prefix, "endpoint": server.endpoint, "region": "us-east-1"}
    return S3Settings(**{**values, "addressing": "path", **changes})  # type: ignore[arg-type]


def open_bare(kind: str, directory: Path, server: SeaweedFS | None, prefix: str) -> Tier:
    if kind == "memory":
        return MemoryTier("memory")
    if kind == "s3":
        assert server is not None
        return S3Tier("object", s3_settings(server, prefix))
    return PosixTier("pfs", directory / "root", direct=kind == "posix")
