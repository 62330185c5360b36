"""Care commands right after a start: what is on a tier counts for them as soon as the tier was looked at."""

import asyncio
from pathlib import Path

import pytest

from forebay_gateway.rpc import care_service
from forebay_gateway.tiers.monitor import MonitoredTier
from paths.kit import client_of, serving, tier


@pytest.fixture
def looks_late(monkeypatch: pytest.MonkeyPatch) -> None:
    step = MonitoredTier.step

    async def late(monitored: MonitoredTier) -> float | None:
        await asyncio.sleep(0.5)
        return await step(monitored)

    monkeypatch.setattr(MonitoredTier, "step", late)


@pytest.mark.usefixtures("looks_late")
async def test_a_command_waits_for_the_first_look_at_each_tier(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        assert not gateway.node.tiers["pfs"].looked_at.is_set()
        assert [each.kind async for each in client.care.collect()] == []  # none was not asked
        assert gateway.node.tiers["pfs"].looked_at.is_set()


@pytest.mark.usefixtures("looks_late")
async def test_it_waits_for_no_tier_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(care_service, "FIRST_LOOK_S", 0.1)
    (tmp_path / "pfs").mkdir()
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        assert [each.kind async for each in client.care.collect()] == ["not_asked"]
        assert not gateway.node.tiers["pfs"].looked_at.is_set()
