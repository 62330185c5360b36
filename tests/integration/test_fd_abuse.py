"""Clients of the fd lane that lie, die, or keep what they should give back: typed errors, nothing left, promises intact."""

import contextlib
import ctypes
import mmap
import os
import pwd
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay.errors import Corrupt, ForebayError, InvalidArgument, NotFound, PermissionDenied, Unavailable, Unsupported
from forebay_wire.checksums import crc32c
from forebay_wire.v1 import gateway_pb2 as pb
from integration.conftest import assert_clean_log
from integration.fd_kit import BLOCK, RawLease, fd_socket, table, write
from integration.kit import (
    CHUNK,
    SMALL_CHUNKS,
    Leftovers,
    Raw,
    assert_clear,
    eventually,
    held,
    part_ref,
    some_bytes,
    whole_put,
)

DATA = some_bytes(5 * CHUNK + 1234, "fd")
OTHER = some_bytes(len(DATA), "fd, other")


@pytest.fixture(scope="module")
def gateway() -> Iterator[GatewayProcess]:
    # Not below pytest's private directory: another user has to find the sockets.
    with tempfile.TemporaryDirectory(prefix="fb-") as name:
        directory = Path(name)
        directory.chmod(0o755)
        (directory / "pfs").mkdir()
        made = GatewayProcess(
            directory, "a", [posix_tier(directory / "pfs")], cache_keys=SMALL_CHUNKS, node_keys='stream_timeout = "2s"'
        )
        with made:
            with Raw(made) as raw:  # its mover runs from here on
                raw.put(whole_put(part_ref("first"), DATA))
                raw.commit(part_ref("first"), {"shard.bin": DATA})
            with forebay.Client(made.address) as client:
                client.wait("first", 1, "pfs", timeout=30)
            yield made
        assert_clean_log(made)


@pytest.fixture
def raw(gateway: GatewayProcess) -> Iterator[Raw]:
    with Raw(gateway) as raw:
        yield raw


@pytest.fixture
def left(gateway: GatewayProcess, raw: Raw) -> Iterator[Leftovers]:
    left = Leftovers(gateway)
    yield left
    left.close()


@pytest.fixture
def part(request: pytest.FixtureRequest) -> pb.PartRef:
    return part_ref(f"fd/{abs(hash(request.node.name)):x}-{secrets.token_hex(4)}")


@pytest.fixture
def lease(gateway: GatewayProcess, raw: Raw, left: Leftovers) -> Iterator[RawLease]:
    with RawLease(gateway, raw) as lease:
        yield lease


def abort(raw: Raw, part: pb.PartRef) -> None:
    raw.call("AbortPart", pb.AbortPartRequest(part=part), pb.AbortPartResponse)


def committed(gateway: GatewayProcess, raw: Raw, part: pb.PartRef, data: bytes = DATA) -> None:
    """Committed, drained, and bit-exact from both levels and by both lanes."""
    raw.commit(part, {"shard.bin": data})
    with forebay.Client(gateway.address) as client:
        client.wait(part.run, 1, "pfs", timeout=30)
        for source, lane in (("cache", "stream"), ("cache", "fd"), ("pfs", "stream")):
            assert client.open(part.run, 1, source=source, lane=lane).read("shard.bin") == data


def test_by_the_book(gateway: GatewayProcess, raw: Raw, lease: RawLease, part: pb.PartRef) -> None:
    layout = lease.open(part, DATA).opened.layout
    assert (layout.chunk_size, layout.block_size, layout.progress_s) == (CHUNK, BLOCK, 2.0)
    with lease.descriptor() as descriptor:
        write(descriptor, DATA)
        with pytest.raises(PermissionError):  # write-only: it cannot be mapped either
            mmap.mmap(descriptor, BLOCK, mmap.MAP_SHARED, mmap.PROT_WRITE)
        with pytest.raises(OSError, match="Bad file"):
            os.pread(descriptor, 1, 0)
    sealed = lease.seal(DATA)
    assert not sealed.copied and sealed.receipt == pb.Receipt(
        name="shard.bin", size=len(DATA), crc32c=crc32c(DATA), level="cache"
    )
    assert lease.is_over()
    committed(gateway, raw, part)


