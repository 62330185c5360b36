"""Nodes that share a tier: who is alive, each one's share, and when its drain may begin."""

import asyncio
from pathlib import Path

import pytest

from forebay_gateway.base.clock import FakeClock
from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.core.errors import Unavailable
from forebay_gateway.core.fleet import node_key, offset_s
from forebay_gateway.paths.fleet import BEAT_S_MIN, EXPIRY_BEATS, FORGOTTEN_S, not_before_s
from forebay_gateway.paths.queue import Queue
from forebay_gateway.tiers.factory import open_tier
from forebay_gateway.tiers.memory import MemoryStore
from forebay_gateway.tiers.throttled import ThrottledTier, set_limits
from forebay_gateway.tiers.wrapper import TierWrapper
from paths.nodes_kit import Here

FLEET = 'fleet_bandwidth = "8MiB"\n'  # a key of the one tier
SHARE = 8 << 20


def below(directory: Path, store: MemoryStore, name: str = "a", keys: str = FLEET) -> Here:
    return Here(directory, {"pfs": store}, name, keys)


async def beat(*nodes: Here) -> None:
    """Each node's turn, as often as it comes within one beat."""
    for node in nodes:
        await node.clock.advance(BEAT_S_MIN)
        await node.fleets["pfs"].step()


async def test_a_node_alone_has_all_of_it(tmp_path: Path) -> None:
    async with below(tmp_path, MemoryStore()) as node:
        fleet = node.fleets["pfs"]
        assert (fleet.live_nodes, fleet.bandwidth) == (None, SHARE)
        await beat(node)
        assert (fleet.live_nodes, fleet.bandwidth) == (1, SHARE)
        for _ in range(5):
            await beat(node)
        assert (fleet.live_nodes, fleet.doubled) == (1, False)


async def test_who_beats_counts_and_who_stops_does_not_whatever_its_clock_says(tmp_path: Path) -> None:
    store = MemoryStore()
    async with below(tmp_path, store) as one, below(tmp_path, store, "b") as other:
        other.clock._now_s += 7 * 3600  # hours apart
        await beat(one, other)
        await beat(one, other)
        assert [node.fleets["pfs"].live_nodes for node in (one, other)] == [2, 2]
        assert one.fleets["pfs"].bandwidth == SHARE // 2
        for _ in range(EXPIRY_BEATS - 1):
            await beat(one)
            assert one.fleets["pfs"].live_nodes == 2
        await beat(one)
        await beat(one)
        assert (one.fleets["pfs"].live_nodes, one.fleets["pfs"].bandwidth) == (1, SHARE)
        await beat(other)  # it was only away
        await beat(one)
        assert one.fleets["pfs"].live_nodes == 2


async def test_a_dead_node_s_record_counts_for_one_expiry_and_goes_in_the_end(tmp_path: Path) -> None:
    store = MemoryStore()
    async with below(tmp_path, store, "dead") as dead:
        await beat(dead)
    async with below(tmp_path, store) as node:
        await beat(node)
        assert node.fleets["pfs"].live_nodes == 2  # nobody can tell yet
        await node.clock.advance(BEAT_S_MIN * EXPIRY_BEATS)
        await node.fleets["pfs"].step()
        assert node.fleets["pfs"].live_nodes == 1
        await node.clock.advance(FORGOTTEN_S)
        await node.fleets["pfs"].step()
        assert node_key("dead") not in store.objects
        assert node_key("a") in store.objects


@pytest.mark.expected_logs("another gateway")
async def test_a_name_that_two_gateways_have_is_an_alarm_and_counts_twice(tmp_path: Path) -> None:
    store = MemoryStore()
    async with below(tmp_path / "1", store) as one, below(tmp_path / "2", store) as two:
        await beat(one, two)
        await beat(one)
        assert one.fleets["pfs"].doubled
        assert one.fleets["pfs"].live_nodes == 2
        assert "calls itself 'a'" in one.node.alarms["node-id-pfs"][0]
        await beat(one)
        assert "node-id-pfs" not in one.node.alarms
    async with below(tmp_path / "1", store) as again:  # one that was restarted is no second one
        await beat(again)
        await beat(again)
        assert not again.fleets["pfs"].doubled


