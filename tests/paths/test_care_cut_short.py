"""Care commands whose client goes away in the middle: what is under way comes to its end, sums stay true, and the same command
again does the rest."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio
from msgspec.structs import replace

from forebay_gateway.base.tasks import uncut_left
from forebay_gateway.build import Gateway
from forebay_gateway.catalog import schema
from forebay_gateway.core.errors import NotFound, Unavailable
from forebay_gateway.core.records import ShardKey, ShardRow
from forebay_gateway.core.states import CopyEvent, CopyState, ShardEvent, ShardState
from forebay_gateway.paths.care.finding import Finding
from forebay_gateway.paths.care.fsck import Checker
from forebay_gateway.paths.care.gc import Collector
from forebay_gateway.paths.care.mend import Mender
from forebay_gateway.paths.care.quarantine import Quarantine
from forebay_gateway.paths.care.repair import Repairer
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.safety import copy_lost
from paths.kit import client_of, serving, tier, until

STEPS = 6
AFTER = (0, 1, 2, 4, 7, 12)  # turns of the loop until the client goes away


class Parts:
    """The care of one gateway, made from its node."""

    def __init__(self, gateway: Gateway) -> None:
        self.node: Node = gateway.node
        self.evictor = Evictor(self.node)
        finder = Finder(self.node)
        self.collector = Collector(self.node, Retention(self.node, finder))
        self.quarantine = Quarantine(self.node, self.evictor)
        self.checker = Checker(self.node, self.evictor, self.collector, serving=True)
        self.mender = Mender(self.node, ReadPath(self.node, finder, self.evictor))
        self.repairer = Repairer(self.node, self.checker, self.mender)

    def rows(self) -> list[ShardRow]:
        with self.node.catalog.read() as txn:
            return list(txn.all_shards())

    def row(self, key: ShardKey) -> ShardRow:
        with self.node.catalog.read() as txn:
            found = txn.shard(key)
        assert found is not None
        return found

    async def findings(self) -> list[Finding]:
        return [finding async for finding in self.checker.check(deep=False)]

    async def repair(self) -> list[Finding]:
        return [finding async for finding in self.repairer.repair(apply=True, deep=False)]

    async def check_agrees(self) -> None:
        """Nothing is under way any more, nothing half done, and the budget counts what the rows count."""
        await until(lambda: not uncut_left())
        with self.node.catalog.read() as txn:
            assert self.node.budget.used == txn.totals().used == txn.recount().used
            assert [row for row in txn.all_shards() if row.state is ShardState.EVICTING] == []


@pytest_asyncio.fixture
async def parts(tmp_path: Path) -> AsyncIterator[Parts]:
    """STEPS checkpoints, each of two sessions of which the second has superseded the first, on one tier."""
    async with (
        serving(tmp_path, tier(tmp_path / "pfs"), cache_keys='repair = "ask"') as gateway,
        client_of(gateway) as client,
    ):
        for session in ("first", "second"):
            for step in range(STEPS):
                part = client.checkpoint("run", step, session=session)
                await part.put("a", session.encode() * 2000)
                await part.commit()
            for step in range(STEPS):
                await client.wait("run", step, "pfs", timeout=60)
        yield Parts(gateway)
        for step in range(STEPS):
            reader = await client.open("run", step)
            assert await reader.read("a") == b"second" * 2000


async def cut_short(act: Callable[[], Awaitable[object]], turns: int, begun: Callable[[], bool] = lambda: True) -> bool:
    """Whether the act was still under way when its caller went: so many turns after something had `begun`."""
    task = asyncio.ensure_future(act())
    while not begun() and not task.done():
        await asyncio.sleep(0)
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    try:
        await task
    except asyncio.CancelledError:
        return True
    return False


async def test_a_gc_that_is_cut_short_is_done_again(parts: Parts) -> None:
    cut = 0
    for turns in AFTER:
        there = len(parts.rows())
        # In the middle of a session that goes: its shards' rows are gone, and more is to follow.
        cut += await cut_short(lambda: parts.collector.collect(0.0), turns, lambda: len(parts.rows()) < there)  # noqa: B023
        await parts.check_agrees()
    await parts.collector.collect(0.0)
    await parts.check_agrees()
    assert cut >= 3
    assert len(parts.rows()) == STEPS
    assert [finding for finding in await parts.findings() if finding.kind != "foreign_file"] == []
    files = sorted(parts.node.cache.path.glob("data/*/*.shard"))
    assert files == sorted(parts.node.cache.shard_path(row.key) for row in parts.rows())


async def test_a_gc_says_which_tier_it_could_not_ask(parts: Parts) -> None:
    root = parts.node.cache.path.with_name("pfs")
    root.rename(root.with_name("elsewhere"))
    try:
        # Seen to be away in the middle of it, and known to be away before.
        for said in ("failed while it was asked", "cannot be reached"):
            (item,) = await parts.collector.collect(0.0)
            assert (item.kind, item.where, item.deletable, item.outcome) == ("not_asked", "pfs", False, "")
            assert said in item.what and str(root) in item.what
        told = [finding for finding in await parts.findings() if finding.kind == "tier_unreachable"]
        assert [finding.where for finding in told] == ["pfs"]  # once, not twice
    finally:
        root.with_name("elsewhere").rename(root)
    await until(lambda: parts.node.tiers["pfs"].usable)
    assert {item.kind for item in await parts.collector.survey(0.0)} == {"superseded"}


def newer(parts: Parts) -> list[ShardKey]:
    """The shards of sessions that stand."""
    with parts.node.catalog.read() as txn:
        sessions = [session.id for session in txn.sessions() if session.session == "second"]
        return [row.key for session in sessions for row in txn.shards(session)]


async def test_a_release_that_is_cut_short_comes_to_its_end(parts: Parts) -> None:
    cut = 0
    for key, turns in zip(newer(parts), AFTER, strict=True):
        await parts.node.catalog.write(lambda txn, key=key: txn.shard_event(key, ShardEvent.MISMATCH))
        id_ = f"{key.session_id}-{key.shard_id}"
        cut += await cut_short(lambda id_=id_: parts.quarantine.release(id_, force=False), turns)
        await parts.check_agrees()
        if parts.row(key).state is ShardState.QUARANTINED:  # it had not begun
            await parts.quarantine.release(id_, force=False)
        assert parts.row(key).state is ShardState.EVICTED
        assert not parts.node.cache.shard_path(key).exists()
    assert cut >= 3


async def test_a_release_whose_file_cannot_be_removed_ends_by_itself(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    key = newer(parts)[0]
    await parts.node.catalog.write(lambda txn: txn.shard_event(key, ShardEvent.MISMATCH))

    def refused(*_: object) -> None:
        raise Unavailable("the disk takes no writes")

    with monkeypatch.context() as patch:
        patch.setattr(type(parts.node.cache), "unlink_many", refused)
        with pytest.raises(Unavailable, match="takes no writes"):
            await parts.quarantine.release(f"{key.session_id}-{key.shard_id}", force=False)
        assert parts.row(key).state is ShardState.EVICTING
        with pytest.raises(Unavailable):
            await parts.evictor.step()
    await parts.evictor.step()
    await parts.check_agrees()
    assert parts.row(key).state is ShardState.EVICTED


async def test_a_copy_that_is_released_is_put_anew_only_afterwards(parts: Parts, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the deletion would take what was proved meanwhile, and the cache's file might go by a copy that is not there."""
    key, node = newer(parts)[0], parts.node
    mismatch = CopyEvent.MISMATCH
    await node.catalog.write(lambda txn: copy_lost(txn, key, "pfs", mismatch, "rotten", node.required_tiers))
    pfs = node.tiers["pfs"].tier
    delete = pfs.delete

    def state() -> CopyState:
        with node.catalog.read() as txn:
            return txn.copies(key)["pfs"].state

    async def late(path: str) -> None:
        await parts.mender.mend(key)
        assert state() is CopyState.QUARANTINED
        await delete(path)

    with monkeypatch.context() as patch:
        patch.setattr(pfs, "delete", late)
        released = await parts.quarantine.release(f"{key.session_id}-{key.shard_id}@pfs", force=False)
    await until(lambda: state() is CopyState.VERIFIED)
    await pfs.head(released.path)
    assert node.releasing == set()
    with pytest.raises(NotFound):
        await parts.quarantine.release(f"{key.session_id}-{key.shard_id}@pfs", force=False)


