"""AsyncClient, cancellation, and processes that fork."""

import asyncio
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator
from contextlib import aclosing

import pytest

import forebay
from client.conftest import RealGateway
from client.lanes import FdClient, StreamClient, async_client
from forebay import AsyncClient, Client
from forebay.testing import MemoryGateway

BIG = os.urandom((9 << 20) + 7)


async def test_the_same_verbs_with_await(gateway, client_class, tmp_path) -> None:
    async with async_client(gateway.address, client_class) as client:
        async with client.checkpoint("r", 1) as ckpt:
            await asyncio.gather(*(ckpt.put(f"big{n}", BIG) for n in range(3)), ckpt.put_many({"s": b"small"}))
            assert (await ckpt.commit({"a": 1}, wait="pfs", timeout=60)).level == "pfs"
        reader = await client.open("r", 1)
        assert await reader.names() == ["big0", "big1", "big2", "s"]
        buffer = bytearray(len(BIG))
        assert await reader.readinto("big1", buffer) == len(BIG) and buffer == BIG
        assert b"".join([chunk async for chunk in reader.stream("big2", 5)]) == BIG[5:]
        assert await reader.read("s") == b"small"
        assert await client.latest("r") == 1
        assert (await client.restore_dir("r", "latest", tmp_path / "out")).shards == 4
        assert (await client.save_dir(tmp_path / "out", "r", 2)).shards == 4
        seen: list[forebay.WaitProgress] = []
        assert (await client.wait("r", 2, "all", timeout=60, progress=seen.append)).reached
        await asyncio.sleep(0)
        assert seen[-1].reached
        assert [run.run for run in await client.runs()] == ["r"]
        assert len(await client.checkpoints("r")) == 2 and (await client.describe("r", 2)).complete
        await client.pin("r", 2)
        await client.unpin("r", 2)
        assert (await client.delete("r", 2)).shards == 4
        assert (await client.pressure()).level == "ok" and (await client.status()).health in ("ok", "warning")


async def until_free(care: forebay.AsyncCare) -> None:
    """The gateway hears of a call that was given up a moment after its client."""
    for _ in range(100):
        try:
            assert [found async for found in care.fsck()] == []
            return
        except forebay.Unavailable:
            await asyncio.sleep(0.05)
    raise AssertionError("a command that was given up does not end")


async def test_care_with_await(real, tmp_path) -> None:
    async with AsyncClient(real.address) as client:
        async with client.checkpoint("r", 1) as ckpt:
            await ckpt.put("a", BIG)
            await ckpt.commit(wait="pfs", timeout=60)
        care = client.care
        assert [(copy.where, copy.state) async for copy in care.verify("r", 1)] == [("cache", "good"), ("pfs", "good")]
        async with aclosing(care.verify("r", 1)) as copies:
            assert (await anext(copies)).state == "good"  # and no more: the command ends at the gateway
        assert (await care.scrub()).state
        await until_free(care)
        assert [found async for found in care.fsck(deep=True)] == [found async for found in care.repair()] == []
        next((real.directory / "pfs/r").glob("step-*/*/a")).with_name("stray").write_bytes(b"x")
        assert [item.kind async for item in care.collect(older_than_s=0)] == ["foreign"]
        assert (await care.evict("r", 1)).shards == 1 and (await care.warm_up("r", 1)).shards == 1
        assert await care.drain() == 0
        assert [bad async for bad in care.quarantine()] == []
        with pytest.raises(forebay.NotFound):
            await care.release("00000000000000000000000000000000:cache")


def test_the_twins_have_the_same_verbs() -> None:
    """Whoever adds a verb to one of them adds it to the other."""
    twins = (
        (Client, AsyncClient),
        (forebay.CheckpointWriter, forebay.AsyncCheckpointWriter),
        (forebay.Reader, forebay.AsyncReader),
        (forebay.Care, forebay.AsyncCare),
        (forebay.BackgroundCheckpoint, forebay.AsyncBackgroundCheckpoint),
        (forebay.Pending, forebay.AsyncPending),
        (forebay.PendingCommit, forebay.AsyncPending),
    )
    lacking = {
        f"{twin.__name__}.{name}"
        for original, twin in twins
        for name in vars(original)
        if not name.startswith("_") and not hasattr(twin, name)
    }
    # Of a writer, what its own package uses; of a commit, too. `run` and `step` are what the caller gave.
    known = {"shard", "run", "step", "commit_json", "check_background", "give_up", "write_to"}
    known |= {"step_of", "add_done_callback", "failed", "wait"}  # for other modules of the client
    known |= {"unseen", "tell", "over", "leave", "succeed", "fail", "reach", "packed", "read_groups"}
    assert {name.partition(".")[2] for name in lacking} <= known, lacking


async def test_leaving_with_an_error_aborts(memory: MemoryGateway) -> None:
    async with AsyncClient(memory.address) as client:
        with pytest.raises(ValueError, match="mine"):
            async with client.checkpoint("r", 1) as ckpt:
                await ckpt.put("a", b"x")
                raise ValueError("mine")
        assert memory.calls[-1] == "AbortPart"
        with pytest.raises(forebay.NotFound):
            await client.checkpoints("r")


