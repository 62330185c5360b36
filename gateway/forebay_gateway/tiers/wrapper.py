"""A tier around another tier: hands every verb on unchanged. The decorators override what they change.

Owns delegation. Capabilities are the inner tier's, in both directions, so a record set from outside reaches the bottom.
"""

from collections.abc import AsyncIterator, Sequence

from forebay_gateway.tiers.base import Capabilities, Leftover, Listing, ObjectInfo, PutOptions, Source, Tier

_PLAIN = PutOptions()


class TierWrapper(Tier):
    """Base of the decorators."""

    def __init__(self, inner: Tier) -> None:
        # Not super().__init__: it would reset the capabilities that the inner tier may already have.
        self.inner = inner
        self.name = inner.name

    @property
    def kind(self) -> str:  # type: ignore[override]
        """The inner tier's."""
        return self.inner.kind

    @property
    def lists_uploads_at_once(self) -> bool:  # type: ignore[override]
        """The inner tier's."""
        return self.inner.lists_uploads_at_once

    @property
    def capabilities(self) -> Capabilities | None:
        """The inner tier's."""
        return self.inner.capabilities

    @capabilities.setter
    def capabilities(self, value: Capabilities | None) -> None:
        self.inner.capabilities = value

    @property
    def reads_at_once(self) -> int:
        """The inner tier's."""
        return self.inner.reads_at_once

    async def probe(self) -> Capabilities:
        return await self.inner.probe()

    async def put(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        return await self.inner.put(key, source, options)

    async def verify(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        return await self.inner.verify(key, source, options)

    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        return await self.inner.put_small(key, data, if_absent=if_absent, if_match=if_match)

    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> tuple[bytes, ObjectInfo]:
        return await self.inner.get_small(key, limit_bytes)

    def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        return self.inner.read(key, offset, length)

    async def head(self, key: str) -> ObjectInfo:
        return await self.inner.head(key)

    async def delete(self, key: str) -> None:
        await self.inner.delete(key)

    async def delete_many(self, keys: Sequence[str]) -> None:
        await self.inner.delete_many(keys)

    async def list(self, prefix: str) -> Listing:
        return await self.inner.list(prefix)

    async def point(self, key: str, target: str) -> None:
        await self.inner.point(key, target)

    async def settle(self, key: str) -> None:
        await self.inner.settle(key)

    async def abort_upload(self, key: str, upload_id: str) -> None:
        await self.inner.abort_upload(key, upload_id)

    async def sweep(self, key: str) -> None:
        await self.inner.sweep(key)

    async def leftovers(self, prefix: str) -> tuple[Leftover, ...]:
        return await self.inner.leftovers(prefix)

    async def close(self) -> None:
        await self.inner.close()


async def aclose(pieces: AsyncIterator[bytes]) -> None:
    """End a read early, so that it lets go of its file or connection now and not when it is collected."""
    close = getattr(pieces, "aclose", None)
    if close is not None:
        await close()
