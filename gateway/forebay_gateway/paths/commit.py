"""A writer closes its part: what it meant to put is compared with what is durable, then promised.

    compare planned with landed -> small packs joined -> part file durable -> catalog: committed, copies pending, synced -> ack
    where the cache's disk fails: no part file, which the catalog notes; it is written once the disk works again (unfiled.py)

Owns this order, and the end of parts that are aborted or fall silent. The pending copies made here are the drain queue.
"""

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from forebay_gateway.base import failpoints
from forebay_gateway.base.tasks import uncut
from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import AlreadyExists, ForebayError, Incomplete, InvalidArgument, MissingPart, NotFound
from forebay_gateway.core.records import NamedShard, PartState, ShardKey, ShardRow
from forebay_gateway.core.schedule_rows import Kind
from forebay_gateway.paths.join import JOIN_PACKS_MIN, Joiner
from forebay_gateway.paths.node import SHARD_BYTES, Node, is_undecided
from forebay_gateway.paths.pages import all_shards, inside, let_go, page_of
from forebay_gateway.paths.passing import note_leaving
from forebay_gateway.paths.wholeness import complete_at_cache, has_all_parts
from forebay_gateway.paths.write import PartRef, WritePath
from forebay_wire.manifest import PackEntry, PartRecord, ShardEntry
from forebay_wire.names import file_and_directory
from forebay_wire.packs import PackIndex

log = logging.getLogger("forebay.commit")

METADATA_BYTES_MAX = 1 << 20
METADATA_DEPTH_MAX = 100  # every reader of the manifest recurses
NAMES_SHOWN = 20
UNFILED = "unfiled:"  # settings of parts that are committed and have no file yet


class Expected(msgspec.Struct, frozen=True, gc=False):
    """A shard that the writer means to have put. There may be very many: see core/records.Row."""

    name: str
    size: int
    crc32c: int


@dataclass(frozen=True, slots=True)
class Committed:
    """The answer to a commit."""

    session_id: int
    complete_at_cache: bool
    transient: bool = False
    levels: tuple[str, ...] = ("cache",)  # where its shards are; more than one, where the disk failed or came back meanwhile

    @property
    def through(self) -> str:
        """The tiers that shards went through to, which are not in the cache; empty for none."""
        return "+".join(level for level in self.levels if level != "cache")


