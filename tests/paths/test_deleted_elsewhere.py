"""A checkpoint that another node has deleted: not offered where nothing of it can be read, put nowhere again unasked, and no
sign of completeness before its bytes."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from forebay_gateway.core.errors import NotFound, Unavailable
from forebay_gateway.core.layout import manifest_key
from forebay_gateway.core.records import SessionRow
from forebay_gateway.core.states import CopyState
from forebay_gateway.paths.care.finding import Finding
from forebay_gateway.paths.care.mend import Mender
from forebay_gateway.paths.care.repair import Repairer
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.view import CheckpointView, view
from forebay_gateway.tiers.base import ObjectInfo
from forebay_gateway.tiers.memory import MemoryStore
from paths.nodes_kit import Here, below

TIERS = ("pfs", "object")


@dataclass
class Pair:
    """Two nodes and what they share; `b` has saved steps 1 and 2."""

    a: Here
    b: Here
    stores: dict[str, MemoryStore]

    async def evict(self) -> None:
        """Out of b's cache, both."""
        for session in self.sessions():
            await Evictor(self.b.node).evict_session(session.id)

    async def delete(self) -> None:
        """Step 2, by a."""
        await self.a.retention.delete("r", 2, force=False, dry_run=False)
        assert self.left() == []

    def left(self) -> list[str]:
        return [key for store in self.stores.values() for key in below(store, "r", 2)]

    def sessions(self) -> list[SessionRow]:
        """Those of b."""
        with self.b.node.catalog.read() as txn:
            return [session for row in txn.checkpoints("r") for session in txn.sessions_of(row)]

    def seen(self, step: int) -> CheckpointView | None:
        with self.b.node.catalog.read() as txn:
            row = txn.checkpoint("r", step)
            return None if row is None else view(self.b.node, txn, row)

    def copies(self) -> set[CopyState]:
        with self.b.node.catalog.read() as txn:
            return {copy.state for row in txn.all_shards() for copy in txn.copies(row.key).values()}

    async def repair(self) -> list[Finding]:
        mender = Mender(self.b.node, self.b.reads)
        repairer = Repairer(self.b.node, self.b.checker, mender)
        return [finding async for finding in repairer.repair(apply=True, deep=False)]

    async def read(self, session: str) -> bytes:
        """The shard of step 2, by b."""
        return b"".join([bytes(piece.data) async for piece in self.b.reads.read("r", 2, session, "a.bin", 0, None, "auto")])


@pytest_asyncio.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    stores = {name: MemoryStore() for name in TIERS}
    async with AsyncExitStack() as stack:
        a, b = [await stack.enter_async_context(Here(tmp_path, stores, name)) for name in "ab"]
        await b.save("r", 1, 2)
        yield Pair(a, b, stores)


async def test_what_is_nowhere_any_more_is_not_offered(pair: Pair) -> None:
    await pair.evict()
    assert (await pair.b.finder.latest("r")).session.step == 2
    await pair.delete()
    assert (await pair.b.finder.latest("r")).session.step == 1
    with pytest.raises(NotFound, match=r"another node may have deleted it.*`forebay rm`"):
        await pair.b.finder.complete("r", 2)
    assert await pair.b.finder.steps("r") == [1, 2]
    seen = pair.seen(2)
    assert seen is not None
    assert (seen.state, [level.state for level in seen.levels]) == ("incomplete", ["evicted", "gone", "gone"])
    assert "another node may have deleted it" in seen.reason
    assert pair.copies() == {CopyState.VERIFIED}
    await pair.b.retention.delete("r", 2, force=False, dry_run=False)
    assert pair.b.known("r") == [1]


async def test_a_cache_that_holds_all_of_it_still_gives_it(pair: Pair) -> None:
    await pair.delete()
    assert (await pair.b.finder.latest("r")).session.step == 2
    assert await pair.read("s") == b"r 2 s" * 100


async def test_a_tier_that_cannot_be_asked_may_hold_it(pair: Pair) -> None:
    await pair.evict()
    await pair.delete()
    pair.b.node.tiers["object"].failed(Unavailable("the tier is away"))
    found = await pair.b.finder.complete("r", 2)
    assert (found.session.step, found.unreachable) == (2, ("object",))


