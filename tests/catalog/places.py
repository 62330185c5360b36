"""Where in a catalog's file a bit can flip, by what lies there. The file is sound, and nobody has it open."""

import os
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from forebay_gateway.catalog import pages
from forebay_gateway.catalog.structure import (
    BIG_DATA,
    BRANCH,
    META_PAGES,
    NO_PAGE,
    NODE,
    PAGE,
    SUB_DATABASE,
    Meta,
    Tree,
    nodes_of,
)

Spans = dict[str, list[tuple[int, int]]]  # kind: (offset, length) of bytes in the file
META_HEAD = 16 + 24 + 2 * 48 + 16


def places(path: Path) -> Spans:
    """ "key of NAME" and "value of NAME" for each database, "branch" and "leaf head" and the like, "free page", "slack"."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        return dict(_Places(descriptor, pages.newest_meta(descriptor)).found)
    finally:
        os.close(descriptor)


def flip_bit(path: Path, offset: int, bit: int) -> None:
    """Silently: neither the file's time nor its inode changes."""
    times = path.stat()
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 1 << bit]))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))


def draw(spans: Spans, kind: str, chance: random.Random) -> tuple[int, int]:
    """(offset, bit): any of the kind alike."""
    spans_of = spans[kind]
    offset, length = chance.choices(spans_of, [length for _, length in spans_of])[0]
    return offset + chance.randrange(length), chance.randrange(8)


class _Places:
    def __init__(self, descriptor: int, meta: Meta) -> None:
        self._descriptor, self._meta = descriptor, meta
        self.found: Spans = defaultdict(list)
        self._used = set(range(META_PAGES))
        newest = meta.txn & 1
        self.found["newest meta page"].append((newest * meta.page_bytes, META_HEAD))
        self.found["older meta page"].append(((1 - newest) * meta.page_bytes, META_HEAD))
        self._tree("free list", meta.free)
        self._tree("databases", meta.main)
        free = sorted(set(range(meta.last_page + 1)) - self._used)
        self.found["free page"] = [(number * meta.page_bytes, meta.page_bytes) for number in free]

    def _tree(self, name: str, tree: Tree) -> None:
        if tree.root != NO_PAGE:
            self._page(name, tree.root)

    def _page(self, name: str, number: int) -> None:
        self._used.add(number)
        base = number * self._meta.page_bytes
        data = os.pread(self._descriptor, self._meta.page_bytes, base)
        _, _, flags, lower, upper = PAGE.unpack_from(data)
        branch = flags == BRANCH
        kind = "branch page" if branch else "leaf page"
        self._add(f"{kind}: head", base, PAGE.size)
        self._add(f"{kind}: pointers", base + PAGE.size, lower - PAGE.size)
        self._add("slack", base + lower, upper - lower)
        for index, node in enumerate(nodes_of(data, branch)):
            self._add(f"{kind}: entry's head", base + node.at, NODE.size)
            if not branch or index:
                self._add("branch page: key" if branch else f"key of {name}", base + node.at + NODE.size, len(node.key))
            if branch:
                self._page(name, node.child)
            elif node.flags & BIG_DATA:
                self._overflow(name, data, base + node.body, node.body, node.size)
            else:
                self._add(f"value of {name}", base + node.body, node.size)
                if node.flags & SUB_DATABASE:
                    self._tree(node.key.decode(), Tree.decode(data[node.body : node.body + node.size]))

    def _overflow(self, name: str, data: bytes, pointer: int, body: int, size: int) -> None:
        self._add("pointer to a long value", pointer, 8)
        first = int.from_bytes(data[body : body + 8], "little")
        base = first * self._meta.page_bytes
        self._add("long value: head", base, PAGE.size)
        self._add(f"value of {name}", base + PAGE.size, size)
        count = int.from_bytes(os.pread(self._descriptor, 4, base + 12), "little")
        self._used.update(range(first, first + count))

    def _add(self, kind: str, offset: int, length: int) -> None:
        if length:
            self.found[kind].append((offset, length))


def kinds_in_turn(spans: Spans, chance: random.Random) -> Iterator[str]:
    """Every kind once in a round, each round in another order."""
    while True:
        yield from chance.sample(sorted(spans), len(spans))
