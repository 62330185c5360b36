"""Background work outlives what may pass, and says so; a defect still ends the process."""

import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from forebay_gateway.base.clock import SystemClock
from forebay_gateway.catalog import CatalogDamaged
from forebay_gateway.core.errors import AlreadyExists, InvalidArgument, PermissionDenied, Unavailable
from forebay_gateway.paths.steady import RETRY_S_MAX, RETRY_S_MIN, steady
from forebay_gateway.tiers.base import Capabilities
from forebay_gateway.tiers.memory import MemoryTier
from forebay_gateway.tiers.monitor import MonitoredTier, TierState
from paths.kit import client_of, serving, tier, until


class Failing:
    """A step that raises what it is told to."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    async def __call__(self) -> float | None:
        if self.error is not None:
            raise self.error
        return 7.0


def a_node(failed: bool = False) -> Any:
    return SimpleNamespace(alarms={}, catalog=SimpleNamespace(is_failed=failed))


@pytest.mark.expected_logs("background work fails")
async def test_a_passing_failure_is_an_alarm_until_the_step_succeeds() -> None:
    node, step = a_node(), Failing()
    run = steady(node, "evict", step)
    assert await run() == 7.0
    for error in (Unavailable("no space is left for the catalog"), OSError(5, "Input/output error")):
        step.error = error
        assert await run() is not None
        (what, _), *others = node.alarms.values()
        assert not others
        assert "'evict'" in what
        assert str(error) in what
    pauses = [await run() for _ in range(10)]
    assert pauses == sorted(pauses, key=lambda pause: pause or 0.0)
    assert pauses[-1] == RETRY_S_MAX
    step.error = None
    assert await run() == 7.0
    assert not node.alarms
    step.error = OSError(5, "Input/output error")
    assert await run() == RETRY_S_MIN


@pytest.mark.parametrize("error", [RuntimeError("a defect"), CatalogDamaged("a page")])
async def test_a_defect_and_a_damaged_catalog_go_up(error: Exception) -> None:
    step = Failing()
    step.error = error
    with pytest.raises(type(error)):
        await steady(a_node(), "evict", step)()


async def test_a_failed_catalog_goes_up() -> None:
    step = Failing()
    step.error = Unavailable("the catalog failed")
    with pytest.raises(Unavailable):
        await steady(a_node(failed=True), "evict", step)()


@pytest.mark.expected_logs("background work fails")
async def test_the_gateway_outlives_a_disk_that_does_not_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        with monkeypatch.context() as broken:

            def statvfs(path: Any) -> os.statvfs_result:
                if path == gateway.node.cache.path:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
                return real(path)

            real = os.statvfs
            broken.setattr(os, "statvfs", statvfs)
            await until(lambda: "work-health" in gateway.node.alarms)
            assert any("'health'" in alarm.what for alarm in (await client.status()).alarms)
        await until(lambda: "work-health" not in gateway.node.alarms)
        async with client.checkpoint("run", 1) as part:
            await part.put("a", b"still here")
            await part.commit(wait="pfs", timeout=30)


def proved() -> MonitoredTier:
    inner = MemoryTier("mem")
    inner.capabilities = Capabilities(
        conditional_create=True,
        conditional_replace=True,
        server_checksum=False,
        multipart=False,
        list_after_put=True,
        links=False,
        direct_io=False,
    )
    found = MonitoredTier(inner, required=True, clock=SystemClock())
    found.worked()
    return found


def test_what_one_object_meets_does_not_take_its_tier_away() -> None:
    found = proved()
    found.failed(AlreadyExists("another node was faster"))
    assert found.usable
    found.failed(Unavailable("no route"))
    assert found.state is TierState.AWAY
    found.worked()
    found.failed(PermissionDenied("no right"))
    assert found.state is TierState.DENIED


async def test_a_probe_that_fails_by_any_error_takes_its_tier_away(monkeypatch: pytest.MonkeyPatch) -> None:
    found = proved()
    found.failed(Unavailable("no route"))

    async def probe() -> Capabilities:
        raise AlreadyExists("nobody expected this of a probe")

    monkeypatch.setattr(found.tier, "probe", probe)
    await found.step()
    assert found.state is TierState.AWAY
    assert "nobody expected" in found.reason


@pytest.mark.expected_logs("cannot complete")
async def test_one_checkpoint_that_a_tier_refuses_does_not_hold_up_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        pfs = gateway.node.tiers["pfs"]
        put = pfs.tier.put_small

        async def picky(key: str, data: bytes, **options: Any) -> Any:
            if key.startswith("bad/"):
                raise InvalidArgument("the key is too long for the object store")
            return await put(key, data, **options)

        monkeypatch.setattr(pfs.tier, "put_small", picky)
        for run in ("bad", "good"):
            async with client.checkpoint(run, 1) as part:
                await part.put("a", b"bytes")
                await part.commit()
        await client.wait("good", 1, "pfs", timeout=30)
        assert pfs.usable
        await until(lambda: any(found.session.run == "bad" for found in _unfinished(gateway)))
        monkeypatch.undo()
        await client.wait("bad", 1, "pfs", timeout=30)
        found = await client.describe("bad", 1)
        assert (found.state, found.reason) == ("complete", "")


def _unfinished(gateway: Any) -> list[Any]:
    with gateway.node.catalog.read() as txn:
        sessions = list(txn.unpublished("pfs"))
    return [SimpleNamespace(session=session) for session in sessions if session.reason]
