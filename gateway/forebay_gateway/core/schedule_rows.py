"""What the drain scheduler keeps: parts, checkpoints, runs, and the rules and answers that others see.

Owns the shapes and what can be said of one of them alone. The rules in words, and how they work together, are in schedule.py.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from math import inf


class Kind(IntEnum):
    """The class of a checkpoint; lower goes first."""

    PREEMPTION = 0
    FINAL = 1
    PERIODIC = 2


def kind_named(name: str, default: Kind = Kind.PERIODIC) -> Kind:
    """By its name in small letters; `default` for a name that is none."""
    return next((kind for kind in Kind if kind.name.lower() == name), default)


REMEMBERED_MAX = 64  # checkpoints of a run that have gone
AGE_LIMITS_S = {Kind.PREEMPTION: 30.0, Kind.FINAL: 120.0, Kind.PERIODIC: 900.0}


@dataclass(frozen=True, slots=True)
class RunRules:
    """What holds for one run on one tier. Raises ValueError for what makes no sense."""

    every: int = 1  # each so many periodic checkpoints
    min_interval_s: float = 0.0  # between the beginnings of two periodic ones
    defer_max_s: float = 6 * 3600.0  # what cadence holds back and nothing supersedes goes after this
    skip_superseded: bool = False  # whether a lagging drain may skip
    lag_s: float = 60.0  # how long one has waited before the drain counts as lagging
    weight: float = 1.0  # of its share

    @property
    def has_cadence(self) -> bool:
        """Whether not every checkpoint has to go."""
        return self.every > 1 or self.min_interval_s > 0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1 every={self.every}")
        if min(self.min_interval_s, self.defer_max_s, self.lag_s) < 0:
            raise ValueError("min_interval_s, defer_max_s and lag_s must be at least 0")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be above 0 weight={self.weight}")


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for all of a tier. Raises ValueError for what makes no sense."""

    max_age_s: float = 3600.0
    age_limits_s: Mapping[Kind, float] = field(default_factory=lambda: AGE_LIMITS_S)
    quantum_bytes: int = 2 << 30  # twice a drain's largest batch or more, or shares are coarser than a round

    def __post_init__(self) -> None:
        if self.max_age_s <= 0 or self.quantum_bytes < 1:
            raise ValueError("max_age_s and quantum_bytes must be above 0")

    def age_limit_of(self, kind: Kind) -> float:
        """Seconds; never above `max_age_s`, so that who is older than that is also first in its class."""
        return min(self.age_limits_s.get(kind, AGE_LIMITS_S[kind]), self.max_age_s)


@dataclass(frozen=True, slots=True)
class Part:
    """What one writer committed of one checkpoint, as far as it waits for this tier."""

    order: int  # its commit's number on this node: unique, 1 or more, later ones higher
    run: str
    step: int
    session_id: int  # the checkpoint's
    copies: int  # shards that are pending
    since_s: float  # when it became pending
    kind: Kind = Kind.PERIODIC
    pinned: bool = False
    started: bool = False  # whether some of the checkpoint is on the tier already
    may_skip: bool = True  # whether this node decides on the checkpoint


@dataclass(frozen=True, slots=True)
class Next:
    """Hand out a batch of this part. `why` is "prioritised", "overdue", or its class in small letters."""

    order: int
    session_id: int
    run: str
    step: int
    why: str


