"""What is left over on the tiers, and may go: only what rows of ours own, and only after a time.

    uploads and temporary files below our sessions that nothing here writes any more; locks beside their manifests whose owner
    let the time run out; sessions of ours that a newer one superseded on every tier -> listed; deleted when told. Everything
    else that lies there is foreign: listed, never touched.

Owns the judgement whose a thing is. Where that cannot be told, it is foreign.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace

from forebay_gateway.base.tasks import uncut
from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.core.layout import (
    CURRENT_NAME,
    MANIFEST_NAME,
    manifest_key,
    part_key,
    session_dir,
    shard_key,
    step_dir,
)
from forebay_gateway.core.records import PartState, PublishState, SessionRow, ShardRow
from forebay_gateway.core.states import CopyState
from forebay_gateway.paths.care.finding import Finding, Severity
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.retain import Retention
from forebay_gateway.tiers.base import Leftover
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError

SPARED_S = 86_400.0  # what `forebay gc` leaves alone unless told otherwise
FOREIGN_SHOWN_MAX = 1000
DEPTH_MAX = 32
_FINDINGS = {
    "foreign": "foreign_file",
    "upload": "orphan_upload",
    "lock": "orphan_lock",
    "superseded": "superseded_session",
    "not_asked": "tier_unreachable",
}


@dataclass(frozen=True, slots=True)
class Garbage:
    """`kind` is "upload", "lock", "superseded", "foreign", or "not_asked" of a tier; `deletable`: ours, and old enough."""

    kind: str
    where: str
    path: str
    what: str
    age_s: float | None = None
    deletable: bool = False
    token: str = ""
    session: SessionRow | None = None
    outcome: str = ""


class Collector:
    """Surveys, and deletes."""

    def __init__(self, node: Node, retention: Retention) -> None:
        self._node, self._retention = node, retention

    async def survey(self, older_than_s: float) -> list[Garbage]:
        """All of it on the tiers that can be reached, superseded sessions, and a "not_asked" for each tier that told nothing,
        or not all."""
        found: list[Garbage] = []
        for tier in self._node.tiers.values():
            if reason := await self._on_tier(tier, older_than_s, found):
                found.append(Garbage("not_asked", tier.name, "", reason))
        for _, sessions in self._checkpoints():
            for session in sessions:
                if len(sessions) > 1 and await self._is_superseded(session):
                    found.append(await self._superseded(session, older_than_s))
        return found

    async def _on_tier(self, tier: MonitoredTier, older_than_s: float, found: list[Garbage]) -> str:
        """Add what lies there to `found`; why it was not asked, or not for all."""
        if not tier.usable:
            return f"the tier cannot be reached, so what is left over there was not looked for: {tier.reason}"
        try:
            # Listed before the rows are read: what begins meanwhile is not there, instead of there without an owner.
            everywhere = await tier.tier.leftovers("") if tier.tier.lists_uploads_at_once else None
            checkpoints = self._checkpoints()
            by_step = {} if everywhere is None else _by_step(everywhere, {base for base, _ in checkpoints})
            for base, sessions in checkpoints:
                left = await tier.tier.leftovers(base) if everywhere is None else by_step.get(base, [])
                found += self._judged(left, sessions, tier, older_than_s)
                if _foreign_count(found) < FOREIGN_SHOWN_MAX:
                    found += await self._foreign(base, sessions, tier)
            elsewhere = by_step.get("", [])[: max(0, FOREIGN_SHOWN_MAX - _foreign_count(found))]
            found += self._judged(elsewhere, [], tier, older_than_s)
        except ForebayError as error:
            tier.failed(error)
            return f"the tier failed while it was asked, so not all was looked for: {error}"
        return ""

    async def collect(self, older_than_s: float) -> list[Garbage]:
        """Survey, and delete what is deletable; each with its outcome."""
        done = []
        for item in await self.survey(older_than_s):
            if not item.deletable:
                done.append(item)
                continue
            try:
                await uncut(self._delete(item), stay=True)
                done.append(replace(item, outcome="deleted"))
            except ForebayError as error:
                done.append(replace(item, outcome=f"failed: {error}"))
        return done

    async def _delete(self, item: Garbage) -> None:
        if item.session is not None:
            await self._retention.drop_superseded(item.session)
        else:
            await self._node.tier(item.where).tier.abort_upload(item.path, item.token)

    def _checkpoints(self) -> list[tuple[str, list[SessionRow]]]:
        """(directory of the step, its sessions) of all that stay."""
        with self._node.catalog.read() as txn:
            return [
                (step_dir(row.run, row.step), txn.sessions_of(row))
                for run in txn.runs()
                for row in txn.checkpoints(run)
                if not row.deleting
            ]

    # -- uploads and temporary files -----------------------------------------------------------------------------------

    def _judged(
        self, left: Sequence[Leftover], sessions: Sequence[SessionRow], tier: MonitoredTier, older_than_s: float
    ) -> list[Garbage]:
        if not left:
            return []
        with self._node.catalog.read() as txn:
            owned = {key: row for session in sessions for key, row in _keys_of(txn, session, self._node.id).items()}
            under_way = {
                upload.upload_id
                for row in owned.values()
                if row is not None
                and (upload := txn.upload(row.key, tier.name)) is not None
                and (copy := txn.copy(row.key, tier.name)) is not None
                and copy.state is CopyState.WRITING
            }
            under_way |= self._node.passing
            whole = [session_dir(each.run, each.step, each.session) for each in sessions if _all_here(txn, each)]
        found = []
        for item in left:
            if item.id in under_way:
                continue
            if item.is_lock:
                found.append(_lock(item, tier, bool(sessions), older_than_s))
                continue
            mine = item.key in owned or self._bears_our_name(item) or (_is_temp(item) and _below(item.key, whole))
            found.append(_leftover(item, tier, mine, older_than_s))
        return found

    def _bears_our_name(self, item: Leftover) -> bool:
        return f"-{self._node.id}@" in item.id

    # -- sessions that a newer one replaced ----------------------------------------------------------------------------

    async def _is_superseded(self, session: SessionRow) -> bool:
        """Whether every tier it was published on says, now, that another session stands there: one that began later."""
        for name, state in session.publish.items():
            tier = self._node.tiers.get(name)
            if tier is None or not tier.usable or state is PublishState.PENDING:
                return False
            if await self._named_on(session, tier) in ("", session.session):
                return False
        return bool(session.publish)

    async def _named_on(self, session: SessionRow, tier: MonitoredTier) -> str:
        """The session that the manifest on the tier names; empty where none can be read."""
        try:
            document, _ = await tier.tier.get_small(manifest_key(session.run, session.step))
            return Manifest.from_json(document).session
        except (ForebayError, ManifestError):
            return ""

    async def _superseded(self, session: SessionRow, older_than_s: float) -> Garbage:
        age_s = await self._node.io.run(self._age, session)
        path = session_dir(session.run, session.step, session.session)
        what = "a session that a newer one of the same step has superseded on every tier"
        return Garbage(
            "superseded",
            "all tiers and the cache",
            path,
            what,
            age_s,
            deletable=age_s is not None and age_s >= older_than_s,
            session=session,
        )

    def _age(self, session: SessionRow) -> float | None:
        """By its newest part file; None where there never was one, and nobody can say."""
        directory = self._node.cache.session_path(session.id)
        paths = list(directory.glob("part-*.json"))
        if not paths and self._is_own(session) and directory.is_dir():
            paths = [directory]  # a deletion that was cut off took the part files first
        newest = max((path.stat().st_mtime for path in paths), default=None)
        return None if newest is None else max(0.0, self._node.clock.wall() - newest)

    def _is_own(self, session: SessionRow) -> bool:
        """Whether parts of it were committed here."""
        with self._node.catalog.read() as txn:
            return any(part.state is PartState.COMMITTED and not part.is_adopted for part in txn.parts(session.id))

    # -- what is not ours ----------------------------------------------------------------------------------------------

    async def _foreign(self, base: str, sessions: Sequence[SessionRow], tier: MonitoredTier) -> list[Garbage]:
        with self._node.catalog.read() as txn:
            known = {key for session in sessions for key in _keys_of(txn, session, self._node.id)}
        known |= {f"{base}/{MANIFEST_NAME}", f"{base}/{CURRENT_NAME}"}
        ours = {session_dir(session.run, session.step, session.session) for session in sessions}
        found: list[Garbage] = []
        waiting = [(base, 0)]
        while waiting and len(found) < FOREIGN_SHOWN_MAX:
            directory, depth = waiting.pop()
            listing = await tier.tier.list(directory)
            for info in listing.objects:
                if info.key not in known:
                    found.append(Garbage("foreign", tier.name, info.key, "not ours, by our rows; never touched"))
            for name in listing.directories:
                path = f"{directory}/{name}"
                if path in ours or depth > 0:
                    if depth < DEPTH_MAX:
                        waiting.append((path, depth + 1))
                else:
                    found.append(Garbage("foreign", tier.name, path, "a session of another node, or not ours; never touched"))
            await asyncio.sleep(0)
        return found


def _keys_of(txn: ReadTxn, session: SessionRow, node_id: str) -> dict[str, ShardRow | None]:
    """Keys that rows of this session stand for: its shards, and its part records."""
    keys: dict[str, ShardRow | None] = {
        shard_key(session.run, session.step, session.session, row.name): row for row in txn.shards(session.id)
    }
    for writer in range(session.writers):
        keys[part_key(session.run, session.step, session.session, writer)] = None
    return keys


def _all_here(txn: ReadTxn, session: SessionRow) -> bool:
    """Whether every writer of the session saves through this node: nobody else writes in its directory."""
    return len([part for part in txn.parts(session.id) if not part.is_adopted]) >= session.writers


def _by_step(left: Sequence[Leftover], steps: set[str]) -> dict[str, list[Leftover]]:
    """By the directory of the step they are for; under "" those of no step of ours: deleted ones, and other nodes'."""
    found: dict[str, list[Leftover]] = {}
    for item in left:
        ends = (at for at, letter in enumerate(item.key) if letter == "/")
        base = next((item.key[:at] for at in ends if item.key[:at] in steps), "")
        found.setdefault(base, []).append(item)
    return found


