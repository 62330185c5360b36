"""What these tests share: a job of several writers, raw streams below the client, and proof that nothing was left behind.

Owns no servers: the gateways come from conftest. Everything here is real: processes, disks, sockets.
"""

import contextlib
import json
import os
import random
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any, Generic, TypeVar

import grpc
import psutil

import forebay
from forebay.connection import CHANNEL_OPTIONS
from forebay.demo.gateways import GatewayProcess
from forebay.errors import ForebayError, from_rpc
from forebay_wire import frames
from forebay_wire.checksums import crc32c
from forebay_wire.names import session8
from forebay_wire.v1 import gateway_pb2 as pb

CHUNK = 64 << 10
SMALL_CHUNKS = 'chunk_size = "64KiB"'
PATIENCE_S = 30.0

Shards = Mapping[str, bytes]
_Value = TypeVar("_Value")
_Bucket = TypeVar("_Bucket")


def eventually(look: Callable[[], _Value], wanted: Callable[[_Value], bool] = bool, within_s: float = PATIENCE_S) -> _Value:
    """What `look` gives once `wanted` holds; fails with the last value after `within_s` seconds."""
    deadline_s = time.monotonic() + within_s
    while True:
        value = look()
        if wanted(value):
            return value
        assert time.monotonic() < deadline_s, f"not within {within_s} s; last seen: {value!r}"
        time.sleep(0.05)


def some_bytes(size: int, seed: object) -> bytes:
    """Reproducible, incompressible bytes."""
    return random.Random(repr(seed)).randbytes(size)


@dataclass(frozen=True)
class Cluster(Generic[_Bucket]):
    """Two nodes that share a directory and a bucket."""

    a: GatewayProcess
    b: GatewayProcess
    root: Path
    bucket: _Bucket

    def __iter__(self) -> Iterator[GatewayProcess]:
        return iter((self.a, self.b))


@dataclass
class Job:
    """A training job's checkpoint: what each writer saves."""

    run: str = "team/model"
    step: int = 7
    writers: int = 3
    session: str = "launch-1"
    size: int = (1 << 20) + 12_345
    metadata: dict[str, object] = field(default_factory=lambda: {"epoch": 3})

    def shards(self, writer: int) -> dict[str, bytes]:
        """One writer's shards: a large one, a small one, an empty one; writer 0 has the sign of completeness too."""
        seed = (self.run, self.step, self.session, writer)
        made = {
            f"rank{writer}/model.bin": some_bytes(self.size, seed),
            f"rank{writer}/rng.json": json.dumps({"writer": writer, "session": self.session}).encode(),
            f"rank{writer}/empty": b"",
        }
        if writer == 0:
            made[".metadata"] = some_bytes(5000, (*seed, "metadata"))
        return made

    @property
    def everything(self) -> dict[str, bytes]:
        """All shards of all writers."""
        return {name: data for writer in range(self.writers) for name, data in self.shards(writer).items()}

    @property
    def directory(self) -> str:
        """The step's directory on a tier."""
        return f"{self.run}/step-{self.step:012d}"

    def key(self, name: str) -> str:
        """A shard's key on a tier."""
        return f"{self.directory}/{session8(self.session)}/{name}"

    def save(self, gateway: GatewayProcess, writer: int, **commit: Any) -> None:
        """One writer's part, put and committed."""
        with forebay.Client(gateway.address) as client, self.part(client, writer) as part:
            part.put_many(self.shards(writer))
            part.commit(self.metadata if writer == 0 else {}, **commit)

    def part(self, client: forebay.Client, writer: int) -> Any:
        """The writer's open part."""
        return client.checkpoint(self.run, self.step, self.writers, writer, self.session)

    def save_all(self, gateways: Iterable[GatewayProcess]) -> None:
        """Every writer at once, dealt over the gateways."""
        dealt = zip(range(self.writers), cycle(gateways), strict=False)
        together([partial(self.save, gateway, writer) for writer, gateway in dealt])

    def save_and_wait(self, gateways: Iterable[GatewayProcess], level: str = "all") -> None:
        """Saved, and complete at the level as each gateway sees it."""
        gateways = list(gateways)
        self.save_all(gateways)
        for gateway in gateways:
            self.wait(gateway, level)

    def wait(self, gateway: GatewayProcess, level: str = "all", timeout: float = 60.0) -> None:
        """Until the checkpoint is complete at the level."""
        with forebay.Client(gateway.address) as client:
            client.wait(self.run, self.step, level, timeout=timeout)

    def assert_restores(self, gateway: GatewayProcess, target: Path, source: str = "auto") -> None:
        """Restore through the gateway; every byte of every shard is equal and there is nothing else."""
        with forebay.Client(gateway.address) as client:
            client.restore_dir(self.run, self.step, target, source=source)
        assert files_below(target) == self.everything

    def copies(self, gateway: GatewayProcess) -> dict[str, dict[str, str]]:
        """Shard name: level or tier: state, as `info --json` says it."""
        found = json.loads(gateway.cli("info", self.run, str(self.step), "--json").stdout)
        return {shard["name"]: {"cache": shard["state"], **shard["copies"]} for shard in found["shards"]}


