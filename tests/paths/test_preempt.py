"""A node that is about to go, on a clock that stands still: what is chosen, what is waited for, what is said."""

import asyncio
from pathlib import Path

import pytest

from forebay_gateway.cache.layout import CLEAN
from forebay_gateway.core.errors import DiskFull, NotFound
from forebay_gateway.core.schedule_rows import Kind
from forebay_gateway.paths import joint, order
from forebay_gateway.paths.care.passes import YIELD_S
from forebay_gateway.paths.care.scrub import Scrubber
from forebay_gateway.paths.preempt import STILL_S, Preemption
from forebay_gateway.paths.write import PartRef
from paths.kit import client_of, serving, tier
from paths.order_kit import RUN, SmallNode

SKIPS = f'[[policy]]\nrun = "{RUN}"\nskip = true'


def preemption(node: SmallNode) -> Preemption:
    """Of this node."""
    return Preemption(node.node, node.queue.first)


async def test_a_run_whose_newest_is_out_leaves_the_tier_to_others(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, near="required = true") as node:
        await node.save(1)
        await node.queue.change("hold", [f"{RUN}@1"])
        await node.save(2)
        for name in ("near", "far"):
            assert await node.batches(name) == ["2"]
        await node.queue.change("release", [f"{RUN}@1"])
        await node.save(7, run="other")
        outcomes = await preemption(node).run("", 0.0)
        assert [(each.session.run, each.session.step) for each in outcomes] == [("other", 7)]
        assert node.session(1).kind is Kind.PERIODIC
        assert [each.session.step for each in await preemption(node).run(RUN, 0.0)] == [2]
        with pytest.raises(NotFound):
            await preemption(node).run("never", 0.0)


async def test_what_an_operator_holds_is_said_and_not_waited_for_at_a_stop(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        await node.save(1)
        await node.queue.change("hold", [f"{RUN}@1"])
        (outcome,) = await asyncio.wait_for(preemption(node).run("", 3600.0, while_it_can=True), 5)
        assert [level for level, _ in outcome.missed] == ["near", "far"]
        assert all(f"forebay queue release {RUN}@1" in progress.reason for _, progress in outcome.missed)
        await node.queue.change("release", [f"{RUN}@1"])
        node.node.tiers["near"].held = True
        (outcome,) = await preemption(node).run(RUN, 0.0)
        assert outcome.coming == ("far",)
        assert "near is held by an operator" in outcome.missed[0][1].reason


async def test_a_part_that_is_out_does_not_hold_up_a_stop_for_writers_that_never_come(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        await node.save(1, writers=2)
        for name in ("near", "far"):
            assert await node.batches(name) == ["1"]
        (outcome,) = await asyncio.wait_for(preemption(node).run("", 3600.0, while_it_can=True), 5)
        assert not outcome.complete and outcome.coming == ()


async def test_a_tier_that_takes_no_byte_holds_up_no_stop(tmp_path: Path) -> None:
    """It answers, but what is put there fails again and again."""
    async with SmallNode(tmp_path) as node:
        await node.save(1)
        stopping = asyncio.create_task(preemption(node).run("", 3600.0, while_it_can=True))
        asked = asyncio.create_task(preemption(node).run("", 3600.0))
        await asyncio.sleep(0.05)
        assert not stopping.done()
        await node.clock.advance(STILL_S + 0.1)
        node.node.changes.tell()
        (outcome,) = await asyncio.wait_for(stopping, 5)
        assert outcome.coming == ("near", "far")
        assert not asked.done()  # who asks with a deadline gets all of it
        asked.cancel()


async def test_scrubs_pause_and_drains_step_back_for_nothing_meanwhile(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, capacity="64MiB") as node:
        told: list[bool] = []
        node.node.movers.saves = told.append  # type: ignore[method-assign]
        await node.save(1)
        part = PartRef(RUN, 2, "s2", 0, 1)
        incoming = await node.small._writes.begin(part, "a", 1)
        assert told[-1]
        scrub = Scrubber(node.node, node.reads, node.evictor)
        await scrub.start()
        running = asyncio.create_task(preemption(node).run(RUN, 3600.0))
        await asyncio.sleep(0.05)
        assert not told[-1]
        assert await scrub.step() == YIELD_S
        other = await node.small._writes.begin(part, "b", 1)
        assert not told[-1]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        for each in (incoming, other):
            await each.discard()


async def test_what_was_left_out_goes_after_all_at_a_preemption(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, SKIPS) as node:
        await node.save(1)
        await node.save(2)
        await node.drains["near"].order.catch_up()
        await node.clock.advance(joint.LAG_S + 1)
        assert await node.batches() == ["2"]
        await order.promote(node.node, RUN, 1)
        assert await node.batches() == ["1"]


async def test_a_save_that_comes_meanwhile_is_chosen_by_each_preemption_under_way(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        await node.save(1)
        both = preemption(node)
        running = [asyncio.create_task(both.run(RUN, 3000.0)), asyncio.create_task(both.run("", 3000.0))]
        await asyncio.sleep(0.1)
        assert node.node.preemptions == 2
        await node.save(2)
        for _ in range(4):
            for name in ("near", "far"):
                await node.batches(name)
            node.node.changes.tell()
            await asyncio.sleep(0.1)
        for task in running:
            assert [each.session.step for each in await asyncio.wait_for(task, 5)] == [2]
        assert node.node.preemptions == 0


async def test_what_waits_after_a_failure_is_tried_at_once(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        await node.save(1)
        with node.node.catalog.read() as txn:
            (row,) = txn.shards(node.session(1).id)
        node.drains["near"]._not_before_s[row.key] = node.clock.monotonic() + 60.0
        assert await node.batches() == []
        await preemption(node).run(RUN, 0.0)
        assert await node.batches() == ["1"]


@pytest.mark.expected_logs("could not be put first before the stop")
async def test_a_stop_comes_to_its_end_where_the_disk_takes_no_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pfs").mkdir()

    async def fail(run: str, step: int) -> None:
        raise DiskFull("no space for the catalog")

    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await client.hold()
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("x", b"x")
            await part.commit()
        assert gateway._preemption is not None
        monkeypatch.setattr(gateway._preemption, "_promote", fail)
    assert (tmp_path / "cache-a" / CLEAN).exists()
