"""The verbs of the contract, against both gateways."""

import os
import pickle
import threading
import time

import numpy
import pytest

import forebay
from forebay import Client
from forebay_wire.checksums import crc32c

BIG = os.urandom((9 << 20) + 12_345)


def test_a_checkpoint_comes_back_bit_exact(client: Client) -> None:
    pieces = [BIG[at : at + 1_000_003] for at in range(0, len(BIG), 1_000_003)]
    with client.checkpoint("team-a/run", 7) as ckpt:
        receipt = ckpt.put("big.bin", BIG)
        assert receipt == forebay.Receipt("big.bin", len(BIG), crc32c(BIG), "cache")
        ckpt.put("layers/array", numpy.arange(1000, dtype=numpy.float32).reshape(10, 100))
        ckpt.put("pieces", iter(pieces))
        ckpt.put("empty", b"")
        receipts = ckpt.put_many({f"small/{n}": bytes([n]) * n for n in range(50)} | {"large": BIG})
        assert [item.name for item in receipts] == [*(f"small/{n}" for n in range(50)), "large"]
        done = ckpt.commit({"epoch": 3, "who": "ünï"})
    assert (done.level, done.checkpoint_complete, done.shard_count) == ("cache", True, 55)
    reader = client.open("team-a/run", 7)
    assert len(reader.names()) == 55 and reader.names() == sorted(reader.names())
    assert reader.read("big.bin") == reader.read("pieces") == reader.read("large") == BIG
    assert reader.read("layers/array") == numpy.arange(1000, dtype=numpy.float32).tobytes()
    assert reader.read("empty") == b"" and reader.read("small/7") == b"\7" * 7
    assert client.describe("team-a/run", 7).metadata == {"epoch": 3, "who": "ünï"}


@pytest.mark.parametrize("offset,length", [(0, 0), (0, 1), (1, 5 << 20), ((4 << 20) - 1, 2), (len(BIG) - 3, 3), (5, None)])
def test_ranges(memory_client: Client, offset: int, length: int | None) -> None:
    _save(memory_client, "r", 1, {"big": BIG})
    end = len(BIG) if length is None else offset + length
    assert memory_client.open("r", 1).read("big", offset, length) == BIG[offset:end]


def test_ranges_into_buffers_and_streams(client: Client) -> None:
    _save(client, "r", 1, {"big": BIG})
    reader = client.open("r", 1)
    buffer = numpy.zeros(5_000_000, dtype=numpy.uint8)
    assert reader.readinto("big", buffer, 4_000_000) == 5_000_000
    assert buffer.tobytes() == BIG[4_000_000:9_000_000]
    assert reader.readinto("big", bytearray(), len(BIG)) == 0
    chunks = list(reader.stream("big"))
    assert b"".join(chunks) == BIG and max(map(len, chunks)) <= 4 << 20
    for offset, length in ((-1, 1), (0, len(BIG) + 1), (len(BIG) + 1, None), (0, -1)):
        with pytest.raises(forebay.InvalidArgument):
            reader.read("big", offset, length)
    with pytest.raises(forebay.InvalidArgument, match="read-only"):
        reader.readinto("big", b"fixed")
    with pytest.raises(forebay.NotFound, match="nope"):
        reader.read("nope")


def test_a_checkpoint_is_complete_or_not_there(client: Client) -> None:
    _save(client, "r", 1, {"a": b"old"})
    second = client.checkpoint("r", 2, writers=2, writer=1, session="s")
    second.put("w1", b"one")
    second.commit()
    assert client.latest("r") == 1
    with pytest.raises(forebay.Incomplete) as caught:
        client.open("r", 2)
    assert [entry.writer for entry in caught.value.missing] == [0]
    listed = {item.step: item.state for item in client.checkpoints("r")}
    assert listed == {1: "complete", 2: "incomplete"}
    with client.checkpoint("r", 2, writers=2, writer=0, session="s") as first:
        first.put("w0", b"zero")
        assert first.commit().checkpoint_complete
    assert client.latest("r") == 2
    assert client.open("r", 2).read("w1") == b"one"


def test_nothing_is_none_or_not_found(client: Client) -> None:
    assert client.latest("nobody") is None
    assert client.runs() == []
    for act in (client.checkpoints, lambda run: client.describe(run, 1), lambda run: client.open(run, 1)):
        with pytest.raises(forebay.NotFound):
            act("nobody")
    with pytest.raises(forebay.NotFound):
        client.pin("nobody", 1)


