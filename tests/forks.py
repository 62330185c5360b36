"""Gateways and commands as forks of one process that has loaded their modules already.

Loading them is most of what a short one costs: some 0.4 s of a processor for each gateway, 0.3 s for each command, and the
tests have hundreds of both. A fork is a process like any other: it has an environment, a directory, standard streams and an end
of its own, can be killed, and starts its movers as always. Where something happens while a program is loaded (LD_PRELOAD,
Python's own variables), it is executed as usual.

Owns that one process, and how to ask it. `ForkServer.start` is what `forebay.demo.gateways.execute` is.
"""

import gc
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from forebay.cli import for_grpc
from forebay.demo.gateways import FOREBAY, Process, execute

# Read when they are asked for. Others may matter to the interpreter, to libc or to a library that is loaded.
_READ_LATE = ("FOREBAY_", "AWS_", "XDG_", "HOME", "PYTEST_")
_MESSAGE_MAX = 1 << 20


def _can_wait() -> bool:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (AttributeError, OSError):  # an old kernel, or a sandbox that has no such call
        return False
    return True


_CAN_WAIT = _can_wait()


class Fork:
    """One process, as far as subprocess.Popen would be asked about it. It stays a zombie until it has been waited for, so that
    its id is nobody else's."""

    def __init__(self, server: "ForkServer", pid: int) -> None:
        self._server = server
        self._reaping = threading.Lock()  # a second thread that waits would ask for what is nobody's any more
        self._ended = os.pidfd_open(pid)  # readable once it has
        weakref.finalize(self, os.close, self._ended)
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._look(0.0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        code = self._look(timeout)
        if code is None:
            raise subprocess.TimeoutExpired(str(FOREBAY), timeout or 0.0)
        return code

    def _look(self, timeout_s: float | None) -> int | None:
        if self.returncode is None:
            ready = select.poll()
            ready.register(self._ended, select.POLLIN)
            if not ready.poll(None if timeout_s is None else timeout_s * 1000):
                return None
            with self._reaping:
                if self.returncode is None:
                    self.returncode = os.waitstatus_to_exitcode(self._server.ask(reap=self.pid))
        return self.returncode

    def send_signal(self, sig: int) -> None:
        """Nothing where it has ended."""
        if self.poll() is None:
            os.kill(self.pid, sig)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Started at the first use. Of any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._environment: dict[str, str] = {}

    @property
    def pid(self) -> int | None:
        """Of the process that forks."""
        return None if self._process is None else self._process.pid

    @property
    def descriptor(self) -> int | None:
        """Of the socket to it."""
        return None if self._control is None else self._control.fileno()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str], out: IO[bytes], err: IO[bytes]) -> Process:
        """`forebay` with `arguments`, as a fork where that can be and makes no difference."""
        if not _CAN_WAIT or not self._makes_no_difference(environment):
            return execute(arguments, environment, out, err)
        pid = self.ask(
            [out.fileno(), err.fileno()], arguments=list(arguments), environment=dict(environment), directory=str(Path.cwd())
        )
        return Fork(self, pid)

    def _makes_no_difference(self, environment: Mapping[str, str]) -> bool:
        with self._lock:
            self._begin()  # its environment is what this one's is by then
        other = {name for name, _ in self._environment.items() ^ environment.items()}
        return all(name.startswith(_READ_LATE) for name in other)

    def _begin(self) -> None:
        if self._process is not None:
            return
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._environment = dict(os.environ)
        self._process = subprocess.Popen(
            [sys.executable, __file__, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=for_grpc(self._environment),
        )
        theirs.close()

    def ask(self, descriptors: Sequence[int] = (), **request: Any) -> int:
        """A process id for `arguments`, a wait status for `reap`."""
        with self._lock:
            self._begin()
            assert self._control is not None
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
            answer = self._control.recv(_MESSAGE_MAX)
        if not answer:
            raise RuntimeError("the process that forks has ended")
        return int(answer)

    def close(self) -> None:
        """End it; what it has forked is the caller's."""
        if self._control is not None and self._process is not None:
            self._control.close()
            self._process.wait(30)
        self._process = self._control = None


def _load() -> None:
    """All that a gateway or a command will want."""
    import forebay_gateway.serve
    import forebay_gateway.tiers.s3.tier
    from forebay.cli import app

    assert forebay_gateway.serve is not None
    app.assemble()


def _become(request: dict[str, Any], descriptors: Sequence[int]) -> None:
    """In the fork: what `exec` would have set up."""
    from forebay_gateway.base import failpoints

    for number, descriptor in enumerate(descriptors, start=1):
        os.dup2(descriptor, number)
        os.close(descriptor)
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    failpoints.arm(os.environ.get(failpoints.ENVIRONMENT, ""))
    sys.argv = [str(FOREBAY), *request["arguments"]]


def _serve(control: socket.socket) -> bool:
    """Answer until the other end has gone: False. True: this is a fork, and is to run what sys.argv says."""
    _load()
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, _MESSAGE_MAX, 2)
        if not message:
            return False
        request = json.loads(message)
        if pid := request.get("reap"):
            control.send(str(os.waitpid(pid, 0)[1]).encode())
            continue
        pid = os.fork()
        if not pid:
            control.close()
            _become(request, descriptors)
            return True
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(str(pid).encode())


if __name__ == "__main__":
    sys.path[0] = str(FOREBAY.parent)  # as where it is executed
    if _serve(socket.socket(fileno=int(sys.argv[1]))):
        from forebay.cli import main

        main()
