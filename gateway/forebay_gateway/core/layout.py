"""Where things lie on a tier, as keys relative to its root (DESIGN: plain files come out).

Owns the key scheme only. Keys use '/'; a tier maps them to paths or object keys.
"""

import re

from forebay_wire.names import session8

CONTROL_DIR = ".forebay"
STEP_DIR = re.compile(r"step-(\d{12,20})\Z")
MANIFEST_NAME = "manifest.json"
CURRENT_NAME = "current"


def step_dir(run: str, step: int) -> str:
    """All that belongs to one checkpoint."""
    return f"{run}/step-{step:012d}"


def session_dir(run: str, step: int, session: str) -> str:
    """One session's files of one checkpoint."""
    return f"{step_dir(run, step)}/{session8(session)}"


def shard_key(run: str, step: int, session: str, name: str) -> str:
    """The shard's plain bytes."""
    return f"{session_dir(run, step, session)}/{name}"


def part_key(run: str, step: int, session: str, writer: int) -> str:
    """The record that one writer's shards are verified on this tier."""
    return f"{session_dir(run, step, session)}/{CONTROL_DIR}/parts/{writer}.json"


def manifest_key(run: str, step: int) -> str:
    """The document that makes the checkpoint complete on this tier."""
    return f"{step_dir(run, step)}/{MANIFEST_NAME}"


def current_key(run: str, step: int) -> str:
    """POSIX only: a symbolic link to the complete session's directory."""
    return f"{step_dir(run, step)}/{CURRENT_NAME}"


def announce_key(run: str, step: int, session: str, writer: int) -> str:
    """The record that one writer's part is durable in some node's cache."""
    return f"{CONTROL_DIR}/announce/{session_dir(run, step, session)}/{writer}.json"


def parse_step_dir(segment: str) -> int | None:
    """The step of a directory name, None where it is none."""
    match = STEP_DIR.match(segment)
    if match is None:
        return None
    step = int(match.group(1))
    return step if f"step-{step:012d}" == segment and step < 2**64 else None
