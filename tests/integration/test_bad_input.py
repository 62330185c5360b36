"""The table "bad input, and what it gets": each row a typed error with a clear sentence, and nothing left behind.

Below the client where the client would prevent the input. One gateway serves all rows, each with a run of its own, so that what
a row leaves would show in the next one too.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay.errors import AlreadyExists, Corrupt, ForebayError, Incomplete, InvalidArgument, NotFound
from forebay_wire import frames
from forebay_wire.checksums import crc32c
from forebay_wire.v1 import gateway_pb2 as pb
from integration.conftest import assert_clean_log
from integration.kit import (
    CHUNK,
    SMALL_CHUNKS,
    Leftovers,
    Raw,
    assert_clear,
    assert_refused,
    chunks_of,
    eventually,
    header,
    part_ref,
    some_bytes,
    trailer,
    whole_put,
)

DATA = some_bytes(3 * CHUNK + 100, "bad input")
GOOD = {"shard.bin": DATA}


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    directory = tmp_path_factory.mktemp("g")
    (directory / "pfs").mkdir()
    made = GatewayProcess(
        directory, "a", [posix_tier(directory / "pfs")], cache_keys=SMALL_CHUNKS, node_keys='stream_timeout = "2s"'
    )
    with made:
        with Raw(made) as raw:  # its mover runs from here on: no test is the one that starts it
            raw.put(whole_put(part_ref("first"), DATA))
            raw.commit(part_ref("first"), GOOD)
        with forebay.Client(made.address) as client:
            client.wait("first", 1, "pfs", timeout=30)
        yield made
    assert_clean_log(made)


@pytest.fixture
def raw(gateway: GatewayProcess) -> Iterator[Raw]:
    with Raw(gateway, message_bytes_max=-1) as opened:
        yield opened


@pytest.fixture
def left(gateway: GatewayProcess, raw: Raw) -> Iterator[Leftovers]:
    """As it is once the test's connection stands."""
    found = Leftovers(gateway)
    yield found
    found.close()


@pytest.fixture
def part(request: pytest.FixtureRequest) -> pb.PartRef:
    """A part of a run that no other test has."""
    return part_ref(f"run-{abs(hash(request.node.name)):x}")


def damaged(chunk_index: int) -> list[bytes]:
    """The chunks, one of them with a wrong CRC."""
    chunks = chunks_of(DATA)
    piece = DATA[chunk_index * CHUNK : (chunk_index + 1) * CHUNK]
    chunks[chunk_index] = frames.encode_put_chunk(chunk_index * CHUNK, crc32c(piece) ^ 1, piece)
    return chunks


Stream = Callable[[pb.PartRef], list[bytes]]
TRAILER = trailer(DATA)


def sized(size: int, *messages: bytes) -> Stream:
    """A stream that announces `size`."""
    return lambda part: [header(part, size=size), *messages]


def unsized(*messages: bytes) -> Stream:
    """A stream that announces nothing."""
    return lambda part: [header(part), *messages]


