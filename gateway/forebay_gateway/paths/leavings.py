"""What a node has put on a tier of a checkpoint that another node left out there for all of them: it goes again.

    no copy under way, the bytes safe elsewhere, no manifest that names it -> part records, then shards, deleted on the tier
    -> their copies left out in the catalog -> the session is

That comes about where nodes go by different rules, or where one had begun before the rule was there. The catalog's word comes
last: until then it is done again. Owns these acts. Whether the checkpoint was left out is joint.py's to know.
"""

from collections.abc import Sequence
from functools import partial

from forebay_gateway.base import failpoints
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.errors import NotFound
from forebay_gateway.core.layout import manifest_key, part_key, shard_key
from forebay_gateway.core.records import PartState, PublishState, SessionRow, ShardRow
from forebay_gateway.core.states import CopyEvent, CopyState
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import all_shards
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError

SHARDS_A_TRANSACTION = 2000
GOES = (CopyState.PENDING, CopyState.VERIFIED, CopyState.QUARANTINED)


async def take_away(node: Node, tier: MonitoredTier, session: SessionRow) -> bool:
    """Whether nothing of this node's is there any more, and the session is left out in the catalog; False where that has to
    wait. Nobody else may begin a copy of it meanwhile. Raises as the tier does."""
    with node.catalog.read() as txn:
        writers = [part.writer for part in txn.parts(session.id) if part.state is PartState.COMMITTED and not part.is_adopted]
        uploads = txn.uploads_of(session.id, tier.name)
    shards = [row for writer in writers for row in await all_shards(node, session.id, writer)]
    if not _may_go(node, tier, session, shards) or await _is_named(tier, session):
        return False
    name = (session.run, session.step, session.session)
    await tier.tier.delete_many([part_key(*name, writer) for writer in writers])
    failpoints.hit("leavings.records_gone")
    for upload in uploads:
        await tier.tier.abort_upload(upload.key, upload.upload_id)
    await tier.tier.delete_many([shard_key(*name, row.name) for row in shards])
    failpoints.hit("leavings.shards_gone")
    for begin in range(0, len(shards), SHARDS_A_TRANSACTION):
        await node.catalog.write(partial(_left_out, tier.name, shards[begin : begin + SHARDS_A_TRANSACTION]))
    return await node.catalog.write(partial(_end, session.id, tier.name))


def _may_go(node: Node, tier: MonitoredTier, session: SessionRow, shards: Sequence[ShardRow]) -> bool:
    """Whether no copy is under way, and none is the only one."""
    with node.catalog.read() as txn:
        for row in shards:
            copies = txn.copies(row.key)
            here = copies.get(tier.name)
            if here is not None and here.state in (CopyState.WRITING, CopyState.WRITTEN):
                return False
            elsewhere = any(copy.state is CopyState.VERIFIED for name, copy in copies.items() if name != tier.name)
            if not row.is_cached and not elsewhere:
                return False
        now = txn.session(session.id)
    return now is not None and now.publish.get(tier.name) is PublishState.PENDING


async def _is_named(tier: MonitoredTier, session: SessionRow) -> bool:
    """Whether it is complete there after all."""
    try:
        document, _ = await tier.tier.get_small(manifest_key(session.run, session.step))
        return Manifest.from_json(document).session == session.session
    except (NotFound, ManifestError):
        return False


def _left_out(tier: str, rows: Sequence[ShardRow], txn: WriteTxn) -> None:
    for row in rows:
        copy = txn.copy(row.key, tier)
        if copy is not None and copy.state in GOES:
            txn.copy_event(row.key, tier, CopyEvent.REMOVE)
        txn.clear_upload(row.key, tier)


def _end(session_id: int, tier: str, txn: WriteTxn) -> bool:
    session = txn.session(session_id)
    if session is None or session.publish.get(tier) is not PublishState.PENDING:
        return False
    txn.skip(session_id, tier, "left out by another node")
    return True
