"""A gateway for each test: the one in memory, and a real one in a process of its own with a POSIX tier below tmp_path.

Both must behave alike; a test that asks for `gateway` runs against each, the real one over both lanes. `memory` gives
the first alone, for injected faults.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from client.lanes import FdClient, StreamClient
from forebay import Client, ForebayError
from forebay.demo.gateways import GatewayProcess, Process
from forebay.testing import MemoryGateway

_START_S_MAX = 30.0


class RealGateway:
    """`forebay serve` in a process of its own. Data stays over restart()."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        # Socket paths have a short limit; tmp_path may be long, so the socket is named relative to nothing but itself.
        self.socket = directory / "g.sock"
        self.address = f"unix://{self.socket}"
        self._process: Process | None = None
        for name in ("cache", "pfs"):
            (directory / name).mkdir()
        self._config = directory / "gateway.toml"
        self._config.write_text(
            f'[node]\nid = "test"\nlisten = ["{self.address}"]\n'
            f'[cache]\npath = "{directory}/cache"\ncapacity = "1 GiB"\ncatalog_reserve = "64 MiB"\n'
            f'[[tier]]\nname = "pfs"\nkind = "posix"\npath = "{directory}/pfs"\n'
        )

    def start(self) -> None:
        with (self.directory / "gateway.log").open("ab") as log:
            self._process = GatewayProcess.launch(["serve", "--config", str(self._config)], os.environ, log, log)
        deadline_s = time.monotonic() + _START_S_MAX
        with Client(self.address, retry_timeout=0) as client:
            while True:
                try:
                    if all(tier.state == "ok" for tier in client.status().tiers):
                        return
                except ForebayError:
                    pass
                if self._process.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError("the gateway did not start:\n" + (self.directory / "gateway.log").read_text()[-2000:])
                time.sleep(0.1)

    def stop(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(10)
            self._process = None

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)
        self._process = None


Gateway = MemoryGateway | RealGateway


@pytest.fixture
def memory() -> Iterator[MemoryGateway]:
    with MemoryGateway() as gateway:
        yield gateway


@pytest.fixture
def real(tmp_path: Path) -> Iterator[RealGateway]:
    if find_spec("forebay_gateway.serve") is None:
        pytest.skip("forebay_gateway.serve is not there")
    directory = tmp_path / "g"
    directory.mkdir()
    gateway = RealGateway(directory)
    try:
        gateway.start()
        yield gateway
    finally:
        gateway.stop()


CLIENTS: dict[str, type[Client]] = {"memory": Client, "stream": StreamClient, "fd": FdClient}


@pytest.fixture(params=CLIENTS)
def client_class(request: pytest.FixtureRequest) -> type[Client]:
    kind: type[Client] = CLIENTS[request.param]
    return kind


@pytest.fixture
def gateway(request: pytest.FixtureRequest, client_class: type[Client]) -> Gateway:
    return request.getfixturevalue("memory" if client_class is Client else "real")


@pytest.fixture
def client(gateway: Gateway, client_class: type[Client]) -> Iterator[Client]:
    with client_class(gateway.address, admit_timeout=5, retry_timeout=10) as client:
        yield client


@pytest.fixture
def memory_client(memory: MemoryGateway) -> Iterator[Client]:
    with Client(memory.address, admit_timeout=5, retry_timeout=10) as client:
        yield client
