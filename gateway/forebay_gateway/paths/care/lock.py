"""One maintenance command at a time: two that check, repair and delete at once would judge each other's half-done work.

Owns the lock and what the second one is told. Background work (scrub, mend) does not take it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from forebay_gateway.core.errors import Unavailable


class Maintenance:
    """Held for as long as a command runs; a client that goes away ends its command, and with it this."""

    def __init__(self) -> None:
        self._holder = ""

    @contextmanager
    def hold(self, command: str) -> Iterator[None]:
        """Raises Unavailable while another command holds it."""
        if self._holder:
            raise Unavailable(
                f"`forebay {self._holder}` is running on this gateway, and `forebay {command}` has to wait for its end",
                retry_after_s=5.0,
            )
        self._holder = command
        try:
            yield
        finally:
            self._holder = ""
