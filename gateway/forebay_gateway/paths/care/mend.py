"""Good bytes back to where they are missing, from wherever they still are.

    quarantined in the cache: fetched from a tier into a fresh file, which takes the bad one's name
    a bad copy on a tier: queued again, from the cache, or from another tier by way of the cache
    not in the cache, and wanted by a tier's queue: fetched, so that the queue can go on

Owns the choice and the repetition. What is to be mended comes as hints (Node.ask_mend); a shard that cannot be mended now is
tried again later, ever more seldom, and stays as it is. Never makes bytes up: without a good copy nothing changes.
"""

import logging
from collections.abc import Collection
from dataclasses import dataclass

from forebay_gateway.base import failpoints
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.records import SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyEvent, CopyState, ShardState
from forebay_gateway.paths.drain import shard_item
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.read import ReadPath

log = logging.getLogger("forebay.mend")

RETRY_S_MIN, RETRY_S_MAX = 2.0, 300.0
REMEMBERED_MAX = 4096  # shards whose next try is noted; the oldest is forgotten, and then tried sooner


@dataclass(frozen=True, slots=True)
class Mended:
    """What came of it. `reason` is empty where all is good, or on its way."""

    reason: str = ""
    acted: bool = False


class Mender:
    """Background repair, and the act itself for commands."""

    def __init__(self, node: Node, reads: ReadPath) -> None:
        self._node = node
        self._reads = reads
        self._later: dict[ShardKey, tuple[float, float]] = {}  # key: (not before, the pause that led to it), in seconds

    async def step(self) -> float | None:
        """One shard; the pause in seconds until the next look."""
        now_s = self._node.clock.monotonic()
        for key in self._node.to_mend:
            if self._later.get(key, (0.0, 0.0))[0] <= now_s:
                break
        else:
            return None
        del self._node.to_mend[key]
        outcome = await self.mend(key, self._node.config.cache.repair == "auto")
        if outcome.reason:
            log.info("a shard cannot be mended now key=%s reason=%s", key, outcome.reason)
            self._try_later(key)
        else:
            self._later.pop(key, None)
        return 0.0

    def _try_later(self, key: ShardKey) -> None:
        _, pause_s = self._later.pop(key, (0.0, RETRY_S_MIN / 2))
        pause_s = min(RETRY_S_MAX, 2 * pause_s)
        self._later[key] = (self._node.clock.monotonic() + pause_s, pause_s)
        if len(self._later) > REMEMBERED_MAX:
            del self._later[next(iter(self._later))]
        self._node.ask_mend(key)

    def retry_now(self) -> None:
        """A tier came back: nothing waits for its pause any more."""
        self._later.clear()

    async def mend(self, key: ShardKey, quarantined: bool = True) -> Mended:
        """Do what can be done for one shard; `quarantined` False leaves bad copies to the operator."""
        found = self._look(key)
        if found is None:
            return Mended()
        session, row, bad, wanted = found
        acted = False
        if not row.is_cached and ((row.state is ShardState.QUARANTINED and quarantined) or (bad and quarantined) or wanted):
            if row.state is ShardState.QUARANTINED and not quarantined:
                return Mended("its cache file is in quarantine; `forebay repair` shows what can be done")
            if not await self._fetch(session, row):
                return Mended(self.why_not(key))
            failpoints.hit("mend.fetched")
            acted = True
        if bad and quarantined:
            await self._node.catalog.write(lambda txn: _requeue(txn, key, self._node.releasing))
            acted = True
        if acted:
            self._tell(key, session, row)
        return Mended(acted=acted)

    def _look(self, key: ShardKey) -> tuple[SessionRow, ShardRow, list[str], bool] | None:
        """The shard, the tiers whose copy is bad, and whether some queue waits for it; None for one that is gone or going."""
        with self._node.catalog.read() as txn:
            row, session = txn.shard(key), txn.session(key.session_id)
            checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
            if row is None or session is None or checkpoint is None or checkpoint.deleting:
                return None
            copies = {name: copy for name, copy in txn.copies(key).items() if name in self._node.tiers}
        bad = [name for name, copy in copies.items() if copy.state is CopyState.QUARANTINED]
        wanted = any(copy.state is CopyState.PENDING for copy in copies.values())
        return session, row, bad, wanted

    async def _fetch(self, session: SessionRow, row: ShardRow) -> bool:
        if row.state not in (ShardState.EVICTED, ShardState.QUARANTINED):
            return False
        with self._node.catalog.read() as txn:
            item = shard_item(txn, session, row)
        return await self._reads.fetch(session, row, item)

    def why_not(self, key: ShardKey) -> str:
        """Why there are no good bytes to be had now."""
        copies = self._reads.copies(key)
        good = [name for name, copy in copies.items() if copy.state is CopyState.VERIFIED and name in self._node.tiers]
        away = [name for name in good if not self._node.tiers[name].usable]
        if not good:
            return "no good copy of it is known"
        if len(away) == len(good):
            return f"the tier that holds a good copy cannot be reached now: {', '.join(away)}"
        return "it could not be fetched into the cache now; the gateway's log says why"

    def _tell(self, key: ShardKey, session: SessionRow, row: ShardRow) -> None:
        for kind in ("lost", "quarantine"):
            self._node.alarms.pop(f"{kind}-{key.session_id}-{key.shard_id}", None)
        log.info("mended a shard run=%s step=%s name=%s", session.run, session.step, row.name)
        self._node.changes.tell()


def _requeue(txn: WriteTxn, key: ShardKey, releasing: Collection[tuple[ShardKey, str]]) -> None:
    for name, copy in txn.copies(key).items():
        if copy.state is CopyState.QUARANTINED and (key, name) not in releasing:  # that is queued once the bad one is gone
            txn.copy_event(key, name, CopyEvent.REQUEUE)
