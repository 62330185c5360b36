"""How a directory of a parallel file system is striped, and the command that would stripe it for so many nodes.

Owns the parsers of `lfs getstripe` and of BeeGFS's tools, and the rule. Nothing is set.

The rule: each node writes files of its own, so with N nodes on T targets every file gets its share of them, T / N, at least
one: few nodes then use all targets, and many do not all meet on each.
"""

import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from forebay_gateway.core.quantities import size_text
from forebay_gateway.doctor.report import Check

STRIPE_BYTES = 4 << 20  # a chunk
_UNKNOWN_TARGETS = 8
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}

Run = Callable[[list[str]], str | None]  # a command's output; None where it is not there or failed


@dataclass(frozen=True, slots=True)
class Striping:
    """Of new files in a directory. `stripes` -1: over all targets."""

    stripes: int
    stripe_bytes: int


def parse_lfs(text: str) -> Striping | None:
    """From `lfs getstripe -d`; of a composite layout its last component, where most bytes of a large file are."""
    counts, sizes = re.findall(r"stripe_count:\s*(-?\d+)", text), re.findall(r"stripe_size:\s*(\d+)", text)
    return Striping(int(counts[-1]), int(sizes[-1])) if counts and sizes else None


def count_osts(text: str) -> int:
    """Active ones in `lfs osts`."""
    return len(re.findall(r"^\s*\d+:\s*\S+\s+ACTIVE\b", text, re.MULTILINE))


def parse_beegfs(text: str) -> Striping | None:
    """From `beegfs-ctl --getentryinfo`, or `beegfs entry info --retro`."""
    size = re.search(r"Chunksize:\s*(\d+)\s*([KMG]?)", text, re.IGNORECASE)
    count = re.search(r"Number of storage targets:\s*desired:\s*(\d+)", text)
    if size is None or count is None:
        return None
    return Striping(int(count[1]), int(size[1]) * _UNITS[size[2].upper()])


def count_beegfs_targets(text: str) -> int:
    """In `beegfs-ctl --listtargets`: a table whose lines begin with a target's number."""
    return len(re.findall(r"^\s*\d+\s+", text, re.MULTILINE))


def wanted(nodes: int, targets: int) -> int:
    """Stripes for each file; `targets` 0: unknown."""
    return max(1, (targets or _UNKNOWN_TARGETS) // nodes)


def striping_check(where: str, path: Path, file_system: str, nodes: int, run: Run) -> Check | None:
    """None for file systems that do not stripe by directory."""
    if file_system == "lustre":
        return _lustre(where, path, nodes, run)
    if file_system == "beegfs":
        return _beegfs(where, path, nodes, run)
    return None


def _lustre(where: str, path: Path, nodes: int, run: Run) -> Check:
    now = parse_lfs(run(["lfs", "getstripe", "-d", str(path)]) or "")
    targets = count_osts(run(["lfs", "osts", str(path)]) or "")
    stripes = wanted(nodes, targets)
    command = f"lfs setstripe -c {stripes} -S {STRIPE_BYTES >> 20}M {shlex.quote(str(path))}"
    return _judge(where, now, stripes, targets, nodes, command, "lfs getstripe")


def _beegfs(where: str, path: Path, nodes: int, run: Run) -> Check:
    quoted = shlex.quote(str(path))
    if shutil.which("beegfs-ctl") or not shutil.which("beegfs"):
        now = parse_beegfs(run(["beegfs-ctl", "--getentryinfo", str(path)]) or "")
        targets = count_beegfs_targets(run(["beegfs-ctl", "--listtargets", "--nodetype=storage"]) or "")
        stripes = wanted(nodes, targets)
        command = f"beegfs-ctl --setpattern --numtargets={stripes} --chunksize={STRIPE_BYTES >> 20}m {quoted}"
        return _judge(where, now, stripes, targets, nodes, command, "beegfs-ctl --getentryinfo")
    now = parse_beegfs(run(["beegfs", "entry", "info", "--retro", str(path)]) or "")
    targets = count_beegfs_targets(run(["beegfs", "target", "list", "--node-type=storage"]) or "")
    stripes = wanted(nodes, targets)
    command = f"beegfs entry set --num-targets={stripes} --chunk-size={STRIPE_BYTES >> 20}MiB {quoted}"
    return _judge(where, now, stripes, targets, nodes, command, "beegfs entry info")


def _judge(where: str, now: Striping | None, stripes: int, targets: int, nodes: int, command: str, asked: str) -> Check:
    why = f"with {nodes} {'node' if nodes == 1 else 'nodes'} on {targets or 'an unknown number of'} targets "
    why += f"{stripes} for each file use all of them and no more; small stripes cost requests"
    do = f"{command}; it counts for new files"
    figures: dict[str, float | int | str | bool | list[float] | None] = {"targets": targets or None, "command": command}
    if now is None:
        return Check(where, "striping", "WARN", f"unknown: no answer from `{asked}`", why, do, figures)
    has = now.stripes if now.stripes > 0 else (targets or _UNKNOWN_TARGETS) if now.stripes < 0 else 1
    good = stripes <= 2 * has and has <= 2 * stripes and now.stripe_bytes >= STRIPE_BYTES // 4
    shown = "all targets" if now.stripes < 0 else f"{has}"
    return Check(
        where,
        "striping",
        "OK" if good else "WARN",
        f"{shown} of {targets or '?'} targets, stripes of {size_text(now.stripe_bytes)}",
        why,
        "" if good else do,
        figures | {"stripes": now.stripes, "stripe_bytes": now.stripe_bytes},
    )
