"""Space that runs out where nobody counted on it: on the cache's disk by somebody else's files, under the catalog's growth, and
below the file system itself. It shows in the call and in status, and it passes by itself.
"""

import json
import os
import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from crash.disks import MIB, DiskBench, Faults, Filler, LoopDisk, Mounted, need, run
from crash.kit import LARGE, MIDDLE, RUN, SMALL, until
from forebay import CacheFull, Client, Unavailable
from soak.figures import reported

SHOWN_WITHIN_S = 5.0


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def bench_on(stack: ExitStack, directory: Path, disk: Mounted, **options: str) -> DiskBench:
    found = os.statvfs(disk.path)  # as much as may be configured: it is the disk that is to be full first
    bench = DiskBench(directory, disk.path, capacity=f"{found.f_blocks * found.f_frsize // MIB}MiB", **options)
    stack.callback(bench.gateway.close)
    bench.gateway.start()
    return bench


def refusing(client: Client) -> str:
    """Why, as status says it; empty where it takes shards."""
    status = client.status()
    if status.pressure.level != "refusing":
        return ""
    alarms = [alarm for alarm in status.alarms if status.pressure.reason in alarm.what]
    assert alarms and alarms[0].severity == "critical" and "make space" in alarms[0].todo
    assert status.health == "critical"
    return status.pressure.reason


def shows(client: Client, words: str) -> None:
    until(lambda: words in refusing(client), f"status says {words!r}", SHOWN_WITHIN_S)


def passes(client: Client) -> None:
    until(lambda: not refusing(client), "status says that there is space again", SHOWN_WITHIN_S)


