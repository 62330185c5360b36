"""Where things lie on a tier, as keys relative to its root (DESIGN: plain files come out).

Owns the keys of a gateway's own documents; those of checkpoints are forebay_wire.keys', and named here too. Keys use '/'; a
tier maps them to paths or object keys.
"""

from hashlib import sha256
from urllib.parse import quote, unquote

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
    "verdicts_key",
]

CONTROL_DIR = RESERVED_PREFIX
CURRENT_NAME = "current"
RUNS_DIR = "runs"
VERDICTS_DIR = "verdicts"
RUN_PIECE = 200


def part_key(run: str, step: int, session: str, writer: int) -> str:
    """The record that one writer's shards are verified on this tier."""
    return f"{session_dir(run, step, session)}/{CONTROL_DIR}/parts/{writer}.json"


def current_key(run: str, step: int) -> str:
    """POSIX only: a symbolic link to the complete session's directory."""
    return f"{step_dir(run, step)}/{CURRENT_NAME}"


def announce_key(run: str, step: int, session: str, writer: int) -> str:
    """The record that one writer's part is durable in some node's cache."""
    return f"{CONTROL_DIR}/announce/{session_dir(run, step, session)}/{writer}.json"


def verdicts_key(run: str) -> str:
    """Which of the run's checkpoints go to this tier, where the nodes that save them must all do the same."""
    return f"{CONTROL_DIR}/{VERDICTS_DIR}/{sha256(run.encode()).hexdigest()[:32]}.json"


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
