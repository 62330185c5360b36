"""Space, made only from what every required tier holds verified, and from what by policy no tier is to hold.

    first: a checkpoint that is transient, or was left out on every tier and outlived (safety.expendable), as a whole
    then: oldest EVICTABLE shard that nobody reads and nobody pinned -> EVICTING -> unlink, directory synced -> EVICTED

Owns the choice and the order of acts. Dirty data is not in the index it reads from, so it cannot be chosen.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable

from forebay_gateway.base import failpoints
from forebay_gateway.base.tasks import uncut
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.errors import ForebayError, NotFound, Unavailable
from forebay_gateway.core.records import CheckpointRow, ShardKey, ShardRow
from forebay_gateway.core.states import ShardEvent, ShardState
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import all_shards
from forebay_gateway.paths.safety import expendable

log = logging.getLogger("forebay.evict")

BATCH_SHARDS_MAX = 256
REST_FACTOR = 20  # a look that finds nothing takes at most this part of one core, however much there is


class Evictor:
    """Makes room, by watermark in the background and on demand before a reservation is refused."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._readers: Counter[ShardKey] = Counter()
        self._unfinished: list[ShardRow] = []  # EVICTING, their files not removed yet
        self._lock = asyncio.Lock()
        self._look_again_s = float("-inf")  # for what no tier is to hold
        self.drop_cache_only: Callable[[CheckpointRow], Awaitable[None]] | None = None  # Retention's

    def hold(self, key: ShardKey) -> None:
        """A reader has the cache file open."""
        self._readers[key] += 1

    def let_go(self, key: ShardKey) -> None:
        """The reader is done."""
        self._readers[key] -= 1
        if self._readers[key] <= 0:
            del self._readers[key]

    async def step(self) -> float | None:
        """Background: down to the soft watermark."""
        async with self._lock:
            await self._finish_again()
        over = self._node.budget.above_soft_bytes()
        if over:
            async with self._lock:
                await self._evict(over)
        return None

    async def make_room(self, size: int) -> bool:
        """Evict until `size` bytes would be taken; False where verified data does not suffice."""
        async with self._lock:
            missing = self._node.budget.missing_bytes(size)
            return missing == 0 or await self._evict(missing) >= missing

    async def evict_session(self, session_id: int, *, dry_run: bool = False) -> tuple[int, int]:
        """All of the session that may go now, whatever the watermarks say: (shards, bytes freed), or what they would be."""
        shards = freed = 0
        async with self._lock:
            found = await all_shards(self._node, session_id)
            evictable = [row for row in found if row.state is ShardState.EVICTABLE]
            rows = [row for row in evictable if row.key not in self._readers]
            if dry_run:
                return sum(row.visible_count for row in rows), sum(row.disk_size for row in rows)
            for begin in range(0, len(rows), BATCH_SHARDS_MAX):
                batch = rows[begin : begin + BATCH_SHARDS_MAX]
                freed += await uncut(self._evict_rows(batch))
                shards += sum(row.visible_count for row in batch)
        return shards, freed

    async def evict(self, wanted: int) -> int:
        """Let go of up to `wanted` bytes, or a little more; returns how many went."""
        async with self._lock:
            return await self._evict(wanted)

    async def _evict(self, wanted: int) -> int:
        freed = await self._evict_cache_only(wanted)
        while freed < wanted:
            rows = self._choose(wanted - freed)
            if not rows:
                break
            freed += await uncut(self._evict_rows(rows))
        return freed

    async def _evict_cache_only(self, wanted: int) -> int:
        """Whole checkpoints that no tier has or is to get, oldest first, and a run's newest last of all."""
        freed, drop = 0, self.drop_cache_only
        if drop is None:
            return 0
        for row in self._cache_only():
            if freed >= wanted:
                break
            if self._is_read(row):
                continue
            used = self._node.budget.used
            try:
                await drop(row)
            except (NotFound, Unavailable) as error:  # it is another one now: begun anew, pinned, or the run's newest
                log.info("a checkpoint that is to leave the cache stays run=%s step=%s reason=%s", row.run, row.step, error)
                continue
            log.info("evicted a checkpoint that no tier was to hold run=%s step=%s", row.run, row.step)
            freed += max(0, used - self._node.budget.used)
        return freed

    def _is_read(self, row: CheckpointRow) -> bool:
        return any(key.session_id in row.session_ids for key in self._readers)

    def _cache_only(self) -> list[CheckpointRow]:
        newest: dict[str, int] = {}
        found: list[tuple[int, CheckpointRow]] = []
        began_s = self._node.clock.monotonic()
        if began_s < self._look_again_s:
            return []
        with self._node.catalog.read() as txn:
            for row in expendable(txn, self._node.required_tiers):
                commit_seq = max(0 if (each := txn.session(number)) is None else each.commit_seq for number in row.session_ids)
                newest[row.run] = max(newest.get(row.run, 0), commit_seq)
                found.append((commit_seq, row))
        if not found:  # who waits for space asks again and again
            self._look_again_s = began_s + REST_FACTOR * (self._node.clock.monotonic() - began_s)
        found.sort(key=lambda each: (each[0] == newest[each[1].run], each[0]))
        return [row for _, row in found]

    def _choose(self, wanted: int) -> list[ShardRow]:
        chosen: list[ShardRow] = []
        total = 0
        pinned: dict[int, bool] = {}
        with self._node.catalog.read() as txn:

            def is_pinned(session_id: int) -> bool:
                if session_id not in pinned:
                    session = txn.session(session_id)
                    checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
                    pinned[session_id] = checkpoint is not None and checkpoint.pinned
                return pinned[session_id]

            for row in txn.evictable(is_pinned):
                if total >= wanted or len(chosen) >= BATCH_SHARDS_MAX:
                    break
                if row.key in self._readers:
                    continue
                chosen.append(row)
                total += row.disk_size
        return chosen

    async def _evict_rows(self, rows: list[ShardRow]) -> int:
        def begin(txn: WriteTxn) -> list[ShardRow]:
            # Chosen a moment ago: a tier may have lost its copy since, or the file was seen to be bad.
            still = [row for row in rows if (now := txn.shard(row.key)) is not None and now.state is ShardState.EVICTABLE]
            return [txn.shard_event(row.key, ShardEvent.EVICT) for row in still]

        rows = await self._node.catalog.write(begin, frees=True)
        failpoints.hit("evict.before_unlink")
        await self.finish(rows)
        freed = sum(row.disk_size for row in rows)
        log.info("evicted shards=%s bytes=%s", len(rows), freed)
        return freed

    async def finish(self, rows: list[ShardRow]) -> None:
        """Unlink the files of EVICTING rows and say so; what cannot be removed now is tried again in the background."""
        try:
            await finish_evicting(self._node, rows)
        except ForebayError:
            self._unfinished += rows
            raise

    async def _finish_again(self) -> None:
        """What could not be removed or recorded at the first try."""
        if rows := list(self._unfinished):
            await finish_evicting(self._node, rows)
            del self._unfinished[: len(rows)]  # others may have come meanwhile


async def finish_evicting(node: Node, rows: list[ShardRow]) -> None:
    """Unlink the files of EVICTING rows and say so; repeated after a crash."""
    await node.io.run(node.cache.unlink_many, [node.cache.shard_path(row.key) for row in rows])
    failpoints.hit("evict.before_catalog")

    def end(txn: WriteTxn) -> int:
        freed = 0
        for row in rows:
            current = txn.shard(row.key)
            if current is not None and current.state is ShardState.EVICTING:  # else deleted meanwhile, its bytes with it
                freed += current.disk_size
                txn.shard_event(row.key, ShardEvent.UNLINKED)
        return freed

    node.budget.freed(await node.catalog.write(end, frees=True))
