"""Which file system a path lies on, and whether the cache and the catalog may live there.

Owns that decision alone. On network and FUSE file systems neither LMDB's locks nor O_DIRECT and fsync promise what the
gateway promises on, so the gateway refuses to start there (DESIGN, configuration).
"""

import re
from dataclasses import dataclass
from pathlib import Path

from forebay_gateway.core.errors import StartupError

MOUNTINFO = Path("/proc/self/mountinfo")

# Names as /proc/self/mountinfo shows them. fuse, fuseblk and every fuse.<name> are refused by their prefix.
REFUSED = frozenset(
    {
        "9p",
        "acfs",
        "afs",
        "beegfs",
        "ceph",
        "cifs",
        "coda",
        "davfs",
        "gfs",
        "gfs2",
        "glusterfs",
        "gpfs",
        "lustre",
        "ncpfs",
        "nfs",
        "nfs4",
        "ocfs2",
        "orangefs",
        "panfs",
        "prl_fs",
        "pvfs2",
        "smb3",
        "smbfs",
        "vboxsf",
        "virtiofs",
        "vmhgfs",
        "wekafs",
    }
)

_OCTAL = re.compile(r"\\([0-7]{3})")


def is_refused(file_system: str) -> bool:
    """True for network and FUSE file systems."""
    return file_system in REFUSED or file_system in ("fuse", "fuseblk") or file_system.startswith(("fuse.", "fuseblk."))


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo. `options` are those of the mount and of its file system together."""

    point: Path
    file_system: str
    source: str
    options: tuple[str, ...]


def mount_of(path: Path, mountinfo: str) -> Mount:
    """The mount that holds the absolute, symlink-free `path`; raises ValueError where no line covers it.

    Format of mountinfo: proc_pid_mountinfo(5). The mount point is the fifth field, its options the sixth; after " - " come the
    file system's type, source and options.
    """
    best_depth: int = -1
    best: Mount | None = None
    for line in mountinfo.splitlines():
        front, separator, back = line.partition(" - ")
        fields = front.split(" ")
        kind, source, options = (*back.split(" "), "", "", "")[:3]
        if not separator or len(fields) < 6 or not kind:
            continue
        point = Path(_plain(fields[4]))
        # A later line over the same mount point hides the earlier one, hence >=.
        if (path == point or point in path.parents) and len(point.parts) >= best_depth:
            both = tuple(dict.fromkeys(each for each in (*fields[5].split(","), *options.split(",")) if each))
            best_depth, best = len(point.parts), Mount(point, kind, _plain(source), both)
    if best is None:
        raise ValueError(f"no mount covers {path}")
    return best


def file_system_of(path: Path, mountinfo: str) -> str:
    """The type of the mount that holds the absolute, symlink-free `path`; raises ValueError where no line covers it."""
    return mount_of(path, mountinfo).file_system


def _plain(field: str) -> str:
    return _OCTAL.sub(lambda match: chr(int(match.group(1), 8)), field)


def existing_ancestor(path: Path) -> Path:
    """`path` itself if it exists, else its nearest directory that does; resolved."""
    at = path.absolute()
    while not at.exists():
        at = at.parent
    return at.resolve()


def check_local(path: Path) -> str:
    """The type of the file system `path` lies on (or would, once made); raises StartupError on one that is refused."""
    try:
        file_system = file_system_of(existing_ancestor(path), MOUNTINFO.read_text(errors="surrogateescape"))
    except (OSError, ValueError) as error:
        raise StartupError(f"cannot tell which file system holds the path: {error}", path=path) from error
    if is_refused(file_system):
        raise StartupError(
            "cache and catalog need a local disk; this is a network or FUSE file system, choose another path",
            path=path,
            file_system=file_system,
        )
    return file_system
