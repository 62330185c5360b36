"""What may change in the catalog: the verbs.

Owns which rows change together, and what is refused. How a row is kept with its indexes and sums is rows.py; when an act runs
and becomes durable is env. Knows nothing of files.
"""

import json
from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from forebay_gateway.catalog import schema
from forebay_gateway.catalog.rows import RowKeeper
from forebay_gateway.core.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, Unavailable
from forebay_gateway.core.records import (
    CheckpointRow,
    CopyRow,
    Origin,
    PartRow,
    PartState,
    PublishState,
    SessionRow,
    ShardKey,
    ShardRow,
    Totals,
    UploadRow,
)
from forebay_gateway.core.schedule_rows import Kind, kind_named
from forebay_gateway.core.states import CopyEvent, CopyState, ShardEvent, ShardState, next_copy_state, next_shard_state
from forebay_wire.manifest import Manifest, PartRecord, ShardEntry
from forebay_wire.packs import PackIndex


class WriteTxn(RowKeeper):
    """One act's changes; sees its own writes. An act may be run again after a rollback: it must change nothing else."""

    # Sessions and parts.

    def open_session(
        self, run: str, step: int, session: str, writers: int, *, session_id: int, origin: Origin = Origin.LOCAL
    ) -> SessionRow:
        """The session with this name, made under `session_id` where there is none yet.

        Raises InvalidArgument where it exists with other `writers`, Unavailable while the checkpoint is being deleted, and
        CatalogDamaged where one that stood here has gone: the new one would take its place, and its files would be nobody's.
        """
        checkpoint = self.checkpoint(run, step)
        if checkpoint is not None and checkpoint.deleting:
            raise Unavailable("the checkpoint is being deleted", retry_after_s=1, run=run, step=step)
        existing = self.find_session(run, step, session)
        if existing is not None:
            if existing.writers != writers:
                raise InvalidArgument(
                    f"session {session!r} was opened with {existing.writers} writers, now {writers} are asked for",
                    run=run,
                    step=step,
                )
            return existing
        if self.session(session_id) is not None:
            raise AlreadyExists("the session id is taken", session_id=session_id)
        if checkpoint is not None:
            self.sessions_of(checkpoint)
        row = SessionRow(session_id, run, step, session, writers, origin)
        self._put_session(row)
        self._put(self._db.session_names, schema.session_name_key(run, step, session), schema.u64(session_id))
        self._put(self._db.runs, schema.run_key(run), run.encode("utf-8"))
        grown = checkpoint or CheckpointRow(run, step)
        self._put_checkpoint(replace(grown, session_ids=(*grown.session_ids, session_id)))
        self.keep_id(session_id)
        return row

    def open_part(self, session_id: int, writer: int) -> PartRow:
        """The writer's part, made OPEN where there is none yet. Raises NotFound, InvalidArgument."""
        existing = self.part(session_id, writer)
        if existing is not None:
            return existing
        session = self._session(session_id)
        if writer >= session.writers:
            raise InvalidArgument(f"writer {writer} of a session with {session.writers} writers", session_id=session_id)
        row = PartRow(session_id, writer)
        self._put_part(row)
        return row

    def seal(self, row: ShardRow, chunks: bytes, index: PackIndex | None = None) -> None:
        """Add a SEALED shard with its packed chunk CRC table, or a pack with its `index`; sealing the same shard again replaces
        its row.

        Raises AlreadyExists where another shard of the session has this name (or one of a pack's) or the part is committed;
        NotFound without a part.
        """
        if row.packed != (0 if index is None else len(index)):
            raise ValueError("a pack is sealed with its index, and no other shard with one")
        if row.state is not ShardState.SEALED:
            raise ValueError(f"seal() takes a SEALED row, not one that is {row.state.value}")
        if self._part(row.session_id, row.writer).state is PartState.COMMITTED:
            raise AlreadyExists("the part is committed", session_id=row.session_id, writer=row.writer, name=row.name)
        existing = self.shard(row.key)
        if existing is not None and (existing.name, existing.writer) != (row.name, row.writer):
            raise AlreadyExists("the shard id is taken", session_id=row.session_id, shard_id=row.shard_id, name=existing.name)
        self._add_shard(existing, row, chunks, index)

    def replace_packs(self, old: Sequence[ShardKey], row: ShardRow, chunks: bytes, index: PackIndex) -> list[ShardRow]:
        """Seal one pack in the place of others of its part; their last rows. Raises NotFound where one is gone, as seal()."""
        rows = [self._shard(key) for key in old]
        for each in rows:
            self._drop_shard(each)
        self.seal(row, chunks, index)
        return rows

    def next_commit_seq(self) -> int:
        """An order for a commit_part, higher than all before; each call gives another. One that is not used leaves a gap."""
        return self._commits.take()

    def commit_part(
        self,
        session_id: int,
        writer: int,
        metadata_json: str,
        tiers: Sequence[str],
        commit_seq: int | None = None,
        *,
        kind: Kind = Kind.PERIODIC,
        only: tuple[str, ...] | None = None,
    ) -> SessionRow:
        """Commit the part: each of its shards gets a PENDING copy on each of `tiers`, and the session is to be published there.

        `only` is what a policy restricts the session to, of which its first commit decides. `commit_seq` is given by a part
        file, or by next_commit_seq(); None takes the next. A part that is committed stays as it is. A tier on which the session
        is published already keeps its state. Raises NotFound.
        """
        session, part = self._session(session_id), self._part(session_id, writer)
        if part.state is PartState.COMMITTED:
            return session
        order = self._take_order(commit_seq)
        shards = list(self.shards(session_id, writer))
        for shard in shards:
            self._reorder(shard, part.commit_seq, order)
        packs = [shard for shard in shards if shard.is_pack]
        self._put_part(
            replace(
                part,
                state=PartState.COMMITTED,
                metadata_json=metadata_json,
                commit_seq=order,
                kind=kind,
                shard_count=len(shards),
                size=sum(shard.size for shard in shards),
                packs=len(packs),
                packs_size=sum(pack.size for pack in packs),
                packed=sum(pack.packed for pack in packs),
                packed_size=sum(pack.packed_size for pack in packs),
            )
        )
        for tier in tiers:
            self._queue_copies(shards, self._tiers.number(tier), order)
        publish = dict.fromkeys(tiers, PublishState.PENDING) | session.publish
        row = replace(
            session,
            commit_seq=max(session.commit_seq, order),
            publish=publish,
            kind=min(session.kind, kind),
            tiers=session.tiers if session.commit_seq else only,
        )
        self._put_session(row)
        return row

    def add_copies(self, session_id: int, writer: int, tier: str) -> int:
        """PENDING copies for those shards of a committed part that have none on the tier; how many. Raises NotFound."""
        part = self._part(session_id, writer)
        if part.state is not PartState.COMMITTED:
            raise InvalidArgument("the part is not committed", session_id=session_id, writer=writer)
        return self._queue_copies(list(self.shards(session_id, writer)), self._tiers.number(tier), part.commit_seq)

    def drop_part(self, session_id: int, writer: int) -> list[ShardRow]:
        """Remove an OPEN part and all its shards, and a session or checkpoint that is empty then; the shards' last rows.

        Raises AlreadyExists for a committed part, NotFound.
        """
        part = self._part(session_id, writer)
        if part.state is PartState.COMMITTED:
            raise AlreadyExists("part is committed", session_id=session_id, writer=writer)
        rows = list(self.shards(session_id, writer))
        for row in rows:
            self._drop_shard(row)
        self._drop_part_row(part)
        if not self.parts(session_id):
            self._drop_session_row(self._session(session_id))
        return rows

    def part_recorded(self, session_id: int, writer: int, tier: str, *, is_there: bool = True) -> None:
        """Note that the part's record lies on the tier, or is to lie there no more."""
        part = self._part(session_id, writer)
        self._tiers.number(tier)
        if is_there is not (tier in part.recorded):
            others = tuple(name for name in part.recorded if name != tier)
            self._put_part(replace(part, recorded=(*others, tier) if is_there else others))

    def set_publish(self, session_id: int, tier: str, state: PublishState) -> SessionRow:
        """Where the session stands on the tier. Raises NotFound."""
        session = self._session(session_id)
        self._tiers.number(tier)
        row = replace(session, publish={**session.publish, tier: state})
        self._put_session(row)
        return row

    def set_kind(self, session_id: int, kind: Kind, writer: int | None = None) -> SessionRow:
        """The session is of this class now, where it was of a less urgent one, and the part of `writer`. Raises NotFound."""
        session = self._session(session_id)
        if writer is not None:
            part = self._part(session_id, writer)
            self._put_part(replace(part, kind=min(part.kind, kind)))
        row = replace(session, kind=min(session.kind, kind))
        self._put_session(row)
        return row

    def skip(self, session_id: int, tier: str, reason: str) -> None:
        """It is not to be published on the tier. Its copies there are left to copy_event(SKIP). Raises NotFound."""
        session = self._session(session_id)
        publish = {**session.publish, tier: PublishState.SKIPPED}
        self._put_session(replace(session, publish=publish, skipped={**session.skipped, tier: reason}))

    def unskip(self, session_id: int, tier: str) -> None:
        """It is to be published there after all. Raises NotFound."""
        session = self._session(session_id)
        skipped = {name: why for name, why in session.skipped.items() if name != tier}
        self._put_session(replace(session, publish={**session.publish, tier: PublishState.PENDING}, skipped=skipped))

    def note_parts(self, session_id: int, parts: dict[int, str]) -> None:
        """Add parts (writer: node) that are durable elsewhere."""
        session = self._session(session_id)
        self._put_session(replace(session, known_parts={**session.known_parts, **parts}))

    def note_predecessors(self, session_id: int, sessions: Sequence[str]) -> None:
        """Add sessions whose manifest stood on a tier when this one began."""
        session = self._session(session_id)
        self._put_session(replace(session, predecessors=tuple(dict.fromkeys((*session.predecessors, *sessions)))))

    def set_reason(self, session_id: int, reason: str) -> None:
        """Why the session cannot complete; empty where nothing is known."""
        self._put_session(replace(self._session(session_id), reason=reason))

    def drop_session(self, session_id: int) -> list[ShardRow]:
        """Remove the session with all its rows, and the checkpoint when it was the last; the rows that still have a file.

        Uploads that were begun are forgotten too: abort them first. Raises NotFound.
        """
        session = self._session(session_id)
        rows = list(self.shards(session_id))
        for row in rows:
            self._drop_shard(row)
        for part in self.parts(session_id):
            self._drop_part_row(part)
        self._drop_session_row(session)
        return [row for row in rows if row.disk_size > 0]

    # Checkpoints.

    def set_pinned(self, run: str, step: int, pinned: bool) -> CheckpointRow:
        """Keep the checkpoint, or no longer. Raises NotFound."""
        row = replace(self._checkpoint(run, step), pinned=pinned)
        self._put_checkpoint(row)
        return row

    def set_held(self, run: str, step: int, held: bool) -> CheckpointRow:
        """Whether an operator keeps the checkpoint from going to tiers. Raises NotFound."""
        row = replace(self._checkpoint(run, step), held=held)
        self._put_checkpoint(row)
        return row

    def set_turn(self, run: str, step: int) -> CheckpointRow:
        """It goes to the tiers first, behind those that were given a turn before. Raises NotFound."""
        row = replace(self._checkpoint(run, step), turn=self._take_order(None))
        self._put_checkpoint(row)
        return row

    def mark_deleting(self, run: str, step: int) -> CheckpointRow:
        """Let no session be opened in the checkpoint any more; it goes with its last session. Raises NotFound."""
        row = replace(self._checkpoint(run, step), deleting=True)
        self._put_checkpoint(row)
        self._put(self._db.deleting, schema.checkpoint_key(run, step), b"")
        return row

    # Shards and copies.

    def drop_shard(self, key: ShardKey) -> ShardRow | None:
        """Remove one shard with all that hangs on it; its last row. A committed part keeps the counts it was committed with."""
        row = self.shard(key)
        if row is not None:
            self._drop_shard(row)
        return row

    def shard_event(self, key: ShardKey, event: ShardEvent, *, disk_size: int | None = None) -> ShardRow:
        """Move the shard by the table. FETCHED needs the new file's `disk_size`; UNLINKED sets it to 0.

        Raises NotFound, IllegalTransition.
        """
        row = self._shard(key)
        state = next_shard_state(row.state, event)
        if event is ShardEvent.FETCHED:
            if disk_size is None:
                raise ValueError("FETCHED needs disk_size")
            self._put(self._db.fetched, schema.shard_key(key), schema.u64(self._take_order(None)))
        if state is ShardState.EVICTED:
            disk_size = 0
        moved = replace(row, state=state, disk_size=row.disk_size if disk_size is None else disk_size)
        self._put_shard(row, moved)
        if state is ShardState.EVICTED:
            self._delete(self._db.fetched, schema.shard_key(key))
        return moved

    def set_disk_size(self, key: ShardKey, disk_size: int) -> None:
        """Count the shard's cache file as it is, in the row and in the sums: a repair. Raises NotFound."""
        row = self._shard(key)
        self._put_shard(row, replace(row, disk_size=disk_size))

    def copy_event(self, key: ShardKey, tier: str, event: CopyEvent, *, error: str = "", tag: str = "") -> CopyRow:
        """Move the copy by the table. FAIL counts an attempt. An error stays until the next one, or until VERIFY.

        Raises NotFound, IllegalTransition.
        """
        row, number = self._shard(key), self._tiers.number(tier)
        old = self.copy(key, tier)
        if old is None:
            raise NotFound("the shard has no copy there", tier=tier, session_id=key.session_id, shard_id=key.shard_id)
        new = CopyRow(
            state=next_copy_state(old.state, event),
            attempts=old.attempts + (event is CopyEvent.FAIL),
            error=error or ("" if event is CopyEvent.VERIFY else old.error),
            tag=tag or ("" if event is CopyEvent.GONE else old.tag),
        )
        self._put_copy(row, number, old, new, self._commit_order(row))
        return new

    def record_upload(self, key: ShardKey, tier: str, upload: UploadRow) -> None:
        """Remember an upload before its first part is sent. Raises NotFound."""
        self._shard(key)
        self._put(self._db.uploads, schema.copy_key(key, self._tiers.number(tier)), schema.UPLOAD.encode(upload))

    def clear_upload(self, key: ShardKey, tier: str) -> None:
        """Forget it: completed or aborted."""
        self._delete(self._db.uploads, schema.copy_key(key, self._tiers.number(tier)))

    def adopt_manifest(self, manifest: Manifest, tier: str, *, session_id: int, new_id: Callable[[], int]) -> SessionRow:
        """Take in a checkpoint that is complete on the tier, so that it can be restored here.

        Shards that are not here are added as EVICTED with a VERIFIED copy; those that are here keep their state, and their copy
        is VERIFIED unless it is QUARANTINED. Raises Corrupt where one differs from the manifest, and as open_session does.
        """
        session = self.begin_adoption(manifest, session_id)
        self.adopt_shards(session.id, tier, manifest.files(), new_id)
        return self.finish_adoption(session.id, manifest, tier)

    def begin_adoption(self, manifest: Manifest, session_id: int) -> SessionRow:
        """adopt_manifest() in several acts, for long ones: the session alone. Nobody takes it for complete."""
        names = (manifest.run, manifest.step, manifest.session, manifest.writers)
        return self.open_session(*names, session_id=session_id, origin=Origin.TIER)

    def adopt_shards(
        self,
        session_id: int,
        tier: str,
        files: Iterable[tuple[int, ShardEntry, PackIndex | None]],
        new_id: Callable[[], int],
    ) -> None:
        """Some of its files, a pack with its index; those that are here already stay. Raises NotFound where the session went
        meanwhile, Corrupt."""
        self._session(session_id)
        number = self._tiers.number(tier)
        for writer, entry, index in files:
            self._adopt_shard(session_id, writer, entry, index, number, new_id)

    def finish_adoption(self, session_id: int, manifest: Manifest, tier: str) -> SessionRow:
        """Its parts, once all shards are there; from here on it is complete. Raises NotFound."""
        for part in manifest.parts:
            if self.part(session_id, part.writer) is None:
                self._put_part(_adopted_part(session_id, part))
        self.set_kind(session_id, min(map(_kind_of, manifest.parts), default=Kind.PERIODIC))
        return self.set_publish(session_id, tier, PublishState.COMPLETE)

    def rewrite_totals(self) -> Totals:
        """Set the running sums to what the rows say, the sessions' too; the sums over all. A full scan."""
        self._flush_sums()
        for session in list(self.sessions()):
            sums, progress = self.recount_session(session.id)
            self._put(self._db.session_sums, schema.u64(session.id), schema.pack_sums(sums))
            for name, number in self._tiers.items():
                key = schema.session_tier_key(session.id, number)
                if name in progress:
                    self._put(self._db.session_progress, key, schema.pack_sums(progress[name]))
                else:
                    self._delete(self._db.session_progress, key)
            self._changed.add((session.run, session.step))
        counted = self.recount()
        self._put(self._db.meta, schema.META_TOTALS, schema.pack_sums((counted.used, counted.dirty, counted.shards)))
        for name, number in self._tiers.items():
            self._put(self._db.meta, schema.queue_key(number), schema.pack_sums(tuple(counted.tiers[name])))
        return counted

    def set_setting(self, name: str, value: bytes | None) -> None:
        """Keep a small named value; None removes it. Names have 1 to 511 bytes."""
        key = name.encode("utf-8")
        if not 1 <= len(key) <= schema.KEY_BYTES_MAX:
            raise InvalidArgument(f"a setting's name has 1 to {schema.KEY_BYTES_MAX} bytes, not {len(key)}")
        if value is None:
            self._delete(self._db.settings, key)
        else:
            self._put(self._db.settings, key, schema.with_checksum(value))

    # Parts of the above.

    def _queue_copies(self, shards: list[ShardRow], tier: int, order: int) -> int:
        """Give those shards that have no copy on the tier a PENDING one."""
        added = 0
        for shard in shards:
            if self._get(self._db.copies, schema.copy_key(shard.key, tier)) is None:
                self._put_copy(shard, tier, None, CopyRow(CopyState.PENDING), order)
                added += 1
        return added

    def _adopt_shard(
        self,
        session_id: int,
        writer: int,
        entry: ShardEntry,
        index: PackIndex | None,
        tier: int,
        new_id: Callable[[], int],
    ) -> None:
        row = self.shard_by_name(session_id, entry.name)
        if row is None:
            row = evicted_row(ShardKey(session_id, new_id()), writer, entry, index)
            try:
                self._add_shard(None, row, entry.chunks, index)
            except AlreadyExists as error:
                raise Corrupt(f"the manifest and this node disagree on where shards lie: {error}", file=entry.name) from error
        elif (row.size, row.crc32c) != (entry.size, entry.crc32c):
            raise Corrupt(
                f"the manifest and this node disagree on shard {entry.name!r}",
                session_id=session_id,
                here=f"{row.size}/{row.crc32c:08x}",
                manifest=f"{entry.size}/{entry.crc32c:08x}",
            )
        data = self._get(self._db.copies, schema.copy_key(row.key, tier))
        old = None if data is None else schema.COPY.decode(data)
        # A manifest is no proof against bytes that were seen to be bad.
        if old is None or old.state is not CopyState.QUARANTINED:
            new = replace(old or CopyRow(CopyState.VERIFIED), state=CopyState.VERIFIED, error="")
            self._put_copy(row, tier, old, new, self._commit_order(row))


def evicted_row(key: ShardKey, writer: int, entry: ShardEntry, index: PackIndex | None) -> ShardRow:
    """The row of a file that documents name and the cache does not have."""
    row = ShardRow(*key, writer, entry.name, entry.size, entry.chunk_size, entry.crc32c, ShardState.EVICTED, 0)
    return row if index is None else replace(row, packed=len(index), packed_size=index.size)


def _adopted_part(session_id: int, part: PartRecord) -> PartRow:
    indexes = [pack.index for pack in part.packs]
    packs_size = sum(pack.file.size for pack in part.packs)
    return PartRow(
        session_id,
        part.writer,
        PartState.COMMITTED,
        json.dumps(part.metadata) if part.metadata else "",
        shard_count=len(part.shards) + len(indexes),
        size=sum(entry.size for entry in part.shards) + packs_size,
        packs=len(indexes),
        packs_size=packs_size,
        packed=sum(map(len, indexes)),
        packed_size=sum(index.size for index in indexes),
        kind=_kind_of(part),
    )


def _kind_of(part: PartRecord) -> Kind:
    return kind_named(part.kind)
