"""The LMDB file under the catalog: opening, ownership, growth, space. Blocking.

Owns the file's settings (synced commits, no writemap), who may open it, that its map grows by itself, and that its disk blocks
are there before a commit needs them. Does not own rows, nor which thread does what (env).
"""

import asyncio
import contextlib
import errno
import fcntl
import mmap
import os
import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import lmdb

from forebay_gateway.base import failpoints
from forebay_gateway.base.durable import sync_dir
from forebay_gateway.base.heap import unmap_resident
from forebay_gateway.catalog import pages, schema
from forebay_gateway.catalog.queries import ReadTxn
from forebay_gateway.catalog.schema import CatalogDamaged, Databases, TierNumbers, Transaction
from forebay_gateway.core.errors import DiskFull, StartupError, Unavailable

DATA_NAME = "data.mdb"
OWNER_NAME = "owner"  # locked by the process that has the catalog open; holds the node's id once the catalog was created
READERS_MAX = 126
MAPPED_BYTES_MAX = 128 << 20
NO_SPACE_RETRY_S = 5.0
MAIN_DATABASES_MAX = len(schema.DATABASE_NAMES) + 4
# What LMDB says of a file it cannot trust; every other error of its says something of the machine. A panic too: it follows a
# commit whose write failed, and the file is as good as the last commit that did not.
_DAMAGE = (
    lmdb.InvalidError,
    lmdb.CorruptedError,
    lmdb.PageNotFoundError,
    lmdb.PageFullError,
    lmdb.VersionMismatchError,
    lmdb.CursorFullError,
    lmdb.IncompatibleError,  # a database's record names another kind of tree
    lmdb.BadDbiError,  # it has gone from the list of databases
    lmdb.BadTxnError,  # what a transaction says after it has met one of these
)
_NO_ROW = (UnicodeDecodeError, struct.error)  # of keys and values that no codec checks
_ENDED = "the read transaction has ended"
_OVERSTAYED = "a catalog read was held across an await; read what you need, leave the block, then await"


def is_damage(error: BaseException) -> bool:
    """Whether it says that the catalog cannot be trusted any more, rather than that the machine lacks something."""
    return isinstance(error, (CatalogDamaged, *_DAMAGE))


