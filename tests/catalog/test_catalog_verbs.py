"""Every verb of ReadTxn and WriteTxn: what it changes, what it refuses, and that a refusal changes nothing."""

from pathlib import Path

import pytest

from catalog.kit import begin, commit, dump, entry, manifest, opened, put, sealed, verify
from forebay_gateway.catalog import Catalog, WriteTxn
from forebay_gateway.core.errors import AlreadyExists, Corrupt, InvalidArgument, NotFound, Unavailable
from forebay_gateway.core.records import (
    CopyRow,
    PartState,
    PublishState,
    ShardKey,
    ShardRow,
    TierTotals,
    Totals,
    UploadRow,
)
from forebay_gateway.core.states import CopyState, ShardEvent, ShardState

LAST_STEP = 2**64 - 1


async def test_a_session_is_made_once_with_its_checkpoint_and_run(catalog: Catalog) -> None:
    first = await begin(catalog)
    again = await begin(catalog)
    assert again == first
    with catalog.read() as txn:
        assert txn.runs() == ["team/run"]
        checkpoint = txn.checkpoint("team/run", 1)
        assert checkpoint is not None and checkpoint.session_ids == (first.id,)
        assert txn.session(first.id) == txn.find_session("team/run", 1, "s") == first
        assert list(txn.sessions()) == [first]
        assert txn.find_session("team/run", 1, "other") is None and txn.find_session("team/run", 2, "s") is None
        assert txn.checkpoint("team", 1) is None and txn.session(first.id + 100) is None


async def test_a_session_with_other_writers_is_refused_naming_both(catalog: Catalog) -> None:
    await begin(catalog, writers=2)
    with pytest.raises(InvalidArgument, match="2 writers, now 3"):
        await begin(catalog, writers=3)


async def test_a_second_session_joins_the_checkpoint_in_order(catalog: Catalog) -> None:
    first, second = await begin(catalog, session="a"), await begin(catalog, session="b")
    with catalog.read() as txn:
        checkpoint = txn.checkpoint("team/run", 1)
    assert checkpoint is not None and checkpoint.session_ids == (first.id, second.id)


async def test_a_taken_session_id_is_refused(catalog: Catalog) -> None:
    first = await begin(catalog)
    with pytest.raises(AlreadyExists):
        await catalog.write(lambda txn: txn.open_session("team/run", 9, "x", 1, session_id=first.id))
    with catalog.read() as txn:
        assert txn.checkpoint("team/run", 9) is None


async def test_checkpoints_come_by_step_and_only_of_their_run(catalog: Catalog) -> None:
    steps = [5, 0, LAST_STEP, 255, 256, 2**63, 1]
    for step in steps:
        await begin(catalog, run="a", step=step)
    await begin(catalog, run="a/b", step=3)
    with catalog.read() as txn:
        assert [row.step for row in txn.checkpoints("a")] == sorted(steps)
        assert [row.step for row in txn.checkpoints("a/b")] == [3]
        assert list(txn.checkpoints("c")) == []
        assert txn.runs() == ["a", "a/b"]


async def test_longest_names_and_highest_step(catalog: Catalog) -> None:
    run = "/".join(["r" * 255] * 3 + ["r" * 127, "r" * 128])
    assert len(run) == 1024
    names = ["n" * 1023 + last for last in "ab"]
    session = await begin(catalog, run=run, step=LAST_STEP, session="s" * 255)
    keys = await put(catalog, session, *names)
    await commit(catalog, session)
    with catalog.read() as txn:
        assert txn.runs() == [run]
        assert txn.find_session(run, LAST_STEP, "s" * 255) is not None
        for key, name in zip(keys, names, strict=True):
            row = txn.shard_by_name(session.id, name)
            assert row is not None and (row.key, row.name) == (key, name)
        assert txn.shard_by_name(session.id, "n" * 1023) is None


async def test_parts_open_once_and_only_for_writers_of_the_session(catalog: Catalog) -> None:
    session = await begin(catalog, writers=2)
    with catalog.read() as txn:
        parts = txn.parts(session.id)
        assert [(part.writer, part.state) for part in parts] == [(0, PartState.OPEN), (1, PartState.OPEN)]
        assert list(txn.open_parts()) == parts
        assert txn.part(session.id, 1) == parts[1] and txn.part(session.id, 2) is None
    assert await catalog.write(lambda txn: txn.open_part(session.id, 1)) == parts[1]
    with pytest.raises(InvalidArgument):
        await catalog.write(lambda txn: txn.open_part(session.id, 2))
    with pytest.raises(NotFound):
        await catalog.write(lambda txn: txn.open_part(session.id + 50, 0))


