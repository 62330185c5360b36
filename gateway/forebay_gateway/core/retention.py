"""What a tier keeps of a run's checkpoints, and in what order they came: retention's rules over plain facts.

Owns the order (`place`), the verdicts (`decide`) and the document that holds both on a tier. No I/O, no clock: ages are given.

Nothing on a tier says in what order checkpoints of several nodes were committed; steps go back after a rollback, and wall
clocks prove nothing. So the order is what is certain: by commit where this node saw both commits, else by who was there when
another one came, with the steps agreeing. What stays undecided is a group. Only what is certainly newer counts against
`keep_last`, so a doubt keeps one more.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from types import MappingProxyType

import msgspec

from forebay_gateway.core.config_sections import RetainConfig
from forebay_gateway.core.layout import CONTROL_DIR
from forebay_gateway.core.policy import fits
from forebay_gateway.core.run_documents import Name, read_run_document
from forebay_wire.manifest import Manifest

RETAIN_DIR = "retain"
PINS_DIR = "pins"
GONE_MAX = 1000  # of a run, so that a node that was down for long still learns what went
FORMAT = "forebay.retain"


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """A complete checkpoint on a tier. `session` is its session8; `committed_s` what the tier's own clock said when it was
    complete there, None where the tier does not tell."""

    step: int
    session: str
    committed_s: float | None = None
    final: bool = False
    size: int = 0

    @property
    def name(self) -> Name:
        """What tells it from others of its run."""
        return self.step, self.session


Groups = tuple[tuple[Entry, ...], ...]  # oldest first; within a group the order is not known


class Ledger(msgspec.Struct, frozen=True, kw_only=True):
    """A run on a tier: who works on it now, what is complete in what order, what of it goes, what has gone (newest last)."""

    format: str = FORMAT
    run: str
    owner: str = ""  # a node, for people
    token: str = ""  # of the process that holds it; empty: free
    turn: int = 0  # counts writes: a document that is alive changes
    ttl_s: float = 0.0
    groups: Groups = ()
    going: tuple[Entry, ...] = ()
    gone: tuple[Name, ...] = ()

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All that are complete, or were when their removal was noted, oldest first."""
        return tuple(entry for group in self.groups for entry in group)

    @property
    def names(self) -> tuple[Name, ...]:
        """All checkpoints that it names."""
        return (*(entry.name for entry in (*self.entries, *self.going)), *self.gone)

    def has_dropped(self, name: Name) -> bool:
        """Whether retention has taken this checkpoint from the tier, or has begun to."""
        return name in self.gone or any(entry.name == name for entry in self.going)


def read_ledger(document: bytes, run: str) -> Ledger | None:
    """The document; None for what is none of this run: it is made anew, and then all that is there counts as undecided.

    Raises Unsupported for one that a newer release has written: its rules are not known here.
    """
    newer = "a newer release works on this run's retention; it is left to that"
    return read_run_document(document, run, Ledger, FORMAT, newer)


def run_hash(run: str) -> str:
    """The run in a key of one segment, whatever its length."""
    return sha256(run.encode()).hexdigest()[:32]


def ledger_key(run: str) -> str:
    """Of the run's document on a tier."""
    return f"{CONTROL_DIR}/{RETAIN_DIR}/{run_hash(run)}.json"


def tombstone_key(run: str, name: Name) -> str:
    """Of the manifest of a checkpoint that is going: what is still to be deleted, once the manifest itself is gone."""
    return f"{CONTROL_DIR}/{RETAIN_DIR}/{run_hash(run)}/{name[0]:012d}-{name[1]}.json"


RESERVE_KEY = f"{CONTROL_DIR}/{RETAIN_DIR}/reserve"  # of the document that only takes space, see paths/reserve.py


def pins_dir(run: str) -> str:
    """Where nodes say on a tier what they have pinned."""
    return f"{CONTROL_DIR}/{PINS_DIR}/{run_hash(run)}/"


def pin_key(run: str, step: int, node: str) -> str:
    """One node's pin."""
    return f"{pins_dir(run)}{step:012d}-{sha256(node.encode()).hexdigest()[:16]}.json"


def parse_pin_key(key: str) -> int | None:
    """The pinned step; None for what is no such key."""
    digits = key.rpartition("/")[2].partition("-")[0]
    return int(digits) if digits.isascii() and digits.isdigit() else None


def manifest_is_final(manifest: Manifest) -> bool:
    """Whether a complete checkpoint is of the class `final`: one part makes it that."""
    return any(part.kind == "final" for part in manifest.parts)


def rule_of(run: str, tier: str, rules: Sequence[RetainConfig]) -> RetainConfig | None:
    """The rule that counts for a run on a tier: the first that fits and names the tier, else the first that names none."""
    fitting = [rule for rule in rules if rule.tier in ("", tier) and fits(rule.run, run)]
    return next((rule for rule in fitting if rule.tier), next(iter(fitting), None))


