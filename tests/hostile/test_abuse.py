"""Requests that no client of ours would send: too large, too many, too often, malformed. Refused or served; never fatal."""

import asyncio
import contextlib
import random
import socket
import time

import grpc
import grpc.aio
import pytest

import forebay
from forebay.demo.gateways import GatewayProcess
from forebay.errors import AlreadyExists, Corrupt, ForebayError, InvalidArgument, NotFound, from_rpc
from forebay.types import Status
from forebay_wire import frames
from forebay_wire.checksums import crc32c
from forebay_wire.v1 import gateway_pb2 as pb
from hostile.conftest import SAVED
from hostile.kit import MIB, SOAK, Left, Wire, at_once, full, loop_lag_ms, report, rss, wire
from integration.kit import CHUNK, Raw, assert_clear, chunks_of, header, part_ref, some_bytes

DATA = some_bytes(2 * CHUNK, "abuse")


async def outcome(line: Wire, method: str, *messages: bytes, within_s: float = 60.0) -> ForebayError | list[bytes]:
    """All answers of a stream, or the typed error. On a thread: gRPC's asynchronous calls lose it when a write fails."""
    call = line.plain.stream_stream(f"/forebay.v1.Gateway/{method}")

    def act() -> ForebayError | list[bytes]:
        try:
            return list(call(iter(messages), timeout=within_s))
        except grpc.RpcError as error:
            return from_rpc(error, "call")

    return await asyncio.to_thread(act)


def many(part: pb.PartRef | None, shards: dict[str, bytes], *more: pb.SmallShard) -> bytes:
    """A PutMany request."""
    made = [pb.SmallShard(name=name, crc32c=crc32c(data), data=data) for name, data in shards.items()]
    return pb.PutManyRequest(part=part, shards=[*made, *more]).SerializeToString()


# -- PutMany -----------------------------------------------------------------------------------------------------------------


async def test_put_many_abuse(gateway: GatewayProcess, raw: Raw, left: Left) -> None:
    part = part_ref("abuse-many")
    twice = pb.SmallShard(name="name-99999", crc32c=0, data=b"")
    crowd = {f"name-{number}": b"" for number in range(100_000)}
    cases: list[tuple[list[bytes], type[ForebayError] | None]] = [
        ([], None),
        ([many(part, {})], None),
        ([many(part, {}), many(None, {})], None),
        ([many(None, {"a": b""})], InvalidArgument),
        ([many(part, crowd)], InvalidArgument),
        ([many(part, crowd, twice)], InvalidArgument),
        ([many(part, {f"n{number}": b"" for number in range(4000)}, pb.SmallShard(name="n3999"))], InvalidArgument),
        ([many(part, {"a": b"1"}, pb.SmallShard(name="b", crc32c=1, data=b"2"))], Corrupt),
        ([many(part, {"../a": b"1"})], InvalidArgument),
        ([many(part, {"a": b"1"}), many(part_ref("abuse-many", writer=7), {"b": b"1"})], InvalidArgument),
        ([b"\xff" * 40], InvalidArgument),
    ]
    async with wire(gateway) as line:
        for index, (messages, kind) in enumerate(cases):
            found = await outcome(line, "PutMany", *messages)
            if kind is None:
                assert isinstance(found, list), (index, found)
            else:
                assert isinstance(found, kind), (index, found)
                assert_clear(found, kind)
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)
    left.none()
    report("put_many_abuse", requests=len(cases), loop_lag_p99_ms=loop_lag_ms(gateway))


