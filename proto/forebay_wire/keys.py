"""Where a checkpoint's files lie below a tier's root, as keys with '/': what a gateway writes and an export without one reads.

Owns this part of the key scheme. A gateway's own documents have the rest of it (core/layout in the gateway).
"""

import re

from forebay_wire.names import session8

STEP_DIR = re.compile(r"step-(\d{12,20})\Z")
MANIFEST_NAME = "manifest.json"


def step_dir(run: str, step: int) -> str:
    """All that belongs to one checkpoint."""
    return f"{run}/step-{step:012d}"


def session_dir(run: str, step: int, session: str) -> str:
    """One session's files of one checkpoint."""
    return f"{step_dir(run, step)}/{session8(session)}"


def shard_key(run: str, step: int, session: str, name: str) -> str:
    """The shard's plain bytes, or a pack's."""
    return f"{session_dir(run, step, session)}/{name}"


def manifest_key(run: str, step: int) -> str:
    """The document that makes the checkpoint complete on this tier."""
    return f"{step_dir(run, step)}/{MANIFEST_NAME}"


def parse_step_dir(segment: str) -> int | None:
    """The step of a directory name, None where it is none."""
    match = STEP_DIR.match(segment)
    if match is None:
        return None
    step = int(match.group(1))
    return step if f"step-{step:012d}" == segment and step < 2**64 else None
