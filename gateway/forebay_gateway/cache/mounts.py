"""Which file system a path lies on, and whether the cache and the catalog may live there.

Owns that decision alone. On network and FUSE file systems neither LMDB's locks nor O_DIRECT and fsync promise what the
gateway promises on, so the gateway refuses to start there (DESIGN, configuration).
"""

import re
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


def file_system_of(path: Path, mountinfo: str) -> str:
    """The type of the mount that holds the absolute, symlink-free `path`; raises ValueError where no line covers it.

    Format of mountinfo: proc_pid_mountinfo(5). The mount point is the fifth field, the type the first after " - ".
    """
    best_depth, best = -1, ""
    for line in mountinfo.splitlines():
        front, separator, back = line.partition(" - ")
        fields = front.split(" ")
        if not separator or len(fields) < 6:
            continue
        point = Path(_OCTAL.sub(lambda match: chr(int(match.group(1), 8)), fields[4]))
        # A later line over the same mount point hides the earlier one, hence >=.
        if (path == point or point in path.parents) and len(point.parts) >= best_depth:
            best_depth, best = len(point.parts), back.split(" ")[0]
    if not best:
        raise ValueError(f"no mount covers {path}")
    return best


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
