"""What smartctl and nvme-cli say of a disk, as several of their versions write it."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_wire.wear import Wear, parse

NVME = {"nvme_smart_health_information_log": {"percentage_used": 12, "data_units_written": 1000, "critical_warning": 0}}
OF_ATA = {"ata_smart_attributes": {"table": [{"id": 9, "value": 1}, {"id": 177, "value": 97}]}}
SAID: list[tuple[object, Wear | None]] = [
    (NVME, Wear(written_bytes=512_000_000, used=0.12)),
    ({"model_name": "A disk", "user_capacity": {"bytes": 7}, **NVME}, Wear("A disk", 7, 512_000_000, 0.12)),
    ({"endurance_used": {"current_percent": 81}}, Wear(used=0.81)),
    (OF_ATA, Wear(used=0.03)),
    ({"smartctl": {"exit_status": 2, "messages": [{"string": "Permission denied"}]}}, Wear(said=("Permission denied",))),
    ({"critical_warning": 4, "percent_used": 105, "data_units_written": 2}, Wear("", None, 1_024_000, 1.05, critical=True)),
    (
        {"critical_warning": {"value": 0, "available_spare": 0}, "percentage_used": "3", "data_units_written": "2"},
        Wear("", None, 1_024_000, 0.03),
    ),
    ([], None),
]


@pytest.mark.parametrize(("answer", "expected"), SAID)
def test_each_program_and_version(answer: object, expected: Wear | None) -> None:
    assert parse(json.dumps(answer)) == expected


@pytest.mark.parametrize("text", ["", "nvme: not found", "\0", "[" * 100_000])
def test_what_is_no_json_of_theirs(text: str) -> None:
    assert parse(text) is None


ODD = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=5)
NAMES = st.sampled_from(
    [
        "nvme_smart_health_information_log",
        "percentage_used",
        "data_units_written",
        "critical_warning",
        "endurance_used",
        "current_percent",
        "ata_smart_attributes",
        "table",
        "id",
        "value",
        "user_capacity",
        "bytes",
        "smartctl",
        "messages",
        "string",
    ]
)


@given(st.recursive(ODD, lambda inner: st.dictionaries(NAMES, inner | st.lists(inner)), max_leaves=20))
def test_odd_answers_are_no_error(answer: object) -> None:
    found = parse(json.dumps(answer))
    assert found is None or found.used is None or found.used >= 0
    assert parse(json.dumps({"ata_smart_attributes": {"table": [{"id": [answer], "value": answer}]}})) == Wear()
