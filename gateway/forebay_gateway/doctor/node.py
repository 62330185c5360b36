"""The machine itself: dirty pages, TCP, open files, who can reach the gateway, and whether the samples share the cache's disk.

Owns these parsers and what is thought of their values.
"""

import resource
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from forebay_gateway.core.exposure import tcp_addresses, unguarded
from forebay_gateway.core.quantities import size_text
from forebay_gateway.doctor.report import NODE, Check

SNMP = Path("/proc/net/snmp")
MEMINFO = Path("/proc/meminfo")
VM = Path("/proc/sys/vm")

FLUSH_S_MAX = 10.0
RETRANSMITTED = 0.01
SEGMENTS_MIN = 1000  # fewer say nothing
OPEN_FILES_MIN = 4096
_WHY_DIRTY = "what other programs wrote is flushed at once when the limit is reached, and saves wait behind it"


@dataclass(frozen=True, slots=True)
class Tcp:
    """Segments since boot."""

    sent: int
    retransmitted: int


def parse_snmp(text: str) -> Tcp | None:
    """From /proc/net/snmp: a line of names and a line of values."""
    lines = [line.split()[1:] for line in text.splitlines() if line.startswith("Tcp:")]
    if len(lines) != 2 or len(lines[0]) != len(lines[1]):
        return None
    values = dict(zip(*lines, strict=True))
    try:
        return Tcp(int(values["OutSegs"]), int(values["RetransSegs"]))
    except (KeyError, ValueError):
        return None


def read_tcp() -> Tcp | None:
    """Now."""
    try:
        return parse_snmp(SNMP.read_text())
    except OSError:
        return None


def tcp_check(before: Tcp | None, after: Tcp | None) -> Check:
    """What this machine sent while the rest was measured, all processes together."""
    why = "segments sent again are a sign of loss, which slows object stores and network file systems"
    if before is None or after is None:
        return Check(NODE, "tcp", "OK", "not to be seen here", why)
    sent, again = max(0, after.sent - before.sent), max(0, after.retransmitted - before.retransmitted)
    ratio = again / sent if sent else 0.0
    bad = sent >= SEGMENTS_MIN and ratio > RETRANSMITTED
    return Check(
        NODE,
        "tcp",
        "WARN" if bad else "OK",
        f"{again:,} of {sent:,} segments sent again while this ran ({ratio:.2%})",
        why,
        "look at the network path to the tiers: cables, switches' drops, MTU, congestion" if bad else "",
        {"sent": sent, "retransmitted": again, "ratio": ratio},
    )


def read_vm() -> dict[str, int] | None:
    """The sysctls of dirty pages by name; None where they are not shown."""
    names = ("dirty_ratio", "dirty_background_ratio", "dirty_bytes", "dirty_background_bytes")
    try:
        return {name: int((VM / name).read_text()) for name in names}
    except (OSError, ValueError):
        return None


def read_available() -> int:
    """Bytes of memory that programs may still have; 0 where it is not shown."""
    try:
        return parse_available(MEMINFO.read_text())
    except (OSError, ValueError):
        return 0


def parse_available(meminfo: str) -> int:
    """MemAvailable in bytes, which the ratios are of (about); 0 where it is not said."""
    for line in meminfo.splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    return 0


def dirty_check(vm: Mapping[str, int] | None, available: int, bytes_per_s: float | None) -> Check:
    """`bytes_per_s`: what the cache's disk takes. Of bytes and ratio the one that is not 0 counts: sysctl/vm.rst."""
    if vm is None:
        return Check(NODE, "dirty_pages", "OK", "not to be seen here", _WHY_DIRTY)
    dirty = vm["dirty_bytes"] or available * vm["dirty_ratio"] // 100
    background = vm["dirty_background_bytes"] or available * vm["dirty_background_ratio"] // 100
    flush_s = dirty / bytes_per_s if bytes_per_s else None
    bad = flush_s is not None and flush_s > FLUSH_S_MAX
    set_by = "dirty_bytes" if vm["dirty_bytes"] else f"dirty_ratio {vm['dirty_ratio']} %"
    begun_by = (
        "dirty_background_bytes" if vm["dirty_background_bytes"] else f"dirty_background_ratio {vm['dirty_background_ratio']} %"
    )
    takes = f", which the cache's disk takes in {flush_s:.1f} s" if flush_s is not None else ""
    do = ""
    if bad and bytes_per_s:
        most = max(64 << 20, int(bytes_per_s * FLUSH_S_MAX / 2) >> 20 << 20)
        do = f"sysctl -w vm.dirty_bytes={most} vm.dirty_background_bytes={most // 4}, and in /etc/sysctl.d"
    return Check(
        NODE,
        "dirty_pages",
        "WARN" if bad else "OK",
        f"{set_by} = {size_text(dirty)}{takes}; {begun_by} = {size_text(background)}",
        _WHY_DIRTY,
        do,
        {"dirty_bytes": dirty, "background_bytes": background, "flush_s": flush_s},
    )


def open_files_check(limits: tuple[int, int] | None = None) -> Check:
    """Of this process; a gateway started from here inherits it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE) if limits is None else limits
    few = 0 <= soft < OPEN_FILES_MIN  # -1 is no limit
    return Check(
        NODE,
        "open_files",
        "WARN" if few else "OK",
        f"{'no limit' if soft < 0 else soft} (at most {'no limit' if hard < 0 else hard})",
        "a gateway started from here inherits it: each client, shard and connection takes one",
        "ulimit -n 65536, or LimitNOFILE=65536 in its unit" if few else "",
        {"soft": soft, "hard": hard},
    )


def listen_check(listen: Iterable[str]) -> Check:
    """Who can reach the gateway, by node.listen. A port of the host alone is no finding: it is told."""
    listen = tuple(listen)
    found = tcp_addresses(listen)
    wide = "network" in found.values()
    do = "leave out of node.listen what is no unix:// path, or let a firewall admit trusted hosts alone"
    return Check(
        NODE,
        "listen",
        "WARN" if wide else "OK",
        unguarded(listen) or "unix sockets alone",
        "who can connect can read and delete every checkpoint",
        do if wide else "",
        {"ports": ", ".join(found)},
    )


def sample_data_check(path: Path, shares_with: list[str]) -> Check:
    """Whether the training data lies on the disk of the cache or of a tier."""
    return Check(
        NODE,
        "sample_data",
        "WARN" if shares_with else "OK",
        f"{path} shares a disk with {', '.join(shares_with)}" if shares_with else f"{path} is on a disk of its own",
        "loading samples and saving checkpoints then take turns on one disk",
        "move the samples, or cache.path, to another disk" if shares_with else "",
        {"shares_with": ", ".join(shares_with)},
    )
