"""Where a safetensors file lies: run, step and shard name, as arguments or as one path.

Owns reading forebay://RUN/STEP/NAME. Does not own which names are allowed (forebay_wire.names).
"""

import contextlib
import re
from collections.abc import Iterator

from forebay.api import Client
from forebay.errors import InvalidArgument

SCHEME = "forebay://"
LATEST = "latest"
DEFAULT_NAME = "model.safetensors"
_STEP_DIRECTORY = re.compile(r"step-[0-9]+", re.ASCII)
_NUMBER = re.compile(r"[0-9]+", re.ASCII)


def place_of(run: str, step: int | str | None, name: str | None) -> tuple[str, int | str, str]:
    """Run, step and name of what save_file() and load_file() were given: `run` is a run, or a path where there is no step.

    In a path the step is the first segment `step-N`, which no run's name can have, else the first that is a number or "latest"
    and is not the very first; what follows is the name, by default that of DEFAULT_NAME. Raises InvalidArgument.
    """
    if not isinstance(run, str):
        raise InvalidArgument(f"a run's name must be text, not {type(run).__name__}")
    if step is not None:
        if run.startswith(SCHEME):
            raise InvalidArgument(f"{run!r} names a step already; give a path alone, or run and step")
        return run, step, name or DEFAULT_NAME
    segments = run.removeprefix(SCHEME).split("/")
    at = _step_at(segments)
    rest = "/".join(segments[at + 1 :])
    if not run.startswith(SCHEME) or not at or (rest and name):
        raise InvalidArgument(f"{run!r}: give run and step, or a path of the form {SCHEME}RUN/STEP/NAME")
    found = segments[at].removeprefix("step-")
    return "/".join(segments[:at]), found if found == LATEST else _number(found), rest or name or DEFAULT_NAME


def _step_at(segments: list[str]) -> int:
    """Which segment is the step; 0 where none is."""
    places = range(1, len(segments))
    named = (at for at in places if _STEP_DIRECTORY.fullmatch(segments[at]))
    plain = (at for at in places if segments[at] == LATEST or _NUMBER.fullmatch(segments[at]))
    return next(named, 0) or next(plain, 0)


def _number(digits: str) -> int:
    # Python refuses numbers of thousands of digits with an error of its own.
    return int(digits) if len(digits.lstrip("0")) <= 20 else 1 << 64


@contextlib.contextmanager
def client_of(client: Client | None, address: str | None) -> Iterator[Client]:
    """The client given, else one for the block."""
    if client is not None:
        yield client
        return
    with Client(address) as made:
        yield made
