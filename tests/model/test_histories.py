"""Histories that the model has found, each with what must come of it. The world's own checks look at everything else."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from forebay_gateway.base import failpoints
from forebay_gateway.base.durable import TEMP_PREFIX
from forebay_gateway.core.errors import Unavailable
from forebay_gateway.core.layout import current_key, manifest_key
from forebay_gateway.paths.passing import Passing
from forebay_gateway.tiers.base import ObjectInfo
from forebay_gateway.tiers.stream import Checksums, Publish
from model.stand_ins import TemporaryThenName
from model.world import RUN, World

pytestmark = pytest.mark.expected_logs()  # of crashes
DATA, OTHER = b"one" * 1000, b"another"


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.start()
    try:
        yield world
        await world.settle()
        world.check()
        world.check_stores()
        await world.check_reads()
    finally:
        await world.close()


async def until(true: Callable[[], bool]) -> None:
    """A deadline of the test's own ends what never becomes true."""
    while not true():
        await asyncio.sleep(0.001)


async def hit_of(point: str, act: Callable[[], Awaitable[None]]) -> int:
    """At which of the act's failpoints, counted from 0, this one comes; the act is done."""
    real, names = failpoints.hit, list[str]()

    def hit(name: str) -> None:
        names.append(name)
        real(name)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(failpoints, "hit", hit)
        await act()
    return names.index(point)


async def put_without_an_answer(world: World, monkeypatch: pytest.MonkeyPatch, step: int, writer: int, name: str) -> None:
    """Past the cache: it has its name on the tier, which went away before it said so."""
    real: Callable[[str], None] = failpoints.hit

    def hit(point: str) -> None:
        real(point)
        if point == "posix.before_dir_fsync":
            world.outages.add("near")

    with monkeypatch.context() as patched:
        patched.setattr(failpoints, "hit", hit)
        await world.put_through(step, writer, name, DATA)
    assert name not in world.model.parts[step, writer]
    await world.comes_back("near")


async def test_what_was_put_for_a_part_that_was_deleted_goes_though_its_writer_commits_the_part_anew(world: World) -> None:
    await world.put_through(0, 1, "x", DATA, lambda: world.delete(0))
    await world.commit(0, 1)
    await world.complete("near")  # the part's record is there, and does not name it
    await world.tidy()
    assert not any(key.endswith("/x") for key in world.stores["near"].objects)


async def test_what_was_put_for_a_part_that_is_committed_without_it_goes(world: World) -> None:
    await world.put_through(0, 1, "x", DATA, lambda: world.commit(0, 1))
    await world.complete("near")


@pytest.mark.parametrize("ends", ["abort", "commit", "open"])
async def test_what_was_put_for_a_part_that_is_gone_waits_for_the_shard_of_its_name(world: World, ends: str) -> None:
    await world.put_through(2, 0, "x", DATA, lambda: world.abort(2, 0))
    await world.put(2, 0, "x", OTHER)
    await world.tidy()
    if ends == "abort":
        await world.abort(2, 0)
        await world.settle()
        assert not world.stores["near"].objects
    elif ends == "commit":
        await world.commit(2, 0)


