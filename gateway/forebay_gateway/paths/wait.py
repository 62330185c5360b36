"""Has a checkpoint reached a level, and what does it wait for.

Owns the meaning of the levels for a whole checkpoint. The gateway advances states by itself; whoever waits only watches.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import Incomplete, InvalidArgument, MissingPart, NotFound, Unavailable, Unsupported
from forebay_gateway.core.records import PublishState, SessionRow
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.safety import required_of
from forebay_gateway.paths.wholeness import (
    NEVER_WHOLE,
    complete_at_cache,
    describe_missing,
    missing_parts,
    past_the_cache,
)

LOOK_AGAIN_S = 0.25
LOOK_S_MIN = 0.02
ASK_AGAIN_S = 1.0  # the tiers, for what is not known here: once for all who wait for it
ASKED_MAX = 1000
TELL_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a checkpoint is towards a level."""

    reached: bool
    done: int
    total: int
    missing: tuple[MissingPart, ...]
    reason: str


class Waiter:
    """Watches checkpoints on behalf of clients."""

    def __init__(self, node: Node, finder: Finder) -> None:
        self._node = node
        self._finder = finder
        self._asked: dict[tuple[str, int], tuple[float, str]] = {}  # (when, what the tiers said)

    def check_level(self, level: str, run: str, only: tuple[str, ...] | None) -> None:
        """Raise InvalidArgument or Unsupported for a level that this gateway cannot reach, or that a policy keeps the run's
        checkpoint from: `only` are the tiers that it goes to, None for all."""
        if level == "peer":
            raise Unsupported("no peers are configured, so nothing reaches the level 'peer'")
        if level not in ("cache", "all"):
            self._node.tier(level)
        if only == () and level != "cache":
            raise InvalidArgument(
                f"by policy the checkpoints of {run!r} are transient: they stay in the cache and never reach {level!r}; wait "
                "for 'cache', or change the policy"
            )
        if only is not None and level in self._node.tiers and level not in only:
            raise InvalidArgument(
                f"by policy the checkpoints of {run!r} do not go to {level!r}, only to {', '.join(only)}; wait for one of these"
            )

    async def watch(self, run: str, step: int, level: str, name: str = "") -> AsyncGenerator[Progress, None]:
        """Progress of the session `name`, else of the newest known here, at each change and about once a second; ends after one
        that is reached. Runs until it is closed.

        Once node.complete_within has passed, raises Incomplete where some writer has not committed, NotFound where nobody has
        heard of the checkpoint. At once Incomplete for a level on which the drain left it out, and where the parts of several
        nodes have met on a tier and make no checkpoint.
        """
        self.check_level(level, run, self._node.only_tiers(run) if self._session(run, step, name) is None else None)
        clock = self._node.clock
        began_s = clock.monotonic()
        told: Progress | None = None
        told_s = float("-inf")
        while True:
            now_s = clock.monotonic()
            progress = await self._look(run, step, level, name, began_s)
            if progress != told or now_s - told_s >= TELL_EVERY_S:
                told, told_s = progress, now_s
                yield progress
            if progress.reached:
                return
            await self._node.changes.wait(LOOK_AGAIN_S)
            # Many may wait, and much may change at once: each looks at most so often.
            if (early_s := now_s + LOOK_S_MIN - clock.monotonic()) > 0:
                await clock.sleep(early_s)

    async def _look(self, run: str, step: int, level: str, name: str, began_s: float) -> Progress:
        session = self._session(run, step, name)
        if session is None:
            return await self._elsewhere(run, step, level, began_s)
        self.check_level(level, run, self._node.restriction_of(session))
        levels: tuple[str, ...] = (level,)
        if level == "all":
            levels = required_of(session, self._node.required_tiers) or tuple(filter(session.goes_to, self._node.tier_names))
        for name in levels:
            if name in self._node.tiers:
                session = await self._finder.at_level(session, self._node.tiers[name])
            if session.publish.get(name) is PublishState.SKIPPED:
                raise Incomplete(left_out(session, name), run=run, step=step)
        with self._node.catalog.read() as txn:
            progress = combined([level_progress(txn, session, name) for name in levels])
        if not progress.reached and session.reason.startswith(NEVER_WHOLE):  # what is committed stays as it is
            raise Incomplete(f"{session.reason}; it never completes: save the step again", run=run, step=step)
        if not progress.reached and progress.missing:
            waited_s = self._node.clock.monotonic() - self._node.first_seen_s.setdefault(session.id, began_s)
            if waited_s >= self._node.config.node.complete_within:
                raise Incomplete(
                    f"{describe_missing(progress.missing)}; node.complete_within is over",
                    missing=progress.missing,
                    run=run,
                    step=step,
                )
        return progress

    def _session(self, run: str, step: int, name: str) -> SessionRow | None:
        with self._node.catalog.read() as txn:
            if name and (named := txn.find_session(run, step, name)) is not None:
                return named
            checkpoint = txn.checkpoint(run, step)
            sessions = [] if checkpoint is None else txn.sessions_of(checkpoint)
        return sessions[-1] if sessions else None

    async def _elsewhere(self, run: str, step: int, level: str, began_s: float) -> Progress:
        """Not heard of here: it may be written through other gateways. Found, it is in the catalog at the next look."""
        asked_s, answer = self._asked.get((run, step), (float("-inf"), ""))
        if self._node.clock.monotonic() - asked_s < ASK_AGAIN_S:
            return Progress(False, 0, 0, (), answer)
        try:
            await self._finder.complete(run, step)
        except (NotFound, Unavailable, Incomplete) as error:
            if len(self._asked) >= ASKED_MAX:
                self._asked.clear()
            self._asked[run, step] = (self._node.clock.monotonic(), error.sentence)
            if isinstance(error, NotFound) and self._node.clock.monotonic() - began_s >= self._node.config.node.complete_within:
                raise
            return Progress(False, 0, 0, (), error.sentence)
        return Progress(False, 0, 0, (), f"found on a tier, on its way to {level}")


