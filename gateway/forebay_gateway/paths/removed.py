"""What retention took from a tier, as this node's catalog follows it, whichever node did the work.

    the run's ledger says that it has gone, and its manifest is not there -> copies SKIPPED -> what of it came back is deleted
    -> the session is REMOVED on this tier; on every tier -> gone from cache and catalog too

Owns that, and the question whether something is absent because it was taken. Does not own what goes (expire.py).
"""

import logging
from collections.abc import Sequence

from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.errors import ForebayError, NotFound, Unavailable
from forebay_gateway.core.layout import manifest_key
from forebay_gateway.core.records import CheckpointRow, PartState, PublishState, SessionRow, ShardRow
from forebay_gateway.core.retention import Ledger, ledger_key, read_ledger, rule_of
from forebay_gateway.core.states import CopyEvent, CopyState
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import all_shards, pages
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.safety import HELD_STATES
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError
from forebay_wire.names import session8

log = logging.getLogger("forebay.retain")

REMOVABLE = (CopyState.PENDING, CopyState.VERIFIED, CopyState.QUARANTINED)


async def was_removed(node: Node, tier: MonitoredTier, session: SessionRow) -> bool:
    """Whether the tier says that retention has taken this session, or has begun to. False where it cannot be asked."""
    if rule_of(session.run, tier.name, node.config.retain) is None:
        return False
    try:
        document, _ = await tier.tier.get_small(ledger_key(session.run))
        ledger = read_ledger(document, session.run)
    except ForebayError:
        return False
    return ledger is not None and ledger.has_dropped((session.step, session8(session.session)))


class Follower:
    """Brings this catalog up to what has gone."""

    def __init__(self, node: Node, finder: Finder, retention: Retention) -> None:
        self._node, self._finder, self._retention = node, finder, retention

    async def follow(self, tier: MonitoredTier, run: str, ledger: Ledger) -> bool:
        """False where something is still under way, so that it has to be done again soon. Raises as the tier does."""
        settled = True
        for step, short in ledger.gone:
            with self._node.catalog.read() as txn:
                row = txn.checkpoint(run, step)
                sessions = [] if row is None else txn.sessions_of(row)
            if row is None or row.deleting or not any(session8(session.session) == short for session in sessions):
                continue
            settled = await self._follow_one(tier, row, sessions, short) and settled
            settled = await self._forget_if_nowhere(run, step) and settled
        return settled

    async def _follow_one(self, tier: MonitoredTier, row: CheckpointRow, sessions: Sequence[SessionRow], short: str) -> bool:
        known = [session for session in sessions if session.publish.get(tier.name) in HELD_STATES]
        if not known:
            return True
        named = await _named_on(tier, row)
        gone = [
            session
            for session in known
            if session.session != named
            and (session8(session.session) == short or (not named and session.publish[tier.name] is PublishState.SUPERSEDED))
        ]
        for session in gone:
            if await self._retention.is_under_way(tier, [session]):
                return False
            await self._removed(tier, row, session)
        if gone:
            self._node.changes.tell()
        return True

    async def _removed(self, tier: MonitoredTier, row: CheckpointRow, session: SessionRow) -> None:
        """The catalog's word comes last: until then it is done again."""
        async for page in pages(self._node, session.id):
            await self._node.catalog.write(lambda txn, page=page: _drop_copies(txn, page, tier.name))  # type: ignore[misc]
        # A scrub or a reader may have seen the absence first, and had a copy put there again.
        shards = await all_shards(self._node, session.id)
        own = [shard for shard in shards if shard.disk_size or not self._is_adopted(shard)]
        await self._retention.shards_off_tier(tier, row, [session], own)
        await self._node.catalog.write(lambda txn: _mark_removed(txn, session.id, tier.name))
        log.info("retention removed a checkpoint tier=%s run=%s step=%s", tier.name, row.run, row.step)

    def _is_adopted(self, shard: ShardRow) -> bool:
        with self._node.catalog.read() as txn:
            part = txn.part(shard.session_id, shard.writer)
        return part is None or part.is_adopted

    async def _forget_if_nowhere(self, run: str, step: int) -> bool:
        """Out of cache and catalog, once every tier that there is says that it holds nothing complete of this step."""
        with self._node.catalog.read() as txn:
            row = txn.checkpoint(run, step)
            sessions = [] if row is None else txn.sessions_of(row)
            open_part = any(part.state is PartState.OPEN for session in sessions for part in txn.parts(session.id))
        if row is None or row.deleting or row.pinned or open_part or not _is_only_removed(sessions):
            return True
        for tier in self._node.tiers.values():
            if not tier.usable:
                return False
            try:
                await tier.tier.head(manifest_key(run, step))
            except NotFound:
                continue
            except ForebayError as error:
                tier.failed(error)
                return False
            await self._finder.learn_copies(sessions[-1], [tier])
            return True
        try:
            await self._retention.forget(row)
        except (NotFound, Unavailable) as error:  # pinned, or saved anew, meanwhile; no word on the tier
            log.info("a checkpoint that no tier holds stays for now run=%s step=%s reason=%s", run, step, error)
            return False
        return True


async def _named_on(tier: MonitoredTier, row: CheckpointRow) -> str:
    """The session that the manifest there names; empty where there is none, "?" where it is damaged."""
    try:
        document, _ = await tier.tier.get_small(manifest_key(row.run, row.step))
        return Manifest.from_json(document).session
    except NotFound:
        return ""
    except ManifestError:
        return "?"


def _is_only_removed(sessions: Sequence[SessionRow]) -> bool:
    states = {state for session in sessions for state in session.publish.values()}
    ended = {PublishState.REMOVED, PublishState.SUPERSEDED, PublishState.SKIPPED}
    return PublishState.REMOVED in states and states <= ended and all(session.publish for session in sessions)


def _drop_copies(txn: WriteTxn, rows: Sequence[ShardRow], tier: str) -> None:
    for row in rows:
        copy = txn.copy(row.key, tier)
        if copy is not None and copy.state in REMOVABLE:
            txn.copy_event(row.key, tier, CopyEvent.REMOVE)


def _mark_removed(txn: WriteTxn, session_id: int, tier: str) -> None:
    session = txn.session(session_id)
    if session is not None and session.publish.get(tier) in HELD_STATES:
        txn.set_publish(session_id, tier, PublishState.REMOVED)
