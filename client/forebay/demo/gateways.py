"""Gateways as processes, for the demo, tests and benchmarks: configured, started, killed, started again.

Owns one process and its files below a directory. Uses the command line as an operator does.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, ClassVar, Protocol

import grpc

from forebay_wire.v1 import gateway_pb2, gateway_pb2_grpc

FOREBAY = Path(sys.executable).parent / "forebay"
# gRPC's own pauses between two tries to connect, 1 s, 1.6 s, 2.6 s and so on, would be taken for the gateway's.
_TRY_OFTEN = [(f"grpc.{which}_reconnect_backoff_ms", 100) for which in ("initial", "min", "max")]
_SETTINGS = ("FOREBAY_NODE_", "FOREBAY_CACHE_", "FOREBAY_TIER_", "FOREBAY_FAILPOINTS")


def posix_tier(path: Path, name: str = "pfs", **keys: object) -> str:
    """A [[tier]] of a directory."""
    return tier_text(name=name, kind="posix", path=str(path), **keys)


def s3_tier(endpoint: str, bucket: str, name: str = "object", prefix: str = "fb", **keys: object) -> str:
    """A [[tier]] of a bucket."""
    return tier_text(
        name=name, kind="s3", bucket=bucket, prefix=prefix, endpoint=endpoint, region="us-east-1", addressing="path", **keys
    )


def tier_text(**keys: object) -> str:
    """A [[tier]] table."""
    return "[[tier]]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())


def _without_settings(environment: Mapping[str, str]) -> dict[str, str]:
    """Not those for another gateway on this machine: they would override the file, and have its cache or socket used here."""
    return {name: value for name, value in environment.items() if not name.startswith(_SETTINGS)}


class Process(Protocol):
    """What is used of subprocess.Popen."""

    pid: int

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""

    def send_signal(self, sig: int) -> None:
        """Nothing where it has ended."""

    def kill(self) -> None:
        """SIGKILL."""


class Launch(Protocol):
    """Starts `forebay`."""

    def __call__(self, arguments: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Process: ...


def execute(arguments: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Process:
    """`forebay` with `arguments`."""
    return subprocess.Popen([str(FOREBAY), *arguments], stdout=out, stderr=err, env=environment)


@dataclass(frozen=True)
class Command:
    """A `forebay` command under way, and the files that it writes to."""

    arguments: Sequence[str]
    process: Process
    out: IO[bytes]
    err: IO[bytes]

    def finish(self, timeout_s: float) -> subprocess.CompletedProcess[str]:
        """What came of it. Raises subprocess.TimeoutExpired."""
        code = self.process.wait(timeout_s)
        said = [os.pread(each.fileno(), os.fstat(each.fileno()).st_size, 0).decode() for each in (self.out, self.err)]
        return subprocess.CompletedProcess(self.arguments, code, *said)


class GatewayProcess:
    """One gateway below `directory`; `start`, `kill`, `terminate` may alternate."""

    launch: ClassVar[Launch] = staticmethod(execute)

    def __init__(
        self,
        directory: Path,
        node: str,
        tiers: Sequence[str],
        *,
        capacity: str = "2GiB",
        node_keys: str = "",
        cache_keys: str = "",
        environment: Mapping[str, str] | None = None,
        cache: Path | None = None,
    ) -> None:
        self.node = node
        self.directory = directory
        self.cache = cache or directory / f"cache-{node}"
        self.log = directory / f"{node}.log"
        self.socket = directory / f"{node}.sock"
        self.address = f"unix://{self.socket}"
        self.environment = dict(environment or {})
        self.config = directory / f"{node}.toml"
        self.config.write_text(
            f'[node]\nid = "{node}"\nlisten = ["{self.address}"]\nruntime_dir = "{directory}/run-{node}"\n{node_keys}\n'
            f'[cache]\npath = "{self.cache}"\ncapacity = "{capacity}"\n{cache_keys}\n' + "\n".join(tiers)
        )
        self.process: Process | None = None

    def start(self, *, failpoints: str = "", ready: bool = True) -> "GatewayProcess":
        """Start, and wait until it answers."""
        environment = {**_without_settings(os.environ), **self.environment}
        if failpoints:
            environment["FOREBAY_FAILPOINTS"] = failpoints
        with self.log.open("ab") as log:
            self.process = self.launch(["serve", "--config", str(self.config)], environment, log, log)
        if ready:
            self.wait_ready()
        return self

    def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Until it answers; raises with the end of its log when it ends before that."""
        deadline_s = time.monotonic() + timeout_s
        with grpc.insecure_channel(f"unix:{self.socket}", options=_TRY_OFTEN) as channel:
            stub = gateway_pb2_grpc.GatewayStub(channel)
            while True:
                try:
                    stub.GetPressure(gateway_pb2.GetPressureRequest(), timeout=5, wait_for_ready=False)
                    return
                except grpc.RpcError:
                    assert self.process is not None
                    if self.process.poll() is not None or time.monotonic() > deadline_s:
                        raise RuntimeError(f"gateway {self.node} did not start:\n{self.tail()}") from None
                    time.sleep(0.05)

    def tail(self, characters: int = 3000) -> str:
        """The end of its log."""
        return self.log.read_text(errors="replace")[-characters:]

    @property
    def pid(self) -> int:
        """Of the running process."""
        assert self.process is not None
        return self.process.pid

    def wait_exit(self, timeout_s: float = 30.0) -> int:
        """Until it ends by itself; its exit code."""
        assert self.process is not None
        code = self.process.wait(timeout_s)
        self.process = None
        return code

    def kill(self) -> None:
        """SIGKILL: no code of it runs any more."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)
        self.process = None

    def terminate(self, timeout_s: float = 40.0) -> int:
        """SIGTERM, an ordered end; returns the exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        return self.wait_exit(timeout_s)

    def wipe(self) -> None:
        """The node's disk is lost."""
        shutil.rmtree(self.cache)

    def status(self) -> dict[str, Any]:
        """`forebay status --json`."""
        result = self.cli("status", "--json")
        answer: dict[str, Any] = json.loads(result.stdout)
        return answer

    def cli(self, *arguments: str, check: bool = True, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
        """The command line against this gateway."""
        with self.begun(*arguments) as command:
            result = command.finish(timeout_s)
        if check and result.returncode:
            raise AssertionError(f"forebay {' '.join(arguments)} -> {result.returncode}: {result.stderr}")
        return result

    @contextlib.contextmanager
    def begun(self, *arguments: str) -> Iterator[Command]:
        """A command under way against this gateway; it has ended when the block is left."""
        environment = {**_without_settings(os.environ), **self.environment, "FOREBAY_ADDRESS": self.address}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            command = Command(arguments, self.launch(arguments, environment, out, err), out, err)
            try:
                yield command
            finally:
                command.process.kill()
                command.process.wait()

    def __enter__(self) -> "GatewayProcess":
        try:
            return self.start()
        except BaseException:  # Ctrl-C too: it must not stay behind half started
            self.close()
            raise

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End it, whatever it does."""
        if self.process is None:
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.terminate(20.0)
            return
        self.kill()
