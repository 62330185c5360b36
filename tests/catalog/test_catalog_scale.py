"""A hundred thousand shards: the questions that people ask stay look-ups. Numbers are printed (pytest -s), not asserted."""

import asyncio
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from catalog.kit import TIERS, opened, sealed
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.records import ShardKey

SESSIONS, SHARDS = 100, 1000


def fill(session_id: int, first_id: int, step: int, txn: WriteTxn) -> None:
    txn.open_session("run", step, "s", 1, session_id=session_id)
    txn.open_part(session_id, 0)
    for number in range(SHARDS):
        row = sealed(ShardKey(session_id, first_id + number), f"layer.{number}.weight", size=1 << 20)
        txn.seal(row, b"crc!" * 16)
    txn.commit_part(session_id, 0, "{}", TIERS)


def timed(label: str, act: Callable[[], Any]) -> Any:
    begin_s = time.perf_counter()
    result = act()
    print(f"{label}: {(time.perf_counter() - begin_s) * 1e3:.2f} ms")
    return result


@pytest.mark.slow
async def test_a_hundred_thousand_shards(tmp_path: Path) -> None:
    async with opened(tmp_path / "c", map_size=1 << 30, reserve_bytes=16 << 20) as catalog:
        begin_s = time.perf_counter()
        acts = []
        for step in range(SESSIONS):
            ids = [catalog.new_id() for _ in range(SHARDS + 1)]
            acts.append(catalog.write(partial(fill, ids[0], ids[1], step)))
        await asyncio.gather(*acts)
        print(f"\n100,000 shards sealed and committed on two tiers: {time.perf_counter() - begin_s:.2f} s {catalog.stats()}")
    begin_s = time.perf_counter()
    async with opened(tmp_path / "c", map_size=1 << 30) as catalog:
        print(f"open: {(time.perf_counter() - begin_s) * 1e3:.2f} ms")
        with catalog.read() as txn:
            session = txn.find_session("run", 50, "s")
            assert session is not None
            rows = timed("ls of one checkpoint with 1,000 shards", lambda: list(txn.shards(session.id)))
            assert len(rows) == SHARDS
            copies = timed("their copies", lambda: [txn.copies(row.key) for row in rows])
            assert all(set(each) == set(TIERS) for each in copies)
            totals = timed("totals", txn.totals)
            assert totals.shards == SESSIONS * SHARDS
            assert totals.tiers["pfs"] == (SESSIONS * SHARDS, SESSIONS * SHARDS << 20)
            assert timed("part_progress", lambda: txn.part_progress(session.id, 0, "pfs"))[1] == SHARDS
            assert len(timed("100 checkpoints", lambda: list(txn.checkpoints("run")))) == SESSIONS
            assert timed("first of the queue", lambda: next(txn.pending("pfs"))).order == 1
            assert timed("recount (full scan)", txn.recount) == totals