@dataclass(frozen=True, slots=True)
class Skip:
    """This checkpoint does not go to this tier; these are its parts here."""

    session_id: int
    run: str
    step: int
    orders: tuple[int, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class Idle:
    """Nothing can go before this time; None: until something is told."""

    until_s: float | None


Place = tuple[float, int, int, int]  # turn, class, order, session: in the list for people, the first first


class Run:
    """One run on one tier."""

    def __init__(self, name: str, rules: RunRules) -> None:
        self.name = name
        self.rules = rules
        self.lanes = {kind: Lane(kind) for kind in Kind}
        self.waiting = 0  # checkpoints here
        self.seen = 0  # checkpoints so far
        self.taken: int | None = None  # the number of the newest that began to go
        self.taken_s = 0.0
        self.complete: dict[int, Checkpoint] = {}  # by order, the newest complete ones, here or gone
        self.newest_complete = 0
        self.finished: dict[int, Checkpoint] = {}  # the last ones that went: a late part of theirs may come
        self.latest: list[tuple[int, int, Checkpoint]] = []  # heap of those that nothing supersedes yet

    def completed(self, checkpoint: "Checkpoint") -> None:
        """It is complete."""
        self.complete[checkpoint.order] = checkpoint
        if len(self.complete) > REMEMBERED_MAX:
            del self.complete[min(self.complete)]
        self.newest_complete = max(self.complete)

    def no_more_complete(self, checkpoint: "Checkpoint") -> None:
        """It was deleted, or is held: it supersedes nothing."""
        if self.complete.get(checkpoint.order) is checkpoint:
            del self.complete[checkpoint.order]
            self.newest_complete = max(self.complete, default=0)

    def finish(self, checkpoint: "Checkpoint") -> None:
        """No part of it waits any more."""
        self.waiting -= 1
        self.finished[checkpoint.session_id] = checkpoint
        if len(self.finished) > REMEMBERED_MAX:
            self.finished.pop(next(iter(self.finished)))


class Lane:
    """One run's queue in one class."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.virtual = 0.0  # bytes it was given, by weight
        self.heap: list[tuple[bool, float, int, int, Checkpoint]] = []
        self.listed: tuple[int, float, int] | None = None  # as it stands in its class's heap
        self.aged: tuple[float, int] | None = None  # as it stands in the heap of ages


class Checkpoint:
    """One session of a checkpoint, with its parts on this node that wait for the tier."""

    def __init__(self, run: Run, first: Part, deadline_s: float) -> None:
        run.seen += 1
        self.run = run
        self.session_id = first.session_id
        self.step = first.step
        self.order = first.order
        self.ordinal = run.seen
        self.since_s = self.waits_since_s = first.since_s
        self.deadline_s = deadline_s
        self.kind = first.kind
        self.lane = run.lanes[first.kind]
        self.pinned = False
        self.started = False
        self.complete = False
        self.may_skip = True
        self.awaits = False  # the decision of another node
        self.goes = False  # was decided, for all nodes
        self.deferred_until_s = 0.0  # above 0: cadence holds it back
        self.parts: set[int] = set()
        self.ready: list[int] = []  # heap of orders
        self.listed: tuple[bool, float, int] | None = None  # as it stands in its lane's heap
        self.turn = 0  # above 0: some part is prioritised
        self.indexed: Place | None = None  # as it stands in the list for people

    def add(self, part: Part) -> None:
        """One more of its parts."""
        self.parts.add(part.order)
        self.pinned = self.pinned or part.pinned
        self.may_skip = self.may_skip and part.may_skip

    def move(self, kind: Kind) -> None:
        """To another class."""
        self.kind, self.lane, self.listed = kind, self.run.lanes[kind], None

    @property
    def place(self) -> "Place":
        """Where it stands in the list for people."""
        return self.turn or inf, self.kind, self.order, self.session_id

    @property
    def is_superseded(self) -> bool:
        """Whether a newer complete checkpoint of its run is here or on the tier."""
        return self.order < self.run.newest_complete

    def inherit(self, skipped: "Checkpoint", now_s: float) -> bool:
        """It goes in the place of one that was skipped, which may have waited for long; whether that changes its place."""
        if self.started or self.kind is not skipped.kind or skipped.held_back_until_s() > now_s:
            return False
        self.waits_since_s = min(self.waits_since_s, skipped.waits_since_s)
        self.deadline_s = min(self.deadline_s, skipped.deadline_s)
        return True

    def waits_for(self, until_s: float) -> bool:
        """Whether cadence holds it back until just then."""
        return bool(self.parts) and self.deferred_until_s == until_s

    def held_back_until_s(self) -> float:
        """The time before which cadence lets it not go; 0 where it is due, infinity until another node has decided."""
        run, rules = self.run, self.run.rules
        if self.kind is not Kind.PERIODIC or self.started or self.pinned or self.goes:
            return 0.0
        if self.awaits:
            return inf
        if run.taken is None:
            return 0.0
        if self.is_superseded and not self.may_skip:
            return 0.0
        until_s = run.taken_s + rules.min_interval_s if rules.min_interval_s else 0.0
        if rules.every > 1 and self.ordinal - run.taken < rules.every:
            until_s = max(until_s, self.since_s + rules.defer_max_s)
        return until_s


class Waiting:
    """One part in the queue."""

    __slots__ = ("checkpoint", "favoured", "held", "left", "listed", "out", "overdue", "part", "paused_until_s", "turn")

    def __init__(self, part: Part, checkpoint: Checkpoint) -> None:
        self.part = part
        self.checkpoint = checkpoint
        self.left = part.copies  # to be handed out
        self.out = 0  # handed out, not yet proved
        self.held = False
        self.paused_until_s = 0.0
        self.turn = 0  # above 0: prioritised
        self.favoured = False  # whether it stands in the heap of those
        self.listed = False  # whether it stands in its checkpoint's heap
        self.overdue = False  # why it was chosen last

    @property
    def ready(self) -> bool:
        """Whether something of it may be handed out, as far as it alone can tell."""
        return self.left > 0 and not self.held and not self.paused_until_s

    def waits_for(self, until_s: float) -> bool:
        """Whether it is paused until just then."""
        return self.paused_until_s == until_s and self.part.order in self.checkpoint.parts


@dataclass(frozen=True, slots=True)
class Entry:
    """A checkpoint in the queue of a tier, for people."""

    session_id: int
    run: str
    step: int
    order: int
    kind: Kind
    parts: int
    copies: int  # not yet proved
    state: str  # "going", "held", "deferred" (cadence), "awaiting" (another node decides), "paused" (its last try failed, or
    # it waits for others), "waiting"
    until_s: float  # of "deferred" and "paused"
    turn: int  # above 0: prioritised

    @property
    def place(self) -> Place:
        """Where it stood in the list when it was looked at."""
        return self.turn or inf, self.kind, self.order, self.session_id

    @classmethod
    def of(cls, checkpoint: Checkpoint, parts: list[Waiting]) -> "Entry":
        """As it stands."""
        until_s = 0.0
        if any(part.out for part in parts):
            state = "going"
        elif any(part.held for part in parts):
            state = "held"
        elif checkpoint.awaits:
            state = "awaiting"
        elif checkpoint.deferred_until_s:
            state, until_s = "deferred", checkpoint.deferred_until_s
        elif all(part.paused_until_s for part in parts):
            state, until_s = "paused", min(part.paused_until_s for part in parts)
        else:
            state = "waiting"
        return cls(
            checkpoint.session_id,
            checkpoint.run.name,
            checkpoint.step,
            checkpoint.order,
            checkpoint.kind,
            len(parts),
            sum(part.left + part.out for part in parts),
            state,
            until_s,
            checkpoint.turn,
        )
