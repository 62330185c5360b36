"""Cells tried and cells held, for the table of figures. Written into the folder that FOREBAY_RESULTS names."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from soak.form import SOAK, given

_cells: dict[str, dict[str, bool]] = {}


@contextmanager
def cell(suite: str, *name: object) -> Iterator[None]:
    """One call under one fault: held if the block ends without an error."""
    cells = _cells.setdefault(suite, {})
    text = " x ".join(str(part) for part in name)
    cells[text] = False
    yield
    cells[text] = True


def write() -> None:
    """A document for each suite, as several processes may run one each; only where a folder is named."""
    folder = given("FOREBAY_RESULTS")
    for suite, cells in sorted(_cells.items()) if folder else ():
        Path(str(folder)).mkdir(parents=True, exist_ok=True)
        broken = sorted(name for name, held in cells.items() if not held)
        figures = {"full": SOAK, "tried": len(cells), "held": sum(cells.values()), "broken": broken}
        (Path(str(folder)) / f"faults-{suite.replace(' ', '-')}.json").write_text(json.dumps(figures, indent=2) + "\n")
