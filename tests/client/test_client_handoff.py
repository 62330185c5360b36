"""forebay.directory: what becomes of a directory's files, whatever happens to block, gateway, disk or process."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import forebay
from client.conftest import Gateway, RealGateway
from forebay import Client, directories, handoff, scratch
from forebay.testing import MemoryGateway
from forebay.writer import CheckpointWriter

HERE = Path(__file__).parents[1]


def _tree(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def _fill(path: Path) -> dict[str, bytes]:
    (path / "deep/er").mkdir(parents=True)
    (path / "model.bin").write_bytes(os.urandom((3 << 20) + 5))
    (path / "deep/er/small").write_bytes(b"small")
    (path / "empty").write_bytes(b"")
    (path / "latest").symlink_to("model.bin")
    return _tree(path)


def _left(under: Path) -> list[str]:
    """What there is of anybody's directories, but for the common lock."""
    return sorted(path.name.partition("-")[0] for path in under.glob("forebay-*/*") if path.name != "lock")


@pytest.fixture
def under(tmp_path: Path) -> Path:
    path = tmp_path / "scratch"
    path.mkdir()
    return path


def test_a_directory_becomes_a_step_and_comes_back(client: Client, under: Path) -> None:
    written = forebay.directory("r/x", 3, client=client, under=under, wait="pfs", timeout=60, metadata={"k": 1})
    with written as path:
        assert list(path.iterdir()) == []
        files = _fill(path)
        assert client.runs() == []
    assert _left(under) == []
    assert isinstance(written.summary, forebay.SaveSummary)
    assert (written.summary.shards, written.summary.level, written.summary.checkpoint_complete) == (4, "pfs", True)
    assert client.describe("r/x", 3).metadata == {"k": 1}
    for step in (3, "latest"):
        restored = forebay.directory("r/x", step, mode="r", client=client, under=under)
        with restored as path:
            assert _tree(path) == files and not (path / "latest").is_symlink()
            (path / "model.bin").write_bytes(b"mine")
        assert restored.step == 3 and _left(under) == []
    with forebay.directory("r/x", 3, mode="r", only=lambda name: name.startswith("deep/"), client=client, under=under) as path:
        assert _tree(path) == {"deep/er/small": b"small"}


