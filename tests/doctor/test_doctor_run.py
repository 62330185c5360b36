"""`forebay doctor` on real disks, a real S3 server, beside a real gateway: what it finds, and that nothing of it stays."""

import asyncio
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay_gateway.doctor as package
from forebay.cli.app import run as forebay_command
from forebay.cli.signals import ended_once
from forebay.demo.gateways import FOREBAY, posix_tier, s3_tier
from forebay.demo.seaweedfs import SeaweedFS, free_ports
from forebay_gateway.core.config import load_config
from forebay_gateway.core.config_sections import Config, TierConfig
from forebay_gateway.core.errors import InvalidArgument
from forebay_gateway.doctor import Check, Report, examine, fio, probe_files, syncs, throughput, tiers
from forebay_gateway.doctor.report import CHECKS
from forebay_gateway.doctor.run import Options
from forebay_gateway.doctor.tiers import measure_s3
from forebay_gateway.doctor.watch import Stopped, Watch, run_async, watched
from paths.kit import client_of, serving, tier

MIB = 1 << 20
SHORT = {"small": 10, "small_s": 0.2, "quiet_s": 0.01, "documents": 3}
POSIX = ("write", "read", "disk", "fsync", "metadata", "filesystem", "mount", "space")


class Node:
    """A cache and a POSIX tier's directory, with files of others in both."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cache, self.root = directory / "cache", directory / "pfs"
        for path in (self.cache, self.root):
            path.mkdir(parents=True)
        (self.root / ".forebay").mkdir()
        (self.root / ".forebay" / "tier.json").write_text('{"id": "0123456789abcdef"}')
        self.foreign = [self.cache / "notes.txt", self.root / "other" / "model.bin", self.cache / ".forebay-tmp-other"]
        for path in self.foreign:
            path.parent.mkdir(exist_ok=True)
            path.write_text("not ours")

    def text(self, *tiers: str, cache: Path | None = None, keys: str = "") -> str:
        shown = "\n".join(tiers or (posix_tier(self.root),))
        return f'[cache]\npath = "{cache or self.cache}"\ncatalog_reserve = "1MiB"\n{keys}\n{shown}\n'

    def config(self, *tiers: str, cache: Path | None = None, keys: str = "") -> Config:
        return load_config(self.text(*tiers, cache=cache, keys=keys), {}, "test", uid=0, hostname="test")

    def file(self, *tiers: str) -> str:
        path = self.directory / "node.toml"
        path.write_text(self.text(*tiers))
        return str(path)

    def seen(self) -> dict[str, tuple[int, int]]:
        """Every file and directory, with size and time of change."""
        paths = [path for path in self.directory.rglob("*") if path.name != "node.toml"]
        return {str(path): (path.stat().st_size, path.stat().st_mtime_ns) if path.is_file() else (0, 0) for path in paths}


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    """Whatever a test does to it, all that is there before is there afterwards, and nothing else."""
    made = Node(tmp_path / "node")
    before = made.seen()
    yield made
    assert made.seen() == before


FIO = fio.find()


@pytest.fixture(autouse=True)
def no_fio(monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes its time to start; those who test it put it back."""
    monkeypatch.setattr(fio, "find", lambda: "")


def examined(config: Config, size: int = 4 * MIB, **changes: object) -> Report:
    return examine(config, "test", Options(size=size, **(SHORT | changes)))  # type: ignore[arg-type]


def find(report: Report, where: str, check: str) -> Check:
    found = [each for each in report.checks if (each.where, each.check) == (where, check)]
    assert len(found) == 1, report.checks
    return found[0]


def names(report: Report, where: str) -> set[str]:
    return {each.check for each in report.checks if each.where == where}


