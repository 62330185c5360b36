"""save_dir and restore_dir."""

import os
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import forebay
from base.ledger import Ledger
from forebay import Client, cancel
from forebay.directories import in_parallel
from forebay.testing import MemoryGateway


def _tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.fixture
def source(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    (root / "layers/deep").mkdir(parents=True)
    (root / "model.bin").write_bytes(os.urandom((5 << 20) + 3))
    (root / "layers/second.bin").write_bytes(os.urandom(2 << 20))
    (root / "empty").write_bytes(b"")
    for number in range(30):
        (root / f"layers/deep/{number}").write_bytes(os.urandom(number * 100))
    (root / ".metadata").write_bytes(b"DCP")
    (root / "link").symlink_to("model.bin")
    return root


def test_a_directory_comes_back(client: Client, source: Path, tmp_path: Path) -> None:
    saved = client.save_dir(source, "r", 3, metadata={"k": 1}, wait="pfs", timeout=60)
    assert (saved.shards, saved.level, saved.checkpoint_complete) == (35, "pfs", True)
    for step, durable in ((3, False), ("latest", True)):
        target = tmp_path / f"out-{step}"
        with Ledger(tmp_path).watching() as ledger:
            restored = client.restore_dir("r", step, target, durable=durable)
        assert ledger.problems() == [] or not durable
        assert _tree(target) == _tree(source)
        assert (restored.step, restored.shards, restored.size) == (3, 35, saved.size)
    assert client.restore_dir("r", 3, tmp_path / "pfs", source="pfs", streams=1).shards == 35
    assert _tree(tmp_path / "pfs") == _tree(source)


def test_files_of_the_target_are_replaced_and_foreign_ones_stay(memory_client: Client, source: Path, tmp_path: Path) -> None:
    memory_client.save_dir(source, "r", 3)
    target = tmp_path / "out"
    target.mkdir()
    (target / "model.bin").write_bytes(b"old")
    (target / "mine").write_bytes(b"mine")
    outside = tmp_path / "outside"
    outside.write_bytes(b"outside")
    (target / "empty").symlink_to(outside)  # replaced, never written through
    memory_client.restore_dir("r", 3, target)
    assert _tree(target) == _tree(source) | {"mine": b"mine"}
    assert outside.read_bytes() == b"outside" and not (target / "empty").is_symlink()


@pytest.mark.parametrize("kind", ["inside", "outside", "file"])
def test_no_link_is_followed_inside_the_target(memory_client: Client, source: Path, tmp_path: Path, kind: str) -> None:
    memory_client.save_dir(source, "r", 3)
    target, outside = tmp_path / "out", tmp_path / "elsewhere"
    target.mkdir()
    outside.mkdir()
    if kind == "file":
        (target / "layers").write_bytes(b"a file")
    else:
        (target / "real").mkdir()
        (target / "layers").symlink_to(outside if kind == "outside" else "real")
    before = _tree(target)
    with pytest.raises(forebay.InvalidArgument, match="'layers'"):
        memory_client.restore_dir("r", 3, target)
    assert _tree(target) == before and list(outside.iterdir()) == []


def test_the_target_itself_may_be_a_link(memory_client: Client, source: Path, tmp_path: Path) -> None:
    memory_client.save_dir(source, "r", 3)
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    memory_client.restore_dir("r", 3, tmp_path / "out")
    assert _tree(tmp_path / "real") == _tree(source)


@pytest.mark.parametrize("method", ["damaged", "away", "collision"])
def test_a_failed_restore_leaves_what_was_there(memory: MemoryGateway, source: Path, tmp_path: Path, method: str) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "model.bin").write_bytes(b"old")
    with Client(memory.address, retry_timeout=0.2) as client:
        client.save_dir(source, "r", 3)
        if method == "damaged":
            memory.damage_stored("r", 3, "layers/deep/29")
        elif method == "away":
            memory.fail("ReadShard", forebay.Unavailable("gone"), times=10_000)
        else:
            (target / "model.bin").unlink()
            (target / "model.bin").mkdir()
        with pytest.raises(forebay.ForebayError, match="restoring '") as caught:
            client.restore_dir("r", 3, target)
    expected = {"damaged": forebay.Corrupt, "away": forebay.Unavailable, "collision": forebay.InvalidArgument}[method]
    assert type(caught.value) is expected
    left = {path.name for path in target.rglob("*")}
    assert left == {"model.bin"}


