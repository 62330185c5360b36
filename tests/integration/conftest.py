"""Gateways as processes, and a prefix of its own on the real S3 server for each that asks.

Starting a pair of gateways with its movers costs seconds, so tests that kill nothing share one (`pair`) and have a run each.
"""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import pytest

from forebay.demo.gateways import GatewayProcess, posix_tier, s3_tier
from forebay.demo.seaweedfs import SeaweedFS
from integration.kit import SMALL_CHUNKS, Cluster, Job


@pytest.fixture(scope="session")
def s3_server(seaweed: SeaweedFS) -> SeaweedFS:
    return seaweed.with_bucket("integration")


@pytest.fixture
def bucket(s3_server: SeaweedFS) -> Iterator["Bucket"]:
    """A prefix of the server's bucket that no other test uses."""
    found = Bucket(s3_server, uuid.uuid4().hex[:12])
    yield found
    found.close()


# What was found damaged stays as it is until told otherwise, so that tests can look at it.
KEEPS_BAD = f'{SMALL_CHUNKS}\nrepair = "ask"\nscrub_rate = "1GiB"'


class Bucket:
    """A place on the S3 server, looked at with plain botocore."""

    def __init__(self, server: SeaweedFS, prefix: str) -> None:
        self.server = server
        self.prefix = prefix
        self._client = server.client()

    def tier(self, name: str = "object", **keys: object) -> str:
        """Its [[tier]] table."""
        return s3_tier(self.server.endpoint, self.server.bucket, name=name, prefix=self.prefix, **keys)

    def get(self, key: str) -> bytes:
        """An object's bytes."""
        answer = self._client.get_object(Bucket=self.server.bucket, Key=f"{self.prefix}/{key}")
        with answer["Body"] as body:
            data: bytes = body.read()
        self.close()
        return data

    def put(self, key: str, data: bytes) -> None:
        """Write an object behind Forebay's back."""
        self._client.put_object(Bucket=self.server.bucket, Key=f"{self.prefix}/{key}", Body=data)
        self.close()

    def delete(self, key: str) -> None:
        """Remove an object behind Forebay's back."""
        self._client.delete_object(Bucket=self.server.bucket, Key=f"{self.prefix}/{key}")
        self.close()

    def keys(self, below: str = "") -> list[str]:
        """All keys below, without the prefix."""
        start = f"{self.prefix}/{below}"
        answer = self._client.list_objects_v2(Bucket=self.server.bucket, Prefix=start)
        assert not answer["IsTruncated"]
        self.close()
        return sorted(entry["Key"].removeprefix(f"{self.prefix}/") for entry in answer.get("Contents", []))

    def close(self) -> None:
        """End the connections; a later call opens one anew."""
        self._client.close()


@contextlib.contextmanager
def cluster_below(directory: Path, server: SeaweedFS) -> Iterator["Cluster[Bucket]"]:
    """Two gateways with a POSIX tier and an S3 tier, all of their movers running."""
    bucket = Bucket(server, uuid.uuid4().hex[:12])
    root = directory / "pfs"
    root.mkdir()
    tiers = [posix_tier(root), bucket.tier()]
    a, b = (GatewayProcess(directory, node, tiers, cache_keys=KEEPS_BAD, environment=server.environment) for node in ("a", "b"))
    try:
        a.start(ready=False)
        b.start()
        a.wait_ready()
        warm_up(a, b, directory / "warm")
        yield Cluster(a, b, root, bucket)
    finally:
        for gateway in (a, b):
            gateway.close()
        bucket.close()
    for gateway in (a, b):
        assert_clean_log(gateway)


def warm_up(a: GatewayProcess, b: GatewayProcess, target: Path) -> None:
    """A first job through both, so that no later test is the one that starts a mover."""
    job = Job(run="warm", writers=2)
    job.save_all((a, b))
    for gateway in (a, b):
        job.wait(gateway)
        job.assert_restores(gateway, target / gateway.node)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator["Cluster[Bucket]"]:
    """Shared by all tests that kill nothing."""
    with cluster_below(tmp_path_factory.mktemp("pair"), s3_server) as cluster:
        yield cluster


@pytest.fixture
def doomed(tmp_path: Path, s3_server: SeaweedFS) -> Iterator["Cluster[Bucket]"]:
    """A pair for one test alone, which may do with it what it likes."""
    with cluster_below(tmp_path, s3_server) as cluster:
        yield cluster


@pytest.fixture
def job(request: pytest.FixtureRequest) -> Job:
    """A job whose run no other test has."""
    return Job(run=f"team/{uuid.uuid4().hex[:8]}")


class MakeGateway(Protocol):
    """Makes a gateway, not yet started."""

    def __call__(self, node: str = "a", tiers: list[str] | None = None, **keys: Any) -> GatewayProcess: ...


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The POSIX tier's directory."""
    path = tmp_path / "pfs"
    path.mkdir()
    return path


@pytest.fixture
def make(tmp_path: Path, root: Path, request: pytest.FixtureRequest) -> Iterator[MakeGateway]:
    """Gateways of this test, ended with it; none may have a traceback in its log. Without `tiers`: the POSIX tier alone."""
    made: list[GatewayProcess] = []

    def make_one(node: str = "a", tiers: list[str] | None = None, **keys: Any) -> GatewayProcess:
        keys.setdefault("cache_keys", SMALL_CHUNKS)
        if "bucket" in request.fixturenames:
            keys.setdefault("environment", request.getfixturevalue("bucket").server.environment)
        gateway = GatewayProcess(tmp_path, node, [posix_tier(root)] if tiers is None else tiers, **keys)
        made.append(gateway)
        return gateway

    yield make_one
    for gateway in made:
        gateway.close()
    for gateway in made:
        if gateway.log.exists():
            assert_clean_log(gateway)


def assert_clean_log(gateway: GatewayProcess) -> None:
    """No defect spoke: every failure was one that the gateway knew by type."""
    text = gateway.log.read_text(errors="replace")
    for mark in ("Traceback", "failed unexpectedly", "unexpected failure", "never retrieved"):
        assert mark not in text, f"{mark!r} in the log of gateway {gateway.node}:\n{text[-4000:]}"


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fails whoever takes the stream lane."""

    def refuse(*arguments: object) -> Any:
        raise AssertionError("the stream lane was taken")

    monkeypatch.setattr("forebay.lanes.stream._put_shard", refuse)
    monkeypatch.setattr("forebay.lanes.stream.read_shard", refuse)
