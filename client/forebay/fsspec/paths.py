"""RUN/STEP/NAME: how a path is taken apart.

Owns which segment is the step. A run's name and a file's may both have several segments, and these may be numbers, so there is
a rule: the step is the first segment `step-N`, which no run's name can have, else the first that is a number or "latest" and is
not the very first. Does not own which names are allowed (forebay_wire.names).
"""

import re
from dataclasses import dataclass

from forebay.checkpoint_id import LATEST, SCHEME, checked
from forebay.errors import InvalidArgument
from forebay_wire.names import InvalidName, check_run, check_shard_name

_STEP_DIRECTORY = re.compile(r"step-([0-9]+)", re.ASCII)
_NUMBER = re.compile(r"[0-9]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a path leads. Without a step, `run` is a run's name or the beginning of some; "" is the root.

    `name` is a file or directory inside the step, "" the step itself; `root` is the path up to the step, as it was written.
    """

    path: str
    run: str
    step: int | str | None = None
    root: str = ""
    name: str = ""

    def below(self, name: str) -> str:
        """The path of a name inside the step."""
        return f"{self.root}/{name}" if name else self.root

    @property
    def key(self) -> tuple[str, int]:
        """Run and step, to write to. Raises InvalidArgument where no step, or no certain one, is named."""
        if not isinstance(self.step, int):
            said = "a step is a number where something is written" if self.step else "it names no step"
            raise InvalidArgument(f"{SCHEME}{self.path}: {said}; write {SCHEME}RUN/STEP/NAME")
        return self.run, self.step


def parse(path: str) -> Place:
    """Of a path without its scheme. Raises InvalidArgument for a name that is not allowed."""
    if not path:
        return Place("", "")
    segments = path.split("/")
    at = _step_at(segments)
    try:
        if at is None:
            return Place(path, check_run(path))
        text = segments[at].removeprefix("step-")
        where = checked("/".join(segments[:at]), LATEST if text == LATEST else _number(text))
        name = "/".join(segments[at + 1 :])
        if name:
            check_shard_name(name)
    except InvalidName as error:
        raise InvalidArgument(f"{SCHEME} path: {error}") from error
    return Place(path, where.run, where.step, "/".join(segments[: at + 1]), name)


def step_path(run: str, step: int) -> str:
    """The path of a step that parse() takes apart into these."""
    plain = f"{run}/{step}"
    return plain if _step_at(plain.split("/")) == run.count("/") + 1 else f"{run}/step-{step}"


def _step_at(segments: list[str]) -> int | None:
    places = range(1, len(segments))
    for at in places:
        if _STEP_DIRECTORY.fullmatch(segments[at]):
            return at
    return next((at for at in places if segments[at] == LATEST or _NUMBER.fullmatch(segments[at])), None)


def _number(digits: str) -> int:
    # Python refuses numbers of thousands of digits with an error of its own.
    return int(digits) if len(digits.lstrip("0")) <= 20 else 1 << 64
