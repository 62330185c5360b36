"""Whole gateways over tiers that fail: saves are acknowledged meanwhile, nothing counts as done that is not there, and when the
fault is over everything arrives by itself, bit-exact, with nothing left behind."""

import itertools
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import forebay
from faults.proxy import FOREVER, Fault, ProxyThread, call_of
from faults.results import SOAK, cell
from faults.s3_matrix import KINDS, Kind
from faults.shim import Shim
from forebay.demo.gateways import GatewayProcess, posix_tier, s3_tier
from forebay.demo.seaweedfs import SeaweedFS
from integration.kit import Job, eventually, files_below, some_bytes

MIB = 1 << 20
CHUNK_KEYS = 'chunk_size = "256KiB"'
_steps = itertools.count(1)


class FaultJob(Job):
    """One shard in parts, one in one piece, a small one."""

    def shards(self, writer: int) -> dict[str, bytes]:
        return {f"{name}.bin": some_bytes(size, (self.step, name)) for name, size in self.sizes.items()}

    @property
    def sizes(self) -> dict[str, int]:
        """By name, in bytes."""
        return {"large": 6 * MIB + 77, "middle": 2 * MIB, "small": 1000}


def job() -> FaultJob:
    """A step that no other test has."""
    return FaultJob(run="faults", step=next(_steps), writers=1)


def complete_on(gateway: GatewayProcess, each: Job, tier: str) -> bool:
    """As the gateway sees it."""
    with forebay.Client(gateway.address) as client:
        try:
            client.wait(each.run, each.step, tier, timeout=0.01)
        except forebay.DeadlineExceeded:
            return False
        return True


@dataclass
class S3Bench:
    """A gateway whose object store stands behind the proxy."""

    gateway: GatewayProcess
    proxy: ProxyThread
    server: SeaweedFS
    plain: Any

    def bytes_of(self, key: str) -> bytes:
        with self.plain.get_object(Bucket=self.server.bucket, Key=f"gateway/{key}")["Body"] as body:
            data: bytes = body.read()
        return data

    def there(self, below: str) -> set[str]:
        found = self.plain.list_objects_v2(Bucket=self.server.bucket, Prefix=f"gateway/{below}/").get("Contents", [])
        return {entry["Key"].removeprefix("gateway/") for entry in found}

    def uploads(self) -> list[str]:
        found = self.plain.list_multipart_uploads(Bucket=self.server.bucket, Prefix="gateway/").get("Uploads", [])
        return [entry["Key"] for entry in found]


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[S3Bench]:
    directory = tmp_path_factory.mktemp("gateway")
    plain = s3_server.client()
    with ProxyThread(s3_server.endpoint) as proxy:
        tier = s3_tier(proxy.proxy.endpoint, s3_server.bucket, prefix="gateway", part_size="5MiB")
        gateway = GatewayProcess(directory, "a", [tier], cache_keys=CHUNK_KEYS, environment=s3_server.environment)
        with gateway:
            first = job()
            first.save(gateway, 0)
            first.wait(gateway, "object")
            yield S3Bench(gateway, proxy, s3_server, plain)
            proxy.clear()
        assert "unexpected failure" not in gateway.log.read_text(errors="replace")
    plain.close()


DRAIN_CALLS = ("PutObject", "CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload", "HeadObject", "GetObject")


def _s3_cells() -> list[tuple[str, Kind]]:
    """Every third of all; by default a few of them."""
    found = [
        (call, kind)
        for call in DRAIN_CALLS
        for kind in KINDS
        if call not in kind.but and (not kind.only or call in kind.only) and kind.name not in ("slow", "etag", "damage")
    ]
    third = found[::3]
    return third if SOAK else third[::12]


@pytest.mark.s3
@pytest.mark.parametrize(("call", "kind"), _s3_cells(), ids=lambda value: getattr(value, "name", value))
def test_a_drain_to_s3_survives(s3: S3Bench, call: str, kind: Kind) -> None:
    with cell("s3 gateway", call, kind.name):
        each = job()
        fault: Fault = kind.fault(lambda request: call_of(request) == call, FOREVER)
        s3.proxy.proxy.faults = [fault]
        each.save(s3.gateway, 0)  # acknowledged, whatever the tier does
        time.sleep(1.0)
        if complete_on(s3.gateway, each, "object"):
            assert {each.key(name) for name in each.everything} <= s3.there(each.directory)
        s3.proxy.clear()
        each.wait(s3.gateway, "object", timeout=90)
        for name, data in each.everything.items():
            assert s3.bytes_of(each.key(name)) == data
        assert set(each.copies(s3.gateway)["large.bin"].values()) & {"verified"}
        eventually(s3.uploads, lambda uploads: not uploads, 10)


