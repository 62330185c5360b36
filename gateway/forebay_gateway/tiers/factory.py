"""From a tier's configuration to a tier with its decorators. The only place that knows all kinds.

Owns the order: metered, around retrying, around throttled, around the tier. So waits and repetitions count into latency, and
every repetition is paced.
"""

from pathlib import Path

from forebay_gateway.base.clock import Clock, SystemClock
from forebay_gateway.core.config_sections import TierConfig
from forebay_gateway.core.errors import InvalidArgument, Unsupported
from forebay_gateway.core.fleet import share_of
from forebay_gateway.tiers.base import Tier
from forebay_gateway.tiers.memory import MemoryTier
from forebay_gateway.tiers.metered import MeteredTier, TierMeter
from forebay_gateway.tiers.posix.stream import PosixStream
from forebay_gateway.tiers.posix.tier import PosixTier
from forebay_gateway.tiers.retrying import RetryingTier, RetryPolicy
from forebay_gateway.tiers.s3.parts import part_size
from forebay_gateway.tiers.stream import ShardStream, StreamOptions
from forebay_gateway.tiers.throttled import PacedStream, ThrottledTier
from forebay_gateway.tiers.wrapper import TierWrapper


def open_tier(
    config: TierConfig,
    clock: Clock | None = None,
    meter: TierMeter | None = None,
    policy: RetryPolicy | None = None,
    owner: str = "",
    known_root: str | None = None,
) -> Tier:
    """A tier ready for use; nothing is touched or connected before its first verb. Counts into `meter` where one is given.

    `owner` is the node, in the one process of it that writes documents: what it left half-written is known by this name.
    `known_root` is the mark that a POSIX tier's root had when it was last seen: only that root is taken for the tier.
    """
    clock = clock or SystemClock()
    tier = _bare(config, clock, owner, known_root)
    bandwidth = share_of(config.fleet_bandwidth, 1, config.bandwidth)  # until it is known how many nodes there are
    tier = ThrottledTier(tier, clock, bandwidth, config.iops)  # also without a limit: one may be set while it is in use
    tier = RetryingTier(tier, clock, policy)
    return tier if meter is None else MeteredTier(tier, meter)


def _bare(config: TierConfig, clock: Clock, owner: str, known_root: str | None) -> Tier:
    match config.kind:
        case "memory":
            return MemoryTier(config.name)
        case "posix":
            path = Path(config.path)
            return PosixTier(config.name, path, concurrency=config.concurrency, clock=clock, owner=owner, known_id=known_root)
        case "s3":
            return _s3_tier(config, clock, owner)
    raise InvalidArgument("no such kind of tier", tier=config.name, kind=config.kind)


def _s3_tier(config: TierConfig, clock: Clock, owner: str) -> Tier:
    # Here: its client library is half of what a gateway imports, which one without an object store need not wait for.
    from forebay_gateway.tiers.s3.client import S3Settings
    from forebay_gateway.tiers.s3.tier import S3Tier

    settings = S3Settings(
        bucket=config.bucket,
        prefix=config.prefix,
        endpoint=config.endpoint,
        region=config.region,
        addressing=config.addressing,
        sign_payload=config.sign_payload,
        part_size=config.part_size,
        concurrency=config.concurrency,
    )
    return S3Tier(config.name, settings, clock=clock, owner=owner)


def takes_stream(config: TierConfig, tier: Tier, size: int | None, chunk_size: int) -> bool:
    """Whether a shard of `size` bytes (None: not known) can be put there while it arrives, in bounded memory."""
    if config.kind == "posix":
        return True
    if config.kind != "s3" or tier.capabilities is None:
        return False
    return tier.capabilities.multipart or (size is not None and size <= part_size(size, chunk_size, config.part_size))


def open_stream(tier: Tier, key: str, options: StreamOptions) -> ShardStream:
    """A shard to be put on the tier while it arrives, at the tier's pace; nothing is touched before begin(). Raises
    Unsupported."""
    throttles = []
    while isinstance(tier, TierWrapper):
        if isinstance(tier, ThrottledTier):
            throttles.append(tier)
        tier = tier.inner
    stream = _bare_stream(tier, key, options)
    for throttle in throttles:
        stream = PacedStream(stream, throttle)
    return stream


def _bare_stream(tier: Tier, key: str, options: StreamOptions) -> ShardStream:
    if isinstance(tier, PosixTier):
        return PosixStream(tier, key, options)
    if tier.kind == "s3":
        from forebay_gateway.tiers.s3.stream import S3Stream
        from forebay_gateway.tiers.s3.tier import S3Tier

        if isinstance(tier, S3Tier):
            return S3Stream(tier, key, options)
    raise Unsupported("the tier takes no shard while it arrives", tier=tier.name, kind=tier.kind)