CHUNKS = chunks_of(DATA)
SIZE = len(DATA)
STREAMS: dict[str, tuple[Stream, type[ForebayError], str]] = {
    "chunk out of order": (sized(SIZE, CHUNKS[0], CHUNKS[2], CHUNKS[1], CHUNKS[3], TRAILER), InvalidArgument, "in order"),
    "first chunk missing": (sized(SIZE, *CHUNKS[1:], TRAILER), InvalidArgument, "in order"),
    "chunk twice": (sized(SIZE, CHUNKS[0], CHUNKS[0], *CHUNKS[1:], TRAILER), InvalidArgument, "in order"),
    "last chunk twice": (sized(SIZE, *CHUNKS, CHUNKS[3], TRAILER), InvalidArgument, "in order"),
    "first chunk damaged": (sized(SIZE, *damaged(0), TRAILER), Corrupt, "damaged"),
    "middle chunk damaged": (sized(SIZE, *damaged(1), TRAILER), Corrupt, "damaged"),
    "last chunk damaged": (sized(SIZE, *damaged(3), TRAILER), Corrupt, "damaged"),
    "chunk damaged, size unknown": (unsized(*damaged(1), TRAILER), Corrupt, "damaged"),
    "trailer with another crc": (sized(SIZE, *CHUNKS, frames.encode_put_trailer(SIZE, crc32c(DATA) ^ 1)), Corrupt, "checksum"),
    "trailer with another size": (
        sized(SIZE, *CHUNKS, frames.encode_put_trailer(SIZE - 1, crc32c(DATA))),
        InvalidArgument,
        "sizes differ",
    ),
    "trailer before the end": (sized(SIZE, *CHUNKS[:2], TRAILER), InvalidArgument, "sizes differ"),
    "fewer bytes than announced": (sized(SIZE + 1, *CHUNKS, TRAILER), InvalidArgument, "sizes differ"),
    "more bytes than announced": (sized(SIZE - 1, *CHUNKS, TRAILER), InvalidArgument, "more bytes than announced"),
    "more bytes than announced as empty": (sized(0, *CHUNKS, TRAILER), InvalidArgument, "more bytes than announced"),
    "short chunk in the middle": (
        sized(
            SIZE,
            CHUNKS[0],
            frames.encode_put_chunk(CHUNK, crc32c(DATA[CHUNK : CHUNK + 10]), DATA[CHUNK : CHUNK + 10]),
            frames.encode_put_chunk(CHUNK + 10, crc32c(DATA[CHUNK + 10 : 2 * CHUNK]), DATA[CHUNK + 10 : 2 * CHUNK]),
            *CHUNKS[2:],
            TRAILER,
        ),
        InvalidArgument,
        "chunk",
    ),
    "chunk larger than the unit": (
        sized(SIZE, frames.encode_put_chunk(0, crc32c(DATA), DATA), TRAILER),
        InvalidArgument,
        "chunk",
    ),
    "ends before the header": (lambda part: [], InvalidArgument, "ended"),
    "ends after the header": (sized(SIZE), InvalidArgument, "ended before its trailer"),
    "ends half-way": (sized(SIZE, *CHUNKS[:2]), InvalidArgument, "ended before its trailer"),
    "ends before the trailer": (sized(SIZE, *CHUNKS), InvalidArgument, "ended before its trailer"),
    "chunk before the header": (lambda part: [*CHUNKS, TRAILER], InvalidArgument, "begins with a header"),
    "trailer first": (lambda part: [TRAILER], InvalidArgument, "begins with a header"),
    "two headers": (lambda part: [header(part, size=SIZE)] * 2, InvalidArgument, "one header"),
    "header among the chunks": (
        lambda part: [header(part, size=SIZE), CHUNKS[0], header(part, size=SIZE), *CHUNKS[1:], TRAILER],
        InvalidArgument,
        "one header",
    ),
    "garbage first": (lambda part: [b"\xff\xfe garbage \x00" * 9], InvalidArgument, "PutShardRequest"),
    "garbage among the chunks": (sized(SIZE, CHUNKS[0], b"\x07\xff" * 40, *CHUNKS[1:]), InvalidArgument, "PutShardRequest"),
    "empty message": (sized(SIZE, b"", *CHUNKS, TRAILER), InvalidArgument, "without header"),
    "announces what never fits": (sized(1 << 50), InvalidArgument, "does not fit"),
}


@pytest.mark.parametrize("case", STREAMS)
def test_a_bad_stream_is_refused_and_leaves_nothing(case: str, raw: Raw, left: Leftovers, part: pb.PartRef) -> None:
    stream, kind, sentence = STREAMS[case]
    with pytest.raises(ForebayError) as caught:
        raw.put(stream(part))
    assert_clear(caught.value, kind, sentence)
    left.none()
    # The name is free: the same shard, sent as it should be, is taken.
    receipt = raw.put(whole_put(part, DATA))
    assert (receipt.size, receipt.crc32c) == (SIZE, crc32c(DATA))
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)
    left.none()


def test_a_message_above_the_limit_is_refused(raw: Raw, left: Leftovers, part: pb.PartRef) -> None:
    huge = bytes(frames.MAX_MESSAGE_BYTES + 1)
    with pytest.raises(ForebayError, match="larger than max"):
        raw.put([header(part, size=len(huge)), frames.encode_put_chunk(0, crc32c(huge), huge)])
    left.none()


