"""fio: what the disk itself gives.

Owns its command lines and reading its figures.
"""

import json
import os
import shutil
import subprocess
from pathlib import Path

from bench.rows import CannotRun, Measured

COMMON = ("--bs=4M", "--direct=1", "--ioengine=libaio", "--iodepth=4", "--output-format=json")


def needs_fio() -> str:
    """The program; raises CannotRun without it."""
    found = shutil.which("fio")
    if found is None:
        raise CannotRun("fio is not installed (Debian: apt-get install fio)")
    return found


def write(path: Path, size: int) -> Measured:
    """Write a new file, end with fsync; the file is gone afterwards."""
    try:
        return _run(path, size, "--rw=write", "--end_fsync=1")
    finally:
        path.unlink(missing_ok=True)


def read(path: Path, size: int) -> Measured:
    """Read a file that is there, unchanged."""
    return _run(path, size, "--rw=read", "--readonly", "--allow_file_create=0")


def _run(path: Path, size: int, *arguments: str) -> Measured:
    os.sync()
    command = [needs_fio(), "--name=bench", f"--filename={path}", f"--size={size}", *COMMON, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, cwd=path.parent)
    if done.returncode:
        raise CannotRun(f"fio failed: {(done.stderr or done.stdout).strip().splitlines()[-1:]}")
    job = json.loads(done.stdout[done.stdout.index("{") :])["jobs"][0]
    moved = sum(job[side]["io_bytes"] for side in ("read", "write"))
    if moved != size:
        raise CannotRun(f"fio moved {moved} bytes of {size}")
    return Measured(job["job_runtime"] / 1000)
