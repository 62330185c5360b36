"""Counting what a tier does: calls, bytes, errors by kind and latency, for each verb.

Owns plain counters. Does not own how they are shown (base/metrics, rpc).
"""

from bisect import bisect_left
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from forebay_gateway.base.clock import Clock
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.tiers.base import Capabilities, Listing, ObjectInfo, PutOptions, Source, Tier
from forebay_gateway.tiers.wrapper import TierWrapper, aclose

_PLAIN = PutOptions()

LATENCY_BOUNDS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(slots=True)
class VerbCounters:
    """One verb of one tier. `latency_counts[i]` counts calls of at most LATENCY_BOUNDS_S[i] s and above the bound before;
    the last counts all longer ones."""

    calls: int = 0
    bytes: int = 0
    errors: dict[str, int] = field(default_factory=dict)  # by ForebayError.kind; "cancelled", "internal"
    latency_s_total: float = 0.0
    latency_s_max: float = 0.0
    latency_counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS_S) + 1))


class TierMeter:
    """All verbs of one tier."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.verbs: dict[str, VerbCounters] = {}

    @contextmanager
    def measure(self, verb: str) -> Iterator[VerbCounters]:
        """Count one call; the body adds bytes."""
        counters = self.verbs.setdefault(verb, VerbCounters())
        start_s = self._clock.monotonic()
        try:
            yield counters
        except Exception as error:
            kind = error.kind if isinstance(error, ForebayError) else "internal"
            counters.errors[kind] = counters.errors.get(kind, 0) + 1
            raise
        except BaseException:
            counters.errors["cancelled"] = counters.errors.get("cancelled", 0) + 1
            raise
        finally:
            taken_s = self._clock.monotonic() - start_s
            counters.calls += 1
            counters.latency_s_total += taken_s
            counters.latency_s_max = max(counters.latency_s_max, taken_s)
            counters.latency_counts[bisect_left(LATENCY_BOUNDS_S, taken_s)] += 1


class MeteredTier(TierWrapper):
    """Counts into `meter`. Bytes of a put are those of the object, sent once; bytes of a read those handed out."""

    def __init__(self, inner: Tier, meter: TierMeter) -> None:
        super().__init__(inner)
        self.meter = meter

    async def probe(self) -> Capabilities:
        with self.meter.measure("probe"):
            return await self.inner.probe()

    async def put(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        with self.meter.measure("put") as counters:
            info = await self.inner.put(key, source, options)
            counters.bytes += info.size
            return info

    async def verify(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        with self.meter.measure("verify") as counters:
            info = await self.inner.verify(key, source, options)
            counters.bytes += info.size
            return info

    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        with self.meter.measure("put_small") as counters:
            info = await self.inner.put_small(key, data, if_absent=if_absent, if_match=if_match)
            counters.bytes += info.size
            return info

    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> tuple[bytes, ObjectInfo]:
        with self.meter.measure("get_small") as counters:
            data, info = await self.inner.get_small(key, limit_bytes)
            counters.bytes += len(data)
            return data, info

    async def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        with self.meter.measure("read") as counters:
            pieces = self.inner.read(key, offset, length)
            try:
                async for piece in pieces:
                    counters.bytes += len(piece)
                    yield piece
            finally:
                await aclose(pieces)

    async def head(self, key: str) -> ObjectInfo:
        with self.meter.measure("head"):
            return await self.inner.head(key)

    async def delete(self, key: str) -> None:
        with self.meter.measure("delete"):
            await self.inner.delete(key)

    async def delete_many(self, keys: Sequence[str]) -> None:
        with self.meter.measure("delete_many"):
            await self.inner.delete_many(keys)

    async def list(self, prefix: str) -> Listing:
        with self.meter.measure("list"):
            return await self.inner.list(prefix)

    async def point(self, key: str, target: str) -> None:
        with self.meter.measure("point"):
            await self.inner.point(key, target)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        with self.meter.measure("abort_upload"):
            await self.inner.abort_upload(key, upload_id)

    async def sweep(self, key: str) -> None:
        with self.meter.measure("sweep"):
            await self.inner.sweep(key)
