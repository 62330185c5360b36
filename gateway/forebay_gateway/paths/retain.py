"""Checkpoints that are to stay, and checkpoints that are to go.

    delete: marked in the catalog -> manifest off each tier (from here on no reader finds it) -> its shards and records off it
    -> part files, then shard files out of the cache -> rows gone

Owns this order, so that a crash at any point leaves a checkpoint whole or invisible, and the marking is found again. Only what
the catalog's rows name is deleted; files of others stay.
"""

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from forebay_gateway.base import failpoints
from forebay_gateway.base.tasks import uncut
from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import ForebayError, InvalidArgument, NotFound, Unavailable, Unsupported
from forebay_gateway.core.layout import announce_key, current_key, manifest_key, part_key, shard_key
from forebay_gateway.core.records import CheckpointRow, PublishState, SessionRow, ShardRow
from forebay_gateway.core.states import CopyState
from forebay_gateway.paths import marks
from forebay_gateway.paths.announce import own_writers, withdraw
from forebay_gateway.paths.find import Finder, Gone
from forebay_gateway.paths.joint import may_leave_out, rules_of
from forebay_gateway.paths.node import FILES, Node
from forebay_gateway.paths.pages import all_shards, pages
from forebay_gateway.paths.pins import lift_pins, tell_pin
from forebay_gateway.paths.safety import HELD_STATES, is_expendable
from forebay_gateway.paths.verdicts import drop_verdicts, name_of
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError, NewerVersion, what_is_wrong

log = logging.getLogger("forebay.retain")

DELETES_A_CALL = 1000
WRITERS_UNSEEN_MAX = 64  # documents of so many are deleted without a look at what there is


@dataclass(frozen=True, slots=True)
class Deletion:
    """What goes, and from where."""

    shards: int
    size: int
    levels: tuple[str, ...]
    pending: tuple[str, ...]  # tiers that could not be reached: deleted there once they return


