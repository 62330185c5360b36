"""`plan`: which checkpoint interval the storage carries, and what an interval needs.

Owns the options and where figures come from. The arithmetic is forebay.plan, the simulation the gateway's, and what is printed
in plan_show.py.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer

from forebay import address as addresses
from forebay.cli import plan_show
from forebay.cli.app import Json, chosen_address, client
from forebay.cli.exits import UsageError
from forebay.cli.output import print_json
from forebay.cli.serve import gateway_missing
from forebay.errors import ForebayError
from forebay.plan import needs, plot, ssd, state
from forebay.plan.inputs import NODE_MTBF_S, BadInput, Disk, Inputs, Prices, Tier, check
from forebay.plan.quantities import parse_count, parse_duration, parse_rate, parse_size

_T = TypeVar("_T")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(plan)


def _option(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text)


_DTYPES, _OPTIMIZERS = ", ".join(state.DTYPES), ", ".join(state.OPTIMIZERS)


def plan(
    params: Annotated[str | None, _option("--params", "N", "Parameters of the model, such as 70B.")] = None,
    size: Annotated[str | None, _option("--bytes", "SIZE", "Bytes of a whole checkpoint instead, such as 1.1TB.")] = None,
    dtype: Annotated[str, _option("--dtype", "TYPE", f"Of the weights: {_DTYPES}.")] = "bf16",
    optimizer: Annotated[str, _option("--optimizer", "NAME", f"One of {_OPTIMIZERS}.")] = "adamw",
    master: Annotated[
        bool | None,
        typer.Option("--master/--no-master", help="Whether fp32 master weights are kept (default: below 32 bits, yes)."),
    ] = None,
    loader: Annotated[str, _option("--loader-bytes", "SIZE", "State of a rank's data loader.")] = "64KiB",
    nodes: Annotated[int, _option("--nodes", "N", "Nodes that save together.")] = 1,
    ranks: Annotated[int, _option("--ranks-per-node", "N", "Writers on a node.")] = 8,
    shards: Annotated[int, _option("--shards-per-rank", "N", "Files that each writer saves.")] = 1,
    interval: Annotated[str, _option("--interval", "TIME", "Between two saves, such as 10m.")] = "30m",
    mtbf: Annotated[
        str | None, _option("--mtbf", "TIME", "Mean time between failures of one node (default 264d: Llama 3, 2024).")
    ] = None,
    cost: Annotated[
        str | None, _option("--save-cost", "TIME", "How long a save stops training (default: until it is on NVMe).")
    ] = None,
    restart: Annotated[str, _option("--restart", "TIME", "From a failure until training goes on.")] = "5m",
    tier: Annotated[
        list[str] | None,
        _option(
            "--tier",
            "NAME=RATE[,s3][,every=N]",
            "A tier and what it takes from all nodes together; repeat for more. Without: as measured by the running gateway.",
        ),
    ] = None,
    nvme: Annotated[str, _option("--nvme", "RATE", "Of a node's cache disk.")] = "3GB/s",
    network: Annotated[str, _option("--network", "RATE", "Of a node.")] = "12.5GB/s",
    metadata: Annotated[
        float, _option("--metadata-ops", "N", "Operations a second of a POSIX tier's metadata servers.")
    ] = 10_000,
    puts: Annotated[float, _option("--object-puts", "N", "PUT requests a second (S3: 3,500 for one prefix).")] = 3500,
    headroom: Annotated[float, _option("--headroom", "SHARE", "How busy anything may be on average.")] = 0.7,
    outage: Annotated[str, _option("--outage", "TIME", "How long a tier may be away before saves are refused.")] = "1h",
    cache: Annotated[str | None, _option("--cache", "SIZE", "A node's cache (default: the running gateway's).")] = None,
    keep: Annotated[int, _option("--keep", "N", "Checkpoints kept on an object tier.")] = 5,
    price_month: Annotated[
        float, _option("--price-gib-month", "USD", "Of a GiB for a month (S3 Standard, us-east-1).")
    ] = 0.023,
    price_put: Annotated[float, _option("--price-put-1000", "USD", "Of 1,000 PUT, POST, COPY or LIST requests.")] = 0.005,
    price_get: Annotated[float, _option("--price-get-1000", "USD", "Of 1,000 GET or HEAD requests.")] = 0.0004,
    disk: Annotated[
        Path | None,
        _option("--disk", "DEVICE|FILE", "The cache's disk, read by smartctl or nvme, or a file with the JSON of either."),
    ] = None,
    disk_size: Annotated[str | None, _option("--disk-size", "SIZE", "Its capacity, where it does not say.")] = None,
    dwpd: Annotated[float, _option("--dwpd", "N", "Drive writes a day for which it is rated.")] = 1.0,
    rated_years: Annotated[float, _option("--rated-years", "N", "For how many years.")] = 5.0,
    amplification: Annotated[float, _option("--write-amplification", "N", "Bytes the disk writes for each of ours.")] = 1.1,
    plot_file: Annotated[Path | None, _option("--plot", "FILE", "Also draw it, as .svg or .png (needs matplotlib).")] = None,
    simulate: Annotated[
        bool, typer.Option("--simulate", help="Also run the fleet, event by event, against the first tier.")
    ] = False,
    duration: Annotated[str, _option("--duration", "TIME", "Simulated time.")] = "24h",
    seed: Annotated[int, _option("--seed", "N", "The same seed gives the same simulation.")] = 1,
    jobs: Annotated[int, _option("--jobs", "N", "Equal jobs that share the nodes.")] = 1,
    stagger: Annotated[str, _option("--stagger", "TIME", "Window over which a job's nodes begin to drain.")] = "0s",
    skip: Annotated[bool, typer.Option("--skip", help="A lagging drain skips superseded checkpoints.")] = False,
    json: Json = False,
) -> int:
    """Say what storage a checkpoint interval needs, and which interval the storage carries.

    Everything is computed here; with --tier nothing is asked of a gateway. What cannot be true is refused (exit 2) with the
    nearest value that could; what does not hold is warned of. Rates and sizes are decimal or binary: 20GB/s, 512MiB.

    JSON keys: state (name, bytes, note), inputs, needs (name, scope, unit, needs, has, share, interval_min_s, source),
    saturates_first, interval_young_s, interval_daly_s, interval_safe_s, interval_best_s, limited_by, lost_share,
    lost_share_best, drains (tier, kind, source, node_bytes_per_s, fleet_bytes_per_s, carries_bytes_per_s, drain_s), cache
    (saves, needed_bytes, has_bytes), objects (tier, puts_a_checkpoint, gets_a_checkpoint, puts_a_month, kept_bytes,
    storage_a_month, requests_a_month, total_a_month), wear (bytes_a_day, drive_writes_a_day, rated_drive_writes_a_day,
    endurance_bytes, years, source), warnings (what, nearest), holds, simulation (nodes, jobs, duration_s, seed, saves,
    complete, skipped, dropped, waiting, failures, lost_work_s, restart_s, saving_s, stalled_s, useful_share, backlog_max_bytes,
    backlog_end_bytes, oldest_max_s, drain_mean_s, drain_p99_s, interval_on_tier_s, tier_busy, decisions, events, samples
    (at_s, backlog_bytes, oldest_s, tier_busy)). null means not known; simulation is null without --simulate.
    """
    given: dict[str, Any] = {
        "nodes": nodes,
        "ranks_per_node": ranks,
        "shards_per_rank": shards,
        "interval_s": _read("--interval", parse_duration, interval),
        "mtbf_s": NODE_MTBF_S if mtbf is None else _read("--mtbf", parse_duration, mtbf),
        "restart_s": _read("--restart", parse_duration, restart),
        "save_cost_s": None if cost is None else _read("--save-cost", parse_duration, cost),
        "nvme_bytes_per_s": _read("--nvme", parse_rate, nvme),
        "network_bytes_per_s": _read("--network", parse_rate, network),
        "metadata_ops_per_s": metadata,
        "object_puts_per_s": puts,
        "headroom": headroom,
        "outage_s": _read("--outage", parse_duration, outage),
        "cache_bytes": None if cache is None else _read("--cache", parse_size, cache),
        "keep": keep,
        "prices": Prices(price_month, price_put, price_get),
        "disk": _disk(disk, disk_size, Disk(None, dwpd, rated_years, amplification)),
    }
    items = _state(params, size, dtype, optimizer, nodes * ranks, master, _read("--loader-bytes", parse_size, loader))
    total = sum(item.bytes for item in items)
    try:
        if plot_file is not None:
            plot.ready(plot_file)
        inputs = Inputs(size_bytes=total, tiers=tuple(_tier(text) for text in tier or ()), **given)
        check(inputs)
        inputs = _with_gateway(inputs) if not tier else inputs
        found = needs.make(inputs)
    except (BadInput, plot.CannotPlot) as error:
        raise UsageError(f"plan: {error}") from error
    outcome = None
    if simulate:
        times = _read("--duration", parse_duration, duration), _read("--stagger", parse_duration, stagger)
        outcome = _simulated(found, *times, seed, jobs, skip)
    if plot_file is not None:
        plot.write(plan_show.charts(found, outcome), plot_file)
    if json:
        print_json(plan_show.document(items, found, outcome))
    else:
        plan_show.show(items, found, outcome)
    return 0


def _read(option: str, parse: Callable[[str], _T], text: str) -> _T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"plan: {option}: {error}") from error


def _state(
    params: str | None, size: str | None, dtype: str, optimizer: str, ranks: int, master: bool | None, loader_bytes: int
) -> tuple[state.Item, ...]:
    if (params is None) == (size is None):
        raise UsageError("plan: give either --params (with --dtype and --optimizer) or --bytes")
    if size is not None:
        return (state.Item("checkpoint", _read("--bytes", parse_size, size), "given"),)
    for option, word, known in (("--dtype", dtype, state.DTYPES), ("--optimizer", optimizer, state.OPTIMIZERS)):
        if word not in known:
            near = [name for name in known if name.startswith(word[:1].lower())] or list(known)
            raise UsageError(f"plan: {option} {word!r} is none of {', '.join(known)}; nearest: {near[0]}")
    count = _read("--params", parse_count, str(params))
    if not 1 <= count <= 10**15:
        raise UsageError(f"plan: --params is {count}, and can be 1 to 1000T; nearest: {'1' if count < 1 else '1000T'}")
    if not 0 <= loader_bytes <= 1 << 40:
        raise UsageError(f"plan: --loader-bytes is {loader_bytes}, and can be 0 to 1TiB; nearest: {state.LOADER_BYTES}")
    return state.breakdown(count, dtype, optimizer, max(1, ranks), master=master, loader_bytes=loader_bytes)


def _tier(text: str) -> Tier:
    name, equals, rest = text.partition("=")
    rate, *words = rest.split(",")
    if not equals or not name or not rate:
        raise UsageError(f"plan: --tier {text!r} is none; write it like pfs=20GB/s or object=5GB/s,s3,every=4")
    tier = Tier(name, _read(f"--tier {name}", parse_rate, rate))
    for word in words:
        key, _, value = word.partition("=")
        if word in ("s3", "posix"):
            tier = replace(tier, kind=word)
        elif key == "every" and value.lstrip("-").isdigit() and len(value) < 9:
            tier = replace(tier, every=int(value))
        else:
            raise UsageError(f"plan: --tier {text!r}: {word!r} is none of s3, posix, every=N")
    return tier


def _disk(source: Path | None, size: str | None, disk: Disk) -> Disk:
    disk = replace(disk, capacity_bytes=None if size is None else _read("--disk-size", parse_size, size))
    if source is None:
        return disk
    try:
        return _told_by(disk, ssd.read(source))
    except ValueError as error:
        raise ForebayError(f"--disk: {error}") from error


def _told_by(disk: Disk, found: ssd.Ssd) -> Disk:
    return replace(
        disk,
        capacity_bytes=disk.capacity_bytes or found.capacity_bytes,
        written_bytes=found.written_bytes or 0,
        endurance_bytes=found.endurance_bytes,
        source=f"{found.model or 'disk'} ({found.source})",
    )


def _disk_below(cache: Path, disk: Disk) -> Disk:
    """With what the disk of a gateway's cache says, where it can be asked: it takes root, and smartctl or nvme."""
    device = ssd.device_of(cache)
    if device is None or disk.source != Disk().source:
        return disk
    try:
        return _told_by(disk, ssd.read(device))
    except (ValueError, OSError):
        return disk


