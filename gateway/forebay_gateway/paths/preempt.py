"""The node is about to go: everything yields to the newest complete checkpoint.

    chosen: of each run the newest complete checkpoint, and what this node has committed of a newer one that others complete
    -> first in every drain's order, drains step back for nothing, scrubs pause -> until all levels are reached, or the deadline
    -> which were reached, and which not

Owns the choice and the wait. Does not own the order (the drain's) nor what a level means (wait.py).
"""

import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import InvalidArgument, NotFound
from forebay_gateway.core.records import SessionRow
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.wait import Progress, level_progress
from forebay_gateway.paths.wholeness import is_complete, sessions_of

LOOK_AGAIN_S = 0.25
DEADLINE_S_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far one checkpoint has come."""

    session: SessionRow
    complete: bool
    reached: tuple[str, ...]
    missed: tuple[tuple[str, Progress], ...]


class Preemption:
    """Preemptions of this node. `promote` puts a checkpoint, (run, step), first in the drains' order."""

    def __init__(self, node: Node, promote: Callable[[str, int], Awaitable[None]]) -> None:
        self._node = node
        self._promote = promote

    async def run(self, run: str, deadline_s: float, *, while_it_can: bool = False) -> tuple[Outcome, ...]:
        """Until everything chosen is out, `deadline_s` seconds at most; with `while_it_can` no longer than some tier that is
        missing takes anything now. Raises InvalidArgument, and NotFound for a run that has no complete checkpoint here."""
        if not 0 <= deadline_s <= DEADLINE_S_MAX:
            raise InvalidArgument(f"a deadline is 0 to {DEADLINE_S_MAX:g} seconds from now", deadline_s=deadline_s)
        clock = self._node.clock
        until_s = clock.monotonic() + deadline_s
        chosen: dict[str, list[SessionRow]] = {}  # by run
        with self._yielding():
            while True:
                for session in self._newer(run, chosen):  # the trainer's last save may come meanwhile
                    with contextlib.suppress(NotFound):  # deleted meanwhile
                        await self._promote(session.run, session.step)
                outcomes = self._look([session for sessions in chosen.values() for session in sessions])
                left_s = until_s - clock.monotonic()
                missed = [level for outcome in outcomes for level, _ in outcome.missed]
                if left_s <= 0 or not missed or (while_it_can and not any(map(self._takes, missed))):
                    return outcomes
                await self._node.changes.wait(min(left_s, LOOK_AGAIN_S))

    @contextlib.contextmanager
    def _yielding(self) -> Iterator[None]:
        self._node.preemptions += 1
        self._node.movers.saves(False)
        try:
            yield
        finally:
            self._node.preemptions -= 1

    def _takes(self, level: str) -> bool:
        tier = self._node.tiers.get(level)
        return tier is not None and tier.usable and not tier.held

    def _newer(self, run: str, chosen: dict[str, list[SessionRow]]) -> list[SessionRow]:
        """Those to be promoted now; `chosen` has them then. What is older than what was chosen once is not, though that may be
        out already."""
        with self._node.catalog.read() as txn:
            found = _of_run(txn, run) if run else self._pending(txn)
            if run and not found:
                raise NotFound(f"run {run!r} has no checkpoint that this node has committed anything of", run=run)
            latest = {name: max(session.commit_seq for session in sessions) for name, sessions in chosen.items()}
            newer = [session for session in found if session.commit_seq > latest.get(session.run, 0)]
            for session in newer:
                known = [each for each in chosen.get(session.run, []) if each.id != session.id]
                chosen[session.run] = _newest(txn, [session, *known])
        return newer

    def _pending(self, txn: ReadTxn) -> list[SessionRow]:
        by_run: dict[str, dict[int, SessionRow]] = {}
        for tier in self._node.tiers:
            for session in txn.unpublished(tier):
                if session.commit_seq and not session.reason:
                    by_run.setdefault(session.run, {})[session.id] = session
        return [session for sessions in by_run.values() for session in _newest(txn, list(sessions.values()))]

    def _look(self, chosen: list[SessionRow]) -> tuple[Outcome, ...]:
        with self._node.catalog.read() as txn:
            now = [session for each in chosen if (session := txn.session(each.id)) is not None]
            return tuple(self._outcome(txn, session) for session in sorted(now, key=lambda session: -session.commit_seq))

    def _outcome(self, txn: ReadTxn, session: SessionRow) -> Outcome:
        tiers = [name for name in self._node.tier_names if session.goes_to(name)]
        levels = {name: level_progress(txn, session, name) for name in ("cache", *tiers)}
        return Outcome(
            session,
            is_complete(txn, session),
            tuple(name for name, progress in levels.items() if progress.reached),
            tuple((name, progress) for name, progress in levels.items() if not progress.reached),
        )


def _of_run(txn: ReadTxn, run: str) -> list[SessionRow]:
    rows = [row for row in txn.checkpoints(run) if not row.deleting]
    return _newest(txn, [session for row in rows for session in sessions_of(txn, row) if session.commit_seq])


def _newest(txn: ReadTxn, sessions: list[SessionRow]) -> list[SessionRow]:
    """The newest complete one of a run, and the newest of which something was committed here, where that is another."""
    ordered = sorted(sessions, key=lambda session: -session.commit_seq)
    complete = next((session for session in ordered if is_complete(txn, session)), None)
    return [*([ordered[0]] if ordered and ordered[0] is not complete else []), *([complete] if complete else [])]
