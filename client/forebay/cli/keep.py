"""`pin`, `unpin`, `rm` and `retain`: what stays and what goes."""

from typing import Annotated

import typer

from forebay.cli.app import Json, RunName, StepNumber, client
from forebay.cli.exits import NOTHING_CHANGED, on_interrupt
from forebay.cli.output import count_text, print_json, say, size_text, table
from forebay.types import Fate


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(pin)
    app.command()(unpin)
    app.command("rm")(remove)
    app.command()(retain)


def pin(run: RunName, step: StepNumber, json: Json = False) -> int:
    """Keep a checkpoint whatever retention says. JSON keys: run, step, pinned."""
    return _set_pin(run, step, True, json)


def unpin(
    run: RunName,
    step: StepNumber,
    all_nodes: Annotated[
        bool, typer.Option("--all-nodes", help="Also what other nodes have pinned, such as one that is gone for good.")
    ] = False,
    json: Json = False,
) -> int:
    """Let retention have a checkpoint again. JSON keys: run, step, pinned."""
    return _set_pin(run, step, False, json, all_nodes)


def _set_pin(run: str, step: int, pinned: bool, json: bool, all_nodes: bool = False) -> int:
    with client() as gateway:
        gateway.pin(run, step) if pinned else gateway.unpin(run, step, all_nodes=all_nodes)
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
    """Delete a checkpoint from this node's cache and from the tiers. A dry run unless --yes is given.

    Another node that has all of it in its cache still offers it, until that is evicted: delete it there too.

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


def retain(
    run: Annotated[str | None, typer.Argument(metavar="RUN", help="This run only.", show_default=False)] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it now; without this only say what would go.")] = False,
    json: Json = False,
) -> int:
    """Say what the rules of [[retain]] keep on each tier and what goes. A dry run unless --yes is given.

    A gateway with rules does the same in the background, after each checkpoint and every few minutes.

    JSON: a list with tier, run, step, session, size, goes, reason, outcome.
    """
    left = "what had begun to go goes on by itself; run it again to see" if yes else NOTHING_CHANGED
    with on_interrupt(left), client() as gateway:
        found = list(gateway.care.retain(run or "", apply=yes))
    print_json(found) if json else _say_fates(found, yes)
    return 0


def _say_fates(found: list[Fate], applied: bool) -> None:
    if not found:
        say("no rule of [[retain]] is for this, or nothing is there")
        return
    rows = [
        (each.tier, f"{each.run}/{each.step}", size_text(each.size), _word(each, applied), each.outcome or each.reason)
        for each in found
    ]
    table(("TIER", "CHECKPOINT", "SIZE", "", "WHY"), rows, numeric=(2,))
    going = [each for each in found if (each.outcome == "removed" if applied else each.goes)]
    freed = f"{count_text(len(going), 'checkpoint')}, {size_text(sum(each.size for each in going))}"
    say(f"removed {freed}" if applied else f"would remove {freed}" + ("; give --yes to do it" if going else ""))


def _word(fate: Fate, applied: bool) -> str:
    if fate.outcome:
        return "gone" if fate.outcome == "removed" else "stays"
    return ("waits" if applied else "goes") if fate.goes else "stays"
