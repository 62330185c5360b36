"""Admission over a whole gateway: quotas, the age limit, a disk that fails, what acknowledgements say, a cache larger than its
disk."""

import asyncio
import errno
import shutil
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

import forebay
from forebay.cli.show import _say_checkpoint, _say_status
from forebay.errors import CacheFull, Unavailable
from forebay.errors import InvalidArgument as InvalidArgumentThere
from forebay_gateway.admission.curve import SLOWEST_BYTES_PER_S
from forebay_gateway.cache.incoming import IncomingFile
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.config_sections import PolicyConfig
from forebay_gateway.core.errors import CacheFull as CacheFullHere
from forebay_gateway.core.errors import DiskFailed, DiskFull, InvalidArgument, StartupError
from forebay_gateway.paths import health
from forebay_gateway.paths.preflight import capacity_of
from forebay_gateway.paths.reload import Reloader
from paths.kit import client_of, serving, tier, until

MIB = 1 << 20
QUOTA = '[[policy]]\nrun = "held"\nquota = "2MiB"\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pfs").mkdir()
    return tmp_path / "pfs"


async def test_info_says_what_holds_for_the_run_now(tmp_path: Path, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rules = '[[policy]]\nrun = "team/*"\nevery = "30m"\nskip = true\nclass = "final"\nquota = "2MiB"\n'
    async with serving(tmp_path, tier(root), rules) as gateway, client_of(gateway) as client:
        for run in ("team/a", "other"):
            async with client.checkpoint(run, 1) as part:
                await part.put("x", b"x")
                await part.commit()
        found = (await client.describe("team/a", 1)).policy
        assert found == forebay.Policy("team/*", ("pfs",), {"pfs": "1800s"}, True, "final", 2 * MIB, False)
        assert (await client.describe("other", 1)).policy == forebay.Policy("", ("pfs",), {"pfs": "1"})
        _say_checkpoint(await client.describe("team/a", 1))
        told = capsys.readouterr().out
        assert "policy 'team/*': to pfs (every 1800s), superseded ones left out when the drain lags, class final, " in told
        assert "at most 2.00 MiB of the cache" in told or "at most 2.0 MiB of the cache" in told, told
        changed = replace(gateway.node.config, policies=(PolicyConfig(run="**", transient=True),))
        Reloader(gateway.node, lambda: changed, []).reload()
        _say_checkpoint(await client.describe("other", 1))
        assert "policy '**': stays in the cache\n" in capsys.readouterr().out


async def test_a_run_is_held_to_its_quota_over_a_restart_and_let_in_once_it_has_drained(tmp_path: Path, root: Path) -> None:
    data = bytes(3 * MIB // 2)
    async with serving(tmp_path, tier(root), QUOTA) as gateway, client_of(gateway) as client:
        await client.hold()
        async with client.checkpoint("held", 1, session="s") as part:
            await part.put("x", data)
            await part.commit()
        held = gateway.node.budget.quotas.held("held")
        assert held == gateway.node.budget.used >= len(data)
        async with client.checkpoint("other", 1, session="s") as part:
            await part.put("x", data)
            await part.commit()
        assert gateway.node.budget.over_quota("other", 100 * MIB) == 0  # it has none
        now = gateway.node.config
        wanted = replace(now, policies=(*now.policies, PolicyConfig(run="other", quota=2 * MIB)))
        assert Reloader(gateway.node, lambda: wanted, []).reload().changed == ("policy",)
        assert gateway.node.budget.over_quota("other", MIB) > 0  # what it holds already counts
    async with serving(tmp_path, tier(root), QUOTA) as gateway, client_of(gateway) as client:
        quotas = gateway.node.budget.quotas
        assert len(data) <= quotas.held("held") <= held
        part = client.checkpoint("held", 2, session="s")
        refused = asyncio.ensure_future(part.put("x", data))
        await asyncio.sleep(1.0)
        assert not refused.done()  # it comes again and again, up to its admit_timeout
        with pytest.raises(InvalidArgument, match="quota"):
            gateway.node.budget.reserve(3 * MIB, "held")
        await client.release()
        await asyncio.wait_for(refused, 30)
        await part.commit()
        await client.wait("held", 2, "pfs", timeout=30)
        await until(lambda: quotas.held("held") == 0)


async def test_a_checkpoint_that_never_fits_is_told_so(tmp_path: Path, root: Path) -> None:
    """What it holds makes no room for what it is to hold."""
    async with serving(tmp_path, tier(root), QUOTA) as gateway, client_of(gateway, admit_timeout=0.5) as client:
        part = client.checkpoint("held", 1, session="s")
        await part.put("x", bytes(3 * MIB // 2))
        with pytest.raises(CacheFull, match=r"quota of its run.*more nodes.*checkpoint_bytes=1572864"):
            await part.put("y", bytes(MIB))
        await part.put("z", b"what fits is taken")
        await part.commit()
        await client.wait("held", 1, "pfs", timeout=30)
        first, second = (client.checkpoint("held", 2, session="s", writer=number, writers=2) for number in range(2))
        await first.put("x", bytes(3 * MIB // 2))
        await first.commit()
        with pytest.raises(CacheFull, match="parts on this node"):  # the first one waits for it
            await second.put("y", bytes(MIB))
        await second.put("y", b"what fits is taken")
        await second.commit()
        await client.wait("held", 2, "pfs", timeout=30)


async def test_what_waits_too_long_slows_writers_shows_and_passes(tmp_path: Path, root: Path) -> None:
    async with serving(tmp_path, tier(root), cache_keys='max_dirty_age = "1s"') as gateway, client_of(gateway) as client:
        await client.hold()
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("x", b"x" * MIB)
            await part.commit()
        await until(lambda: gateway.node.budget.too_old)
        status = await client.status()
        assert status.pressure.level == "hard" and "max_dirty_age" in status.pressure.reason
        assert status.pressure.writers_bytes_per_s == SLOWEST_BYTES_PER_S
        assert status.cache.oldest_dirty_s >= 1.0
        assert any("max_dirty_age" in alarm.what for alarm in status.alarms)
        began_s = asyncio.get_running_loop().time()
        async with client.checkpoint("run", 2, session="s", lane="stream") as part:
            await part.put("x", b"x" * MIB)
            assert asyncio.get_running_loop().time() - began_s >= 0.2  # 1 MiB at 4 MiB a second
            await part.commit()
        await client.release()
        await client.wait("run", 2, "pfs", timeout=30)
        await until(lambda: not gateway.node.budget.too_old)
        assert (await client.pressure()).level == "ok"


async def test_a_disk_that_fails_is_told_and_used_again_by_itself(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = True

    def fail(act: str) -> None:
        if fails:
            raise DiskFailed(f"the cache's disk failed: cannot {act}", errno=errno.errorcode[errno.EIO])

    seal, try_writing = IncomingFile.seal, CacheDir.try_writing
    monkeypatch.setattr(IncomingFile, "seal", lambda *arguments: (fail("seal the shard"), seal(*arguments)))
    monkeypatch.setattr(CacheDir, "try_writing", lambda cache: (fail("write"), try_writing(cache)))
    async with serving(tmp_path, tier(root)) as gateway, client_of(gateway) as client:
        await client.hold()  # else shards would go through to the tier
        put = client.checkpoint("run", 1, session="s")
        with pytest.raises(Unavailable, match="disk fail"):
            await put.put("x", b"x" * 1000)
        await until(lambda: gateway.node.budget.disk.reason)
        status = await client.status()
        assert status.pressure.level == "refusing" and status.health == "critical"
        assert any("disk fails" in alarm.what and "kernel" in alarm.todo for alarm in status.alarms)
        assert gateway.node.budget.reserved == 0
        with pytest.raises(Unavailable, match="no required tier can take it"):
            await put.put("y", b"y")
        await client.release()
        fails = False
        await until(lambda: not gateway.node.budget.disk.reason, within_s=5 * health.DISK_FULL_SHOWN_S)
        await put.put("x", b"x" * 1000)
        await put.commit()
        assert (await client.status()).health == "ok"


async def test_every_acknowledgement_brings_the_pressure(tmp_path: Path, root: Path) -> None:
    async with serving(tmp_path, tier(root)) as gateway, client_of(gateway) as client:
        await client.hold()
        assert client.last_pressure is None
        reserved = gateway.node.budget.reserve(160 * MIB)
        seen = []
        async with client.checkpoint("run", 1, session="s", lane="stream") as part:
            await part.put("stream", b"x" * MIB)
            seen.append(client.last_pressure)
        reserved.release()
        await asyncio.sleep(0.3)  # it is computed a few times a second
        async with client.checkpoint("run", 1, session="s", lane="fd") as part:
            await part.put("fd", b"x" * MIB)
            seen.append(client.last_pressure)
            reserved = gateway.node.budget.reserve(235 * MIB)
            await asyncio.sleep(0.3)
            await part.put_many({"many": b"x"})
            seen.append(client.last_pressure)
            reserved.release()
            await asyncio.sleep(0.3)
            committed = await part.commit()
            assert client.last_pressure == committed.pressure
            seen.append(client.last_pressure)
        assert [pressure.level for pressure in seen if pressure is not None] == ["soft", "ok", "hard", "ok"]
        assert seen[-1] is not None and seen[-1].tiers[0].tier == "pfs"


async def test_what_is_promised_and_not_written_is_not_free_for_others(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tier(root)) as gateway:
        admitter, budget = gateway._writes.admitter, gateway.node.budget
        reserve = gateway.node.config.cache.catalog_reserve
        monkeypatch.setattr(CacheDir, "free_on_disk", property(lambda cache: reserve + 10 * MIB))
        first = await admitter.reserve(6 * MIB, "run", 0)
        with pytest.raises(Exception, match="kept for the catalog"):
            await admitter.reserve(6 * MIB, "run", 1)
        with pytest.raises(Exception, match="kept for the catalog"):
            await admitter.grow(first, 5 * MIB)  # a stream of unknown length must not eat it either
        first.unwritten(0)
        (await admitter.reserve(6 * MIB, "run", 1)).release()
        first.release()
        assert (budget.unwritten, budget.reserved) == (0, 0)


async def test_a_disk_with_less_than_the_capacity_is_shown(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(tmp_path, tier(root)) as gateway, client_of(gateway) as client:

        async def shown(free: int | Exception) -> tuple[int | None, str]:
            def ask(cache: CacheDir) -> int:
                if isinstance(free, Exception):
                    raise free
                return free

            monkeypatch.setattr(CacheDir, "free_on_disk", property(ask))
            status = await client.status()
            _say_status(status)
            return status.cache.disk_free_bytes, capsys.readouterr().out

        found, text = await shown(100 * MIB)
        assert found == 100 * MIB and "of 256.0 MiB (0 %), but only 100.0 MiB free on its disk, 0 streams" in text
        found, text = await shown(300 * MIB)
        assert found == 300 * MIB and "free on its disk" not in text
        gateway.node.budget.disk_full(health.disk_full_reason(3 * MIB, 64 * MIB), 64 * MIB)
        found, text = await shown(DiskFailed("the disk does not say"))
        assert found is None and "3.0 MiB are free, 64.0 MiB are kept for the catalog" in text
        monkeypatch.undo()


async def test_clients_that_go_leave_the_queue(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(tmp_path, tier(root)) as gateway, client_of(gateway) as client:
        node = gateway.node
        monkeypatch.setattr(gateway._writes.admitter._room, "_has_hope", lambda: True)
        full = node.budget.reserve(240 * MIB)
        puts = []
        for lane in ("stream", "fd"):
            part = client.checkpoint("run", 1, session="s", lane=lane)
            puts.append(asyncio.ensure_future(part.put(f"one-{lane}", b"x" * 8 * MIB)))
        puts.append(asyncio.ensure_future(part.put_many({f"many-{number}": bytes(MIB) for number in range(8)})))
        await until(lambda: node.budget.waiting == 3)
        assert (await client.pressure()).waiting == 3
        for each in puts:
            each.cancel()
        await until(lambda: node.budget.waiting == 0)
        full.release()
        await until(lambda: node.budget.reserved == 0)


async def test_who_waits_gets_in_when_space_comes_and_is_told_when_its_time_is_over(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tier(root)) as gateway, client_of(gateway) as client:
        node = gateway.node
        monkeypatch.setattr(gateway._writes.admitter._room, "_has_hope", lambda: True)
        full = node.budget.reserve(240 * MIB)
        client._client._connection.policy = type(client._client._connection.policy)(1.0, 1.0)
        async with client.checkpoint("run", 1, session="s", lane="stream") as part:
            began_s = asyncio.get_running_loop().time()
            with pytest.raises(CacheFull) as caught:
                await part.put("x", b"x" * 8 * MIB)
            assert 0.9 < asyncio.get_running_loop().time() - began_s < 3.0  # the wait in the gateway counts
            assert caught.value.waited_s > 0.5
            putting = asyncio.ensure_future(part.put("x", b"x" * 8 * MIB))
            await until(lambda: node.budget.waiting == 1)
            full.release()
            assert (await putting).size == 8 * MIB


def test_a_cache_larger_than_its_disk_is_refused_with_the_nearest_sensible_value() -> None:
    assert capacity_of(None, 1000 * MIB) == 800 * MIB
    assert capacity_of(1000 * MIB, 1000 * MIB) == 1000 * MIB
    with pytest.raises(StartupError, match=r'cache\.capacity is 1001\.0 MiB.*1000\.0 MiB in all; set at most "800MiB"'):
        capacity_of(1001 * MIB, 1000 * MIB)


async def test_a_gateway_with_such_a_cache_does_not_start(tmp_path: Path, root: Path) -> None:
    more = shutil.disk_usage(tmp_path).total + 1
    with pytest.raises(StartupError, match=r"cache\.capacity"):
        async with serving(tmp_path, tier(root), capacity=f"{more}B"):
            raise AssertionError
    assert not (tmp_path / "cache-a").exists()  # it was looked at before anything was made


async def test_a_checkpoint_whose_other_writers_never_commit_slows_nobody_for_good(tmp_path: Path, root: Path) -> None:
    async with serving(tmp_path, tier(root), cache_keys='max_dirty_age = "1s"') as gateway, client_of(gateway) as client:
        part = client.checkpoint("run", 1, session="died", writers=2, writer=0)
        await part.put(".metadata", b"x")  # goes last, once all have committed
        await part.put("x", b"x" * MIB)
        await part.commit()

        def waits() -> bool:
            with gateway.node.catalog.read() as txn:
                return txn.totals().tiers["pfs"].copies == 1

        await until(waits)
        await asyncio.sleep(2.5)  # health looks every second
        assert waits() and not gateway.node.budget.too_old


async def test_the_disk_is_asked_again_after_the_wait_in_the_queue(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serving(tmp_path, tier(root)) as gateway:
        admitter, budget = gateway._writes.admitter, gateway.node.budget
        monkeypatch.setattr(admitter._room, "_has_hope", lambda: True)
        full = budget.reserve(240 * MIB)
        waiting = asyncio.ensure_future(admitter.reserve(8 * MIB, "run", 0, 20.0))
        await until(lambda: budget.waiting == 1)
        reserve = gateway.node.config.cache.catalog_reserve
        monkeypatch.setattr(CacheDir, "free_on_disk", property(lambda cache: reserve + MIB))
        full.release()
        with pytest.raises(DiskFull, match="kept for the catalog"):
            await waiting
        assert (budget.unwritten, budget.reserved) == (0, 0)


async def test_a_stream_that_grows_lets_verified_data_go_and_is_told_what_never_fits(tmp_path: Path, root: Path) -> None:
    async with serving(tmp_path, tier(root)) as gateway, client_of(gateway) as client:
        admitter, budget = gateway._writes.admitter, gateway.node.budget
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("x", bytes(32 * MIB))
            await part.commit()
        await client.wait("run", 1, "pfs", timeout=30)
        rest = int(budget.capacity * 0.95) - budget.used - MIB
        growing = await admitter.reserve(MIB // 2, "run", 0)
        others = budget.reserve(rest - MIB, "others")
        await admitter.grow(growing, 8 * MIB, 16 * MIB)
        assert growing.size == MIB // 2 + 16 * MIB and budget.used == 0
        others.release()
        with pytest.raises(InvalidArgument):
            await admitter.grow(growing, budget.capacity)
        await admitter.grow(growing, MIB, budget.capacity)  # then no more than is needed
        growing.release()


async def test_a_small_quota_takes_small_streams_of_unknown_length(tmp_path: Path, root: Path) -> None:
    async with serving(tmp_path, tier(root), QUOTA) as gateway, client_of(gateway) as client:
        async with client.checkpoint("held", 1, session="s", lane="stream") as part:
            with pytest.raises(InvalidArgumentThere, match="quota"):
                await part.put("y", iter([b"y" * MIB] * 3))
            assert (await part.put("x", iter([b"x" * 1000, b"y" * MIB]))).size == MIB + 1000
            await part.commit()
        await until(lambda: gateway.node.budget.quotas.held("held") == 0)


async def test_a_quota_counts_once_the_configuration_was_read_again(tmp_path: Path, root: Path) -> None:
    async with serving(tmp_path, tier(root)) as gateway, client_of(gateway) as client:
        node = gateway.node
        await client.hold()
        async with client.checkpoint("held", 1, session="s") as part:
            await part.put("x", bytes(3 * MIB // 2))
            await part.commit()
        policy = PolicyConfig(run="held", quota=2 * MIB)
        node.config = msgspec.structs.replace(node.config, policies=(policy,))
        with pytest.raises(CacheFullHere, match="quota"):
            node.budget.reserve(MIB, "held")


async def test_a_tier_that_waits_for_nothing_does_not_count_as_slow(tmp_path: Path, root: Path) -> None:
    (tmp_path / "other").mkdir()
    only_pfs = '[[policy]]\nrun = "**"\ntiers = ["pfs"]\n'
    tiers = tier(root) + tier(tmp_path / "other", "other")
    async with serving(tmp_path, tiers, only_pfs) as gateway, client_of(gateway) as client:
        await client.hold()
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("x", b"x" * MIB)
            await part.commit()
        rate = gateway.node.tiers["pfs"].rate
        rate.resume()
        await asyncio.sleep(0.1)
        rate.add(MIB)
        assert gateway.node.budget._drain_rate() > 0
