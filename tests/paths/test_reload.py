"""What a reload changes holds at once: in this process, in the movers that are there, and in those that come."""

import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from conformance.tier_kit import CHUNK, BytesSource, blob
from forebay.cli.show import _say_status
from forebay_gateway.base.clock import FakeClock
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.config import is_live
from forebay_gateway.core.config_keys import Cadence
from forebay_gateway.core.config_sections import Config, TierConfig
from forebay_gateway.movers import pool as pool_module
from forebay_gateway.movers.jobs import DrainJob, ItemDone, Limits, Setup, ShardItem, send
from forebay_gateway.movers.worker import JobRunner, Mover
from forebay_gateway.paths.care.tier_scrub import TierScrubber
from forebay_gateway.paths.reload import Reloader
from forebay_gateway.tiers.base import ObjectInfo, PutOptions, Source, Tier
from forebay_gateway.tiers.memory import MemoryStore, MemoryTier
from forebay_gateway.tiers.throttled import ThrottledTier
from forebay_gateway.tiers.wrapper import TierWrapper
from forebay_wire.manifest import pack_chunk_crcs
from paths.kit import client_of, serving, tier, until
from paths.nodes_kit import Here

MIB = 1 << 20
PLAIN = PutOptions()
CHANGED: dict[str, Any] = {
    "bandwidth": 5 * MIB,
    "iops": 70,
    "concurrency": 9,
    "fleet_bandwidth": 8 * MIB,
    "stagger": 3.0,
    "every": Cadence(2),
    "scrub_rate": 3 * MIB,
    "scrub_every": 60.0,
}


def with_tier(config: Config, **keys: Any) -> Config:
    return replace(config, tiers=tuple(replace(each, **keys) for each in config.tiers))


def throttle_of(tier: Tier) -> ThrottledTier:
    while not isinstance(tier, ThrottledTier):
        assert isinstance(tier, TierWrapper)
        tier = tier.inner
    return tier


def rates(tier: Tier) -> tuple[float | None, float | None]:
    throttle = throttle_of(tier)
    return throttle._bytes._rate, throttle._verbs._rate


def test_every_key_of_a_tier_that_is_live_is_tried_here() -> None:
    live = {field.name for field in msgspec.structs.fields(TierConfig) if is_live("tier", field.name)}
    assert live == set(CHANGED)


