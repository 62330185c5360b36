"""forebay.v1.Admin: the operator's verbs.

Owns decoding and encoding, and what counts as healthy.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from forebay_gateway import __version__
from forebay_gateway.core.config import render_toml
from forebay_gateway.core.errors import Unavailable
from forebay_gateway.paths.drain import Drain
from forebay_gateway.paths.expire import Expiry
from forebay_gateway.paths.fleet import Fleet
from forebay_gateway.paths.health import Health
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.queue import Queue, Waiting
from forebay_gateway.paths.reload import Reloader
from forebay_gateway.paths.skip import skipped_count
from forebay_gateway.paths.write import WritePath
from forebay_gateway.rpc import encode
from forebay_gateway.rpc.sending import Sending
from forebay_gateway.rpc.status import Context, answers, streams
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.v1 import admin_pb2 as pb

INCOMPLETE_SHOWN_MAX = 20


class AdminService:
    """One instance a gateway."""

    def __init__(
        self,
        node: Node,
        health: Health,
        writes: WritePath,
        queue: Queue,
        drains: dict[str, Drain],
        reloader: Reloader,
        source: str,
        fleets: dict[str, Fleet],
        expiries: dict[str, Expiry],
    ) -> None:
        self.sending = Sending(node.config.node.stream_timeout)
        self._node = node
        self._health = health
        self._writes = writes
        self._queue = queue
        self._drains = drains
        self._reloader = reloader
        self._source = source
        self._fleets = fleets
        self._expiries = expiries

    @answers
    async def GetStatus(self, request: pb.GetStatusRequest, context: Context) -> pb.Status:
        """See admin.proto."""
        return self.status()

    def status(self) -> pb.Status:
        """All that an operator asks first."""
        node = self._node
        report = self._health.report()
        shown = report.incomplete_shown[:INCOMPLETE_SHOWN_MAX]
        return pb.Status(
            node=node.id,
            version=__version__,
            uptime_s=report.uptime_s,
            health=report.health,
            pressure=encode.pressure(node),
            cache=self._cache(),
            tiers=[self._tier(tier) for tier in node.tiers.values()],
            movers=[
                pb.MoverStatus(name=mover.name, pid=mover.pid, doing=mover.doing, restarts=mover.restarts)
                for mover in node.movers.processes()
            ],
            alarms=[pb.Alarm(severity=alarm.severity, what=alarm.what, todo=alarm.todo) for alarm in report.alarms],
            checkpoints_complete=report.complete,
            checkpoints_incomplete=report.incomplete,
            incomplete=[encode.checkpoint(replace(found, metadata_json="")) for found in shown],
            listen=node.config.node.listen,
            loop_lag_p99_s=report.loop_lag_p99_s,
        )

    def _cache(self) -> pb.CacheStatus:
        node = self._node
        return pb.CacheStatus(
            path=str(node.cache.path),
            capacity_bytes=node.budget.capacity,
            used_bytes=node.budget.used,
            reserved_bytes=node.budget.reserved,
            dirty_bytes=node.budget.dirty,
            direct_io=node.cache.direct_io,
            file_system=node.cache.file_system,
            open_streams=self._writes.open_streams,
            oldest_dirty_s=node.budget.dirty_age_s,
            disk_free_bytes=self._disk_free_bytes(),
        )

    def _disk_free_bytes(self) -> int | None:
        try:
            return self._node.cache.free_on_disk
        except Unavailable:  # the alarms tell of a disk that fails
            return None

    def _tier(self, tier: MonitoredTier) -> pb.TierStatus:
        with self._node.catalog.read() as txn:
            totals, skipped = txn.totals().tiers.get(tier.name), skipped_count(txn, tier.name)
        message = pb.TierStatus(
            name=tier.name,
            kind=tier.tier.kind,
            state="held" if tier.held else tier.state.value,
            reason="held by an operator; `forebay queue release` lets it go on" if tier.held else tier.reason,
            pending_copies=totals.copies if totals else 0,
            pending_bytes=totals.size if totals else 0,
            drain_bytes_per_s=tier.rate.bytes_per_s,
            required=tier.required,
            live_nodes=self._fleets[tier.name].live_nodes,
            bandwidth_bytes_per_s=self._fleets[tier.name].bandwidth,
            retention=self._retention(self._expiries[tier.name]),
            skipped=skipped,
        )
        oldest_s = self._health.oldest_pending_s(tier.name)
        if oldest_s is not None:
            message.oldest_pending_s = oldest_s
        if (proved := tier.tier.capabilities) is not None:
            words = {
                "conditional_create": proved.conditional_create,
                "conditional_replace": proved.conditional_replace,
                "server_checksum": proved.server_checksum,
                "multipart": proved.multipart,
                "list_after_put": proved.list_after_put,
                "links": proved.links,
                "direct_io": proved.direct_io,
            }
            message.capabilities.update({name: "yes" if value else "no" for name, value in words.items()})
            message.capabilities.update(proved.notes)
            if proved.clock_skew_s is not None:
                message.clock_skew_s = proved.clock_skew_s
        return message

    def _retention(self, expiry: Expiry) -> pb.RetentionStatus:
        tally = expiry.tally
        return pb.RetentionStatus(
            state=expiry.off or "on",
            looked_s=None if tally.looked_at_s is None else self._node.clock.monotonic() - tally.looked_at_s,
            removed=tally.removed,
            removed_bytes=tally.removed_bytes,
            last=tally.last,
        )

    @answers
    async def GetConfig(self, request: pb.GetConfigRequest, context: Context) -> pb.GetConfigResponse:
        """See admin.proto."""
        return pb.GetConfigResponse(toml=render_toml(self._node.config), source=self._source)

    @answers
    async def SetQueue(self, request: pb.SetQueueRequest, context: Context) -> pb.SetQueueResponse:
        """See admin.proto."""
        tiers = [self._node.tier(request.tier)] if request.tier else list(self._node.tiers.values())
        for tier in tiers:
            await self._drains[tier.name].hold(request.held)
        if not request.held and not request.tier:
            await self._queue.change("release", ())
        return pb.SetQueueResponse(tiers=[tier.name for tier in tiers])

    @streams
    async def ListQueue(self, request: pb.ListQueueRequest, context: Context) -> AsyncGenerator[pb.ListQueueResponse, None]:
        """See admin.proto."""
        async with aclosing(self._queue.pages()) as pages:
            async for page in pages:
                yield pb.ListQueueResponse(entries=map(_queue_entry, page))
        skipped = self._queue.skipped()
        yield pb.ListQueueResponse(skips=[pb.QueueSkips(tier=tier, skipped=count) for tier, count in skipped.items()])

    @answers
    async def ChangeQueue(self, request: pb.ChangeQueueRequest, context: Context) -> pb.ChangeQueueResponse:
        """See admin.proto."""
        return pb.ChangeQueueResponse(ids=await self._queue.change(request.action, request.ids))

    @answers
    async def ReloadConfig(self, request: pb.ReloadConfigRequest, context: Context) -> pb.ReloadConfigResponse:
        """See admin.proto."""
        done = self._reloader.reload()
        return pb.ReloadConfigResponse(changed=done.changed, needs_restart=done.needs_restart)


def _queue_entry(waiting: Waiting) -> pb.QueueEntry:
    entry = waiting.entry
    message = pb.QueueEntry(
        id=waiting.id,
        run=entry.run,
        step=entry.step,
        tier=waiting.tier,
        kind=entry.kind.name.lower(),
        state=entry.state,
        why=waiting.why,
        parts=entry.parts,
        copies=entry.copies,
        bytes=waiting.size,
        held=waiting.held,
        prio=waiting.place,
    )
    if waiting.next_in_s is not None:
        message.next_in_s = waiting.next_in_s
    return message
