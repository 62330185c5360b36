"""The fixtures that watch all tests do fail a test when they should."""

import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parents[1] / "conftest.py"

LOGS = """
import asyncio, logging, pytest
log = logging.getLogger("forebay.x")
def test_warns(): log.warning("surprise %d", 1)
def test_other_name(): logging.getLogger("forebay_gateway.y").error("surprise 2")
def test_quiet(): log.info("fine"); logging.getLogger("urllib3").warning("not ours")
@pytest.mark.expected_logs("surp")
def test_marked(): log.warning("surprise")
@pytest.mark.expected_logs("other")
def test_marked_for_another(): log.warning("surprise")
@pytest.mark.expected_logs()
def test_all_allowed(): log.error("anything")
def test_allowed_at_run_time(expected_logs):
    expected_logs.allow("any"); log.error("anything"); assert len(expected_logs.records) == 1
def test_lost_task_exception():
    async def main():
        async def fails(): raise ValueError
        asyncio.ensure_future(fails()); await asyncio.sleep(0)
    asyncio.run(main())
"""
LEAKS = """
import socket, subprocess, sys, pytest
KEPT = []
def test_child(): KEPT.append(subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE))
def test_file(tmp_path): KEPT.append(open(tmp_path / "f", "w"))
def test_socket(): KEPT.append(socket.socket())
def test_clean(tmp_path):
    with open(tmp_path / "f", "w"), socket.socket(): pass
    subprocess.run([sys.executable, "-c", ""])
@pytest.fixture(scope="module", autouse=True)
def end():
    yield
    KEPT[0].stdin.close(); KEPT[0].wait(); KEPT[1].close(); KEPT[2].close()
"""


def outcomes(directory: Path) -> dict[str, set[str]]:
    """Test names by outcome of a run of pytest in `directory`; a fixture's failure counts as "ERROR"."""
    (directory / "conftest.py").write_text(CONFTEST.read_text().replace("_GRACE_S = 3.0", "_GRACE_S = 0.2"))
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-rA",
        "-c",
        "/dev/null",
        "--rootdir",
        str(directory),
        "-p",
        "no:cacheprovider",
        "-o",
        f"pythonpath={CONFTEST.parent}",
    ]
    result = subprocess.run([*command, str(directory)], capture_output=True, text=True, timeout=120, check=False)
    found: dict[str, set[str]] = {}
    for line in result.stdout.splitlines():
        word, _, rest = line.partition(" ")
        if word in ("PASSED", "FAILED", "ERROR") and "::" in rest:
            found.setdefault(word, set()).add(rest.split("::")[1].split(" ")[0])
    return found


def test_unexpected_log_records_fail(tmp_path: Path) -> None:
    (tmp_path / "test_logs_of.py").write_text(LOGS)
    found = outcomes(tmp_path)
    assert found["ERROR"] == {"test_warns", "test_other_name", "test_marked_for_another", "test_lost_task_exception"}
    assert found["PASSED"] >= {"test_quiet", "test_marked", "test_all_allowed", "test_allowed_at_run_time"}


def test_leaks_fail_where_processes_run(tmp_path: Path) -> None:
    (tmp_path / "crash").mkdir()
    (tmp_path / "crash" / "test_leaks.py").write_text(LEAKS)
    found = outcomes(tmp_path)
    assert found["ERROR"] == {"test_child", "test_file", "test_socket"}
    assert "test_clean" in found["PASSED"]


def test_leaks_are_not_watched_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "core").mkdir()
    (tmp_path / "core" / "test_leaks.py").write_text(LEAKS)
    assert "ERROR" not in outcomes(tmp_path)


def test_folders_share_one_s3_server() -> None:
    tests = CONFTEST.parent
    assert [path.parent.name for path in tests.rglob("conftest.py") if "SeaweedFS(" in path.read_text()] == [tests.name]
