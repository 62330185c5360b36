"""A shard into a temporary file of a POSIX tier as it arrives; then as any other: fsync, read back, rename.

Owns the order of writes under way. Does not own how a file becomes durable and counts (tier.py), nor descriptors (files.py).
"""

import asyncio
import os
import secrets
from dataclasses import replace

from forebay_gateway.base import durable
from forebay_gateway.core.errors import ForebayError, NotFound
from forebay_gateway.tiers.base import ObjectInfo, PutOptions
from forebay_gateway.tiers.posix.acts import info_of
from forebay_gateway.tiers.posix.files import Buffers, OpenFile
from forebay_gateway.tiers.posix.tier import PosixTier
from forebay_gateway.tiers.readback import check_size
from forebay_gateway.tiers.stream import Checksums, Publish, ShardStream, StreamOptions
from forebay_gateway.tiers.window import Window

WRITES = 2  # under way at a time, as of a put
_PLAIN = PutOptions()


class PosixStream(ShardStream):
    """See ShardStream. The directory is made, and pruned again, by the tier."""

    def __init__(self, tier: PosixTier, key: str, options: StreamOptions) -> None:
        self._tier, self._key, self._options = tier, key, options
        self._path = tier._path(key)
        self._temp = self._path.parent / f"{durable.TEMP_PREFIX}{secrets.token_hex(8)}"
        self._file = OpenFile(self._temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL, tier.direct)
        self._buffers = Buffers(options.chunk_size)
        self._window = Window(WRITES)
        self._written = 0
        self._finished = False

    async def begin(self) -> None:
        await self._options.on_upload(self._temp.name)
        await self._tier._run("open", self._key, self._tier._open_temp, self._file)

    async def write(self, crc: int, data: memoryview) -> None:
        offset, self._written = self._written, self._written + len(data)
        await self._window.add(self._tier._write(self._file, self._key, data, offset, self._buffers, _PLAIN))

    async def finish(self, proof: Checksums, publish: Publish) -> ObjectInfo:
        tier, key = self._tier, self._key
        await self._window.__aexit__(None, None, None)
        check_size(tier.name, key, proof, self._written)
        await tier._run("fsync", key, self._file.finish, proof.size, timeout_s=tier._data_timeout_s)
        await tier._run("close", key, self._file.close)
        stat = await tier._read_back(self._temp, key, proof, _PLAIN)
        await publish(info_of(key, stat))
        info = await tier._run("rename", key, tier._publish, self._temp, self._path, key)
        self._finished = True
        return replace(info, crc32c=proof.crc32c)  # proved by the read-back above

    async def discard(self) -> bool:
        if self._finished:
            return True
        ended = asyncio.CancelledError()
        await self._window.__aexit__(type(ended), ended, None)
        await self._tier._close(self._file)
        try:
            await self._tier._run("unlink", self._key, self._tier._remove, self._temp)
        except NotFound:
            return True
        except ForebayError:
            return False
        return True
