"""Puts and commits in the background: what returns early, what waits, and where errors come out."""

import asyncio
import gc
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy
import pytest

import forebay
from forebay import AsyncClient, Client
from forebay.background import UPLOADS
from forebay.testing import MemoryGateway

MIB = 1 << 20
BIG = os.urandom((9 << 20) + 7)


@contextmanager
def held_back(memory: MemoryGateway) -> Iterator[threading.Event]:
    """No shard of run "r" lands before the event is set, or the block is left."""
    go = threading.Event()
    store = memory._store
    originals = store.store, store.put_batch

    def late(original: Callable) -> Callable:
        def act(part, *arguments):
            if part.run == "r":
                go.wait(60)
            return original(part, *arguments)

        return act

    store.store, store.put_batch = late(originals[0]), late(originals[1])
    try:
        yield go
    finally:
        go.set()
        store.store, store.put_batch = originals


def test_data_may_change_at_once(client: Client) -> None:
    arrays = [numpy.frombuffer(os.urandom(n * MIB + 5), numpy.uint8).copy() for n in (1, 3, 12)]
    wanted = [array.tobytes() for array in arrays]
    small = {f"s/{n}": bytearray(os.urandom(n)) for n in range(0, 3000, 3)}
    wanted_small = {name: bytes(data) for name, data in small.items()}
    with client.checkpoint("r", 1) as ckpt:
        pending = []
        for number, array in enumerate(arrays):
            pending.append(ckpt.put(f"a{number}", array, background=True))
            array[:] = 7
        many = ckpt.put_many(small, background=True)
        for data in small.values():
            data[:] = bytes(len(data))
        done = ckpt.commit({"k": 1})
        assert done.shard_count == 3 + len(small)
        assert all(each.done() for each in pending) and many.done()
    reader = client.open("r", 1)
    assert [reader.read(f"a{number}") for number in range(3)] == wanted
    assert {name: reader.read(name) for name in list(small)[::97]} == {n: wanted_small[n] for n in list(small)[::97]}
    assert [receipt.name for receipt in many.result()] == list(small)
    assert [receipt.result() for receipt in pending] == [ckpt.receipts[f"a{number}"] for number in range(3)]
    assert client._background.pool.free_bytes == client._background.pool.size