class CommitPath:
    """Commits, aborts, and parts that fall silent."""

    def __init__(self, node: Node, writes: WritePath, joined_from: int = JOIN_PACKS_MIN) -> None:
        self._node = node
        self._writes = writes
        self._joiner = Joiner(node, writes, joined_from)
        self._turns: dict[tuple[int, int], tuple[asyncio.Lock, int]] = {}  # and how many hold or want it

    async def commit(self, part: PartRef, expected: Sequence[Expected], metadata_json: str, kind: str = "") -> Committed:
        """Promise the part, or raise Incomplete / InvalidArgument / AlreadyExists and change nothing.

        `kind` is "periodic", "final" or "preemption"; "" takes what the run's policy says. One part makes the checkpoint that.
        """
        chosen = check_kind(kind or self._node.policy(part.run).class_)
        metadata_json = check_metadata(metadata_json)
        with self._node.disk_refusals_shown():
            session_id = await self._writes.open_part(part)
            # A client that goes away after this point may find its part committed; it asks again and gets the same answer.
            return await uncut(self._commit(part, session_id, expected, metadata_json, chosen))

    async def _commit(
        self, part: PartRef, session_id: int, expected: Sequence[Expected], metadata_json: str, kind: Kind
    ) -> Committed:
        async with self._turn(session_id, part.writer):
            with self._node.catalog.read() as txn:
                row = txn.part(session_id, part.writer)
            landed = await all_shards(self._node, session_id, part.writer)
            there = await inside(self._node, landed)
            size = SHARD_BYTES * len(there)
            if row is None:
                raise NotFound("the part was aborted", run=part.run, step=part.step, writer=part.writer)
            if row.state is PartState.COMMITTED:
                if not await self._node.aside(size, lambda: same_content(expected, there)):
                    raise AlreadyExists(
                        "this part is committed with other content; save again under a new session",
                        run=part.run,
                        step=part.step,
                        session=part.session,
                        writer=part.writer,
                    )
                if kind < row.kind:  # said again, and now that it is more urgent
                    await self._node.catalog.write(lambda txn: txn.set_kind(session_id, kind, part.writer))
            else:
                await self._node.aside(size, lambda: compare(part, expected, there))
                if await self._joiner.join(session_id, part):
                    landed = await all_shards(self._node, session_id, part.writer)
                await self._make_durable(part, session_id, landed, metadata_json, kind)
            levels = tuple(dict.fromkeys(self._node.level_of(row) for row in landed)) or ("cache",)
            await let_go(there, landed)
        self._writes.forget(session_id, part.writer)
        self._node.changes.tell(session_id)
        with self._node.catalog.read() as txn:
            session = txn.session(session_id)
            if session is None:
                return Committed(session_id, False, levels=levels)
            # What goes to no tier is complete only for who has all of it here.
            whole = has_all_parts if session.is_transient else complete_at_cache
            return Committed(session_id, whole(txn, session), session.is_transient, levels)

    @contextlib.asynccontextmanager
    async def _turn(self, session_id: int, writer: int) -> AsyncIterator[None]:
        """One commit or abort of a part at a time."""
        key = (session_id, writer)
        lock, count = self._turns.get(key, (asyncio.Lock(), 0))
        self._turns[key] = (lock, count + 1)
        try:
            async with lock:
                yield
        finally:
            lock, count = self._turns[key]
            if count > 1:
                self._turns[key] = (lock, count - 1)
            else:
                del self._turns[key]

    async def _make_durable(
        self, part: PartRef, session_id: int, landed: Sequence[ShardRow], metadata_json: str, kind: Kind
    ) -> None:
        with self._node.catalog.read() as txn:
            only, _ = where_to(self._node, txn, session_id, self._node.only_tiers(part.run))
        document = await part_document(self._node, part, landed, metadata_json, kind, only)
        commit_seq = await self._node.catalog.write(lambda txn: txn.next_commit_seq())
        shard_ids = [row.shard_id for row in landed]
        failpoints.hit("commit.before_part_file")

        def act(txn: WriteTxn) -> None:
            if txn.shard_ids(session_id, part.writer) != shard_ids:
                raise Incomplete("a shard of this part landed or went while it was being committed; commit again")
            now, tiers = where_to(self._node, txn, session_id, only)
            txn.commit_part(session_id, part.writer, metadata_json, tiers, commit_seq, kind=kind, only=now)
            if disk_fails:
                txn.set_setting(f"{UNFILED}{session_id:x}-{part.writer:x}", b"")

        disk_fails = bool(self._node.budget.disk.reason)
        try:
            if not disk_fails:
                await self._node.io.run(self._node.cache.write_part, session_id, part.writer, commit_seq, document)
            failpoints.hit("commit.before_catalog")
            await self._node.catalog.write(act)
        except BaseException:
            if not self._node.catalog.is_failed:  # else it may hold the commit; recovery compares
                await self._remove_part_files(session_id, part.writer)
            raise
        failpoints.hit("commit.done")

    async def _remove_part_files(self, session_id: int, writer: int) -> None:
        """Of a commit that failed; why it did is what the caller hears."""
        try:
            await self._node.io.run(self._node.cache.remove_part_files, session_id, writer)
        except ForebayError as error:
            log.warning("cannot remove the file of a failed commit; an abort tries again error=%s", error)

    async def abort(self, part: PartRef) -> int:
        """Drop what the writer has put and not committed; returns how many shards went. Unknown parts count as aborted."""
        part.check()
        with self._node.catalog.read() as txn:
            session = txn.find_session(part.run, part.step, part.session)
            row = None if session is None else txn.part(session.id, part.writer)
        if session is None or row is None:
            return 0
        # Shielded: a client that goes away must not cut the rows' end from the files' and the bytes'.
        try:
            return await uncut(self.drop_open(session.id, part.writer))
        except NotFound:
            return 0  # another abort of this part was faster

    async def drop_open(self, session_id: int, writer: int) -> int:
        """Drop an open part, its shards and their files; how many shards went. Raises NotFound, AlreadyExists for a committed
        part."""
        async with self._turn(session_id, writer):
            with self._node.catalog.read() as txn:
                session, part = txn.session(session_id), txn.part(session_id, writer)
            if part is not None and part.state is PartState.OPEN:
                # What a failed commit could not remove would be taken for a commit by the next start.
                await self._node.io.run(self._node.cache.remove_part_files, session_id, writer)
            failpoints.hit("abort.before_catalog")
            rows = await self._node.catalog.write(partial(_drop, session_id, writer), frees=True)
        failpoints.hit("abort.before_unlink")
        self._writes.forget(session_id, writer)
        self._node.budget.freed(sum(row.disk_size for row in rows))
        self._node.left_behind()
        paths = [self._node.cache.shard_path(row.key) for row in rows if row.disk_size]
        await self._node.io.run(self._node.cache.unlink_many, paths)
        await self._node.io.run(self._node.cache.drop_session_dir, session_id)
        if session is not None:
            await self._node.marks.aborted(session.run, session.step)
        self._node.changes.tell()
        return sum(row.visible_count for row in rows)

    async def drop_silent(self) -> float | None:
        """Background step: drop open parts that nobody has written to for node.abandon_after. Never committed ones."""
        limit_s = self._node.config.node.abandon_after
        with self._node.catalog.read() as txn:
            parts = {(part.session_id, part.writer): None for part in txn.open_parts()}
        self._writes.remember_only(parts)
        for session_id, writer in parts:
            if self._writes.silent_for_s(session_id, writer) >= limit_s:
                try:
                    count = await self.drop_open(session_id, writer)
                except (AlreadyExists, NotFound):
                    continue  # committed or aborted meanwhile
                log.info("dropped a silent, uncommitted part session_id=%s writer=%s shards=%s", session_id, writer, count)
        return min(60.0, max(0.5, limit_s / 4))


