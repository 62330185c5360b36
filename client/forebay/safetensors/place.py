"""Where a safetensors file lies: run, step and shard name, as arguments or as one path.

Owns reading forebay://RUN/STEP/NAME. Does not own which names are allowed (forebay_wire.names).
"""

import contextlib
from collections.abc import Iterator

from forebay.api import Client
from forebay.errors import InvalidArgument

SCHEME = "forebay://"
LATEST = "latest"
DEFAULT_NAME = "model.safetensors"


def place_of(run: str, step: int | str | None, name: str | None) -> tuple[str, int | str, str]:
    """Run, step and name of what save_file() and load_file() were given: `run` is a run, or a path where there is no step.

    In a path the step is the last segment that is a number or "latest"; what follows is the name, by default that of
    DEFAULT_NAME. Raises InvalidArgument.
    """
    if not isinstance(run, str):
        raise InvalidArgument(f"a run's name must be text, not {type(run).__name__}")
    if step is not None:
        if run.startswith(SCHEME):
            raise InvalidArgument(f"{run!r} names a step already; give a path alone, or run and step")
        return run, step, name or DEFAULT_NAME
    segments = run.removeprefix(SCHEME).split("/")
    at = max((at for at, text in enumerate(segments) if at and (text == LATEST or _is_number(text))), default=0)
    rest = "/".join(segments[at + 1 :])
    if not run.startswith(SCHEME) or not at or (rest and name):
        raise InvalidArgument(f"{run!r}: give run and step, or a path of the form {SCHEME}RUN/STEP/NAME")
    found = segments[at]
    return "/".join(segments[:at]), found if found == LATEST else int(found), rest or name or DEFAULT_NAME


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit()


@contextlib.contextmanager
def client_of(client: Client | None, address: str | None) -> Iterator[Client]:
    """The client given, else one for the block."""
    if client is not None:
        yield client
        return
    with Client(address) as made:
        yield made
