"""A checkpoint of several nodes goes to a tier from all of them, or from none: cadences and skips by one word for all."""

from pathlib import Path

import pytest

from forebay_gateway.core.errors import Incomplete, NotFound
from forebay_gateway.paths import announce
from forebay_gateway.paths.joint import LAG_S
from forebay_gateway.paths.view import view
from forebay_gateway.paths.wait import level_progress
from paths.joint_kit import RUN, Job, job

EVERY_3 = f'[[policy]]\nrun = "{RUN}"\nevery = 3\n'
SKIPS = f'[[policy]]\nrun = "{RUN}"\nskip = true\n'


def assert_whole(all_nodes: Job, goes: set[int], skipped: set[int]) -> None:
    """Each of these is complete on the tier, or nothing of it is there; all nodes say so."""
    for step in goes:
        assert all_nodes.is_complete(step), step
        assert all_nodes.where(step) == [["complete"]] * len(all_nodes.nodes), step
    for step in skipped:
        assert all_nodes.shards(step) == [], step
        assert all_nodes.where(step) == [["skipped"]] * len(all_nodes.nodes), step


async def test_a_cadence_holds_for_a_job_of_three_nodes(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3, nodes=3) as all_nodes:
        for step in range(1, 8):
            await all_nodes.save(step)
            await all_nodes.turns()
        assert_whole(all_nodes, {1, 4, 7}, {2, 3, 5, 6})
        reasons = {node.session(2).skipped["pfs"] for node in all_nodes.nodes}  # type: ignore[union-attr]
        assert reasons == {"cadence: step 3 is newer and complete"}
        announced = [key for key in all_nodes.store.objects if "/announce/" in key]
        assert announced == []  # what is left out leaves nothing behind, and what is complete neither


async def test_a_run_without_a_rule_costs_no_request_more(tmp_path: Path) -> None:
    async with job(tmp_path) as all_nodes:
        await all_nodes.save(1, 2)
        await all_nodes.turns()
        assert_whole(all_nodes, {1, 2}, set())
        for node in all_nodes.nodes:
            assert not [key for _, key in node.shared.asked if "/verdicts/" in key]


