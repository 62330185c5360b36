"""The newest checkpoints of a run, by the order of commits on this node.

Owns the look through all of a run's checkpoints, a page at a time: they are kept by step, and a job may have gone back to an
older one.
"""

import asyncio
from itertools import islice

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.records import SessionRow
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.wholeness import is_complete

ROWS_A_READ = 256  # a run may have very many checkpoints, and the event loop has to answer others


async def newest_of(node: Node, run: str) -> tuple[SessionRow | None, SessionRow | None]:
    """Of those that something was committed of here: the newest complete one, and the newest of all where that is another."""
    found: list[SessionRow] = []
    step, ended = 0, False
    while not ended:
        with node.catalog.read() as txn:
            rows = list(islice(txn.checkpoints(run, step), ROWS_A_READ))
            page = [session for row in rows if not row.deleting for session in txn.sessions_of(row) if session.commit_seq]
            complete, other = _newest(txn, [*found, *page])
        found = [session for session in (complete, other) if session is not None]
        ended = len(rows) < ROWS_A_READ
        step = rows[-1].step + 1 if rows else 0
        await asyncio.sleep(0)
    return complete, other


def _newest(txn: ReadTxn, sessions: list[SessionRow]) -> tuple[SessionRow | None, SessionRow | None]:
    ordered = sorted(sessions, key=lambda session: -session.commit_seq)
    complete = next((session for session in ordered if is_complete(txn, session)), None)
    return complete, ordered[0] if ordered and ordered[0] is not complete else None
