"""Saves go first: drains step back for them, and never for good."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from conformance.tier_kit import CHUNK, BytesSource, blob
from forebay_gateway.base.clock import FakeClock
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.movers.jobs import DrainJob, ItemDone, Setup, ShardItem
from forebay_gateway.movers.turn import WORK_S, YIELD_S, Turn
from forebay_gateway.movers.worker import JobRunner
from forebay_gateway.tiers.memory import MemoryTier
from forebay_wire.manifest import pack_chunk_crcs
from paths.kit import client_of, serving, tier


async def waits(turn: Turn) -> bool:
    """Whether the drain has to wait now."""
    task = asyncio.ensure_future(turn.mine())
    await asyncio.sleep(0)
    task.cancel()
    return bool(await asyncio.gather(task, return_exceptions=True) != [None])


async def test_a_save_goes_first_and_an_endless_one_leaves_the_drain_its_time() -> None:
    clock = FakeClock()
    turn = Turn(clock)
    assert not await waits(turn)
    turn.saves(True)
    for _ in range(3):
        assert await waits(turn)
        await clock.advance(YIELD_S - 0.1)
        assert await waits(turn)
        await clock.advance(0.2)
        assert not await waits(turn)
        await clock.advance(WORK_S - 0.1)
    turn.saves(False)
    assert not await waits(turn)


async def test_many_small_saves_in_a_row_count_as_one() -> None:
    clock = FakeClock()
    turn = Turn(clock)
    waited = []
    for _ in range(int(YIELD_S + WORK_S) * 4):
        turn.saves(True)
        waited.append(await waits(turn))
        await clock.advance(0.2)
        turn.saves(False)
        await clock.advance(0.05)
    assert waited[0]
    assert not all(waited)
    await clock.advance(WORK_S)
    turn.saves(True)
    assert await waits(turn)  # after a pause a save has its whole time again


async def test_who_waits_goes_on_as_soon_as_the_save_ends() -> None:
    turn = Turn(FakeClock())
    turn.saves(True)
    waiting = asyncio.ensure_future(turn.mine())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    turn.saves(False)
    await asyncio.wait_for(waiting, 5)


class Closing(BytesSource):
    async def close(self) -> None:
        """Nothing is open."""


async def test_a_drain_steps_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    CacheDir.open(tmp_path / "cache", "a").release()
    data, told = blob(3 * CHUNK), list[Any]()
    memory = MemoryTier("memory")
    config = TierConfig(name="memory", kind="memory")
    runner = JobRunner(Setup("", str(tmp_path / "cache"), CHUNK, (config,), "info", "text"), told.append, lambda _: memory)

    async def opened(item: ShardItem) -> Closing:
        return Closing(data)

    monkeypatch.setattr(runner, "_open", opened)
    source = BytesSource(data)
    item = ShardItem(1, 2, "key", len(data), CHUNK, source.crc32c, pack_chunk_crcs(list(source.chunk_crcs)))
    runner.turn.saves(True)
    job = asyncio.ensure_future(runner.run(DrainJob(1, "memory", memory.capabilities, (item,))))
    try:
        await asyncio.sleep(0.1)
        assert told == []
        runner.turn.saves(False)
        await asyncio.wait_for(job, 10)
    finally:
        await runner.close()
    assert any(isinstance(each, ItemDone) for each in told)


async def test_movers_are_told_while_shards_are_received(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pfs").mkdir()
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        told: list[bool] = []
        monkeypatch.setattr(gateway.node.movers, "saves", told.append)
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("x", b"x" * 100_000)
            assert told == [True, True, False]
            pressed = gateway.node.budget.reserve(int(gateway.node.budget.capacity * 0.7))
            told.clear()
            await part.put("y", b"y" * 100_000)
            assert told == [False, False, False]  # above the soft watermark it is the drain that saves wait for
            pressed.release()
            budget = gateway.node.budget
            for known in (True, False):  # by its own bytes it gets there
                rest = budget.reserve(int(budget.capacity * (0.57 - budget.fill)))
                told.clear()
                data = b"z" * (10 << 20)
                await part.put(f"over-{known}", data if known else iter([data]))
                assert (told[0], set(told[-2:])) == (True, {False})
                rest.release()
            await part.put_many({"a": b"1", "b": b"2"})
            await part.commit()
