"""`ls`, `info`, `status`, `wait`, `pressure`: what is there, and how far it is."""

import json as json_module
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from forebay.api import Client
from forebay.cli.app import Json, RunName, StepNumber, StepOrLatest, client, step_or_latest
from forebay.cli.exits import on_interrupt
from forebay.cli.output import count_text, duration_text, print_json, say, say_state, size_text, table
from forebay.errors import NotFound
from forebay.progress import byte_counter
from forebay.types import Alarm, Checkpoint, Level, Policy, Pressure, RetentionStatus, Shard, Status, TierStatus, WaitProgress

_STANDING = ("held", "away", "denied", "full")  # a tier takes nothing then


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (info, status, wait, pressure):
        app.command()(command)
    app.command("ls")(list_)


def list_(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="List its checkpoints.", show_default=False)] = None,
    step: Annotated[int | None, typer.Argument(metavar="STEP", min=0, help="List its shards.", show_default=False)] = None,
    json: Json = False,
) -> int:
    """List runs, a run's checkpoints, or a checkpoint's shards.

    JSON: a list. Runs: run, checkpoints, latest_step. Checkpoints: as `info`, without shards. Shards: name, size, crc32c,
    writer, state, copies.
    """
    with client() as gateway:
        if run is None:
            _list_runs(gateway, json)
        elif step is None:
            _list_checkpoints(gateway, run, json)
        else:
            _list_shards(gateway, run, step, json)
    return 0


def _list_runs(gateway: Client, json: bool) -> None:
    runs = gateway.runs()
    if json:
        print_json(runs)
        return
    rows = [(run.run, str(run.checkpoints), "-" if run.latest_step is None else str(run.latest_step)) for run in runs]
    table(("RUN", "CHECKPOINTS", "LATEST"), rows, numeric=(1, 2))


def _list_checkpoints(gateway: Client, run: str, json: bool) -> None:
    found = gateway.checkpoints(run)
    if json:
        print_json(found)
        return
    rows = [
        (
            str(item.step),
            item.state,
            str(item.shard_count),
            size_text(item.size),
            " ".join(f"{level.level}:{level.state}" for level in item.levels),
            ", ".join(_marks(item)),
        )
        for item in found
    ]
    table(("STEP", "STATE", "SHARDS", "SIZE", "LEVELS", ""), rows, numeric=(0, 2, 3))


def _marks(item: Checkpoint) -> list[str]:
    kind = [item.kind] if item.kind != "periodic" else []
    return kind + ["pinned"] * item.pinned + ["transient"] * item.transient


def _list_shards(gateway: Client, run: str, step: int, json: bool) -> None:
    shards = sorted(gateway.describe(run, step).shards, key=lambda shard: shard.name)
    if json:
        print_json(shards)
        return
    rows = [(shard.name, size_text(shard.size), str(shard.writer), shard.state or "-", _copies(shard)) for shard in shards]
    table(("SHARD", "SIZE", "WRITER", "CACHE", "COPIES"), rows, numeric=(1, 2))


def info(
    run: RunName,
    step: StepOrLatest,
    shard: Annotated[str | None, typer.Argument(metavar="SHARD", help="One shard only.", show_default=False)] = None,
    json: Json = False,
) -> int:
    """Say all about a checkpoint, or about one of its shards.

    JSON keys: run, step, session, writers, state, missing, levels, size, shard_count, pinned, metadata, reason, kind,
    transient, policy, shards; of a shard: name, size, crc32c, writer, state, copies.
    """
    wanted = step_or_latest("info", step)
    with client() as gateway:
        found = gateway.describe(run, gateway.step_of(run, wanted))
    if shard is None:
        print_json(found) if json else _say_checkpoint(found)
        return 0
    one = next((item for item in found.shards if item.name == shard), None)
    if one is None:
        raise NotFound(f"checkpoint {run}/{found.step} has no shard {shard!r}; 'forebay ls {run} {found.step}' lists them")
    print_json(one) if json else _say_shard(one)
    return 0


def _say_checkpoint(found: Checkpoint) -> None:
    say_state(f"{found.run}/{found.step}: ", found.state, f" ({found.reason})" if found.reason else "")
    marks = "".join(f", {mark}" for mark in _marks(found))
    counts = f"{count_text(found.writers, 'writer')}, {count_text(found.shard_count, 'shard')}"
    say(f"session {found.session}, {counts}, {size_text(found.size)}{marks}")
    for level in found.levels:
        say_state(f"  {level.level:<12} ", level.state, _level_rest(level))
    for missing in found.missing:
        say(f"  missing: {missing}")
    if found.policy.run:
        say(f"policy {found.policy.run!r}: {', '.join(_rules(found.policy))}")
    if found.metadata:
        say("metadata " + json_module.dumps(dict(found.metadata), sort_keys=True))


