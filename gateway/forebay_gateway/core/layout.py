"""Where things lie on a tier, as keys relative to its root (DESIGN: plain files come out).

Owns the key scheme only. Keys use '/'; a tier maps them to paths or object keys.
"""

import re
from urllib.parse import quote, unquote

from forebay_wire.names import session8

CONTROL_DIR = ".forebay"
STEP_DIR = re.compile(r"step-(\d{12,20})\Z")
MANIFEST_NAME = "manifest.json"
CURRENT_NAME = "current"
RUNS_DIR = "runs"
RUN_PIECE = 200


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


def run_key(run: str) -> str:
    """Says that the run has something on this tier: all runs are found by listing RUNS_DIR, whatever else lies in the bucket.

    The name, percent-encoded; one too long for a file's name is cut into directories.
    """
    name = quote(run, safe="")
    pieces = [name[begin : begin + RUN_PIECE] for begin in range(0, len(name), RUN_PIECE)]
    return "/".join((CONTROL_DIR, RUNS_DIR, *pieces)) + ".json"


def parse_run_key(key: str) -> str | None:
    """The run's name, None for what is no such key."""
    prefix = f"{CONTROL_DIR}/{RUNS_DIR}/"
    if not key.startswith(prefix) or not key.endswith(".json"):
        return None
    run = unquote(key[len(prefix) : -len(".json")].replace("/", ""), errors="replace")
    return run if run and run_key(run) == key else None


def parse_step_dir(segment: str) -> int | None:
    """The step of a directory name, None where it is none."""
    match = STEP_DIR.match(segment)
    if match is None:
        return None
    step = int(match.group(1))
    return step if f"step-{step:012d}" == segment and step < 2**64 else None