async def test_the_requests_of_a_run_with_a_cadence_are_bounded(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        await all_nodes.save(1, 2)
        await all_nodes.turns(600)
        first, other = all_nodes.nodes
        assert all_nodes.where(1, 2) == [["complete", "pending"]] * 2
        asked = {
            node.name: sum(n for (verb, key), n in node.shared.asked.items() if "/verdicts/" in key) for node in (first, other)
        }
        assert asked["a"] < 45
        assert asked["b"] < 45  # of ten minutes
        manifests = sum(n for (verb, key), n in other.shared.asked.items() if "step-000000000002/manifest" in key)
        assert manifests <= 1  # nobody can have completed what has not begun to go


async def test_a_drain_that_lags_is_skipped_by_all_nodes(tmp_path: Path) -> None:
    async with job(tmp_path, SKIPS) as all_nodes:
        first = all_nodes.nodes[0]
        await first.drains["pfs"].hold(True)
        await all_nodes.save(1, 2, 3)
        await first.drains["pfs"].order.catch_up()  # as whoever asks for the queue has it done
        await all_nodes.turns(int(LAG_S) + 2)
        assert all_nodes.where(1, 2, 3) == [["pending"] * 3] * 2
        await first.drains["pfs"].hold(False)
        await all_nodes.turns()
        assert_whole(all_nodes, {3}, {1, 2})


async def test_the_next_begins_only_once_the_last_is_out_everywhere(tmp_path: Path) -> None:
    """So it shows to who decides that another node lags."""
    async with job(tmp_path, SKIPS) as all_nodes:
        slow = all_nodes.nodes[1]
        await all_nodes.save(1)
        await all_nodes.turns(2, but=[slow])
        await slow.announcer.step()
        await all_nodes.turns(2, but=[slow])
        assert all_nodes.verdicts() == [(1, True)]
        await all_nodes.save(2, 3)
        await slow.clock.advance(1.0)
        await slow.announcer.step()
        await all_nodes.turns(int(LAG_S) + 5, but=[slow])
        assert all_nodes.verdicts() == [(1, True), (2, False)]
        await all_nodes.turns()
        assert_whole(all_nodes, {1, 3}, {2})


@pytest.mark.parametrize("writer", [0, 1])
async def test_a_final_part_of_any_writer_brings_all_of_it_out(tmp_path: Path, writer: int) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        await all_nodes.save(1)
        await all_nodes.turns()
        await all_nodes.save(2, kinds=["final" if each == writer else "" for each in range(2)])
        await all_nodes.turns(40)
        assert_whole(all_nodes, {1, 2}, set())


@pytest.mark.parametrize("place", [0, 1])
async def test_a_pin_on_any_node_takes_a_skip_back_on_all(tmp_path: Path, place: int) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        for step in (1, 2, 3):
            await all_nodes.save(step)
            await all_nodes.turns()
        assert_whole(all_nodes, {1}, {2})
        await all_nodes.nodes[place].retention.pin(RUN, 2, True)
        await all_nodes.turns(20, 60.0)
        assert_whole(all_nodes, {1, 2}, set())


async def test_an_operator_s_priority_on_a_follower_brings_it_out(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        await all_nodes.save(1)
        await all_nodes.turns()
        await all_nodes.save(2)
        await all_nodes.turns(2)
        await all_nodes.nodes[1].queue.change("prio", [f"{RUN}@2"])
        await all_nodes.turns(40)
        assert_whole(all_nodes, {1, 2}, set())


async def test_a_hold_on_a_follower_lets_nothing_go_and_ends_with_what_was_decided(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        first, other = all_nodes.nodes
        await all_nodes.save(1)
        await all_nodes.turns()
        await all_nodes.save(2)
        await other.queue.change("hold", [f"{RUN}@2"])
        await all_nodes.save(3)
        await all_nodes.turns()
        assert (first.where(2), other.where(2)) == (["skipped"], ["pending"])
        assert all_nodes.shards(2) == []
        await other.queue.change("release", [f"{RUN}@2"])
        await all_nodes.turns()
        assert_whole(all_nodes, {1}, {2})


async def test_a_preemption_of_a_follower_waits_for_nobody(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        other = all_nodes.nodes[1]
        await all_nodes.save(1)
        await all_nodes.turns()
        await all_nodes.save(2)
        await all_nodes.turns(2)
        await other.queue.first(RUN, 2)
        await other.turn()
        assert all_nodes.shards(2) == ["w1.bin"]
        await all_nodes.turns(40)
        assert_whole(all_nodes, {1, 2}, set())


async def test_what_was_superseded_goes_after_all_once_the_newer_one_is_deleted(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        for step in (1, 2, 3):
            await all_nodes.save(step)
            await all_nodes.turns()
        assert all_nodes.where(1, 2, 3) == [["complete", "skipped", "pending"]] * 2
        for node in all_nodes.nodes:
            await node.retention.delete(RUN, 3, force=True, dry_run=False)
        await all_nodes.turns(40)
        assert_whole(all_nodes, {1, 2}, set())


# -- nodes that die, come late, or think differently -----------------------------------------------------------------------


@pytest.mark.expected_logs("no node has decided")
async def test_what_nobody_decides_on_goes_in_the_end(tmp_path: Path) -> None:
    async with job(tmp_path, SKIPS) as all_nodes:
        first = all_nodes.nodes[0]
        await all_nodes.save(1)
        await all_nodes.turns(60, 60.0, but=[first])
        assert all_nodes.shards(1) == []
        await all_nodes.turns(20, 60.0, but=[first])
        assert all_nodes.shards(1) == ["w1.bin"]
        assert all_nodes.verdicts() == [(1, True)]
        await first.restart()
        await all_nodes.turns()
        assert_whole(all_nodes, {1}, set())


@pytest.mark.expected_logs("no node has decided")
async def test_what_nobody_decides_on_is_left_out_once_a_newer_one_is_there(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        first = all_nodes.nodes[0]
        await all_nodes.save(1)
        await all_nodes.turns()
        await all_nodes.save(2, 3)
        await first.clock.advance(1.0)
        await first.announcer.step()  # and it is away from here on
        await all_nodes.turns(30, 20.0, but=[first])
        assert all_nodes.verdicts()[-1] == (2, False)
        await first.restart()
        await all_nodes.turns()
        assert_whole(all_nodes, {1}, {2})


@pytest.mark.parametrize("keys", [EVERY_3, ""])
async def test_who_decides_is_killed_between_its_word_and_its_act(tmp_path: Path, keys: str) -> None:
    """Also where it comes back with another policy: it does as it said, once it sees that the others do."""
    async with job(tmp_path, EVERY_3) as all_nodes:
        first = all_nodes.nodes[0]
        for step in (1, 2):
            await all_nodes.save(step)
            await all_nodes.turns()
        two = first.session(2)
        assert two is not None
        assert not await first.joint.say(two, goes=False, reason="for a test")
        await first.restart(keys)
        await all_nodes.save(3)
        await all_nodes.turns(30, 10.0)
        assert_whole(all_nodes, set(), {2})
        assert all_nodes.nodes[1].session(2).skipped["pfs"] == "for a test"  # type: ignore[union-attr]


async def test_followers_that_restart_go_on_by_what_was_said(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        other = all_nodes.nodes[1]
        await all_nodes.save(1)
        await all_nodes.turns()
        await all_nodes.save(2, 3, 4)
        await other.announcer.step()
        await all_nodes.turns(but=[other])
        await other.restart()
        await all_nodes.turns()
        assert_whole(all_nodes, {1, 4}, {2, 3})


async def test_a_follower_that_had_begun_before_the_rule_brings_all_out(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3, others="") as all_nodes:
        other = all_nodes.nodes[1]
        await all_nodes.save(1)
        await all_nodes.turns()
        await all_nodes.save(2)
        await other.turn()
        assert all_nodes.shards(2) == ["w1.bin"]
        await other.restart(EVERY_3)
        await all_nodes.turns(40)
        assert_whole(all_nodes, {1, 2}, set())


async def test_what_a_follower_without_the_rule_has_brought_out_goes_again(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3, others="") as all_nodes:
        for step in range(1, 5):
            await all_nodes.save(step)
            await all_nodes.turns()
        assert all_nodes.shards(2) == ["w1.bin"]
        assert not all_nodes.is_complete(2)
        await all_nodes.turns(40, 10.0)
        assert_whole(all_nodes, {1, 4}, {2, 3})
        assert not [key for key in all_nodes.store.objects if "step-000000000002/" in key]


async def test_a_follower_with_a_rule_that_who_decides_does_not_have(tmp_path: Path) -> None:
    """It would wait for a word that nobody is to say, but for what the other has announced of its rules."""
    async with job(tmp_path, "", others=SKIPS) as all_nodes:
        await all_nodes.save(1)
        await all_nodes.turns()
        assert_whole(all_nodes, {1}, set())


@pytest.mark.expected_logs("no node has decided")
async def test_who_does_not_say_its_rules_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a node of an older release."""
    async with job(tmp_path, "", others=SKIPS) as all_nodes:
        monkeypatch.setattr(announce, "rules_of", lambda *given: None)
        monkeypatch.setattr(announce, "may_leave_out", lambda rules: "?")
        await all_nodes.save(1)
        await all_nodes.turns()
        assert all_nodes.where(1) == [["pending"]] * 2
        await all_nodes.turns(80, 60.0)
        assert_whole(all_nodes, {1}, set())


async def test_a_tier_that_is_away_from_a_follower_loses_no_word(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        other = all_nodes.nodes[1]
        await all_nodes.save(1)
        await all_nodes.turns()
        await all_nodes.save(2, 3, 4)
        await other.announcer.step()
        other.shared.away = True
        await all_nodes.turns()
        assert other.where(2, 3, 4) == ["pending"] * 3
        other.shared.away = False
        await other.node.tiers["pfs"].step()
        await all_nodes.turns()
        assert_whole(all_nodes, {1, 4}, {2, 3})


async def test_a_tier_that_is_away_from_who_decides_stops_nothing_for_good(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        first, other = all_nodes.nodes
        await all_nodes.save(1)
        await all_nodes.turns()
        await all_nodes.save(2, 3)
        await other.announcer.step()
        await first.announcer.step()
        await first.turn(1.0)
        first.shared.away = True
        await all_nodes.turns(3)
        first.shared.away = False
        await first.node.tiers["pfs"].step()
        await all_nodes.turns()
        assert_whole(all_nodes, {1}, {2})


async def test_what_lacks_a_writer_holds_nobody_up(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        await all_nodes.save(1)
        await all_nodes.turns()
        await all_nodes.save(2, only=[0])
        await all_nodes.save(3, 4)
        await all_nodes.turns()
        assert_whole(all_nodes, {1, 4}, {3})
        assert all_nodes.nodes[0].where(2) == ["skipped"]
        await all_nodes.nodes[1].part(2, 1, 2)  # it comes after all
        await all_nodes.turns()
        assert_whole(all_nodes, {1, 4}, {2, 3})


async def test_a_step_that_is_saved_again_is_decided_on_anew(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        for step in (1, 2, 3):
            await all_nodes.save(step)
            await all_nodes.turns()
        for number, node in enumerate(all_nodes.nodes):
            await node.part(2, number, 2, session="again", kind="final")
        await all_nodes.turns(20)
        assert all_nodes.is_complete(2)
        for node in all_nodes.nodes:
            again, first = node.session(2, "again"), node.session(2)
            assert again is not None
            assert first is not None
            assert (again.publish["pfs"].value, first.publish["pfs"].value) == ("complete", "superseded")


async def test_what_is_left_out_leaves_every_cache_only_once_a_newer_one_is_complete(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        for step in (1, 2, 3):
            await all_nodes.save(step)
            await all_nodes.turns()
        assert all_nodes.where(2) == [["skipped"]] * 2
        for node in all_nodes.nodes:
            await node.evictor.evict(32 << 20)
            assert 2 in node.known(RUN)  # 3 is in caches alone
        await all_nodes.save(4)
        await all_nodes.turns()
        for node in all_nodes.nodes:
            await node.evictor.evict(64 << 20)
            assert 2 not in node.known(RUN)
            assert node.where(4) == ["complete"]


async def test_a_deletion_takes_the_word_along(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        for step in (1, 2, 3):
            await all_nodes.save(step)
            await all_nodes.turns()
        assert (2, False) in all_nodes.verdicts()
        for node in all_nodes.nodes:
            await node.retention.delete(RUN, 2, force=True, dry_run=False)
        assert 2 not in dict(all_nodes.verdicts())
        assert not [key for key in all_nodes.store.objects if "step-000000000002" in key]
        findings = [finding async for finding in all_nodes.nodes[0].checker.check(deep=False)]
        assert not [finding for finding in findings if ".forebay/" in finding.path]


# -- transient runs --------------------------------------------------------------------------------------------------------

TRANSIENT = f'[[policy]]\nrun = "{RUN}"\ntransient = true\n'


async def test_a_transient_checkpoint_of_several_nodes_says_what_it_is(tmp_path: Path) -> None:
    async with job(tmp_path, TRANSIENT) as all_nodes:
        first, other = all_nodes.nodes
        for writer, node in enumerate(all_nodes.nodes):
            receipt = await node.part(1, writer, 2)
            assert (receipt.transient, receipt.complete_at_cache) == (True, False)
        await all_nodes.turns()
        assert all_nodes.shards(1) == []
        for node in all_nodes.nodes:
            with node.node.catalog.read() as txn:
                row = txn.checkpoint(RUN, 1)
                assert row is not None
                seen = view(node.node, txn, row)
                session = node.session(1)
                assert session is not None
                assert level_progress(txn, session, "cache").reached
            assert seen is not None
            assert (seen.state, seen.transient, seen.missing) == ("incomplete", True, ())
            assert "in the caches of 2 nodes, 1 of 2 in this one's, and cannot be restored as a whole" in seen.reason
            with pytest.raises(Incomplete, match="cannot be restored as a whole"):
                await node.finder.complete(RUN, 1)
            with pytest.raises(NotFound):
                await node.finder.latest(RUN)
        asked = sum(first.shared.asked.values())
        await all_nodes.turns()
        assert sum(first.shared.asked.values()) == asked  # all is known, so nobody asks any more
        for node in (first, other):
            await node.evictor.evict(64 << 20)
            assert node.known(RUN) == []
        assert list(all_nodes.store.objects) == []


async def test_a_transient_checkpoint_that_lacks_a_writer_is_not_asked_about_for_ever(tmp_path: Path) -> None:
    async with job(tmp_path, TRANSIENT) as all_nodes:
        await all_nodes.save(1, only=[0])
        await all_nodes.turns(70, 60.0)
        first = all_nodes.nodes[0]
        asked = sum(first.shared.asked.values())
        assert asked > 0
        await all_nodes.turns()
        assert sum(first.shared.asked.values()) == asked


async def test_a_transient_run_of_one_node_tells_no_tier(tmp_path: Path) -> None:
    async with job(tmp_path, TRANSIENT, nodes=1) as all_nodes:
        receipts = [await all_nodes.nodes[0].part(1, writer, 2) for writer in (0, 1)]
        assert receipts[-1].complete_at_cache
        await all_nodes.turns()
        assert not all_nodes.nodes[0].shared.asked
