"""What goes next, over a real catalog: classes, cadence, lag, an operator's word, and what of it survives a restart."""

import asyncio
from functools import partial
from pathlib import Path

import pytest

from forebay_gateway.base.metrics import LoopLag
from forebay_gateway.core.errors import Incomplete, InvalidArgument, NotFound
from forebay_gateway.core.records import ShardKey
from forebay_gateway.core.schedule_rows import Kind
from forebay_gateway.core.states import CopyEvent, CopyState
from forebay_gateway.paths import joint, order, skip
from forebay_gateway.paths.health import Health
from forebay_gateway.paths.safety import copy_lost
from paths.order_kit import RUN, SmallNode

EVERY_2 = "every = 2"
SKIPS = f'[[policy]]\nrun = "{RUN}"\nskip = true'


@pytest.mark.expected_logs("rebuilt from the cache's files")
async def test_a_final_save_goes_before_older_periodic_ones_also_after_a_restart_and_a_rebuild(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        for step in (1, 2):
            await node.save(step)
        await node.save(3, kind="final")
        assert await node.batches() == ["3", "1", "2"]
        await node.restart()
        assert await node.batches("far") == ["3", "1", "2"]
        await node.save(4)
        await node.save(5, kind="final")
        await node.lose_catalog()
        assert node.session(5).kind is Kind.FINAL
        assert await node.batches() == ["5", "4"]


async def test_one_final_part_makes_the_checkpoint_final(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        await node.save(1)
        await node.save(2, writers=2, writer=1)
        await node.save(2, writers=2, writer=0, kind="final")
        assert await node.batch() == f"{RUN}@2"
        assert await node.batch() == f"{RUN}@1"  # both parts of the other were one batch
        with pytest.raises(InvalidArgument, match="periodic, final or preemption"):
            await node.save(3, kind="urgent")


async def test_a_policy_gives_the_class_where_the_save_names_none(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, '[[policy]]\nrun = "best"\nclass = "final"') as node:
        await node.save(1)
        await node.save(2, run="best")
        assert await node.batches() == ["best@2", "1"]


async def test_a_run_with_much_does_not_push_another_aside_and_a_promoted_checkpoint_goes_first(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        for step in range(1, 5):
            await node.save(step)
        await order.promote(node.node, RUN, 3)
        assert await node.batch() == f"{RUN}@3"
        await node.restart()
        assert node.session(3).kind is Kind.PREEMPTION
        assert await node.batches("far") == ["3", "1", "2", "4"]
        with pytest.raises(NotFound):
            await order.promote(node.node, RUN, 9)


async def test_cadence_lets_each_second_one_go_and_skips_the_others(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, near=EVERY_2) as node:
        gone = []
        for step in range(1, 6):
            await node.save(step)
            gone += await node.batches()
        assert gone == ["1", "3", "5"]
        assert node.states("near", 1, 2, 3, 4, 5) == ["complete", "skipped", "complete", "skipped", "complete"]
        assert "cadence" in node.session(2).skipped["near"]
        assert await node.batches("far") == ["1", "2", "3", "4", "5"]  # the other tier takes all


async def test_cadence_goes_on_after_a_restart(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, near="every = 3") as node:
        gone = []
        for step in range(1, 9):
            await node.save(step)
            gone += await node.batches()
            await node.restart()
        assert gone == ["1", "4", "7"]


async def test_an_interval_counts_from_the_last_one_that_went(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, near='every = "10m"') as node:
        await node.save(1)
        assert await node.batches() == ["1"]
        await node.save(2)
        await node.clock.advance(300)
        assert await node.batches() == []
        await node.restart()
        await node.clock.advance(300)  # a clock of its own: as many seconds as before
        await node.clock.advance(301)
        assert await node.batches() == ["2"]


async def test_what_a_rule_holds_back_is_no_standstill(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, near="every = 3") as node:
        await node.save(1)
        assert await node.batches() == ["1"]
        await node.save(2)
        assert await node.batches() == []
        health = Health(node.node, node.clock, LoopLag(node.clock))
        for _ in range(3):
            await health.step()
            await node.clock.advance(100)
        alarms = [alarm.what for alarm in health.report().alarms if "near" in alarm.what]
        assert alarms == []
        assert [alarm for alarm in health.report().alarms if "far" in alarm.what]  # nobody drains there


async def test_a_final_one_is_never_held_back(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, near="every = 5") as node:
        await node.save(1)
        await node.save(2)
        await node.save(3, kind="final")
        assert await node.batches() == ["3"]
        assert node.states("near", 1, 2) == ["skipped", "skipped"]


async def test_what_lags_is_left_out_once_a_newer_one_is_complete_and_a_pin_brings_it_back(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, SKIPS) as node:
        for step in (1, 2, 3):
            await node.save(step, shards=3)
        await node.drains["near"].order.catch_up()
        await node.clock.advance(joint.LAG_S + 1)
        assert await node.batches() == ["3"]
        assert node.states("near", 1, 2, 3) == ["skipped", "skipped", "complete"]
        with node.node.catalog.read() as txn:
            assert txn.totals().tiers["near"].copies == 0
            copies = [txn.copy(row.key, "near") for row in txn.shards(node.session(2).id)]
            assert {copy.state for copy in copies if copy is not None} == {CopyState.SKIPPED}
        with pytest.raises(Incomplete, match=r"left out on 'near'.*step 3 is newer"):
            async for _ in node.waiter.watch(RUN, 2, "near"):
                pass
        await node.retention.pin(RUN, 2, True)
        assert node.states("near", 2) == ["pending"]
        assert await node.batches() == ["2"]
        await node.clock.advance(10)
        await node.completions["near"].step()
        assert node.states("near", 2) == ["complete"]
        assert node.queue.skipped() == {"near": 2, "far": 0}


async def test_what_is_pinned_held_or_another_node_s_to_decide_is_not_left_out(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, SKIPS) as node:
        await node.save(1)
        await node.retention.pin(RUN, 1, True)
        await node.save(2)
        await node.queue.change("hold", [f"{RUN}@2"])
        await node.save(3, writers=2, writer=1)  # writer 0 commits elsewhere
        session = node.session(3)
        await node.node.catalog.write(lambda txn: txn.note_parts(session.id, {0: "other"}))
        await node.save(4, writers=2, writer=0)
        await node.save(4, writers=2, writer=1)
        await node.save(5)
        await node.drains["near"].order.catch_up()
        await node.clock.advance(joint.LAG_S + 1)
        assert await node.batches() == ["1", "5"]
        assert node.states("near", 2, 3, 4) == ["pending", "pending", "skipped"]
        await node.queue.change("release", ())
        assert await node.batches() == []  # it is superseded, and nobody holds it any more
        assert node.states("near", 2) == ["skipped"]


async def test_a_deleted_successor_supersedes_nothing(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, SKIPS) as node:
        await node.save(1)
        await node.save(2)
        await node.drains["near"].order.catch_up()
        await node.retention.delete(RUN, 2, force=True, dry_run=False)
        await node.clock.advance(joint.LAG_S + 1)
        assert await node.batches() == ["1"]


async def test_a_skip_that_a_kill_cut_short_is_finished_and_one_that_was_pinned_is_undone(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, SKIPS) as node:
        for step in (1, 2, 3):
            await node.save(step)
        for step in (1, 2):  # the decision, and no copy yet
            session = node.session(step)
            await node.node.catalog.write(lambda txn, at=session.id: txn.skip(at, "near", "why"))
        await node.node.catalog.write(lambda txn: txn.set_pinned(RUN, 2, True))
        await node.restart()
        assert await node.batches() == ["2", "3"]
        assert node.states("near", 1) == ["skipped"]
        with node.node.catalog.read() as txn:
            assert txn.totals().tiers["near"].copies == 0


async def test_a_skipped_one_leaves_the_cache_only_once_a_newer_one_is_complete_on_a_required_tier(tmp_path: Path) -> None:
    policy = f'[[policy]]\nrun = "{RUN}"\ntiers = ["near"]\nskip = true'
    async with SmallNode(tmp_path, policy) as node:
        await node.save(1)
        await node.save(2)
        await node.drains["near"].order.catch_up()
        await node.clock.advance(joint.LAG_S + 1)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(node.drains["near"]), "_batch_of", lambda *_: [])
            assert await node.batches() == []
        assert node.states("near", 1) == ["skipped"]
        await node.evictor.step()
        assert node.is_known(1)  # it is the newest that anybody could restore, should the other be lost
        await node.drains["near"].order.catch_up()
        node.drains["near"].retry_now()
        node.drains["near"].order.reload()
        assert await node.batches() == ["2"]
        assert node.states("near", 2) == ["complete"]
        await node.evictor.evict(1)
        assert not node.is_known(1)  # as a whole: nobody finds a checkpoint without its bytes
        assert node.is_known(2)


async def test_a_transient_run_stays_here_goes_first_and_its_newest_last(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, '[[policy]]\nrun = "scratch"\ntransient = true') as node:
        await node.save(1)
        assert await node.batches() == ["1"]
        assert await node.batches("far") == ["1"]
        done = [await node.save(step, run="scratch") for step in (1, 2, 3)]
        assert all(each.transient and each.complete_at_cache for each in done)
        assert await node.batches() == await node.batches("far") == []
        await node.retention.pin("scratch", 1, True)
        for level in ("near", "all"):
            with pytest.raises(InvalidArgument, match="transient"):
                async for _ in node.waiter.watch("scratch", 3, level):
                    pass
        await node.restart()
        assert [node.is_known(step, "scratch") for step in (1, 2, 3)] == [True, True, True]
        await node.evictor.evict(1)
        assert [node.is_known(step, "scratch") for step in (1, 2, 3)] == [True, False, True]
        await node.evictor.evict(1)
        assert [node.is_known(step, "scratch") for step in (1, 2, 3)] == [True, False, False]
        with node.node.catalog.read() as txn:
            assert txn.session_sums(node.session(1).id).cached == 1  # what the tiers hold went after these, so not yet
        assert node.node.budget.used == sum(path.stat().st_size for path in node.path.glob("data/*/*.shard"))


async def test_a_policy_s_tiers_are_all_that_counts_for_its_runs(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, f'[[policy]]\nrun = "{RUN}"\ntiers = ["near"]') as node:
        await node.save(1)
        assert await node.batches("far") == []
        with pytest.raises(InvalidArgument, match="do not go to 'far', only to near"):
            async for _ in node.waiter.watch(RUN, 1, "far"):
                pass
        assert await node.batches() == ["1"]
        async with asyncio.timeout(5):
            async for progress in node.waiter.watch(RUN, 1, "all"):
                assert progress.reached
        session = node.session(1)
        with node.node.catalog.read() as txn:
            assert txn.session_sums(session.id).sealed == 0  # evictable: nothing more is required of it


async def test_holds_and_priorities_of_single_checkpoints_survive_a_restart(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        for step in range(1, 6):
            await node.save(step)
        assert await node.queue.change("hold", [f"{RUN}@1"]) == [f"{RUN}@1"]
        await node.queue.change("prio", [f"{RUN}@4", f"{RUN}@3"])
        await node.restart()
        waiting = [each async for page in node.queue.pages() for each in page]
        near = [(each.id, each.entry.state, each.place, each.held) for each in waiting if each.tier == "near"]
        assert near[:2] == [(f"{RUN}@4", "waiting", 1, False), (f"{RUN}@3", "waiting", 2, False)]
        assert (f"{RUN}@1", "held", 0, True) in near
        assert await node.batches() == ["4", "3", "2", "5"]
        await node.queue.change("release", [f"{RUN}@1"])
        assert await node.batches() == ["1"]
        for action, ids, error in (
            ("hold", ["nothing"], InvalidArgument),
            ("hold", [f"{RUN}@1", f"{RUN}@99"], NotFound),
            ("prio", [], InvalidArgument),
            ("eat", [], InvalidArgument),
        ):
            with pytest.raises(error):
                await node.queue.change(action, ids)
        with node.node.catalog.read() as txn:
            row = txn.checkpoint(RUN, 1)
        assert row is not None
        assert not row.held  # one name was unknown, so nothing was changed


async def test_a_part_that_waits_after_a_failure_is_tried_at_an_operator_s_word(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        await node.save(1)
        await node.save(2)
        drain = node.drains["near"]
        with node.node.catalog.read() as txn:
            keys = [row.key for row in txn.shards(node.session(1).id)]
        drain._not_before_s.update(dict.fromkeys(keys, node.clock.monotonic() + 60))
        assert await node.batches() == ["2"]  # it does not hold up the others
        await node.queue.change("retry", [f"{RUN}@1"])
        assert await node.batches() == ["1"]


async def test_what_the_scheduler_was_never_told_of_is_found_in_the_queue(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        assert await node.batches() == []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(node.node.changes, "tell", lambda session_id=None: None)
            await node.save(1)
        assert await node.batches() == []
        await node.clock.advance(order.LOOK_AGAIN_S + 1)
        assert await node.batches() == ["1"]


async def test_finding_the_parts_of_a_long_queue_reads_no_shards(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, capacity="512MiB") as node:  # far below the watermark: nobody moves the clock
        for step in range(1, 4):
            await node.save(step, shards=500)
        with node.node.catalog.read() as txn:
            looked: list[ShardKey] = []
            real = type(txn).shard

            def counted(self: object, key: ShardKey) -> object:
                looked.append(key)
                return real(self, key)  # type: ignore[arg-type]

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(type(txn), "shard", counted)
                assert len(list(txn.pending_parts("near"))) == 3
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(txn), "shard", counted)
            await node.drains["near"].order.catch_up()
        assert len(looked) <= 3
        assert [entry.copies for entry in node.drains["near"].order.entries(None, 10)] == [500, 500, 500]


async def test_a_lost_copy_of_what_is_complete_goes_again_and_is_not_left_out(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, SKIPS) as node:
        for step in (1, 2):
            await node.save(step)
            assert await node.batches() == [str(step)]
        (shard,) = await _rows(node, 1)
        await node.node.catalog.write(lambda txn: copy_lost(txn, shard, "near", CopyEvent.GONE, "gone", ("near", "far")))
        node.stores["near"].objects.pop(next(key for key in node.stores["near"].objects if f"{1:012d}" in key and "/w" in key))
        await node.clock.advance(joint.LAG_S + order.LOOK_AGAIN_S)
        assert await node.batches() == ["1"]
        assert node.states("near", 1) == ["complete"]


async def test_parts_that_were_committed_in_another_order_than_the_scheduler_met_them(tmp_path: Path) -> None:
    """By its first part it is older than the other, by its last one newer: the catalog does not let it be left out."""
    async with SmallNode(tmp_path, SKIPS) as node:
        await node.save(1, writers=2, writer=0)
        await node.save(2)
        await node.save(1, writers=2, writer=1)
        await node.drains["near"].order.catch_up()
        await node.clock.advance(joint.LAG_S + 1)
        assert sorted(await node.batches()) == ["1", "2"]


async def _rows(node: SmallNode, step: int) -> list[ShardKey]:
    with node.node.catalog.read() as txn:
        return [row.key for row in txn.shards(node.session(step).id)]


async def test_a_skip_and_a_pin_at_once_never_publish_what_lacks_a_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(skip, "COPIES_A_TRANSACTION", 1)
    async with SmallNode(tmp_path, SKIPS) as node:
        await node.save(1, shards=3)
        await node.save(2)
        write, session = node.node.catalog.write, node.session(1)
        assert await write(partial(skip.begin_skip, session.id, "near", "why", ""))
        assert await write(partial(skip.skip_some, session.id, "near"))
        await write(lambda txn: txn.set_pinned(RUN, 1, True))
        assert not await write(partial(skip.skip_some, session.id, "near"))
        after = await write(partial(skip.unskip_some, session.id, "near", -1))
        await write(lambda txn: txn.set_pinned(RUN, 1, False))  # and taken off again, before it was done
        while await write(partial(skip.skip_some, session.id, "near")):
            pass
        while after is not None:
            after = await write(partial(skip.unskip_some, session.id, "near", after))
        await write(partial(skip.end_unskip, session.id, "near"))
        assert node.states("near", 1) == ["skipped"]
        await node.restart()
        assert await node.batches() == ["2"]
        assert node.states("near", 1, 2) == ["skipped", "complete"]
        with node.node.catalog.read() as txn:
            assert txn.totals().tiers["near"].copies == 0


async def test_an_operator_s_word_on_all_passes_over_what_has_gone_meanwhile(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        await node.save(1)
        await node.save(2)
        await node.drains["near"].order.catch_up()
        await node.node.catalog.write(lambda txn: txn.drop_session(node.session(1).id))
        assert await node.queue.change("hold", []) == [f"{RUN}@1", f"{RUN}@2"]
        assert await node.batches() == []
        with pytest.raises(NotFound):
            await node.queue.change("hold", [f"{RUN}@1"])
