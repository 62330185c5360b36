"""forebay.v1.Care: the operator's checks, repairs and deletions.

Owns decoding and encoding, and which calls take the maintenance lock.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass

from forebay_gateway.core.errors import InvalidArgument
from forebay_gateway.paths.care.finding import Finding
from forebay_gateway.paths.care.fsck import Checker
from forebay_gateway.paths.care.gc import Collector, Garbage
from forebay_gateway.paths.care.lock import Maintenance
from forebay_gateway.paths.care.passes import Pass
from forebay_gateway.paths.care.quarantine import Quarantine, Quarantined
from forebay_gateway.paths.care.repair import Repairer
from forebay_gateway.paths.care.scrub import Scrubber
from forebay_gateway.paths.care.space import Moved, Space
from forebay_gateway.paths.care.tier_scrub import TierScrubber
from forebay_gateway.paths.care.verify import Verifier
from forebay_gateway.paths.drain import Drain
from forebay_gateway.paths.expire import Expiry, Fate, fates_of
from forebay_gateway.paths.node import Node
from forebay_gateway.rpc.sending import Sending
from forebay_gateway.rpc.status import Context, answers, streams
from forebay_wire.names import InvalidName, check_run
from forebay_wire.v1 import admin_pb2 as pb

FIRST_LOOK_S = 5.0


@dataclass
class Care:
    """The care paths, as the service calls them."""

    verify: Verifier
    scrub: Scrubber
    tier_scrubs: dict[str, TierScrubber]
    check: Checker
    repair: Repairer
    quarantine: Quarantine
    collect: Collector
    space: Space
    drains: dict[str, Drain]
    expiries: dict[str, Expiry]


class CareService:
    """One instance a gateway."""

    def __init__(self, node: Node, care: Care) -> None:
        self._node = node
        self._care = care
        self._lock = Maintenance()
        self.sending = Sending(node.config.node.stream_timeout)

    @asynccontextmanager
    async def _command(self, name: str) -> AsyncIterator[None]:
        """Alone, and with tiers that were looked at: right after a start a command would leave out what is there."""
        with self._lock.hold(name):
            await self._node.tiers_looked_at(FIRST_LOOK_S)
            yield

    @streams
    async def Verify(self, request: pb.VerifyRequest, context: Context) -> AsyncGenerator[pb.CopyReport, None]:
        """See admin.proto."""
        check_name(request.run)
        verified = self._care.verify.verify(request.run, request.step, request.source)
        async with self._command("verify"), aclosing(verified) as reports:
            async for report in reports:
                yield pb.CopyReport(
                    name=report.name, where=report.where, state=report.verdict, size=report.size, reason=report.reason
                )

    @answers
    async def Scrub(self, request: pb.ScrubRequest, context: Context) -> pb.ScrubStatus:
        """See admin.proto."""
        chosen = self._care.tier_scrubs.get(request.tier) if request.tier else self._care.scrub
        if chosen is None:
            self._node.tier(request.tier)  # raises InvalidArgument that lists the names
            raise AssertionError("a tier without its scrub")
        match request.action:
            case "start":
                await chosen.start()
            case "stop":
                await chosen.stop()
            case "" | "status":
                pass
            case _:
                raise InvalidArgument(f"a scrub can be started and stopped, not {request.action!r}")
        message = scrub_status(self._care.scrub)
        for name, scrub in self._care.tier_scrubs.items():
            message.tiers.append(tier_scrub_status(name, scrub))
        return message

    @streams
    async def Fsck(self, request: pb.FsckRequest, context: Context) -> AsyncGenerator[pb.Finding, None]:
        """See admin.proto."""
        async with self._command("fsck"), aclosing(self._care.check.check(request.deep)) as findings:
            async for found in findings:
                yield finding(found)

    @streams
    async def Repair(self, request: pb.RepairRequest, context: Context) -> AsyncGenerator[pb.Finding, None]:
        """See admin.proto."""
        async with self._command("repair"), aclosing(self._care.repair.repair(request.apply, request.deep)) as findings:
            async for found in findings:
                yield finding(found)

    @streams
    async def ListQuarantine(self, request: pb.ListQuarantineRequest, context: Context) -> AsyncGenerator[pb.Quarantined, None]:
        """See admin.proto."""
        if request.id:
            yield quarantined(self._care.quarantine.show(request.id))
            return
        async with aclosing(self._care.quarantine.entries()) as entries:
            async for entry in entries:
                yield quarantined(entry)

    @answers
    async def ReleaseQuarantine(self, request: pb.ReleaseQuarantineRequest, context: Context) -> pb.Quarantined:
        """See admin.proto."""
        async with self._command("quarantine release"):
            return quarantined(await self._care.quarantine.release(request.id, request.force, dry_run=request.dry_run))

    @streams
    async def Collect(self, request: pb.CollectRequest, context: Context) -> AsyncGenerator[pb.Garbage, None]:
        """See admin.proto."""
        if request.older_than_s < 0:
            raise InvalidArgument("an age is not negative", older_than_s=request.older_than_s)
        async with self._command("gc"):
            act = self._care.collect.collect if request.apply else self._care.collect.survey
            for item in await act(request.older_than_s):
                yield garbage(item)

    @streams
    async def Retain(self, request: pb.RetainRequest, context: Context) -> AsyncGenerator[pb.Fate, None]:
        """See admin.proto."""
        if request.run:
            check_name(request.run)
        found = fates_of(self._care.expiries.values(), request.run, apply=request.apply)
        async with self._command("retain"), aclosing(found) as fates:
            async for each in fates:
                yield fate(each)

    @answers
    async def Evict(self, request: pb.EvictRequest, context: Context) -> pb.Moved:
        """See admin.proto."""
        check_name(request.run)
        return moved(await self._care.space.evict(request.run, request.step, dry_run=request.dry_run))

    @answers
    async def Warmup(self, request: pb.WarmupRequest, context: Context) -> pb.Moved:
        """See admin.proto."""
        check_name(request.run)
        return moved(await self._care.space.warm_up(request.run, request.step))

    @answers
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """See admin.proto."""
        for drain in self._care.drains.values():
            drain.retry_now()
        self._node.changes.tell()
        with self._node.catalog.read() as txn:
            tiers = [txn.totals().tiers[name] for name in self._node.tier_names]
        return pb.DrainResponse(copies=sum(tier.copies for tier in tiers), size=sum(tier.size for tier in tiers))


def scrub_state(scrub: Pass) -> str:
    """In a word."""
    idle = "stopped" if scrub.state.paused else "waiting" if scrub.next_in_s is not None else "off"
    return "running" if scrub.state.running else idle


def scrub_status(scrub: Scrubber) -> pb.ScrubStatus:
    """Of the cache's scrub, as a message."""
    state, next_in_s = scrub.state, scrub.next_in_s
    return pb.ScrubStatus(
        state=scrub_state(scrub),
        rate_bytes_per_s=scrub.rate,
        every_s=scrub.every_s,
        passes=state.passes,
        shards=state.shards,
        bytes=state.bytes,
        bad=state.bad,
        copies=state.copies,
        copies_bad=state.copies_bad,
        copies_not_asked=state.copies_not_asked,
        next_in_s=next_in_s,
    )


