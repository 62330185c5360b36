"""`doctor`: what this node's disks, network and tiers can carry, and what is wrong with them.

Owns the command and its lines; the measuring is the gateway package's.
"""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.api import Client
from forebay.cli.app import Json
from forebay.cli.config import label, load
from forebay.cli.exits import DONE, FAILED, UsageError, on_interrupt
from forebay.cli.output import count_text, print_json, printable, say, say_state, size_text
from forebay.cli.serve import gateway_missing
from forebay.errors import ForebayError, InvalidArgument


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(doctor)


def doctor(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="The gateway's configuration; without it the default.", show_default=False
        ),
    ] = None,
    size: Annotated[
        str, typer.Option("--size", metavar="SIZE", help="This node's bytes of a checkpoint, such as 80GiB.")
    ] = "1GiB",
    nodes: Annotated[
        int, typer.Option("--nodes", metavar="N", min=1, help="Nodes that save to the tiers; the striping follows from it.")
    ] = 1,
    data: Annotated[
        Path | None,
        typer.Option("--data", metavar="DIR", help="Where the training samples lie: do they share a disk?", show_default=False),
    ] = None,
    json: Json = False,
) -> int:
    """Measure the cache and every tier of a configuration, and say what is wrong and how often they carry a checkpoint.

    Each place is written three times with a checkpoint of --size (by fio where it is installed) and read once. It takes no
    lock, works with and without a running gateway (one that runs is asked whether saves go past its cache), and touches its
    own probe files only, which are removed again, also when it is interrupted. It writes as fast as it can: what else uses
    the disks is slower meanwhile. Nothing is changed; what to run is shown beside `do:`.

    Exit 0 when all is OK or WARN, 1 when something is FAIL, 2 for a size that does not fit (it names the nearest that does).

    JSON keys: config, size_bytes, nodes, status, checks, frequency. Each check: where, check, status (OK, WARN, FAIL), value,
    why, do, figures. frequency: interval_s, per_hour, bytes_per_s, bounded_by, reason, parts (name, write_bytes_per_s,
    read_bytes_per_s, limit_bytes_per_s, seconds, devices). A figure that could not be had is null.

    Checks and their figures: path; write_through: tier; write: bytes_per_s, rounds_bytes_per_s, tool, direct; read:
    bytes_per_s, direct; fsync: per_s, median_s; metadata: per_s; disk: device, busy_before, busy, write_wait_s; filesystem:
    type; mount: options; striping: stripes, stripe_bytes, targets, command; space: free_bytes, total_bytes, checkpoints;
    inodes: free; wear: device, used, written_bytes; apart: shares_with; probe: conditional_create, conditional_replace, links,
    direct_io, list_after_put, seconds; round_trip: median_s, per_s; conditional_create: create, replace; checksums: put,
    full_object; list_after_put: listed; clock_skew: seconds; multipart: supported, max_parts, part_bytes, largest_bytes;
    sample_data: shares_with; dirty_pages: dirty_bytes, background_bytes, flush_s; tcp: sent, retransmitted, ratio;
    open_files: soft, hard; listen: ports.
    """
    try:
        from forebay_gateway import doctor as gateway
    except ModuleNotFoundError as error:
        raise gateway_missing(error) from error
    try:
        wanted = gateway.parse_size(size)
    except ValueError as error:
        raise UsageError(f"doctor: --size: {error}; write it like 512MiB or 80GiB") from error
    read = load(config)
    try:
        with on_interrupt("its probe files are removed"):
            options = gateway.Options(size=wanted, nodes=nodes, data=data, told=_told(read, gateway.Told))
            report = gateway.examine(read, label(config), options, _tell)
    except gateway.ForebayError as error:
        raise (InvalidArgument if error.kind == "invalid_argument" else ForebayError)(f"doctor: {error}") from error
    print_json(report) if json else _show(report, gateway.sentence(report))
    return FAILED if report.status == "FAIL" else DONE


def _told(config: Any, told: Callable[[str, str], Any]) -> Any:
    """What the running gateway says of its cache; None where none answers."""
    for address in config.node.listen:
        with contextlib.suppress(ForebayError), Client(address, 0.0, retry_timeout=0.0, progress=False) as client:
            pressure = client.pressure()
            return told(pressure.through, pressure.reason)
    return None


def _show(report: Any, last: str) -> None:
    say(f"{report.config}: checkpoints of {size_text(report.size_bytes)}, {count_text(report.nodes, 'node')}")
    width = max(len(check.where) for check in report.checks)
    for check in report.checks:
        say_state("", check.status, f"{'':{5 - len(check.status)}}{check.where:{width}}  {check.check}: {check.value}")
        say(f"{'':{7 + width}}why: {check.why}")
        if check.do:
            say(f"{'':{7 + width}}do:  {check.do}")
    say(last)


def _tell(line: str) -> None:
    """What it is doing, for those who watch."""
    if sys.stderr.isatty():
        print(printable(line), file=sys.stderr)
