"""What was left out on tiers, or goes to none by policy: it is never lost for it, and takes no space for ever."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from forebay_gateway.base.metrics import LoopLag
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.errors import Unavailable
from forebay_gateway.core.records import CheckpointRow, PublishState, ShardKey, ShardRow, UploadRow
from forebay_gateway.core.states import CopyEvent, ShardEvent, ShardState
from forebay_gateway.paths import evict, joint, order
from forebay_gateway.paths.health import Health
from forebay_gateway.paths.safety import copy_lost, expendable_bytes
from paths.order_kit import RUN, SHARD, SmallNode

SKIPS = f'[[policy]]\nrun = "{RUN}"\nskip = true'
TRANSIENT = f'[[policy]]\nrun = "{RUN}"\ntransient = true'


def shard(node: SmallNode, step: int) -> ShardRow:
    """The only one of that step."""
    with node.node.catalog.read() as txn:
        (row,) = txn.shards(node.session(step).id)
    return row


async def lag(node: SmallNode, tier: str = "near") -> None:
    """What waits has waited for so long that it may be left out."""
    await node.drains[tier].order.catch_up()
    await node.clock.advance(joint.LAG_S + 1)


async def test_the_only_copy_on_an_optional_tier_is_lost_so_the_cache_keeps_its_own(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, SKIPS) as node:
        node.node.tiers["far"].required = False
        await node.save(1)
        assert await node.batches("far") == ["1"]
        await node.save(2)
        await lag(node)
        assert await node.batches() == ["2"]
        assert (node.states("near", 1), node.states("far", 1)) == (["skipped"], ["complete"])
        row = shard(node, 1)
        assert row.state is ShardState.EVICTABLE
        del node.stores["far"].objects[next(key for key in node.stores["far"].objects if key.endswith("/w0-0"))]
        await node.node.catalog.write(
            lambda txn: copy_lost(txn, row.key, "far", CopyEvent.GONE, "not there", node.node.required_tiers)
        )
        assert shard(node, 1).state is ShardState.SEALED
        await node.evictor.evict(1 << 20)
        assert shard(node, 1).is_cached
        node.drains["far"].order.reload()
        assert await node.batches("far") == ["1"]
        assert shard(node, 1).state is ShardState.EVICTABLE


async def test_what_may_leave_the_cache_is_asked_again_when_it_goes(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, f'[[policy]]\nrun = "{RUN}"\ntiers = ["near"]\nskip = true') as node:
        await node.save(1)
        await node.save(2)
        await lag(node)
        assert await node.batches() == ["2"]
        with node.node.catalog.read() as txn:
            row = txn.checkpoint(RUN, 1)
        assert row is not None
        await node.retention.delete(RUN, 2, force=False, dry_run=False)  # between the choice and the act
        with pytest.raises(Unavailable):
            await node.retention.drop_cache_only(row)
        assert node.is_known(1)


async def test_a_pinned_transient_one_is_no_space_that_could_be_had(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, TRANSIENT) as node:
        await node.save(1)
        with node.node.catalog.read() as txn:
            assert expendable_bytes(txn, node.node.required_tiers) > 0
        await node.retention.pin(RUN, 1, True)
        with node.node.catalog.read() as txn:
            assert expendable_bytes(txn, node.node.required_tiers) == 0


async def test_what_is_transient_is_not_dirty(tmp_path: Path) -> None:
    """It may go at any time, so it is no reason to slow writers."""
    async with SmallNode(tmp_path, TRANSIENT) as node:
        await node.save(1, run="drained/run")
        await node.clock.advance(60.0)
        before = node.node.budget.dirty
        assert before > 0
        for step in range(1, 4):
            await node.save(step)
        await node.clock.advance(60.0)
        with node.node.catalog.read() as txn:
            more = txn.totals().dirty - before
            size = expendable_bytes(txn, node.node.required_tiers)
        assert size == 3 * len(SHARD)
        assert node.node.budget.dirty == before + more - size


async def test_a_damaged_or_held_one_takes_nobody_s_place(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, SKIPS) as node:
        await node.save(1)
        await node.save(2)
        await node.save(3)
        await node.node.catalog.write(lambda txn: txn.shard_event(shard(node, 3).key, ShardEvent.MISMATCH))
        await node.queue.change("hold", [f"{RUN}@2"])
        await lag(node)
        assert await node.batches() == ["1"]
        await node.queue.change("release", [f"{RUN}@2"])
        assert await node.batches() == ["2"]


async def test_once_the_newest_is_deleted_the_one_before_it_goes_after_all(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, SKIPS) as node:
        for step in (1, 2, 3):
            await node.save(step)
        await lag(node)
        assert await node.batches() == ["3"]
        await node.retention.delete(RUN, 3, force=True, dry_run=False)
        assert node.states("near", 1, 2) == ["skipped", "pending"]
        assert await node.batches() == ["2"]


async def test_what_was_left_out_goes_after_all_once_it_is_said_to_be_final(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, SKIPS) as node:
        await node.save(1)
        await node.save(2)
        await lag(node)
        assert await node.batches() == ["2"]
        await node.save(1, kind="final")
        assert await node.batches() == ["1"]
        assert node.states("near", 1) == ["complete"]


async def test_a_step_that_is_saved_again_frees_the_space_of_its_first_try(tmp_path: Path) -> None:
    keys = f'[[policy]]\nrun = "{RUN}"\ntiers = ["near"]\nskip = true'
    async with SmallNode(tmp_path, keys) as node:
        await node.save(1)
        first = shard(node, 1)
        await node.save(1, session="again")
        await lag(node)
        await node.batches()
        assert node.session(1).publish["near"] is PublishState.SUPERSEDED
        with node.node.catalog.read() as txn:
            again = txn.find_session(RUN, 1, "again")
            row = txn.shard(first.key)
        assert again is not None and again.publish["near"] is PublishState.COMPLETE
        assert row is not None and row.state is ShardState.EVICTABLE


async def test_where_nodes_cannot_agree_nothing_of_theirs_is_held_back_once_a_newer_one_is_here(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, near="every = 3") as node:
        tier = node.node.tiers["near"].tier
        assert tier.capabilities is not None
        tier.capabilities = replace(tier.capabilities, conditional_replace=False)
        for step in (1, 2, 3):
            await node.save(step, writers=2)
            await node.node.catalog.write(partial(note_other, node.session(step).id))
            node.node.changes.tell(node.session(step).id)
        gone = await node.batches()
        assert gone[:2] == ["1", "2"]  # nobody leaves it out, and held back they would fill the cache
        assert "3" not in gone


def note_other(session_id: int, txn: WriteTxn) -> None:
    """The second writer's part is in another node's cache."""
    txn.note_parts(session_id, {1: "other"})


@pytest.mark.expected_logs("rebuilt from the cache's files")
async def test_a_policy_that_changed_since_does_not_make_what_was_saved_transient(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        await node.save(1)
        node.keys = TRANSIENT
        await node.restart()
        await node.save(2)
        await node.lose_catalog()
        assert (node.session(1).is_transient, node.session(2).is_transient) == (False, True)
        node.keys = ""
        await node.lose_catalog()
        assert (node.session(1).is_transient, node.session(2).is_transient) == (False, True)
        assert await node.batches() == ["1"]


async def test_what_a_rule_holds_back_slows_nobody(tmp_path: Path) -> None:
    async with SmallNode(tmp_path, near='every = "6h"') as node:
        node.node.tiers["far"].required = False
        await node.save(1)
        assert await node.batches() == ["1"]
        await node.save(2)
        health = Health(node.node, node.clock, LoopLag(node.clock))
        for _ in range(2):
            assert await node.batches() == []
            await health.step()
            await node.clock.advance(1000)
        assert node.node.budget.dirty_age_s == 0


async def test_copies_that_were_left_out_are_no_proof_of_a_part(tmp_path: Path) -> None:
    """As a kill between the end of a superseded session's copies and its own leaves it."""
    async with SmallNode(tmp_path) as node:
        await node.save(1, writers=2)
        await node.node.catalog.write(lambda txn: txn.copy_event(shard_of(txn), "near", CopyEvent.SKIP))
        await node.completions["near"].step()
        assert not [key for key in node.stores["near"].objects if "/parts/" in key]