def test_a_cache_and_a_posix_tier(node: Node) -> None:
    report = examined(node.config(), size=4 * MIB + 100, data=node.root)  # no whole block
    assert report.size_bytes == 4 * MIB + 4096
    for where in ("cache", "pfs"):
        assert set(POSIX) <= names(report, where)
        write = find(report, where, "write")
        rounds = write.figures["rounds_bytes_per_s"]
        assert isinstance(rounds, list) and len(rounds) == 3 and min(rounds) > 0
        assert write.figures["bytes_per_s"] == pytest.approx(sum(rounds) / 3)
        assert write.figures["tool"] == "own probe" and "own probe, O_DIRECT" in write.value
        for check, figure in (("read", "bytes_per_s"), ("fsync", "per_s"), ("fsync", "median_s"), ("metadata", "per_s")):
            value = find(report, where, check).figures[figure]
            assert isinstance(value, float) and value > 0, check
    assert find(report, "pfs", "probe").status == "OK" and find(report, "pfs", "path").status == "OK"
    assert find(report, "pfs", "apart").status == find(report, "node", "sample_data").status == "WARN"  # one disk for all
    assert {"dirty_pages", "tcp", "open_files", "listen"} <= names(report, "node")
    for check in report.checks:
        assert check.value and check.why and bool(check.do) == (check.status != "OK"), check
    frequency = report.frequency
    assert frequency.bounded_by == "cache+pfs" and [part.name for part in frequency.parts] == ["cache", "pfs"]
    assert frequency.interval_s == pytest.approx(sum(part.seconds for part in frequency.parts))
    assert frequency.per_hour == pytest.approx(3600 / (frequency.interval_s or 1))


@pytest.mark.skipif(not FIO, reason="fio is not installed")
def test_fio_where_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fio, "find", lambda: FIO)
    odd = Node(tmp_path / "a:b")
    write = find(examined(odd.config(posix_tier(odd.root / "gone"))), "cache", "write")
    assert write.figures["tool"] == "fio" and "(fio, O_DIRECT)" in write.value
    rounds = write.figures["rounds_bytes_per_s"]
    assert isinstance(rounds, list) and len(rounds) == 3 and min(rounds) > 0


def test_direct_io_off_is_measured_as_the_gateway_writes(node: Node) -> None:
    report = examined(node.config(keys='direct_io = "off"\ncapacity = "16MiB"'), size=20 * MIB)
    assert find(report, "cache", "write").figures["direct"] is False and "page cache" in find(report, "cache", "write").value
    assert "dropped before" in find(report, "cache", "read").value
    assert find(report, "pfs", "write").figures["direct"] is True
    space = find(report, "cache", "space")  # the configuration keeps it too small, not the disk
    assert space.status == "FAIL" and "cache.capacity" in space.do


