"""The pool of host memory, and snapshots into it."""

import gc
import io
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import forebay
from forebay import cancel
from forebay.buffers import PAGE_BYTES, BufferPool, Region, parse_size
from forebay.snapshot import BLOCK_BYTES, Copier, snapshotted
from forebay.sources import source_of
from forebay_wire.checksums import crc32c

MIB = 1 << 20


@pytest.mark.parametrize("text,size", [("0", 0), (" 4096 ", 4096), ("3KiB", 3 << 10), ("16 GiB", 16 << 30), ("1tib", 1 << 40)])
def test_sizes_of_the_environment(text: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert parse_size(text) == size
    monkeypatch.setenv("FOREBAY_BACKGROUND_BYTES", text)
    assert forebay.Client("x:1")._background.size == size


@pytest.mark.parametrize("text", ["x", "-1", "1.5GiB", "4GB", "", "٤"])
def test_bad_sizes(text: str) -> None:
    with pytest.raises(forebay.InvalidArgument, match="FOREBAY_BACKGROUND_BYTES"):
        parse_size(text)
    with pytest.raises(forebay.InvalidArgument, match="background_bytes"):
        forebay.Client("x:1", background_bytes=-1)


def test_regions_begin_at_pages_and_are_used_again() -> None:
    pool = BufferPool(10 * MIB)
    first, second = pool.take(5, 1, "a"), pool.take(MIB + 1, 1, "b")
    assert first.address % PAGE_BYTES == second.address % PAGE_BYTES == 0
    assert len(second.view) == MIB + 1
    first.view[:] = b"12345"
    second.view[:3] = b"abc"
    assert bytes(first.view) == b"12345"
    address = first.address
    first.release()
    first.release()
    again = pool.take(5, 1, "a")
    assert again.address == address and bytes(again.view) == b"12345", "the same memory, warm"
    again.release()
    second.release()
    whole = pool.take(10 * MIB, 1, "whole")
    assert pool.free_bytes == 0
    whole.release()


@settings(max_examples=50)
@given(st.lists(st.one_of(st.integers(1, 40), st.integers(-5, -1)), max_size=40))
def test_the_pool_never_gives_memory_twice_nor_loses_any(steps: list[int]) -> None:
    pool = BufferPool(64 * PAGE_BYTES)
    held: list[tuple[int, Region]] = []
    for number, step in enumerate(steps):
        if step < 0 and held:
            mark, region = held.pop(-step % len(held))
            assert bytes(region.view) == bytes([mark]) * region.size
            region.release()
        elif step > 0:
            try:
                region = pool.take(step * PAGE_BYTES - 7, 0, "x")
            except forebay.DeadlineExceeded:
                continue
            region.view[:] = bytes([number]) * region.size
            held.append((number, region))
    for mark, region in held:
        assert bytes(region.view) == bytes([mark]) * region.size
        region.release()
    assert pool.free_bytes == pool.size and pool.take(pool.size, 0, "whole").size == pool.size


def test_more_than_the_pool_is_an_error_at_once_and_a_full_one_after_its_time() -> None:
    pool = BufferPool(MIB)
    with pytest.raises(forebay.InvalidArgument, match=r"put 'x'.*which have 1048576.*background_bytes=2097154"):
        pool.take(MIB + 1, 100, "put 'x'")
    held = pool.take(MIB, 1, "a")
    with pytest.raises(forebay.DeadlineExceeded, match="no buffer became free"):
        pool.take(1, 0.05, "put 'x'")
    held.release()
    pool.take(MIB, 0, "b")


def test_a_large_one_is_not_starved_by_small_ones_that_came_later() -> None:
    pool = BufferPool(4 * PAGE_BYTES)
    held = [pool.take(PAGE_BYTES, 1, "x") for _ in range(4)]
    order: list[str] = []

    def take(name: str, size: int) -> Region:
        region = pool.take(size, 30, name)
        order.append(name)
        return region

    with ThreadPoolExecutor(2) as threads:
        large = threads.submit(take, "large", 3 * PAGE_BYTES)
        _until(lambda: len(pool._queue) == 1)
        small = threads.submit(take, "small", PAGE_BYTES)
        _until(lambda: len(pool._queue) == 2)
        for region in held:
            region.release()
        large.result(30), small.result(30)
    assert order == ["large", "small"]


def test_who_waits_is_woken_by_the_end_of_his_operation_and_of_the_pool() -> None:
    pool = BufferPool(PAGE_BYTES)
    pool.take(1, 1, "x")
    scope = cancel.Scope()

    def wait_in_scope() -> None:
        with scope.entered():
            pool.take(1, 100, "y")

    with ThreadPoolExecutor(2) as threads:
        cancelled, closed = threads.submit(wait_in_scope), threads.submit(pool.take, 1, 100, "z")
        _until(lambda: len(pool._queue) == 2)
        scope.cancel()
        assert isinstance(cancelled.exception(30), cancel.Cancelled)
        pool.close()
        assert isinstance(closed.exception(30), forebay.InvalidArgument)
    assert not pool._queue


def test_the_memory_goes_with_the_last_region() -> None:
    pool = BufferPool(8 * MIB)
    region = pool.take(MIB, 1, "x")
    mapping = weakref.ref(region._mapping)
    pool.close()
    region.view[:3] = b"abc"
    region.release()
    del region
    gc.collect()
    assert mapping() is None


def test_too_much_memory_is_a_clear_error() -> None:
    with pytest.raises(forebay.InvalidArgument, match=r"background_bytes=.*cannot be mapped"):
        BufferPool(1 << 60).take(1, 1, "x")


def test_faulting_in_makes_memory_resident_and_changes_nothing() -> None:
    pool, copier = BufferPool(64 * MIB), Copier()
    before = _resident_bytes()
    region = pool.take(40 * MIB, 1, "x")
    copier.fault_in(region)
    assert _resident_bytes() - before >= 39 * MIB
    neighbour = pool.take(3, 1, "y")
    neighbour.view[:] = b"abc"
    copier.fault_in(neighbour)
    region.release()
    copier.fault_in(pool.take(40 * MIB, 1, "z"))
    assert bytes(neighbour.view) == b"abc"
    copier.close()


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.parametrize(
    "size", [1, 4095, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 9 * BLOCK_BYTES, 33 * BLOCK_BYTES + 77]
)
@pytest.mark.parametrize("kind", ["bytes", "bytearray", "array", "list", "path", "file"])
def test_a_snapshot_is_bit_exact_and_knows_its_checksums(size: int, kind: str, tmp_path: Path) -> None:
    data = os.urandom(size)
    path = tmp_path / "x"
    path.write_bytes(data)
    source = {
        "bytes": lambda: data,
        "bytearray": lambda: bytearray(data),
        "array": lambda: numpy.frombuffer(data, numpy.uint8),
        "list": lambda: [data[:7], data[7:]],
        "path": lambda: path,
        "file": lambda: io.BytesIO(data),
    }[kind]()
    pool, copier = BufferPool(size + 3 * PAGE_BYTES), Copier()
    copier._more_threads = 2  # whatever this machine has
    region = pool.take(size + 100, 1, "x")
    copy = copier.copy(snapshotted(source, "x"), region, 100, "x")
    path.write_bytes(b"")
    assert bytes(copy.view) == data and copy.size == size
    assert copy.crc32c == crc32c(data)
    for chunk in (64 << 10, BLOCK_BYTES, 4 * BLOCK_BYTES):
        at = 0
        for piece in copy.chunks(chunk):
            known = copy.known_crc32c(at, len(piece))
            assert known == crc32c(data[at : at + chunk]) or (known is None and chunk < BLOCK_BYTES)
            at += len(piece)
        assert at == size
    assert copy.known_crc32c(1, 5) is None
    copier.close()


def test_what_is_checksummed_is_the_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Data that changes during the copy must not become a shard whose checksum never fits."""
    pool, copier, data = BufferPool(MIB), Copier(), bytearray(b"a" * 1000)

    def changed(piece: memoryview) -> int:
        data[:] = b"b" * 1000
        return crc32c(piece)

    monkeypatch.setattr("forebay.snapshot.crc32c", changed)
    copy = copier.copy(source_of(data, "x"), pool.take(1000, 1, "x"), 0, "x")
    assert copy.crc32c == crc32c(bytes(copy.view)) == crc32c(b"a" * 1000)


def test_an_error_on_one_thread_is_raised_after_all_have_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, copier = BufferPool(64 * MIB), Copier()
    copier._more_threads = 3
    region = pool.take(64 * MIB, 1, "x")
    running = threading.Semaphore(0)

    def fail(start: int, stop: int) -> None:
        if start:
            running.release()
            raise MemoryError("mine")
        running.acquire(timeout=30)

    monkeypatch.setattr(region, "fault_in", fail)
    with pytest.raises(MemoryError, match="mine"):
        copier.fault_in(region)
    copier.close()


@pytest.mark.parametrize(
    "data,hint",
    [
        ((piece for piece in [b"x"]), "size of a generator is not known"),
        (numpy.zeros((4, 4))[:, 1], "not C-contiguous"),
        (numpy.array([object()]), "Python objects"),
        (5, "a value of type int"),
        (io.StringIO("x"), "binary mode"),
    ],
)
def test_what_cannot_be_snapshotted(data: object, hint: str) -> None:
    with pytest.raises(forebay.InvalidArgument, match=hint):
        snapshotted(data, "shard 'x'")


def _until(condition) -> None:
    waiting = threading.Event()
    for _ in range(3000):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("never came true")
