"""A shard that landed on a tier and never lay in this node's cache: its row, and the proved copy that it begins with.

Owns this one verb, which writes rows as those of mutations.py do.
"""

from forebay_gateway.catalog.mutations import WriteTxn
from forebay_gateway.core.errors import AlreadyExists, NotFound
from forebay_gateway.core.records import CopyRow, PartState, ShardRow
from forebay_gateway.core.states import CopyState, ShardState
from forebay_wire.packs import PackIndex


def land(txn: WriteTxn, row: ShardRow, chunks: bytes, index: PackIndex | None, tier: str, tag: str) -> None:
    """Add an EVICTED shard of an open part with a VERIFIED copy on the tier, of that version.

    Raises NotFound where the part was aborted meanwhile, or its checkpoint is being deleted, AlreadyExists where it was
    committed, or the session has the name.
    """
    if row.state is not ShardState.EVICTED or row.disk_size:
        raise ValueError(f"land() takes an EVICTED row without a file, not one that is {row.state.value}")
    part = txn.part(row.session_id, row.writer)
    if part is None:
        raise NotFound("the part was aborted while this shard was on its way", writer=row.writer)
    session = txn.session(row.session_id)
    checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
    if checkpoint is None or checkpoint.deleting:  # what lies on the tier may have been deleted before this came there
        raise NotFound("the checkpoint was deleted while this shard was on its way", writer=row.writer)
    if part.state is PartState.COMMITTED:
        raise AlreadyExists("the part was committed while this shard was on its way", writer=row.writer)
    if txn.shard_by_name(row.session_id, row.name) is not None:
        raise AlreadyExists("the session has a shard of this name", session_id=row.session_id, name=row.name)
    txn._add_shard(None, row, chunks, index)
    txn._put_copy(row, txn._tiers.number(tier), None, CopyRow(CopyState.VERIFIED, tag=tag), part.commit_seq)