def tier_scrub_status(name: str, scrub: TierScrubber) -> pb.TierScrub:
    """Of one tier's, as a message."""
    state, next_in_s = scrub.state, scrub.next_in_s
    return pb.TierScrub(
        tier=name,
        state=scrub_state(scrub),
        rate_bytes_per_s=scrub.rate,
        every_s=scrub.every_s,
        passes=state.passes,
        copies=state.copies,
        bytes=state.bytes,
        bad=state.copies_bad,
        unreadable=state.copies_not_asked,
        next_in_s=next_in_s,
    )


def check_name(run: str) -> None:
    """Raise InvalidArgument for what can be no run's name."""
    try:
        check_run(run)
    except InvalidName as error:
        raise InvalidArgument(str(error)) from error


def finding(value: Finding) -> pb.Finding:
    """As a message."""
    return pb.Finding(
        kind=value.kind,
        severity=value.severity,
        where=value.where,
        run=value.run,
        step=value.step,
        session=value.session,
        name=value.name,
        path=value.path,
        what=value.what,
        remedy=value.remedy,
        outcome=value.outcome,
    )


def quarantined(value: Quarantined) -> pb.Quarantined:
    """As a message."""
    return pb.Quarantined(
        id=value.id,
        run=value.run,
        step=value.step,
        session=value.session,
        name=value.name,
        where=value.where,
        path=value.path,
        size=value.size,
        reason=value.reason,
        good=value.good,
    )


def garbage(value: Garbage) -> pb.Garbage:
    """As a message."""
    message = pb.Garbage(
        kind=value.kind,
        where=value.where,
        path=value.path,
        what=value.what,
        deletable=value.deletable,
        outcome=value.outcome,
    )
    if value.age_s is not None:
        message.age_s = value.age_s
    return message


def fate(value: Fate) -> pb.Fate:
    """As a message."""
    return pb.Fate(
        tier=value.tier,
        run=value.run,
        step=value.step,
        session=value.session,
        size=value.size,
        goes=value.goes,
        reason=value.reason,
        outcome=value.outcome,
    )


def moved(value: Moved) -> pb.Moved:
    """As a message."""
    return pb.Moved(shards=value.shards, size=value.size, left=value.left, reason=value.reason)
