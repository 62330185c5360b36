"""The mutation check knows every safeguard: each entry fits the code once, and no sync, comparison or condition lacks one."""

import pytest

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
