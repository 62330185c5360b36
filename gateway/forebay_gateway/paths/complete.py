"""What makes a checkpoint complete on a tier: part records, then the manifest.

    a part's copies all verified -> part record on the tier -> all writers' records there -> manifest.json, atomically created
    -> the checkpoint is complete on this tier -> its shards may be evicted once that holds for every required tier

Writer 0's gateway writes the manifest; another one that holds a part does so after node.takeover_after, which is safe
because the create is atomic. Every gateway watches for the manifest of the sessions it holds. One Completion a tier. What is
left to do is an index in the catalog, so a restart goes on where it was.
"""

import asyncio
import json
import logging
from collections.abc import Sequence
from functools import partial

from forebay_gateway.base import failpoints
from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import AlreadyExists, Corrupt, ForebayError, InvalidArgument, NotFound, Unsupported
from forebay_gateway.core.layout import announce_key, current_key, manifest_key, part_key
from forebay_gateway.core.records import PartRow, PartState, PublishState, SessionRow, ShardKey
from forebay_gateway.core.states import CopyEvent, CopyState, ShardState
from forebay_gateway.paths.commit import part_record
from forebay_gateway.paths.drain import Drain
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.safety import is_published, let_go
from forebay_gateway.paths.wholeness import missing_parts
from forebay_gateway.paths.write import PartRef
from forebay_gateway.tiers.base import ObjectInfo
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError, PartRecord
from forebay_wire.names import session8

log = logging.getLogger("forebay.complete")

WATCH_S_MIN, WATCH_S_MAX = 0.2, 5.0
SHARDS_A_TRANSACTION = 2000
READS_AT_ONCE = 16


def predecessor(tier: str, session: str) -> str:
    """An entry of SessionRow.predecessors; with no session it says that this tier has been looked at."""
    return f"{tier}\n{session}"


