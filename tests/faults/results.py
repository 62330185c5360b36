"""Cells tried and cells held, for the table of figures. Written as faults.json into the folder that FOREBAY_RESULTS names."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SOAK = os.environ.get("FOREBAY_SOAK") == "1"

_cells: dict[str, dict[str, bool]] = {}


@contextmanager
def cell(suite: str, *name: object) -> Iterator[None]:
    """One call under one fault: held if the block ends without an error."""
    cells = _cells.setdefault(suite, {})
    text = " x ".join(str(part) for part in name)
    cells[text] = False
    yield
    cells[text] = True


def summary() -> dict[str, object]:
    """By suite: how many, and the names of those that did not hold."""
    suites = {
        suite: {"tried": len(cells), "held": sum(cells.values()), "broken": sorted(name for name in cells if not cells[name])}
        for suite, cells in sorted(_cells.items())
    }
    total = [held for cells in _cells.values() for held in cells.values()]
    return {"full": SOAK, "tried": len(total), "held": sum(total), "suites": suites}


def write() -> None:
    """Only where a folder is named, and something was tried."""
    folder = os.environ.get("FOREBAY_RESULTS")
    if folder and _cells:
        Path(folder).mkdir(parents=True, exist_ok=True)
        (Path(folder) / "faults.json").write_text(json.dumps(summary(), indent=2) + "\n")