# -- order -----------------------------------------------------------------------------------------------------------------


def place(groups: Groups, arrivals: Collection[Entry], commits: Mapping[Name, int]) -> Groups:
    """The groups with those that came into sight together. `commits` is the order of the commits that this node saw.

    An arrival goes behind what it is certainly newer than, before what was certainly committed later, else beside it.
    """
    made = [piece for group in groups for piece in _ordered(group, commits)]
    fresh: set[Name] = set()
    ordered = sorted(arrivals, key=lambda entry: (entry.name not in commits, commits.get(entry.name, 0), entry.name))
    for arrival in ordered:
        _place(made, arrival, commits, fresh)
        fresh.add(arrival.name)
    return tuple(tuple(group) for group in made)


def _ordered(group: Sequence[Entry], commits: Mapping[Name, int]) -> list[list[Entry]]:
    """One by one, where this node knows what another one that worked here did not."""
    if any(entry.name not in commits for entry in group):
        return [list(group)]
    return [[entry] for entry in sorted(group, key=lambda entry: commits[entry.name])]


def _place(groups: list[list[Entry]], arrival: Entry, commits: Mapping[Name, int], fresh: Collection[Name]) -> None:
    at = len(groups)
    while at > 0:
        said = {_is_newer(arrival, other, commits, fresh) for other in _telling(groups[at - 1], arrival, commits, fresh)}
        if False not in said:
            if None in said:
                groups[at - 1].append(arrival)
                return
            break
        at -= 1
    groups.insert(at, [arrival])


def _telling(group: Sequence[Entry], arrival: Entry, commits: Mapping[Name, int], fresh: Collection[Name]) -> Sequence[Entry]:
    """Those of a group that decide. What this node did not commit is certainly older than nothing, so one doubt is enough:
    about the last that came, or the one with the highest step. Very many may have come together."""
    if arrival.name in commits or not group:
        return group
    return group[-1:] if group[-1].name in fresh else (max(group, key=lambda entry: entry.step),)


def _is_newer(entry: Entry, other: Entry, commits: Mapping[Name, int], fresh: Collection[Name]) -> bool | None:
    """Whether the arrival was committed after the other one; None where that is not known."""
    if entry.name in commits and other.name in commits:
        return commits[entry.name] > commits[other.name]
    if other.name in fresh:
        return None  # both came between two looks
    # A lower step that comes later was on its way for long, or its job has gone back: nobody can tell.
    return True if entry.step > other.step else None


# -- verdicts --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether a checkpoint goes from the tier, and why or why not."""

    entry: Entry
    goes: bool
    reason: str


def decide(
    rule: RetainConfig,
    groups: Groups,
    now_s: float | None,
    protected: Mapping[Name, str],
    pinned: Collection[int],
    doubtful: Mapping[Name, str] = MappingProxyType({}),
) -> list[Verdict]:
    """A verdict on each, oldest first. It stays where any key asks for it; also the newest, pinned and final ones, and those
    that `protected` names with a reason. Those that `doubtful` names stay likewise, and no other goes for their sake. `now_s`
    is the tier's own time; None: ages are not known, and `keep_for` keeps."""
    verdicts: list[Verdict] = []
    newer = 0
    kept = {**protected, **doubtful}
    for group in reversed(groups):
        verdicts += [_verdict(rule, entry, newer, now_s, kept, pinned) for entry in reversed(group)]
        newer += sum(entry.name not in doubtful for entry in group)
    return verdicts[::-1]


def _verdict(
    rule: RetainConfig,
    entry: Entry,
    newer: int,
    now_s: float | None,
    protected: Mapping[Name, str],
    pinned: Collection[int],
) -> Verdict:
    reasons = []
    if newer == 0:
        reasons.append("nothing that is complete here is certainly newer")
    if entry.step in pinned:
        reasons.append("it is pinned")
    if entry.final:
        reasons.append("it is a final one")
    if rule.keep_last is not None and 0 < newer < rule.keep_last:
        reasons.append(f"keep_last = {rule.keep_last}")
    if rule.keep_every is not None and entry.step % rule.keep_every == 0:
        reasons.append(f"keep_every = {rule.keep_every}")
    if rule.keep_for is not None and (reason := _age_keeps(rule.keep_for, entry, now_s)):
        reasons.append(reason)
    if entry.name in protected:
        reasons.append(protected[entry.name])
    if reasons:
        return Verdict(entry, False, "; ".join(reasons))
    return Verdict(entry, True, f"no rule keeps it, and {newer} newer complete one{'s are' if newer > 1 else ' is'} here")


def _age_keeps(keep_for_s: float, entry: Entry, now_s: float | None) -> str:
    if entry.committed_s is None or now_s is None:
        return "keep_for, as its age is not known"
    return "keep_for" if now_s - entry.committed_s < keep_for_s else ""
