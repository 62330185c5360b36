"""Nodes that say something of the same run at once, and what another one said meanwhile: nothing of it is lost."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from forebay_gateway.core.errors import Corrupt, ForebayError, InvalidArgument, PermissionDenied, Unsupported
from forebay_gateway.core.layout import verdicts_key
from forebay_gateway.core.records import CheckpointRow, SessionRow
from forebay_gateway.paths import verdicts
from forebay_gateway.paths.verdicts import Book
from forebay_gateway.tiers.memory import MemoryTier
from forebay_gateway.tiers.monitor import MonitoredTier
from paths.joint_kit import RUN, Job, JobNode, job

EVERY_3 = f'[[policy]]\nrun = "{RUN}"\nevery = 3\n'


async def test_a_word_that_was_read_while_another_was_said_is_heeded(tmp_path: Path) -> None:
    """Who decides is refused once, since a pin elsewhere has taken a skip back: it reads that, and does so as well."""
    async with job(tmp_path, EVERY_3) as all_nodes:
        first, other = all_nodes.nodes
        for step in (1, 2, 3):
            await all_nodes.save(step)
            await all_nodes.turns()
        assert all_nodes.where(2) == [["skipped"]] * 2
        await other.retention.pin(RUN, 2, True)
        await other.turn()
        assert (2, True) in all_nodes.verdicts()
        await all_nodes.save(4)
        await other.announcer.step()
        three = first.session(3)
        assert three is not None
        await first.joint.say(three, goes=True)  # before its next look at the document
        await all_nodes.turns(20, 60.0)
        assert all_nodes.where(2) == [["complete"]] * 2


async def test_a_restart_that_says_something_first_still_heeds_what_was_said(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3) as all_nodes:
        first, other = all_nodes.nodes
        for step in (1, 2, 3):
            await all_nodes.save(step)
            await all_nodes.turns()
        await other.retention.pin(RUN, 2, True)
        await other.turn()
        await first.restart()
        three = first.session(3)
        assert three is not None
        await first.joint.say(three, goes=True)
        await all_nodes.turns(20, 60.0)
        assert all_nodes.where(2) == [["complete"]] * 2


# -- what was left out, and one node without the rule had brought to the tier ------------------------------------------------


def has_record(all_nodes: Job, step: int, writer: int) -> bool:
    return any(f"step-{step:012d}/" in key and key.endswith(f"/parts/{writer}.json") for key in all_nodes.store.objects)


async def until_withdrawn(all_nodes: Job, *, but: Sequence[JobNode] = ()) -> None:
    """Writer 1's node has begun to take its part of step 2 away."""
    for _ in range(60):
        await all_nodes.turns(1, 5.0, but=but)
        if not has_record(all_nodes, 2, 1):
            break
    assert all_nodes.shards(2)[:1] == ["w1.bin"]
    assert not has_record(all_nodes, 2, 1)


async def left_out_by_one(all_nodes: Job) -> None:
    """Step 2 is skipped where there is a rule; elsewhere it went."""
    for step in (1, 2, 3):
        await all_nodes.save(step)
        await all_nodes.turns()
    assert all_nodes.nodes[0].where(2) == ["skipped"]
    assert all_nodes.nodes[1].where(2) == ["pending"]
    assert has_record(all_nodes, 2, 1)


async def test_what_was_taken_away_again_can_still_be_pinned(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3, nodes=3, others="") as all_nodes:
        await left_out_by_one(all_nodes)
        await all_nodes.turns(40, 10.0)
        assert all_nodes.where(2) == [["skipped"]] * 3
        assert all_nodes.shards(2) == []
        for node in all_nodes.nodes:
            await node.retention.pin(RUN, 2, True)
        await all_nodes.turns(40, 10.0)
        assert all_nodes.where(2) == [["complete"]] * 3
        assert all_nodes.shards(2) == ["w0.bin", "w1.bin", "w2.bin"]


async def test_what_is_taken_back_while_it_is_being_taken_away_stays(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3, others="") as all_nodes:
        await left_out_by_one(all_nodes)
        await until_withdrawn(all_nodes)
        await all_nodes.nodes[0].retention.pin(RUN, 2, True)
        for _ in range(40):
            await all_nodes.turns(1, 10.0)
            assert "w1.bin" in all_nodes.shards(2)
        assert all_nodes.where(2) == [["complete"]] * 2
        assert all_nodes.shards(2) == ["w0.bin", "w1.bin"]


