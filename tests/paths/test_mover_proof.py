"""A put that did not prove its bytes by itself is verified by the mover before it is reported as done."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from conformance.tier_kit import CHUNK, BytesSource, blob
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.movers.jobs import DrainJob, ItemDone, ItemFailed, Setup, ShardItem
from forebay_gateway.movers.worker import JobRunner
from forebay_gateway.tiers.base import ObjectInfo
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