def keep_descriptor(descriptor: int) -> Callable[[bytes], None]:
    kept = os.dup(descriptor)

    def act(data: bytes) -> None:
        if data:
            write(kept, data)
        else:
            os.close(kept)

    return act


def keep_in_a_child(descriptor: int) -> Callable[[bytes], None]:
    code = "import os,sys\nwhile data := sys.stdin.buffer.read(): os.pwrite(int(sys.argv[1]), data, 0)\n"
    child = subprocess.Popen([sys.executable, "-c", code, str(descriptor)], stdin=subprocess.PIPE, pass_fds=[descriptor])
    assert child.stdin is not None
    pipe = child.stdin

    def act(data: bytes) -> None:
        if data:
            pipe.write(data)
            pipe.flush()
        else:
            pipe.close()
            assert child.wait(10) == 0

    return act


def keep_in_a_socket(descriptor: int) -> Callable[[bytes], None]:
    near, far = socket.socketpair()
    socket.send_fds(near, [b"x"], [descriptor])

    def act(data: bytes) -> None:
        if data:
            _, (kept,), _, _ = socket.recv_fds(far, 1, 1)
            write(kept, data)
            os.close(kept)
        else:
            near.close()
            far.close()

    return act


def keep_a_mapping(descriptor: int) -> Callable[[bytes], None]:
    """Only root or the gateway's own user can open the file anew, for reading and writing, and so map it."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    again = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR)
    address = libc.mmap(None, len(DATA), mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, again, 0)
    os.close(again)
    assert address != ctypes.c_void_p(-1).value

    def act(data: bytes) -> None:
        if data:
            ctypes.memmove(address, data, len(data))
        else:
            libc.munmap(address, len(DATA))

    return act


@pytest.mark.parametrize("keep", [keep_descriptor, keep_in_a_child, keep_in_a_socket, keep_a_mapping])
def test_who_can_still_write_writes_into_nothing(
    gateway: GatewayProcess,
    raw: Raw,
    lease: RawLease,
    part: pb.PartRef,
    left: Leftovers,
    keep: Callable[[int], Callable[[bytes], None]],
) -> None:
    """The shard is sealed as a copy of its own, so what is written later goes nowhere; and the kept file is not left behind."""
    lease.open(part, DATA)
    with lease.descriptor() as descriptor:
        write(descriptor, DATA)
        act = keep(descriptor)
    try:
        assert lease.seal(DATA).copied
        act(OTHER)
    finally:
        act(b"")
    assert list((gateway.cache / "incoming").iterdir()) == []
    committed(gateway, raw, part)
    # The sealed file beside the part's; descriptors of the kept file are closed on a thread.
    eventually(left.found, lambda found: len([each for each in found if ".json" not in each]) == 1)


def test_a_copy_of_bytes_that_were_changed_is_refused(
    gateway: GatewayProcess, raw: Raw, lease: RawLease, part: pb.PartRef, left: Leftovers
) -> None:
    lease.open(part, DATA)
    with lease.descriptor() as descriptor:
        write(descriptor, OTHER)
        kept = os.dup(descriptor)
    try:
        with pytest.raises(ForebayError) as caught:
            lease.seal(DATA)
    finally:
        os.close(kept)
    assert_clear(caught.value, Corrupt, "does not hold the bytes")
    left.none()


def nothing(descriptor: int) -> None:
    pass


def half(descriptor: int) -> None:
    write(descriptor, DATA[: 2 * CHUNK])


def a_hole(descriptor: int) -> None:
    write(descriptor, DATA[:CHUNK])
    write(descriptor, DATA[2 * CHUNK :], 2 * CHUNK)


def longer(descriptor: int) -> None:
    write(descriptor, DATA)
    write(descriptor, b"more", 64 * CHUNK)


def shorter(descriptor: int) -> None:
    write(descriptor, DATA)
    os.ftruncate(descriptor, 2 * CHUNK)


@pytest.mark.parametrize(
    "fill,kind,part_of_message",
    [
        (nothing, Corrupt, "does not hold"),
        (half, Corrupt, "does not hold"),
        (a_hole, Corrupt, "does not hold"),
        (longer, InvalidArgument, "length that it was not given"),
        (shorter, InvalidArgument, "length that it was not given"),
    ],
)
def test_less_or_more_than_was_said(
    lease: RawLease,
    part: pb.PartRef,
    left: Leftovers,
    fill: Callable[[int], None],
    kind: type[ForebayError],
    part_of_message: str,
) -> None:
    lease.open(part, DATA)
    with lease.descriptor() as descriptor:
        fill(descriptor)
    with pytest.raises(ForebayError) as caught:
        lease.seal(DATA)
    assert_clear(caught.value, kind, part_of_message)
    assert lease.is_over()
    left.none()


@pytest.mark.parametrize(
    "seal,kind,part_of_message",
    [
        (lambda lease: lease.seal(DATA[:-1]), InvalidArgument, "sizes differ"),
        (lambda lease: lease.seal(DATA + b"x"), InvalidArgument, "sizes differ"),
        (lambda lease: lease.seal(DATA, crc=crc32c(OTHER)), Corrupt, "do not combine"),
        (lambda lease: lease.seal(DATA, chunks=table(OTHER)), Corrupt, "do not combine"),
        (lambda lease: lease.seal(DATA, chunks=table(DATA)[:-4]), InvalidArgument, "does not fit"),
        (lambda lease: lease.seal(DATA, chunks=b""), InvalidArgument, "does not fit"),
    ],
)
def test_a_seal_that_contradicts_itself(
    lease: RawLease,
    part: pb.PartRef,
    left: Leftovers,
    seal: Callable[[RawLease], object],
    kind: type[ForebayError],
    part_of_message: str,
) -> None:
    lease.open(part, DATA)
    with lease.descriptor() as descriptor:
        write(descriptor, DATA)
    with pytest.raises(ForebayError) as caught:
        seal(lease)
    assert_clear(caught.value, kind, part_of_message)
    left.none()


def test_bytes_that_are_not_those_of_their_checksums_go_nowhere(
    gateway: GatewayProcess, raw: Raw, lease: RawLease, part: pb.PartRef
) -> None:
    """A client that lies about its own bytes is acknowledged; what it calls its shard is never handed on as such."""
    with held(gateway):
        lease.open(part, DATA)
        with lease.descriptor() as descriptor:
            write(descriptor, OTHER)
        assert not lease.seal(DATA).copied
        raw.commit(part, {"shard.bin": DATA})
        with forebay.Client(gateway.address) as client:
            for lane in ("fd", "stream"):
                with pytest.raises(Corrupt):
                    client.open(part.run, 1, lane=lane).read("shard.bin")
            assert client.describe(part.run, 1).shards[0].state == "quarantined"
            client.delete(part.run, 1, force=True)


def test_sealing_twice(lease: RawLease, raw: Raw, part: pb.PartRef, left: Leftovers) -> None:
    lease.open(part, DATA)
    with lease.descriptor() as descriptor:
        write(descriptor, DATA)
    lease.seal(DATA)
    with pytest.raises(ForebayError) as caught:
        lease.seal(DATA)
    assert_clear(caught.value, Unavailable, "no such lease")
    abort(raw, part)
    left.none()


def test_sealing_what_was_never_fetched(lease: RawLease, part: pb.PartRef, left: Leftovers) -> None:
    with pytest.raises(ForebayError) as caught:
        lease.open(part, DATA).seal(DATA)
    assert_clear(caught.value, InvalidArgument, "never fetched")
    left.none()


def test_a_name_that_is_there_is_not_opened_again(gateway: GatewayProcess, raw: Raw, lease: RawLease, part: pb.PartRef) -> None:
    raw.put(whole_put(part, DATA))
    answer = lease.open(part, OTHER).opened
    assert (answer.existing.size, answer.existing.crc32c, answer.token, answer.lease) == (len(DATA), crc32c(DATA), b"", b"")
    abort(raw, part)


def test_tokens_are_for_one_connection_and_one_use(
    gateway: GatewayProcess, raw: Raw, lease: RawLease, part: pb.PartRef, left: Leftovers
) -> None:
    lease.open(part, DATA)
    token = lease.opened.token
    assert len(token) == 32
    for offered in (token, secrets.token_bytes(32), bytes(32)):
        with RawLease(gateway, raw) as thief:
            with pytest.raises(ForebayError) as caught:
                thief.trade(offered)
            assert_clear(caught.value, PermissionDenied, "token", "connection")
            assert thief.is_over()
    with lease.descriptor() as descriptor:  # the theft has not used it up
        write(descriptor, DATA)
        lease.socket.sendall(token)  # a sign of life, no more
        lease.socket.settimeout(0.3)
        with pytest.raises(TimeoutError):
            lease.socket.recv(1)
        lease.socket.settimeout(10)
        with RawLease(gateway, raw) as thief, pytest.raises(PermissionDenied):
            thief.trade(token)
    lease.seal(DATA)
    abort(raw, part)
    left.none()


def test_a_wrong_token_ends_the_lease(lease: RawLease, part: pb.PartRef, left: Leftovers) -> None:
    lease.open(part, DATA)
    with pytest.raises(PermissionDenied):
        lease.trade(bytes(32))
    left.none()


def test_a_token_with_more_behind_it(lease: RawLease, part: pb.PartRef, left: Leftovers) -> None:
    lease.open(part, DATA)
    with pytest.raises(InvalidArgument):
        lease.trade(lease.opened.token + b"x")
    left.none()


def test_tickets(gateway: GatewayProcess, raw: Raw, lease: RawLease, part: pb.PartRef, left: Leftovers) -> None:
    lease.open(part, DATA)
    with pytest.raises(ForebayError) as caught:
        lease.open(part, DATA, "another")
    assert_clear(caught.value, InvalidArgument, "has its lease already")
    gone = RawLease(gateway, raw)
    gone.close()
    for ticket in (gone.ticket, b"", secrets.token_bytes(32)):
        lease.ticket = ticket
        with pytest.raises(ForebayError) as caught:
            eventually(lambda: lease.open(part, DATA, "another"), lambda _: False, 1.0)
        assert_clear(caught.value, Unavailable, "ticket")
    lease.close()
    left.none()


@pytest.mark.parametrize("fetched", [False, True])
def test_who_goes_without_a_word_leaves_nothing(lease: RawLease, part: pb.PartRef, left: Leftovers, fetched: bool) -> None:
    lease.open(part, DATA)
    assert left.found()
    if fetched:
        descriptor = lease.trade()
        write(descriptor, DATA)
        lease.close()  # and keeps the descriptor: the file has no name any more
        left.none()
        os.close(descriptor)
    lease.close()
    left.none()


def test_who_never_seals_is_ended(lease: RawLease, part: pb.PartRef, left: Leftovers) -> None:
    """Alive for as long as it writes, in whatever order; ended after stream_timeout without, connection and descriptor kept."""
    lease.open(part, DATA)
    with lease.descriptor() as descriptor:
        for at in (5, 0, 3, 1):  # the last one is short
            write(descriptor, DATA[at * CHUNK : (at + 1) * CHUNK], at * CHUNK)
            lease.socket.send(b".")
            lease.socket.settimeout(0.8)
            with pytest.raises(TimeoutError):
                lease.socket.recv(1)
        lease.socket.settimeout(10)
        assert lease.is_over()
        left.none()
    with pytest.raises(Unavailable):
        lease.seal(DATA)


def test_who_only_says_that_it_goes_on_is_ended(gateway: GatewayProcess, raw: Raw, part: pb.PartRef, left: Leftovers) -> None:
    """Signs of life without a chunk more in the file hold no space for ever."""

    def drip(descriptor: int, turn: int) -> None:
        write(descriptor, b"x", turn * BLOCK)

    def same_again(descriptor: int, _: int) -> None:
        write(descriptor, DATA[:CHUNK])

    def all_at_once(descriptor: int, turn: int) -> None:
        if turn == 0:
            write(descriptor, DATA)

    acts: list[Callable[[int, int], None]] = [lambda *_: None, drip, same_again, all_at_once]
    with contextlib.ExitStack() as stack:
        alive = []
        for number, act in enumerate(acts):
            mine = stack.enter_context(RawLease(gateway, raw)).open(part, DATA, f"{number}.bin")
            alive.append((mine, act, stack.enter_context(mine.descriptor())))
            mine.socket.settimeout(0.1)
        for turn in range(100):
            for entry in list(alive):
                mine, act, descriptor = entry
                act(descriptor, turn)
                with contextlib.suppress(BrokenPipeError):
                    mine.socket.send(b".")
                with contextlib.suppress(TimeoutError):
                    assert mine.is_over()
                    alive.remove(entry)
        assert not alive, "they live on words"
    left.none()


def test_who_never_fetches_or_never_opens_is_ended(
    gateway: GatewayProcess, raw: Raw, lease: RawLease, part: pb.PartRef, left: Leftovers
) -> None:
    lease.open(part, DATA)
    with RawLease(gateway, raw) as idle:
        assert lease.is_over() and idle.is_over()
    left.none(5.0)


def test_an_abort_and_a_commit_while_a_lease_is_open(
    gateway: GatewayProcess, raw: Raw, lease: RawLease, part: pb.PartRef, left: Leftovers
) -> None:
    for end in (lambda: abort(raw, part), lambda: raw.commit(part, {})):
        with RawLease(gateway, raw) as mine:
            mine.open(part, DATA)
            end()
            with mine.descriptor() as descriptor:
                write(descriptor, DATA)
            with pytest.raises(ForebayError) as caught:
                mine.seal(DATA)
            assert_clear(caught.value, type(caught.value), "on its way")
    with forebay.Client(gateway.address) as client:
        client.delete(part.run, 1, force=True)
    left.none()


CLIENT = """
import sys, forebay
address, run = sys.argv[1:]
class Slow:  # a file that is read for ever
    def __init__(self): self.at = 0
    def seekable(self): return True
    def tell(self): return self.at
    def seek(self, offset, whence=0): self.at = (1 << 30) if whence == 2 else offset; return self.at
    def read(self, size):
        import time
        print("reading", flush=True)
        time.sleep(0.2)
        return bytes(size)
