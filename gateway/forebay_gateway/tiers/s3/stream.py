"""A shard into an object store as it arrives: one request where it fits into a part, else a multipart upload part by part.

Owns which chunks make a part, and how many parts are in memory. Does not own single parts, their repetition and completion
(multipart.py). A part is sent once all of its chunks are here, so that no slot of the store waits for a client.
"""

import asyncio
import random
from dataclasses import replace

from forebay_gateway.core.errors import InvalidArgument
from forebay_gateway.tiers.base import ObjectInfo, PutOptions
from forebay_gateway.tiers.readback import check_size
from forebay_gateway.tiers.retrying import Retries, run_retrying
from forebay_gateway.tiers.s3.body import Body
from forebay_gateway.tiers.s3.multipart import _PART_POLICY, Upload
from forebay_gateway.tiers.s3.parts import MAX_PARTS, part_size
from forebay_gateway.tiers.s3.tier import S3Tier
from forebay_gateway.tiers.stream import Checksums, Publish, ShardStream, StreamOptions
from forebay_gateway.tiers.window import Window

PARTS = 2  # sent at a time, while a third one fills
GROWS_AFTER_PARTS = 1000  # of a shard whose size is not known: then parts are twice as long
DOUBLINGS_MAX = 2
_PLAIN = PutOptions()


class _Held:
    """The chunks of one part, which stay until the store has them."""

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size
        self.size = self.crc32c = 0
        self._crcs: list[int] = []
        self.views: list[memoryview] = []

    @property
    def chunk_crcs(self) -> tuple[int, ...]:
        """Of the chunks."""
        return tuple(self._crcs)

    def add(self, crc: int, data: memoryview) -> None:
        """One chunk more."""
        self._crcs.append(crc)
        self.views.append(data)
        self.size += len(data)

    async def read_chunk(self, index: int) -> memoryview:
        """See Source; as often as a request is repeated."""
        return self.views[index]


class S3Stream(ShardStream):
    """See ShardStream."""

    def __init__(self, tier: S3Tier, key: str, options: StreamOptions) -> None:
        self._tier, self._key, self._options = tier, key, options
        self._filling = _Held(options.chunk_size)
        self._sent = 0  # parts that were begun, and the bytes of them
        self._sent_bytes = 0
        self._upload: Upload | None = None
        self._window = Window(PARTS)
        self._finished = False

    async def begin(self) -> None:
        await self._tier.client.before_write()
        await self._tier._clean_up_before(self._key)

    async def write(self, crc: int, data: memoryview) -> None:
        if self._filling.size >= self._part_bytes():  # now that more comes it is not the last
            await self._send()
        self._filling.add(crc, data)

    def _part_bytes(self) -> int:
        """Of the part that is filling."""
        size, chunk_size, wished = self._options.size, self._options.chunk_size, self._tier.client.settings.part_size
        if size is not None:
            return part_size(size, chunk_size, wished)
        return part_size(0, chunk_size, wished) << min(DOUBLINGS_MAX, self._sent // GROWS_AFTER_PARTS)

    async def _send(self) -> None:
        if self._upload is None:
            await self._options.on_upload("")
            full_crc = self._tier._proved("server_checksum")
            self._upload = Upload(self._tier.client, self._tier._limit, self._key, self._filling, full_crc)
            await self._upload._create()
            await self._options.on_upload(self._upload.id)
        if self._sent >= MAX_PARTS:
            raise InvalidArgument("the shard is too long for an upload whose size was not known", parts=self._sent)
        part, self._filling = self._filling, _Held(self._options.chunk_size)
        self._sent += 1
        self._sent_bytes += part.size
        # The same upload, with what it has been told of its parts, over the chunks of this one.
        sender = replace(self._upload, source=part)
        await self._window.add(sender._part(self._sent, 0, len(part.views), _PLAIN))

    async def finish(self, proof: Checksums, publish: Publish) -> ObjectInfo:
        tier, key = self._tier, self._key
        check_size(tier.name, key, proof, self._sent_bytes + self._filling.size)
        if self._upload is None:
            await publish(None)
            await self._put_whole(proof)
        else:
            await self._send()
            await self._window.__aexit__(None, None, None)
            self._upload.source = proof
            await publish(None)
            await self._upload._complete()
            self._upload.may_be_left = False
        self._finished = True
        return await tier.verify(key, proof)

    async def _put_whole(self, proof: Checksums) -> None:
        async def put() -> None:
            async with self._tier._limit.slot():
                await self._tier._put_object(self._key, Body(self._filling.views), proof.crc32c)

        await run_retrying(put, Retries(_PART_POLICY, self._tier.client.clock, random.Random()))

    async def discard(self) -> bool:
        ended = asyncio.CancelledError()
        await self._window.__aexit__(type(ended), ended, None)
        if self._finished or self._upload is None:
            return True
        if self._upload.may_be_left and self._upload.id:
            await self._upload._abandon()
        return not self._upload.may_be_left