async def test_many_streams_of_large_requests_at_once(gateway: GatewayProcess, raw: Raw, left: Left) -> None:
    """16 requests of 32 MiB under way together: half a GiB is asked for, and served as memory allows."""
    part = part_ref("abuse-large")
    blob = some_bytes(32 * MIB, "blob")
    crc = crc32c(blob)
    before = rss(gateway)
    peak = 0
    served: list[bool] = []

    async def one(number: int) -> None:
        nonlocal peak
        request = pb.PutManyRequest(part=part, shards=[pb.SmallShard(name=f"blob-{number}", crc32c=crc, data=blob)])
        found = await outcome(line, "PutMany", request.SerializeToString())
        peak = max(peak, rss(gateway) - before)
        served.append(isinstance(found, list))
        # They share one connection: one of them may not be whole within this gateway's short time for a silent stream.
        assert isinstance(found, (list, forebay.CacheFull, forebay.DeadlineExceeded)), found

    async with wire(gateway) as line:
        await at_once(16, 16, one)
    assert any(served)
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)
    left.none()
    report("large_requests", requests=16, rss_peak_growth=peak, rss_growth=rss(gateway) - before)
    assert peak < 640 * MIB  # few are taken in at a time; what gRPC itself holds of the others counts too


# -- giant and malformed -------------------------------------------------------------------------------------------------------


async def test_giant_values(gateway: GatewayProcess, left: Left) -> None:
    """A megabyte where a name should be: a sentence of readable length, with its type."""
    giant = "x" * (8 << 20)
    async with wire(gateway) as line:
        requests = {
            "run": line.read(pb.ReadShardRequest(run=giant, step=1, name="a").SerializeToString()),
            "name": line.read(pb.ReadShardRequest(run="saved", step=1, name=giant).SerializeToString()),
            "source": line.read(pb.ReadShardRequest(run="saved", step=1, name="shard-0.bin", source=giant).SerializeToString()),
            "session": line.read(pb.ReadShardRequest(run="saved", step=1, name="a", session=giant).SerializeToString()),
            "list session": line.stream("ListShards")(
                pb.ListShardsRequest(run="saved", step=1, session=giant).SerializeToString()
            ),
            "level": line.stream("Wait")(pb.WaitRequest(run="saved", step=1, level=giant).SerializeToString()),
        }
        for name, call in requests.items():
            try:
                async with asyncio.timeout(20):
                    await call.read()
            except grpc.RpcError as error:
                found = from_rpc(error, "call")
                assert isinstance(found, InvalidArgument | NotFound), (name, found)
                assert len(found.message) < 3000, name
            else:
                raise AssertionError(f"{name} was taken")
        for messages in (
            [header(part_ref(giant))],
            [header(part_ref("abuse"), giant)],
            [header(part_ref("abuse", session=giant))],
        ):
            found_ = await outcome(line, "PutShard", *messages)
            assert isinstance(found_, InvalidArgument)
            assert len(found_.message) < 3000
    left.none()


async def test_giant_metadata_and_messages(gateway: GatewayProcess, left: Left) -> None:
    async with wire(gateway, ("grpc.max_send_message_length", -1)) as line:
        call = line.read(
            pb.ReadShardRequest(run="saved", step=1, name="shard-0.bin").SerializeToString(),
            metadata=[(f"key-{number}", "v" * 8000) for number in range(100)],
        )
        with pytest.raises(grpc.RpcError):
            await call.read()
        found = await outcome(line, "PutShard", bytes(frames.MAX_MESSAGE_BYTES + 1))
        assert isinstance(found, ForebayError)
        found = await outcome(line, "PutMany", bytes(frames.MAX_MESSAGE_BYTES + 1))
        assert isinstance(found, ForebayError)
    left.none()


async def test_a_hundred_thousand_tiny_messages(gateway: GatewayProcess, left: Left) -> None:
    """In one stream of small shards, and as chunks that are refused at the second."""
    count = full(100_000)
    part = part_ref("tiny")
    empty = pb.PutManyRequest(part=part).SerializeToString()
    before = rss(gateway)
    async with wire(gateway) as line:
        call = line.put_many()

        async def send() -> None:
            for _ in range(count):
                await call.write(empty)
            await call.done_writing()

        async with asyncio.TaskGroup() as group:
            group.create_task(send())
            for _ in range(count):
                assert await call.read() is not grpc.aio.EOF
        tiny = [frames.encode_put_chunk(offset, crc32c(b"x"), b"x") for offset in range(1000)]
        found = await outcome(line, "PutShard", header(part, size=1000), *tiny)
        assert isinstance(found, InvalidArgument)
    grown = rss(gateway) - before
    report("tiny_messages", messages=count, rss_growth=grown, loop_lag_p99_ms=loop_lag_ms(gateway))
    assert grown < 24 * MIB
    gateway.cli("rm", "tiny", "1", "--force", "--yes", check=False)
    left.none()


