"""Durable writes: the order of system calls, whole content or the old one after a kill anywhere, nothing left on error."""

import errno
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay_gateway.base import durable, failpoints

OLD, NEW = b"old content", b"new content" * 1000
STRACE = shutil.which("strace")


def run(verb: str, path: Path, points: str = "", prefix: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    imports = "from pathlib import Path; from forebay_gateway.base import durable"
    code = f"{imports}; durable.{verb}(Path({str(path)!r}), {NEW!r}, 'tag')"
    env = {**os.environ, "FOREBAY_FAILPOINTS": points}
    return subprocess.run(
        [*prefix, sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False
    )


def traced(verb: str, path: Path) -> list[str]:
    """The writer's system calls that matter, in order: "fsync temp", "rename", "fsync dir", ..."""
    assert STRACE is not None, "strace is missing; .ci/run installs it"
    calls = "trace=write,fsync,fdatasync,rename,renameat,renameat2,link,linkat,unlink,unlinkat"
    log = path.parent.parent / "strace.log"
    run(verb, path, prefix=(STRACE, "-f", "-y", "-e", calls, "-o", str(log))).check_returncode()
    found = []
    for line in log.read_text().splitlines():
        call = re.search(r"(\w+)\((.*)", line)
        if call is None or str(path.parent) not in line:
            continue
        name, arguments = call.group(1).removesuffix("at2").removesuffix("at"), call.group(2)
        what = "temp" if durable.TEMP_PREFIX in arguments else "dir" if f"<{path.parent}>" in arguments else "file"
        found.append(f"{name} {what}")
    return found


def test_replace_syncs_the_file_before_the_name_and_the_directory_after(tmp_path: Path) -> None:
    path = tmp_path / "d" / "file"
    path.parent.mkdir()
    assert traced("replace_file", path) == ["write temp", "fsync temp", "rename temp", "fsync dir"]
    assert path.read_bytes() == NEW


def test_create_syncs_the_file_before_the_name_and_the_directory_last(tmp_path: Path) -> None:
    path = tmp_path / "d" / "file"
    path.parent.mkdir()
    assert traced("create_file", path) == ["write temp", "fsync temp", "link temp", "unlink temp", "fsync dir"]
    assert path.read_bytes() == NEW


@pytest.mark.parametrize("point", ["durable.before_fsync", "durable.before_rename", "durable.before_dir_fsync"])
def test_a_kill_leaves_the_old_content_or_the_new(tmp_path: Path, point: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    assert run("replace_file", path, f"{point}=kill").returncode == -signal.SIGKILL
    assert path.read_bytes() == (NEW if point == "durable.before_dir_fsync" else OLD)


@pytest.mark.parametrize("point", ["durable.before_fsync", "durable.before_link", "durable.before_dir_fsync"])
def test_a_kill_leaves_no_new_name_or_a_whole_file(tmp_path: Path, point: str) -> None:
    path = tmp_path / "file"
    assert run("create_file", path, f"{point}=kill").returncode == -signal.SIGKILL
    assert (path.read_bytes() if path.exists() else None) == (NEW if point == "durable.before_dir_fsync" else None)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("point", ["durable.before_fsync", "durable.before_rename"])
def test_an_error_goes_up_and_leaves_nothing_behind(tmp_path: Path, point: str, number: int) -> None:
    path = tmp_path / "file"
    path.write_bytes(OLD)
    with failpoints.armed(f"{point}=error:{errno.errorcode[number]}"), pytest.raises(OSError) as caught:
        durable.replace_file(path, NEW, "tag")
    assert caught.value.errno == number
    assert os.listdir(tmp_path) == ["file"]
    assert path.read_bytes() == OLD


def test_an_error_of_the_directory_sync_goes_up(tmp_path: Path) -> None:
    for verb, name in ((durable.replace_file, "a"), (durable.create_file, "b")):
        with failpoints.armed("durable.before_dir_fsync=error:EIO"), pytest.raises(OSError):
            verb(tmp_path / name, NEW, "tag")
        assert not list(tmp_path.glob(f"{durable.TEMP_PREFIX}*"))


def test_create_takes_no_name_that_somebody_has(tmp_path: Path) -> None:
    path = tmp_path / "file"
    durable.create_file(path, OLD, "one")
    with pytest.raises(FileExistsError):
        durable.create_file(path, NEW, "two")
    assert path.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]


def test_replace_onto_a_directory_fails_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError):
        durable.replace_file(tmp_path / "taken", NEW, "tag")
    assert os.listdir(tmp_path) == ["taken"]


def test_make_dirs(tmp_path: Path) -> None:
    deep = tmp_path / "a" / "b" / "c"
    durable.make_dirs(deep, tmp_path)
    durable.make_dirs(deep, tmp_path)
    assert deep.is_dir()
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(NotADirectoryError):
        durable.make_dirs(tmp_path / "file" / "x", tmp_path)
