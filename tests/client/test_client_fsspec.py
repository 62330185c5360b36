"""forebay.fsspec: what a step shows to whom and when, what a commit refuses, and what goes wrong."""

import gc
import os
import pickle
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

fsspec = pytest.importorskip("fsspec", reason="forebay.fsspec needs fsspec, which this environment does not have")

import forebay  # noqa: E402
from client.conftest import Gateway  # noqa: E402
from conftest import ExpectedLogs  # noqa: E402
from forebay import Client  # noqa: E402
from forebay.fsspec import ForebayFileSystem, StepCommitted  # noqa: E402
from forebay.fsspec.paths import parse, step_path  # noqa: E402
from forebay.testing import MemoryGateway  # noqa: E402
from forebay_wire.v1 import gateway_pb2 as pb  # noqa: E402

STEP = "forebay://team/model/7"
Make = Callable[..., ForebayFileSystem]


@pytest.fixture
def make(memory: MemoryGateway) -> Iterator[Make]:
    """A file system at the gateway in memory; what it leaves open is dropped."""

    def made(**options: Any) -> ForebayFileSystem:
        return ForebayFileSystem(memory.address, skip_instance_cache=True, **{"retry_timeout": 5, **options})

    yield made
    drop_all(made())


@pytest.fixture
def fs(make: Make) -> ForebayFileSystem:
    return make()


def drop_all(fs: ForebayFileSystem) -> None:
    for step in fs.uncommitted():
        fs.discard(step)


def saved(client: Client, step: int = 7, run: str = "team/model") -> dict[str, bytes] | None:
    """What another program sees of the step."""
    try:
        return dict(client.open(run, step).read_many())
    except (forebay.NotFound, forebay.Incomplete):
        return None


# -- the whole way, over every gateway and lane


def test_a_step_is_there_with_its_commit_and_not_before(gateway: Gateway, client: Client) -> None:
    fs = ForebayFileSystem(gateway.address, skip_instance_cache=True, retry_timeout=10)
    large = os.urandom((5 << 20) + 3)
    with fs.open(f"{STEP}/sub/large.bin", "wb") as file:
        for start in range(0, len(large), 999_983):
            file.write(large[start : start + 999_983])
    fs.pipe({f"{STEP}/a": b"a", f"{STEP}/empty": b""})
    assert fs.cat_file(f"{STEP}/sub/large.bin", 1 << 20, (1 << 20) + 5) == large[1 << 20 : (1 << 20) + 5]
    assert saved(client) is None and client.latest("team/model") is None

    written = fs.checksum(f"{STEP}/sub/large.bin")
    receipt = fs.commit(STEP, metadata={"epoch": 3}, wait="pfs", timeout=60)
    assert (receipt.level, receipt.checkpoint_complete, receipt.shard_count) == ("pfs", True, 3)
    assert saved(client) == {"sub/large.bin": large, "a": b"a", "empty": b""}
    assert client.describe("team/model", 7).metadata == {"epoch": 3}

    latest = "forebay://team/model/latest"
    assert fs.find(latest) == [f"team/model/latest/{name}" for name in ("a", "empty", "sub/large.bin")]
    assert fs.cat_file(f"{latest}/sub/large.bin", -3) == large[-3:]
    assert fs.checksum(f"{latest}/sub/large.bin") == written
    assert fs.info(f"{STEP}/a")["committed"] and fs.ls("team/model", detail=False) == ["team/model/7"]
    ranges = fs.cat_ranges([f"{STEP}/sub/large.bin", f"{STEP}/a", f"{STEP}/no"], [7, 0, 0], [4_500_000, 9, 1])
    assert ranges[:2] == [large[7:4_500_000], b"a"] and isinstance(ranges[2], FileNotFoundError)
    with fs.open(f"{STEP}/sub/large.bin") as file:
        buffer = bytearray((4 << 20) + 9)
        assert file.readinto(buffer) == len(buffer) and buffer == large[: len(buffer)]
        assert file.read() == large[len(buffer) :]
        again = pickle.loads(pickle.dumps(file))
        assert again.seek(-2, 2) and again.read() == large[-2:]


