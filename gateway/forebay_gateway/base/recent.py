"""A dictionary of bounded length: the entry that was set longest ago goes first.

Owns the bound, for what a process remembers and can find out again. Does not own what is lost where an entry has gone.
"""

from collections import OrderedDict
from typing import Generic, TypeVar

K = TypeVar("K")
V = TypeVar("V")

__all__ = ["Recent"]


class Recent(OrderedDict[K, V], Generic[K, V]):
    """At most `limit` entries. Setting one anew makes it the newest; reading it does not."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self._limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        while len(self) > self._limit:
            self.popitem(last=False)
