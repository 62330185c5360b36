"""Which checkpoints of a run go to a tier, decided once for all nodes that save them: the document that says so.

Owns its shape, and what may follow on what: the first word on a checkpoint counts, but for one: what was left out may go after
all. What goes is never left out afterwards. No I/O, no clock.
"""

from collections.abc import Sequence

import msgspec

from forebay_gateway.core.run_documents import Name, read_run_document

FORMAT = "forebay.verdicts"
VERDICTS_MAX = 256  # of a run, the newest: what a node was away for that long, it decides by the same rules (paths/joint.py)


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

    @property
    def names(self) -> tuple[Name, ...]:
        """Of whom something was said."""
        return tuple(each.name for each in self.verdicts)

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


def read_verdicts(document: bytes, run: str) -> RunVerdicts | None:
    """The document; None for what is none of this run: it is made anew, and then nothing was decided yet.

    Raises Unsupported for one that a newer release has written.
    """
    return read_run_document(document, run, RunVerdicts, FORMAT, "a newer release decides what of this run goes to the tier")
