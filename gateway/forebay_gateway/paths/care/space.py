"""One checkpoint into the cache, or out of it, because an operator says so.

Owns the two verbs. What may be evicted is evict.py's rule, how a shard comes back is read.py's.
"""

from dataclasses import dataclass

from forebay_gateway.core.errors import InvalidArgument, NotFound, Unavailable
from forebay_gateway.core.states import ShardState
from forebay_gateway.paths.drain import shard_item
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import all_shards
from forebay_gateway.paths.read import ReadPath


@dataclass(frozen=True, slots=True)
class Moved:
    """`shards` and `size` (bytes) were evicted or fetched; `left` shards were not, for `reason`."""

    shards: int
    size: int
    left: int
    reason: str = ""


class Space:
    """Evicts and warms up."""

    def __init__(self, node: Node, finder: Finder, reads: ReadPath, evictor: Evictor) -> None:
        self._node, self._finder, self._reads, self._evictor = node, finder, reads, evictor

    async def evict(self, run: str, step: int, *, dry_run: bool = False) -> Moved:
        """All of the checkpoint that its required tiers hold, or what that is. Raises NotFound, InvalidArgument if pinned."""
        with self._node.catalog.read() as txn:
            row = txn.checkpoint(run, step)
            sessions = [] if row is None or row.deleting else txn.sessions_of(row)
        if row is None or not sessions:
            raise NotFound(f"no checkpoint of run {run!r} with step {step} is in this node's cache", run=run, step=step)
        if row.pinned:
            raise InvalidArgument("the checkpoint is pinned; unpin it first", run=run, step=step)
        shards = size = 0
        for session in sessions:
            count, freed = await self._evictor.evict_session(session.id, dry_run=dry_run)
            shards, size = shards + count, size + freed
        left = [row for session in sessions for row in await all_shards(self._node, session.id) if row.disk_size]
        dirty = sum(row.visible_count for row in left if row.state is ShardState.SEALED)
        bad = sum(row.visible_count for row in left if row.state is ShardState.QUARANTINED)
        count = sum(row.visible_count for row in left) - shards * dry_run
        reasons = [f"{dirty} not yet on every required tier"] * bool(dirty) + [f"{bad} in quarantine"] * bool(bad)
        if count > dirty + bad:
            reasons.append(f"{count - dirty - bad} being read")
        return Moved(shards, size, count, ", ".join(reasons))

    async def warm_up(self, run: str, step: int) -> Moved:
        """Fetch what is not in the cache. Raises NotFound, Unavailable where nothing could be fetched."""
        session = (await self._finder.complete(run, step)).session
        rows = [row for row in await all_shards(self._node, session.id) if not row.is_cached]
        shards = size = 0
        for row in rows:
            with self._node.catalog.read() as txn:
                item = shard_item(txn, session, row)
            if row.state in (ShardState.EVICTED, ShardState.QUARANTINED) and await self._reads.fetch(session, row, item):
                shards, size = shards + row.visible_count, size + row.visible_size
        left = sum(row.visible_count for row in rows) - shards
        reason = "the cache has no room, or no tier could serve them; the gateway's log says why" if left else ""
        if left and not shards:
            raise Unavailable(f"no shard could be fetched: {reason}", retry_after_s=5.0, shards=left)
        return Moved(shards, size, left, reason)