class Retention:
    """Pins and deletions."""

    def __init__(self, node: Node, finder: Finder) -> None:
        self._node = node
        self._finder = finder
        self.pinned = _nothing  # told of each checkpoint that was pinned or unpinned, see queue.py
        self.deleted = _nothing  # likewise of each that somebody deletes
        self._lock = asyncio.Lock()

    async def pin(self, run: str, step: int, pinned: bool, *, all_nodes: bool = False) -> None:
        """Keep from eviction and retention, or no longer: `all_nodes` lifts what others have said on the tiers, too. Raises
        NotFound; Unavailable for a tier that cannot be told of the latter."""
        row = await self._known(run, step)
        if row.deleting:
            raise NotFound("this checkpoint is being deleted", run=run, step=step)
        change = marks.pinned(row.run, row.step, pinned)
        await self._node.marks.change(change, lambda txn: txn.set_pinned(row.run, row.step, pinned))
        if all_nodes:
            await lift_pins(self._node, row.run, row.step)
        else:
            await tell_pin(self._node, row.run, row.step, pinned)
        await self.pinned(row)

    async def delete(self, run: str, step: int, *, force: bool, dry_run: bool) -> Deletion:
        """Delete a checkpoint everywhere; refuses pinned ones, and ones that no tier holds unless `force`. Raises Unsupported
        where a newer release's manifest stands on a tier."""
        row = await self._known(run, step)
        if row.pinned:
            raise InvalidArgument(
                "the checkpoint is pinned, and force does not change that; unpin it first", run=run, step=step
            )
        sessions, shards = await self._content(row)
        safe = any(state in HELD_STATES for session in sessions for state in session.publish.values())
        if not safe and not force and not row.deleting:
            raise InvalidArgument(
                "no tier holds this checkpoint yet, so its only copy would go; with --force (force=True) it goes all the same",
                run=run,
                step=step,
            )
        if not row.deleting:
            await self._refuse_newer(row, sessions)
        count, size = sum(shard.visible_count for shard in shards), sum(shard.visible_size for shard in shards)
        if dry_run:
            levels = tuple(["cache"] * any(shard.disk_size for shard in shards)) + self._node.tier_names
            return Deletion(count, size, levels, ())
        await self._mark(row)
        for session in sessions:
            self._node.changes.tell(session.id)
        await self.deleted(row)
        done, pending = await self._finish(row)
        return Deletion(count, size, done, pending)

    async def _refuse_newer(self, row: CheckpointRow, sessions: list[SessionRow]) -> None:
        """Before anything of it is marked. A tier that cannot be asked now is looked at when it is its turn."""
        for tier in self._node.tiers.values():
            try:
                if tier.takes_deletions:
                    await self._is_theirs(tier, row, sessions)
            except Unsupported:
                raise
            except ForebayError as error:
                tier.failed(error)

    async def _mark(self, row: CheckpointRow, may_go: Callable[[ReadTxn, CheckpointRow], bool] = lambda txn, row: True) -> None:
        """Deleting, in the catalog and beside it; raises Unavailable where a session was begun since the look at `row`, or
        where it may not go any more."""

        def act(txn: WriteTxn) -> None:
            now = txn.checkpoint(row.run, row.step)
            if now is not None and now.session_ids != row.session_ids:
                raise Unavailable("a session of this checkpoint came or went meanwhile; delete it again", retry_after_s=0.1)
            if now is not None and now.pinned:
                raise Unavailable("the checkpoint was pinned meanwhile", retry_after_s=0.1)
            if now is not None and not may_go(txn, now):
                raise Unavailable("the checkpoint may not leave the cache any more", retry_after_s=0.1)
            txn.mark_deleting(row.run, row.step)

        await self._node.marks.change(marks.going(row), act, spare=True)

    async def forget(self, row: CheckpointRow) -> None:
        """Out of cache and catalog, a checkpoint that no tier holds any more, as the caller has seen on each."""
        await self._mark(row)
        self._node.changes.tell()
        await self._finish(row)

    async def drop_cache_only(self, row: CheckpointRow) -> None:
        """A checkpoint that no tier has or is to get: marked, then out of the cache as a whole. Raises as _mark.

        Without the lock: writers wait for this space, and a deletion on a slow tier may hold it for long. What both do to one
        checkpoint they can do twice.
        """
        required = self._node.required_tiers
        await self._mark(row, lambda txn, now: is_expendable(txn, now, required))
        sessions, shards = await self._content(row)
        announced = [
            (session, own_writers(self._node, session)) for session in sessions if session.is_transient and session.writers > 1
        ]
        await uncut(self._out_of_cache(sessions, shards))
        await self._node.marks.ended(row.run, row.step)
        for session, writers in announced:
            await withdraw(self._node, session, writers)
        for session in sessions:
            self._node.changes.tell(session.id)

    async def step(self) -> float | None:
        """Background: go on with deletions that a crash or an absent tier interrupted."""
        with self._node.catalog.read() as txn:
            rows = txn.deleting()
        pause_s: float | None = None
        for row in rows:
            _, pending = await self._finish(row)
            if pending:
                pause_s = 5.0
        return pause_s

    async def _known(self, run: str, step: int) -> CheckpointRow:
        reason: ForebayError | None = None
        try:
            await self._finder.complete(run, step)
        except Gone as error:  # by another node, from the tiers
            reason = error
        except NotFound as error:
            with self._node.catalog.read() as txn:
                row = txn.checkpoint(run, step)
            if row is None or not row.deleting:
                raise
            reason = error
        except ForebayError as error:  # incomplete, damaged or out of reach: what the catalog has can still be dealt with
            reason = error
        with self._node.catalog.read() as txn:
            row = txn.checkpoint(run, step)
        if row is None:
            raise reason or NotFound(f"no checkpoint of run {run!r} has step {step}", run=run, step=step)
        return row

    async def _content(self, row: CheckpointRow) -> tuple[list[SessionRow], list[ShardRow]]:
        with self._node.catalog.read() as txn:
            now = txn.checkpoint(row.run, row.step)  # others may have taken it out since the look
            sessions = [] if now is None else [each for each in txn.sessions_of(now) if each.id in row.session_ids]
        return sessions, [shard for session in sessions for shard in await all_shards(self._node, session.id)]

    async def _finish(self, row: CheckpointRow) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Go through the levels; the rows go last, and only when every tier is done."""
        async with self._lock:
            with self._node.catalog.read() as txn:
                now = txn.checkpoint(row.run, row.step)
            if now is None or not now.deleting:  # gone since the look, and perhaps saved anew
                return ("cache", *self._node.tiers), ()
            sessions, shards = await self._content(now)
            done: list[str] = []
            pending: list[str] = []
            for tier in self._node.tiers.values():
                if await self._try_off_tier(tier, row, sessions, shards):
                    done.append(tier.name)
                else:
                    pending.append(tier.name)
                    log.info("a deletion waits for a tier tier=%s run=%s step=%s", tier.name, row.run, row.step)
            if not pending:
                # Shielded: a client that goes away must not cut the files' end from the rows' and the bytes'.
                await uncut(self._out_of_cache(sessions, shards))
                failpoints.hit("delete.before_mark")
                await self._node.marks.ended(row.run, row.step)
                done.insert(0, "cache")
        if not pending:  # else nothing has changed yet, and whoever tries again would wake itself
            self._node.changes.tell()
        return tuple(done), tuple(pending)

    async def _try_off_tier(
        self, tier: MonitoredTier, row: CheckpointRow, sessions: list[SessionRow], shards: list[ShardRow]
    ) -> bool:
        """False where the tier is away, or something is still on its way to it: it is tried again."""
        if not tier.takes_deletions or await self.is_under_way(tier, sessions):
            return False
        alarm = f"delete-{row.run}-{row.step}-{tier.name}"
        try:
            await self._off_tier(tier, row, sessions, shards)
        except ForebayError as error:
            if isinstance(error, Unsupported):
                what = f"the deletion of {row.run}/{row.step} cannot go on: {error.sentence}"
                self._node.alarms[alarm] = (what, "meanwhile it is not offered here")
            tier.failed(error)
            return False
        self._node.alarms.pop(alarm, None)
        return True

    async def _off_tier(
        self, tier: MonitoredTier, row: CheckpointRow, sessions: list[SessionRow], shards: list[ShardRow]
    ) -> None:
        await self._drop_manifest(tier, row, sessions)
        failpoints.hit("delete.manifest_gone")
        await self.shards_off_tier(tier, row, sessions, shards)
        decided = [name_of(session) for session in sessions if session.writers > 1]
        if decided and may_leave_out(rules_of(self._node, tier.name, row.run)):
            await drop_verdicts(tier, row.run, decided)
        failpoints.hit("delete.off_tier")

    async def shards_off_tier(
        self, tier: MonitoredTier, row: CheckpointRow, sessions: list[SessionRow], shards: list[ShardRow]
    ) -> None:
        """What rows of these sessions stand for, uploads, shards and part records, deleted there; the rows stay."""
        with self._node.catalog.read() as txn:
            uploads = [upload for session in sessions for upload in txn.uploads_of(session.id, tier.name)]
        for upload in uploads:  # their records go with the rows
            await tier.tier.abort_upload(upload.key, upload.upload_id)
        by_id = {session.id: session for session in sessions}
        keys = [shard_key(row.run, row.step, by_id[shard.session_id].session, shard.name) for shard in shards]
        for session in sessions:
            keys += await self._documents(tier, session)
        for begin in range(0, len(keys), DELETES_A_CALL):
            await tier.tier.delete_many(keys[begin : begin + DELETES_A_CALL])

    async def _documents(self, tier: MonitoredTier, session: SessionRow) -> list[str]:
        """Part records and announcements. Of very many writers those that are there: most nodes announce nothing."""
        names = (session.run, session.step, session.session)
        kinds = (part_key, announce_key) if session.writers > 1 else (part_key,)
        if session.writers <= WRITERS_UNSEEN_MAX:
            return [kind(*names, writer) for kind in kinds for writer in range(session.writers)]
        found = []
        for kind in kinds:
            listing = await tier.tier.list(kind(*names, 0).rpartition("/")[0] + "/")
            there = {info.key for info in listing.objects}
            found += [key for writer in range(session.writers) if (key := kind(*names, writer)) in there]
        return found

    async def drop_superseded(self, session: SessionRow) -> None:
        """Delete a session that a newer one of its step has replaced on every tier, as the caller has seen there.

        The checkpoint and its manifest stay.

        Raises Unavailable where a tier is away or something is on its way: nothing is forgotten then, and it can be repeated.
        """
        async with self._lock:
            with self._node.catalog.read() as txn:
                row, current = txn.checkpoint(session.run, session.step), txn.session(session.id)
            shards = await all_shards(self._node, session.id)
            if row is None or current is None or row.deleting:
                return
            for name in current.publish:
                tier = self._node.tiers.get(name)
                if tier is None or not tier.usable or await self.is_under_way(tier, [current]):
                    raise Unavailable("a tier that holds the session cannot be cleaned now", tier=name, retry_after_s=5.0)
            for name in current.publish:
                await self._node.catalog.write(partial(_yielded, current.id, name))  # no reader takes it from here on
            failpoints.hit("delete.superseded_marked")
            for name in current.publish:
                await self.shards_off_tier(self._node.tiers[name], row, [current], shards)
            await self._out_of_cache([current], shards)
        self._node.changes.tell()

    async def is_under_way(self, tier: MonitoredTier, sessions: list[SessionRow]) -> bool:
        """Whether something of them is on its way to the tier. After the marking neither a copy nor a document is begun any
        more; those that were have to end first."""
        if any((where, session.id) in self._node.publishing for session in sessions for where in (tier.name, FILES)):
            return True
        for session in sessions:
            with self._node.catalog.read() as txn:
                verified, copies, _, _ = txn.session_progress(session.id, tier.name)
            if verified == copies:
                continue
            async for rows in pages(self._node, session.id):
                with self._node.catalog.read() as txn:
                    copy_rows = [txn.copy(row.key, tier.name) for row in rows]
                if any(copy is not None and copy.state is CopyState.WRITING for copy in copy_rows):
                    return True
        return False

    async def _drop_manifest(self, tier: MonitoredTier, row: CheckpointRow, sessions: list[SessionRow]) -> None:
        """Only a manifest that names a session of ours: a newer session of another node is not ours to delete."""
        try:
            if await self._is_theirs(tier, row, sessions):
                return
        except NotFound:
            return
        await tier.tier.delete(current_key(row.run, row.step))
        failpoints.hit("delete.pointer_gone")
        await tier.tier.delete(manifest_key(row.run, row.step))

    async def _is_theirs(self, tier: MonitoredTier, row: CheckpointRow, sessions: list[SessionRow]) -> bool:
        """Whether the manifest there names no session of ours. Raises NotFound where there is none, and Unsupported for a newer
        release's, which may name what nobody here knows of."""
        key = manifest_key(row.run, row.step)
        document, _ = await tier.tier.get_small(key)
        try:
            manifest = await self._node.aside(len(document), lambda: Manifest.from_json(document))
        except NewerVersion as error:
            what = what_is_wrong("the manifest", error)
            raise Unsupported(f"{what}; delete it with that release", tier=tier.name, key=key) from error
        except ManifestError:
            return False
        return manifest.session not in {session.session for session in sessions}

    async def _out_of_cache(self, sessions: list[SessionRow], shards: list[ShardRow]) -> None:
        cache, io = self._node.cache, self._node.io
        for session in sessions:
            # Part files first: a shard without its part file is never taken for committed.
            await io.run(cache.remove_part_files, session.id, None)
        failpoints.hit("delete.part_files_gone")
        on_disk = [shard for shard in shards if shard.disk_size]
        await io.run(cache.unlink_many, [cache.shard_path(shard.key) for shard in on_disk])
        failpoints.hit("delete.files_gone")
        for shard in shards:
            for kind in ("lost", "quarantine"):
                self._node.alarms.pop(f"{kind}-{shard.session_id}-{shard.shard_id}", None)
        unlinked = {shard.key for shard in on_disk}
        for session in sessions:
            # By the rows as they are now: since the look some may have been evicted, and a stream may have sealed one more.
            rows = []
            async for page in pages(self._node, session.id):
                rows += await self._node.catalog.write(partial(_drop_shards, page), frees=True)
            rows += await self._node.catalog.write(partial(_drop_session, session.id), frees=True)
            self._node.first_seen_s.pop(session.id, None)
            self._node.budget.freed(sum(row.disk_size for row in rows))
            await io.run(cache.unlink_many, [cache.shard_path(row.key) for row in rows if row.key not in unlinked])
            await io.run(cache.remove_part_files, session.id, None)
            await io.run(cache.drop_session_dir, session.id)


async def _nothing(row: CheckpointRow) -> None:
    return None


def _yielded(session_id: int, tier: str, txn: WriteTxn) -> None:
    txn.set_publish(session_id, tier, PublishState.SUPERSEDED)


def _drop_session(session_id: int, txn: WriteTxn) -> list[ShardRow]:
    return txn.drop_session(session_id) if txn.session(session_id) is not None else []


def _drop_shards(rows: Sequence[ShardRow], txn: WriteTxn) -> list[ShardRow]:
    dropped = [txn.drop_shard(row.key) for row in rows]
    return [row for row in dropped if row is not None and row.disk_size]
