"""What an operator sees of the queues and says to single checkpoints in them.

    hold, release, prio: marks on the checkpoint's row, which last -> every tier's order hears of it
    retry: what waits after a failure is tried now
    a pin, or the deletion of what is newer: what was left out on a tier goes after all

Owns the words and the marks. Holding a whole tier is the drain's own; what goes next is order.py's.
"""

import asyncio
from collections.abc import AsyncGenerator, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import InvalidArgument, NotFound
from forebay_gateway.core.records import CheckpointRow, PublishState, SessionRow
from forebay_gateway.core.schedule import Entry
from forebay_gateway.paths.drain import Drain
from forebay_gateway.paths.newest import newest_of
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.order import promote
from forebay_gateway.paths.skip import skipped_count
from forebay_gateway.paths.wholeness import complete_at_cache

ENTRIES_A_PAGE = 200  # some milliseconds
ACTIONS = ("hold", "release", "retry", "prio")

Name = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Waiting:
    """A checkpoint in a tier's queue."""

    tier: str
    entry: Entry
    size: int  # bytes not yet proved
    held: bool
    place: int  # among the prioritised, 1 or more; 0: it is none
    why: str
    next_in_s: float | None

    @property
    def id(self) -> str:
        """As an operator names it."""
        return f"{self.entry.run}@{self.entry.step}"


class Queue:
    """The queues of all tiers."""

    def __init__(self, node: Node, drains: Mapping[str, Drain]) -> None:
        self._node = node
        self._drains = drains

    async def pages(self) -> AsyncGenerator[list[Waiting], None]:
        """What waits, tier by tier, the prioritised first, then by class and commit; a page as it is in that moment."""
        for name, drain in self._drains.items():
            listed = 0
            async with aclosing(_entries(drain)) as pages:
                async for entries in pages:
                    places = enumerate(entries, listed + 1)  # of the prioritised, which come first
                    with self._node.catalog.read() as txn:
                        page = [self._waiting(txn, name, entry, place if entry.turn else 0) for place, entry in places]
                    listed += len(page)
                    yield page

    def skipped(self) -> dict[str, int]:
        """How many checkpoints were left out on each tier so far."""
        with self._node.catalog.read() as txn:
            return {name: skipped_count(txn, name) for name in self._drains}

    def _waiting(self, txn: ReadTxn, tier: str, entry: Entry, place: int) -> Waiting:
        _, _, proved, size = txn.session_progress(entry.session_id, tier)
        row = txn.checkpoint(entry.run, entry.step)
        in_s = max(0.0, entry.until_s - self._node.clock.monotonic()) if entry.until_s else None
        held = row is not None and row.held
        return Waiting(tier, entry, size - proved, held, place, self._why(tier, entry), in_s)

    def _why(self, tier: str, entry: Entry) -> str:
        monitored = self._node.tiers[tier]
        if entry.state == "held":
            return "held by an operator"
        if monitored.held:
            return "the tier is held by an operator"
        if not monitored.usable:
            return f"the tier is {monitored.state.value}"
        if entry.state == "deferred":
            return "held back by its cadence"
        if entry.state == "awaiting":
            return "the node of writer 0 decides whether it goes"
        if entry.state == "paused":
            return "to be tried again, or waiting for others"
        if entry.state == "going":
            return "on its way"
        return "prioritised" if entry.turn else f"waits among the {entry.kind.name.lower()} ones"

    async def change(self, action: str, ids: Sequence[str]) -> list[str]:
        """Hold, release, retry or prioritise these, on every tier; their ids. None: all that wait, but for prio.

        Raises InvalidArgument for what is no id, NotFound for what this node does not know; nothing is changed then.
        """
        if action not in ACTIONS:
            raise InvalidArgument(f"a queue knows {', '.join(ACTIONS)}, not {action!r}")
        if action == "prio" and not ids:
            raise InvalidArgument("prio needs the checkpoints that go first; `forebay queue` lists them")
        names = list(dict.fromkeys(map(_parse, ids))) if ids else await self._all(action)
        sessions = await self._node.catalog.write(partial(_mark, action, names, bool(ids)))
        for session_id in sessions:
            if action == "retry":
                for drain in self._drains.values():
                    drain.retry_session(session_id)
            self._node.changes.tell(session_id)
        if not ids and action == "retry":
            for drain in self._drains.values():
                drain.retry_now()
            self._node.changes.tell()
        return [f"{run}@{step}" for run, step in names]

    async def _all(self, action: str) -> list[Name]:
        names: dict[Name, None] = {}
        for drain in self._drains.values():
            async with aclosing(_entries(drain)) as pages:
                async for entries in pages:
                    names |= dict.fromkeys((entry.run, entry.step) for entry in entries)
        if action != "release":
            return list(names)
        with self._node.catalog.read() as txn:
            return [name for name in names if (row := txn.checkpoint(*name)) is not None and row.held]

    async def first(self, run: str, step: int) -> None:
        """The node is about to go: the checkpoint goes before all others, and what of it waits after a failure is tried now.
        Raises NotFound."""
        for session_id in await promote(self._node, run, step):
            for drain in self._drains.values():
                drain.retry_session(session_id)

    async def deleted(self, row: CheckpointRow) -> None:
        """A checkpoint is going: what is the run's newest complete one then goes to the tiers on which it was left out, since
        nothing newer goes there in its place."""
        newest, other = await newest_of(self._node, row.run)
        if other is not None:  # newer still: it is complete as well where its other parts are in other nodes' caches
            with self._node.catalog.read() as txn:
                newest = other if complete_at_cache(txn, other) else newest
        if newest is not None:
            await self._let_go(newest)

    async def pinned(self, row: CheckpointRow) -> None:
        """A pin was set or taken off: what is pinned now goes to the tiers on which it was left out, while it is here."""
        with self._node.catalog.read() as txn:
            now = txn.checkpoint(row.run, row.step)
            sessions = [] if now is None else txn.sessions_of(now)
        for session in sessions if now is not None and now.pinned else ():
            await self._let_go(session)
        for session in sessions:
            self._node.changes.tell(session.id)

    async def _let_go(self, session: SessionRow) -> None:
        for tier, state in session.publish.items():
            if state is PublishState.SKIPPED and tier in self._drains:
                await self._drains[tier].order.unskip(session.id)


async def _entries(drain: Drain) -> AsyncGenerator[list[Entry], None]:
    """All that waits for one tier, a page at a time: others have their turn between two."""
    await drain.order.catch_up()  # while the tier is away its drain does not
    after: Entry | None = None
    while page := drain.order.entries(after, ENTRIES_A_PAGE):
        yield page
        after = page[-1]
        await asyncio.sleep(0)


def _parse(text: str) -> Name:
    run, _, step = text.rpartition("@")
    if not run or not (step.isascii() and step.isdigit()) or int(step) >= 1 << 64:
        raise InvalidArgument(f"a checkpoint in the queue is named RUN@STEP, not {text!r}; `forebay queue` lists them")
    return run, int(step)


def _mark(action: str, names: Collection[Name], named: bool, txn: WriteTxn) -> list[int]:
    sessions: list[int] = []
    for run, step in names:
        row = txn.checkpoint(run, step)
        if row is None or row.deleting:
            if not named:  # gone since all were looked up
                continue
            raise NotFound(f"no checkpoint {run}@{step} is known here; `forebay queue` lists what waits", run=run, step=step)
        if action in ("hold", "release"):
            txn.set_held(run, step, action == "hold")
        elif action == "prio":
            txn.set_turn(run, step)
        sessions += row.session_ids
    return sessions
