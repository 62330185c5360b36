"""`pin`, `unpin` and `rm`: what stays and what goes."""

from typing import Annotated

import typer

from forebay.cli.app import Json, RunName, StepNumber, client
from forebay.cli.exits import NOTHING_CHANGED, on_interrupt
from forebay.cli.output import count_text, print_json, say, size_text


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(pin)
    app.command()(unpin)
    app.command("rm")(remove)


def pin(run: RunName, step: StepNumber, json: Json = False) -> int:
    """Keep a checkpoint whatever retention says. JSON keys: run, step, pinned."""
    return _set_pin(run, step, True, json)


def unpin(run: RunName, step: StepNumber, json: Json = False) -> int:
    """Let retention have a checkpoint again. JSON keys: run, step, pinned."""
    return _set_pin(run, step, False, json)


def _set_pin(run: str, step: int, pinned: bool, json: bool) -> int:
    with client() as gateway:
        gateway.pin(run, step) if pinned else gateway.unpin(run, step)
    if json:
        print_json({"run": run, "step": step, "pinned": pinned})
    else:
        say(f"{run}/{step} is {'pinned' if pinned else 'no longer pinned'}")
    return 0


def remove(
    run: RunName,
    step: StepNumber,
    force: Annotated[bool, typer.Option("--force", help="Also what no tier holds yet.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it; without this only say what would go.")] = False,
    json: Json = False,
) -> int:
    """Delete a checkpoint from cache and tiers. A dry run unless --yes is given.

    JSON keys: run, step, deleted, shards, size, levels.
    """
    left = "a deletion that has begun goes on by itself; run it again to see" if yes else NOTHING_CHANGED
    with on_interrupt(left), client() as gateway:
        gone = gateway.delete(run, step, force=force, dry_run=not yes)
    if json:
        print_json({"run": run, "step": step, "deleted": yes, "shards": gone.shards, "size": gone.size, "levels": gone.levels})
        return 0
    what = (
        f"{run}/{step}: {count_text(gone.shards, 'shard')}, {size_text(gone.size)}, at {', '.join(gone.levels) or 'no level'}"
    )
    say(f"deleted {what}" if yes else f"would delete {what}; give --yes to do it")
    return 0