class Completion:
    """All sessions that are not yet complete on one tier."""

    def __init__(self, node: Node, tier: MonitoredTier, drain: Drain) -> None:
        self._node = node
        self._tier = tier
        self._drain = drain
        self._watch_s: dict[int, float] = {}  # session: pause before the tier is asked again
        self._next_look_s: dict[int, float] = {}
        self._records: dict[int, dict[int, PartRecord]] = {}  # session: parts of other nodes, as read from the tier

    async def step(self) -> float | None:
        """One look at every unfinished session; returns the pause in seconds until the next."""
        if not self._tier.usable:
            return None
        with self._node.catalog.read() as txn:
            sessions = list(txn.unpublished(self._tier.name))
        next_s: float | None = None
        for session in sessions:
            if self._is_going(session):
                continue
            # No await since the look: a deletion waits for this entry, or it was marked before and is seen.
            self._node.publishing.add((self._tier.name, session.id))
            try:
                done = await self._advance(session)
            except AlreadyExists as error:  # another node was faster; who it was is seen at the next look
                done = False
                log.info("a manifest changed under way run=%s step=%s error=%s", session.run, session.step, error)
                self._look_later(session.id)
            except (Corrupt, InvalidArgument, Unsupported) as error:  # of this checkpoint alone: the others go on
                done = False
                await self._cannot(session, str(error))
            except ForebayError as error:
                self._tier.failed(error)
                return WATCH_S_MIN
            finally:
                self._node.publishing.discard((self._tier.name, session.id))
            if not done:
                left_s = self._next_look_s.get(session.id, 0.0) - self._node.clock.monotonic()
                next_s = min(next_s if next_s is not None else WATCH_S_MAX, max(0.0, left_s))
        return next_s

    def _is_going(self, session: SessionRow) -> bool:
        with self._node.catalog.read() as txn:
            checkpoint = txn.checkpoint(session.run, session.step)
        return checkpoint is None or checkpoint.deleting

    async def _advance(self, session: SessionRow) -> bool:
        """Move one session on; True when it is finished on this tier."""
        session = await self._look_back(session)
        with self._node.catalog.read() as txn:
            parts = [part for part in txn.parts(session.id) if part.state is PartState.COMMITTED and not part.is_adopted]
            ready = [part for part in parts if self._part_verified(txn, part)]
        for part in ready:
            if self._tier.name not in part.recorded:
                await self._record_part(session, part)
        now_s = self._node.clock.monotonic()
        first_s = self._node.first_seen_s.setdefault(session.id, now_s)
        if now_s < self._next_look_s.get(session.id, 0.0) and len(ready) < session.writers:
            return False
        mine = any(part.writer == 0 for part in parts)
        if mine or (parts and now_s - first_s >= self._node.config.node.takeover_after):
            finished = await self._try_to_complete(session, {part.writer for part in ready})
        else:
            finished = await self._completed_by_another(session)
        if finished:
            self._forget(session.id)
        else:
            self._look_later(session.id)
        return finished

    def _look_later(self, session_id: int) -> None:
        pause_s = min(WATCH_S_MAX, self._watch_s.get(session_id, WATCH_S_MIN / 1.5) * 1.5)
        self._watch_s[session_id] = pause_s
        self._next_look_s[session_id] = self._node.clock.monotonic() + pause_s

    def _forget(self, session_id: int) -> None:
        self._watch_s.pop(session_id, None)
        self._next_look_s.pop(session_id, None)
        self._records.pop(session_id, None)
        self._drain.forget_session(session_id)

    def _part_verified(self, txn: ReadTxn, part: PartRow) -> bool:
        verified, shards, _, _ = txn.part_progress(part.session_id, part.writer, self._tier.name)
        return verified == shards

    # -- part records --------------------------------------------------------------------------------------------------

    def _local_record(self, session: SessionRow, part: PartRow) -> PartRecord:
        ref = PartRef(session.run, session.step, session.session, part.writer, session.writers)
        with self._node.catalog.read() as txn:
            rows = list(txn.shards(session.id, part.writer))
            return part_record(txn, self._node.id, ref, rows, part.metadata_json)

    async def _record_part(self, session: SessionRow, part: PartRow) -> None:
        """Say on the tier that this writer's shards are verified there. Repeating it writes the same bytes."""
        document = self._local_record(session, part).to_json()
        key = part_key(session.run, session.step, session.session, part.writer)
        failpoints.hit("complete.before_part_record")
        await self._tier.tier.put_small(key, document)
        await self._node.catalog.write(lambda txn: txn.part_recorded(session.id, part.writer, self._tier.name))
        self._watch_s.pop(session.id, None)
        self._next_look_s.pop(session.id, None)

    async def _collect(self, session: SessionRow, ready: set[int]) -> list[PartRecord] | None:
        """The records of all writers, or None while some are not there yet."""
        seen = self._records.setdefault(session.id, {})
        missing = [writer for writer in range(session.writers) if writer not in ready and writer not in seen]
        with self._node.catalog.read() as txn:
            held_here = {part.writer for part in txn.parts(session.id) if not part.is_adopted}
        elsewhere = [writer for writer in missing if writer not in held_here]
        for begin in range(0, len(elsewhere), READS_AT_ONCE):
            batch = elsewhere[begin : begin + READS_AT_ONCE]
            records = await asyncio.gather(*(self._read_part(session, writer) for writer in batch))
            seen.update({writer: record for writer, record in zip(batch, records, strict=True) if record is not None})
        if seen:
            nodes = {writer: record.node for writer, record in seen.items()}
            if set(nodes) - set(session.known_parts):
                await self._node.catalog.write(lambda txn: txn.note_parts(session.id, nodes))
                self._node.changes.tell()
            self._drain.note_recorded_elsewhere(session.id, set(seen))
        if len(ready | set(seen)) < session.writers:
            return None
        with self._node.catalog.read() as txn:
            local = [part for part in txn.parts(session.id) if part.writer in ready]
        return [*(self._local_record(session, part) for part in local), *(seen[w] for w in seen if w not in ready)]

    async def _read_part(self, session: SessionRow, writer: int) -> PartRecord | None:
        key = part_key(session.run, session.step, session.session, writer)
        try:
            document, _ = await self._tier.tier.get_small(key)
        except NotFound:
            return None
        try:
            record = PartRecord.from_json(document)
        except ManifestError as error:
            raise Corrupt(f"the part record of writer {writer} is damaged: {error}", tier=self._tier.name, key=key) from error
        if (record.run, record.step, record.session, record.writers) != (
            session.run,
            session.step,
            session.session,
            session.writers,
        ):
            raise Corrupt(f"the part record of writer {writer} belongs to another checkpoint", tier=self._tier.name, key=key)
        return record

    # -- the manifest --------------------------------------------------------------------------------------------------

    async def _try_to_complete(self, session: SessionRow, ready: set[int]) -> bool:
        records = await self._collect(session, ready)
        if records is None:
            return await self._completed_by_another(session)
        try:
            manifest = Manifest.of_parts(records, self._node.id)
        except ManifestError as error:
            raise Corrupt(f"the parts do not make one checkpoint: {error}") from error
        key = manifest_key(session.run, session.step)
        failpoints.hit("complete.before_manifest")
        try:
            await self._tier.tier.put_small(key, manifest.to_json(), if_absent=True)
        except AlreadyExists:
            if not await self._replace(session, manifest, key):
                return True
        failpoints.hit("complete.after_manifest")
        await self._tier.tier.point(current_key(session.run, session.step), session8(session.session))
        await self._finished(session, PublishState.COMPLETE)
        await self._drop_announcements(session)
        return True

    async def _replace(self, session: SessionRow, manifest: Manifest, key: str) -> bool:
        """A manifest is there. Ours (an answer was lost): fine. An older session's: replaced. A newer one's: we yield."""
        there, info = await self._read_manifest(key)
        if there is not None and there.session == session.session:
            await self._tier.tier.settle(key)
            return True
        if there is None or self._is_older(session, there):
            await self._tier.tier.put_small(key, manifest.to_json(), if_match=info.tag)
            return True
        await self._yield_to(session, there)
        return False

    def _is_older(self, session: SessionRow, there: Manifest) -> bool:
        """A session may replace only what stood before it began, or what this node itself opened before it."""
        if predecessor(self._tier.name, there.session) in session.predecessors:
            return True
        with self._node.catalog.read() as txn:
            other = txn.find_session(session.run, session.step, there.session)
        return other is not None and other.id < session.id

    async def _look_back(self, session: SessionRow) -> SessionRow:
        """Once a session, when it is first met: note whose manifest stood there before it."""
        looked = predecessor(self._tier.name, "")
        if looked in session.predecessors:
            return session
        found = [looked]
        try:
            there, _ = await self._read_manifest(manifest_key(session.run, session.step))
        except NotFound:
            there = None
        if there is not None and there.session != session.session:
            found.append(predecessor(self._tier.name, there.session))
        await self._node.catalog.write(lambda txn: txn.note_predecessors(session.id, found))
        with self._node.catalog.read() as txn:
            return txn.session(session.id) or session

    async def _read_manifest(self, key: str) -> tuple[Manifest | None, ObjectInfo]:
        """What is there; None for a document that is damaged (it makes nothing complete, and may be replaced)."""
        document, info = await self._tier.tier.get_small(key)
        try:
            return Manifest.from_json(document), info
        except ManifestError as error:
            log.warning("a manifest is damaged tier=%s key=%s error=%s", self._tier.name, key, error)
            return None, info

    async def _completed_by_another(self, session: SessionRow) -> bool:
        """Whether the manifest of this session, or of one that superseded it, is there."""
        key = manifest_key(session.run, session.step)
        try:
            there, _ = await self._read_manifest(key)
        except NotFound:
            return False
        if there is None:
            return False
        if there.session == session.session:
            if not self._all_verified_here(session):
                return False  # begun before a restart: proved first, since what is complete may be evicted
            await self._tier.tier.settle(key)
            await self._finished(session, PublishState.COMPLETE)
            return True
        if self._is_older(session, there):
            return False
        with self._node.catalog.read() as txn:
            whole = not missing_parts(txn, session)
        # What all writers committed is brought out first. What can never be whole would stay in the queue for ever.
        if not (self._all_verified_here(session) if whole else await self._skip_rest(session)):
            return False
        await self._yield_to(session, there)
        return True

    def _all_verified_here(self, session: SessionRow) -> bool:
        with self._node.catalog.read() as txn:
            return all(self._part_verified(txn, part) for part in txn.parts(session.id) if not part.is_adopted)

    async def _skip_rest(self, session: SessionRow) -> bool:
        """Skip the queued copies of a session that another one superseded; False while a copy is still under way."""
        return await self._node.catalog.write(partial(self._skip_queued, session))

    def _skip_queued(self, session: SessionRow, txn: WriteTxn) -> bool:
        queued = []
        for row in txn.shards(session.id):
            copy = txn.copy(row.key, self._tier.name)
            if copy is not None and copy.state in (CopyState.WRITING, CopyState.WRITTEN):
                return False
            if copy is not None and copy.state is CopyState.PENDING:
                queued.append(row.key)
        for key in queued:
            txn.copy_event(key, self._tier.name, CopyEvent.SKIP)
        return True

    async def _yield_to(self, session: SessionRow, there: Manifest) -> None:
        log.info(
            "another session completed this step; this one yields run=%s step=%s session=%s by=%s",
            session.run,
            session.step,
            session.session,
            there.session,
        )
        await self._finished(session, PublishState.SUPERSEDED)

    async def _finished(self, session: SessionRow, state: PublishState) -> None:

        def act(txn: WriteTxn) -> None:
            txn.set_publish(session.id, self._tier.name, state)
            if state is PublishState.COMPLETE and session.reason:
                txn.set_reason(session.id, "")  # what was in the way is not any more; another tier says so again if it is

        await self._node.catalog.write(act)
        failpoints.hit("complete.done")
        await mark_evictable(self._node, session.id)
        self._node.changes.tell()

    async def _cannot(self, session: SessionRow, reason: str) -> None:
        self._look_later(session.id)
        if session.reason != reason:
            log.warning("a checkpoint cannot complete run=%s step=%s reason=%s", session.run, session.step, reason)
            await self._node.catalog.write(lambda txn: txn.set_reason(session.id, reason))
            self._node.changes.tell()

    async def _drop_announcements(self, session: SessionRow) -> None:
        if session.writers == 1:
            return
        for writer in range(session.writers):
            await self._tier.tier.delete(announce_key(session.run, session.step, session.session, writer))


