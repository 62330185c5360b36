"""Reading over the fd lane: damage, eviction, kills and forks while the cache's own file is read."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess
from forebay.errors import ForebayError
from forebay.lanes.fd import Lease
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import pack_chunk_crcs, unpack_chunk_crcs
from forebay_wire.v1 import gateway_pb2 as pb
from integration.conftest import MakeGateway
from integration.fd_kit import BIG, MIB, in_pages, saved
from integration.kit import CHUNK, SMALL_CHUNKS, cache_file_of, cache_files, eventually, flip_byte
from soak.form import some


@pytest.fixture
def gateway(make: MakeGateway) -> GatewayProcess:
    return make().start()


READS: dict[str, Callable[[forebay.Client, Path], bytes]] = {
    "read": lambda client, _: client.open("r", 1, lane="fd").read("x"),
    "stream": lambda client, _: b"".join(client.open("r", 1, lane="fd").stream("x")),
    "readinto": lambda client, _: _into(client, in_pages(bytes(len(BIG)))),
    "readinto, unaligned": lambda client, _: _into(client, in_pages(bytes(len(BIG)), 16)),
    "restore_dir": lambda client, out: (client.restore_dir("r", 1, out, lane="fd"), (out / "x").read_bytes())[1],
}


def _into(client: forebay.Client, target: memoryview) -> bytes:
    client.open("r", 1, lane="fd").readinto("x", target)
    return bytes(target)


@pytest.mark.parametrize("how", READS)
@pytest.mark.parametrize("offset", some([0, 5 * MIB + 17, len(BIG) - 1], 5 * MIB + 17))
def test_damage_in_the_cache_is_not_handed_out(make: MakeGateway, tmp_path: Path, how: str, offset: int) -> None:
    """The bytes come from the tier, and the cache's copy is quarantined: the gateway has seen the damage too."""
    gateway = make(cache_keys='chunk_size = "64KiB"\nrepair = "ask"').start()
    saved(gateway)
    flip_byte(cache_file_of(gateway, BIG), offset)
    with forebay.Client(gateway.address) as client:
        assert READS[how](client, tmp_path / "out") == BIG
        eventually(lambda: client.describe("r", 1).shards[0].state == "quarantined")
        assert READS[how](client, tmp_path / "out") == BIG


def test_a_chunk_table_that_fits_damaged_bytes_alone(make: MakeGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not combine to the checksum that the checkpoint was saved with: nothing is read by it."""
    gateway = make(cache_keys=f'{SMALL_CHUNKS}\nrepair = "ask"').start()
    saved(gateway)
    path, at = cache_file_of(gateway, BIG), CHUNK + 17
    flip_byte(path, at)
    damaged = path.read_bytes()[CHUNK : 2 * CHUNK]
    call = Lease.call
    answers = []

    def lie(lease: Lease, method: Callable[..., Any], request: object) -> Any:
        answer = call(lease, method, request)
        if isinstance(answer, pb.OpenReadResponse):
            crcs = list(unpack_chunk_crcs(answer.chunk_crcs))
            assert answer.layout.chunk_size == CHUNK
            crcs[1] = crc32c(damaged)
            answer.chunk_crcs = pack_chunk_crcs(crcs)
            answers.append(answer)
        return answer

    monkeypatch.setattr(Lease, "call", lie)
    with forebay.Client(gateway.address) as client:
        # A range: of the whole, the shard's own checksum would say it too.
        assert client.open("r", 1, lane="fd").read("x", CHUNK, CHUNK) == BIG[CHUNK : 2 * CHUNK]
    assert answers


@pytest.mark.parametrize("how", some([*READS], "readinto", "restore_dir"))
def test_what_was_evicted_is_fetched_and_then_read(gateway: GatewayProcess, tmp_path: Path, how: str, no_streams: None) -> None:
    saved(gateway)
    gateway.cli("evict", "r", "1", "--yes")
    assert cache_files(gateway) == []
    with forebay.Client(gateway.address) as client:
        assert READS[how](client, tmp_path / "out") == BIG
    assert len(cache_files(gateway)) == 1


def test_a_small_range_of_what_was_evicted_comes_by_stream(gateway: GatewayProcess) -> None:
    saved(gateway)
    gateway.cli("evict", "r", "1", "--yes")
    with forebay.Client(gateway.address) as client:
        assert client.open("r", 1, lane="fd").read("x", 5, 70) == BIG[5:75]
        with pytest.raises(ForebayError):
            client.open("r", 1, source="cache", lane="fd").read("x")
    assert cache_files(gateway) == []


def test_a_file_that_is_read_is_not_evicted(gateway: GatewayProcess) -> None:
    saved(gateway)
    with forebay.Client(gateway.address) as client:
        chunks = client.open("r", 1, lane="fd").stream("x")
        begun = [next(chunks)]
        gateway.cli("evict", "r", "1", "--yes")
        assert len(cache_files(gateway)) == 1
        assert b"".join([*begun, *chunks]) == BIG
        eventually(lambda: (gateway.cli("evict", "r", "1", "--yes"), cache_files(gateway))[1] == [])


def test_a_gateway_that_is_killed_while_its_file_is_read(gateway: GatewayProcess) -> None:
    saved(gateway)
    with forebay.Client(gateway.address) as client:
        chunks = client.open("r", 1, lane="fd").stream("x")
        begun = [next(chunks)]
        gateway.kill()
        assert b"".join([*begun, *chunks]) == BIG


def test_what_a_stream_handed_out_is_there_in_a_child(gateway: GatewayProcess) -> None:
    """Memory that direct reads went into is kept from forks while they last, and no longer."""
    saved(gateway)
    with forebay.Client(gateway.address) as client:
        pieces = list(client.open("r", 1, lane="fd").stream("x"))
    child = os.fork()
    if child == 0:
        os._exit(0 if b"".join(pieces) == BIG else 1)
    assert os.waitpid(child, 0)[1] == 0
    del pieces
