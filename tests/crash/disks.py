"""Disks that fail: a file system in a file that can lose power, calls that strace makes fail, a sync that does nothing.

All need rights or tools that a machine may lack; what cannot be had skips the test and says why. Whatever was mounted or
started is unmounted and ended by close(), also after a failure.
"""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import signal
import struct
import subprocess
import time
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType

import psutil
import pytest

from crash.kit import NODE, RUN, Trainer, until
from forebay.demo.gateways import FOREBAY, GatewayProcess, posix_tier

SHUTDOWN = 0x8004587D  # EXT4_IOC_SHUTDOWN and XFS_IOC_GOINGDOWN: _IOR('X', 125, __u32)
NO_LOG_FLUSH = 2
MIB = 1 << 20
# ext4 commits its journal by itself every 5 s, which would hide a sync that is missing.
MKFS = {"ext4": (["mkfs.ext4", "-q", "-F"], "noatime,commit=300"), "xfs": (["mkfs.xfs", "-q", "-f"], "noatime")}

NO_SYNC = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <fcntl.h>
#include <stdarg.h>

static int dropped(const char *what) {
    const char *set = getenv("NO_SYNC");
    while (set && *set) {
        const char *a = set, *b = what;
        while (*b && *a == *b) { a++; b++; }
        if (!*b && (*a == ',' || !*a)) return 1;
        while (*set && *set != ',') set++;
        if (*set) set++;
    }
    return 0;
}

int fsync(int fd) {
    struct stat st;
    if (dropped(fstat(fd, &st) == 0 && S_ISDIR(st.st_mode) ? "directories" : "files")) return 0;
    return ((int (*)(int))dlsym(RTLD_NEXT, "fsync"))(fd);
}

int fdatasync(int fd) {
    if (dropped("catalog")) return 0;
    return ((int (*)(int))dlsym(RTLD_NEXT, "fdatasync"))(fd);
}

static int plain(int flags) { return dropped("catalog") ? flags & ~(O_DSYNC | O_SYNC) : flags; }

int open(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    return ((int (*)(const char *, int, int))dlsym(RTLD_NEXT, "open"))(path, plain(flags), mode);
}

int open64(const char *path, int flags, ...) {
    va_list rest;
    va_start(rest, flags);
    int mode = va_arg(rest, int);
    va_end(rest);
    return ((int (*)(const char *, int, int))dlsym(RTLD_NEXT, "open64"))(path, plain(flags), mode);
}
"""


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def need(tool: str) -> str:
    """The tool's path; skips the test where there is none."""
    found = shutil.which(tool)
    if found is None:
        pytest.skip(f"needs {tool}")
    return found


class Mounted:
    """A file system of the test's own at `path`. Skips the test where mounting is not permitted."""

    def __init__(self, path: Path, *arguments: str) -> None:
        self.path = path
        self._arguments = arguments
        path.mkdir(exist_ok=True)
        made = run("mount", *arguments, str(path))
        if made.returncode:
            pytest.skip(f"needs the right to mount: {made.stderr.strip()}")

    def mount(self) -> None:
        made = run("mount", *self._arguments, str(self.path))
        assert made.returncode == 0, made.stderr

    def unmount(self) -> None:
        """Once nobody uses it any more; a loop device goes with it."""
        until(lambda: run("umount", str(self.path)).returncode == 0, f"{self.path} is unmounted", 20.0, 0.1)

    def close(self) -> None:
        if self.path.is_mount():
            try:
                self.unmount()
            except AssertionError:
                run("umount", "--lazy", str(self.path))
                raise

    def free(self) -> int:
        stat = os.statvfs(self.path)
        return stat.f_bavail * stat.f_frsize


class LoopDisk(Mounted):
    """A disk in a file: `lose_power` drops what was not synced, as far as the file system is concerned."""

    def __init__(self, directory: Path, kind: str, size: int, *format_options: str) -> None:
        self.image = directory / "image"
        with self.image.open("wb") as file:
            file.truncate(size)
        command, options = MKFS[kind]
        need(command[0])
        made = run(*command, *format_options, str(self.image))
        assert made.returncode == 0, made.stderr
        super().__init__(directory / "disk", "-o", f"loop,{options}", str(self.image))

    def remount(self, how: str) -> None:
        """ "ro" or "rw"; nobody has a file of it open for writing."""
        made = run("mount", "-o", f"remount,{how}", str(self.path))
        assert made.returncode == 0, made.stderr

    def mount_anew(self) -> None:
        """After lose_power() and unmount(). A mount namespace that another test made meanwhile may hold the dead file system
        for a while, and then it is this one that is mounted again."""
        deadline_s = time.monotonic() + 60
        while True:
            self.mount()
            try:
                (self.path / "alive").touch()
                (self.path / "alive").unlink()
                return
            except OSError:
                assert time.monotonic() < deadline_s, "somebody holds the file system that lost its power"
                self.unmount()
                time.sleep(0.2)

    def lose_power(self) -> None:
        """From this moment nothing reaches the disk, not even the journal's last entries."""
        descriptor = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.ioctl(descriptor, SHUTDOWN, struct.pack("I", NO_LOG_FLUSH))
        except OSError as error:
            if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP, errno.EPERM):
                pytest.skip(f"needs the shutdown ioctl of the file system: {error}")
            raise
        finally:
            os.close(descriptor)


class Filler:
    """A file of somebody else that takes the disk's space."""

    def __init__(self, disk: Mounted) -> None:
        self._disk = disk
        self._path = disk.path / "of-somebody-else"

    def leave(self, free: int) -> None:
        """Grow or shrink until about `free` bytes are left."""
        with self._path.open("ab") as file:
            size = file.tell()
            wanted = max(0, size + self._disk.free() - free)
            if wanted < size:
                file.truncate(wanted)
            elif wanted > size:
                with contextlib.suppress(OSError):
                    os.posix_fallocate(file.fileno(), size, wanted - size)

    def go(self) -> None:
        self._path.unlink(missing_ok=True)