async def test_what_an_aborted_part_had_not_heard_of_does_not_turn_up_in_the_next_one(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await world.put(1, 1, "b", DATA)  # so that the session stays
    await put_without_an_answer(world, monkeypatch, 1, 0, "x")
    await world.abort(1, 0)
    await world.put(1, 0, "c", DATA)
    await world.tidy()
    await world.commit(1, 0)


async def test_what_nobody_heard_of_turns_up_in_its_part(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await put_without_an_answer(world, monkeypatch, 1, 0, "x")
    await world.tidy()
    assert world.model.parts[1, 0] == {"x": DATA}


async def test_what_nobody_heard_of_and_was_put_anew_is_the_new_one(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await put_without_an_answer(world, monkeypatch, 1, 0, "x")
    await world.put_through(1, 0, "x", OTHER)
    await world.tidy()
    assert world.model.parts[1, 0] == {"x": OTHER}
    await world.commit(1, 0)


async def test_what_a_kill_left_of_a_shard_goes_though_others_go_past_the_cache_before_it_is_looked_for(world: World) -> None:
    pack = {"a": DATA, "b": OTHER}
    hit = await hit_of("model.written", lambda: world.put_small_through(1, 1, pack))
    await world.crash_in(lambda: world.put_small_through(2, 0, pack), hit)
    assert any(TEMP_PREFIX in key for key in world.stores["near"].objects)
    await world.put_small_through(2, 0, {"c": DATA})


@pytest.mark.parametrize("first", ["complete", "look"])
async def test_a_kill_right_behind_the_manifest_leaves_its_checkpoint_pointed_at(world: World, first: str) -> None:
    for step in (0, 1):
        for writer in (0, 1):
            await world.put_through(step, writer, f"a-{writer}", DATA)  # so that a look goes to the tier
            await world.commit(step, writer)
        await world.drain("near")
        if step == 0:
            hit = await hit_of("complete.after_manifest", lambda: world.complete("near"))
    await world.crash_in(lambda: world.complete("near"), hit)
    assert manifest_key(RUN, 1) in world.stores["near"].objects
    assert current_key(RUN, 1) not in world.stores["near"].links
    if first == "look":
        await world.pin(1, True)
        await world.delete(1)  # refused, once it was looked at everywhere
    await world.settle()  # and what is on the tiers is looked at behind it


async def test_a_part_that_is_aborted_while_a_shard_is_on_its_way_keeps_it_out_of_the_next_one(world: World) -> None:
    await world.put(1, 1, "a", DATA)  # so that the session stays

    async def put_and_abort() -> None:
        await world.put_through(1, 0, "x", DATA, lambda: world.abort(1, 0))

    hit = await hit_of("posix.before_dir_fsync", put_and_abort)
    await world.tidy()
    await world.crash_in(put_and_abort, hit)
    assert any(key.endswith("/x") for key in world.stores["near"].objects)
    await world.put(1, 0, "b", DATA)
    await world.tidy()
    await world.commit(1, 0)


async def test_what_nobody_heard_of_goes_though_the_next_try_breaks_off(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await put_without_an_answer(world, monkeypatch, 1, 0, "x")
    await world.put_broken_through(1, 0, "x", 1000, "damaged")
    await world.tidy()
    assert not any(key.endswith("/x") for key in world.stores["near"].objects)


async def test_a_try_that_comes_while_an_earlier_one_is_looked_at_begins_behind_its_end(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else what is left of the earlier one would be deleted under the name of the later one."""
    await put_without_an_answer(world, monkeypatch, 1, 0, "x")
    node, near = world.paths.node, world.paths.node.tiers["near"].tier
    settled, tries = near.settle, list[asyncio.Task[None]]()

    async def nothing_is_noted() -> None:
        with node.catalog.read() as txn:
            assert [name for name, _ in txn.settings() if name.startswith("leaving:")] == []

    async def settle(key: str) -> None:
        if not tries:
            tries.append(asyncio.create_task(world.put_through(1, 0, "x", OTHER, nothing_is_noted)))
            await until(lambda: 0 in world.paths.writes._receiving.values())
        await settled(key)

    monkeypatch.setattr(near, "settle", settle)
    await world.paths.through.tidier.step()
    await tries[0]
    assert world.model.parts[1, 0] == {"x": OTHER}


async def test_a_deletion_waits_for_who_points_at_a_checkpoint(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in (0, 1):
        for writer in (0, 1):
            await world.put_through(step, writer, f"a-{writer}", DATA)
            await world.commit(step, writer)
        await world.drain("near")
        if step == 0:
            hit = await hit_of("complete.after_manifest", lambda: world.complete("near"))
    await world.crash_in(lambda: world.complete("near"), hit)
    near = world.paths.node.tiers["near"].tier
    point, deletions = near.point, list[asyncio.Task[None]]()

    async def point_late(key: str, target: str) -> None:
        if not deletions:
            deletions.append(asyncio.create_task(world.delete(1)))
            await until(lambda: deletions[0].done())
        await point(key, target)

    monkeypatch.setattr(near, "point", point_late)
    await world.paths.finder.complete(RUN, 1)
    await deletions[0]


@pytest.fixture
def without_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an object store, whose objects have no version before they are there."""
    finish = TemporaryThenName.finish

    async def finish_unknown(stream: TemporaryThenName, proof: Checksums, publish: Publish) -> ObjectInfo:
        return await finish(stream, proof, lambda info: publish(None))

    monkeypatch.setattr(TemporaryThenName, "finish", finish_unknown)


@pytest.mark.usefixtures("without_versions")
async def test_without_versions_what_nobody_heard_of_is_looked_at_though_the_next_try_breaks_off(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put_without_an_answer(world, monkeypatch, 1, 0, "x")
    await world.put_broken_through(1, 0, "x", 1000, "damaged")
    await world.tidy()
    assert world.model.parts[1, 0] == {"x": DATA}


@pytest.mark.usefixtures("without_versions")
async def test_without_versions_what_the_next_try_is_at_is_left_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """An object store would give up the next one's upload too."""
    await put_without_an_answer(world, monkeypatch, 1, 0, "x")
    near, given_up = world.paths.node.tiers["near"].tier, list[str]()
    abort_upload = near.abort_upload
    left = [note.upload_id for _, note in world.paths.through.tidier._noted("near") if isinstance(note, Passing)]

    async def abort(key: str, upload_id: str) -> None:
        given_up.append(upload_id)
        await abort_upload(key, upload_id)

    async def sweep(key: str) -> None:
        given_up.append(f"all of {key}")

    async def tidy() -> None:
        with monkeypatch.context() as patched:
            patched.setattr(near, "abort_upload", abort)
            patched.setattr(near, "sweep", sweep)
            await world.tidy()

    await world.put_through(1, 0, "x", OTHER, tidy)
    assert given_up == left
    assert world.model.parts[1, 0] == {"x": OTHER}


async def test_nobody_puts_a_name_while_it_is_being_deleted(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.put(1, 1, "a", DATA)  # so that the session stays
    await world.put_through(1, 0, "x", DATA, lambda: world.abort(1, 0))
    near, refused = world.paths.node.tiers["near"].tier, list[str]()
    delete = near.delete

    async def delete_late(key: str) -> None:
        with pytest.raises(Unavailable) as caught:
            await world.paths.writes.begin(world.part(1, 0), "x", len(OTHER))
        refused.append(str(caught.value))
        await delete(key)

    monkeypatch.setattr(near, "delete", delete_late)
    await world.paths.through.tidier.step()
    world._sync_open(1, 0)
    assert len(refused) == 1
    assert not any(key.endswith("/x") for key in world.stores["near"].objects)
