"""Figures of one test or suite: a JSON document in the folder FOREBAY_RESULTS, written also where the test fails.

Documents name what they count alike (report.py sums these): crash_rounds, failpoints_passed and failpoints_known (lists), tried
(calls under a fault), acknowledged_bytes, compared_bytes, lost_bytes, flips_made, flips_found, files_looked_at, leaked_files,
leaked_uploads. `held` says whether the test did.
"""

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import forebay_gateway
from soak.form import given

SOURCE = Path(forebay_gateway.__file__).parent


def failpoints() -> list[str]:
    """All names that the gateway's source passes."""
    found = {name for path in SOURCE.rglob("*.py") for name in re.findall(r'failpoints\.hit\("([^"]+)"\)', path.read_text())}
    return sorted(found)


def report(name: str, **figures: Any) -> None:
    """Print the figures, and keep them where they are collected."""
    print(f"{name}: {json.dumps(figures, sort_keys=True)}")
    folder = given("FOREBAY_RESULTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / f"{name}.json").write_text(json.dumps(figures, indent=1, sort_keys=True) + "\n")


def died(name: str, *points: str) -> None:
    """A process died at each of these failpoints, or met its error there, and the test's promises held."""
    report(f"failpoints-{name}", crash_rounds=len(points), failpoints_passed=list(points), failpoints_known=failpoints())


@contextmanager
def reported(name: str, counted: Callable[[], dict[str, Any]] = dict, **figures: Any) -> Iterator[dict[str, Any]]:
    """The test adds to what it is given; what `counted` says at the end is added to it, and all is reported."""
    held = False
    try:
        yield figures
        held = True
    finally:
        report(name, held=held, **{**counted(), **figures})
