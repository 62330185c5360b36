"""What an errno of a file system means to a tier.

Owns the table. ENOENT is not in it: whether a file is absent or the whole tier is away only posix.py can tell.
"""

import errno

from forebay_gateway.core.errors import ForebayError, InvalidArgument, PermissionDenied, Unavailable, Unsupported
from forebay_gateway.tiers.base import StorageFull

_TABLE: dict[int, tuple[type[ForebayError], str]] = {
    errno.ENOSPC: (StorageFull, "the file system has no space left"),
    errno.EDQUOT: (StorageFull, "the quota on the file system is used up"),
    errno.EACCES: (PermissionDenied, "the file system refuses access"),
    errno.EPERM: (PermissionDenied, "the file system refuses access"),
    errno.EROFS: (PermissionDenied, "the file system is mounted read-only"),
    errno.ENAMETOOLONG: (InvalidArgument, "the name is too long for the file system"),
    errno.EISDIR: (InvalidArgument, "a directory stands where the file should be"),
    errno.ENOTDIR: (InvalidArgument, "a file stands where a directory should be"),
    errno.EOPNOTSUPP: (Unsupported, "the file system does not have this operation"),
    errno.ENOSYS: (Unsupported, "the file system does not have this operation"),
    errno.EFBIG: (InvalidArgument, "the file is larger than the file system allows"),
}
_AWAY = "the file system cannot serve this now"


def translate(error: OSError, tier: str, key: str, act: str) -> ForebayError:
    """The error to raise from `error`. What the table does not list may pass, so it is Unavailable."""
    number = error.errno or 0
    cls, sentence = _TABLE.get(number, (Unavailable, _AWAY))
    name = errno.errorcode.get(number, str(number))
    return cls(sentence, tier=tier, key=key, act=act, errno=name)
