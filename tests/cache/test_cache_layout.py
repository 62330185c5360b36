"""The cache directory: lock, format, file systems, part files, scan."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from forebay_gateway.base import failpoints
from forebay_gateway.cache import layout
from forebay_gateway.cache.layout import CacheDir
from forebay_gateway.cache.mounts import check_local, file_system_of, is_refused
from forebay_gateway.core.errors import StartupError, Unavailable
from forebay_gateway.core.records import ShardKey

MOUNTINFO = r"""22 1 253:0 / / rw,relatime - ext4 /dev/root rw
23 22 0:21 / /mnt/space\040here rw shared:1 - xfs /dev/sdb rw
24 22 0:22 / /mnt/nfs rw - nfs4 server:/x rw
25 24 0:23 / /mnt/nfs/local rw master:2 propagate_from:3 - tmpfs tmpfs rw
26 22 0:24 / /over rw - ext4 /dev/sdc rw
27 26 0:25 / /over rw - fuse.juicefs JuiceFS:x rw
"""


CALLS = "trace=mkdir,fsync,rename,unlink"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/", "ext4"),
        ("/mnt", "ext4"),
        ("/mnt/space here", "xfs"),
        ("/mnt/space here/deep/er", "xfs"),
        ("/mnt/nfs", "nfs4"),
        ("/mnt/nfs2", "ext4"),
        ("/mnt/nfs/a", "nfs4"),
        ("/mnt/nfs/local/a", "tmpfs"),
        ("/over/x", "fuse.juicefs"),
    ],
)
def test_the_mount_that_holds_a_path(path: str, expected: str) -> None:
    assert file_system_of(Path(path), MOUNTINFO) == expected


def test_no_mount_is_an_error() -> None:
    with pytest.raises(ValueError, match="no mount"):
        file_system_of(Path("/x"), "garbage\n1 2 3 - ext4\n")


@pytest.mark.parametrize(
    "name",
    [
        "nfs",
        "nfs4",
        "cifs",
        "smb3",
        "lustre",
        "beegfs",
        "ceph",
        "fuse",
        "fuse.sshfs",
        "fuse.juicefs",
        "fuseblk",
        "9p",
        "gpfs",
        "afs",
        "glusterfs",
        "virtiofs",
    ],
)
def test_network_file_systems_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_refused(name)
    mountinfo = tmp_path / "mountinfo"
    mountinfo.write_text(f"22 1 253:0 / / rw - {name} /dev/root rw\n")
    monkeypatch.setattr("forebay_gateway.cache.mounts.MOUNTINFO", mountinfo)
    for act in (lambda: CacheDir.open(tmp_path / "cache", "n"), lambda: check_local(tmp_path / "catalog")):
        with pytest.raises(StartupError, match=f"local disk.*file_system={name}"):
            act()
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("name", ["ext4", "xfs", "btrfs", "zfs", "tmpfs", "overlay", "f2fs", "bcachefs", "fusectl"])
def test_local_file_systems_are_taken(name: str) -> None:
    assert not is_refused(name)


def test_unreadable_mountinfo_refuses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay_gateway.cache.mounts.MOUNTINFO", tmp_path / "absent")
    with pytest.raises(StartupError, match="cannot tell"):
        check_local(tmp_path)


def test_open_makes_the_directory_and_opens_it_again(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    for _ in range(2):
        cache = CacheDir.open(path, "node-1")
        assert (path / "FORMAT").read_text() == "forebay-cache 1\n"
        assert f"pid={os.getpid()} node=node-1" in (path / "forebay.lock").read_text()
        assert cache.file_system == CacheDir.check_not_network(path)
        assert 0 < cache.free_on_disk < cache.capacity_of_disk
        cache.release()
        cache.release()
    assert path.stat().st_mode & 0o077 == 0


def test_two_owners_are_one_too_many(tmp_path: Path) -> None:
    first = CacheDir.open(tmp_path, "node-1")
    with pytest.raises(StartupError, match=rf"pid={os.getpid()} node=node-1"):
        CacheDir.open(tmp_path, "node-2")
    first.release()
    CacheDir.open(tmp_path, "node-2").release()


def test_the_lock_of_another_process_ends_with_it(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from forebay_gateway.cache.layout import CacheDir\n"
        "cache = CacheDir.open(Path(sys.argv[1]), 'other'); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"open\n"
        with pytest.raises(StartupError, match=f"pid={holder.pid} node=other"):
            CacheDir.open(tmp_path, "node-1")
        CacheDir.attach(tmp_path)  # a mover needs no lock
        holder.kill()
    CacheDir.open(tmp_path, "node-1").release()


@pytest.mark.parametrize("text", ["forebay-cache 2", "forebay-cache 0", "forebay-cache x", "something else", ""])
def test_another_format_refuses_and_lets_go_of_the_lock(tmp_path: Path, text: str) -> None:
    CacheDir.open(tmp_path, "n").release()
    (tmp_path / "FORMAT").write_text(text)
    for _ in range(2):
        with pytest.raises(StartupError, match="FORMAT"):
            CacheDir.open(tmp_path, "n")
    with pytest.raises(StartupError, match="FORMAT"):
        CacheDir.attach(tmp_path)


def test_a_foreign_directory_is_not_taken_over(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(StartupError, match="no forebay cache"):
        CacheDir.open(tmp_path, "n")


def test_a_path_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="cannot open the cache"):
        CacheDir.open(tmp_path / "file" / "cache", "n")


def test_a_failed_first_start_can_be_repeated(tmp_path: Path) -> None:
    for point in ("durable.before_fsync", "durable.before_rename", "durable.before_dir_fsync"):
        with failpoints.armed(f"{point}=error:ENOSPC"), pytest.raises(StartupError, match="No space"):
            CacheDir.open(tmp_path / point, "n")
        CacheDir.open(tmp_path / point, "n").release()


def test_attach_creates_nothing(tmp_path: Path) -> None:
    with pytest.raises(StartupError):
        CacheDir.attach(tmp_path)
    assert list(tmp_path.iterdir()) == []
    owner = CacheDir.open(tmp_path, "n")
    before = sorted(tmp_path.rglob("*"))
    attached = CacheDir.attach(tmp_path)
    assert sorted(tmp_path.rglob("*")) == before
    assert attached.direct_io == owner.direct_io
    attached.release()
    with pytest.raises(StartupError):
        CacheDir.open(tmp_path, "n")  # a mover's end does not end the owner's lock
    owner.release()


def test_a_disk_without_direct_io_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_probe_write", lambda path: False)
    cache = CacheDir.open(tmp_path, "n")
    assert not cache.direct_io
    assert "O_DIRECT" in cache.note
    cache.release()


def test_session_directories(tmp_path: Path) -> None:
    cache = CacheDir.open(tmp_path, "n")
    path = cache.make_session_dir(0xAB)
    assert path == tmp_path / "data" / "00000000000000ab" == cache.make_session_dir(0xAB)
    (path / "x").write_text("")
    cache.drop_session_dir(0xAB)
    assert path.is_dir()
    (path / "x").unlink()
    cache.drop_session_dir(0xAB)
    assert not path.exists()
    cache.drop_session_dir(0xAB)
    assert cache.make_session_dir(0xAB).is_dir()
    cache.release()


def test_part_files(tmp_path: Path) -> None:
    cache = CacheDir.open(tmp_path, "n")
    for writer, seq in ((1, 5), (1, 6), (11, 7)):
        cache.write_part(2, writer, seq, f"part {writer} {seq}".encode())
    assert cache.part_path(2, 11, 7).read_bytes() == b"part 11 7"
    cache.write_part(2, 11, 7, b"again")
    assert cache.part_path(2, 11, 7).read_bytes() == b"again"
    cache.remove_part_files(2, 1)
    assert [found.writer for found in cache.scan()] == [11]
    half_written = tmp_path / "data" / f"{2:016x}" / ".forebay-tmp-part-3-9.json"
    half_written.write_text("{")
    cache.remove_part_files(2, 11)
    assert half_written.exists()
    cache.remove_part_files(2)
    cache.drop_session_dir(2)
    assert list((tmp_path / "data").iterdir()) == []
    cache.remove_part_files(2)
    cache.release()


@pytest.mark.parametrize("point", ["durable.before_fsync", "durable.before_rename"])
def test_a_part_file_that_fails_leaves_nothing(tmp_path: Path, point: str) -> None:
    cache = CacheDir.open(tmp_path, "n")
    with failpoints.armed(f"{point}=error:EIO"), pytest.raises(Unavailable, match=r"cannot write the part.s file"):
        cache.write_part(2, 1, 1, b"x")
    assert list(cache.scan()) == []
    cache.release()


def test_scan_tells_ours_from_foreign(tmp_path: Path) -> None:
    cache = CacheDir.open(tmp_path, "n")
    session = cache.make_session_dir(2)
    names = {
        cache.shard_path(ShardKey(2, 3)): ("shard", 2, 3, None, None),
        cache.part_path(2, 4, 5): ("part", 2, None, 4, 5),
        cache.incoming_path(6): ("incoming", None, 6, None, None),
        tmp_path / "incoming" / ".forebay-tmp-probe": ("incoming", None, None, None, None),
        session / ".forebay-tmp-part-1-1.json": ("incoming", 2, None, None, None),
        session / "notes.txt": ("foreign", 2, None, None, None),
        session / "part-01-5.json": ("foreign", 2, None, None, None),
        session / "ABCDEF0123456789.shard": ("foreign", 2, None, None, None),
        tmp_path / "incoming" / "6.tmp": ("foreign", None, None, None, None),
        tmp_path / "data" / "stray": ("foreign", None, None, None, None),
        tmp_path / "stray": ("foreign", None, None, None, None),
    }
    for path in names:
        path.write_bytes(b"12345")
    link = session / f"{9:016x}.shard"
    link.symlink_to("/etc/hostname")
    (tmp_path / "catalog").mkdir()
    (tmp_path / "catalog" / "data.mdb").write_text("")
    found = {each.path: each for each in cache.scan()}
    assert found.pop(link).kind == "foreign"
    assert {
        path: (each.kind, each.session_id, each.shard_id, each.writer, each.commit_seq) for path, each in found.items()
    } == names
    assert {each.size for each in found.values()} == {5}
    cache.release()


def test_unlink_many(tmp_path: Path) -> None:
    cache = CacheDir.open(tmp_path, "n")
    paths = [cache.shard_path(ShardKey(session, shard)) for session in (1, 2) for shard in range(3)]
    for path in paths:
        cache.make_session_dir(int(path.parent.name, 16))
        path.write_text("x")
    cache.unlink(paths[0])
    cache.unlink_many([*paths, cache.shard_path(ShardKey(99, 99))])
    assert list(cache.scan()) == []
    cache.release()


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_part_and_session_directory_are_synced(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from forebay_gateway.cache.layout import CacheDir\n"
        "cache = CacheDir.open(Path(sys.argv[1]), 'n'); cache.write_part(2, 1, 3, b'x'); cache.unlink(cache.part_path(2, 1, 3))"
    )
    trace = tmp_path / "trace"
    subprocess.run(
        ["strace", "-f", "-y", "-o", trace, "-e", CALLS, sys.executable, "-c", code, str(tmp_path / "cache")],
        check=True,
        timeout=60,
    )
    lines = [line for line in trace.read_text().splitlines() if str(tmp_path) in line]
    data, session = str(tmp_path / "cache" / "data"), str(tmp_path / "cache" / "data" / f"{2:016x}")
    wanted = [
        ("mkdir", f'"{session}"'),
        ("fsync", f"<{data}>"),
        ("fsync", f"<{session}/.forebay-tmp-part-1-3.json>"),
        ("rename", f"{session}/part-1-3.json"),
        ("fsync", f"<{session}>"),
        ("unlink", f"{session}/part-1-3.json"),
        ("fsync", f"<{session}>"),
    ]
    at = 0
    for call, argument in wanted:
        while at < len(lines) and not (f"{call}(" in lines[at] and argument in lines[at]):
            at += 1
        assert at < len(lines), (call, argument, lines)
        at += 1
