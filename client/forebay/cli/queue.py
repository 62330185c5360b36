"""`queue`: what waits for the tiers, and an operator's word on it."""

from typing import Annotated

import typer

from forebay.cli.app import Json, client
from forebay.cli.exits import UsageError
from forebay.cli.output import duration_text, print_json, say, size_text, table
from forebay.types import QueueEntry, QueueList

_Ids = Annotated[
    list[str] | None,
    typer.Argument(metavar="ID|TIER", help="Checkpoints as `queue` shows them, or tiers; all unless given."),
]
_Checkpoints = Annotated[
    list[str], typer.Argument(metavar="ID", help="Checkpoints as `queue` shows them, the first first.", show_default=False)
]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    group = typer.Typer(invoke_without_command=True, rich_markup_mode=None)
    group.callback()(list_)
    for command in (hold, release, retry, prio):
        group.command()(command)
    app.add_typer(group, name="queue")


def list_(context: typer.Context, json: Json = False) -> int:
    """What waits for the tiers, by checkpoint: listed (without a command), stopped, resumed, tried again, put first.

    JSON keys of the list: entries (a list of id, run, step, tier, kind, state, why, parts, copies, bytes, held, prio,
    next_in_s), skipped (tier: checkpoints that were left out on it so far).
    """
    if context.invoked_subcommand is not None:
        return 0
    with client() as gateway:
        found = gateway.queue()
    print_json(found) if json else _say(found)
    return 0


def _say(found: QueueList) -> None:
    if found.entries:
        rows = [
            (entry.id, entry.tier, entry.kind, entry.state, str(entry.copies), size_text(entry.bytes), _rest(entry))
            for entry in found.entries
        ]
        table(("ID", "TIER", "CLASS", "STATE", "SHARDS", "SIZE", ""), rows, numeric=(4, 5))
    else:
        say("nothing waits")
    for tier, count in found.skipped.items():
        if count:
            say(f"left out on {tier} so far: {count}")


def _rest(entry: QueueEntry) -> str:
    place = f", first but {entry.prio - 1}" if entry.prio > 1 else ", first" if entry.prio else ""
    later = "" if entry.next_in_s is None else f", in {duration_text(entry.next_in_s)} at the latest"
    return f"{entry.why}{later}{place}"


def hold(ids: _Ids = None, json: Json = False) -> int:
    """Stop draining: all, single tiers, or single checkpoints. What is saved stays in the cache.

    JSON keys: held, tiers, ids.
    """
    return _set(ids or [], True, json)


def release(ids: _Ids = None, json: Json = False) -> int:
    """Resume draining what was held. JSON keys: held, tiers, ids."""
    return _set(ids or [], False, json)


def retry(
    ids: Annotated[list[str] | None, typer.Argument(metavar="ID", help="As `queue` shows them.", show_default=False)] = None,
    json: Json = False,
) -> int:
    """Try now what waits after a failure; all unless given. JSON keys: ids."""
    return _change("retry", ids or [], json)


def prio(ids: _Checkpoints, json: Json = False) -> int:
    """Drain these first, in this order, whatever their class. JSON keys: ids."""
    return _change("prio", ids, json)


def _change(action: str, ids: list[str], json: bool) -> int:
    with client() as gateway:
        done = gateway.change_queue(action, *ids)
    print_json({"ids": done}) if json else say(f"{action}: {', '.join(done) or 'nothing waits'}")
    return 0


def _set(named: list[str], held: bool, json: bool) -> int:
    tiers = [name for name in named if "@" not in name]
    ids = [name for name in named if "@" in name]
    if tiers and ids:
        raise UsageError("queue: name tiers or checkpoints (RUN@STEP), not both")
    with client() as gateway:
        if ids:
            ids, done = gateway.change_queue("hold" if held else "release", *ids), []
        else:
            act = gateway.hold if held else gateway.release
            done = [tier for name in tiers or [""] for tier in act(name)]
    if json:
        print_json({"held": held, "tiers": done, "ids": ids})
    else:
        say(f"{'held' if held else 'released'}: {', '.join(ids or done) or 'no tiers'}")
    return 0
