"""Long form and short form of a test: FOREBAY_SOAK=1 (`make soak`) takes all cases, `make test` some that stand for them."""

import os
from collections.abc import Sequence
from typing import TypeVar

SOAK = os.environ.get("FOREBAY_SOAK") == "1"

T = TypeVar("T")


def some(cases: Sequence[T], *standing: T) -> list[T]:
    """All of `cases` in the long form; those `standing` for them otherwise, each of which must be one of them."""
    assert standing
    assert all(case in cases for case in standing), "no such case"
    return list(cases if SOAK else standing)


def every(cases: Sequence[T], step: int) -> list[T]:
    """All of `cases` in the long form, every `step`th otherwise."""
    return list(cases if SOAK else cases[::step])
