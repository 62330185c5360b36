"""A shard's file as this process's own memory: views of chunks that were checked, and of no others."""

import gc
from collections.abc import Iterator

import pytest

from client.conftest import RealGateway
from forebay import Client
from forebay.lanes import fd_map

CHUNK = 8 << 20  # the gateway's default
DATA = bytes(range(251)) * ((2 * CHUNK + 4096) // 251)


@pytest.fixture
def saved(real: RealGateway) -> Iterator[Client]:
    with Client(real.address) as client:
        with client.checkpoint("r", 1) as part:
            part.put("a", DATA)
            part.commit()
        yield client


def test_a_damaged_chunk_is_not_handed_out(saved: Client, real: RealGateway) -> None:
    (path,) = (real.directory / "cache").rglob("*.shard")
    with path.open("r+b") as file:
        file.seek(CHUNK + 77)
        file.write(bytes([DATA[CHUNK + 77] ^ 1]))
    shard = saved.open("r", 1).mapped("a")
    assert shard.view(0, len(DATA)) is None
    assert shard.view(CHUNK + 4096, CHUNK + 8192) is None  # good bytes, but nothing proves them
    for begin, end in ((0, CHUNK), (77, 78), (2 * CHUNK, len(DATA))):
        view = shard.view(begin, end)
        assert view is not None and view == DATA[begin:end]
    del view, shard
    gc.collect()
    assert not fd_map._leases
