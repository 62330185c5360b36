"""The parts of care that only compare: rows with files, ids, where a catalog goes aside, when a shard may go."""

import inspect
import shutil
from pathlib import Path

import msgspec
import pytest

from forebay.cli.care import _say_garbage, _seconds, collect
from forebay.types import Garbage as ToldGarbage
from forebay_gateway.cache.footer import disk_size
from forebay_gateway.cache.layout import FoundFile
from forebay_gateway.core.errors import NotFound, Unavailable
from forebay_gateway.core.records import PublishState, SessionRow, ShardKey, ShardRow
from forebay_gateway.core.states import ShardState
from forebay_gateway.movers.jobs import ShardItem
from forebay_gateway.paths.care.fsck import file_problem, part_file_problem
from forebay_gateway.paths.care.gc import SPARED_S, Garbage, as_finding
from forebay_gateway.paths.care.lock import Maintenance
from forebay_gateway.paths.care.passes import ScrubState, decode_state
from forebay_gateway.paths.care.proof import BYTES_A_JOB, ITEMS_A_JOB, batches
from forebay_gateway.paths.care.quarantine import parse_id
from forebay_gateway.paths.care.rebuild import (
    LOST,
    config_option,
    damage_note,
    is_being_rebuilt,
    last_aside,
    note_damage,
    rebuild_ended,
    set_aside,
)
from forebay_gateway.paths.safety import is_published, required_of
from forebay_wire.manifest import PartRecord

SIZE, CHUNK = 100_000, 1 << 16


def row(state: ShardState, size: int = SIZE) -> ShardRow:
    on_disk = 0 if state is ShardState.EVICTED else disk_size(size, CHUNK)
    return ShardRow(1, 2, 0, "name", size, CHUNK, 7, state, on_disk)


def file(size: int) -> FoundFile:
    return FoundFile("shard", Path("x"), size, 1, 2)


GOOD = disk_size(SIZE, CHUNK)


@pytest.mark.parametrize(
    ("state", "found", "kind"),
    [
        (ShardState.SEALED, file(GOOD), None),
        (ShardState.EVICTABLE, file(GOOD), None),
        (ShardState.SEALED, None, "file_missing"),
        (ShardState.EVICTABLE, file(GOOD - 4096), "file_length"),
        (ShardState.EVICTED, None, None),
        (ShardState.EVICTED, file(GOOD), None),
        (ShardState.EVICTING, file(GOOD), None),
        (ShardState.QUARANTINED, file(GOOD), "quarantined"),
        (ShardState.QUARANTINED, None, "quarantined"),
    ],
)
def test_a_row_against_its_file(state: ShardState, found: FoundFile | None, kind: str | None) -> None:
    problem = file_problem(row(state), found)
    assert (problem and problem[0]) == kind


@pytest.mark.parametrize(("state", "found"), [(ShardState.SEALED, file(GOOD)), (ShardState.EVICTED, None)])
def test_what_a_row_counts_for_its_file(state: ShardState, found: FoundFile | None) -> None:
    counted = msgspec.structs.replace(row(state), disk_size=row(state).disk_size + 4096)
    problem = file_problem(counted, found)
    assert problem is not None and problem[0] == "disk_size" and str(counted.disk_size) in problem[1]


@pytest.mark.parametrize(
    ("age_s", "remedy"),
    [(SPARED_S, "`forebay gc --apply` deletes it"), (3600.0, "in 23.0 h, when it is 24 h old"), (None, "")],
)
def test_what_fsck_says_of_leftovers_is_what_gc_does(age_s: float | None, remedy: str) -> None:
    found = as_finding(Garbage("superseded", "pfs", "path", "a session", age_s, deletable=age_s is not None))
    assert remedy in found.remedy and bool(remedy) == bool(found.remedy)
    assert ("gc` leaves it" in found.what) == (age_s is None)
    default = inspect.signature(collect).parameters["older_than"].default
    assert _seconds(default) == SPARED_S


def test_a_tier_that_was_not_asked_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _say_garbage([ToldGarbage("not_asked", "pfs", "", "the tier cannot be reached: no route", None, False, "")], False, "24h")
    said = capsys.readouterr().out.splitlines()
    assert said == [
        "not asked: pfs (the tier cannot be reached: no route)",
        "0 would be deleted, 0 left alone; not asked: pfs",
    ]


def record(writer: int = 0) -> PartRecord:
    return PartRecord("run", 1, "s", writer, 2, "node", ())


