"""Is this data.mdb whole enough to be mapped? LMDB trusts the file, and a page behind its end kills the process (SIGBUS).

Owns the look at the raw file before LMDB opens it: both meta pages, the file's length and, where it is shorter than its meta
page says, every page that can be reached (structure). A flipped bit inside a page passes here: who suspects one has all be read
by a process that may die of it (trial).

A meta page (LMDB 0.9, mdb.c: MDB_meta), in the machine's byte order: a page's head, magic, version, address, map size, the
records of two trees, last page, transaction.
"""

import os
import struct
from pathlib import Path

from forebay_gateway.catalog.schema import CatalogDamaged
from forebay_gateway.catalog.structure import META_PAGES, NO_PAGE, PAGE, TREE, Meta, Tree, check_trees
from forebay_gateway.core.errors import StartupError

_META = struct.Struct("=IIQQ48s48sQQ")

_MAGIC = 0xBEEFC0DE
_DATA_VERSION = 1
_META_FLAG = 0x08
_SMALLEST_PAGE_BYTES, _LARGEST_PAGE_BYTES = 512, 32768


def check_file(path: Path) -> None:
    """Raise CatalogDamaged unless LMDB can open the file and reach all its pages; StartupError for another LMDB's format."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        meta = newest_meta(descriptor)
        # A page that was freed before it was written may be missing at the end of a sound file: what is in use decides.
        if os.fstat(descriptor).st_size < (meta.last_page + 1) * meta.page_bytes:
            check_trees(descriptor, meta)
    finally:
        os.close(descriptor)


def meta_of(descriptor: int, txn: int) -> Meta | None:
    """The meta page of transaction `txn`; None where two later ones have been committed. Raises CatalogDamaged."""
    first = _read_meta(descriptor, 0, None)
    both = (first, _read_meta(descriptor, 1, first.page_bytes))
    return next((meta for meta in both if meta.txn == txn), None)


def is_blank(path: Path) -> bool:
    """True where the meta pages were never written: creation was cut short by a power loss."""
    with path.open("rb") as file:
        return not any(file.read(META_PAGES * _LARGEST_PAGE_BYTES))


def newest_meta(descriptor: int) -> Meta:
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


def _read_meta(descriptor: int, number: int, page_bytes: int | None) -> Meta:
    data = os.pread(descriptor, PAGE.size + _META.size, number * (page_bytes or 0))
    if len(data) < PAGE.size + _META.size:
        raise CatalogDamaged("data.mdb is cut off within its meta pages", length_bytes=os.fstat(descriptor).st_size)
    page, _, flags, _, _ = PAGE.unpack_from(data)
    magic, version, _, map_bytes, free, main, last_page, txn = _META.unpack_from(data, PAGE.size)
    if page != number or not flags & _META_FLAG or magic != _MAGIC:
        raise CatalogDamaged(f"meta page {number} of data.mdb is garbage")
    if version != _DATA_VERSION:
        raise StartupError("data.mdb was written by an incompatible version of LMDB", format=version, expected=_DATA_VERSION)
    size = TREE.unpack(free)[0]
    trees = Tree.decode(free), Tree.decode(main)
    if not _SMALLEST_PAGE_BYTES <= size <= _LARGEST_PAGE_BYTES or size & (size - 1):
        raise CatalogDamaged(f"meta page {number} of data.mdb has an impossible page size", page_bytes=size)
    sound = last_page * size < map_bytes and (not txn or txn & 1 == number)
    if not sound or any(root != NO_PAGE and not META_PAGES <= root <= last_page for root in (tree.root for tree in trees)):
        raise CatalogDamaged(f"meta page {number} of data.mdb contradicts itself", last_page=last_page, txn=txn)
    return Meta(size, *trees, last_page, txn)