async def test_limits_of_a_tier_change_while_the_gateway_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sent: list[tuple[int, object]] = []  # to which mover, in order

    def sending(writer: asyncio.StreamWriter, message: Any) -> None:
        sent.append((id(writer), message))
        send(writer, message)

    monkeypatch.setattr(pool_module, "send", sending)
    (tmp_path / "pfs").mkdir()
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:

        async def saved(step: int) -> None:
            async with client.checkpoint("run", step) as part:
                await part.put("x", b"x" * 100_000)
                await part.commit()
            await client.wait("run", step, "pfs", timeout=30)

        def reload(**keys: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
            wanted = with_tier(gateway.node.config, **keys)
            gateway.reloader._read = lambda: wanted
            done = gateway.reloader.reload()
            return done.changed, done.needs_restart

        front = gateway.node.tiers["pfs"].tier
        await saved(1)
        assert rates(front) == (None, None)
        assert not [message for _, message in sent if isinstance(message, Limits)]
        assert reload(bandwidth=5 * MIB, iops=70, concurrency=9) == (
            ("tier.pfs.bandwidth", "tier.pfs.iops", "tier.pfs.concurrency"),
            (),
        )
        assert rates(front) == (5 * MIB, 70)
        told = Limits("pfs", 5 * MIB, 70, 9)
        assert [message for _, message in sent if isinstance(message, Limits)] == [told]  # the one that has drained
        assert "concurrency = 9\n" in await client.config()
        _say_status(await client.status())
        assert "pfs: this node may send 5.0 MiB/s\n" in capsys.readouterr().out
        (mover,) = (each for each in gateway.node.movers.processes() if each.name == "drain-pfs-0")
        await mover.stop(5.0)
        mover._stopped = False
        sent.clear()
        await saved(2)  # by another process, which hears it before its first job
        kinds = [message for _, message in sent]
        assert kinds.index(told) < next(place for place, each in enumerate(kinds) if isinstance(each, DrainJob))
        assert reload(bandwidth=None, path=str(tmp_path / "other")) == (("tier.pfs.bandwidth",), ("tier.pfs.path",))
        assert rates(front) == (None, 70)
        assert (await client.status()).tiers[0].bandwidth_bytes_per_s is None


async def test_scrubs_follow_and_one_that_is_switched_off_waits_where_it_is(tmp_path: Path) -> None:
    async with Here(tmp_path, {"pfs": MemoryStore()}) as node:
        scrub = TierScrubber(node.node, node.reads, node.node.tiers["pfs"])
        assert (scrub.rate, scrub.every_s) == (20 * MIB, 30 * 86400.0)
        Reloader(node.node, lambda: with_tier(node.node.config, scrub_rate=3 * MIB, scrub_every=60.0), []).reload()
        assert (scrub.rate, scrub.every_s) == (3 * MIB, 60.0)
        await scrub.start()
        Reloader(node.node, lambda: with_tier(node.node.config, scrub_rate=0), []).reload()
        assert (await scrub.step() or 0.0) > 1.0
        assert scrub.state.running
        Reloader(node.node, lambda: with_tier(node.node.config, scrub_rate=MIB), []).reload()
        assert await scrub.step() is None  # nothing to read, so it has ended
        assert not scrub.state.running


async def test_a_fleet_is_counted_once_its_bandwidth_is_shared_and_no_longer(tmp_path: Path) -> None:
    async with Here(tmp_path, {"pfs": MemoryStore()}) as node:
        fleet, woken = node.fleets["pfs"], list[bool]()
        fleet.wake = lambda: woken.append(True)
        assert await fleet.step() is None
        reloader = Reloader(node.node, lambda: with_tier(node.node.config, fleet_bandwidth=8 * MIB), [fleet.reload])
        assert reloader.reload().changed == ("tier.pfs.fleet_bandwidth",)
        assert woken == [True]
        assert await fleet.step() is not None
        assert (fleet.live_nodes, fleet.bandwidth, len(node.stores["pfs"].objects)) == (1, 8 * MIB, 1)
        Reloader(node.node, lambda: with_tier(node.node.config, fleet_bandwidth=None), [fleet.reload]).reload()
        assert (await fleet.step(), fleet.live_nodes, fleet.bandwidth) == (None, None, None)


# -- in a mover ----------------------------------------------------------------------------------------------------------


class Gated(MemoryTier):
    """Puts wait at a gate, and say how many are there."""

    def __init__(self, config: TierConfig, gate: asyncio.Event) -> None:
        super().__init__(config.name)
        self.config, self.gate = config, gate
        self.waiting = 0
        self.closed = False

    async def put(self, key: str, source: Source, options: PutOptions = PLAIN) -> ObjectInfo:
        self.waiting += 1
        await self.gate.wait()
        self.waiting -= 1
        return await super().put(key, source, options)

    async def close(self) -> None:
        assert not self.waiting
        self.closed = True


class Closing(BytesSource):
    async def close(self) -> None:
        """Nothing is open."""


async def test_concurrency_holds_from_the_next_job_on_and_memory_grows_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CacheDir.open(tmp_path / "cache", "a").release()
    data, gate = blob(3 * CHUNK), asyncio.Event()
    opened: list[Gated] = []

    def open_tier(config: TierConfig) -> Gated:
        opened.append(Gated(config, gate))
        return opened[-1]

    told: list[Any] = []
    config = TierConfig(name="memory", kind="memory", concurrency=1)
    runner = JobRunner(Setup("", str(tmp_path / "cache"), CHUNK, (config,), "info", "text"), told.append, open_tier)

    async def source_of(item: ShardItem) -> Closing:
        return Closing(data)

    monkeypatch.setattr(runner, "_open", source_of)
    source = BytesSource(data)
    crcs = pack_chunk_crcs(list(source.chunk_crcs))
    items = tuple(ShardItem(1, shard, f"key-{shard}", len(data), CHUNK, source.crc32c, crcs) for shard in range(8))
    proved = await MemoryTier("memory").probe()
    before = runner._pool.memory_bytes_max
    try:
        first = asyncio.ensure_future(runner.run(DrainJob(1, "memory", proved, items)))
        await until(lambda: opened and opened[0].waiting)
        runner.limit(Limits("memory", None, None, 1))
        runner.limit(Limits("memory", None, None, 64))
        assert runner._pool.memory_bytes_max > before  # else its 64 transfers could wait for each other
        second = asyncio.ensure_future(runner.run(DrainJob(2, "memory", proved, items)))
        await until(lambda: len(opened) == 2 and opened[1].waiting == len(items))
        assert (opened[0].waiting, opened[0].closed) == (1, False)
        gate.set()
        await asyncio.wait_for(asyncio.gather(first, second), 10)
        assert (opened[0].closed, opened[1].closed) == (True, False)
        assert sum(isinstance(each, ItemDone) for each in told) == 2 * len(items)
        runner.limit(Limits("memory", None, None, 2))
        await asyncio.wait_for(runner.run(DrainJob(3, "memory", proved, items)), 10)
        assert [each.closed for each in opened] == [True, True, False]
        assert (opened[2].config.concurrency, runner._pool.memory_bytes_max > before) == (2, True)
    finally:
        gate.set()
        await runner.close()
    assert opened[2].closed


async def test_a_mover_hears_of_limits(tmp_path: Path) -> None:
    CacheDir.open(tmp_path / "cache", "a").release()
    config = TierConfig(name="pfs", kind="memory", fleet_bandwidth=100)
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs)
    _, front = await asyncio.open_connection(sock=ours)
    mover = Mover(Setup("", str(tmp_path / "cache"), CHUNK, (config,), "info", "text"), reader, writer)
    running = asyncio.ensure_future(mover.run())
    proved = await MemoryTier("pfs").probe()
    async with mover._runner._using("pfs", proved) as opened:
        assert rates(opened) == (100, None)
        send(front, Limits("pfs", 50, 7, 4))
        await until(lambda: rates(opened) == (50, 7))
        send(front, Limits("pfs", None, None, 4))
        await until(lambda: rates(opened) == (None, None))
    front.close()
    await asyncio.wait_for(running, 10)


async def test_a_limit_slows_and_frees_what_is_under_way_also_where_there_was_none() -> None:
    clock = FakeClock()
    tier = ThrottledTier(MemoryTier("pfs"), clock)
    source = BytesSource(blob(40 * CHUNK))
    began = asyncio.Event()
    real = source.read_chunk

    async def read_chunk(index: int) -> memoryview:
        if index == 0:
            began.set()
            await asyncio.sleep(0)
        return await real(index)

    source.read_chunk = read_chunk  # type: ignore[method-assign]
    putting = asyncio.ensure_future(tier.put("x", source))
    await began.wait()
    tier.set_limits(10 * CHUNK, None)
    for _ in range(200):
        await asyncio.sleep(0)
    assert not putting.done()
    await clock.advance(1.0)
    assert not putting.done()
    tier.set_limits(None, None)
    await clock.advance(0.6)
    await asyncio.wait_for(putting, 5)