def test_a_client_of_its_own(memory: MemoryGateway, under: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_ADDRESS", memory.address)
    monkeypatch.setattr(scratch, "_roomiest", lambda: under)
    with forebay.directory("r", 1) as path:
        files = _fill(path)
    with forebay.directory("r", 1, mode="r", address=memory.address) as path:
        assert path.is_relative_to(under) and _tree(path) == files


def test_a_block_that_fails_leaves_nothing(client: Client, under: Path) -> None:
    class Mine(Exception):
        pass

    with pytest.raises(Mine), forebay.directory("r", 3, client=client, under=under) as path:
        _fill(path)
        raise Mine
    assert client.runs() == [] and _left(under) == []


def test_a_directory_without_files_is_no_checkpoint_and_does_not_stay(memory_client: Client, under: Path) -> None:
    with (
        pytest.raises(forebay.InvalidArgument, match=r"holds no files$"),
        forebay.directory("r", 3, client=memory_client, under=under) as path,
    ):
        (path / "directory").mkdir()
    assert _left(under) == [] and memory_client.runs() == []


@pytest.mark.parametrize("kind", ["socket", "outside", "open", "name", "dangling"])
def test_what_cannot_be_saved_is_named_and_kept(memory_client: Client, under: Path, kind: str) -> None:
    bound, opened = socket.socket(socket.AF_UNIX), None
    said = {
        "socket": "bad: not a regular file",
        "outside": "bad: ",
        "open": "'bad' is still open for writing",
        "name": "reserved",
        "dangling": "nothing",
    }[kind]
    with pytest.raises(forebay.InvalidArgument, match=f"{said}.*the files are kept in") as caught:  # noqa: SIM117
        with forebay.directory("r", 3, client=memory_client, under=under) as path:
            if kind == "socket":
                here = Path.cwd()
                os.chdir(path)  # a socket's path has a short limit
                bound.bind("bad")
                os.chdir(here)
            elif kind == "outside":
                (path / "bad").symlink_to("/etc/passwd")
            elif kind == "open":
                opened = (path / "bad").open("wb")
                opened.write(b"not yet there")
            elif kind == "name":
                (path / ".forebay-x").write_bytes(b"")
            else:
                (path / "bad").symlink_to("nowhere")
    kept = Path(str(caught.value).rpartition("kept in ")[2].partition(";")[0])
    assert kept.is_dir() and _left(under) == ["kept"]
    assert memory_client.runs() == []
    bound.close()
    if opened is not None:
        opened.close()


@pytest.mark.expected_logs("the abort did not reach the gateway")
def test_the_gateway_is_away_at_the_end(real: RealGateway, under: Path) -> None:
    """Nothing is lost: the files stay, no sweep takes them, and they can be saved when it is back."""
    with (
        Client(real.address, retry_timeout=0.3) as client,
        pytest.raises(forebay.Unavailable, match="the files are kept in ") as caught,
        forebay.directory("r", 3, client=client, under=under) as path,
    ):
        files = _fill(path)
        real.kill()
    kept = Path(str(caught.value).rpartition("kept in ")[2].partition(";")[0])
    assert _tree(kept) == files
    real.start()
    with Client(real.address) as client:
        with forebay.directory("r", 4, client=client, under=under) as path:
            _fill(path)
        assert _left(under) == ["kept"]
        client.save_dir(kept, "r", 3)
        with forebay.directory("r", 3, mode="r", client=client, under=under) as path:
            assert _tree(path) == files


def test_a_gateway_that_comes_back_in_time(real: RealGateway, under: Path) -> None:
    with Client(real.address, retry_timeout=60) as client:
        with forebay.directory("r", 3, client=client, under=under) as path:
            files = _fill(path)
            real.kill()
            starting = threading.Thread(target=real.start)
            starting.start()
        starting.join()
        with forebay.directory("r", 3, mode="r", client=client, under=under) as path:
            assert _tree(path) == files
    assert _left(under) == []


@pytest.mark.parametrize("error", [forebay.CacheFull("full"), forebay.Corrupt("bad"), forebay.Unavailable("away")])
@pytest.mark.parametrize("method", ["PutShard", "PutMany", "CommitPart"])
def test_whatever_fails_keeps_the_files(memory: MemoryGateway, under: Path, method: str, error: forebay.ForebayError) -> None:
    memory.fail(method, error, times=1000)
    with Client(memory.address, admit_timeout=0.1, retry_timeout=0.1) as client:
        with pytest.raises(type(error), match="kept in") as caught:  # noqa: SIM117
            with forebay.directory("r", 3, client=client, under=under) as path:
                files = _fill(path)
        assert client.latest("r") is None
    assert _tree(Path(str(caught.value).rpartition("kept in ")[2].partition(";")[0])) == files


def test_acknowledged_files_go_though_a_tier_is_late(
    memory_client: Client, under: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the wait for the tier, which may be long."""
    left_at_commit: dict[str, list[str]] = {}
    commit = CheckpointWriter.commit

    def watched(part: CheckpointWriter, metadata: Any = None, wait: str = "cache", *rest: Any, **options: Any) -> Any:
        left_at_commit[wait] = _left(under)
        return commit(part, metadata, wait, *rest, **options)

    monkeypatch.setattr(CheckpointWriter, "commit", watched)
    memory_client.hold("pfs")
    with pytest.raises(forebay.DeadlineExceeded, match=r"this part is committed \(cache\)") as caught:  # noqa: SIM117
        with forebay.directory("r", 3, client=memory_client, under=under, wait="pfs", timeout=0.3, metadata={"k": 1}) as path:
            _fill(path)
    assert "kept" not in str(caught.value) and memory_client.latest("r") == 3
    assert left_at_commit == {"cache": ["live"], "pfs": []}
    assert memory_client.describe("r", 3).metadata == {"k": 1}  # the second commit of the part leaves it


@pytest.mark.parametrize("change", ["longer", "shorter", "rewritten", "added", "removed"])
def test_files_that_change_while_they_are_put(
    memory_client: Client, under: Path, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    """Whichever bytes were taken, they are no checkpoint."""
    put_files = directories.put_files

    def put_and_change(writer: Any, files: Any, streams: int, count: Any) -> None:
        put_files(writer, files, streams, count)
        file = next(path for name, (path, _) in files.items() if name == "model.bin")
        if change == "added":
            (file.parent / "new").write_bytes(b"")
        elif change == "removed":
            file.unlink()
        else:
            size = file.stat().st_size
            file.write_bytes(bytes({"longer": size + 1, "shorter": size - 1, "rewritten": size}[change]))

    monkeypatch.setattr(directories, "put_files", put_and_change)
    with pytest.raises(forebay.InvalidArgument, match=r"changed while they were put.*'(model\.bin|new)'.*kept in"):  # noqa: SIM117
        with forebay.directory("r", 3, client=memory_client, under=under) as path:
            _fill(path)
            (path / "latest").unlink()
    assert memory_client.latest("r") is None and _left(under) == ["kept"]


def test_two_at_once_on_one_step(client: Client, under: Path) -> None:
    """Launches of their own: the last commit is the step. In one launch the second one's other bytes are refused, and kept."""
    with forebay.directory("r", 3, client=client, under=under, session="one") as first:
        with forebay.directory("r", 3, client=client, under=under, session="two") as second:
            assert first != second
            newer = _fill(second)
        older = _fill(first)
    assert newer != older
    with forebay.directory("r", 3, mode="r", client=client, under=under) as path:
        assert _tree(path) == older
    with pytest.raises(forebay.AlreadyExists, match="kept in"):  # noqa: SIM117
        with forebay.directory("r", 3, client=client, under=under, session="one") as path:
            _fill(path)
    with forebay.directory("r", 3, mode="r", client=client, under=under) as path:
        assert _tree(path) == older
    assert _left(under) == ["kept"]


def test_writers_hand_over_what_each_wrote(client: Client, under: Path) -> None:
    """One of them nothing at all."""
    options: dict[str, Any] = {"client": client, "under": under, "writers": 3, "session": "s"}
    files = {}
    for writer in range(3):
        with forebay.directory("r", 3, writer=writer, **options) as path:
            if writer < 2:
                (path / f"rank{writer}").write_bytes(os.urandom(100))
                files.update(_tree(path))
        assert client.latest("r") == (3 if writer == 2 else None)
    with forebay.directory("r", 3, mode="r", client=client, under=under) as path:
        assert _tree(path) == files


@pytest.mark.parametrize("content", [b"same", b"other"])
def test_a_name_of_two_writers(client: Client, under: Path, content: bytes) -> None:
    options: dict[str, Any] = {"client": client, "under": under, "writers": 2, "session": "s"}
    with forebay.directory("r", 3, writer=0, **options) as path:
        (path / "config.json").write_bytes(b"same")
    with pytest.raises(forebay.AlreadyExists, match=r"config\.json.*kept in"):  # noqa: SIM117
        with forebay.directory("r", 3, writer=1, **options) as path:
            (path / "config.json").write_bytes(content)
    assert client.latest("r") is None


@pytest.mark.parametrize(
    "options,said",
    [
        ({"mode": "a"}, "mode must be"),
        ({"step": "latest"}, "mode='r'"),
        ({"step": -1}, "step"),
        ({"run": "bad//run"}, "run"),
        ({"wait": "nowhere"}, "nowhere"),
        ({"writers": 2}, "session"),
        ({"metadata": {"k": object()}}, "JSON"),
        ({"streams": 0}, "streams"),
        ({"source": "pfs"}, "mode 'r'"),
        ({"mode": "r", "wait": "pfs"}, "saves nothing"),
        ({"under": "/nowhere/at/all"}, "not a directory"),
    ],
)
def test_bad_arguments_are_told_before_the_block(
    memory_client: Client, under: Path, options: dict[str, Any], said: str
) -> None:
    arguments = {"run": "r", "step": 1, "client": memory_client, "under": under, **options}
    with pytest.raises(forebay.InvalidArgument, match=said), forebay.directory(**arguments):
        pytest.fail("the block ran")
    assert _left(under) == []


def test_nothing_to_read(memory: MemoryGateway, memory_client: Client, under: Path) -> None:
    for step in (7, "latest"):
        with pytest.raises(forebay.NotFound), forebay.directory("r", step, mode="r", client=memory_client, under=under):
            pytest.fail("the block ran")
    memory_client.checkpoint("r", 8, 2, 0, "s").put("a", b"a")
    with pytest.raises(forebay.Incomplete), forebay.directory("r", 8, mode="r", client=memory_client, under=under):
        pytest.fail("the block ran")
    memory.stop()
    with Client(memory.address, retry_timeout=0.1) as client, pytest.raises(forebay.Unavailable):
        forebay.directory("r", 7, mode="r", client=client, under=under).__enter__()
    assert _left(under) == []


def test_damage_is_never_restored(memory: MemoryGateway, memory_client: Client, under: Path) -> None:
    with forebay.directory("r", 3, client=memory_client, under=under) as path:
        _fill(path)
    memory.damage_stored("r", 3, "model.bin")
    with pytest.raises(forebay.Corrupt), forebay.directory("r", 3, mode="r", client=memory_client, under=under):
        pytest.fail("the block ran")
    assert _left(under) == []


def test_too_little_space_is_told_before_a_byte_comes(
    memory: MemoryGateway, memory_client: Client, under: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with forebay.directory("r", 3, client=memory_client, under=under) as path:
        _fill(path)
    monkeypatch.setattr(scratch, "_free_bytes", lambda path: 1 << 20)
    memory.calls.clear()
    with pytest.raises(forebay.ForebayError, match=r"too little space.*needed=\d+ free=1048576"):  # noqa: SIM117
        with forebay.directory("r", 3, mode="r", client=memory_client, under=under):
            pytest.fail("the block ran")
    assert _left(under) == [] and "ReadShard" not in memory.calls


def test_the_disk_fills_while_a_step_is_restored(memory_client: Client, under: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with forebay.directory("r", 3, client=memory_client, under=under) as path:
        _fill(path)

    def full(descriptor: int, data: memoryview, offset: int) -> int:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr("forebay.lanes.fd_read.os.pwrite", full)
    with pytest.raises(forebay.ForebayError, match="No space left"):  # noqa: SIM117
        with forebay.directory("r", 3, mode="r", client=memory_client, under=under):
            pytest.fail("the block ran")
    assert _left(under) == []


_KILLED = """
import os, signal, sys
import forebay
from forebay import handoff
address, under, when = sys.argv[1:]
die = lambda *arguments, **options: os.kill(os.getpid(), signal.SIGKILL)
if when == "in the hand-over":
    handoff._stamps = die
made = forebay.directory("r", 3, address=address, under=under)
child = None
with made as path:
    (path / "model.bin").write_bytes(bytes(3 << 20))
    if when == "in the block":
        die()
    if when == "in a child's block" and (child := os.fork()):
        assert os.waitpid(child, 0)[1] == 0
if child == 0:
    os._exit(made.summary is not None)  # it must not have handed over what is its parent's
"""


@pytest.mark.parametrize("when", ["in the block", "in the hand-over"])
def test_what_a_killed_process_left_is_swept_by_the_next(gateway: Gateway, client: Client, under: Path, when: str) -> None:
    killed = subprocess.run([sys.executable, "-c", _KILLED, gateway.address, str(under), when], timeout=60)
    assert killed.returncode == -signal.SIGKILL
    assert _left(under) == ["live"] and client.latest("r") is None
    with forebay.directory("r", 4, client=client, under=under) as path:
        assert _left(under) == ["live"] and path.is_dir()  # its own
        _fill(path)
    assert _left(under) == []


def test_a_forked_child_leaves_its_parents_files_alone(gateway: Gateway, client: Client, under: Path) -> None:
    command = [sys.executable, "-c", _KILLED, gateway.address, str(under), "in a child's block"]
    assert subprocess.run(command, timeout=60).returncode == 0
    assert client.latest("r") == 3 and _left(under) == []


def test_what_lives_is_not_swept(memory_client: Client, under: Path) -> None:
    with forebay.directory("r", 3, client=memory_client, under=under) as first:
        files = _fill(first)
        with forebay.directory("r", 4, client=memory_client, under=under) as second:
            (second / "x").write_bytes(b"x")
            assert _tree(first) == files
        assert _tree(first) == files
    assert _left(under) == []


@pytest.fixture
def elsewhere(under: Path) -> Iterator[Path]:
    """What a process of another host has left, or uses."""
    base = under / f"forebay-{os.geteuid()}"
    (base / "live-elsewhere.0123/files").mkdir(parents=True)
    (base / "live-elsewhere.0123/lock").write_bytes(b"")
    yield base


@pytest.mark.parametrize("kind", ["ext4", "lustre"])
def test_another_hosts_directories_on_a_shared_file_system(
    elsewhere: Path, under: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Whose lock may not be seen here. On a local one, nobody else can be there."""
    monkeypatch.setattr(scratch, "_mount_of", lambda path: ("/", kind))
    scratch.Scratch(under).remove()
    assert _left(under) == (["live"] if kind == "lustre" else [])


def test_a_place_that_somebody_else_has_made(under: Path) -> None:
    (under / f"forebay-{os.geteuid()}").symlink_to("/tmp")
    with pytest.raises(forebay.InvalidArgument, match="not a directory of this user's"):
        scratch.Scratch(under)


def test_the_roomiest_place_is_on_a_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    places = {name: tmp_path / name for name in ("memory", "disk")}
    for place in places.values():
        place.mkdir()
    monkeypatch.setattr(scratch.tempfile, "gettempdir", lambda: str(places["memory"]))
    monkeypatch.setattr(scratch, "_ALTERNATIVE", str(places["disk"]))
    free = {places["memory"]: 100, places["disk"]: 10}
    monkeypatch.setattr(scratch, "_free_bytes", free.__getitem__)
    monkeypatch.setattr(scratch, "_mount_of", lambda path: ("/", "tmpfs" if path == places["memory"] else "xfs"))
    assert scratch._roomiest() == places["disk"]
    monkeypatch.setattr(scratch, "_mount_of", lambda path: ("/", "xfs"))
    assert scratch._roomiest() == places["memory"]
    places["disk"].rmdir()
    assert scratch._roomiest() == places["memory"]


def test_mounts_are_told_apart() -> None:
    assert scratch._mount_of(Path("/proc/self"))[1] == "proc"
    assert scratch._mount_of(Path("/"))[0] == "/"


def test_one_block_each(memory_client: Client, under: Path) -> None:
    made = forebay.directory("r", 3, client=memory_client, under=under)
    with made as path:
        _fill(path)
    with pytest.raises(forebay.InvalidArgument, match="one block"):
        made.__enter__()
    assert isinstance(made, handoff.Directory)
