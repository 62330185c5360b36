"""Writing a shard: exactly the right bytes and order on disk, or no file at all."""

import asyncio
import errno
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from cache.disk import CHUNK, KEY, SIZES, Rig, file_of, footer_of, open_descriptors, pieces_of, some_bytes
from forebay_gateway.base import failpoints
from forebay_gateway.cache.footer import disk_size, find_footer
from forebay_gateway.cache.io import IoPool
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.cache.writer import ShardWriter
from forebay_gateway.core.errors import AlreadyExists, CacheFull, Corrupt, ForebayError, InvalidArgument, Unavailable
from forebay_gateway.core.records import ShardKey
from forebay_wire.checksums import crc32c

POINTS = [
    "create.before_open",
    "create.before_allocate",
    "write.before_chunk",
    "seal.before_footer",
    "seal.before_fsync",
    "seal.before_rename",
    "seal.before_dir_fsync",
    "seal.done",
]


@pytest.mark.parametrize("announced", [True, False])
@pytest.mark.parametrize("size", SIZES)
async def test_the_file_is_byte_for_byte_right(rig: Rig, size: int, announced: bool) -> None:
    data = some_bytes(size)
    sealed = await rig.put(data, announced=announced)
    path = rig.cache.shard_path(KEY)
    assert path.read_bytes() == file_of(data)
    assert sealed.disk_size == path.stat().st_size == disk_size(size, CHUNK)
    assert (sealed.size, sealed.crc32c) == (size, crc32c(data))
    descriptor = os.open(path, os.O_RDONLY)
    try:
        assert find_footer(descriptor, sealed.disk_size) == (footer_of(data), sealed.chunks)
    finally:
        os.close(descriptor)
    assert rig.files() == [str(path.relative_to(rig.cache.path))]
    rig.cache.unlink(path)
    rig.assert_nothing_left()


async def test_rules_for_chunks(rig: Rig) -> None:
    short, full, long = (memoryview(some_bytes(size)) for size in (10, CHUNK, CHUNK + 1))
    writer = await rig.create(None)
    for wrong in (long, memoryview(b"")):
        with pytest.raises(InvalidArgument, match="length"):
            await writer.write_chunk(crc32c(wrong), wrong)
    await writer.write_chunk(crc32c(full), full)
    await writer.write_chunk(crc32c(short), short)
    assert writer.bytes_received == CHUNK + 10
    with pytest.raises(InvalidArgument, match="after a short one"):
        await writer.write_chunk(crc32c(full), full)
    await writer.discard()
    with pytest.raises(Unavailable):
        await writer.write_chunk(crc32c(full), full)
    with pytest.raises(Unavailable):
        await writer.seal(footer_of(b""), size=0, crc32c=0)
    announced = await rig.create(CHUNK + 5)
    await announced.write_chunk(crc32c(full), full)
    with pytest.raises(InvalidArgument, match="announced"):
        await announced.write_chunk(crc32c(short), short)
    await announced.discard()
    rig.assert_nothing_left()


@pytest.mark.parametrize("at", [0, 1, 2])
async def test_a_wrong_chunk_crc_is_found_before_the_file_counts(rig: Rig, at: int) -> None:
    data = some_bytes(3 * CHUNK)
    writer = await rig.create(len(data))
    with pytest.raises(Corrupt, match=f"offset={at * CHUNK} "):
        for index, piece in enumerate(pieces_of(data)):
            await writer.write_chunk(crc32c(piece) ^ (index == at), piece)
        await writer.seal(footer_of(data), size=len(data), crc32c=crc32c(data))
    await writer.discard()
    rig.assert_nothing_left()


@pytest.mark.parametrize(
    ("size", "crc", "announced", "expected"),
    [
        (2 * CHUNK, 1, None, Corrupt),
        (2 * CHUNK - 1, 0, None, InvalidArgument),
        (3 * CHUNK, 0, None, InvalidArgument),
        (2 * CHUNK, 0, 3 * CHUNK, InvalidArgument),
    ],
)
async def test_a_wrong_end_leaves_no_file(
    rig: Rig, size: int, crc: int, announced: int | None, expected: type[ForebayError]
) -> None:
    data = some_bytes(2 * CHUNK)
    writer = await rig.create(announced)
    for piece in pieces_of(data):
        await writer.write_chunk(crc32c(piece), piece)
    with pytest.raises(expected):
        await writer.seal(footer_of(data), size=size, crc32c=crc32c(data) ^ crc)
    rig.assert_nothing_left()  # without discard()
    await writer.discard()


@pytest.mark.parametrize("number", ["EIO", "ENOSPC", "EDQUOT"])
@pytest.mark.parametrize("point", POINTS)
async def test_an_error_at_any_step_leaves_no_file(rig: Rig, point: str, number: str) -> None:
    expected = Unavailable if number == "EIO" else CacheFull
    with failpoints.armed(f"{point}=error:{number}"), pytest.raises(expected) as caught:
        await rig.put(some_bytes(3 * CHUNK + 1))
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == getattr(errno, number)
    assert caught.value.retry_after_s == 5
    # put() has no discard of its own: only a failed create() or seal() cleans up alone
    if point == "write.before_chunk":
        assert len(rig.files()) <= 1
    else:
        rig.assert_nothing_left()


