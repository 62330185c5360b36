"""The command line: output, exit codes, one clear line for each error."""

import errno
import json
import logging
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

import forebay
from forebay import Client
from forebay.cli import app, exits, show
from forebay.cli.app import run
from forebay.convert import record
from forebay.testing import MemoryGateway
from forebay.types import Status
from forebay_wire.v1 import admin_pb2

COMMAND = [sys.executable, "-c", "from forebay.cli import main; main()"]


@pytest.fixture
def call(gateway, capsys: pytest.CaptureFixture[str]):
    return _caller(gateway.address, capsys)


@pytest.fixture
def memory_call(memory: MemoryGateway, capsys: pytest.CaptureFixture[str]):
    return _caller(memory.address, capsys)


def _caller(address: str, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: str, code: int = 0) -> str:
        capsys.readouterr()
        assert run(["--address", address, *arguments]) == code, capsys.readouterr().err
        said = capsys.readouterr()
        if code:
            assert said.err.startswith("forebay") and said.err.count("\n") == 1, said.err
            return said.err
        assert said.err == "" and "\033" not in said.out
        return said.out

    return call


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "d/sub").mkdir(parents=True)
    (tmp_path / "d/big").write_bytes(os.urandom((5 << 20) + 1))
    (tmp_path / "d/sub/small").write_bytes(b"small")
    return tmp_path / "d"


@pytest.mark.parametrize("level,code", [("nosuch", exits.USAGE), ("peer", None)])
def test_a_level_that_is_not_there_fails_before_anything_is_saved(gateway, call, directory: Path, level: str, code) -> None:
    code = code or (exits.USAGE if isinstance(gateway, MemoryGateway) else exits.FAILED)  # there: no peers are configured
    said = call("save", str(directory), "--run", "r", "--step", "1", "--wait", level, code=code)
    assert level in said and "nothing was sent" in said
    assert json.loads(call("ls", "--json")) == []
    call("save", str(directory), "--run", "r", "--step", "1", "--wait", "all", "--timeout", "60")


def test_a_source_that_is_not_there_fails_before_anything_is_made(gateway, call, directory: Path, tmp_path: Path) -> None:
    call("save", str(directory), "--run", "r", "--step", "1")
    said = call("restore", "r", str(tmp_path / "out"), "--from", "nosuch", code=exits.USAGE)
    assert "'nosuch'" in said and "auto, cache, peer, pfs" in said and not (tmp_path / "out").exists()
    said = call("restore", "r", str(tmp_path / "out"), "--from", "peer", code=exits.NOT_FOUND)
    assert "no other node" in said and not (tmp_path / "out").exists()


def test_save_look_restore(call, directory: Path, tmp_path: Path) -> None:
    words = ["--run", "t/r", "--step", "5", "--wait", "pfs", "--timeout", "60", "--json"]
    saved = json.loads(call("save", str(directory), *words))
    keys = {"run", "step", "session", "writer", "shards", "size", "level", "checkpoint_complete", "elapsed_s"}
    assert set(saved) == keys | {"transient", "through"}
    assert (saved["shards"], saved["level"]) == (2, "pfs")
    assert json.loads(call("ls", "--json")) == [{"run": "t/r", "checkpoints": 1, "latest_step": 5}]
    assert "t/r" in call("ls")
    assert [item["step"] for item in json.loads(call("ls", "t/r", "--json"))] == [5]
    assert "complete" in call("ls", "t/r") and "sub/small" in call("ls", "t/r", "5")
    shards = json.loads(call("ls", "t/r", "5", "--json"))
    assert [item["name"] for item in shards] == ["big", "sub/small"] and shards[0]["copies"] == {"pfs": "verified"}
    info = json.loads(call("info", "t/r", "5", "--json"))
    assert info["state"] == "complete" and len(info["shards"]) == 2 and info["session"] == saved["session"]
    assert call("info", "t/r", "latest") == call("info", "t/r", "5")
    assert "a step is a number or 'latest', not 'newest'" in call("info", "t/r", "newest", code=2)
    assert "no complete checkpoint" in call("info", "t/none", "latest", code=3)
    assert "pfs" in call("info", "t/r", "5") and "crc32c" in call("info", "t/r", "5", "sub/small")
    for number, words in enumerate((["t/r"], ["t/r", "5"], ["t/r", "latest"], ["t/r", "5", "--from", "pfs", "--durable"])):
        target = tmp_path / f"out{number}"
        position = len(words) if number < 3 else 2
        words.insert(position, str(target))
        restored = json.loads(call("restore", *words, "--json"))
        assert (restored["step"], restored["shards"]) == (5, 2)
        assert (target / "big").read_bytes() == (directory / "big").read_bytes()
    assert json.loads(call("wait", "t/r", "5", "--json"))["reached"] is True
    assert "all checked" in call("restore", "t/r", str(tmp_path / "again"))


