"""Numbers as people write them on a command line: "70B" parameters, "1.5TB", "20GB/s", "10m", "30d".

Owns parsing. Does not own which values make sense (needs.py).
"""

import math
import re

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
_SIZES = {"": 1, "b": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("kmgtp", start=1)
    for suffix, base in (("b", 1000), ("ib", 1024))
}
_DURATIONS = {"": 1.0, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "y": 365.25 * 86400}
# Bounded digits: what needs more is a mistake. A sign is read, so that a negative number is refused for what it is.
_QUANTITY = re.compile(r"(-?\d{1,19}(?:\.\d{1,19})?(?:[eE]\+?\d{1,2})?)\s*([A-Za-z]*)", re.ASCII)


def _parse(text: str, units: dict[str, int] | dict[str, float], what: str) -> float:
    match = _QUANTITY.fullmatch(text.strip())
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is no {what}")
    value = float(match[1]) * units[match[2].lower()]
    if not math.isfinite(value):
        raise ValueError(f"{text!r} is no {what}")
    return value


def parse_count(text: str) -> int:
    """A number of things: k, M, B (or G) and T are powers of 1000. Raises ValueError."""
    return round(_parse(text, _COUNTS, "number; write it like 7000000000, 7B or 1.5T"))


def parse_size(text: str) -> int:
    """Bytes; kB, MB, GB are powers of 1000 and KiB, MiB, GiB of 1024. Raises ValueError."""
    return round(_parse(text, _SIZES, "size; write it like 512MiB or 1.5TB"))


def parse_rate(text: str) -> int:
    """Bytes a second: a size, with or without "/s". Raises ValueError."""
    try:
        return parse_size(text.strip().removesuffix("/s"))
    except ValueError:
        raise ValueError(f"{text!r} is no rate; write it like 20GB/s") from None


def parse_duration(text: str) -> float:
    """Seconds; units ms, s, m, h, d, y, none means seconds. Raises ValueError."""
    return _parse(text, _DURATIONS, "duration; write it like 30s, 10m, 4h or 30d")
