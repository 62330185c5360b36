"""Where checkpoints go: the cache and each tier, looked at before anything is written.

Owns whether a directory can be measured at all, and which size of checkpoint fits. Nothing is made here.
"""

import errno
import json
import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from forebay_gateway.cache.mounts import Mount, existing_ancestor
from forebay_gateway.core.config_sections import Config, TierConfig
from forebay_gateway.core.errors import ForebayError, InvalidArgument
from forebay_gateway.core.layout import CONTROL_DIR
from forebay_gateway.core.quantities import format_size, size_text
from forebay_gateway.doctor.devices import device_of, disks_of
from forebay_gateway.doctor.filesystem import find_mount
from forebay_gateway.doctor.report import Check
from forebay_gateway.tiers.posix.marker import MADE

SIZE_MIN = 1 << 20
_SPARE = 0.05  # of a tier's file system, which others use too
# What may lie in a new tier's directory; the same as where a gateway adopts one.
_EMPTY_ENOUGH = frozenset({CONTROL_DIR, "lost+found", ".snapshot"})
_WHY = "without it nothing is saved, or nothing leaves this node"


@dataclass(slots=True)
class Place:
    """The cache, or a tier. Sizes are bytes."""

    name: str
    kind: str  # "cache", "posix", "s3", "memory"
    path: Path | None
    direct: bool = True
    reserve: int | None = None  # kept free; None: a share of the disk
    capacity: int | None = None  # what the configuration lets in
    tier: TierConfig | None = None
    mount: Mount | None = None
    device: str = ""
    disks: frozenset[str] = frozenset()
    usable: bool = True
    room: int = 0  # for a checkpoint, what is kept free taken off
    marked: bool = False  # a POSIX tier's root with its marker
    checks: list[Check] = field(default_factory=list)

    @property
    def required(self) -> bool:
        """Whether nothing is safe, or may leave the cache, without it."""
        return self.tier is None or self.tier.required

    def fail(self, value: str, do: str) -> None:
        """It cannot be used."""
        self.usable = False
        self.checks.append(Check(self.name, "path", "FAIL", value, _WHY, do))


def places_of(config: Config) -> list[Place]:
    """The cache first, then the tiers in their order."""
    cache = config.cache
    found = [Place("cache", "cache", Path(cache.path), cache.direct_io != "off", cache.catalog_reserve)]
    found[0].capacity = None if cache.capacity is None else int(cache.capacity * cache.refuse)
    for tier in config.tiers:
        found.append(Place(tier.name, tier.kind, Path(tier.path) if tier.kind == "posix" else None, tier=tier))
    return found


def look(place: Place) -> None:
    """Fill in what can be seen of a directory without writing; `checks` say what is wrong."""
    path = place.path
    if path is None:
        return
    try:
        if not path.exists():
            nearest = existing_ancestor(path)
            known = "mount its file system, or " if place.kind == "posix" else ""
            place.fail(
                f"{path} is not there; the nearest directory that is: {nearest}",
                f"{known}mkdir -p {shlex.quote(str(path))}" + (" (or start the gateway once)" if place.kind == "cache" else ""),
            )
            return
        if not path.is_dir():
            place.fail(f"{path} is no directory", "name a directory in the configuration")
            return
        place.mount = find_mount(path)
        place.device = device_of(path, place.mount.source)
        place.disks = disks_of(path, place.device)
        place.room = _room(place, path)
        _look_inside(place, path)
    except (OSError, ValueError) as error:
        place.fail(*explain(error, path))


