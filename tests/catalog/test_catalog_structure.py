"""One flipped bit in whatever holds the catalog's trees together: the look at the pages finds it; LMDB alone would not."""

import os
import random
import sys
from pathlib import Path

import pytest

from catalog.kit import begin, commit, opened, put
from catalog.places import Spans, draw, flip_bit, places
from forebay_gateway.catalog import CatalogDamaged, pages
from forebay_gateway.catalog.schema import DATABASE_NAMES
from forebay_gateway.catalog.structure import check_trees
from forebay_gateway.catalog.trial import read_all, trial
from soak.form import SOAK

# A flip in these always contradicts something else in the file's own structure.
HELD_TOGETHER = (
    "branch page: head",
    "branch page: pointers",
    "branch page: entry's head",
    "leaf page: head",
    "leaf page: pointers",
    "leaf page: entry's head",
    "pointer to a long value",
    "long value: head",
    "value of free list",
    "value of databases",
)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A closed catalog with every kind of page, the free list's own branches aside."""
    return tmp_path_factory.mktemp("sound") / "c" / "data.mdb"


@pytest.fixture
async def data(sound: Path) -> Path:
    if not sound.exists():
        async with opened(sound.parent) as catalog:
            for step in range(3):
                session = await begin(catalog, step=step)
                await put(catalog, session, *(f"shard-{number}" for number in range(200)))
                await catalog.write(lambda txn, step=step: txn.set_setting(f"long-{step}", b"x" * 9000))
                await commit(catalog, session)
            await catalog.write(lambda txn: txn.set_setting("long-1", None))
    return sound


def check(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        check_trees(descriptor, pages.newest_meta(descriptor))
    finally:
        os.close(descriptor)


def test_every_kind_of_place_is_there(data: Path) -> None:
    found = places(data)
    assert set(found) >= {*HELD_TOGETHER, "free page", "slack", "newest meta page", "key of shards", "value of copies"}
    assert {name.removeprefix("value of ") for name in found} & set(DATABASE_NAMES)
    check(data)
    read_all(data.parent)


def test_a_bit_in_what_holds_the_trees_together_is_found(data: Path) -> None:
    spans, chance = places(data), random.Random(20260701)
    missed = []
    for kind in HELD_TOGETHER:
        for _ in range(150 if SOAK else 12):
            offset, bit = draw(spans, kind, chance)
            if is_idle(data, spans, kind, offset):
                continue
            flip_bit(data, offset, bit)
            try:
                check(data)
                missed.append((kind, offset, bit))
            except CatalogDamaged:
                pass
            finally:
                flip_bit(data, offset, bit)
    assert missed == []
    check(data)


def is_idle(data: Path, spans: Spans, kind: str, offset: int) -> bool:
    """Nobody reads it: the pad of a page's head, and of a tree's record."""
    start = max(begin for begin, length in spans[kind] if begin <= offset)
    if kind.endswith(": head"):
        return offset - start in (8, 9)
    return kind == "value of databases" and offset - start < 4


async def test_a_bit_that_kills_who_reads_it_is_told_by_the_trial(data: Path) -> None:
    """A page's number far behind the file's end: LMDB maps nothing there."""
    assert await trial(data.parent) == ""
    assert await trial(data.parent / "nowhere") == ""
    (offset, _), *_ = places(data)["branch page: entry's head"]
    flip_bit(data, offset + 3, 4)
    try:
        assert "data.mdb" in await trial(data.parent)
    finally:
        flip_bit(data, offset + 3, 4)


@pytest.mark.expected_logs("could not be read on trial")
async def test_a_child_that_dies_is_damage(data: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the look at the pages does not know of."""
    real = sys.executable
    for line, said in (
        ("import os, signal; os.kill(os.getpid(), signal.SIGBUS)", "dies of SIGBUS"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", ""),  # the machine's doing
        ("import sys; sys.exit(1)", ""),
    ):
        python = tmp_path / "python"
        python.write_text(f"#!{real}\n{line}\n")
        python.chmod(0o755)
        monkeypatch.setattr("forebay_gateway.catalog.trial.sys.executable", str(python))
        assert said in await trial(data.parent) if said else await trial(data.parent) == ""