def test_leaving_without_commit_drops_everything(client: Client) -> None:
    with client.checkpoint("r", 1, session="s") as ckpt:
        ckpt.put("a", b"x")
    with pytest.raises(RuntimeError, match="mine"), client.checkpoint("r", 2, session="s") as ckpt:
        ckpt.put("a", b"x")
        raise RuntimeError("mine")
    assert client.latest("r") is None
    with client.checkpoint("r", 2, session="s") as ckpt:  # the name is free again, for other bytes too
        ckpt.put("a", b"y")
        ckpt.commit()
    assert client.open("r", 2).read("a") == b"y"


def test_one_bad_name_among_ten_thousand(memory, memory_client: Client) -> None:
    shards: dict[object, object] = {f"s/{number}": b"x" for number in range(10_000)}
    bad = {"s/../up": b"x"}, {"s/.forebay": b"x"}, {5: b"x"}, {"s/gap\n": b"x"}, {"s/number": 7}, {"s/list": [b"x", 7]}
    with memory_client.checkpoint("r", 1) as ckpt:
        for background in (False, True):
            for one in bad:
                with pytest.raises(forebay.InvalidArgument, match="none of 10001 shards was sent") as caught:
                    ckpt.put_many(shards | one, background=background)
                shown = ascii(next(iter(one)))
                assert shown in str(caught.value), caught.value
        assert memory.calls == [] and not ckpt.receipts
        assert len(ckpt.put_many(shards)) == 10_000


def test_order_of_verbs(client: Client) -> None:
    ckpt = client.checkpoint("r", 1, session="s")
    ckpt.put("a", b"x")
    first = ckpt.commit({"k": 1})
    assert ckpt.commit() == first or ckpt.commit().level == "cache"
    assert client.describe("r", 1).metadata == {"k": 1}
    with pytest.raises(forebay.InvalidArgument, match="committed"):
        ckpt.put("b", b"x")
    assert ckpt.abort() == 0
    assert client.open("r", 1).names() == ["a"]
    gone = client.checkpoint("r", 2, session="s")
    gone.put("a", b"x")
    assert gone.abort() == 1
    for act in (lambda: gone.put("b", b"x"), gone.commit):
        with pytest.raises(forebay.InvalidArgument, match="aborted"):
            act()


def test_the_same_name_again(client: Client) -> None:
    with client.checkpoint("r", 1, session="s") as ckpt:
        first = ckpt.put("big", BIG)
        assert ckpt.put("big", BIG) == first
        assert ckpt.put("big", iter([BIG[:100], BIG[100:]])) == first
        for other in (BIG[:-1], BIG[:-1] + bytes((BIG[-1] ^ 1,))):
            with pytest.raises(forebay.AlreadyExists):
                ckpt.put("big", other)
        assert ckpt.put_many({"s": b"1"}) == ckpt.put_many({"s": b"1"})
        with pytest.raises(forebay.AlreadyExists):
            ckpt.put_many({"s": b"2"})
        ckpt.commit()
    assert client.open("r", 1).read("big") == BIG


def test_a_part_goes_on_over_a_restart(client: Client, gateway) -> None:
    with client.checkpoint("r", 1, session="s") as ckpt:
        ckpt.put("before", BIG)
        ckpt.put_many({"small": b"s"})
        gateway.stop()
        restarting = threading.Timer(0.3, gateway.start)
        restarting.start()
        ckpt.put("after", b"x" * 100)
        restarting.join()
        assert ckpt.commit().checkpoint_complete
    reader = client.open("r", 1)
    assert {name: reader.read(name) for name in reader.names()} == {"before": BIG, "small": b"s", "after": b"x" * 100}


def test_wait_reaches_the_tier_and_tells_progress(client: Client) -> None:
    client.hold()
    _save(client, "r", 1, {"big": BIG})
    with pytest.raises(forebay.DeadlineExceeded) as caught:
        client.wait("r", 1, "pfs", timeout=0.4)
    assert "r/1" in caught.value.message
    assert client.latest("r", "pfs") is None and client.latest("r", "cache") == 1
    seen: list[forebay.WaitProgress] = []
    timer = threading.Timer(0.3, client.release)
    timer.start()
    done = client.wait("r", 1, "pfs", timeout=30, progress=seen.append)
    timer.join()
    assert done.reached and seen[-1] == done and not seen[0].reached
    assert client.latest("r", "pfs") == 1
    assert client.wait("r", 1, "all", timeout=30).reached
    with pytest.raises(forebay.ForebayError, match="nowhere"):
        client.wait("r", 1, "nowhere", timeout=5)
    assert client.open("r", 1, source="pfs").read("big") == BIG