def test_what_lies_above_steps(make: Make, memory_client: Client) -> None:
    fs = make()
    for run, step in (("a", 1), ("a", 20), ("a/b", 3), ("2024/c/05", 4)):
        with memory_client.checkpoint(run, step) as part:
            part.put("x", b"1")
            part.commit()
    with memory_client.checkpoint("a", 30) as part:
        part.put("x", b"of a step that is not complete")
        assert fs.ls("", detail=False) == ["2024", "a"]
        assert fs.ls("a", detail=False) == ["a/1", "a/20", "a/b"]
        assert not fs.exists("a/30/x")
    assert fs.find("a") == ["a/1/x", "a/20/x", "a/b/3/x"]
    assert fs.glob("a/*/x") == ["a/1/x", "a/20/x"]
    assert fs.find("2024") == ["2024/c/05/step-4/x"]
    assert fs.cat("2024/c/05/step-4/x") == b"1"
    assert fs.isdir("2024/c/05") and fs.isdir("2024/c") and not fs.isdir("2024/d")
    fs.mkdir("new/run")
    assert fs.ls("new", detail=False) == ["new/run"] and fs.ls("new/run") == []
    fs.rmdir("new/run")
    assert not fs.exists("new")


@pytest.mark.parametrize(
    ("path", "run", "step", "name"),
    [
        ("run/5/f", "run", 5, "f"),
        ("team/run/5/a/6/f", "team/run", 5, "a/6/f"),
        ("2024/run/0005", "2024/run", 5, ""),
        ("team/2024/run/step-5/f", "team/2024/run", 5, "f"),
        ("run/latest/f", "run", "latest", "f"),
        ("5", "5", None, ""),
        ("run/steps/f", "run/steps/f", None, ""),
    ],
)
def test_a_path_is_taken_apart(path: str, run: str, step: int | str | None, name: str) -> None:
    place = parse(path)
    assert (place.run, place.step, place.name) == (run, step, name)
    if isinstance(step, int):
        assert parse(step_path(run, step)).key == (run, step)


# -- when a step is committed


def test_a_transaction_commits_what_its_block_wrote(fs: ForebayFileSystem, memory_client: Client) -> None:
    with fs.transaction:
        fs.pipe_file(f"{STEP}/a", b"1")
        with fs.open("forebay://team/model/8/b", "w") as file:
            file.write("text")
        assert fs.cat(f"{STEP}/a") == b"1"
        assert saved(memory_client) is None
    assert saved(memory_client) == {"a": b"1"} and saved(memory_client, 8) == {"b": b"text"}
    assert fs.uncommitted() == []


def test_a_transaction_that_fails_leaves_all_as_it_was(fs: ForebayFileSystem, memory_client: Client) -> None:
    fs.pipe_file(f"{STEP}/before", b"0")
    with pytest.raises(KeyboardInterrupt), fs.transaction:
        fs.pipe_file(f"{STEP}/before", b"changed")
        fs.pipe_file(f"{STEP}/a", b"1")
        fs.pipe_file("team/model/8/b", b"2")
        left = fs.open("team/model/8/c", "wb")
        raise KeyboardInterrupt
    assert left.closed and fs.uncommitted() == ["team/model/7"]
    assert fs.find(STEP) == ["team/model/7/before"] and fs.cat(f"{STEP}/before") == b"0"
    assert memory_client.runs() == []  # nothing of it has ever been sent
    fs.pipe_file(f"{STEP}/after", b"1")  # no transaction any more
    fs.commit(STEP)


