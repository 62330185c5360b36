"""Whose turn it is to work on a run's checkpoints on a tier: who holds the run's ledger.

The ledger is a document on the tier that is only ever replaced as it was read. A holder counts as gone when another one has
seen the document unchanged for its time to live, by the latter's own monotonic clock; itself it stops acting at half of that.

Owns taking, keeping and writing the ledger. Does not own what it says (core/retention), nor what is done in the turn
(expire.py).
"""

import logging
import secrets
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from forebay_gateway.base.recent import Recent
from forebay_gateway.core.errors import AlreadyExists, NotFound, Unavailable
from forebay_gateway.core.fleet import Sighting, look, unchanged_s
from forebay_gateway.core.retention import Ledger, ledger_key, read_ledger
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.reserve import Reserve
from forebay_gateway.tiers.monitor import MonitoredTier

log = logging.getLogger("forebay.retain")

SOON_S = 10.0  # where another node holds the ledger, or something is under way
TTL_S = 120.0
TTL_S_MAX = 3600.0  # whatever a document says
RUNS_REMEMBERED_MAX = 10_000
UNKNOWN = "?"  # a token that no process has


@dataclass(slots=True)
class Hold:
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


class Ledgers:
    """Those of one tier, as this process knows them."""

    def __init__(self, node: Node, tier: MonitoredTier, reserve: Reserve) -> None:
        self._node, self._tier, self._reserve = node, tier, reserve
        self._process = secrets.token_hex(8)
        self._seen: Recent[str, Sighting] = Recent(RUNS_REMEMBERED_MAX)

    async def read(self, run: str) -> tuple[Ledger, str]:
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

    async def take(self, ledger: Ledger, tag: str) -> Hold:
        """Raises Busy where another process holds it and is, as far as is known, alive."""
        if ledger.token not in ("", self._process):
            seen, ttl_s = self._seen.get(ledger.run), min(max(ledger.ttl_s, 1.0), TTL_S_MAX)
            left_s = ttl_s if seen is None else ttl_s - unchanged_s(seen, self._node.clock.monotonic())
            if left_s > 0:
                raise Busy(self._tier.name, ledger.run, min(SOON_S, left_s))
            log.info(
                "retention goes on for a node that is gone tier=%s run=%s node=%s", self._tier.name, ledger.run, ledger.owner
            )
        hold = Hold(ledger, tag, float("inf"), None)
        await self.write(hold, replace(ledger, owner=self._node.id, token=self._process, ttl_s=TTL_S))
        return hold

    async def write(self, hold: Hold, ledger: Ledger) -> None:
        """Replace it as it was read; raises Busy where somebody else did, or time ran out."""
        self.check(hold)
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

    def check(self, hold: Hold) -> None:
        """Raises Busy where it is not for certain this process's any more."""
        if self._node.clock.monotonic() >= hold.safe_until_s:
            raise Busy(self._tier.name, hold.ledger.run)