def test_a_full_disk_is_told(memory_client: Client, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import errno

    memory_client.save_dir(source, "r", 3)

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("forebay.lanes.fd_read.os.pwrite", full)
    with pytest.raises(forebay.ForebayError, match=r"restoring '.*No space left"):
        memory_client.restore_dir("r", 3, tmp_path / "out")
    assert list((tmp_path / "out").rglob("*")) == []


def test_what_cannot_be_saved_is_named_before_anything_is_sent(
    memory: MemoryGateway, memory_client: Client, source: Path, tmp_path: Path
) -> None:
    (tmp_path / "secret").write_bytes(b"x")
    made = {
        "outside": lambda path: path.symlink_to(tmp_path / "secret"),
        "dangling": lambda path: path.symlink_to("nothing"),
        "to-directory": lambda path: path.symlink_to("layers"),
        "loop": lambda path: path.symlink_to("loop"),
        "fifo": os.mkfifo,
        ".forebay-x": lambda path: path.write_bytes(b"x"),
        "new\nline": lambda path: path.write_bytes(b"x"),
    }
    for name, make in made.items():
        path = source / "layers" / name
        make(path)
        with pytest.raises(forebay.ForebayError) as caught:
            memory_client.save_dir(source, "r", 3)
        assert name.split("\n")[0] in caught.value.message, name
        path.unlink()
    bad = os.fsencode(source) + b"/\xff"
    with open(bad, "wb"):
        pass
    with pytest.raises(forebay.InvalidArgument, match="UTF-8"):
        memory_client.save_dir(source, "r", 3)
    os.unlink(bad)
    with socket.socket(socket.AF_UNIX) as server:
        here = os.getcwd()
        os.chdir(source)
        try:
            server.bind("sock")
        finally:
            os.chdir(here)
        with pytest.raises(forebay.InvalidArgument, match="sock: not a regular file"):
            memory_client.save_dir(source, "r", 3)
        (source / "sock").unlink()
    for path in (tmp_path / "nowhere", source / "model.bin"):
        with pytest.raises(forebay.InvalidArgument, match="not a directory"):
            memory_client.save_dir(path, "r", 3)
    (tmp_path / "void/void").mkdir(parents=True)
    with pytest.raises(forebay.InvalidArgument, match="no files"):
        memory_client.save_dir(tmp_path / "void", "r", 3)
    assert memory.calls == []


def test_a_shard_below_another_shard_cannot_be_files(client: Client) -> None:
    with client.checkpoint("r", 1) as ckpt:
        ckpt.put_many({"a": b"x", "a/b": b"y"})
        with pytest.raises(forebay.InvalidArgument, match="'a' and 'a/b' cannot both be files"):
            ckpt.commit()
    with pytest.raises(forebay.NotFound):
        client.describe("r", 1)


def test_bad_arguments(memory_client: Client, tmp_path: Path) -> None:
    for step in ("7x", "newest", None, 1.5):
        with pytest.raises(forebay.InvalidArgument):
            memory_client.restore_dir("r", step, tmp_path / "out")  # type: ignore[arg-type]
    with pytest.raises(forebay.NotFound):
        memory_client.restore_dir("r", "latest", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_interrupt_while_workers_start_ends_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it comes: a pool that is left waits for its workers, and these wait for as long as their operation takes."""
    begun, ended = threading.Event(), threading.Event()
    submit, submitted = ThreadPoolExecutor.submit, 0

    def act(_: int) -> None:
        begun.set()
        try:
            cancel.sleep(3600)
        finally:
            ended.set()

    def interrupted(pool: ThreadPoolExecutor, work: Any, *arguments: Any) -> Future[Any]:
        nonlocal submitted
        submitted += 1
        if submitted == 2:
            assert begun.wait(20)
            raise KeyboardInterrupt
        return submit(pool, work, *arguments)

    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_parallel(act, [1, 2, 3], 3)
    assert ended.is_set()


def test_a_signal_that_another_thread_was_given_ends_it_too() -> None:
    """The kernel may choose any thread, and then nothing wakes the main one: it has to look."""
    code = """
import signal, sys, threading, time
from forebay import cancel
from forebay.directories import in_parallel

def waits_for_futures(frame):
    return frame is not None and (frame.f_code.co_filename.endswith("futures/_base.py") or waits_for_futures(frame.f_back))

def act(item):
    while not waits_for_futures(sys._current_frames()[threading.main_thread().ident]):
        time.sleep(0.01)
    signal.pthread_kill(threading.get_ident(), signal.SIGINT)
    try:
        cancel.sleep(20)
        print("slept")
    except cancel.Cancelled:
        print("ended")

signal.signal(signal.SIGINT, signal.default_int_handler)
try:
    in_parallel(act, [1], 1)
except KeyboardInterrupt:
    print("interrupted")
"""
    ran = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert ran.stdout == "ended\ninterrupted\n"
