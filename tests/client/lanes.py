"""A client that takes one lane wherever a test names none, so that each test of the verbs runs over both."""

from typing import Any

from forebay import AsyncClient, Client
from forebay.reader import Reader
from forebay.writer import CheckpointWriter


class LaneClient(Client):
    """Client whose "auto" is `lane`."""

    lane = "auto"

    def checkpoint(self, *arguments: Any, **options: Any) -> CheckpointWriter:
        """As Client.checkpoint."""
        if len(arguments) > 5:
            arguments, options = arguments[:5], {**options, "lane": arguments[5]}
        return super().checkpoint(*arguments, **self._with_lane(options))

    def open(self, run: str, step: int, **options: Any) -> Reader:
        """As Client.open."""
        return super().open(run, step, **self._with_lane(options))

    def _with_lane(self, options: dict[str, Any]) -> dict[str, Any]:
        return {**options, "lane": self.lane} if options.get("lane", "auto") == "auto" else options


class FdClient(LaneClient):
    """Takes the fd lane, or fails."""

    lane = "fd"


class StreamClient(LaneClient):
    """Never takes it."""

    lane = "stream"


def async_client(address: str, kind: type[Client]) -> AsyncClient:
    """AsyncClient over a client of that kind."""
    made = AsyncClient(address)
    made._client = kind(address)
    return made
