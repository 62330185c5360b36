"""Documents of one run that gateways of several nodes, and of several releases, keep on a tier: which of them may be heeded.

Owns that one rule. Does not own what the documents say (retention.py, verdicts.py). No I/O, no clock.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar

import msgspec

from forebay_gateway.core.errors import Unsupported
from forebay_wire.names import MAX_STEP

Name = tuple[int, str]  # step, session8


class RunDocument(Protocol):
    """What all of them say."""

    @property
    def format(self) -> str:
        """Which kind of document it is: "forebay." and a word."""
        ...

    @property
    def run(self) -> str:
        """Whose it is."""
        ...

    @property
    def names(self) -> Iterable[Name]:
        """All checkpoints that it names."""
        ...


D = TypeVar("D", bound=RunDocument)


class _Kind(msgspec.Struct, frozen=True):
    """What any of them says first, whatever its release."""

    format: str = ""


def read_run_document(document: bytes, run: str, kind: type[D], known: str, newer: str) -> D | None:
    """The document, of the format `known`; None for what is none of this run, which is then made anew.

    Raises Unsupported, in the words `newer`, for one that a newer release has written: its rules are not known here.
    """
    try:
        said = msgspec.json.decode(document, type=_Kind).format
        if said != known and said.startswith(known):
            raise Unsupported(newer, run=run, format=said)
        found = msgspec.json.decode(document, type=kind)
    except (msgspec.DecodeError, RecursionError):
        return None
    is_ours = (found.format, found.run) == (known, run)
    return found if is_ours and all(0 <= step <= MAX_STEP and session.isalnum() for step, session in found.names) else None