def _drop(session_id: int, writer: int, txn: WriteTxn) -> list[ShardRow]:
    note_leaving(txn, session_id, writer)
    return txn.drop_part(session_id, writer)


def check_kind(name: str) -> Kind:
    """The class that a commit names. Raises InvalidArgument."""
    for kind in Kind:
        if kind.name.lower() == name:
            return kind
    raise InvalidArgument(f"a checkpoint is periodic, final or preemption, not {name!r}")


def where_to(
    node: Node, txn: ReadTxn, session_id: int, first: tuple[str, ...] | None
) -> tuple[tuple[str, ...] | None, tuple[str, ...]]:
    """What the session is restricted to, `first` where this is its first commit, and the tiers that it goes to. Raises
    NotFound."""
    if (session := txn.session(session_id)) is None:
        raise NotFound("the session was dropped meanwhile", session_id=session_id)
    only = first if is_undecided(session) else session.tiers
    return only, tuple(name for name in node.tier_names if only is None or name in only)


def check_metadata(metadata_json: str) -> str:
    """A JSON object in at most 1 MiB, "{}" for nothing; raises InvalidArgument."""
    if len(metadata_json.encode()) > METADATA_BYTES_MAX:
        raise InvalidArgument("the metadata is too large", limit_bytes=METADATA_BYTES_MAX)
    try:
        value = json.loads(metadata_json or "{}", parse_constant=_no_number)
        # As it will stand in documents: what Python's reader takes and no writer, or no other reader, does.
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"the metadata is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument("the metadata must be a JSON object")
    if _deeper_than(value, METADATA_DEPTH_MAX):
        raise InvalidArgument("the metadata is nested too deeply", limit=METADATA_DEPTH_MAX)
    return metadata_json or "{}"


def _no_number(text: str) -> None:
    raise ValueError(f"{text} is no JSON number")


def _deeper_than(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: object) -> list[object]:
    if isinstance(value, dict):
        return [inner for inner in value.values() if isinstance(inner, dict | list)]
    return [inner for inner in value if isinstance(inner, dict | list)] if isinstance(value, list) else []


def same_content(expected: Sequence[Expected], landed: Sequence[NamedShard]) -> bool:
    """Whether both name the same shards with the same sizes and checksums."""
    return {(e.name, e.size, e.crc32c) for e in expected} == {(row.name, row.size, row.crc32c) for row in landed}