async def test_a_tier_without_the_key_gets_no_records(tmp_path: Path) -> None:
    store = MemoryStore()
    async with below(tmp_path, store, keys="") as node:
        assert await node.fleets["pfs"].step() is None
        assert not store.objects
        assert (node.fleets["pfs"].live_nodes, node.fleets["pfs"].bandwidth) == (None, None)


async def test_while_a_tier_is_away_the_others_count_as_before(tmp_path: Path) -> None:
    store = MemoryStore()
    async with below(tmp_path, store) as one, below(tmp_path, store, "b") as other:
        await beat(one, other)
        await beat(one)
        one.node.tiers["pfs"].failed(Unavailable("away"))
        await one.clock.advance(3600)
        await one.fleets["pfs"].step()
        assert one.fleets["pfs"].live_nodes == 2


# -- the bucket ----------------------------------------------------------------------------------------------------------


def throttle_of(tier: object) -> ThrottledTier:
    while not isinstance(tier, ThrottledTier):
        assert isinstance(tier, TierWrapper)
        tier = tier.inner
    return tier


async def test_a_limit_changes_while_a_transfer_waits(tmp_path: Path) -> None:
    clock = FakeClock()
    tier = open_tier(TierConfig(name="pfs", kind="memory", fleet_bandwidth=100_000), clock)
    throttle = throttle_of(tier)
    await throttle.put_small("a", bytes(500_000))  # overdrawn: the next one waits for some five seconds
    waiting = asyncio.create_task(throttle.put_small("b", b"b"))
    await asyncio.sleep(0)
    await clock.advance(1.0)
    assert not waiting.done()
    set_limits(tier, 10_000_000, None)
    await clock.advance(0.6)
    assert waiting.done()
    set_limits(tier, None, None)
    await asyncio.wait_for(throttle.put_small("c", bytes(50_000_000)), 5)


# -- staggering ----------------------------------------------------------------------------------------------------------


async def test_a_periodic_drain_begins_at_this_node_s_offset(tmp_path: Path) -> None:
    async with below(tmp_path, MemoryStore(), keys='stagger = "100s"\n') as node:
        offset = offset_s("a", "pfs", 100.0)
        assert 1.0 < offset < 99.0
        await node.drains["pfs"].step()
        await node.commit("r", 1)
        with node.node.catalog.read() as txn:
            (session,) = txn.sessions()
        began_s = node.clock.monotonic()
        assert not_before_s(node.node, "pfs", session) == began_s + offset
        wait_s = await node.drains["pfs"].step()
        assert wait_s is not None
        await node.clock.advance(offset - 0.5)
        await node.drains["pfs"].step()
        assert not [key for key in node.stores["pfs"].objects if "a.bin" in key]
        await node.clock.advance(0.6)
        await node.drains["pfs"].step()
        assert [key for key in node.stores["pfs"].objects if "a.bin" in key]


async def test_what_an_operator_puts_first_does_not_wait_for_the_offset(tmp_path: Path) -> None:
    async with below(tmp_path, MemoryStore(), keys='stagger = "100s"\n') as node:
        await node.commit("r", 1)
        await node.drains["pfs"].step()
        assert not [key for key in node.stores["pfs"].objects if "a.bin" in key]
        await Queue(node.node, node.drains).change("prio", ["r@1"])
        await node.drains["pfs"].step()
        assert [key for key in node.stores["pfs"].objects if "a.bin" in key]


async def test_a_final_one_begins_at_once(tmp_path: Path) -> None:
    async with below(tmp_path, MemoryStore(), keys='stagger = "100s"\n') as node:
        await node.commit("r", 1, kind="final")
        await node.drains["pfs"].step()
        assert [key for key in node.stores["pfs"].objects if "a.bin" in key]
