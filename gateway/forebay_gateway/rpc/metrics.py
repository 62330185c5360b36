"""`GET /metrics`: what status says, as figures for a Prometheus collector. Off unless [metrics] listen is set.

Owns the names of the figures and the endpoint. Does not own what is counted: each scrape reads the same status
that operators see.
"""

import logging
from collections.abc import Callable, Iterable

from aiohttp import web
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from forebay_gateway.core.errors import StartupError
from forebay_wire.v1 import admin_pb2 as pb

log = logging.getLogger("forebay.metrics")

LEVELS = ("ok", "soft", "hard", "refusing")
SEVERITIES = ("critical", "warning")


def figures(status: pb.Status, disk_full: bool, open_uploads: int) -> Iterable[Metric]:
    """Everything that is exposed. Bytes, seconds and counts, as their names say."""

    def gauge(name: str, what: str, value: float) -> Metric:
        return GaugeMetricFamily(f"forebay_{name}", what, value)

    cache = status.cache
    yield gauge("uptime_seconds", "Since the gateway began.", status.uptime_s)
    yield gauge("cache_capacity_bytes", "Bytes the cache may fill.", cache.capacity_bytes)
    yield gauge("cache_used_bytes", "Bytes of files in the cache.", cache.used_bytes)
    yield gauge("cache_reserved_bytes", "Bytes promised to shards that are on their way.", cache.reserved_bytes)
    yield gauge("cache_dirty_bytes", "Bytes that some required tier does not hold yet.", cache.dirty_bytes)
    yield gauge("cache_disk_full", "1 while the cache's disk or the catalog has no space left.", disk_full)
    yield gauge("cache_oldest_dirty_seconds", "Age of the oldest shard that some required tier lacks.", cache.oldest_dirty_s)
    yield gauge("admission_waiting", "Requests that wait for space.", status.pressure.waiting)
    yield gauge("writers_slowed", "1 while writers are slowed.", status.pressure.HasField("writers_bytes_per_s"))
    yield gauge("open_streams", "Shards being received.", cache.open_streams)
    yield gauge("open_uploads", "Multipart uploads that were begun and neither completed nor aborted.", open_uploads)
    yield gauge("loop_lag_seconds", "Lag of the event loop, 99 of 100, of the last minute.", status.loop_lag_p99_s)
    pressure = GaugeMetricFamily("forebay_pressure", "1 at the level that holds.", labels=["level"])
    for level in LEVELS:
        pressure.add_metric([level], level == status.pressure.level)
    yield pressure
    through = GaugeMetricFamily("forebay_write_through", "1 while shards go past the cache to the tier.", labels=["tier"])
    for tier in status.tiers:
        through.add_metric([tier.name], tier.name == status.pressure.through)
    yield through
    checkpoints = GaugeMetricFamily("forebay_checkpoints", "Checkpoints known here.", labels=["state"])
    checkpoints.add_metric(["complete"], status.checkpoints_complete)
    checkpoints.add_metric(["incomplete"], status.checkpoints_incomplete)
    yield checkpoints
    alarms = GaugeMetricFamily("forebay_alarms", "Alarms now, as `forebay status` shows them.", labels=["severity"])
    for severity in SEVERITIES:
        alarms.add_metric([severity], sum(alarm.severity == severity for alarm in status.alarms))
    yield alarms
    restarts = CounterMetricFamily("forebay_mover_restarts", "Times that a mover died.", labels=["mover"])
    for mover in status.movers:
        restarts.add_metric([mover.name], mover.restarts)
    yield restarts
    yield from _of_tiers(status.tiers)


def _of_tiers(tiers: Iterable[pb.TierStatus]) -> Iterable[Metric]:
    state = GaugeMetricFamily("forebay_tier_state", "1 for the state that holds.", labels=["tier", "state"])
    copies = GaugeMetricFamily("forebay_tier_pending_copies", "Copies that wait for the tier.", labels=["tier"])
    size = GaugeMetricFamily("forebay_tier_pending_bytes", "Their bytes.", labels=["tier"])
    oldest = GaugeMetricFamily("forebay_tier_oldest_pending_seconds", "How long the oldest has waited.", labels=["tier"])
    rate = GaugeMetricFamily("forebay_tier_drain_bytes_per_second", "Bytes a second sent, smoothed.", labels=["tier"])
    for tier in tiers:
        state.add_metric([tier.name, tier.state], 1)
        copies.add_metric([tier.name], tier.pending_copies)
        size.add_metric([tier.name], tier.pending_bytes)
        oldest.add_metric([tier.name], tier.oldest_pending_s)
        rate.add_metric([tier.name], tier.drain_bytes_per_s)
    return state, copies, size, oldest, rate


class _Now(Collector):
    def __init__(self, read: Callable[[], Iterable[Metric]]) -> None:
        self._read = read

    def collect(self) -> Iterable[Metric]:
        """What is so at this moment."""
        return self._read()


class MetricsEndpoint:
    """One HTTP listener of one path."""

    def __init__(self, listen: str, read: Callable[[], Iterable[Metric]]) -> None:
        self._listen = listen
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(_Now(read))
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        """Serve. Raises StartupError where the address cannot be had."""
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        host, _, port = self._listen.rpartition(":")
        try:
            await web.TCPSite(self._runner, host.strip("[]"), int(port)).start()
        except OSError as error:
            await self.close()
            raise StartupError(f"metrics.listen {self._listen}: {error.strerror}; choose another address") from error

    async def _answer(self, _request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(self._registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    async def close(self) -> None:
        """End it; once is enough."""
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
