"""The doctor's place on the real S3 server."""

import pytest

from forebay.demo.seaweedfs import SeaweedFS


@pytest.fixture(scope="session")
def own_bucket(seaweed: SeaweedFS) -> SeaweedFS:
    return seaweed.with_bucket("doctor")


@pytest.fixture
def s3_server(own_bucket: SeaweedFS, s3_key: None) -> SeaweedFS:
    """The server, with its key in the standard AWS chain."""
    return own_bucket
