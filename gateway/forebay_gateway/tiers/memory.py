"""A tier in this process's memory, for tests and trials: the contract without a disk.

Owns a dictionary. Nothing outlives the process; two MemoryTiers meet only when they are given the same store.
"""

import itertools
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import ClassVar

from forebay_gateway.core.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound
from forebay_gateway.tiers.base import Capabilities, Listing, ObjectInfo, PutOptions, Source, Tier
from forebay_gateway.tiers.keys import check_key, directory_of
from forebay_gateway.tiers.readback import check_chunk, check_size
from forebay_wire.checksums import crc32c

_PLAIN = PutOptions()

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Object:
    data: bytes
    tag: str
    modified_s: float | None = None


@dataclass(slots=True)
class MemoryStore:
    """What is stored; shared by the tiers that are given it."""

    objects: dict[str, _Object] = field(default_factory=dict)
    links: dict[str, str] = field(default_factory=dict)
    versions: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    now: Callable[[], float | None] = lambda: None  # its own clock, where it has one


class MemoryTier(Tier):
    """Between two awaits nothing else runs, so every condition is atomic."""

    kind: ClassVar[str] = "memory"

    def __init__(self, name: str, store: MemoryStore | None = None) -> None:
        super().__init__(name)
        self.store = MemoryStore() if store is None else store

    async def probe(self) -> Capabilities:
        self.capabilities = Capabilities(
            conditional_create=True,
            conditional_replace=True,
            server_checksum=True,
            multipart=False,
            list_after_put=True,
            links=True,
            direct_io=False,
            clock_skew_s=0.0,
        )
        return self.capabilities

    async def put(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        check_key(key)
        data = bytearray()
        for index in range(len(source.chunk_crcs)):
            chunk = await source.read_chunk(index)
            data += chunk
            if options.on_progress is not None:
                options.on_progress(len(chunk))
        check_size(self.name, key, source, len(data))
        return self._store(key, bytes(data))

    def _store(self, key: str, data: bytes) -> ObjectInfo:
        self.store.objects[key] = _Object(data, f"v{next(self.store.versions)}", self.store.now())
        return self._info(key)

    def _object(self, key: str) -> _Object:
        try:
            return self.store.objects[check_key(key)]
        except KeyError:
            raise NotFound("no such object", tier=self.name, key=key) from None

    def _info(self, key: str) -> ObjectInfo:
        found = self._object(key)
        return ObjectInfo(key, len(found.data), found.tag, crc32c(found.data), found.modified_s)

    async def verify(self, key: str, source: Source, options: PutOptions = _PLAIN) -> ObjectInfo:
        info = self._info(key)
        check_size(self.name, key, source, info.size)
        view = memoryview(self._object(key).data)
        for index in range(len(source.chunk_crcs)):
            at = index * source.chunk_size
            check_chunk(self.name, key, source, index, crc32c(view[at : at + source.chunk_size]))
        return info

    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        found = self.store.objects.get(check_key(key))
        if if_absent and found is not None:
            raise AlreadyExists("the object is already there", tier=self.name, key=key)
        if if_match is not None and (found is None or found.tag != if_match):
            raise AlreadyExists("the object has another version", tier=self.name, key=key)
        return self._store(key, bytes(data))

    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> tuple[bytes, ObjectInfo]:
        found = self._object(key)
        if len(found.data) > limit_bytes:
            raise InvalidArgument("the document is larger than asked for", tier=self.name, key=key, limit_bytes=limit_bytes)
        return found.data, self._info(key)

    async def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        data = self._object(key).data
        if offset + length > len(data):
            raise Corrupt("the object is shorter than asked for", tier=self.name, key=key, size=len(data))
        for at in range(offset, offset + length, _PIECE_BYTES):
            yield data[at : min(at + _PIECE_BYTES, offset + length)]

    async def head(self, key: str) -> ObjectInfo:
        return self._info(key)

    async def delete(self, key: str) -> None:
        self.store.objects.pop(check_key(key), None)
        self.store.links.pop(key, None)

    async def list(self, prefix: str) -> Listing:
        directory = directory_of(prefix)
        start = f"{directory}/" if directory else ""
        objects, directories = [], set()
        for key in sorted(self.store.objects):
            if not key.startswith(start):
                continue
            name, slash, _ = key[len(start) :].partition("/")
            if slash:
                directories.add(name)
            else:
                objects.append(self._info(key))
        return Listing(tuple(objects), tuple(sorted(directories)))

    async def point(self, key: str, target: str) -> None:
        self.store.links[check_key(key)] = target

    async def close(self) -> None:
        """Nothing to let go of; the store stays."""
