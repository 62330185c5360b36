"""`evict`, `warmup` and `drain`: what is in the cache, and what leaves it now."""

import time
from dataclasses import asdict
from typing import Annotated

import typer

from forebay.cli.app import Json, RunName, StepNumber, client
from forebay.cli.exits import NOTHING_CHANGED, on_interrupt
from forebay.cli.output import count_text, print_json, say, size_text
from forebay.errors import DeadlineExceeded
from forebay.types import Moved

_LOOK_S = 0.5


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (evict, warmup, drain):
        app.command()(command)


def evict(
    run: RunName,
    step: StepNumber,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it; without this only say what would go.")] = False,
    json: Json = False,
) -> int:
    """Drop a checkpoint from this node's cache, as far as every required tier holds it. A dry run unless --yes is given.

    JSON keys: run, step, evicted, shards, size, left, reason.
    """
    left = (
        "what was evicted so far is on every required tier, the rest stays; run it again to go on" if yes else NOTHING_CHANGED
    )
    with on_interrupt(left), client() as gateway:
        done = gateway.care.evict(run, step, dry_run=not yes)
    if json:
        print_json({"run": run, "step": step, "evicted": yes, **asdict(done)})
        return 0
    what = f"{'evicted' if yes else 'would be evicted'} from the cache: {run}/{step}"
    return _tell(done, what, json, "" if yes else "; give --yes to do it")


def warmup(run: RunName, step: StepNumber, json: Json = False) -> int:
    """Fetch a checkpoint from the tiers into this node's cache. JSON keys: shards, size, left, reason."""
    with on_interrupt("what was fetched so far stays in the cache; run it again to go on"), client() as gateway:
        done = gateway.care.warm_up(run, step)
    return _tell(done, f"fetched into the cache: {run}/{step}", json)


def _tell(done: Moved, what: str, json: bool, more: str = "") -> int:
    if json:
        print_json(done)
    else:
        left = f"; {done.left} stay as they are: {done.reason}" if done.left else ""
        say(f"{what}, {count_text(done.shards, 'shard')}, {size_text(done.size)}{left}{more}")
    return 0


def drain(
    wait: Annotated[bool, typer.Option("--wait", help="Return once every queue is empty.")] = False,
    timeout: Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="Exit 8 after these.")] = None,
    json: Json = False,
) -> int:
    """Try every waiting copy now, without the pause after its last failure. JSON keys: waiting, tiers (tier, state, copies)."""
    deadline_s = None if timeout is None else time.monotonic() + timeout
    with on_interrupt("only the waiting ended, the queues are drained by themselves"), client() as gateway:
        gateway.care.drain()
        while True:
            tiers = gateway.status().tiers
            waiting = sum(tier.pending_copies for tier in tiers)
            if not wait or not waiting:
                break
            if deadline_s is not None and time.monotonic() >= deadline_s:
                stuck = ", ".join(f"{tier.name} is {tier.state}" for tier in tiers if tier.pending_copies)
                raise DeadlineExceeded(f"drain: {waiting} copies still wait ({stuck})")
            time.sleep(_LOOK_S)
    if json:
        shown = [{"tier": tier.name, "state": tier.state, "copies": tier.pending_copies} for tier in tiers]
        print_json({"waiting": waiting, "tiers": shown})
    else:
        say("nothing waits" if not waiting else f"{waiting} copies wait; `forebay status` shows where")
    return 0
