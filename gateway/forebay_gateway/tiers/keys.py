"""Keys as every tier takes them: '/'-separated segments relative to the tier's root.

Owns the check that a key stays below the root. Does not own what keys mean (core/layout).
"""

from forebay_gateway.core.errors import InvalidArgument


def check_key(key: str) -> str:
    """Return `key` if it names something below a tier's root, else raise InvalidArgument."""
    if not key or any(segment in ("", ".", "..") for segment in key.split("/")) or "\0" in key:
        raise InvalidArgument("a tier key needs non-empty segments other than '.' and '..'", key=repr(key))
    return key


def directory_of(prefix: str) -> str:
    """A listing's prefix in one form: "" for the root, else checked segments without a final '/'."""
    trimmed = prefix.rstrip("/")
    return check_key(trimmed) if trimmed else ""