def test_a_transaction_refuses_to_leave_a_file_out(fs: ForebayFileSystem, memory_client: Client) -> None:
    with pytest.raises(FileNotFoundError, match="'b' is still open for writing"), fs.transaction:
        fs.pipe_file(f"{STEP}/a", b"1")
        left = fs.open(f"{STEP}/b", "wb")
    assert left.closed and saved(memory_client) is None and fs.uncommitted() == []
    with pytest.raises(forebay.Incomplete, match=r"'b' was not finished \(ZeroDivisionError"), fs.transaction:
        fs.pipe_file(f"{STEP}/a", b"1")
        with pytest.raises(ZeroDivisionError), fs.open(f"{STEP}/b", "wb"):
            raise ZeroDivisionError
    assert saved(memory_client) is None


def test_a_commit_that_fails_ends_its_transaction(make: Make, memory: MemoryGateway, memory_client: Client) -> None:
    fs = make(retry_timeout=0)
    memory.fail("CommitPart", forebay.Unavailable("away"))
    with pytest.raises(ConnectionError, match="away"), fs.transaction:
        fs.pipe_file(f"{STEP}/a", b"1")
    assert saved(memory_client) is None and fs.uncommitted() == [] and not fs._intrans


def test_auto_commits_with_dcps_last_file_only_at_the_top(make: Make, memory_client: Client) -> None:
    fs = make()
    fs.pipe_file(f"{STEP}/part/.metadata", b"of a part")
    fs.pipe_file(f"{STEP}/.metadata.tmp", b"m")
    assert saved(memory_client) is None
    fs.mv(f"{STEP}/.metadata.tmp", f"{STEP}/.metadata")
    assert saved(memory_client) == {".metadata": b"m", "part/.metadata": b"of a part"}
    explicit = make(commit="explicit")
    explicit.pipe_file("team/model/8/.metadata", b"m")
    assert saved(memory_client, 8) is None


