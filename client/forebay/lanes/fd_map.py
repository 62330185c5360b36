"""A shard mapped over the fd lane: the cache's own file in this process's memory, for as long as something looks at it.

Owns the mapping, its lease, and which chunks of it were checked. The lease ends when the last view of the mapping goes; until
then a thread tells the gateway that it is in use, so that the file is not evicted. Does not own what takes a damaged chunk's
place (the caller reads it by reader.py).
"""

import contextlib
import mmap
import os
import threading
import weakref

from forebay.connection import Connection
from forebay.errors import Unavailable
from forebay.lanes import fd_read
from forebay.lanes.fd import Lease
from forebay.types import Shard
from forebay_wire.checksums import crc32c
from forebay_wire.v1 import gateway_pb2 as pb

SIGN_EVERY_S = 1.0  # a lease itself sends no more than its gateway asks for
_MAP_NORESERVE = 0x4000  # from <linux/mman.h>; the mmap module of Python 3.11 does not name it

_lock = threading.Lock()
_leases: set[Lease] = set()
_wake = threading.Event()
_signer: threading.Thread | None = None


class Mapping(mmap.mmap):
    """Private memory of the file: what is written into it is this process's own, and never the cache's."""


class MappedShard:
    """A shard's bytes, of which view() hands out what it has checked."""

    def __init__(self, connection: Connection, request: pb.OpenReadRequest, shard: Shard) -> None:
        """Raises NotOffered, Unsupported where the file is not to be had, Unavailable."""
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(fd_read.opened(connection, request, shard))
            flags, rights = mmap.MAP_PRIVATE | _MAP_NORESERVE, mmap.PROT_READ | mmap.PROT_WRITE
            self._mapping = Mapping(file.descriptor, shard.size, flags=flags, prot=rights)
            weakref.finalize(self._mapping, _let_go, file.lease, stack.pop_all())
        _keep(file.lease)
        self._size = shard.size
        self._chunk_size = file.chunk_size
        self._crcs = file.crcs
        self._lock = threading.Lock()
        self._checked = bytearray(len(file.crcs))

    def view(self, begin: int, end: int) -> memoryview | None:
        """These bytes, checked against the chunk table; None where they do not match it. They are checked once: a page that the
        kernel drops and reads again later is not looked at."""
        for index in range(begin // self._chunk_size, -(-end // self._chunk_size)):
            if not self._checked[index]:
                low = index * self._chunk_size
                with memoryview(self._mapping) as whole:
                    good = crc32c(whole[low : min(self._size, low + self._chunk_size)]) == self._crcs[index]
                if not good:
                    return None
                self._checked[index] = 1
        return memoryview(self._mapping)[begin:end]


def _keep(lease: Lease) -> None:
    """Have signs of life sent for the lease."""
    global _signer
    with _lock:
        _leases.add(lease)
        if _signer is None or not _signer.is_alive():  # a forked child has no thread
            _signer = threading.Thread(target=_sign, name="forebay-leases", daemon=True)
            _signer.start()


def _sign() -> None:
    global _signer
    while True:
        _wake.wait(SIGN_EVERY_S)
        with _lock:
            _wake.clear()
            if not _leases:
                _signer = None
                return
            leases = list(_leases)
        for lease in leases:
            with contextlib.suppress(Unavailable):  # the gateway went away: the file is still open, its bytes are checked
                lease.alive()


def _let_go(lease: Lease, ends: contextlib.ExitStack) -> None:
    with _lock:
        _leases.discard(lease)
        if not _leases:
            _wake.set()
    ends.close()


def _forget() -> None:
    """In a forked child: the leases, and the thread that holds them, are its parent's."""
    global _lock, _signer
    _lock, _signer = threading.Lock(), None
    for lease in _leases:
        lease.disown()
    _leases.clear()


os.register_at_fork(after_in_child=_forget)
