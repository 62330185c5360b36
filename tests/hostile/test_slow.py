"""Clients that stall: writers without progress, readers that never read. Both are ended by node.stream_timeout (2 s here), and
until then hold nothing that others need."""

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier, s3_tier
from forebay.demo.seaweedfs import SeaweedFS
from forebay.errors import CacheFull, DeadlineExceeded, InvalidArgument, from_rpc
from forebay_wire import frames
from forebay_wire.checksums import crc32c
from forebay_wire.v1 import gateway_pb2 as pb
from hostile.kit import MIB, Left, report, rss, wire
from integration.conftest import assert_clean_log
from integration.kit import CHUNK, Raw, chunks_of, eventually, header, part_ref, some_bytes, trailer, whole_put

DATA = some_bytes(CHUNK * 3, "slow")


async def answer_of(call: "grpc.aio.StreamStreamCall[bytes, bytes]", within_s: float = 10.0) -> Exception:
    """The typed error with which a call ends."""
    try:
        async with asyncio.timeout(within_s):
            while await call.read() is not grpc.aio.EOF:
                pass
    except grpc.RpcError as error:
        return from_rpc(error, "call")
    raise AssertionError("the call ended well")


async def test_writers_that_send_nothing_or_next_to_nothing(gateway: GatewayProcess, left: Left) -> None:
    """No header, a header alone, one chunk, a byte now and then: each ends by itself, with its reason."""
    byte = [frames.encode_put_chunk(offset, crc32c(b"x"), b"x") for offset in range(9)]
    empty = frames.encode_put_chunk(0, 0, b"")
    starts = {"nothing": [], "header": [header(part_ref("slow"), "h", 9)], "unsized": [header(part_ref("slow"), "u")]}
    async with wire(gateway) as line:
        calls = {}
        for name, messages in starts.items():
            calls[name] = line.put()
            for message in messages:
                await calls[name].write(message)
        for name, call in calls.items():
            error = await answer_of(call)
            assert isinstance(error, DeadlineExceeded), (name, error)
        for message in (byte[0], empty):
            call = line.put()
            await call.write(header(part_ref("slow"), "b", 9))
            await call.write(message)
            await asyncio.sleep(1.0)
            if message is byte[0]:
                await call.write(byte[1])  # the last chunk alone may be short, so bytes cannot drip in
            assert isinstance(await answer_of(call), InvalidArgument)
    left.none()


async def test_empty_chunks_do_not_keep_a_comparison_alive(gateway: GatewayProcess, raw: Raw, left: Left) -> None:
    part = part_ref("slow-existing")
    raw.put(whole_put(part, DATA, "there"))
    async with wire(gateway) as line:
        call = line.put()
        await call.write(header(part, "there", len(DATA)))
        await call.write(frames.encode_put_chunk(0, 0, b""))
        assert isinstance(await answer_of(call), InvalidArgument)
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)
    left.none()


async def test_a_silent_stream_of_small_shards_is_ended(gateway: GatewayProcess, left: Left) -> None:
    async with wire(gateway) as line:
        call = line.put_many()
        await call.write(pb.PutManyRequest(part=part_ref("slow-many")).SerializeToString())
        error = await answer_of(call)
        assert isinstance(error, DeadlineExceeded), error
    left.none()


# -- readers ---------------------------------------------------------------------------------------------------------------

BIG = some_bytes(32 * MIB, "big")


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[GatewayProcess]:
    """Chunks of 4 MiB, so that the 16 buffers of the disk are few; run `big` is complete on both tiers."""
    directory = tmp_path_factory.mktemp("large")
    (directory / "pfs").mkdir()
    made = GatewayProcess(
        directory,
        "large",
        [
            posix_tier(directory / "pfs"),
            s3_tier(s3_server.endpoint, s3_server.bucket, prefix="large"),
        ],
        node_keys='stream_timeout = "4s"',
        environment=s3_server.environment,
    )
    with made:
        with forebay.Client(made.address) as client:
            with client.checkpoint("big", 1, session="s") as part:
                part.put("big.bin", BIG)
                part.commit()
            client.wait("big", 1, "all", timeout=60)
        yield made
    assert_clean_log(made)


