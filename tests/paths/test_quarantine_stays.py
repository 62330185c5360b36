"""A copy that was once seen to be bad is not read again: not by the next restore, nor by one after a restart."""

from pathlib import Path

import pytest

import forebay
from forebay_gateway.build import Gateway
from forebay_gateway.core.layout import shard_key
from forebay_gateway.core.states import CopyState
from paths.kit import client_of, serving, tier

DATA = bytes(range(256)) * 1000


def states(gateway: Gateway) -> dict[str, CopyState]:
    with gateway.node.catalog.read() as txn:
        (row,) = txn.all_shards()
        return {name: copy.state for name, copy in txn.copies(row.key).items()}


@pytest.mark.expected_logs("a copy on a tier is bad")
async def test_a_bad_copy_is_met_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The bad file is then taken away: who looked for it again would find it gone, and say so."""
    tiers = (tier(tmp_path / "near", "near"), tier(tmp_path / "far", "far"))
    path = tmp_path / "near" / shard_key("run", 1, "s", "a")
    async with serving(tmp_path, *tiers, cache_keys='repair = "ask"') as gateway, client_of(gateway) as client:
        part = client.checkpoint("run", 1, session="s")
        await part.put("a", DATA)
        await part.commit()
        await client.wait("run", 1, "all", timeout=60)
        path.write_bytes(DATA[:-1] + b"x")
        for _ in range(2):
            await client.care.evict("run", 1)
            assert await (await client.open("run", 1)).read("a") == DATA
            assert states(gateway) == {"near": CopyState.QUARANTINED, "far": CopyState.VERIFIED}
    path.unlink()
    for _ in range(2):
        async with serving(tmp_path, *tiers, cache_keys='repair = "ask"') as gateway, client_of(gateway) as client:
            await client.care.evict("run", 1)
            assert await (await client.open("run", 1)).read("a") == DATA
            assert states(gateway) == {"near": CopyState.QUARANTINED, "far": CopyState.VERIFIED}
            (entry,) = [entry async for entry in client.care.quarantine()]
            assert (entry.where, entry.good) == ("near", ("cache", "far")) and "do not match" in entry.reason
            with pytest.raises(forebay.ForebayError):
                await (await client.open("run", 1, source="near")).read("a")
    assert len([record for record in caplog.records if "a copy on a tier is bad" in record.message]) == 1
