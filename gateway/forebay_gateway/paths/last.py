"""What readers take for the sign of a whole checkpoint goes to a tier after all others, also where it goes past the cache.

    nothing else of the session is under way here, all of it that is here is proved on the tier, and so are, for writer 0, the
    parts of all others -> it may go

Owns this judgement for shards that go through; the drain's is in drain.py. What its own writer has not yet begun to put nobody
knows: clients put it last.
"""

from collections.abc import Collection

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import DiskFailed, ForebayError, Unavailable
from forebay_gateway.core.layout import part_key
from forebay_gateway.core.records import PartState
from forebay_gateway.core.states import CopyState
from forebay_gateway.paths.admit import DISK_FAILS_RETRY_S
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.write import PartRef, WritePath
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.names import is_commit_last


async def check_its_turn(
    node: Node, writes: WritePath, part: PartRef, session_id: int, name: str, tier: MonitoredTier, together: Collection[str]
) -> None:
    """Raise DiskFailed, which says what is waited for, where it is not the shard's turn; Unavailable where the tier cannot be
    asked. The names `together` are of the same request, which puts them in order."""
    under_way = [each for each in writes.under_way(session_id) if each not in together and not is_commit_last(each)]
    with node.catalog.read() as txn:
        waits_for = under_way[0] if under_way else _not_proved(txn, session_id, tier.name)
        here = {each.writer: each.state for each in txn.parts(session_id) if not each.is_adopted}
    missing: list[int] = []
    if part.writer == 0 and not waits_for:  # others do not wait for each other: two nodes could do so for ever
        missing = [writer for writer in range(1, part.writers) if here.get(writer) is not PartState.COMMITTED]
        if missing and not any(writer in here for writer in missing):
            missing = await _not_recorded(part, missing, tier)
    if waits_for or missing:
        what = f"{waits_for!r}" if waits_for else f"the part of writer {missing[0]}"
        raise DiskFailed(
            f"{node.budget.disk.reason}, and shard {name!r} goes to a tier only after all others of its checkpoint, of which "
            f"{what} is not on {tier.name} yet",
            retry_after_s=DISK_FAILS_RETRY_S,
        )


def _not_proved(txn: ReadTxn, session_id: int, tier: str) -> str:
    """The first shard here that the tier does not have; empty for none."""
    if txn.session_progress(session_id, tier)[0] >= txn.session_sums(session_id).shards:
        return ""
    for row in txn.shards(session_id):
        copy = None if is_commit_last(row.name) else txn.copy(row.key, tier)
        if not is_commit_last(row.name) and (copy is None or copy.state is not CopyState.VERIFIED):
            return row.name
    return ""


async def _not_recorded(part: PartRef, writers: list[int], tier: MonitoredTier) -> list[int]:
    """Those of them whose parts are not recorded on the tier: one question for all."""
    keys = {writer: part_key(part.run, part.step, part.session, writer) for writer in writers}
    try:
        listing = await tier.tier.list(keys[writers[0]].rpartition("/")[0] + "/")
    except ForebayError as error:
        tier.failed(error)
        raise Unavailable(f"{tier.name} does not say which parts are there: {error.sentence}", retry_after_s=1.0) from error
    there = {info.key for info in listing.objects}
    return [writer for writer, key in keys.items() if key not in there]