def as_damage(error: BaseException) -> CatalogDamaged | None:
    """What an error means that a transaction met, where it means that the catalog is damaged."""
    if isinstance(error, _DAMAGE):
        return CatalogDamaged(f"LMDB cannot read it ({error})")
    if isinstance(error, _NO_ROW):
        return CatalogDamaged(f"a key or value is none ({error})")
    return None


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes of the map and of the file, in bytes."""

    map_size: int
    max_map_size: int
    reserve: int  # blocks kept allocated behind the last used page


class Read(contextlib.AbstractContextManager[ReadTxn]):
    """One snapshot. On an event loop it must end before the loop runs anything else, and is ended by force otherwise."""

    __slots__ = ("_open", "_storage", "_txn", "_view", "_watch")

    def __init__(self, storage: "Storage") -> None:
        self._storage = storage
        self._open = False
        self._watch: asyncio.Handle | None = None

    def __enter__(self) -> ReadTxn:
        self._storage.map_lock.acquire()
        try:
            self._txn = self._storage.begin_read()
        except BaseException as error:
            self._storage.map_lock.release()
            if isinstance(error, lmdb.PanicError):  # seen here before the writer thread has told why
                raise Unavailable(f"the catalog failed and the gateway has to be restarted ({error})") from error
            raise
        self._open = True
        self._view = ReadTxn(self._txn, self._storage.databases, self._storage.tiers)
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return self._view  # a plain thread has no await to be held across
        # Runs only if the loop gets control again while the snapshot is held, which is what must not be.
        self._watch = loop.call_soon(self._end, _OVERSTAYED)
        return self._view

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self._watch is not None:
            self._watch.cancel()
        overstayed = not self._open
        self._end(_ENDED)
        if error is not None and (damage := as_damage(error)) is not None:
            if not isinstance(error, _NO_ROW):
                self._storage.on_damage(damage)
            raise damage from error
        if isinstance(error, CatalogDamaged):
            self._storage.on_damage(error)
        if overstayed and error is None:
            raise RuntimeError(_OVERSTAYED)

    def _end(self, reason: str) -> None:
        if self._open:
            self._open = False
            self._view.end(reason)
            self._txn.abort()
            self._storage.map_lock.release()


class Storage:
    """The open file. `map_lock` is held by every live read, and by whoever moves the map."""

    def __init__(self, path: Path, limits: Limits, owner: int) -> None:
        self._limits = limits
        self._path = (path / DATA_NAME).resolve()
        self._owner = owner
        self._env = _open_environment(path, limits)
        self.map_lock = threading.RLock()
        self.stale_readers = self._env.reader_check()
        self._file = os.open(path / DATA_NAME, os.O_RDWR | os.O_CLOEXEC)
        self._page_bytes = self._env.stat()["psize"]
        self.file_bytes = os.fstat(self._file).st_size
        self.databases: Databases
        self.tiers: TierNumbers
        # Called on any thread; not for what no codec checks: that may also be an argument that nothing can be packed of.
        self.on_damage: Callable[[CatalogDamaged], None] = lambda error: None

    @classmethod
    def open(cls, path: Path, tiers: Sequence[str], node: str, limits: Limits) -> "Storage":
        """Open or create the catalog in the directory `path`. Raises StartupError, CatalogDamaged."""
        try:
            return cls._open(path, tiers, node, limits)
        except _NO_ROW as error:
            raise CatalogDamaged(f"a key or value is none ({error})", path=path) from error
        except _DAMAGE as error:
            raise CatalogDamaged(f"LMDB cannot open it ({error})", path=path) from error
        except (OSError, lmdb.Error) as error:
            raise StartupError(f"the catalog cannot be opened: {error}", path=path) from error

    @classmethod
    def _open(cls, path: Path, tiers: Sequence[str], node: str, limits: Limits) -> "Storage":
        path.mkdir(parents=True, exist_ok=True)
        owner = _lock_owner(path)
        storage = None
        try:
            created = os.pread(owner, 4096, 0) != b""
            _check_data_file(path / DATA_NAME, created)
            storage = cls(path, limits, owner)
            storage._prepare(tiers, node, created)
            with contextlib.suppress(DiskFull):  # on a full disk it can be read, and each write is refused by itself
                storage.reserve_space()
            if not created:
                _note_created(path, owner, node)
        except BaseException:
            if storage is None:
                os.close(owner)
            else:
                storage.close()
            raise
        return storage

    def _prepare(self, tiers: Sequence[str], node: str, created: bool) -> None:
        """Check format and node, open the databases, number new tiers. Writes only what is new: a full catalog opens too."""
        try:
            with self._env.begin(write=True) as txn:
                known = created or txn.stat()["entries"] > 0
                if known:
                    self._check_identity(txn, node)
                self._check_names(txn)
                opened = {name: self._env.open_db(name.encode(), txn=txn) for name in schema.DATABASE_NAMES}
                self.databases = Databases(**opened)
                if not known:
                    version = schema.u64(schema.FORMAT_VERSION)
                    txn.put(schema.META_FORMAT, schema.with_checksum(version), db=self.databases.meta)
                    txn.put(schema.META_NODE, schema.with_checksum(node.encode("utf-8")), db=self.databases.meta)
                self.tiers = _number_tiers(txn, self.databases, tiers)
        except lmdb.MapFullError:
            if not self.grow():
                raise
            self._prepare(tiers, node, created)

    def _check_names(self, txn: Transaction) -> None:
        """A name that is none of ours was one, before it was damaged: that database would be made anew, and empty."""
        known = {name.encode() for name in schema.DATABASE_NAMES}
        with txn.cursor() as cursor:
            for name in cursor.iternext(keys=True, values=False):
                if name not in known:
                    raise CatalogDamaged("data.mdb holds a database that no release knows", name=repr(bytes(name)))

    def _check_identity(self, txn: Transaction, node: str) -> None:
        try:
            meta = self._env.open_db(b"meta", txn=txn, create=False)
        except lmdb.NotFoundError as error:
            raise CatalogDamaged("data.mdb holds no catalog") from error
        version, owner = txn.get(schema.META_FORMAT, db=meta), txn.get(schema.META_NODE, db=meta)
        if version is None or owner is None:
            raise CatalogDamaged("data.mdb holds no catalog")
        is_bare = len(version) == len(schema.u64(0))  # as before format 3
        number = schema.number_of(version if is_bare else schema.checked(version, "format"))
        if number != schema.FORMAT_VERSION:
            raise StartupError(
                "the catalog was written by another release; use that one",
                format=number,
                this_release_reads=schema.FORMAT_VERSION,
            )
        name = schema.checked(owner, "node's id").decode("utf-8")
        if name != node:
            raise StartupError("the catalog belongs to another node", node=node, catalog_of=name)

    def read(self) -> Read:
        """A snapshot, as a context manager."""
        return Read(self)

    def begin_read(self) -> Transaction:
        """A read transaction; the caller holds map_lock."""
        return self._env.begin()

    def begin_write(self, parent: Transaction | None = None) -> Transaction:
        """A write transaction, or one nested in `parent`. Only the writer thread calls this."""
        return self._env.begin(write=True, parent=parent)

    def meta_number(self, key: bytes) -> int:
        """A number in `meta`, 0 where it was never set."""
        with self.map_lock, self._env.begin() as txn:
            return schema.number_of(txn.get(key, db=self.databases.meta) or b"")

    def grow(self) -> bool:
        """Double the map, up to its limit; False at the limit. No write transaction may be live; waits for reads to end.

        LMDB asks that no transaction be active in this process while the map moves, and does not check it.
        """
        size = self._env.info()["map_size"]
        if size >= self._limits.max_map_size:
            return False
        with self.map_lock:
            self._env.set_mapsize(min(2 * size, self._limits.max_map_size))
        return True

    def reserve_space(self) -> None:
        """Keep blocks allocated behind the last used page. Raises DiskFull when they run out.

        So a full disk shows here, where it harms nothing, and not inside a commit, whose failed fsync could not be trusted.
        """
        used = self._used_bytes()
        if self.file_bytes - used >= self._limits.reserve:
            return
        self.file_bytes = os.fstat(self._file).st_size  # LMDB may have written behind what was its end when it was opened
        wanted = min(used + 2 * self._limits.reserve, max(self._limits.max_map_size, self.file_bytes))
        try:
            if wanted > self.file_bytes:
                self._allocate(wanted - self.file_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            if self.file_bytes - used < self._limits.reserve // 2:
                raise DiskFull("no space is left for the catalog", retry_after_s=NO_SPACE_RETRY_S) from error
        self.file_bytes = os.fstat(self._file).st_size

    def _allocate(self, length: int) -> None:
        """All of it or nothing: a try that must fail would take what is left from the shards, if only for a moment."""
        stat = os.fstatvfs(self._file)
        if stat.f_bavail * stat.f_frsize < length:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        try:
            os.posix_fallocate(self._file, self.file_bytes, length)
        except OSError:
            os.ftruncate(self._file, self.file_bytes)  # some file systems keep the part that they could allocate
            raise

    def has_last_blocks(self) -> bool:
        """Whether a small change still fits into the blocks that are there: one that frees space must not be refused for
        want of it."""
        return self.file_bytes - self._used_bytes() >= self._limits.reserve // 8

    def used_bytes(self) -> int:
        """Up to the last page that was ever used; freed pages before it are used again first."""
        with self.map_lock:
            return self._used_bytes()

    def _used_bytes(self) -> int:
        # Without the lock, for the writer thread: it alone moves the map, and a long read must not hold up a commit.
        return (self._env.info()["last_pgno"] + 1) * self._page_bytes

    def map_bytes(self) -> int:
        """The map's size now."""
        with self.map_lock:
            return self._env.info()["map_size"]

    def drop_mapped(self) -> None:
        """Take the file's pages off this process's memory where they are many; they stay in the page cache and come back where
        they are read. A pass over all rows would else leave the whole file resident for good."""
        pages = int(Path("/proc/self/statm").read_text().split()[2])  # resident and of files
        if pages * mmap.PAGESIZE < MAPPED_BYTES_MAX:
            return
        name = str(self._path)
        for line in Path("/proc/self/maps").read_text().splitlines():
            if line.endswith(name):
                begin, _, end = line.split(" ", 1)[0].partition("-")
                unmap_resident(int(begin, 16), int(end, 16) - int(begin, 16))

    def check_readers(self) -> None:
        """Free the slots of readers whose process has died: each would keep every page since from being used again."""
        self.stale_readers += self._env.reader_check()

    def close(self) -> None:
        """Let go of the file and of its ownership."""
        with self.map_lock:
            self._env.close()
        os.close(self._file)
        os.close(self._owner)


