"""The POSIX tier beyond the contract: roots that go away, full and failing disks, leftovers, crashes."""

import asyncio
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.tier_kit import CHUNK, BytesSource, blob, collect
from forebay_gateway.base import durable, failpoints
from forebay_gateway.core.errors import (
    Corrupt,
    ForebayError,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from forebay_gateway.tiers.base import PutOptions, StorageFull, Tier
from forebay_gateway.tiers.posix.files import Buffers, OpenFile
from forebay_gateway.tiers.posix.tier import PosixTier

FailAt = Callable[[str], None]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pfs"


@pytest.fixture
async def posix(root: Path) -> AsyncIterator[PosixTier]:
    tier = PosixTier("pfs", root)
    await tier.probe()
    yield tier
    await tier.close()


@pytest.fixture
def fail_at(monkeypatch: pytest.MonkeyPatch) -> FailAt:
    def arm(text: str) -> None:
        monkeypatch.setattr(failpoints, "_points", failpoints._parse(text))

    return arm


def _files(root: Path) -> set[str]:
    found = {str(path.relative_to(root)) for path in root.rglob("*") if not path.is_dir()}
    return found - {".forebay/tier.json"}


# The root: away is not empty


async def _every_verb(tier: Tier) -> AsyncIterator[tuple[str, ForebayError | None]]:
    acts = {
        "head": tier.head("d/x"),
        "get": tier.get_small("d/x"),
        "read": collect(tier.read("d/x", 0, 1)),
        "verify": tier.verify("d/x", BytesSource(b"1")),
        "list": tier.list(""),
        "list absent": tier.list("nowhere"),
        "put": tier.put("d/y", BytesSource(b"1")),
        "put_small": tier.put_small("d/z", b"1"),
        "create": tier.put_small("d/z", b"1", if_absent=True),
        "replace": tier.put_small("d/x", b"1", if_match="tag"),
        "delete": tier.delete("d/x"),
        "point": tier.point("d/current", "x"),
        "abort": tier.abort_upload("d/x", ".forebay-tmp-1"),
    }
    for name, act in acts.items():
        try:
            await act
        except ForebayError as error:
            yield name, error
        else:
            yield name, None


@pytest.mark.parametrize("how", ["removed", "unmounted", "other"])
async def test_root_that_went_away_is_unavailable_for_every_verb(posix: PosixTier, root: Path, how: str) -> None:
    await posix.put_small("d/x", b"1")
    root.rename(root.with_name("elsewhere"))
    if how != "removed":
        root.mkdir()  # as a mount point looks without its file system
    if how == "other":
        await PosixTier("second", root).probe()
    before = _files(root)
    async for name, error in _every_verb(posix):
        assert type(error) is Unavailable, f"{name}: {error!r}"
    with pytest.raises(Unavailable):
        await posix.probe()
    assert _files(root) == before, "nothing may be written below a root that is away"
    shutil.rmtree(root, ignore_errors=True)
    root.with_name("elsewhere").rename(root)
    assert (await posix.get_small("d/x"))[0] == b"1"


@pytest.mark.parametrize("failing", [1, 2])
async def test_a_root_whose_mark_cannot_be_read_is_no_absence(
    posix: PosixTier, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Both looks at the root that follow "no such file" can fail too: a disk that died in between."""
    await posix.put_small("d/x", b"1")
    looks, look = [0], posix.marker.check

    def check() -> None:
        looks[0] += 1
        if looks[0] == failing:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        look()

    monkeypatch.setattr(posix.marker, "check", check)
    with pytest.raises(Unavailable, match="EIO"):
        await posix.head("d/none")
    with pytest.raises(NotFound):
        await posix.head("d/none")


async def test_fresh_tier_takes_an_emptied_root_as_empty(posix: PosixTier, root: Path) -> None:
    await posix.put_small("d/x", b"1")
    shutil.rmtree(root)
    root.mkdir()
    fresh = PosixTier("pfs", root)
    await fresh.probe()
    with pytest.raises(NotFound):
        await fresh.head("d/x")
    await fresh.close()


async def test_root_with_foreign_files_is_not_adopted_unasked(root: Path) -> None:
    root.mkdir()
    (root / "NOT-MOUNTED").touch()
    tier = PosixTier("pfs", root)
    with pytest.raises(Unavailable, match="not mounted"):
        await tier.probe()
    assert _files(root) == {"NOT-MOUNTED"}
    (root / ".forebay").mkdir()
    (root / ".forebay/tier.json").touch()  # the operator says so
    await tier.probe()
    assert (await tier.list("")).objects[0].key == "NOT-MOUNTED"
    await tier.close()


async def test_without_a_probe_nothing_is_adopted(root: Path) -> None:
    root.mkdir()
    tier = PosixTier("pfs", root)
    with pytest.raises(Unavailable):
        await tier.put_small("x", b"1")
    with pytest.raises(Unavailable):
        await tier.head("x")
    await tier.close()


async def test_capabilities_from_another_process_name_the_root(posix: PosixTier, root: Path) -> None:
    other = PosixTier("pfs", root)
    other.capabilities = posix.capabilities
    await other.put_small("x", b"1")
    stranger = PosixTier("pfs", root.with_name("new"))
    await stranger.probe()
    third = PosixTier("pfs", root.with_name("new"))
    third.capabilities = posix.capabilities
    with pytest.raises(Unavailable):
        await third.head("x")
    for tier in (other, stranger, third):
        await tier.close()


async def test_gateways_that_start_together_agree_on_one_marker(root: Path) -> None:
    root.mkdir()
    tiers = [PosixTier("pfs", root) for _ in range(6)]
    await asyncio.gather(*(tier.probe() for tier in tiers))
    assert len({tier.marker.id for tier in tiers}) == 1
    for tier in tiers:
        await tier.close()


# Failing disks


@pytest.mark.parametrize("place", ["posix.before_write", "posix.before_fsync", "posix.before_close", "posix.before_rename"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("ENOSPC", StorageFull),
        ("EDQUOT", StorageFull),
        ("EIO", Unavailable),
        ("ESTALE", Unavailable),
        ("ETIMEDOUT", Unavailable),
        ("EROFS", PermissionDenied),
        ("EACCES", PermissionDenied),
    ],
)
async def test_errors_at_every_act_of_a_put(
    posix: PosixTier, root: Path, fail_at: FailAt, place: str, name: str, kind: type[ForebayError]
) -> None:
    await posix.put("d/x", BytesSource(b"old"))
    fail_at(f"{place}=error:{name}")
    with pytest.raises(kind, match=name) as seen:
        await posix.put("d/x", BytesSource(blob(3 * CHUNK)))
    assert type(seen.value) is kind
    assert _files(root) == {"d/x"}
    assert (await posix.get_small("d/x"))[0] == b"old"
    await posix.put("d/x", BytesSource(blob(3 * CHUNK)))


@pytest.mark.parametrize("place", ["durable.before_fsync", "posix.before_link"])
async def test_errors_of_a_document(posix: PosixTier, root: Path, fail_at: FailAt, place: str) -> None:
    fail_at(f"{place}=error:EDQUOT")
    with pytest.raises(StorageFull):
        await posix.put_small("d/x", b"1", if_absent=True)
    assert _files(root) == set()


async def test_failed_fsync_is_not_repeated_on_the_file(posix: PosixTier, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An fsync that failed once and then succeeds has lost data: the file itself must go."""
    synced: list[int] = []
    real = os.fsync

    def first_fails(descriptor: int) -> None:
        inode = os.fstat(descriptor).st_ino
        synced.append(inode)
        if inode == synced[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(descriptor)

    (root / "x").write_bytes(b"old")
    monkeypatch.setattr(os, "fsync", first_fails)
    with pytest.raises(Unavailable, match="EIO"):
        await posix.put("x", BytesSource(blob(CHUNK)))
    assert synced.count(synced[0]) == 1
    assert (root / "x").read_bytes() == b"old"
    assert _files(root) == {"x"}


async def test_full_file_system_is_storage_full_and_passes(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(mount)], capture_output=True, check=False)
    if made.returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        tier = PosixTier("pfs", mount)
        await tier.probe()
        with pytest.raises(StorageFull):
            await tier.put("d/large", BytesSource(blob(2 << 20)))
        assert _files(mount) == set()
        await tier.put("d/small", BytesSource(blob(CHUNK)))
        await tier.verify("d/small", BytesSource(blob(CHUNK)))
        await tier.close()
    finally:
        subprocess.run(["umount", str(mount)], check=True)


async def test_wrong_bytes_are_found_before_the_rename(posix: PosixTier, root: Path) -> None:
    await posix.put("d/x", BytesSource(b"old"))
    with pytest.raises(Corrupt):
        await posix.put("d/x", BytesSource(blob(4 * CHUNK), wrong=True))
    assert _files(root) == {"d/x"}
    assert (await posix.get_small("d/x"))[0] == b"old"


@pytest.mark.parametrize("direct", [True, False])
async def test_verify_reads_the_disk_and_not_a_cache(root: Path, direct: bool) -> None:
    tier = PosixTier("pfs", root, direct=direct)
    await tier.probe()
    data = blob(4 * CHUNK + 100)
    await tier.put("x", BytesSource(data))
    with (root / "x").open("r+b") as file:
        file.seek(3 * CHUNK + 5)
        file.write(bytes([data[3 * CHUNK + 5] ^ 1]))
    with pytest.raises(Corrupt, match="chunk=3"):
        await tier.verify("x", BytesSource(data))
    await tier.close()


async def test_hung_file_system_is_unavailable_and_the_loop_goes_on(root: Path, fail_at: FailAt) -> None:
    tier = PosixTier("pfs", root, metadata_timeout_s=0.3)
    await tier.probe()
    fail_at("posix.before_rename=sleep:1.5")
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.01)

    ticking = asyncio.create_task(tick())
    with pytest.raises(Unavailable, match="does not answer"):
        await tier.put("x", BytesSource(b"1"))
    ticking.cancel()
    assert ticks > 10
    await tier.close()


def test_descriptor_stays_while_a_thread_is_inside(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"data")
    file = OpenFile(tmp_path / "x", os.O_RDONLY, direct=False)
    file.open()
    with file._use() as descriptor:
        file.close()
        assert os.fstat(descriptor).st_size == 4
        with pytest.raises(OSError, match="not open"):
            file.stat()
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(descriptor)


@pytest.mark.parametrize("size", [1, 511, 4095, 4096, 4097, 65_537])
@pytest.mark.parametrize("shift", [0, 1])
def test_direct_writes_of_any_length_and_alignment(tmp_path: Path, size: int, shift: int) -> None:
    data = blob(size + shift)
    path = tmp_path / "x"
    file = OpenFile(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, direct=True)
    file.open()
    file.write_chunk(memoryview(data)[shift:], 0, Buffers(size))
    file.finish(size)
    file.close()
    assert path.read_bytes() == data[shift:]


# Names and leftovers


async def test_long_names_have_locks_too(posix: PosixTier) -> None:
    key = f"d/{'n' * 255}"
    info = await posix.put_small(key, b"1")
    await posix.put_small(key, b"2", if_match=info.tag)
    with pytest.raises(InvalidArgument, match="too long"):
        await posix.put_small(f"{key}n", b"1")


async def test_link_is_relative_and_replaced(posix: PosixTier, root: Path) -> None:
    await posix.put_small("run/one/doc", b"1")
    await posix.put_small("run/two/doc", b"2")
    for target in ("one", "two"):
        await posix.point("run/current", target)
        assert os.readlink(root / "run/current") == target
    assert (root / "run/current/doc").read_bytes() == b"2"
    await posix.delete("run/current")
    assert _files(root) == {"run/one/doc", "run/two/doc"}


async def test_delete_prunes_what_it_emptied(posix: PosixTier, root: Path) -> None:
    await posix.put_small("a/b/c/one", b"1")
    await posix.put_small("a/two", b"1")
    await posix.delete("a/b/c/one")
    assert sorted(path.name for path in (root / "a").iterdir()) == ["two"]
    await posix.delete("a/two")
    assert sorted(path.name for path in root.iterdir()) == [".forebay"]
    await posix.delete("a")
    await posix.delete(".forebay")
    assert (root / ".forebay/tier.json").exists()


async def test_the_age_of_what_is_left_is_the_file_system_s(
    posix: PosixTier, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine whose clock is days off would take another one's work for old, or its own left-overs for new."""
    await posix.put_small("d/doc", b"1")
    for name, age_s in (("00aa", 0), ("00bb", 3 * 86_400)):
        path = root / "d" / f"{durable.TEMP_PREFIX}{name}"
        path.touch()
        os.utime(path, (path.stat().st_mtime - age_s,) * 2)
    for shift_s in (-5 * 86_400, 5 * 86_400):
        monkeypatch.setattr(posix._clock, "wall", lambda shift_s=shift_s: time.time() + shift_s, raising=False)
        ages_s = {item.id[-2:]: item.age_s for item in await posix.leftovers("d")}
        assert ages_s["aa"] < 3600
        assert 3 * 86_400 - 60 < ages_s["bb"] < 3 * 86_400 + 3600
    assert _files(root) == {"d/doc", f"d/{durable.TEMP_PREFIX}00aa", f"d/{durable.TEMP_PREFIX}00bb"}


async def test_temporary_files_are_hidden_recorded_and_given_up(posix: PosixTier, root: Path) -> None:
    recorded: list[str] = []

    async def record(upload_id: str) -> None:
        recorded.append(upload_id)
        assert not any(name.startswith("d/") for name in _files(root)), "recorded before the first byte"

    source = BytesSource(blob(2 * CHUNK))
    await posix.put("d/x", source, PutOptions(on_upload=record))
    (name,) = recorded
    assert name.startswith(durable.TEMP_PREFIX)
    (root / "d" / name).write_bytes(b"left behind by a crash")
    assert [info.key for info in (await posix.list("d")).objects] == ["d/x"]
    for _ in range(2):
        await posix.abort_upload("d/x", name)
        assert _files(root) == {"d/x"}
    for wrong in ("x", "../d/x", f"{durable.TEMP_PREFIX}/../x"):
        with pytest.raises(InvalidArgument):
            await posix.abort_upload("d/x", wrong)


_CRASHER = """
import asyncio, sys
sys.path.insert(0, {tests!r})
from pathlib import Path
from conformance.tier_kit import BytesSource, blob
from forebay_gateway.tiers.base import PutOptions
from forebay_gateway.tiers.posix.tier import PosixTier

async def record(upload_id):
    print(upload_id, flush=True)

async def main():
    tier = PosixTier("pfs", Path({root!r}))
    await tier.put("d/x", BytesSource(blob(300_000)), PutOptions(on_upload=record))

asyncio.run(main())
"""


async def test_what_an_attempt_left_goes_before_the_next(posix: PosixTier, root: Path) -> None:
    """Whoever records temporary files knows the newest alone."""
    away, body, recorded = root.with_name("away"), blob(3 * CHUNK), []

    async def record(name: str) -> None:
        recorded.append(name)

    class Leaving(BytesSource):
        async def read_chunk(self, index: int) -> memoryview:
            if index == 2:
                root.rename(away)
            return await super().read_chunk(index)

    options = PutOptions(on_upload=record)
    with pytest.raises(Unavailable):
        await posix.put("run/x", Leaving(body), options)
    with pytest.raises(Unavailable):
        await posix.put("run/x", BytesSource(body), options)
    assert [path.name for path in (away / "run").iterdir()] == recorded
    away.rename(root)
    await posix.put("run/x", BytesSource(body), options)
    assert _files(root) == {"run/x"}
    assert len(recorded) == 2


@pytest.mark.parametrize("place", ["posix.before_write", "posix.before_fsync", "posix.before_rename", "posix.before_dir_fsync"])
async def test_kill_at_every_act_leaves_whole_or_nothing(posix: PosixTier, root: Path, place: str) -> None:
    script = _CRASHER.format(tests=str(Path(__file__).parent.parent), root=str(root))
    environment = {**os.environ, failpoints.ENVIRONMENT: f"{place}=kill"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    source = BytesSource(blob(300_000))
    if place == "posix.before_dir_fsync":
        await posix.verify("d/x", source)
    else:
        with pytest.raises(NotFound):
            await posix.head("d/x")
        assert len(_files(root)) == 1
    await posix.abort_upload("d/x", done.stdout.strip())
    await posix.put("d/x", source)
    assert _files(root) == {"d/x"}


async def test_a_directory_that_the_gateway_made_is_told_and_stands_in_its_marker(tmp_path: Path, expected_logs: Any) -> None:
    (tmp_path / "there").mkdir()
    for name, made in (("there", False), ("missing", True)):
        tier = PosixTier("pfs", tmp_path / name)
        await tier.probe()
        assert json.loads((tmp_path / name / ".forebay/tier.json").read_bytes())["directory_made"] is made
        await tier.close()
    (told,) = (record.getMessage() for record in expected_logs.records)
    device = (tmp_path / "missing").stat().st_dev
    assert f"path={tmp_path}/missing device={os.major(device)}:{os.minor(device)}" in told
