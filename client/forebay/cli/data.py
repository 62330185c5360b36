"""`save`, `restore` and `export`: directories to checkpoints and back."""

from pathlib import Path
from typing import Annotated

import typer

from forebay.cli.app import Json, RunName, client, step_or_latest
from forebay.cli.exits import UsageError, on_interrupt
from forebay.cli.output import count_text, duration_text, print_json, say, size_text
from forebay.export import export_dir
from forebay.session import ENVIRONMENT as SESSION_VARIABLE
from forebay.session import launch_session
from forebay.types import RestoreSummary, SaveSummary

_Wait = Annotated[str, typer.Option("--wait", metavar="LEVEL", help="Return once it is there: cache, a tier's name, or all.")]
_Session = Annotated[
    str | None, typer.Option("--session", metavar="TEXT", help="Shared by all writers of one launch.", show_default=False)
]
_StepAndDirectory = Annotated[
    list[str],
    typer.Argument(metavar="[STEP|latest] DIR", help="Which checkpoint, and the directory to fill.", show_default=False),
]
_HALF = "{} does not hold the whole checkpoint; files half written are removed, and it can be restored again"
_Streams = Annotated[int, typer.Option("--streams", metavar="N", min=1, max=64, help="Shards at a time.")]
_Durable = Annotated[bool, typer.Option("--durable", help="Sync files and directories before returning.")]
_Timeout = Annotated[float | None, typer.Option("--timeout", metavar="SECONDS", min=0, help="For commit and wait together.")]


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    app.command()(save)
    app.command()(restore)
    app.command()(export)


def save(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Every file below it becomes a shard.", show_default=False)],
    run: Annotated[str, typer.Option("--run", metavar="RUN", help="The run's name.", show_default=False)],
    step: Annotated[int, typer.Option("--step", metavar="N", min=0, help="The step.", show_default=False)],
    wait: _Wait = "cache",
    timeout: _Timeout = None,
    writers: Annotated[int, typer.Option("--writers", metavar="N", min=1, help="How many writers make the checkpoint.")] = 1,
    writer: Annotated[int, typer.Option("--writer", metavar="N", min=0, help="Which of them this is.")] = 0,
    session: _Session = None,
    final: Annotated[bool, typer.Option("--final", help="The run's last save: drained first, and never left out.")] = False,
    json: Json = False,
) -> int:
    """Save a directory as a checkpoint, or as one writer's part of it.

    JSON keys: run, step, session, writer, shards, size, level, checkpoint_complete, elapsed_s, transient,
    through (the tier that shards went through to since the cache's disk fails; "" for none).
    """
    if writers > 1 and session is None and launch_session() is None:
        raise UsageError(
            f"save: {writers} writers share one session and none is set: give --session, or set {SESSION_VARIABLE}, the same "
            "for every writer and a new one for each launch (torchrun with --rdzv-id, and Slurm, set it by themselves)"
        )
    left = f"unless it was committed already, nothing of it stays; `forebay info {run} {step}` tells"
    with on_interrupt(left), client(patient=True) as gateway:
        summary = gateway.save_dir(
            directory, run, step, writers=writers, writer=writer, session=session, wait=wait, timeout=timeout, final=final
        )
    print_json(summary) if json else _say_saved(summary)
    return 0


def restore(
    run: RunName,
    arguments: _StepAndDirectory,
    source: Annotated[str, typer.Option("--from", metavar="auto|cache|TIER", help="Read from there alone.")] = "auto",
    streams: _Streams = 4,
    durable: _Durable = False,
    json: Json = False,
) -> int:
    """Restore a checkpoint (the latest unless a step is given) into a directory; every byte is checked.

    Files appear under their names only once all are whole. JSON keys: run, step, session, shards, size, path, elapsed_s.
    """
    step, directory = _step_and_directory("restore", arguments)
    with on_interrupt(_HALF.format(directory)), client(patient=True) as gateway:
        summary = gateway.restore_dir(run, step, directory, source=source, streams=streams, durable=durable)
    print_json(summary) if json else _say_restored(summary, "restored")
    return 0


def export(
    run: RunName,
    arguments: _StepAndDirectory,
    root: Annotated[
        Path | None,
        typer.Option("--root", metavar="PATH", help="A POSIX tier's root, or a copy of a tier's files; no gateway is asked."),
    ] = None,
    streams: _Streams = 4,
    durable: _Durable = False,
    json: Json = False,
) -> int:
    """Unpack a checkpoint (the latest unless a step is given) into plain files, every byte checked.

    With --root straight from a tier's files, else through the gateway, as restore does. JSON keys: run, step, session, shards,
    size, path, elapsed_s.
    """
    step, directory = _step_and_directory("export", arguments)
    if root is not None:
        with on_interrupt(_HALF.format(directory)):
            summary = export_dir(root, run, step, directory, streams=streams, durable=durable)
    else:
        with on_interrupt(_HALF.format(directory)), client(patient=True) as gateway:
            summary = gateway.restore_dir(run, step, directory, streams=streams, durable=durable)
    print_json(summary) if json else _say_restored(summary, "exported")
    return 0


def _step_and_directory(command: str, arguments: list[str]) -> tuple[int | str, str]:
    if len(arguments) > 2:
        raise UsageError(f"{command}: give RUN, at most one STEP, and DIR")
    chosen = arguments[0] if len(arguments) == 2 else "latest"
    return step_or_latest(command, chosen), arguments[-1]


def _say_saved(done: SaveSummary) -> None:
    complete = "checkpoint complete" if done.checkpoint_complete else "other writers are still missing"
    what = f"{count_text(done.shards, 'shard')}, {size_text(done.size)}"
    say(f"saved {done.run}/{done.step}: {what}, durable at {done.level}, {complete}")
    say(f"session {done.session}, writer {done.writer}, {_pace(done.size, done.elapsed_s)}")
    if done.through:
        say(f"written through to {done.through}: the cache's disk fails, so the bytes are not in the cache")
    if done.transient:
        say("transient: by policy it stays in the cache, goes to no tier, and is the first to be dropped")
        if not done.checkpoint_complete:
            say("parts that go through other nodes stay in their caches: it can be restored as a whole only where all of it is")


def _say_restored(done: RestoreSummary, verb: str) -> None:
    say(
        f"{verb} {done.run}/{done.step} to {done.path}: {count_text(done.shards, 'shard')}, {size_text(done.size)}, all checked"
    )
    say(f"session {done.session}, {_pace(done.size, done.elapsed_s)}")


def _pace(size: int, elapsed_s: float) -> str:
    return f"{duration_text(elapsed_s)} ({size_text(size / elapsed_s)}/s)" if elapsed_s > 0 else duration_text(elapsed_s)
