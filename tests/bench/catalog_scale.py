"""The catalog at scale: many shards in many checkpoints, and what status, ls, a start and memory cost then.

usage: catalog_scale.py [--checkpoints 1000] [--shards 1000] [--files 0] [--directory DIR] [--json FILE]

The catalog is filled through the same acts as a gateway's own: seal, commit, verified on a tier, complete, evictable. `--files`
of the newest checkpoints keep sparse files of the right names and sizes in the cache; the shards of all others are evicted.
Then a real gateway is started on it: after an orderly stop, and after a kill.
"""

import argparse
import asyncio
import json
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import psutil

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay_gateway.cache.footer import disk_size
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.catalog import Catalog, WriteTxn
from forebay_gateway.core.layout import manifest_key
from forebay_gateway.core.records import PublishState, ShardKey, ShardRow
from forebay_gateway.core.states import CopyEvent, ShardEvent, ShardState
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import Manifest, PartRecord, ShardEntry, pack_chunk_crcs

CHUNK = 4 << 20
RUN = "bench/scale"
TIER = "pfs"
SHARDS_AN_ACT = 500
ASKED = 20
READY_S_MAX = 120.0


def _entry(step: int, number: int) -> ShardEntry:
    size = (1 + number % 3) * (1 << 20)
    crc = crc32c(b"%d/%d" % (step, number))
    return ShardEntry(f"model.layers.{number:06d}.weight", size, crc, CHUNK, pack_chunk_crcs([crc]))


def _seal(session_id: int, step: int, first_id: int, numbers: range, txn: WriteTxn) -> None:
    if txn.session(session_id) is None:
        txn.open_session(RUN, step, f"session-{step}", 1, session_id=session_id)
        txn.open_part(session_id, 0)
    for number in numbers:
        entry = _entry(step, number)
        key = ShardKey(session_id, first_id + number)
        row = ShardRow(*key, 0, entry.name, entry.size, CHUNK, entry.crc32c, ShardState.SEALED, disk_size(entry.size, CHUNK))
        txn.seal(row, entry.chunks)


def _verify(session_id: int, first_id: int, numbers: range, txn: WriteTxn) -> None:
    for number in numbers:
        for event in (CopyEvent.START, CopyEvent.PUT, CopyEvent.VERIFY):
            txn.copy_event(ShardKey(session_id, first_id + number), TIER, event)


def _let_go(session_id: int, first_id: int, evict: bool, numbers: range, txn: WriteTxn) -> None:
    events = (ShardEvent.ALL_VERIFIED, *((ShardEvent.EVICT, ShardEvent.UNLINKED) if evict else ()))
    for number in numbers:
        for event in events:
            txn.shard_event(ShardKey(session_id, first_id + number), event)


async def fill(cache: Path, tier: Path, node: str, checkpoints: int, shards: int, files: int) -> float:
    """Make the catalog below `cache`, the newest `files` checkpoints' files, and manifests on the tier; shards a second."""
    directory = CacheDir.open(cache, node)
    began_s = time.perf_counter()
    catalog = await Catalog.open(cache / "catalog", tiers=[TIER], node=node)
    try:
        slices = [range(at, min(at + SHARDS_AN_ACT, shards)) for at in range(0, shards, SHARDS_AN_ACT)]
        for step in range(checkpoints):
            session_id, first_id = catalog.new_id(), catalog.new_id()
            for _ in range(shards - 1):
                catalog.new_id()
            has_files = step >= checkpoints - files
            acts: list[Callable[[WriteTxn], Any]] = [partial(_seal, session_id, step, first_id, each) for each in slices]
            acts.append(lambda txn, at=session_id: txn.commit_part(at, 0, '{"loss": 1.5}', [TIER]))
            acts += [partial(_verify, session_id, first_id, each) for each in slices]
            acts.append(lambda txn, at=session_id: txn.part_recorded(at, 0, TIER))
            acts.append(lambda txn, at=session_id: txn.set_publish(at, TIER, PublishState.COMPLETE))
            acts += [partial(_let_go, session_id, first_id, not has_files, each) for each in slices]
            await asyncio.gather(*(catalog.write(act) for act in acts))
            if has_files:
                _make_files(directory, session_id, first_id, step, shards)
        seconds = time.perf_counter() - began_s
        for step in range(checkpoints):
            _put_manifest(tier, step, shards)
    finally:
        await catalog.close()
        directory.release()
    return checkpoints * shards / seconds