@pytest.mark.parametrize("what", ["wait", "put", "retry", "read"])
async def test_cancelling_ends_the_rpc(memory: MemoryGateway, what: str) -> None:
    def slowly() -> Iterator[bytes]:
        while True:
            time.sleep(0.02)
            yield b"x"

    async with AsyncClient(memory.address) as client:
        await client.hold()
        async with client.checkpoint("r", 1) as ckpt:
            await ckpt.put("a", BIG)
            await ckpt.commit()
        if what == "retry":
            memory.fail("ListRuns", forebay.Unavailable("away", retry_after_s=50), times=1000)
        reader = await client.open("r", 1)
        await reader.names()
        second = client.checkpoint("r", 2)
        stream = reader.stream("a")
        if what == "read":  # the stream breaks after a chunk, and its resumption waits
            memory.fail("ReadShard", forebay.Unavailable("x", retry_after_s=50), after=1)
            await anext(stream)
        acts = {
            "wait": lambda: client.wait("r", 1, "pfs"),
            "put": lambda: second.put("b", slowly()),
            "retry": client.runs,
            "read": lambda: _drain(stream),
        }
        task = asyncio.create_task(acts[what]())
        await asyncio.sleep(0.5)
        assert not task.done()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asyncio.wait_for(task, 30)
        await stream.aclose()
        assert await client.latest("r") == 1  # the client is as good as before


async def _drain(stream) -> None:
    async for _ in stream:
        pass


async def test_a_cancelled_block_aborts_its_part(memory: MemoryGateway) -> None:
    async with AsyncClient(memory.address) as client:
        inside = asyncio.Event()

        async def save() -> None:
            async with client.checkpoint("r", 1) as ckpt:
                await ckpt.put("a", BIG)
                inside.set()
                await asyncio.sleep(100)

        task = asyncio.create_task(save())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert memory.calls[-1] == "AbortPart"


async def test_a_hundred_cancelled_operations_leave_nothing(memory: MemoryGateway) -> None:
    async with AsyncClient(memory.address) as client:
        async with client.checkpoint("r", 1) as ckpt:
            await ckpt.put("a", BIG)
            await ckpt.commit()
        reader = await client.open("r", 1)
        for number in range(100):
            task = asyncio.create_task(reader.read("a"))
            await asyncio.sleep(0.0005 * (number % 10))
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        assert await reader.read("a") == BIG


def _child(client: Client, step: int) -> None:
    with client.checkpoint("r", step) as ckpt:
        ckpt.put("a", BIG)
        ckpt.commit()
    os._exit(0 if client.open("r", step).read("a") == BIG else 3)


# A gateway in this very process would fork with its client: gRPC cannot reset itself in a child while a server's thread is
# inside it. A trainer has none.


@pytest.mark.parametrize("kind", [StreamClient, FdClient])
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_has_a_channel_of_its_own(real: RealGateway, kind: type[Client], method: str) -> None:
    with kind(real.address) as client:
        with client.checkpoint("r", 1) as ckpt:
            ckpt.put("a", BIG)
            context = multiprocessing.get_context(method)
            children = [context.Process(target=_child, args=(client, step)) for step in (2, 3)]
            for child in children:
                child.start()
            for child in children:
                child.join(60)
            assert [child.exitcode for child in children] == [0, 0]
            ckpt.put("b", b"the parent goes on")
            ckpt.commit()
        assert client.latest("r") == 3
        assert client.open("r", 1).read("b") == b"the parent goes on"


def test_a_child_that_leaves_the_block_of_its_parent_aborts_nothing(real: RealGateway) -> None:
    with Client(real.address) as client, client.checkpoint("r", 1) as ckpt:
        ckpt.put("a", BIG)
        pid = os.fork()
        if pid == 0:
            try:
                ckpt.__exit__(SystemExit, SystemExit(), None)
            finally:
                os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        ckpt.commit()  # refused where the part lacks what was put
        assert client.open("r", 1).read("a") == BIG


def test_a_child_that_exits_normally_does_not_disturb_its_parent(real: RealGateway) -> None:
    with Client(real.address) as client:
        assert client.runs() == []
        before = client._connection.stubs()
        for _ in range(3):
            pid = os.fork()
            if pid == 0:
                try:
                    client.runs()
                    client.close()
                finally:
                    os._exit(0 if client._connection._stubs is None else 4)
            assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
            assert client.runs() == []
        assert client._connection.stubs() is before


@pytest.mark.parametrize("what", ["stream", "read_many"])
def test_a_stream_that_a_child_goes_on_with_is_begun_anew_there(real: RealGateway, what: str) -> None:
    shards = {f"{n:02}": os.urandom(100_000) for n in range(30)}
    with Client(real.address, progress=False) as client:
        with client.checkpoint("r", 1) as ckpt:
            ckpt.put_many(shards)
            ckpt.put("a", BIG)
            ckpt.commit()
        reader = client.open("r", 1, lane="stream")

        def rest(items: Iterator[memoryview] | Iterator[tuple[str, bytes]]) -> bool:
            return b"".join(items) == BIG[first:] if what == "stream" else dict(items).items() >= left.items()  # type: ignore[arg-type]

        items = reader.stream("a") if what == "stream" else reader.read_many(shards)
        head = next(items)
        first = len(head)
        left = {name: data for name, data in shards.items() if name != head[0]}
        pid = os.fork()
        if pid == 0:
            signal.alarm(20)  # a child that waits for its parent's stream waits for ever
            try:
                os._exit(0 if rest(items) else 3)
            finally:
                os._exit(4)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        assert code == 0
        assert rest(items)