async def test_malformed_frames(gateway: GatewayProcess, raw: Raw, left: Left) -> None:
    """Damaged streams of every kind end as typed errors; the log has no word of a defect (the fixture looks)."""
    count = full(5_000)
    good = [header(part_ref("malformed"), "m", len(DATA)), *chunks_of(DATA)]
    refused = 0

    async def one(number: int) -> None:
        nonlocal refused
        chance = random.Random(number)
        messages = [bytearray(message) for message in good]
        for _ in range(chance.randrange(1, 4)):
            victim = chance.choice(messages)
            position = chance.randrange(min(len(victim), 64)) if victim else 0
            match chance.randrange(4):
                case 0:
                    victim[position:position] = chance.randbytes(chance.randrange(1, 9))
                case 1:
                    del victim[position : position + chance.randrange(1, 9)]
                case 2 if victim:
                    victim[position % len(victim)] ^= 1 << chance.randrange(8)
                case _:
                    victim[:] = chance.randbytes(chance.randrange(40))
        messages[0] = messages[0].replace(b"\x01m", f"\x01{chr(97 + number % 26)}".encode())
        found = await outcome(line, "PutShard", *map(bytes, messages))
        assert isinstance(found, ForebayError), "no trailer was sent"
        assert found.kind != "internal", found
        refused += 1

    async with wire(gateway) as line:
        await at_once(count, 8, one)
    report("malformed_streams", streams=count, refused=refused)
    left.none()


def test_connections_that_speak_no_http2(gateway: GatewayProcess, left: Left) -> None:
    chance = random.Random(5)
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    starts = [b"", b"GET / HTTP/1.1\r\n\r\n", preface, preface + b"\x00\x00\x00\x04\x00\x00\x00\x00\x00", preface[:9]]
    sockets = []
    for number in range(200):
        each = socket.socket(socket.AF_UNIX)
        each.connect(str(gateway.socket))
        with contextlib.suppress(OSError):
            each.sendall(starts[number % len(starts)] + chance.randbytes(chance.randrange(200)))
        sockets.append(each)
    with forebay.Client(gateway.address) as client:
        assert client.open("saved", 1).read("shard-0.bin") == SAVED["shard-0.bin"]
    for each in sockets:
        each.close()
    left.none()


# -- too many, too often -------------------------------------------------------------------------------------------------------


async def test_thousands_of_open_parts_sessions_and_runs(gateway: GatewayProcess, raw: Raw) -> None:
    count = 10_000 if SOAK else 600
    before = rss(gateway)

    async def one(number: int) -> None:
        part = part_ref(f"open/run-{number % 97}", step=number, session=f"s{number}", writers=1 + number % 3)
        call = line.put()
        await call.write(header(part, size=10))
        await call.read()
        call.cancel()

    async with wire(gateway) as line:
        await at_once(count, 16, one)
    began_s = time.monotonic()
    status = raw_status(gateway)
    took_s = time.monotonic() - began_s
    grown = rss(gateway) - before
    report(
        "open_parts",
        parts=count,
        rss_growth=grown,
        status_s=round(took_s, 3),
        loop_lag_p99_ms=round(1000 * status.loop_lag_p99_s, 1),
    )
    assert status.checkpoints_incomplete >= count
    with forebay.Client(gateway.address) as client:
        assert client.open("saved", 1).read("shard-0.bin") == SAVED["shard-0.bin"]
    for number in range(count):
        part = part_ref(f"open/run-{number % 97}", step=number, session=f"s{number}", writers=1 + number % 3)
        raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)


def raw_status(gateway: GatewayProcess) -> Status:
    with forebay.Client(gateway.address) as client:
        client.pressure()
        return client.status()


