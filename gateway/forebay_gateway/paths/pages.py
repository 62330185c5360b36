"""A session's shards in pages, so that long look-ups leave the event loop free.

Owns the paging: a page ends after so many rows or so much time, since a row costs more where other threads want the interpreter
too. What is read between two pages may have changed: whoever acts on a row asks for it again in the act.
"""

import asyncio
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, TypeVar

from forebay_gateway.base.clock import Clock
from forebay_gateway.core.records import NamedShard, ShardRow
from forebay_gateway.paths.node import Node

SHARDS_A_PAGE = 1000  # some 4 ms
PAGE_S = 0.005
LOOK_EVERY = 16  # items between two looks at the clock

T = TypeVar("T")


def page_of(clock: Clock, items: Iterable[T], count: int = SHARDS_A_PAGE) -> tuple[list[T], bool]:
    """The next page of what there is, and whether that was all."""
    page: list[T] = []
    until_s = clock.monotonic() + PAGE_S
    for item in items:
        page.append(item)
        if len(page) >= count or (not len(page) % LOOK_EVERY and clock.monotonic() >= until_s):
            return page, False
    return page, True


async def pages(node: Node, session_id: int, writer: int | None = None) -> AsyncGenerator[list[ShardRow], None]:
    """The session's shards, or one writer's, by shard id, a page in a snapshot of its own each."""
    after, ended = -1, False
    while not ended:
        with node.catalog.read() as txn:
            rows, ended = page_of(node.clock, txn.shards(session_id, writer, after))
        if rows:
            yield rows
            after = rows[-1].shard_id
        await asyncio.sleep(0)


async def all_shards(node: Node, session_id: int, writer: int | None = None) -> list[ShardRow]:
    """All of them at once, for who needs that."""
    return [row async for rows in pages(node, session_id, writer) for row in rows]


async def inside(node: Node, rows: Sequence[ShardRow]) -> list[NamedShard]:
    """What the files hold: each shard by itself, those in packs too. Raises NotFound where a pack went meanwhile."""
    shards: list[NamedShard] = []
    each, ended = (shard for row in rows for shard in inside_of(node, row)), False
    while not ended:
        found, ended = page_of(node.clock, each)
        shards += found
        await asyncio.sleep(0)
    return shards


def inside_of(node: Node, row: ShardRow) -> Iterator[NamedShard]:
    """What one file holds, by name. Raises NotFound, CatalogDamaged. A pack's index is looked up at the first step, and no
    snapshot is held afterwards."""
    if not row.is_pack:
        yield NamedShard(row)
        return
    with node.catalog.read() as txn:
        shards = txn.inside(row)
        first = next(shards)
    yield first
    yield from shards


async def let_go(*held: list[Any] | dict[Any, Any]) -> None:
    """Empty these a page at a time: freeing very many rows at once is one step that nothing interrupts."""
    for each in held:
        while each:
            if isinstance(each, list):
                del each[-SHARDS_A_PAGE:]
            else:
                for key in list(islice(each, SHARDS_A_PAGE)):
                    del each[key]
            await asyncio.sleep(0)
