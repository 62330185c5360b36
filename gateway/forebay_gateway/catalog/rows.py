"""How rows are kept together with their indexes and sums.

Owns the entries that hang on each row: all changes of a shard go through _put_shard and all of a copy through _put_copy, so
that sums and indexes cannot drift from the rows. Does not own which rows change in one act (mutations).
"""

import threading
from typing import Any, TypeVar

from msgspec.structs import replace

from forebay_gateway.catalog import schema
from forebay_gateway.catalog.queries import OUT_OF_QUEUE, UNSETTLED, ReadTxn
from forebay_gateway.catalog.schema import CatalogDamaged, Database, Databases, TierNumbers, Transaction
from forebay_gateway.core.errors import AlreadyExists, NotFound
from forebay_gateway.core.records import (
    CheckpointRow,
    CopyRow,
    PartRow,
    PartState,
    PublishState,
    SessionRow,
    SessionSums,
    ShardKey,
    ShardRow,
    Totals,
)
from forebay_gateway.core.states import CopyState, ShardState
from forebay_wire.packs import PackIndex

_R = TypeVar("_R")


class RisingNumber:
    """A number that only rises, shared between threads. What was taken and then rolled back leaves a gap, never a repeat."""

    def __init__(self, last: int) -> None:
        self._last = last
        self._lock = threading.Lock()

    def take(self) -> int:
        """The next number."""
        with self._lock:
            self._last += 1
            return self._last

    def raise_to(self, floor: int) -> None:
        """Give nothing up to `floor` from now on."""
        with self._lock:
            self._last = max(self._last, floor)