async def test_a_session_of_a_million_writers(gateway: GatewayProcess, raw: Raw, left: Left) -> None:
    """It says so itself; nobody has a million names to read."""
    part = part_ref("million", writers=1 << 20)
    async with wire(gateway) as line:
        call = line.put()
        await call.write(header(part, size=10))
        await call.read()
        call.cancel()
        waits = [line.stream("Wait")(pb.WaitRequest(run="million", step=1, level="all").SerializeToString()) for _ in range(20)]
        for wait in waits:
            answer = pb.WaitResponse.FromString(await wait.read())
            assert 0 < len(answer.missing) <= 1000
        status = await asyncio.to_thread(raw_status, gateway)
        assert status.checkpoints_incomplete >= 1
        for wait in waits:
            wait.cancel()
    report("million_writers", waits=len(waits), loop_lag_p99_ms=loop_lag_ms(gateway))
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)
    left.none()


@pytest.mark.parametrize("timeout_s", [float("nan"), float("inf"), -1.0, 1e300])
def test_times_that_are_none(raw: Raw, gateway: GatewayProcess, timeout_s: float) -> None:
    request = pb.WaitRequest(run="saved", step=1, level="all", timeout_s=timeout_s)
    wait = raw.channel.unary_stream("/forebay.v1.Gateway/Wait")
    with pytest.raises(grpc.RpcError) as caught:
        list(wait(request.SerializeToString(), timeout=10))
    assert_clear(from_rpc(caught.value, "wait"), InvalidArgument, "seconds")


async def test_names_that_leave_the_root_do_not_make_a_tier_go_away(gateway: GatewayProcess) -> None:
    async with wire(gateway) as line:
        for run in ("..", "../x", "a//b", "/", "a/../../b", "\x00", ".forebay/nodes"):
            request = pb.ReadShardRequest(run=run, step=1, name="../../etc/passwd").SerializeToString()
            found = await outcome_of_read(line, request)
            assert isinstance(found, InvalidArgument | NotFound), (run, found)
        found = await outcome_of_read(
            line, pb.ReadShardRequest(run="saved", step=1, name="../../etc/passwd").SerializeToString()
        )
        assert isinstance(found, InvalidArgument | NotFound)
    assert {tier["state"] for tier in gateway.status()["tiers"]} == {"ok"}


async def outcome_of_read(line: Wire, request: bytes) -> ForebayError | bytes:
    try:
        answer: bytes = await line.read(request).read()
    except grpc.RpcError as error:
        return from_rpc(error, "read")
    return answer


async def test_deadline_storms(gateway: GatewayProcess, left: Left) -> None:
    """Calls that are over before they begin, thousands of them, and waits for what never comes."""
    count = full(20_000)
    calls = {
        "Describe": pb.DescribeRequest(run="saved", step=1),
        "Latest": pb.LatestRequest(run="saved"),
        "ListRuns": pb.ListRunsRequest(),
        "CommitPart": pb.CommitPartRequest(part=part_ref("storm")),
        "AbortPart": pb.AbortPartRequest(part=part_ref("storm")),
    }
    names = list(calls)
    before = rss(gateway)
    async with wire(gateway) as line:

        async def one(number: int) -> None:
            name = names[number % len(names)]
            with contextlib.suppress(grpc.RpcError):
                await line.unary(name)(
                    calls[name].SerializeToString(), timeout=random.Random(number).choice([0.001, 0.01, 0.2])
                )

        waits = [
            line.stream("Wait")(pb.WaitRequest(run="saved", step=1000 + number % 50, level="all").SerializeToString())
            for number in range(300)
        ]
        await at_once(count, 64, one)
        for wait in waits:
            wait.cancel()
    grown, lag_ms = rss(gateway) - before, loop_lag_ms(gateway)
    report("deadline_storm", calls=count, waits=300, rss_growth=grown, loop_lag_p99_ms=lag_ms)
    assert grown < 32 * MIB
    with forebay.Client(gateway.address) as client:
        assert client.latest("saved") == 1
        with contextlib.suppress(AlreadyExists, NotFound, ForebayError):
            client.delete("storm", 1, force=True)
    left.none()
