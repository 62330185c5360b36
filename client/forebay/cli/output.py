"""How commands print: one JSON document, or text that is coloured on a terminal and plain on a pipe.

Owns formats. Does not own what is printed.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

COLOURS = {
    "ok": "green",
    "complete": "green",
    "verified": "green",
    "warning": "yellow",
    "soft": "yellow",
    "hard": "yellow",
    "held": "yellow",
    "incomplete": "yellow",
    "draining": "yellow",
    "pending": "yellow",
    "away": "red",
    "full": "red",
    "critical": "red",
    "refusing": "red",
    "quarantined": "red",
    "OK": "green",
    "WARN": "yellow",
    "FAIL": "red",
}
_ANSI = {"green": 32, "yellow": 33, "red": 31}


def plain(value: Any) -> Any:
    """Records as JSON values; checksums stay numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return value


def print_json(value: Any) -> None:
    """One document on standard output."""
    print(json.dumps(plain(value), indent=2, ensure_ascii=True))


def say(line: str) -> None:
    """One line of result."""
    print(printable(line))


def say_state(label: str, word: str, rest: str = "") -> None:
    """A line with a state in it, in its colour on a terminal."""
    word, rest = printable(word), printable(rest)
    code = _ANSI[COLOURS[word]] if sys.stdout.isatty() and word in COLOURS else None
    print(label + (word if code is None else f"\033[{code}m{word}\033[0m") + rest)


def table(headings: Sequence[str], rows: Sequence[Sequence[str]], numeric: Sequence[int] = ()) -> None:
    """Aligned columns; those whose index is in `numeric` to the right. Words that are states get their colour on a terminal."""
    cells = [[printable(cell) for cell in row] for row in (headings, *rows)]
    widths = [max(len(row[index]) for row in cells) for index in range(len(headings))]
    coloured = sys.stdout.isatty()
    for number, row in enumerate(cells):
        padded = [
            cell.rjust(width) if index in numeric else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        line = "  ".join(padded).rstrip()
        if not coloured:
            print(line)
        else:
            _print_coloured(line, row, heading=number == 0)


def _print_coloured(line: str, row: Sequence[str], heading: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    text = Text(line, style="bold" if heading else "")
    for cell in row:
        if not heading and cell in COLOURS:
            text.highlight_words([cell], COLOURS[cell])
    Console(highlight=False, soft_wrap=True).print(text)


def size_text(size: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("unreachable")


def count_text(number: int, noun: str) -> str:
    """A number of things for people: "1 shard", "2 shards"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def duration_text(duration_s: float | None) -> str:
    """Seconds for people: "2 h 5 min"; "unknown" where there is none."""
    if duration_s is None:
        return "unknown"
    if duration_s < 60:
        return f"{duration_s:.1f} s" if duration_s < 10 else f"{duration_s:.0f} s"
    minutes = round(duration_s / 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours // 24} d {hours % 24} h" if hours >= 48 else f"{hours} h {minutes} min" if hours else f"{minutes} min"


def printable(text: str) -> str:
    """The text without what would steer a terminal: it comes from a gateway, or from file names."""
    return "".join(character if character.isprintable() else "?" for character in text)