def files_below(root: Path) -> dict[str, bytes]:
    """Relative path: content."""
    found = {}
    for directory, _, names in os.walk(root):  # which a directory that goes meanwhile does not disturb
        for path in (Path(directory, name) for name in names):
            with contextlib.suppress(FileNotFoundError):
                found[str(path.relative_to(root))] = path.read_bytes()
    return found


def together(acts: Iterable[Callable[[], object]]) -> None:
    """Run all in threads of their own; the first error is raised."""
    errors: list[BaseException] = []

    def run(act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(act,)) for act in acts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def held(gateway: GatewayProcess, *tier: str) -> Iterator[None]:
    """The drain to the tier, or to all, stands in the block."""
    gateway.cli("queue", "hold", *tier)
    try:
        yield
    finally:
        gateway.cli("queue", "release", *tier)


def flip_byte(path: Path, offset: int) -> None:
    """Silent damage: same size, one bit other."""
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 0x01]))


def cache_files(gateway: GatewayProcess) -> list[Path]:
    """Sealed shard files of its cache."""
    return sorted(gateway.cache.glob("data/*/*.shard"))


def cache_file_of(gateway: GatewayProcess, data: bytes) -> Path:
    """The cache's file that begins with these bytes."""
    found = [path for path in cache_files(gateway) if path.read_bytes()[: len(data)] == data]
    assert len(found) == 1, found
    return found[0]


# -- raw streams: what the client would never send -----------------------------------------------------------------------


def part_ref(run: str, step: int = 1, session: str = "s", writer: int = 0, writers: int = 1) -> pb.PartRef:
    """A part, unchecked."""
    return pb.PartRef(run=run, step=step, session=session, writer=writer, writers=writers)


def header(part: pb.PartRef, name: str = "shard.bin", size: int | None = None) -> bytes:
    """The first message of a PutShard stream."""
    return frames.encode_put_header(pb.PutHeader(part=part, name=name, size=size))


def chunks_of(data: bytes) -> list[bytes]:
    """The chunk messages of a shard, as they should be."""
    pieces = [(offset, data[offset : offset + CHUNK]) for offset in range(0, len(data), CHUNK)]
    return [frames.encode_put_chunk(offset, crc32c(piece), piece) for offset, piece in pieces]


def trailer(data: bytes) -> bytes:
    """The last message, as it should be."""
    return frames.encode_put_trailer(len(data), crc32c(data))


def whole_put(part: pb.PartRef, data: bytes, name: str = "shard.bin") -> list[bytes]:
    """A stream without a fault."""
    return [header(part, name, len(data)), *chunks_of(data), trailer(data)]


