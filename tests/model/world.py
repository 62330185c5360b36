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
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import msgspec

from catalog.kit import check_sums
from forebay_gateway import build
from forebay_gateway.admission.disk import FAILURES_IN_A_ROW
from forebay_gateway.base import failpoints
from forebay_gateway.base.clock import FakeClock
from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.config import load_config
from forebay_gateway.core.errors import AlreadyExists, CacheFull, ForebayError, NotFound, Unavailable
from forebay_gateway.core.layout import current_key, manifest_key, part_key, run_key, shard_key
from forebay_gateway.core.records import NamedShard, PartState, ShardRow
from forebay_gateway.core.states import CopyState
from forebay_gateway.movers.jobs import Setup
from forebay_gateway.paths.care.mend import Mender
from forebay_gateway.paths.commit import UNFILED, CommitPath, Expected
from forebay_gateway.paths.complete import Completion
from forebay_gateway.paths.drain import Drain
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.passing import Leaving
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.paths.recover import recover, recover_copies
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.small import SmallPath, SmallShard
from forebay_gateway.paths.through import Passage, Through
from forebay_gateway.paths.unfiled import Filer
from forebay_gateway.paths.view import view
from forebay_gateway.paths.write import Existing, PartRef, WritePath
from forebay_gateway.tiers.memory import MemoryStore
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.checksums import crc32c
from forebay_wire.names import is_commit_last
from model.stand_ins import Away, MoversHere, open_stream