def _look_inside(place: Place, path: Path) -> None:
    if place.kind == "cache":
        known = (path / "FORMAT").is_file()
        place.checks.append(Check("cache", "path", "OK", f"{path}: {'a cache' if known else 'no cache yet'}", _WHY))
        return
    place.marked = (path / CONTROL_DIR / "tier.json").is_file()
    others = [] if place.marked else sorted({entry.name for entry in path.iterdir()} - _EMPTY_ENOUGH)
    if others:
        place.fail(
            f"{path} holds files ({others[0]}, ...) but no {CONTROL_DIR}/tier.json: not mounted, or not this tier's",
            f"mount it; to adopt the directory as it is: cd {shlex.quote(str(path))} && mkdir -p {CONTROL_DIR} && "
            f"touch {CONTROL_DIR}/tier.json",
        )
        return
    if place.marked and _was_made(path):
        place.checks.append(_made_check(place, path))
        return
    place.checks.append(
        Check(
            place.name,
            "path",
            "OK" if place.marked else "WARN",
            f"{path}: {'marked as a tier' if place.marked else 'empty; the first gateway that starts marks it'}",
            _WHY,
            "" if place.marked else f"if a file system belongs at {path}, mount it first",
        )
    )


def _was_made(root: Path) -> bool:
    """Whether its marker says that a gateway made the directory."""
    try:
        body = json.loads((root / CONTROL_DIR / "tier.json").read_bytes())
    except ValueError:
        return False
    return isinstance(body, dict) and body.get(MADE) is True


def _made_check(place: Place, path: Path) -> Check:
    """A directory that a gateway made lies on whatever was there: the node's own disk where a mount was missing."""
    point = Path("/") if place.mount is None else place.mount.point
    on_root = point == Path("/")
    value = f"{path}: marked as a tier; a gateway made the directory, on {place.device or 'an unknown device'} ({point})"
    do = f"if a file system belongs at {path}: stop the gateway, move the directory away, mount it" if on_root else ""
    return Check(place.name, "path", "WARN" if on_root else "OK", value, _WHY, do)


def explain(error: Exception, path: Path | None) -> tuple[str, str]:
    """What an error means, and what to do about it."""
    where = f" {path}" if path is not None else ""
    if isinstance(error, ForebayError):
        return str(error), _REMEDIES.get(error.kind, "look at the tier's configuration and at the gateway's log")
    name = getattr(error, "strerror", None) or str(error)
    number = getattr(error, "errno", 0) or 0
    do = _BY_ERRNO.get(number, "look at the kernel's log (dmesg) and at the mount")
    return f"{name}:{where}", do


_BY_ERRNO = {
    errno.EROFS: "mount it for writing: mount -o remount,rw",
    errno.EACCES: "run this as the gateway's user, or give that user the directory",
    errno.EPERM: "run this as the gateway's user, or give that user the directory",
    errno.ENOSPC: "free space on it",
    errno.EDQUOT: "free space in the quota",
    errno.ENOTDIR: "remove what is in the directory's place",
    errno.EMFILE: "raise the open-file limit: ulimit -n 65536",
}
_REMEDIES = {
    "unavailable": "see that it is up and can be reached from this node",
    "permission_denied": "check the credentials (standard AWS chain) and their rights, or who owns the directory",
    "invalid_argument": "correct the tier's bucket, endpoint or region",
    "corrupt": "take it out of use: it gives back other bytes than it was given",
}


def refuse_size(places: list[Place], size: int) -> None:
    """Raise InvalidArgument, with the nearest size that would do, where a checkpoint of `size` does not fit. A place on which
    none fits is no longer usable, and says so."""
    if size < SIZE_MIN:
        raise InvalidArgument(f"--size {format_size(size)} measures nothing; the least is {format_size(SIZE_MIN)}")
    directories = [place for place in places if place.path is not None and place.usable]
    for place in directories:
        if place.room < SIZE_MIN:
            place.fail(f"{place.path} is full: {size_text(max(0, place.room))} may be used", "free space on it")
    tight = min((place for place in directories if place.usable), key=lambda place: place.room, default=None)
    if tight is not None and tight.room < size:
        nearest = 1 << tight.room.bit_length() - 1
        raise InvalidArgument(
            f"--size {format_size(size)} does not fit on {tight.name}: {size_text(tight.room)} may be used there; "
            f"the nearest that fits is --size {format_size(nearest)}"
        )


def _room(place: Place, path: Path) -> int:
    found = os.statvfs(path)
    reserve = int(found.f_blocks * found.f_frsize * _SPARE) if place.reserve is None else place.reserve
    return found.f_bavail * found.f_frsize - reserve
