"""Small decisions that are the same everywhere.

Owns rules over names and rows, without I/O.
"""

# DCP's reader takes this file for the sign that the checkpoint is whole.
COMMIT_LAST_NAMES = frozenset({".metadata"})


def is_commit_last(name: str) -> bool:
    """Whether a shard is put on a tier only after all others of its checkpoint are verified there."""
    return name.rpartition("/")[2] in COMMIT_LAST_NAMES
