"""The node is about to go: everything yields to the newest complete checkpoint.

    chosen: of each run the newest complete checkpoint, and what this node has committed of a newer one that others complete
    -> first in every drain's order, drains step back for nothing, scrubs pause -> until all levels are reached, or the deadline
    -> which were reached, and which not

Owns the choice and the wait. Does not own the order (the drain's) nor what a level means (wait.py).
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import InvalidArgument, NotFound
from forebay_gateway.core.records import CheckpointRow, PublishState, SessionRow
from forebay_gateway.paths.newest import ROWS_A_READ, newest_of
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.wait import Progress, level_progress
from forebay_gateway.paths.wholeness import is_complete

LOOK_AGAIN_S = 0.25
STILL_S = 3.0  # without a byte, so long after the beginning
DEADLINE_S_MAX = 3600.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How far one checkpoint has come. `coming` are those of the missed levels that it may reach as things stand."""

    session: SessionRow
    complete: bool
    reached: tuple[str, ...]
    missed: tuple[tuple[str, Progress], ...]
    coming: tuple[str, ...]


class Preemption:
    """Preemptions of this node. `promote` puts a checkpoint, (run, step), first in the drains' order."""

    def __init__(self, node: Node, promote: Callable[[str, int], Awaitable[None]]) -> None:
        self._node = node
        self._promote = promote
        self._told: list[set[int]] = []  # of each preemption under way: sessions that something happened to
        node.changes.listen_sessions(self._note)

    def _note(self, session_id: int) -> None:
        for told in self._told:
            told.add(session_id)

    async def run(self, run: str, deadline_s: float, *, while_it_can: bool = False) -> tuple[Outcome, ...]:
        """Until everything chosen is out, `deadline_s` seconds at most; with `while_it_can` no longer than something of it can
        go on now. Raises InvalidArgument, and NotFound for a run that has no complete checkpoint here."""
        if not 0 <= deadline_s <= DEADLINE_S_MAX:
            raise InvalidArgument(f"a deadline is 0 to {DEADLINE_S_MAX:g} seconds from now", deadline_s=deadline_s)
        clock = self._node.clock
        began_s = clock.monotonic()
        until_s = began_s + deadline_s
        chosen: dict[str, list[SessionRow]] = {}  # by run
        with self._yielding() as told:
            for name in [run] if run else await self._pending_runs():
                await self._choose(name, chosen, pending=not run)
            if run and not chosen:
                raise NotFound(f"run {run!r} has no checkpoint that this node has committed anything of", run=run)
            while True:
                outcomes = self._look([session for sessions in chosen.values() for session in sessions])
                left_s = until_s - clock.monotonic()
                waits = any(each.missed for each in outcomes)
                if while_it_can:
                    waits = any(self._moves(level, began_s) for each in outcomes for level in each.coming)
                if left_s <= 0 or not waits:
                    return outcomes
                await self._node.changes.wait(min(left_s, LOOK_AGAIN_S))
                for name in self._runs_with_newer(told, run, chosen):  # the trainer's last save may come meanwhile
                    await self._choose(name, chosen, pending=not run)

    def _moves(self, level: str, began_s: float) -> bool:
        """Whether bytes have gone there lately: copies that fail again and again hold nobody up."""
        quiet_s = self._node.tiers[level].rate.quiet_s
        return min(quiet_s, self._node.clock.monotonic() - began_s) < STILL_S

    @contextlib.contextmanager
    def _yielding(self) -> Iterator[set[int]]:
        told: set[int] = set()
        self._told.append(told)
        self._node.preemptions += 1
        self._node.movers.saves(False)
        try:
            yield told
        finally:
            self._node.preemptions -= 1
            self._told = [each for each in self._told if each is not told]

    # -- the choice ----------------------------------------------------------------------------------------------------

    async def _choose(self, run: str, chosen: dict[str, list[SessionRow]], *, pending: bool) -> None:
        """The run's newest, promoted; with `pending` only where it is not out yet: what is older than that waits for others."""
        before = {session.id: session.commit_seq for session in chosen.get(run, ())}
        newest = [session for session in await newest_of(self._node, run) if session is not None]
        if wanted := [session for session in newest if not pending or (_is_pending(session) and _can_go(session))]:
            chosen[run] = wanted
        for session in wanted:
            if before.get(session.id) != session.commit_seq:
                with contextlib.suppress(NotFound):  # deleted meanwhile
                    await self._promote(session.run, session.step)

    async def _pending_runs(self) -> list[str]:
        """Runs of which something is not out yet."""
        with self._node.catalog.read() as txn:
            ids = list(dict.fromkeys(number for tier in self._node.tiers for number in txn.unpublished_ids(tier)))
        runs: dict[str, None] = {}
        for begin in range(0, len(ids), ROWS_A_READ):
            with self._node.catalog.read() as txn:
                sessions = [txn.session(number) for number in ids[begin : begin + ROWS_A_READ]]
            runs |= dict.fromkeys(session.run for session in sessions if session is not None and _can_go(session))
            await asyncio.sleep(0)
        return list(runs)

    def _runs_with_newer(self, told: set[int], run: str, chosen: dict[str, list[SessionRow]]) -> list[str]:
        """Those with a commit that is newer than what was chosen; what is older is not chosen, also where that is out."""
        with self._node.catalog.read() as txn:
            sessions = [session for number in told if (session := txn.session(number)) is not None]
        told.clear()
        latest = {name: max(session.commit_seq for session in some) for name, some in chosen.items()}
        newer = [session for session in sessions if session.commit_seq > latest.get(session.run, 0)]
        return list(dict.fromkeys(each.run for each in newer if each.run == run or (not run and _is_pending(each))))

    # -- how far it is -------------------------------------------------------------------------------------------------

    def _look(self, chosen: list[SessionRow]) -> tuple[Outcome, ...]:
        with self._node.catalog.read() as txn:
            now = [session for each in chosen if (session := txn.session(each.id)) is not None]
            return tuple(self._outcome(txn, session) for session in sorted(now, key=lambda session: -session.commit_seq))

    def _outcome(self, txn: ReadTxn, session: SessionRow) -> Outcome:
        tiers = [name for name in self._node.tier_names if session.goes_to(name)]
        levels = {name: level_progress(txn, session, name) for name in ("cache", *tiers)}
        row, complete = txn.checkpoint(session.run, session.step), is_complete(txn, session)
        missed = {level: progress for level, progress in levels.items() if not progress.reached}
        stuck = {level: why for level in missed if (why := self._why_stuck(row, session, level))}
        return Outcome(
            session,
            complete,
            tuple(name for name, progress in levels.items() if progress.reached),
            tuple((level, replace(progress, reason=stuck.get(level, progress.reason))) for level, progress in missed.items()),
            tuple(
                level
                for level, progress in missed.items()
                if level not in stuck and level != "cache" and (complete or progress.done < progress.total)
            ),
        )

    def _why_stuck(self, row: CheckpointRow | None, session: SessionRow, level: str) -> str:
        """Why nothing of it goes there now; empty where it may."""
        tier = self._node.tiers.get(level)
        if tier is None:
            return ""
        if tier.held:
            return f"{level} is held by an operator; `forebay queue release` lets it go on"
        if not tier.usable:
            return f"{level} is {tier.state.value}: {tier.reason}" if tier.reason else f"{level} is {tier.state.value}"
        if row is not None and row.held and session.publish.get(level) is PublishState.PENDING:
            return f"held by an operator; `forebay queue release {row.run}@{row.step}` lets it go on"
        return ""


def _is_pending(session: SessionRow) -> bool:
    return PublishState.PENDING in session.publish.values()


def _can_go(session: SessionRow) -> bool:
    return session.commit_seq > 0 and not session.reason
