"""Small decisions that are the same everywhere.

Owns rules over names and rows, without I/O.
"""

from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache

from forebay_gateway.core.config_sections import PolicyConfig
from forebay_gateway.core.records import Origin, PublishState, SessionRow, SessionSums


def is_whole(session: SessionRow, committed: int) -> bool:
    """Whether every shard of every writer has landed and verified somewhere, where `committed` parts of it are on this node: on
    a tier, or in this node's cache."""
    if PublishState.COMPLETE in session.publish.values():
        return True
    return session.origin is not Origin.TIER and not session.reason and committed >= session.writers


def is_unfinished(session: SessionRow, sums: SessionSums) -> bool:
    """Whether something of it is still to come, as long as it is not whole: a part, or its way to a tier."""
    if sums.parts > sums.committed or PublishState.PENDING in session.publish.values():
        return True
    return session.origin is Origin.LOCAL and not session.publish


def fits(glob: str, run: str) -> bool:
    """Whether a pattern of runs is for this run: `*` and `?` within a segment, `**` for any number of them, also none."""
    return _matches(tuple(glob.split("/")), tuple(run.split("/")))


@lru_cache(maxsize=4096)
def _matches(pattern: tuple[str, ...], segments: tuple[str, ...]) -> bool:
    if not pattern:
        return not segments
    if pattern[0] == "**":
        return _matches(pattern[1:], segments) or (bool(segments) and _matches(pattern, segments[1:]))
    return bool(segments) and fnmatchcase(segments[0], pattern[0]) and _matches(pattern[1:], segments[1:])


def policy_of(run: str, policies: Sequence[PolicyConfig]) -> PolicyConfig:
    """The first that fits the run; else what holds without any."""
    return next((policy for policy in policies if fits(policy.run, run)), PolicyConfig(run="**"))