class Raw:
    """The wire below the client: messages as they are given, answers or the typed error that the client would raise."""

    def __init__(self, gateway: GatewayProcess, *, message_bytes_max: int = frames.MAX_MESSAGE_BYTES) -> None:
        options = [*CHANNEL_OPTIONS, ("grpc.max_send_message_length", message_bytes_max)]
        self.channel = grpc.insecure_channel(f"unix:{gateway.socket}", options=options)
        self._put: Any = self.channel.stream_stream("/forebay.v1.Gateway/PutShard")
        self.call("GetPressure", pb.GetPressureRequest(), pb.Pressure)  # connected from here on

    def put(self, messages: Iterable[bytes]) -> pb.Receipt:
        """Send all, then half-close; the receipt."""
        try:
            answers = [pb.PutShardResponse.FromString(answer) for answer in self._put(iter(messages), timeout=PATIENCE_S)]
        except grpc.RpcError as error:
            raise from_rpc(error, "put") from error
        return answers[-1].receipt

    def call(self, method: str, request: Any, answer: Any) -> Any:
        """One unary call."""
        callable_ = self.channel.unary_unary(
            f"/forebay.v1.Gateway/{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=answer.FromString,
        )
        try:
            return callable_(request, timeout=PATIENCE_S)
        except grpc.RpcError as error:
            raise from_rpc(error, method) from error

    def commit(self, part: pb.PartRef, shards: Mapping[str, bytes], metadata_json: str = "") -> pb.CommitPartResponse:
        """Commit a part that names exactly these shards."""
        expected = [pb.ExpectedShard(name=name, size=len(data), crc32c=crc32c(data)) for name, data in shards.items()]
        request = pb.CommitPartRequest(part=part, shards=expected, metadata_json=metadata_json)
        answer: pb.CommitPartResponse = self.call("CommitPart", request, pb.CommitPartResponse)
        return answer

    def close(self) -> None:
        """End the connection."""
        self.channel.close()

    def __enter__(self) -> "Raw":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def assert_clear(error: ForebayError, kind: type[ForebayError], *parts: str) -> None:
    """The typed error, with a sentence for people: one line, no Python in it, naming what the caller must know."""
    assert type(error) is kind, f"{type(error).__name__}: {error}"
    assert_clear_line(error.message)
    for part in parts:
        assert part in error.message, error.message


def assert_clear_line(line: str) -> None:
    """One line, and no trace of the program's inside."""
    assert "\n" not in line.strip()
    for inside in ("Traceback", "Error(", "Exception", "object at 0x", "internal error"):
        assert inside not in line, line


def assert_refused(result: "subprocess.CompletedProcess[str]", code: int, *parts: str) -> None:
    """A command that ended with `code` and one clear line on standard error."""
    assert result.returncode == code, (result.returncode, result.stderr)
    assert len(result.stderr.strip().splitlines()) == 1, result.stderr
    assert_clear_line(result.stderr)
    for part in parts:
        assert part in result.stderr, result.stderr


# -- nothing left --------------------------------------------------------------------------------------------------------


class Leftovers:
    """What a gateway holds, before and after: files, reservations, streams, descriptors."""

    def __init__(self, gateway: GatewayProcess) -> None:
        self._gateway = gateway
        self._client = forebay.Client(gateway.address)
        self._process = psutil.Process(gateway.pid)
        self._client.status()  # its connection counts on both sides
        self._files = self._shard_files()
        self._descriptors = self._process.num_fds()

    def _shard_files(self) -> set[str]:
        data = self._gateway.cache / "data"
        return {str(path.relative_to(data)) for path in data.rglob("*") if path.is_file()}

    def found(self) -> list[str]:
        """What was not there before, in words."""
        cache = self._client.status().cache
        left = [f"incoming file {path.name}" for path in (self._gateway.cache / "incoming").iterdir()]
        left += [f"data file {path}" for path in sorted(self._shard_files() - self._files)]
        left += [f"lost data file {path}" for path in sorted(self._files - self._shard_files())]
        if cache.reserved_bytes:
            left.append(f"{cache.reserved_bytes} bytes reserved")
        if cache.open_streams:
            left.append(f"{cache.open_streams} streams open")
        if (extra := self._process.num_fds() - self._descriptors) > 0:
            left.append(f"{extra} descriptors more than before")
        return left

    def none(self, within_s: float = 10.0) -> None:
        """Fails unless nothing is left, after what ends by itself has ended."""
        eventually(self.found, lambda left: not left, within_s)

    def close(self) -> None:
        """End the connection."""
        self._client.close()


def pause_after(data: bytes, pieces: int, gate: threading.Event) -> Iterator[bytes]:
    """An iterable of buffers that stops in the middle until `gate` is set."""
    for index, offset in enumerate(range(0, len(data), CHUNK)):
        if index == pieces:
            assert gate.wait(PATIENCE_S)
        yield data[offset : offset + CHUNK]
