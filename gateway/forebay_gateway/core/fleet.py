"""What nodes that share a tier owe each other: an equal share of its bandwidth, and beginnings that are spread.

Owns the arithmetic and the keys. Does not own who is alive (paths/fleet.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from urllib.parse import quote

from forebay_gateway.core.layout import CONTROL_DIR

NODES_DIR = f"{CONTROL_DIR}/nodes/"
NAME_MAX = 200


def node_key(node: str) -> str:
    """Of a node's record on a tier."""
    name = quote(node, safe="")
    if len(name) > NAME_MAX:
        name = f"{name[:100]}-{sha256(node.encode()).hexdigest()[:16]}"
    return f"{NODES_DIR}{name}.json"


def share_of(fleet_bandwidth: int | None, live_nodes: int, bandwidth: int | None) -> int | None:
    """Bytes a second for one of `live_nodes`, itself among them; None is no limit."""
    limits = [] if bandwidth is None else [bandwidth]
    if fleet_bandwidth is not None:
        limits.append(max(1, fleet_bandwidth // max(1, live_nodes)))
    return min(limits, default=None)


def offset_s(node: str, tier: str, window_s: float) -> float:
    """Where in a window of `window_s` seconds this node's turn begins, always the same, spread evenly over nodes."""
    if window_s <= 0:
        return 0.0
    digest = sha256(f"{node}\n{tier}".encode()).digest()
    return window_s * int.from_bytes(digest[:8], "big") / 2.0**64


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record as it was last seen to change."""

    tag: str
    at_s: float  # monotonic, on this node


def look(before: Mapping[str, Sighting], seen: Mapping[str, str], now_s: float) -> dict[str, Sighting]:
    """The sightings after a look that has shown these tags by key. Only change counts, on this node's own clock: what others
    believe of the time does not matter. What is seen first counts as changed, so a dead one lives for one more expiry."""
    return {key: before[key] if key in before and before[key].tag == tag else Sighting(tag, now_s) for key, tag in seen.items()}


def unchanged_s(sighting: Sighting, now_s: float) -> float:
    """For how long this node has seen no change."""
    return now_s - sighting.at_s
