"""Keys on a tier: as the contract writes them, distinct for distinct things, and readable back."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_gateway.core import layout
from forebay_wire.names import session8


def test_keys_are_those_of_the_contract() -> None:
    short = session8("job-1")
    assert layout.step_dir("team/llama", 42) == "team/llama/step-000000000042"
    assert layout.shard_key("team/llama", 42, "job-1", "a/b.pt") == f"team/llama/step-000000000042/{short}/a/b.pt"
    assert layout.part_key("r", 1, "job-1", 3) == f"r/step-000000000001/{short}/.forebay/parts/3.json"
    assert layout.manifest_key("r", 1) == "r/step-000000000001/manifest.json"
    assert layout.current_key("r", 1) == "r/step-000000000001/current"
    assert layout.announce_key("r", 1, "job-1", 3) == f".forebay/announce/r/step-000000000001/{short}/3.json"


@given(st.integers(0, 2**64 - 1))
def test_a_step_directory_reads_back(step: int) -> None:
    assert layout.parse_step_dir(layout.step_dir("run", step).rpartition("/")[2]) == step


@pytest.mark.parametrize(
    "segment",
    [
        "step-1",
        "step-00000000001",
        "step-0000000000001",
        "step-18446744073709551616",
        "step-000000000001\n",
        "step--00000000001",
        "Step-000000000001",
        "step-00000000000a",
        "step-١١١١١١١١١١١١",
        "",
    ],
)
def test_what_is_no_step_directory(segment: str) -> None:
    assert layout.parse_step_dir(segment) is None


@given(st.text())
def test_only_canonical_names_are_step_directories(segment: str) -> None:
    step = layout.parse_step_dir(segment)
    assert step is None or layout.step_dir("r", step) == f"r/{segment}"


def test_steps_sort_as_text_up_to_twelve_digits() -> None:
    steps = [0, 9, 10, 99_999, 10**11, 10**12 - 1]
    assert sorted(layout.step_dir("r", step) for step in steps) == [layout.step_dir("r", step) for step in steps]