def test_status(call, directory: Path) -> None:
    found = json.loads(call("status", "--json"))
    assert found["health"] in ("ok", "warning") and found["tiers"][0]["name"] == "pfs"
    assert call("queue", "hold").strip() == "held: pfs"
    call("save", str(directory), "--run", "r", "--step", "1")
    deadline_s = time.monotonic() + 10
    while "tier pfs is held" not in (text := call("status")) and time.monotonic() < deadline_s:
        time.sleep(0.1)
    assert "tier pfs is held" in text and "at risk" in text
    assert "out in    pfs: held" in text  # and no rate, which would only be the memory of what went before
    assert "B/s" not in text
    assert json.loads(call("queue", "release", "pfs", "--json")) == {"held": False, "tiers": ["pfs"], "ids": []}
    assert "pressure" in call("pressure") and json.loads(call("pressure", "--json"))["level"] == "ok"
    assert "[cache]" in call("config", "show", "--running")


def test_writers_share_a_session(call, directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FOREBAY_SESSION", "SLURM_JOB_ID", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    both = ["--run", "r", "--step", "1", "--writers", "2"]
    said = call("save", str(directory / "sub"), *both, code=2)
    assert "give --session, or set FOREBAY_SESSION" in said and "session=" not in said
    out = call("save", str(directory / "sub"), *both, "--writer", "1", "--session", "s")
    assert "still missing" in out
    assert "writer 0" in call("info", "r", "1")
    assert "writer 0" in call("restore", "r", "1", "/nonexistent/x", code=4)
    assert "writer 0" in call("wait", "r", "1", "cache", "--timeout", "0.3", code=8)


def test_rm_is_a_dry_run_until_yes(call, directory: Path) -> None:
    call("save", str(directory), "--run", "r", "--step", "1", "--wait", "pfs", "--timeout", "60")
    assert json.loads(call("pin", "r", "1", "--json")) == {"run": "r", "step": 1, "pinned": True}
    assert "unpin it first" in call("rm", "r", "1", "--yes", "--force", code=2)
    call("unpin", "r", "1")
    assert "would delete" in call("rm", "r", "1")
    assert "complete" in call("ls", "r")
    gone = json.loads(call("rm", "r", "1", "--yes", "--json"))
    assert gone["deleted"] is True and gone["shards"] == 2
    call("ls", "r", code=3)


def test_rm_says_what_lets_the_only_copy_go(call, directory: Path) -> None:
    call("queue", "hold")
    call("save", str(directory), "--run", "r", "--step", "1")
    assert "--force" in call("rm", "r", "1", "--yes", code=2)
    assert "would delete" in call("rm", "r", "1", "--force")
    call("queue", "release")


ERRORS = [
    (forebay.NotFound("x"), 3),
    (forebay.Corrupt("x"), 4),
    (forebay.Incomplete("x"), 4),
    (forebay.PermissionDenied("x"), 7),
    (forebay.DeadlineExceeded("x"), 8),
    (forebay.InvalidArgument("x"), 2),
    (forebay.Unsupported("x"), 1),
    (forebay.AlreadyExists("x"), 1),
    (forebay.ForebayError("two\nlines"), 1),
]


@pytest.mark.parametrize("error,code", ERRORS, ids=lambda item: getattr(item, "kind", str(item)))
def test_exit_codes(memory: MemoryGateway, memory_call, error: forebay.ForebayError, code: int) -> None:
    memory.fail("ListRuns", error)
    memory_call("ls", code=code)


@pytest.mark.parametrize("raised,code", [(forebay.CacheFull("x"), 6), (forebay.Unavailable("x"), 5), (OSError(28, "full"), 1)])
def test_exit_codes_of_what_is_retried(raised: Exception, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> int:
        raise raised

    assert exits.guarded(command) == code
    assert capsys.readouterr().err.count("\n") == 1


def test_every_kind_has_a_code_from_the_contract() -> None:
    from forebay.errors import _BY_KIND

    assert set(exits.CODES) | {"already_exists", "unsupported"} == set(_BY_KIND)


def test_usage_has_one_pair_of_brackets_an_argument(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("ls", "info", "wait", "queue hold", "queue release", "queue retry", "queue prio"):
        assert run([*command.split(), "--help"]) == 0
        usage, _, rest = capsys.readouterr().out.partition("\n\n")
        assert "[[" not in usage and "]]" not in usage, usage
        assert "]]" not in rest.partition("Options:")[0], rest


def test_help_offers_no_level_that_is_always_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("wait", "save"):
        assert run([command, "--help"]) == 0
        assert "peer" not in capsys.readouterr().out


USAGE_ERRORS = "nonsense|rm r|rm r x|ls --nope|restore r 1 x y|restore r q x"


@pytest.mark.parametrize("arguments", [text.split() for text in USAGE_ERRORS.split("|")], ids=" ".join)
def test_usage_errors(memory_call, arguments: list[str]) -> None:
    assert len(memory_call(*arguments, code=2)) < 300


def test_missing_files_and_bad_directories(memory_call, tmp_path: Path) -> None:
    assert "not a directory" in memory_call("save", str(tmp_path / "no"), "--run", "r", "--step", "1", code=2)
    assert "no run" in memory_call("ls", "nope", code=3)
    assert "no shard" in _one(memory_call, tmp_path)


def _one(call, tmp_path: Path) -> str:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/x").write_bytes(b"x")
    call("save", str(tmp_path / "d"), "--run", "r", "--step", "1")
    return call("info", "r", "1", "nope", code=3)


def test_ctrl_c_while_the_program_is_still_loading_ends_with_130_and_no_traceback() -> None:
    code = """
import sys

class Interrupting:
    def find_spec(self, name, *_):
        if name == "forebay.cli.app":
            raise KeyboardInterrupt

sys.meta_path.insert(0, Interrupting())
from forebay.cli import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (130, "forebay: interrupted: nothing was begun\n")


def test_save_that_waited_in_vain_says_that_the_cache_has_it(memory: MemoryGateway, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"x")
    with Client(memory.address) as client:
        client.hold()
    asked = ["save", str(tmp_path), "--run", "r", "--step", "1", "--wait", "pfs", "--timeout", "1"]
    done = _process(["--address", memory.address, *asked])
    assert done.returncode == 8 and "committed (cache)" in done.stderr
    assert "timeout_s=1.0\n" in done.stderr or "timeout_s=0." in done.stderr
    info = _process(["--address", memory.address, "info", "r", "1"]).stdout
    assert "1 writer, 1 shard," in info


def test_configuration_that_is_not_there(tmp_path: Path) -> None:
    pytest.importorskip("forebay_gateway.core.config")
    for command in (["config", "check", f"{tmp_path}/none.toml"], ["serve", "--config", f"{tmp_path}/none.toml"]):
        done = _process(command)
        assert done.returncode == 1 and done.stderr.endswith("none.toml: No such file or directory\n"), done.stderr


def test_no_gateway_is_told_at_once(tmp_path: Path) -> None:
    done = _process(["--address", f"unix://{tmp_path}/no.sock", "status"])
    assert (done.returncode, done.stdout) == (5, "")
    assert "forebay serve" in done.stderr and "Traceback" not in done.stderr


def test_what_saves_and_restores_waits_for_a_gateway_that_starts(
    memory_call, directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(app.addresses, "await_listener", lambda address, wait_s, tell: waited.append(wait_s))
    memory_call("status")
    assert waited == []
    memory_call("save", str(directory), "--run", "r", "--step", "1")
    memory_call("restore", "r", str(tmp_path / "out"))
    memory_call("wait", "r", "1")
    assert waited == [app.WAIT_FOR_GATEWAY_S] * 3


def test_a_gateway_that_does_not_come_is_told_of_after_the_wait(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(app, "WAIT_FOR_GATEWAY_S", 0.2)
    assert run(["--address", f"{tmp_path}/no.sock", "save", str(directory), "--run", "r", "--step", "1"]) == 5
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and "no gateway answers" in said and "forebay serve" in said and "waited_s=" in said


@pytest.mark.expected_logs("trying again", "a gateway's own record")
def test_what_the_library_waits_for_is_told_on_standard_error(memory: MemoryGateway, monkeypatch, capsys) -> None:
    def busy(client: Client) -> None:
        logging.getLogger("forebay").warning("%s", "trying again for up to 58 s more: there is no socket")
        logging.getLogger("forebay.serve").warning("a gateway's own record")
        raise forebay.Unavailable("away")

    monkeypatch.setattr(Client, "status", busy)
    for _ in range(2):  # one handler, however many commands a process runs
        assert run(["--address", memory.address, "status"]) == 5
        assert capsys.readouterr().err == "forebay: trying again for up to 58 s more: there is no socket\nforebay: away\n"


def test_a_global_option_after_the_command_is_told_where_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["status", "--address", "/run/forebay/gateway.sock"]) == 2
    assert "it goes before the command, forebay --address ADDRESS ..." in capsys.readouterr().err
    assert run(["status", "--nonsense"]) == 2
    assert "before the command" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "/a/b"), exits.DENIED, "/a/b: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device"), exits.FAILED, "No space left on device"),
        (
            OSError(errno.EXDEV, "Invalid cross-device link", b"/a", None, "/b"),
            exits.FAILED,
            "/a -> /b: Invalid cross-device link",
        ),
        (OSError("in words"), exits.FAILED, "in words"),
    ],
)
def test_what_the_system_refuses_is_told_in_words(error: OSError, code: int, said: str, capsys) -> None:
    def fails() -> None:
        raise error

    assert exits.guarded(fails) == code
    assert capsys.readouterr().err == f"forebay: {said}\n"


def test_status_says_a_tiers_error_once(capsys: pytest.CaptureFixture[str]) -> None:
    why = "NoSuchBucket: the bucket is not there endpoint=http://s3.example.com"
    tier = admin_pb2.TierStatus(name="object", kind="s3", state="away", reason=why, required=True)
    status = admin_pb2.Status(node="n", health="critical", tiers=[tier])
    status.alarms.add(severity="critical", what=f"tier object is away, 2 copies wait: {why}", todo="bring the tier back")
    show._say_status(record(status, Status))
    shown = capsys.readouterr().out
    assert shown.count("NoSuchBucket") == 1 and "stuck     tier object is away\n" in shown
    status.ClearField("alarms")  # of a tier that nothing was found wrong with yet
    show._say_status(record(status, Status))
    assert f"stuck     tier object is away: {why}\n" in capsys.readouterr().out


def test_version_and_help() -> None:
    assert _process(["--version"]).stdout == f"forebay {forebay.__version__}\n"
    assert "8 timed out" in _process(["--help"]).stdout


@pytest.mark.parametrize("command", ["save", "restore", "ls", "info", "status", "wait", "rm", "pin", "unpin", "pressure"])
def test_help_documents_the_keys(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run([command, "--help"]) == 0
    said = capsys.readouterr().out
    assert "--json" in said and "JSON" in said


def test_config(tmp_path: Path) -> None:
    pytest.importorskip("forebay_gateway.core.config")
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    tier = f'[[tier]]\nname = "pfs"\nkind = "posix"\npath = "{tmp_path}/pfs"\n'
    good.write_text(f'[cache]\npath = "{tmp_path}/cache"\ncapacity = "3 GiB"\n{tier}')
    bad.write_text(f'[cache]\npath = "{tmp_path}/cache"\ncapacitty = "3 GiB"\n{tier}')
    assert _process(["config", "check", str(good)]).returncode == 0
    refused = _process(["config", "check", str(bad)])
    assert refused.returncode == 1 and "capacity" in refused.stderr and refused.stderr.count("\n") == 1
    shown = _process(["config", "show", str(good)])
    assert 'capacity = "3GiB"' in shown.stdout
    as_json = json.loads(_process(["config", "show", str(good), "--json"]).stdout)
    assert "# bandwidth = (unset)\n" in shown.stdout
    assert as_json["tier"][0]["bandwidth"] is None and "region" not in as_json["tier"][0]
    as_json["tier"] = [{key: value for key, value in each.items() if value is not None} for each in as_json["tier"]]
    assert as_json == tomllib.loads(shown.stdout)
    assert json.loads(_process(["config", "check", str(good), "--json"]).stdout) == {"source": str(good), "good": True}
    again = tmp_path / "again.toml"
    again.write_text(shown.stdout)
    assert _process(["config", "show", str(again)]).stdout == shown.stdout
    assert _process(["config", "check", str(tmp_path / "none.toml")]).returncode == 1


def test_config_check_looks_at_the_directories_and_makes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("forebay_gateway.core.config")
    file, taken = tmp_path / "gateway.toml", tmp_path / "taken"
    taken.write_text("a file")

    def checked(cache: object, tier: object, keys: str = "", *options: str) -> tuple[int, str]:
        text = f'[cache]\npath = "{cache}"\n{keys}\n[[tier]]\nname = "pfs"\nkind = "posix"\npath = "{tier}"\n'
        file.write_text(text)
        code = run(["config", "check", str(file), *options])
        said = capsys.readouterr()
        assert (said.err.count("\n"), said.out) == (1, "") if code else not said.err
        return code, said.err or said.out

    code, said = checked(tmp_path / "cache", tmp_path / "pfs")
    assert (
        code == 0 and said.startswith(f"{file}: good\n") and f"'forebay doctor --config {file}' on the node does that" in said
    )
    for cache, tier, keys, words in (
        (tmp_path / "cache", tmp_path / "pfs", 'capacity = "4000000TB"', "cache.capacity is"),
        (taken, tmp_path / "pfs", "", f"cache.path {taken} is a file"),
        (taken / "cache", tmp_path / "pfs", "", f"lies below {taken}, a file"),
        (tmp_path / "cache", taken, "", f"tier.path of tier 'pfs' {taken} is a file"),
    ):
        code, said = checked(cache, tier, keys)
        assert code == 1 and words in said and f"source={file}" in said
        assert checked(cache, tier, keys, "--elsewhere")[0] == 0
    assert {path.name for path in tmp_path.iterdir()} == {"gateway.toml", "taken"}


def test_config_reload_of_a_bad_file_ends_as_a_check_of_it(
    memory: MemoryGateway, memory_call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(client: Client) -> None:
        raise forebay.InvalidArgument("the configuration stays as it is: unknown key cache.capcity")

    monkeypatch.setattr(Client, "reload_config", refuses)
    assert "unknown key" in memory_call("config", "reload", code=exits.FAILED)


def test_without_the_gateways_package_serve_says_what_to_install() -> None:
    code = "import sys; sys.modules['forebay_gateway'] = None; from forebay.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, "serve"], capture_output=True, text=True)
    assert (
        done.returncode == 1
        and "install Forebay's extra 'gateway' (in its tree: pip install '.[gateway]')" in done.stderr
        and "Traceback" not in done.stderr
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_ends_with_130_and_no_traceback(memory: MemoryGateway, number: signal.Signals) -> None:
    with Client(memory.address) as client:
        client.hold()
        with client.checkpoint("r", 1) as ckpt:
            ckpt.put("a", b"x")
            ckpt.commit()
        # A shell's background job starts with SIGINT ignored, and so does everything below it: take the signal's own way back.
        # With nohup it is the same for SIGHUP.
        code = (
            "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); "
            "signal.signal(signal.SIGHUP, signal.SIG_DFL); from forebay.cli import main; main()"
        )
        command = [sys.executable, "-c", code, "--address", memory.address, "wait", "r", "1", "pfs"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            try:
                deadline_s = time.monotonic() + 20
                while "Wait" not in memory.calls and time.monotonic() < deadline_s:
                    time.sleep(0.05)
                process.send_signal(number)
                out, err = process.communicate(timeout=20)
            finally:
                process.kill()
    assert (process.returncode, out) == (130, "")
    assert err == "forebay: interrupted: only the waiting ended, r/1 goes on to pfs by itself\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_restore_that_is_ended_leaves_no_part_of_a_file(
    memory: MemoryGateway, tmp_path: Path, number: signal.Signals
) -> None:
    with Client(memory.address) as client, client.checkpoint("r", 1) as ckpt:
        ckpt.put("a", bytes(9 << 20))
        ckpt.commit()
    memory.fail("ReadShard", forebay.Unavailable("not now"), times=1000)  # it waits with its file open
    target = tmp_path / "out"
    code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from forebay.cli import main; main()"
    command = [sys.executable, "-c", code, "--address", memory.address, "restore", "r", "1", str(target)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            deadline_s = time.monotonic() + 20
            while not list(target.glob(".forebay-tmp-*")) and time.monotonic() < deadline_s:
                time.sleep(0.02)
            assert list(target.glob(".forebay-tmp-*")), "it never began"
            process.send_signal(number)
            _, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert process.returncode == 130 and err.startswith("forebay: interrupted: "), err
    assert not target.exists()  # nor the directory that it had made


def test_grpc_does_nothing_in_children_that_only_start_another_program() -> None:
    """With its fork handlers one start in twenty-five died in them while calls were under way: movers, of a gateway."""
    code = (
        "import os, sys, forebay.cli\n"
        "forebay.cli.app = type(sys)('forebay.cli.app')\n"
        "def run(arguments):\n"
        "    print(os.environ['GRPC_ENABLE_FORK_SUPPORT'], 'grpc' in sys.modules)\n"
        "    return 0\n"
        "forebay.cli.app.run = run\n"
        "sys.modules['forebay.cli.app'] = forebay.cli.app\n"
        "forebay.cli.main()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "0 False\n", done.stderr


def test_a_closed_pipe_is_no_traceback(memory: MemoryGateway) -> None:
    with Client(memory.address) as client, client.checkpoint("r", 1) as ckpt:
        ckpt.put_many({f"shard-{number:06}": b"x" for number in range(3000)})
        ckpt.commit()
    command = " ".join(f"'{word}'" for word in [*COMMAND, "--address", memory.address, "ls", "r", "1"])
    done = subprocess.run(["bash", "-c", f"{command} | head -1"], capture_output=True, text=True, timeout=60)
    assert "SHARD" in done.stdout and done.stderr == ""


def test_names_cannot_steer_the_terminal(memory_call, memory: MemoryGateway) -> None:
    memory.fail("ListRuns", forebay.NotFound("\033[2Jgone"))
    assert "\033" not in memory_call("ls", code=3)


def _process(arguments: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60)


def test_serve_with_json_logs_one_object_a_line(tmp_path: Path) -> None:
    (tmp_path / "gateway.toml").write_text(
        f'[node]\nid = "n"\nlisten = ["unix://{tmp_path}/s.sock"]\n[cache]\npath = "{tmp_path}/cache"\ncapacity = "1GiB"\n'
        f'[[tier]]\nname = "pfs"\nkind = "posix"\npath = "{tmp_path}/pfs"\n'
    )
    for name in ("cache", "pfs"):
        (tmp_path / name).mkdir()
    command = [*COMMAND, "serve", "--json", "--config", str(tmp_path / "gateway.toml")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    first = json.loads(process.stderr.readline())
    process.terminate()
    rest = [json.loads(line) for line in process.stderr]
    assert process.wait(30) == 0
    assert first["message"].startswith("serving ") and all({"time", "level", "logger", "message"} <= set(line) for line in rest)
    process.stderr.close()
