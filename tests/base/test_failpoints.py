"""Failpoints: off by default, counted, parsed at start, and each verb does what it says."""

import errno
import os
import signal
import subprocess
import sys
import time

import pytest

from forebay_gateway.base import failpoints


def test_off_by_default() -> None:
    failpoints.hit("anything")


def test_an_error_comes_once_by_default() -> None:
    with failpoints.armed("here=error:ENOSPC"):
        failpoints.hit("elsewhere")
        with pytest.raises(OSError) as caught:
            failpoints.hit("here")
        assert caught.value.errno == errno.ENOSPC
        failpoints.hit("here")


def test_counts() -> None:
    with failpoints.armed("third=3*error:EIO;every=all*error:EIO"):
        failpoints.hit("third")
        failpoints.hit("third")
        with pytest.raises(OSError):
            failpoints.hit("third")
        failpoints.hit("third")
        for _ in range(3):
            with pytest.raises(OSError):
                failpoints.hit("every")


def test_sleep() -> None:
    with failpoints.armed("nap=sleep:0.05"):
        before_s = time.monotonic()
        failpoints.hit("nap")
        assert time.monotonic() - before_s >= 0.05


def test_armed_points_end_with_the_block_also_on_error() -> None:
    with pytest.raises(KeyError), failpoints.armed("here=error:EIO"):
        raise KeyError
    failpoints.hit("here")


@pytest.mark.parametrize("text", ["x=explode", "x=error:ENOTHING", "x=sleep:soon", "x=two*kill", "x", "x="])
def test_nonsense_fails_at_start(text: str) -> None:
    with pytest.raises((ValueError, AttributeError)), failpoints.armed(text):
        pass
    failpoints.hit("x")


def test_kill_from_the_environment() -> None:
    hits = "failpoints.hit('a'); print('a', flush=True); failpoints.hit('b'); print('b')"
    code = f"from forebay_gateway.base import failpoints; {hits}"
    env = {**os.environ, failpoints.ENVIRONMENT: " b = kill "}
    result = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (-signal.SIGKILL, "a\n")
