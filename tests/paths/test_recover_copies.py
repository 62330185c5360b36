"""Copies that were under way when the last process ended."""

from pathlib import Path

import pytest

from forebay_gateway.core.layout import shard_key
from forebay_gateway.core.states import CopyEvent, CopyState
from forebay_gateway.paths.recover import recover_copies
from forebay_gateway.tiers.memory import MemoryStore
from paths.nodes_kit import Here

DATA = b"x" * 1000


async def test_a_name_that_a_kill_left_unsettled_is_settled_before_its_copy_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Here(tmp_path, {"pfs": MemoryStore()}) as here:
        await here.commit("team/run", 1, data=DATA)
        node, tier = here.node, here.tiers["pfs"]
        with node.catalog.read() as txn:
            (row,) = txn.shards(txn.find_session("team/run", 1, "s").id)  # type: ignore[union-attr]
        await node.catalog.write(lambda txn: txn.copy_event(row.key, "pfs", CopyEvent.START))
        await tier.put_small(shard_key("team/run", 1, "s", "a.bin"), DATA)
        settled: list[tuple[str, CopyState]] = []

        async def settle(key: str) -> None:
            with node.catalog.read() as txn:
                settled.append((key, txn.copy(row.key, "pfs").state))  # type: ignore[union-attr]

        monkeypatch.setattr(tier, "settle", settle)
        await recover_copies(node, node.tiers["pfs"])
        assert settled == [(shard_key("team/run", 1, "s", "a.bin"), CopyState.WRITING)]
        with node.catalog.read() as txn:
            assert txn.copy(row.key, "pfs").state is CopyState.VERIFIED  # type: ignore[union-attr]
