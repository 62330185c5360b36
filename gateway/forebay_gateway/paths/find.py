"""Where a checkpoint is: the catalog, else the tiers' manifests. An unreachable tier never counts as "not there".

Owns which session of a (run, step) a reader gets, and the adoption of manifests that other nodes wrote. Does not own bytes.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from forebay_gateway.base.recent import Recent
from forebay_gateway.base.tasks import uncut
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.errors import AlreadyExists, Corrupt, ForebayError, Incomplete, NotFound, Unavailable
from forebay_gateway.core.layout import (
    CONTROL_DIR,
    RUNS_DIR,
    current_key,
    manifest_key,
    parse_run_key,
    parse_step_dir,
)
from forebay_gateway.core.records import Origin, PartState, PublishState, SessionRow
from forebay_gateway.paths.evictable import mark_evictable
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.wholeness import (
    describe_gone,
    describe_missing,
    describe_spread,
    is_cached,
    is_complete,
    knows_copies,
    missing_parts,
    published_on,
)
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError, ShardEntry, what_is_wrong
from forebay_wire.names import InvalidName, check_run, session8
from forebay_wire.packs import PackIndex

log = logging.getLogger("forebay.find")

RUN_DEPTH_MAX = 16
ASK_AGAIN_S = 2.0
STEPS_AT_ONCE = 16
WALK_LISTS_MAX = 256
REMEMBERED_MAX = 20_000
ADOPTED_AT_ONCE = 1000  # shards in one transaction, those in packs too: some 30 ms; a pack is never divided

_File = tuple[int, ShardEntry, PackIndex | None]  # writer, file, its index where it is a pack


class Gone(NotFound):
    """Of a checkpoint that this catalog knows, and nobody else. kind stays "not_found"."""


@dataclass(frozen=True, slots=True)
class Found:
    """A complete session, and what could not be asked."""

    session: SessionRow
    unreachable: tuple[str, ...] = ()


class Finder:
    """Looks checkpoints up. `drop_open` ends an open part (CommitPath's); without it they stay."""

    def __init__(self, node: Node, drop_open: Callable[[int, int], Coroutine[Any, Any, int]] | None = None) -> None:
        self._node = node
        self._drop_open = drop_open
        self._learning = asyncio.Lock()
        self.left_out = ""
        # (tier, session): when to ask for its manifest again
        self._ask_again_s: Recent[tuple[str, int], float] = Recent(REMEMBERED_MAX)
        # (tier, run, step): (tag, session). What is forgotten is read and compared again.
        self._manifest_tags: Recent[tuple[str, str, int], tuple[str, int]] = Recent(REMEMBERED_MAX)

    async def complete(self, run: str, step: int) -> Found:
        """The complete session of a step; raises Incomplete with what is missing, NotFound, or Unavailable."""
        self._check_stays(run, step)
        local = self._complete_here(run, step)
        if local is not None and self._whole_in_cache(local):
            self._node.gone.pop(local.id, None)
            return Found(local)
        damaged: Corrupt | None = None
        without: set[str] = set()
        for tier in self._node.usable_tiers():
            try:
                adopted = await self._adopt(tier, run, step)
            except Corrupt as error:
                damaged = error
                continue
            except ForebayError as error:
                tier.failed(error)
                continue
            if adopted is not None:
                self._node.gone.pop(adopted.id, None)
                return Found(adopted, self._unreachable())
            without.add(tier.name)
        if local is not None:
            if await self._is_gone(local, without):
                self._node.gone[local.id] = None
                raise Gone(describe_gone(local), run=run, step=step)
            self._node.gone.pop(local.id, None)
            return Found(local, self._unreachable())
        raise self._why_not(run, step, damaged)

    def _check_stays(self, run: str, step: int) -> None:
        """Raise NotFound for a checkpoint that is on its way out, though a tier that was away may hold its manifest yet."""
        with self._node.catalog.read() as txn:
            checkpoint = txn.checkpoint(run, step)
        if checkpoint is not None and checkpoint.deleting:
            raise NotFound("this checkpoint is being deleted", run=run, step=step)

    def _complete_here(self, run: str, step: int) -> SessionRow | None:
        """The newest session that this catalog knows to be complete, in caches or on a tier."""
        with self._node.catalog.read() as txn:
            checkpoint = txn.checkpoint(run, step)
            if checkpoint is None or checkpoint.deleting:
                return None
            return next((row for row in reversed(txn.sessions_of(checkpoint)) if is_complete(txn, row)), None)

    async def _is_gone(self, local: SessionRow, without: set[str]) -> bool:
        """Whether each tier that had the manifest of what is not whole in the cache has none now. An absence counts only when
        the tier says it twice: else an older checkpoint would be taken for the newest."""
        names = published_on(local)
        if not names or not without.issuperset(names):
            return False
        for name in names:
            tier = self._node.tiers[name]
            try:
                await tier.tier.head(manifest_key(local.run, local.step))
                return False
            except NotFound:
                continue
            except ForebayError as error:
                tier.failed(error)
                return False
        return True

    def _whole_in_cache(self, session: SessionRow) -> bool:
        with self._node.catalog.read() as txn:
            return is_cached(txn, session)

    async def _adopt(self, tier: MonitoredTier, run: str, step: int) -> SessionRow | None:
        """The session whose manifest lies on the tier, with its rows in this catalog; None where there is no manifest."""
        key = manifest_key(run, step)
        try:
            info = await tier.tier.head(key)
            known = self._manifest_tags.get((tier.name, run, step))
            if known is not None and known[0] == info.tag:
                with self._node.catalog.read() as txn:
                    session = txn.session(known[1])
                if session is not None:
                    return session
            document, info = await tier.tier.get_small(key)
        except NotFound:
            return None
        try:
            manifest = await self._node.aside(len(document), lambda: Manifest.from_json(document))
        except ManifestError as error:
            raise Corrupt(what_is_wrong("the manifest", error), tier=tier.name, key=key) from error
        if (manifest.run, manifest.step) != (run, step):
            raise Corrupt("the manifest belongs to another checkpoint", tier=tier.name, key=key)
        session = await self._take(manifest, tier.name)
        self._manifest_tags[tier.name, run, step] = (info.tag, session.id)
        return session

    async def _take(self, manifest: Manifest, tier: str) -> SessionRow:
        with self._node.catalog.read() as txn:
            session = txn.find_session(manifest.run, manifest.step, manifest.session)
            known = session is not None and knows_copies(txn, session, tier)
        if session is not None and known and session.publish.get(tier) is PublishState.COMPLETE:
            return session
        if session is not None:
            await self._drop_stale(session, tier)
        catalog = self._node.catalog
        new_id = catalog.new_id()
        begin = partial(_begin_adoption, manifest, new_id)
        opened = await self._node.marks.found_again(manifest.run, manifest.step, begin)
        for some in _batches(manifest.files()):  # whoever waits for an acknowledgement has a turn between
            await catalog.write(partial(_adopt_some, opened.id, tier, some, catalog.new_id))
        if session is not None and manifest.node == self._node.id:  # complete.py may have been cut off behind the manifest
            await self._point(opened, tier)
        adopted = await catalog.write(lambda txn: txn.finish_adoption(opened.id, manifest, tier))
        await mark_evictable(self._node, adopted.id)  # where it is our own, and this look was faster than complete.py's
        return adopted

    async def _point(self, session: SessionRow, tier: str) -> None:
        """As complete.py would. It serves people who look into the directory: where the tier refuses it, no read fails."""
        with self._node.catalog.read() as txn:
            row = txn.checkpoint(session.run, session.step)
        if row is None or row.deleting:
            return
        with self._node.publishes(tier, session.id), contextlib.suppress(ForebayError):
            await self._node.tiers[tier].tier.point(current_key(session.run, session.step), session8(session.session))

    async def _drop_stale(self, session: SessionRow, tier: str) -> None:
        """Parts that are open here, of a session that is complete on the tier: their writers went on, and committed, through
        another gateway. What they had put here is in the way of what counts: the same names, perhaps in other packs."""
        if (drop := self._drop_open) is None:
            return
        with self._node.catalog.read() as txn:
            stale = [part.writer for part in txn.parts(session.id) if part.state is PartState.OPEN]
        for writer in stale:
            with contextlib.suppress(AlreadyExists, NotFound):  # committed here after all, or gone
                await uncut(drop(session.id, writer))
                log.info("dropped an open part: its session is complete tier=%s writer=%s", tier, writer)

    async def learn_copies(self, session: SessionRow, tiers: Iterable[MonitoredTier]) -> None:
        """Ask these tiers too for a complete session: each has a manifest of its own. One that cannot be asked is skipped."""
        async with self._learning:  # whoever comes while another asks has the answer when it is its turn
            for tier in tiers:
                if self._node.clock.monotonic() < self._ask_again_s.get((tier.name, session.id), 0.0):
                    continue
                try:
                    await self._adopt(tier, session.run, session.step)
                except Corrupt as error:
                    log.warning("a manifest is damaged tier=%s error=%s", tier.name, error)
                except ForebayError as error:
                    tier.failed(error)
                self._ask_again_s[tier.name, session.id] = self._node.clock.monotonic() + ASK_AGAIN_S

    async def at_level(self, session: SessionRow, tier: MonitoredTier) -> SessionRow:
        """The session again, with what the tier says of it where this node was never told: a session that was found on one tier
        is complete on another, or not, without this catalog's doing."""
        if session.origin is not Origin.TIER or tier.name in session.publish or not tier.usable:
            return session
        await self.learn_copies(session, [tier])
        with self._node.catalog.read() as txn:
            return txn.session(session.id) or session

    def _unreachable(self) -> tuple[str, ...]:
        return tuple(tier.name for tier in self._node.unreachable_tiers())

    def _why_not(self, run: str, step: int, damaged: Corrupt | None) -> ForebayError:
        if damaged is not None:
            return damaged
        with self._node.catalog.read() as txn:
            checkpoint = txn.checkpoint(run, step)
            sessions = [] if checkpoint is None else txn.sessions_of(checkpoint)
            newest = sessions[-1] if sessions else None
            missing = () if newest is None else missing_parts(txn, newest)
            spread = "" if newest is None else describe_spread(txn, newest)
        if newest is not None and missing:
            return Incomplete(describe_missing(missing), missing=missing, run=run, step=step)
        if newest is not None and newest.reason and checkpoint is not None and not checkpoint.deleting:
            return Incomplete(f"incomplete: {newest.reason}", run=run, step=step)
        if spread and checkpoint is not None and not checkpoint.deleting:
            return Incomplete(f"incomplete: {spread}", run=run, step=step)
        away = self._unreachable()
        if away:
            return Unavailable(
                "this checkpoint is not known here, and a tier that may hold it cannot be reached",
                retry_after_s=2.0,
                run=run,
                step=step,
                unreachable=",".join(away),
            )
        return NotFound(f"no checkpoint of run {run!r} has step {step}", run=run, step=step)

    # -- newest, and all -----------------------------------------------------------------------------------------------

    async def latest(self, run: str, level: str = "any") -> Found:
        """The complete checkpoint with the highest step; raises NotFound or Unavailable."""
        wanted = None if level in ("", "any", "cache") else self._node.tier(level)
        return await self.latest_of(run, await self.known_steps(run), level, wanted)

    async def latest_of(
        self, run: str, steps: Collection[int], level: str = "any", wanted: MonitoredTier | None = None
    ) -> Found:
        """The same among these steps."""
        for step in sorted(steps, reverse=True):
            try:
                found = await self.complete(run, step)
            except (NotFound, Incomplete):
                continue
            except Corrupt as error:
                log.warning("a damaged checkpoint is passed over run=%s step=%s error=%s", run, step, error)
                continue
            if wanted is not None:
                found = Found(await self.at_level(found.session, wanted), found.unreachable)
            if level in ("", "any") or self._reached(found.session, level):
                return found
        away = self._unreachable()
        if away:
            raise Unavailable(
                "no complete checkpoint is known here, and a tier that may hold one cannot be reached",
                retry_after_s=2.0,
                run=run,
                unreachable=",".join(away),
            )
        raise NotFound(f"run {run!r} has no complete checkpoint", run=run)

    def _reached(self, session: SessionRow, level: str) -> bool:
        return self._whole_in_cache(session) if level == "cache" else session.publish.get(level) is PublishState.COMPLETE

    async def known_steps(self, run: str) -> set[int]:
        """All steps known here, or begun on a reachable tier; none is looked at."""
        with self._node.catalog.read() as txn:
            steps = {row.step for row in txn.checkpoints(run) if not row.deleting}
            deleting = {row.step for row in txn.checkpoints(run) if row.deleting}
        for tier in self._node.usable_tiers():
            try:
                listing = await tier.tier.list(f"{run}/")
            except ForebayError as error:
                tier.failed(error)
                continue
            found = (parse_step_dir(name) for name in listing.directories)
            steps.update(step for step in found if step is not None and step not in deleting)
        return steps

    async def steps(self, run: str) -> list[int]:
        """All steps known here or on a reachable tier, ascending; manifests of the latter are adopted."""
        steps = sorted(await self.known_steps(run))

        async def look(step: int) -> None:
            with contextlib.suppress(ForebayError):  # the view says what is wrong with it
                await self.everywhere(run, step)

        for begin in range(0, len(steps), STEPS_AT_ONCE):
            await asyncio.gather(*(look(step) for step in steps[begin : begin + STEPS_AT_ONCE]))
        return steps

    async def everywhere(self, run: str, step: int) -> Found:
        """As complete(), and each tier has been asked that this node knows nothing of."""
        found = await self.complete(run, step)
        session = found.session
        for tier in self._node.usable_tiers():
            session = await self.at_level(session, tier)
        return Found(session, found.unreachable)

    async def runs(self) -> list[str]:
        """All runs known here or on a reachable tier, sorted. `left_out` says what this look did not see."""
        with self._node.catalog.read() as txn:
            runs = set(txn.runs())
        self.left_out = ""
        for tier in self._node.usable_tiers():
            try:
                runs |= await noted_runs(tier)
                if not await self._walk(tier, runs):
                    self.left_out = (
                        f"tier {tier.name} holds very many directories, of which {WALK_LISTS_MAX} were looked at: runs that "
                        "were copied there and not saved through Forebay may be missing here, and are found by name"
                    )
            except ForebayError as error:
                tier.failed(error)
        return sorted(runs)

    async def _walk(self, tier: MonitoredTier, runs: set[str]) -> bool:
        """Directories level by level down to those that hold a step, for what came onto the tier without a gateway; False where
        there are too many to look at: the tier may be a bucket that is shared with others."""
        left, level = WALK_LISTS_MAX, [""]
        for _ in range(RUN_DEPTH_MAX + 1):
            below: list[str] = []
            for begin in range(0, len(level), STEPS_AT_ONCE):
                prefixes = level[begin : begin + STEPS_AT_ONCE][:left]
                if not prefixes:
                    return False
                left -= len(prefixes)
                listings = await asyncio.gather(*(tier.tier.list(prefix) for prefix in prefixes))
                for prefix, listing in zip(prefixes, listings, strict=True):
                    names = [name for name in listing.directories if name != CONTROL_DIR]
                    if prefix and any(parse_step_dir(name) is not None for name in names):
                        runs.add(prefix.rstrip("/"))
                    below += [f"{prefix}{name}/" for name in names if parse_step_dir(name) is None]
            level = below
        return True


async def noted_runs(tier: MonitoredTier, prefix: str = f"{CONTROL_DIR}/{RUNS_DIR}/", depth: int = RUN_DEPTH_MAX) -> set[str]:
    """Runs that gateways have noted on the tier. Raises as the tier does."""
    listing = await tier.tier.list(prefix)
    runs = {run for info in listing.objects if (run := parse_run_key(info.key)) is not None and is_run(run)}
    for name in listing.directories if depth else ():
        runs |= await noted_runs(tier, f"{prefix}{name}/", depth - 1)
    return runs


def is_run(name: str) -> bool:
    """Whether a name that stands on a tier can be a run's."""
    try:
        check_run(name)
    except InvalidName:
        return False
    return True


def _batches(files: Iterable[_File]) -> list[list[_File]]:
    """What is taken in at once."""
    made: list[list[_File]] = []
    count = 0
    for file in files:
        names = 1 if file[2] is None else len(file[2])
        if not made or count + names > ADOPTED_AT_ONCE:
            made.append([])
            count = 0
        made[-1].append(file)
        count += names
    return made


def _begin_adoption(manifest: Manifest, new_id: int, txn: WriteTxn) -> SessionRow:
    return txn.begin_adoption(manifest, new_id)


def _adopt_some(
    session_id: int,
    tier: str,
    files: Sequence[_File],
    new_id: Callable[[], int],
    txn: WriteTxn,
) -> None:
    txn.adopt_shards(session_id, tier, files, new_id)
