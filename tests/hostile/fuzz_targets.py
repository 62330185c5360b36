"""What takes bytes from outside, each as one function of bytes: it returns, or raises what its contract names; anything else
that it raises is a defect. Used by Hypothesis (test_fuzz) and by atheris (fuzz)."""

import contextlib
import io
import json
import os
import random
from collections.abc import Callable
from typing import Any
from unittest import mock

from forebay.cli import app, exits
from forebay.cli.app import run as run_command
from forebay_gateway.cache import footer
from forebay_gateway.core.config import ConfigError, load_config
from forebay_gateway.core.errors import Corrupt, InvalidArgument, Unsupported
from forebay_gateway.core.layout import parse_step_dir
from forebay_gateway.core.quantities import parse_duration, parse_size
from forebay_gateway.paths.commit import check_metadata
from forebay_gateway.rpc.status import Malformed, check_formed, parser
from forebay_gateway.tiers.keys import check_key
from forebay_wire import document as written
from forebay_wire import frames
from forebay_wire.checksums import crc32c
from forebay_wire.frames import ChunkFrame, FrameError
from forebay_wire.manifest import Manifest, ManifestError, PartRecord, ShardEntry, pack_chunk_crcs
from forebay_wire.names import InvalidName, check_run, check_session, check_shard_name
from forebay_wire.v1 import gateway_pb2 as pb

NOBODY = "unix:///nowhere/forebay.sock"


