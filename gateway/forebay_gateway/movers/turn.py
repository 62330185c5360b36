"""Whose turn it is at the node's disk and cores: a save's, for which training may be waiting, or the drain's, which can wait.

Owns the rule by which a mover steps back. The front says when shards are being received (movers/pool), and takes it back once
the cache is above its soft watermark: there the drain is what saves wait for.
"""

import asyncio
import contextlib

from forebay_gateway.base.clock import Clock

YIELD_S = 8.0  # a save of 10 GB on a fast disk
WORK_S = 2.0  # so that endless saves slow the drain down and never stop it


class Turn:
    """While saves run: YIELD_S for them, WORK_S for the drain, again and again; from the first moment of a save on."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._saving = False
        self._began_s = 0.0
        self._ended_s = float("-inf")
        self._over = asyncio.Event()

    def saves(self, under_way: bool) -> None:
        """Whether shards are being received now."""
        now_s = self._clock.monotonic()
        if under_way and not self._saving:
            self._over.clear()
            if now_s - self._ended_s >= WORK_S:  # many small saves in a row count as one: the drain's time comes all the same
                self._began_s = now_s
        elif not under_way:
            self._over.set()
            if self._saving:
                self._ended_s = now_s
        self._saving = under_way

    async def mine(self) -> None:
        """Until the drain may go on."""
        while self._saving:
            left_s = YIELD_S - (self._clock.monotonic() - self._began_s) % (YIELD_S + WORK_S)
            if left_s <= 0:
                return
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), left_s)
