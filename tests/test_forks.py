"""A fork is what an executed program would be: where it were not, tests of gateways and commands would say nothing of them."""

import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from forebay.demo.gateways import Launch, execute, posix_tier
from forks import Fork, ForkServer


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


@pytest.fixture
def serve(tmp_path: Path) -> list[str]:
    config, tier = tmp_path / "gateway.toml", posix_tier(tmp_path / "pfs")
    listen = f"unix://{tmp_path}/g.sock"
    config.write_text(f'[node]\nlisten = ["{listen}"]\n[cache]\npath = "{tmp_path}/cache"\ncapacity = "1GiB"\n{tier}')
    return ["serve", "--config", str(config)]


def run(launch: Launch, arguments: list[str], environment: Mapping[str, str]) -> tuple[int, bytes, bytes, bool]:
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = launch(arguments, environment, out, err)
        code = process.wait(30)
        assert process.poll() == code
        out.seek(0)
        err.seek(0)
        return code, out.read(), err.read(), isinstance(process, Fork)


@pytest.mark.parametrize(
    "arguments", [["--version"], ["--help"], ["ls"], ["no-such"], ["config", "show", "--config", "relative.toml"]], ids=" ".join
)
def test_a_fork_says_and_ends_as_what_is_executed(
    server: ForkServer, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relative.toml").write_text('[node]\nid = "of-this-directory"\n')
    environment = {**os.environ, "FOREBAY_ADDRESS": f"unix://{tmp_path}/none.sock", "HOME": str(tmp_path)}
    forked, executed = (run(launch, arguments, environment) for launch in (server.start, execute))
    assert forked == (*executed[:3], True)
    assert executed[1] or executed[2]


def test_a_fork_passes_failpoints_and_dies_of_them(server: ForkServer, serve: list[str]) -> None:
    environment = {**os.environ, "FOREBAY_FAILPOINTS": "catalog.before_commit=kill"}
    code, _, said, is_fork = run(server.start, serve, environment)
    assert (code, is_fork) == (-signal.SIGKILL, True), said


def test_what_acts_while_a_program_is_loaded_is_executed(server: ForkServer) -> None:
    for name, value in (("LD_PRELOAD", ""), ("PYTHONHASHSEED", "0"), ("GRPC_TRACE", "0")):
        assert not run(server.start, ["--version"], {**os.environ, name: value})[3]


def test_what_forks_has_loaded_grpc_as_a_command_does(server: ForkServer) -> None:
    """With its fork handlers movers would die before they are born."""
    assert run(server.start, ["--version"], os.environ)[3]
    assert psutil.Process(server.pid).environ()["GRPC_ENABLE_FORK_SUPPORT"] == "0"


def test_several_threads_wait_for_one_fork(server: ForkServer, serve: list[str]) -> None:
    with tempfile.TemporaryFile() as out, ThreadPoolExecutor(8) as pool:
        process = server.start(serve, {**os.environ, "FOREBAY_FAILPOINTS": "catalog.before_commit=sleep:60"}, out, out)
        waiting = [pool.submit(process.wait, 30) for _ in range(8)]
        process.kill()
        assert [each.result() for each in waiting] == [-signal.SIGKILL] * 8
    assert run(server.start, ["--version"], os.environ)[3]  # it still answers


def test_a_fork_that_has_ended_keeps_its_id_until_it_is_waited_for(server: ForkServer) -> None:
    with tempfile.TemporaryFile() as out:
        process = server.start(["--version"], os.environ, out, out)
        while psutil.Process(process.pid).status() != psutil.STATUS_ZOMBIE:
            assert process.pid in [child.pid for child in psutil.Process(server.pid).children()]
        process.send_signal(signal.SIGKILL)  # nobody's
        assert process.wait(0) == 0
        assert not psutil.pid_exists(process.pid)


def test_a_fork_is_waited_for_as_long_as_was_said(server: ForkServer, serve: list[str]) -> None:
    environment = {**os.environ, "FOREBAY_FAILPOINTS": "catalog.before_commit=sleep:60"}
    with tempfile.TemporaryFile() as out:
        process = server.start(serve, environment, out, out)
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.2)
            assert process.poll() is None
        finally:
            process.kill()
            assert process.wait(30) == -signal.SIGKILL
    assert [child for child in psutil.Process(server.pid).children() if child.status() != psutil.STATUS_ZOMBIE] == []
