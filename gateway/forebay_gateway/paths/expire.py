"""What the rules of `[[retain]]` let go of, off one tier.

    a run's steps on the tier -> those that are new get their place in the run's ledger -> this node takes the ledger for a
    while -> verdicts -> what goes is noted there -> its manifest is kept aside, then deleted: from here on no reader finds it
    -> its shards and part records -> the ledger says that it has gone; every node's catalog follows (removed.py)

One node at a time works on a run: it holds the run's ledger, a document on the tier that is only ever replaced as it was read.
A holder counts as gone when another one has seen the document unchanged for its time to live, by the latter's own monotonic
clock; itself it stops acting at half of that. Owns this order, so that a kill at any point leaves a checkpoint whole or
invisible, and whoever holds the ledger next goes on. Only what a manifest names is deleted. The rules are core/retention's.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from forebay_gateway.base import failpoints
from forebay_gateway.base.recent import Recent
from forebay_gateway.core.config_sections import RetainConfig
from forebay_gateway.core.errors import AlreadyExists, ForebayError, NotFound, PermissionDenied, Unavailable
from forebay_gateway.core.fleet import Sighting, look, unchanged_s
from forebay_gateway.core.layout import current_key, manifest_key, parse_step_dir, part_key, shard_key
from forebay_gateway.core.retention import (
    GONE_MAX,
    Entry,
    Groups,
    Ledger,
    Verdict,
    decide,
    ledger_key,
    manifest_is_final,
    place,
    read_ledger,
    rule_of,
    tombstone_key,
)
from forebay_gateway.core.run_documents import Name
from forebay_gateway.paths.find import noted_runs
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pins import pinned_steps
from forebay_gateway.paths.removed import Follower
from forebay_gateway.paths.reserve import Reserve
from forebay_gateway.paths.retain import DELETES_A_CALL
from forebay_gateway.paths.standing import known
from forebay_gateway.paths.wholeness import sessions_of
from forebay_gateway.tiers.monitor import OF_ONE_OBJECT, MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError
from forebay_wire.names import session8

log = logging.getLogger("forebay.retain")

LOOK_S = 300.0  # between two looks at all runs
SOON_S = 10.0  # where another node holds the ledger, or something is under way
TTL_S = 120.0
TTL_S_MAX = 3600.0  # whatever a document says
GOING_MAX = 64  # checkpoints in one go, so that the ledger is held for a bounded time
PROVED_MAX = 64
RUNS_REMEMBERED_MAX = 10_000
WHOLE_REMEMBERED_MAX = 10_000
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


@dataclass(slots=True)
class _Hold:
    """The ledger, while it is this process's."""

    ledger: Ledger
    tag: str
    safe_until_s: float
    now_s: float | None  # by the tier's own clock


class Busy(Unavailable):
    """Another node works on the run, or was faster. kind stays "unavailable"; nothing is wrong with the tier."""

    def __init__(self, tier: str, run: str, pause_s: float = SOON_S) -> None:
        self.pause_s = pause_s
        super().__init__("retention of this run is another node's work just now", retry_after_s=pause_s, tier=tier, run=run)