@pytest.mark.parametrize("count", [1, 2, 3, 4])
async def test_a_failed_write_is_never_lost(rig: Rig, count: int) -> None:
    """Whichever chunk it is, and however late it fails: seal never succeeds."""
    data = some_bytes(4 * CHUNK)
    writer = await rig.create(len(data), window=8)
    with failpoints.armed(f"write.before_chunk={count}*error:EIO"), pytest.raises(Unavailable, match="EIO"):
        for piece in pieces_of(data):
            await writer.write_chunk(crc32c(piece), piece)
        await writer.seal(footer_of(data), size=len(data), crc32c=crc32c(data))
    await writer.discard()
    rig.assert_nothing_left()


async def test_a_write_that_fails_just_before_seal_looks(rig: Rig) -> None:
    """The future is done, its callbacks have not run: the failure must be seen all the same."""
    data = some_bytes(CHUNK)
    writer = await rig.create(len(data))
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    await writer.write_chunk(crc32c(data), memoryview(data))
    await asyncio.wait(writer._under_way)
    writer._under_way = {failed}
    failed.set_exception(Unavailable("late"))
    with pytest.raises(Unavailable, match="late"):
        await writer.seal(footer_of(data), size=len(data), crc32c=crc32c(data))
    rig.assert_nothing_left()


async def test_fsync_is_never_repeated(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(name)
        if name.endswith(".tmp"):
            raise OSError(errno.EIO, "once")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(Unavailable, match="EIO"):
        await rig.put(some_bytes(CHUNK))
    assert [name for name in synced if name.endswith(".tmp")] == [str(rig.cache.incoming_path(KEY.shard_id))]
    rig.assert_nothing_left()


async def test_the_window_bounds_what_is_under_way(rig: Rig) -> None:
    data = some_bytes(12 * CHUNK)
    writer = await rig.create(len(data), window=3)
    most = 0
    with failpoints.armed("write.before_chunk=all*sleep:0.02"):
        for piece in pieces_of(data):
            await writer.write_chunk(crc32c(piece), piece)
            most = max(most, rig.pool.buffers - rig.pool.free_buffers)
        await writer.seal(footer_of(data), size=len(data), crc32c=crc32c(data))
    assert most == 3


async def test_discard_is_idempotent_and_leaves_a_sealed_file_alone(rig: Rig) -> None:
    writer = await rig.create(CHUNK)
    await writer.discard()
    await writer.discard()
    rig.assert_nothing_left()
    data = some_bytes(CHUNK)
    writer = await rig.create(CHUNK)
    await writer.write_chunk(crc32c(data), memoryview(data))
    await writer.seal(footer_of(data), size=CHUNK, crc32c=crc32c(data))
    await writer.discard()
    assert rig.cache.shard_path(KEY).read_bytes() == file_of(data)


@pytest.mark.parametrize("point", POINTS)
async def test_cancelled_at_any_step_leaves_no_file(rig: Rig, point: str) -> None:
    async def put() -> None:
        data = some_bytes(3 * CHUNK)
        writer = await rig.create(len(data), window=1)
        try:
            for piece in pieces_of(data):
                await writer.write_chunk(crc32c(piece), piece)
            await writer.seal(footer_of(data), size=len(data), crc32c=crc32c(data))
        except BaseException:
            await writer.discard()
            raise

    with failpoints.armed(f"{point}=sleep:0.15"):
        task = asyncio.create_task(put())
        await asyncio.sleep(0.08)
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0.01)
        with pytest.raises(asyncio.CancelledError):
            await task
    await asyncio.sleep(0)
    rig.assert_nothing_left()


async def test_cancelled_at_random_moments(rig: Rig) -> None:
    """Either the writer had sealed, and the file is whole, or nothing is there."""
    choose = random.Random(3)
    data = some_bytes(4 * CHUNK)
    finished = 0
    for number in range(60):
        task = asyncio.create_task(rig.put(data, ShardKey(1, number)))
        await asyncio.sleep(choose.random() * 0.02)
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        path = rig.cache.shard_path(ShardKey(1, number))
        if isinstance(outcome, BaseException):
            assert not path.exists()
        else:
            finished += 1
            assert path.read_bytes() == file_of(data)
    await asyncio.sleep(0)
    assert rig.pool.free_buffers == rig.pool.buffers
    assert finished < 60


async def test_no_descriptor_leaks(rig: Rig) -> None:
    before = open_descriptors()
    for number in range(30):
        writer = await rig.create(CHUNK, ShardKey(1, number))
        await writer.discard()
        await rig.put(some_bytes(CHUNK), ShardKey(1, number))
    assert open_descriptors() == before


