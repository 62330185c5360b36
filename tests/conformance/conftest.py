"""A place on the real S3 server, and every tier, bare and decorated."""

import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from conformance.tier_kit import decorated, open_bare
from forebay.demo.seaweedfs import SeaweedFS
from forebay_gateway.tiers.base import Capabilities, Tier
from soak.form import some

KINDS = ("memory", "posix", "posix-buffered", "s3")


@pytest.fixture(scope="session")
def own_bucket(seaweed: SeaweedFS) -> SeaweedFS:
    return seaweed.with_bucket("conformance")


@pytest.fixture
def s3_server(own_bucket: SeaweedFS, s3_key: None) -> SeaweedFS:
    """The server, with its key in the standard AWS chain."""
    return own_bucket


@pytest.fixture
def prefix() -> str:
    return f"t/{uuid.uuid4().hex[:12]}"


def _cases() -> list[object]:
    cases = []
    for kind in KINDS:
        marks = [pytest.mark.s3] if kind == "s3" else []
        for wrapped in some([False, True], kind != "posix"):  # the decorators are the same around each
            name = f"{kind}-decorated" if wrapped else kind
            cases.append(pytest.param((kind, wrapped), id=name, marks=marks))
    return cases


@pytest.fixture(scope="session")
def proved() -> dict[str, Capabilities]:
    """What the S3 server's probe proved, once a session: it sends some MiB."""
    return {}


@pytest.fixture(params=_cases())
async def tier(
    request: pytest.FixtureRequest, tmp_path: Path, prefix: str, proved: dict[str, Capabilities]
) -> AsyncIterator[Tier]:
    """A probed, empty tier."""
    kind, wrapped = request.param
    server = request.getfixturevalue("s3_server") if kind == "s3" else None
    opened = open_bare(kind, tmp_path, server, prefix)
    if wrapped:
        opened = decorated(opened)
    if kind == "s3" and kind in proved:
        opened.capabilities = proved[kind]
    else:
        proved[kind] = await opened.probe()
    yield opened
    await opened.close()
