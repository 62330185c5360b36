"""Pure parts: addresses, sessions, retries, errors, sources, waiting for nothing."""

import array
import contextlib
import io
import mmap
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import grpc
import numpy
import pytest
from hypothesis import given
from hypothesis import strategies as st

import forebay
from conftest import ExpectedLogs
from forebay import address, convert
from forebay.directories import put_files, walk
from forebay.errors import CacheFull, from_rpc
from forebay.retry import Attempts, RetryPolicy, _Teller
from forebay.session import default_session
from forebay.sources import source_of
from forebay_wire.v1 import admin_pb2
from forebay_wire.v1 import gateway_pb2 as pb


@pytest.mark.parametrize(
    "text,target",
    [
        ("unix:///run/x.sock", "unix:/run/x.sock"),
        ("unix:/run/x.sock", "unix:/run/x.sock"),
        ("unix:rel.sock", "unix:rel.sock"),
        ("/run/x.sock", "unix:/run/x.sock"),
        ("node1:7400", "node1:7400"),
        ("[::1]:7400", "[::1]:7400"),
    ],
)
def test_addresses(text: str, target: str) -> None:
    assert address.parse(text) == target
    assert address.candidates(None, {"FOREBAY_ADDRESS": text}) == (target,)


@pytest.mark.parametrize("text", ["unix:", "unix://", "x", "x:", ":1", "x:0", "x:65536", "x:１", "run/x.sock", "http://x:1"])
def test_bad_addresses(text: str) -> None:
    with pytest.raises(forebay.InvalidArgument, match="unix:///"):
        forebay.Client(text)


def test_default_sockets_are_all_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"XDG_RUNTIME_DIR": "/run/user/5"}
    system, own, fallback = (f"{place}/gateway.sock" for place in ("/run/forebay", "/run/user/5/forebay", "/tmp/forebay-5"))
    assert address.default_sockets(environ, 0) == (system, own)
    assert address.default_sockets(environ, 5) == (own, fallback, system)
    assert address.default_sockets({}, 5) == (fallback, system)
    monkeypatch.setattr(address, "SYSTEM_SOCKET", f"{tmp_path}/none")
    with pytest.raises(forebay.Unavailable, match="forebay serve"):
        address.resolve(None, {"XDG_RUNTIME_DIR": str(tmp_path)})


def test_a_fallback_that_is_not_this_users_alone_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as listener:
        path = f"{place}/gateway.sock"
        monkeypatch.setattr(address, "fallback_socket", lambda uid: path)
        listener.bind(path)
        listener.listen()
        assert address.problem(f"unix:{path}") is None
        Path(place).chmod(0o755)
        assert "open to others" in str(address.problem(f"unix:{path}"))


@contextlib.contextmanager
def closed_socket() -> Iterator[str]:
    """A gateway's socket that this user may not connect to; the rest of the block is run as one whom permissions bind."""
    import socket

    uid = os.geteuid()
    with tempfile.TemporaryDirectory() as place, socket.socket(socket.AF_UNIX) as listener:
        Path(place).chmod(0o755)
        listener.bind(f"{place}/g.sock")
        listener.listen()
        Path(place, "g.sock").chmod(0o600 if uid == 0 else 0)
        if uid == 0:
            os.seteuid(65534)
        try:
            yield f"{place}/g.sock"
        finally:
            os.seteuid(uid)


def test_a_socket_of_others_is_denied_at_once() -> None:
    with closed_socket() as path:
        with pytest.raises(forebay.PermissionDenied, match=rf"{path} is of user \w+ and group \w+ \(mode \d+\).* run this as"):
            address.require_listener(f"unix://{path}")
        with forebay.Client(path) as client:  # its policy would try for a minute
            with pytest.raises(forebay.PermissionDenied, match=rf"ask for status: {path} is of user"):
                client.status()
            with client.checkpoint("r", 1, session="s") as part, pytest.raises(forebay.PermissionDenied, match="is of user"):
                part.put("x", bytes(2 << 20))


