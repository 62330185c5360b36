"""A bucket on the real S3 server for all fault tests, and the results' file at the end."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from faults import results, shim
from forebay.demo.seaweedfs import SeaweedFS


@pytest.fixture(scope="module")
def s3_server(seaweed: SeaweedFS) -> Iterator[SeaweedFS]:
    """With its key in the standard AWS chain, from before the first tier of a module on."""
    server = seaweed.with_bucket("faults")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(scope="session", autouse=True)
def results_file() -> Iterator[None]:
    yield
    results.write()


@pytest.fixture(scope="session")
def shim_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The LD_PRELOAD layer, built from its source."""
    built = shim.build(tmp_path_factory.mktemp("shim"))
    if built is None:
        pytest.skip("no C compiler: the LD_PRELOAD layer cannot be built")
    return built
