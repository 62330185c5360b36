"""Would a gateway start with these directories: what can be seen of them before anything is made.

Owns these looks, for the start itself and for `forebay config check`, and that the start tells of a cache that it made. A look
writes nothing, and proves nothing of a tier: that is `forebay doctor`'s. What only opening the cache can tell (its lock, its
format) is cache/layout's.
"""

import errno
import logging
import os
import shutil
import stat
from pathlib import Path

from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.cache.mounts import check_local
from forebay_gateway.core.config_sections import MIB, CacheConfig, Config, TierConfig
from forebay_gateway.core.errors import StartupError
from forebay_gateway.core.quantities import size_text

log = logging.getLogger("forebay.cache")

CAPACITY_SHARE = 0.8  # of the disk, where none is configured


def open_cache(config: Config) -> tuple[CacheDir, int]:
    """The cache, made where it was not there, and the bytes that it may fill. Raises as check_cache() before anything is made,
    and as CacheDir.open()."""
    path = Path(config.cache.path)
    capacity = check_cache(config.cache)
    was_there = path.is_dir()
    cache = CacheDir.open(path, config.node.id)
    if not was_there:  # as of a tier: it lies on whatever was there, the node's own disk where a mount is missing
        device = path.stat().st_dev
        log.warning(
            "the cache's directory was not there, and was made: if a disk belongs at this path, stop, remove the directory and "
            "mount it path=%s device=%s:%s",
            path,
            os.major(device),
            os.minor(device),
        )
    return cache, capacity


def check_places(config: Config) -> None:
    """Raise StartupError for the first directory that cannot serve, saying which key names it and what to do."""
    check_cache(config.cache)
    for tier in config.tiers:
        if tier.kind == "posix":
            _check_tier(tier)


def check_cache(cache: CacheConfig) -> int:
    """Bytes that the cache may fill. Raises StartupError: a file in the way, no right to write, a network file system, fewer
    bytes on the disk than the capacity."""
    path = Path(cache.path)
    nearest = _nearest("cache.path", path)
    if not os.access(nearest, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        if os.statvfs(nearest).f_flag & os.ST_RDONLY:
            raise StartupError(f"cache.path {path} cannot be written: Read-only file system; mount it for writing")
        does = "is not this user's to write" if nearest == path else f"cannot be made: this user may not write in {nearest}"
        raise StartupError(
            f"cache.path {path} {does}; give uid {os.geteuid()} the directory, or set cache.path to one below its own"
        )
    check_local(path)
    return capacity_of(cache.capacity, shutil.disk_usage(nearest).total)


def capacity_of(configured: int | None, disk_bytes: int) -> int:
    """Bytes that the cache may fill on a disk of that size. Raises StartupError for more than there are."""
    usual = int(disk_bytes * CAPACITY_SHARE)
    if configured is None:
        return usual
    if configured > disk_bytes:
        raise StartupError(
            f"cache.capacity is {size_text(configured)}, and the disk of cache.path has {size_text(disk_bytes)} in all; "
            f'set at most "{usual // MIB}MiB", {CAPACITY_SHARE:.0%} of it, or leave the key out'
        )
    return configured


def _check_tier(tier: TierConfig) -> None:
    """That nothing is in the way. One that is not there may be mounted yet."""
    _nearest(f"tier.path of tier {tier.name!r}", Path(tier.path))


def _nearest(key: str, path: Path) -> Path:
    """The directory itself, else the nearest above it that is there. Raises StartupError where that is none."""
    at = path.absolute()
    while True:
        try:
            is_directory = stat.S_ISDIR(at.stat().st_mode)
            break
        except (FileNotFoundError, NotADirectoryError):
            if at.is_symlink():
                raise StartupError(f"{key} {path} cannot be made: {at} is a link that leads nowhere") from None
            at = at.parent
        except OSError as error:
            why = error.strerror
            if error.errno == errno.EACCES:
                why = f"this user (uid {os.geteuid()}) may not look into a directory above it"
            raise StartupError(f"{key} {path} cannot be reached: {why}") from error
    if not is_directory:
        what = f"{key} {path} is a file" if at == path.absolute() else f"{key} {path} lies below {at}, a file"
        raise StartupError(f"{what}; name a directory")
    return at