class Expiry:
    """Retention on one tier."""

    def __init__(self, node: Node, tier: MonitoredTier, follower: Follower) -> None:
        self._node, self._tier, self._follower = node, tier, follower
        self._reserve = Reserve(tier)
        self._process = secrets.token_hex(8)
        self._lock = asyncio.Lock()
        self._seen: Recent[str, Sighting] = Recent(RUNS_REMEMBERED_MAX)
        self._due: dict[str, float] = {}
        self._completed: dict[str, set[int]] = {}  # steps that were completed here since the last look at their run
        self._whole: Recent[tuple[str, Name], str] = Recent(WHOLE_REMEMBERED_MAX)  # manifests that were read, their versions
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
        was, tag = await self._read(run)
        ledger = await self._decided_anew(run, was)
        there = await self._steps(run)
        completed = set(self._completed.get(run, ()))
        groups = await self._with_news(run, ledger, there, completed)
        protected, doubtful = known(self._node, self._tier.name, run, groups)
        pinned = await pinned_steps(self._node, self._tier, run)
        # At the end of all times everything has its age: what could go at all.
        likely = any(verdict.goes for verdict in decide(rule, groups, float("inf"), protected, pinned, doubtful))
        verdicts = decide(rule, groups, None, protected, pinned, doubtful)
        outcomes: dict[Name, str] = {}
        if likely or was.going or groups != was.groups:
            here = {entry.name for group in groups for entry in group}
            gone = tuple(name for name in ledger.gone if name not in here)  # what was saved anew has not gone
            hold = await self._take(replace(ledger, groups=groups, gone=gone), tag)
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
            found = await self._entry(run, entry.step)
            if found is None or found.name != entry.name:
                begun.append(entry)
        stay = {entry.name for entry in ledger.entries} - {entry.name for entry in begun}
        return replace(ledger, groups=_only(ledger.groups, stay), going=tuple(begun))

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

    # -- what is there -------------------------------------------------------------------------------------------------

    async def _read(self, run: str) -> tuple[Ledger, str]:
        """The ledger and its version; an empty one, and no version, where there is none."""
        key = ledger_key(run)
        try:
            document, info = await self._tier.tier.get_small(key)
        except NotFound:
            return Ledger(run=run), ""
        before = {run: seen} if (seen := self._seen.get(run)) is not None else {}
        self._seen[run] = look(before, {run: info.tag}, self._node.clock.monotonic())[run]
        ledger = read_ledger(document, run)
        if ledger is None:
            log.warning("a ledger of retention is damaged and made anew tier=%s run=%s", self._tier.name, run)
            ledger = Ledger(run=run, owner="unknown", token=UNKNOWN, ttl_s=TTL_S)  # whose turn it was, nobody can tell
        return ledger, info.tag

    async def _steps(self, run: str) -> set[int]:
        listing = await self._tier.tier.list(f"{run}/")
        return {step for name in listing.directories if (step := parse_step_dir(name)) is not None}

    async def _with_news(self, run: str, ledger: Ledger, there: set[int], completed: set[int]) -> Groups:
        """The ledger's groups without what is no longer there, and with what has come."""
        known = {entry.step: entry for entry in ledger.entries if entry.step in there}
        going = {entry.step for entry in ledger.going}
        arrivals = []
        for step in sorted(there - going):
            if step in known and step not in completed:
                continue
            entry = await self._entry(run, step)
            if entry is None or (step in known and entry.name == known[step].name):
                continue
            arrivals.append(entry)
            known.pop(step, None)  # a newer session of the step stands there: its place is another
        groups = _only(ledger.groups, {entry.name for entry in known.values()})
        return place(groups, arrivals, self._commits(run))

    async def _entry(self, run: str, step: int) -> Entry | None:
        """What the manifest there says; None where there is none, or none that can be read."""
        found = await self._manifest(manifest_key(run, step), run, step)
        if found is None:
            return None
        manifest, committed_s, tag, _ = found
        size = sum(file.size for _, file, _ in manifest.files())
        entry = Entry(step, session8(manifest.session), committed_s, manifest_is_final(manifest), size)
        self._whole[run, entry.name] = tag
        return entry

    async def _manifest(self, key: str, run: str, step: int) -> tuple[Manifest, float | None, str, bytes] | None:
        """(manifest, when it was written by the tier's clock, version, document). None also for one of another checkpoint:
        somebody has copied a directory, and what it names lies elsewhere and is not ours to delete."""
        try:
            document, info = await self._tier.tier.get_small(key)
            manifest = await self._node.aside(len(document), lambda: Manifest.from_json(document))
            if (manifest.run, manifest.step) != (run, step):
                raise ManifestError(f"it is of run {manifest.run!r}, step {manifest.step}")
        except NotFound:
            return None
        except ManifestError as error:
            log.warning(
                "retention passes over a manifest that is damaged, or not this one tier=%s key=%s error=%s",
                self._tier.name,
                key,
                error,
            )
            return None
        return manifest, info.modified_s, info.tag, document

    def _commits(self, run: str) -> dict[Name, int]:
        """The order of the commits that this node saw."""
        with self._node.catalog.read() as txn:
            sessions = [session for row in txn.checkpoints(run) for session in sessions_of(txn, row)]
        return {(each.step, session8(each.session)): each.commit_seq for each in sessions if each.commit_seq}

    # -- the ledger is this node's -------------------------------------------------------------------------------------

    async def _take(self, ledger: Ledger, tag: str) -> _Hold:
        """Raises Busy where another process holds it and is, as far as is known, alive."""
        if ledger.token not in ("", self._process):
            seen, ttl_s = self._seen.get(ledger.run), min(max(ledger.ttl_s, 1.0), TTL_S_MAX)
            left_s = ttl_s if seen is None else ttl_s - unchanged_s(seen, self._node.clock.monotonic())
            if left_s > 0:
                raise Busy(self._tier.name, ledger.run, min(SOON_S, left_s))
            log.info(
                "retention goes on for a node that is gone tier=%s run=%s node=%s", self._tier.name, ledger.run, ledger.owner
            )
        hold = _Hold(ledger, tag, float("inf"), None)
        await self._write(hold, replace(ledger, owner=self._node.id, token=self._process, ttl_s=TTL_S))
        return hold

    async def _write(self, hold: _Hold, ledger: Ledger) -> None:
        """Replace it as it was read; raises Busy where somebody else did, or time ran out."""
        self._check_holds(hold)
        began_s = self._node.clock.monotonic()
        ledger = replace(ledger, turn=ledger.turn + 1)
        document, key = msgspec.json.encode(ledger), ledger_key(ledger.run)
        try:
            if hold.tag:
                info = await self._reserve.put(key, document, if_match=hold.tag)
            else:
                info = await self._reserve.put(key, document, if_absent=True)
        except AlreadyExists as error:
            raise Busy(self._tier.name, ledger.run) from error
        if info.modified_s is None:
            info = await self._tier.tier.head(key)
        hold.ledger, hold.tag, hold.now_s = ledger, info.tag, info.modified_s
        hold.safe_until_s = began_s + TTL_S / 2

    def _check_holds(self, hold: _Hold) -> None:
        if self._node.clock.monotonic() >= hold.safe_until_s:
            raise Busy(self._tier.name, hold.ledger.run)

    async def _act(self, rule: RetainConfig, hold: _Hold, apply: bool) -> tuple[list[Verdict], dict[Name, str]]:
        run, outcomes = hold.ledger.run, dict[Name, str]()
        verdicts = await self._verdicts(rule, hold)
        if apply:
            chosen = [verdict.entry for verdict in verdicts if verdict.goes][:GOING_MAX]
            if chosen or hold.ledger.going:
                await self._write(hold, replace(hold.ledger, going=(*hold.ledger.going, *chosen)))
                failpoints.hit("expire.noted")
                for entry in hold.ledger.going:
                    outcomes[entry.name] = await self._take_off(run, entry, hold)
                await self._note_gone(hold, outcomes)
                if len(chosen) == GOING_MAX:
                    self._due[run] = self._node.clock.monotonic()
                return verdicts, outcomes
        await self._write(hold, replace(hold.ledger, token="", owner=""))
        return verdicts, outcomes

    async def _verdicts(self, rule: RetainConfig, hold: _Hold) -> list[Verdict]:
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
            stand = {entry.name: await self._stands(run, entry) for entry in newest if entry.name not in proved}
            proved |= {name for name, stands in stand.items() if stands}
            if stand.keys() <= proved:
                return verdicts
            damaged = [name for name, stands in stand.items() if stands is False]
            doubtful |= dict.fromkeys(damaged, "its manifest here is damaged, or of another session")
            gone = {name for name, stands in stand.items() if stands is None}
            hold.ledger = replace(hold.ledger, groups=_only(groups, {entry.name for entry in hold.ledger.entries} - gone))

    async def _stands(self, run: str, entry: Entry) -> bool | None:
        """Whether its manifest is there, whole and its own; None where there is none. Read only where it is not as it was."""
        try:
            info = await self._tier.tier.head(manifest_key(run, entry.step))
        except NotFound:
            return None
        if self._whole.get((run, entry.name)) == info.tag:
            return True
        found = await self._entry(run, entry.step)
        return found is not None and found.name == entry.name

    async def _note_gone(self, hold: _Hold, outcomes: dict[Name, str]) -> None:
        """The end of a removal; the ledger is free again."""
        ledger = hold.ledger
        ended = [entry for entry in ledger.going if outcomes[entry.name] == REMOVED]
        off = {entry.name for entry in ledger.going if outcomes[entry.name] != KEPT}
        kept = _only(ledger.groups, {entry.name for entry in ledger.entries} - off)
        gone = dict.fromkeys((*ledger.gone, *(entry.name for entry in ended)))
        done = replace(ledger, groups=kept, going=(), gone=tuple(gone)[-GONE_MAX:], token="", owner="")
        failpoints.hit("expire.before_gone")
        await self._write(hold, done)
        failpoints.hit("expire.gone")
        self.tally.removed += len(ended)
        self.tally.removed_bytes += sum(entry.size for entry in ended)
        if ended:
            self.tally.last = f"{ledger.run}/{ended[-1].step}"

    # -- one checkpoint ------------------------------------------------------------------------------------------------

    async def _take_off(self, run: str, entry: Entry, hold: _Hold) -> str:
        """REMOVED; KEPT where it is pinned now; REPLACED where something else stands in its place. Repeatable at any point."""
        key, aside = manifest_key(run, entry.step), tombstone_key(run, entry.name)
        there, tombstone = await self._manifest(key, run, entry.step), await self._manifest(aside, run, entry.step)
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
                self._check_holds(hold)  # each answer may have taken its time
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

    async def _shards_off(self, manifest: Manifest, hold: _Hold) -> None:
        names = (manifest.run, manifest.step, manifest.session)
        keys = [shard_key(*names, file.name) for _, file, _ in manifest.files()]
        keys += [part_key(*names, writer) for writer in range(manifest.writers)]
        for begin in range(0, len(keys), DELETES_A_CALL):
            if self._node.clock.monotonic() >= hold.safe_until_s - TTL_S / 4:
                await self._write(hold, hold.ledger)
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


UNKNOWN = "?"  # a token that no process has
REMOVED, KEPT, REPLACED = "removed", "kept: it is pinned", "kept: it was saved again"


def _only(groups: Groups, names: set[Name]) -> Groups:
    """Without all others, and without groups that are empty then."""
    kept = (tuple(entry for entry in group if entry.name in names) for group in groups)
    return tuple(group for group in kept if group)