def test_a_fio_that_fails_is_told_and_replaced(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    program = node.directory.parent / "fio"
    program.write_text("#!/bin/sh\nsleep 0.1\necho 'engine libaio not loadable' >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(fio, "find", lambda: str(program))
    write = find(examined(node.config(posix_tier(node.root / "gone"))), "cache", "write")
    assert write.figures["tool"] == "own probe" and "libaio not loadable" in write.value
    assert isinstance(write.figures["rounds_bytes_per_s"], list) and len(write.figures["rounds_bytes_per_s"]) == 3


async def test_beside_a_running_gateway(tmp_path: Path) -> None:
    async with serving(tmp_path, tier(tmp_path / "pfs")) as gateway, client_of(gateway) as client:
        async with client.checkpoint("r", 1) as part:
            await part.put("shard", b"kept")
            await part.commit(wait="pfs")
        report = await asyncio.to_thread(examined, gateway.node.config)
        assert report.status != "FAIL" and "a cache" in find(report, "cache", "path").value
        assert find(report, "pfs", "probe").status == "OK"
        await client.wait("r", 1, "pfs")
        assert [finding async for finding in client.care.fsck()] == []
    assert not list(tmp_path.rglob("*doctor*"))


# -- what cannot be measured -----------------------------------------------------------------------------------------------


def test_what_cannot_be_measured_is_a_line(node: Node, tmp_path: Path) -> None:
    gone, fresh, file = node.directory / "mnt" / "gone", tmp_path / "fresh", node.foreign[1]
    fresh.mkdir()
    three = [posix_tier(gone, "gone"), posix_tier(file.parent, "unmounted"), posix_tier(fresh, "fresh")]
    report = examined(node.config(*three, cache=node.directory / "none"))
    other = examined(node.config(posix_tier(file, "file"), cache=node.directory / "none"))
    path = {name: find(report, name, "path") for name in ("cache", "gone", "unmounted", "fresh")}
    assert [check.status for check in path.values()] == ["FAIL", "FAIL", "FAIL", "WARN"]
    assert str(node.directory) in path["gone"].value and f"mkdir -p {gone}" in path["gone"].do
    assert "mkdir -p" in path["cache"].do and "no directory" in find(other, "file", "path").value
    # Files of others, and no marker: nothing is written there.
    assert "model.bin" in path["unmounted"].value and "tier.json" in path["unmounted"].do
    for name in ("cache", "gone", "unmounted"):
        assert names(report, name) == {"path"}
    # An empty one is measured, and stays without the marker that a gateway would make.
    assert "mount it first" in path["fresh"].do and set(POSIX) <= names(report, "fresh")
    assert "probe" not in names(report, "fresh") and list(fresh.iterdir()) == []
    assert report.status == "FAIL" and report.frequency.interval_s is None and report.frequency.bounded_by == "cache"
    assert find(report, "node", "dirty_pages").figures["flush_s"] is None


@pytest.mark.parametrize("place", [".forebay", ".forebay/probe"])
@pytest.mark.parametrize("what", ["link", "dangling", "file"])
def test_what_stands_in_the_way_of_its_own_directory_is_not_followed(node: Node, tmp_path: Path, place: str, what: str) -> None:
    """By a link another directory would be measured, and old directories with the doctor's names removed there."""
    root, elsewhere = tmp_path / "other-tier", tmp_path / "elsewhere"
    old = elsewhere / "doctor-aaaaaaaaaaaa-1-1-1-aaaaaaaa"
    old.mkdir(parents=True)
    os.utime(old, (0, 0))
    at = root / place
    at.parent.mkdir(parents=True)
    if what == "file":
        at.touch()
    else:
        at.symlink_to(elsewhere if what == "link" else tmp_path / "nowhere")
    report = examined(node.config(posix_tier(root, "linked")))
    found = [check for check in report.checks if check.where == "linked" and check.status == "FAIL"]
    assert len(found) == 1 and f"{place} is a link or a file" in found[0].value and "remove" in found[0].do
    assert "write" not in names(report, "linked")
    assert list(elsewhere.iterdir()) == [old] and list(old.iterdir()) == []
    assert not (tmp_path / "nowhere").exists() and (at.is_symlink() or at.is_file())


@contextlib.contextmanager
def mounted(path: Path, options: str) -> Iterator[Path]:
    path.mkdir()
    if os.getuid() or subprocess.run(["mount", "-t", "tmpfs", "-o", options, "doctor", path], capture_output=True).returncode:
        pytest.skip("may not mount here")
    try:
        yield path
    finally:
        subprocess.run(["umount", path], check=True)


def test_read_only_and_full_directories(node: Node, tmp_path: Path) -> None:
    with (
        mounted(tmp_path / "ro", "ro,size=64m") as locked,
        mounted(tmp_path / "full", "size=8m") as full,
        mounted(tmp_path / "memory", "size=64m") as memory,
    ):
        (full / ".forebay").mkdir()
        (full / ".forebay" / "tier.json").write_text("{}")
        (full / "much").write_bytes(bytes(int(7.5 * MIB)))
        report = examined(node.config(posix_tier(locked, "locked"), posix_tier(full, "full"), cache=memory))
        assert list(memory.iterdir()) == []
        assert sorted(path.name for path in full.rglob("*")) == [".forebay", "much", "tier.json"]
    path = [check for check in report.checks if check.where == "locked" and check.status == "FAIL"]
    assert len(path) == 1 and "Read-only" in path[0].value and "remount,rw" in path[0].do
    full_line = [check for check in report.checks if check.where == "full" and check.status == "FAIL"]
    assert len(full_line) == 1 and "is full" in full_line[0].value and "free space" in full_line[0].do
    assert find(report, "cache", "write").status in ("OK", "WARN") and report.status == "FAIL"
    assert find(report, "cache", "filesystem").status == "FAIL" and find(report, "cache", "disk").figures["device"] is None


def test_an_error_in_the_middle_is_a_line_and_leaves_nothing(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, direct: bool, watch: Watch) -> float:
        if "cache" in str(path):
            raise OSError(5, "Input/output error")
        return 1.0

    monkeypatch.setattr(throughput, "read", broken)
    report = examined(node.config())
    bad = [check for check in report.checks if check.where == "cache" and check.status == "FAIL"]
    assert len(bad) == 1 and "Input/output error" in bad[0].value and "dmesg" in bad[0].do
    assert find(report, "pfs", "write").figures["bytes_per_s"] and report.frequency.bounded_by == "cache"


def test_a_mount_that_hangs_is_a_line(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    free, real = threading.Event(), throughput.takes_direct

    def hangs(directory: Path) -> bool:
        if "pfs" in str(directory):
            free.wait(20)
        return real(directory)

    monkeypatch.setattr(throughput, "takes_direct", hangs)
    try:
        report = examined(node.config(), still_s_max=1.5)
    finally:
        free.set()
    bad = [check for check in report.checks if check.where == "pfs" and check.status == "FAIL"]
    assert len(bad) == 1 and "no answer" in bad[0].value and find(report, "cache", "write").figures["bytes_per_s"]
    wait_for(lambda: not (node.root / ".forebay" / "probe").exists())


HANGING = """
import threading
from forebay_gateway.core.errors import Unavailable
from forebay_gateway.doctor import throughput
from forebay_gateway.doctor.watch import watched
try:
    watched(lambda watch: throughput._each_block(8 << 20, watch, lambda at, length: threading.Event().wait()), 0.2)
except Unavailable:
    print("given up")
"""


def test_a_process_ends_though_its_threads_hang() -> None:
    done = subprocess.run([sys.executable, "-c", HANGING], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("given up\n", 0)


# -- sizes -----------------------------------------------------------------------------------------------------------------


def test_a_size_that_does_not_fit_names_the_nearest(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe_files, "in_cache", None)  # nothing may be written
    free = os.statvfs(node.cache).f_bavail * os.statvfs(node.cache).f_frsize
    with pytest.raises(InvalidArgument, match="does not fit") as refused:
        examined(node.config(), size=4 * free)
    nearest = package.parse_size(str(refused.value).rpartition("--size ")[2])
    assert free / 4 < nearest <= free and nearest & (nearest - 1) == 0
    with pytest.raises(InvalidArgument, match=r"the least is 1MiB"):
        examined(node.config(), size=1000)


def test_sample_data_that_are_not_there(node: Node) -> None:
    with pytest.raises(InvalidArgument, match=f"nearest that is there: {node.directory}"):
        examined(node.config(), data=node.directory / "no" / "samples")


# -- several at once, and one that was killed ------------------------------------------------------------------------------


def test_two_at_once_do_not_disturb_each_other(node: Node) -> None:
    reports: list[Report] = []
    threads = [threading.Thread(target=lambda: reports.append(examined(node.config()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(reports) == 2 and all(report.status != "FAIL" for report in reports)


KILLED = """
import os, signal, sys
from pathlib import Path
from forebay_gateway.doctor import probe_files
with probe_files.in_cache(Path(sys.argv[1])) as one, probe_files.in_tier(Path(sys.argv[2])) as two:
    for path in (one, two):
        (path / "data").write_bytes(bytes(5000))
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_killed_one_left_goes_and_what_is_at_work_stays(node: Node) -> None:
    subprocess.run([sys.executable, "-c", KILLED, node.cache, node.root], check=False)
    left = [*node.cache.glob(".forebay-tmp-doctor-*"), *node.root.glob(".forebay/probe/doctor-*")]
    assert len(left) == 2 and all((path / "data").exists() for path in left)
    with probe_files.in_cache(node.cache) as cache, probe_files.in_tier(node.root) as root:
        other_boot = root.parent / "doctor-0123456789ab-1-2-3-01234567"
        strange = root.parent / "doctor-who"
        for path in (other_boot, strange):
            path.mkdir()
        with probe_files.in_cache(node.cache), probe_files.in_tier(node.root):
            assert cache.exists() and root.exists()  # of a process that lives
        assert not any(path.exists() for path in left) and other_boot.exists() and strange.exists()
        os.utime(other_boot, (0, 0))
        with probe_files.in_tier(node.root):
            assert not other_boot.exists()
        strange.rmdir()


# -- interrupted -----------------------------------------------------------------------------------------------------------


def wait_for(look: Callable[[], object], within_s: float = 30.0) -> None:
    end_s = time.monotonic() + within_s
    while not look():
        assert time.monotonic() < end_s
        time.sleep(0.01)


@pytest.mark.parametrize(("number", "tool"), [(signal.SIGINT, "fio"), (signal.SIGTERM, "own probe")])
def test_an_interrupt_leaves_nothing(node: Node, number: signal.Signals, tool: str) -> None:
    if tool == "fio" and not FIO:
        pytest.skip("fio is not installed")
    environment = {**os.environ, **({} if tool == "fio" else {"PATH": "/nowhere"})}
    free = os.statvfs(node.cache).f_bavail * os.statvfs(node.cache).f_frsize
    # More than is written in the time that a clean-up may take: who does not stop at once is seen.
    command = [str(FOREBAY), "doctor", "--config", node.file(), "--size", f"{free // 2 >> 20}MiB"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        wait_for(lambda: [path for path in node.cache.glob(".forebay-tmp-doctor-*/data") if path.stat().st_blocks > 1000])
        process.send_signal(number)
        process.send_signal(number)  # impatience does not break the clean-up off
        out, said = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130 and b"Traceback" not in said and not out, said


def test_an_interrupt_waits_for_the_clean_up(node: Node) -> None:
    """In this process, at a moment that is known: within the small acts. A second signal does not break it off."""
    cleaning = []
    with pytest.raises(KeyboardInterrupt), ended_once(), pytest.MonkeyPatch.context() as patch:
        real = syncs.create_rate

        def late(directory: Path, watch: Watch, count: int, seconds_max: float) -> float:
            os.kill(os.getpid(), signal.SIGTERM)
            wait_for(lambda: watch.stopped)
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)  # for one who does not wait
            cleaning.append(directory.exists())
            return real(directory, watch, count, seconds_max)

        patch.setattr(syncs, "create_rate", late)
        try:
            examined(node.config())
        finally:
            assert cleaning == [True] and not list(node.cache.glob("*doctor*"))


# -- an object store -------------------------------------------------------------------------------------------------------


class Bucket:
    def __init__(self, server: SeaweedFS, prefix: str) -> None:
        self.tier = functools.partial(s3_tier, server.endpoint, server.bucket, prefix=prefix)
        self.config = TierConfig(
            name="object", kind="s3", bucket=server.bucket, prefix=prefix, endpoint=server.endpoint, addressing="path"
        )
        self._client, self._bucket, self._prefix = server.client(), server.bucket, prefix

    def keys(self) -> list[str]:
        answer = self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix)
        return [entry["Key"].removeprefix(f"{self._prefix}/") for entry in answer.get("Contents", ())]

    def uploads(self) -> list[str]:
        answer = self._client.list_multipart_uploads(Bucket=self._bucket, Prefix=self._prefix)
        return [entry["Key"] for entry in answer.get("Uploads", ())]

    def put(self, key: str) -> None:
        self._client.put_object(Bucket=self._bucket, Key=f"{self._prefix}/{key}", Body=b"x")

    def begin(self, key: str) -> None:
        """An upload that nobody goes on with."""
        self._client.create_multipart_upload(Bucket=self._bucket, Key=f"{self._prefix}/{key}")

    def close(self) -> None:
        self._client.close()


@pytest.fixture
def bucket(s3_server: SeaweedFS, tmp_path: Path) -> Iterator[Bucket]:
    made = Bucket(s3_server, tmp_path.name)
    yield made
    made.close()


@pytest.mark.s3
def test_an_object_store(node: Node, bucket: Bucket) -> None:
    dead = f"doctor-{probe_files._boot()}-{probe_files._pid_namespace()}-{2**22 - 1}-{5}-01234567"
    for key in ("foreign", f".forebay/probe/{dead}/data", ".forebay/probe/other-node/document"):
        bucket.put(key)
    bucket.begin(f".forebay/probe/{dead}/data")
    report = examined(node.config(bucket.tier(bandwidth="64KiB")), size=17 * MIB)
    checks = {"write", "read", "round_trip", "conditional_create", "checksums", "list_after_put", "clock_skew", "multipart"}
    assert names(report, "object") == checks
    assert all(find(report, "object", check).status in ("OK", "WARN") for check in checks)
    assert find(report, "object", "write").figures["tool"] == "S3 put"
    assert float(str(find(report, "object", "write").figures["bytes_per_s"])) > 64 << 10  # as if without the limit
    assert report.frequency.bounded_by == "object" and report.frequency.interval_s == pytest.approx(17 * 16)  # with it
    assert sorted(bucket.keys()) == [".forebay/probe/other-node/document", "foreign"] and not bucket.uploads()


@pytest.mark.s3
def test_a_stop_in_the_middle_of_an_upload_leaves_nothing(bucket: Bucket) -> None:
    watch, ended, checks = Watch(), [], list[Check]()

    def work() -> None:
        with pytest.raises(Stopped):
            run_async(lambda: measure_s3(bucket.config, 4 << 30, 1, 1, watch, checks), watch)
        ended.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    wait_for(lambda: any(key.endswith("/data") for key in bucket.uploads()))
    watch.stop()
    thread.join()
    assert ended and not bucket.keys() and not bucket.uploads()


@pytest.mark.s3
async def test_an_upload_that_its_put_could_not_end_goes_too(bucket: Bucket) -> None:
    bucket.put("mine/data")
    bucket.begin("mine/data")
    bucket.begin("others/data")
    opened = tiers.unlimited(bucket.config, "me")
    await tiers._remove(opened, "mine")
    await opened.close()
    assert not bucket.keys() and [key.rpartition("others/")[2] for key in bucket.uploads()] == ["data"]


def test_an_object_store_that_is_away(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "none")
    away = s3_tier(f"http://127.0.0.1:{free_ports(1)[0]}", "bucket")
    report = examined(node.config(posix_tier(node.root), away))
    path = find(report, "object", "path")
    assert path.status == "FAIL" and "reached" in path.do and names(report, "object") == {"path"}
    assert find(report, "pfs", "write").figures["bytes_per_s"] and report.frequency.bounded_by == "object"


# -- the command -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package, "Options", functools.partial(Options, **SHORT))


def test_the_command_in_json(node: Node, short: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert forebay_command(["doctor", "--config", node.file(), "--size", "4MiB", "--nodes", "3", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"config", "size_bytes", "nodes", "status", "checks", "frequency"}
    assert (report["size_bytes"], report["nodes"], report["status"]) == (4 * MIB, 3, "WARN")
    for check in report["checks"]:
        assert set(check) == {"where", "check", "status", "value", "why", "do", "figures"}
        assert tuple(check["figures"]) == CHECKS[check["check"]]
    assert set(report["frequency"]) == {"interval_s", "per_hour", "bytes_per_s", "bounded_by", "reason", "parts"}
    part = {"name", "write_bytes_per_s", "read_bytes_per_s", "limit_bytes_per_s", "seconds", "devices"}
    assert [set(each) for each in report["frequency"]["parts"]] == [part, part]


def test_the_command_in_lines(node: Node, short: None, capsys: pytest.CaptureFixture[str]) -> None:
    gone = node.directory / "gone"
    assert forebay_command(["doctor", "--config", node.file(posix_tier(gone)), "--size", "4MiB"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].endswith("node.toml: checkpoints of 4.0 MiB, 1 node")
    at = next(index for index, line in enumerate(lines) if line.startswith("FAIL pfs    path: "))
    assert lines[at + 1].strip().startswith("why: ")
    assert lines[at + 2].strip() == f"do:  mount its file system, or mkdir -p {gone}"
    assert lines[-1] == "highest checkpoint frequency now: none, pfs could not be measured"


def test_bad_arguments(node: Node, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["--size", "many"], ["--size", "1PB"], ["--size", "1KiB"], ["--nodes", "0"], ["--data", "/no/such"]):
        assert forebay_command(["doctor", "--config", node.file(), *arguments]) == 2, arguments
        said = capsys.readouterr()
        assert not said.out and len(said.err.splitlines()) == 1
    assert forebay_command(["doctor", "--config", "/no/such.toml"]) == 1


def test_the_embedded_default(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Before a gateway has ever run there: nothing is made."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert forebay_command(["doctor", "--size", "4MiB"]) == 1
    assert f"mkdir -p {tmp_path}/forebay/cache (or start the gateway once)" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []


def test_an_error_on_the_thread_is_raised_by_the_one_who_waits() -> None:
    def fails(watch: Watch) -> None:
        raise ValueError("seen")

    with pytest.raises(ValueError, match="seen"):
        watched(fails, 5.0)
