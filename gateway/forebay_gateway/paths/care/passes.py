"""One slow walk over many shards, again and again: when it begins, how fast it goes, where it was when the process ended.

    due, or started by an operator -> a step: about a second's worth -> cursor durable -> a pause that keeps to the rate -> ...
    -> the end: the next pass is due `every_s` later

Owns schedule, pace and the durable cursor. Does not own what is looked at (scrub.py, tier_scrub.py). The wall clock says when
the next pass is due, and nothing more.
"""

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable

import msgspec

from forebay_gateway.core.errors import InvalidArgument, Unavailable
from forebay_gateway.paths.node import Node

log = logging.getLogger("forebay.scrub")

STEP_S = 1.0  # of the configured rate, in one step
SAVE_S = 5.0  # at most this much work is repeated after a crash
LOOK_S = 60.0
YIELD_S = 5.0  # while the node is about to go


class ScrubState(msgspec.Struct, kw_only=True):
    """What is kept in the catalog, and shown. Counts are of the pass under way, else of the last one."""

    running: bool = False
    paused: bool = False  # by an operator, until the next start
    after: tuple[int, int] | None = None  # the cursor: the last shard that is done
    begun_wall_s: float = 0.0
    ended_wall_s: float = 0.0  # of the last pass; before the first: when this gateway was first started
    passes: int = 0
    shards: int = 0
    bytes: int = 0
    bad: int = 0
    copies: int = 0
    copies_bad: int = 0
    copies_not_asked: int = 0  # of tiers that could not be reached


class Pass(ABC):
    """One worker. `name` is for people, `setting` is under which name the catalog keeps the state."""

    def __init__(self, node: Node, name: str, setting: str, rate_key: str) -> None:
        self._node = node
        self._name, self._setting, self._rate_key = name, setting, rate_key
        self._saved_s = float("-inf")
        self._wake: Callable[[], None] = lambda: None
        with node.catalog.read() as txn:
            self.state = decode_state(txn.setting(setting))

    @property
    @abstractmethod
    def rate(self) -> int:
        """Bytes a second, as configured now; 0 is off."""

    @property
    @abstractmethod
    def every_s(self) -> float:
        """Pause between passes in seconds, as configured now; 0: none begins by itself."""

    @property
    def next_in_s(self) -> float | None:
        """Seconds until the next pass begins by itself; None where none will."""
        if not self.rate or not self.every_s or self.state.running or self.state.paused:
            return None
        left_s = self.state.ended_wall_s + self.every_s - self._node.clock.wall()
        return max(0.0, min(self.every_s, left_s))

    def on_start(self, wake: Callable[[], None]) -> None:
        """Call `wake` when an operator starts a pass."""
        self._wake = wake

    async def start(self) -> None:
        """Begin a pass, or go on with the one that was stopped. Raises InvalidArgument, Unavailable."""
        if not self.rate:
            raise InvalidArgument(f"{self._rate_key} is off, so this gateway does not scrub; set it and start again")
        if self.state.running:
            raise Unavailable(
                f"{self._name} is running already; `forebay scrub --status` shows how far it is", retry_after_s=60.0
            )
        if self.state.after is None:
            self._begin()
        self.state.running, self.state.paused = True, False
        await self._save()
        self._wake()

    async def stop(self) -> None:
        """Pause; the cursor stays. Raises InvalidArgument where nothing runs or would."""
        if self.state.paused or not (self.state.running or self.next_in_s is not None):
            raise InvalidArgument(f"no scrub is running: {self._name}")
        self.state.running, self.state.paused = False, True
        await self._save()

    async def step(self) -> float | None:
        """A second's worth; the pause in seconds that keeps to the rate."""
        if self._node.preemptions:
            return YIELD_S
        if not self.state.running:
            if not self.state.ended_wall_s:
                self.state.ended_wall_s = self._node.clock.wall()
                await self._save()
            due_s = self.next_in_s
            if due_s is None or due_s > 0:
                return LOOK_S if due_s is None else min(LOOK_S, due_s)
            self._begin()
        if (wait_s := self._wait_s()) is not None:
            return wait_s
        if not (rate := self.rate):  # switched off under way: the cursor stays
            return LOOK_S
        began_s = self._node.clock.monotonic()
        size, more = await self._work(int(rate * STEP_S))
        if not self.state.running:  # stopped meanwhile, which has saved
            return LOOK_S
        if not more:
            await self._end()
            return None
        if self._node.clock.monotonic() - self._saved_s >= SAVE_S:
            await self._save()
        return max(0.05, size / rate - (self._node.clock.monotonic() - began_s))

    def _begin(self) -> None:
        done = self.state
        self.state = ScrubState(running=True, begun_wall_s=self._node.clock.wall(), passes=done.passes)
        self.state.ended_wall_s = done.ended_wall_s
        self._reset()
        log.info("%s begins rate_bytes_per_s=%s", self._name, self.rate)

    async def _end(self) -> None:
        done = self.state
        done.running, done.after = False, None
        done.passes += 1
        done.ended_wall_s = self._node.clock.wall()
        await self._save()
        log.info("%s ended bytes=%s bad=%s copies_bad=%s", self._name, done.bytes, done.bad, done.copies_bad)

    async def _save(self) -> None:
        data = msgspec.json.encode(self.state)
        self._saved_s = self._node.clock.monotonic()
        await self._node.catalog.write(lambda txn: txn.set_setting(self._setting, data))

    def _wait_s(self) -> float | None:
        """How long nothing can be looked at, in seconds; None where it can."""
        return None

    @abstractmethod
    def _reset(self) -> None:
        """A pass begins."""

    @abstractmethod
    async def _work(self, budget: int) -> tuple[int, bool]:
        """Read up to about `budget` bytes; how many, and whether something is left."""


def decode_state(data: bytes | None) -> ScrubState:
    """What an earlier process left; a state that cannot be read begins anew."""
    if data is None:
        return ScrubState()
    try:
        return msgspec.json.decode(data, type=ScrubState)
    except msgspec.MsgspecError:
        return ScrubState()
