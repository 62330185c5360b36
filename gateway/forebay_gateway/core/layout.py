"""Where things lie on a tier, as keys relative to its root (DESIGN: plain files come out).

Owns the keys of a gateway's own documents; those of checkpoints are forebay_wire.keys', and named here too. Keys use '/'; a
tier maps them to paths or object keys.
"""

from forebay_wire.keys import MANIFEST_NAME, manifest_key, parse_step_dir, session_dir, shard_key, step_dir
from forebay_wire.names import RESERVED_PREFIX

__all__ = [
    "CONTROL_DIR",
    "CURRENT_NAME",
    "MANIFEST_NAME",
    "announce_key",
    "current_key",
    "manifest_key",
    "parse_step_dir",
    "part_key",
    "session_dir",
    "shard_key",
    "step_dir",
]

CONTROL_DIR = RESERVED_PREFIX
CURRENT_NAME = "current"


def part_key(run: str, step: int, session: str, writer: int) -> str:
    """The record that one writer's shards are verified on this tier."""
    return f"{session_dir(run, step, session)}/{CONTROL_DIR}/parts/{writer}.json"


def current_key(run: str, step: int) -> str:
    """POSIX only: a symbolic link to the complete session's directory."""
    return f"{step_dir(run, step)}/{CURRENT_NAME}"


def announce_key(run: str, step: int, session: str, writer: int) -> str:
    """The record that one writer's part is durable in some node's cache."""
    return f"{CONTROL_DIR}/announce/{session_dir(run, step, session)}/{writer}.json"
