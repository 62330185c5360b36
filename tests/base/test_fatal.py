"""The last word of a process that dies of a signal of its own making."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from forebay_gateway.base import fatal

DIES = """
import os, pathlib, signal, sys
from forebay_gateway.base import fatal

path = pathlib.Path(sys.argv[1])
fatal.arm(path)
fatal.disarm(path.with_name("another"))
if sys.argv[2] == "SIGTERM":
    fatal.disarm(path)
os.kill(os.getpid(), getattr(signal, sys.argv[2]))
"""


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGBUS", "SIGABRT", "SIGKILL", "SIGTERM"])
def test_what_a_process_leaves(tmp_path: Path, name: str) -> None:
    note = tmp_path / "FATAL"
    note.write_text("an older one")
    done = subprocess.run([sys.executable, "-c", DIES, str(note), name], timeout=30)
    assert done.returncode == -getattr(signal, name)
    if name in ("SIGKILL", "SIGTERM"):
        assert fatal.left(note) == ""
    else:
        assert "Fatal Python error" in fatal.left(note)
    assert note.exists() == (name != "SIGTERM")


def test_nothing_is_left_where_nothing_died(tmp_path: Path) -> None:
    assert fatal.left(tmp_path / "FATAL") == ""


@pytest.mark.expected_logs("would leave no note")
def test_a_disk_that_takes_no_note_stops_nobody(tmp_path: Path) -> None:
    fatal.arm(tmp_path / "gone" / "FATAL")
    fatal.disarm(tmp_path / "gone" / "FATAL")
