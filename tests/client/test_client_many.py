"""Many small shards at once: streams that break, bytes damaged on the way, gateways that know no such call."""

import os
from pathlib import Path

import pytest

import forebay
from client.lanes import async_client
from forebay import AsyncClient, Client
from forebay.lanes import many
from forebay.testing import MemoryGateway

SHARDS = {f"d/{n:03}": os.urandom(50 + n) for n in range(40)}
LARGE = {"large": os.urandom(1 << 20)}


@pytest.fixture
def reader(memory_client: Client) -> forebay.Reader:
    with memory_client.checkpoint("r", 1) as ckpt:
        ckpt.put_many(SHARDS)
        ckpt.put("large", LARGE["large"])
        ckpt.commit()
    reader = memory_client.open("r", 1)
    reader.names()
    return reader


def test_all_or_those_named(memory: MemoryGateway, reader: forebay.Reader) -> None:
    assert dict(reader.read_many()) == SHARDS | LARGE
    assert memory.calls.count("ReadShard") == 1
    some = list(SHARDS)[3:30:2]
    assert dict(reader.read_many([*some, some[0]])) == {name: SHARDS[name] for name in some}
    assert dict(reader.read_many(["d/001"])) == {"d/001": SHARDS["d/001"]}  # alone it needs no stream
    assert memory.calls.count("ReadMany") == 2
    assert dict(reader.read_many([])) == {}


def test_a_name_that_is_not_there_is_told_at_once(reader: forebay.Reader) -> None:
    with pytest.raises(forebay.NotFound, match="nothing"):
        reader.read_many(["nothing"])


@pytest.mark.parametrize("after", [0, 1, 17])
def test_a_stream_that_breaks_goes_on(memory: MemoryGateway, reader: forebay.Reader, after: int) -> None:
    memory.fail("ReadMany", forebay.Unavailable("away", retry_after_s=0.01), times=2, after=after)
    names = [name for name, _ in reader.read_many(SHARDS)]
    assert sorted(names) == sorted(SHARDS)  # none twice
    assert (memory.calls.count("ReadMany"), memory.calls.count("ReadShard")) == (3, 0)


def test_damage_on_the_way_is_asked_for_again(memory: MemoryGateway, reader: forebay.Reader) -> None:
    memory.damage(method="ReadMany", after=7)
    assert dict(reader.read_many(SHARDS)) == SHARDS
    assert memory.calls.count("ReadShard") == 1


def test_a_gateway_without_the_call(memory: MemoryGateway, reader: forebay.Reader, tmp_path: Path) -> None:
    memory.fail("ReadMany", forebay.Unsupported("no such method"), times=2)
    assert dict(reader.read_many(SHARDS)) == SHARDS
    assert memory.calls.count("ReadShard") == len(SHARDS)
    with Client(memory.address, progress=False) as client:
        client.restore_dir("r", 1, tmp_path / "out")
    assert {name: (tmp_path / "out" / name).read_bytes() for name in SHARDS} == SHARDS


def test_stored_damage_is_named_after_the_others(memory: MemoryGateway, reader: forebay.Reader) -> None:
    memory.damage_stored("r", 1, "d/020")
    found = {}
    with pytest.raises(forebay.Corrupt, match="d/020"):
        found.update(reader.read_many(SHARDS))
    for name, data in reader.read_many([name for name in SHARDS if name != "d/020"]):
        assert data == SHARDS[name]


def test_an_answer_that_nobody_asked_for(
    memory: MemoryGateway, reader: forebay.Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = memory._store.find_shards

    def others(request):  # type: ignore[no-untyped-def]
        if hasattr(request, "names"):
            del request.names[:]
            request.names.append("large-not")
        return {"large-not": next(iter(find(request).values()))}

    monkeypatch.setattr(memory._store, "find_shards", others)
    with pytest.raises(forebay.ForebayError, match="not asked for"):
        dict(reader.read_many(SHARDS))


def test_a_restore_takes_small_ones_together(memory: MemoryGateway, reader: forebay.Reader, tmp_path: Path) -> None:
    with Client(memory.address, progress=False) as client:
        done = client.restore_dir("r", 1, tmp_path / "out")
    assert (done.shards, memory.calls.count("ReadMany"), memory.calls.count("ReadShard")) == (41, 1, 1)
    assert {name: (tmp_path / "out" / name).read_bytes() for name in SHARDS | LARGE} == SHARDS | LARGE


def test_a_full_disk_ends_the_stream(
    memory: MemoryGateway, reader: forebay.Reader, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("forebay.directories.os.pwrite", full)
    with (
        Client(memory.address, progress=False) as client,
        pytest.raises(forebay.ForebayError, match=r"restoring 'd/.*No space l"),
    ):
        client.restore_dir("r", 1, tmp_path / "out")
    assert list((tmp_path / "out").rglob("*")) == []
    assert memory.calls.count("ReadShard") == 0


def test_names_are_asked_for_in_bounded_requests(
    memory: MemoryGateway, reader: forebay.Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "NAMES_MAX", 15)
    assert dict(reader.read_many(SHARDS)) == SHARDS
    assert memory.calls.count("ReadMany") == 3
    monkeypatch.setattr(many, "NAMES_BYTES_MAX", 50)
    assert [len(batch) for batch in many.batches(SHARDS)] == [10, 10, 10, 10]


async def test_with_await(memory: MemoryGateway, reader: forebay.Reader) -> None:
    async with AsyncClient(memory.address, progress=False) as client:
        opened = await client.open("r", 1)
        assert {name: data async for name, data in opened.read_many()} == SHARDS | LARGE
        assert {name: data async for name, data in opened.read_many(["d/000"])} == {"d/000": SHARDS["d/000"]}


async def test_over_each_lane(client: Client, gateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked for is what comes, however the large ones travel: all, some, in several requests, as files, with await."""
    with client.checkpoint("r", 1) as ckpt:
        ckpt.put_many(SHARDS)
        ckpt.put("large", LARGE["large"])
        ckpt.commit()
    reader = client.open("r", 1)
    assert dict(reader.read_many()) == SHARDS | LARGE
    some = list(SHARDS)[3:30:2]
    assert dict(reader.read_many([*some, some[0], "large"])) == {name: SHARDS[name] for name in some} | LARGE
    with pytest.raises(forebay.NotFound, match="nothing"):
        reader.read_many([*some, "nothing"])
    monkeypatch.setattr(many, "NAMES_MAX", 15)
    assert dict(reader.read_many()) == SHARDS | LARGE
    assert client.restore_dir("r", 1, tmp_path / "out").shards == 41
    assert {name: (tmp_path / "out" / name).read_bytes() for name in SHARDS | LARGE} == SHARDS | LARGE
    async with async_client(gateway.address, type(client)) as waiting:
        opened = await waiting.open("r", 1)
        assert {name: data async for name, data in opened.read_many()} == SHARDS | LARGE