def level_progress(txn: ReadTxn, session: SessionRow, level: str) -> Progress:
    """One level of one session, as the catalog knows it."""
    missing = missing_parts(txn, session)
    if level == "cache":
        reached = any(state is PublishState.COMPLETE for state in session.publish.values()) or (
            complete_at_cache(txn, session) and not missing
        )
        total = txn.session_sums(session.id).committed_size
        # What went through to a tier is safer than in the cache, so the level is reached; that it is not there is said.
        reason = past_the_cache(txn, session) if reached else describe_missing(missing)
        return Progress(reached, total, total, () if reached else missing, reason)
    state = session.publish.get(level)
    _, _, done, total = txn.session_progress(session.id, level)
    if state in (PublishState.COMPLETE, PublishState.SUPERSEDED, PublishState.REMOVED):  # it was reached
        return Progress(True, total, total, (), "")
    if session.reason:
        reason = session.reason
    elif state is PublishState.SKIPPED:
        reason = left_out(session, level)
    elif missing:
        reason = describe_missing(missing)
    elif done < total:
        reason = f"draining to {level}"
    else:
        reason = f"waiting for the other writers' parts on {level}"
    return Progress(False, done, total, missing, reason)


def left_out(session: SessionRow, tier: str) -> str:
    """Why a session that is SKIPPED on the tier does not reach it."""
    why = session.skipped.get(tier, "by policy")
    return f"this checkpoint was left out on {tier!r} and does not go there ({why})"


def combined(several: list[Progress]) -> Progress:
    """All levels together."""
    if not several:
        raise InvalidArgument("no tier is configured, so there is no level to wait for")
    open_ones = [progress for progress in several if not progress.reached]
    return Progress(
        reached=not open_ones,
        done=sum(progress.done for progress in several),
        total=sum(progress.total for progress in several),
        missing=open_ones[0].missing if open_ones else (),
        reason=open_ones[0].reason if open_ones else "",
    )
