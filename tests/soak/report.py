"""`make soak`, at its end: the figures of the run, as tests/README.md shows them.

usage: report.py FOLDER    (the JSON documents that the suites wrote there)
"""

import json
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures:begin -->\n", "<!-- figures:end -->"


def rows(name: str, value: Any) -> Iterator[tuple[str, str]]:
    """(what, figure) of every number, flag and list in a document."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from rows(f"{name}: {key}" if name else key, item)
    elif isinstance(value, list):
        yield name, f"{len(value)}" + (f" ({', '.join(map(str, value[:5]))})" if value else "")
    elif value is not None:
        yield name, str(value)


def table(folder: Path) -> str:
    """All documents of the folder as one table."""
    lines = [f"Run of {datetime.now(UTC).date().isoformat()}.", "", "| what | figure |", "|---|---|"]
    for path in sorted(folder.glob("*.json")):
        lines += [f"| {what} | {figure} |" for what, figure in rows(path.stem, json.loads(path.read_text()))]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Put the table between the markers."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    README.write_text(before + BEGIN + table(Path(sys.argv[1])) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