with forebay.Client(address).checkpoint(run, 1, session="s", lane="fd") as part:
    part.put("shard.bin", Slow())
"""


def test_a_client_that_is_killed_leaves_nothing(gateway: GatewayProcess, left: Leftovers, part: pb.PartRef) -> None:
    child = subprocess.Popen([sys.executable, "-c", CLIENT, gateway.address, part.run], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        for _ in range(3):
            assert child.stdout.readline()
        assert left.found()
        child.send_signal(signal.SIGKILL)
    finally:
        child.kill()
        child.wait(10)
        child.stdout.close()
    left.none()


def test_a_crowd_of_connections(gateway: GatewayProcess, raw: Raw, left: Leftovers, part: pb.PartRef) -> None:
    """More than there is room for: those are turned away, the others work, and all is well when they have gone."""
    with contextlib.ExitStack() as stack:
        tickets = []
        for _ in range(400):
            made = stack.enter_context(socket.socket(socket.AF_UNIX))
            made.settimeout(10)
            made.connect(str(fd_socket(gateway)))
            tickets.append(made.recv(32))
        assert 200 <= sum(len(ticket) == 32 for ticket in tickets) <= 256
        assert len(set(filter(None, tickets))) == sum(map(bool, tickets))
        with forebay.Client(gateway.address) as client, client.checkpoint(part.run, 1, session="s") as ckpt:
            ckpt.put("shard.bin", DATA * 8)  # by the stream lane, for want of a place
    left.none()
    with forebay.Client(gateway.address) as client, client.checkpoint(part.run, 1, session="s", lane="fd") as ckpt:
        ckpt.put("shard.bin", DATA)
    left.none()


def test_reading_what_is_not_to_be_had(gateway: GatewayProcess, raw: Raw, left: Leftovers) -> None:
    cases: list[tuple[str, str, int, str, type[ForebayError]]] = [
        ("first", "nope", 1, "", NotFound),
        ("nobody", "shard.bin", 1, "", NotFound),
        ("first", "shard.bin", len(DATA) + 1, "", InvalidArgument),
        ("first", "shard.bin", 1, "pfs", Unsupported),
        ("", "shard.bin", 1, "", InvalidArgument),
    ]
    for run, name, length, source, kind in cases:
        with RawLease(gateway, raw) as lease, pytest.raises(ForebayError) as caught:
            lease.open_read(run, name, length, source)
        assert_clear(caught.value, kind)
    left.none()


def test_a_descriptor_for_reading_is_for_nothing_else(gateway: GatewayProcess, raw: Raw, left: Leftovers) -> None:
    with RawLease(gateway, raw) as lease:
        answer = lease.open_read("first", "shard.bin", len(DATA))
        assert (answer.size, answer.crc32c, answer.chunk_crcs) == (len(DATA), crc32c(DATA), table(DATA))
        descriptor = lease.trade(answer.token)
        try:
            with pytest.raises(OSError, match="Bad file"):
                os.pwrite(descriptor, b"x", 0)
            with mmap.mmap(-1, CHUNK) as memory:
                os.preadv(descriptor, [memory], 0)
                assert memory[:] == DATA[:CHUNK]
        finally:
            os.close(descriptor)
    left.none()


IN_A_CHILD = """
import os, socket, sys
mine = socket.socket(fileno=int(sys.argv[1]))
mine.setblocking(True)
mine.sendall(bytes.fromhex(sys.argv[2]))
data, descriptors, _, _ = socket.recv_fds(mine, 4096, 1)
print(len(descriptors), b"permission_denied" in data)
"""


def test_a_token_from_another_process(gateway: GatewayProcess, lease: RawLease, part: pb.PartRef, left: Leftovers) -> None:
    """Of the same user, over the very connection, with the right token: it is not the process that connected."""
    lease.open(part, DATA)
    command = [sys.executable, "-c", IN_A_CHILD, str(lease.socket.fileno()), lease.opened.token.hex()]
    child = subprocess.run(command, capture_output=True, text=True, timeout=60, pass_fds=[lease.socket.fileno()])
    assert child.stdout == "0 True\n", child.stderr
    assert lease.is_over()
    left.none()


OF_A_CHILD = """
import os, socket, sys, time
mine, descriptor, chunk, count = socket.socket(fileno=int(sys.argv[1])), *map(int, sys.argv[2:])
done = 0
try:
    while done < count:
        os.pwrite(descriptor, bytes(chunk), done * chunk)
        mine.send(b".")
        done += 1
        time.sleep(0.5)
