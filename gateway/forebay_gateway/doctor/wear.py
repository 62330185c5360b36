"""How worn a disk is, from smartctl or nvme-cli where one of them is installed and may ask.

Owns their JSON. Nothing of a disk is changed: both only read its log.
"""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from forebay_gateway.doctor.report import Check, size_text

Run = Callable[[list[str]], str | None]

_UNIT_BYTES = 512_000  # NVMe counts in thousands of 512 bytes (NVM Express base specification, SMART log)
_VIRTUAL = re.compile(r"(vd|xvd|loop|zram|ram|nbd|rbd)")
# Normalised attributes of SATA disks that fall from 100 to 0: wear levelling, lifetime left, SSD life left, media wearout.
_LIFE_LEFT = frozenset({177, 202, 231, 233})
WORN = 0.80


@dataclass(frozen=True, slots=True)
class Wear:
    """`used` is the fraction of the rated writes; above 1 it is beyond them."""

    used: float
    written_bytes: int | None
    critical: bool = False


def parse_smartctl(text: str) -> Wear | None:
    """From `smartctl -j -a`."""
    answer = _object(text)
    log = answer.get("nvme_smart_health_information_log")
    if isinstance(log, dict) and isinstance(log.get("percentage_used"), int):
        return _nvme(log["percentage_used"], log.get("data_units_written"), log.get("critical_warning"))
    endurance = answer.get("endurance_used")
    if isinstance(endurance, dict) and isinstance(endurance.get("current_percent"), int):
        return Wear(endurance["current_percent"] / 100, None)
    table = answer.get("ata_smart_attributes", {})
    for row in table.get("table", ()) if isinstance(table, dict) else ():
        if isinstance(row, dict) and row.get("id") in _LIFE_LEFT and isinstance(row.get("value"), int):
            return Wear(max(0, 100 - row["value"]) / 100, None)
    return None


def parse_nvme(text: str) -> Wear | None:
    """From `nvme smart-log -o json`; its names differ between versions."""
    answer = _object(text)
    used = answer.get("percent_used", answer.get("percentage_used"))
    if not isinstance(used, int):
        return None
    return _nvme(used, answer.get("data_units_written"), answer.get("critical_warning"))


def _nvme(used: int, units: Any, warning: Any) -> Wear:
    value = warning.get("value", 0) if isinstance(warning, dict) else warning
    return Wear(used / 100, int(units) * _UNIT_BYTES if isinstance(units, int | float) else None, bool(value))


def _object(text: str) -> dict[str, Any]:
    try:
        answer = json.loads(text)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def wear_check(where: str, disk: str, run: Run) -> Check:
    """Of one whole disk."""
    why = "checkpoints are the most that this disk is written; past its rated writes it may fail or turn read-only"
    device = f"/dev/{disk}"
    if _VIRTUAL.match(disk):
        return Check(
            where, "wear", "OK", f"{disk} is a virtual disk: its wear is not to be seen here", why, "", {"device": disk}
        )
    wear = parse_smartctl(run(["smartctl", "-j", "-a", device]) or "")
    if wear is None and disk.startswith("nvme"):
        wear = parse_nvme(run(["nvme", "smart-log", device, "-o", "json"]) or "")
    if wear is None:
        do = "install smartmontools or nvme-cli, and run this as root"
        return Check(where, "wear", "WARN", f"{disk}: unknown, neither smartctl nor nvme answers", why, do, {"device": disk})
    failing = wear.critical or wear.used >= 1
    written = "" if wear.written_bytes is None else f", {size_text(wear.written_bytes)} written in its life"
    return Check(
        where,
        "wear",
        "FAIL" if failing else "WARN" if wear.used >= WORN else "OK",
        f"{disk}: {wear.used:.0%} of its rated writes used{written}"
        + (", and it reports a critical state" if wear.critical else ""),
        why,
        "replace the disk" if failing else "plan its replacement" if wear.used >= WORN else "",
        {"device": disk, "used": wear.used, "written_bytes": wear.written_bytes},
    )