async def test_seal_adds_row_name_chunks_and_sums(catalog: Catalog) -> None:
    session = await begin(catalog)
    (key,) = await put(catalog, session, "a/b")
    (empty,) = [ShardKey(session.id, catalog.new_id())]
    await catalog.write(lambda txn: txn.seal(sealed(empty, "empty", writer=1, size=0), b""))
    with catalog.read() as txn:
        assert txn.shard(key) == txn.shard_by_name(session.id, "a/b") == sealed(key, "a/b")
        assert txn.chunks(key) == key.shard_id.to_bytes(4, "little") and txn.chunks(empty) == b""
        assert [row.key for row in txn.shards(session.id)] == [key, empty]
        assert [row.key for row in txn.shards(session.id, 0)] == [key]
        assert [row.key for row in txn.shards(session.id, 1)] == [empty]
        assert [row.key for row in txn.cached()] == [key, empty]
        assert txn.totals() == Totals(16384, 16384, 2, {"pfs": TierTotals(0, 0), "object": TierTotals(0, 0)})
        with pytest.raises(NotFound):
            txn.chunks(ShardKey(session.id, 999))


async def test_seal_refuses_a_name_that_is_there_and_a_committed_part(catalog: Catalog) -> None:
    session = await begin(catalog)
    (key,) = await put(catalog, session, "a")
    with catalog.read() as txn:
        before = dump(txn)
    with pytest.raises(AlreadyExists, match="shard of this name"):
        await put(catalog, session, "a", writer=1)
    with pytest.raises(AlreadyExists, match="id is taken"):
        await catalog.write(lambda txn: txn.seal(sealed(key, "b"), b""))
    with pytest.raises(NotFound):
        await catalog.write(lambda txn: txn.seal(sealed(ShardKey(session.id, 900), "c", writer=5), b""))
    with pytest.raises(ValueError, match="SEALED"):
        row = ShardRow(session.id, 901, 0, "d", 1, 65536, 1, ShardState.EVICTED, 0)
        await catalog.write(lambda txn: txn.seal(row, b""))
    with catalog.read() as txn:
        assert dump(txn) == before
    await commit(catalog, session)
    with pytest.raises(AlreadyExists, match="committed"):
        await put(catalog, session, "late")


async def test_sealing_the_same_shard_again_replaces_it(catalog: Catalog) -> None:
    session = await begin(catalog)
    (key,) = await put(catalog, session, "a")
    await catalog.write(lambda txn: txn.seal(sealed(key, "a", size=5, disk_size=4096), b"new!"))
    with catalog.read() as txn:
        assert txn.totals().used == 4096 and txn.totals() == txn.recount()
        assert txn.chunks(key) == b"new!"


async def test_commit_queues_copies_in_order_of_commits(catalog: Catalog) -> None:
    session = await begin(catalog)
    later = await put(catalog, session, "x", "y", writer=1)
    earlier = await put(catalog, session, "a", "b", writer=0)
    first = await commit(catalog, session, 0)
    second = await commit(catalog, session, 1, tiers=("pfs",))
    assert 0 < first.commit_seq < second.commit_seq
    assert second.publish == {"pfs": PublishState.PENDING, "object": PublishState.PENDING}
    with catalog.read() as txn:
        queue = list(txn.pending("pfs"))
        assert [item.key for item in queue] == earlier + later
        assert [item.order for item in queue] == [first.commit_seq] * 2 + [second.commit_seq] * 2
        assert list(txn.pending("pfs", after=queue[1])) == queue[2:]
        assert list(txn.pending("pfs", after=queue[3])) == []
        assert [item.key for item in txn.pending("object")] == earlier
        part = txn.part(session.id, 0)
        assert part is not None
        assert (part.state, part.shard_count, part.size, part.metadata_json) == (PartState.COMMITTED, 2, 200, "{}")
        assert list(txn.open_parts()) == []
        assert txn.copies(earlier[0]) == {tier: CopyRow(CopyState.PENDING) for tier in ("pfs", "object")}
        assert txn.copy(later[0], "object") is None
        assert txn.totals().tiers == {"pfs": TierTotals(4, 400), "object": TierTotals(2, 200)}
        assert txn.part_progress(session.id, 0, "pfs") == (0, 2, 0, 200)


