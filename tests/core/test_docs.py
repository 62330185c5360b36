"""What README and ARCHITECTURE show of the code is what the code says. Run as a program (`make docs`) it writes it there."""

import re
from pathlib import Path

import pytest

from forebay_gateway.core.config import config_table
from forebay_gateway.core.states import diagram

ROOT = Path(__file__).parents[2]
SHOWN = {
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
