"""Sizes and durations as people write them: "512MiB", "1.5TB", "10m", "500ms".

Owns parsing and printing. Does not own which sizes or durations a key accepts (core/config_keys).
"""

import re
from fractions import Fraction

__all__ = ["format_duration", "format_size", "parse_duration", "parse_size", "size_text"]

_SIZE_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgtp", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgtp", 1)},
}
_BINARY_NAMES = ("", "KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL_NAMES = ("", "kB", "MB", "GB", "TB", "PB")
_DURATION_UNITS = {
    "": Fraction(1),
    "ms": Fraction(1, 1000),
    "s": Fraction(1),
    "m": Fraction(60),
    "h": Fraction(3600),
    "d": Fraction(86400),
}
# Bounded digits: a number that needs more is a mistake, and must not become a long computation.
_QUANTITY = re.compile(r"(\d{1,19}(?:\.\d{1,19})?)\s*([A-Za-z]*)", re.ASCII)


def _split(text: str) -> tuple[Fraction, str]:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no number with a unit")
    return Fraction(match.group(1)), match.group(2)


def parse_size(text: str) -> int:
    """Bytes; kB, MB, GB are powers of 1000 and KiB, MiB, GiB of 1024, upper or lower case. Raises ValueError."""
    number, unit = _split(text)
    if unit.lower() not in _SIZE_UNITS:
        raise ValueError(f"{unit!r} is no unit of size")
    return int(number * _SIZE_UNITS[unit.lower()])


def parse_duration(text: str) -> float:
    """Seconds; units ms, s, m, h, d, none means seconds. Raises ValueError."""
    number, unit = _split(text)
    if unit not in _DURATION_UNITS:
        raise ValueError(f"{unit!r} is no unit of time")
    return float(number * _DURATION_UNITS[unit])


def format_size(size_bytes: int) -> str:
    """The shortest exact form: parse_size of it gives the same number."""
    for base, names in ((1024, _BINARY_NAMES), (1000, _DECIMAL_NAMES)):
        for power in range(len(names) - 1, 0, -1):
            if size_bytes and size_bytes % base**power == 0:
                return f"{size_bytes // base**power}{names[power]}"
    return f"{size_bytes}B"


def size_text(size_bytes: float) -> str:
    """Bytes for people, rounded: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024:
            return f"{size_bytes:.0f} {unit}" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"


def format_duration(duration_s: float) -> str:
    """An exact form: parse_duration of it gives the same number (for durations of at least a nanosecond)."""
    for unit in ("d", "h", "m"):
        unit_s = int(_DURATION_UNITS[unit])
        if duration_s and duration_s % unit_s == 0:
            return f"{int(duration_s) // unit_s}{unit}"
    if duration_s == int(duration_s):
        return f"{int(duration_s)}s"
    return f"{duration_s:.9f}".rstrip("0").rstrip(".") + "s"
