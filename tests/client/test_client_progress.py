"""Progress bars: on a terminal after a while, never on a pipe."""

import contextlib
import os
import pty
import subprocess
import sys
import threading
import time

import pytest

from forebay import progress


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> pytest.CaptureFixture[str]:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    return capsys


CODE = """
import time
from forebay import progress
with progress.byte_counter("save [run]/1", 1000) as count:
    count(400)
    time.sleep({sleep_s})
    print("mine", flush=True)
    count(600)
    count(-100)
"""


@pytest.mark.parametrize("sleep_s,shows", [(2.0, True), (0.1, False)])
def test_a_bar_shows_on_a_terminal_after_a_second(sleep_s: float, shows: bool) -> None:
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-c", CODE.format(sleep_s=sleep_s)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=slave, env=environment, text=True, timeout=60, check=True)
    os.close(slave)
    drawn = b""
    with contextlib.suppress(OSError):  # EIO: all that was written has been read
        while piece := os.read(master, 65536):
            drawn += piece
    os.close(master)
    assert done.stdout == "mine\n"
    assert (b"save [run]/1" in drawn and b"kB" in drawn) if shows else drawn == b""


def test_short_work_shows_nothing(terminal: pytest.CaptureFixture[str]) -> None:
    before = threading.active_count()
    with progress.byte_counter("quick", 10) as count:
        count(10)
    deadline_s = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert terminal.readouterr().err == "" and threading.active_count() == before


def test_no_bar_on_a_pipe_or_where_not_wanted(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SHOW_AFTER_S", 0.0)
    with progress.byte_counter("piped", 10) as count:
        count(5)
        time.sleep(0.1)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with progress.byte_counter("unwanted", 10, enabled=False) as count:
        count(5)
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
