"""Views of the paths as messages.

Owns the translation, and nothing else.
"""

from collections.abc import Iterable, Mapping

from forebay_gateway.admission.budget import Pressure
from forebay_gateway.cache.footer import BLOCK
from forebay_gateway.core.errors import MissingPart
from forebay_gateway.core.records import CopyRow, NamedShard
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.preempt import Outcome
from forebay_gateway.paths.view import CheckpointView
from forebay_gateway.paths.write import PartRef, Receipt
from forebay_wire.v1 import gateway_pb2 as pb


def part_ref(message: pb.PartRef) -> PartRef:
    """A writer's part; checked by the path that takes it."""
    return PartRef(message.run, message.step, message.session, message.writer, message.writers)


def receipt(value: Receipt, transient: bool) -> pb.Receipt:
    """What is durable and where, and whether by policy it stays in the cache."""
    return pb.Receipt(name=value.name, size=value.size, crc32c=value.crc32c, level=value.level, transient=transient)


def missing(parts: Iterable[MissingPart]) -> list[pb.Missing]:
    """Writers that are lacking."""
    return [pb.Missing(writer=part.writer, shards=part.shards, state=part.state) for part in parts]


def checkpoint(value: CheckpointView) -> pb.Checkpoint:
    """One checkpoint for people and schedulers."""
    session = value.session
    return pb.Checkpoint(
        run=session.run,
        step=session.step,
        session=session.session,
        writers=session.writers,
        state=value.state,
        missing=missing(value.missing),
        levels=[
            pb.Level(
                level=level.level,
                state=level.state,
                bytes_done=level.done,
                bytes_total=level.total,
                reason=level.reason,
            )
            for level in value.levels
        ],
        size=value.size,
        shard_count=value.shard_count,
        pinned=value.pinned,
        metadata_json=value.metadata_json,
        reason=value.reason,
        kind=session.kind.name.lower(),
        transient=value.transient,
    )


def policy(node: Node, run: str) -> pb.Policy:
    """What holds for the run now."""
    found, only = node.policy(run), node.only_tiers(run)
    tiers = [tier for tier in node.config.tiers if only is None or tier.name in only]
    return pb.Policy(
        run=found.run if found in node.config.policies else "",
        tiers=[tier.name for tier in tiers],
        every={tier.name: str(found.every or tier.every) for tier in tiers},
        skip=found.skip,
        kind=found.class_,
        quota_bytes=found.quota,
        transient=found.transient,
    )


def shard(value: NamedShard, copies: Mapping[str, CopyRow]) -> pb.ShardInfo:
    """One shard, with the state of each copy; of one in a pack, the pack's."""
    return pb.ShardInfo(
        name=value.name,
        size=value.size,
        crc32c=value.crc32c,
        writer=value.writer,
        state=value.row.state.value,
        copies={tier: copy.state.value for tier, copy in copies.items()},
    )


def file_layout(node: Node, chunk_size: int) -> pb.FileLayout:
    """How the cache's files are read and written by those who get their descriptors."""
    return pb.FileLayout(
        chunk_size=chunk_size,
        block_size=BLOCK,
        direct_io=node.cache.direct_io,
        progress_s=node.config.node.stream_timeout,
    )


def preempted(outcome: Outcome) -> pb.Preempted:
    """How far a checkpoint came by a preemption's deadline."""
    session = outcome.session
    return pb.Preempted(
        run=session.run,
        step=session.step,
        session=session.session,
        complete=outcome.complete,
        reached=outcome.reached,
        missed=[
            pb.NotReached(level=level, reason=progress.reason, bytes_left=progress.total - progress.done)
            for level, progress in outcome.missed
        ],
    )


def pressure(node: Node) -> pb.Pressure:
    """How full the cache is, and what the tiers still have to take."""
    now: Pressure = node.budget.pressure()
    message = pb.Pressure(level=now.level, reason=now.reason, fill=now.fill, waiting=node.budget.waiting, through=now.through)
    if now.retry_after_s is not None:
        message.retry_after_s = now.retry_after_s
    if now.writers_bytes_per_s is not None:
        message.writers_bytes_per_s = now.writers_bytes_per_s
    with node.catalog.read() as txn:
        totals = txn.totals()
    for tier in node.tiers.values():
        size = totals.tiers[tier.name].size if tier.name in totals.tiers else 0
        rate = tier.rate.bytes_per_s
        backlog = message.tiers.add(tier=tier.name, pending_bytes=size, drain_bytes_per_s=rate)
        if not size:
            backlog.eta_s = 0.0
        elif rate > 0 and tier.usable and not tier.held:  # else it is the memory of what went before
            backlog.eta_s = size / rate
    return message