class DiskBench(Trainer):
    """A gateway with its cache on `disk`; its tier, a directory, lies elsewhere unless `tier` says so."""

    def __init__(
        self, directory: Path, disk: Path, *, tier: Path | None = None, capacity: str = "64MiB", cache_keys: str = ""
    ) -> None:
        pfs = tier or directory / "pfs"
        pfs.mkdir(exist_ok=True)
        gateway = GatewayProcess(
            directory,
            NODE,
            [posix_tier(pfs)],
            capacity=capacity,
            cache_keys=f'chunk_size = "1MiB"\ncatalog_reserve = "1MiB"\n{cache_keys}',
            cache=disk / "cache",
        )
        super().__init__(gateway, ("pfs",), pfs)

    def check_settled(self, steps: Iterable[int]) -> None:
        """Drained, bit-exact at both levels; then an ordered end, and nothing on the disk that the catalog does not know, and
        nothing on the tier that no checkpoint owns."""
        steps = set(steps)
        with self.client() as client:
            for step in sorted(steps):
                client.wait(RUN, step, "pfs", timeout=60)
                for source in ("pfs", "auto"):
                    self.compare(client, step, source)
            self.check_queue_empty(client)
            self.await_deletions(steps)
        assert self.gateway.terminate() == 0
        self.check_disk()
        self.check_tiers(steps)

    def kill(self) -> None:
        """SIGKILL, and wait until its movers have gone as well: they have files open."""
        assert self.gateway.process is not None
        movers = psutil.Process(self.gateway.pid).children() if self.gateway.process.poll() is None else []
        self.gateway.kill()
        psutil.wait_procs(movers, 20)


class NoSync:
    """Makes a gateway whose syncs do nothing: of "files", "directories", "catalog". A switch of tests only."""

    def __init__(self, directory: Path) -> None:
        need("cc")
        source, self.library = directory / "nosync.c", directory / "nosync.so"
        source.write_text(NO_SYNC)
        made = run("cc", "-shared", "-fPIC", "-O1", "-w", "-o", str(self.library), str(source), "-ldl")
        assert made.returncode == 0, made.stderr

    def environment(self, *what: str) -> dict[str, str]:
        return {"LD_PRELOAD": str(self.library), "NO_SYNC": ",".join(what)}


class Faults:
    """While the block runs, `calls` of the process, and of `others` such as its movers, fail with `error`: at the `when`-th
    call of each thread ("3", "3+").

    Only calls on `paths` count, where there are any. `seen` afterwards holds what strace wrote: one line a call.
    """

    def __init__(
        self, pid: int, calls: str, error: str, when: str, paths: Iterable[Path], directory: Path, *others: int
    ) -> None:
        self._output = directory / "strace.out"
        arguments = [need("strace"), "-f", "-y", "-e", f"trace={calls}", "-o", str(self._output)]
        if error:
            arguments += ["-e", f"inject={calls}:error={error}:when={when}"]
        for path in paths:
            arguments += ["-P", str(path)]
        for each in (pid, *others):
            arguments += ["-p", str(each)]
        self._command = arguments
        self._pids = (pid, *others)
        self.seen: list[str] = []

    def __enter__(self) -> "Faults":
        self._messages = self._output.with_suffix(".err")
        with self._messages.open("wb") as messages:
            self._strace = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stderr=messages)
        until(self._attached, "strace is attached", 15.0, 0.02)
        return self

    def _attached(self) -> bool:
        text = self._messages.read_text(errors="replace")
        if self._strace.poll() is not None:
            if "Operation not permitted" in text:
                pytest.skip(f"needs the right to trace: {text.strip()}")
            raise AssertionError(text)
        return all(f"Process {pid} attached" in text for pid in self._pids)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._strace.send_signal(signal.SIGTERM)  # detaches
        try:
            self._strace.wait(20)
        except subprocess.TimeoutExpired:
            self._strace.kill()
            self._strace.wait()
        self.seen = self._output.read_text(errors="replace").splitlines()

    @property
    def injected(self) -> int:
        """How many calls failed by the test's will; also while the block runs."""
        return self._output.read_text(errors="replace").count("(INJECTED)")

    def check_no_second_fsync(self) -> int:
        """After an fsync that failed no other on that file; how many failed. Directories have no pages to lose."""
        failed: set[str] = set()
        for line in self.seen:
            call = re.search(r"\b(?:fsync|fdatasync)\(\d+<([^>]+\.(?:tmp|shard))(?: \(deleted\))?>\)\s+= (-?\d+)", line)
            if call is not None:
                assert call[1] not in failed, f"fsynced again: {line}"
                if call[2] == "-1":
                    failed.add(call[1])
        return len(failed)


def start_with_faults(
    gateway: GatewayProcess, calls: str, error: str, when: str, paths: Iterable[Path], directory: Path
) -> Path:
    """Start a gateway whose calls on `paths` fail from its first moment on; what strace wrote. It may end by itself."""
    output = directory / "strace-start.out"
    command = [need("strace"), "-D", "-f", "-y", "-o", str(output), "-e", f"trace={calls}"]
    command += ["-e", f"inject={calls}:error={error}:when={when}"]
    for path in paths:
        command += ["-P", str(path)]
    with gateway.log.open("ab") as log:
        environment = {**os.environ, **gateway.environment}
        serve = [str(FOREBAY), "serve", "--config", str(gateway.config)]
        gateway.process = subprocess.Popen([*command, *serve], stdout=log, stderr=log, env=environment)
    return output
