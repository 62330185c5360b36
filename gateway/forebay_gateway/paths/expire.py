"""What the rules of `[[retain]]` let go of, off one tier.

    a run's steps on the tier -> those that are new get their place in the run's ledger -> this node takes the ledger for a
    while -> verdicts -> what goes is noted there -> its manifest is kept aside, then deleted: from here on no reader finds it
    -> its shards and part records -> the ledger says that it has gone; every node's catalog follows (removed.py)

One node at a time works on a run: it holds the run's ledger (ledgers.py). Owns this order, so that a kill at any point leaves a
checkpoint whole or invisible, and whoever holds the ledger next goes on. Only what a manifest names is deleted. What stands on
the tier is on_tier.py's to say, the rules are core/retention's.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from forebay_gateway.base import failpoints
from forebay_gateway.core.config_sections import RetainConfig
from forebay_gateway.core.errors import ForebayError, PermissionDenied, Unavailable
from forebay_gateway.core.layout import current_key, manifest_key, part_key, shard_key
from forebay_gateway.core.retention import (
    GONE_MAX,
    Entry,
    Ledger,
    Verdict,
    decide,
    ledger_key,
    rule_of,
    tombstone_key,
)
from forebay_gateway.core.run_documents import Name
from forebay_gateway.paths.find import noted_runs
from forebay_gateway.paths.ledgers import SOON_S, TTL_S, Busy, Hold, Ledgers
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.on_tier import OnTier, only
from forebay_gateway.paths.pins import pinned_steps
from forebay_gateway.paths.removed import Follower
from forebay_gateway.paths.reserve import Reserve
from forebay_gateway.paths.retain import DELETES_A_CALL
from forebay_gateway.paths.standing import known
from forebay_gateway.tiers.monitor import OF_ONE_OBJECT, MonitoredTier
from forebay_wire.manifest import Manifest
from forebay_wire.names import session8

log = logging.getLogger("forebay.retain")

LOOK_S = 300.0  # between two looks at all runs
GOING_MAX = 64  # checkpoints in one go, so that the ledger is held for a bounded time
PROVED_MAX = 64
OF_ONE_RUN = (*OF_ONE_OBJECT, PermissionDenied)  # a tier that lets nothing be deleted still takes what drains


@dataclass(frozen=True, slots=True)
class Fate:
    """What becomes of one checkpoint on one tier. `outcome` is empty where nothing was done."""

    tier: str
    run: str
    step: int
    session: str
    size: int
    goes: bool
    reason: str
    outcome: str = ""


@dataclass(slots=True)
class Tally:
    """Since this process began."""

    looked_at_s: float | None = None  # monotonic, when the last look at a run ended
    removed: int = 0
    removed_bytes: int = 0
    last: str = ""  # what went last, run/step


class Expiry:
    """Retention on one tier."""

    def __init__(self, node: Node, tier: MonitoredTier, follower: Follower) -> None:
        self._node, self._tier, self._follower = node, tier, follower
        self._reserve = Reserve(tier)
        self._ledgers, self._there = Ledgers(node, tier, self._reserve), OnTier(node, tier)
        self._lock = asyncio.Lock()
        self._due: dict[str, float] = {}
        self._completed: dict[str, set[int]] = {}  # steps that were completed here since the last look at their run
        self._refused: dict[str, str] = {}  # runs that could not be looked at, and why
        self._look_at_all_s = float("-inf")
        self.tally = Tally()
        self.wake: Callable[[], None] = lambda: None

    @property
    def off(self) -> str:
        """Why nothing is removed here; empty where rules are kept."""
        if not any(rule.tier in ("", self._tier.name) for rule in self._node.config.retain):
            return "no rule"
        proved = self._tier.tier.capabilities
        if proved is not None and not proved.conditional_replace:
            return "off: the tier cannot replace a document only as it was read, so nodes could not take turns"
        return ""

    def completed(self, run: str, step: int) -> None:
        """A checkpoint became complete on this tier: what it makes superfluous goes soon."""
        if rule_of(run, self._tier.name, self._node.config.retain) is not None:
            self._completed.setdefault(run, set()).add(step)
            self._due[run] = self._node.clock.monotonic()
            self.wake()

    async def step(self) -> float | None:
        """Background: the runs whose time has come; now and then all of them. Returns the pause in seconds."""
        if self.off or not self._tier.takes_deletions:
            return None
        now_s = self._node.clock.monotonic()
        try:
            await self._reserve.keep()
            if now_s >= self._look_at_all_s:
                for run in await self.runs():
                    self._due.setdefault(run, now_s)
                self._look_at_all_s = now_s + LOOK_S
            for run in [run for run, at_s in self._due.items() if at_s <= now_s]:
                del self._due[run]
                await self._look_in_turn(run)
        except ForebayError as error:
            self._tier.failed(error)
            self._look_at_all_s = min(self._look_at_all_s, self._node.clock.monotonic() + SOON_S)
            return SOON_S
        next_s = min([self._look_at_all_s, *self._due.values()])
        return max(0.0, next_s - self._node.clock.monotonic())

    async def _look_in_turn(self, run: str) -> None:
        """What is wrong with one run alone, or what this node may not do there, stops neither the others nor the drain."""
        try:
            await self.look(run, apply=True)
        except Busy as busy:
            self._due[run] = self._node.clock.monotonic() + busy.pause_s
        except OF_ONE_RUN as error:
            log.warning("retention cannot work on a run tier=%s run=%s error=%s", self._tier.name, run, error)
            self._refused[run] = str(error)
        else:
            self._refused.pop(run, None)
        alarm = f"retain-{self._tier.name}"
        self._node.alarms.pop(alarm, None)
        for one, why in list(self._refused.items())[:1]:
            what = f"retention cannot work on {len(self._refused)} of the runs on tier {self._tier.name}, one is {one}: {why}"
            self._node.alarms[alarm] = (what, "mend that, often the right to delete there, or take the rule away")

    async def runs(self) -> list[str]:
        """All that a rule is for: those of this catalog, and those noted on the tier."""
        with self._node.catalog.read() as txn:
            known = set(txn.runs())
        known |= await noted_runs(self._tier)
        return sorted(run for run in known if rule_of(run, self._tier.name, self._node.config.retain) is not None)

    async def look(self, run: str, *, apply: bool) -> list[Fate]:
        """What becomes of a run's checkpoints here; with `apply` it is done. Raises Busy, and as the tier does."""
        rule = rule_of(run, self._tier.name, self._node.config.retain)
        if rule is None or self.off:
            return []
        if not self._tier.takes_deletions:
            raise Unavailable("the tier cannot be reached", retry_after_s=5.0, tier=self._tier.name, reason=self._tier.reason)
        async with self._lock:
            fates = await self._look(run, rule, apply)
        self.tally.looked_at_s = self._node.clock.monotonic()
        return fates

    async def _look(self, run: str, rule: RetainConfig, apply: bool) -> list[Fate]:
        was, tag = await self._ledgers.read(run)
        ledger = await self._decided_anew(run, was)
        there = await self._there.steps(run)
        completed = set(self._completed.get(run, ()))
        groups = await self._there.with_news(run, ledger, there, completed)
        protected, doubtful = known(self._node, self._tier.name, run, groups)
        pinned = await pinned_steps(self._node, self._tier, run)
        # At the end of all times everything has its age: what could go at all.
        likely = any(verdict.goes for verdict in decide(rule, groups, float("inf"), protected, pinned, doubtful))
        verdicts = decide(rule, groups, None, protected, pinned, doubtful)
        outcomes: dict[Name, str] = {}
        if likely or was.going or groups != was.groups:
            here = {entry.name for group in groups for entry in group}
            gone = tuple(name for name in ledger.gone if name not in here)  # what was saved anew has not gone
            hold = await self._ledgers.take(replace(ledger, groups=groups, gone=gone), tag)
            try:
                for entry in set(was.going) - set(ledger.going):
                    await self._tier.tier.delete(tombstone_key(run, entry.name))
                verdicts, outcomes = await self._act(rule, hold, apply)
            finally:
                ledger = hold.ledger
        self._completed.get(run, set()).difference_update(completed)
        if not await self._follower.follow(self._tier, run, ledger):
            self._due.setdefault(run, self._node.clock.monotonic() + SOON_S)
        return self._told(run, there, verdicts, outcomes)

    async def _decided_anew(self, run: str, ledger: Ledger) -> Ledger:
        """What was going when a turn was cut short: what has begun to go goes on; what still stands is decided on anew, since
        that for whose sake it was to go may be gone by now."""
        begun = []
        for entry in ledger.going:
            found = await self._there.entry(run, entry.step)
            if found is None or found.name != entry.name:
                begun.append(entry)
        stay = {entry.name for entry in ledger.entries} - {entry.name for entry in begun}
        return replace(ledger, groups=only(ledger.groups, stay), going=tuple(begun))

    def _told(self, run: str, there: Iterable[int], verdicts: Sequence[Verdict], outcomes: dict[Name, str]) -> list[Fate]:
        known = {verdict.entry.step for verdict in verdicts}
        fates = [
            Fate(self._tier.name, run, step, "", 0, False, "it is not complete here") for step in sorted(set(there) - known)
        ]
        for verdict in verdicts:
            entry = verdict.entry
            outcome = outcomes.get(entry.name, "")
            fates.append(
                Fate(self._tier.name, run, entry.step, entry.session, entry.size, verdict.goes, verdict.reason, outcome)
            )
        return fates

    async def _act(self, rule: RetainConfig, hold: Hold, apply: bool) -> tuple[list[Verdict], dict[Name, str]]:
        run, outcomes = hold.ledger.run, dict[Name, str]()
        verdicts = await self._verdicts(rule, hold)
        if apply:
            chosen = [verdict.entry for verdict in verdicts if verdict.goes][:GOING_MAX]
            if chosen or hold.ledger.going:
                await self._ledgers.write(hold, replace(hold.ledger, going=(*hold.ledger.going, *chosen)))
                failpoints.hit("expire.noted")
                for entry in hold.ledger.going:
                    outcomes[entry.name] = await self._take_off(run, entry, hold)
                await self._note_gone(hold, outcomes)
                if len(chosen) == GOING_MAX:
                    self._due[run] = self._node.clock.monotonic()
                return verdicts, outcomes
        await self._ledgers.write(hold, replace(hold.ledger, token="", owner=""))
        return verdicts, outcomes

    async def _verdicts(self, rule: RetainConfig, hold: Hold) -> list[Verdict]:
        """Those that stay and for whose sake others go are proved to be there, whole."""
        run = hold.ledger.run
        pinned = await pinned_steps(self._node, self._tier, run)
        protected, doubtful = known(self._node, self._tier.name, run, hold.ledger.groups)
        proved = set[Name]()
        while True:
            groups = hold.ledger.groups
            verdicts = decide(rule, groups, hold.now_s, protected, pinned, doubtful)
            if not any(verdict.goes for verdict in verdicts):
                return verdicts
            counted = [verdict.entry for verdict in verdicts if verdict.entry.name not in doubtful]
            newest = counted[-min(PROVED_MAX, max(rule.keep_last or 1, len(groups[-1]))) :]
            stand = {entry.name: await self._there.stands(run, entry) for entry in newest if entry.name not in proved}
            proved |= {name for name, stands in stand.items() if stands}
            if stand.keys() <= proved:
                return verdicts
            damaged = [name for name, stands in stand.items() if stands is False]
            doubtful |= dict.fromkeys(damaged, "its manifest here is damaged, or of another session")
            gone = {name for name, stands in stand.items() if stands is None}
            hold.ledger = replace(hold.ledger, groups=only(groups, {entry.name for entry in hold.ledger.entries} - gone))

    async def _note_gone(self, hold: Hold, outcomes: dict[Name, str]) -> None:
        """The end of a removal; the ledger is free again."""
        ledger = hold.ledger
        ended = [entry for entry in ledger.going if outcomes[entry.name] == REMOVED]
        off = {entry.name for entry in ledger.going if outcomes[entry.name] != KEPT}
        kept = only(ledger.groups, {entry.name for entry in ledger.entries} - off)
        gone = dict.fromkeys((*ledger.gone, *(entry.name for entry in ended)))
        done = replace(ledger, groups=kept, going=(), gone=tuple(gone)[-GONE_MAX:], token="", owner="")
        failpoints.hit("expire.before_gone")
        await self._ledgers.write(hold, done)
        failpoints.hit("expire.gone")
        self.tally.removed += len(ended)
        self.tally.removed_bytes += sum(entry.size for entry in ended)
        if ended:
            self.tally.last = f"{ledger.run}/{ended[-1].step}"

    # -- one checkpoint ------------------------------------------------------------------------------------------------

    async def _take_off(self, run: str, entry: Entry, hold: Hold) -> str:
        """REMOVED; KEPT where it is pinned now; REPLACED where something else stands in its place. Repeatable at any point."""
        key, aside = manifest_key(run, entry.step), tombstone_key(run, entry.name)
        there, tombstone = await self._there.manifest(key, run, entry.step), await self._there.manifest(aside, run, entry.step)
        is_there = there is not None and session8(there[0].session) == entry.session
        if there is not None and is_there:
            if there[1] != entry.committed_s:  # saved again since
                await self._tier.tier.delete(aside)
                return REPLACED
            await self._reserve.put(aside, there[3])
            failpoints.hit("expire.kept_aside")
            # Noted first, looked for pins then; whoever pins says so first and looks at the ledger then: one sees the other.
            if entry.step in await pinned_steps(self._node, self._tier, run):
                await self._tier.tier.delete(aside)
                return KEPT
            if (await self._tier.tier.head(ledger_key(run))).tag != hold.tag:  # a machine's pause may not show in its clocks
                raise Busy(self._tier.name, run)
            if (await self._tier.tier.head(key)).tag != there[2]:
                await self._tier.tier.delete(aside)
                return REPLACED
            for each in (current_key(run, entry.step), key):
                self._ledgers.check(hold)  # each answer may have taken its time
                await self._tier.tier.delete(each)
            failpoints.hit("expire.manifest_gone")
            await self._shards_off(there[0], hold)
        elif tombstone is not None and session8(tombstone[0].session) == entry.session:
            await self._shards_off(tombstone[0], hold)
        elif there is not None:
            return REPLACED
        await self._tier.tier.delete(aside)
        failpoints.hit("expire.tombstone_gone")
        return REMOVED

    async def _shards_off(self, manifest: Manifest, hold: Hold) -> None:
        names = (manifest.run, manifest.step, manifest.session)
        keys = [shard_key(*names, file.name) for _, file, _ in manifest.files()]
        keys += [part_key(*names, writer) for writer in range(manifest.writers)]
        for begin in range(0, len(keys), DELETES_A_CALL):
            if self._node.clock.monotonic() >= hold.safe_until_s - TTL_S / 4:
                await self._ledgers.write(hold, hold.ledger)
            await self._tier.tier.delete_many(keys[begin : begin + DELETES_A_CALL])
            failpoints.hit("expire.shards_gone")


async def fates_of(expiries: Iterable[Expiry], run: str, *, apply: bool) -> AsyncGenerator[Fate, None]:
    """Of one run, or of all that a rule is for, on each tier. Raises the first failure at the end, once all others had their
    turn: Unavailable for a tier that cannot be reached."""
    failed: list[ForebayError] = []
    for expiry in expiries:
        if expiry.off:
            continue
        try:
            runs = [run] if run else await expiry.runs()
        except ForebayError as error:
            failed.append(error)
            continue
        for each in runs:
            try:
                fates = await expiry.look(each, apply=apply)
            except ForebayError as error:
                failed.append(error)
                continue
            for fate in fates:
                yield fate
    if len(failed) > 1:
        log.warning("retention looked at all that it could failed=%s last=%s", len(failed), failed[-1])
    if failed:
        raise failed[0]


REMOVED, KEPT, REPLACED = "removed", "kept: it is pinned", "kept: it was saved again"