def test_a_silent_stream_ends_by_itself(gateway: GatewayProcess, raw: Raw, left: Leftovers, part: pb.PartRef) -> None:
    """A client that hangs holds neither space nor a file for ever (stream_timeout)."""

    def hang() -> Iterator[bytes]:
        yield header(part, size=SIZE)
        yield CHUNKS[0]
        eventually(lambda: gateway.status()["cache"]["open_streams"] == 0)

    with pytest.raises(forebay.DeadlineExceeded) as caught:
        raw.put(hang())
    assert_clear(caught.value, forebay.DeadlineExceeded, "no progress")
    left.none()


CLIENT = """
import sys, time, forebay
from pathlib import Path
address, run, flag = sys.argv[1:]
def endless():
    yield bytes(300_000)
    Path(flag).touch()
    time.sleep(600)
with forebay.Client(address).checkpoint(run, 1, session="s") as part:
    part.put("shard.bin", endless())
"""


def test_a_client_that_is_killed_leaves_nothing(gateway: GatewayProcess, left: Leftovers, tmp_path: Path) -> None:
    flag = tmp_path / "flowing"
    child = subprocess.Popen([sys.executable, "-c", CLIENT, gateway.address, "killed", str(flag)])
    try:
        eventually(flag.exists)
        eventually(lambda: list((gateway.cache / "incoming").iterdir()))
        assert left.found()  # it is seen while it is there
        child.kill()
    finally:
        child.kill()
        child.wait(10)
    left.none()


BAD_NAMES = {
    "empty": ("", "empty"),
    "leading slash": ("/a", "empty segment"),
    "trailing slash": ("a/", "empty segment"),
    "double slash": ("a//b", "empty segment"),
    "dot": ("a/./b", "'.'"),
    "dot dot": ("../../etc/passwd", "'..'"),
    "NUL": ("a\0b", "control character"),
    "newline": ("a\nb", "control character"),
    "escape": ("a\x1b[31m", "control character"),
    "segment too long": ("x" * 256, "longer than 255"),
    "whole too long": ("/".join(["x" * 200] * 6), "at most 1024"),
    "reserved": (".forebay/parts/0.json", "reserved"),
    "reserved inside": ("a/.forebay-x/b", "reserved"),
}


@pytest.mark.parametrize("case", BAD_NAMES)
def test_a_bad_name_is_refused_by_its_rule(
    case: str, gateway: GatewayProcess, raw: Raw, left: Leftovers, part: pb.PartRef
) -> None:
    name, rule = BAD_NAMES[case]
    with pytest.raises(ForebayError) as caught:
        raw.put(whole_put(part, DATA, name))
    assert_clear(caught.value, InvalidArgument, rule)
    with pytest.raises(ForebayError) as caught:
        raw.put(whole_put(part_ref(name), DATA))
    assert_clear(caught.value, InvalidArgument, rule)
    if "\0" not in name:
        with forebay.Client(gateway.address) as client, client.checkpoint("names", 1, session="s") as opened:
            with pytest.raises(InvalidArgument, match="shard name"):
                opened.put(name, DATA)
            with pytest.raises(InvalidArgument, match="run"):
                client.latest(name)
    left.none()


BAD_PARTS = {
    "run is a step directory": (part_ref("a/step-000000000001"), "step directory"),
    "no session": (part_ref("r", session=""), "session is empty"),
    "session too long": (part_ref("r", session="s" * 256), "at most 255"),
    "control character in the session": (part_ref("r", session="a\tb"), "control character"),
    "no writers": (part_ref("r", writers=0), "writers must be"),
    "writer is writers": (part_ref("r", writer=2, writers=2), "writer must be below writers"),
    "too many writers": (part_ref("r", writers=1 << 31), "writers must be"),
}