def _rules(policy: Policy) -> Iterator[str]:
    if policy.transient:
        yield "stays in the cache"
    for tier in policy.tiers:
        every = policy.every.get(tier, "1")
        yield f"to {tier}" + ("" if every == "1" else f" (every {every})")
    if policy.skip:
        yield "superseded ones left out when the drain lags"
    if policy.kind != "periodic":
        yield f"class {policy.kind}"
    if policy.quota_bytes is not None:
        yield f"at most {size_text(policy.quota_bytes)} of the cache"


def _level_rest(level: Level) -> str:
    share = f" {size_text(level.bytes_done)} of {size_text(level.bytes_total)}" if level.bytes_done < level.bytes_total else ""
    return share + (f" ({level.reason})" if level.reason else "")


def _say_shard(shard: Shard) -> None:
    say(f"{shard.name}: {shard.size} bytes, crc32c {shard.crc32c:08x}, writer {shard.writer}")
    say_state("  cache        ", shard.state or "not here")
    for tier, copy in sorted(shard.copies.items()):
        say_state(f"  {tier:<12} ", copy)


def _copies(shard: Shard) -> str:
    return " ".join(f"{tier}:{copy}" for tier, copy in sorted(shard.copies.items()))


def status(json: Json = False) -> int:
    """Say at a glance: is data at risk, what is stuck, when will it be out.

    JSON keys: node, version, uptime_s, health, pressure, cache, tiers, movers, alarms, checkpoints_complete,
    checkpoints_incomplete, incomplete, listen, loop_lag_p99_s.
    """
    with client() as gateway:
        found = gateway.status()
    print_json(found) if json else _say_status(found)
    return 0


def _say_status(found: Status) -> None:
    say_state(f"gateway {found.node}: ", found.health, f", up {duration_text(found.uptime_s)}, version {found.version}")
    for alarm in found.alarms:
        say_state("  ", alarm.severity, f": {alarm.what}" + (f"; {alarm.todo}" if alarm.todo else ""))
    say(f"at risk   {_at_risk(found)}")
    told = _Told(found.alarms)
    say(f"stuck     {_stuck(found, told)}")
    say(f"out in    {_out_in(found.pressure, found.tiers)}")
    cache = found.cache
    share = f"{100 * cache.used_bytes / cache.capacity_bytes:.0f} %" if cache.capacity_bytes else "?"
    full = f"{size_text(cache.used_bytes)} of {size_text(cache.capacity_bytes)} ({share})"
    if cache.disk_free_bytes is not None and cache.disk_free_bytes < cache.capacity_bytes - cache.used_bytes:
        full += f", but only {size_text(cache.disk_free_bytes)} free on its disk"
    pressure = f", {found.pressure.reason}" if found.pressure.reason else ""
    say_state(f"cache     {full}, {cache.open_streams} streams open, pressure ", found.pressure.level, pressure)
    say(f"holds     {found.checkpoints_complete} complete, {found.checkpoints_incomplete} incomplete checkpoints")
    if found.tiers:
        say("")
        rows = [
            (
                tier.name,
                tier.state,
                size_text(tier.pending_bytes),
                str(tier.pending_copies),
                "-" if tier.oldest_pending_s is None else duration_text(tier.oldest_pending_s),
                _pace(tier),
                "-" if tier.live_nodes is None else str(tier.live_nodes),
                "; ".join(filter(None, (told.unless(tier.reason), f"{tier.skipped} left out so far" if tier.skipped else ""))),
            )
            for tier in found.tiers
        ]
        table(("TIER", "STATE", "WAITING", "SHARDS", "OLDEST", "DRAINS AT", "NODES", ""), rows, numeric=(2, 3, 4, 5, 6))
        for tier in found.tiers:
            if tier.bandwidth_bytes_per_s is not None:
                share = "" if tier.live_nodes is None else f", one of {tier.live_nodes} nodes"
                say(f"{tier.name}: this node may send {size_text(tier.bandwidth_bytes_per_s)}/s{share}")
            if tier.retention.state != "no rule":
                say(f"{tier.name}: retention {_retention(tier.retention)}")


