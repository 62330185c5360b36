"""Pace: token buckets for bytes and operations in front of a tier.

Owns waiting. `bandwidth` counts bytes sent to the tier, as a put takes them from its source: a restore is never slowed by the
pace of the drain. `iops` counts verbs, whatever requests each of them makes.
"""

from collections.abc import AsyncIterator, Sequence

from forebay_gateway.base.clock import Clock
from forebay_gateway.tiers.base import Listing, ObjectInfo, PutOptions, Source, Tier
from forebay_gateway.tiers.stream import Checksums, Publish, ShardStream
from forebay_gateway.tiers.wrapper import TierWrapper, aclose

_PLAIN = PutOptions()

# Waits are cut into slices, so that a large debt never becomes one sleep that outlives a changed situation.
_SLICE_S = 0.5
_SLEEP_S_MIN = 0.001  # a rest that rounding leaves of a debt
_BURST_S = 0.25


class TokenBucket:
    """`rate` tokens a second, saved up for a quarter of a second at most; None is no limit. A taker may overdraw; the next ones
    wait for it."""

    def __init__(self, rate: float | None, clock: Clock) -> None:
        self._clock = clock
        self._rate: float | None = None
        self._at_s = clock.monotonic()
        self._burst = self._tokens = 0.0
        self.set_rate(rate)
        self._tokens = self._burst

    def set_rate(self, rate: float | None) -> None:
        """From now on, also for who waits. What was saved up or owed stays, unless there was or will be no limit."""
        if rate is not None and rate <= 0:
            raise ValueError(f"a token bucket needs a rate above 0, not {rate}")
        self._refill()
        self._rate, self._burst = rate, max(1.0, (rate or 0.0) * _BURST_S)

    def _refill(self) -> None:
        now_s = self._clock.monotonic()
        if self._rate is None:
            self._tokens = 0.0
        else:
            self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self._rate)
        self._at_s = now_s

    async def take(self, tokens: float) -> None:
        """Wait until the bucket is not in debt, then take."""
        if self._rate is None:
            return
        self._refill()
        while self._rate is not None and self._tokens < 0:
            await self._clock.sleep(min(_SLICE_S, max(_SLEEP_S_MIN, -self._tokens / self._rate)))
            self._refill()
        self._tokens -= tokens


class _PacedSource:
    """A source that waits for tokens before each chunk."""

    def __init__(self, source: Source, bytes_bucket: TokenBucket) -> None:
        self._source = source
        self._bucket = bytes_bucket
        self.size = source.size
        self.chunk_size = source.chunk_size
        self.crc32c = source.crc32c
        self.chunk_crcs = source.chunk_crcs

    async def read_chunk(self, index: int) -> memoryview:
        await self._bucket.take(min(self.chunk_size, self.size - index * self.chunk_size))
        return await self._source.read_chunk(index)


class ThrottledTier(TierWrapper):
    """At most `bandwidth` bytes and `iops` verbs a second; None is no limit."""

    def __init__(self, inner: Tier, clock: Clock, bandwidth: int | None = None, iops: int | None = None) -> None:
        super().__init__(inner)
        self._bytes = TokenBucket(bandwidth, clock)
        self._verbs = TokenBucket(iops, clock)

    def set_limits(self, bandwidth: int | None, iops: int | None) -> None:
        """From now on, transfers under way included."""
        self._bytes.set_rate(bandwidth)
        self._verbs.set_rate(iops)

    async def _admit(self, size: int = 0) -> None:
        await self._verbs.take(1)
        if size:
            await self._bytes.take(size)

    async def put(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        await self._admit()
        return await self.inner.put(key, _PacedSource(source, self._bytes), options)

    async def verify(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        await self._admit()
        return await self.inner.verify(key, source, options)

    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        await self._admit(len(data))
        return await self.inner.put_small(key, data, if_absent=if_absent, if_match=if_match)

    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> tuple[bytes, ObjectInfo]:
        await self._admit()
        return await self.inner.get_small(key, limit_bytes)

    async def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        await self._admit()
        pieces = self.inner.read(key, offset, length)
        try:
            async for piece in pieces:
                yield piece
        finally:
            await aclose(pieces)

    async def head(self, key: str) -> ObjectInfo:
        await self._admit()
        return await self.inner.head(key)

    async def delete(self, key: str) -> None:
        await self._admit()
        await self.inner.delete(key)

    async def delete_many(self, keys: Sequence[str]) -> None:
        for _ in keys:  # each is an operation, though some tiers take many in one request
            await self._admit()
        await self.inner.delete_many(keys)

    async def list(self, prefix: str) -> Listing:
        await self._admit()
        return await self.inner.list(prefix)

    async def point(self, key: str, target: str) -> None:
        await self._admit()
        await self.inner.point(key, target)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._admit()
        await self.inner.abort_upload(key, upload_id)

    async def sweep(self, key: str) -> None:
        await self._admit()
        await self.inner.sweep(key)


class PacedStream(ShardStream):
    """A stream to a tier at the tier's pace; its client waits."""

    def __init__(self, inner: ShardStream, tier: ThrottledTier) -> None:
        self._inner, self._tier = inner, tier

    async def begin(self) -> None:
        await self._tier._admit()
        await self._inner.begin()

    async def write(self, crc: int, data: memoryview) -> None:
        await self._tier._bytes.take(len(data))
        await self._inner.write(crc, data)

    async def finish(self, proof: Checksums, publish: Publish) -> ObjectInfo:
        return await self._inner.finish(proof, publish)

    async def discard(self) -> bool:
        return await self._inner.discard()


def set_limits(tier: Tier, bandwidth: int | None, iops: int | None) -> None:
    """Of a tier with its decorators, as the factory makes them; a bare one has no pace."""
    while isinstance(tier, TierWrapper):
        if isinstance(tier, ThrottledTier):
            tier.set_limits(bandwidth, iops)
            return
        tier = tier.inner