async def mark_evictable(node: Node, session_id: int) -> None:
    """Let go of the session's shards once every required tier holds the complete checkpoint (and at least one tier does)."""
    with node.catalog.read() as txn:
        session = txn.session(session_id)
        if session is None:
            return
        if not is_published(session, node.required_tiers):
            return
        keys = [row.key for row in txn.shards(session_id) if row.state is ShardState.SEALED]

    def act(batch: Sequence[ShardKey], txn: WriteTxn) -> None:
        for key in batch:
            let_go(txn, key, node.required_tiers)

    for begin in range(0, len(keys), SHARDS_A_TRANSACTION):
        await node.catalog.write(partial(act, keys[begin : begin + SHARDS_A_TRANSACTION]))


class Announcer:
    """Tells other nodes, through the shared tiers, which parts are durable in this node's cache, and learns of theirs.

    Only for checkpoints of several writers. Best effort: nothing depends on it but `wait("cache")` and what people see early.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._told: set[tuple[int, int]] = set()

    async def step(self) -> float | None:
        """Announce new parts, look for others'; returns the pause in seconds."""
        tiers = [tier for tier in self._node.usable_tiers() if tier.tier.kind != "memory"][:1]
        if not tiers:
            return 2.0
        waiting = False
        for session, parts in self._unfinished():
            try:
                for part in parts:
                    if (session.id, part.writer) not in self._told:
                        await self._announce(tiers[0], session, part)
                waiting = await self._learn(tiers[0], session, {part.writer for part in parts}) or waiting
            except ForebayError as error:
                tiers[0].failed(error)
                return 2.0
        return 0.5 if waiting else None

    def _unfinished(self) -> list[tuple[SessionRow, list[PartRow]]]:
        found: dict[int, tuple[SessionRow, list[PartRow]]] = {}
        with self._node.catalog.read() as txn:
            for tier in self._node.tier_names:
                for session in txn.unpublished(tier):
                    if session.writers > 1 and session.id not in found:
                        committed = [part for part in txn.parts(session.id) if part.state is PartState.COMMITTED]
                        parts = [part for part in committed if not part.is_adopted]
                        if len(committed) < session.writers:
                            found[session.id] = (session, parts)
        return list(found.values())

    async def _announce(self, tier: MonitoredTier, session: SessionRow, part: PartRow) -> None:
        body = {"node": self._node.id, "writer": part.writer, "shards": part.visible_count, "size": part.visible_size}
        key = announce_key(session.run, session.step, session.session, part.writer)
        await tier.tier.put_small(key, json.dumps(body, sort_keys=True).encode())
        self._told.add((session.id, part.writer))

    async def _learn(self, tier: MonitoredTier, session: SessionRow, here: set[int]) -> bool:
        """Note other nodes' parts; True while some writer has not been heard of."""
        missing = set(range(session.writers)) - here - set(session.known_parts)
        if not missing:
            return False
        listing = await tier.tier.list(announce_key(session.run, session.step, session.session, 0).rpartition("/")[0])
        found: dict[int, str] = {}
        for info in listing.objects:
            stem = info.key.rpartition("/")[2].removesuffix(".json")
            if stem.isdigit() and int(stem) in missing:
                document, _ = await tier.tier.get_small(info.key)
                try:
                    found[int(stem)] = str(json.loads(document)["node"])
                except (ValueError, KeyError, TypeError):
                    continue
        if found:
            await self._node.catalog.write(lambda txn: txn.note_parts(session.id, found))
            self._node.changes.tell()
        return bool(missing - set(found))
