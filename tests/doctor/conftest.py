"""One real S3 server for the session."""

from collections.abc import Iterator

import pytest

from forebay.demo.seaweedfs import SeaweedFS


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SeaweedFS]:
    with SeaweedFS(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def s3_server(seaweed: SeaweedFS, monkeypatch: pytest.MonkeyPatch) -> SeaweedFS:
    """The server, with its key in the standard AWS chain."""
    for name, value in seaweed.environment.items():
        monkeypatch.setenv(name, value)
    return seaweed
