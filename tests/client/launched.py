"""Scripts that are started as several ranks on one machine, as torchrun would."""

import os
import socket
import subprocess
import sys


def launch(script: str, count: int, *arguments: str) -> list[tuple[int, str, str]]:
    """Run a script as that many ranks; the status, output and errors of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launched = []
    for rank in range(count):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count)}
        environment = {**os.environ, **place, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", script, *arguments]
        launched.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
    try:
        said = [process.communicate(timeout=150) for process in launched]
    finally:
        for process in launched:
            process.kill()
    return [(process.returncode, out, errors) for process, (out, errors) in zip(launched, said, strict=True)]


def ranks(script: str, count: int, *arguments: str) -> list[str]:
    """As launch(), where all go well; what each said."""
    found = launch(script, count, *arguments)
    for status, _, errors in found:
        assert status == 0, errors[-3000:]
    return [out for _, out, _ in found]
