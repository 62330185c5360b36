"""A node in this process whose clock stands still and whose tiers are dictionaries; a test saves, and takes the drain's steps.

Real: catalog, cache, every path, the jobs of movers. Not real: time, tiers, the mover's process. Owns no assertions.
"""

import asyncio
import shutil
from functools import partial
from pathlib import Path

from forebay_gateway import build
from forebay_gateway.base.clock import FakeClock
from forebay_gateway.core.config import load_config
from forebay_gateway.core.records import PublishState, SessionRow
from forebay_gateway.movers.jobs import Setup
from forebay_gateway.paths.commit import CommitPath, Committed, Expected
from forebay_gateway.paths.complete import Completion
from forebay_gateway.paths.drain import Drain
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.queue import Queue
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.paths.recover import recover, recover_copies
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.small import SmallPath, SmallShard
from forebay_gateway.paths.wait import Waiter
from forebay_gateway.paths.write import PartRef, WritePath
from forebay_gateway.tiers.memory import MemoryStore, MemoryTier
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.checksums import crc32c
from model.world import MoversHere

RUN = "team/run"
SHARD = b"x" * 1000


class SmallNode:
    """With the tiers "near" and "far", both required; `keys` are added to the configuration, `near` to the tier's."""

    def __init__(self, directory: Path, keys: str = "", near: str = "", capacity: str = "3MiB") -> None:
        self.path = directory / "cache"
        self.keys, self.near, self.capacity = keys, near, capacity
        self.stores = {"near": MemoryStore(), "far": MemoryStore()}
        self.drained: list[tuple[str, int]] = []  # (tier, step) in the order in which copies were proved

    async def __aenter__(self) -> "SmallNode":
        text = (
            f'[node]\nid = "small"\nlisten = ["unix:///nowhere/forebay.sock"]\n[cache]\npath = "{self.path}"\n'
            f'capacity = "{self.capacity}"\nchunk_size = "64KiB"\ncatalog_reserve = "1MiB"\nsoft = 0.05\npack = "never"\n'
            f'[[tier]]\nname = "near"\nkind = "memory"\n{self.near}\n[[tier]]\nname = "far"\nkind = "memory"\n{self.keys}\n'
        )
        config = load_config(text, {}, "test", uid=0, hostname="test")
        self.clock = FakeClock()
        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        self.node = node = await build.open_node(config, "test", self.clock, failed)
        for name in self.stores:
            node.tiers[name] = MonitoredTier(self._tier(name), required=True, clock=self.clock)
        setup = Setup("test", str(self.path), 64 << 10, config.tiers, "error", "text")
        node.movers = MoversHere(setup, lambda tier: self._tier(tier.name))
        await recover(node)
        self.evictor, finder = Evictor(node), Finder(node)
        writes = WritePath(node, self.evictor)
        self.small, self.commits = SmallPath(node, writes), CommitPath(node, writes)
        self.retention, self.waiter = Retention(node, finder), Waiter(node, finder)
        self.reads = ReadPath(node, finder, self.evictor)
        self.evictor.drop_cache_only = self.retention.drop_cache_only
        self.drains = {
            name: Drain(node, tier, recover_copies=partial(recover_copies, node, tier), verified=lambda: None)
            for name, tier in node.tiers.items()
        }
        self.completions = {name: Completion(node, tier, self.drains[name]) for name, tier in node.tiers.items()}
        self.queue = Queue(node, self.drains)
        self.retention.pinned, self.retention.deleted = self.queue.pinned, self.queue.deleted
        for tier in node.tiers.values():
            await tier.step()
        return self

    def _tier(self, name: str) -> MemoryTier:
        return MemoryTier(name, self.stores[name])

    async def __aexit__(self, *_: object) -> None:
        await self.node.movers.stop(0)
        await self.node.catalog.close()
        self.node.io.close()
        self.node.cache.release()

    async def restart(self) -> None:
        """As after a kill: what was in memory is gone, the tiers stay."""
        await self.__aexit__()
        await self.__aenter__()

    async def lose_catalog(self) -> None:
        """The catalog's file is gone, the cache's files are there."""
        await self.__aexit__()
        shutil.rmtree(self.path / "catalog")
        await self.__aenter__()

    async def save(
        self,
        step: int,
        *,
        run: str = RUN,
        writers: int = 1,
        writer: int = 0,
        kind: str = "",
        shards: int = 1,
        session: str = "",
    ) -> Committed:
        """One writer's part."""
        part = PartRef(run, step, session or f"s{step}", writer, writers)
        data = {f"w{writer}-{number}": SHARD for number in range(shards)}
        await self.small.put(part, [SmallShard(name, crc32c(body), memoryview(body)) for name, body in data.items()])
        expected = [Expected(name, len(body), crc32c(body)) for name, body in data.items()]
        return await self.commits.commit(part, expected, "", kind)

    def session(self, step: int, run: str = RUN) -> SessionRow:
        """Its row."""
        with self.node.catalog.read() as txn:
            found = txn.find_session(run, step, f"s{step}")
        assert found is not None
        return found

    def is_known(self, step: int, run: str = RUN) -> bool:
        """Whether the catalog has it."""
        with self.node.catalog.read() as txn:
            return txn.find_session(run, step, f"s{step}") is not None

    async def batch(self, tier: str = "near") -> str:
        """One step of the drain and of completion: what it put there, "run@step", or "" for nothing."""
        before = set(self.stores[tier].objects)
        await self.drains[tier].step()
        await self.completions[tier].step()
        new = [key for key in set(self.stores[tier].objects) - before if "/w" in key]
        return next((f"{key.split('/step-')[0]}@{int(key.split('/step-')[1].split('/')[0])}" for key in new), "")

    async def batches(self, tier: str = "near", count: int = 20) -> list[str]:
        """What goes, until nothing does."""
        found = []
        for _ in range(count):
            if not (gone := await self.batch(tier)):
                break
            found.append(gone.rpartition("@")[2] if gone.startswith(RUN + "@") else gone)
        return found

    def states(self, tier: str, *steps: int) -> list[str]:
        """Where each of these stands on the tier."""
        return [self.session(step).publish.get(tier, PublishState.PENDING).value for step in steps]
