"""One examination, from top to bottom: look at each place, measure it, look at the node, say how often it carries a checkpoint.

Owns the order. Takes no lock and asks no gateway, which may be told of one: it works beside a running one and without one.
"""

import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forebay_gateway.cache.mounts import existing_ancestor
from forebay_gateway.core.config_sections import Config
from forebay_gateway.core.errors import ForebayError, InvalidArgument
from forebay_gateway.core.quantities import size_text
from forebay_gateway.doctor import fio, node, probe_files, syncs, throughput
from forebay_gateway.doctor.devices import Gauge, Load, device_of, disk_check, disks_of, disks_under, sharing
from forebay_gateway.doctor.filesystem import find_mount, mount_check, space_checks, type_check
from forebay_gateway.doctor.frequency import Measured, highest
from forebay_gateway.doctor.places import Place, explain, look, places_of, refuse_size
from forebay_gateway.doctor.report import Check, Report, rate_text, worst
from forebay_gateway.doctor.striping import striping_check
from forebay_gateway.doctor.tiers import Speeds, measure_s3, prove_posix
from forebay_gateway.doctor.watch import Watch, run_async, watched
from forebay_gateway.doctor.wear import wear_check

_UNEVEN = 0.6
_TOOL_S = 20.0


@dataclass(frozen=True, slots=True)
class Told:
    """What the running gateway of the configuration says of its cache: the tier that shards go through to past a disk that
    fails, empty for none, and why its pressure is what it is."""

    through: str
    reason: str


@dataclass(frozen=True, slots=True)
class Options:
    """Sizes are bytes. The numbers of small acts are bounded in time as well."""

    size: int = 1 << 30
    nodes: int = 1
    data: Path | None = None
    rounds: int = 3
    small: int = 500
    small_s: float = 1.0  # for each kind of small act
    documents: int = 20
    quiet_s: float = 0.5  # a look at the disk before it is written
    still_s_max: float = 120.0  # without any progress
    told: Told | None = None  # None: no gateway answers


@dataclass(slots=True)
class _Found:
    """What measuring gave so far: also where it broke off."""

    checks: list[Check] = field(default_factory=list)
    speeds: Speeds = field(default_factory=Speeds)


