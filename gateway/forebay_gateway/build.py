"""The only place where components meet: a configuration in, a gateway out, started and stopped in order.

Owns the wiring and its order. Does not own signals or exit codes (serve.py).
"""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from forebay_gateway.base.clock import Clock, SystemClock
from forebay_gateway.base.metrics import LoopLag
from forebay_gateway.base.tasks import Crew, Worker, uncut_ended, uncut_left
from forebay_gateway.cache.io import IoPool
from forebay_gateway.catalog import Catalog, is_damage
from forebay_gateway.core.config_sections import Config, TierConfig
from forebay_gateway.core.errors import ForebayError
from forebay_gateway.movers.jobs import Setup
from forebay_gateway.movers.pool import MoverPool
from forebay_gateway.paths.admit import budget_of, watch_quotas
from forebay_gateway.paths.announce import Announcer
from forebay_gateway.paths.care.fsck import Checker
from forebay_gateway.paths.care.gc import Collector
from forebay_gateway.paths.care.mend import Mender
from forebay_gateway.paths.care.quarantine import Quarantine
from forebay_gateway.paths.care.rebuild import (
    damage_met,
    is_of_the_catalog,
    note_damage,
    open_catalog,
    rebuild_ended,
    tell,
)
from forebay_gateway.paths.care.repair import Repairer
from forebay_gateway.paths.care.scrub import Scrubber
from forebay_gateway.paths.care.space import Space
from forebay_gateway.paths.care.tier_scrub import TierScrubber
from forebay_gateway.paths.care.verify import Verifier
from forebay_gateway.paths.commit import CommitPath
from forebay_gateway.paths.complete import Completion
from forebay_gateway.paths.drain import Drain, held_setting
from forebay_gateway.paths.evict import Evictor
from forebay_gateway.paths.expire import Expiry
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.fleet import Fleet
from forebay_gateway.paths.handover import found_mark, leave_mark, leave_token
from forebay_gateway.paths.health import Health
from forebay_gateway.paths.lease import Leases
from forebay_gateway.paths.many import ManyPath
from forebay_gateway.paths.marks import MarkKeeper, restore_settings, setting
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.preempt import Preemption
from forebay_gateway.paths.preflight import open_cache
from forebay_gateway.paths.queue import Queue
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.paths.recover import StartCheck, recover, recover_copies
from forebay_gateway.paths.reload import Reloader
from forebay_gateway.paths.removed import Follower
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.small import SmallPath
from forebay_gateway.paths.steady import Step, steady
from forebay_gateway.paths.through import Through
from forebay_gateway.paths.unfiled import Filer
from forebay_gateway.paths.wait import Waiter
from forebay_gateway.paths.write import WritePath
from forebay_gateway.rpc.admin_service import AdminService
from forebay_gateway.rpc.care_service import Care, CareService
from forebay_gateway.rpc.fd_socket import FdSocket
from forebay_gateway.rpc.gateway_service import GatewayService, Paths
from forebay_gateway.rpc.listen import SOCKET_MODE, bind, claim_socket, socket_path
from forebay_gateway.rpc.status import parser
from forebay_gateway.tiers.base import Capabilities
from forebay_gateway.tiers.factory import open_tier
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.frames import MAX_MESSAGE_BYTES
from forebay_wire.v1 import admin_pb2, gateway_pb2

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from forebay_gateway.rpc.metrics import MetricsEndpoint

log = logging.getLogger("forebay.gateway")

SERVICES = ("forebay.v1.Gateway", "forebay.v1.Admin", "forebay.v1.Care")
BUFFERS_BYTES = 64 << 20  # of chunks on their way to and from the disk
SETTLE_S_MAX = 10.0
RAW_METHODS = frozenset({"PutShard", "ReadShard"})  # messages go through the hot-path codec
RAW_ANSWERS = RAW_METHODS | {"ReadMany"}

# Clients ping every 30 s (client/forebay); a server that thinks this too often would cut healthy connections.
SERVER_OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not shared
    ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
]