def test_auto_does_not_take_one_ranks_files_for_a_checkpoint(
    fs: ForebayFileSystem, memory_client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    fs.pipe_file(f"{STEP}/__0_0.distcp", b"of rank 0")
    with pytest.raises(NotImplementedError, match="4 ranks"):
        fs.pipe_file(f"{STEP}/.metadata", b"m")
    assert saved(memory_client) is None
    fs.commit(STEP)  # who knows better says so
    assert saved(memory_client) is not None


def test_close_commits_with_each_file(make: Make, memory: MemoryGateway, memory_client: Client) -> None:
    fs = make(commit="close")
    with fs.open(f"{STEP}/a.tmp", "wb") as file:
        file.write(b"1")
        assert saved(memory_client) is None
    assert saved(memory_client) == {"a.tmp": b"1"}
    fs.mv(f"{STEP}/a.tmp", f"{STEP}/a")
    assert saved(memory_client) == {"a": b"1"}
    memory.calls.clear()
    fs.pipe({f"{STEP}/b": b"2", f"{STEP}/c": b"3"})
    assert memory.calls.count("CommitPart") == 1
    assert saved(memory_client) == {"a": b"1", "b": b"2", "c": b"3"}
    fs.rm(f"{STEP}/b")
    with fs.open(f"{STEP}/a", "ab") as file:
        file.write(b"1")
    assert saved(memory_client) == {"a": b"11", "c": b"3"} and fs.uncommitted() == []
    fs.rm([f"{STEP}/a", f"{STEP}/c"])
    assert saved(memory_client) is None and not fs.exists(STEP)


def test_close_gives_each_save_a_session_of_its_own(make: Make, memory_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FOREBAY_SESSION", "launch-1")
    fs = make(commit="close")
    fs.pipe_file(f"{STEP}/a", b"1")
    first = memory_client.describe("team/model", 7).session
    fs.pipe_file(f"{STEP}/a", b"2")
    second = memory_client.describe("team/model", 7).session
    assert first != second and first.startswith("launch-1-") and second.startswith("launch-1-")


def test_close_of_several_files_at_a_time(make: Make, memory_client: Client) -> None:
    fs = make(commit="close")
    files = [fs.open(f"{STEP}/{number}", "wb") for number in range(4)]

    def write(number: int) -> None:
        with files[number] as file:
            file.write(b"x" * number)

    threads = [threading.Thread(target=write, args=[number]) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert saved(memory_client) == {str(number): b"x" * number for number in range(4)}


def test_close_does_not_add_to_what_another_has_committed(make: Make, memory_client: Client) -> None:
    fs = make(commit="close")
    fs.pipe_file(f"{STEP}/a", b"1")
    with memory_client.checkpoint("team/model", 7) as part:
        part.put("other", b"2")
        part.commit()
    with pytest.raises(StepCommitted):
        fs.pipe_file(f"{STEP}/b", b"3")
    assert saved(memory_client) == {"other": b"2"}


# -- what is committed does not change


def test_a_committed_step_is_immutable(fs: ForebayFileSystem, make: Make, memory_client: Client) -> None:
    fs.pipe_file(f"{STEP}/dir/a", b"1")
    fs.commit(STEP)
    fs.pipe_file("team/model/8/b", b"2")
    acts: list[Callable[[], object]] = [
        lambda: fs.open(f"{STEP}/dir/a", "wb"),
        lambda: fs.open(f"{STEP}/dir/a", "ab"),
        lambda: fs.pipe_file(f"{STEP}/new", b"2"),
        lambda: fs.rm(f"{STEP}/dir/a"),
        lambda: fs.rm(f"{STEP}/dir", recursive=True),
        lambda: fs.mv(f"{STEP}/dir/a", f"{STEP}/b"),
        lambda: fs.mv(f"{STEP}/dir/a", "team/model/8/a"),
        lambda: fs.mv("team/model/8/b", f"{STEP}/b"),
        lambda: fs.cp_file(f"{STEP}/dir/a", f"{STEP}/b"),
        lambda: fs.mkdir(f"{STEP}/new"),
    ]
    for act in acts:
        with pytest.raises(PermissionError, match=r"do(es)? not change") as caught:
            act()
        assert isinstance(caught.value, StepCommitted) and isinstance(caught.value, forebay.AlreadyExists)
    assert saved(memory_client) == {"dir/a": b"1"} and fs.cat("team/model/8/b") == b"2"
    with pytest.raises(FileExistsError):
        fs.mkdir(STEP)
    fs.makedirs(STEP, exist_ok=True)

    replacing = make(replace=True)
    replacing.pipe_file(f"{STEP}/new", b"2")
    assert replacing.find(STEP) == ["team/model/7/new"] and saved(memory_client) == {"dir/a": b"1"}
    replacing.commit(STEP)
    assert saved(memory_client) == {"new": b"2"}
    assert fs.find(STEP) == ["team/model/7/new"]  # no listing of a session that is superseded


def test_a_step_that_another_commits_meanwhile(fs: ForebayFileSystem, memory_client: Client) -> None:
    fs.pipe_file(f"{STEP}/a", b"1")
    with memory_client.checkpoint("team/model", 7) as part:
        part.put("other", b"2")
        part.commit()
    with pytest.raises(StepCommitted, match="by another meanwhile"):
        fs.commit(STEP)
    assert saved(memory_client) == {"other": b"2"} and fs.uncommitted() == ["team/model/7"]
    fs.discard(STEP)
    assert fs.find(STEP) == ["team/model/7/other"]


def test_a_whole_step_is_removed(fs: ForebayFileSystem, memory_client: Client) -> None:
    fs.pipe_file(f"{STEP}/a", b"1")
    fs.rm(STEP, recursive=True)
    assert fs.uncommitted() == []
    fs.pipe_file(f"{STEP}/a", b"1")
    fs.commit(STEP)
    with pytest.raises(NotImplementedError, match="remove its steps"):
        fs.rm("team/model", recursive=True)
    fs.rm(STEP, recursive=True)
    assert saved(memory_client) is None
    with pytest.raises(FileNotFoundError):
        fs.rm(STEP, recursive=True)


# -- inside an open step


def test_an_open_step_is_a_file_system(fs: ForebayFileSystem, make: Make) -> None:
    fs.makedirs(f"{STEP}/empty/inner")
    fs.pipe_file(f"{STEP}/d/a", b"old")
    reading = fs.open(f"{STEP}/d/a")
    fs.pipe_file(f"{STEP}/d/a", b"newer")
    assert reading.read() == b"old" and fs.cat(f"{STEP}/d/a") == b"newer"
    assert fs.ls(STEP, detail=False) == ["team/model/7/d", "team/model/7/empty"]
    fs.mv(f"{STEP}/d", f"{STEP}/e", recursive=True)
    assert fs.find(STEP, withdirs=True) == [f"team/model/7{x}" for x in ("", "/e", "/e/a", "/empty", "/empty/inner")]
    with pytest.raises(OSError, match="not empty"):
        fs.rmdir(f"{STEP}/empty")
    with pytest.raises(IsADirectoryError):
        fs.open(f"{STEP}/e", "wb")
    with pytest.raises(IsADirectoryError):
        fs.cat_file(f"{STEP}/e")
    with pytest.raises(NotADirectoryError):
        fs.open(f"{STEP}/e/a/b", "wb")
    with pytest.raises(FileExistsError):
        fs.open(f"{STEP}/e/a", "xb")
    with fs.open(f"{STEP}/seek", "wb") as file:
        file.write(b"x" * 70_000)
        file.seek(10)
        file.write(b"y")
        file.seek(0, 2)
        assert file.tell() == 70_000 and file.truncate(20) == 20
    assert fs.cat(f"{STEP}/seek") == b"x" * 10 + b"y" + b"x" * 9
    assert make().cat(f"{STEP}/e/a") == b"newer"  # instances of one process share it


@pytest.mark.parametrize("mode", ["auto", "close"])
@pytest.mark.parametrize("way", ["fs", "text", "gzip", "url"])
def test_a_block_that_raises_leaves_nothing(
    make: Make, memory: MemoryGateway, memory_client: Client, tmp_path: Path, expected_logs: ExpectedLogs, mode: str, way: str
) -> None:
    expected_logs.allow("is given up: ZeroDivisionError")
    options = {"commit": mode, "spool_dir": str(tmp_path)}
    fs = make(**options)
    opened: dict[str, Callable[[], Any]] = {
        "fs": lambda: fs.open(f"{STEP}/a", "wb"),
        "text": lambda: fs.open(f"{STEP}/a", "w", encoding="latin-1"),
        "gzip": lambda: fs.open(f"{STEP}/a", "wb", compression="gzip"),
        "url": lambda: fsspec.open(f"{STEP}/a", "wb", address=memory.address, **options),
    }
    data = os.urandom(200_000)
    with pytest.raises(ZeroDivisionError), opened[way]() as file:
        file.write(data.decode("latin-1") if way == "text" else data)
        assert len(list(tmp_path.iterdir())) == 1
        raise ZeroDivisionError
    assert not fs.exists(f"{STEP}/a") and list(tmp_path.iterdir()) == [] and memory_client.runs() == []
    with pytest.raises(forebay.Incomplete, match="'a' was not finished"):
        fs.commit(STEP)
    fs.rm(f"{STEP}/a")  # or written again
    fs.pipe_file(f"{STEP}/b", b"1")
    if mode == "auto":
        fs.commit(STEP)
    assert saved(memory_client) == {"b": b"1"}


@pytest.mark.parametrize("kind", ["gzip", "bz2", "xz"])
def test_a_compressed_file_is_finished_when_it_is_closed(fs: ForebayFileSystem, kind: str) -> None:
    with fs.open(f"{STEP}/a", "wb", compression=kind) as file:
        file.write(b"x" * 100_000)
    with fs.open(f"{STEP}/text", "w", compression=kind) as file:
        file.write("y")
    assert fs.size(f"{STEP}/a") < 10_000
    with fs.open(f"{STEP}/a", "rb", compression=kind) as file:
        assert file.read() == b"x" * 100_000
    assert fs.read_text(f"{STEP}/text", compression=kind) == "y"


def test_an_error_that_is_older_than_the_file_does_not_count(make: Make, memory_client: Client) -> None:
    fs = make(commit="close")
    try:
        raise ZeroDivisionError
    except ZeroDivisionError:
        with fs.open(f"{STEP}/emergency", "wb") as file:
            file.write(b"1")
    assert saved(memory_client) == {"emergency": b"1"}


@pytest.mark.expected_logs("was never closed")
def test_a_file_that_is_only_collected_is_not_finished(fs: ForebayFileSystem) -> None:
    fs.open(f"{STEP}/a", "wb").write(b"half")
    gc.collect()
    assert not fs.exists(f"{STEP}/a")
    with pytest.raises(forebay.Incomplete, match="'a' was never closed"):
        fs.commit(STEP)
    fs.pipe_file(f"{STEP}/a", b"whole")
    fs.commit(STEP)


def test_written_files_are_removed_with_their_step(make: Make, tmp_path: Path) -> None:
    fs = make(spool_dir=str(tmp_path))
    fs.pipe_file(f"{STEP}/a", b"x" * 100_000)
    fs.pipe_file(f"{STEP}/a", b"y" * 100_000)
    gc.collect()
    assert len(list(tmp_path.iterdir())) == 1
    fs.commit(STEP)
    gc.collect()
    assert list(tmp_path.iterdir()) == [] and fs.cat(f"{STEP}/a") == b"y" * 100_000


# -- processes and threads


def test_a_pickled_file_system_works(fs: ForebayFileSystem) -> None:
    fs.pipe_file(f"{STEP}/a", b"1")
    fs.commit(STEP)
    assert pickle.loads(pickle.dumps(fs)).cat(f"{STEP}/a") == b"1"
    assert fsspec.AbstractFileSystem.from_json(fs.to_json()).cat(f"{STEP}/a") == b"1"


def test_many_threads_write_one_step(fs: ForebayFileSystem, memory_client: Client) -> None:
    def write(number: int) -> None:
        for each in range(20):
            fs.pipe_file(f"{STEP}/{number}/{each}", b"%d" % number * 100)

    threads = [threading.Thread(target=write, args=[number]) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    fs.commit(STEP)
    assert saved(memory_client) == {f"{n}/{each}": b"%d" % n * 100 for n in range(6) for each in range(20)}


_FORK = """
import os, sys, fsspec
from forebay.fsspec import ForebayFileSystem
fs = fsspec.filesystem("forebay", address=sys.argv[1], spool_dir=sys.argv[2])
fs.pipe_file("team/model/1/a", b"1" * 100_000)
fs.commit("team/model/1")
fs.pipe_file("team/model/2/a", b"2" * 100_000)
half = fs.open("team/model/2/b", "wb")
half.write(b"3" * 100_000)
child = os.fork()
if child == 0:
    half.close()
    assert fs.cat("team/model/1/a") == b"1" * 100_000  # over a channel of its own
    assert not fs.exists("team/model/2/a") and fs.uncommitted() == []
    again = fsspec.filesystem("forebay", address=sys.argv[1], spool_dir=sys.argv[2])
    assert again is not fs
    again.pipe_file("team/model/3/c", b"of the child")
    again.commit("team/model/3")
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
half.close()
fs.commit("team/model/2")
assert fs.cat("team/model/2/b") == b"3" * 100_000 and fs.cat("team/model/3/c") == b"of the child"
fs.pipe_file("team/model/4/a", b"never committed")
"""


def test_a_fork_leaves_the_parents_open_step_alone(memory: MemoryGateway, memory_client: Client, tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", _FORK, memory.address, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert "forebay://team/model/4 was written (1 files) and never committed" in ended.stderr
    assert list(tmp_path.iterdir()) == [] and saved(memory_client, 4) is None
    assert saved(memory_client, 2) == {"a": b"2" * 100_000, "b": b"3" * 100_000}


# -- hostile input


@pytest.mark.parametrize(
    "path",
    [
        "team/../7/a",
        "team/7/../../a",
        "team/7/a//b",
        f"team/7/{'x' * 256}",
        f"team/7/{'x/' * 600}y",
        "team/7/.forebay-x",
        "team/7/new\nline",
        f"team/{1 << 64}/a",
        f"team/{'9' * 5000}/a",
        "team/7/\udc80",
        "team/seven/a",
        "team/latest/a",
        "model.bin",
    ],
)
def test_a_bad_path_is_named_and_nothing_is_sent(fs: ForebayFileSystem, memory: MemoryGateway, path: str) -> None:
    acts: list[Callable[[], object]] = [
        lambda: fs.open(path, "wb"),
        lambda: fs.pipe_file(path, b"1"),
        lambda: fs.commit(path),
        lambda: fs.discard(path),
    ]
    for act in acts:
        with pytest.raises(forebay.InvalidArgument) as caught:
            act()
        assert isinstance(caught.value, ValueError) and isinstance(caught.value, OSError)
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 2000
    assert not fs.exists(path) and not fs.isfile(path) and not fs.isdir(path)
    assert not {"PutShard", "PutMany", "CommitPart"} & set(memory.calls) and fs.uncommitted() == []


def test_a_missing_gateway_is_no_empty_one(tmp_path: Path) -> None:
    fs = ForebayFileSystem(f"unix://{tmp_path}/none.sock", retry_timeout=0.2, skip_instance_cache=True)
    acts: list[Callable[[], object]] = [
        lambda: fs.ls(""),
        lambda: fs.info(STEP),
        lambda: fs.exists(f"{STEP}/a"),
        lambda: fs.isfile(f"{STEP}/a"),
        lambda: fs.isdir(STEP),
        lambda: fs.find("team"),
        lambda: list(fs.walk("team")),
        lambda: fs.find(STEP),
        lambda: fs.glob("team/*"),
        lambda: fs.cat_file(f"{STEP}/a"),
        lambda: fs.open(f"{STEP}/a"),
        lambda: fs.open(f"{STEP}/a", "wb"),
        lambda: fs.rm(STEP, recursive=True),
        lambda: fs.cat_ranges([f"{STEP}/a"], 0, 1, on_error="raise"),
    ]
    for act in acts:
        with pytest.raises(ConnectionError) as caught:
            act()
        assert isinstance(caught.value, forebay.Unavailable)
    assert fs.uncommitted() == []


def test_what_is_not_there(fs: ForebayFileSystem) -> None:
    fs.pipe_file(f"{STEP}/a", b"1")
    fs.commit(STEP)
    for path in (f"{STEP}/b", f"{STEP}/a/b", "team/model/8/a", "team/other/7/a", "team/other", "other/latest/a"):
        with pytest.raises(FileNotFoundError) as caught:
            fs.info(path)
        assert isinstance(caught.value, forebay.NotFound)
        with pytest.raises(FileNotFoundError):
            fs.open(path)
        with pytest.raises(FileNotFoundError):
            fs.rm(path)
    with pytest.raises(FileNotFoundError, match="nothing of this step is being written"):
        fs.commit(STEP)
    with pytest.raises(NotImplementedError):
        fs.modified(f"{STEP}/a")


def test_ranges_are_those_of_a_slice(fs: ForebayFileSystem) -> None:
    data = bytes(range(100))
    fs.pipe_file(f"{STEP}/a", data)
    for committed in (False, True):
        if committed:
            fs.commit(STEP)
        for start, end in ((None, None), (0, 0), (5, 3), (90, 500), (500, 600), (-7, None), (-7, -2), (None, -99), (-500, 2)):
            assert fs.cat_file(f"{STEP}/a", start, end) == data[start:end], (start, end)
    file = fs.open(f"{STEP}/a")
    with pytest.raises(ValueError):
        file.seek(-1)
    file.seek(200)
    assert file.read(5) == b"" and file.readinto(bytearray(5)) == 0
    file.close()
    for act in (lambda: file.read(1), lambda: file.readinto(bytearray(1))):
        with pytest.raises(ValueError, match="closed file"):
            act()


def test_a_closed_file_takes_nothing_more(fs: ForebayFileSystem) -> None:
    file = fs.open(f"{STEP}/a", "wb")
    file.write(b"1")
    file.close()
    file.close()
    for act in (lambda: file.write(b"2"), lambda: file.seek(0), file.tell, file.truncate, file.flush):
        with pytest.raises(ValueError, match="closed file"):
            act()
    assert fs.cat(f"{STEP}/a") == b"1"
    fs.discard(STEP)
    left = fs.open(f"{STEP}/a", "wb")
    fs.discard(STEP)
    with pytest.raises(StepCommitted):
        left.close()


class CountingGateway(MemoryGateway):
    """Counts what reads bring."""

    sent = 0

    def ReadShard(self, request: pb.ReadShardRequest, context: Any) -> Iterator[pb.ReadShardResponse]:
        for message in super().ReadShard(request, context):
            self.sent += len(message.chunk.data)
            yield message


def test_a_read_of_a_little_brings_a_little() -> None:
    with CountingGateway(chunk_size=64 << 10) as memory:
        fs = ForebayFileSystem(memory.address, skip_instance_cache=True)
        data = os.urandom(8 << 20)
        fs.pipe_file(f"{STEP}/a", data)
        fs.commit(STEP)
        assert fs.cat_file(f"{STEP}/a", 5 << 20, (5 << 20) + 10) == data[5 << 20 : (5 << 20) + 10]
        assert memory.sent == 10
        with fs.open(f"{STEP}/a", block_size=1000) as file:
            file.seek(-100, 2)
            assert file.read(100) == data[-100:]
            file.seek(4 << 20)
            assert file.read(10) == data[4 << 20 : (4 << 20) + 10]
        assert memory.sent < 5000


def test_options_are_checked(make: Make) -> None:
    for options, said in (
        ({"asynchronous": True}, "AsyncClient"),
        ({"commit": "never"}, "auto, close, explicit"),
        ({"comit": "close"}, "'comit'"),
        ({"streams": 0}, "streams"),
        ({"address": "nowhere"}, "nowhere"),
    ):
        with pytest.raises((OSError, NotImplementedError), match=said):
            ForebayFileSystem(**{**options, "skip_instance_cache": True})
    with pytest.raises(NotImplementedError, match="rb, wb, xb and ab"):
        make().open(f"{STEP}/a", "r+b")


def test_the_entry_point_names_the_class() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, name = project["entry-points"]["fsspec.specs"]["forebay"].partition(":")
    assert getattr(sys.modules[module], name) is ForebayFileSystem
    assert fsspec.get_filesystem_class("forebay") is ForebayFileSystem
    assert any(re.match(r"fsspec\b", each) for each in project["optional-dependencies"]["fsspec"])


def test_without_fsspec_it_says_what_to_install() -> None:
    code = "import sys; sys.modules['fsspec'] = None; import forebay.fsspec"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "install Forebay's extra 'fsspec' (in its tree: pip install '.[fsspec]')" in ended.stderr
    ended = subprocess.run([sys.executable, "-c", "import forebay, sys; assert 'fsspec' not in sys.modules"], timeout=60)
    assert ended.returncode == 0
