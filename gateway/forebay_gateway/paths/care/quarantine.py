"""What lies in quarantine, why, and its release by an operator.

Owns ids, the list and the release. A quarantined cache file stays where it is until it is repaired or released.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from forebay_gateway.base import failpoints
from forebay_gateway.base.tasks import uncut
from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import InvalidArgument, NotFound
from forebay_gateway.core.layout import shard_key
from forebay_gateway.core.records import SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyEvent, CopyState, ShardEvent, ShardState
from forebay_gateway.paths.care.fsck import good_tiers
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.node import Node

ROWS_A_READ = 2000


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One bad copy. `good` names where a good one is known to be."""

    id: str
    run: str
    step: int
    session: str
    name: str
    where: str
    path: str
    size: int
    reason: str
    good: tuple[str, ...]


class Quarantine:
    """Reads and releases."""

    def __init__(self, node: Node, evictor: Evictor) -> None:
        self._node, self._evictor = node, evictor

    async def entries(self) -> AsyncGenerator[Quarantined, None]:
        """All of it: copies on tiers by their queues, cache files by a walk over the rows."""
        after: ShardKey | None = None
        while True:
            found, last = self._page(after)
            for entry in found:
                yield entry
            if last is None:
                return
            after = last

    def _page(self, after: ShardKey | None) -> tuple[list[Quarantined], ShardKey | None]:
        found: list[Quarantined] = []
        with self._node.catalog.read() as txn:
            for looked, row in enumerate(txn.all_shards(after), start=1):
                found += self._of_row(txn, row)
                if looked >= ROWS_A_READ:
                    return found, row.key
        return found, None

    def _of_row(self, txn: ReadTxn, row: ShardRow) -> list[Quarantined]:
        bad = [name for name, copy in txn.copies(row.key).items() if copy.state is CopyState.QUARANTINED]
        session = txn.session(row.session_id) if bad or row.state is ShardState.QUARANTINED else None
        if session is None:
            return []
        here = [self._entry(txn, session, row, "")] if row.state is ShardState.QUARANTINED else []
        return here + [self._entry(txn, session, row, name) for name in bad]

    def _entry(self, txn: ReadTxn, session: SessionRow, row: ShardRow, tier: str) -> Quarantined:
        id_ = f"{row.session_id}-{row.shard_id}"
        good = tuple(["cache"] * row.is_cached) + tuple(name for name in good_tiers(txn, row, self._node.tiers) if name != tier)
        if tier:
            copy = txn.copy(row.key, tier)
            reason = copy.error if copy is not None else ""
            path = shard_key(session.run, session.step, session.session, row.name)
        else:
            alarm = self._node.alarms.get(f"quarantine-{id_}") or self._node.alarms.get(f"lost-{id_}")
            reason = alarm[0] if alarm else ("its bytes do not match their checksums" if row.disk_size else "its file is lost")
            path = str(self._node.cache.shard_path(row.key)) if row.disk_size else ""
        return Quarantined(
            f"{id_}@{tier}" if tier else id_,
            session.run,
            session.step,
            session.session,
            row.name,
            tier or "cache",
            path,
            row.size,
            reason,
            good,
        )

    def show(self, id_: str) -> Quarantined:
        """One entry. Raises NotFound."""
        key, tier = parse_id(id_)
        with self._node.catalog.read() as txn:
            row = txn.shard(key)
            entries = [] if row is None else self._of_row(txn, row)
        wanted = tier or "cache"
        for entry in entries:
            if entry.where == wanted:
                return entry
        raise NotFound(f"nothing in quarantine has the id {id_!r}; `forebay quarantine ls` lists them")

    async def release(self, id_: str, force: bool, *, dry_run: bool = False) -> Quarantined:
        """Drop the bad bytes, or say which. Raises NotFound; InvalidArgument where no good copy is known, unless `force`."""
        entry = self.show(id_)
        if not entry.good and not force:
            raise InvalidArgument(
                f"no good copy of shard {entry.name!r} is known, so what is left of it would go; release it with --force to do "
                "it all the same"
            )
        if dry_run:
            return entry
        key, tier = parse_id(id_)
        act = self._release_copy(key, tier, entry.path) if tier else self._release_file(key, lost=not entry.good)
        await uncut(act, stay=True)
        self._node.changes.tell()
        return entry

    async def _release_copy(self, key: ShardKey, tier: str, path: str) -> None:
        """The object goes, and the copy is queued again: by nobody else before, or what is put anew would be deleted."""
        monitored, releasing = self._node.tier(tier), self._node.releasing

        def begin(txn: WriteTxn) -> bool:
            copy = txn.copy(key, tier)
            if copy is None or copy.state is not CopyState.QUARANTINED:
                return False
            releasing.add((key, tier))
            return True

        def end(txn: WriteTxn) -> None:
            copy = txn.copy(key, tier)
            if copy is not None and copy.state is CopyState.QUARANTINED:
                txn.copy_event(key, tier, CopyEvent.REQUEUE)

        try:
            if await self._node.catalog.write(begin):  # else it was mended meanwhile
                await monitored.tier.delete(path)
                failpoints.hit("release.object_gone")
                await self._node.catalog.write(end)
        finally:
            releasing.discard((key, tier))

    async def _release_file(self, key: ShardKey, lost: bool) -> None:
        def act(txn: WriteTxn) -> ShardRow | None:
            row = txn.shard(key)
            if row is None or row.state is not ShardState.QUARANTINED:
                return None
            if lost:
                txn.set_reason(key.session_id, f"shard {row.name!r} is lost: its damaged cache file was released")
            return txn.shard_event(key, ShardEvent.EVICT)

        row = await self._node.catalog.write(act)
        failpoints.hit("release.before_unlink")
        if row is not None:
            await self._evictor.finish([row])
            for kind in ("lost", "quarantine"):
                self._node.alarms.pop(f"{kind}-{key.session_id}-{key.shard_id}", None)


def parse_id(id_: str) -> tuple[ShardKey, str]:
    """(shard, tier or "") of an id such as 12-34 or 12-34@pfs. Raises NotFound: what is no id names nothing."""
    numbers, _, tier = id_.partition("@")
    session, dash, shard = numbers.partition("-")
    if not dash or not all(text.isascii() and text.isdigit() and len(text) <= 20 for text in (session, shard)):
        raise NotFound(f"nothing in quarantine has the id {id_!r}; ids look like 12-34 or 12-34@pfs")
    key = ShardKey(int(session), int(shard))
    if max(key) >= 2**64:
        raise NotFound(f"nothing in quarantine has the id {id_!r}")
    return key, tier
