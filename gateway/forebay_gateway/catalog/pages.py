"""Is this data.mdb whole enough to be mapped? LMDB trusts the file, and a page behind its end kills the process (SIGBUS).

Owns the look at the raw file before LMDB opens it: both meta pages, the file's length and, where it is shorter than its meta
page says, every page that can be reached. Does not own what entries mean. LMDB has no page checksums: a flipped bit inside a
page can pass; the rows' own decoding is the next line.

Layout (LMDB 0.9, mdb.c: MDB_page, MDB_meta, MDB_db, MDB_node), in the machine's byte order: a page begins with its number u64,
pad u16, flags u16, lower u16, upper u16; a meta page goes on with magic, version, address, map size, two MDB_db, last page,
transaction.
"""

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from forebay_gateway.catalog.schema import CatalogDamaged
from forebay_gateway.core.errors import StartupError

_PAGE = struct.Struct("=QHHHH")
_META = struct.Struct("=IIQQ48s48sQQ")
_DB = struct.Struct("=IHHQQQQQ")  # pad (page size, in a meta page's first), flags, depth, 3 counts, entries, root
_NODE = struct.Struct("=HHHH")

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_NO_PAGE = 2**64 - 1
_BRANCH, _LEAF, _OVERFLOW, _META_FLAG = 0x01, 0x02, 0x04, 0x08
_BIG_DATA, _SUB_DATABASE = 0x01, 0x02
_META_PAGES = 2
_SMALLEST_PAGE_BYTES, _LARGEST_PAGE_BYTES = 512, 32768


@dataclass(frozen=True, slots=True)
class _Meta:
    """What a meta page says."""

    page_bytes: int
    roots: tuple[int, int]  # of the free list and of the main database
    last_page: int
    txn: int


def check_file(path: Path) -> None:
    """Raise CatalogDamaged unless LMDB can open the file and reach all its pages; StartupError for another LMDB's format."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        meta = _newest_meta(descriptor)
        # A page that was freed before it was written may be missing at the end of a sound file: what is in use decides.
        if os.fstat(descriptor).st_size < (meta.last_page + 1) * meta.page_bytes:
            _walk(descriptor, meta)
    finally:
        os.close(descriptor)


def is_blank(path: Path) -> bool:
    """True where the meta pages were never written: creation was cut short by a power loss."""
    with path.open("rb") as file:
        return not any(file.read(_META_PAGES * _LARGEST_PAGE_BYTES))


def _newest_meta(descriptor: int) -> _Meta:
    first = _read_meta(descriptor, 0, None)
    second = _read_meta(descriptor, 1, first.page_bytes)
    if first.page_bytes != second.page_bytes or abs(first.txn - second.txn) > 1:
        raise CatalogDamaged("the two meta pages of data.mdb contradict each other", txns=f"{first.txn},{second.txn}")
    older, newer = sorted((first, second), key=lambda meta: meta.txn)
    if older.last_page > newer.last_page:  # LMDB's files never shrink
        raise CatalogDamaged(
            "the two meta pages of data.mdb contradict each other", last_pages=f"{first.last_page},{second.last_page}"
        )
    return newer


def _read_meta(descriptor: int, number: int, page_bytes: int | None) -> _Meta:
    data = os.pread(descriptor, _PAGE.size + _META.size, number * (page_bytes or 0))
    if len(data) < _PAGE.size + _META.size:
        raise CatalogDamaged("data.mdb is cut off within its meta pages", length_bytes=os.fstat(descriptor).st_size)
    page, _, flags, _, _ = _PAGE.unpack_from(data)
    magic, version, _, map_bytes, free, main, last_page, txn = _META.unpack_from(data, _PAGE.size)
    if page != number or not flags & _META_FLAG or magic != _MAGIC:
        raise CatalogDamaged(f"meta page {number} of data.mdb is garbage")
    if version != _DATA_VERSION:
        raise StartupError("data.mdb was written by an incompatible version of LMDB", format=version, expected=_DATA_VERSION)
    size = _DB.unpack(free)[0]
    roots = (_DB.unpack(free)[-1], _DB.unpack(main)[-1])
    if not _SMALLEST_PAGE_BYTES <= size <= _LARGEST_PAGE_BYTES or size & (size - 1):
        raise CatalogDamaged(f"meta page {number} of data.mdb has an impossible page size", page_bytes=size)
    sound = last_page * size < map_bytes and (not txn or txn & 1 == number)
    if not sound or any(root != _NO_PAGE and not _META_PAGES <= root <= last_page for root in roots):
        raise CatalogDamaged(f"meta page {number} of data.mdb contradicts itself", last_page=last_page, txn=txn)
    return _Meta(size, roots, last_page, txn)


def _walk(descriptor: int, meta: _Meta) -> None:
    """Visit every page that can be reached from the roots."""
    waiting = [root for root in meta.roots if root != _NO_PAGE]
    seen: set[int] = set()
    while waiting:
        number = waiting.pop()
        if number in seen or number > meta.last_page:
            raise CatalogDamaged("data.mdb's tree is tangled", page=number)
        seen.add(number)
        data = os.pread(descriptor, meta.page_bytes, number * meta.page_bytes)
        if len(data) < meta.page_bytes:
            raise CatalogDamaged("data.mdb is cut off: a page that is in use lies behind its end", page=number)
        own, _, flags, lower, upper = _PAGE.unpack_from(data)
        if own != number or not flags & (_BRANCH | _LEAF | _OVERFLOW):
            raise CatalogDamaged("a page of data.mdb is garbage", page=number)
        if flags & _OVERFLOW:
            _check_overflow(descriptor, meta, number, lower | upper << 16)
            continue
        try:
            waiting += _children(data, bool(flags & _BRANCH), lower)
        except (struct.error, IndexError) as error:
            raise CatalogDamaged("a page of data.mdb is garbage", page=number) from error


def _check_overflow(descriptor: int, meta: _Meta, number: int, pages: int) -> None:
    if (number + pages) * meta.page_bytes > os.fstat(descriptor).st_size:
        raise CatalogDamaged("data.mdb is cut off: a page that is in use lies behind its end", page=number)


def _children(data: bytes, branch: bool, lower: int) -> list[int]:
    """Pages that the nodes of a branch or leaf page point to."""
    found = []
    for index in range((lower - _PAGE.size) // 2):
        (offset,) = struct.unpack_from("=H", data, _PAGE.size + 2 * index)
        low, high, flags, key_bytes = _NODE.unpack_from(data, offset)
        body = offset + _NODE.size + key_bytes
        if branch:
            found.append(low | high << 16 | flags << 32)
        elif flags & _BIG_DATA:
            found.append(struct.unpack_from("=Q", data, body)[0])
        elif flags & _SUB_DATABASE and (root := _DB.unpack_from(data, body)[-1]) != _NO_PAGE:
            found.append(root)
    return found
