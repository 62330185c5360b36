"""The figures in FIGURES.md: written from a result file, so that no figure there is typed by hand.

Owns the text between the markers.
"""

import json
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- bench:begin -->\n", "<!-- bench:end -->"


def write(results: Path, readme: Path) -> None:
    """Put the results between the markers. Raises ValueError where there are none, or the run was a quick or partial one."""
    text = readme.read_text(encoding="utf-8")
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(END) < text.index(BEGIN):
        raise ValueError(f"{readme} needs one line {BEGIN.strip()} and after it one {END}")
    shown = render(json.loads(results.read_text(encoding="utf-8")))
    before, _, rest = text.partition(BEGIN)
    readme.write_text(before + BEGIN + shown + END + rest.partition(END)[2], encoding="utf-8")


def render(results: dict[str, Any]) -> str:
    """A table of the rows, and what they were measured with."""
    if results["quick"]:
        raise ValueError("these results are of a quick look; FIGURES.md shows whole runs only")
    machine, job = results["machine"], results["job"]
    lines = [
        f"Measured on {machine['date']}: {machine['processor']}, {machine['memory']}, {machine['file_system']}, "
        f"Linux {machine['kernel']}, Python {machine['python']}, grpcio {machine['grpcio']}; "
        f"{job['size'] / 2**30:.1f} GiB a side, medians of {job['pairs']} pairs, both sides in turn.",
        "",
        "| what | against | measured | goal | |",
        "|---|---|---:|---|---|",
    ]
    for row in results["rows"]:
        if row["name"].startswith("profile-"):
            continue
        rest = row["detail"] if row["value"] is not None else f"{row['verdict']}: {row['reason']}"
        verdict = f"{row['verdict']}; " if row["verdict"] == "NOT MET" else ""
        cells = [row["what"], row["against"], row["shown"], row["goal"], verdict + rest]
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"
