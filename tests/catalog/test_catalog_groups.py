"""Group commit and the rules around it: who shares a transaction, who is rolled back, who is told what, and when."""

import asyncio
import contextlib
import errno
import subprocess
import sys
import threading
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import lmdb
import pytest

from catalog.kit import begin, dump, opened, put, sealed
from forebay_gateway.base import failpoints
from forebay_gateway.base.clock import FakeClock
from forebay_gateway.catalog import Catalog, ReadTxn, WriteTxn, env
from forebay_gateway.catalog.storage import Storage
from forebay_gateway.core.errors import ForebayError, NotFound, Unavailable
from forebay_gateway.core.records import ShardKey


@pytest.fixture
def gate(catalog: Catalog) -> "Gate":
    return Gate(catalog)


class Gate:
    """Holds the writer thread inside an act, so that others have to queue."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._open = threading.Event()
        self._entered = threading.Event()

    async def shut(self) -> "asyncio.Task[bool]":
        task = asyncio.create_task(self._catalog.write(self._hold))
        while not self._entered.is_set():
            await asyncio.sleep(0.001)
        return task

    def open(self) -> None:
        self._open.set()

    def _hold(self, _: WriteTxn) -> bool:
        self._entered.set()
        return self._open.wait(10)


async def test_concurrent_writes_share_transactions(catalog: Catalog, gate: Gate) -> None:
    session = await begin(catalog)
    held = await gate.shut()
    before = catalog.stats()["groups"]
    writes = [asyncio.create_task(put(catalog, session, f"n{number}")) for number in range(200)]
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(held, *writes)
    stats = catalog.stats()
    # The held act's own group, and the queue: as many groups as 20 ms slices of work, never one an act.
    assert 2 <= stats["groups"] - before <= 60
    assert stats["last_group_acts"] >= 2
    with catalog.read() as txn:
        assert len(list(txn.shards(session.id))) == 200


async def test_a_group_holds_at_most_its_bound(tmp_path: Path) -> None:
    clock = FakeClock()  # stands still: only the number of acts ends a group
    async with opened(tmp_path / "c", clock=clock) as catalog:
        gate = Gate(catalog)
        held = await gate.shut()
        writes = [asyncio.create_task(catalog.write(lambda txn: txn.set_setting("a", b"1"))) for _ in range(600)]
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(held, *writes)
        assert catalog.stats()["groups"] == 4  # the held one, then 256 + 256 + 88
        assert catalog.stats()["writes"] == 601
        assert catalog.stats()["last_group_acts"] == 88


async def test_a_group_ends_when_its_time_is_over(tmp_path: Path) -> None:
    class Ticking(FakeClock):
        ticks = count()

        def monotonic(self) -> float:
            return next(self.ticks) * env.GROUP_S / 4

    async with opened(tmp_path / "c", clock=Ticking()) as catalog:
        gate = Gate(catalog)
        held = await gate.shut()
        writes = [asyncio.create_task(catalog.write(lambda txn: txn.set_setting("a", b"1"))) for _ in range(20)]
        await asyncio.sleep(0)
        gate.open()
        await asyncio.gather(held, *writes)
        assert 5 <= catalog.stats()["groups"] - 1 <= 7


async def test_acts_run_in_the_order_in_which_they_were_written(catalog: Catalog) -> None:
    order: list[int] = []
    await asyncio.gather(*(catalog.write(lambda _, number=number: order.append(number)) for number in range(500)))
    assert order == list(range(500))


async def test_an_act_that_raises_is_rolled_back_alone(catalog: Catalog, gate: Gate) -> None:
    session = await begin(catalog)

    def act(number: int, txn: WriteTxn) -> int:
        txn.seal(sealed(ShardKey(session.id, 1000 + number), f"n{number}"), b"")
        if number % 3 == 0:
            raise ValueError(f"act {number}")
        return number

    held = await gate.shut()
    groups = catalog.stats()["groups"]
    tasks = [asyncio.create_task(catalog.write(lambda txn, number=number: act(number, txn))) for number in range(30)]
    await asyncio.sleep(0)
    gate.open()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await held
    assert catalog.stats()["groups"] - groups < 30  # they did share
    for number, result in enumerate(results):
        if number % 3 == 0:
            assert isinstance(result, ValueError) and str(result) == f"act {number}"
        else:
            assert result == number
    with catalog.read() as txn:
        assert [row.shard_id - 1000 for row in txn.shards(session.id)] == [n for n in range(30) if n % 3]
        assert txn.totals() == txn.recount() and txn.totals().shards == 20


@pytest.mark.parametrize("error", [NotFound("x"), StopIteration(), SystemExit(3), asyncio.CancelledError()])
async def test_whatever_an_act_raises_reaches_its_caller(catalog: Catalog, error: BaseException) -> None:
    def act(txn: WriteTxn) -> None:
        txn.set_setting("a", b"1")
        raise error

    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)):
        await catalog.write(act)
    await catalog.write(lambda txn: txn.set_setting("b", b"2"))  # the writer thread lives
    with catalog.read() as txn:
        assert txn.setting("a") is None and txn.setting("b") == b"2"


async def test_a_cancelled_caller_s_act_still_runs(catalog: Catalog, gate: Gate) -> None:
    held = await gate.shut()
    task = asyncio.create_task(catalog.write(lambda txn: txn.set_setting("a", b"1")))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.open()
    await held
    await catalog.write(lambda _: None)
    with catalog.read() as txn:
        assert txn.setting("a") == b"1"


async def test_a_full_queue_makes_writers_wait(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, expected_logs: object) -> None:
    monkeypatch.setattr(env, "QUEUED_ACTS_MAX", 4)
    async with opened(tmp_path / "c") as catalog:
        gate = Gate(catalog)
        held = await gate.shut()
        tasks = [asyncio.create_task(catalog.write(lambda txn: txn.set_setting("a", b"1"))) for _ in range(10)]
        cancelled = asyncio.create_task(catalog.write(lambda txn: txn.set_setting("cancelled", b"1")))
        await asyncio.sleep(0.01)
        assert catalog.stats()["queued_acts"] == 3  # and the held one
        cancelled.cancel()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        gate.open()
        await asyncio.gather(held, *tasks)
        assert catalog.stats()["writes"] == 12
        with catalog.read() as txn:  # "if the caller is cancelled, the act still runs", also where it had to wait for a place
            assert txn.setting("cancelled") == b"1"
        await asyncio.gather(*(catalog.write(lambda _: None) for _ in range(20)))  # every place was given back


async def test_close_runs_what_was_queued_and_refuses_what_comes_later(tmp_path: Path) -> None:
    catalog = await Catalog.open(tmp_path / "c", tiers=("pfs",), node="n")
    gate = Gate(catalog)
    held = await gate.shut()
    queued = asyncio.create_task(catalog.write(lambda txn: txn.set_setting("a", b"1")))
    await asyncio.sleep(0)
    closing = asyncio.create_task(catalog.close())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="closed"):
        await catalog.write(lambda _: None)
    gate.open()
    await asyncio.gather(held, queued, closing)
    await catalog.close()
    with pytest.raises(Unavailable, match="closed"):
        catalog.read()
    async with opened(tmp_path / "c", node="n") as catalog:
        with catalog.read() as txn:
            assert txn.setting("a") == b"1"


async def test_a_writer_that_waits_for_a_place_is_refused_at_close(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(env, "QUEUED_ACTS_MAX", 1)
    catalog = await Catalog.open(tmp_path / "c", tiers=("pfs",), node="n")
    gate = Gate(catalog)
    held = await gate.shut()
    waiting = asyncio.create_task(catalog.write(lambda _: None))
    await asyncio.sleep(0)
    closing = asyncio.create_task(catalog.close())
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(Unavailable, match="closed"):
        await waiting
    await asyncio.gather(held, closing)


# Snapshots.


async def test_a_snapshot_does_not_see_later_writes(catalog: Catalog) -> None:
    written = threading.Event()

    def act(txn: WriteTxn) -> None:
        txn.set_setting("a", b"1")

    def read() -> tuple[bytes | None, bytes | None]:
        with catalog.read() as txn:
            loop.call_soon_threadsafe(lambda: asyncio.ensure_future(write()))
            assert written.wait(5)
            return txn.setting("a"), txn.setting("a")

    async def write() -> None:
        await catalog.write(act)
        written.set()

    loop = asyncio.get_running_loop()
    assert await asyncio.to_thread(read) == (None, None)
    with catalog.read() as txn:
        assert txn.setting("a") == b"1"


async def test_a_read_held_across_an_await_raises(catalog: Catalog) -> None:
    with pytest.raises(RuntimeError, match="across an await"), catalog.read():
        await asyncio.sleep(0)


async def test_a_read_is_dead_after_an_await(catalog: Catalog) -> None:
    await begin(catalog)
    seen: list[ReadTxn] = []
    with pytest.raises(RuntimeError, match="across an await"), catalog.read() as txn:
        seen.append(txn)
        await asyncio.sleep(0)
        txn.runs()
        pytest.fail("the read went on")
    with pytest.raises(RuntimeError, match="across an await"):
        seen[0].setting("a")


async def test_an_async_generator_inside_a_read_is_caught(catalog: Catalog) -> None:
    await begin(catalog)

    async def rows():  # type: ignore[no-untyped-def]
        with catalog.read() as txn:
            for row in txn.sessions():
                yield row
                await asyncio.sleep(0)

    with pytest.raises(RuntimeError, match="across an await"):
        async for _ in rows():
            pass


async def test_the_error_of_the_block_goes_first(catalog: Catalog) -> None:
    with pytest.raises(KeyError), catalog.read():
        await asyncio.sleep(0)
        raise KeyError("own")


async def test_nothing_of_a_read_works_after_its_block(catalog: Catalog) -> None:
    session = await begin(catalog)
    await put(catalog, session, "a", "b")
    with catalog.read() as txn:
        rows: Iterator[object] = txn.shards(session.id)
        next(rows)
        untouched = txn.shards(session.id)
    for use in (lambda: next(rows), lambda: next(untouched), txn.runs, txn.totals):
        with pytest.raises(RuntimeError, match="has ended"):
            use()


async def test_reads_nest_and_run_in_plain_threads(catalog: Catalog) -> None:
    session = await begin(catalog)
    with catalog.read() as outer, catalog.read() as inner:
        assert outer.session(session.id) == inner.session(session.id) == session

    def in_thread() -> list[str]:
        with catalog.read() as txn:
            return txn.runs()

    assert await asyncio.to_thread(in_thread) == ["team/run"]


async def test_a_write_transaction_does_not_outlive_its_act(catalog: Catalog) -> None:
    kept: list[WriteTxn] = []
    await catalog.write(kept.append)
    for use in (lambda: kept[0].runs(), lambda: kept[0].set_setting("a", b"1")):
        with pytest.raises(RuntimeError, match="the act has ended"):
            use()


# Failure of the file.


@pytest.mark.expected_logs("the catalog failed")
async def test_a_failed_commit_fails_its_callers_and_every_later_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failures: list[BaseException] = []
    async with opened(tmp_path / "c", on_failure=failures.append) as catalog:
        await catalog.write(lambda txn: txn.set_setting("kept", b"1"))
        gate = Gate(catalog)
        held = await gate.shut()
        tasks = [asyncio.create_task(catalog.write(lambda txn: txn.set_setting("a", b"1"))) for _ in range(5)]
        await asyncio.sleep(0)
        # Not the held act's commit but the one after it.
        monkeypatch.setattr(failpoints, "_points", failpoints._parse("catalog.before_commit=2*error:EIO"))
        gate.open()
        await held
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(result, Unavailable) and isinstance(result.__cause__, OSError)
            assert result.__cause__.errno == errno.EIO
        with pytest.raises(Unavailable, match="has to be restarted"):
            await catalog.write(lambda _: None)
        assert len(failures) == 1 and isinstance(failures[0], OSError)
        with catalog.read() as txn:
            assert txn.setting("kept") == b"1" and txn.setting("a") is None
    async with opened(tmp_path / "c") as catalog:
        with catalog.read() as txn:
            assert txn.setting("kept") == b"1" and txn.setting("a") is None


@pytest.mark.expected_logs("the catalog failed")
@pytest.mark.parametrize("error", [lmdb.PanicError("x"), lmdb.CorruptedError("x"), lmdb.DiskError("x")])
async def test_an_lmdb_error_inside_an_act_is_a_failure_of_the_catalog(tmp_path: Path, error: lmdb.Error) -> None:
    def act(_: WriteTxn) -> None:
        raise error

    failures: list[BaseException] = []
    async with opened(tmp_path / "c", on_failure=failures.append) as catalog:
        with pytest.raises(Unavailable):
            await catalog.write(act)
        with pytest.raises(Unavailable):
            await catalog.write(lambda _: None)
        await asyncio.sleep(0)
        assert failures == [error]


async def test_a_transaction_that_is_too_full_is_split(catalog: Catalog, gate: Gate) -> None:
    """Many acts together exceed LMDB's dirty list: each then gets a transaction of its own."""
    tries: list[int] = []

    def act(number: int, txn: WriteTxn) -> None:
        txn.set_setting(str(number), b"1")
        tries.append(number)
        if number == 2 and tries.count(2) == 1:
            raise lmdb.TxnFullError("x")

    held = await gate.shut()
    tasks = [asyncio.create_task(catalog.write(lambda txn, number=number: act(number, txn))) for number in range(4)]
    await asyncio.sleep(0)
    gate.open()
    await asyncio.gather(held, *tasks)
    with catalog.read() as txn:
        assert [txn.setting(str(number)) for number in range(4)] == [b"1"] * 4

    def never(_: WriteTxn) -> None:
        raise lmdb.TxnFullError("x")

    with pytest.raises(Unavailable, match="too large"):
        await catalog.write(never)
    await catalog.write(lambda _: None)


