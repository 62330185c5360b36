"""What a disk says of its own wear, in the JSON of smartctl (`--json --all`) or of nvme-cli (`smart-log`).

Owns reading that text. Does not own who runs these programs, nor what follows from the figures. NVMe counts "data units" of
512,000 bytes (NVM Express base specification, SMART / Health Information log).
"""

import json
from dataclasses import dataclass
from typing import Any

DATA_UNIT_BYTES = 512_000
# Normalised attributes of SATA disks that fall from 100 to 0: wear levelling, lifetime left, SSD life left, media wearout.
_LIFE_LEFT = frozenset({177, 202, 231, 233})


@dataclass(frozen=True, slots=True)
class Wear:
    """A disk's own word; None, or empty, where it does not say. `said` is what smartctl had to say instead."""

    model: str = ""
    capacity_bytes: int | None = None
    written_bytes: int | None = None  # in its life
    used: float | None = None  # of the rated writes, 0 to 1 and beyond
    critical: bool = False
    said: tuple[str, ...] = ()


def parse(text: str) -> Wear | None:
    """Of either program; None for what is no JSON of theirs. Names differ between their versions."""
    try:
        answer = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(answer, dict):
        return None
    log = _object(answer, "nvme_smart_health_information_log") or answer
    used, units = _number(_first(log, "percentage_used", "percent_used")), _number(log.get("data_units_written"))
    if used is None:
        used = _number(_object(answer, "endurance_used").get("current_percent"))
    if used is None:
        used = _used_of_ata(_object(answer, "ata_smart_attributes").get("table"))
    warning = log.get("critical_warning")
    messages = _object(answer, "smartctl").get("messages")
    return Wear(
        str(answer.get("model_name", "")),
        _number(_object(answer, "user_capacity").get("bytes")),
        None if units is None else units * DATA_UNIT_BYTES,
        None if used is None else used / 100,
        bool(warning.get("value", 0) if isinstance(warning, dict) else warning),
        tuple(str(each.get("string", "")) for each in messages if isinstance(each, dict)) if isinstance(messages, list) else (),
    )


def _used_of_ata(table: Any) -> int | None:
    for row in table if isinstance(table, list) else ():
        if isinstance(row, dict) and _number(row.get("id")) in _LIFE_LEFT and (left := _number(row.get("value"))) is not None:
            return max(0, 100 - left)
    return None


def _object(answer: dict[str, Any], name: str) -> dict[str, Any]:
    found = answer.get(name)
    return found if isinstance(found, dict) else {}


def _first(log: dict[str, Any], *names: str) -> Any:
    return next((log[name] for name in names if name in log), None)


def _number(value: Any) -> int | None:
    """Newer nvme-cli prints large numbers as text."""
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if number >= 0 else None
