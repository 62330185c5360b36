"""fsspec's own suite for file systems, over both gateways: open, pipe, copy, get, put, in every layout it knows.

It copies, moves and removes inside one step that is being written, as a program does that knows no commit.
"""

import itertools
from collections.abc import Callable, Iterator
from importlib.util import find_spec

import pytest

pytest.importorskip("fsspec", reason="forebay.fsspec needs fsspec, which this environment does not have")

from fsspec.tests import abstract

from client.conftest import RealGateway
from forebay.fsspec import ForebayFileSystem
from forebay.testing import MemoryGateway

_steps = itertools.count()


@pytest.fixture(scope="module", params=["memory", "real"])
def address(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One gateway for all of it: starting a real one takes longer than any of these tests."""
    if request.param == "memory":
        with MemoryGateway() as memory:
            yield memory.address
        return
    if find_spec("forebay_gateway.serve") is None:
        pytest.skip("forebay_gateway.serve is not there")
    real = RealGateway(tmp_path_factory.mktemp("g"))
    try:
        real.start()
        yield real.address
    finally:
        real.stop()


class Fixtures(abstract.AbstractFixtures):
    """One step for each test."""

    @pytest.fixture
    def fs(self, address: str) -> Iterator[ForebayFileSystem]:
        fs = ForebayFileSystem(address, retry_timeout=5, skip_instance_cache=True)
        yield fs
        for step in fs.uncommitted():
            fs.discard(step)

    @pytest.fixture
    def fs_path(self) -> str:
        return f"suite/{next(_steps)}"

    @pytest.fixture
    def fs_join(self) -> Callable[..., str]:
        return lambda *segments: "/".join(segments)


class TestOpen(Fixtures, abstract.AbstractOpenTests):
    pass


class TestPipe(Fixtures, abstract.AbstractPipeTests):
    pass


class TestCopy(Fixtures, abstract.AbstractCopyTests):
    pass


class TestGet(Fixtures, abstract.AbstractGetTests):
    pass


class TestPut(Fixtures, abstract.AbstractPutTests):
    pass