except BrokenPipeError:
    pass
print(done)
"""


def test_signs_of_life_from_another_process(lease: RawLease, part: pb.PartRef, left: Leftovers) -> None:
    """A child that has inherited connection and file, and goes on, does not keep the lease of a parent that hangs."""
    count = 30
    lease.open(part, b"", size=count * CHUNK)
    with lease.descriptor() as descriptor:
        write(descriptor, b"")  # no O_DIRECT from here on
        numbers = [lease.socket.fileno(), descriptor]
        command = [sys.executable, "-c", OF_A_CHILD, *map(str, [*numbers, CHUNK, count])]
        child = subprocess.run(command, pass_fds=numbers, capture_output=True, text=True, timeout=120)
    assert 0 < int(child.stdout) < count, child.stderr
    assert lease.is_over()
    left.none()


TOO_LATE = """
import os, socket, sys
from forebay_wire.v1 import gateway_pb2 as pb
import forebay
from forebay.lanes.fd import Lease
address, run, user = sys.argv[1:]
forebay.Client(address).runs()
os.setgroups([int(group) for group in sys.stdin.readline().split()]); os.setgid(int(user)); os.setuid(int(user))
client = forebay.Client(address)
with Lease(client._connection, "test") as lease:
    part = pb.PartRef(run=run, step=1, session="s", writer=0, writers=1)
    opened = lease.call(
        lambda stubs: stubs.gateway.OpenShard, pb.OpenShardRequest(ticket=lease.ticket, part=part, name="x", size=1 << 20)
    )
    print("open", flush=True)
    sys.stdin.readline()
    try:
        os.close(lease.descriptor(opened.token, opened.layout))
        print("traded", flush=True)
    except forebay.PermissionDenied as error:
        print("refused", flush=True)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize(("groups", "wanted"), [("", "refused"), ("GROUP", "traded")])