async def test_a_tier_is_believed_when_it_says_so_twice(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that denies a manifest once, and shows it then, has not lost it."""
    await pair.evict()
    denied: set[str] = set()
    for name in TIERS:
        tier = pair.b.node.tiers[name].tier
        head = tier.head

        async def once(key: str, name: str = name, head: Callable[[str], Awaitable[ObjectInfo]] = head) -> ObjectInfo:
            if name not in denied:
                denied.add(name)
                raise NotFound("not found", key=key)
            return await head(key)

        monkeypatch.setattr(tier, "head", once)
    assert (await pair.b.finder.complete("r", 2)).session.step == 2
    assert denied == set(TIERS)


async def test_what_comes_back_is_offered_again(pair: Pair) -> None:
    await pair.evict()
    kept = {name: dict(store.objects) for name, store in pair.stores.items()}
    await pair.delete()
    with pytest.raises(NotFound):
        await pair.b.finder.complete("r", 2)
    pair.stores["object"].objects.update(kept["object"])
    assert (await pair.b.finder.complete("r", 2)).session.step == 2
    seen = pair.seen(2)
    assert seen is not None
    assert (seen.state, seen.reason) == ("complete", "")
    assert await pair.read("") == b"r 2 s" * 100


async def test_a_read_that_finds_nothing_puts_nothing_in_the_queue(pair: Pair) -> None:
    """Of a checkpoint that was opened before: neither what cannot be put there, nor what was deleted on purpose."""
    await pair.evict()
    await pair.delete()
    with pytest.raises(NotFound, match="removed"):
        await pair.read("s")
    assert pair.copies() == {CopyState.VERIFIED}
    assert not pair.b.node.to_mend


@pytest.mark.expected_logs("a copy on a tier is bad")
async def test_a_read_of_one_lost_copy_still_asks_for_another(pair: Pair) -> None:
    await pair.evict()
    (key,) = [key for key in below(pair.stores["pfs"], "r", 2) if key.endswith("a.bin")]
    del pair.stores["pfs"].objects[key]
    assert await pair.read("s") == b"r 2 s" * 100
    assert pair.copies() == {CopyState.VERIFIED, CopyState.PENDING}


async def test_a_repair_does_not_bring_back_what_another_node_deleted(pair: Pair) -> None:
    """Its cache holds all of it, and nobody has told it."""
    await pair.delete()
    for _ in range(2):
        found = await pair.repair()
        assert {(each.kind, each.where) for each in found} == {
            (kind, name) for kind in ("manifest", "part_record", "copy_missing") for name in TIERS
        }
        assert [each for each in found if each.remedy or each.outcome] == []
        assert all("another node may have deleted the checkpoint" in each.what for each in found)
    assert pair.left() == []


async def test_a_tier_that_was_emptied_gets_its_sign_of_completeness_last(pair: Pair) -> None:
    """Nobody may take it for complete before its bytes are there."""
    await pair.evict()
    pfs = pair.stores["pfs"].objects
    for key in below(pair.stores["pfs"], "r", 2):
        del pfs[key]
    for _ in range(2):  # the second time they are under way
        found = {each.kind: each for each in await pair.repair()}
        assert (found["manifest"].outcome, found["manifest"].remedy) == ("", "")
        assert "once its copies are there" in found["manifest"].what
        assert manifest_key("r", 2) not in pfs
    while CopyState.PENDING in pair.copies():
        await pair.b.drains["pfs"].step()
        await pair.b.clock.advance(1.0)
    assert {each.kind: each.outcome for each in await pair.repair()} == {"manifest": "repaired"}
    del pair.stores["object"].objects[manifest_key("r", 2)]
    assert (await pair.a.finder.complete("r", 2)).session.step == 2


async def test_a_manifest_alone_is_written_again(pair: Pair) -> None:
    for store in pair.stores.values():
        del store.objects[manifest_key("r", 2)]
    assert {(each.kind, each.outcome) for each in await pair.repair()} == {("manifest", "repaired")}
    assert (await pair.a.finder.complete("r", 2)).session.step == 2
