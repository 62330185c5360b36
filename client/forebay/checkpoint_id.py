"""forebay://RUN/STEP: how one checkpoint is named in one text.

Owns reading and writing these. Does not own which runs and steps are allowed (forebay_wire.names), nor what lies inside a
step (fsspec/paths.py).
"""

import os
from dataclasses import dataclass

from forebay.errors import InvalidArgument
from forebay_wire.names import InvalidName, check_run, check_step

SCHEME = "forebay://"
LATEST = "latest"


@dataclass(frozen=True, slots=True)
class CheckpointId:
    """A run and a step; `step` may be "latest" where something is read."""

    run: str
    step: int | str

    def __str__(self) -> str:
        return f"{SCHEME}{self.run}/{self.step}"


def parse(checkpoint_id: str | os.PathLike[str]) -> CheckpointId:
    """Of "forebay://RUN/STEP", where RUN may have several segments. Raises InvalidArgument."""
    text = os.fspath(checkpoint_id)
    run, _, step = text.removeprefix(SCHEME).rpartition("/")
    if not text.startswith(SCHEME) or not run or not (step == LATEST or (step.isascii() and step.isdigit())):
        raise InvalidArgument(
            f"checkpoint_id {text!r} is not of the form {SCHEME}RUN/STEP, such as {SCHEME}team-a/llama-70b/100"
        )
    return checked(run, step if step == LATEST else int(step))


def checked(run: str, step: int | str) -> CheckpointId:
    """Of a run and a step. Raises InvalidArgument."""
    if not isinstance(run, str):
        raise InvalidArgument(f"a run's name must be text, not {type(run).__name__}")
    try:
        check_run(run)
        if step != LATEST:
            check_step(step)  # type: ignore[arg-type]  # it says what is wrong with what is no number
    except InvalidName as error:
        raise InvalidArgument(str(error)) from error
    return CheckpointId(run, step)


def of_arguments(run: str | None, step: int | str | None) -> CheckpointId | None:
    """Of what a storage class was made with: run and step, a checkpoint_id in place of the run, or nothing yet.

    Raises InvalidArgument.
    """
    if run is None and step is None:
        return None
    if isinstance(run, str | os.PathLike) and step is None:
        return parse(run)
    if run is None or step is None:
        raise InvalidArgument("run and step belong together; or give a checkpoint_id, " + f"{SCHEME}RUN/STEP")
    return checked(run, step)