def examine(config: Config, source: str, options: Options, tell: Callable[[str], None] = lambda line: None) -> Report:
    """Everything about the cache, the tiers and this node. `source` names the configuration; `tell` gets a line for each step.

    Raises InvalidArgument, before anything is written, for a size that does not fit and for sample data that are not there.
    An interrupt in the middle removes what was made and goes on. What is wrong with a place is a check, never an error.
    """
    if options.data is not None and not options.data.is_dir():
        nearest = existing_ancestor(options.data)
        raise InvalidArgument(f"--data {options.data} is no directory; the nearest that is there: {nearest}")
    size = -(-options.size // throughput.ALIGN_BYTES) * throughput.ALIGN_BYTES
    places = places_of(config)
    for place in places:
        _guarded(place, lambda watch, place=place: look(place), options)  # type: ignore[misc]
    refuse_size(places, size)
    tcp = node.read_tcp()
    measured = []
    for place in places:
        tell(f"{place.name}: {place.kind}" + (f" at {place.path}" if place.path is not None else ""))
        measured.append(_measure(place, places, size, options))
    if options.told is not None:
        places[0].checks.append(through_check(options.told))
    checks = [check for place in places for check in place.checks]
    checks += [*_node_checks(places, measured[0], tcp, options), node.listen_check(config.node.listen)]
    return Report(source, size, options.nodes, worst(checks), tuple(checks), highest(_carrying(places, measured), size))


def through_check(told: Told) -> Check:
    """Whether saves go past the cache."""
    why = "what goes past the cache goes at the tier's pace, and has no second copy on this node"
    if not told.through:
        return Check("cache", "write_through", "OK", "shards go into the cache", why)
    todo = (
        "see the kernel's log; replace the disk of cache.path once its queue is empty, if it can still be read, and start the "
        "gateway again: the other tiers get what went through once the cache's disk takes writes"
    )
    return Check("cache", "write_through", "WARN", told.reason, why, todo, {"tier": told.through})


def _guarded(place: Place, act: Callable[[Watch], object], options: Options) -> None:
    """`act` on a thread of its own; what it raises becomes a check."""
    try:
        watched(act, options.still_s_max)
    except (ForebayError, OSError, ValueError) as error:
        place.fail(*explain(error, place.path))


# -- one place -------------------------------------------------------------------------------------------------------------


def _measure(place: Place, places: list[Place], size: int, options: Options) -> Speeds:
    found = _Found()
    if place.usable:
        _guarded(place, lambda watch: _measure_on_thread(place, places, size, options, found, watch), options)
    place.checks += list(found.checks)
    return found.speeds if place.usable else Speeds()


def _measure_on_thread(place: Place, places: list[Place], size: int, options: Options, found: _Found, watch: Watch) -> None:
    if place.kind == "memory":
        found.checks.append(
            Check(
                place.name, "path", "WARN", "a tier in memory", "nothing of it outlives the gateway", "use it for trials only"
            )
        )
    elif place.kind == "s3":
        assert place.tier is not None
        tier = place.tier
        found.speeds = run_async(lambda: measure_s3(tier, size, options.rounds, options.documents, watch, found.checks), watch)
        found.checks += [
            _write_check(place.name, found.speeds.writes, "S3 put", None),
            _read_check(place.name, found.speeds.read),
        ]
    else:
        _measure_directory(place, places, size, options, found, watch)


def _measure_directory(place: Place, places: list[Place], size: int, options: Options, found: _Found, watch: Watch) -> None:
    assert place.path is not None and place.mount is not None
    own = probe_files.in_cache if place.kind == "cache" else probe_files.in_tier
    with own(place.path) as directory:
        direct = place.direct and throughput.takes_direct(directory)
        before = _quiet(place.device, options.quiet_s, watch)
        gauge = Gauge(place.device)
        tool, speeds = _writes(directory, size, direct, options.rounds, watch)
        during = gauge.load()
        speeds.read = throughput.read(directory / "data", direct, watch)
        (directory / "data").unlink()
        found.checks += [
            _write_check(place.name, speeds.writes, tool, direct),
            _read_check(place.name, speeds.read, direct),
            disk_check(place.name, place.device, before, during),
            syncs.fsync_check(place.name, syncs.fsync_rate(directory, watch, options.small, options.small_s)),
            syncs.create_check(place.name, syncs.create_rate(directory, watch, options.small, options.small_s)),
        ]
        found.speeds = speeds
    found.checks += _of_the_file_system(place, size, options, watch)
    found.checks += _apart(place, places)
    if place.marked and place.tier is not None:
        tier = place.tier
        run_async(lambda: prove_posix(tier, found.checks), watch)


def _quiet(device: str, seconds: float, watch: Watch) -> Load | None:
    gauge = Gauge(device)
    watch.pause(seconds)
    return gauge.load()


def _writes(directory: Path, size: int, direct: bool, rounds: int, watch: Watch) -> tuple[str, Speeds]:
    """By fio where it is installed and works, else by the own probe; the last file stays, to be read."""
    path, pattern, tool = directory / "data", throughput.Pattern(), ""
    program = fio.find() if direct else ""  # through the page cache its progress is not to be seen
    speeds = Speeds()
    if program:
        try:
            for _ in range(rounds):
                path.unlink(missing_ok=True)
                speeds.writes.append(fio.write(program, path, size, watch))
            return "fio", speeds
        except fio.FioFailed as error:
            tool = f"own probe; fio did not work: {error}"
            speeds = Speeds()
    for _ in range(rounds):
        path.unlink(missing_ok=True)
        speeds.writes.append(throughput.write(path, size, direct, pattern, watch))
    return tool or "own probe", speeds


def _write_check(where: str, rates: list[float], tool: str, direct: bool | None) -> Check:
    mean = sum(rates) / len(rates)
    uneven = min(rates) < _UNEVEN * max(rates)
    way = "" if direct is None else ", O_DIRECT" if direct else ", through the page cache"
    return Check(
        where,
        "write",
        "WARN" if uneven else "OK",
        f"{rate_text(mean)}, the mean of {', '.join(rate_text(each) for each in rates)} ({tool}{way})",
        "it bounds how long a save, or its drain, takes",
        "the rounds differ: find who else uses it, and measure again when it is quiet" if uneven else "",
        {"bytes_per_s": mean, "rounds_bytes_per_s": rates, "tool": tool.partition(";")[0], "direct": direct},
    )


def _read_check(where: str, rate: float | None, direct: bool | None = None) -> Check:
    assert rate is not None
    if direct is None:
        value = f"{rate_text(rate)} in one request"
    else:
        value = f"{rate_text(rate)}, cold (own probe, {'O_DIRECT' if direct else 'its pages dropped before'})"
    why = "it bounds restores, and the drain, which reads every byte once more"
    return Check(where, "read", "OK", value, why, "", {"bytes_per_s": rate, "direct": direct})


def _of_the_file_system(place: Place, size: int, options: Options, watch: Watch) -> list[Check]:
    assert place.path is not None and place.mount is not None

    def tool(command: list[str]) -> str | None:
        watch.tick()
        return _output_of(command)

    found = [type_check(place.name, place.kind, place.mount), mount_check(place.name, place.mount)]
    striping = striping_check(place.name, place.path, place.mount.file_system, options.nodes, tool)
    if striping is not None:
        found.append(striping)
    found += space_checks(place.name, place.path, size, place.capacity)
    found += [wear_check(place.name, disk, tool) for disk in sorted(disks_under(place.device))]
    return found


def _output_of(command: list[str]) -> str | None:
    """What a tool says; None where it is not installed, hangs or says nothing. smartctl's exit code is a set of bits."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout or None


def _apart(place: Place, places: list[Place]) -> list[Check]:
    """Whether a tier's copies would be lost together with the cache."""
    if place.kind != "posix":
        return []
    shares = bool(sharing(place.disks, {"cache": places[0].disks}))
    return [
        Check(
            place.name,
            "apart",
            "WARN" if shares else "OK",
            f"on the cache's disk ({', '.join(sorted(place.disks))})" if shares else "not on the cache's disk",
            "a disk that fails takes both copies, and saves and drains take turns on it",
            "put the tier on shared storage, or at least on another disk" if shares else "",
            {"shares_with": "cache" if shares else ""},
        )
    ]


# -- the node --------------------------------------------------------------------------------------------------------------


def _node_checks(places: list[Place], cache: Speeds, tcp: node.Tcp | None, options: Options) -> list[Check]:
    found = []
    if options.data is not None:
        disks = {place.name: place.disks for place in places}
        found.append(node.sample_data_check(options.data, sharing(_disks(options.data), disks)))
    rate = sum(cache.writes) / len(cache.writes) if cache.writes else None
    found.append(node.dirty_check(node.read_vm(), node.read_available(), rate))
    found += [node.tcp_check(tcp, node.read_tcp()), node.open_files_check()]
    return found


def _disks(path: Path) -> frozenset[str]:
    try:
        return disks_of(path, device_of(path, find_mount(path).source))
    except (OSError, ValueError):
        return frozenset()


def _carrying(places: list[Place], measured: list[Speeds]) -> list[Measured]:
    """What the arithmetic needs of each place; a tier in memory carries nothing."""
    found = []
    for place, speeds in zip(places, measured, strict=True):
        if place.kind == "memory":
            continue
        proved = any(check.check == "checksums" and check.figures["full_object"] for check in place.checks)
        found.append(
            Measured(
                place.name,
                sum(speeds.writes) / len(speeds.writes) if speeds.writes else None,
                None if proved else speeds.read,
                place.tier.bandwidth if place.tier is not None else None,
                place.disks,
                place.required,
            )
        )
    return found


def sentence(report: Report) -> str:
    """The last line."""
    found, size = report.frequency, size_text(report.size_bytes)
    if found.interval_s is None or found.bytes_per_s is None:
        return f"highest checkpoint frequency now: none, {found.reason}"
    each = "; ".join(f"{part.name} {part.seconds:.2f} s" for part in found.parts)
    return (
        f"highest checkpoint frequency now: {size} every {found.interval_s:.2f} s ({found.per_hour:,.0f} an hour, "
        f"{rate_text(found.bytes_per_s)}), bounded by {found.bounded_by}: {found.reason} ({each})"
    )