@pytest.mark.parametrize("case", BAD_PARTS)
def test_a_bad_part_is_refused(case: str, raw: Raw, left: Leftovers) -> None:
    bad, rule = BAD_PARTS[case]
    acts: list[Callable[[], object]] = [
        lambda: raw.put(whole_put(bad, DATA)),
        lambda: raw.commit(bad, {}),
        lambda: raw.call("AbortPart", pb.AbortPartRequest(part=bad), pb.AbortPartResponse),
    ]
    for act in acts:
        with pytest.raises(ForebayError) as caught:
            act()
        assert_clear(caught.value, InvalidArgument, rule)
    left.none()


def test_another_number_of_writers_for_the_same_session(raw: Raw, left: Leftovers) -> None:
    first, other = part_ref("writers", writer=0, writers=2), part_ref("writers", writer=1, writers=3)
    raw.put(whole_put(first, DATA))
    for act in (lambda: raw.put(whole_put(other, DATA, "other.bin")), lambda: raw.commit(other, {})):
        with pytest.raises(ForebayError) as caught:
            act()
        assert_clear(caught.value, InvalidArgument, "2 writers", "3")
    raw.call("AbortPart", pb.AbortPartRequest(part=first), pb.AbortPartResponse)
    left.none()


def test_a_second_writer_for_the_same_shard(raw: Raw, left: Leftovers) -> None:
    first, second = (part_ref("same-shard", writer=writer, writers=2) for writer in (0, 1))
    raw.put(whole_put(first, DATA))
    with pytest.raises(ForebayError) as caught:
        raw.put(whole_put(second, DATA))
    assert_clear(caught.value, AlreadyExists, "another writer", "shard.bin")
    raw.call("AbortPart", pb.AbortPartRequest(part=first), pb.AbortPartResponse)
    left.none()


def test_a_second_writer_while_the_first_is_sending(gateway: GatewayProcess, raw: Raw, left: Leftovers) -> None:
    first, second = (part_ref("same-time", writer=writer, writers=2) for writer in (0, 1))
    caught: list[ForebayError] = []

    def slow() -> Iterator[bytes]:
        yield header(first, size=SIZE)
        yield CHUNKS[0]
        eventually(lambda: list((gateway.cache / "incoming").iterdir()))
        with Raw(gateway) as other, pytest.raises(ForebayError) as error:
            other.put(whole_put(second, DATA))
        caught.append(error.value)
        yield from CHUNKS[1:]
        yield TRAILER

    assert raw.put(slow()).size == SIZE
    assert_clear(caught[0], AlreadyExists, "another writer")
    raw.call("AbortPart", pb.AbortPartRequest(part=first), pb.AbortPartResponse)
    left.none()


def test_other_content_under_the_same_name(raw: Raw, left: Leftovers, part: pb.PartRef) -> None:
    raw.put(whole_put(part, DATA))
    for other in (DATA[:-1] + bytes([DATA[-1] ^ 1]), DATA[:-1], b""):
        with pytest.raises(ForebayError) as caught:
            raw.put(whole_put(part, other))
        assert_clear(caught.value, AlreadyExists, "other content")
    assert raw.put(whole_put(part, DATA)).size == SIZE
    assert raw.put([header(part, size=SIZE), TRAILER]).crc32c == crc32c(DATA)
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)
    left.none()


COMMITS: dict[str, tuple[dict[str, bytes], type[ForebayError], str]] = {
    "a shard that never landed": ({**GOOD, "missing.bin": b"x"}, Incomplete, "missing.bin"),
    "nothing of what landed": ({}, InvalidArgument, "does not name"),
    "another name": ({"other.bin": DATA}, Incomplete, "other.bin"),
    "another checksum": ({"shard.bin": DATA[:-1] + b"!"}, InvalidArgument, "shard.bin"),
    "another size": ({"shard.bin": DATA + b"!"}, InvalidArgument, "shard.bin"),
}


@pytest.mark.parametrize("case", COMMITS)
def test_a_commit_that_does_not_fit_what_landed(
    case: str, gateway: GatewayProcess, raw: Raw, left: Leftovers, part: pb.PartRef
) -> None:
    named, kind, sentence = COMMITS[case]
    raw.put(whole_put(part, DATA))
    with pytest.raises(ForebayError) as caught:
        raw.commit(part, named)
    assert_clear(caught.value, kind, sentence)
    if kind is Incomplete:
        [missing] = caught.value.missing
        assert (missing.writer, set(missing.shards)) == (0, set(named) - set(GOOD))
    with forebay.Client(gateway.address) as client:
        assert client.latest(part.run) is None
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)
    left.none()


