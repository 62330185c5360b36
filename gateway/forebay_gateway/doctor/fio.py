"""The same write by fio, where it is installed: a figure that others can repeat.

Owns fio's arguments, its process and its answer.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

from forebay_gateway.doctor.throughput import BLOCK_BYTES
from forebay_gateway.doctor.watch import POLL_S, Stopped, Watch


class FioFailed(Exception):
    """It is there, but did not measure; the text says why."""


def find() -> str:
    """Its path; empty where it is not installed."""
    return shutil.which("fio") or ""


def write(program: str, path: Path, size: int, watch: Watch) -> float:
    """Bytes a second of a new file written with O_DIRECT, its fsync included. Raises FioFailed, Stopped."""
    command = [
        program,
        "--name=doctor",
        f"--filename={str(path).replace(':', chr(92) + ':')}",  # fio takes a colon for the end of a name
        "--rw=write",
        f"--bs={min(size, BLOCK_BYTES)}",
        f"--size={size}",
        "--direct=1",
        "--ioengine=libaio",
        "--iodepth=4",
        "--end_fsync=1",
        "--thread",
        "--fallocate=none",
        "--output-format=json",
    ]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=path.parent,
        start_new_session=True,  # a Ctrl-C is for us to hand on
    )
    try:
        out, err = _wait(process, watch)
    finally:
        process.kill()
        process.communicate()
    if process.returncode:
        raise FioFailed(" ".join((err or out).split())[:200] or f"exit code {process.returncode}")
    return parse(out)


def _wait(process: "subprocess.Popen[str]", watch: Watch) -> tuple[str, str]:
    written = -1
    while True:
        try:
            return process.communicate(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            if watch.stopped:
                raise Stopped from None
            now = _written(process.pid)
            if now != written:  # a disk that takes nothing more stands still, whatever fio says
                written = now
                watch.tick()


def _written(pid: int) -> int:
    """Bytes that it has sent to a disk so far; -1 where that is not told. Format: proc_pid_io(5)."""
    try:
        text = Path(f"/proc/{pid}/io").read_text(encoding="ascii")
    except OSError:
        return -1
    return int(text.partition("\nwrite_bytes: ")[2].partition("\n")[0] or -1)


def parse(text: str) -> float:
    """Bytes a second of the write job in fio's JSON. Raises FioFailed."""
    try:
        job = json.loads(text[text.index("{") :])["jobs"][0]
        count, runtime_ms, failed = int(job["write"]["io_bytes"]), int(job["write"]["runtime"]), int(job["error"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise FioFailed(f"an answer that is not understood: {error!r}") from error
    if failed:
        raise FioFailed(os.strerror(failed))
    if count <= 0:
        raise FioFailed("nothing was written")
    return count / (max(1, runtime_ms) / 1000)
