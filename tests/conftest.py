"""What every test stands under: no unexpected log record, and, where processes run, nothing left behind.

`@pytest.mark.expected_logs("part of a message", ...)` allows warnings and errors that a test means to cause; without
arguments it allows all. The fixture of the same name allows more at run time and gives the records to look at.
"""

import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

from forebay.demo.gateways import GatewayProcess
from forks import ForkServer
from soak.form import OWN

if TYPE_CHECKING:
    from forebay.demo.seaweedfs import SeaweedFS

# What an assertion compared is told also where it stands in a kit, which pytest would not see by itself. (This file is imported
# again by name, when they are there.)
_WITH_KITS = {"catalog", "conformance", "crash", "faults", "integration", "model", "paths"}
pytest.register_assert_rewrite(*_WITH_KITS - sys.modules.keys())

# A shared machine stalls now and then; an example that takes long is no defect.
settings.register_profile("forebay", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("forebay")

# What a shell starts in the background begins with SIGINT ignored, and so does everything below it: tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

_WATCHED_LOGGERS = ("forebay", "forebay_gateway", "forebay_wire", "asyncio")
# Tests leave it to the gateway to make its directories; and one that is restarted may take its time on a busy machine.
_MEANT = ("directory was not there, and was made", "trying again for up to")
_WATCHED_FOLDERS = ("integration", "crash")
_FORKS = ForkServer()
_GRACE_S = 3.0


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "expected_logs(*parts): warnings and errors whose message holds a part are meant")


@pytest.fixture(scope="session", autouse=True)
def no_process_inherits_the_tests_own_variables() -> Iterator[None]:
    taken = {name: os.environ.pop(name) for name in OWN if name in os.environ}
    yield
    os.environ.update(taken)


@pytest.fixture(scope="session", autouse=True)
def gateways_and_commands_are_forks(no_process_inherits_the_tests_own_variables: None) -> Iterator[None]:
    """Of a process that has loaded them: see forks.py."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GatewayProcess, "launch", staticmethod(_FORKS.start))
        yield
    _FORKS.close()


class ExpectedLogs(logging.Handler):
    """Collects records of at least WARNING, and knows which of them are meant."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.records: list[logging.LogRecord] = []
        self._parts: list[str] = [*_MEANT]

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def allow(self, *parts: str) -> None:
        """Records whose message holds one of `parts` are meant; no parts: all are."""
        self._parts.extend(parts or ("",))

    def unexpected(self) -> list[str]:
        """One line for each record that nobody meant."""
        shown = []
        for record in self.records:
            message = record.getMessage()
            if not any(part in message for part in self._parts):
                cause = f" ({record.exc_info[1]!r})" if record.exc_info else ""
                shown.append(f"{record.levelname} {record.name}: {message}{cause}")
        return shown


@pytest.fixture(autouse=True)
def expected_logs(request: pytest.FixtureRequest) -> Iterator[ExpectedLogs]:
    """Fails the test on a WARNING or ERROR that was not allowed."""
    gc.freeze()  # or what is there already is gone through after each test: a third of a second once all modules are loaded
    handler = ExpectedLogs()
    for marker in request.node.iter_markers("expected_logs"):
        handler.allow(*marker.args)
    for name in _WATCHED_LOGGERS:
        logging.getLogger(name).addHandler(handler)
    level = logging.getLogger().level
    yield handler
    left = logging.getLogger().level
    logging.getLogger().setLevel(level)  # a gateway in this process may have set it, as its configuration says
    if left > logging.WARNING:
        pytest.fail("the root logger shows no warnings any more: what should fail this test was not seen", pytrace=False)
    gc.collect()  # "Task exception was never retrieved" is logged when the task goes
    for name in _WATCHED_LOGGERS:
        logging.getLogger(name).removeHandler(handler)
    if unexpected := handler.unexpected():
        pytest.fail("unexpected log records:\n  " + "\n  ".join(unexpected), pytrace=False)


@pytest.fixture(scope="session")
def seaweed(tmp_path_factory: pytest.TempPathFactory) -> Iterator["SeaweedFS"]:
    """A real S3 server: one a process, whatever tests it runs. Each folder has a bucket of its own there, and each test keys of
    its own; whoever stops a server starts another one."""
    from forebay.demo.seaweedfs import SeaweedFS

    with SeaweedFS(tmp_path_factory.mktemp("weed")) as server:
        yield server


@pytest.fixture
def s3_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server's key in the standard AWS chain."""
    from forebay.demo.seaweedfs import ENVIRONMENT

    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


def _open_files() -> dict[str, str]:
    """Descriptors of files and sockets. Pipes, epoll and the like belong to event loops and gRPC's global state."""
    found = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except FileNotFoundError:
            continue  # the listing's own
        if int(descriptor) == _FORKS.descriptor:
            continue
        if target.startswith("socket:") or (target.startswith("/") and not target.startswith(("/dev/", "/proc/"))):
            found[f"{descriptor} {target}"] = target
    return found


def _children() -> dict[int, str]:
    """Living children and theirs, without the tracker that multiprocessing starts and the process that forks."""
    found = {}
    for child in psutil.Process().children(recursive=True):
        if child.pid == _FORKS.pid:
            continue
        try:
            command = " ".join(child.cmdline())
            if child.status() != psutil.STATUS_ZOMBIE and "multiprocessing.resource_tracker" not in command:
                found[child.pid] = command[:120]
        except psutil.NoSuchProcess:
            continue
    return found


@pytest.fixture(autouse=True)
def nothing_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test of integration/ or crash/ that leaves a process, a file or a socket open."""
    if not set(_WATCHED_FOLDERS) & set(Path(request.path).parent.parts):
        yield
        return
    children, files = _children(), _open_files()
    yield
    deadline_s = time.monotonic() + _GRACE_S  # sockets close on threads of their own
    while True:
        left = [f"process {pid}: {command}" for pid, command in _children().items() if pid not in children]
        left += [f"descriptor {entry}" for entry in _open_files() if entry not in files]
        if not left or time.monotonic() > deadline_s:
            break
        gc.collect()
        time.sleep(0.05)
    if left:
        pytest.fail("left behind:\n  " + "\n  ".join(left), pytrace=False)