def compare(part: PartRef, expected: Sequence[Expected], landed: Sequence[NamedShard]) -> None:
    """Planned = landed, by name, size and CRC; raises with the names that differ."""
    planned = {shard.name: shard for shard in expected}
    if len(planned) != len(expected):
        raise InvalidArgument("the commit names a shard twice", writer=part.writer)
    if (clash := file_and_directory(planned)) is not None:
        raise InvalidArgument(
            f"shards {clash[0]!r} and {clash[1]!r} cannot both be files: the first is a directory of the second; "
            "abort the part and put one of them under another name"
        )
    there = {row.name: row for row in landed}
    missing = sorted(set(planned) - set(there))
    if missing:
        shown = tuple(missing[:NAMES_SHOWN])
        raise Incomplete(
            f"writer {part.writer} commits {len(missing)} shard(s) that have not landed: {', '.join(map(repr, shown[:5]))}",
            missing=(MissingPart(part.writer, shown, "open"),),
        )
    unknown = sorted(set(there) - set(planned))
    if unknown:
        raise InvalidArgument(
            f"writer {part.writer} has put {len(unknown)} shard(s) that its commit does not name: "
            f"{', '.join(map(repr, unknown[:5]))}; name them, or abort the part first"
        )
    for name, shard in planned.items():
        row = there[name]
        if (row.size, row.crc32c) != (shard.size, shard.crc32c):
            raise InvalidArgument(
                f"shard {name!r} landed with another size or checksum than the commit names",
                size=row.size,
                crc32c=f"{row.crc32c:08x}",
                named_size=shard.size,
                named_crc32c=f"{shard.crc32c:08x}",
            )


async def part_document(
    node: Node,
    part: PartRef,
    rows: Sequence[ShardRow],
    metadata_json: str,
    kind: Kind = Kind.PERIODIC,
    only: tuple[str, ...] | None = None,
) -> bytes:
    """The document of one writer's part, made from the catalog without holding up the event loop. Raises NotFound."""
    record = replace(await whole_record(node, part, rows, metadata_json, kind), tiers=only)
    return await node.aside(document_bytes(rows), record.to_json)


async def whole_record(
    node: Node, part: PartRef, rows: Sequence[ShardRow], metadata_json: str, kind: Kind = Kind.PERIODIC
) -> PartRecord:
    """Its content. Raises NotFound where a shard went meanwhile."""
    tables: dict[ShardKey, tuple[bytes, PackIndex | None]] = {}
    left, ended = iter(rows), False
    while not ended:
        with node.catalog.read() as txn:
            found, ended = page_of(node.clock, ((row.key, _table(txn, row)) for row in left))
        tables.update(found)
        await asyncio.sleep(0)
    record = await node.aside(document_bytes(rows), lambda: _record(tables, node.id, part, rows, metadata_json))
    await let_go(tables)
    return of_kind(record, kind)


def of_kind(record: PartRecord, kind: Kind) -> PartRecord:
    """The record with its class, which is only said where it is not the usual one."""
    return record if kind is Kind.PERIODIC else replace(record, kind=kind.name.lower())


def document_bytes(rows: Sequence[ShardRow]) -> int:
    """About as long is a document that names these; a pack names all that lie in it."""
    return SHARD_BYTES * sum(row.visible_count for row in rows)


def part_record(txn: ReadTxn, node_id: str, part: PartRef, rows: Sequence[ShardRow], metadata_json: str) -> PartRecord:
    """The same from one snapshot, for parts that are not long."""
    return _record(_tables(txn, rows), node_id, part, rows, metadata_json)


def _tables(txn: ReadTxn, rows: Sequence[ShardRow]) -> dict[ShardKey, tuple[bytes, PackIndex | None]]:
    return {row.key: _table(txn, row) for row in rows}


def _table(txn: ReadTxn, row: ShardRow) -> tuple[bytes, PackIndex | None]:
    return txn.chunks(row.key), txn.pack_index(row.key) if row.is_pack else None


def _record(
    tables: Mapping[ShardKey, tuple[bytes, PackIndex | None]],
    node_id: str,
    part: PartRef,
    rows: Sequence[ShardRow],
    metadata_json: str,
) -> PartRecord:
    shards: list[ShardEntry] = []
    packs: list[PackEntry] = []
    for row in sorted(rows, key=lambda row: row.name):
        chunks, index = tables[row.key]
        entry = ShardEntry(row.name, row.size, row.crc32c, row.chunk_size, chunks)
        if index is None:
            shards.append(entry)
        else:
            packs.append(PackEntry(entry, index))
    return PartRecord(
        run=part.run,
        step=part.step,
        session=part.session,
        writer=part.writer,
        writers=part.writers,
        node=node_id,
        shards=tuple(shards),
        metadata=json.loads(metadata_json or "{}"),
        packs=tuple(packs),
    )