async def test_a_row_that_does_not_decode_is_reported_and_nothing_else_harmed(catalog: Catalog) -> None:
    session = await begin(catalog)
    (key,) = await put(catalog, session, "a")

    def damage(txn: WriteTxn) -> None:
        txn._put(txn._db.shards, key.session_id.to_bytes(8, "big") + key.shard_id.to_bytes(8, "big"), b"\x93\x01")

    await catalog.write(damage)
    with pytest.raises(ForebayError, match="damaged"), catalog.read() as txn:
        txn.shard(key)
    with pytest.raises(ForebayError, match="no ShardRow"):
        await catalog.write(lambda txn: txn.drop_shard(key))
    await catalog.write(lambda txn: txn.set_setting("still", b"writable"))


async def test_stale_readers_are_looked_for_now_and_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[int] = []
    monkeypatch.setattr(Storage, "check_readers", lambda self: checked.append(1))
    clock = FakeClock()
    async with opened(tmp_path / "c", clock=clock) as catalog:
        await catalog.write(lambda _: None)
        await clock.advance(env.READER_CHECK_S + 1)
        await catalog.write(lambda _: None)
        await catalog.write(lambda _: None)
    assert checked == [1]


HOLDER = """
import sys, lmdb
env = lmdb.open(sys.argv[1], readonly=True, max_dbs=30)
txn = env.begin()
print("reading", flush=True)
sys.stdin.read()
"""


