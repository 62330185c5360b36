"""Nothing waits for a disk on the event loop: whole histories of a node, with each call to the operating system watched."""

import asyncio
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import pytest

import forebay_gateway
from forebay_gateway.cache.layout import CacheDir
from model.test_node_model import simulate

pytestmark = pytest.mark.expected_logs()  # of crashes

SOURCE = str(Path(forebay_gateway.__file__).parent)
CALLS = (
    *("open", "read", "pread", "preadv", "write", "pwrite", "pwritev", "fsync", "fdatasync", "posix_fallocate", "ftruncate"),
    *("rename", "replace", "link", "symlink", "unlink", "mkdir", "rmdir", "stat", "lstat", "scandir", "listdir", "statvfs"),
)
# The test's own: how the model opens, copies and looks through its node's disk.
THE_TEST_S = {"start", "stop", "close", "_freeze", "crash", "check"}
# One call without I/O on a local file system, and the answer must be of this moment.
ALLOWED = {("statvfs", "free_on_disk")}


def blame(frame: FrameType | None) -> str:
    """The function of the gateway that called; empty where the model asked for it, or none did."""
    function = ""
    while frame is not None:
        code = frame.f_code
        if not function and code.co_filename.startswith(SOURCE):
            function = code.co_name
        if code.co_filename.endswith("model/world.py") and code.co_name in THE_TEST_S:
            return ""
        frame = frame.f_back
    return function


@contextmanager
def watched() -> Iterator[set[tuple[str, str]]]:
    """Calls that are made on a running loop's thread, with the gateway's functions that make them."""
    found: set[tuple[str, str]] = set()

    def watch(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            if asyncio._get_running_loop() is not None and (function := blame(sys._getframe(1))):
                found.add((name, function))
            return real(*arguments, **options)

        return call

    calls = {name: watch(name, getattr(os, name)) for name in CALLS}
    with mock.patch.multiple(os, **calls), mock.patch.object(time, "sleep", watch("sleep", time.sleep)):  # type: ignore[arg-type]
        yield found


@pytest.mark.parametrize("seed", [1, 2])
def test_nothing_waits_for_a_disk_on_the_event_loop(seed: int) -> None:
    with watched() as found:
        asyncio.run(simulate(seed, 80))
    assert found == ALLOWED


def test_what_waits_on_the_loop_is_seen(tmp_path: Path) -> None:
    cache = CacheDir.open(tmp_path / "cache", "a")

    async def on_the_loop() -> None:
        cache.make_session_dir(7)
        await asyncio.to_thread(cache.make_session_dir, 8)

    try:
        with watched() as found:
            asyncio.run(on_the_loop())
    finally:
        cache.release()
    assert {("mkdir", "make_session_dir"), ("fsync", "sync_dir")} <= found
