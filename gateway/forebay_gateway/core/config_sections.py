"""Every section and key of the configuration, with its meaning and default: what README's table shows.

Owns the keys. Does not own how they are read from TOML and the environment, nor the rules across them (core/config.py).
"""

from typing import Annotated, Any

import msgspec

from forebay_gateway.core.config_keys import Cadence, Key
from forebay_wire.sockets import SYSTEM_SOCKET

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
DAY_S = 86400.0


def _key(description: str, read: str, **facts: Any) -> msgspec.Meta:
    return msgspec.Meta(description=description, extra={"key": Key(read, **facts)})


EACH = Cadence()


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[node]: this gateway and how it is reached. Durations are seconds."""

    id: Annotated[
        str, _key("Name of this node on the tiers and in status; unique in the cluster.", "node id", default="host name")
    ]
    listen: Annotated[
        tuple[str, ...],
        _key(
            "Addresses to serve: `unix:///path` and `host:port`. A port has no authentication, no TLS: trusted networks only.",
            "list of addresses",
            default=f"`unix://{SYSTEM_SOCKET}`; when not root below `$XDG_RUNTIME_DIR`, else below `/tmp/forebay-<uid>`",
        ),
    ]
    runtime_dir: Annotated[
        str,
        _key("Directory for sockets and other files of a running gateway.", "path", default="directory of the first socket"),
    ]
    advertise: Annotated[
        str,
        _key("Reserved for reads between nodes, which are not in this release: it is checked, and nothing uses it.", "address"),
    ] = ""
    abandon_after: Annotated[
        float, _key("A session silent for this long loses its shards that were never committed.", "duration", low=1)
    ] = 3600.0
    complete_within: Annotated[
        float,
        _key(
            "After this long a checkpoint that lacks a writer's commit is reported incomplete, with an alarm, and waits end.",
            "duration",
            low=1,
        ),
    ] = 3600.0
    takeover_after: Annotated[
        float, _key("After this long another gateway than writer 0's may complete a checkpoint on a tier.", "duration", low=1)
    ] = 60.0
    stream_timeout: Annotated[
        float, _key("A stream of a shard that sends nothing for this long is ended, and nothing of it kept.", "duration", low=1)
    ] = 60.0
    movers: Annotated[
        int,
        _key("Mover processes that fetch for restores; each tier's drain has one of its own.", "whole number", low=1, high=16),
    ] = 1
    drain_timeout: Annotated[
        float,
        _key(
            "Time at SIGTERM for work under way and for the newest complete checkpoint to get out, before it is cancelled.",
            "duration",
            high=3600,
        ),
    ] = 20.0


class CacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[cache]: the NVMe directory that takes the surge. Sizes are bytes, watermarks fractions of capacity."""

    path: Annotated[str, _key("Directory of shards and catalog, on a local disk.", "path", default="required")]
    capacity: Annotated[
        int | None, _key("Bytes the cache may fill, footers and padding included.", "size", low=1, default="80% of the disk")
    ] = None
    chunk_size: Annotated[
        int, _key("Unit of checksums and transfer, a power of two.", "power-of-two size", low=64 * KIB, high=64 * MIB)
    ] = 4 * MIB
    soft: Annotated[
        float,
        _key(
            "Fill above which verified shards are evicted, oldest first, and writers are slowed by what is not verified yet.",
            "fraction",
            low=0.01,
            high=1,
        ),
    ] = 0.60
    hard: Annotated[
        float,
        _key("Fill at which writers are slowest, and pressure is reported as `hard`.", "fraction", low=0.01, high=1),
    ] = 0.90
    refuse: Annotated[float, _key("Fill at which new shards are refused.", "fraction", low=0.01, high=1)] = 0.95
    reopen: Annotated[float, _key("Fill below which refused writers are let in again.", "fraction", low=0.01, high=1)] = 0.85
    catalog_reserve: Annotated[int, _key("Bytes kept free on the disk for the catalog.", "size", low=MIB)] = 256 * MIB
    max_dirty_age: Annotated[
        float,
        _key(
            "Once the oldest shard that waits for a required tier is this old, writers are slowed as at the hard watermark, "
            "whatever the fill; 0 or `off`: no limit.",
            "duration or off",
        ),
    ] = 0.0
    direct_io: Annotated[
        str, _key("`auto` uses O_DIRECT where the file system has it; `off` never does.", "choice", choices=("auto", "off"))
    ] = "auto"
    pack: Annotated[
        str,
        _key(
            "`auto` puts small shards (below 1 MiB) together into pack files where they are many: 64 in a request or in their "
            "part so far; `never` gives each a file of its own, which other software can read on a tier.",
            "choice",
            choices=("auto", "never"),
        ),
    ] = "auto"
    repair: Annotated[
        str,
        _key(
            "`auto` replaces bytes that were found damaged, in the cache or on a tier, from another good copy; "
            "`ask` leaves them in quarantine for `forebay repair`.",
            "choice",
            choices=("auto", "ask"),
        ),
    ] = "auto"
    rebuild: Annotated[
        str,
        _key(
            "A catalog that is lost or damaged: `auto` rebuilds it from the cache's files at start and keeps the damaged one "
            "aside; `ask` refuses to start and says what to run.",
            "choice",
            choices=("auto", "ask"),
        ),
    ] = "auto"
    scrub_rate: Annotated[
        int,
        _key("Most bytes a second that the background scrub reads; 0 or `off`: no scrub.", "size per second or off", live=True),
    ] = 50 * MIB
    scrub_every: Annotated[
        float, _key("Pause between scrubs of the whole cache; 0 or `off`: only when started.", "duration or off", live=True)
    ] = 7 * DAY_S


class TierConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[[tier]]: one place that shards drain to. Keys of another kind are errors."""

    name: Annotated[str, _key("Name of the tier, used as a level in waits and status.", "tier name", default="required")]
    kind: Annotated[str, _key("What the tier is.", "choice", choices=("posix", "s3", "memory"), default="required")]
    required: Annotated[bool, _key("Whether a shard must be verified here before the cache may evict it.", "true or false")] = (
        True
    )
    every: Annotated[
        Cadence,
        _key(
            "Each how many periodic checkpoints of a run go to the tier, or after what time the next one does.",
            "cadence",
            live=True,
        ),
    ] = EACH
    fleet_bandwidth: Annotated[
        int | None,
        _key(
            "Most bytes a second that all nodes together send to the tier; each takes an equal share of it, by the number of "
            "nodes that are alive.",
            "size per second",
            low=64 * KIB,
            default="no limit",
            live=True,
        ),
    ] = None
    stagger: Annotated[
        float,
        _key(
            "Window over which nodes spread the beginnings of their drains of periodic checkpoints, each at an offset of its "
            "own; 0 or `off`: all begin at once.",
            "duration or off",
            high=3600,
            live=True,
        ),
    ] = 0.0
    bandwidth: Annotated[
        int | None,
        _key(
            "Most bytes a second that this node sends to the tier.",
            "size per second",
            low=64 * KIB,
            default="no limit",
            live=True,
        ),
    ] = None
    iops: Annotated[
        int | None,
        _key("Most requests a second that this node sends to the tier.", "whole number", low=1, default="no limit", live=True),
    ] = None
    concurrency: Annotated[int, _key("Transfers at a time for each mover.", "whole number", low=1, high=256, live=True)] = 4
    scrub_rate: Annotated[
        int,
        _key(
            "Most bytes a second read back from the tier to find silent damage; 0 or `off`: never.",
            "size per second or off",
            live=True,
        ),
    ] = 20 * MIB
    scrub_every: Annotated[
        float | None,
        _key(
            "Pause between such readings of all that this node put there; 0 or `off`: only when started.",
            "duration or off",
            default="30d; 180d for S3",
            live=True,
        ),
    ] = None
    path: Annotated[str, _key("Directory of the tier.", "path", only="posix", default="required")] = ""
    bucket: Annotated[str, _key("Bucket of the tier.", "bucket", only="s3", default="required")] = ""
    prefix: Annotated[str, _key("Keys begin with this and a `/`; empty: the bucket's root.", "key prefix", only="s3")] = ""
    endpoint: Annotated[str | None, _key("Server, where it is not AWS.", "URL", only="s3", default="AWS")] = None
    region: Annotated[str | None, _key("Region.", "text", only="s3", default="AWS chain")] = None
    addressing: Annotated[
        str, _key("Where the bucket's name stands.", "choice", only="s3", choices=("auto", "path", "virtual"))
    ] = "auto"
    sign_payload: Annotated[
        bool, _key("Sign bodies too; costs CPU, and CRC32C protects them already.", "true or false", only="s3")
    ] = False
    part_size: Annotated[
        int | None,
        _key(
            "Bytes in each part of a multipart upload.",
            "size",
            only="s3",
            low=5 * MIB,
            high=5 * GIB,
            default="from the object's size",
        ),
    ] = None


class PolicyConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[[policy]]: what holds for the runs of a glob; the first that fits a run counts for it."""

    run: Annotated[
        str,
        _key(
            "Runs that this is for: `*` and `?` within a segment, `**` for any number of them.", "run glob", default="required"
        ),
    ]
    tiers: Annotated[
        tuple[str, ...] | None,
        _key("Tiers that these checkpoints go to, of those configured.", "list of tiers", default="all"),
    ] = None
    every: Annotated[
        Cadence | None,
        _key("As `tier.every`, for these runs and each of their tiers.", "cadence", default="the tier's"),
    ] = None
    skip: Annotated[
        bool,
        _key(
            "Whether a drain that lags may leave out periodic checkpoints that a newer complete one supersedes; never a pinned "
            "or final one.",
            "true or false",
        ),
    ] = False
    class_: Annotated[
        str,
        _key(
            "Class of these checkpoints where the save does not name one; `final` ones go first and are never left out.",
            "choice",
            choices=("periodic", "final"),
        ),
    ] = "periodic"
    quota: Annotated[
        int | None,
        _key(
            "Bytes of the cache that each of these runs may hold while they wait for a tier.", "size", low=MIB, default="none"
        ),
    ] = None
    transient: Annotated[
        bool,
        _key("Cache only: never drained, evicted first, and every acknowledgement says so.", "true or false"),
    ] = False


class RetainConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[[retain]]: what a tier keeps of the runs of a glob: all that any of the keys asks for. The first that fits counts."""

    run: Annotated[
        str,
        _key(
            "Runs that this is for, as `policy.run`. A rule needs one of the keys `keep_*`, or several.",
            "run glob",
            default="required",
        ),
    ]
    tier: Annotated[str, _key("Tier that this is for; empty: each of them.", "tier or none")] = ""
    keep_last: Annotated[
        int | None, _key("The newest complete checkpoints to keep, by commit.", "whole number", low=1, default="none")
    ] = None
    keep_every: Annotated[
        int | None, _key("Keep those whose step is a multiple of this.", "whole number", low=1, default="none")
    ] = None
    keep_for: Annotated[float | None, _key("Keep what was committed within this time.", "duration", low=1, default="none")] = (
        None
    )


class MetricsConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[metrics]: figures for collectors."""

    listen: Annotated[
        str,
        _key("Address, `host:port`, that answers `GET /metrics` in Prometheus' text format; empty: none.", "address"),
    ] = ""


class LogConfig(msgspec.Struct, frozen=True, kw_only=True):
    """[log]: what goes to standard error."""

    level: Annotated[
        str, _key("Least severe record shown.", "choice", choices=("debug", "info", "warning", "error"), live=True)
    ] = "info"
    format: Annotated[
        str, _key("`text` for people, `json` for collectors, one object a line.", "choice", choices=("text", "json"))
    ] = "text"


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Everything the gateway is told."""

    node: NodeConfig
    cache: CacheConfig
    tiers: tuple[TierConfig, ...]
    policies: tuple[PolicyConfig, ...] = ()
    retain: tuple[RetainConfig, ...] = ()
    metrics: MetricsConfig = MetricsConfig()
    log: LogConfig = LogConfig()
