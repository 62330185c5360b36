"""What a disk says of its own wear: JSON of smartctl or nvme-cli, from a file or by running them.

Owns finding the disk and asking it. What it answers is read by forebay_wire.wear.
"""

import os
import shutil
import stat
import subprocess
from dataclasses import dataclass
from pathlib import Path

from forebay_wire import wear

TIMEOUT_S = 10.0


@dataclass(frozen=True, slots=True)
class Ssd:
    """A disk's own word; None where it does not say."""

    source: str
    model: str = ""
    capacity_bytes: int | None = None
    written_bytes: int | None = None
    used_share: float | None = None  # of the rated endurance, 0 to 1 and beyond

    @property
    def endurance_bytes(self) -> float | None:
        """Bytes that may be written in all, as the disk's own wear so far implies; None below 1 %, the counter's step."""
        if not self.written_bytes or self.used_share is None or self.used_share < 0.01:
            return None
        return self.written_bytes / self.used_share


def read(source: Path) -> Ssd:
    """Of a JSON file, or of a device by smartctl, else nvme. Raises ValueError saying what is wrong, OSError."""
    if source.exists() and (stat.S_ISBLK(source.stat().st_mode) or stat.S_ISCHR(source.stat().st_mode)):
        return parse(_ask(source), str(source))
    return parse(source.read_text(encoding="utf-8", errors="replace"), str(source))


def device_of(path: Path) -> Path | None:
    """The disk on which a directory lies; None where that is no single disk that can be seen from here."""
    try:
        number = path.stat().st_dev
        found = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve(strict=True)
    except OSError:
        return None
    disk = found.parent if (found / "partition").exists() else found
    device = Path("/dev") / disk.name
    return device if (disk / "device").exists() and device.exists() else None


def _ask(device: Path) -> str:
    commands = (["smartctl", "--json", "--all", str(device)], ["nvme", "smart-log", "--output-format=json", str(device)])
    tried = []
    for command in commands:
        if shutil.which(command[0]) is None:
            tried.append(f"{command[0]} is not installed")
            continue
        try:
            said = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            tried.append(f"{command[0]} did not answer in {TIMEOUT_S:.0f} s")
            continue
        # smartctl's exit code is a set of bits, most of which are about the disk's health and not about the call.
        if said.stdout.lstrip().startswith("{"):
            return said.stdout
        tried.append(f"{command[0]}: {said.stderr.strip() or said.stdout.strip() or said.returncode}")
    raise ValueError(f"cannot read the wear of {device}: {'; '.join(tried)}")


def parse(text: str, source: str) -> Ssd:
    """Of either program's JSON. Raises ValueError where it says nothing of wear."""
    found = wear.parse(text)
    if found is None:
        raise ValueError(f"{source} is no JSON of smartctl or nvme-cli")
    if found.written_bytes is None and found.used is None and found.capacity_bytes is None:
        raise ValueError(f"{source} says nothing of a disk's wear{': ' + '; '.join(found.said) if found.said else ''}")
    return Ssd(source, found.model, found.capacity_bytes, found.written_bytes, found.used)
