"""A whole node in this process, without gRPC, beside a model made of dictionaries.

Real: the cache directory, its files and their fsyncs, the catalog, every path, the jobs of movers. Not real: the clock, which a
test moves; the tiers, which are dictionaries that can be away; the mover's process, whose jobs run here.

A crash takes the disk and the tiers as they are at one instant (also in the middle of an act, at a failpoint), throws away
everything else, and recovers. Owns the acts and what they must do; not when they are done (test_node_model).
"""

import asyncio
import contextlib
import itertools
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from catalog.kit import check_sums
from forebay_gateway import build
from forebay_gateway.base import failpoints
from forebay_gateway.base.clock import FakeClock
from forebay_gateway.core.config import load_config
from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.core.errors import AlreadyExists, CacheFull, ForebayError, NotFound, Unavailable
from forebay_gateway.core.layout import manifest_key, shard_key
from forebay_gateway.core.records import NamedShard, PartState
from forebay_gateway.movers.jobs import ItemDone, ItemFailed, Job, JobDone, Limits, Progress, Setup, ToFront, UploadBegun
from forebay_gateway.movers.pool import MoverProcess, Reports
from forebay_gateway.movers.worker import JobRunner
from forebay_gateway.paths.commit import CommitPath, Expected
from forebay_gateway.paths.complete import Completion
from forebay_gateway.paths.drain import Drain
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.paths.recover import recover, recover_copies
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.small import SmallPath, SmallShard
from forebay_gateway.paths.view import view
from forebay_gateway.paths.write import Existing, PartRef, WritePath
from forebay_gateway.tiers.base import ObjectInfo, PutOptions, Source, Tier
from forebay_gateway.tiers.memory import MemoryStore, MemoryTier
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.checksums import crc32c

CHUNK = 64 << 10
PLAIN = PutOptions()
TIERS = ("near", "far")
RUN = "team/run"
WRITERS = 2
CONFIG = """
[node]
id = "model"
listen = ["unix:///nowhere/forebay.sock"]
[cache]
path = "{path}"
capacity = "3MiB"
chunk_size = "64KiB"
catalog_reserve = "1MiB"
soft = 0.05
[[tier]]
name = "near"
kind = "memory"
[[tier]]
name = "far"
kind = "memory"
"""


class Away(MemoryTier):
    """A tier that can be away: then no verb has an answer, and nothing is said about what is there."""

    def __init__(self, name: str, store: MemoryStore, outages: set[str]) -> None:
        super().__init__(name, store)
        self._outages = outages

    def _look(self) -> None:
        if self.name in self._outages:
            raise Unavailable("the tier is away", tier=self.name)

    async def probe(self) -> Any:
        self._look()
        return await super().probe()

    async def put(self, key: str, source: Source, options: PutOptions = PLAIN) -> ObjectInfo:
        self._look()
        return await super().put(key, source, options)

    async def verify(self, key: str, source: Source, options: PutOptions = PLAIN) -> ObjectInfo:
        self._look()
        return await super().verify(key, source, options)

    async def put_small(self, key: str, data: bytes, *, if_absent: bool = False, if_match: str | None = None) -> ObjectInfo:
        self._look()
        return await super().put_small(key, data, if_absent=if_absent, if_match=if_match)

    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> tuple[bytes, ObjectInfo]:
        self._look()
        return await super().get_small(key, limit_bytes)

    async def read(self, key: str, offset: int, length: int) -> AsyncIterator[bytes]:
        self._look()
        async for piece in super().read(key, offset, length):
            yield piece

    async def head(self, key: str) -> ObjectInfo:
        self._look()
        return await super().head(key)

    async def delete(self, key: str) -> None:
        self._look()
        await super().delete(key)

    async def list(self, prefix: str) -> Any:
        self._look()
        return await super().list(prefix)

    async def point(self, key: str, target: str) -> None:
        self._look()
        await super().point(key, target)


