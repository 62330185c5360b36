"""What README and ARCHITECTURE show of the code is what the code says, and README's figures are those of FIGURES.md. Run as a
program (`make docs`) it writes them there."""

import re
from pathlib import Path

import pytest

from forebay_gateway.core.config import config_table
from forebay_gateway.core.states import diagram

ROOT = Path(__file__).parents[2]
# Rows of FIGURES.md that README shows: what, and against what. Each goal that was not met is shown besides.
TELLING = (
    ("durable save, fd lane", "fio 4 MiB O_DIRECT depth 4, fsync"),
    ("dcp.save to cache", "torch DCP FileSystemWriter"),
    ("10,000 shards of 4 KiB, durable", "create + write + fsync each"),
    ("restore from cache, fd lane, cold", "fio 4 MiB O_DIRECT depth 4"),
    ("drain to S3, verified", "rclone copy --checksum"),
    ("fd save while draining to S3", "the same save alone"),
    ("dcp.async_save, trainer blocked", "the same with FileSystemWriter"),
    ("status, 1,000,000 shards, all cached", ""),
)


def _cells(row: str) -> list[str]:
    return [cell.strip() for cell in row.strip("|").split(" |")]


def telling_figures() -> str:
    """The rows of FIGURES.md that README shows, under the head of their table."""
    begin, end = _markers("bench")
    lines = (ROOT / "FIGURES.md").read_text(encoding="utf-8").partition(begin)[2].partition(end)[0].splitlines()
    table = [line for line in lines if line.startswith("|")]
    names = [tuple(_cells(row)[:2]) for row in table]
    missing = set(TELLING) - set(names)
    assert not missing, f"FIGURES.md has no row {missing}"
    shown = [
        row for row, name in zip(table[2:], names[2:], strict=True) if name in TELLING or _cells(row)[4].startswith("NOT MET")
    ]
    return "\n".join([*table[:2], *shown]) + "\n"


SHOWN = {
    "figures": (ROOT / "README.md", telling_figures),
    "config": (ROOT / "README.md", config_table),
    "states": (ROOT / "gateway" / "ARCHITECTURE.md", diagram),
}


def _markers(name: str) -> tuple[str, str]:
    return f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"


@pytest.mark.parametrize("name", SHOWN)
def test_what_the_documents_show_is_current(name: str) -> None:
    path, source = SHOWN[name]
    begin, end = _markers(name)
    text = path.read_text(encoding="utf-8")
    assert text.count(begin) == 1, f"{path.name} needs {begin.strip()}"
    assert text.count(end) == 1, f"{path.name} needs {end}"
    assert text.split(begin)[1].split(end)[0] == source(), "make docs"


def test_the_tests_that_a_table_names_are_there() -> None:
    named = set(re.findall(r"`(test_\w+)`", (ROOT / "tests" / "README.md").read_text(encoding="utf-8")))
    sources = (path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))
    known = {name for source in sources for name in re.findall(r"^ *(?:async )?def (test_\w+)\(", source, re.MULTILINE)}
    assert named
    assert named - known == set()


def write() -> None:
    """Put today's text between the markers."""
    for name, (path, source) in SHOWN.items():
        begin, end = _markers(name)
        before, _, rest = path.read_text(encoding="utf-8").partition(begin)
        path.write_text(before + begin + source() + end + rest.partition(end)[2], encoding="utf-8")


if __name__ == "__main__":
    write()
