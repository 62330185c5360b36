"""The mutation check knows every safeguard: each entry fits the code once, and no sync, comparison or condition lacks one."""

import sys
from pathlib import Path

import pytest

from soak import mutations
from soak.mutations import ROOT, uncovered
from soak.safeguards import MUTATIONS, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_an_entry_fits_the_code(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text(encoding="utf-8").count(mutation.before) == 1
    for name in mutation.tests:
        assert (ROOT / name).exists(), name


def test_no_safeguard_is_without_an_entry() -> None:
    assert uncovered() == []


def test_names_are_distinct() -> None:
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)


@pytest.mark.parametrize(
    ("test", "code", "said"),
    [
        ("assert 'sync' in text", 0, "1 of 1 noticed"),
        ("assert 'write' in text", 1, "NOT NOTICED"),
        ("assert 'flush' in text", 1, "prove nothing"),  # fails with the safeguard, too
        ("'sync' in text or __import__('pytest').exit('cannot go on')", 1, "NOT RUN      a sync\n"),
    ],
)
def test_what_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], test: str, code: int, said: str
) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "thing.py").write_text("write()\nsync()\n")
    (tmp_path / "tests" / "test_thing.py").write_text(
        f"from pathlib import Path\n\ndef test_it():\n    text = Path('thing.py').read_text()\n    {test}\n"
    )
    monkeypatch.setattr(mutations, "ROOT", tmp_path)
    monkeypatch.setattr(mutations, "COPIED", ("tests", "thing.py"))
    monkeypatch.setattr(mutations, "MUTATIONS", [Mutation("a sync", "thing.py", "sync()\n", "", ("tests/test_thing.py",))])
    monkeypatch.setattr(sys, "argv", ["mutations.py"])
    assert mutations.main() == code
    assert said in capsys.readouterr().out
