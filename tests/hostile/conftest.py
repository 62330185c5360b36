"""One gateway with a POSIX and an S3 tier for all hostile clients: what one of them leaves behind, the next test sees."""

from collections.abc import Iterator

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier, s3_tier
from forebay.demo.seaweedfs import SeaweedFS
from hostile.kit import Left
from integration.conftest import assert_clean_log
from integration.kit import SMALL_CHUNKS, Raw, some_bytes

SAVED = {f"shard-{number}.bin": some_bytes((1 << 20) + number, ("hostile", number)) for number in range(4)}


@pytest.fixture(scope="session")
def s3_server(seaweed: SeaweedFS) -> SeaweedFS:
    return seaweed.with_bucket("hostile")


@pytest.fixture(scope="session")
def gateway(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[GatewayProcess]:
    """Run `saved`, step 1, is complete on both tiers."""
    directory = tmp_path_factory.mktemp("hostile")
    (directory / "pfs").mkdir()
    made = GatewayProcess(
        directory,
        "a",
        [posix_tier(directory / "pfs"), s3_tier(s3_server.endpoint, s3_server.bucket)],
        cache_keys=SMALL_CHUNKS,
        node_keys='stream_timeout = "2s"',
        environment=s3_server.environment,
    )
    with made:
        with forebay.Client(made.address) as client:
            with client.checkpoint("saved", 1, session="s") as part:
                part.put_many(SAVED)
                part.commit()
            client.wait("saved", 1, "all", timeout=60)
            for source in ("pfs", "object", "cache"):
                assert client.open("saved", 1, source=source).read("shard-0.bin") == SAVED["shard-0.bin"]
        yield made
    assert_clean_log(made)


@pytest.fixture
def raw(gateway: GatewayProcess) -> Iterator[Raw]:
    with Raw(gateway) as found:
        yield found


@pytest.fixture
def left(gateway: GatewayProcess) -> Iterator[Left]:
    """What the gateway held when the test began."""
    found = Left(gateway)
    yield found
    found.close()