@pytest.mark.s3
def test_neither_a_save_nor_a_restore_lists(s3: S3Bench) -> None:
    """A LIST costs by what else lies there, and on some stores it lags behind."""
    s3.proxy.proxy.forget()
    each = job()
    each.save(s3.gateway, 0)
    each.wait(s3.gateway, "object")
    with forebay.Client(s3.gateway.address) as client:
        reader = client.open(each.run, each.step, source="object")
        assert {name: reader.read(name) for name in reader.names()} == each.everything
    calls = s3.proxy.proxy.calls
    assert {"UploadPart", "PutObject", "GetObject"} <= set(calls)
    assert not [call for call in calls if "List" in call]


@pytest.mark.s3
@pytest.mark.parametrize("code", ["403", "404-once", *(["refused", "503", "cut", "200-error", "400"] if SOAK else [])])
def test_unreachable_is_not_absent_in_a_restore(s3: S3Bench, code: str, tmp_path: Path) -> None:
    with cell("s3 restore", code):
        each = job()
        each.save(s3.gateway, 0)
        each.wait(s3.gateway, "object")
        times = 1 if code == "404-once" else FOREVER
        kind = next(kind for kind in KINDS if kind.name == code.removesuffix("-once"))
        s3.proxy.proxy.faults = [kind.fault(lambda request: call_of(request) == "GetObject", times)]
        with forebay.Client(s3.gateway.address) as client, ThreadPoolExecutor(1) as pool:
            reading = pool.submit(lambda: client.open(each.run, each.step, source="object").read("middle.bin"))
            time.sleep(2.0)
            s3.proxy.clear()
            # It waits; neither NotFound nor Corrupt ends it meanwhile.
            assert reading.result(60) == each.everything["middle.bin"]
        states = {name: copies["object"] for name, copies in each.copies(s3.gateway).items()}
        assert set(states.values()) == {"verified"}, states
        eventually(lambda: s3.gateway.status()["tiers"][0]["state"], lambda state: state == "ok")
        each.assert_restores(s3.gateway, tmp_path / "restored", "object")


@dataclass
class PosixBench:
    """A gateway that runs under the shim."""

    gateway: GatewayProcess
    shim: Shim
    root: Path


@pytest.fixture(scope="module")
def posix(tmp_path_factory: pytest.TempPathFactory, shim_library: Path) -> Iterator[PosixBench]:
    directory = tmp_path_factory.mktemp("gateway")
    root = directory / "pfs"
    root.mkdir()
    steered = Shim(directory / "control", root)
    gateway = GatewayProcess(
        directory, "a", [posix_tier(root)], cache_keys=CHUNK_KEYS, environment=steered.environment(shim_library)
    )
    with gateway:
        first = job()
        first.save(gateway, 0)
        first.wait(gateway, "pfs")
        yield PosixBench(gateway, steered, root)
        steered.clear()
    assert "unexpected failure" not in gateway.log.read_text(errors="replace")
    steered.close()


def _posix_cells() -> list[tuple[str, str]]:
    calls = ("open", "pwrite", "fsync", "pread", "rename", "link", "unlink", "dirfsync")
    found = [(call, action) for call in calls for action in ("EIO", "ENOSPC", "EDQUOT", "ESTALE", "hang")]
    found = [each for each in found if not (each[0] in ("pread", "unlink") and each[1] in ("ENOSPC", "EDQUOT"))]
    found += [("pwrite", "short"), ("pread", "short"), ("pread", "flip")]
    return found if SOAK else [*found[::12], ("pwrite", "ENOSPC")]


@pytest.mark.parametrize(("call", "action"), _posix_cells())
def test_a_drain_to_a_file_system_survives(posix: PosixBench, call: str, action: str, tmp_path: Path) -> None:
    with cell("posix gateway", call, action):
        each = job()
        # In the mover and in the front alike; where there is no space, there is none for anything.
        posix.shim.strike(call, action, match="" if action == "ENOSPC" else each.directory)
        each.save(posix.gateway, 0)  # acknowledged, whatever the tier does
        eventually(lambda: posix.shim.hits, within_s=10)
        time.sleep(0.5)
        if action not in ("short",) and call not in ("unlink",):
            assert not complete_on(posix.gateway, each, "pfs")
        if action == "ENOSPC":
            eventually(lambda: posix.gateway.status()["tiers"][0]["state"], lambda state: state == "full", 5)
        posix.shim.clear()
        each.wait(posix.gateway, "pfs", timeout=90)
        for name, data in each.everything.items():
            assert (posix.root / each.key(name)).read_bytes() == data
        each.assert_restores(posix.gateway, tmp_path / "restored", "pfs")
        eventually(lambda: [name for name in files_below(posix.root) if ".forebay-tmp-" in name], lambda left: not left, 10)