@contextlib.contextmanager
def reading(path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process that holds a snapshot; killed at the end, where it is not before."""
    command = [sys.executable, "-c", HOLDER, str(path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "reading\n"
            yield process
        finally:
            process.kill()


async def test_a_killed_reader_is_cleared_at_the_start_and_later(tmp_path: Path) -> None:
    """Its snapshot would keep every page since from being used again. A reader that lives is left alone."""
    path, clock = tmp_path / "c", FakeClock()
    async with opened(path) as catalog:
        await begin(catalog)
    with reading(path):  # while anybody has it open the table of readers stays
        with reading(path) as killed:
            killed.kill()
            killed.wait()
        async with opened(path, clock=clock) as catalog:
            assert catalog.stats()["stale_readers"] == 1
            with reading(path) as killed:
                killed.kill()
                killed.wait()
            await catalog.write(lambda _: None)
            assert catalog.stats()["stale_readers"] == 1
            await clock.advance(env.READER_CHECK_S + 1)
            await catalog.write(lambda _: None)
            await catalog.write(lambda _: None)
            assert catalog.stats()["stale_readers"] == 2


async def test_every_rollback_leaves_the_whole_file_as_it_was(catalog: Catalog) -> None:
    session = await begin(catalog)
    (key,) = await put(catalog, session, "a")
    with catalog.read() as txn:
        before = dump(txn)

    def act(txn: WriteTxn) -> None:
        txn.commit_part(session.id, 0, "{}", ("pfs", "object"))
        txn.mark_deleting("team/run", 1)
        txn.drop_session(session.id)
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await catalog.write(act)
    with catalog.read() as txn:
        assert dump(txn) == before and txn.shard(key) is not None
