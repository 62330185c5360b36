"""What is not as it was written, or no longer there, is said to be damage: nothing is made in its place."""

import asyncio
from typing import Any

import pytest

from catalog.kit import begin
from forebay_gateway.catalog import Catalog, CatalogDamaged, WriteTxn, schema
from forebay_gateway.core.records import (
    CheckpointRow,
    CopyRow,
    PartRow,
    PartState,
    PublishState,
    Row,
    SessionRow,
    ShardRow,
    UploadRow,
)
from forebay_gateway.core.states import CopyState, ShardState

ROWS: list[tuple[Row, schema.Codec[Any]]] = [
    (CheckpointRow("team/run", 7, (1, 2), pinned=True), schema.CHECKPOINT),
    (SessionRow(1, "team/run", 7, "s", 2, publish={"pfs": PublishState.PENDING}), schema.SESSION),
    (PartRow(1, 0, PartState.COMMITTED, '{"loss": 0.25}', 3, 2, 4096), schema.PART),
    (ShardRow(1, 2, 0, "rank0/w", 4096, 65536, 0xDEADBEEF, ShardState.SEALED, 8192), schema.SHARD),
    (CopyRow(CopyState.VERIFIED, 1, "", "etag"), schema.COPY),
    (UploadRow("team/run/w", "id"), schema.UPLOAD),
]


@pytest.mark.parametrize(("row", "codec"), ROWS, ids=[type(row).__name__ for row, _ in ROWS])
def test_any_bit_of_a_row_that_has_changed_shows(row: Row, codec: schema.Codec[Any]) -> None:
    data = codec.encode(row)
    assert codec.decode(data) == row
    for place in range(8 * len(data)):
        changed = bytearray(data)
        changed[place // 8] ^= 1 << place % 8
        with pytest.raises(CatalogDamaged):
            codec.decode(bytes(changed))
    for short in range(len(data)):
        with pytest.raises(CatalogDamaged):
            codec.decode(data[:short])


async def test_a_setting_that_has_changed_is_none(catalog: Catalog) -> None:
    await catalog.write(lambda txn: txn.set_setting("root:pfs", b"0123"))
    await catalog.write(lambda txn: txn.set_setting("still", b""))

    def damage(txn: WriteTxn) -> None:
        held = txn._get(txn._db.settings, b"root:pfs") or b""
        txn._put(txn._db.settings, b"root:pfs", b"1" + held[1:])

    with catalog.read() as txn:
        assert dict(txn.settings()) == {"root:pfs": b"0123", "still": b""}
    await catalog.write(damage)
    with pytest.raises(CatalogDamaged), catalog.read() as txn:
        txn.setting("root:pfs")
    with pytest.raises(CatalogDamaged), catalog.read() as txn:
        list(txn.settings())
    with catalog.read() as txn:
        assert txn.setting("still") == b""


async def test_a_run_whose_name_has_changed_is_not_listed_under_it(catalog: Catalog) -> None:
    session = await begin(catalog)
    with catalog.read() as txn:
        assert txn.runs() == [session.run]
    await catalog.write(lambda txn: txn._put(txn._db.runs, schema.run_key(session.run), b"team/other"))
    with pytest.raises(CatalogDamaged), catalog.read() as txn:
        txn.runs()


async def test_no_session_takes_the_place_of_one_whose_row_is_gone(catalog: Catalog) -> None:
    session = await begin(catalog)
    known = (session.run, session.step, session.session, session.writers)

    def damage(txn: WriteTxn) -> None:
        txn._delete(txn._db.sessions, schema.u64(session.id))

    await catalog.write(damage)
    met: list[CatalogDamaged] = []
    catalog.on_damage(met.append)
    for names in (known, (session.run, session.step, "another", 1)):
        with pytest.raises(CatalogDamaged):
            await catalog.write(lambda txn, names=names: txn.open_session(*names, session_id=catalog.new_id()))
    with pytest.raises(CatalogDamaged), catalog.read() as txn:
        txn.sessions_of(txn.checkpoint(session.run, session.step))  # type: ignore[arg-type]
    await asyncio.sleep(0)
    assert len(met) == 3
