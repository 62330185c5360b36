"""`make soak`, at its end: the figures of the run, as tests/README.md shows them.

usage: report.py FOLDER    (the JSON documents that the suites wrote there)
"""

import json
import sys
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- figures:begin -->\n", "<!-- figures:end -->"
HEAD = ["| what | figure |", "|---|---|"]
Documents = Mapping[str, Mapping[str, Any]]
# Of each document alone: the same in all, or in a line above.
UNSHOWN = {"failpoints_known", "soak", "held", "lost_bytes", "leaked_files", "leaked_uploads", "compared_bytes"}
FAMILIES = ("disk-faults", "failpoints")  # many documents of one kind: one line, of what they come to together


def shown_briefly(document: Mapping[str, Any]) -> str:
    """What a document counts, in one line; of lists, how many there are."""
    known = ((key, value) for key, value in sorted(document.items()) if key not in UNSHOWN and value is not None)
    return ", ".join(f"{key} {_brief(value)}" for key, value in known)


def gathered(documents: Documents) -> Documents:
    """The documents, those of a family as one: numbers are summed, lists joined."""
    found: dict[str, dict[str, Any]] = {}
    for name, each in documents.items():
        family = next((family for family in FAMILIES if name.startswith(f"{family}-")), name)
        known = found.setdefault(family, {})
        for key, value in each.items():
            known[key] = known[key] + value if key in known else value
        if family != name:
            known["documents"] = known.get("documents", 0) + 1
    return found


def _brief(value: Any) -> str:
    if isinstance(value, dict):
        return "(" + ", ".join(f"{key} {_brief(item)}" for key, item in value.items()) + ")"
    if isinstance(value, list):
        return f"{len(value)}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def summary(documents: Documents) -> Iterator[tuple[str, str]]:
    """(what, figure), summed over all documents. What nobody counted is said to be so: it is no zero."""

    def total(key: str, *, held: bool = False) -> int | None:
        known = [each for each in documents.values() if key in each and (each.get("held", True) or not held)]
        return sum(int(each[key]) for each in known) if known else None

    def named(key: str) -> set[str]:
        return {name for each in documents.values() for name in each.get(key, ())}

    def shown(value: int | None) -> str:
        return "not counted" if value is None else f"{value:,}"

    known = named("failpoints_known")
    passed = named("failpoints_passed") & known
    left = sorted(known - passed)
    yield "crash rounds survived", shown(total("crash_rounds", held=True))
    yield (
        "failpoints covered",
        f"{len(passed)} of {len(known)}" + (f" (not: {', '.join(left)})" if left else "") if known else "not counted",
    )
    yield "calls tried under a fault", shown(total("tried"))
    yield "bytes acknowledged", shown(total("acknowledged_bytes"))
    yield "of these read back and equal", shown(total("compared_bytes"))
    yield "bytes lost", shown(total("lost_bytes"))
    yield "bit flips found, of those made", f"{shown(total('flips_found'))} of {shown(total('flips_made'))}"
    yield "files looked at for leaks", shown(total("files_looked_at"))
    yield "leaked files", shown(total("leaked_files"))
    yield "leaked uploads", shown(total("leaked_uploads"))
    removed, survived = total("mutations"), named("survived")
    noticed = None if removed is None else removed - len(survived)
    yield "safeguards taken out one at a time, and noticed", f"{shown(removed)}, {shown(noticed)}"
    yield "inputs that fuzzing made", shown(total("inputs"))
    yield (
        "readers of outside bytes that one broke",
        "not counted" if total("inputs") is None else f"{len(named('broken_targets'))}",
    )
    broken = sorted(name for name, each in documents.items() if each.get("held", True) is False or each.get("broken"))
    yield "documents of tests that did not hold", f"{len(broken)}" + (f" ({', '.join(broken)})" if broken else "")


def table(folder: Path) -> str:
    """The folder's documents: what they come to together, then each by itself."""
    documents = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    lines = [f"Run of {datetime.now(UTC).date().isoformat()}.", "", *HEAD]
    lines += [f"| {what} | {figure} |" for what, figure in summary(documents)]
    lines += ["", "Each by itself:", "", "| document | what it counted |", "|---|---|"]
    lines += [f"| {name} | {shown_briefly(each)} |" for name, each in gathered(documents).items()]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Put the table between the markers."""
    before, _, rest = README.read_text(encoding="utf-8").partition(BEGIN)
    README.write_text(before + BEGIN + table(Path(sys.argv[1])) + END + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
