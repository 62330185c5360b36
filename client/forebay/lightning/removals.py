"""Removing checkpoints that Lightning has dropped, not before their successor is as safe as they are.

Owns that order: Lightning removes a checkpoint when the call that saves its successor has returned. Then the successor may
still be on its way, and lie on this node alone, while what it replaces is on every tier.
"""

import logging
from dataclasses import dataclass

from forebay.api import Client
from forebay.errors import DeadlineExceeded, ForebayError, InvalidArgument, NotFound, Unavailable
from forebay.lightning.places import Place, said

_log = logging.getLogger("forebay")


@dataclass(frozen=True, slots=True)
class _Removal:
    place: Place
    after: int


class Removals:
    """What is to be removed. Not thread-safe; landed() may be called by any thread."""

    def __init__(self) -> None:
        self._due: list[_Removal] = []
        self._newest: dict[bool, tuple[int, Place]] = {}

    def landed(self, number: int, place: Place, weights_only: bool) -> None:
        """The save of that number is durable."""
        if number >= self._newest.get(weights_only, (0, place))[0]:
            self._newest[weights_only] = (number, place)

    def add(self, place: Place, after: int) -> None:
        """To be removed once a save of at least that number is where it is."""
        self.keep(place)
        self._due.append(_Removal(place, after))

    def keep(self, place: Place) -> None:
        """It is saved anew."""
        self._due = [each for each in self._due if (each.place.run, each.place.step) != (place.run, place.step)]

    def carry_out(self, client: Client) -> list[Place]:
        """Remove what is due; what is still to be removed. What cannot be is logged, and no error."""
        left = []
        for index, removal in enumerate(self._due):
            try:
                if not self._remove(client, removal):
                    left.append(removal)
            except NotFound:
                continue
            except InvalidArgument as error:  # it is pinned: somebody wants it
                _log.warning("%s stays: %s", removal.place, error)
            except (DeadlineExceeded, Unavailable) as error:  # training stands still meanwhile: not again for each of them
                _log.warning("%s is removed later, as is all else that was dropped: %s", removal.place, error)
                left += self._due[index:]
                break
            except ForebayError as error:
                _log.warning("%s is removed later: %s", removal.place, error)
                left.append(removal)
        self._due = left
        return [each.place for each in left]

    def _remove(self, client: Client, removal: _Removal) -> bool:
        old = client.describe(removal.place.run, removal.place.step)
        number, newest = self._newest.get(bool(said(old).get("weights_only")), (0, removal.place))
        if number < removal.after or newest == removal.place:
            return False
        new = client.describe(newest.run, newest.step)
        levels = [{level.level for level in each.levels if level.state == "complete"} for each in (old, new)]
        if not new.complete or not levels[0] <= levels[1]:
            return False
        client.delete(old.run, old.step, force=True)
        return True
