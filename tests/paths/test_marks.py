"""Pins, holds, deletions and roots outlive the catalog: in a document that is written first, and set again from it."""

import contextlib
import shutil
from pathlib import Path

import pytest

from forebay import AsyncClient
from forebay_gateway.base import failpoints
from forebay_gateway.cache.marks import MARKS, Going, Marks, Pin, read_marks, write_marks
from forebay_gateway.core.errors import Corrupt, ForebayError
from forebay_gateway.paths.pins import pinned_steps
from paths.kit import client_of, serving, tier, until

FULL = Marks((Pin("a/b", 1),), (Going("a/b", 2, (3, 4)),), {"held:pfs": b"1", "root:pfs:/x": b"\x00\xff"})


def test_every_bit_of_the_document_counts(tmp_path: Path) -> None:
    assert read_marks(tmp_path) is None
    write_marks(tmp_path, FULL)
    assert read_marks(tmp_path) == FULL
    assert [path.name for path in tmp_path.iterdir()] == [MARKS]
    data = bytearray((tmp_path / MARKS).read_bytes())
    for at in range(len(data)):
        for bit in (1, 32):
            data[at] ^= bit
            (tmp_path / MARKS).write_bytes(data)
            with contextlib.suppress(Corrupt):
                assert read_marks(tmp_path) == FULL, at
            data[at] ^= bit
    (tmp_path / MARKS).write_bytes(data[:-1])
    with pytest.raises(Corrupt):
        read_marks(tmp_path)


async def save(directory: Path, *steps: int) -> None:
    async with serving(directory, tier(directory / "pfs")) as gateway, client_of(gateway) as client:
        for step in steps:
            async with client.checkpoint("run", step, session="s") as part:
                await part.put("x", bytes([step]) * 100_000)
                await part.commit()
            await client.wait("run", step, "pfs", timeout=30)


