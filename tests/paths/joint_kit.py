"""Several nodes of one job in this process, with one tier in memory that counts what it is asked; a test moves their clocks.

Owns no assertions.
"""

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, ClassVar

from forebay_gateway.core.layout import verdicts_key
from forebay_gateway.core.records import PublishState, SessionRow
from forebay_gateway.core.verdicts import RunVerdicts, read_verdicts
from forebay_gateway.paths.announce import Announcer
from forebay_gateway.paths.commit import Committed, Expected
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.queue import Queue
from forebay_gateway.paths.wait import Waiter
from forebay_gateway.paths.write import Existing, PartRef
from forebay_gateway.tiers.memory import MemoryStore, MemoryTier
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.checksums import crc32c
from paths.nodes_kit import Here

RUN = "team/run"


class SharedTier(MemoryTier):
    """One that nodes meet on. `asked` counts requests for documents and listings by (verb, key)."""

    kind: ClassVar[str] = "shared"

    def __init__(self, name: str, store: MemoryStore) -> None:
        super().__init__(name, store)
        self.asked: Counter[tuple[str, str]] = Counter()
        self.away = False

    async def put_small(self, key: str, data: bytes, **conditions: Any) -> Any:
        self._ask("put", key)
        return await super().put_small(key, data, **conditions)

    async def get_small(self, key: str, limit_bytes: int = 256 << 20) -> Any:
        self._ask("get", key)
        return await super().get_small(key, limit_bytes)

    async def head(self, key: str) -> Any:
        self._ask("head", key)
        return await super().head(key)

    async def list(self, prefix: str) -> Any:
        self._ask("list", prefix)
        return await super().list(prefix)

    async def delete(self, key: str) -> None:
        self._ask("delete", key)
        await super().delete(key)

    def _ask(self, verb: str, key: str) -> None:
        from forebay_gateway.core.errors import Unavailable

        self.asked[verb, key] += 1
        if self.away:
            raise Unavailable("away", tier=self.name)


class JobNode(Here):
    """One node of a job; the tier is "pfs"."""

    async def __aenter__(self) -> "JobNode":
        await super().__aenter__()
        node = self.node
        self.shared = SharedTier("pfs", self.stores["pfs"])
        monitored = MonitoredTier(self.shared, required=True, clock=self.clock)
        await monitored.step()
        # The kit's parts look tiers up by name, but for completion, which is given its own.
        node.tiers["pfs"] = monitored
        self.drains["pfs"]._tier = monitored
        self.completions["pfs"]._tier = monitored
        self.announcer = Announcer(node)
        self.queue = Queue(node, self.drains)
        self.retention.pinned, self.retention.deleted = self.queue.pinned, self.queue.deleted
        self.evictor = Evictor(node)
        self.evictor.drop_cache_only = self.retention.drop_cache_only
        self.waiter = Waiter(node, self.finder)
        self.shared.asked.clear()
        return self

    @property
    def joint(self) -> Any:
        return self.drains["pfs"].order.joint

    async def restart(self, keys: str | None = None) -> None:
        """As after a kill."""
        await self.__aexit__()
        self.keys = self.keys if keys is None else keys
        clock = self.clock
        await self.__aenter__()
        self.node.clock = self.clock
        del clock

    async def part(
        self, step: int, writer: int, writers: int, *, kind: str = "", session: str = "s", size: int = 1000
    ) -> Committed:
        """One writer's part, of one shard."""
        data = f"{step} {writer} ".encode() * (size // 4)
        part = PartRef(RUN, step, session, writer, writers)
        name = f"w{writer}.bin"
        incoming = await self.writes.begin(part, name, len(data))
        assert not isinstance(incoming, Existing)
        await incoming.chunk(0, crc32c(data), memoryview(data))
        await incoming.finish(len(data), crc32c(data))
        return await self.commits.commit(part, [Expected(name, len(data), crc32c(data))], "", kind)

    async def turn(self, passed_s: float = 0.0) -> None:
        """One step of each worker."""
        if passed_s:
            await self.clock.advance(passed_s)
        await self.announcer.step()
        await self.drains["pfs"].step()
        await self.completions["pfs"].step()

    def session(self, step: int, session: str = "s") -> SessionRow | None:
        with self.node.catalog.read() as txn:
            return txn.find_session(RUN, step, session)

    def where(self, *steps: int) -> list[str]:
        """Where each of these stands on the tier, as this node sees it."""
        found = [self.session(step) for step in steps]
        return ["" if each is None else each.publish.get("pfs", PublishState.PENDING).value for each in found]


class Job:
    """The nodes of one job, writer n on node n."""

    def __init__(self, store: MemoryStore, nodes: Sequence[JobNode]) -> None:
        self.store, self.nodes = store, nodes

    async def save(self, *steps: int, kinds: Sequence[str] = (), only: Sequence[int] = ()) -> None:
        """A part of each by every node, or by these alone."""
        for step in steps:
            for writer, node in enumerate(self.nodes):
                if not only or writer in only:
                    await node.part(step, writer, len(self.nodes), kind=kinds[writer] if kinds else "")

    async def turns(self, count: int = 12, passed_s: float = 1.0, but: Sequence[JobNode] = ()) -> None:
        """Time passes, and every worker of all nodes has its turn."""
        for _ in range(count):
            for node in self.nodes:
                if node not in but:
                    await node.turn(passed_s)

    def where(self, *steps: int) -> list[list[str]]:
        return [node.where(*steps) for node in self.nodes]

    def shards(self, step: int) -> list[str]:
        """Of the step on the tier."""
        begins = f"{RUN}/step-{step:012d}/"
        return sorted(key.rpartition("/")[2] for key in self.store.objects if key.startswith(begins) and key.endswith(".bin"))

    def is_complete(self, step: int) -> bool:
        """Whether its manifest is there."""
        return f"{RUN}/step-{step:012d}/manifest.json" in self.store.objects

    def verdicts(self) -> list[tuple[int, bool]]:
        """As they stand on the tier."""
        found = self.book()
        return [] if found is None else [(each.step, each.goes) for each in found.verdicts]

    def book(self) -> RunVerdicts | None:
        document = self.store.objects.get(verdicts_key(RUN))
        return None if document is None else read_verdicts(document.data, RUN)


@asynccontextmanager
async def job(directory: Path, keys: str = "", *, nodes: int = 2, others: str | None = None) -> AsyncIterator[Job]:
    """`keys` are added to each node's configuration; `others` instead to all but the first's."""
    store = MemoryStore()
    async with AsyncExitStack() as stack:
        made = []
        for number in range(nodes):
            own = keys if number == 0 or others is None else others
            made.append(await stack.enter_async_context(JobNode(directory, {"pfs": store}, "abcdef"[number], own)))
        yield Job(store, made)