async def test_a_committed_part_stays_as_it_is(catalog: Catalog) -> None:
    session = await begin(catalog)
    await put(catalog, session, "a")
    await commit(catalog, session, tiers=("pfs",))
    with catalog.read() as txn:
        before = dump(txn)
    await catalog.write(lambda txn: txn.commit_part(session.id, 0, '{"other": 1}', ("pfs", "object"), 77))
    with catalog.read() as txn:
        assert dump(txn) == before


async def test_commit_needs_a_part_and_known_tiers(catalog: Catalog) -> None:
    session = await begin(catalog, writers=1)
    with pytest.raises(NotFound):
        await commit(catalog, session, writer=3)
    await put(catalog, session, "a")
    with catalog.read() as txn:
        before = dump(txn)
    with pytest.raises(InvalidArgument, match="no tier is named 'tape'"):
        await commit(catalog, session, tiers=("pfs", "tape"))
    with catalog.read() as txn:
        assert dump(txn) == before


async def test_orders_never_come_twice_and_never_go_back(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as catalog:
        session = await begin(catalog, writers=3)
        taken = [await catalog.write(lambda txn: txn.next_commit_seq()) for _ in range(3)]
        assert taken == sorted(set(taken))
        await catalog.write(lambda txn: txn.commit_part(session.id, 0, "{}", (), 500))
        row = await commit(catalog, session, 1)
        assert row.commit_seq == 501
        # A part file found late has a lower order: the session keeps the highest.
        row = await catalog.write(lambda txn: txn.commit_part(session.id, 2, "{}", (), 3))
        assert row.commit_seq == 501
    async with opened(tmp_path / "c") as catalog:
        assert await catalog.write(lambda txn: txn.next_commit_seq()) == 502


async def test_add_copies_fills_a_tier_that_came_later(tmp_path: Path) -> None:
    async with opened(tmp_path / "c", tiers=("pfs",)) as catalog:
        session = await begin(catalog)
        keys = await put(catalog, session, "a", "b")
        with pytest.raises(InvalidArgument):
            await catalog.write(lambda txn: txn.add_copies(session.id, 0, "pfs"))
        await commit(catalog, session, tiers=("pfs",))
    async with opened(tmp_path / "c", tiers=("tape", "pfs")) as catalog:
        assert await catalog.write(lambda txn: txn.add_copies(session.id, 0, "tape")) == 2
        assert await catalog.write(lambda txn: txn.add_copies(session.id, 0, "tape")) == 0
        with catalog.read() as txn:
            assert [item.key for item in txn.pending("tape")] == keys == [item.key for item in txn.pending("pfs")]


async def test_a_tier_that_left_the_configuration_keeps_rows_and_number(tmp_path: Path) -> None:
    async with opened(tmp_path / "c", tiers=("pfs", "object")) as catalog:
        session = await begin(catalog)
        (key,) = await put(catalog, session, "a")
        await commit(catalog, session)
        await catalog.write(lambda txn: verify(txn, key, "object"))
    async with opened(tmp_path / "c", tiers=("new",)) as catalog:
        with catalog.read() as txn:
            assert {tier: row.state for tier, row in txn.copies(key).items()} == {
                "pfs": CopyState.PENDING,
                "object": CopyState.VERIFIED,
            }
            assert list(txn.pending("new")) == [] and len(list(txn.pending("pfs"))) == 1
            assert set(txn.totals().tiers) == {"pfs", "object", "new"}


async def test_drop_part_leaves_nothing(catalog: Catalog) -> None:
    with catalog.read() as txn:
        empty = dump(txn, without_meta=True)
    session = await begin(catalog, writers=2)
    keys = await put(catalog, session, "a", "b")
    await put(catalog, session, "c", writer=1)
    await catalog.write(lambda txn: txn.record_upload(keys[0], "pfs", UploadRow("k", "u")))
    rows = await catalog.write(lambda txn: txn.drop_part(session.id, 0))
    assert [row.key for row in rows] == keys
    with catalog.read() as txn:
        assert txn.session(session.id) == session  # writer 1 is still there
        assert txn.shard_by_name(session.id, "a") is None and list(txn.uploads()) == []
    await catalog.write(lambda txn: txn.drop_part(session.id, 1))
    with catalog.read() as txn:
        assert dump(txn, without_meta=True) == empty
        assert txn.totals() == txn.recount() and txn.totals().used == 0
    with pytest.raises(NotFound):
        await catalog.write(lambda txn: txn.drop_part(session.id, 1))


async def test_a_committed_part_is_not_dropped(catalog: Catalog) -> None:
    session = await begin(catalog)
    await put(catalog, session, "a")
    await commit(catalog, session)
    with pytest.raises(AlreadyExists, match="part is committed"):
        await catalog.write(lambda txn: txn.drop_part(session.id, 0))


async def test_drop_session_and_shard_leave_nothing_behind(catalog: Catalog) -> None:
    with catalog.read() as txn:
        empty = dump(txn, without_meta=True)
    session, other = await begin(catalog, session="a"), await begin(catalog, session="b")
    gone, evicted, kept = await put(catalog, session, "x", "y", "z")
    await commit(catalog, session)
    assert await catalog.write(lambda txn: txn.drop_shard(gone)) == sealed(gone, "x")
    assert await catalog.write(lambda txn: txn.drop_shard(gone)) is None
    with catalog.read() as txn:
        assert txn.part_progress(session.id, 0, "pfs") == (0, 2, 0, 200)

    def evict(txn: WriteTxn) -> None:
        verify(txn, evicted)
        for event in (ShardEvent.ALL_VERIFIED, ShardEvent.EVICT, ShardEvent.UNLINKED):
            txn.shard_event(evicted, event)

    await catalog.write(evict)
    rows = await catalog.write(lambda txn: txn.drop_session(session.id))
    assert [row.key for row in rows] == [kept]
    with catalog.read() as txn:
        checkpoint = txn.checkpoint("team/run", 1)
        assert checkpoint is not None and checkpoint.session_ids == (other.id,)
    await catalog.write(lambda txn: txn.drop_session(other.id))
    with catalog.read() as txn:
        assert dump(txn, without_meta=True) == empty
    with pytest.raises(NotFound):
        await catalog.write(lambda txn: txn.drop_session(session.id))


async def test_uploads_are_remembered_until_cleared(catalog: Catalog) -> None:
    session = await begin(catalog)
    (key,) = await put(catalog, session, "a")
    upload = UploadRow("team/run/x", "id-1")
    await catalog.write(lambda txn: txn.record_upload(key, "object", upload))
    with catalog.read() as txn:
        assert txn.upload(key, "object") == upload and txn.upload(key, "pfs") is None
        assert list(txn.uploads()) == [(key, "object", upload)]
    await catalog.write(lambda txn: txn.clear_upload(key, "object"))
    await catalog.write(lambda txn: txn.clear_upload(key, "object"))
    with catalog.read() as txn:
        assert list(txn.uploads()) == []
    with pytest.raises(NotFound):
        await catalog.write(lambda txn: txn.record_upload(ShardKey(1, 99), "object", upload))


async def test_publish_states_and_their_index(catalog: Catalog) -> None:
    late, early = await begin(catalog, step=1, writers=1), await begin(catalog, step=2, writers=1)
    await commit(catalog, early)
    await commit(catalog, late)
    with catalog.read() as txn:
        assert [row.id for row in txn.unpublished("pfs")] == [early.id, late.id]
    row = await catalog.write(lambda txn: txn.set_publish(early.id, "pfs", PublishState.COMPLETE))
    assert row.publish == {"pfs": PublishState.COMPLETE, "object": PublishState.PENDING}
    with catalog.read() as txn:
        assert [row.id for row in txn.unpublished("pfs")] == [late.id]
        assert [row.id for row in txn.unpublished("object")] == [early.id, late.id]
    await catalog.write(lambda txn: txn.set_publish(late.id, "pfs", PublishState.SUPERSEDED))
    await catalog.write(lambda txn: txn.set_publish(early.id, "pfs", PublishState.PENDING))
    with catalog.read() as txn:
        assert [row.id for row in txn.unpublished("pfs")] == [early.id]


async def test_notes_on_a_session(catalog: Catalog) -> None:
    session = await begin(catalog)
    await catalog.write(lambda txn: txn.note_parts(session.id, {1: "n2"}))
    await catalog.write(lambda txn: txn.note_parts(session.id, {0: "n3", 1: "n4"}))
    await catalog.write(lambda txn: txn.note_predecessors(session.id, ["old", "older"]))
    await catalog.write(lambda txn: txn.note_predecessors(session.id, ["older", "oldest"]))
    await catalog.write(lambda txn: txn.set_reason(session.id, "writer 1 differs"))
    await catalog.write(lambda txn: txn.part_recorded(session.id, 0, "pfs"))
    await catalog.write(lambda txn: txn.part_recorded(session.id, 0, "pfs"))
    with catalog.read() as txn:
        row, part = txn.session(session.id), txn.part(session.id, 0)
    assert row is not None and part is not None
    assert (row.known_parts, row.predecessors, row.reason) == (
        {0: "n3", 1: "n4"},
        ("old", "older", "oldest"),
        "writer 1 differs",
    )
    assert part.recorded == ("pfs",)


async def test_pins_and_deletion(catalog: Catalog) -> None:
    session = await begin(catalog)
    assert (await catalog.write(lambda txn: txn.set_pinned("team/run", 1, True))).pinned
    assert not (await catalog.write(lambda txn: txn.set_pinned("team/run", 1, False))).pinned
    with catalog.read() as txn:
        assert txn.deleting() == []
    marked = await catalog.write(lambda txn: txn.mark_deleting("team/run", 1))
    assert marked.deleting
    with catalog.read() as txn:
        assert txn.deleting() == [marked]
    with pytest.raises(Unavailable, match="being deleted") as caught:
        await begin(catalog)
    assert caught.value.retry_after_s == 1
    await catalog.write(lambda txn: txn.drop_session(session.id))
    with catalog.read() as txn:
        assert txn.deleting() == [] and txn.runs() == []
    await begin(catalog)
    for act in (lambda txn: txn.set_pinned("team/run", 5, True), lambda txn: txn.mark_deleting("x", 1)):
        with pytest.raises(NotFound):
            await catalog.write(act)


async def test_settings(catalog: Catalog) -> None:
    await catalog.write(lambda txn: txn.set_setting("held", b"pfs"))
    with catalog.read() as txn:
        assert txn.setting("held") == b"pfs" and txn.setting("other") is None and txn.setting("") is None
    await catalog.write(lambda txn: txn.set_setting("held", None))
    with catalog.read() as txn:
        assert txn.setting("held") is None
    for name in ("", "x" * 512):
        with pytest.raises(InvalidArgument):
            await catalog.write(lambda txn, name=name: txn.set_setting(name, b""))


async def test_an_act_sees_its_own_sums(catalog: Catalog) -> None:
    session = await begin(catalog)

    def act(txn: WriteTxn) -> tuple[Totals, tuple[int, int, int, int]]:
        key = ShardKey(session.id, 900)
        txn.seal(sealed(key, "a"), b"")
        txn.commit_part(session.id, 0, "{}", ("pfs",))
        return txn.totals(), txn.part_progress(session.id, 0, "pfs")

    totals, progress = await catalog.write(act)
    assert (totals.used, totals.tiers["pfs"], progress) == (8192, TierTotals(1, 100), (0, 1, 0, 100))


async def test_ids_rise_and_are_not_given_again_after_their_rows_went(tmp_path: Path) -> None:
    async with opened(tmp_path / "c") as catalog:
        session = await begin(catalog)
        keys = await put(catalog, session, "a", "b")
        await catalog.write(lambda txn: txn.drop_session(session.id))
    async with opened(tmp_path / "c") as catalog:
        assert catalog.new_id() > max(key.shard_id for key in keys)
        catalog.raise_ids(10_000)
        catalog.raise_ids(5)
        assert catalog.new_id() == 10_001


async def test_a_manifest_of_other_bytes_is_not_adopted_over_a_shard_that_is_here(catalog: Catalog) -> None:
    session = await begin(catalog, writers=1)
    (key,) = await put(catalog, session, "x", size=100)
    await commit(catalog, session)
    with catalog.read() as txn:
        before = dump(txn)
    document = manifest([[entry("x", b"other bytes")]])

    def act(txn: WriteTxn) -> None:
        txn.adopt_manifest(document, "pfs", session_id=catalog.new_id(), new_id=catalog.new_id)

    with pytest.raises(Corrupt, match="disagree on shard 'x'"):
        await catalog.write(act)
    with catalog.read() as txn:
        assert dump(txn) == before
        assert txn.shard(key) is not None