def test_a_user_who_may_not_connect_any_more(
    gateway: GatewayProcess, part: pb.PartRef, left: Leftovers, groups: str, wanted: str
) -> None:
    """His connection is older than the socket's mode: what counts is whether he may when he asks for the descriptor."""
    nobody, group = pwd.getpwnam("nobody").pw_uid, 54321
    sockets = (gateway.socket, fd_socket(gateway))
    for path in sockets:
        path.chmod(0o666)
        os.chown(path, 0, group)
    command = [sys.executable, "-c", TOO_LATE, gateway.address, part.run, str(nobody)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        try:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write(groups.replace("GROUP", str(group)) + "\n")
            child.stdin.flush()
            assert child.stdout.readline() == "open\n"
            for path in sockets:
                path.chmod(0o660)
            child.stdin.write("\n")
            child.stdin.flush()
            assert child.stdout.readline() == f"{wanted}\n"
        finally:
            child.kill()
            for path in sockets:
                path.chmod(0o660)
                os.chown(path, 0, 0)
    left.none()


OTHER_USER = """
import os, sys, forebay, socket
from forebay import Client, care, writer, reader  # now: the other user may not be able to read the interpreter's files
address, run, token, fd_socket, user = sys.argv[1:]
Client(address).runs()
os.setgroups([]); os.setgid(int(user)); os.setuid(int(user))
with socket.socket(socket.AF_UNIX) as mine:
    mine.connect(fd_socket)
    mine.recv(32, socket.MSG_WAITALL)
    mine.sendall(bytes.fromhex(token))
    data, descriptors, _, _ = socket.recv_fds(mine, 4096, 1)
    assert not descriptors and b"permission_denied" in data, (data, descriptors)
original = os.pwrite
def pwrite(descriptor, data, offset):
    for flags in (os.O_RDWR, os.O_WRONLY, os.O_RDONLY):
        try:
            os.open(f"/proc/self/fd/{descriptor}", flags)
        except PermissionError:
            continue
        raise AssertionError("the descriptor can be opened anew")
    return original(descriptor, data, offset)
os.pwrite = pwrite
with forebay.Client(address) as client:
    with client.checkpoint(run, 1, session="theirs", lane="fd") as part:
        part.put("theirs.bin", b"x" * 100_000)
        part.commit()
    assert client.open(run, 1, lane="fd").read("theirs.bin") == b"x" * 100_000
print("done")
"""


@pytest.mark.skipif(os.getuid() != 0, reason="becoming another user needs root")
def test_another_user(gateway: GatewayProcess, lease: RawLease, raw: Raw, part: pb.PartRef, left: Leftovers) -> None:
    """An unprivileged trainer beside a root gateway: its own leases work, another's token does not, and a descriptor is no
    way to the file under another mode."""
    lease.open(part, DATA)
    nobody = pwd.getpwnam("nobody").pw_uid
    sockets = (gateway.socket, fd_socket(gateway))
    run = f"{part.run}/theirs"
    for path in sockets:
        path.chmod(0o666)
    try:
        arguments = [gateway.address, run, lease.opened.token.hex(), str(fd_socket(gateway)), str(nobody)]
        child = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(OTHER_USER), *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
    finally:
        for path in sockets:
            path.chmod(0o660)
    assert child.stdout == "done\n", child.stderr
    lease.close()
    with forebay.Client(gateway.address) as client:
        client.delete(run, 1, force=True)
    left.none()