class RowKeeper(ReadTxn):
    """What the verbs of WriteTxn are made of; sees its own writes."""

    def __init__(self, txn: Transaction, databases: Databases, tiers: TierNumbers, commits: RisingNumber) -> None:
        super().__init__(txn, databases, tiers)
        self._commits = commits
        self._deltas: dict[tuple[str, bytes], list[int]] = {}  # (database, key): what to add to the sums
        self._changed: set[tuple[str, int]] = set()  # checkpoints whose completeness may be another one
        self._changed_sessions: set[int] = set()  # the same, by their sessions
        self._id_seen = 0
        self.dirty: dict[int, int] = {}  # session: by how many bytes its dirty files have grown

    def totals(self) -> Totals:
        """The running sums, with this act's changes."""
        self._flush_sums()
        return super().totals()

    def part_progress(self, session_id: int, writer: int, tier: str) -> tuple[int, int, int, int]:
        """As in ReadTxn, with this act's changes."""
        self._flush_sums()
        return super().part_progress(session_id, writer, tier)

    def session_progress(self, session_id: int, tier: str) -> tuple[int, int, int, int]:
        """As in ReadTxn, with this act's changes."""
        self._flush_sums()
        return super().session_progress(session_id, tier)

    def session_sums(self, session_id: int) -> SessionSums:
        """As in ReadTxn, with this act's changes."""
        self._flush_sums()
        return super().session_sums(session_id)

    @property
    def highest_id(self) -> int:
        """Of the sessions and shards that the act added or kept; 0 for none."""
        return self._id_seen

    def keep_id(self, number: int) -> None:
        """Something on record bears it, though perhaps no row: no later start gives it again."""
        self._id_seen = max(self._id_seen, number)

    def finish(self) -> None:
        """Write what the act left for its end. Called once, by the writer thread, before the act's commit."""
        self._flush_sums()
        self._index_completeness()
        if self._id_seen:
            self._raise_meta(schema.META_ID_FLOOR, self._id_seen)

    # Rows that must be there.

    def _session(self, session_id: int) -> SessionRow:
        return self._found(self.session(session_id), "session", session_id=session_id)

    def _part(self, session_id: int, writer: int) -> PartRow:
        return self._found(self.part(session_id, writer), "part", session_id=session_id, writer=writer)

    def _shard(self, key: ShardKey) -> ShardRow:
        return self._found(self.shard(key), "shard", session_id=key.session_id, shard_id=key.shard_id)

    def _checkpoint(self, run: str, step: int) -> CheckpointRow:
        return self._found(self.checkpoint(run, step), "checkpoint", run=run, step=step)

    @staticmethod
    def _found(row: _R | None, noun: str, **details: Any) -> _R:
        if row is None:
            raise NotFound(f"the catalog has no such {noun}", **details)
        return row

    # Writing rows with their indexes and sums.

    def _put(self, database: Database, key: bytes, value: bytes) -> None:
        self._txn.put(key, value, db=database)

    def _delete(self, database: Database, key: bytes) -> None:
        self._txn.delete(key, db=database)

    def _put_checkpoint(self, row: CheckpointRow) -> None:
        self._changed.add((row.run, row.step))
        self._put(self._db.checkpoints, schema.checkpoint_key(row.run, row.step), schema.CHECKPOINT.encode(row))

    def _put_session(self, row: SessionRow) -> None:
        self._changed.add((row.run, row.step))
        self._put(self._db.sessions, schema.u64(row.id), schema.SESSION.encode(row))
        if row.is_cache_only:
            self._put(self._db.cache_only, schema.u64(row.id), b"")
        else:
            self._delete(self._db.cache_only, schema.u64(row.id))
        for tier, state in row.publish.items():
            self._index_publish(row, self._tiers.number(tier), state is PublishState.PENDING)

    def _index_publish(self, row: SessionRow, tier: int, wanted: bool) -> None:
        order_key = schema.session_tier_key(row.id, tier)
        held = self._get(self._db.publish_order, order_key)
        if wanted and held is None:
            self._put(self._db.publish_order, order_key, schema.u64(row.commit_seq))
            self._put(self._db.publish, schema.publish_key(tier, row.commit_seq, row.id), b"")
        elif held is not None and not wanted:
            self._delete(self._db.publish_order, order_key)
            self._delete(self._db.publish, schema.publish_key(tier, schema.number_of(held), row.id))

    def _put_part(self, row: PartRow) -> None:
        key = schema.part_key(row.session_id, row.writer)
        self._count_part(self.part(row.session_id, row.writer), -1)
        self._count_part(row, 1)
        self._put(self._db.parts, key, schema.PART.encode(row))
        if row.state is PartState.OPEN:
            self._put(self._db.open_parts, key, b"")
        else:
            self._delete(self._db.open_parts, key)

    def _count_part(self, row: PartRow | None, sign: int) -> None:
        if row is not None:
            committed = sign * (row.state is PartState.COMMITTED)
            sums = (sign, committed, committed * row.visible_count, committed * row.visible_size, 0, 0, 0, 0, 0)
            self._add("session_sums", schema.u64(row.session_id), *sums)
            self._changed_sessions.add(row.session_id)

    def _add_shard(self, old: ShardRow | None, row: ShardRow, chunks: bytes, index: PackIndex | None = None) -> None:
        self._take_name(row, row.name, schema.u64(row.shard_id))
        if index is not None:
            for ordinal, packed in enumerate(index):
                self._take_name(row, packed.name, schema.packed_value(row.shard_id, ordinal))
            self._put(self._db.packs, schema.shard_key(row.key), index.encoded)
        self._put(self._db.part_shards, schema.part_shard_key(row.session_id, row.writer, row.shard_id), b"")
        self._put(self._db.chunks, schema.shard_key(row.key), chunks)
        self._put_shard(old, row)
        self.keep_id(row.shard_id)

    def _take_name(self, row: ShardRow, name: str, value: bytes) -> None:
        key = schema.name_key(row.session_id, name)
        holder = self._get(self._db.names, key)
        if holder is not None and schema.named_of_value(holder)[0] != row.shard_id:
            raise AlreadyExists("the session has a shard of this name", session_id=row.session_id, name=name)
        self._put(self._db.names, key, value)

    def _put_shard(self, old: ShardRow | None, new: ShardRow | None) -> None:
        """Replace a shard's row (None: absent) with its share in the sums and its places in `evictable` and `unsettled`."""
        for row, sign in ((old, -1), (new, 1)):
            if row is None:
                continue
            dirty = row.disk_size if row.state is ShardState.SEALED else 0
            self._add("meta", schema.META_TOTALS, sign * row.disk_size, sign * dirty, sign)
            if dirty:
                self.dirty[row.session_id] = self.dirty.get(row.session_id, 0) + sign * dirty
            cached, sealed = sign * row.is_cached, sign * (row.state is ShardState.SEALED)
            sums = (0, 0, 0, 0, sign, sign * row.size, cached, cached * row.size, sealed)
            self._add("session_sums", schema.u64(row.session_id), *sums)
            if row.state in UNSETTLED:
                if sign > 0:
                    self._put(self._db.unsettled, schema.shard_key(row.key), b"")
                else:
                    self._delete(self._db.unsettled, schema.shard_key(row.key))
            if row.state is ShardState.EVICTABLE:
                entry = schema.evictable_key(self._eviction_order(row), row.key)
                if sign > 0:
                    self._put(self._db.evictable, entry, b"")
                else:
                    self._delete(self._db.evictable, entry)
        if new is not None:
            self._put(self._db.shards, schema.shard_key(new.key), schema.SHARD.encode(new))
        elif old is not None:
            self._delete(self._db.shards, schema.shard_key(old.key))

    def _put_copy(self, shard: ShardRow, tier: int, old: CopyRow | None, new: CopyRow | None, order: int) -> None:
        """Replace a copy's row (None: absent) with its place in the queue and its share in the queue's, the part's and the
        session's sums."""
        progress = schema.progress_key(shard.session_id, shard.writer, tier)
        for row, sign in ((old, -1), (new, 1)):
            if row is None:
                continue
            count, size = sign, sign * shard.size
            verified = row.state is CopyState.VERIFIED
            if row.state is not CopyState.SKIPPED:
                shares = (count * verified, count, size * verified, size)
                self._add("progress", progress, *shares)
                self._add("session_progress", schema.session_tier_key(shard.session_id, tier), *shares)
            if row.state not in OUT_OF_QUEUE:
                self._add("meta", schema.queue_key(tier), count, size)
                entry = schema.pending_key(tier, order, shard.key)
                if sign > 0:
                    self._put(self._db.pending, entry, b"")
                else:
                    self._delete(self._db.pending, entry)
        key = schema.copy_key(shard.key, tier)
        if new is not None:
            self._put(self._db.copies, key, schema.COPY.encode(new))
        else:
            self._delete(self._db.copies, key)

    def _reorder(self, shard: ShardRow, old: int, new: int) -> None:
        """Move a shard's index entries from its part's old order to the new one; only adoption leaves any before a commit."""
        for tier, copy in self._copy_rows(shard.key):
            if copy.state not in OUT_OF_QUEUE:
                self._delete(self._db.pending, schema.pending_key(tier, old, shard.key))
                self._put(self._db.pending, schema.pending_key(tier, new, shard.key), b"")
        if shard.state is ShardState.EVICTABLE and self._get(self._db.fetched, schema.shard_key(shard.key)) is None:
            self._delete(self._db.evictable, schema.evictable_key(old, shard.key))
            self._put(self._db.evictable, schema.evictable_key(new, shard.key), b"")

    # Removing rows.

    def _drop_shard(self, row: ShardRow) -> None:
        order, key = self._commit_order(row), schema.shard_key(row.key)
        for tier, copy in self._copy_rows(row.key):
            self._put_copy(row, tier, copy, None, order)
        for entry, _ in list(self._scan(self._db.uploads, key)):
            self._delete(self._db.uploads, entry)
        self._put_shard(row, None)
        if row.is_pack:
            for inner in self.inside(row):
                self._delete(self._db.names, schema.name_key(row.session_id, inner.name))
            self._delete(self._db.packs, key)
        self._delete(self._db.fetched, key)
        self._delete(self._db.chunks, key)
        self._delete(self._db.names, schema.name_key(row.session_id, row.name))
        self._delete(self._db.part_shards, schema.part_shard_key(row.session_id, row.writer, row.shard_id))

    def _drop_part_row(self, part: PartRow) -> None:
        key = schema.part_key(part.session_id, part.writer)
        self._count_part(part, -1)
        self._delete(self._db.parts, key)
        self._delete(self._db.open_parts, key)

    def _drop_session_row(self, session: SessionRow) -> None:
        self._changed.add((session.run, session.step))
        for _, tier in self._tiers.items():
            self._index_publish(session, tier, False)
        self._delete(self._db.sessions, schema.u64(session.id))
        self._delete(self._db.cache_only, schema.u64(session.id))
        self._delete(self._db.session_names, schema.session_name_key(session.run, session.step, session.session))
        checkpoint = self._checkpoint(session.run, session.step)
        left = tuple(each for each in checkpoint.session_ids if each != session.id)
        if left:
            self._put_checkpoint(replace(checkpoint, session_ids=left))
            return
        key = schema.checkpoint_key(session.run, session.step)
        self._delete(self._db.checkpoints, key)
        self._delete(self._db.deleting, key)
        if next(self._scan(self._db.checkpoints, schema.run_key(session.run)), None) is None:
            self._delete(self._db.runs, schema.run_key(session.run))

    # Orders and sums.

    def _take_order(self, given: int | None) -> int:
        """The next number of the one order of commits and fetches, or the given one, kept so that neither comes again."""
        order = self._commits.take() if given is None else given
        self._commits.raise_to(order)
        self._raise_meta(schema.META_COMMIT_SEQ, order)
        return order

    def _commit_order(self, shard: ShardRow) -> int:
        part = self.part(shard.session_id, shard.writer)
        return 0 if part is None else part.commit_seq

    def _eviction_order(self, shard: ShardRow) -> int:
        fetched = self._get(self._db.fetched, schema.shard_key(shard.key))
        return self._commit_order(shard) if fetched is None else schema.number_of(fetched)

    def _raise_meta(self, key: bytes, floor: int) -> None:
        held = self._get(self._db.meta, key)
        if held is None or schema.number_of(held) < floor:
            self._put(self._db.meta, key, schema.u64(floor))

    def _index_completeness(self) -> None:
        """Put the checkpoints that this act touched where they belong."""
        for session_id in self._changed_sessions:
            if (session := self.session(session_id)) is not None:
                self._changed.add((session.run, session.step))
        for run, step in self._changed:
            row, key = self.checkpoint(run, step), schema.checkpoint_key(run, step)
            belongs = None if row is None else self.recount_completeness(row)
            for wanted, database in ((True, self._db.complete), (False, self._db.incomplete)):
                if belongs is wanted:
                    self._put(database, key, b"")
                else:
                    self._delete(database, key)

    def _add(self, database: str, key: bytes, *deltas: int) -> None:
        sums = self._deltas.setdefault((database, key), [0] * len(deltas))
        for index, delta in enumerate(deltas):
            sums[index] += delta

    def _flush_sums(self) -> None:
        deltas, self._deltas = self._deltas, {}
        for (name, key), delta in deltas.items():
            database = getattr(self._db, name)
            held = schema.unpack_sums(self._get(database, key), len(delta))
            sums = tuple(old + more for old, more in zip(held, delta, strict=True))
            if min(sums) < 0:
                raise CatalogDamaged("a sum would fall below zero", key=key.hex(), sums=sums)
            if any(sums):
                self._put(database, key, schema.pack_sums(sums))
            else:
                self._delete(database, key)