CHUNK = 64 << 10
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
kind = "posix"
path = "/nowhere/near"
[[tier]]
name = "far"
kind = "posix"
path = "/nowhere/far"
"""


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
    through: Through
    filer: Filer
    mender: Mender


Name = tuple[int, int]  # step, writer


@dataclass
class Model:
    """What was promised. A part that is no key was never heard of, or is gone."""

    parts: dict[Name, dict[str, bytes]] = field(default_factory=dict)
    committed: set[Name] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    # Its last part was aborted since. A tier keeps the word for other nodes, and gives it back to whoever saves the step again.
    once_pinned: set[int] = field(default_factory=set)
    # Where a shard is that never came into the cache; and what was tried so and not acknowledged: it may turn up in its part
    # later, as a sealed file would that a crash left without its row.
    through: dict[Name, dict[str, str]] = field(default_factory=dict)
    tried: dict[Name, dict[str, set[bytes]]] = field(default_factory=dict)

    def copy(self) -> "Model":
        return Model(
            {key: dict(shards) for key, shards in self.parts.items()},
            set(self.committed),
            set(self.pinned),
            set(self.once_pinned),
            {key: dict(tiers) for key, tiers in self.through.items()},
            {key: {name: set(tries) for name, tries in tried.items()} for key, tried in self.tried.items()},
        )

    def complete(self) -> set[int]:
        return {step for step, writer in self.committed if all((step, each) in self.committed for each in range(WRITERS))}

    def holder(self, step: int, name: str) -> int | None:
        return next((writer for writer in range(WRITERS) if name in self.parts.get((step, writer), {})), None)

    def try_through(self, key: Name, shards: dict[str, bytes]) -> None:
        for name, data in shards.items():
            self.tried.setdefault(key, {}).setdefault(name, set()).add(data)

    def drop(self, key: Name) -> dict[str, bytes]:
        """A part, and all that was tried of it."""
        self.committed.discard(key)
        self.through.pop(key, None)
        self.tried.pop(key, None)
        return self.parts.pop(key, {})

    def forget(self, step: int) -> None:
        for writer in range(WRITERS):
            self.drop((step, writer))
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
        small, reads = SmallPath(node, writes, packed_from=2), ReadPath(node, finder, evictor)
        through, mender = Through(node, writes, open_stream), Mender(node, reads)
        small.divert, node.budget.through = through.put_group, through.tier
        for tier in node.tiers.values():
            tier.on_return(mender.retry_now)
        node.on_disk_return.append(mender.retry_now)
        drains = {
            name: Drain(node, tier, recover_copies=partial(recover_copies, node, tier), verified=lambda: None)
            for name, tier in node.tiers.items()
        }
        self.paths = Paths(
            node,
            writes,
            small,
            CommitPath(node, writes, joined_from=2),
            finder,
            reads,
            evictor,
            Retention(node, finder),
            drains,
            {name: Completion(node, tier, drains[name]) for name, tier in node.tiers.items()},
            through,
            Filer(node),
            mender,
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
        before = self.model.copy()
        with self._at(hit, self._freeze):
            await act()
        after = self.model
        await self.crash()
        self.model = self._as_found(before, after)

    async def cut_in(self, act: Callable[[], Awaitable[object]], tier: str, hit: int) -> None:
        """The tier goes away at the act's failpoint number `hit`, where it has so many."""
        with self._at(hit, lambda: self.outages.add(tier)):
            await act()

    @contextlib.contextmanager
    def _at(self, hit: int, happens: Callable[[], object]) -> Iterator[None]:
        left, real = itertools.count(hit, -1), failpoints.hit

        def pass_by(name: str) -> None:
            real(name)
            if next(left) == 0:
                happens()

        failpoints.hit = pass_by
        try:
            yield
        finally:
            failpoints.hit = real

    def _as_found(self, before: Model, after: Model) -> Model:
        """Of what the interrupted act changes, what the disk says; of all else, what was promised."""
        found = Model(pinned=before.pinned | after.pinned, once_pinned=before.once_pinned | after.once_pinned)
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
                    through = before.through.get(key, {}) | after.through.get(key, {})
                    found.through[key] = {name: tier for name, tier in through.items() if name in here}
                    for model in (before, after):
                        for name, tries in model.tried.get(key, {}).items():
                            for data in tries:
                                found.try_through(key, {name: data})
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

    async def put(
        self, step: int, writer: int, name: str, data: bytes, meanwhile: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        """One shard, by stream; `meanwhile` is done between its last chunk and its end."""
        key, shards = (step, writer), {name: data}
        refused = self._refusal(step, writer, shards)
        path = self.paths.through if self.paths.node.budget.disk.reason else self.paths.writes  # as the service does
        on = ""
        try:
            incoming = await path.begin(self.part(step, writer), name, len(data))
            if isinstance(incoming, Passage):
                on = incoming.tier.name
                self._open(step, writer)
                self.model.try_through(key, shards)
            try:
                if not isinstance(incoming, Existing):
                    for offset in range(0, len(data), CHUNK):
                        piece = memoryview(data)[offset : offset + CHUNK]
                        await incoming.chunk(offset, crc32c(piece), piece)
                    if meanwhile is not None:
                        self._sync_open(step, writer)
                        await meanwhile()
                        refused = key in self.model.committed
                receipt = await incoming.finish(len(data), crc32c(data))
            finally:
                await incoming.discard()
        except AlreadyExists:
            assert refused, (step, writer, name)
        except NotFound:
            assert meanwhile is not None and key not in self.model.parts, (step, writer, name)
        except CacheFull:
            pass
        except Unavailable as error:
            assert self._is_excused(error, shards, on), error
        else:
            assert not refused, (step, writer, name)
            assert (receipt.size, receipt.crc32c) == (len(data), crc32c(data))
            if meanwhile is not None and key not in self.model.parts:
                assert self._is_going(step), (step, writer, name)
                return
            self._landed(key, shards, {name: receipt.level})
        self._sync_open(step, writer)

    def _landed(self, key: Name, shards: dict[str, bytes], levels: dict[str, str]) -> None:
        """They are acknowledged, with these levels."""
        self._open(*key).update(shards)
        with self.paths.node.catalog.read() as txn:
            for name, level in levels.items():
                if self._named(txn, key, name).row.is_cached:
                    assert level == "cache", (key, name, level)
                    continue
                on = [tier for tier in self._on(key, name) if tier in level.split("+")]  # one word for a group
                assert on, (key, name, level)
                if key not in self.model.committed:
                    self.model.through.setdefault(key, {}).setdefault(name, on[0])

    def _is_going(self, step: int) -> bool:
        with self.paths.node.catalog.read() as txn:
            row = txn.checkpoint(RUN, step)
        return row is not None and row.deleting

    def _is_excused(self, error: ForebayError, names: Iterable[str], on: str = "") -> bool:
        """Whether a put may be refused so: of a checkpoint that goes; past the cache, where the tier that it had begun on went
        away, or none takes it, and for the sign of completeness; and into a cache whose disk fails."""
        if "deleted" in str(error):
            return True
        if on or not self.paths.node.budget.disk.reason:
            return on in self.outages
        usable = [tier for tier in self.paths.node.tiers.values() if tier.usable and tier.name not in self.outages]
        return not usable or any(is_commit_last(name) for name in names)

    async def put_broken(self, step: int, writer: int, name: str, size: int, how: str) -> None:
        """A stream without its trailer, damaged on its way, or with another checksum at its end: nothing is left of it."""
        data = bytes(size)
        path = self.paths.through if self.paths.node.budget.disk.reason else self.paths.writes
        with contextlib.suppress(ForebayError):
            incoming = await path.begin(self.part(step, writer), name, size)
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
        key = (step, writer)
        refused = self._refusal(step, writer, shards)
        small = [SmallShard(name, crc32c(data), memoryview(data)) for name, data in shards.items()]
        if self.paths.node.budget.disk.reason and not refused:
            self.model.try_through(key, shards)
        try:
            receipts = await self.paths.small.put(self.part(step, writer), small)
        except AlreadyExists:
            assert refused, (step, writer, shards)
        except CacheFull:
            pass
        except Unavailable as error:
            assert self.outages or self._is_excused(error, shards), error
        else:
            assert not refused, (step, writer, shards)
            self._landed(key, shards, {receipt.name: receipt.level for receipt in receipts})
        self._sync_open(step, writer)

    @contextlib.contextmanager
    def failing_disk(self) -> Iterator[None]:
        """Meanwhile shards go past the cache."""
        node, fails = self.paths.node, bool(self.paths.node.budget.disk.reason)
        self.fail_disk()
        try:
            yield
        finally:
            if node is self.paths.node and not fails:
                self.mend_disk()

    def fail_disk(self) -> None:
        for _ in range(FAILURES_IN_A_ROW):
            self.paths.node.budget.disk.failed("it takes no write, says the test")

    def mend_disk(self) -> None:
        """As health.py does, once it has written something."""
        node = self.paths.node
        node.budget.disk.worked()
        for listener in node.on_disk_return:
            listener()

    async def put_through(
        self, step: int, writer: int, name: str, data: bytes, meanwhile: Callable[[], Awaitable[object]] | None = None
    ) -> None:
        with self.failing_disk():
            await self.put(step, writer, name, data, meanwhile)

    async def put_small_through(self, step: int, writer: int, shards: dict[str, bytes]) -> None:
        with self.failing_disk():
            await self.put_small(step, writer, shards)

    async def put_broken_through(self, step: int, writer: int, name: str, size: int, how: str) -> None:
        with self.failing_disk():
            await self.put_broken(step, writer, name, size, how)

    async def tidy(self) -> None:
        """What is left of attempts is ended, one way or the other."""
        await self.paths.through.tidier.step()
        with self.paths.node.catalog.read() as txn:
            for (step, writer), shards in self.model.parts.items():
                for name in self._names(txn, step, writer) - shards.keys():
                    shard, tried = self._named(txn, (step, writer), name), self.model.tried.get((step, writer), {})
                    found = [data for data in tried.get(name, ()) if (len(data), crc32c(data)) == (shard.size, shard.crc32c)]
                    assert found, f"{name!r} of {step, writer} turned up, and nobody had put it into this part"
                    assert (step, writer) not in self.model.committed
                    shards[name] = found[0]
                    self.model.through.setdefault((step, writer), {})[name] = self._on((step, writer), name)[0]

    async def disk_fails(self) -> None:
        """Until it works again: all that comes goes past the cache, and no part has a file."""
        self.fail_disk()

    async def disk_works(self) -> None:
        self.mend_disk()

    async def file_parts(self) -> None:
        await self.paths.filer.step()

    async def mend(self) -> None:
        """All that can be mended now."""
        while await self.paths.mender.step() is not None:
            pass

    # -- what the catalog says -----------------------------------------------------------------------------------------

    def _names(self, txn: ReadTxn, step: int, writer: int) -> set[str]:
        return {shard.name for row in self._rows(txn, step, writer) for shard in txn.inside(row)}

    def _rows(self, txn: ReadTxn, step: int, writer: int) -> list[ShardRow]:
        session = txn.find_session(RUN, step, session_of(step, self.generation))
        return [] if session is None else list(txn.shards(session.id, writer))

    def _named(self, txn: ReadTxn, key: Name, name: str) -> NamedShard:
        session = txn.find_session(RUN, key[0], session_of(key[0], self.generation))
        assert session is not None, (key, name)
        shard = txn.named(session.id, name)
        assert shard is not None and shard.writer == key[1], (key, name)
        return shard

    def _on(self, key: Name, name: str) -> list[str]:
        """The tiers that have it proved."""
        with self.paths.node.catalog.read() as txn:
            copies = txn.copies(self._named(txn, key, name).row.key)
        return [tier for tier in TIERS if tier in copies and copies[tier].state is CopyState.VERIFIED]

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
            assert dropped == len(self.model.drop((step, writer)))
            if step in self.model.pinned and not any(key[0] == step for key in self.model.parts):
                self.model.pinned.discard(step)  # nothing is left to pin
                self.model.once_pinned.add(step)

    async def pin(self, step: int, pinned: bool) -> None:
        known = any(key[0] == step for key in self.model.parts)
        try:
            await self.paths.retention.pin(RUN, step, pinned)
        except (NotFound, Unavailable):
            assert not known
        else:
            self.model.once_pinned.discard(step)
            (self.model.pinned.add if pinned else self.model.pinned.discard)(step)

    async def delete(self, step: int) -> None:
        """By force; what a tier that is away still holds goes once it is back."""
        known = any(key[0] == step for key in self.model.parts)
        try:
            await self.paths.retention.delete(RUN, step, force=True, dry_run=False)
        except ForebayError as error:
            assert not known or step in self.model.pinned | self.model.once_pinned, error
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
        """All tiers are there, the disk works, and all work is done: everything promised is complete on both, all that was
        deleted is gone, and so is what is left of attempts."""
        if self.paths.node.budget.disk.reason:
            self.mend_disk()
        for _ in range(60):
            for tier in TIERS:
                await self.comes_back(tier)
            await self.tidy()
            await self.file_parts()
            await self.mend()
            for tier in TIERS:
                await self.drain(tier)
                await self.complete(tier)
            await self.retain()
            await self.pass_time(30.0)
            if not self._left():
                return
        raise AssertionError(f"does not settle: {self._left()}")

    def _left(self) -> list[str]:
        with self.paths.node.catalog.read() as txn:
            left = [f"deleting {row.step}" for row in txn.deleting()]
            left += [name for name, _ in txn.settings() if name.startswith(("passing:", UNFILED))]
            left += [
                f"{gone.key} on {tier}" for tier in TIERS for gone in self._leaving(txn, tier) if not self._waits(txn, gone)
            ]
            for tier in TIERS:
                for entry in txn.pending(tier):  # the sign of completeness of a step that lacks a writer waits for ever
                    session, row = txn.session(entry.key.session_id), txn.shard(entry.key)
                    assert session is not None and row is not None
                    if session.step in self.model.complete() or not is_commit_last(row.name):
                        left.append(f"pending on {tier}: {entry}")
                waiting = {session.step for session in txn.unpublished(tier)} & self.model.complete()
                left += [f"step {step} is not complete on {tier}" for step in waiting]
        return left

    def _leaving(self, txn: ReadTxn, tier: str) -> list[Leaving]:
        """What is noted to be deleted there."""
        return [
            msgspec.msgpack.decode(value, type=Leaving) for name, value in txn.settings() if name.startswith(f"leaving:{tier}:")
        ]

    def _waits(self, txn: ReadTxn, gone: Leaving) -> bool:
        """Whether a shard of its name is here that has not come there: it replaces it, or goes, and the other goes then."""
        return any(
            step == gone.step and gone.name in {row.name for row in self._rows(txn, step, writer)}
            for step, writer in self.model.parts
        )

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
            unfiled = {
                tuple(int(n, 16) for n in name[len(UNFILED) :].split("-"))
                for name, _ in txn.settings()
                if name.startswith(UNFILED)
            }
            for (step, writer), shards in self.model.parts.items():
                assert self._names(txn, step, writer) == shards.keys(), (step, writer)
                through = self.model.through.get((step, writer), {})
                for name, data in shards.items():
                    shard = self._named(txn, (step, writer), name)
                    assert (shard.size, shard.crc32c) == (len(data), crc32c(data))
                    if name in through:
                        self._check_on_tier(through[name], step, shard, data)
                    elif not shard.row.is_cached:  # then it is safe elsewhere, every byte of it
                        assert (step, writer) in self.model.committed
                        for tier in TIERS:
                            self._check_on_tier(tier, step, shard, data)
                            assert manifest_key(RUN, step) in self.stores[tier].objects
        files = {path: path.stat().st_size for path in self._cache.glob("data/*/*.shard")}
        assert {node.cache.shard_path(row.key) for row in rows.values() if row.disk_size} == set(files)
        found = {(file.session_id, file.writer, file.commit_seq) for file in node.cache.scan() if file.kind == "part"}
        filed = {part for part in promised if part[0] not in going and part[:2] not in unfiled}
        assert filed <= found <= promised
        assert node.budget.used == totals.used == sum(files.values())
        assert node.budget.reserved == 0
        assert not node.passing and not self.paths.through.tidier.under_way
        assert list((self._cache / "incoming").iterdir()) == []

    def _check_on_tier(self, tier: str, step: int, shard: NamedShard, data: bytes) -> None:
        begin = 0 if shard.packed is None else shard.packed.offset
        whole = self.stores[tier].objects[shard_key(RUN, step, session_of(step, self.generation), shard.row.name)].data
        assert len(whole) == shard.row.size and whole[begin : begin + shard.size] == data

    def check_stores(self) -> None:
        """Once all is settled: each tier holds what committed parts and shards that went through to it need, and nothing else.

        Left by design: the note of the run, which goes with no checkpoint. Allowed, not needed: the sign of completeness of a
        checkpoint that lacks a writer, and the record of its part, which waits for it; it may have gone through before. And an
        object that was put for a part that is gone, while one of its name waits here.
        """
        complete = self.model.complete()
        for tier, store in self.stores.items():
            needed, allowed = {manifest_key(RUN, step) for step in complete}, {run_key(RUN)}
            with self.paths.node.catalog.read() as txn:
                for (step, writer), shards in self.model.parts.items():
                    names, committed = (RUN, step, session_of(step, self.generation)), (step, writer) in self.model.committed
                    waits = committed and step not in complete and any(map(is_commit_last, shards))
                    for name, data in shards.items():
                        shard = self._named(txn, (step, writer), name)
                        if committed and not (waits and is_commit_last(name)):
                            needed.add(shard_key(*names, shard.row.name))
                            self._check_on_tier(tier, step, shard, data)
                        elif committed or self.model.through.get((step, writer), {}).get(name) == tier:
                            (allowed if committed else needed).add(shard_key(*names, shard.row.name))
                    if committed:
                        (allowed if waits else needed).add(part_key(*names, writer))
                allowed |= {gone.key for gone in self._leaving(txn, tier) if self._waits(txn, gone)}
            found = set(store.objects)
            assert needed <= found, (tier, "lacks", needed - found)
            assert found <= needed | allowed, (tier, "has left", found - needed - allowed)
            assert set(store.links) == {current_key(RUN, step) for step in complete}, (tier, store.links)

    async def check_reads(self) -> None:
        """Every shard of every complete checkpoint, and nothing of any other."""
        for step in self.model.complete():
            for writer in range(WRITERS):
                for name in self.model.parts[step, writer]:
                    await self.read(step, name)
