"""Retention on tiers in memory: what goes and what stays, whose turn it is, and what any interruption leaves."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from forebay_gateway.base import failpoints
from forebay_gateway.base.clock import FakeClock
from forebay_gateway.core.errors import NotFound, Unavailable
from forebay_gateway.core.records import PublishState
from forebay_gateway.core.retention import Ledger, ledger_key, pins_dir
from forebay_gateway.paths.care.finding import Severity
from forebay_gateway.paths.expire import LOOK_S, fates_of
from forebay_gateway.paths.ledgers import TTL_S, Busy
from forebay_gateway.paths.view import view
from forebay_gateway.paths.wait import level_progress
from forebay_gateway.tiers.memory import MemoryStore, MemoryTier
from paths.nodes_kit import LAST_2, Here, below, ledger_of, put_ledger
from soak.figures import failpoints as all_failpoints

POINTS = [name for name in all_failpoints() if name.startswith("expire.")]


async def test_what_no_rule_keeps_goes_from_tier_cache_and_catalog(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, keys=LAST_2) as node:
        await node.save("r", 1, 2, 3, 4)
        store.objects["r/step-000000000001/notes.txt"] = next(iter(store.objects.values()))
        fates = await node.look("r", apply=False)
        assert [(fate.step, fate.goes) for fate in fates] == [(1, True), (2, True), (3, False), (4, False)]
        assert node.on_tier("r") == [1, 2, 3, 4]
        fates = await node.look("r")
        assert [fate.outcome for fate in fates] == ["removed", "removed", "", ""]
        assert node.on_tier("r") == node.known("r") == [3, 4]
        assert below(store, "r", 1) == ["r/step-000000000001/notes.txt"]  # not ours
        assert below(store, "r", 2) == []
        assert not [key for key in store.objects if key.startswith(".forebay/retain/") and key != ledger_key("r")]
        assert len(list(node.node.cache.path.glob("data/*/*.shard"))) == 2
        assert (node.expiries["pfs"].tally.removed, node.expiries["pfs"].tally.last) == (2, "r/2")
        with pytest.raises(NotFound):
            await node.finder.complete("r", 1)
        await node.save("r", 1, session="again")  # the name is free
        assert node.on_tier("r") == [1, 3, 4]


async def test_steps_that_go_back_are_newer_all_the_same(tmp_path: Path) -> None:
    async with Here(tmp_path, {"pfs": MemoryStore()}, keys=LAST_2) as node:
        await node.save("r", 30, 40)
        await node.look("r")
        await node.save("r", 10, 20, session="rolled-back")
        await node.look("r")
        assert node.on_tier("r") == [10, 20]


async def test_nothing_goes_before_its_successor_is_complete_on_that_tier(tmp_path: Path) -> None:
    stores = {"pfs": MemoryStore(), "object": MemoryStore()}
    async with Here(tmp_path, stores, keys=LAST_2) as node:
        await node.save("r", 1, 2)
        await node.commit("r", 3)
        await node.look("r")
        assert node.on_tier("r") == [1, 2]
        await node.drain("pfs")
        await node.look("r")
        assert node.on_tier("r") == [2, 3]
        await node.look("r", "object")
        assert node.on_tier("r", "object") == [1, 2]
        assert node.state("r", 1) is PublishState.REMOVED
        assert [problem async for problem in node.checker.check(False) if problem.severity is Severity.ERROR] == []
        found = await node.finder.complete("r", 1)  # from the tier that still holds it
        assert found.session.step == 1
        await node.drain("object")
        await node.look("r", "object")
        assert node.on_tier("r", "object") == node.known("r") == [2, 3]


async def test_what_is_on_its_way_to_another_tier_stays(tmp_path: Path) -> None:
    async with Here(tmp_path, {"pfs": MemoryStore(), "object": MemoryStore()}, keys=LAST_2) as node:
        for step in (1, 2, 3):
            await node.commit("r", step)
        await node.drain("pfs")
        fates = await node.look("r")
        assert not any(fate.goes for fate in fates)
        assert "on its way to object" in fates[0].reason


async def test_a_successor_that_is_no_longer_there_does_not_count(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, keys='[[retain]]\nrun = "**"\nkeep_last = 1\n') as node:
        await node.save("r", 1, 2)
        await node.look("r", apply=False)
        del store.objects["r/step-000000000002/manifest.json"]  # its shards are there
        await node.look("r")
        assert node.on_tier("r") == [1]


async def test_keep_for_goes_by_the_tier_s_own_clock(tmp_path: Path) -> None:
    clock = FakeClock(5e6)  # weeks away from the node's
    store = MemoryStore(now=clock.wall)
    async with Here(tmp_path, {"pfs": store}, keys='[[retain]]\nrun = "**"\nkeep_for = "1h"\n') as node:
        await node.save("r", 1, 2)
        await clock.advance(3000)
        await node.save("r", 3)
        await node.look("r")
        assert node.on_tier("r") == [1, 2, 3]
        await clock.advance(1000)
        await node.look("r")
        assert node.on_tier("r") == [3]


async def test_a_tier_that_tells_no_time_keeps_all_of_keep_for(tmp_path: Path) -> None:
    async with Here(tmp_path, {"pfs": MemoryStore()}, keys='[[retain]]\nrun = "**"\nkeep_for = "1s"\n') as node:
        await node.save("r", 1, 2)
        await node.clock.advance(1e6)
        fates = await node.look("r")
        assert node.on_tier("r") == [1, 2]
        assert "its age is not known" in fates[0].reason


# -- other nodes ---------------------------------------------------------------------------------------------------------


async def test_checkpoints_of_other_nodes_go_too_and_their_catalogs_follow(tmp_path: Path) -> None:
    store = MemoryStore()
    async with (
        Here(tmp_path, {"pfs": store}, "a", LAST_2) as one,
        Here(tmp_path, {"pfs": store}, "b", LAST_2) as other,
    ):
        await one.save("r", 1, 2)
        await other.look("r")  # 1 and 2 are there together
        await one.save("r", 3)
        await other.look("r")
        assert one.on_tier("r") == [1, 2, 3]
        await one.save("r", 4)
        await other.look("r")
        assert one.on_tier("r") == [3, 4]
        assert one.known("r") == [1, 2, 3, 4]
        await one.look("r")
        assert one.known("r") == [3, 4]
        assert await other.expiries["pfs"].runs() == ["r"]


async def test_a_pin_of_another_node_counts(tmp_path: Path) -> None:
    store = MemoryStore()
    async with (
        Here(tmp_path, {"pfs": store}, "a", LAST_2) as one,
        Here(tmp_path, {"pfs": store}, "b", LAST_2) as other,
    ):
        await one.save("r", 1, 2, 3, 4)
        await other.retention.pin("r", 1, True)
        await one.look("r")
        assert one.on_tier("r") == [1, 3, 4]
        await other.retention.pin("r", 1, False)
        await one.look("r")
        assert one.on_tier("r") == [3, 4]


async def test_a_pin_of_a_node_that_is_gone_can_be_lifted_and_one_that_lives_says_it_again(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as one:
        await one.save("r", 1, 2, 3, 4)
        async with Here(tmp_path, {"pfs": store}, "b", LAST_2) as other:
            for step in (1, 2):
                await other.retention.pin("r", step, True)
            await one.look("r")
            assert one.on_tier("r") == [1, 2, 3, 4]
            await one.retention.pin("r", 1, False)  # its own, which it never had
            await one.look("r")
            assert one.on_tier("r") == [1, 2, 3, 4]
            await one.retention.pin("r", 2, False, all_nodes=True)
            await other.look("r")
            assert one.on_tier("r") == [1, 2, 3, 4]
        await one.retention.pin("r", 1, False, all_nodes=True)
        await one.look("r")
        assert one.on_tier("r") == [2, 3, 4]
        one.node.tiers["pfs"].failed(Unavailable("away"))
        with pytest.raises(Unavailable):
            await one.retention.pin("r", 2, False, all_nodes=True)


async def test_a_pin_that_a_tier_was_not_told_of_is_told_before_anything_goes(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        await node.retention.pin("r", 1, True)
        for key in [key for key in store.objects if key.startswith(pins_dir("r"))]:
            del store.objects[key]
        await node.save("r", 4)
        await node.look("r")
        assert node.on_tier("r") == [1, 3, 4]
        assert [key for key in store.objects if key.startswith(pins_dir("r"))]


async def test_a_pin_of_what_is_just_going_is_refused(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        with failpoints.armed("expire.noted=error:EIO"), pytest.raises(OSError):
            await node.look("r")
        with pytest.raises(Unavailable, match="just removing"):
            await node.retention.pin("r", 1, True)
        fates = await node.look("r")
        assert node.on_tier("r") == [1, 2, 3], fates  # the pin was there in time after all
        await node.retention.pin("r", 1, True)


# -- turns ---------------------------------------------------------------------------------------------------------------


async def test_one_run_that_cannot_be_looked_at_keeps_no_other_from_it(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, keys=LAST_2) as node:
        for run in ("a", "b"):
            await node.save(run, 1, 2, 3)
        put_ledger(store, Ledger(run="a", owner="other-node", token="another process", ttl_s=TTL_S))
        seen = []
        with pytest.raises(Busy):
            async for fate in fates_of(node.expiries.values(), "", apply=True):
                seen.append((fate.run, fate.step, fate.outcome))
        assert ("b", 1, "removed") in seen and not [run for run, _, _ in seen if run == "a"]
        assert node.on_tier("a") == [1, 2, 3] and node.on_tier("b") == [2, 3]


async def test_one_node_at_a_time_and_one_that_is_gone_is_succeeded(tmp_path: Path) -> None:
    store = MemoryStore()
    async with (
        Here(tmp_path, {"pfs": store}, "a", LAST_2) as one,
        Here(tmp_path, {"pfs": store}, "b", LAST_2) as other,
    ):
        await one.save("r", 1, 2, 3)
        with failpoints.armed("expire.noted=error:EIO"), pytest.raises(OSError):
            await one.look("r")
        with pytest.raises(Busy):
            await other.look("r")
        await other.clock.advance(TTL_S - 1)
        with pytest.raises(Busy):
            await other.look("r")
        ledger = ledger_of(store, "r")
        put_ledger(store, msgspec.structs.replace(ledger, turn=ledger.turn + 1))  # a sign of life
        await other.clock.advance(TTL_S - 1)
        with pytest.raises(Busy):
            await other.look("r")
        await other.clock.advance(TTL_S + 1)
        await other.look("r")
        assert one.on_tier("r") == [2, 3]


async def test_a_holder_that_was_stopped_for_long_does_nothing_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        real = failpoints.hit

        def stopped(name: str) -> None:
            real(name)
            if name == "expire.kept_aside":
                node.clock._now_s += TTL_S

        monkeypatch.setattr(failpoints, "hit", stopped)
        with pytest.raises(Busy):
            await node.look("r")
        assert node.on_tier("r") == [1, 2, 3]


async def test_who_was_slower_leaves_the_other_s_work_alone(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        expiry = node.expiries["pfs"]
        ledger, tag = await expiry._ledgers.read("r")
        assert tag == ""
        put_ledger(store, Ledger(run="r", owner="b", token="t", ttl_s=5))
        with pytest.raises(Busy):
            await expiry._ledgers.take(ledger, tag)


async def test_without_conditional_replacement_it_is_off_and_says_so(tmp_path: Path) -> None:
    async with Here(tmp_path, {"pfs": MemoryStore()}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        tier = node.node.tiers["pfs"].tier
        assert tier.capabilities is not None
        tier.capabilities = replace(tier.capabilities, conditional_replace=False)
        assert "cannot replace" in node.expiries["pfs"].off
        assert await node.look("r") == []
        assert await node.expiries["pfs"].step() is None
        assert node.on_tier("r") == [1, 2, 3]


@pytest.mark.expected_logs("ledger of retention is damaged")
async def test_a_damaged_ledger_is_made_anew_and_nothing_is_taken_for_old(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        await node.look("r", apply=False)
    MemoryTier("pfs", store)._store(ledger_key("r"), b"\x00")
    async with Here(tmp_path, {"pfs": store}, "b", LAST_2) as other:
        with pytest.raises(Busy):  # somebody may be at work
            await other.look("r")
        await other.clock.advance(TTL_S + 1)
        await other.look("r")
        assert other.on_tier("r") == [1, 2, 3]


# -- interruptions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("heir", ["itself", "another"])
async def test_an_end_at_any_point_is_gone_on_from(tmp_path: Path, point: str, heir: str) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3, 4)
        with failpoints.armed(f"{point}=error:EIO"), pytest.raises(OSError):
            await node.look("r")
        assert {3, 4} <= set(node.on_tier("r"))
    for step in (1, 2):  # whole, or invisible
        if step in (shown := Here(tmp_path, {"pfs": store}).on_tier("r")):
            assert len(below(store, "r", step)) == 3, shown
    async with Here(tmp_path, {"pfs": store}, "a" if heir == "itself" else "b", LAST_2) as later:
        for _ in range(2):
            try:
                await later.look("r")
            except Busy:
                await later.clock.advance(TTL_S + 1)
        assert later.on_tier("r") == [3, 4]
        assert below(store, "r", 1) == below(store, "r", 2) == []
        assert not [key for key in store.objects if key.startswith(".forebay/retain/") and key != ledger_key("r")]
        assert ledger_of(store, "r").going == ()
        assert later.known("r") in ([3, 4], [])


async def test_what_was_saved_again_meanwhile_stays(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        await node.look("r", apply=False)
        await node.save("r", 1, session="second-launch")
        await node.look("r")
        assert node.on_tier("r") == [1, 3]
        assert ledger_of(store, "r").entries[-1].step == 1


async def test_a_deletion_by_hand_in_the_middle_is_no_trouble(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        with failpoints.armed("expire.kept_aside=error:EIO"), pytest.raises(OSError):
            await node.look("r")
        await node.retention.delete("r", 1, force=False, dry_run=False)
        await node.look("r")
        assert node.on_tier("r") == node.known("r") == [2, 3]
        assert ledger_of(store, "r").going == ()


async def test_a_read_that_meets_a_removal_is_told_so_and_puts_nothing_back(tmp_path: Path) -> None:
    store = MemoryStore()
    async with (
        Here(tmp_path, {"pfs": store}, "a", LAST_2) as one,
        Here(tmp_path, {"pfs": store}, "b", LAST_2) as reader,
    ):
        await one.save("r", 1, 2)
        await reader.finder.complete("r", 1)
        await one.save("r", 3)
        await one.look("r")
        with pytest.raises(NotFound, match="was removed while it was read"):
            async for _ in reader.reads.read("r", 1, "s", "a.bin", 0, 10, "auto"):
                pass
        await reader.drain()
        assert below(store, "r", 1) == []
        await reader.look("r")
        assert reader.known("r") == []


async def test_gone_from_one_tier_while_the_other_is_away_it_stays_known(tmp_path: Path) -> None:
    stores = {"pfs": MemoryStore(), "object": MemoryStore()}
    async with Here(tmp_path, stores, keys=LAST_2) as node:
        await node.save("r", 1, 2, 3)
        await node.look("r", "object")
        assert node.on_tier("r", "object") == [2, 3]
        node.node.tiers["object"].failed(Unavailable("away"))
        await node.look("r")
        assert node.on_tier("r") == [2, 3]
        assert node.known("r") == [1, 2, 3]  # nobody can say that it is nowhere
        node.node.tiers["object"].worked()
        await node.look("r")
        assert node.known("r") == [2, 3]


async def test_a_waiting_client_hears_that_the_tier_was_reached(tmp_path: Path) -> None:
    stores = {"pfs": MemoryStore(), "object": MemoryStore()}
    async with Here(tmp_path, stores, keys=LAST_2) as node:
        await node.save("r", 1, 2, 3)
        await node.look("r")
        with node.node.catalog.read() as txn:
            session = txn.find_session("r", 1, "s")
            assert session is not None
            assert level_progress(txn, session, "pfs").reached
            row = txn.checkpoint("r", 1)
            assert row is not None
            seen = view(node.node, txn, row)
        assert seen is not None
        assert {level.level: level.state for level in seen.levels}["pfs"] == "removed"


async def test_the_background_finds_runs_of_other_nodes_and_waits_its_turn(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as one, Here(tmp_path, {"pfs": store}, "b", LAST_2) as other:
        await one.save("r", 1, 2)
        assert await other.expiries["pfs"].step() == pytest.approx(LOOK_S)
        await one.save("r", 3, 4, 5)
        await other.clock.advance(LOOK_S)
        await other.expiries["pfs"].step()
        assert one.on_tier("r") == [3, 4, 5]  # these came together
        with failpoints.armed("expire.noted=error:EIO"), pytest.raises(OSError):
            await one.save("r", 6)
            await one.expiries["pfs"].step()
        other.expiries["pfs"].completed("r", 6)
        pause_s = await other.expiries["pfs"].step()
        assert pause_s is not None
        assert 0 < pause_s <= 10
        assert one.on_tier("r") == [3, 4, 5, 6]
