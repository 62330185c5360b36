"""`plan`: which checkpoint interval the storage carries, and what an interval needs.

Owns where figures come from; the options are plan_options.py's. The arithmetic is forebay.plan, the simulation the gateway's,
and what is printed in plan_show.py.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import typer

from forebay import address as addresses
from forebay.cli import plan_show
from forebay.cli.app import chosen_address, client, taking
from forebay.cli.exits import UsageError
from forebay.cli.output import print_json
from forebay.cli.plan_options import Options
from forebay.cli.serve import gateway_missing
from forebay.errors import ForebayError
from forebay.plan import needs, plot, ssd, state
from forebay.plan.inputs import NODE_MTBF_S, BadInput, Disk, Inputs, Prices, Tier, check
from forebay.plan.quantities import parse_count, parse_duration, parse_rate, parse_size

_T = TypeVar("_T")


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(taking(Options, plan))


def plan(options: Options) -> int:
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
    items = _state(options)
    try:
        if options.plot_file is not None:
            plot.ready(options.plot_file)
        inputs = _inputs(options, sum(item.bytes for item in items))
        check(inputs)
        found = needs.make(inputs if options.tier else _with_gateway(inputs))
    except (BadInput, plot.CannotPlot) as error:
        raise UsageError(f"plan: {error}") from error
    outcome = _simulated(found, options) if options.simulate else None
    if options.plot_file is not None:
        plot.write(plan_show.charts(found, outcome), options.plot_file)
    if options.json:
        print_json(plan_show.document(items, found, outcome))
    else:
        plan_show.show(items, found, outcome)
    return 0


def _inputs(options: Options, size_bytes: int) -> Inputs:
    cost, cache = options.cost, options.cache
    return Inputs(
        size_bytes=size_bytes,
        tiers=tuple(map(_tier, options.tier or ())),
        nodes=options.nodes,
        ranks_per_node=options.ranks,
        shards_per_rank=options.shards,
        interval_s=_read("--interval", parse_duration, options.interval),
        mtbf_s=NODE_MTBF_S if options.mtbf is None else _read("--mtbf", parse_duration, options.mtbf),
        restart_s=_read("--restart", parse_duration, options.restart),
        save_cost_s=None if cost is None else _read("--save-cost", parse_duration, cost),
        nvme_bytes_per_s=_read("--nvme", parse_rate, options.nvme),
        network_bytes_per_s=_read("--network", parse_rate, options.network),
        metadata_ops_per_s=options.metadata,
        object_puts_per_s=options.puts,
        headroom=options.headroom,
        outage_s=_read("--outage", parse_duration, options.outage),
        cache_bytes=None if cache is None else _read("--cache", parse_size, cache),
        keep=options.keep,
        prices=Prices(options.price_month, options.price_put, options.price_get),
        disk=_disk(options),
    )


def _read(option: str, parse: Callable[[str], _T], text: str) -> _T:
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"plan: {option}: {error}") from error


def _state(options: Options) -> tuple[state.Item, ...]:
    params, size, dtype, optimizer = options.params, options.size, options.dtype, options.optimizer
    loader_bytes, ranks = _read("--loader-bytes", parse_size, options.loader), options.nodes * options.ranks
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
    return state.breakdown(count, dtype, optimizer, max(1, ranks), master=options.master, loader_bytes=loader_bytes)


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


def _disk(options: Options) -> Disk:
    size = None if options.disk_size is None else _read("--disk-size", parse_size, options.disk_size)
    disk = Disk(size, options.dwpd, options.rated_years, options.amplification)
    if options.disk is None:
        return disk
    try:
        return _told_by(disk, ssd.read(options.disk))
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


def _simulated(plan: needs.Plan, options: Options) -> Any:
    inputs = plan.inputs
    duration_s = _read("--duration", parse_duration, options.duration)
    stagger_s = _read("--stagger", parse_duration, options.stagger)
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
        jobs=options.jobs,
        duration_s=duration_s,
        seed=options.seed,
        mtbf_s=inputs.mtbf_s,
        save_cost_s=inputs.cost_s,
        restart_s=inputs.restart_s,
        node_bytes_per_s=inputs.network_bytes_per_s,
        cache_bytes=inputs.cache_bytes,
        stagger_s=stagger_s,
        rules=RunRules(every=first.every, skip_superseded=options.skip),
    )
    try:
        return simulate(scenario)
    except Unfinishable as error:
        raise UsageError(f"plan: --simulate: {error}") from error
