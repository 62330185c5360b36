"""The cache's disk takes no writes: every command says so in one line with the contract's exit code, and leaves all as it was.

A loop image that is mounted again read-only for what runs without a gateway; for a gateway that runs, strace refuses its calls
(a file system with files open for writing cannot be made read-only).
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import psutil
import pytest

from crash.disks import MIB, DiskBench, Faults, LoopDisk
from crash.kit import LARGE, MIDDLE, RUN, SMALL
from forebay import Unavailable

SIZES = {"large": LARGE, "middle": MIDDLE, "small": SMALL}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def saved(bench: DiskBench) -> None:
    bench.gateway.start()
    with bench.client() as client:
        bench.save(client, 1, SIZES)
        client.wait(RUN, 1, "pfs", timeout=60)


def assert_clear(text: str, *parts: str) -> None:
    (line,) = text.strip().splitlines()
    for inside in ("Traceback", "Error(", "Exception", "internal error"):
        assert inside not in line, line
    for part in parts:
        assert part in line, line


def content(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}


OFFLINE = {
    "fsck": ["fsck", "--offline"],
    "rebuild": ["rebuild"],
    "rebuild --apply": ["rebuild", "--apply", "--force"],
    "serve": ["serve"],
}


def test_without_a_gateway(tmp_path: Path, stack: ExitStack) -> None:
    disk = LoopDisk(tmp_path, "ext4", 96 * MIB)
    stack.callback(disk.close)
    bench = DiskBench(tmp_path, disk.path)
    stack.callback(bench.gateway.close)
    saved(bench)
    assert bench.gateway.terminate() == 0
    before = content(bench.cache)
    disk.remount("ro")
    for command in OFFLINE.values():
        result = bench.gateway.cli(*command, "--config", str(bench.gateway.config), check=False)
        assert result.returncode == 1, (command, result)
        assert_clear(result.stderr, "Read-only file system", str(bench.cache))
    disk.remount("rw")
    assert content(bench.cache) == before
    bench.gateway.start()
    with bench.client() as client:
        bench.compare(client, 1)


def test_repair_and_fsck_with_a_gateway_that_runs(tmp_path: Path, stack: ExitStack) -> None:
    """fsck only reads, so it says what it would; a repair says why it could not, and does it once the disk takes writes."""
    bench = DiskBench(tmp_path, tmp_path, cache_keys='repair = "ask"')
    stack.callback(bench.gateway.close)
    saved(bench)
    gateway = bench.gateway
    (part,) = (bench.cache / "data").glob("*/part-*.json")
    part.write_bytes(part.read_bytes()[:-1])
    files = {path.stat().st_size: path for path in (bench.cache / "data").glob("*/*.shard")}
    damaged = files[max(files)]
    data = bytearray(damaged.read_bytes())
    data[MIB] ^= 1
    damaged.write_bytes(data)
    assert gateway.cli("verify", RUN, "1", check=False).returncode == 4
    wrong = {"part_file", "quarantined"}
    before = content(bench.cache / "data")
    incoming = [bench.cache / "incoming" / f"{number:016x}.tmp" for number in range(100)]
    temps = [part.with_name(f".forebay-tmp-{part.name}")]
    movers = [process.pid for process in psutil.Process(gateway.pid).children()]
    with Faults(gateway.pid, f"{REFUSED},openat,write", "EROFS", "1+", [*incoming, *temps], tmp_path, *movers) as faults:
        dry = {verb: gateway.cli(*verb.split(), "--json", check=False) for verb in ("fsck", "repair")}
        done = gateway.cli("repair", "--apply", "--json", check=False)
    assert faults.injected
    for result in dry.values():
        found = [each for each in json.loads(result.stdout) if each["severity"] == "error"]
        assert {each["kind"] for each in found} == wrong and not any(each["outcome"] for each in found)
    assert (dry["fsck"].returncode, dry["repair"].returncode) == (4, 0)  # a repair would mend all of it
    assert done.returncode == 4
    outcomes = {each["kind"]: each["outcome"] for each in json.loads(done.stdout) if each["severity"] == "error"}
    assert set(outcomes) == wrong
    for outcome in outcomes.values():
        assert_clear(outcome)
    assert "EROFS" in outcomes["part_file"] or "Read-only" in outcomes["part_file"], outcomes
    assert content(bench.cache / "data") == before
    assert gateway.cli("repair", "--apply", check=False).returncode == 0
    assert gateway.cli("fsck", "--deep", check=False).returncode == 0
    with bench.client() as client:
        bench.compare(client, 1)


REFUSED = "unlink,unlinkat,rename,renameat,renameat2,mkdir,fallocate,ftruncate,pwrite64"


def test_with_a_gateway_that_runs(tmp_path: Path, stack: ExitStack) -> None:
    bench = DiskBench(tmp_path, tmp_path, cache_keys='repair = "ask"')
    stack.callback(bench.gateway.close)
    saved(bench)
    with bench.client() as client:  # of step 3 the older session is garbage
        for session in ("older", "newer"):
            with client.checkpoint(RUN, 3, session=session) as part:
                part.put("x", session.encode())
                part.commit()
            client.wait(RUN, 3, "pfs", timeout=60)
    files = {path.stat().st_size: path for path in (bench.cache / "data").glob("*/*.shard")}
    damaged = files[max(files)]
    data = bytearray(damaged.read_bytes())
    data[MIB] ^= 1
    damaged.write_bytes(data)
    gateway = bench.gateway
    assert gateway.cli("verify", RUN, "1", check=False).returncode == 4
    (entry,) = json.loads(gateway.cli("quarantine", "ls", "--json").stdout)
    before = content(bench.cache / "data")
    incoming = [bench.cache / "incoming" / f"{number:016x}.tmp" for number in range(100)]
    marks = [bench.cache / "marks.json", bench.cache / ".forebay-tmp-marks.json"]
    paths = [*(bench.cache / "data").rglob("*"), bench.cache / "data", bench.cache / "incoming", *incoming, *marks]
    with Faults(gateway.pid, REFUSED, "EROFS", "1+", paths, tmp_path) as faults:
        found = {
            "release": gateway.cli("quarantine", "release", entry["id"], "--yes", check=False),
            "evict": gateway.cli("evict", RUN, "1", "--yes", check=False),
            "gc": gateway.cli("gc", "--apply", "--older-than", "0s", "--json", check=False),
        }
        with bench.client(retry_s=0.0) as client:
            with pytest.raises(Unavailable, match="EROFS"):
                client.pin(RUN, 1)
            with pytest.raises(Unavailable, match="EROFS"):
                bench.put(client.checkpoint(RUN, 2, session="job-1"), "x", SMALL)
        assert gateway.process is not None and gateway.process.poll() is None
    assert faults.injected
    for name in ("release", "evict"):
        assert found[name].returncode == 5, (name, found[name])
        assert_clear(found[name].stderr, "EROFS")
    assert found["gc"].returncode == 1, found["gc"]
    (left,) = json.loads(found["gc"].stdout)
    assert left["kind"] == "superseded" and left["outcome"].startswith("failed: ") and "EROFS" in left["outcome"]
    assert content(bench.cache / "data") == before
    # Writable again: what was begun ends by itself, and all of it can be done.
    with bench.client() as client:
        bench.compare(client, 1)
    assert gateway.cli("repair", "--apply", check=False).returncode == 0
    assert "1 of 1 deleted" in gateway.cli("gc", "--apply", "--older-than", "0s").stdout
    gateway.cli("pin", RUN, "1")
    assert gateway.cli("fsck", "--deep", check=False).returncode == 0