class MoversHere:
    """MoverPool without processes: the same jobs by the same code, their reports in the same order."""

    def __init__(self, setup: Setup, opened: Callable[[TierConfig], Tier]) -> None:
        self._ids = itertools.count(1)
        self._told: dict[int, asyncio.Queue[ToFront]] = {}
        self._runner = JobRunner(setup, lambda message: self._told[message.id].put_nowait(message), opened)

    def next_job_id(self) -> int:
        return next(self._ids)

    def processes(self) -> list[MoverProcess]:
        return []

    def limit(self, limits: Limits) -> None:
        self._runner.limit(limits)

    def saves(self, under_way: bool) -> None:
        self._runner.turn.saves(under_way)

    async def drain(self, tier: str, job: Job, reports: Reports) -> None:
        await self.fetch(job, reports)

    async def fetch(self, job: Job, reports: Reports) -> None:
        inbox = self._told[job.id] = asyncio.Queue()
        running = asyncio.create_task(self._runner.run(job))
        try:
            while not isinstance(message := await inbox.get(), JobDone):
                match message:
                    case UploadBegun():
                        await reports.upload_begun(message.index, message.upload_id)
                        self._runner.acknowledged(job.id, message.index)
                    case ItemDone():
                        await reports.item_done(message.index, message)
                    case ItemFailed():
                        await reports.item_failed(message.index, message)
                    case Progress():
                        reports.progress(message.size)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            del self._told[job.id]

    async def stop(self, grace_s: float) -> None:
        await self._runner.close()


@dataclass
class Paths:
    """One life of the node: everything that a crash throws away."""

    node: Node
    writes: WritePath
    small: SmallPath
    commits: CommitPath
    finder: Finder
    reads: ReadPath
    evictor: Evictor
    retention: Retention
    drains: dict[str, Drain]
    completions: dict[str, Completion]


Name = tuple[int, int]  # step, writer


@dataclass
class Model:
    """What was promised. A part that is no key was never heard of, or is gone."""

    parts: dict[Name, dict[str, bytes]] = field(default_factory=dict)
    committed: set[Name] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)

    def complete(self) -> set[int]:
        return {step for step, writer in self.committed if all((step, each) in self.committed for each in range(WRITERS))}

    def holder(self, step: int, name: str) -> int | None:
        return next((writer for writer in range(WRITERS) if name in self.parts.get((step, writer), {})), None)

    def forget(self, step: int) -> None:
        for writer in range(WRITERS):
            self.parts.pop((step, writer), None)
            self.committed.discard((step, writer))
        self.pinned.discard(step)


def session_of(step: int, generation: int) -> str:
    """A step that was deleted is saved again by another launch of the job."""
    return f"launch-{generation}-of-{step}"


def _no_catalog(directory: str, names: list[str]) -> list[str]:
    return ["catalog"] if "catalog" in names else []


