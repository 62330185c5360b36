"""What can be asked of the catalog, inside one snapshot.

Owns look-ups, scans and sums. Does not own when a snapshot begins and ends (env), and changes nothing.
"""

from collections.abc import Callable, Iterable, Iterator

from forebay_gateway.catalog import schema
from forebay_gateway.catalog.schema import CatalogDamaged, Database, Databases, TierNumbers, Transaction
from forebay_gateway.core.errors import NotFound
from forebay_gateway.core.policy import is_unfinished, is_whole
from forebay_gateway.core.records import (
    CheckpointRow,
    CopyRow,
    NamedShard,
    PartRow,
    PartState,
    PendingCopy,
    SessionRow,
    SessionSums,
    ShardKey,
    ShardRow,
    TierTotals,
    Totals,
    UploadRow,
)
from forebay_gateway.core.states import CopyState, ShardState
from forebay_wire.packs import PackedShard, PackError, PackIndex

# What start-up looks at, whatever else there is.
UNSETTLED = frozenset({ShardState.EVICTING, ShardState.QUARANTINED})
# A copy is in its tier's queue until one of these is reached. QUARANTINED is in it: it still has to be put again.
OUT_OF_QUEUE = frozenset({CopyState.VERIFIED, CopyState.SKIPPED})


class ReadTxn:
    """One snapshot. Rows are immutable and outlive it; iterators do not, and raise RuntimeError when it has ended."""

    def __init__(self, txn: Transaction, databases: Databases, tiers: TierNumbers) -> None:
        self._open: Transaction | None = txn
        self._db = databases
        self._tiers = tiers
        self._ended = ""

    def end(self, reason: str) -> None:
        """Make every later use raise RuntimeError(reason)."""
        self._ended = reason
        # LMDB's reader slot is taken until its transaction is freed, and an iterator over a pack keeps this view.
        self._open = None

    @property
    def _txn(self) -> Transaction:
        if self._open is None:
            raise RuntimeError(self._ended)
        return self._open

    def _get(self, database: Database, key: bytes) -> bytes | None:
        return self._txn.get(key, db=database)

    def _scan(self, database: Database, prefix: bytes = b"", start: bytes | None = None) -> Iterator[tuple[bytes, bytes]]:
        """Entries whose key begins with `prefix`, in key order, from `start` on. The database must not change meanwhile.

        Raises CatalogDamaged where keys do not ascend: who goes on behind the last one would come by the same ones for ever.
        """
        with self._txn.cursor(database) as cursor:
            last = prefix if start is None else start
            if not (cursor.set_range(last) if last else cursor.first()):
                return
            for key, value in cursor:
                if key < last:
                    raise _out_of_order(key)
                if not key.startswith(prefix):
                    return
                last = key
                yield key, value
                if self._ended:
                    raise RuntimeError(self._ended)

    # Runs, checkpoints, sessions, parts.

    def runs(self) -> list[str]:
        """Names of all runs, sorted."""
        found = {key: value.decode("utf-8") for key, value in self._scan(self._db.runs)}
        for key, run in found.items():
            if key != schema.run_key(run):  # what is looked up by such a name would be missed, and taken for gone
                raise CatalogDamaged("a run's name stands under the key of another", key=key.hex())
        return sorted(found.values())

    def checkpoint(self, run: str, step: int) -> CheckpointRow | None:
        """The checkpoint, None where this node has nothing of it."""
        data = self._get(self._db.checkpoints, schema.checkpoint_key(run, step))
        return None if data is None else schema.CHECKPOINT.decode(data)

    def checkpoints(self, run: str, first_step: int = 0) -> Iterator[CheckpointRow]:
        """The run's checkpoints, by step, from `first_step` on."""
        if first_step >= 1 << 64:
            return
        for key, value in self._scan(self._db.checkpoints, schema.run_key(run), schema.checkpoint_key(run, first_step)):
            row = schema.CHECKPOINT.decode(value)
            if row.run != run or not key.endswith(schema.u64(row.step)):
                raise CatalogDamaged("a checkpoint's row stands under the key of another", key=key.hex())
            yield row

    def deleting(self) -> list[CheckpointRow]:
        """Checkpoints that are marked for deletion."""
        rows = []
        for key, _ in self._scan(self._db.deleting):
            data = self._get(self._db.checkpoints, key)
            rows.append(schema.CHECKPOINT.decode(self._there(data, "deleting", key)))
        return rows

    def session(self, session_id: int) -> SessionRow | None:
        """The session with this id."""
        data = self._get(self._db.sessions, schema.u64(session_id))
        return None if data is None else schema.SESSION.decode(data)

    def find_session(self, run: str, step: int, session: str) -> SessionRow | None:
        """The session with this name."""
        data = self._get(self._db.session_names, schema.session_name_key(run, step, session))
        row = None if data is None else self.session(schema.number_of(data))
        if data is not None and (row is None or (row.run, row.step, row.session) != (run, step, session)):
            raise CatalogDamaged("a session's name leads to none, or to another", run=run, step=step, session=session)
        return row

    def sessions_of(self, checkpoint: CheckpointRow) -> list[SessionRow]:
        """A checkpoint's sessions, in the order in which they were opened here."""
        found = [row for number in checkpoint.session_ids if (row := self.session(number)) is not None]
        if len(found) < len(checkpoint.session_ids) or any(row.step != checkpoint.step for row in found):
            raise CatalogDamaged("a session of a checkpoint is not there", run=checkpoint.run, step=checkpoint.step)
        return found

    def sessions(self) -> Iterator[SessionRow]:
        """All sessions, by id. A full scan."""
        for _, value in self._scan(self._db.sessions):
            yield schema.SESSION.decode(value)

    def unpublished(self, tier: str) -> Iterator[SessionRow]:
        """Sessions that are PENDING on the tier, in the order of the commits that made them so."""
        for session_id in self.unpublished_ids(tier):
            data = self._get(self._db.sessions, schema.u64(session_id))
            yield schema.SESSION.decode(self._there(data, "publish", schema.u64(session_id)))

    def unpublished_ids(self, tier: str) -> Iterator[int]:
        """Their ids alone, for those who look at them one by one."""
        for key, _ in self._scan(self._db.publish, schema.tier_prefix(self._tiers.number(tier))):
            yield schema.session_of_publish_key(key)

    def complete_count(self) -> int:
        """How many checkpoints have a whole session and are not being deleted. A look-up."""
        return self._entries(self._db.complete)

    def incomplete_count(self) -> int:
        """How many have none, and something is still to come. A look-up."""
        return self._entries(self._db.incomplete)

    def incomplete(self) -> Iterator[CheckpointRow]:
        """The latter, a run's side by side, by step. An entry without its row is fsck's to tell: no status hangs on it."""
        for key, _ in self._scan(self._db.incomplete):
            if (data := self._get(self._db.checkpoints, key)) is not None:
                yield schema.CHECKPOINT.decode(data)

    def cache_only(self) -> list[int]:
        """Ids of sessions that no tier has or is to get, by policy; oldest first."""
        return [schema.number_of(key) for key, _ in self._scan(self._db.cache_only)]

    def session_sums(self, session_id: int) -> SessionSums:
        """The session's running sums; all zero where there is no such session. A look-up."""
        return SessionSums(*self._sums(self._db.session_sums, schema.u64(session_id), schema.SESSION_LENGTH))

    def sessions_with(self, wanted: Callable[[SessionSums], int]) -> list[int]:
        """Ids of the sessions of whose sums `wanted` says more than 0. A look at every session's sums, and at no shard."""
        found = []
        for key, value in self._scan(self._db.session_sums):
            if wanted(SessionSums(*schema.unpack_sums(value, schema.SESSION_LENGTH))):
                found.append(schema.number_of(key))
        return found

    def open_parts(self) -> Iterator[PartRow]:
        """Parts that are OPEN, by session and writer."""
        for key, _ in self._scan(self._db.open_parts):
            yield schema.PART.decode(self._there(self._get(self._db.parts, key), "open_parts", key))

    def part(self, session_id: int, writer: int) -> PartRow | None:
        """One writer's part."""
        data = self._get(self._db.parts, schema.part_key(session_id, writer))
        return None if data is None else schema.PART.decode(data)

    def parts(self, session_id: int) -> list[PartRow]:
        """The session's parts on this node, by writer."""
        return [schema.PART.decode(value) for _, value in self._scan(self._db.parts, schema.u64(session_id))]

    # Shards.

    def shard(self, key: ShardKey) -> ShardRow | None:
        """The shard with this key."""
        data = self._get(self._db.shards, schema.shard_key(key))
        return None if data is None else schema.SHARD.decode(data)

    def shard_by_name(self, session_id: int, name: str) -> ShardRow | None:
        """The session's file with this name: a shard that is in no pack, or a pack."""
        found = self._named(session_id, name)
        return None if found is None or found.packed is not None else found.row

    def named(self, session_id: int, name: str) -> NamedShard | None:
        """The session's shard with this name, wherever it lies. Packs are none."""
        found = self._named(session_id, name)
        return None if found is None or (found.row.is_pack and found.packed is None) else found

    def _named(self, session_id: int, name: str) -> NamedShard | None:
        data = self._get(self._db.names, schema.name_key(session_id, name))
        if data is None:
            return None
        shard_id, ordinal = schema.named_of_value(data)
        row = self.shard(ShardKey(session_id, shard_id))
        if row is None:
            return None
        if ordinal is None:
            return NamedShard(row) if row.name == name else None
        try:
            packed = self.pack_index(row.key)[ordinal]
        except PackError as error:
            raise CatalogDamaged(f"a pack's index cannot be read ({error})", pack=row.name) from error
        return NamedShard(row, packed) if packed.name == name else None

    def packed(self, session_id: int, names: Iterable[str]) -> Iterator[tuple[ShardRow, PackedShard]]:
        """Those of the named shards that lie in packs: (pack, place in it). Each pack's index is taken in once."""
        packs: dict[int, tuple[ShardRow, PackIndex] | None] = {}
        for name in names:
            data = self._get(self._db.names, schema.name_key(session_id, name))
            shard_id, ordinal = (0, None) if data is None else schema.named_of_value(data)
            if ordinal is None:
                continue
            if shard_id not in packs:
                row = self.shard(ShardKey(session_id, shard_id))
                packs[shard_id] = None if row is None else (row, self.pack_index(row.key))
            if (pack := packs[shard_id]) is None:
                continue
            row, index = pack
            try:
                shard = index[ordinal]
            except PackError as error:
                raise CatalogDamaged(f"a pack's index cannot be read ({error})", pack=row.name) from error
            if shard.name == name:
                yield row, shard

    def pack_index(self, key: ShardKey) -> PackIndex:
        """What lies where in a pack. Raises NotFound."""
        data = self._get(self._db.packs, schema.shard_key(key))
        if data is None:
            raise NotFound("the catalog has no such pack", session_id=key.session_id, shard_id=key.shard_id)
        try:
            return PackIndex(data)
        except PackError as error:
            raise CatalogDamaged(f"a pack's index cannot be read ({error})", shard_id=key.shard_id) from error

    def inside(self, row: ShardRow) -> Iterator[NamedShard]:
        """The shards that the row stands for, by name: itself, or all in the pack."""
        if not row.is_pack:
            yield NamedShard(row)
            return
        index = self.pack_index(row.key)
        try:
            for packed in index:
                yield NamedShard(row, packed)
        except PackError as error:
            raise CatalogDamaged(f"a pack's index cannot be read ({error})", pack=row.name) from error

    def shards(self, session_id: int, writer: int | None = None, after: int = -1) -> Iterator[ShardRow]:
        """The session's files, shards and packs, or only one writer's, by shard id, from behind the id `after`."""
        if writer is None:
            start = schema.shard_key(ShardKey(session_id, after + 1))
            for key, value in self._scan(self._db.shards, schema.u64(session_id), start):
                yield _shard_at(key, value)
            return
        start = schema.part_shard_key(session_id, writer, after + 1)
        for key, _ in self._scan(self._db.part_shards, schema.part_key(session_id, writer), start):
            yield self._indexed_shard(schema.shard_of_part_shard_key(key), "part_shards", key)

    def shard_ids(self, session_id: int, writer: int) -> list[int]:
        """Of one writer's files, ascending."""
        entries = self._scan(self._db.part_shards, schema.part_key(session_id, writer))
        return [schema.shard_of_part_shard_key(key).shard_id for key, _ in entries]

    def unsettled(self) -> list[ShardRow]:
        """Shards that are EVICTING or QUARANTINED."""
        return [self._indexed_shard(schema.shard_of_key(key), "unsettled", key) for key, _ in self._scan(self._db.unsettled)]

    def chunks(self, key: ShardKey) -> bytes:
        """The shard's packed chunk CRC table. Raises NotFound."""
        data = self._get(self._db.chunks, schema.shard_key(key))
        if data is None:
            raise NotFound("the catalog has no such shard", session_id=key.session_id, shard_id=key.shard_id)
        return data

    def all_shards(self, after: ShardKey | None = None) -> Iterator[ShardRow]:
        """Every shard, by key, from behind `after`. A full scan."""
        start = None if after is None else schema.shard_key(after)
        for key, value in self._scan(self._db.shards, start=start):
            if key != start:
                yield _shard_at(key, value)

    def cached(self) -> Iterator[ShardRow]:
        """Every shard that should have a file in the cache. A full scan."""
        return (row for row in self.all_shards() if row.disk_size > 0)

    def evictable(self, kept: Callable[[int], bool] = lambda session_id: False) -> Iterator[ShardRow]:
        """EVICTABLE shards, those first that came first into the cache: by their part's commit or their fetch from a tier.

        Those of a session that `kept` says yes to are passed over, a part at a time.
        """
        with self._txn.cursor(self._db.evictable) as cursor:
            there, least = cursor.first(), b""
            while there:
                if (key := cursor.key()) < least:
                    raise _out_of_order(key)
                shard = schema.shard_of_evictable_key(key)
                least = key
                if kept(shard.session_id):
                    least = schema.behind_session_of_evictable_key(key)
                    there = cursor.set_range(least) if least > key else cursor.next()
                    continue
                yield self._indexed_shard(shard, "evictable", key)
                if self._ended:
                    raise RuntimeError(self._ended)
                there = cursor.next()

    # Copies.

    def copy(self, key: ShardKey, tier: str) -> CopyRow | None:
        """The shard's copy on the tier."""
        data = self._get(self._db.copies, schema.copy_key(key, self._tiers.number(tier)))
        return None if data is None else schema.COPY.decode(data)

    def copies(self, key: ShardKey) -> dict[str, CopyRow]:
        """The shard's copies by tier name."""
        return {self._tiers.name(tier): row for tier, row in self._copy_rows(key)}

    def copies_of(self, keys: Iterable[ShardKey]) -> list[dict[str, CopyRow]]:
        """The copies of each of these shards, as copies()."""
        name = self._tiers.name
        found = []
        with self._txn.cursor(self._db.copies) as cursor:  # one for all: opening it costs more than the look-up
            for key in keys:
                prefix = schema.shard_key(key)
                rows = {}
                there = cursor.set_range(prefix)
                while there and (at := cursor.key()).startswith(prefix):
                    rows[name(schema.copy_of_key(at)[1])] = schema.COPY.decode(cursor.value())
                    there = cursor.next()
                found.append(rows)
        return found

    def _copy_rows(self, key: ShardKey) -> list[tuple[int, CopyRow]]:
        found = self._scan(self._db.copies, schema.shard_key(key))
        return [(schema.copy_of_key(entry)[1], schema.COPY.decode(value)) for entry, value in found]

    def pending(self, tier: str, after: PendingCopy | None = None) -> Iterator[PendingCopy]:
        """The tier's drain queue in order, from behind `after`: copies that are neither VERIFIED nor SKIPPED."""
        number = self._tiers.number(tier)
        start = None if after is None else schema.pending_key(number, after.order, after.key)
        for key, _ in self._scan(self._db.pending, schema.tier_prefix(number), start):
            if key != start:
                yield PendingCopy(*schema.pending_of_key(key))

    def pending_parts(self, tier: str, after: int = 0) -> Iterator[PendingCopy]:
        """The first entry of each part in the queue, by the order of commits from behind `after`; a look-up for each."""
        number = self._tiers.number(tier)
        prefix = schema.tier_prefix(number)
        with self._txn.cursor(self._db.pending) as cursor:
            order = after
            while cursor.set_range(schema.pending_key(number, order + 1, ShardKey(0, 0))):
                if self._ended:
                    raise RuntimeError(self._ended)
                if not (key := cursor.key()).startswith(prefix):
                    return
                entry = PendingCopy(*schema.pending_of_key(key))
                if entry.order <= order:
                    raise _out_of_order(key)
                order = entry.order
                yield entry

    def part_progress(self, session_id: int, writer: int, tier: str) -> tuple[int, int, int, int]:
        """(verified shards, shards, verified bytes, bytes) of a part's copies on the tier; SKIPPED ones count nowhere."""
        key = schema.progress_key(session_id, writer, self._tiers.number(tier))
        verified, shards, verified_bytes, size = self._sums(self._db.progress, key, schema.PROGRESS_LENGTH)
        return verified, shards, verified_bytes, size

    def session_progress(self, session_id: int, tier: str) -> tuple[int, int, int, int]:
        """The sum of part_progress over the session's parts. A look-up."""
        key = schema.session_tier_key(session_id, self._tiers.number(tier))
        verified, shards, verified_bytes, size = self._sums(self._db.session_progress, key, schema.PROGRESS_LENGTH)
        return verified, shards, verified_bytes, size

    def upload(self, key: ShardKey, tier: str) -> UploadRow | None:
        """The upload that was begun for this copy."""
        data = self._get(self._db.uploads, schema.copy_key(key, self._tiers.number(tier)))
        return None if data is None else schema.UPLOAD.decode(data)

    def uploads(self) -> Iterator[tuple[ShardKey, str, UploadRow]]:
        """All uploads that were begun and not cleared."""
        for entry, value in self._scan(self._db.uploads):
            key, tier = schema.copy_of_key(entry)
            yield key, self._tiers.name(tier), schema.UPLOAD.decode(value)

    def uploads_of(self, session_id: int, tier: str) -> list[UploadRow]:
        """Those of one session on one tier."""
        number, found = self._tiers.number(tier), self._scan(self._db.uploads, schema.u64(session_id))
        return [schema.UPLOAD.decode(value) for entry, value in found if schema.copy_of_key(entry)[1] == number]

    # Sums and settings.

    def totals(self) -> Totals:
        """The running sums; a handful of look-ups, whatever the catalog holds."""
        used, dirty, shards = self._sums(self._db.meta, schema.META_TOTALS, schema.TOTALS_LENGTH)
        tiers = {}
        for name, number in self._tiers.items():
            copies, size = self._sums(self._db.meta, schema.queue_key(number), schema.QUEUE_LENGTH)
            tiers[name] = TierTotals(copies, size)
        return Totals(used, dirty, shards, tiers)

    def recount(self) -> Totals:
        """What totals() should say, from the rows themselves. A full scan, for fsck and tests."""
        used = dirty = shards = 0
        queued = {name: [0, 0] for name, _ in self._tiers.items()}
        for _, value in self._scan(self._db.shards):
            row = schema.SHARD.decode(value)
            shards += 1
            used += row.disk_size
            dirty += row.disk_size if row.state is ShardState.SEALED else 0
            for tier, copy in self._copy_rows(row.key):
                if copy.state not in OUT_OF_QUEUE:
                    counts = queued[self._tiers.name(tier)]
                    counts[0] += 1
                    counts[1] += row.size
        return Totals(used, dirty, shards, {name: TierTotals(*counts) for name, counts in queued.items()})

    def recount_session(self, session_id: int) -> tuple[SessionSums, dict[str, tuple[int, int, int, int]]]:
        """What session_sums() and, by tier, session_progress() should say, from the rows themselves. Reads them all."""
        parts = self.parts(session_id)
        committed = [part for part in parts if part.state is PartState.COMMITTED]
        shard_count = sum(part.visible_count for part in committed)
        committed_size = sum(part.visible_size for part in committed)
        shards = size = cached = cached_size = sealed = 0
        progress: dict[int, list[int]] = {}
        for row in self.shards(session_id):
            shards, size = shards + 1, size + row.size
            cached, cached_size = cached + row.is_cached, cached_size + row.size * row.is_cached
            sealed += row.state is ShardState.SEALED
            for tier, copy in self._copy_rows(row.key):
                if copy.state is not CopyState.SKIPPED:
                    verified = copy.state is CopyState.VERIFIED
                    counted = progress.setdefault(tier, [0, 0, 0, 0])
                    for index, more in enumerate((verified, 1, row.size * verified, row.size)):
                        counted[index] += more
        named = {self._tiers.name(tier): (a, b, c, d) for tier, (a, b, c, d) in progress.items()}
        counts = (len(parts), len(committed), shard_count, committed_size)
        return SessionSums(*counts, shards, size, cached, cached_size, sealed), named

    def recount_completeness(self, row: CheckpointRow) -> bool | None:
        """Whether the checkpoint belongs into the index of complete ones (True), incomplete ones (False), or neither."""
        if row.deleting:
            return None
        sessions = self.sessions_of(row)
        sums = [self.session_sums(session.id) for session in sessions]
        if any(is_whole(session, of.committed) for session, of in zip(sessions, sums, strict=True)):
            return True
        return False if any(is_unfinished(session, of) for session, of in zip(sessions, sums, strict=True)) else None

    def completeness(self, row: CheckpointRow) -> bool | None:
        """What the indexes say of it, as recount_completeness() does."""
        key = schema.checkpoint_key(row.run, row.step)
        if self._get(self._db.complete, key) is not None:
            return True
        return None if self._get(self._db.incomplete, key) is None else False

    def setting(self, name: str) -> bytes | None:
        """A small named value."""
        key = name.encode("utf-8")
        data = self._get(self._db.settings, key) if 1 <= len(key) <= schema.KEY_BYTES_MAX else None
        return None if data is None else schema.checked(data, "setting")

    def settings(self) -> Iterator[tuple[str, bytes]]:
        """All small named values, by name."""
        for key, value in self._scan(self._db.settings):
            yield key.decode("utf-8"), schema.checked(value, "setting")

    def _entries(self, database: Database) -> int:
        return self._txn.stat(database)["entries"]

    def _sums(self, database: Database, key: bytes, length: int) -> tuple[int, ...]:
        return schema.unpack_sums(self._get(database, key), length)

    def _indexed_shard(self, shard: ShardKey, index: str, key: bytes) -> ShardRow:
        data = self._get(self._db.shards, schema.shard_key(shard))
        return schema.SHARD.decode(self._there(data, index, key))

    @staticmethod
    def _there(data: bytes | None, index: str, key: bytes) -> bytes:
        if data is None:
            raise CatalogDamaged("an index names a row that is not there", index=index, key=key.hex())
        return data


def _shard_at(key: bytes, value: bytes) -> ShardRow:
    """The row of that entry. Pages go on behind a row's own number, so another key than that would lead round in a circle."""
    row = schema.SHARD.decode(value)
    if schema.shard_key(row.key) != key:
        raise CatalogDamaged("a shard's row stands under the key of another", key=key.hex())
    return row


def _out_of_order(key: bytes) -> CatalogDamaged:
    return CatalogDamaged("the keys of a database do not ascend", key=key.hex())
