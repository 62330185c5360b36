"""Fuzzing in little: every reader of outside bytes, by Hypothesis. `fuzz.py` goes on for as long as one likes."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from hostile.fuzz_targets import SEEDS, TARGETS
from hostile.kit import SOAK, report

EXAMPLES = 20_000 if SOAK else 300
cases: dict[str, int] = {}


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    """Something of ours, cut, repeated or changed in a few places."""
    data = bytearray(draw(st.sampled_from(SEEDS)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, max(0, len(data) - 1)))
        match draw(st.integers(0, 3)):
            case 0:
                data[at : at + 1] = draw(st.binary(max_size=6))
            case 1:
                del data[at:]
            case 2:
                data[at:at] = data[: draw(st.integers(0, 40))]
            case _ if data:
                data[at] ^= 1 << draw(st.integers(0, 7))
    return bytes(data)


@pytest.mark.parametrize("target", TARGETS)
def test_outside_bytes_raise_only_what_the_contract_names(target: str) -> None:
    act = TARGETS[target]
    count = 0

    @seed(7)
    @settings(max_examples=EXAMPLES, database=None)
    @given(st.binary(max_size=300) | damaged() | st.text(max_size=60).map(lambda text: text.encode("utf-8", "surrogatepass")))
    def fuzz(data: bytes) -> None:
        nonlocal count
        count += 1
        act(data)

    fuzz()
    cases[target] = count
    report("fuzz", cases=sum(cases.values()), targets=len(cases))


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="atheris is not installed")
def test_the_coverage_guided_fuzzer_runs() -> None:
    script = Path(__file__).with_name("fuzz.py")
    result = subprocess.run(
        [sys.executable, str(script), "put_frames", "-runs=2000"], capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stderr[-2000:]
