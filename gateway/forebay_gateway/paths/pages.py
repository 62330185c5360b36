"""A session's shards in pages, so that long look-ups leave the event loop free.

Owns the paging. What is read between two pages may have changed: whoever acts on a row asks for it again in the act.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from itertools import islice

from forebay_gateway.core.records import NamedShard, ShardRow
from forebay_gateway.paths.node import Node

SHARDS_A_PAGE = 1000  # some 4 ms


async def pages(node: Node, session_id: int, writer: int | None = None) -> AsyncGenerator[list[ShardRow], None]:
    """The session's shards, or one writer's, by shard id, a page in a snapshot of its own each."""
    after = -1
    while True:
        with node.catalog.read() as txn:
            rows = list(islice(txn.shards(session_id, writer, after), SHARDS_A_PAGE))
        if rows:
            yield rows
        if len(rows) < SHARDS_A_PAGE:
            return
        after = rows[-1].shard_id
        await asyncio.sleep(0)


async def all_shards(node: Node, session_id: int, writer: int | None = None) -> list[ShardRow]:
    """All of them at once, for who needs that."""
    return [row async for rows in pages(node, session_id, writer) for row in rows]


async def inside(node: Node, rows: Sequence[ShardRow]) -> list[NamedShard]:
    """What the files hold: each shard by itself, those in packs too. Raises NotFound where a pack went meanwhile."""
    shards: list[NamedShard] = []
    begun = 0
    while begun < len(rows):
        page = len(shards) + SHARDS_A_PAGE
        with node.catalog.read() as txn:
            while begun < len(rows) and len(shards) < page:
                shards += txn.inside(rows[begun])
                begun += 1
        await asyncio.sleep(0)
    return shards