@pytest.mark.expected_logs("the catalog is rebuilt", "pinned checkpoints are no longer here")
async def test_a_rebuild_sets_them_again(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    await save(tmp_path, 1, 2, 3)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        for step in (1, 2):
            await client.pin("run", step)
        await client.unpin("run", 2)
        await client.hold("pfs")
        root = {name: value for name, value in read(gateway) if name.startswith("root:")}
        assert root
    shutil.rmtree(tmp_path / "cache-a" / "catalog")
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        found = {each.step: each.pinned for each in await client.checkpoints("run")}
        assert found == {1: True, 2: False, 3: False}
        assert gateway.node.tiers["pfs"].held
        assert dict(read(gateway)).items() >= root.items()
        assert "marks" not in gateway.node.alarms
        await client.unpin("run", 1)
        await client.pin("run", 3)
    # The pinned step is not in the cache any more: that is said, and its pin comes back with it.
    for path in (tmp_path / "cache-a" / "data").iterdir():
        shutil.rmtree(path)
    shutil.rmtree(tmp_path / "cache-a" / "catalog")
    (tmp_path / "cache-a" / "catalog").mkdir()
    (tmp_path / "cache-a" / "catalog" / "owner").write_text("a\n")
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        assert "run/3" in gateway.node.alarms["marks"][0]
        await client.pin("run", 1)  # what changes meanwhile leaves it in the document
        await client.unpin("run", 1)
        assert read_marks(tmp_path / "cache-a").waiting == (Pin("run", 3),)  # type: ignore[union-attr]
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await until(lambda: bool(gateway.node.usable_tiers()))
        assert {each.step: each.pinned for each in await client.checkpoints("run")} == {1: False, 2: False, 3: True}
        await client.unpin("run", 3)
        marks = read_marks(tmp_path / "cache-a")
        assert marks is not None and (marks.pins, marks.waiting) == ((), ())


def read(gateway: object) -> list[tuple[str, bytes]]:
    with gateway.node.catalog.read() as txn:  # type: ignore[attr-defined]
        return list(txn.settings())


@pytest.mark.expected_logs("the catalog is rebuilt")
async def test_a_deletion_names_its_sessions_and_no_others(tmp_path: Path) -> None:
    """What was begun goes on without the catalog that knew it; what was saved anew under the same name stays."""
    (tmp_path / "pfs").mkdir()
    await save(tmp_path, 1, 2)
    cache = tmp_path / "cache-a"
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway:
        with gateway.node.catalog.read() as txn:
            row = txn.checkpoint("run", 1)
        assert row is not None
    write_marks(cache, Marks(going=(Going("run", 1, row.session_ids), Going("run", 2, (77,)))))
    (tmp_path / "pfs" / "run" / "step-000000000001" / "manifest.json").unlink()
    shutil.rmtree(cache / "catalog")
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        assert [each.step for each in await client.checkpoints("run")] == [2]
        await until(lambda: not list((tmp_path / "pfs").glob("run/step-000000000001/*/x")))
        await until(lambda: (marks := read_marks(cache)) is not None and not marks.going)
        assert gateway.node.catalog.new_id() > 77  # which a deletion named


@pytest.mark.expected_logs("marks.json")
async def test_a_mark_that_cannot_be_kept_is_refused_and_a_deletion_is_not(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    await save(tmp_path, 1)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        with failpoints.armed("durable.before_fsync=all*error:ENOSPC"):
            with pytest.raises(ForebayError):
                await gateway.node.marks.change(lambda marks: FULL, lambda txn: txn.set_pinned("run", 1, True))
            assert not (await client.describe("run", 1)).pinned
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        with failpoints.armed("durable.before_fsync=all*error:ENOSPC"):
            await client.delete("run", 1)
        assert gateway.node.catalog.is_failed is False


@pytest.mark.expected_logs("pins and deletions")
async def test_a_damaged_document_is_told_and_written_anew(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    await save(tmp_path, 1)
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        await client.pin("run", 1)
    (tmp_path / "cache-a" / MARKS).write_bytes(b"{")
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        assert "damaged" in gateway.node.alarms["marks"][0]
        assert (await client.describe("run", 1)).pinned  # the catalog knew it
    assert read_marks(tmp_path / "cache-a").pins == (Pin("run", 1),)  # type: ignore[union-attr]


@pytest.mark.expected_logs("pinned checkpoints are no longer here")
async def test_a_pin_without_its_checkpoint_waits_and_can_be_lifted(tmp_path: Path) -> None:
    """What is pinned is not deleted: the catalog has lost it, as yet unnoticed, and a rebuild will find it."""
    (tmp_path / "pfs").mkdir()
    await save(tmp_path, 1)
    cache = tmp_path / "cache-a"
    write_marks(cache, Marks(pins=(Pin("run", 1), Pin("run", 8)), waiting=(Pin("run", 9),)))
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        assert (await client.describe("run", 1)).pinned
        marks = read_marks(cache)
        assert marks is not None and (marks.pins, marks.waiting) == ((Pin("run", 1),), (Pin("run", 8), Pin("run", 9)))
        assert gateway.node.marks.waiting_steps("run") == {8, 9}
        assert "run/8" in gateway.node.alarms["marks"][0]
        for step in (8, 9):
            await save_here(client, step)
            await client.unpin("run", step)
        marks = read_marks(cache)
        assert marks is not None and marks.waiting == ()


async def test_a_pin_goes_with_the_last_part_that_is_aborted(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        parts = [client.checkpoint("run", 1, session="s", writer=writer, writers=2) for writer in range(2)]
        for number, part in enumerate(parts):
            await part.put(f"x{number}", b"x")
        await client.pin("run", 1)
        await parts[0].abort()
        assert read_marks(tmp_path / "cache-a").pins == (Pin("run", 1),)  # type: ignore[union-attr]
        await parts[1].abort()
    assert read_marks(tmp_path / "cache-a").pins == ()  # type: ignore[union-attr]
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        assert "marks" not in gateway.node.alarms
        await save_here(client, 1)
        assert not (await client.describe("run", 1)).pinned


async def save_here(client: AsyncClient, step: int) -> None:
    async with client.checkpoint("run", step, session="s") as part:
        await part.put("x", b"x")
        await part.commit()


async def test_a_pin_that_waits_keeps_its_checkpoint_on_the_tier(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    await save(tmp_path, 1)
    write_marks(tmp_path / "cache-a", Marks(waiting=(Pin("run", 9),)))
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway:
        (pfs,) = gateway.node.tiers.values()
        await until(lambda: pfs.usable)
        assert await pinned_steps(gateway.node, pfs, "run") == {9}
        assert len(list((tmp_path / "pfs" / ".forebay" / "pins").rglob("000000000009*"))) == 1
