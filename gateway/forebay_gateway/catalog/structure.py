"""Does every page of data.mdb fit the tree that it is in? LMDB has no page checksums and believes what it reads: a flipped bit
in a page's head, a node or the free list ends in a crash, or in a page that is in use being written over.

    free list, list of databases, each database: pages by their numbers and kinds, nodes within their page, keys in order and
    within what the page above says, counts as the tree's record has them -> no page twice, none both free and in use

Owns the look at the raw file below one meta page; of what values mean it knows the free list's alone. Blocking.

Layout (LMDB 0.9, mdb.c: MDB_page, MDB_db, MDB_node), in the machine's byte order.
"""

import os
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from forebay_gateway.catalog.schema import CatalogDamaged

PAGE = struct.Struct("=QHHHH")  # number, pad, flags, lower, upper; of an overflow page the last two are a count of pages
NODE = struct.Struct("=HHHH")  # size of the data or, in a branch, the page below: low, high; flags; length of the key
TREE = struct.Struct("=IHHQQQQQ")  # pad (page size, in a meta page's first), flags, depth, 3 counts, entries, root
NO_PAGE = 2**64 - 1
META_PAGES = 2
BRANCH, LEAF, OVERFLOW = 0x01, 0x02, 0x04
BIG_DATA, SUB_DATABASE = 0x01, 0x02

_NUMBER = struct.Struct("=Q")
_FREE_FLAGS = 0x08  # keys are numbers, compared as such
_KEY_BYTES_MAX = 511
_DEPTH_MAX = 32  # LMDB's own limit
_NO_BOUND = (None, None)
_Key = bytes | int
_Bounds = tuple[_Key | None, _Key | None]


@dataclass(frozen=True, slots=True)
class Tree:
    """A B+tree's record: in a meta page, or the value of a database's name."""

    flags: int
    depth: int
    branch_pages: int
    leaf_pages: int
    overflow_pages: int
    entries: int
    root: int

    @classmethod
    def decode(cls, data: bytes) -> "Tree":
        """Raises struct.error."""
        return cls(*TREE.unpack(data)[1:])


@dataclass(frozen=True, slots=True)
class Meta:
    """What a meta page says."""

    page_bytes: int
    free: Tree
    main: Tree
    last_page: int
    txn: int


@dataclass(frozen=True, slots=True)
class Node:
    """One entry of a page. `size` of its data; `at` its place in the page, `body` that of its data."""

    key: bytes
    flags: int
    size: int
    at: int
    body: int
    child: int  # in a branch


def check_trees(descriptor: int, meta: Meta) -> None:
    """Raise CatalogDamaged unless all that can be reached from the meta page fits together."""
    try:
        _Walk(descriptor, meta).check()
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise CatalogDamaged(f"a page of data.mdb is garbage ({error})") from error