class Gateway:
    """A running gateway. `await Gateway.start(config)`, then `run()`, then `stop()`."""

    def __init__(
        self,
        node: Node,
        source: str,
        catalog_failed: "asyncio.Future[BaseException]",
        read_again: Callable[[], Config] | None = None,
    ) -> None:
        self.node = node
        self._read_again = read_again
        self._source = source
        self._catalog_failed = catalog_failed
        self._crew = Crew()
        self._server: grpc.aio.Server | None = None
        self._sockets: list[Path] = []
        self._writes: WritePath | None = None
        self._preemption: Preemption | None = None
        self._fd_socket: FdSocket | None = None
        self._metrics: MetricsEndpoint | None = None
        self._health_service = health.aio.HealthServicer()
        self._lag = LoopLag(node.clock, interval_s=0.05)
        self._stopped: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls, config: Config, source: str, clock: Clock | None = None, read_again: Callable[[], Config] | None = None
    ) -> "Gateway":
        """Open, recover, serve. Raises StartupError with what to do; nothing stays open then. `read_again` gives what the
        configuration file says by then."""
        clock = clock or SystemClock()
        tries = 2  # a damaged catalog is made anew once
        while True:
            tries -= 1
            catalog_failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
            gateway: Gateway | None = None
            try:
                node = await open_node(config, source, clock, catalog_failed)
                gateway = cls(node, source, catalog_failed, read_again)
                node.catalog.on_damage(partial(damage_met, node))
                unchecked = await recover(node)
                if node.rebuilt:
                    await asyncio.to_thread(rebuild_ended, node.cache.path)
                gateway._wire(unchecked)
                await gateway._listen()
                return gateway
            except BaseException as error:
                if gateway is not None:
                    await gateway.stop(0.0)
                if not isinstance(error, Exception) or not tries or (gateway is not None and gateway.node.rebuilt):
                    raise
                cause = catalog_failed.result() if catalog_failed.done() else error
                if not await is_of_the_catalog(cause, Path(config.cache.path), _names(config), config.node.id):
                    raise  # else the next round takes it for damaged

    def _wire(self, unchecked: set[int]) -> None:
        """Paths, workers, services."""
        node = self.node
        watch_quotas(node)
        evictor = Evictor(node)
        writes = self._writes = WritePath(node, evictor)
        commits = CommitPath(node, writes)
        finder = Finder(node, commits.drop_open)
        retention = Retention(node, finder)
        evictor.drop_cache_only = retention.drop_cache_only
        reads = ReadPath(node, finder, evictor)
        leases = Leases(node, writes, reads, evictor)
        self._fd_socket = FdSocket(leases, SOCKET_MODE)
        many = ManyPath(node, reads, evictor)
        watch = Health(node, node.clock, self._lag)
        drains: dict[str, Drain] = {}
        fleets, expiries = self._wire_shared(finder, retention)
        for tier in node.tiers.values():
            drains[tier.name] = self._wire_tier(tier)
        queue = Queue(node, drains)
        retention.pinned, retention.deleted = queue.pinned, queue.deleted
        rules = [drain.order.reload for drain in drains.values()] + [fleet.reload for fleet in fleets.values()]
        self.reloader = Reloader(node, self._read_again, [*rules, node.budget.on_room])
        preemption = self._preemption = Preemption(node, queue.first)
        small, waiter = SmallPath(node, writes), Waiter(node, finder)
        through = self._through = self._wire_through(writes, small)
        paths = Paths(writes, small, commits, finder, reads, many, waiter, retention, leases, preemption, through)
        mender = Mender(node, reads)
        care = _care(node, finder, reads, evictor, retention, mender, drains, expiries)
        retain = self._worker("retain", retention.step, 60.0)
        changing = [
            self._worker("evict", evictor.step, 5.0),
            self._worker("mend", mender.step, 2.0),
            self._worker("announce", Announcer(node).step, 5.0),
            retain,
        ]
        scrub = self._worker("scrub", care.scrub.step, 60.0)
        care.scrub.on_start(scrub.wake)
        reading = []
        for name, each in care.tier_scrubs.items():
            reading.append(self._worker(f"scrub {name}", each.step, 60.0))
            each.on_start(reading[-1].wake)
        quiet = [
            *reading,
            self._worker("silent", commits.drop_silent, 60.0),
            self._worker("health", watch.step, 1.0),
            scrub,
        ]
        for tier in node.tiers.values():
            tier.on_return(mender.retry_now)
            tier.on_return(retain.wake)  # deletions that a stop cut off go on as soon as a start finds the tier
        node.on_disk_return.append(mender.retry_now)
        for worker in changing:
            node.changes.listen(worker.wake)
        for worker in (*changing, *quiet):
            self._crew.add(worker)
        self._crew.add(self._worker("check files", StartCheck(node, unchecked).step, 3600.0))
        self._crew.add("loop lag", self._lag.run)
        admin = AdminService(node, watch, writes, queue, drains, self.reloader, self._source, fleets, expiries)
        self._metrics = _metrics(node, admin)
        self._server = grpc.aio.server(options=SERVER_OPTIONS)
        self._server.add_generic_rpc_handlers(
            (
                handlers(gateway_pb2.DESCRIPTOR.services_by_name["Gateway"], GatewayService(node, paths)),
                handlers(admin_pb2.DESCRIPTOR.services_by_name["Admin"], admin),
                handlers(admin_pb2.DESCRIPTOR.services_by_name["Care"], CareService(node, care)),
            )
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health_service, self._server)
        reflection.enable_server_reflection((*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server)

    def _wire_through(self, writes: WritePath, small: SmallPath) -> Through:
        """The way past the cache, for the time in which its disk fails, and what is to be done after it."""
        node = self.node
        through = Through(node, writes)
        small.divert, node.budget.through = through.put_group, through.tier
        tidy = self._worker("tidy", through.tidier.step, 60.0)
        filer = self._worker("file parts", Filer(node).step, 60.0)
        through.tidier.wake = tidy.wake
        for tier in node.tiers.values():
            tier.on_return(tidy.wake)
        node.on_disk_return.append(filer.wake)
        for worker in (tidy, filer):
            self._crew.add(worker)
        return through

    def _wire_shared(self, finder: Finder, retention: Retention) -> tuple[dict[str, Fleet], dict[str, Expiry]]:
        """What nodes that share a tier do together: count each other, and take turns at retention."""
        node = self.node
        follower = Follower(node, finder, retention)
        fleets = {name: Fleet(node, tier) for name, tier in node.tiers.items()}
        expiries = {name: Expiry(node, tier, follower) for name, tier in node.tiers.items()}
        for name, tier in node.tiers.items():
            expiring = self._worker(f"expire {name}", expiries[name].step, 60.0)
            expiries[name].wake = expiring.wake
            node.tiers[name].on_failure(expiring.wake)  # a full tier is freed by it
            sharing = self._worker(f"fleet {name}", fleets[name].step, 60.0)
            fleets[name].wake = sharing.wake
            for worker in (expiring, sharing):
                tier.on_return(worker.wake)
                self._crew.add(worker)
        node.on_complete.append(lambda tier, run, step: expiries[tier].completed(run, step))
        return fleets, expiries

    def _worker(self, name: str, step: Step, idle_s: float) -> Worker:
        """A background worker that outlives what may pass."""
        return Worker(name, steady(self.node, name, step), self.node.clock, idle_s)

    def _wire_tier(self, tier: MonitoredTier) -> Drain:
        """A tier's three workers: probe, drain, completion."""
        node = self.node
        workers: list[Worker] = []

        def wake_all() -> None:
            for worker in workers:
                worker.wake()

        drain = Drain(node, tier, recover_copies=partial(recover_copies, node, tier), verified=wake_all)
        completion = Completion(node, tier, drain)
        workers += [
            self._worker(f"drain {tier.name}", drain.step, 5.0),
            self._worker(f"complete {tier.name}", completion.step, 5.0),
        ]
        probe = self._worker(f"probe {tier.name}", tier.step, 15.0)

        def returned() -> None:
            drain.retry_now()
            wake_all()

        tier.on_return(returned)
        tier.on_failure(probe.wake)
        node.changes.listen(wake_all)
        for worker in (*workers, probe):
            self._crew.add(worker)
        return drain

    async def _listen(self) -> None:
        assert self._server is not None
        for address in self.node.config.node.listen:
            if (path := socket_path(address)) is not None:
                await asyncio.to_thread(claim_socket, path)
                self._hand_out_beside(path)  # first, so that whoever finds the gateway finds it
            await bind(self._server, address)
            if path is not None:
                self._sockets.append(path)
        if self._metrics is not None:
            await self._metrics.start()
        await self._server.start()
        for service in ("", *SERVICES):
            await self._health_service.set(service, health_pb2.HealthCheckResponse.SERVING)

    def _hand_out_beside(self, path: Path) -> None:
        """The fd lane's socket; a gateway without it still serves streams."""
        assert self._fd_socket is not None
        try:
            found = self._fd_socket.start(path)
        except OSError as error:
            log.warning("no fd lane: its socket cannot be made path=%s error=%s", path, error)
            return
        if found is not None:
            self._sockets.append(found)

    @property
    def open_streams(self) -> int:
        """Shards that are received now."""
        return 0 if self._writes is None else self._writes.open_streams

    async def run(self) -> None:
        """Until stop(), or until a background task or the catalog fails: then that error is raised."""
        working = asyncio.ensure_future(self._crew.run_until_failure())
        watched: set[asyncio.Future[Any]] = {working, self._catalog_failed}
        await asyncio.wait(watched, return_when=asyncio.FIRST_COMPLETED)
        try:
            if self._catalog_failed.done():
                raise self._catalog_failed.result()
            await working
        except Exception as error:
            if is_damage(error):  # the next start must not trust it
                await asyncio.to_thread(note_damage, self.node.cache.path, error)
            raise

    async def stop(self, grace_s: float) -> None:
        """Once, however often it is called: all callers return when the one stop has ended."""
        if self._stopped is None:
            self._stopped = asyncio.ensure_future(self._stop(grace_s))
        await asyncio.shield(self._stopped)

    async def _newest_out(self, grace_s: float) -> None:
        """Who stops us may be about to take the node: the newest complete checkpoint goes on, as far as it can by then."""
        if self._preemption is None or not self._crew.is_running or self._catalog_failed.done():
            return
        try:
            outcomes = await self._preemption.run("", grace_s, while_it_can=True)
        except ForebayError as error:  # a full disk, perhaps: the stop goes on
            log.warning("the newest checkpoint could not be put first before the stop error=%s", error)
            return
        for outcome in outcomes:
            if outcome.missed:
                session, missed = outcome.session, ",".join(level for level, _ in outcome.missed)
                log.info("stopping; the rest waits in the cache run=%s step=%s levels=%s", session.run, session.step, missed)

    async def _stop(self, grace_s: float) -> None:
        """In order: no new calls, streams and leases end, workers finish their step, movers and catalog end, the lock goes."""
        node = self.node
        for service in ("", *SERVICES):
            await self._health_service.set(service, health_pb2.HealthCheckResponse.NOT_SERVING)
        if self._server is not None:
            await asyncio.gather(self._server.stop(grace_s), self._newest_out(grace_s))
        if self._fd_socket is not None:
            await self._fd_socket.close()
        if self._metrics is not None:
            await self._metrics.close()
        if self._writes is not None:  # gRPC does not wait for handlers that it cancels: they have files to remove yet
            await self._writes.settled(SETTLE_S_MAX)
        await uncut_ended(SETTLE_S_MAX)  # commits, aborts, groups of small shards: their callers are gone, they are not
        stopping = asyncio.ensure_future(self._crew.stop(grace_s))
        await node.movers.stop(min(grace_s, 2.0))
        ended = await stopping
        for tier in node.tiers.values():
            await tier.tier.close()
        token = ""
        if ended and self._writes is not None and not self._writes.open_streams and not uncut_left():
            token = await leave_token(node)
        await node.catalog.close()
        if token:
            await asyncio.to_thread(leave_mark, node.cache.path, token)
        node.io.close()
        node.cache.release()
        for path in self._sockets:  # those of our own: a start that was refused leaves another gateway's alone
            path.unlink(missing_ok=True)


async def open_node(config: Config, source: str, clock: Clock, catalog_failed: "asyncio.Future[BaseException]") -> Node:
    """Disk, catalog, tiers, movers; what was opened is closed again when a later step fails."""

    def failed(error: BaseException) -> None:
        if not catalog_failed.done():
            catalog_failed.set_result(error)

    cache, capacity = await asyncio.to_thread(open_cache, config)
    cache.direct_io = cache.direct_io and config.cache.direct_io == "auto"
    io = IoPool.within(BUFFERS_BYTES, config.cache.chunk_size)
    names = _names(config)
    catalog: Catalog | None = None
    try:
        mark = await asyncio.to_thread(found_mark, cache.path)
        catalog, rebuilt = await open_catalog(cache, names, config.node.id, config.cache.rebuild, source, failed)
        await restore_settings(cache, catalog)
        with catalog.read() as txn:
            used = txn.totals().used
            held = {name for name in names if txn.setting(held_setting(name))}
            roots = {tier.name: txn.setting(root_setting(tier)) for tier in config.tiers}
    except BaseException:
        if catalog is not None:
            await catalog.close()
        io.close()
        cache.release()
        raise
    marks = MarkKeeper(cache, catalog)
    tiers: dict[str, MonitoredTier] = {}
    for tier_config in config.tiers:
        root = roots[tier_config.name]
        opened = open_tier(tier_config, owner=config.node.id, known_root=None if root is None else root.decode())
        tier = MonitoredTier(opened, required=tier_config.required, clock=clock)
        tier.held = tier.name in held
        tier.after_probe = partial(_remember_root, marks, tier_config)
        tiers[tier.name] = tier
    setup = Setup("", config.cache.path, config.cache.chunk_size, config.tiers, config.log.level, config.log.format)
    budget = budget_of(config, catalog, tiers, capacity, used, clock)
    node = Node(
        id=config.node.id,
        config=config,
        clock=clock,
        catalog=catalog,
        cache=cache,
        io=io,
        budget=budget,
        tiers=tiers,
        movers=MoverPool(setup, names, config.node.movers, clock),
        marks=marks,
        clean_mark=mark,
    )
    tell(node, rebuilt)
    return node


def _names(config: Config) -> list[str]:
    return [tier.name for tier in config.tiers]


def root_setting(tier: TierConfig) -> str:
    """Under which name the catalog keeps the mark of a tier's root."""
    return f"root:{tier.name}:{tier.path}"


async def _remember_root(marks: MarkKeeper, tier: TierConfig, proved: Capabilities) -> None:
    """So that after a restart an unmounted, empty directory is not taken for the tier."""
    mark = proved.notes.get("marker")
    if mark is not None:
        name, value = root_setting(tier), mark.encode()
        await marks.change(setting(name, value), lambda txn: txn.set_setting(name, value))


def _metrics(node: Node, admin: AdminService) -> "MetricsEndpoint | None":
    """The collector's endpoint, where one is asked for: its libraries take time and memory that others need not spend."""
    if not node.config.metrics.listen:
        return None
    from forebay_gateway.rpc.metrics import MetricsEndpoint, figures

    def read() -> "Iterable[Metric]":
        with node.catalog.read() as txn:
            uploads = sum(1 for _ in txn.uploads())
        return figures(admin.status(), bool(node.budget.disk_reason), uploads)

    return MetricsEndpoint(node.config.metrics.listen, read)


def _care(
    node: Node,
    finder: Finder,
    reads: ReadPath,
    evictor: Evictor,
    retention: Retention,
    mender: Mender,
    drains: dict[str, Drain],
    expiries: dict[str, Expiry],
) -> Care:
    """The operator's care of what is stored."""
    collector = Collector(node, retention)
    checker = Checker(node, evictor, collector, serving=True)
    return Care(
        verify=Verifier(node, finder, reads, evictor),
        scrub=Scrubber(node, reads, evictor),
        tier_scrubs={name: TierScrubber(node, reads, tier) for name, tier in node.tiers.items()},
        check=checker,
        repair=Repairer(node, checker, mender),
        quarantine=Quarantine(node, evictor),
        collect=collector,
        space=Space(node, finder, reads, evictor),
        drains=drains,
        expiries=expiries,
    )


def handlers(service: Any, servicer: object) -> grpc.GenericRpcHandler:
    """The service's methods, by its descriptor; raw ones without (de)serializers."""
    made: dict[str, grpc.RpcMethodHandler[Any, Any]] = {}
    for method in service.methods:
        raw = method.name in RAW_METHODS
        request, response = method.input_type._concrete_class, method.output_type._concrete_class
        kind = ("stream" if method.client_streaming else "unary", "stream" if method.server_streaming else "unary")
        make = getattr(grpc, f"{kind[0]}_{kind[1]}_rpc_method_handler")
        made[method.name] = make(
            getattr(servicer, method.name),
            request_deserializer=None if raw else parser(request),
            response_serializer=None if method.name in RAW_ANSWERS else response.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(service.full_name, made)
