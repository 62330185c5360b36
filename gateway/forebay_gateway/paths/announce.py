"""Which parts are durable in this node's cache, told to other nodes through the shared tiers; and what they tell.

    a part of several writers is committed here -> a small document on a tier -> the others' documents, while some are missing
    the checkpoint is to go to no tier any more, or leaves the cache -> this node's documents go

Owns these documents while a checkpoint is not complete on a tier; complete.py removes them then. Best effort: nothing depends
on it but `wait("cache")`, what people see early, and what may be left out for a newer checkpoint's sake.
"""

import asyncio
import json
from collections.abc import Sequence

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.core.layout import announce_key
from forebay_gateway.core.records import PartRow, PartState, PublishState, SessionRow
from forebay_gateway.paths.joint import may_leave_out, rules_of
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.wholeness import complete_at_cache
from forebay_gateway.tiers.monitor import MonitoredTier

REST_FACTOR = 20  # a look at all sessions takes at most this part of one core, however many there are
SESSIONS_AT_ONCE = 32  # looked at before the event loop has its turn
ANNOUNCE_S_MIN = 0.1


class Announcer:
    """Tells other nodes, through the shared tiers, which parts are durable in this node's cache, and learns of theirs.

    Only for checkpoints of several writers. Best effort: nothing depends on it but `wait("cache")` and what people see early.
    """

    def __init__(self, node: Node) -> None:
        self._node = node
        self._told: set[tuple[int, int]] = set()
        self._next_s = float("-inf")

    async def step(self) -> float | None:
        """Announce new parts, look for others'; returns the pause in seconds."""
        tiers = [tier for tier in self._node.usable_tiers() if tier.tier.kind != "memory"]
        if not tiers:
            return 2.0
        began_s = self._node.clock.monotonic()
        if (left_s := self._next_s - began_s) > 0:
            return left_s
        waiting = False
        found = await self._unfinished()
        now_s = self._node.clock.monotonic()
        self._next_s = now_s + max(ANNOUNCE_S_MIN, REST_FACTOR * (now_s - began_s))
        for session, parts in found:
            tier = next((tier for tier in tiers if session.is_transient or session.goes_to(tier.name)), None)
            if tier is None:
                continue
            try:
                for part in parts:
                    if (session.id, part.writer) not in self._told:
                        await self._announce(tier, session, part)
                waiting = await self._learn(tier, session, {part.writer for part in parts}) or waiting
            except ForebayError as error:
                tier.failed(error)
                return 2.0
        return 0.5 if waiting else None

    async def _unfinished(self) -> list[tuple[SessionRow, list[PartRow]]]:
        """Sessions that are on no tier yet and whose writers have not all committed here, with the parts that are here."""
        with self._node.catalog.read() as txn:
            ids = list(dict.fromkeys(each for tier in self._node.tier_names for each in txn.unpublished_ids(tier)))
            ids += txn.cache_only()
        found = []
        for begin in range(0, len(ids), SESSIONS_AT_ONCE):
            with self._node.catalog.read() as txn:
                for session_id in ids[begin : begin + SESSIONS_AT_ONCE]:
                    session = txn.session(session_id)
                    if session is None or txn.session_sums(session_id).committed >= session.writers:
                        continue
                    if not self._is_wanted(txn, session):
                        continue
                    committed = [part for part in txn.parts(session_id) if part.state is PartState.COMMITTED]
                    found.append((session, [part for part in committed if not part.is_adopted]))
            await asyncio.sleep(0)
        here = {session.id for session, _ in found}
        self._told = {told for told in self._told if told[0] in here}
        return found

    def _is_wanted(self, txn: ReadTxn, session: SessionRow) -> bool:
        """Whether others are to hear of its parts: no longer once it goes, or goes nowhere."""
        checkpoint = txn.checkpoint(session.run, session.step)
        if checkpoint is None or checkpoint.deleting:
            return False
        return not session.is_cache_only or self._is_awaited(txn, session)

    def _is_awaited(self, txn: ReadTxn, session: SessionRow) -> bool:
        """Of what no tier is to get: whether it is transient, and others' parts of it may still come."""
        if not session.is_transient or complete_at_cache(txn, session):
            return False
        now_s = self._node.clock.monotonic()
        waited_s = now_s - self._node.first_seen_s.setdefault(session.id, now_s)
        return waited_s < self._node.config.node.complete_within

    async def _announce(self, tier: MonitoredTier, session: SessionRow, part: PartRow) -> None:
        body: dict[str, object] = {
            "node": self._node.id,
            "writer": part.writer,
            "shards": part.visible_count,
            "size": part.visible_size,
        }
        # By which others know whether its word on what goes where is to be waited for (joint.py).
        body["leaves_out"] = {name: may_leave_out(rules_of(self._node, name, session.run)) for name in self._node.tiers}
        key = announce_key(session.run, session.step, session.session, part.writer)
        with self._node.catalog.read() as txn:
            if not self._still(txn, tier, session.id):
                return
        with self._node.publishes(tier.name, session.id):  # no await since the look: a deletion waits for it
            await tier.tier.put_small(key, json.dumps(body, sort_keys=True).encode())
            with self._node.catalog.read() as txn:
                still = self._still(txn, tier, session.id)
            if not still:  # who took it back has been here before it
                await tier.tier.delete(key)
                return
        self._told.add((session.id, part.writer))

    def _still(self, txn: ReadTxn, tier: MonitoredTier, session_id: int) -> bool:
        session = txn.session(session_id)
        if session is None or session.publish.get(tier.name) is PublishState.COMPLETE:
            return False
        return self._is_wanted(txn, session)

    async def _learn(self, tier: MonitoredTier, session: SessionRow, here: set[int]) -> bool:
        """Note other nodes' parts; True while some writer has not been heard of."""
        missing = set(range(session.writers)) - here - set(session.known_parts)
        if not missing:
            return False
        listing = await tier.tier.list(announce_key(session.run, session.step, session.session, 0).rpartition("/")[0])
        found: dict[int, str] = {}
        for info in listing.objects:
            stem = info.key.rpartition("/")[2].removesuffix(".json")
            if stem.isdigit() and int(stem) in missing:
                document, _ = await tier.tier.get_small(info.key)
                try:
                    body = json.loads(document)
                    found[int(stem)] = str(body["node"])
                except (ValueError, KeyError, TypeError, RecursionError):
                    continue
                if int(stem) == 0 and isinstance(body.get("leaves_out"), dict):  # older releases do not say
                    self._node.unruled[session.id] = frozenset(name for name, may in body["leaves_out"].items() if may is False)
        if found:
            await self._node.catalog.write(lambda txn: txn.note_parts(session.id, found))
            self._node.changes.tell(session.id)
        return bool(missing - set(found))


def own_writers(node: Node, session: SessionRow) -> list[int]:
    """Those who committed their part of the session through this node."""
    with node.catalog.read() as txn:
        return [part.writer for part in txn.parts(session.id) if part.state is PartState.COMMITTED and not part.is_adopted]


async def withdraw(node: Node, session: SessionRow, writers: Sequence[int]) -> None:
    """Take back what this node has announced of a session. What cannot be deleted now goes with the checkpoint's deletion."""
    for tier in node.usable_tiers():
        if tier.tier.kind == "memory":
            continue
        try:
            for writer in writers:
                await tier.tier.delete(announce_key(session.run, session.step, session.session, writer))
        except ForebayError as error:
            tier.failed(error)