@pytest.mark.parametrize(
    "metadata",
    ["[1]", "{", "1", '{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", '"' + "x" * (2 << 20) + '"'],
    ids=["list", "no JSON", "number", "nested", "large"],
)
def test_bad_metadata(metadata: str, raw: Raw, left: Leftovers, part: pb.PartRef) -> None:
    raw.put(whole_put(part, DATA))
    with pytest.raises(ForebayError) as caught:
        raw.commit(part, GOOD, metadata)
    assert_clear(caught.value, InvalidArgument, "metadata")
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)
    left.none()


def test_a_commit_names_a_shard_twice(raw: Raw, left: Leftovers, part: pb.PartRef) -> None:
    raw.put(whole_put(part, DATA))
    shard = pb.ExpectedShard(name="shard.bin", size=SIZE, crc32c=crc32c(DATA))
    with pytest.raises(ForebayError) as caught:
        raw.call("CommitPart", pb.CommitPartRequest(part=part, shards=[shard, shard]), pb.CommitPartResponse)
    assert_clear(caught.value, InvalidArgument, "twice")
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)
    left.none()


def test_a_committed_part_is_closed(gateway: GatewayProcess, raw: Raw, part: pb.PartRef) -> None:
    raw.put(whole_put(part, DATA))
    raw.commit(part, GOOD)
    with forebay.Client(gateway.address) as client:
        client.wait(part.run, part.step, "pfs", timeout=30)
    left = Leftovers(gateway)
    raw.commit(part, GOOD)  # identical: the same answer
    assert raw.put(whole_put(part, DATA)).size == SIZE
    acts: list[Callable[[], object]] = [
        lambda: raw.put(whole_put(part, b"new", "new.bin")),
        lambda: raw.put(whole_put(part, DATA[:-1])),
        lambda: raw.commit(part, {"shard.bin": DATA[:-1]}),
        lambda: raw.commit(part, {}),
        lambda: raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse),
    ]
    for act in acts:
        with pytest.raises(ForebayError) as caught:
            act()
        assert_clear(caught.value, AlreadyExists)
    with forebay.Client(gateway.address) as client:
        assert client.open(part.run, part.step).read("shard.bin") == DATA
    left.none()
    left.close()


def test_small_shards_are_taken_together_or_not_at_all(
    gateway: GatewayProcess, raw: Raw, left: Leftovers, part: pb.PartRef
) -> None:
    good = pb.SmallShard(name="good", crc32c=crc32c(b"good"), data=b"good")
    put_many = raw.channel.stream_stream(
        "/forebay.v1.Gateway/PutMany",
        request_serializer=pb.PutManyRequest.SerializeToString,
        response_deserializer=pb.PutManyResponse.FromString,
    )
    bad = {
        "damaged": pb.SmallShard(name="bad", crc32c=1, data=b"bad"),
        "twice": good,
        "empty segment": pb.SmallShard(name="a//b", crc32c=crc32c(b"x"), data=b"x"),
    }
    for sentence, shard in bad.items():
        with pytest.raises(Exception, match=sentence):
            list(put_many(iter([pb.PutManyRequest(part=part, shards=[good, shard])]), timeout=20))
        left.none()
    with pytest.raises(Exception, match="names the part"):
        list(put_many(iter([pb.PutManyRequest(shards=[good])]), timeout=20))
    with forebay.Client(gateway.address) as client:
        assert client.latest(part.run) is None
    left.none()


