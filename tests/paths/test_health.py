"""When an operator is told that something stands still."""

from pathlib import Path

import pytest

from forebay_gateway.base.clock import FakeClock
from forebay_gateway.base.metrics import LoopLag, Rate
from forebay_gateway.paths.drain import Drain, fail, start
from forebay_gateway.paths.health import Health
from paths.kit import client_of, serving, tier, until


@pytest.mark.parametrize(("bandwidth", "after_s"), [("", 31), ('bandwidth = "1MiB"\n', 95)])
async def test_a_drain_that_stands_still_is_an_alarm_until_it_moves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bandwidth: str, after_s: int
) -> None:
    async def idle(_self: Drain) -> float | None:
        return 0.05

    real, clock = Drain.step, FakeClock()
    monkeypatch.setattr(Drain, "step", lambda self: (idle if stands else real)(self))
    stands = True
    async with serving(tmp_path, tier(tmp_path / "pfs") + bandwidth) as gateway, client_of(gateway) as client:
        (tmp_path / "pfs").mkdir(exist_ok=True)
        pfs = gateway.node.tiers["pfs"]
        await until(lambda: gateway.node.usable_tiers())
        pfs.rate = Rate(clock)
        health = Health(gateway.node, clock, LoopLag(clock))
        pfs.rate.add(1 << 40)  # it was fast until now
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("x", b"x" * 100_000)
            await part.commit()
        await health.step()
        await clock.advance(after_s - 2)
        await health.step()
        assert not [alarm for alarm in health.report().alarms if "no progress" in alarm.what]
        await clock.advance(2)
        await health.step()
        (alarm,) = (alarm for alarm in health.report().alarms if "no progress" in alarm.what)
        assert (alarm.severity, health.report().health) == ("critical", "critical")
        assert "1 copy waits" in alarm.what
        pfs.rate.add(0)  # a chunk was read back: slow, but it works
        assert not [alarm for alarm in health.report().alarms if "no progress" in alarm.what]
        await clock.advance(after_s)
        assert [alarm for alarm in health.report().alarms if "no progress" in alarm.what]
        stands = False
        assert await client.wait("run", 1, "pfs", timeout=30)
        await health.step()
        assert health.report().health == "ok"


async def test_a_copy_that_fails_again_and_again_is_an_alarm_though_bytes_move(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def idle(_self: Drain) -> float | None:
        return 0.05

    real, clock, stands = Drain.step, FakeClock(), True
    monkeypatch.setattr(Drain, "step", lambda self: (idle if stands else real)(self))
    (tmp_path / "pfs").mkdir()
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        node = gateway.node
        pfs = node.tiers["pfs"]
        await until(node.usable_tiers)
        pfs.rate = Rate(clock)
        health = Health(node, clock, LoopLag(clock))
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("x", b"x" * 100_000)
            await part.commit()
        with node.catalog.read() as txn:
            (row,) = txn.all_shards()

        async def attempts(count: int) -> list[str]:
            for _ in range(count):
                await node.catalog.write(lambda txn: start(txn, [row.key], "pfs"))
                await node.catalog.write(lambda txn: fail(txn, [row.key], "pfs", "other bytes came back"))
                pfs.rate.add(1 << 20)
                await health.step()
                await clock.advance(11)
            pfs.rate.add(1)
            return [alarm.what for alarm in health.report().alarms]

        await attempts(3)
        with monkeypatch.context() as patch:
            patch.setattr(type(pfs), "usable", False)
            await health.step()  # what had failed before counts no more once it is back
        assert await attempts(2) == []
        (what,) = await attempts(1)
        assert "again and again, 1 copy waits" in what
        stands = False
        assert await client.wait("run", 1, "pfs", timeout=30)
        await health.step()
        assert health.report().alarms == ()