def put_frames(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        frame = frames.decode_put_request(data)
        if isinstance(frame, ChunkFrame):
            assert 0 <= frame.offset < 1 << 64
            assert len(frame.data) <= len(data)


def read_frames(data: bytes) -> None:
    with contextlib.suppress(FrameError):
        frames.decode_read_response(data)


def requests(data: bytes) -> None:
    """Messages that are parsed by the runtime: none ends in an exception of gRPC's."""
    for message in (pb.PutManyRequest, pb.CommitPartRequest, pb.WaitRequest, pb.ListShardsRequest):
        found = parser(message)(data)
        if isinstance(found, Malformed):
            with contextlib.suppress(InvalidArgument):
                check_formed(found)


def names(data: bytes) -> None:
    try:
        text = data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError:
        text = data.decode("utf-8", "replace")
    for check in (check_run, check_shard_name, check_session):
        with contextlib.suppress(InvalidName):
            assert check(text) == text
            assert text
            assert "\0" not in text
            assert len(text.encode()) <= 1024
            if check is not check_session:
                assert not set(text.split("/")) & {"", ".", ".."}
    with contextlib.suppress(InvalidArgument):
        assert os.path.normpath("/tier/" + check_key(text)).startswith("/tier/")
    parse_step_dir(text)
    for parse in (parse_size, parse_duration):
        with contextlib.suppress(ValueError):
            parse(text)


def footers(data: bytes) -> None:
    """As a block alone, with a right checksum, and at the end of a file."""
    block = data[: footer.BLOCK].ljust(footer.BLOCK, b"\0")
    signed = footer.MAGIC + block[len(footer.MAGIC) : -4]
    signed += crc32c(signed).to_bytes(4, "little")
    for each in (data, block, signed):
        with contextlib.suppress(Corrupt, Unsupported):
            footer.decode(each)
    descriptor = os.memfd_create("fuzz")
    try:
        for content in (data, block + signed, signed + block, block * 2 + signed + block):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
            with contextlib.suppress(Corrupt, Unsupported):
                found, chunks = footer.find_footer(descriptor, len(content))
                assert found.disk_size == len(content)
                assert len(chunks) == 4 * found.chunk_count
    finally:
        os.close(descriptor)


def _documents() -> list[bytes]:
    data = bytes(70_000)
    entry = ShardEntry(
        "a/b", len(data), crc32c(data), 1 << 16, pack_chunk_crcs([crc32c(data[: 1 << 16]), crc32c(data[1 << 16 :])])
    )
    parts = [PartRecord("run", 7, "s", writer, 2, "node", (entry,) if writer else (), {"k": [1]}) for writer in range(2)]
    return [parts[1].to_json(), Manifest.of_parts(parts, "node").to_json()]


DOCUMENTS = _documents()
# What a damaged input is made from.
SEEDS = [
    *DOCUMENTS,
    frames.encode_put_chunk(5, 6, b"payload"),
    frames.encode_put_trailer(7, 8),
    footer.encode(footer.Footer("run", 1, "s", 0, 1, "name", 70_000, 65_536, 5), bytes(8)),
    b'[node]\nid = "a"\n',
    b"team/run",
]
_ODD: list[Any] = [
    None,
    True,
    -1,
    0,
    1 << 64,
    1.5,
    float("nan"),
    "",
    "x" * 300,
    "../x",
    "\ud800",
    [],
    {},
    [[]],
    {"": ""},
    1e400,
]


def documents(data: bytes) -> None:
    """Bytes as they are; and whole documents of ours with odd values at any place, their checksum made right again."""
    for read in (PartRecord.from_json, Manifest.from_json):
        with contextlib.suppress(ManifestError):
            read(data)
    chance = random.Random(data)
    body = json.loads(chance.choice(DOCUMENTS))
    body.pop("crc32c")
    for _ in range(chance.randrange(1, 4)):
        _spoil(body, chance)
    try:
        sealed = written.seal(body)
    except (ValueError, UnicodeEncodeError):
        return
    for read in (PartRecord.from_json, Manifest.from_json):
        with contextlib.suppress(ManifestError):
            read(sealed)


def _spoil(value: Any, chance: random.Random) -> None:
    while True:
        if not value:
            return
        key = chance.choice(list(value)) if isinstance(value, dict) else chance.randrange(len(value))
        if isinstance(value[key], dict | list) and chance.random() < 0.7:
            value = value[key]
            continue
        if chance.random() < 0.2:
            del value[key]
        else:
            value[key] = chance.choice(_ODD)
        return


CONFIG_LINES = [
    "[node]", 'id = "a"', 'listen = ["unix:///x/y.sock"]', "[cache]", 'path = "/x"', 'capacity = "1GiB"', "soft = 0.5",
    "[[tier]]", 'name = "t"', 'kind = "posix"', 'kind = "s3"', 'bucket = "bbb"', 'chunk_size = "64KiB"', "[tier]", "[[cache]]",
    "[policy]", "[log]", 'level = "info"', "hard = nan", "refuse = inf", 'capacity = "-1"', "id = []", "concurrency = 1e9",
    'stream_timeout = "1d"', "node = 1", 'path = "\\u0000"', 'endpoint = "http://[::1"', "required = 3", "cache.path = 1",
]  # fmt: skip


def config(data: bytes) -> None:
    texts = [data.decode("utf-8", "replace")]
    chance = random.Random(data)
    texts.append("\n".join(chance.choice(CONFIG_LINES) for _ in range(chance.randrange(1, 14))))
    texts.append("\n".join([*CONFIG_LINES[:6], texts[0]]))
    environment = {f"FOREBAY_{chance.choice(['CACHE_PATH', 'NODE_ID', 'X', 'TIER', 'CACHE_SOFT'])}": texts[0].replace("\0", "")}
    for text in texts:
        with contextlib.suppress(ConfigError):
            load_config(text, environment if chance.random() < 0.3 else {}, "fuzz", uid=0, hostname="h")


def metadata(data: bytes) -> None:
    with contextlib.suppress(InvalidArgument):
        json.loads(check_metadata(data.decode("utf-8", "replace")))


COMMANDS = [
    "ls", "info", "status", "check", "queue", "wait", "pressure", "pin", "unpin", "rm", "drain", "warmup", "evict", "verify",
    "scrub", "fsck", "repair", "gc", "quarantine", "save", "restore", "config", "export", "top", "nonsense", "--version",
    "--help",
]  # fmt: skip
# These only say what they would do unless told, and with arguments taken at random hardly ever are.
TOLD_TO_DO_IT = [
    ["evict", "team/run", "1", "--yes"],
    ["rm", "team/run", "1", "--yes"],
    ["quarantine", "release", "1-2", "--yes"],
    ["gc", "--apply"],
    ["repair", "--apply"],
]
ARGUMENTS = [
    "--json", "--force", "--yes", "-h", "--config", "/nowhere.toml", "run", "team/run", "../x", "", "1", "-1", "latest", "1e9",
    "99999999999999999999999", "--wait", "all", "--timeout", "nan", "inf", "--step", "--run", "/nowhere", "hold", "show", "ls",
    "\x00", "\ud800", "é\n", "--", "-", "--from", "cache", "--address", "unix:///x", "host:99999", ":::", "--no-such-option",
]  # fmt: skip


def command_line(data: bytes) -> None:
    """Any arguments, no gateway: one clear line and a code of the contract, never a traceback."""
    chance = random.Random(data)
    begin = chance.choice(TOLD_TO_DO_IT) if chance.random() < 0.2 else [chance.choice(COMMANDS)]
    arguments = [*begin, *(chance.choice(ARGUMENTS) for _ in range(chance.randrange(5)))]
    if chance.random() < 0.3:
        arguments.append(data.decode("utf-8", "replace"))
    out, error = io.StringIO(), io.StringIO()
    nobody_comes = mock.patch.object(app, "WAIT_FOR_GATEWAY_S", 0.0)
    with nobody_comes, contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        code = run_command(["--address", NOBODY, *arguments])
    assert code in range(9), (arguments, code)
    assert "Traceback" not in error.getvalue(), (arguments, error.getvalue())
    if code not in (exits.DONE, exits.USAGE) and arguments[0] != "check":
        assert len(error.getvalue().strip().splitlines()) <= 1, (arguments, error.getvalue())


TARGETS: dict[str, Callable[[bytes], None]] = {
    each.__name__: each
    for each in (put_frames, read_frames, requests, names, footers, documents, config, metadata, command_line)
}
