"""Trying again, once for all tiers: only what is Unavailable, jittered, bounded in time, never blindly.

Owns when and how often. Does not own what is worth a retry (the tiers' error tables decide that by raising Unavailable).
StorageFull is passed up at once: space does not return within a retry, and the operator must see it within seconds.
"""

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from forebay_gateway.base.clock import Clock
from forebay_gateway.core.errors import AlreadyExists, NotFound, Unavailable
from forebay_gateway.tiers.base import Capabilities, Listing, ObjectInfo, PutOptions, Source, StorageFull, Tier
from forebay_gateway.tiers.wrapper import TierWrapper, aclose

_PLAIN = PutOptions()

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Exponential from `first_s`, each wait jittered and at most `cap_s`; no attempt begins after `total_s`."""

    attempts: int = 5
    first_s: float = 0.1
    cap_s: float = 3.0
    total_s: float = 10.0

    def wait_s(self, failures: int, hint_s: float | None, rng: random.Random) -> float:
        """Seconds before the next attempt. A tier's own hint is honoured where it asks for more."""
        ceiling = min(self.cap_s, self.first_s * 2.0 ** (failures - 1))
        return max(rng.uniform(ceiling / 2, ceiling), hint_s or 0.0)


class Retries:
    """The failures of one act."""

    def __init__(self, policy: RetryPolicy, clock: Clock, rng: random.Random) -> None:
        self._policy, self._clock, self._rng = policy, clock, rng
        self._failures = 0
        self._end_s = clock.monotonic() + policy.total_s

    def progressed(self) -> None:
        """Bytes have come since the last failure: count and time begin anew."""
        self._failures = 0
        self._end_s = self._clock.monotonic() + self._policy.total_s

    async def pause(self, error: Unavailable) -> None:
        """Wait before the next attempt, or raise `error` where there must be none."""
        self._failures += 1
        wait_s = self._policy.wait_s(self._failures, error.retry_after_s, self._rng)
        out_of_time = self._clock.monotonic() + wait_s > self._end_s
        if isinstance(error, StorageFull) or self._failures >= self._policy.attempts or out_of_time:
            raise error
        await self._clock.sleep(wait_s)


async def run_retrying(call: Callable[[], Awaitable[T]], retries: Retries) -> T:
    """The result of `call`, which must be safe to repeat."""
    while True:
        try:
            return await call()
        except Unavailable as error:
            await retries.pause(error)


class RetryingTier(TierWrapper):
    """Repeats what may be repeated."""

    def __init__(self, inner: Tier, clock: Clock, policy: RetryPolicy | None = None, rng: random.Random | None = None) -> None:
        super().__init__(inner)
        self._clock = clock
        self._policy = policy or RetryPolicy()
        self._rng = rng or random.Random()

    def _retries(self) -> Retries:
        return Retries(self._policy, self._clock, self._rng)

    async def _run(self, call: Callable[[], Awaitable[T]]) -> T:
        return await run_retrying(call, self._retries())

    # probe is not repeated here: who starts a tier shows "away" at once and asks again at its own pace.
    async def probe(self) -> Capabilities:
        return await self.inner.probe()

    async def put(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        return await self._run(lambda: self.inner.put(key, source, options))

    async def verify(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        return await self._run(lambda: self.inner.verify(key, source, options))

    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        if not if_absent and if_match is None:
            return await self._run(lambda: self.inner.put_small(key, data))
        return await self._put_conditional(key, data, if_absent, if_match)

    async def _put_conditional(self, key: str, data: bytes, if_absent: bool, if_match: str | None) -> ObjectInfo:
        """After a lost answer nobody knows whether the write happened: look first, then decide."""
        retries = self._retries()
        in_doubt = False
        while True:
            try:
                return await self.inner.put_small(key, data, if_absent=if_absent, if_match=if_match)
            except AlreadyExists:
                # It may be our own earlier attempt that stands there.
                if in_doubt and (landed := await self._landed(key, data)) is not None:
                    return landed
                raise
            except Unavailable as error:
                in_doubt = True
                await retries.pause(error)
                if (landed := await self._landed(key, data)) is not None:
                    return landed

    async def _landed(self, key: str, data: bytes) -> ObjectInfo | None:
        try:
            found, info = await self.get_small(key)
        except NotFound:
            return None
        if found != data:
            return None
        await self._run(lambda: self.inner.settle(key))
        return info

    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> tuple[bytes, ObjectInfo]:
        return await self._run(lambda: self.inner.get_small(key, limit_bytes))

    async def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        retries = self._retries()
        end = offset + length
        while True:
            pieces = self.inner.read(key, offset, end - offset)
            try:
                async for piece in pieces:
                    offset += len(piece)
                    retries.progressed()
                    yield piece
                return
            except Unavailable as error:
                await retries.pause(error)
            finally:
                await aclose(pieces)

    async def head(self, key: str) -> ObjectInfo:
        return await self._run(lambda: self.inner.head(key))

    async def delete(self, key: str) -> None:
        await self._run(lambda: self.inner.delete(key))

    async def delete_many(self, keys: Sequence[str]) -> None:
        await self._run(lambda: self.inner.delete_many(keys))

    async def list(self, prefix: str) -> Listing:
        return await self._run(lambda: self.inner.list(prefix))

    async def point(self, key: str, target: str) -> None:
        await self._run(lambda: self.inner.point(key, target))

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self._run(lambda: self.inner.abort_upload(key, upload_id))

    async def sweep(self, key: str) -> None:
        await self._run(lambda: self.inner.sweep(key))