def _copy_if_there(source: str, target: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        shutil.copy2(source, target)


class World:
    """The node and its model. All acts check what they can; `check` looks at everything."""

    def __init__(self) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="forebay-model-"))
        self._caches = itertools.count(1)
        self._cache = self.directory / "cache-0"
        self.stores = {tier: MemoryStore() for tier in TIERS}
        self.outages: set[str] = set()
        self.model = Model()
        self.generation = 0
        self.steps_done = 0
        self.crashes = 0
        self._instant: tuple[Path, dict[str, MemoryStore]] | None = None

    # -- life ----------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the disk and recover."""
        config = load_config(CONFIG.format(path=self._cache), {}, "model", uid=0, hostname="model")
        clock = FakeClock()
        failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        node = await build.open_node(config, "model", clock, failed)
        node.budget.pace_s = lambda: 0.0  # a writer that is slowed would wait for a clock that nobody moves meanwhile
        for name in TIERS:
            node.tiers[name] = MonitoredTier(self._tier(name), required=True, clock=clock)
        setup = Setup("model", str(self._cache), CHUNK, config.tiers, "error", "text")
        node.movers = MoversHere(setup, lambda tier: self._tier(tier.name))
        await recover(node)
        evictor, finder = Evictor(node), Finder(node)
        writes = WritePath(node, evictor)
        drains = {
            name: Drain(node, tier, recover_copies=partial(recover_copies, node, tier), verified=lambda: None)
            for name, tier in node.tiers.items()
        }
        self.paths = Paths(
            node,
            writes,
            SmallPath(node, writes, packed_from=2),
            CommitPath(node, writes, joined_from=2),
            finder,
            ReadPath(node, finder, evictor),
            evictor,
            Retention(node, finder),
            drains,
            {name: Completion(node, tier, drains[name]) for name, tier in node.tiers.items()},
        )
        self.clock = clock
        for tier in node.tiers.values():
            await tier.step()

    def _tier(self, name: str) -> Away:
        return Away(name, self.stores[name], self.outages)

    async def stop(self) -> None:
        """Let go of what this process holds."""
        node = self.paths.node
        await node.movers.stop(0)
        await node.catalog.close()
        node.io.close()
        node.cache.release()

    async def close(self) -> None:
        await self.stop()
        shutil.rmtree(self.directory)

    def _freeze(self) -> None:
        """The disk and the tiers at this instant. The catalog first: other files of a group may be moving meanwhile, and a file
        that is ahead of the catalog is what a crash leaves too."""
        cache = self.directory / f"cache-{next(self._caches)}"
        shutil.copytree(self._cache / "catalog", cache / "catalog")
        shutil.copytree(self._cache, cache, copy_function=_copy_if_there, dirs_exist_ok=True, ignore=_no_catalog)
        stores = {
            name: MemoryStore(dict(store.objects), dict(store.links), itertools.count(10_000 * (self.crashes + 1)))
            for name, store in self.stores.items()
        }
        self._instant = (cache, stores)

    async def crash(self) -> None:
        """Power off between two acts, and on again."""
        if self._instant is None:
            self._freeze()
        assert self._instant is not None
        await self.stop()
        shutil.rmtree(self._cache)
        self._cache, self.stores = self._instant
        self._instant = None
        self.crashes += 1
        await self.start()

    async def crash_in(self, act: Callable[[], Awaitable[object]], hit: int) -> None:
        """Power off at the act's failpoint number `hit` (after it, where it has fewer): it happened, or it did not."""
        before = Model(
            {key: dict(shards) for key, shards in self.model.parts.items()}, set(self.model.committed), set(self.model.pinned)
        )
        left = itertools.count(hit, -1)
        real = failpoints.hit

        def pass_by(name: str) -> None:
            real(name)
            if next(left) == 0 and self._instant is None:
                self._freeze()

        failpoints.hit = pass_by
        try:
            await act()
        finally:
            failpoints.hit = real
        after = self.model
        await self.crash()
        self.model = self._as_found(before, after)

    def _as_found(self, before: Model, after: Model) -> Model:
        """Of what the interrupted act changes, what the disk says; of all else, what was promised."""
        found = Model(pinned=set(before.pinned | after.pinned))
        with self.paths.node.catalog.read() as txn:
            for key in before.parts.keys() | after.parts.keys():
                step, writer = key
                known = txn.checkpoint(RUN, step)
                session = (
                    None if known is None or known.deleting else txn.find_session(RUN, step, session_of(step, self.generation))
                )
                part = None if session is None else txn.part(session.id, writer)
                here = (
                    set()
                    if part is None
                    else {shard.name for row in txn.shards(part.session_id, writer) for shard in txn.inside(row)}
                )
                old, new = before.parts.get(key, {}), after.parts.get(key, {})
                assert old.keys() & new.keys() <= here <= old.keys() | new.keys(), (key, old.keys(), new.keys(), here)
                if part is not None:
                    found.parts[key] = {name: (new | old)[name] for name in here}
                    if part.state is PartState.COMMITTED:
                        assert key in before.committed | after.committed
                        found.committed.add(key)
                if key in before.committed & after.committed:
                    assert key in found.committed, key
            for step in list(found.pinned):
                row = txn.checkpoint(RUN, step)
                if row is None or not row.pinned:
                    assert step not in before.pinned & after.pinned
                    found.pinned.discard(step)
        return found

    # -- a job's acts --------------------------------------------------------------------------------------------------

    def part(self, step: int, writer: int) -> PartRef:
        return PartRef(RUN, step, session_of(step, self.generation), writer, WRITERS)

    def _refusal(self, step: int, writer: int, shards: dict[str, bytes]) -> bool:
        """Whether the model says AlreadyExists."""
        mine = self.model.parts.get((step, writer), {})
        for name, data in shards.items():
            holder = self.model.holder(step, name)
            if holder is not None and (holder != writer or mine[name] != data):
                return True
            if holder is None and (step, writer) in self.model.committed:
                return True
        return False

    def _open(self, step: int, writer: int) -> dict[str, bytes]:
        return self.model.parts.setdefault((step, writer), {})

    async def put(self, step: int, writer: int, name: str, data: bytes) -> None:
        """One shard, by stream."""
        refused = self._refusal(step, writer, {name: data})
        with contextlib.suppress(CacheFull):
            try:
                incoming = await self.paths.writes.begin(self.part(step, writer), name, len(data))
                try:
                    if not isinstance(incoming, Existing):
                        for offset in range(0, len(data), CHUNK):
                            piece = memoryview(data)[offset : offset + CHUNK]
                            await incoming.chunk(offset, crc32c(piece), piece)
                    receipt = await incoming.finish(len(data), crc32c(data))
                finally:
                    await incoming.discard()
            except AlreadyExists:
                assert refused, (step, writer, name)
            except Unavailable as error:
                assert "deleted" in str(error)
                return
            else:
                assert not refused, (step, writer, name)
                assert (receipt.size, receipt.crc32c) == (len(data), crc32c(data))
                self._open(step, writer)[name] = data
                return
        self._sync_open(step, writer)

    async def put_broken(self, step: int, writer: int, name: str, size: int, how: str) -> None:
        """A stream without its trailer, damaged on its way, or with another checksum at its end: nothing is left of it."""
        data = bytes(size)
        with contextlib.suppress(ForebayError):
            incoming = await self.paths.writes.begin(self.part(step, writer), name, size)
            try:
                first = memoryview(data)[:CHUNK]
                await incoming.chunk(0, crc32c(first) ^ (how == "damaged"), first)
                if how != "gone":
                    await incoming.finish(len(first), crc32c(first) ^ 1)
                    raise AssertionError("a damaged shard was taken")
            finally:
                await incoming.discard()
        self._sync_open(step, writer)

    async def put_small(self, step: int, writer: int, shards: dict[str, bytes]) -> None:
        """A group, all or none."""
        refused = self._refusal(step, writer, shards)
        small = [SmallShard(name, crc32c(data), memoryview(data)) for name, data in shards.items()]
        with contextlib.suppress(CacheFull):
            try:
                await self.paths.small.put(self.part(step, writer), small)
            except AlreadyExists:
                assert refused, (step, writer, shards)
            except Unavailable as error:
                assert "deleted" in str(error)
                return
            else:
                assert not refused, (step, writer, shards)
                self._open(step, writer).update(shards)
                return
        self._sync_open(step, writer)

    def _sync_open(self, step: int, writer: int) -> None:
        """A refused put may have opened the part; that is no promise."""
        with self.paths.node.catalog.read() as txn:
            session = txn.find_session(RUN, step, session_of(step, self.generation))
            row = txn.checkpoint(RUN, step)
            if row is not None and not row.deleting and session is not None and txn.part(session.id, writer) is not None:
                self._open(step, writer)

    async def commit(self, step: int, writer: int) -> None:
        """Whatever was put."""
        shards = self.model.parts.get((step, writer), {})
        expected = [Expected(name, len(data), crc32c(data)) for name, data in shards.items()]
        try:
            done = await self.paths.commits.commit(self.part(step, writer), expected, "")
        except Unavailable as error:
            assert "deleted" in str(error)
            return
        self._open(step, writer)
        self.model.committed.add((step, writer))
        assert done.complete_at_cache == (step in self.model.complete())

    async def abort(self, step: int, writer: int) -> None:
        """Only what is not committed can be."""
        committed = (step, writer) in self.model.committed
        with self.paths.node.catalog.read() as txn:
            going = (row := txn.checkpoint(RUN, step)) is not None and row.deleting
        if going:  # what is promised no more may be in any state
            with contextlib.suppress(AlreadyExists):
                await self.paths.commits.abort(self.part(step, writer))
            return
        try:
            dropped = await self.paths.commits.abort(self.part(step, writer))
        except AlreadyExists:
            assert committed
        else:
            assert not committed
            assert dropped == len(self.model.parts.pop((step, writer), {}))
            if not any(key[0] == step for key in self.model.parts):
                self.model.pinned.discard(step)  # nothing is left to pin

    async def pin(self, step: int, pinned: bool) -> None:
        known = any(key[0] == step for key in self.model.parts)
        try:
            await self.paths.retention.pin(RUN, step, pinned)
        except (NotFound, Unavailable):
            assert not known
        else:
            (self.model.pinned.add if pinned else self.model.pinned.discard)(step)

    async def delete(self, step: int) -> None:
        """By force; what a tier that is away still holds goes once it is back."""
        known = any(key[0] == step for key in self.model.parts)
        try:
            await self.paths.retention.delete(RUN, step, force=True, dry_run=False)
        except ForebayError as error:
            assert not known or step in self.model.pinned, error
        else:
            assert step not in self.model.pinned
            self.model.forget(step)

    async def read(self, step: int, name: str, source: str = "auto") -> None:
        """Bit-exact, or an error that does not lie."""
        holder = self.model.holder(step, name)
        there = holder is not None and step in self.model.complete()
        data = bytearray()
        try:
            async with aclosing(
                self.paths.reads.read(RUN, step, session_of(step, self.generation), name, 0, None, source)
            ) as pieces:
                async for piece in pieces:
                    assert crc32c(piece.data) == piece.crc32c
                    data += piece.data
        except ForebayError as error:
            assert error.kind != "corrupt", error
            if there and source == "auto":
                assert self.outages, error
        else:
            assert there, (step, name)
            assert holder is not None
            assert bytes(data) == self.model.parts[step, holder][name]

    # -- the node's own acts -------------------------------------------------------------------------------------------

    async def drain(self, tier: str) -> None:
        await self.paths.drains[tier].step()

    async def complete(self, tier: str) -> None:
        await self.paths.completions[tier].step()

    async def evict(self) -> None:
        await self.paths.evictor.step()

    async def retain(self) -> None:
        await self.paths.retention.step()

    async def outage(self, tier: str) -> None:
        """Noticed at the next verb."""
        self.outages.add(tier)

    async def comes_back(self, tier: str) -> None:
        self.outages.discard(tier)
        await self.paths.node.tiers[tier].step()

    async def pass_time(self, delta_s: float) -> None:
        await self.clock.advance(delta_s)
        for drain in self.paths.drains.values():
            drain.retry_now()

    async def settle(self) -> None:
        """All tiers are there and all work is done: everything promised is complete on both, all that was deleted is gone."""
        for _ in range(60):
            for tier in TIERS:
                await self.comes_back(tier)
                await self.drain(tier)
                await self.complete(tier)
            await self.retain()
            await self.pass_time(10.0)
            if not self._left():
                return
        raise AssertionError(f"does not settle: {self._left()}")

    def _left(self) -> list[str]:
        with self.paths.node.catalog.read() as txn:
            left = [f"deleting {row.step}" for row in txn.deleting()]
            for tier in TIERS:
                for entry in txn.pending(tier):  # the sign of completeness of a step that lacks a writer waits for ever
                    session = txn.session(entry.key.session_id)
                    if session is not None and session.step in self.model.complete():
                        left.append(f"pending on {tier}: {entry}")
                waiting = {session.step for session in txn.unpublished(tier)} & self.model.complete()
                left += [f"step {step} is not complete on {tier}" for step in waiting]
        return left

    # -- what always holds ---------------------------------------------------------------------------------------------

    def check(self) -> None:
        """After every act."""
        self.steps_done += 1
        node = self.paths.node
        with node.catalog.read() as txn:
            views = [found for row in txn.checkpoints(RUN) if (found := view(node, txn, row)) is not None]
            assert {found.session.step for found in views if found.state == "complete"} == self.model.complete()
            totals = txn.totals()
            check_sums(txn)
            rows = {row.key: row for row in txn.all_shards()}
            parts = [part for session in txn.sessions() for part in txn.parts(session.id) if part.state is PartState.COMMITTED]
            promised = {(part.session_id, part.writer, part.commit_seq) for part in parts if not part.is_adopted}
            going = {number for row in txn.deleting() for number in row.session_ids}
            cached = {row.key for row in rows.values() if row.is_cached}
            for step, writer in self.model.committed:
                session = txn.find_session(RUN, step, session_of(step, self.generation))
                assert session is not None
                for name, data in self.model.parts[step, writer].items():
                    shard = txn.named(session.id, name)
                    assert shard is not None
                    assert (shard.size, shard.crc32c) == (len(data), crc32c(data))
                    if shard.row.key not in cached:  # then it is safe elsewhere, every byte of it
                        self._check_on_tiers(step, shard, data)
        files = {path: path.stat().st_size for path in self._cache.glob("data/*/*.shard")}
        assert {node.cache.shard_path(row.key) for row in rows.values() if row.disk_size} == set(files)
        found = {(file.session_id, file.writer, file.commit_seq) for file in node.cache.scan() if file.kind == "part"}
        assert {part for part in promised if part[0] not in going} <= found <= promised
        assert node.budget.used == totals.used == sum(files.values())
        assert node.budget.reserved == 0
        assert list((self._cache / "incoming").iterdir()) == []

    def _check_on_tiers(self, step: int, shard: NamedShard, data: bytes) -> None:
        session = session_of(step, self.generation)
        begin = 0 if shard.packed is None else shard.packed.offset
        for store in self.stores.values():
            whole = store.objects[shard_key(RUN, step, session, shard.row.name)].data
            assert len(whole) == shard.row.size and whole[begin : begin + shard.size] == data
            assert manifest_key(RUN, step) in store.objects

    async def check_reads(self) -> None:
        """Every shard of every complete checkpoint, and nothing of any other."""
        for step in self.model.complete():
            for writer in range(WRITERS):
                for name in self.model.parts[step, writer]:
                    await self.read(step, name)