def _with_gateway(inputs: Inputs) -> Inputs:
    """The tiers and the cache of the gateway that runs here, where one does. One that was named has to answer."""
    if chosen_address() is None and not os.environ.get(addresses.ENVIRONMENT):
        try:
            addresses.require_listener(None)
        except ForebayError:
            return inputs
    with client() as gateway:
        status = gateway.status()
    tiers = []
    for tier in status.tiers:
        rate = tier.drain_bytes_per_s
        source = f"measured on {status.node} now, times {inputs.nodes}" if rate >= 1e5 else "nothing drains now: not measured"
        tiers.append(Tier(tier.name, rate * inputs.nodes if rate >= 1e5 else None, tier.kind, source))
    cache_bytes = status.cache.capacity_bytes if inputs.cache_bytes is None else inputs.cache_bytes
    disk = (
        _disk_below(Path(status.cache.path), inputs.disk)
        if addresses.resolve(chosen_address()).startswith("unix:")
        else inputs.disk
    )
    return replace(inputs, tiers=tuple(tiers), cache_bytes=cache_bytes, disk=disk)


def _simulated(plan: needs.Plan, duration_s: float, stagger_s: float, seed: int, jobs: int, skip: bool) -> Any:
    inputs = plan.inputs
    if not inputs.tiers or inputs.tiers[0].fleet_bytes_per_s is None:
        raise UsageError("plan: --simulate needs a tier whose rate is known; give one, such as --tier pfs=20GB/s")
    try:
        from forebay_gateway.core.schedule import RunRules
        from forebay_gateway.plan.scenario import Scenario, Unfinishable
        from forebay_gateway.plan.simulate import simulate
    except ModuleNotFoundError as error:
        raise gateway_missing(error) from error
    first = inputs.tiers[0]
    scenario = Scenario(
        nodes=inputs.nodes,
        size_bytes=inputs.size_bytes,
        interval_s=inputs.interval_s,
        tier_bytes_per_s=first.fleet_bytes_per_s or 0.0,
        jobs=jobs,
        duration_s=duration_s,
        seed=seed,
        mtbf_s=inputs.mtbf_s,
        save_cost_s=inputs.cost_s,
        restart_s=inputs.restart_s,
        node_bytes_per_s=inputs.network_bytes_per_s,
        cache_bytes=inputs.cache_bytes,
        stagger_s=stagger_s,
        rules=RunRules(every=first.every, skip_superseded=skip),
    )
    try:
        return simulate(scenario)
    except Unfinishable as error:
        raise UsageError(f"plan: --simulate: {error}") from error
