"""What a collector reads: the same that status says."""

import asyncio
import socket
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from forebay.demo.seaweedfs import free_ports
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.core.errors import DiskFailed, StartupError
from forebay_gateway.core.records import UploadRow
from paths.kit import client_of, serving, tier, until

Figures = dict[tuple[str, ...], float]


async def scraped(port: int) -> Figures:
    """By name and the values of labels, which come in the order of their names."""

    def read() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            assert answer.headers["Content-Type"].startswith("text/plain")
            return str(answer.read().decode())

    text = await asyncio.to_thread(read)
    found = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, *sample.labels.values()): sample.value for sample in found}


async def test_figures_follow_the_gateway(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    (port,) = free_ports(1)
    metrics = f'[metrics]\nlisten = "127.0.0.1:{port}"\n'
    async with serving(tmp_path, tier(tmp_path / "pfs"), metrics) as gateway, client_of(gateway) as client:
        await until(lambda: gateway.node.tiers["pfs"].state.value == "ok")
        empty = await scraped(port)
        assert empty["forebay_cache_used_bytes",] == 0
        assert empty["forebay_pressure", "ok"] == 1
        assert empty["forebay_tier_state", "ok", "pfs"] == 1
        await client.hold()
        async with client.checkpoint("run", 1, session="s") as part:
            await part.put("x", b"x" * 100_000)
            await part.commit()
        held = await scraped(port)
        assert held["forebay_tier_pending_copies", "pfs"] == 1
        assert held["forebay_tier_pending_bytes", "pfs"] == 100_000
        assert held["forebay_cache_dirty_bytes",] == held["forebay_cache_used_bytes",] > 100_000  # with footer and padding
        assert held["forebay_tier_state", "held", "pfs"] == 1
        assert held["forebay_checkpoints", "complete"] == 1
        assert held["forebay_alarms", "warning"] == 1
        assert held["forebay_open_uploads",] == 0
        with gateway.node.catalog.read() as txn:
            (row,) = txn.all_shards()
        await gateway.node.catalog.write(lambda txn: txn.record_upload(row.key, "pfs", UploadRow("x", "begun")))
        assert (await scraped(port))["forebay_open_uploads",] == 1
        await gateway.node.catalog.write(lambda txn: txn.clear_upload(row.key, "pfs"))
        assert (await scraped(port))["forebay_open_uploads",] == 0
        gateway.node.budget.disk_full("no space is left")
        full = await scraped(port)
        assert full["forebay_cache_disk_full",] == 1
        assert full["forebay_pressure", "refusing"] == 1
        assert full["forebay_alarms", "critical"] == 1
        gateway.node.budget.disk_usable()
        assert (await scraped(port))["forebay_cache_disk_full",] == 0
        await client.release()
        await client.wait("run", 1, "pfs", timeout=30)
        await until(lambda: gateway.node.budget.used)
        assert (await scraped(port))["forebay_tier_pending_copies", "pfs"] == 0
        with pytest.raises(urllib.error.HTTPError):
            await asyncio.to_thread(urllib.request.urlopen, f"http://127.0.0.1:{port}/", timeout=10)
    with pytest.raises(urllib.error.URLError):  # the port goes with the gateway
        await scraped(port)


async def test_write_through_names_its_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(cache: CacheDir) -> None:
        raise DiskFailed("cannot write")

    monkeypatch.setattr(CacheDir, "try_writing", fail)  # so that it does not work again by itself
    (tmp_path / "pfs").mkdir()
    (port,) = free_ports(1)
    metrics = f'[metrics]\nlisten = "127.0.0.1:{port}"\n'
    async with serving(tmp_path, tier(tmp_path / "pfs"), metrics) as gateway:
        await until(lambda: gateway.node.tiers["pfs"].state.value == "ok")
        assert (await scraped(port))["forebay_write_through", "pfs"] == 0
        for _ in range(3):
            gateway.node.budget.disk.failed("cannot write")
        failing = await scraped(port)
        assert failing["forebay_write_through", "pfs"] == failing["forebay_pressure", "hard"] == 1
        assert failing["forebay_alarms", "critical"] == 1


async def test_an_address_that_is_taken_refuses_the_start(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        metrics = f'[metrics]\nlisten = "127.0.0.1:{taken.getsockname()[1]}"\n'
        with pytest.raises(StartupError, match=r"metrics.listen 127.0.0.1:\d+: .*in use"):
            async with serving(tmp_path, tier(tmp_path / "pfs"), metrics):
                pass
    async with serving(tmp_path, tier(tmp_path / "pfs")):  # nothing was left open
        pass