async def test_a_left_over_incoming_file_is_not_overwritten(rig: Rig) -> None:
    path = rig.cache.incoming_path(KEY.shard_id)
    path.write_text("of another process")
    with pytest.raises(AlreadyExists):
        await rig.create(CHUNK)
    assert path.read_text() == "of another process"


async def test_a_session_directory_dropped_meanwhile_is_made_again(rig: Rig) -> None:
    attached = CacheDir.attach(rig.cache.path)
    attached.direct_io = rig.cache.direct_io
    attached.make_session_dir(KEY.session_id)
    rig.cache.drop_session_dir(KEY.session_id)
    data = some_bytes(5)
    await Rig(attached, rig.pool).put(data)
    assert rig.cache.shard_path(KEY).read_bytes() == file_of(data)


async def test_chunks_larger_than_the_pools_buffers(rig: Rig) -> None:
    data = some_bytes(5 * CHUNK)
    writer = await ShardWriter.create(rig.cache, rig.pool, KEY, size=len(data), chunk_size=4 * CHUNK)
    for piece in pieces_of(data, 4 * CHUNK):
        await writer.write_chunk(crc32c(piece), piece)
    await writer.seal(footer_of(data), size=len(data), crc32c=crc32c(data))
    assert rig.cache.shard_path(KEY).read_bytes() == file_of(data, 4 * CHUNK)


async def test_many_writers_share_a_small_pool(rig: Rig) -> None:
    datas = [some_bytes(6 * CHUNK + number, number) for number in range(20)]
    await asyncio.gather(*(rig.put(data, ShardKey(1, number)) for number, data in enumerate(datas)))
    for number, data in enumerate(datas):
        assert rig.cache.shard_path(ShardKey(1, number)).read_bytes() == file_of(data)
    assert rig.pool.free_buffers == rig.pool.buffers


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="needs a tmpfs")
async def test_tmpfs(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
        cache, pool = CacheDir.open(Path(directory), "n"), IoPool(buffer_size=CHUNK)
        assert cache.file_system == "tmpfs"
        rig = Rig(cache, pool)
        data = some_bytes(3 * CHUNK + 7)
        sealed = await rig.put(data)
        reader = await rig.open(sealed)
        assert b"".join([bytes(view) async for _, view in reader.chunks_from(0, 4)]) == data
        await reader.close()
        with pytest.raises(CacheFull):  # the whole size is allocated before the first byte is taken
            await rig.create(1 << 50, ShardKey(1, 99))
        assert not cache.incoming_path(99).exists()
        pool.close()
        cache.release()


SCRIPT = """
import asyncio, sys
from pathlib import Path
from cache.disk import CHUNK, Rig, some_bytes
from forebay_gateway.cache.io import IoPool
from forebay_gateway.cache.layout import CacheDir

async def main():
    cache, pool = CacheDir.open(Path(sys.argv[1]), "n"), IoPool(buffer_size=CHUNK)
    await Rig(cache, pool).put(some_bytes(9 * CHUNK + 5), announced=sys.argv[2] == "True")
    pool.close()

asyncio.run(main())
"""


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
@pytest.mark.parametrize("announced", [True, False])
def test_order_of_system_calls(tmp_path: Path, announced: bool) -> None:
    trace, cache = tmp_path / "trace", tmp_path / "cache"
    calls = "trace=openat,fallocate,fsync,fdatasync,rename,renameat,renameat2,pwrite64,ftruncate"
    tests = str(Path(__file__).parent.parent)
    subprocess.run(
        ["strace", "-f", "-y", "-o", trace, "-e", calls, sys.executable, "-c", SCRIPT, cache, str(announced)],
        check=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), tests)))},
    )
    lines = trace.read_text().splitlines()
    incoming, sealed = str(cache / "incoming" / f"{0x2B:016x}.tmp"), str(cache / "data" / f"{0x1A:016x}")

    def places(*parts: str) -> list[int]:
        return [at for at, line in enumerate(lines) if all(part in line for part in parts)]

    (opened,) = places("openat(", incoming)
    assert "O_EXCL" in lines[opened]
    assert ("O_DIRECT" in lines[opened]) == bool(places("openat(", "forebay-tmp-probe", "O_DIRECT"))
    assert bool(places("fallocate(", incoming)) == announced
    writes = places("pwrite64(", incoming)
    (synced,) = places("fsync(", f"<{incoming}>")
    (renamed,) = places("rename", f'"{incoming}"', f"{sealed}/{0x2B:016x}.shard")
    (dir_synced,) = places("fsync(", f"<{sealed}>")
    parent_synced = places("fsync(", f"<{cache / 'data'}>")
    assert len(writes) >= 11  # ten chunks and the tail
    assert opened < min(writes)
    assert max(writes) < synced < parent_synced[-1] < renamed < dir_synced
    assert not any(at > synced for at in places("ftruncate(", incoming))
