"""What makes a checkpoint complete on a tier: part records, then the manifest.

    a part's copies all verified -> part record on the tier -> all writers' records there -> manifest.json, atomically created
    -> the checkpoint is complete on this tier -> its shards may be evicted once that holds for every required tier

Writer 0's gateway writes the manifest; another one that holds a part does so after node.takeover_after, which is safe
because the create is atomic. Every gateway watches for the manifest of the sessions it holds. One Completion a tier. What is
left to do is an index in the catalog, so a restart goes on where it was.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import Callable
from functools import partial

from forebay_gateway.base import failpoints
from forebay_gateway.base.recent import Recent
from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import AlreadyExists, Corrupt, ForebayError, InvalidArgument, NotFound, Unsupported
from forebay_gateway.core.layout import announce_key, current_key, manifest_key, part_key, run_key
from forebay_gateway.core.records import PartRow, PartState, PublishState, SessionRow
from forebay_gateway.core.retention import rule_of
from forebay_gateway.core.states import CopyEvent, CopyState
from forebay_gateway.paths.commit import whole_record
from forebay_gateway.paths.drain import Drain
from forebay_gateway.paths.evictable import mark_evictable
from forebay_gateway.paths.leavings import is_named, pause_s, take_away, withdraw_records
from forebay_gateway.paths.node import SHARD_BYTES, Node
from forebay_gateway.paths.pages import all_shards
from forebay_gateway.paths.pins import is_going
from forebay_gateway.paths.skip import outdo
from forebay_gateway.paths.wholeness import NEVER_WHOLE, missing_parts
from forebay_gateway.paths.write import PartRef
from forebay_gateway.tiers.base import ObjectInfo
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError, NewerVersion, PartRecord, what_is_wrong
from forebay_wire.names import session8

log = logging.getLogger("forebay.complete")

WATCH_S_MIN, WATCH_S_MAX = 0.2, 5.0
LOOK_AT_ALL_S = 5.0
REST_FACTOR = 20  # a look at all sessions takes at most this part of one core, however many there are
SESSIONS_AT_ONCE = 32  # looked at before the event loop has its turn
READS_AT_ONCE = 16
RECORDS_S_MAX = 10.0  # a part record that was read is relied on; less than leavings.PAUSE_S_MIN
RUNS_REMEMBERED_MAX = 10_000
STEP_GOES_S_MAX = 600.0  # several turns of retention; whoever was taking something from the step's place has ended by then


def _content(manifest: Manifest) -> set[tuple[int, str, int, int]]:
    return {(writer, shard.name, shard.size, shard.crc32c) for writer, shard in manifest.shards()}


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
        # Of sessions: parts of other nodes as read from the tier, and when.
        self._records: dict[int, dict[int, tuple[float, PartRecord]]] = {}
        self._runs_noted: Recent[str, None] = Recent(RUNS_REMEMBERED_MAX)
        self._step_goes_s: dict[int, float] = {}  # session: since when it is waited that its step is free of a removal
        self._hinted: set[int] = set()  # sessions of which something was told since they were looked at
        self._look_at_all_s = float("-inf")
        node.changes.listen_sessions(self._hinted.add)

    async def step(self) -> float | None:
        """One look at the unfinished sessions that moved or whose time has come, now and then at all; returns the pause in
        seconds until the next."""
        if not self._tier.usable:
            return None
        try:
            verdicts_s = await self._drain.order.joint.step()
        except ForebayError as error:
            self._tier.failed(error)
            return WATCH_S_MIN
        began_s = self._node.clock.monotonic()
        at_all = began_s >= self._look_at_all_s
        for looked, session_id in enumerate(self._wanted(began_s, at_all)):
            if looked % SESSIONS_AT_ONCE == SESSIONS_AT_ONCE - 1:
                await asyncio.sleep(0)
            self._hinted.discard(session_id)
            session = self._unfinished(session_id)
            if session is None:
                continue
            with self._node.publishes(self._tier.name, session.id):  # no await since the look
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
                    self._hinted.add(session.id)
                    self._tier.failed(error)
                    return WATCH_S_MIN
            if not done:
                self._next_look_s.setdefault(session.id, self._node.clock.monotonic() + WATCH_S_MAX)
        now_s = self._node.clock.monotonic()
        if at_all:
            self._look_at_all_s = now_s + max(LOOK_AT_ALL_S, REST_FACTOR * (now_s - began_s))
        if not self._next_look_s:
            return verdicts_s
        pause_s = min(WATCH_S_MAX, min(self._next_look_s.values()) - now_s)
        return max(0.0, pause_s if verdicts_s is None else min(pause_s, verdicts_s))

    def _wanted(self, now_s: float, at_all: bool) -> list[int]:
        """The sessions to look at: those that were told of, then those whose time has come, or all."""
        self._hinted |= self._drain.take_moved()
        if at_all:
            with self._node.catalog.read() as txn:
                every = dict.fromkeys(txn.unpublished_ids(self._tier.name))
            for gone in [known for known in self._next_look_s if known not in every]:
                self._forget(gone)
            return list(every)
        due = [session_id for session_id, at_s in self._next_look_s.items() if at_s <= now_s]
        return list(dict.fromkeys((*sorted(self._hinted), *due)))

    def _unfinished(self, session_id: int) -> SessionRow | None:
        with self._node.catalog.read() as txn:
            session = txn.session(session_id)
            checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
        if session is None or session.publish.get(self._tier.name) is not PublishState.PENDING:
            self._forget(session_id)
            return None
        return None if checkpoint is None or checkpoint.deleting else session

    async def _advance(self, session: SessionRow) -> bool:
        """Move one session on; True when it is finished on this tier."""
        session, joint = await self._look_back(session), self._drain.order.joint
        if session.id in joint.to_clean:
            goes = await self._goes_after_all(session)
            if goes is None:  # nothing of it is taken away on a doubt
                self._look_later(session.id)
                return False
            if not goes:
                return await self._clear(session)
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
        if joint.is_awaited(session.id) and not ready:  # while it is not decided whether it goes, no manifest can name it
            self._look_later(session.id)
            return False
        mine = any(part.writer == 0 for part in parts)
        if mine or (parts and now_s - first_s >= self._node.config.node.takeover_after):
            finished = await self._try_to_complete(session, {part.writer for part in ready})
        else:
            finished = await self._completed_by_another(session)
        if finished:
            self._forget(session.id)
        else:
            if len(ready) == len(parts) and now_s - first_s >= self._node.config.node.takeover_after:
                await joint.look_if_stuck(session)
            self._look_later(session.id)
        return finished

    async def _goes_after_all(self, session: SessionRow) -> bool | None:
        """Whether what was left out for all nodes, and is being taken away, is to stay now: asked before its records go, and
        before all else does. None where nobody can tell."""
        joint = self._drain.order.joint
        since_s = joint.to_clean[session.id]
        if since_s is not None and self._node.clock.monotonic() - since_s < pause_s(self._node):
            return False
        if await joint.is_left_out(session) and not (named := await is_named(self._node, self._tier, session)):
            return named
        joint.to_clean.pop(session.id, None)
        self._node.changes.tell(session.id)
        return True

    async def _clear(self, session: SessionRow) -> bool:
        """It was left out for all nodes, and something of it is here already."""
        now_s, to_clean = self._node.clock.monotonic(), self._drain.order.joint.to_clean
        since_s = to_clean.get(session.id)
        if since_s is None:
            if await withdraw_records(self._node, self._tier, session):
                to_clean[session.id] = self._node.clock.monotonic()
        elif now_s - since_s >= pause_s(self._node) and await take_away(self._node, self._tier, session):
            await self._drain.order.left_out(session.id)
            self._forget(session.id)
            return True
        self._look_later(session.id)
        return False

    def _look_later(self, session_id: int) -> None:
        pause_s = min(WATCH_S_MAX, self._watch_s.get(session_id, WATCH_S_MIN / 1.5) * 1.5)
        self._watch_s[session_id] = pause_s
        self._next_look_s[session_id] = self._node.clock.monotonic() + pause_s

    def _forget(self, session_id: int) -> None:
        self._watch_s.pop(session_id, None)
        self._next_look_s.pop(session_id, None)
        self._records.pop(session_id, None)
        self._step_goes_s.pop(session_id, None)
        self._drain.forget_session(session_id)

    def _part_verified(self, txn: ReadTxn, part: PartRow) -> bool:
        verified, _, _, _ = txn.part_progress(part.session_id, part.writer, self._tier.name)
        return verified >= part.shard_count  # copies that were left out are none

    def _is_out_of_queue(self, txn: ReadTxn, part: PartRow) -> bool:
        verified, shards, _, _ = txn.part_progress(part.session_id, part.writer, self._tier.name)
        return verified == shards

    # -- part records --------------------------------------------------------------------------------------------------

    async def _local_record(self, session: SessionRow, part: PartRow) -> PartRecord:
        ref = PartRef(session.run, session.step, session.session, part.writer, session.writers)
        rows = await all_shards(self._node, session.id, part.writer)
        return await whole_record(self._node, ref, rows, part.metadata_json, part.kind)

    async def _record_part(self, session: SessionRow, part: PartRow) -> None:
        """Say on the tier that this writer's shards are verified there. Repeating it writes the same bytes."""
        record = await self._local_record(session, part)
        document = await self._node.aside(SHARD_BYTES * part.visible_count, record.to_json)
        key = part_key(session.run, session.step, session.session, part.writer)
        failpoints.hit("complete.before_part_record")
        await self._tier.tier.put_small(key, document)
        failpoints.hit("complete.part_recorded")
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
        if len(elsewhere) > READS_AT_ONCE:  # one question for all: most of very many may not be there yet
            elsewhere = await self._listed(session, elsewhere)
        read_s = self._node.clock.monotonic()
        for begin in range(0, len(elsewhere), READS_AT_ONCE):
            batch = elsewhere[begin : begin + READS_AT_ONCE]
            records = await asyncio.gather(*(self._read_part(session, writer) for writer in batch))
            seen.update({writer: (read_s, found) for writer, found in zip(batch, records, strict=True) if found is not None})
        if seen:
            nodes = {writer: record.node for writer, (_, record) in seen.items()}
            if set(nodes) - set(session.known_parts):
                await self._node.catalog.write(lambda txn: txn.note_parts(session.id, nodes))
                self._node.changes.tell(session.id)
            self._drain.note_recorded_elsewhere(session.id, set(seen))
        if len(ready | set(seen)) < session.writers or not await self._are_still_there(session, seen):
            return None
        with self._node.catalog.read() as txn:
            local = [part for part in txn.parts(session.id) if part.writer in ready]
        return [*[await self._local_record(session, part) for part in local], *(seen[w][1] for w in seen if w not in ready)]

    async def _are_still_there(self, session: SessionRow, seen: dict[int, tuple[float, PartRecord]]) -> bool:
        """Whether records that were read some time ago still lie there: what was left out for all nodes is taken away again
        (leavings.py), and that begins with them. Else these are forgotten."""
        now_s = self._node.clock.monotonic()
        old = [writer for writer, (read_s, _) in seen.items() if now_s - read_s > RECORDS_S_MAX]
        there = await self._listed(session, old) if old else []
        for writer in old:
            if writer in there:
                seen[writer] = (now_s, seen[writer][1])
            else:
                del seen[writer]
        return len(there) == len(old)

    async def _listed(self, session: SessionRow, writers: list[int]) -> list[int]:
        """Those of them whose records are on the tier: one question for all."""
        names = (session.run, session.step, session.session)
        prefix = part_key(*names, 0).rpartition("/")[0]
        there = {info.key for info in (await self._tier.tier.list(f"{prefix}/")).objects}
        return [writer for writer in writers if part_key(*names, writer) in there]

    async def _read_part(self, session: SessionRow, writer: int) -> PartRecord | None:
        key = part_key(session.run, session.step, session.session, writer)
        try:
            document, _ = await self._tier.tier.get_small(key)
        except NotFound:
            return None
        try:
            record = await self._node.aside(len(document), lambda: PartRecord.from_json(document))
        except ManifestError as error:
            raise Corrupt(what_is_wrong(f"the part record of writer {writer}", error), tier=self._tier.name, key=key) from error
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
        size = SHARD_BYTES * sum(1 if index is None else len(index) for record in records for _, index in record.files())
        try:
            document = await self._node.aside(size, lambda: Manifest.of_parts(records, self._node.id).to_json())
        except ManifestError as error:
            raise Corrupt(f"{NEVER_WHOLE}: {error}") from error
        key = manifest_key(session.run, session.step)
        failpoints.hit("complete.before_manifest")
        try:
            await self._tier.tier.put_small(key, document, if_absent=True)
        except AlreadyExists:
            if not await self._replace(session, document, key):
                return True
        failpoints.hit("complete.after_manifest")
        if await self._step_goes(session):
            return False
        await self._tier.tier.point(current_key(session.run, session.step), session8(session.session))
        failpoints.hit("complete.pointed")
        await self._finished(session, PublishState.COMPLETE)
        await self._drop_announcements(session)
        return True

    async def _replace(self, session: SessionRow, document: bytes, key: str) -> bool:
        """A manifest is there. Ours (an answer was lost): fine. An older session's: replaced. A newer one's: we yield.

        Raises Corrupt where it is of our session, and of other bytes: two jobs were given one session, on two nodes.
        """
        there, info = await self._read_manifest(key)
        if there is not None and there.session == session.session:
            if await self._node.aside(len(document), lambda: _content(there) != _content(Manifest.from_json(document))):
                raise Corrupt(
                    f"{NEVER_WHOLE}: node {there.node} has completed the same session with other content; "
                    f"jobs need sessions of their own, and ranks their writer numbers session={session.session}"
                )
            await self._tier.tier.settle(key)
            return True
        if there is None or self._is_older(session, there):
            await self._tier.tier.put_small(key, document, if_match=info.tag)
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
        await self._note_run(session.run)
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

    async def _note_run(self, run: str) -> None:
        """On the tier, before anything of the run that is complete: whoever looks for runs need not walk the tier."""
        if run in self._runs_noted:
            return
        with contextlib.suppress(AlreadyExists):
            await self._tier.tier.put_small(run_key(run), json.dumps({"run": run}).encode(), if_absent=True)
        self._runs_noted[run] = None

    async def _read_manifest(self, key: str) -> tuple[Manifest | None, ObjectInfo]:
        """What is there; None for a document that is damaged (it makes nothing complete, and may be replaced).

        Raises Unsupported for a newer release's, which nobody here may replace."""
        document, info = await self._tier.tier.get_small(key)
        try:
            return await self._node.aside(len(document), lambda: Manifest.from_json(document)), info
        except NewerVersion as error:
            raise Unsupported(what_is_wrong("the manifest that is there", error), tier=self._tier.name, key=key) from error
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
            if not self._all_here(session, self._part_verified):
                return False  # begun before a restart: proved first, since what is complete may be evicted
            await self._tier.tier.settle(key)
            if await self._step_goes(session):
                return False
            await self._finished(session, PublishState.COMPLETE)
            return True
        if self._is_older(session, there):
            return False
        with self._node.catalog.read() as txn:
            whole = not missing_parts(txn, session)
        # What all writers committed is brought out first. What can never be whole would stay in the queue for ever.
        if not (self._all_here(session, self._is_out_of_queue) if whole else await self._skip_rest(session)):
            return False
        await self._yield_to(session, there)
        return True

    def _all_here(self, session: SessionRow, holds: Callable[[ReadTxn, PartRow], bool]) -> bool:
        with self._node.catalog.read() as txn:
            return all(holds(txn, part) for part in txn.parts(session.id) if not part.is_adopted)

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

    async def _step_goes(self, session: SessionRow) -> bool:
        """Whether retention is just removing what stood in this step's place: its deletion may still hit the manifest that is
        there now. It notes first and looks at the manifest then; here the manifest is placed first: one sees the other."""
        if rule_of(session.run, self._tier.name, self._node.config.retain) is None:
            return False
        now_s = self._node.clock.monotonic()
        since_s = self._step_goes_s.setdefault(session.id, now_s)
        if now_s - since_s < STEP_GOES_S_MAX and await is_going(self._tier, session.run, session.step):
            return True
        self._step_goes_s.pop(session.id, None)
        return False

    async def _finished(self, session: SessionRow, state: PublishState) -> None:

        def act(txn: WriteTxn) -> tuple[int, ...]:
            txn.set_publish(session.id, self._tier.name, state)
            if state is PublishState.COMPLETE and session.reason:
                txn.set_reason(session.id, "")  # what was in the way is not any more; another tier says so again if it is
            return outdo(session.id, self._tier.name, txn)

        outdone = await self._node.catalog.write(act)
        failpoints.hit("complete.done")
        if state is PublishState.COMPLETE:
            for listener in self._node.on_complete:
                listener(self._tier.name, session.run, session.step)
        for session_id in (session.id, *outdone):
            await mark_evictable(self._node, session_id)
            self._node.changes.tell(session_id)

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
