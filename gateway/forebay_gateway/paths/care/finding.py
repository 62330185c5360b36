"""What care finds, as one record for people, JSON and the repair.

Owns the shape. Kinds are stable words: scripts compare them.
"""

from dataclasses import dataclass
from enum import StrEnum

from forebay_gateway.core.records import ShardKey


class Severity(StrEnum):
    """What a finding means for the exit code."""

    ERROR = "error"  # bytes or rows are not what they should be
    NOTE = "note"  # worth knowing; nothing is wrong with checkpoints


@dataclass(frozen=True, slots=True)
class Finding:
    """`where` is "cache", "catalog" or a tier's name; `remedy` says what a repair does, empty where it can do nothing."""

    kind: str
    where: str
    what: str
    severity: Severity = Severity.ERROR
    run: str = ""
    step: int = 0
    session: str = ""
    name: str = ""  # of the shard
    path: str = ""  # of the file, or the key on the tier
    remedy: str = ""
    outcome: str = ""  # of the repair: "repaired", or why not
    key: ShardKey | None = None
    writer: int = 0
    token: str = ""  # what the remedy needs beside all that: an upload's id