def test_a_part_file_against_the_catalog(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    assert "gone" in part_file_problem(path, record())[0]
    path.write_bytes(record().to_json())
    assert part_file_problem(path, record()) == ("", False)
    assert "other shards" in part_file_problem(path, record(writer=1))[0]
    data = bytearray(record().to_json())
    for at in range(len(data)):  # every single bit counts
        data[at] ^= 1
        path.write_bytes(data)
        what, newer = part_file_problem(path, record())
        assert what and not newer, at
        data[at] ^= 1


@pytest.mark.parametrize("id_", ["", "1", "1-", "-2", "1-2-3", "a-b", "1-٣", "1 -2", f"1-{2**64}", "1" * 30 + "-2", "@pfs"])
def test_what_is_no_id_names_nothing(id_: str) -> None:
    with pytest.raises(NotFound):
        parse_id(id_)


def test_ids() -> None:
    assert parse_id("12-34") == (ShardKey(12, 34), "")
    assert parse_id("12-34@pfs") == (ShardKey(12, 34), "pfs")


def test_one_command_at_a_time() -> None:
    lock = Maintenance()
    with lock.hold("fsck"), pytest.raises(Unavailable, match=r"forebay fsck.*is running.*forebay gc"), lock.hold("gc"):
        raise AssertionError("two at once")
    with pytest.raises(ValueError, match="inside"), lock.hold("gc"):
        raise ValueError("inside")
    with lock.hold("repair"):
        pass


def item(size: int) -> ShardItem:
    return ShardItem(1, 2, "key", size, CHUNK, 0, b"")


def test_jobs_are_neither_long_nor_large() -> None:
    many = [(row(ShardState.SEALED), item(1)) for _ in range(2 * ITEMS_A_JOB + 1)]
    assert [len(batch) for batch in batches(many)] == [ITEMS_A_JOB, ITEMS_A_JOB, 1]
    large = [(row(ShardState.SEALED), item(size)) for size in (BYTES_A_JOB, 1, BYTES_A_JOB, 5)]
    assert [len(batch) for batch in batches(large)] == [1, 2, 1]
    assert batches([]) == []


def test_a_scrub_s_state_survives_and_rubbish_begins_anew() -> None:
    assert decode_state(None) == decode_state(b"rubbish") == ScrubState()
    state = ScrubState(running=True, after=(3, 4), bytes=5)
    assert decode_state(msgspec.json.encode(state)) == state


def test_where_a_catalog_goes_aside(tmp_path: Path) -> None:
    assert (last_aside(tmp_path), damage_note(tmp_path)) == ("", "")  # a new, empty cache has lost nothing
    for number in (1, 2):
        (tmp_path / "catalog").mkdir(exist_ok=True)
        (tmp_path / "catalog" / "data.mdb").write_text(str(number))
        assert damage_note(tmp_path) == ""
        assert set_aside(tmp_path, "why") == last_aside(tmp_path) == f"catalog.damaged-{number}"
        assert is_being_rebuilt(tmp_path)
    rebuild_ended(tmp_path)
    assert not is_being_rebuilt(tmp_path)
    (tmp_path / "catalog").rmdir()
    assert set_aside(tmp_path, "why") == ""  # there was none; the note is left all the same
    assert is_being_rebuilt(tmp_path)
    shutil.rmtree(tmp_path / "catalog")
    assert (tmp_path / "catalog.damaged-2" / "data.mdb").read_text() == "2"
    (tmp_path / "data" / "0").mkdir(parents=True)
    (tmp_path / "data" / "0" / "1.shard").touch()
    assert damage_note(tmp_path) == LOST
    (tmp_path / "catalog").mkdir()
    note_damage(tmp_path, RuntimeError("a row is no row"))
    assert damage_note(tmp_path) == "a row is no row"


def test_the_command_to_run_names_the_configuration() -> None:
    assert config_option("/etc/forebay.toml") == " --config /etc/forebay.toml"
    assert config_option("embedded default") == ""


@pytest.mark.parametrize(
    ("publish", "required", "safe"),
    [
        ({}, (), False),  # nobody holds it
        ({"a": PublishState.PENDING}, (), False),
        ({"a": PublishState.COMPLETE}, ("a",), True),
        ({"a": PublishState.COMPLETE}, ("a", "b"), False),
        ({"a": PublishState.COMPLETE, "b": PublishState.PENDING}, ("a",), True),
        ({"a": PublishState.SUPERSEDED}, ("a",), True),
        ({"a": PublishState.SKIPPED}, ("a",), False),  # nobody holds it: it leaves the cache as a whole or not at all
        ({"a": PublishState.SKIPPED, "b": PublishState.COMPLETE}, ("a", "b"), True),
        ({"a": PublishState.SKIPPED, "b": PublishState.PENDING}, ("a", "b"), False),
    ],
)
def test_when_the_tiers_hold_enough(publish: dict[str, PublishState], required: tuple[str, ...], safe: bool) -> None:
    assert is_published(SessionRow(1, "run", 1, "s", 1, publish=publish), required) is safe


def test_only_the_tiers_that_its_policy_names_are_required_of_a_session() -> None:
    session = SessionRow(1, "run", 1, "s", 1, publish={"a": PublishState.COMPLETE}, tiers=("a",))
    assert required_of(session, ("a", "b")) == ("a",)
    assert is_published(session, ("a", "b"))
    transient = SessionRow(1, "run", 1, "s", 1, tiers=())
    assert transient.is_transient
    assert transient.is_cache_only
    assert not is_published(transient, ("a", "b"))
