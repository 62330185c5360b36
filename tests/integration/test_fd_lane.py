"""The fd lane as a trainer uses it: all kinds of data and memory, restarts at any moment, forks, what it falls back to."""

import asyncio
import contextlib
import mmap
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay.demo.seaweedfs import free_ports
from forebay.errors import Corrupt, ForebayError, InvalidArgument, NotFound, Unavailable, Unsupported
from forebay.lanes.memory import aligned
from forebay.sources import source_of
from integration.conftest import MakeGateway
from integration.fd_kit import BIG, BLOCK, MIB, RawLease, fd_socket, in_pages, saved
from integration.kit import (
    CHUNK,
    Leftovers,
    Raw,
    cache_files,
    files_below,
    held,
    part_ref,
    some_bytes,
)
from soak.form import every, some

SIZES = (1, BLOCK - 1, BLOCK, BLOCK + 1, CHUNK, CHUNK + 1, 4 * MIB - 1, 4 * MIB, 4 * MIB + 1, 9 * MIB + 12_345)


@pytest.fixture
def gateway(make: MakeGateway) -> GatewayProcess:
    return make().start()


@pytest.mark.usefixtures("no_streams")
def test_a_snapshot_that_is_damaged_while_it_waits_is_found(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client:
        said = pytest.raises(Corrupt, match="put 'x': its bytes were damaged while they waited")
        with said, client.checkpoint("r", 1, lane="fd") as part:
            with client._background.copying():  # nothing is sent meanwhile
                part.put("x", BIG, background=True)
                next(iter(part._background._under_way.values()))._region.view[5] ^= 1
            part.commit()
        assert client.runs() == []


@pytest.mark.parametrize("direct_io", ["auto", "off"])
@pytest.mark.parametrize("chunk_size", some(["64KiB", "4MiB", "16MiB"], "64KiB"))
@pytest.mark.usefixtures("no_streams")
def test_every_size_from_every_memory_into_every_memory(make: MakeGateway, chunk_size: str, direct_io: str) -> None:
    gateway = make(cache_keys=f'chunk_size = "{chunk_size}"\ndirect_io = "{direct_io}"').start()
    data = {f"{shift}/{size}": some_bytes(size, (shift, size)) for size in SIZES for shift in (0, 16, 512)}
    with forebay.Client(gateway.address) as client:
        with client.checkpoint("r", 1, lane="fd") as part:
            for name, content in data.items():
                part.put(name, in_pages(content, int(name.partition("/")[0])))
            part.commit()
        reader = client.open("r", 1, lane="fd")
        for name, content in data.items():
            assert reader.read(name) == content
            assert b"".join(reader.stream(name)) == content
            for shift in (0, 16):
                target = in_pages(bytes(len(content)), shift)
                assert reader.readinto(name, target) == len(content)
                assert target == content
        name = f"0/{SIZES[-1]}"
        size = SIZES[-1]
        for low, high in (
            (0, 1),
            (5, 6),
            (CHUNK - 1, CHUNK + 1),
            (BLOCK, 8 * MIB),
            (4 * MIB - 3, 4 * MIB + 3),
            (size - 7, size),
        ):
            assert reader.read(name, low, high - low) == data[name][low:high]
            assert b"".join(reader.stream(name, low, high - low)) == data[name][low:high]
            target = in_pages(bytes(high - low), low % BLOCK)
            reader.readinto(name, target, low)
            assert target == data[name][low:high]
    assert "checked copy" not in gateway.log.read_text()  # every file was sealed as it was written


@pytest.mark.usefixtures("no_streams")
def test_every_kind_of_data(gateway: GatewayProcess, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(BIG)
    array = numpy.frombuffer(BIG[: 8 * MIB], dtype=numpy.float64)
    counted: list[int] = []
    with forebay.Client(gateway.address) as client, path.open("rb") as file:
        file.seek(5)
        with client.checkpoint("r", 1, lane="fd") as part:
            part.put("bytes", BIG, on_bytes=counted.append)
            part.put("path", path)
            part.put("file", file)
            part.put("list", [BIG[:7], BIG[7 : 5 * MIB], BIG[5 * MIB :]])
            part.put("array", array)
            part.put_many({"large": BIG})
            part.commit()
        reader = client.open("r", 1, lane="fd")
        for name in ("bytes", "path", "list", "large"):
            assert reader.read(name) == BIG, name
        assert reader.read("file") == BIG[5:]
        assert reader.read("array") == array.tobytes()
        assert sum(counted) == len(BIG)
        summary = client.restore_dir("r", 1, tmp_path / "out", lane="fd")
        assert summary.size == sum(shard.size for shard in reader.shards())
        assert files_below(tmp_path / "out") == {name: reader.read(name) for name in reader.names()}


def test_what_it_cannot_carry_goes_by_stream(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client:
        with client.checkpoint("r", 1, lane="fd") as part:
            part.put("unknown size", iter([BIG[:5], BIG[5:]]))
            part.put("empty", b"")
            part.put_many({"small": b"s"})
            assert part.put("again", BIG) == part.put("again", BIG)  # compared by the stream lane
            with pytest.raises(forebay.AlreadyExists):
                part.put("again", BIG[:-1])
            part.commit()
        reader = client.open("r", 1, lane="fd")
        assert (reader.read("unknown size"), reader.read("empty"), reader.read("small")) == (BIG, b"", b"s")
        client.wait("r", 1, "pfs", timeout=30)
        assert client.open("r", 1, source="pfs", lane="fd").read("again") == BIG


@pytest.mark.usefixtures("no_streams")
def test_auto_takes_it_for_what_is_large(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client:
        with client.checkpoint("r", 1) as part:
            part.put("large", BIG)
            with pytest.raises(AssertionError, match="stream lane"):
                part.put("small", b"x")
            part.commit()
        assert client.open("r", 1).read("large") == BIG
        assert client.open("r", 1).readinto("large", bytearray(len(BIG))) == len(BIG)
        assert sum(map(len, client.open("r", 1).stream("large"))) == len(BIG)


def test_where_it_is_not_offered(make: MakeGateway, tmp_path: Path) -> None:
    """Over TCP nothing proves that client and gateway share a host; a socket may be out of reach, or have too long a path."""
    gateway = make()
    (port,) = free_ports(1)
    text = gateway.config.read_text()
    gateway.config.write_text(text.replace(f'["{gateway.address}"]', f'["{gateway.address}", "127.0.0.1:{port}"]'))
    gateway.start()
    assert gateway.log.read_text().count(f"every user of this host, through 127.0.0.1:{port}, can read") == 1
    hidden = tmp_path / "seen"
    hidden.mkdir()
    (hidden / "a.sock").symlink_to(gateway.socket)
    for step, address in enumerate((f"127.0.0.1:{port}", f"unix://{hidden}/a.sock"), 1):
        with forebay.Client(address) as client:
            with client.checkpoint("r", step, lane="fd") as part, pytest.raises(Unsupported, match="fd lane"):
                part.put("x", BIG)
            with client.checkpoint("r", step) as part:
                part.put("x", BIG)
                part.commit()
            assert client.open("r", step).read("x") == BIG
            with pytest.raises(Unsupported, match="fd lane"):
                client.open("r", step, lane="fd").read("x")


def test_a_path_too_long_for_a_second_socket(make: MakeGateway, tmp_path: Path) -> None:
    gateway = make()
    path = tmp_path / ("s" * (107 - len(str(tmp_path)) - 6) + ".sock")
    assert len(str(path)) == 107
    gateway.config.write_text(gateway.config.read_text().replace(str(gateway.socket), str(path)))
    gateway.socket, gateway.address = path, f"unix://{path}"
    gateway.start()
    with forebay.Client(gateway.address) as client:
        with client.checkpoint("r", 1) as part:
            part.put("x", BIG)
            part.commit()
        with pytest.raises(Unsupported, match="too long a path"):
            client.open("r", 1, lane="fd").read("x")
    assert "no fd lane" in gateway.tail()


IN_A_CONTAINER = """
import os, pathlib, subprocess, sys
import forebay
from forebay.cli import main  # and all else that is imported late: nothing more is read from disk than what is mounted
base, sockets, name = map(pathlib.Path, sys.argv[1:])
seen = base.parent / "seen"
seen.mkdir()
for command in (
    ["mount", "--make-rprivate", "/"],
    ["mount", "--bind", sockets, seen],
    ["mount", "-t", "tmpfs", "none", base],
    ["mount", "-t", "tmpfs", "none", sockets],
):
    subprocess.run(command, check=True)
assert not any(base.iterdir()) and not any(sockets.iterdir())
assert len(list(seen.iterdir())) == 2 and all(path.is_socket() for path in seen.iterdir())
data = bytes(range(251)) * 20_000
with forebay.Client(f"unix://{seen}/{name}") as client:
    for step, lane in enumerate(("fd", "stream", "auto"), 1):
        with client.checkpoint("r", step, lane=lane) as part:
            part.put("x", data)
            part.put_many({"small": b"s"})
            part.commit()
        client.wait("r", step, "pfs", timeout=60)
        for source in ("cache", "auto"):
            reader = client.open("r", step, source=source, lane=lane)
            assert reader.read("x") == data and reader.read("small") == b"s"
        assert client.open("r", step, source="pfs").read("x") == data
print("done")
"""


def may_unshare() -> bool:
    """Whether this user may have a mount namespace of its own, and mount in it."""
    probe = "mount --make-rprivate / && mount -t tmpfs none /mnt"
    try:
        return subprocess.run(["unshare", "-m", "sh", "-c", probe], capture_output=True, timeout=30).returncode == 0
    except OSError:
        return False


def test_from_a_container_that_sees_only_the_sockets(make: MakeGateway) -> None:
    """A mount namespace of its own, in which there is neither cache nor tier, and the sockets have other paths."""
    if not may_unshare():
        pytest.skip("this user may not unshare a mount namespace (needs CAP_SYS_ADMIN)")
    gateway = make()
    with tempfile.TemporaryDirectory(prefix="fb-") as short:
        sockets = Path(short) / "sockets"
        sockets.mkdir()
        text = gateway.config.read_text()
        gateway.config.write_text(text.replace(str(gateway.socket), str(sockets / "a.sock")))
        gateway.socket, gateway.address = sockets / "a.sock", f"unix://{sockets}/a.sock"
        gateway.start()
        command = [sys.executable, "-c", IN_A_CONTAINER, str(gateway.config.parent), str(sockets), "a.sock"]
        inside = subprocess.run(["unshare", "-m", *command], capture_output=True, text=True, timeout=120)
    assert inside.stdout == "done\n", inside.stderr


@pytest.mark.usefixtures("no_streams")
def test_from_a_container_that_sees_the_sockets_elsewhere(gateway: GatewayProcess, tmp_path: Path) -> None:
    elsewhere = tmp_path / "mnt"
    elsewhere.mkdir()
    for path in (gateway.socket, fd_socket(gateway)):
        (elsewhere / path.name).symlink_to(path)
    with forebay.Client(f"unix://{elsewhere}/{gateway.socket.name}") as client:
        with client.checkpoint("r", 1, lane="fd") as part:
            part.put("x", BIG)
            part.commit()
        assert client.open("r", 1, lane="fd").read("x") == BIG


def test_the_sockets_are_private_and_go_with_the_gateway(gateway: GatewayProcess) -> None:
    path = fd_socket(gateway)
    assert path.stat().st_mode & 0o777 == gateway.socket.stat().st_mode & 0o777 == 0o660
    assert gateway.terminate() == 0
    assert not path.exists()
    gateway.start()
    gateway.kill()
    assert path.exists()
    gateway.start()  # over the one that was left
    with forebay.Client(gateway.address) as client, client.checkpoint("r", 1, lane="fd") as part:
        part.put("x", b"x")


# -- the gateway ends in the middle --------------------------------------------------------------------------------------

POINTS = [
    "create.before_allocate",
    "lease.handed",
    "lease.before_proof",
    "lease.before_reopen",
    "seal.before_rename",
    "seal.done",
]


@pytest.mark.parametrize("point", every(POINTS, 2))
def test_a_gateway_that_is_killed_in_the_middle(make: MakeGateway, point: str) -> None:
    """The SDK begins again; the file of the first try is gone, or, if it was sealed, acknowledged once more."""
    gateway = make()
    gateway.start(failpoints=f"{point}=kill")
    done: list[Any] = []

    def save() -> None:
        with forebay.Client(gateway.address) as client, client.checkpoint("r", 1, session="s", lane="fd") as part:
            done.append(part.put("x", BIG))
            part.commit()

    trainer = threading.Thread(target=save)
    trainer.start()
    assert gateway.wait_exit() == -9
    gateway.start()
    trainer.join(60)
    assert len(done) == 1
    with forebay.Client(gateway.address) as client:
        assert client.open("r", 1).read("x") == BIG
        client.wait("r", 1, "pfs", timeout=30)
    assert len(cache_files(gateway)) == 1
    assert list((gateway.cache / "incoming").iterdir()) == []


class Slow:
    """A file that is read piece by piece, when told so."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self.reading = threading.Event()
        self.go = threading.Event()

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = 0) -> int:
        self._at = len(self._data) if whence == os.SEEK_END else offset
        return self._at

    def read(self, size: int) -> bytes:
        if self._at:
            self.reading.set()
            assert self.go.wait(30)
        piece = self._data[self._at : self._at + size]
        self._at += len(piece)
        return piece


@pytest.mark.parametrize("end", [GatewayProcess.terminate, GatewayProcess.kill])
def test_a_gateway_that_ends_while_its_client_writes(make: MakeGateway, end: Callable[[GatewayProcess], object]) -> None:
    gateway = make(node_keys='drain_timeout = "1s"').start()
    source = Slow(BIG)
    counted: list[int] = []
    errors: list[BaseException] = []

    def save() -> None:
        try:
            with forebay.Client(gateway.address) as client, client.checkpoint("r", 1, session="s", lane="fd") as part:
                part.put("x", source, on_bytes=counted.append)
                part.commit()
        except BaseException as error:
            errors.append(error)

    trainer = threading.Thread(target=save)
    trainer.start()
    assert source.reading.wait(30)
    end(gateway)
    if end is GatewayProcess.terminate:
        assert list((gateway.cache / "incoming").iterdir()) == []
    gateway.start()
    source.go.set()
    trainer.join(60)
    assert errors == []
    with forebay.Client(gateway.address) as client:
        assert client.open("r", 1).read("x") == BIG
    assert sum(counted) == len(BIG)
    assert list((gateway.cache / "incoming").iterdir()) == []


def test_a_lease_of_a_killed_gateway_is_dropped_at_the_next_start(gateway: GatewayProcess) -> None:
    with Raw(gateway) as raw, RawLease(gateway, raw) as lease:
        lease.open(part_ref("r"), BIG)
        with lease.descriptor():
            gateway.kill()
            assert len(list((gateway.cache / "incoming").iterdir())) == 1
            gateway.start()
            assert list((gateway.cache / "incoming").iterdir()) == []


# -- the client ends in the middle ---------------------------------------------------------------------------------------


def test_an_error_of_the_data_leaves_nothing(gateway: GatewayProcess, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(BIG)
    with forebay.Client(gateway.address) as client:
        client.runs()  # connected from here on
        left = Leftovers(gateway)
        part = client.checkpoint("r", 1, session="s", lane="fd")
        broken = Slow(BIG)
        broken.read = lambda size: 1 // 0  # type: ignore[method-assign, assignment, return-value]
        with pytest.raises(ZeroDivisionError):
            part.put("x", broken)
        source = source_of(path, "file")
        path.write_bytes(BIG[:-1])
        with pytest.raises(InvalidArgument, match="became shorter"):
            part.put("x", source)
        left.none()
        part.put("x", b"something else")
        part.abort()
        left.none()
        left.close()


def test_a_part_that_is_aborted_meanwhile_is_not_opened_again(gateway: GatewayProcess) -> None:
    source = Slow(BIG)
    errors: list[BaseException] = []
    with forebay.Client(gateway.address) as client, forebay.Client(gateway.address) as other:
        part = client.checkpoint("r", 1, session="s", lane="fd")

        def put() -> None:
            try:
                part.put("x", source)
            except ForebayError as error:
                errors.append(error)

        trainer = threading.Thread(target=put)
        trainer.start()
        assert source.reading.wait(30)
        other.checkpoint("r", 1, session="s").abort()
        source.go.set()
        trainer.join(30)
        assert [type(error) for error in errors] == [NotFound] and "aborted" in str(errors[0])
        with pytest.raises(NotFound):
            client.describe("r", 1)
    assert cache_files(gateway) == []


@pytest.mark.usefixtures("no_streams")
def test_a_snapshot_that_is_damaged_while_it_waits_is_never_acknowledged(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client, client.checkpoint("r", 1, lane="fd") as part:
        with client._background.copying():  # nothing is sent meanwhile
            pending = part.put("x", BIG, background=True)
            region = next(iter(part._background._under_way.values()))._region
            assert region is not None
            region.view[5] ^= 1
        assert isinstance(pending.exception(30), Corrupt)
        assert part.receipts == {} and cache_files(gateway) == []
        part.put("x", BIG, background=True)  # its name is free
        part.commit()
        assert client.open("r", 1, lane="fd").read("x") == BIG


def test_too_many_that_connect_at_once(gateway: GatewayProcess) -> None:
    """The kernel's queue of those that wait to be taken is full: no reason to say that there is no fd lane."""
    with contextlib.ExitStack() as stack:
        fd_socket(gateway).unlink()
        listener = stack.enter_context(socket.socket(socket.AF_UNIX))
        listener.bind(str(fd_socket(gateway)))
        listener.listen(0)
        with pytest.raises(BlockingIOError):
            for _ in range(10):
                waiting = stack.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(str(fd_socket(gateway)))
        client = stack.enter_context(forebay.Client(gateway.address, retry_timeout=0.3))
        with client.checkpoint("r", 1, lane="fd") as part, pytest.raises(Unavailable, match="too many"):
            part.put("x", BIG)
        with client.checkpoint("r", 2) as part:
            part.put("x", BIG)
            part.commit()
        assert client.open("r", 2, lane="fd").read("x") == BIG


async def test_a_cancelled_put_lets_go_of_the_data_and_leaves_nothing(gateway: GatewayProcess) -> None:
    source = Slow(BIG)
    async with forebay.AsyncClient(gateway.address) as client:
        await client.runs()  # connected from here on
        left = Leftovers(gateway)
        part = client.checkpoint("r", 1, session="s", lane="fd")
        task = asyncio.create_task(part.put("x", source))
        await asyncio.to_thread(source.reading.wait, 30)
        task.cancel()
        await asyncio.sleep(0.1)
        assert not task.done()  # the data is still being read
        source.go.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        at = source.tell()
        left.none()
        assert source.tell() == at
        await part.abort()
    left.close()


def test_a_child_of_the_trainer_that_holds_the_descriptor(gateway: GatewayProcess) -> None:
    """Forked in the middle of a put, as data loaders are: the shard is copied, the child has nothing of it."""
    source = Slow(BIG)
    done: list[Any] = []

    def save() -> None:
        with forebay.Client(gateway.address) as client, client.checkpoint("r", 1, session="s", lane="fd") as part:
            done.append(part.put("x", source))
            part.commit()

    trainer = threading.Thread(target=save)
    trainer.start()
    assert source.reading.wait(30)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(writing)
        os.read(reading, 1)  # until the parent closes its end
        os._exit(0)
    os.close(reading)
    try:
        source.go.set()
        trainer.join(60)
        assert len(done) == 1
        assert "checked copy" in gateway.tail()
        with forebay.Client(gateway.address) as client:
            assert client.open("r", 1).read("x") == BIG
        assert list((gateway.cache / "incoming").iterdir()) == []
        assert gateway.status()["cache"]["open_streams"] == 0
    finally:
        os.close(writing)
        os.waitpid(child, 0)


# -- space and memory ----------------------------------------------------------------------------------------------------


def test_a_full_cache_refuses_before_data_flows(make: MakeGateway) -> None:
    gateway = make(capacity="24MiB", tiers=None).start()
    with (
        held(gateway),
        forebay.Client(gateway.address, admit_timeout=0.3) as client,
        client.checkpoint("r", 1, session="s", lane="fd") as part,
    ):
        part.put("a", BIG)
        part.put("b", BIG)
        with pytest.raises(forebay.CacheFull) as caught:
            part.put("c", BIG)
        assert caught.value.retry_after_s is not None
        with pytest.raises(InvalidArgument, match="does not fit"):
            part.put("d", bytes(25 * MIB))
        assert gateway.status()["cache"]["reserved_bytes"] == 0


def test_the_gateways_memory_does_not_see_the_bytes(make: MakeGateway) -> None:
    gateway = make(capacity="4GiB", cache_keys="").start()
    size = 512 * MIB
    source = aligned(size)
    source[: len(BIG)] = BIG
    with held(gateway), forebay.Client(gateway.address) as client:
        process = psutil.Process(gateway.pid)
        with client.checkpoint("r", 1, session="s", lane="fd") as part:
            part.put("first", source[: 8 * MIB])
            before = process.memory_info().rss
            part.put("x", source)
            part.commit()
        client.open("r", 1, lane="fd").readinto("x", source)
        assert source[: len(BIG)] == BIG
        assert process.memory_info().rss - before < 16 * MIB
        client.delete("r", 1, force=True)


def test_many_at_once(gateway: GatewayProcess) -> None:
    """Threads that save and restore together, each over leases of its own."""
    saved(gateway)  # its mover runs from here on
    errors: list[BaseException] = []

    def one(number: int) -> None:
        try:
            data = BIG[number:]
            with client.checkpoint("many", number, session="s") as part:
                part.put("x", data)
                part.commit()
            reader = client.open("many", number)
            assert reader.read("x") == data and b"".join(reader.stream("x")) == data
            client.delete("many", number, force=True)
        except BaseException as error:
            errors.append(error)

    with forebay.Client(gateway.address) as client:
        client.runs()
        left = Leftovers(gateway)
        threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert errors == []
        left.none()
        left.close()


@pytest.fixture
def on_tmpfs(tmp_path: Path, root: Path) -> Iterator[GatewayProcess]:
    """A cache where files are pages: no direct I/O to speak of."""
    shm = Path("/dev/shm")
    if not shm.is_dir() or not os.access(shm, os.W_OK):
        pytest.skip("no tmpfs to write to")
    cache = shm / f"forebay-{os.getpid()}"
    gateway = GatewayProcess(tmp_path, "t", [posix_tier(root)], capacity="64MiB", cache=cache)
    try:
        yield gateway.start()
    finally:
        gateway.close()
        with contextlib.suppress(FileNotFoundError):
            gateway.wipe()


@pytest.mark.usefixtures("no_streams")
def test_a_cache_on_tmpfs(on_tmpfs: GatewayProcess) -> None:
    with forebay.Client(on_tmpfs.address) as client:
        with client.checkpoint("r", 1, lane="fd") as part:
            part.put("x", BIG)
            part.put("y", in_pages(BIG, 7))
            part.commit(wait="pfs", timeout=30)
        assert client.open("r", 1, lane="fd").read("x") == client.open("r", 1, lane="fd").read("y") == BIG
    assert "checked copy" not in on_tmpfs.tail()


def test_memory_that_cannot_be_put(gateway: GatewayProcess) -> None:
    with forebay.Client(gateway.address) as client:
        part = client.checkpoint("r", 1, session="s", lane="fd")
        with pytest.raises(InvalidArgument, match="C-contiguous"):
            part.put("x", numpy.zeros((2000, 2000))[:, ::2])
        with pytest.raises(InvalidArgument):
            part.put("x", object())
        with mmap.mmap(-1, 2 * MIB) as memory:
            part.put("x", memory)
        part.abort()
