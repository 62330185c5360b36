"""What this node may do on a tier now: its limits, and of a bandwidth that all nodes share, its part.

    this node's record on the tier, replaced at every beat -> one listing shows every record's version -> those that changed
    within the expiry are alive -> the movers hear what one of so many may send, and after a reload all that changed

Owns the records below `.forebay/nodes` and that count; on tiers with `fleet_bandwidth` only, since each look costs requests.
Does not own the arithmetic (core/fleet.py) or the token bucket (tiers/throttled.py).
"""

import json
import logging
import secrets
from collections.abc import Callable

from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.core.fleet import NODES_DIR, Sighting, look, node_key, offset_s, share_of, unchanged_s
from forebay_gateway.core.records import SessionRow
from forebay_gateway.core.schedule_rows import Kind
from forebay_gateway.movers.jobs import Limits
from forebay_gateway.paths.node import Node
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_gateway.tiers.throttled import set_limits

log = logging.getLogger("forebay.fleet")

BEAT_S_MIN = 30.0
BEAT_S_A_NODE = 0.1  # so that listings grow no faster than the fleet: ten thousand nodes look every quarter of an hour
EXPIRY_BEATS = 3
FORGOTTEN_S = 86_400.0  # a record that nobody has changed for so long is removed


class Fleet:
    """The nodes on one tier. `wake` is called when a reload gives `step` something to do."""

    def __init__(self, node: Node, tier: MonitoredTier) -> None:
        self._node, self._tier = node, tier
        self.wake: Callable[[], None] = lambda: None
        self._key = node_key(node.id)
        self._process = secrets.token_hex(8)  # a second gateway under this node's name writes another one
        self._beat = 0
        self._tag = ""  # of the record as this process wrote it last
        self._seen: dict[str, Sighting] = {}
        self._next_s = float("-inf")
        self._live = 0
        self.doubled = False  # another process uses this node's name

    @property
    def _config(self) -> TierConfig:
        return self._node.tier_config(self._tier.name)

    @property
    def live_nodes(self) -> int | None:
        """Those that are alive, this one among them; None where nobody keeps records, or before the first look."""
        return None if self._config.fleet_bandwidth is None else self._live or None

    @property
    def beat_s(self) -> float:
        """Between two beats of this node."""
        return max(BEAT_S_MIN, BEAT_S_A_NODE * self._live)

    @property
    def bandwidth(self) -> int | None:
        """Bytes a second that this node may send now; None is no limit."""
        return share_of(self._config.fleet_bandwidth, self._live or 1, self._config.bandwidth)

    def reload(self) -> None:
        """The configuration was read again."""
        self._tell()
        self.wake()

    def _tell(self) -> None:
        """The front, too: it writes documents, and shards while the cache's disk fails."""
        config, bandwidth = self._config, self.bandwidth
        set_limits(self._tier.tier, bandwidth, config.iops)
        self._node.movers.limit(Limits(self._tier.name, bandwidth, config.iops, config.concurrency))

    async def step(self) -> float | None:
        """One beat, and a look at the others'. Returns the pause in seconds."""
        if self._config.fleet_bandwidth is None:
            return None
        now_s = self._node.clock.monotonic()
        if not self._tier.usable or now_s < self._next_s:  # what was known stays: the others may go on without us
            return max(1.0, self._next_s - now_s)
        try:
            await self._look()
            await self._write()
        except ForebayError as error:
            self._tier.failed(error)
            return BEAT_S_MIN
        self._next_s = self._node.clock.monotonic() + self.beat_s
        return self.beat_s

    async def _look(self) -> None:
        listing = await self._tier.tier.list(NODES_DIR)
        now_s = self._node.clock.monotonic()
        tags = {info.key: info.tag for info in listing.objects}
        self._note_double(tags.get(self._key))
        self._seen = look(self._seen, tags, now_s)
        expiry_s = EXPIRY_BEATS * max(self.beat_s, BEAT_S_A_NODE * len(tags))
        others = [key for key, seen in self._seen.items() if key != self._key and unchanged_s(seen, now_s) < expiry_s]
        live = 1 + len(others) + self.doubled
        if live != self._live:
            log.info("nodes that share the tier tier=%s live=%s", self._tier.name, live)
            self._live = live
        self._tell()
        for key, seen in list(self._seen.items()):
            if key != self._key and unchanged_s(seen, now_s) >= FORGOTTEN_S:
                await self._tier.tier.delete(key)

    def _note_double(self, tag: str | None) -> None:
        self.doubled = bool(self._tag) and tag is not None and tag != self._tag
        alarm = f"node-id-{self._tier.name}"
        if not self.doubled:
            self._node.alarms.pop(alarm, None)
        elif alarm not in self._node.alarms:
            what = f"another gateway calls itself {self._node.id!r} on tier {self._tier.name}"
            self._node.alarms[alarm] = (what, "give each gateway a node.id of its own")

    async def _write(self) -> None:
        self._beat += 1
        record = {"node": self._node.id, "process": self._process, "beat": self._beat, "expiry_s": EXPIRY_BEATS * self.beat_s}
        info = await self._tier.tier.put_small(self._key, json.dumps(record, sort_keys=True).encode())
        self._tag = info.tag


def not_before_s(node: Node, tier: str, session: SessionRow) -> float:
    """When the drain of a session to the tier may begin, monotonic: a periodic one after this node's offset in `tier.stagger`,
    counted from when this process first saw it; others at once."""
    window_s = node.tier_config(tier).stagger
    if window_s <= 0 or session.kind is not Kind.PERIODIC:
        return float("-inf")
    return node.first_seen_s.setdefault(session.id, node.clock.monotonic()) + offset_s(node.id, tier, window_s)
