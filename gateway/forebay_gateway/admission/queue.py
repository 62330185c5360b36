"""Who waits for space, and who is next: deficit round robin over runs, and over the writers of each.

Owns the order. Does not own the space (budget.py), nor how long somebody waits (waiting.py).

Deficit round robin (M. Shreedhar, G. Varghese, SIGCOMM 1995): each round gives every flow the same credit, and a flow's first
request goes once its credit covers it. So runs get equal bytes whatever the size and number of their requests. A round's credit
is a byte, and as many rounds go by at once as somebody needs: there are few flows, and a larger credit would let a run that has
much to send go on with it while another that asks for little waits.

Who is next stays next until it is served or leaves: a small request behind a large one does not overtake it, or the large
one would never have its turn.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from typing import Generic, TypeVar

from forebay_gateway.admission.budget import Reservation

Key = TypeVar("Key", bound=Hashable)


class Waiter:
    """One request. `kept_until_s` (monotonic) is set while its client is away and is to come again."""

    __slots__ = ("future", "kept_until_s", "run", "size", "writer")

    def __init__(self, run: str, writer: int, size: int, future: "asyncio.Future[Reservation]") -> None:
        self.run, self.writer, self.size, self.future = run, writer, size, future
        self.kept_until_s: float | None = None


class _Ring(Generic[Key]):
    """One level of the round robin: flows in their order, each with its credit in bytes."""

    def __init__(self) -> None:
        self._credits: dict[Key, int] = {}  # in the order of the round

    def join(self, key: Key) -> None:
        """A flow that has something to send; at the end of the round, with no credit."""
        self._credits.setdefault(key, 0)

    def leave(self, key: Key) -> None:
        """It has nothing more; what credit it had is gone."""
        self._credits.pop(key, None)

    def next(self, size_of: Callable[[Key], int | None]) -> Key | None:
        """The flow whose first request, of `size_of` bytes (None: it cannot go now), is next. The same again until served."""
        sizes = {key: size for key in self._credits if (size := size_of(key)) is not None}
        if not sizes:
            return None
        short = min(size - self._credits[key] for key, size in sizes.items())
        if short > 0:
            for key in sizes:
                self._credits[key] += short
        return next(key for key, size in sizes.items() if self._credits[key] >= size)

    def served(self, key: Key, size: int) -> None:
        """Its first request went. The next flow has its turn; this one keeps what credit is left."""
        self._credits[key] = self._credits.pop(key) - size


class FairQueue:
    """Requests in their order. Pure: nothing here waits."""

    def __init__(self) -> None:
        self._runs: _Ring[str] = _Ring()
        self._writers: dict[str, _Ring[int]] = {}
        self._waiting: dict[str, dict[int, deque[Waiter]]] = {}
        self._count = 0
        self.size = 0  # bytes asked for, in all

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Waiter]:
        for writers in self._waiting.values():
            for flow in writers.values():
                yield from flow

    def add(self, waiter: Waiter) -> None:
        """Behind the other requests of its writer."""
        self._runs.join(waiter.run)
        self._writers.setdefault(waiter.run, _Ring()).join(waiter.writer)
        self._waiting.setdefault(waiter.run, {}).setdefault(waiter.writer, deque()).append(waiter)
        self._count += 1
        self.size += waiter.size

    def away(self, run: str, writer: int, size: int) -> Waiter | None:
        """The first of the writer's requests for so many bytes whose client is away."""
        flow = self._waiting.get(run, {}).get(writer, ())
        return next((waiter for waiter in flow if waiter.size == size and waiter.kept_until_s is not None), None)

    def next(self, may_go: Callable[[Waiter], bool]) -> Waiter | None:
        """Who is to be served; those that may not go now (their run's quota) are passed over."""
        heads: dict[str, Waiter] = {}

        def of_run(run: str) -> int | None:
            flows = self._waiting[run]

            def of_writer(writer: int) -> int | None:
                head = flows[writer][0]
                return head.size if may_go(head) else None

            writer = self._writers[run].next(of_writer)
            if writer is None:
                return None
            heads[run] = flows[writer][0]
            return heads[run].size

        run = self._runs.next(of_run)
        return None if run is None else heads[run]

    def served(self, waiter: Waiter) -> None:
        """It has its space."""
        self._runs.served(waiter.run, waiter.size)
        self._writers[waiter.run].served(waiter.writer, waiter.size)
        self.remove(waiter)

    def remove(self, waiter: Waiter) -> None:
        """It does not wait any more. No effect on one that left before."""
        flows = self._waiting.get(waiter.run, {})
        flow = flows.get(waiter.writer)
        if flow is None or waiter not in flow:
            return
        flow.remove(waiter)
        self._count -= 1
        self.size -= waiter.size
        if not flow:
            del flows[waiter.writer]
            self._writers[waiter.run].leave(waiter.writer)
        if not flows:
            del self._waiting[waiter.run], self._writers[waiter.run]
            self._runs.leave(waiter.run)
