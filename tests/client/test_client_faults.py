"""What the client does when calls fail, streams break, and bytes arrive damaged."""

import os
import threading
import time
from collections.abc import Iterator

import pytest

import forebay
from forebay import Client
from forebay.testing import MemoryGateway

BIG = os.urandom((9 << 20) + 5)
FULL = forebay.CacheFull("no room", retry_after_s=0.1)
AWAY = forebay.Unavailable("back soon")


def _save(client: Client, data: object, name: str = "big") -> None:
    with client.checkpoint("r", 1, session="s") as ckpt:
        ckpt.put(name, data)
        ckpt.commit()


@pytest.mark.parametrize("error", [FULL, AWAY], ids=["full", "away"])
@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_put_is_repeated_from_the_start(memory: MemoryGateway, memory_client: Client, error, after: int) -> None:
    memory.fail("PutShard", error, times=2, after=after)
    counted: list[int] = []
    with memory_client.checkpoint("r", 1, session="s") as ckpt:
        ckpt.put("big", BIG, on_bytes=counted.append)
        ckpt.commit()
    assert memory.calls.count("PutShard") == 3
    assert memory_client.open("r", 1).read("big") == BIG
    assert sum(counted) == len(BIG)


@pytest.mark.parametrize("method", ["PutShard", "PutMany"])
def test_a_put_is_not_repeated_into_a_part_that_was_aborted(memory: MemoryGateway, memory_client: Client, method: str) -> None:
    memory.fail(method, AWAY, times=3)
    ckpt = memory_client.checkpoint("r", 1, session="s")
    errors: list[BaseException] = []

    def put() -> None:
        try:
            if method == "PutShard":
                ckpt.put("big", BIG)
            else:
                ckpt.put_many({"a": b"1", "b": b"2"})
        except forebay.ForebayError as error:
            errors.append(error)

    trainer = threading.Thread(target=put)
    trainer.start()
    deadline_s = time.monotonic() + 10
    while method not in memory.calls and time.monotonic() < deadline_s:
        time.sleep(0.005)
    ckpt.abort()
    trainer.join(30)
    assert "aborted" in str(errors[0])
    assert memory_client.runs() == []


def test_a_full_cache_is_told_after_the_time_given(memory: MemoryGateway) -> None:
    memory.fail("PutShard", FULL, times=1000)
    memory.fail("PutMany", FULL, times=1000)
    with Client(memory.address, admit_timeout=0.5) as client, client.checkpoint("r", 1) as ckpt:
        for act in (lambda: ckpt.put("a", BIG), lambda: ckpt.put_many({"a": b"x"})):
            began_s = time.monotonic()
            with pytest.raises(forebay.CacheFull, match=r"no room.*waited_s") as caught:
                act()
            assert caught.value.retry_after_s == 0.1
            assert time.monotonic() - began_s > 0.4, "no time was given"
    assert 3 < memory.calls.count("PutShard") < 10


@pytest.mark.parametrize("after,attempts", [(0, 2), (1, 1)])
def test_data_that_cannot_be_replayed_is_sent_again_only_before_it_flowed(
    memory: MemoryGateway, memory_client: Client, after: int, attempts: int
) -> None:
    memory.fail("PutShard", AWAY, after=after)
    ckpt = memory_client.checkpoint("r", 1, session="s")
    pieces = (BIG[at : at + 999] for at in range(0, len(BIG), 999))
    if attempts == 1:
        with pytest.raises(forebay.Unavailable, match="back soon"):
            ckpt.put("big", pieces)
    else:
        assert ckpt.put("big", pieces).size == len(BIG)
    assert memory.calls.count("PutShard") == attempts


def test_an_error_of_the_data_ends_the_put_and_is_raised_as_it_is(memory: MemoryGateway, memory_client: Client) -> None:
    def broken() -> Iterator[bytes]:
        yield BIG[: 5 << 20]
        raise ZeroDivisionError("in the middle")

    ckpt = memory_client.checkpoint("r", 1, session="s")
    with pytest.raises(ZeroDivisionError, match="in the middle"):
        ckpt.put("big", broken())
    assert ckpt.receipts == {}
    ckpt.put("big", b"other bytes")  # nothing is left of the first
    assert ckpt.commit().shard_count == 1


def test_small_shards_already_durable_are_not_lost_when_a_stream_breaks(memory: MemoryGateway, memory_client: Client) -> None:
    shards = {f"s{n}": os.urandom(300_000) for n in range(40)}
    memory.fail("PutMany", AWAY, after=2)
    with memory_client.checkpoint("r", 1, session="s") as ckpt:
        assert [receipt.name for receipt in ckpt.put_many(shards)] == list(shards)
        ckpt.commit()
    assert memory.calls.count("PutMany") == 2
    reader = memory_client.open("r", 1)
    assert {name: reader.read(name) for name in shards} == shards


