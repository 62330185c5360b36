"""Checkpoints of several nodes under a cadence, of which one node's shards went through to the tier past its failing cache."""

from pathlib import Path

import pytest

from forebay_gateway.catalog import evicted_row
from forebay_gateway.catalog.landing import land
from forebay_gateway.core.layout import manifest_key, shard_key
from forebay_gateway.core.records import ShardKey
from forebay_gateway.paths.commit import Expected
from forebay_gateway.paths.write import PartRef
from forebay_gateway.tiers.memory import MemoryTier
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import ShardEntry, pack_chunk_crcs
from paths.joint_kit import RUN, JobNode, job

EVERY_3 = f'[[policy]]\nrun = "{RUN}"\nevery = 3\n'


async def goes_through(node: JobNode, step: int, writer: int, writers: int) -> None:
    """As paths/through.py leaves it: on the tier, proved, and not in the cache."""
    data, name, part = b"x" * 1000, f"w{writer}.bin", PartRef(RUN, step, "s", writer, writers)
    session_id = await node.writes.open_part(part)
    info = await MemoryTier("pfs", node.stores["pfs"]).put_small(shard_key(RUN, step, "s", name), data)
    chunks = pack_chunk_crcs([crc32c(data)])
    entry = ShardEntry(name, len(data), crc32c(data), node.node.config.cache.chunk_size, chunks)
    row = evicted_row(ShardKey(session_id, node.node.catalog.new_id()), writer, entry, None)
    await node.node.catalog.write(lambda txn: land(txn, row, chunks, None, "pfs", info.tag))
    await node.commits.commit(part, [Expected(name, len(data), crc32c(data))], "")


@pytest.mark.parametrize("others", [EVERY_3, ""])
async def test_what_lies_on_the_tier_alone_is_not_left_out_there(tmp_path: Path, others: str) -> None:
    """Who decides has said that it is, before it could know. Its bytes are nowhere else: taken away they would be lost, and
    waiting for another copy would have no end."""
    async with job(tmp_path, EVERY_3, others=others) as all_nodes:
        first, other = all_nodes.nodes
        await all_nodes.save(1)
        await all_nodes.turns()
        await first.part(2, 0, 2)
        await goes_through(other, 2, 1, 2)
        await all_nodes.save(3)
        await other.clock.advance(1.0)
        await other.announcer.step()
        await all_nodes.turns(but=[other])
        assert (2, False) in all_nodes.verdicts()
        await all_nodes.turns(60, 10.0)
        assert all_nodes.where(2) == [["complete"]] * 2
        assert all_nodes.shards(2) == ["w0.bin", "w1.bin"]


@pytest.mark.expected_logs("a manifest is damaged")
async def test_what_a_damaged_manifest_may_name_is_not_taken_away(tmp_path: Path) -> None:
    async with job(tmp_path, EVERY_3, others="") as all_nodes:
        for step in (1, 2, 3):
            await all_nodes.save(step)
            await all_nodes.turns()
        assert all_nodes.shards(2) == ["w1.bin"]
        tier = MemoryTier("pfs", all_nodes.store)
        await tier.put_small(manifest_key(RUN, 2), b'{"session": "s", "sha')
        await all_nodes.turns(40, 10.0)
        assert all_nodes.shards(2) == ["w1.bin"]
        assert any("/parts/1.json" in key and "step-000000000002/" in key for key in all_nodes.store.objects)
        await tier.delete(manifest_key(RUN, 2))
        await all_nodes.turns(40, 10.0)
        assert all_nodes.shards(2) == []
