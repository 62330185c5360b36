"""What lies below a directory: type of the file system, mount options, space.

Owns what is thought of each. Does not own finding the mount (cache/mounts).
"""

import os
import shlex
from pathlib import Path

from forebay_gateway.cache.mounts import MOUNTINFO, Mount, existing_ancestor, is_refused, mount_of
from forebay_gateway.core.quantities import size_text
from forebay_gateway.doctor.report import Check

_PROVED = frozenset({"ext4", "xfs"})
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
_MANY_INODES = 10_000


def find_mount(path: Path) -> Mount:
    """Of the nearest directory that exists. Raises OSError, ValueError."""
    return mount_of(existing_ancestor(path), MOUNTINFO.read_text(errors="surrogateescape"))


def type_check(where: str, kind: str, mount: Mount) -> Check:
    """`kind`: "cache", or the tier's."""
    name, status, why, do = mount.file_system, "OK", "fsync and rename have to hold what they promise", ""
    if name in _IN_MEMORY:
        status, why = "FAIL", "it is memory: what is acknowledged there does not outlive this machine"
        do = "choose a directory on a disk"
    elif kind == "cache" and is_refused(name):
        status, why = (
            "FAIL",
            "on network and FUSE file systems neither LMDB's locks nor O_DIRECT hold; the gateway refuses them",
        )
        do = "set cache.path to a directory on a local NVMe disk"
    elif kind == "cache" and name not in _PROVED:
        status, why, do = "WARN", "the gateway is proved on ext4 and XFS", "prefer XFS or ext4 for the cache"
    return Check(where, "filesystem", status, f"{name} at {mount.point}", why, do, {"type": name})  # type: ignore[arg-type]


def mount_check(where: str, mount: Mount) -> Check:
    """Options that cost writes or make deletes slow."""
    advice, remount = [], []
    has = set(mount.options)
    if "noatime" not in has:  # which includes nodiratime: mount(8)
        advice.append("without noatime a read may write")
        remount.append("noatime")
    if any(each == "discard" or (each.startswith("discard=") and each != "discard=async") for each in has):
        advice.append("with discard each deleted checkpoint trims the disk at once, while others are written")
        remount.append("nodiscard")
    shown = [each for each in mount.options if each in _SHOWN or each.startswith(("discard", "data=", "barrier", "nobarrier"))]
    do = f"mount -o remount,{','.join(remount)} {shlex.quote(str(mount.point))}, and in /etc/fstab" if remount else ""
    if "nodiscard" in remount:
        do += "; systemctl enable --now fstrim.timer trims weekly instead"
    return Check(
        where,
        "mount",
        "WARN" if remount else "OK",
        ",".join(shown) or "no options of note",
        "; ".join(advice) or "nothing here costs writes",
        do,
        {"options": ",".join(mount.options)},
    )


_SHOWN = frozenset({"rw", "ro", "noatime", "relatime", "strictatime", "nodiratime", "nodiscard", "sync", "dirsync", "lazytime"})


def space_checks(where: str, path: Path, size: int, capacity: int | None = None) -> list[Check]:
    """Free bytes, and free inodes where the file system counts them. `capacity`: what the cache's configuration lets in."""
    found = os.statvfs(path)
    free, total = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
    fits = (free if capacity is None else min(free, capacity)) // size
    bounded = capacity is not None and capacity < free
    status = "FAIL" if fits < 1 else "WARN" if fits < 3 else "OK"
    checks = [
        Check(
            where,
            "space",
            status,  # type: ignore[arg-type]
            f"{size_text(free)} of {size_text(total)} free"
            f"{f', of which the configuration takes {size_text(capacity)}' if capacity is not None and bounded else ''}: "
            f"room for {fits or 'no'} checkpoint{'s' if fits != 1 else ''} of {size_text(size)}",
            "the newest has to find room while older ones still drain",
            "" if status == "OK" else "raise cache.capacity" if bounded else "free space, or use a larger disk",
            {"free_bytes": free, "total_bytes": total, "checkpoints": fits},
        )
    ]
    if found.f_files:
        few = found.f_favail < _MANY_INODES
        checks.append(
            Check(
                where,
                "inodes",
                "WARN" if few else "OK",
                f"{found.f_favail:,} free",
                "each shard is a file",
                "delete small files, or make the file system with more inodes" if few else "",
                {"free": found.f_favail},
            )
        )
    return checks