@pytest.mark.parametrize("method", ["CommitPart", "Describe", "ListShards", "Latest", "Wait"])
def test_calls_that_may_be_repeated_are(memory: MemoryGateway, memory_client: Client, method: str) -> None:
    memory.fail(method, AWAY, times=2)
    _save(memory_client, BIG)
    assert memory_client.latest("r") == 1
    assert memory_client.open("r", 1).names() == ["big"]
    assert memory_client.wait("r", 1, "pfs", timeout=10).reached
    assert memory.calls.count(method) == 3


def test_a_delete_is_sent_once(memory: MemoryGateway, memory_client: Client) -> None:
    _save(memory_client, BIG)
    memory.fail("Delete", AWAY)
    with pytest.raises(forebay.Unavailable):
        memory_client.delete("r", 1)
    assert memory.calls.count("Delete") == 1


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_broken_read_goes_on_where_it_was(memory: MemoryGateway, memory_client: Client, after: int) -> None:
    _save(memory_client, BIG)
    memory.fail("ReadShard", AWAY, after=after)
    assert memory_client.open("r", 1).read("big") == BIG
    assert memory.calls.count("ReadShard") == 2


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_chunk_damaged_on_the_wire_is_asked_for_again(memory: MemoryGateway, memory_client: Client, after: int) -> None:
    _save(memory_client, BIG)
    memory.damage(after=after)
    chunks = list(memory_client.open("r", 1).stream("big"))
    assert b"".join(chunks) == BIG
    assert memory.calls.count("ReadShard") == 2


def test_a_chunk_damaged_twice_is_corrupt_and_not_handed_out(memory: MemoryGateway, memory_client: Client) -> None:
    _save(memory_client, BIG)
    memory.damage(times=1, after=1)
    memory.damage(times=5, after=0)  # the repeated read begins with the chunk that failed
    got = b""
    with pytest.raises(forebay.Corrupt, match="again"):
        for chunk in memory_client.open("r", 1).stream("big"):
            got += chunk
    assert got == BIG[: 4 << 20]


def test_a_copy_damaged_in_store_is_corrupt(memory: MemoryGateway, memory_client: Client) -> None:
    _save(memory_client, BIG)
    memory.damage_stored("r", 1, "big")
    with pytest.raises(forebay.Corrupt, match="only copy"):
        memory_client.open("r", 1).read("big")


def test_a_gateway_that_is_not_there(tmp_path) -> None:
    told = pytest.raises(forebay.Unavailable, match=r"forebay serve.*FOREBAY_ADDRESS")
    with Client(f"unix://{tmp_path}/none.sock", retry_timeout=0.3) as client, told:
        client.latest("r")


def test_details_of_errors_arrive(memory: MemoryGateway, memory_client: Client) -> None:
    many = [forebay.Missing(n, tuple(f"layers/{n}/{m}" for m in range(20)), "open") for n in range(100)]
    for error in (
        forebay.NotFound("a"),
        forebay.AlreadyExists("b"),
        forebay.InvalidArgument("c"),
        forebay.Incomplete("d", missing=many),
        forebay.Corrupt("e"),
        forebay.PermissionDenied("f"),
        forebay.DeadlineExceeded("g"),
        forebay.Unsupported("h"),
        forebay.ForebayError("i"),
    ):
        memory.fail("ListRuns", error)
        with pytest.raises(forebay.ForebayError) as caught:
            memory_client.runs()
        assert type(caught.value) is type(error)
        assert caught.value.missing == error.missing and caught.value.message.endswith(error.message)
        assert caught.value.__cause__ is not None


def test_the_abort_of_a_gateway_gone_does_not_hide_the_error(memory: MemoryGateway, expected_logs) -> None:
    expected_logs.allow("the abort did not reach the gateway")
    client = Client(memory.address, retry_timeout=0.1)
    with pytest.raises(ValueError, match="mine"), client, client.checkpoint("r", 1, session="s") as ckpt:
        ckpt.put("a", b"x")
        memory.stop()
        raise ValueError("mine")
    assert len(expected_logs.records) == 1


def test_no_more_than_a_few_chunks_are_in_memory(memory: MemoryGateway, memory_client: Client) -> None:
    """Chunks are made as they are sent: the producer never runs far ahead of a gateway that does not read."""
    produced = 0
    reached = threading.Event()

    def producer() -> Iterator[bytes]:
        nonlocal produced
        for _ in range(64):
            produced += 1
            yield bytes(4 << 20)

    original, memory._receive = memory._receive, lambda *arguments: (reached.wait(20), original(*arguments))[1]  # type: ignore[method-assign]
    thread = threading.Thread(target=lambda: memory_client.checkpoint("r", 1, session="s").put("big", producer()))
    thread.start()
    try:
        seen = -1
        while seen != produced:
            seen = produced
            time.sleep(0.7)
        assert 0 < produced <= 8
    finally:
        reached.set()
        thread.join()
    assert produced == 64