def _make_files(directory: CacheDir, session_id: int, first_id: int, step: int, shards: int) -> None:
    directory.make_session_dir(session_id)
    for number in range(shards):
        descriptor = os.open(directory.shard_path(ShardKey(session_id, first_id + number)), os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(descriptor, disk_size(_entry(step, number).size, CHUNK))
        os.close(descriptor)


def _put_manifest(tier: Path, step: int, shards: int) -> None:
    entries = tuple(_entry(step, number) for number in range(shards))
    part = PartRecord(RUN, step, f"session-{step}", 0, 1, "bench", entries)
    path = tier / manifest_key(RUN, step)
    path.parent.mkdir(parents=True)
    path.write_bytes(Manifest.of_parts([part], "bench").to_json())


def measure(directory: Path, checkpoints: int = 1000, shards: int = 1000, files: int = 0) -> dict[str, Any]:
    """All figures: times in milliseconds (medians), sizes in MiB, `start_*` in seconds until the gateway answers."""
    tier = directory / "pfs"
    tier.mkdir()
    gateway = GatewayProcess(directory, "scale", [posix_tier(tier)])
    figures: dict[str, Any] = {"checkpoints": checkpoints, "shards": checkpoints * shards, "files": files * shards}
    gateway.start()  # the empty directory becomes its tier; one that holds files already it would not take
    gateway.terminate()
    rate = asyncio.run(fill(gateway.cache, tier, gateway.node, checkpoints, shards, files))
    figures["fill_shards_per_s"] = round(rate)
    figures["catalog_mib"] = round((gateway.cache / "catalog" / "data.mdb").stat().st_size / 2**20)
    figures["start_after_kill_s"] = _start(gateway)
    figures.update({f"after_kill_{name}": value for name, value in _memory(gateway).items()})
    gateway.terminate()
    figures["start_s"] = _start(gateway)
    try:
        figures.update(_memory(gateway))
        client = forebay.Client(gateway.address)
        step = checkpoints // 2
        figures["status_ms"] = _median_ms(client.status)
        figures["describe_ms"] = _median_ms(lambda: client._describe(RUN, step))
        figures["ls_step_ms"] = _median_ms(lambda: client.describe(RUN, step))
        figures["ls_run_ms"] = _median_ms(lambda: client.checkpoints(RUN), 3)
        figures["ls_ms"] = _median_ms(client.runs, 3)
        figures["loop_lag_p99_ms"] = round(client.status().loop_lag_p99_s * 1e3, 2)
        figures.update({f"after_{name}": value for name, value in _memory(gateway).items()})
        client.close()
    finally:
        gateway.close()
    return figures


def _start(gateway: GatewayProcess) -> float:
    began_s = time.perf_counter()
    gateway.start(ready=False)
    gateway.wait_ready(READY_S_MAX)
    return round(time.perf_counter() - began_s, 2)


def _memory(gateway: GatewayProcess) -> dict[str, int]:
    found = psutil.Process(gateway.pid)
    lines = Path(f"/proc/{found.pid}/status").read_text().splitlines()
    kib = {line.split(":")[0]: int(line.split()[1]) for line in lines if line.startswith(("Rss", "VmRSS"))}
    return {
        "rss_mib": kib["VmRSS"] >> 10,
        "rss_anon_mib": kib["RssAnon"] >> 10,
        "rss_file_mib": kib["RssFile"] >> 10,
    }


def _median_ms(ask: Callable[[], Any], times: int = ASKED) -> float:
    taken = []
    for _ in range(times):
        began_s = time.perf_counter()
        ask()
        taken.append(time.perf_counter() - began_s)
    return round(statistics.median(taken) * 1e3, 2)


def main() -> None:
    """Measure once and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--checkpoints", type=int, default=1000)
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--files", type=int, default=0, help="so many of the newest checkpoints keep their files in the cache")
    parser.add_argument("--directory", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="forebay-scale-", dir=arguments.directory))
    try:
        figures = measure(directory, arguments.checkpoints, arguments.shards, arguments.files)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(json.dumps(figures, indent=2))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(figures, indent=2))


if __name__ == "__main__":
    main()
