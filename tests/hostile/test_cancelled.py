"""Thousands of streams and reads that their clients give up: memory stays flat, and nothing is held for them."""

import asyncio
import contextlib
import random
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import grpc
import psutil
import pytest

import forebay
from forebay.demo.gateways import GatewayProcess
from forebay.demo.seaweedfs import SeaweedFS
from forebay_wire.v1 import gateway_pb2 as pb
from hostile.conftest import SAVED
from hostile.kit import MIB, Left, Wire, at_once, full, loop_lag_ms, report, rss, wire
from integration.kit import CHUNK, Raw, chunks_of, eventually, header, part_ref, some_bytes, trailer, whole_put

WIDTH = 16
GROWTH_BYTES_MAX = 24 * MIB
DATA = some_bytes(4 * CHUNK, "cancelled")
CHUNKS = chunks_of(DATA)


async def cancelled_put(line: Wire, number: int) -> None:
    """A stream that ends at any point of its life, read or not."""
    chance = random.Random(number)
    call = line.put()
    messages = [header(part_ref("cancelled"), f"s{number}", len(DATA) if number % 3 else None), *CHUNKS, trailer(DATA)]
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
        for message in messages[: chance.randrange(len(messages) + 1)]:
            await call.write(message)
        if number % 2:
            await call.read()
        if number % 5 == 0:
            await asyncio.sleep(chance.random() / 50)
    call.cancel()


async def test_cancelled_puts(gateway: GatewayProcess, raw: Raw, left: Left) -> None:
    count = full(10_000)

    async def streams(begin: int, number_of_them: int) -> None:
        async with wire(gateway) as line:
            await at_once(number_of_them, WIDTH, lambda number: cancelled_put(line, begin + number))

    def drop() -> int:
        request = pb.AbortPartRequest(part=part_ref("cancelled"))
        return int(raw.call("AbortPart", request, pb.AbortPartResponse).shards_dropped)

    await streams(0, max(300, count // 4))
    drop()
    before, began_s = rss(gateway), time.monotonic()
    await streams(100_000, count)
    took_s = time.monotonic() - began_s
    eventually(lambda: gateway.status()["cache"]["open_streams"] == 0)
    sealed = drop()  # those whose trailer came through are durable, though nobody heard so
    left.none()
    grown = rss(gateway) - before
    report(
        "cancelled_puts",
        streams=count,
        sealed=sealed,
        rss_growth=grown,
        loop_lag_p99_ms=loop_lag_ms(gateway),
        per_s=round(count / took_s),
    )
    assert grown < GROWTH_BYTES_MAX
    raw.put(whole_put(part_ref("cancelled"), DATA))
    drop()
    left.none()


async def cancelled_read(line: Wire, number: int, sources: tuple[str, ...]) -> None:
    request = pb.ReadShardRequest(run="saved", step=1, name=f"shard-{number % 4}.bin", source=sources[number % len(sources)])
    call = line.read(request.SerializeToString())
    with contextlib.suppress(grpc.RpcError, asyncio.CancelledError):
        for _ in range(random.Random(number).randrange(5)):
            await call.read()
        if number % 5 == 0:
            await asyncio.sleep(0.005)
    call.cancel()


def connections_to(gateway: GatewayProcess, server: SeaweedFS) -> int:
    """Open TCP connections of the gateway's own process to the S3 server."""
    port = int(server.endpoint.rpartition(":")[2])
    found = psutil.Process(gateway.pid).net_connections("tcp")
    return sum(1 for each in found if each.raddr and each.raddr.port == port and each.status == psutil.CONN_ESTABLISHED)


async def test_cancelled_reads(gateway: GatewayProcess, s3_server: SeaweedFS, left: Left) -> None:
    count = full(10_000)
    sources = ("cache", "pfs", "object", "auto")

    async def reads(begin: int, number_of_them: int) -> None:
        async with wire(gateway) as line:
            await at_once(number_of_them, WIDTH, lambda number: cancelled_read(line, begin + number, sources))

    await reads(0, max(300, count // 4))
    before, began_s = rss(gateway), time.monotonic()
    await reads(100_000, count)
    took_s = time.monotonic() - began_s
    # Every connection of the pool is free again: as many whole reads as it has at once.
    with forebay.Client(gateway.address) as client:
        for source in ("object", "pfs", "cache"):
            reader = client.open("saved", 1, source=source)
            found = await asyncio.gather(*(asyncio.to_thread(reader.read, name) for name in list(SAVED) * 4))
            assert found == list(SAVED.values()) * 4
    grown, connections = rss(gateway) - before, connections_to(gateway, s3_server)
    report(
        "cancelled_reads",
        reads=count,
        rss_growth=grown,
        s3_connections=connections,
        loop_lag_p99_ms=loop_lag_ms(gateway),
        per_s=round(count / took_s),
    )
    assert grown < GROWTH_BYTES_MAX
    assert connections <= 16
    held = [entry.path for entry in psutil.Process(gateway.pid).open_files() if entry.path.endswith(".shard")]
    assert held == []


async def auto_read(line: Wire, turn: int, number: int) -> None:
    await cancelled_read(line, turn * 8 + number, ("auto",))


async def test_reads_cancelled_while_a_mover_fetches(gateway: GatewayProcess) -> None:
    for turn in range(full(60)):
        gateway.cli("evict", "saved", "1", "--yes")
        async with wire(gateway) as line:
            await at_once(8, 8, partial(auto_read, line, turn))
        if turn >= 5 and turn % 20:
            continue
        with forebay.Client(gateway.address) as client:
            reader = client.open("saved", 1)
            assert {name: reader.read(name) for name in reader.names()} == SAVED
    cache = gateway.status()["cache"]
    assert cache["reserved_bytes"] == 0
    assert list((gateway.cache / "incoming").iterdir()) == []
    files = sum(path.stat().st_size for path in gateway.cache.glob("data/*/*.shard"))
    assert files == cache["used_bytes"]


HOLDER = """
import sys, time, forebay, threading
from pathlib import Path
address, number, flag = sys.argv[1:]
gate = threading.Barrier(9)
def endless():
    yield bytes(200_000)
    gate.wait()
    time.sleep(600)
def put(index):
    client = forebay.Client(address)
    with client.checkpoint("killed", 1, session=f"{number}-{index}") as part:
        part.put(f"{number}-{index}.bin", endless())
def read(index):
    for chunk in forebay.Client(address).open("saved", 1, source="auto").stream("shard-1.bin"):
        gate.wait()
        time.sleep(600)
for index in range(4):
    threading.Thread(target=put, args=(index,), daemon=True).start()
    threading.Thread(target=read, args=(index,), daemon=True).start()
gate.wait()
Path(flag).touch()
time.sleep(600)
"""


@pytest.mark.parametrize("clients", [4])
def test_clients_killed_with_streams_open(gateway: GatewayProcess, left: Left, tmp_path: Path, clients: int) -> None:
    processes = [
        subprocess.Popen([sys.executable, "-c", HOLDER, gateway.address, str(number), str(tmp_path / str(number))])
        for number in range(clients)
    ]
    try:
        eventually(lambda: len(list(tmp_path.iterdir())) == clients)
        assert gateway.status()["cache"]["open_streams"] >= 1
    finally:
        for process in processes:
            process.send_signal(signal.SIGKILL)
            process.wait()
    left.none()
    assert gateway.cli("evict", "saved", "1", "--yes").returncode == 0  # the reads held nothing back
    assert not list(gateway.cache.glob("data/*/*.shard"))