def _open_environment(path: Path, limits: Limits) -> lmdb.Environment:
    return lmdb.open(
        str(path),
        map_size=limits.map_size,
        max_dbs=MAIN_DATABASES_MAX,
        max_readers=READERS_MAX,
        subdir=True,
        writemap=False,
        sync=True,
        metasync=True,
        lock=True,
        mode=0o640,
    )


def _lock_owner(path: Path) -> int:
    descriptor = os.open(path / OWNER_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if error.errno != errno.EWOULDBLOCK:
            raise
        raise StartupError("the catalog is in use: another gateway has it open", path=path) from None
    return descriptor


def _check_data_file(data: Path, created: bool) -> None:
    if not data.exists() or data.stat().st_size == 0:
        if created:
            raise CatalogDamaged(f"its file {DATA_NAME} is gone or empty", path=data)
        return
    if not created and pages.is_blank(data):
        data.unlink()
        return
    pages.check_file(data)


def _note_created(path: Path, owner: int, node: str) -> None:
    """From now on a missing or empty data file is damage, and never a new catalog."""
    os.pwrite(owner, node.encode("utf-8") + b"\n", 0)
    failpoints.hit("catalog.noted")
    os.fsync(owner)
    sync_dir(path)
    sync_dir(path.parent)


def _number_tiers(txn: Transaction, databases: Databases, tiers: Sequence[str]) -> TierNumbers:
    with txn.cursor(databases.tiers) as cursor:
        numbers = {name.decode("utf-8"): schema.number_of(number) for name, number in cursor}
    for tier in tiers:
        if tier not in numbers:
            numbers[tier] = max(numbers.values(), default=0) + 1
            txn.put(tier.encode("utf-8"), schema.tier_prefix(numbers[tier]), db=databases.tiers)
    return TierNumbers(numbers)