async def test_a_repair_that_is_cut_short_is_done_again(parts: Parts) -> None:
    cut = 0
    for key, turns in zip(newer(parts), AFTER, strict=True):
        parts.node.cache.shard_path(key).unlink()
        cut += await cut_short(parts.repair, turns, lambda key=key: not parts.row(key).is_cached)
        await parts.check_agrees()
        await parts.repair()
        await parts.check_agrees()
        assert parts.row(key).is_cached and parts.node.cache.shard_path(key).exists()
    assert cut >= 3


async def test_what_a_row_counts_for_its_file_is_found_and_mended(parts: Parts) -> None:
    kept, evicted = newer(parts)[:2]
    await parts.evictor.evict_session(evicted.session_id)
    used = parts.node.budget.used
    for key, more in ((kept, 4096), (evicted, 8192)):
        row = parts.row(key)
        counted = replace(row, disk_size=row.disk_size + more)
        await parts.node.catalog.write(lambda txn, row=row, counted=counted: txn._put_shard(row, counted))
    parts.node.budget.adopted(4096 + 8192)  # as a start would count them
    found = [finding for finding in await parts.findings() if finding.severity == "error"]
    assert {(finding.kind, finding.key) for finding in found} == {("disk_size", kept), ("disk_size", evicted)}
    assert {finding.outcome for finding in await parts.repair() if finding.severity == "error"} == {"repaired"}
    assert [finding for finding in await parts.findings() if finding.severity == "error"] == []
    await parts.check_agrees()
    assert parts.node.budget.used == used
    assert parts.row(kept).is_cached


@pytest.mark.expected_logs("stands under the key of another")
async def test_rows_that_lead_round_in_a_circle_end_a_check(parts: Parts) -> None:
    first, last = parts.rows()[0], parts.rows()[-1]
    misplaced = schema.shard_key(ShardKey(last.session_id, last.shard_id + 1000))
    await parts.node.catalog.write(lambda txn: txn._put(txn._db.shards, misplaced, schema.SHARD.encode(first)))
    async with asyncio.timeout(30):
        found = [finding.what for finding in await parts.findings()]
    assert any("nothing more can be compared" in what for what in found), found
    await parts.node.catalog.write(lambda txn: txn._delete(txn._db.shards, misplaced))