@pytest.mark.parametrize("source", ["cache", "object"])
async def test_readers_that_never_read_hold_up_nobody(large: GatewayProcess, source: str) -> None:
    """More of them than the pool has buffers, or the S3 client connections."""
    count = 40
    request = pb.ReadShardRequest(run="big", step=1, name="big.bin", source=source).SerializeToString()
    before = rss(large)
    async with wire(large) as line:
        stalled = [line.read(request) for _ in range(count)]
        await asyncio.sleep(1.0)
        peak = rss(large) - before
        began_s = time.monotonic()

        def others() -> None:
            with forebay.Client(large.address, progress=False) as client:
                assert client.open("big", 1, source="cache").read("big.bin") == BIG
                with client.checkpoint("beside", int(time.monotonic_ns()), session="s") as part:
                    part.put("data.bin", BIG[: 8 * MIB])
                    part.commit(wait="all", timeout=30)

        await asyncio.to_thread(others)
        took_s = time.monotonic() - began_s

        def evicted() -> bool:
            large.cli("evict", "big", "1", "--yes")
            return "evicted" in {shard["state"] for shard in info(large)}

        await asyncio.to_thread(eventually, evicted, bool, 90.0)
        for call in stalled:
            call.cancel()
    with forebay.Client(large.address) as client:
        assert client.open("big", 1).read("big.bin") == BIG  # fetched again
    report(f"stalled_readers_{source}", readers=count, rss_peak_growth=peak, others_took_s=round(took_s, 2))
    assert peak < 900 * MIB


def info(gateway: GatewayProcess) -> list[dict[str, str]]:
    import json

    found: list[dict[str, str]] = json.loads(gateway.cli("info", "big", "1", "--json").stdout)["shards"]
    return found


async def test_lists_and_waits_that_are_never_read_end(gateway: GatewayProcess, raw: Raw, left: Left) -> None:
    part = part_ref("many-shards")
    shards = {f"{'n' * 200}-{number}": b"x" for number in range(3000)}
    small = [pb.SmallShard(name=name, crc32c=crc32c(data), data=data) for name, data in shards.items()]
    async with wire(gateway) as line:
        call = line.put_many()
        for begin in range(0, len(small), 500):
            request = pb.PutManyRequest(part=part, shards=small[begin : begin + 500])
            await call.write(request.SerializeToString())
        await call.done_writing()
        while await call.read() is not grpc.aio.EOF:
            pass
        raw.commit(part, shards)
        before = rss(gateway)
        request_bytes = pb.ListShardsRequest(run="many-shards", step=1).SerializeToString()
        lists = [line.stream("ListShards")(request_bytes) for _ in range(50)]
        waits = [
            line.stream("Wait")(pb.WaitRequest(run="nobody", step=number % 10, level="all").SerializeToString())
            for number in range(200)
        ]
        await asyncio.sleep(4.0)
        grown = rss(gateway) - before
        status = await asyncio.to_thread(gateway.status)
        for unread in (*lists, *waits):
            unread.cancel()
    report("unread_lists", lists=50, waits=200, rss_growth=grown, loop_lag_p99_ms=round(1000 * status["loop_lag_p99_s"], 1))
    assert grown < 128 * MIB
    gateway.cli("rm", "many-shards", "1", "--force", "--yes", check=False)


async def test_a_writer_that_dribbles_whole_chunks_may(gateway: GatewayProcess, raw: Raw) -> None:
    """Slow is not stalled: a chunk within each timeout is progress."""
    part = part_ref("dribble")
    async with wire(gateway) as line:
        call = line.put()
        await call.write(header(part, size=len(DATA)))
        for chunk in chunks_of(DATA):
            await asyncio.sleep(1.2)
            await call.write(chunk)
        await call.write(trailer(DATA))
        await call.done_writing()
        answers = []
        while (answer := await call.read()) is not grpc.aio.EOF:
            answers.append(pb.PutShardResponse.FromString(answer))
    assert answers[-1].receipt.size == len(DATA)
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)


def test_a_stalled_writer_keeps_space_only_until_its_timeout(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    made = GatewayProcess(
        tmp_path,
        "full",
        [posix_tier(tmp_path / "pfs")],
        capacity="20MiB",
        cache_keys='chunk_size = "64KiB"',
        node_keys='stream_timeout = "2s"',
    )

    async def take_all() -> None:
        async with wire(made) as line:
            call = line.put()
            await call.write(header(part_ref("greedy"), size=18 * MIB))
            await call.read()
            with (
                forebay.Client(made.address, admit_timeout=0) as client,
                client.checkpoint("r", 1, session="s") as part,
                pytest.raises(CacheFull),
            ):
                await asyncio.to_thread(part.put, "x", bytes(4 * MIB))
            with forebay.Client(made.address, admit_timeout=20) as client, client.checkpoint("r", 2, session="s") as part:
                await asyncio.to_thread(part.put, "x", bytes(4 * MIB))
                await asyncio.to_thread(part.commit)

    with made:
        asyncio.run(take_all())
    assert_clean_log(made)
