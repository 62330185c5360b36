"""Nodes in this process that share tiers in memory, with a clock that a test moves: without gRPC and without processes."""

import asyncio
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import msgspec

from forebay_gateway import build
from forebay_gateway.base.clock import FakeClock
from forebay_gateway.core.config import load_config
from forebay_gateway.core.records import PublishState
from forebay_gateway.core.retention import Ledger, ledger_key, read_ledger
from forebay_gateway.movers.jobs import Setup
from forebay_gateway.paths.care.fsck import Checker
from forebay_gateway.paths.care.gc import Collector
from forebay_gateway.paths.commit import CommitPath, Expected
from forebay_gateway.paths.complete import Completion
from forebay_gateway.paths.drain import Drain
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.expire import Expiry, Fate
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.fleet import Fleet
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.paths.recover import recover, recover_copies
from forebay_gateway.paths.removed import Follower
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.write import Existing, PartRef, WritePath
from forebay_gateway.tiers.memory import MemoryStore, MemoryTier
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.checksums import crc32c
from model.world import MoversHere

CHUNK = 64 << 10
LAST_2 = '[[retain]]\nrun = "**"\nkeep_last = 2\n'


def ledger_of(store: MemoryStore, run: str) -> Ledger:
    ledger = read_ledger(store.objects[ledger_key(run)].data, run)
    assert ledger is not None
    return ledger


def put_ledger(store: MemoryStore, ledger: Ledger) -> None:
    MemoryTier("pfs", store)._store(ledger_key(ledger.run), msgspec.json.encode(ledger))


def below(store: MemoryStore, run: str, step: int) -> list[str]:
    return [key for key in store.objects if key.startswith(f"{run}/step-{step:012d}/")]


class Here:
    """One node."""

    node: Node

    def __init__(self, directory: Path, stores: Mapping[str, MemoryStore], name: str = "a", keys: str = "") -> None:
        self.directory, self.stores, self.name, self.keys = directory, stores, name, keys
        self.clock = FakeClock()

    async def __aenter__(self) -> "Here":
        text = (
            f'[node]\nid = "{self.name}"\nlisten = ["unix:///nowhere/x.sock"]\n'
            f'[cache]\npath = "{self.directory}/cache-{self.name}"\ncapacity = "64MiB"\nchunk_size = "64KiB"\n'
            'catalog_reserve = "1MiB"\n'
        )
        tiers = [f'[[tier]]\nname = "{name}"\nkind = "memory"\n' for name in self.stores]
        config = load_config(text + "".join(tiers) + self.keys, {}, "test", uid=0, hostname="test")
        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        node = self.node = await build.open_node(config, "test", self.clock, failed)
        self.tiers = {name: MemoryTier(name, store) for name, store in self.stores.items()}
        for name, tier in self.tiers.items():
            node.tiers[name] = MonitoredTier(tier, required=True, clock=self.clock)
            await node.tiers[name].step()
        setup = Setup(self.name, str(node.cache.path), CHUNK, config.tiers, "error", "text")
        node.movers = MoversHere(setup, lambda tier: MemoryTier(tier.name, self.stores[tier.name]))
        await recover(node)
        self.finder = Finder(node)
        self.writes = WritePath(node, Evictor(node))
        self.commits = CommitPath(node, self.writes)
        self.reads = ReadPath(node, self.finder, Evictor(node))
        self.retention = Retention(node, self.finder)
        self.checker = Checker(node, Evictor(node), Collector(node, self.retention), serving=True)
        self.drains = {
            name: Drain(node, tier, recover_copies=partial(recover_copies, node, tier), verified=lambda: None)
            for name, tier in node.tiers.items()
        }
        self.completions = {name: Completion(node, tier, self.drains[name]) for name, tier in node.tiers.items()}
        follower = Follower(node, self.finder, self.retention)
        self.expiries = {name: Expiry(node, tier, follower) for name, tier in node.tiers.items()}
        self.fleets = {name: Fleet(node, tier) for name, tier in node.tiers.items()}
        node.on_complete.append(lambda tier, run, step: self.expiries[tier].completed(run, step))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.node.movers.stop(0)
        await self.node.catalog.close()
        self.node.io.close()
        self.node.cache.release()

    async def commit(self, run: str, step: int, session: str = "s", data: bytes | None = None, kind: str = "") -> None:
        """Save one shard and commit it."""
        data = data or f"{run} {step} {session}".encode() * 100
        part = PartRef(run, step, session, 0, 1)
        incoming = await self.writes.begin(part, "a.bin", len(data))
        assert not isinstance(incoming, Existing)
        await incoming.chunk(0, crc32c(data), memoryview(data))
        await incoming.finish(len(data), crc32c(data))
        await self.commits.commit(part, [Expected("a.bin", len(data), crc32c(data))], "", kind)

    async def drain(self, tier: str = "pfs") -> None:
        """Until nothing waits for the tier."""
        for _ in range(100):
            await self.drains[tier].step()
            self.completions[tier]._look_at_all_s = float("-inf")
            await self.completions[tier].step()
            with self.node.catalog.read() as txn:
                if not list(txn.unpublished_ids(tier)):
                    return
            await self.clock.advance(1.0)
        raise AssertionError(f"something still waits for {tier}")

    async def save(self, run: str, *steps: int, session: str = "s") -> None:
        """Commit each and drain it to all tiers, one after the other."""
        for step in steps:
            await self.commit(run, step, session)
            for tier in self.tiers:
                await self.drain(tier)

    async def look(self, run: str, tier: str = "pfs", *, apply: bool = True) -> list[Fate]:
        return await self.expiries[tier].look(run, apply=apply)

    def on_tier(self, run: str, tier: str = "pfs") -> list[int]:
        """Steps whose manifest lies there."""
        ends = f"{run}/step-", "/manifest.json"
        keys = [key for key in self.stores[tier].objects if key.startswith(ends[0]) and key.endswith(ends[1])]
        return sorted(int(key.removeprefix(ends[0]).removesuffix(ends[1])) for key in keys)

    def known(self, run: str) -> list[int]:
        """Steps in this node's catalog."""
        with self.node.catalog.read() as txn:
            return [row.step for row in txn.checkpoints(run)]

    def state(self, run: str, step: int, tier: str = "pfs") -> PublishState | None:
        """Of the step's newest session."""
        with self.node.catalog.read() as txn:
            row = txn.checkpoint(run, step)
            session = None if row is None else txn.session(row.session_ids[-1])
        return None if session is None else session.publish.get(tier)