def test_unknown_run_step_and_shard(
    gateway: GatewayProcess, raw: Raw, left: Leftovers, part: pb.PartRef, tmp_path: Path
) -> None:
    raw.put(whole_put(part, DATA))
    raw.commit(part, GOOD)
    with forebay.Client(gateway.address) as client:
        client.wait(part.run, part.step, "pfs", timeout=30)
        assert client.latest("no/such/run") is None
        reader = client.open(part.run, part.step)
        acts: list[Callable[[], object]] = [
            lambda: client.checkpoints("no/such/run"),
            lambda: client.describe("no/such/run", 1),
            lambda: client.describe(part.run, 2),
            lambda: client.open(part.run, 2),
            lambda: client.restore_dir("no/such/run", "latest", tmp_path / "never"),
            lambda: client.restore_dir(part.run, 2, tmp_path / "never"),
            lambda: client.pin(part.run, 2),
            lambda: client.delete("no/such/run", 1),
            lambda: reader.read("no/such/shard"),
        ]
        for act in acts:
            with pytest.raises(ForebayError) as caught:
                act()
            assert_clear(caught.value, NotFound)
        with pytest.raises(InvalidArgument, match="no tier is named 'nowhere'"):
            client.wait(part.run, part.step, "nowhere", timeout=5)
        with pytest.raises(forebay.Unsupported, match="peer"):
            client.wait(part.run, part.step, "peer", timeout=5)
        with pytest.raises(InvalidArgument, match="nowhere"):
            client.open(part.run, part.step, source="nowhere").read("shard.bin")
    assert not (tmp_path / "never").exists()


def test_the_command_line_says_it_with_its_exit_code(gateway: GatewayProcess, tmp_path: Path) -> None:
    source = tmp_path / "state"
    source.mkdir()
    (source / "model.bin").write_bytes(DATA)
    never = str(tmp_path / "never")
    save = ("save", str(source), "--run", "cli", "--step", "1", "--session")
    gateway.cli(*save, "s", "--wait", "pfs")
    gateway.cli(*save, "s")  # identical: done already
    (source / "model.bin").write_bytes(DATA[::-1])
    cases: list[tuple[tuple[str, ...], int, str]] = [
        ((*save, "s"), 1, "other content"),
        (("save", str(source), "--run", "a//b", "--step", "1"), 2, "empty segment"),
        (("save", str(tmp_path / "nothing"), "--run", "cli", "--step", "2"), 2, "not a directory"),
        (
            ("save", str(source), "--run", "cli", "--step", "2", "--writers", "2", "--writer", "2", "--session", "s"),
            2,
            "writer 2",
        ),
        (("save", str(source), "--run", "cli", "--step", "-1"), 2, "--step"),
        (("restore", "no-run", never), 3, "no complete checkpoint"),
        (("restore", "cli", "2", never), 3, "step 2"),
        (("restore", "cli", "two", never), 2, "two"),
        (("info", "cli", "2"), 3, "step 2"),
        (("info", "cli", "1", "no-shard"), 3, "no-shard"),
        (("ls", "no-run"), 3, "no-run"),
        (("rm", "cli", "2"), 3, "step 2"),
        (("pin", "cli", "2"), 3, "step 2"),
        (("wait", "cli", "1", "nowhere"), 2, "nowhere"),
        (("wait", "cli", "2", "--timeout", "0.3"), 8, "step 2"),
        (("--address", f"unix://{tmp_path}/no.sock", "status"), 5, "no gateway answers"),
        (("status", "--nonsense"), 2, "--nonsense"),
    ]
    for arguments, code, sentence in cases:
        result = gateway.cli(*arguments, check=False)
        assert result.returncode == code, (arguments, result)
        assert_refused(result, code, sentence)
    gateway.cli("restore", "cli", "1", str(tmp_path / "restored"))
    assert (tmp_path / "restored" / "model.bin").read_bytes() == DATA
    assert not Path(never).exists()


def test_hundreds_of_bad_streams_leave_the_gateway_as_it_was(
    gateway: GatewayProcess, raw: Raw, left: Leftovers, part: pb.PartRef
) -> None:
    for _ in range(20):  # until allocators and threads have settled
        with pytest.raises(ForebayError):
            raw.put([header(part, size=SIZE), CHUNKS[1]])
    process = psutil.Process(gateway.pid)
    before = process.memory_info().rss
    for index in range(300):
        with pytest.raises(ForebayError):
            raw.put([header(part, f"shard-{index}", SIZE), CHUNKS[0], *(CHUNKS[2:] if index % 2 else ())])
    left.none()
    assert process.memory_info().rss - before < 32 << 20
