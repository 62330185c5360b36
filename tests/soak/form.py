"""Long form and short form of a test: FOREBAY_SOAK=1 (`make soak`) takes all cases, `make test` some that stand for them."""

import os
from collections.abc import Sequence
from typing import TypeVar

# What only the tests read. Processes that a test starts do not inherit these: a gateway says of each that it is not known.
NAMES = ("SOAK", "RESULTS", "CRASH_ROUNDS", "CRASH_SEED", "FLIPS", "SEED", "KEEP", "PING_S", "SIM_SEED", "SIM_TAIL")
OWN = tuple(f"FOREBAY_{name}" for name in NAMES)
GIVEN = {name: value for name in OWN if (value := os.environ.get(name)) is not None}


def given(name: str, otherwise: str = "") -> str:
    """The variable with which the tests were started."""
    assert name in OWN, name
    return GIVEN.get(name, otherwise)


SOAK = given("FOREBAY_SOAK") == "1"

T = TypeVar("T")


def some(cases: Sequence[T], *standing: T) -> list[T]:
    """All of `cases` in the long form; those `standing` for them otherwise, each of which must be one of them."""
    assert standing
    assert all(case in cases for case in standing), "no such case"
    return list(cases if SOAK else standing)


def every(cases: Sequence[T], step: int) -> list[T]:
    """All of `cases` in the long form, every `step`th otherwise."""
    return list(cases if SOAK else cases[::step])