def test_wait_names_the_missing_writer(client: Client) -> None:
    with client.checkpoint("r", 1, writers=3, writer=1, session="s") as ckpt:
        ckpt.put("a", b"x")
        with pytest.raises(forebay.DeadlineExceeded) as caught:
            ckpt.commit(wait="pfs", timeout=0.5)
    assert [entry.writer for entry in caught.value.missing] == [0, 2]
    assert "writer 0" in str(caught.value) and "writer 2" in str(caught.value)


def test_pin_and_delete(client: Client) -> None:
    with client.checkpoint("r", 1) as ckpt:
        ckpt.put("a", b"x" * 1000)
        ckpt.commit(wait="pfs", timeout=30)
    client.pin("r", 1)
    assert client.describe("r", 1).pinned
    with pytest.raises(forebay.ForebayError, match="pin"):
        client.delete("r", 1)
    client.unpin("r", 1)
    would = client.delete("r", 1, dry_run=True)
    assert (would.shards, would.size) == (1, 1000) and "pfs" in would.levels
    assert client.latest("r") == 1
    assert client.delete("r", 1) == would
    assert client.latest("r") is None


def test_bad_names_are_refused_before_anything_is_sent(memory, memory_client: Client) -> None:
    bad_names = ["", "a//b", "../x", "a/./b", "x\0", "/abs", "end/", ".forebay", ".forebay-x/y", "é" * 128, "\ud800", "a\nb"]
    ckpt = memory_client.checkpoint("r", 1, session="s")
    for name in bad_names:
        with pytest.raises(forebay.InvalidArgument):
            ckpt.put(name, b"x")
        with pytest.raises(forebay.InvalidArgument):
            ckpt.put_many({"good": b"x", name: b"y"})
        with pytest.raises(forebay.InvalidArgument):
            memory_client.checkpoint(name, 1)
        with pytest.raises(forebay.InvalidArgument):
            memory_client.latest(name)
    with pytest.raises(forebay.InvalidArgument, match="'worse/'"):
        ckpt.put_many({"good": b"x", "worse/": b"y"})
    for step in (-1, 1 << 64, True, 1.5, "3"):
        with pytest.raises(forebay.InvalidArgument):
            memory_client.checkpoint("r", step)  # type: ignore[arg-type]
    for writers, writer in ((0, 0), (2, 2), (1, -1), (True, 0)):
        with pytest.raises(forebay.InvalidArgument):
            memory_client.checkpoint("r", 1, writers=writers, writer=writer, session="s")
    for metadata in ({"x": float("nan")}, {"x": object()}, [1]):
        with pytest.raises(forebay.InvalidArgument):
            ckpt.commit(metadata)  # type: ignore[arg-type]
    with pytest.raises(forebay.InvalidArgument, match="lane"):
        memory_client.checkpoint("r", 1, lane="pigeon")
    assert memory.calls == []


def test_several_threads_put_into_one_part(client: Client) -> None:
    with client.checkpoint("r", 1) as ckpt:
        threads = [threading.Thread(target=ckpt.put, args=(f"t{n}", BIG[n:])) for n in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert ckpt.commit().shard_count == 4
    reader = client.open("r", 1)
    assert all(reader.read(f"t{n}") == BIG[n:] for n in range(4))


def test_clients_and_readers_are_picklable(client: Client) -> None:
    _save(client, "r", 1, {"a": b"x"})
    with pickle.loads(pickle.dumps(client)) as again:
        assert again.latest("r") == 1
    assert pickle.loads(pickle.dumps(client.open("r", 1))).read("a") == b"x"


def test_a_closed_client_says_so(memory) -> None:
    client = Client(memory.address)
    assert client.runs() == []
    client.close()
    client.close()
    with pytest.raises(forebay.InvalidArgument, match="closed"):
        client.runs()


def test_status_and_pressure(client: Client) -> None:
    _save(client, "r", 1, {"a": b"x"})
    deadline_s = time.monotonic() + 10
    while (status := client.status()).checkpoints_complete != 1 and time.monotonic() < deadline_s:
        time.sleep(0.1)  # a gateway may count now and then only
    assert status.health in ("ok", "warning") and status.checkpoints_complete == 1
    assert [tier.name for tier in status.tiers] == ["pfs"]
    assert client.pressure().level == "ok"
    assert "[cache]" in client.config()
    assert client.hold("pfs") == ["pfs"] and client.release() == ["pfs"]
    with pytest.raises(forebay.ForebayError, match="nowhere"):
        client.hold("nowhere")


def _save(client: Client, run: str, step: int, shards: dict[str, bytes]) -> None:
    with client.checkpoint(run, step) as ckpt:
        ckpt.put_many(shards)
        ckpt.commit()
