"""Random histories of the catalog against a plain model: sums, queues, indexes and names must agree after every step."""

import asyncio
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from catalog.kit import SMALL, TIERS, check_sums, entry, manifest, sealed
from forebay_gateway.catalog import Catalog, WriteTxn, indexes, schema
from forebay_gateway.core.errors import AlreadyExists, Corrupt
from forebay_gateway.core.records import CopyRow, ShardKey, ShardRow, TierTotals, Totals
from forebay_gateway.core.states import (
    COPY_TABLE,
    SHARD_TABLE,
    CopyEvent,
    CopyState,
    IllegalTransition,
    ShardEvent,
    ShardState,
)

NAMES = st.sampled_from("abcdef")
WRITERS = 2


class CatalogAgainstModel(RuleBasedStateMachine):
    """The model: dicts, and one counter for what came into the cache when."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.folder = Path(tempfile.mkdtemp(prefix="forebay-catalog-model-"))
        self.sessions: dict[int, int] = {}  # id: step
        self.parts: dict[tuple[int, int], int | None] = {}  # commit order, None while open
        self.shards: dict[ShardKey, Any] = {}
        self.copies: dict[tuple[ShardKey, str], CopyState] = {}
        self.fetched: dict[ShardKey, int] = {}
        self.thinned: set[str] = set()
        self.clock = 0

    def teardown(self) -> None:
        self.runner.run(self.catalog.close())
        self.runner.close()
        shutil.rmtree(self.folder)

    @initialize()
    def open(self) -> None:
        opening = Catalog.open(self.folder / "c", tiers=TIERS, node="n", **SMALL)  # type: ignore[arg-type]
        self.catalog = self.runner.run(opening)

    @rule()
    def reopen(self) -> None:
        self.runner.run(self.catalog.close())
        self.open()

    def write(self, act: Any) -> Any:
        return self.runner.run(self.catalog.write(act))

    def mostly_legal(self, data: st.DataObject, table: Any, state: Any, any_event: Any) -> Any:
        """Histories get far only where most events are ones that the state allows."""
        legal = [event for before, event in table if before is state]
        return data.draw(st.sampled_from([*legal * 4, any_event]))

    def pick(self, data: st.DataObject, things: Any) -> Any:
        return data.draw(st.sampled_from(sorted(things)))

    @rule(step=st.integers(0, 2))
    def open_session(self, step: int) -> None:
        def act(txn: WriteTxn) -> int:
            row = txn.open_session("run", step, "s", WRITERS, session_id=self.catalog.new_id())
            for writer in range(WRITERS):
                txn.open_part(row.id, writer)
            return row.id

        session_id = self.write(act)
        assert self.sessions.setdefault(session_id, step) == step
        for writer in range(WRITERS):
            self.parts.setdefault((session_id, writer), None)

    @precondition(lambda self: self.parts)
    @rule(data=st.data(), name=NAMES, size=st.integers(0, 3))
    def seal(self, data: st.DataObject, name: str, size: int) -> None:
        session_id, writer = self.pick(data, self.parts)
        row = sealed(ShardKey(session_id, self.catalog.new_id()), name, writer=writer, size=size, disk_size=8192 + size)
        taken = any(other.session_id == session_id and other.name == name for other in self.shards.values())
        if taken or self.parts[session_id, writer] is not None:
            with pytest.raises(AlreadyExists):
                self.write(lambda txn: txn.seal(row, b"crc!"))
        else:
            self.write(lambda txn: txn.seal(row, b"crc!"))
            self.shards[row.key] = row

    @precondition(lambda self: self.parts)
    @rule(data=st.data(), tiers=st.sets(st.sampled_from(TIERS)))
    def commit(self, data: st.DataObject, tiers: set[str]) -> None:
        part = self.pick(data, self.parts)
        self.write(lambda txn: txn.commit_part(*part, "{}", sorted(tiers)))
        if self.parts[part] is None:
            self.clock += 1
            self.parts[part] = self.clock
            for row in self.of_part(*part):
                for tier in tiers:
                    self.copies.setdefault((row.key, tier), CopyState.PENDING)

    @precondition(lambda self: any(order is not None for order in self.parts.values()))
    @rule(data=st.data(), tier=st.sampled_from(TIERS))
    def add_copies(self, data: st.DataObject, tier: str) -> None:
        part = self.pick(data, [part for part, order in self.parts.items() if order is not None])
        self.write(lambda txn: txn.add_copies(*part, tier))
        for row in self.of_part(*part):
            self.copies.setdefault((row.key, tier), CopyState.PENDING)

    @precondition(lambda self: self.copies)
    @rule(data=st.data(), any_event=st.sampled_from(CopyEvent))
    def copy_event(self, data: st.DataObject, any_event: CopyEvent) -> None:
        key, tier = self.pick(data, self.copies)
        event = self.mostly_legal(data, COPY_TABLE, self.copies[key, tier], any_event)
        after = COPY_TABLE.get((self.copies[key, tier], event))
        if after is None:
            with pytest.raises(IllegalTransition):
                self.write(lambda txn: txn.copy_event(key, tier, event))
        else:
            self.write(lambda txn: txn.copy_event(key, tier, event))
            self.copies[key, tier] = after

    @precondition(lambda self: self.shards)
    @rule(data=st.data(), any_event=st.sampled_from(ShardEvent))
    def shard_event(self, data: st.DataObject, any_event: ShardEvent) -> None:
        key = self.pick(data, self.shards)
        row = self.shards[key]
        event = self.mostly_legal(data, SHARD_TABLE, row.state, any_event)
        self.move(row, event)

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def round_trip(self, data: st.DataObject) -> None:
        """Out of the cache and in again, from wherever the shard stands on that way."""
        key = self.pick(data, self.shards)
        for event in (ShardEvent.ALL_VERIFIED, ShardEvent.EVICT, ShardEvent.UNLINKED, ShardEvent.FETCHED):
            if (self.shards[key].state, event) in SHARD_TABLE:
                self.move(self.shards[key], event)

    def move(self, row: ShardRow, event: ShardEvent) -> None:
        key = row.key
        after = SHARD_TABLE.get((row.state, event))
        size = 4096 if event is ShardEvent.FETCHED else None
        if after is None:
            with pytest.raises(IllegalTransition):
                self.write(lambda txn: txn.shard_event(key, event, disk_size=size))
            return
        moved = self.write(lambda txn: txn.shard_event(key, event, disk_size=size))
        assert moved.state is after
        if event is ShardEvent.FETCHED:
            self.clock += 1
            self.fetched[key] = self.clock
            assert moved.disk_size == 4096
        elif after is ShardState.EVICTED:
            self.fetched.pop(key, None)
            assert moved.disk_size == 0
        self.shards[key] = moved

    @precondition(lambda self: self.shards)
    @rule(data=st.data())
    def drop_shard(self, data: st.DataObject) -> None:
        key = self.pick(data, self.shards)
        row = self.shards[key]
        assert self.write(lambda txn: txn.drop_shard(key)) == row
        self.count_otherwise(row.session_id, row.writer)  # as a deletion under way
        self.forget(key)

    @precondition(lambda self: self.parts)
    @rule(data=st.data())
    def drop_part(self, data: st.DataObject) -> None:
        part = self.pick(data, self.parts)
        if self.parts[part] is not None:
            with pytest.raises(AlreadyExists):
                self.write(lambda txn: txn.drop_part(*part))
            return
        rows = self.write(lambda txn: txn.drop_part(*part))
        assert rows == self.of_part(*part)
        for row in rows:
            self.forget(row.key)
        del self.parts[part]
        if not any(session_id == part[0] for session_id, _ in self.parts):
            del self.sessions[part[0]]

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def drop_session(self, data: st.DataObject) -> None:
        session_id = self.pick(data, self.sessions)
        rows = self.write(lambda txn: txn.drop_session(session_id))
        mine = [self.shards[key] for key in sorted(self.shards) if key.session_id == session_id]
        assert rows == [row for row in mine if row.disk_size]
        for row in mine:
            self.forget(row.key)
        self.parts = {part: order for part, order in self.parts.items() if part[0] != session_id}
        del self.sessions[session_id]

    @rule(step=st.integers(0, 2), tier=st.sampled_from(TIERS), names=st.sets(NAMES, min_size=1))
    def adopt(self, step: int, tier: str, names: set[str]) -> None:
        parts = [[entry(name, name.encode()) for name in sorted(names)], []]
        known = next((id for id, other in self.sessions.items() if other == step), None)
        mine = {row.name: row for row in self.shards.values() if row.session_id == known}

        def act(txn: WriteTxn) -> int:
            document = manifest(parts, run="run", step=step)
            return txn.adopt_manifest(document, tier, session_id=self.catalog.new_id(), new_id=self.catalog.new_id).id

        expected = {shard.name: (shard.size, shard.crc32c) for shard in parts[0]}
        if any(name in mine and (mine[name].size, mine[name].crc32c) != expected[name] for name in names):
            with pytest.raises(Corrupt):
                self.write(act)
            return
        session_id = self.write(act)
        self.sessions[session_id] = step
        if known is not None:  # by another manifest than its part's: here anything goes
            self.count_otherwise(session_id, 0)
        for writer in range(WRITERS):
            self.parts.setdefault((session_id, writer), 0)
        with self.catalog.read() as txn:
            for row in txn.shards(session_id):
                if row.key not in self.shards:
                    assert row.name in names and row.state is ShardState.EVICTED
                    self.shards[row.key] = row
                if row.name in names and self.copies.get((row.key, tier)) is not CopyState.QUARANTINED:
                    self.copies[row.key, tier] = CopyState.VERIFIED

    @precondition(lambda self: self.sessions)
    @rule(data=st.data())
    def an_act_that_raises(self, data: st.DataObject) -> None:
        session_id = self.pick(data, self.sessions)

        def act(txn: WriteTxn) -> None:
            txn.drop_session(session_id)
            txn.open_session("other", 1, "s", 1, session_id=self.catalog.new_id())
            raise KeyError("rolled back")

        with pytest.raises(KeyError):
            self.write(act)

    def of_part(self, session_id: int, writer: int) -> list[Any]:
        return [row for key, row in sorted(self.shards.items()) if (row.session_id, row.writer) == (session_id, writer)]

    def count_otherwise(self, session_id: int, writer: int) -> None:
        """The part's shards are from here on others than it was committed with."""
        self.thinned.add(f"parts {schema.part_key(session_id, writer).hex()}: what it was committed with")

    def forget(self, key: ShardKey) -> None:
        del self.shards[key]
        self.fetched.pop(key, None)
        for copy in [copy for copy in self.copies if copy[0] == key]:
            del self.copies[copy]

    def order(self, row: Any) -> int:
        return self.parts[row.session_id, row.writer] or 0

    @invariant()
    def sums_agree(self) -> None:
        if not hasattr(self, "catalog"):
            return
        used = sum(row.disk_size for row in self.shards.values())
        dirty = sum(row.disk_size for row in self.shards.values() if row.state is ShardState.SEALED)
        queued = {tier: [key for key in sorted(self.shards) if self.is_queued(key, tier)] for tier in TIERS}
        tiers = {tier: TierTotals(len(keys), sum(self.shards[key].size for key in keys)) for tier, keys in queued.items()}
        with self.catalog.read() as txn:
            assert txn.totals() == txn.recount() == Totals(used, dirty, len(self.shards), tiers)
            for tier, keys in queued.items():
                keys.sort(key=lambda key: (self.order(self.shards[key]), key))
                assert [item.key for item in txn.pending(tier)] == keys

    @invariant()
    def indexes_agree(self) -> None:
        if not hasattr(self, "catalog"):
            return
        evictable = [row for row in self.shards.values() if row.state is ShardState.EVICTABLE]
        evictable.sort(key=lambda row: (self.fetched.get(row.key, self.order(row)), row.key))
        with self.catalog.read() as txn:
            assert list(txn.evictable()) == evictable
            for kept in self.sessions:
                others = [row for row in evictable if row.session_id != kept]
                assert list(txn.evictable(kept.__eq__)) == others
            check_sums(txn)
            assert [row.id for row in txn.sessions()] == sorted(self.sessions)
            assert sorted({row.step for row in txn.checkpoints("run")}) == sorted(set(self.sessions.values()))
            assert txn.runs() == (["run"] if self.sessions else [])
            opened = sorted(part for part, order in self.parts.items() if order is None)
            assert [(part.session_id, part.writer) for part in txn.open_parts()] == opened
            for session_id, writer in self.parts:
                assert list(txn.shards(session_id, writer)) == self.of_part(session_id, writer)
                for tier in TIERS:
                    assert txn.part_progress(session_id, writer, tier) == self.progress(session_id, writer, tier)
            for row in self.shards.values():
                assert txn.shard_by_name(row.session_id, row.name) == row
                copies = txn.copies(row.key)
                assert txn.copies_of([row.key, row.key]) == [copies, copies]
                states = {tier: copy.state for tier, copy in copies.items()}
                assert states == {tier: state for (key, tier), state in self.copies.items() if key == row.key}
            counts = {name: sum(1 for _ in txn._scan(getattr(txn._db, name))) for name in ("names", "chunks", "part_shards")}
            assert set(counts.values()) == {len(self.shards)}
            assert set(self.fetched) == {
                ShardKey(int.from_bytes(key[:8], "big"), int.from_bytes(key[8:], "big"))
                for key, _ in txn._scan(txn._db.fetched)
            }

    @invariant()
    def nothing_contradicts_itself(self) -> None:
        """The check that fsck makes finds nothing in any history; chunk tables here are made up."""
        if not hasattr(self, "catalog"):
            return
        for name in indexes.CHECKED:
            with self.catalog.read() as txn:
                found, after = indexes.check_page(txn, name, None)
            left = [
                each for each in found if "chunk table" not in each and not any(each.startswith(had) for had in self.thinned)
            ]
            assert (left, after) == ([], None)

    def is_queued(self, key: ShardKey, tier: str) -> bool:
        return self.copies.get((key, tier), CopyState.VERIFIED) not in (CopyState.VERIFIED, CopyState.SKIPPED)

    def progress(self, session_id: int, writer: int, tier: str) -> tuple[int, int, int, int]:
        totals = [0, 0, 0, 0]
        for row in self.of_part(session_id, writer):
            copy = CopyRow(self.copies.get((row.key, tier), CopyState.SKIPPED))
            if copy.state is not CopyState.SKIPPED:
                verified = copy.state is CopyState.VERIFIED
                for index, value in enumerate((verified, 1, verified * row.size, row.size)):
                    totals[index] += value
        return totals[0], totals[1], totals[2], totals[3]


TestCatalogAgainstModel = CatalogAgainstModel.TestCase
TestCatalogAgainstModel.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
