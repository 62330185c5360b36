"""Which checkpoints of a run go to a tier, decided once for all nodes that save them: the document that says so.

Owns its shape, and what may follow on what: the first word on a checkpoint counts, but for one: what was left out may go after
all. What goes is never left out afterwards. No I/O, no clock.
"""

from collections.abc import Sequence

import msgspec

from forebay_gateway.core.errors import Unsupported

FORMAT = "forebay.verdicts"
VERDICTS_MAX = 256  # of a run, the newest: what a node was away for that long, it decides by the same rules (paths/joint.py)
STEP_MAX = 2**64 - 1

Name = tuple[int, str]  # step, session8


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """Of one session of a checkpoint: whether it goes to the tier; why not; which node said so, for people."""

    step: int
    session: str
    goes: bool
    reason: str = ""
    node: str = ""

    @property
    def name(self) -> Name:
        """What tells it from others of its run."""
        return self.step, self.session

    def yields_to(self, other: "Verdict") -> bool:
        """Whether `other` takes its place: a skip is taken back, and nothing else is."""
        return not self.goes and other.goes


class RunVerdicts(msgspec.Struct, frozen=True, kw_only=True):
    """All of a run on one tier, in the order in which they were said."""

    format: str = FORMAT
    run: str
    verdicts: tuple[Verdict, ...] = ()

    def of(self, name: Name) -> Verdict | None:
        """What was said of this one."""
        return next((verdict for verdict in reversed(self.verdicts) if verdict.name == name), None)

    def plus(self, verdict: Verdict) -> "RunVerdicts":
        """With one more, in place of what was said of the same session; the oldest go."""
        others = tuple(each for each in self.verdicts if each.name != verdict.name)
        return RunVerdicts(run=self.run, verdicts=(*others, verdict)[-VERDICTS_MAX:])

    def without(self, names: Sequence[Name]) -> "RunVerdicts":
        """As if nothing had been said of these."""
        return RunVerdicts(run=self.run, verdicts=tuple(each for each in self.verdicts if each.name not in names))

    def to_json(self) -> bytes:
        """The document."""
        return msgspec.json.encode(self)


class _Kind(msgspec.Struct, frozen=True):
    format: str = ""


def read_verdicts(document: bytes, run: str) -> RunVerdicts | None:
    """The document; None for what is none of this run: it is made anew, and then nothing was decided yet.

    Raises Unsupported for one that a newer release has written.
    """
    try:
        kind = msgspec.json.decode(document, type=_Kind).format
        if kind != FORMAT and kind.startswith(FORMAT):
            raise Unsupported("a newer release decides what of this run goes to the tier", run=run, format=kind)
        found = msgspec.json.decode(document, type=RunVerdicts)
    except (msgspec.DecodeError, RecursionError):
        return None
    is_ours = (found.format, found.run) == (FORMAT, run)
    return found if is_ours and all(0 <= each.step <= STEP_MAX for each in found.verdicts) else None
