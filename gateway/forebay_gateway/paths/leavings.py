"""What a node has put on a tier of a checkpoint that another node left out there for all of them: it goes again.

    no copy under way, the bytes safe elsewhere, no manifest that names it -> its part records deleted there -> a pause
    -> left out still, and in no manifest still -> shards deleted -> their copies left out in the catalog -> the session is

That comes about where nodes go by different rules, or where one had begun before the rule was there. Nobody relies for as long
as that pause on a record that it has read (complete.py), so no manifest ever names what goes here. The catalog's word comes
last: until then all is done again; where the checkpoint is to stay after all, the records are written anew. Owns these acts.
Whether it was left out is joint.py's to know.
"""

from collections.abc import Sequence
from functools import partial

from forebay_gateway.base import failpoints
from forebay_gateway.catalog import WriteTxn
from forebay_gateway.core.errors import NotFound
from forebay_gateway.core.layout import manifest_key, part_key, shard_key
from forebay_gateway.core.records import PublishState, SessionRow, ShardRow
from forebay_gateway.core.states import CopyEvent, CopyState
from forebay_gateway.paths.announce import own_writers
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import all_shards
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError

SHARDS_A_TRANSACTION = 2000
PAUSE_S_MIN = 15.0  # RECORDS_S_MAX of complete.py, and more than a manifest takes to be placed
GOES = (CopyState.PENDING, CopyState.VERIFIED, CopyState.QUARANTINED)


def pause_s(node: Node) -> float:
    """Between the records' deletion and that of what they name: others have long noticed, or completed it."""
    return max(PAUSE_S_MIN, node.config.node.takeover_after)


async def withdraw_records(node: Node, tier: MonitoredTier, session: SessionRow) -> bool:
    """Whether nobody who begins to look now finds this node's parts there any more; False where that has to wait. No manifest
    names it. Raises as the tier does."""
    writers, shards = await _own(node, session)
    if not _may_go(node, tier, session, shards):
        return False
    for writer in writers:  # first: what goes after all is recorded anew
        await node.catalog.write(partial(_unrecord, session.id, writer, tier.name))
    await tier.tier.delete_many([part_key(session.run, session.step, session.session, writer) for writer in writers])
    failpoints.hit("leavings.records_gone")
    return True


async def take_away(node: Node, tier: MonitoredTier, session: SessionRow) -> bool:
    """Whether nothing of this node's is there any more, and the session is left out in the catalog; False where that has to
    wait. Its records have been gone for `pause_s`, no manifest names it, and nobody else may begin a copy of it meanwhile.
    Raises as the tier does."""
    _, shards = await _own(node, session)
    if not _may_go(node, tier, session, shards):
        return False
    with node.catalog.read() as txn:
        uploads = txn.uploads_of(session.id, tier.name)
    name = (session.run, session.step, session.session)
    for upload in uploads:
        await tier.tier.abort_upload(upload.key, upload.upload_id)
    await tier.tier.delete_many([shard_key(*name, row.name) for row in shards])
    failpoints.hit("leavings.shards_gone")
    for begin in range(0, len(shards), SHARDS_A_TRANSACTION):
        await node.catalog.write(partial(_left_out, tier.name, shards[begin : begin + SHARDS_A_TRANSACTION]))
    return await node.catalog.write(partial(_end, session.id, tier.name))


async def _own(node: Node, session: SessionRow) -> tuple[list[int], list[ShardRow]]:
    writers = own_writers(node, session)
    return writers, [row for writer in writers for row in await all_shards(node, session.id, writer)]


def _unrecord(session_id: int, writer: int, tier: str, txn: WriteTxn) -> None:
    if txn.part(session_id, writer) is not None:
        txn.part_recorded(session_id, writer, tier, is_there=False)


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


async def is_named(node: Node, tier: MonitoredTier, session: SessionRow) -> bool | None:
    """Whether it is complete there after all; None where nobody can tell, as the manifest is damaged. Raises as the tier
    does."""
    try:
        document, _ = await tier.tier.get_small(manifest_key(session.run, session.step))
    except NotFound:
        return False
    try:
        manifest = await node.aside(len(document), lambda: Manifest.from_json(document))
    except ManifestError:
        return None
    return manifest.session == session.session


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