async def test_no_manifest_names_what_is_being_taken_away(tmp_path: Path) -> None:
    """A third node has read the record that goes, before it went."""
    async with job(tmp_path, EVERY_3, nodes=3, others="") as all_nodes:
        first, _, third = all_nodes.nodes
        await left_out_by_one(all_nodes)

        async def has_not_come_to_it(session: SessionRow) -> None:
            return None

        third.joint.look_if_stuck = has_not_come_to_it
        await until_withdrawn(all_nodes)
        await first.clock.advance(10.0)
        await first.retention.pin(RUN, 2, True)
        for _ in range(20):
            await first.drains["pfs"].step()  # it brings its part out, and does not come to look for the others'
            await first.clock.advance(1.0)
        await first.completions["pfs"].step()
        assert has_record(all_nodes, 2, 0)
        await third.turn(30.0)
        assert not all_nodes.is_complete(2)
        await all_nodes.turns(60, 10.0)
        assert all_nodes.where(2) == [["complete"]] * 3
        assert all_nodes.shards(2) == ["w0.bin", "w1.bin", "w2.bin"]


# -- a document that cannot be used -----------------------------------------------------------------------------------------


@pytest.mark.expected_logs("nothing of this run is left out here")
@pytest.mark.parametrize("error", [Corrupt, InvalidArgument, Unsupported])
async def test_a_document_that_cannot_be_read_keeps_nothing_from_going(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[ForebayError]
) -> None:
    async def unreadable(tier: MonitoredTier, run: str) -> Book:
        raise error("for a test")

    monkeypatch.setattr(verdicts, "read_book", unreadable)
    async with job(tmp_path, EVERY_3) as all_nodes:
        await all_nodes.save(1, 2, 3)
        await all_nodes.turns(20)
        assert all_nodes.where(1, 2, 3) == [["complete"] * 3] * 2


async def test_a_word_that_is_refused_for_want_of_rights_is_said_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refused(tier: MonitoredTier, book: Book, document: object) -> Book:
        raise PermissionDenied("for a test")

    async with job(tmp_path, EVERY_3) as all_nodes:
        with monkeypatch.context() as patch:
            patch.setattr(verdicts, "write_book", refused)
            await all_nodes.save(1)
            await all_nodes.turns(3)
            assert all_nodes.shards(1) == []
            assert {node.node.tiers["pfs"].state.value for node in all_nodes.nodes} == {"ok", "denied"}
        await all_nodes.nodes[0].node.tiers["pfs"].step()
        await all_nodes.turns()
        assert all_nodes.where(1) == [["complete"]] * 2


@pytest.mark.expected_logs("a document of verdicts is damaged")
async def test_a_skip_whose_word_is_lost_is_said_anew_by_who_waits_for_the_others(tmp_path: Path) -> None:
    """A node without the rule has brought its part out, and nobody can tell it any more that the others never will."""
    async with job(tmp_path, EVERY_3, others="") as all_nodes:
        await left_out_by_one(all_nodes)
        MemoryTier("pfs", all_nodes.store)._store(verdicts_key(RUN), b'{"format": "forebay.verdicts", "ru')
        await all_nodes.turns(60, 30.0)
        assert all_nodes.where(2) == [["complete"]] * 2
        assert all_nodes.shards(2) == ["w0.bin", "w1.bin"]


# -- what is announced while its checkpoint goes -----------------------------------------------------------------------------


@pytest.mark.parametrize("keys", ["", f'[[policy]]\nrun = "{RUN}"\ntransient = true\n'], ids=["deleted", "transient"])
async def test_nothing_stays_announced_of_what_goes_meanwhile(tmp_path: Path, keys: str) -> None:
    async with job(tmp_path, keys) as all_nodes:
        _, other = all_nodes.nodes
        await other.part(1, 1, 2)
        put, went = other.shared.put_small, []

        async def put_late(key: str, data: bytes, **conditions: Any) -> Any:
            """It has gone out of the cache before the document is there."""
            if "/announce/" in key and not went:
                went.append(key)
                row = checkpoint_of(other)
                assert row is not None
                if keys:
                    await other.retention.drop_cache_only(row)
                else:
                    await other.retention.delete(RUN, 1, force=True, dry_run=False)
            return await put(key, data, **conditions)

        other.shared.put_small = put_late  # type: ignore[method-assign]
        await other.announcer.step()
        await other.retention.step()
        assert went and checkpoint_of(other) is None
        assert [key for key in all_nodes.store.objects if "/announce/" in key] == []


def checkpoint_of(node: JobNode) -> CheckpointRow | None:
    with node.node.catalog.read() as txn:
        return txn.checkpoint(RUN, 1)