def test_all_kinds_of_data_with_a_size(client: Client, tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(BIG)
    with client.checkpoint("r", 1) as ckpt, path.open("rb") as file:
        file.seek(5)
        ckpt.put("path", path, background=True)
        ckpt.put("file", file, background=True)
        ckpt.put("list", [BIG[:MIB], b"", BIG[MIB:]], background=True)
        ckpt.put("empty", b"", background=True)
        path.write_bytes(b"gone")
        with pytest.raises(forebay.InvalidArgument, match="put it without background=True"):
            ckpt.put("generator", (piece for piece in [b"x"]), background=True)
        ckpt.commit()
    reader = client.open("r", 1)
    assert reader.read("path") == reader.read("list") == BIG and reader.read("file") == BIG[5:] and reader.read("empty") == b""
    assert client._background.pool.free_bytes == client._background.pool.size


class _Device:
    type = "cuda"

    def __str__(self) -> str:
        return "cuda:1"


class _GpuTensor:
    """What a tensor on a GPU looks like from outside; torch itself is not needed to refuse it."""

    __module__ = "torch"
    device = _Device()

    def untyped_storage(self) -> None: ...


def test_memory_that_cannot_be_copied_is_refused_before_anything_is_sent(memory: MemoryGateway, memory_client: Client) -> None:
    with memory_client.checkpoint("r", 1) as ckpt:
        with pytest.raises(forebay.InvalidArgument, match=r"shard 'g': the tensor is on cuda:1.*tensor\.cpu\(\)"):
            ckpt.put("g", _GpuTensor(), background=True)
        with pytest.raises(forebay.InvalidArgument, match=r"'n'.*contiguous"):
            ckpt.put_many({"a": b"x", "n": numpy.zeros((9, 9)).T[::2]}, background=True)
        assert "PutShard" not in memory.calls and "PutMany" not in memory.calls
        ckpt.put("n", b"taken", background=True).result(30)
        assert list(ckpt.receipts) == ["n"]


@pytest.mark.torch
def test_tensors(client: Client) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(3 * MIB, dtype=torch.bfloat16)
    wanted = tensor.view(torch.uint8).numpy().tobytes()
    with client.checkpoint("r", 1) as ckpt:
        ckpt.put("t", tensor, background=True)
        tensor.zero_()
        ckpt.commit()
    assert client.open("r", 1).read("t") == wanted


def test_a_put_returns_while_nothing_lands_and_commit_waits(memory: MemoryGateway, memory_client: Client) -> None:
    with memory_client.checkpoint("r", 1) as ckpt:
        with held_back(memory) as go:
            pending = ckpt.put("a", BIG, background=True)
            assert not pending.done()
            with pytest.raises(forebay.DeadlineExceeded, match="put 'a': still under way"):
                pending.result(0.05)
            with pytest.raises(forebay.DeadlineExceeded, match=r"r/1.*under way: 'a'"):
                ckpt.commit(timeout=0.05)
            assert "CommitPart" not in memory.calls
            go.set()
            assert pending.result(30).size == len(BIG) and pending.exception() is None
        assert ckpt.commit().shard_count == 1


def test_nothing_is_sent_while_the_trainer_copies(memory: MemoryGateway, memory_client: Client) -> None:
    background = memory_client._background
    with memory_client.checkpoint("r", 1) as ckpt:
        with background.copying():
            pending = ckpt.put("a", b"x", background=True)
            with pytest.raises(forebay.DeadlineExceeded):
                pending.result(0.2)
            assert "PutShard" not in memory.calls
        assert pending.result(30).size == 1


def test_a_failure_is_raised_until_the_name_is_put_again(memory: MemoryGateway, memory_client: Client) -> None:
    with memory_client.checkpoint("r", 1) as ckpt:
        memory.fail("PutShard", forebay.PermissionDenied("not yours"))
        pending = ckpt.put("a", BIG, background=True)
        assert isinstance(pending.exception(30), forebay.PermissionDenied)
        for act in (
            lambda: ckpt.put("b", b"x"),
            lambda: ckpt.put("b", b"x", background=True),
            lambda: ckpt.put_many({"b": b"x"}),
            lambda: ckpt.put_many({"b": b"x"}, background=True),
            ckpt.commit,
            pending.result,
        ):
            with pytest.raises(forebay.PermissionDenied, match="put 'a': not yours"):
                act()
        assert "CommitPart" not in memory.calls and not ckpt.receipts
        ckpt.put("a", BIG, background=True)
        assert ckpt.commit().shard_count == 1


def test_a_failure_during_commit_is_raised_by_it(memory: MemoryGateway, memory_client: Client) -> None:
    memory.fail("PutMany", forebay.Unsupported("no packs"))
    with pytest.raises(forebay.Unsupported, match="no packs"), memory_client.checkpoint("r", 1) as ckpt:
        ckpt.put_many({"a": b"1", "b": b"2"}, background=True)
        ckpt.commit()
    with pytest.raises(forebay.NotFound):
        memory_client.describe("r", 1)


def test_a_passing_failure_is_retried_from_the_snapshot(memory: MemoryGateway, memory_client: Client) -> None:
    data = bytearray(BIG)
    memory.fail("PutShard", forebay.Unavailable("away"), times=2, after=1)
    with memory_client.checkpoint("r", 1) as ckpt:
        ckpt.put("a", data, background=True)
        data[:] = bytes(len(data))
        ckpt.commit()
    assert memory.calls.count("PutShard") == 3 and memory_client.open("r", 1).read("a") == BIG


def test_a_buffer_that_is_damaged_while_it_waits_is_found(memory: MemoryGateway, memory_client: Client) -> None:
    background = memory_client._background
    for step, (name, data) in enumerate({"large": BIG, "tail": BIG[: 4 * MIB + 5], "small": b"abc"}.items()):
        with pytest.raises(forebay.Corrupt, match=f"{name}.*arrived damaged"), memory_client.checkpoint("r", step) as ckpt:
            with background.copying():  # nothing is sent meanwhile
                ckpt.put_many({name: data}, background=True)
                region = next(iter(ckpt._background._under_way.values()))._region
                region.view[len(data) - 1] ^= 1
            ckpt.commit()
    assert memory_client.runs() == [] and background.pool.free_bytes == background.pool.size


def test_a_lane_that_takes_checksums_of_its_own_is_compared(memory_client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("forebay.snapshot.SnapshotSource.known_crc32c", lambda *_: None)
    said = pytest.raises(forebay.Corrupt, match="put 'a': what was sent is not what was snapshotted")
    with said, memory_client.checkpoint("r", 1) as ckpt:
        with memory_client._background.copying():
            ckpt.put("a", BIG, background=True)
            next(iter(ckpt._background._under_way.values()))._region.view[5] ^= 1
        ckpt.commit()
    assert memory_client.runs() == []


def test_a_full_pool_makes_puts_wait_and_then_go_on(memory: MemoryGateway) -> None:
    with Client(memory.address, background_bytes=4 * MIB) as client, client.checkpoint("r", 1) as ckpt:
        with held_back(memory) as go:
            for number in range(4):
                ckpt.put(f"a{number}", BIG[: MIB - 5], background=True)
            began_s = time.monotonic()
            threading.Timer(0.3, go.set).start()
            ckpt.put("b", BIG[: 2 * MIB], background=True)
            assert time.monotonic() - began_s > 0.25, "there was no room before"
        for number in range(20):
            ckpt.put(f"c{number}", bytes([number]) * MIB, background=True)
        ckpt.commit()
        reader = client.open("r", 1)
        assert all(reader.read(f"c{number}") == bytes([number]) * MIB for number in range(20))


def test_a_pool_that_stays_full_is_an_error_that_says_so(memory: MemoryGateway) -> None:
    options = {"background_bytes": MIB, "background_timeout": 0.1}
    with Client(memory.address, **options) as client, client.checkpoint("r", 1) as ckpt, held_back(memory) as go:
        ckpt.put("a", BIG[:MIB], background=True)
        with pytest.raises(forebay.DeadlineExceeded, match=r"put 'b': no buffer became free.*background_bytes=1048576"):
            ckpt.put("b", b"x", background=True)
        with pytest.raises(forebay.InvalidArgument, match=r"'c'.*do not fit"):
            ckpt.put("c", BIG, background=True)
        go.set()
        assert ckpt.commit().shard_count == 1, "what was put before is unharmed"


def test_who_waits_for_a_buffer_hears_of_a_failure_before_him(memory: MemoryGateway) -> None:
    with Client(memory.address, background_bytes=2 * MIB) as client, client.checkpoint("r", 1) as ckpt:
        memory.fail("PutShard", forebay.PermissionDenied("not yours"))
        copying = client._background.copying()
        copying.__enter__()  # nothing is sent before the timer
        ckpt.put("a", BIG[: 2 * MIB], background=True)
        threading.Timer(0.2, copying.__exit__, [None, None, None]).start()
        with pytest.raises(forebay.PermissionDenied, match="put 'a'"):
            ckpt.put("b", BIG[: 2 * MIB], background=True)


def test_abort_ends_what_is_under_way(memory: MemoryGateway, memory_client: Client) -> None:
    memory.fail("PutShard", forebay.CacheFull("full", retry_after_s=100), times=1000)
    ckpt = memory_client.checkpoint("r", 1)
    pending = [ckpt.put(f"a{number}", b"x", background=True) for number in range(UPLOADS + 3)]
    _until(lambda: memory.calls.count("PutShard") >= UPLOADS)
    ckpt.abort()  # does not wait the hundred seconds
    assert memory.calls[-1] == "AbortPart"
    for each in pending:
        with pytest.raises(forebay.ForebayError, match=r"cancelled|aborted"):
            each.result(0)
    with pytest.raises(forebay.InvalidArgument, match="aborted"):
        ckpt.put("b", b"x", background=True)
    assert memory_client._background.pool.free_bytes == memory_client._background.pool.size


def test_an_abort_while_another_put_waits_for_a_buffer(memory: MemoryGateway) -> None:
    """Who waits for a buffer holds the pool's lock and asks for the part's, so nobody may do the reverse."""
    memory.fail("PutShard", forebay.CacheFull("full", retry_after_s=100), times=1000)
    with Client(memory.address, background_bytes=(UPLOADS + 2) * MIB) as client:
        ckpt = client.checkpoint("r", 1)
        for number in range(UPLOADS + 2):
            ckpt.put(f"a{number}", BIG[:MIB], background=True)
        pool, part = client._background.pool, ckpt._background
        _until(lambda: memory.calls.count("PutShard") >= UPLOADS)
        abort = threading.Thread(target=ckpt.abort)

        def check() -> None:
            with suppress(forebay.ForebayError):  # what the abort has ended counts as failed
                part.check()

        look = threading.Thread(target=check)
        with pool._changed:  # as the one that waits, whenever he has been woken
            abort.start()
            _until(lambda: len(part._under_way) < UPLOADS + 2)
            look.start()
            look.join(10)
            stuck = look.is_alive()
        for thread in (abort, look):
            thread.join(30)
        assert not stuck
        assert pool.free_bytes == pool.size


def test_who_waits_for_a_buffer_hears_of_the_abort(memory: MemoryGateway) -> None:
    with Client(memory.address, background_bytes=2 * MIB) as client, held_back(memory):
        other, ckpt = client.checkpoint("r", 1), client.checkpoint("r", 2)
        held = [other.put(name, BIG[:MIB], background=True) for name in "ab"]
        errors: list[BaseException] = []

        def put() -> None:
            try:
                ckpt.put("c", BIG[: 2 * MIB], background=True)
            except forebay.ForebayError as error:
                errors.append(error)

        waiting = threading.Thread(target=put)
        waiting.start()
        _until(lambda: bool(client._background.pool._queue))
        ckpt.abort()
        with client._background.pool._changed:
            client._background.pool._changed.notify_all()
        waiting.join(10)
        assert not waiting.is_alive() and "aborted" in str(errors[0])
        assert not any(each.done() for each in held)


def test_an_interrupt_while_committing_aborts(memory: MemoryGateway, memory_client: Client) -> None:
    memory.fail("PutShard", forebay.CacheFull("full", retry_after_s=100), times=1000)
    with pytest.raises(KeyboardInterrupt), memory_client.checkpoint("r", 1) as ckpt:
        ckpt.put("a", b"x", background=True)
        timer = threading.Timer(0.2, signal.raise_signal, [signal.SIGINT])
        timer.start()
        try:
            ckpt.commit()
        finally:
            timer.join()
    assert memory.calls[-1] == "AbortPart"


# Whole checkpoints


def test_a_checkpoint_in_the_background(client: Client) -> None:
    data, metadata = bytearray(BIG), {"loss": [1]}
    with client.async_checkpoint("r", 1) as ckpt:
        ckpt.put("a", data)
        ckpt.put_many({"s": b"small"})
        commit = ckpt.commit(metadata, wait="pfs", timeout=60)
        data[:] = bytes(len(data))
        metadata["loss"].append(2)
        with pytest.raises(forebay.InvalidArgument, match="commit of r/1 has begun"):
            ckpt.put("b", b"x")
        assert ckpt.commit() is commit and ckpt.abort() == 0
    receipt = commit.result(60)
    assert (receipt.level, receipt.shard_count, receipt.size) == ("pfs", 2, len(BIG) + 5) and commit.done()
    assert client.open("r", 1).read("a") == BIG and client.describe("r", 1).metadata == {"loss": [1]}
    assert set(ckpt.receipts) == {"a", "s"} and (ckpt.run, ckpt.step, ckpt.session) == ("r", 1, client.describe("r", 1).session)


def test_commit_returns_before_anything_has_landed_and_the_next_waits(memory: MemoryGateway, memory_client: Client) -> None:
    with held_back(memory) as go:
        with memory_client.async_checkpoint("r", 1) as first:
            first.put("a", BIG)
            commit = first.commit()
        assert not commit.done() and memory_client.latest("r") is None
        threading.Timer(0.3, go.set).start()
        second = memory_client.async_checkpoint("r", 2)
        assert commit.done(), "one at a time"
    third = memory_client.async_checkpoint("r", 3)  # the second has not asked for its commit: nobody waits for that
    for ckpt in (third, second):
        ckpt.put("a", b"x")
    third.commit().result(30)
    second.commit().result(30)
    assert [each.step for each in memory_client.checkpoints("r") if each.complete] == [1, 2, 3]


def test_several_in_flight_and_the_limit_of_waiting(memory: MemoryGateway) -> None:
    with Client(memory.address, background_timeout=0.1) as client, held_back(memory) as go:
        for step in (1, 2):
            with client.async_checkpoint("r", step, in_flight=2) as ckpt:
                ckpt.put("a", b"x")
                ckpt.commit()
        with pytest.raises(forebay.DeadlineExceeded, match="2 checkpoints before it are still being saved"):
            client.async_checkpoint("r", 3, in_flight=2)
        go.set()
    with Client(memory.address) as client:
        assert client.latest("r") == 2
        for bad in (0, 9, True, 1.5):
            with pytest.raises(forebay.InvalidArgument, match="in_flight must be 1 to 8"):
                client.async_checkpoint("r", 3, in_flight=bad)


@pytest.mark.expected_logs("commit of r/")
def test_a_failed_commit_is_raised_by_the_next_checkpoint_once(memory: MemoryGateway, memory_client: Client) -> None:
    memory.fail("CommitPart", forebay.PermissionDenied("not yours"))
    with memory_client.async_checkpoint("r", 1) as ckpt:
        ckpt.put("a", b"x")
        ckpt.commit()
    with pytest.raises(forebay.PermissionDenied, match=r"commit of r/1 in the background: .*not yours"):
        memory_client.async_checkpoint("r", 2)
    with pytest.raises(forebay.NotFound):
        memory_client.describe("r", 1)  # nothing of it is kept
    with memory_client.async_checkpoint("r", 2) as ckpt:
        ckpt.put("a", b"x")
        assert ckpt.commit().result(30).checkpoint_complete


@pytest.mark.expected_logs("commit of r/")
def test_a_failure_that_the_handle_has_told_is_not_raised_again(memory: MemoryGateway, memory_client: Client) -> None:
    memory.fail("PutShard", forebay.Corrupt("bad"))
    with memory_client.async_checkpoint("r", 1) as ckpt:
        with held_back(memory) as go:
            ckpt.put("a", BIG)
            commit = ckpt.commit()
            go.set()
        with pytest.raises(forebay.Corrupt, match="bad"):
            commit.result(30)
    memory_client.async_checkpoint("r", 2)


@pytest.mark.expected_logs("commit of r/")
def test_close_finishes_commits_and_raises_what_nobody_has_seen(memory: MemoryGateway) -> None:
    with Client(memory.address) as client, held_back(memory) as go:
        with client.async_checkpoint("r", 1) as ckpt:
            ckpt.put("a", BIG)
            ckpt.commit(wait="cache")
        threading.Timer(0.2, go.set).start()
        client.close()
        assert memory._store.describe("r", 1).state == "complete"
    memory.fail("CommitPart", forebay.PermissionDenied("not yours"), times=2)
    with (
        pytest.raises(forebay.PermissionDenied, match="not yours"),
        Client(memory.address) as client,
        client.async_checkpoint("r", 2) as ckpt,
    ):
        ckpt.put("a", BIG)
        ckpt.commit()
    with pytest.raises(ValueError, match="mine"), Client(memory.address) as client:
        with client.async_checkpoint("r", 3) as ckpt:
            ckpt.put("a", BIG)
            ckpt.commit()
        raise ValueError("mine")


def test_close_does_not_wait_for_a_tier(memory: MemoryGateway) -> None:
    with Client(memory.address) as client:
        client.hold()
        with client.async_checkpoint("r", 1) as ckpt:
            ckpt.put("a", b"x")
            commit = ckpt.commit(wait="pfs")
        second = client.async_checkpoint("r", 2)  # nor does the next checkpoint
        assert not commit.done()
        second.abort()
        client.release()
        client.hold()
        with client.async_checkpoint("r", 3) as ckpt:
            ckpt.put("a", b"x")
            commit = ckpt.commit(wait="pfs")
    with pytest.raises(forebay.ForebayError, match="committed, and the client was closed before 'pfs'"):
        commit.result(30)
    assert memory._store.describe("r", 3).state == "complete"


@pytest.mark.expected_logs("commit of r/")
def test_a_level_that_is_not_reached_is_told_and_the_part_stays(client: Client) -> None:
    client.hold()
    with client.async_checkpoint("r", 1) as ckpt:
        ckpt.put("a", BIG).result(30)
        commit = ckpt.commit(wait="pfs", timeout=0.3)
    with pytest.raises(forebay.DeadlineExceeded, match="pfs"):
        commit.result(30)
    assert client.describe("r", 1).complete and client.open("r", 1).read("a") == BIG


def test_leaving_without_commit_leaves_nothing(client: Client) -> None:
    """Nor stands in the way of the same step; what landed before, and what was under way, are gone alike."""
    with pytest.raises(ValueError, match="mine"), client.async_checkpoint("r", 1) as ckpt:
        ckpt.put("a", b"x").result(30)
        for number in range(UPLOADS):
            ckpt.put(f"b{number}", BIG)
        raise ValueError("mine")
    assert client.runs() == [] and client._background.pool.free_bytes == client._background.pool.size
    with client.async_checkpoint("r", 1) as ckpt:
        ckpt.put("a", BIG)
        assert ckpt.commit().result(60).shard_count == 1
    assert client.open("r", 1).names() == ["a"] and client.open("r", 1).read("a") == BIG


def test_a_small_pool_and_several_in_flight(gateway, client_class: type[Client]) -> None:
    """Puts of more than the pool holds wait for what is being sent, over whichever lane; commits keep their order."""
    with client_class(gateway.address, background_bytes=4 * MIB) as client:
        for step in (1, 2, 3):
            with client.async_checkpoint("r", step, in_flight=3) as ckpt:
                for number in range(4):
                    ckpt.put(f"a{number}", BIG[number * MIB : (number + 3) * MIB])
                ckpt.put_many({"s": b"%d" % step})
                ckpt.commit()
        client.async_checkpoint("r", 4, in_flight=1).abort()  # waits for all of them
        assert client._background.pool.free_bytes == client._background.pool.size
        for step in (1, 2, 3):
            reader = client.open("r", step)
            assert [reader.read(f"a{n}") for n in range(4)] == [BIG[n * MIB : (n + 3) * MIB] for n in range(4)]
            assert reader.read("s") == b"%d" % step


def test_leaving_without_commit_aborts(memory: MemoryGateway, memory_client: Client) -> None:
    with pytest.raises(ValueError, match="mine"), memory_client.async_checkpoint("r", 1) as ckpt:
        ckpt.put("a", b"x").result(30)
        raise ValueError("mine")
    assert memory.calls[-1] == "AbortPart" and memory_client.runs() == []


def test_nothing_is_left(memory: MemoryGateway) -> None:
    before = {thread.name for thread in threading.enumerate()}
    files = len(os.listdir("/proc/self/fd"))
    for step in range(3):
        with Client(memory.address) as client:
            with client.async_checkpoint("r", step) as ckpt:
                ckpt.put("a", BIG)
                commit = ckpt.commit(wait="pfs")
            commit.result(30)
            mapping = weakref.ref(client._background.pool._mapping)
    left = [thread for thread in threading.enumerate() if thread.name not in before and thread.name.startswith("forebay")]
    for thread in left:
        thread.join(10)
    assert not [thread.name for thread in left if thread.is_alive()]
    del client, ckpt, commit
    gc.collect()
    assert mapping() is None
    assert len(os.listdir("/proc/self/fd")) <= files + 2  # gRPC's own, for the whole process


# Other processes


def test_a_client_with_a_pool_is_pickled_by_its_options(memory: MemoryGateway) -> None:
    with Client(memory.address, background_bytes=5 * MIB, background_timeout=7) as client:
        with client.checkpoint("r", 1) as ckpt:
            ckpt.put("a", b"x", background=True)
            ckpt.commit()
        with pickle.loads(pickle.dumps(client)) as copy:
            assert (copy._background.size, copy._background.timeout_s) == (5 * MIB, 7)
            assert copy.latest("r") == 1


def test_a_forked_child_has_nothing_of_its_parents_saves(memory: MemoryGateway, memory_client: Client) -> None:
    with held_back(memory) as go, memory_client.async_checkpoint("r", 1) as ckpt:
        pending = ckpt.put("a", BIG)
        region = next(iter(ckpt._part._background._under_way.values()))._region
        context = multiprocessing.get_context("fork")
        child = context.Process(target=_child, args=(memory_client, ckpt, pending, region))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert "AbortPart" not in memory.calls
        assert bytes(region.view[: len(BIG)]) == BIG, "the parent's pages are its own"
        commit = ckpt.commit()
        go.set()
        assert commit.result(30).shard_count == 1
    assert memory_client.open("r", 1).read("a") == BIG
    assert memory_client.latest("child") == 5


def _child(client: Client, ckpt: forebay.BackgroundCheckpoint, pending: forebay.Pending, region) -> None:
    assert not any(region.view[: 1 << 20]), "zeros in place of the parent's pages"
    with pytest.raises(forebay.InvalidArgument, match="forked"):
        pending.result()
    ckpt._part._background.settle(time.monotonic())  # nothing is under way here
    assert client._background.pool.free_bytes == client._background.pool.size
    with suppress(forebay.ForebayError), ckpt:
        pass  # leaving the block in the child aborts nothing
    with client.async_checkpoint("child", 5) as mine:
        mine.put_many({"a": b"x"})
        commit = mine.commit()
    os._exit(0 if commit.result(30).checkpoint_complete else 3)


_TRAINER = """
import os, sys, forebay
client = forebay.Client(sys.argv[1], background_bytes=256 << 20)
with client.async_checkpoint("r", 1) as ckpt:
    ckpt.put("first", b"x" * (3 << 20)).result(60)
    for number in range(6):
        ckpt.put(f"a{number}", os.urandom(30 << 20))
    if sys.argv[2] == "kill":
        print("under way", flush=True)
        sys.stdin.read()
    ckpt.commit({"k": 1}, wait=sys.argv[3])
print("goes", flush=True)
"""


@contextmanager
def _trainer(address: str, how: str, wait: str = "cache") -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", _TRAINER, address, how, wait],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_trainer_that_is_killed_leaves_no_checkpoint(gateway) -> None:
    with _trainer(gateway.address, "kill") as process, Client(gateway.address) as client:
        assert process.stdout.readline() == "under way\n"
        process.kill()
        process.wait(30)
        assert client.latest("r") is None
        with suppress(forebay.NotFound):  # where something has landed, it shows as what it is
            assert not client.describe("r", 1).complete
        with pytest.raises((forebay.Incomplete, forebay.NotFound)):
            client.open("r", 1)
        with client.async_checkpoint("r", 1) as ckpt:  # the next launch saves the same step
            ckpt.put("first", b"y")
            commit = ckpt.commit()
        assert commit.result(60).checkpoint_complete and client.open("r", 1).names() == ["first"]


def test_a_trainer_that_ends_after_its_last_commit_loses_nothing(gateway) -> None:
    """No close, no result: leaving the program is enough."""
    with _trainer(gateway.address, "end") as process, Client(gateway.address) as client:
        assert process.stdout.readline() == "goes\n"
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0 and errors == "", errors
        assert client.latest("r") == 1 and len(client.open("r", 1).names()) == 7


def test_an_ending_trainer_does_not_wait_for_a_tier(memory: MemoryGateway, memory_client: Client) -> None:
    memory_client.hold()
    with _trainer(memory.address, "end", "pfs") as process:
        output, errors = process.communicate(timeout=120)
        assert (process.returncode, output, errors) == (0, "goes\n", "")
    assert memory_client.describe("r", 1).complete


# With await


async def test_the_same_with_await(gateway) -> None:
    async with AsyncClient(gateway.address, background_bytes=64 * MIB) as client:
        await client.prefault_background(8 * MIB)
        data = bytearray(BIG)
        async with client.checkpoint("r", 1) as ckpt:
            pending = await ckpt.put("a", data, background=True)
            many = await ckpt.put_many({"s": b"1", "t": b"2"}, background=True)
            data[:] = bytes(len(data))
            assert (await pending.result(60)).size == len(BIG)
            assert [receipt.name for receipt in await many.result(60)] == ["s", "t"]
            await ckpt.commit()
        async with client.async_checkpoint("r", 2) as ckpt:
            await ckpt.put("a", BIG)
            await ckpt.put_many({"s": b"1"})
            commit = await ckpt.commit({"k": 1})
        assert (await commit.result(60)).shard_count == 2 and commit.done() and await commit.exception() is None
        assert await (await client.open("r", 1)).read("a") == await (await client.open("r", 2)).read("a") == BIG
        ckpt = await client.async_checkpoint("r", 3)
        await (await ckpt.put("a", b"x")).result(60)
        assert ckpt.session and list(ckpt.receipts) == ["a"] and await ckpt.abort() == 1
        with pytest.raises(forebay.InvalidArgument, match="async with"):
            await client.async_checkpoint("r", 4).put("a", b"x")


async def test_a_put_that_waits_for_a_buffer_can_be_cancelled(memory: MemoryGateway) -> None:
    async with AsyncClient(memory.address, background_bytes=MIB) as client, client.checkpoint("r", 1) as ckpt:
        with held_back(memory) as go:
            first = await ckpt.put("a", BIG[:MIB], background=True)
            for act in (lambda: ckpt.put("b", b"x", background=True), first.result):
                task = asyncio.create_task(act())
                await asyncio.sleep(0.2)
                assert not task.done()
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            go.set()
        assert (await first.result(30)).size == MIB, "what was put before goes on"
        assert (await ckpt.commit()).shard_count == 1


def _until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