def test_a_socket_that_is_about_to_be_opened_to_its_group_is_not_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that starts again makes its socket first, and sets its mode then."""
    with closed_socket() as path:

        def opens(delay_s: float) -> None:
            me = os.geteuid()
            os.seteuid(os.getuid())
            Path(path).chmod(0o666)
            os.seteuid(me)

        monkeypatch.setattr(address.cancel, "sleep", opens)
        assert address.hint(f"unix:{path}") is None
    with closed_socket() as path:
        assert address.problem(f"unix:{path}") is None


def test_the_default_socket_of_others_is_denied_with_what_else_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    with closed_socket() as path:
        monkeypatch.setattr(address, "SYSTEM_SOCKET", path)
        monkeypatch.setattr(address, "fallback_socket", lambda uid: "/nowhere/own.sock")
        with pytest.raises(
            forebay.PermissionDenied, match=rf"may not use the gateway: {path} is of .*; /nowhere/own.sock: No such"
        ):
            address.resolve(None, {})


def test_a_directory_that_may_not_be_looked_into_is_denied(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(path: Path, **options: object) -> os.stat_result:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuses)
    for found in (address.hint("unix:/closed/g.sock"), address.problem("unix:/closed/g.sock")):
        assert found is not None and found.denied and "may not look into a directory above it" in found.text


def test_a_gateway_that_is_still_starting_is_waited_for(tmp_path: Path) -> None:
    import socket

    clock, told = _Time(), []
    began_s = clock.now_s
    path = f"{tempfile.mkdtemp()}/g.sock"
    with socket.socket(socket.AF_UNIX) as listener:

        def sleep(delay_s: float) -> None:
            clock.sleep(delay_s)
            if clock.now_s > began_s + 3.0 and not Path(path).exists():
                listener.bind(path)
                listener.listen()

        address.await_listener(path, 5.0, told.append, lambda: clock.now_s, sleep)
        assert 3.0 < clock.now_s - began_s < 4.0 and len(told) == 1 and "waiting up to 5 s for the gateway" in told[0]
    clock, told = _Time(), []
    with pytest.raises(forebay.Unavailable, match=r"Connection refused.*forebay serve.* waited_s=5\.\d"):
        address.await_listener(path, 5.0, told.append, lambda: clock.now_s, clock.sleep)
    assert len(told) == 1
    Path(path).unlink()
    Path(path).parent.rmdir()


def test_the_default_socket_with_a_listener_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    import socket

    with tempfile.TemporaryDirectory() as directory, socket.socket(socket.AF_UNIX) as listener:
        monkeypatch.setattr(address, "SYSTEM_SOCKET", f"{directory}/stale")
        with socket.socket(socket.AF_UNIX) as stale:
            stale.bind(f"{directory}/stale")  # left behind by a gateway that died
        Path(directory, "forebay").mkdir()
        listener.bind(f"{directory}/forebay/gateway.sock")
        listener.listen()
        assert address.resolve(None, {"XDG_RUNTIME_DIR": directory}) == f"unix:{directory}/forebay/gateway.sock"


def test_sessions() -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": "2", "SLURM_JOB_ID": "9"}
    assert default_session(8, {"FOREBAY_SESSION": "mine", **elastic}) == "mine"
    assert default_session(8, elastic) == "torchelastic-job-2"
    assert default_session(8, {**elastic, "TORCHELASTIC_RUN_ID": "none"}) == "slurm-9-0"
    assert default_session(8, {"SLURM_JOB_ID": "9", "SLURM_RESTART_COUNT": "3"}) == "slurm-9-3"
    assert default_session(1, {}) != default_session(1, {})
    with pytest.raises(forebay.InvalidArgument, match="FOREBAY_SESSION"):
        default_session(2, {"TORCHELASTIC_RUN_ID": "none"})


class _Time:
    def __init__(self) -> None:
        self.now_s = 50.0
        self.slept: list[float] = []

    def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        self.now_s += delay_s


def _attempts(policy: RetryPolicy, jitter: float = 1.0) -> tuple[Attempts, _Time]:
    clock = _Time()
    return Attempts(policy, lambda: clock.now_s, clock.sleep, lambda: jitter), clock


def test_pauses_grow_and_end() -> None:
    attempts, clock = _attempts(RetryPolicy(60, 20))
    with pytest.raises(forebay.Unavailable, match=r"waited_s=20.0 attempts=\d"):
        while True:
            attempts.pause(forebay.Unavailable("away"))
    assert clock.slept[:4] == pytest.approx([0.1, 0.2, 0.4, 0.8])
    assert max(clock.slept) <= 5 and sum(clock.slept) == pytest.approx(20)


def test_who_waits_for_a_gateway_that_is_away_is_told_once(
    monkeypatch: pytest.MonkeyPatch, expected_logs: ExpectedLogs
) -> None:
    monkeypatch.setattr("forebay.retry._teller", _Teller())
    many = [_attempts(RetryPolicy(60, 20)) for _ in range(3)]  # the streams of one save
    for attempts, clock in many:
        began_s = clock.now_s
        with pytest.raises(forebay.Unavailable):
            while True:
                attempts.pause(forebay.Unavailable("put 'x': there is no socket /g.sock"))
                assert bool(expected_logs.records) >= (clock.now_s - began_s > 4.0)
    (record,) = expected_logs.records
    assert (record.name, record.levelname) == ("forebay", "WARNING")
    assert "more: put 'x': there is no socket /g.sock" in record.getMessage()


def test_a_short_wait_and_a_full_cache_are_not_told_of(monkeypatch: pytest.MonkeyPatch, expected_logs: ExpectedLogs) -> None:
    monkeypatch.setattr("forebay.retry._teller", _Teller())
    attempts, _ = _attempts(RetryPolicy(60, 20))
    for _ in range(4):  # 1.5 s
        attempts.pause(forebay.Unavailable("away"))
    ending, _ = _attempts(RetryPolicy(60, 3))
    with pytest.raises(forebay.Unavailable):
        while True:
            ending.pause(forebay.Unavailable("away"))
    with pytest.raises(forebay.CacheFull):
        while True:
            attempts.pause(forebay.CacheFull("full"))
    assert expected_logs.records == []


def test_the_gateways_time_is_honoured_and_capped_by_our_own() -> None:
    attempts, clock = _attempts(RetryPolicy(10, 60), jitter=0.0)
    attempts.pause(forebay.CacheFull("full", retry_after_s=4))
    attempts.pause(forebay.CacheFull("full", retry_after_s=4000))
    assert clock.slept == [4, 6]
    with pytest.raises(forebay.CacheFull):
        attempts.pause(forebay.CacheFull("full"))


def test_limits_count_apart_and_anew_after_progress() -> None:
    attempts, _ = _attempts(RetryPolicy(0, 10))
    attempts.pause(forebay.Unavailable("away"))
    with pytest.raises(forebay.CacheFull):
        attempts.pause(forebay.CacheFull("full"))
    for _ in range(100):
        attempts.pause(forebay.Unavailable("away"))
        attempts.progressed()
    for error in (forebay.NotFound("x"), forebay.Corrupt("x"), forebay.DeadlineExceeded("x")):
        with pytest.raises(type(error)):
            attempts.pause(error)


class _Failed(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str, trailing: object = ()) -> None:
        self._parts = code, details, trailing

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> object:
        return self._parts[2]


@pytest.mark.parametrize("code", list(grpc.StatusCode))
def test_every_code_without_detail_is_an_error_of_ours(code: grpc.StatusCode) -> None:
    error = from_rpc(_Failed(code, "text"), "do it")
    assert error.message.startswith("do it: text")
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.ABORTED):
        assert type(error) is forebay.Unavailable


def test_errors_of_grpc_itself() -> None:
    big = _Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 4)")
    assert type(from_rpc(big, "x")) is forebay.ForebayError
    assert type(from_rpc(_Failed(grpc.StatusCode.INTERNAL, "Received RST_STREAM with code 2"), "x")) is forebay.Unavailable
    junk = _Failed(grpc.StatusCode.NOT_FOUND, "x", (("forebay-error-bin", b"\xff\xff"),))
    assert type(from_rpc(junk, "x")) is forebay.NotFound


def test_errors_are_picklable() -> None:
    error = pickle.loads(pickle.dumps(forebay.Incomplete("lacks", missing=[forebay.Missing(3, ("a",))])))
    assert str(error) == "lacks" and error.missing[0].writer == 3
    full = pickle.loads(pickle.dumps(forebay.CacheFull("full", retry_after_s=2.5)))
    assert full.retry_after_s == 2.5


def test_every_field_of_a_record_has_a_field_in_its_message() -> None:
    import dataclasses

    for message, record in convert._RECORDS.items():
        names = set(message.DESCRIPTOR.fields_by_name) | {"shards", "metadata"}
        assert {field.name for field in dataclasses.fields(record)} <= names, record
        assert convert.record(message(), record) is not None
    tier = convert.record(admin_pb2.TierStatus(oldest_pending_s=0.0, capabilities={"a": "b"}), forebay.types.TierStatus)
    assert tier.oldest_pending_s == 0.0 and tier.clock_skew_s is None and tier.capabilities == {"a": "b"}
    shown = convert.record(pb.Checkpoint(metadata_json="[not an object]"), forebay.Checkpoint)
    assert shown.metadata == {"unparsed": "[not an object]"}


def _bytes_of(data: object, chunk_size: int = 8) -> bytes:
    source = source_of(data, "x")
    pieces = [bytes(piece) for piece in source.chunks(chunk_size)]
    assert all(len(piece) == chunk_size for piece in pieces[:-1]) and all(pieces)
    if source.replayable:
        assert b"".join(bytes(piece) for piece in source.chunks(chunk_size)) == b"".join(pieces)
    assert source.size in (None, len(b"".join(pieces)))
    return b"".join(pieces)


@given(st.lists(st.binary(max_size=40), max_size=12), st.integers(1, 16))
def test_pieces_are_cut_anew(pieces: list[bytes], chunk_size: int) -> None:
    whole = b"".join(pieces)
    assert _bytes_of(pieces, chunk_size) == _bytes_of(iter(pieces), chunk_size) == _bytes_of(whole, chunk_size) == whole


ARRAYS = [
    numpy.arange(7, dtype=numpy.float64),
    numpy.ones((3, 4), dtype=numpy.complex64),
    numpy.zeros((0, 5)),
    numpy.array(3.5),
    numpy.array([True, False]),
    numpy.array(["2026-01-01"], dtype="datetime64[s]"),
    numpy.array([(1, 2.5)], dtype=[("a", "i4"), ("b", "f8")]),
    numpy.array(["text"]),
    numpy.arange(12, dtype=">i4")[2:9],
]


@pytest.mark.parametrize("array_", ARRAYS, ids=lambda item: str(item.dtype))
def test_arrays(array_: numpy.ndarray) -> None:
    assert _bytes_of(array_) == array_.tobytes()


def test_buffers_and_files(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"0123456789abcdef+")
    assert _bytes_of(path) == _bytes_of(str(path)) == path.read_bytes()
    with path.open("rb") as file:
        file.seek(3)
        assert _bytes_of(file) == b"3456789abcdef+"
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        assert _bytes_of(mapped) == path.read_bytes()
    assert _bytes_of(io.BytesIO(b"x" * 20)) == b"x" * 20
    assert _bytes_of(array.array("d", [1.5])) == array.array("d", [1.5]).tobytes()
    assert _bytes_of(memoryview(bytearray(b"abc"))) == b"abc"
    read_end, write_end = os.pipe()
    os.write(write_end, b"through a pipe")
    os.close(write_end)
    with os.fdopen(read_end, "rb") as pipe:
        assert _bytes_of(pipe) == b"through a pipe"


@pytest.mark.parametrize(
    "data,why",
    [
        (numpy.arange(10)[::2], "contiguous"),
        (numpy.asfortranarray(numpy.ones((3, 4))), "contiguous"),
        (memoryview(b"abcdef")[::2], "contiguous"),
        (numpy.array([object()]), "objects"),
        (numpy.zeros(10, dtype="datetime64[s]")[::2], "contiguous"),
        (5, "a value of type int"),
        (None, "a value of type NoneType"),
        (io.StringIO("x"), "binary"),
        (["text"], "no buffer"),
        (Path("/"), "regular"),
        (Path("/dev/null"), "regular"),
    ],
)
def test_what_cannot_be_put(data: object, why: str) -> None:
    with pytest.raises(forebay.InvalidArgument, match=why):
        source_of(data, "x")


def test_a_file_that_shrinks_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"x" * 20)
    source = source_of(path, "x")
    path.write_bytes(b"x" * 10)
    with pytest.raises(forebay.InvalidArgument, match="shorter"):
        list(source.chunks(8))


def test_tensors() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.bfloat16)
    assert _bytes_of(tensor) == bytes(tensor.view(torch.uint8).tolist())
    parameter = torch.nn.Parameter(torch.ones(2, 3))
    assert _bytes_of(parameter) == numpy.ones(6, dtype=numpy.float32).tobytes()
    assert _bytes_of(torch.tensor(1.5)) == numpy.float32(1.5).tobytes() and _bytes_of(torch.zeros(0)) == b""
    with pytest.raises(forebay.InvalidArgument, match="contiguous"):
        source_of(torch.ones(3, 4).t(), "x")
    with pytest.raises(forebay.InvalidArgument, match="CPU"):
        source_of(torch.empty(3, device="meta"), "x")


def test_importing_forebay_is_light() -> None:
    code = "import sys, forebay; forebay.NotFound, forebay.Missing; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())
    assert not loaded & {"grpc", "typer", "rich", "google.protobuf", "numpy", "ulid", "asyncio", "forebay_gateway"}
    code = "import sys, forebay; forebay.Client; print(*sys.modules)"
    loaded = set(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split())
    assert not loaded & {"typer", "rich", "numpy", "forebay_gateway", "msgspec", "lmdb"}


def test_all_names_exist() -> None:
    for name in forebay.__all__:
        assert getattr(forebay, name) is not None


def test_what_was_waited_in_the_gateway_counts_and_its_queue_is_joined_again_at_once() -> None:
    now_s = [100.0]
    slept: list[float] = []

    def sleep(delay_s: float) -> None:
        slept.append(delay_s)
        now_s[0] += delay_s

    attempts = Attempts(RetryPolicy(admit_timeout_s=60.0), lambda: now_s[0], sleep, lambda: 1.0)
    assert attempts.admit_left_s == 60.0
    full = CacheFull("full", retry_after_s=20.0)
    full.waited_s = 30.0
    now_s[0] += 30.0
    attempts.pause(full)
    assert slept == [0.1]  # not the 20 s that one who did not wait should stay away
    assert attempts.admit_left_s == pytest.approx(29.9)
    now_s[0] += 29.9
    full.waited_s = 29.9
    with pytest.raises(CacheFull, match=r"waited_s=60\.0 attempts=2"):
        attempts.pause(full)
    assert attempts.admit_left_s == 0.0


def test_what_stands_for_a_whole_checkpoint_is_put_last(tmp_path: Path) -> None:
    """Its name sorts first, and past a failing cache it goes to the tier at once."""
    put: list[str] = []

    class Writer:
        def put(self, name: str, path: Path, on_bytes: object) -> None:
            put.append(name)

        def put_many(self, small: dict[str, Path], on_bytes: object) -> None:
            put.extend(small)

    (tmp_path / "sub").mkdir()
    for name, size in ((".metadata", 10), ("a", 10), ("large", 3 << 20), ("sub/.metadata", 2 << 20)):
        (tmp_path / name).write_bytes(bytes(size))
    put_files(Writer(), walk(tmp_path), 2, lambda size: None)  # type: ignore[arg-type]
    assert put[:2] == ["a", "large"] and sorted(put[2:]) == [".metadata", "sub/.metadata"]
