"""A checkpoint has reached what it had to reach: its shards may leave the cache.

Owns the walk over a session's shards; the rule is safety.py's.
"""

from collections.abc import Sequence
from functools import partial

from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.records import ShardKey
from forebay_gateway.core.states import ShardState
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import pages
from forebay_gateway.paths.safety import is_published, let_go

SHARDS_A_TRANSACTION = 2000


async def mark_evictable(node: Node, session_id: int) -> None:
    """Let go of the session's shards once every required tier holds the complete checkpoint (and at least one tier does)."""
    with node.catalog.read() as txn:
        session = txn.session(session_id)
        if session is None:
            return
        if not is_published(session, node.required_tiers):
            return
        if not txn.session_sums(session_id).sealed:
            return
    keys = [row.key async for rows in pages(node, session_id) for row in rows if row.state is ShardState.SEALED]

    def act(batch: Sequence[ShardKey], txn: WriteTxn) -> None:
        for key in batch:
            let_go(txn, key, node.required_tiers)

    for begin in range(0, len(keys), SHARDS_A_TRANSACTION):
        await node.catalog.write(partial(act, keys[begin : begin + SHARDS_A_TRANSACTION]))
