"""The figures' table: what it sums, and that it says so where a thing was lost, leaked, or not counted at all."""

import json
from pathlib import Path

import pytest

from soak import form
from soak.figures import reported
from soak.report import summary, table


def test_figures_are_summed_over_documents() -> None:
    documents = {
        "a": {"held": True, "crash_rounds": 3, "acknowledged_bytes": 1000, "lost_bytes": 0, "tried": 5, "leaked_files": 1},
        "b": {"held": False, "crash_rounds": 4, "acknowledged_bytes": 234, "lost_bytes": 9, "leaked_uploads": 2},
        "c": {"failpoints_passed": ["x"], "failpoints_known": ["x", "y"]},
        "d": {"failpoints_passed": ["x"], "failpoints_known": ["x", "y"], "flips_made": 4, "flips_found": 3, "tried": 2},
        "mutations": {"mutations": 9, "survived": ["a sync"]},
        "fuzz": {"inputs": 70, "broken_targets": ["names"]},
    }
    found = dict(summary(documents))
    assert found["crash rounds survived"] == "3"  # of a test that failed none counts
    assert found["failpoints covered"] == "1 of 2 (not: y)"
    assert found["calls tried under a fault"] == "7"
    assert (found["bytes acknowledged"], found["bytes lost"]) == ("1,234", "9")
    assert found["bit flips found, of those made"] == "3 of 4"
    assert (found["leaked files"], found["leaked uploads"]) == ("1", "2")
    assert found["safeguards taken out one at a time, and noticed"] == "9, 8"
    assert found["inputs that fuzzing made"] == "70"
    assert found["readers of outside bytes that one broke"] == "1"
    assert found["documents of tests that did not hold"] == "1 (b)"


def test_what_nobody_counted_is_no_zero() -> None:
    assert dict(summary({}))["bytes lost"] == "not counted"
    assert dict(summary({}))["readers of outside bytes that one broke"] == "not counted"


def test_a_document_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "of_a_test.json").write_text(
        '{"held": true, "kills": 12345, "points": ["a", "b"], "of": {"x": 1}, "rate": 0.5, "failpoints_known": ["a"]}'
    )
    assert "| of_a_test | kills 12,345, of (x 1), points 2, rate 0.5 |\n" in table(tmp_path)


def test_a_test_that_fails_reports_what_it_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(form.GIVEN, "FOREBAY_RESULTS", str(tmp_path))
    with pytest.raises(AssertionError), reported("loses", lambda: {"lost_bytes": 7}, crash_rounds=0) as figures:
        figures["crash_rounds"] += 1
        raise AssertionError
    assert json.loads((tmp_path / "loses.json").read_text()) == {"crash_rounds": 1, "held": False, "lost_bytes": 7}
    assert "| bytes lost | 7 |" in table(tmp_path)


def test_documents_of_one_kind_are_one_line(tmp_path: Path) -> None:
    (tmp_path / "failpoints-0.json").write_text('{"held": true, "crash_rounds": 2, "failpoints_passed": ["a", "b"]}')
    (tmp_path / "failpoints-care.json").write_text('{"crash_rounds": 1, "failpoints_passed": ["c"]}')
    assert "| failpoints | crash_rounds 3, documents 2, failpoints_passed 3 |\n" in table(tmp_path)
