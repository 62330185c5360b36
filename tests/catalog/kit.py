"""What the catalog's tests share: opening one, short-hand for rows, and a dump of everything it holds."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest_asyncio

from forebay_gateway.catalog import Catalog, ReadTxn, WriteTxn
from forebay_gateway.core.records import SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import CopyEvent, ShardState
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import Manifest, PartRecord, ShardEntry, pack_chunk_crcs

TIERS = ("pfs", "object")
CHUNK_SIZE = 65536
SMALL = {"map_size": 8 << 20, "reserve_bytes": 1 << 20}


@asynccontextmanager
async def opened(path: Path, **options: Any) -> AsyncIterator[Catalog]:
    """A catalog that is closed again."""
    catalog = await Catalog.open(path, **{"tiers": TIERS, "node": "node-1", **SMALL, **options})
    try:
        yield catalog
    finally:
        await catalog.close()


@pytest_asyncio.fixture
async def catalog(tmp_path: Path) -> AsyncIterator[Catalog]:
    async with opened(tmp_path / "catalog") as catalog:
        yield catalog


def sealed(key: ShardKey, name: str, *, writer: int = 0, size: int = 100, crc: int = 7, disk_size: int = 8192) -> ShardRow:
    """A row as write.py makes it."""
    return ShardRow(*key, writer, name, size, CHUNK_SIZE, crc, ShardState.SEALED, disk_size)


async def begin(catalog: Catalog, run: str = "team/run", step: int = 1, session: str = "s", writers: int = 2) -> SessionRow:
    """A session with its parts open."""
    session_id = catalog.new_id()

    def act(txn: WriteTxn) -> SessionRow:
        row = txn.open_session(run, step, session, writers, session_id=session_id)
        for writer in range(writers):
            txn.open_part(row.id, writer)
        return row

    return await catalog.write(act)


async def put(catalog: Catalog, session: SessionRow, *names: str, writer: int = 0, size: int = 100) -> list[ShardKey]:
    """Sealed shards."""
    keys = [ShardKey(session.id, catalog.new_id()) for _ in names]

    def act(txn: WriteTxn) -> None:
        for key, name in zip(keys, names, strict=True):
            txn.seal(sealed(key, name, writer=writer, size=size), key.shard_id.to_bytes(4, "little"))

    await catalog.write(act)
    return keys


async def commit(catalog: Catalog, session: SessionRow, writer: int = 0, tiers: tuple[str, ...] = TIERS) -> SessionRow:
    """Commit one part."""
    return await catalog.write(lambda txn: txn.commit_part(session.id, writer, "{}", tiers))


def verify(txn: WriteTxn, key: ShardKey, *tiers: str) -> None:
    """A PENDING copy all the way to VERIFIED."""
    for tier in tiers or TIERS:
        for event in (CopyEvent.START, CopyEvent.PUT, CopyEvent.VERIFY):
            txn.copy_event(key, tier, event)


def entry(name: str, data: bytes) -> ShardEntry:
    """A shard of a manifest, its checksums right."""
    crc = crc32c(data)
    return ShardEntry(name, len(data), crc, CHUNK_SIZE, pack_chunk_crcs([crc]))


def manifest(parts: list[list[ShardEntry]], *, run: str = "team/run", step: int = 1, session: str = "s") -> Manifest:
    """One part a list."""
    records = [
        PartRecord(run, step, session, writer, len(parts), "node-2", tuple(shards)) for writer, shards in enumerate(parts)
    ]
    return Manifest.of_parts(records, "node-2")


def check_sums(txn: ReadTxn) -> None:
    """Every running sum and small index says what the rows say."""
    assert txn.totals() == txn.recount()
    for session in txn.sessions():
        sums, progress = txn.recount_session(session.id)
        assert txn.session_sums(session.id) == sums
        shown = {tier: txn.session_progress(session.id, tier) for tier in txn.totals().tiers}
        assert {tier: each for tier, each in shown.items() if any(each)} == progress
    rows = [row for run in txn.runs() for row in txn.checkpoints(run)]
    said = {(row.run, row.step): txn.completeness(row) for row in rows}
    assert said == {(row.run, row.step): txn.recount_completeness(row) for row in rows}
    assert txn.complete_count() == sum(each is True for each in said.values())
    assert [said[row.run, row.step] for row in txn.incomplete()] == [False] * txn.incomplete_count()
    unsettled = [row for row in txn.all_shards() if row.state in (ShardState.EVICTING, ShardState.QUARANTINED)]
    assert txn.unsettled() == unsettled
    sealed = [session.id for session in txn.sessions() if any(row.state is ShardState.SEALED for row in txn.shards(session.id))]
    assert txn.sessions_with(lambda sums: sums.sealed) == sealed


def dump(txn: ReadTxn, *, without_meta: bool = False) -> dict[str, dict[bytes, bytes]]:
    """Every entry of every database."""
    names = [field.name for field in fields(txn._db) if not (without_meta and field.name in ("meta", "tiers"))]
    return {name: dict(txn._scan(getattr(txn._db, name))) for name in names}
