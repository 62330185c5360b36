"""A put that did not prove its bytes by itself is verified by the mover before it is reported as done."""

import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conformance.tier_kit import CHUNK, BytesSource, blob
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.core.errors import ForebayError, Unavailable
from forebay_gateway.movers.jobs import DrainJob, Failure, ItemDone, ItemFailed, Setup, ShardItem
from forebay_gateway.movers.worker import JobRunner, failure_of
from forebay_gateway.tiers.base import ObjectInfo, StorageFull
from forebay_gateway.tiers.memory import MemoryTier
from forebay_wire.manifest import pack_chunk_crcs

DATA = blob(3 * CHUNK)


class Unproved(MemoryTier):
    """Stores other bytes than it was given, once, and says nothing of checksums."""

    def __init__(self, damages: bool) -> None:
        super().__init__("memory")
        self._damages = damages

    async def put(self, key: str, source: Any, *options: Any) -> ObjectInfo:
        sent = BytesSource(bytes([DATA[0] ^ 1]) + DATA[1:]) if self._damages else source
        return dataclasses.replace(await super().put(key, sent, *options), crc32c=None)


class Closing(BytesSource):
    async def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize("damages", [False, True])
async def test_what_put_did_not_prove_is_verified(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damages: bool) -> None:
    CacheDir.open(tmp_path / "cache", "a").release()
    config = TierConfig(name="memory", kind="memory")
    told: list[Any] = []
    tier = Unproved(damages)
    runner = JobRunner(Setup("", str(tmp_path / "cache"), CHUNK, (config,), "info", "text"), told.append, lambda _: tier)

    async def opened(item: ShardItem) -> Closing:
        return Closing(DATA)

    monkeypatch.setattr(runner, "_open", opened)
    source = BytesSource(DATA)
    item = ShardItem(1, 2, "key", len(DATA), CHUNK, source.crc32c, pack_chunk_crcs(list(source.chunk_crcs)))
    try:
        await runner.run(DrainJob(1, "memory", tier.capabilities, (item,)))
    finally:
        await runner.close()
    answer = next(each for each in told if isinstance(each, ItemDone | ItemFailed))
    assert isinstance(answer, ItemFailed if damages else ItemDone)
    if damages:
        assert answer.failure.kind == "corrupt"


@pytest.mark.parametrize("error", [StorageFull("no space left", act="write"), Unavailable("away", retry_after_s=2.0)])
def test_whether_a_tier_is_full_or_away_comes_through(error: ForebayError) -> None:
    """Both are of one kind; people have to do different things."""
    failure = msgspec.msgpack.decode(msgspec.msgpack.encode(failure_of(error)), type=Failure)
    assert type(failure.error) is type(error)
    assert (str(failure.error), failure.error.retry_after_s) == (str(error), error.retry_after_s)