def _foreign_count(found: Sequence[Garbage]) -> int:
    return sum(item.kind == "foreign" for item in found)


def _is_temp(item: Leftover) -> bool:
    return item.key.rpartition("/")[2] == item.id


def _below(key: str, directories: Sequence[str]) -> bool:
    return any(key.startswith(f"{directory}/") for directory in directories)


def _leftover(item: Leftover, tier: MonitoredTier, mine: bool, older_than_s: float) -> Garbage:
    if not mine:
        what = "an upload or temporary file that may be another node's; never touched"
        return Garbage("foreign", tier.name, item.key, what, item.age_s)
    what = "an upload or temporary file of ours that nothing writes any more"
    return Garbage("upload", tier.name, item.key, what, item.age_s, item.age_s >= older_than_s, item.id)


def _lock(item: Leftover, tier: MonitoredTier, ours: bool, older_than_s: float) -> Garbage:
    """Of a checkpoint of ours whoever comes may take it over, since its time has run out."""
    if not ours:
        return Garbage("foreign", tier.name, item.key, "a lock of a checkpoint that is not ours; never touched", item.age_s)
    what = "a lock of the manifest that whoever held it left behind"
    return Garbage("lock", tier.name, item.key, what, item.age_s, item.age_s >= older_than_s, item.id)


def as_finding(item: Garbage) -> Finding:
    """For fsck, which leaves all of it to gc."""
    kind = _FINDINGS[item.kind]
    what, remedy = item.what, ""
    if item.kind in ("upload", "superseded") and item.age_s is None:
        what += "; `forebay gc` leaves it, since nobody can tell how old it is"
    elif item.kind not in ("foreign", "not_asked"):
        remedy = "`forebay gc --apply` deletes it"
        if item.age_s is not None and item.age_s < SPARED_S:
            remedy += (
                f" in {(SPARED_S - item.age_s) / 3600:.1f} h, when it is {SPARED_S / 3600:.0f} h old (--older-than: sooner)"
            )
    return Finding(kind, item.where, what, Severity.NOTE, path=item.path, remedy=remedy, outcome=item.outcome)
