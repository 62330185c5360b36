"""How worn a disk is, from smartctl or nvme-cli where one of them is installed and may ask.

Owns what follows from it; their JSON is read by forebay_wire.wear. Nothing of a disk is changed: both only read its log.
"""

import re
from collections.abc import Callable

from forebay_gateway.core.quantities import size_text
from forebay_gateway.doctor.report import Check
from forebay_wire.wear import parse

Run = Callable[[list[str]], str | None]

_VIRTUAL = re.compile(r"(vd|xvd|loop|zram|ram|nbd|rbd)")
WORN = 0.80


def wear_check(where: str, disk: str, run: Run) -> Check:
    """Of one whole disk."""
    why = "checkpoints are the most that this disk is written; past its rated writes it may fail or turn read-only"
    device = f"/dev/{disk}"
    if _VIRTUAL.match(disk):
        return Check(
            where, "wear", "OK", f"{disk} is a virtual disk: its wear is not to be seen here", why, "", {"device": disk}
        )
    wear = parse(run(["smartctl", "-j", "-a", device]) or "")
    if (wear is None or wear.used is None) and disk.startswith("nvme"):
        wear = parse(run(["nvme", "smart-log", device, "-o", "json"]) or "")
    if wear is None or wear.used is None:
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