def _retention(found: RetentionStatus) -> str:
    if found.state != "on":
        return found.state
    looked = "has not looked yet" if found.looked_s is None else f"looked {duration_text(found.looked_s)} ago"
    last = f", {found.last} last" if found.last else ""
    return f"{looked}, removed {count_text(found.removed, 'checkpoint')}, {size_text(found.removed_bytes)}{last}"


def _pace(tier: TierStatus) -> str:
    """How fast it drains. The rate of one that stands still is only the memory of what went before."""
    return tier.state if tier.state in _STANDING else f"{size_text(tier.drain_bytes_per_s)}/s"


def _at_risk(found: Status) -> str:
    waiting = [tier.name for tier in found.tiers if tier.required and tier.pending_copies]
    if waiting and not found.cache.dirty_bytes:  # what went through to another tier, or was lost on these
        return f"nothing is only on this node; {', '.join(waiting)} still lacks what another tier holds"
    if not found.cache.dirty_bytes:
        return "nothing: all committed data is verified on every required tier"
    return f"{size_text(found.cache.dirty_bytes)} only on this node, not yet verified on every required tier"


class _Told:
    """What the alarms say already: a server's error may be long, and once is enough."""

    def __init__(self, alarms: Sequence[Alarm]) -> None:
        self._alarms = [alarm.what for alarm in alarms]

    def unless(self, reason: str) -> str:
        """The reason, empty where an alarm has it."""
        return "" if any(reason in what for what in self._alarms) else reason


def _stuck(found: Status, told: _Told) -> str:
    parts = []
    for tier in filter(_blocks, found.tiers):
        reason = told.unless(tier.reason)
        parts.append(f"tier {tier.name} is {tier.state}" + (f": {reason}" if reason else ""))
    for item in found.incomplete[:3]:
        lacks = "; ".join(map(str, item.missing[:3])) or item.reason
        parts.append(f"{item.run}/{item.step} is incomplete{': ' + lacks if lacks else ''}")
    return "; ".join(parts) or "nothing"


def _blocks(tier: TierStatus) -> bool:
    return tier.state in ("away", "full") or (tier.state == "held" and tier.pending_copies > 0)


def _out_in(pressure: Pressure, tiers: tuple[TierStatus, ...]) -> str:
    waiting = [tier for tier in tiers if tier.pending_copies]
    if not waiting:
        return "nothing is waiting"
    known = {backlog.tier: duration_text(backlog.eta_s) for backlog in pressure.tiers}
    return ", ".join(
        f"{tier.name}: {tier.state if tier.state in _STANDING else known.get(tier.name, 'unknown')}" for tier in waiting
    )


def wait(
    run: RunName,
    step: StepNumber,
    level: Annotated[str, typer.Argument(metavar="LEVEL", help="cache, a tier's name, or all.")] = "all",
    timeout: Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Exit 8 after these.")] = None,
    json: Json = False,
) -> int:
    """Wait until a whole checkpoint is complete at a level.

    JSON keys: reached, bytes_done, bytes_total, missing, reason.
    """
    left = f"only the waiting ended, {run}/{step} goes on to {level} by itself"
    with on_interrupt(left), client(patient=True) as gateway, byte_counter(f"wait for {run}/{step} at {level}", None) as count:
        done_bytes = 0

        def progress(seen: WaitProgress) -> None:
            nonlocal done_bytes
            count(seen.bytes_done - done_bytes)
            done_bytes = seen.bytes_done

        reached = gateway.wait(run, step, level, timeout, progress)
    note = f"; {reached.reason}" if reached.reason else ""
    print_json(reached) if json else say(f"{run}/{step} is complete at {level}, {size_text(reached.bytes_total)}{note}")
    return 0


def pressure(json: Json = False) -> int:
    """Say how full the cache is, and whether to slow down.

    JSON keys: level, reason, fill, tiers (tier, pending_bytes, drain_bytes_per_s, eta_s), retry_after_s, writers_bytes_per_s
    (to which all writers together are slowed; null: they are not), waiting (requests that wait for space), through (the tier
    that new shards go through to since the cache's disk fails; "": none do).
    """
    with client() as gateway:
        found = gateway.pressure()
    if json:
        print_json(found)
        return 0
    say_state("pressure ", found.level, f", {found.reason or f'cache {found.fill:.0%} full'}")
    if found.writers_bytes_per_s is not None:
        say(f"  writers are slowed to {size_text(int(found.writers_bytes_per_s))}/s in all, {found.waiting} wait for space")
    for tier in found.tiers:
        say(f"  {tier.tier}: {size_text(tier.pending_bytes)} waiting, out in {duration_text(tier.eta_s)}")
    return 0