def nodes_of(data: bytes, branch: bool) -> Iterator[Node]:
    """The nodes of a branch or leaf page, in the order of their keys. Raises struct.error."""
    lower = PAGE.unpack_from(data)[3]
    for index in range((lower - PAGE.size) // 2):
        (at,) = struct.unpack_from("=H", data, PAGE.size + 2 * index)
        low, high, flags, key_bytes = NODE.unpack_from(data, at)
        begin = at + NODE.size
        size = low | high << 16
        child = size | flags << 32 if branch else 0
        yield Node(data[begin : begin + key_bytes], flags, size, at, begin + key_bytes, child)


class _Walk:
    def __init__(self, descriptor: int, meta: Meta) -> None:
        self._descriptor, self._meta = descriptor, meta
        self._end = min(meta.last_page + 1, -(-os.fstat(descriptor).st_size // meta.page_bytes))
        self._seen = bytearray(self._end)  # of each page that may be read: whether it has its place
        self._databases: list[tuple[str, Tree]] = []
        self._free: list[tuple[int, bytes]] = []

    def check(self) -> None:
        self._tree("the free list", self._meta.free, _FREE_FLAGS)
        self._tree("the list of databases", self._meta.main, 0)
        for name, tree in self._databases:
            self._tree(name, tree, 0)
        for txn, listed in self._free:
            self._check_free(txn, listed)

    def _tree(self, name: str, tree: Tree, flags: int) -> None:
        counted = [0, 0, 0, 0]  # as the record has them
        if tree.flags != flags or tree.depth > _DEPTH_MAX or (tree.root == NO_PAGE) != (tree.depth == 0):
            raise CatalogDamaged("a tree of data.mdb has an impossible record", tree=name)
        waiting: list[tuple[int, int, _Bounds]] = [] if tree.root == NO_PAGE else [(tree.root, 1, _NO_BOUND)]
        while waiting:
            number, depth, bounds = waiting.pop()
            branch = depth < tree.depth
            data = self._page(number, BRANCH if branch else LEAF)
            nodes = self._nodes(number, data, branch)
            keys = self._keys(number, nodes, branch, bounds, bool(flags))
            if branch:
                counted[0] += 1
                highs = [*keys[1:], bounds[1]]
                waiting += [(node.child, depth + 1, (low, high)) for node, low, high in zip(nodes, keys, highs, strict=True)]
                continue
            counted[1] += 1
            counted[3] += len(nodes)
            for node in nodes:
                counted[2] += self._value(tree, number, data, node)
        if counted != [tree.branch_pages, tree.leaf_pages, tree.overflow_pages, tree.entries]:
            raise CatalogDamaged("a tree of data.mdb has other pages or entries than its record counts", tree=name)

    def _page(self, number: int, kind: int) -> bytes:
        self._claim(number)
        data = os.pread(self._descriptor, self._meta.page_bytes, number * self._meta.page_bytes)
        if len(data) < self._meta.page_bytes:
            raise CatalogDamaged("data.mdb is cut off: a page that is in use lies behind its end", page=number)
        own, _, flags, lower, upper = PAGE.unpack_from(data)
        if own != number or flags != kind:
            raise CatalogDamaged("a page of data.mdb is garbage", page=number)
        if kind != OVERFLOW and not (PAGE.size <= lower <= upper <= len(data) and lower % 2 == 0):
            raise CatalogDamaged("a page of data.mdb has an impossible head", page=number)
        return data

    def _claim(self, first: int, count: int = 1) -> None:
        """Pages that have their place now, and had none before."""
        if first < META_PAGES or first + count - 1 > self._meta.last_page:
            raise CatalogDamaged("data.mdb's tree is tangled", page=first)
        if first + count > self._end:
            raise CatalogDamaged("data.mdb is cut off: a page that is in use lies behind its end", page=first)
        if any(self._seen[first : first + count]):
            raise CatalogDamaged("data.mdb's tree is tangled: a page is in two places", page=first)
        self._seen[first : first + count] = b"\1" * count

    def _nodes(self, number: int, data: bytes, branch: bool) -> list[Node]:
        nodes = list(nodes_of(data, branch))
        end = PAGE.unpack_from(data)[4]
        for node in sorted(nodes, key=lambda node: node.at):
            inline = 0 if branch else _NUMBER.size if node.flags & BIG_DATA else node.size
            if node.at != end or len(node.key) > _KEY_BYTES_MAX:
                raise CatalogDamaged("entries of a page of data.mdb do not lie one behind the other", page=number)
            end = node.body + inline + (node.body + inline) % 2
        if not nodes or end != len(data):
            raise CatalogDamaged("entries of a page of data.mdb do not fill it", page=number)
        return nodes

    def _keys(self, number: int, nodes: list[Node], branch: bool, bounds: _Bounds, numbers: bool) -> list[_Key | None]:
        """In order and within the bounds. A branch's first key is its lower bound, whatever is written there."""
        keys: list[_Key | None] = [int.from_bytes(node.key, sys.byteorder) if numbers else node.key for node in nodes]
        if any(not node.key or (numbers and len(node.key) != _NUMBER.size) for node in nodes[branch:]):
            raise CatalogDamaged("a key in data.mdb has an impossible length", page=number)
        if branch:
            keys[0] = bounds[0]
        low, high = bounds
        before = low
        for index, key in enumerate(keys):
            first = index == 0
            if before is not None and key is not None and (key < before or (key == before and not first)):  # type: ignore[operator]
                raise CatalogDamaged("keys in data.mdb are out of order", page=number)
            before = key
        if high is not None and before is not None and before >= high:  # type: ignore[operator]
            raise CatalogDamaged("keys in data.mdb are out of order", page=number)
        return keys

    def _value(self, tree: Tree, number: int, data: bytes, node: Node) -> int:
        """Look at one entry of a leaf; how many overflow pages it has."""
        is_name, is_free = tree is self._meta.main, tree is self._meta.free
        if node.flags != (SUB_DATABASE if is_name else node.flags & BIG_DATA):
            raise CatalogDamaged("an entry of data.mdb is of an impossible kind", page=number)
        if is_name:
            if node.size != TREE.size:
                raise CatalogDamaged("an entry of data.mdb is of an impossible kind", page=number)
            self._databases.append((node.key.decode(), Tree.decode(data[node.body : node.body + node.size])))
        if not node.flags & BIG_DATA or is_name:
            if is_free:
                self._free.append((int.from_bytes(node.key, sys.byteorder), data[node.body : node.body + node.size]))
            return 0
        (first,) = _NUMBER.unpack_from(data, node.body)
        head = self._page(first, OVERFLOW)
        _, _, _, low, high = PAGE.unpack_from(head)
        count: int = low | high << 16
        if count * self._meta.page_bytes < PAGE.size + node.size:
            raise CatalogDamaged("a value in data.mdb is longer than its pages", page=first)
        self._claim(first + 1, count - 1)
        if is_free:
            at = first * self._meta.page_bytes + PAGE.size
            self._free.append((int.from_bytes(node.key, sys.byteorder), os.pread(self._descriptor, node.size, at)))
        return count

    def _check_free(self, txn: int, listed: bytes) -> None:
        """Pages that a transaction freed: a count, then their numbers, the highest first."""
        (count,) = _NUMBER.unpack_from(listed)
        if txn > self._meta.txn or _NUMBER.size * (count + 1) > len(listed):
            raise CatalogDamaged("the free list of data.mdb is garbage", txn=txn)
        numbers = struct.unpack_from(f"={count}Q", listed, _NUMBER.size)
        for before, number in zip((self._meta.last_page + 1, *numbers), numbers, strict=False):
            if not META_PAGES <= number < before:
                raise CatalogDamaged("the free list of data.mdb is garbage", txn=txn)
            if number >= self._end:  # freed before it was ever written
                continue
            if self._seen[number]:
                raise CatalogDamaged("a page of data.mdb is in use, and in the free list", page=number)
            self._seen[number] = 1