def shard_of(txn: WriteTxn) -> ShardKey:
    """The only one."""
    (row,) = txn.all_shards()
    return row.key


async def test_what_is_urgent_is_known_however_much_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "PARTS_MAX", 2)
    async with SmallNode(tmp_path) as node:
        for step in range(1, 6):
            await node.save(step)
        await node.drains["near"].order.catch_up()
        await node.save(6, kind="final")
        assert await node.batch() == f"{RUN}@6"
        assert await node.batch() == f"{RUN}@1"


async def test_what_has_an_upload_under_way_has_begun_to_go(tmp_path: Path) -> None:
    """Left out, it would leave its parts on the tier when it goes from the cache."""
    async with SmallNode(tmp_path, SKIPS) as node:
        assert await node.batches() == []  # what an earlier process had begun was looked at
        await node.save(1)
        await node.save(2)
        await node.node.catalog.write(lambda txn: txn.record_upload(shard(node, 1).key, "near", UploadRow("key", "id")))
        await lag(node)
        assert sorted(await node.batches()) == ["1", "2"]


async def test_a_look_for_space_that_takes_long_is_not_repeated_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with SmallNode(tmp_path, TRANSIENT) as node:
        looks = 0

        def slow(*_: object) -> list[CheckpointRow]:
            nonlocal looks
            looks += 1
            node.clock._now_s += 0.1
            return []

        monkeypatch.setattr(evict, "expendable", slow)
        for _ in range(5):
            await node.evictor.evict(1)
        assert looks == 1
        await node.clock.advance(evict.REST_FACTOR * 0.1)
        await node.evictor.evict(1)
        assert looks == 2