def test_a_disk_that_somebody_fills_shows_and_passes(tmp_path: Path, stack: ExitStack) -> None:
    disk = LoopDisk(tmp_path, "ext4", 192 * MIB)
    stack.callback(disk.close)
    bench = bench_on(stack, tmp_path, disk)
    filler = Filler(disk)
    with bench.client(admit_s=0.0) as client:
        client.hold()
        bench.save(client, 1, {"a": LARGE, "b": SMALL})
        filler.leave(MIB // 2)
        shows(client, "disk is full")  # nobody has tried to save
        with client.checkpoint(RUN, 2, session="job-1") as part:
            for name, size in (("a", LARGE), ("b", SMALL)):
                with pytest.raises(CacheFull, match="disk is full"):
                    bench.put(part, name, size)
            with pytest.raises(CacheFull, match="disk is full"):
                part.put_many({"c": b"c", "d": b"d"})
        said = json.loads(bench.gateway.cli("status", "--json").stdout)
        assert said["pressure"]["level"] == "refusing" and said["health"] == "critical"
        bench.compare(client, 1)
        filler.go()
        passes(client)
        bench.save(client, 2, {"a": LARGE, "b": SMALL})

        # In the middle of a stream whose length nobody knew.
        def growing() -> Iterator[bytes]:
            yield bytes(2 * MIB)
            filler.leave(0)
            for _ in range(24):
                yield bytes(MIB)

        with client.checkpoint(RUN, 3, session="job-1") as part, pytest.raises(CacheFull, match="disk is full"):
            part.put("a", growing())
        shows(client, "disk is full")
        assert list((bench.cache / "incoming").iterdir()) == []

        # A start on a full disk, and a client that waits for the space.
        bench.gateway.kill()
        bench.gateway.start()
        shows(client, "disk is full")
        for step in (1, 2):
            bench.compare(client, step)
        with bench.client() as patient:
            waiting = threading.Timer(1.0, filler.go)
            waiting.start()
            bench.save(patient, 3, {"a": LARGE, "b": SMALL})
            waiting.join()
        passes(client)
        client.release()
    bench.check_settled({1, 2, 3})


def test_what_is_evictable_makes_room_on_a_full_disk(tmp_path: Path, stack: ExitStack) -> None:
    disk = LoopDisk(tmp_path, "ext4", 192 * MIB)
    stack.callback(disk.close)
    bench = bench_on(stack, tmp_path, disk)
    filler = Filler(disk)
    with bench.client(admit_s=0.0) as client:
        for step in (1, 2):
            bench.save(client, step, {"a": LARGE, "b": LARGE})
            client.wait(RUN, step, "pfs", timeout=60)
        filler.leave(2 * MIB)
        bench.save(client, 3, {"a": LARGE})
        for step in (1, 2, 3):
            bench.compare(client, step)
    bench.check_settled({1, 2, 3})


def test_the_catalogs_growth_on_a_full_disk_shows_and_passes(tmp_path: Path, stack: ExitStack) -> None:
    """Metadata of a mebibyte each makes it grow; meanwhile there is room for shards, but not for the catalog's next blocks."""
    disk = LoopDisk(tmp_path, "ext4", 192 * MIB)
    stack.callback(disk.close)
    bench = bench_on(stack, tmp_path, disk)
    filler = Filler(disk)
    text = "x" * 900_000
    saved: list[int] = []
    with bench.client(admit_s=0.0) as client:
        bench.save(client, 1, {"a": LARGE})
        client.wait(RUN, 1, "pfs", timeout=60)

        def grow() -> None:
            for step in range(2, 100):
                filler.leave(12 * MIB)
                with client.checkpoint(RUN, step, session="job-1") as part:
                    bench.put(part, "a", 1)
                    part.commit({"text": text})
                bench.log.attempted.add(step)
                bench.log.promised.add(step)
                saved.append(step)

        with pytest.raises(CacheFull, match="no space is left for the catalog"):
            grow()
        assert len(saved) > 5
        shows(client, "no space is left for the catalog")
        assert disk.free() > 8 * MIB, "the catalog has taken what it could not use"
        # What makes space is not refused for want of it.
        assert json.loads(bench.gateway.cli("evict", RUN, "1", "--yes", "--json").stdout)["shards"] == 1
        filler.go()
        passes(client)
        bench.check_visible()
        step = max(saved) + 1
        bench.save(client, step, {"a": LARGE})
        for known in (1, *saved, step):
            bench.compare(client, known)
    bench.check_settled({1, *saved, step})


def test_writes_that_fail_below_the_file_system(tmp_path: Path, stack: ExitStack) -> None:
    """The disk's own store is full: a write is taken into memory, and the sync says later that it went nowhere. The first sync
    fails, a later one would succeed and mean nothing: none is tried on that file again."""
    need("filefrag")
    memory = tmp_path / "memory"
    store = Mounted(memory, "-t", "tmpfs", "-o", "size=176m", "tmpfs")
    stack.callback(store.close)
    disk = LoopDisk(memory, "ext4", 128 * MIB, "-E", "nodiscard,lazy_itable_init=0,lazy_journal_init=0")
    stack.callback(disk.close)
    bench = bench_on(stack, tmp_path, disk, cache_keys='direct_io = "off"')
    sizes = {"a": LARGE, "b": MIDDLE, "c": SMALL}
    filler = Filler(store)
    figures = stack.enter_context(reported("disk-writeback", bench.figures))
    with bench.client(retry_s=0.0, admit_s=0.0) as client:
        client.hold()
        bench.save(client, 1, sizes)
        part = client.checkpoint(RUN, 2, session="job-1")
        bench.put(part, "first", SMALL)
        keep_backed(disk, bench.cache / "catalog" / "data.mdb")
        errors = []
        with Faults(bench.gateway.pid, "fsync,fdatasync", "", "", (), tmp_path) as watched:
            more: list[str] = []
            while len(errors) < 3 and len(more) < 30:  # some blocks may have a place already
                filler.leave(0)
                more.append(f"more-{len(more)}")
                try:
                    bench.put(part, more[-1], MIDDLE)
                except (CacheFull, Unavailable) as error:
                    errors.append(error)
        failed = watched.check_no_second_fsync()
        figures |= {"refused": len(errors), "syncs_failed": failed}
        assert errors and failed, "nothing failed below the file system"
        assert bench.gateway.process is not None and bench.gateway.process.poll() is None, bench.gateway.tail()
        filler.go()
    with bench.client() as client:
        with client.checkpoint(RUN, 2, session="job-1") as part:
            for name in ("first", *more):
                bench.put(part, name, SMALL if name == "first" else MIDDLE)
            bench.commit(part)
        for step in (1, 2):
            bench.compare(client, step)
    bench.kill()
    disk.unmount()  # so that nothing is read from memory
    disk.mount()
    bench.gateway.start()
    with bench.client() as client:
        bench.check_visible()
        for step in (1, 2):
            bench.compare(client, step)
        client.release()
    bench.check_settled({1, 2})


def keep_backed(disk: LoopDisk, file: Path) -> None:
    """Give the file's blocks a place below the file system now, so that not they are what runs out."""
    run("sync", "-f", str(file))
    extents = re.findall(
        r"^\s*\d+:\s+\d+\.\.\s*\d+:\s+(\d+)\.\.\s*(\d+):", run("filefrag", "-v", "-b4096", str(file)).stdout, re.M
    )
    assert extents
    with disk.image.open("r+b") as image:
        for first, last in extents:
            os.posix_fallocate(image.fileno(), int(first) * 4096, (int(last) - int(first) + 1) * 4096)
