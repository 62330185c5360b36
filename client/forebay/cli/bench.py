"""`bench`: what this node's gateway, disk and tiers do, measured on them.

Owns the command and its table; the measuring is forebay.bench.
"""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from forebay.bench import Bench, Figure, Plan
from forebay.cli.app import Json, client
from forebay.cli.exits import UsageError, on_interrupt
from forebay.cli.output import print_json, printable, say, size_text, table

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", start=1)
    for suffix, base in (("iB", 1024), ("B", 1000))
}


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(bench)


def bench(
    size: Annotated[str, typer.Option("--size", metavar="SIZE", help="Bytes of each checkpoint, such as 4GiB.")] = "1GiB",
    rounds: Annotated[int, typer.Option("--rounds", metavar="N", min=1, help="How often; medians are shown.")] = 3,
    small: Annotated[
        int, typer.Option("--small", metavar="N", min=1, help="Small shards whose acknowledgement is timed.")
    ] = 200,
    disk: Annotated[
        Path | None,
        typer.Option("--disk", metavar="DIR", help="Also write as much into this directory, without the gateway."),
    ] = None,
    timeout: Annotated[float, typer.Option("--timeout", metavar="SECONDS", min=1, help="For each drain to each tier.")] = 600.0,
    json: Json = False,
) -> int:
    """Measure the running gateway: durable saves and restores over both lanes, the drain, acknowledgements.

    It saves checkpoints under a run name of its own, and deletes them, also when interrupted. Everything else goes on
    meanwhile, and shows in the figures. Refuses (exit 6) where the cache has not the room.

    JSON keys: node, run, size, rounds, figures (name, value, unit, meaning, reason, values); value is null where it could not
    be measured.
    """
    plan = Plan(_bytes(size), rounds, small, disk, timeout)
    with on_interrupt("what it had saved is deleted"), client() as gateway:
        measuring = Bench(gateway, plan, _tell)
        figures = measuring.run()
    if json:
        head = {"node": measuring.status.node, "run": measuring.run_name, "size": plan.size, "rounds": rounds}
        print_json({**head, "figures": figures})
    else:
        say(f"gateway {measuring.status.node}: checkpoints of {size_text(plan.size)}, medians of {rounds}")
        table(("FIGURE", "VALUE", "", "MEANS"), [_row(figure) for figure in figures], numeric=(1,))
    return 0


def _row(figure: Figure) -> tuple[str, str, str, str]:
    if figure.value is None:
        return figure.name, "-", "", f"not measured: {figure.reason}"
    return figure.name, f"{figure.value:.2f}", figure.unit, figure.meaning


def _tell(line: str) -> None:
    """What it is doing, for those who watch."""
    if sys.stderr.isatty():
        print(printable(line), file=sys.stderr)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    if found is None or found[2] not in _UNITS:
        raise UsageError(f"--size: {text!r} is no size; write it like 512MiB or 4GiB")
    return int(float(found[1]) * _UNITS[found[2]])
