"""`verify`, `scrub`, `fsck`, `repair`, `quarantine`, `rebuild`, `gc`: is every copy good, and what to do where it is not.

Owns the commands. Checks exit 4 when something is bad. What destroys something is a dry run without --apply, or --yes.
"""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from forebay.cli import exits
from forebay.cli.app import Json, RunName, StepNumber, client
from forebay.cli.exits import NOTHING_CHANGED, Interrupted, UsageError, on_interrupt
from forebay.cli.output import duration_text, print_json, say, say_state, size_text, table
from forebay.cli.serve import gateway_missing
from forebay.errors import ForebayError, InvalidArgument, NotFound, Unavailable
from forebay.types import CopyReport, Finding, Garbage, Quarantined, ScrubStatus

_Apply = Annotated[bool, typer.Option("--apply", help="Do it; without this only say what would be done.")]
_Deep = Annotated[bool, typer.Option("--deep", help="Read every byte, in the cache and on the tiers.")]
_ConfigFile = Annotated[
    Path | None, typer.Option("--config", metavar="FILE", help="The gateway's configuration.", show_default=False)
]
_Id = Annotated[str, typer.Argument(metavar="ID", help="As `quarantine ls` shows it, such as 12-34@pfs.", show_default=False)]

_UNITS_S = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def register(app: typer.Typer) -> None:
    """Add this module's commands."""
    for command in (verify, scrub, fsck, repair, rebuild):
        app.command()(command)
    app.command("gc")(collect)
    group = typer.Typer(help="Look at bad copies, and drop them.", no_args_is_help=True, rich_markup_mode=None)
    group.command("ls")(quarantine_list)
    group.command("show")(quarantine_show)
    group.command("release")(quarantine_release)
    app.add_typer(group, name="quarantine")


# -- verify and scrub ----------------------------------------------------------------------------------------------------


def verify(
    run: RunName,
    step: StepNumber,
    source: Annotated[str, typer.Option("--from", metavar="cache|TIER|all", help="Which copies to read.")] = "all",
    json: Json = False,
) -> int:
    """Read every byte of a checkpoint where it lies, and compare it with its checksums. Bad copies go into quarantine.

    Exit 4 when a copy is bad, 5 when one could not be read. JSON keys: run, step, good, bad, absent, pending, unreachable,
    copies (name, where, state, size, reason).
    """
    reports: list[CopyReport] = []
    with on_interrupt("copies seen to be bad so far are in quarantine, the rest was not read"), client() as gateway:
        for report in gateway.care.verify(run, step, source):
            reports.append(report)
            if not json and report.state not in ("good", "absent"):
                say_state(f"{report.where:<12} ", report.state, f" {report.name}: {report.reason}")
    counts = {state: sum(report.state == state for report in reports) for state in _STATES}
    if json:
        print_json({"run": run, "step": step, **counts, "copies": reports})
    else:
        _say_verified(run, step, reports, counts)
    return exits.CORRUPT if counts["bad"] else exits.UNAVAILABLE if counts["unreachable"] else exits.DONE


_STATES = ("good", "bad", "absent", "pending", "unreachable")


def _say_verified(run: str, step: int, reports: list[CopyReport], counts: dict[str, int]) -> None:
    read = sum(report.size for report in reports if report.state == "good")
    shown = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    say(f"{run}/{step}: {'copies: ' + shown if shown else 'no copies'}; {size_text(read)} read and good")


def scrub(
    start: Annotated[bool, typer.Option("--start", help="Begin now, or go on after --stop.")] = False,
    stop: Annotated[bool, typer.Option("--stop", help="Pause until --start.")] = False,
    status: Annotated[bool, typer.Option("--status", help="Say how far it is; this is the default.")] = False,
    tier: Annotated[str, typer.Option("--tier", metavar="TIER", help="Start or stop the reading back of a tier.")] = "",
    json: Json = False,
) -> int:
    """Start, stop or show the slow reading of the whole cache, or of what lies on a tier, in the background.

    Exit 4 when a pass found something bad. JSON keys: state, rate_bytes_per_s, every_s, passes, shards, bytes, bad, copies,
    copies_bad, copies_not_asked, next_in_s, tiers (tier, state, rate_bytes_per_s, every_s, passes, copies, bytes, bad,
    unreadable, next_in_s).
    """
    if start + stop + status > 1:
        raise UsageError("scrub: give one of --start, --stop and --status")
    with client() as gateway:
        found = gateway.care.scrub("start" if start else "stop" if stop else "status", tier)
    print_json(found) if json else _say_scrub(found)
    bad = found.bad or found.copies_bad or any(each.bad for each in found.tiers)
    return exits.CORRUPT if bad and not (start or stop) else exits.DONE


def _say_scrub(found: ScrubStatus) -> None:
    say(f"scrub {found.state}, {_pace(found.rate_bytes_per_s, found.every_s)}, {found.passes} passes done")
    say(f"cache  {found.shards} shards, {size_text(found.bytes)} read, {found.bad} bad")
    away = f", {found.copies_not_asked} not asked (tier away)" if found.copies_not_asked else ""
    say(f"tiers  {found.copies} copies asked for, {found.copies_bad} bad{away}")
    if found.next_in_s is not None:
        say(f"next   in {duration_text(found.next_in_s)}")
    for each in found.tiers:
        next_one = f", next in {duration_text(each.next_in_s)}" if each.next_in_s is not None else ""
        unread = f", {each.unreadable} unreadable" if each.unreadable else ""
        pace = _pace(each.rate_bytes_per_s, each.every_s)
        say(f"read back {each.tier}: {each.state}, {pace}, {each.passes} passes done{next_one}")
        say(f"       {each.copies} copies, {size_text(each.bytes)} read, {each.bad} bad{unread}")


def _pace(rate_bytes_per_s: int, every_s: float) -> str:
    if not rate_bytes_per_s:
        return "off"
    return f"{size_text(rate_bytes_per_s)}/s, " + (f"every {duration_text(every_s)}" if every_s else "only when started")


# -- fsck and repair -----------------------------------------------------------------------------------------------------


def fsck(
    deep: _Deep = False,
    offline: Annotated[bool, typer.Option("--offline", help="Without a gateway; takes the cache's lock.")] = False,
    config: _ConfigFile = None,
    json: Json = False,
) -> int:
    """Compare the catalog with the cache's files and the tiers. Changes nothing.

    Exit 4 when something is wrong. JSON: a list of findings with kind, severity, where, run, step, session, name, path, what,
    remedy, outcome.
    """
    if config is not None and not offline:
        raise UsageError("fsck: --config goes with --offline")
    if offline:
        with on_interrupt(NOTHING_CHANGED):
            return _tell_findings((Finding(**found) for found in _offline("fsck", config, deep)), json)
    with on_interrupt(NOTHING_CHANGED), client() as gateway:
        return _tell_findings(gateway.care.fsck(deep=deep), json)


def repair(apply: _Apply = False, deep: _Deep = False, json: Json = False) -> int:
    """Mend what fsck finds, where that can be done. A dry run unless --apply is given.

    Exit 4 when something is wrong that is not, or would not be, repaired. JSON: as fsck.
    """
    told: list[Finding] = []

    def left() -> str:
        repaired = sum(finding.outcome == "repaired" for finding in told)
        return f"{repaired} repaired so far, at most one more under way; run it again to go on" if apply else NOTHING_CHANGED

    with on_interrupt(left), client() as gateway:
        findings = _noting(gateway.care.repair(apply=apply, deep=deep), told)
        return _tell_findings(findings, json, repairing=True, applied=apply)


def _noting(findings: Iterable[Finding], told: list[Finding]) -> Iterator[Finding]:
    for finding in findings:
        told.append(finding)
        yield finding


def _tell_findings(findings: Iterable[Finding], json: bool, *, repairing: bool = False, applied: bool = False) -> int:
    found = []
    for finding in findings:
        found.append(finding)
        if not json:
            _say_finding(finding)
    errors = [finding for finding in found if finding.severity == "error"]
    left = [finding for finding in errors if not _is_mended(finding, applied)] if repairing else errors
    if json:
        print_json(found)
    else:
        say(_summary(errors, left, len(found) - len(errors), repairing, applied))
    return exits.CORRUPT if left else exits.DONE


def _is_mended(finding: Finding, applied: bool) -> bool:
    return finding.outcome == "repaired" if applied else bool(finding.remedy)


def _say_finding(finding: Finding) -> None:
    shard = f" {finding.run}/{finding.step} {finding.name}".rstrip() if finding.run else ""
    at = f" [{finding.path}]" if finding.path else ""
    say_state("", "critical" if finding.severity == "error" else "note", f" {finding.where}{shard}: {finding.what}{at}")
    if finding.outcome:
        say(f"    {finding.remedy}: {finding.outcome}")
    elif finding.remedy:
        say(f"    remedy: {finding.remedy}")


def _summary(errors: list[Finding], left: list[Finding], notes: int, repairing: bool, applied: bool) -> str:
    tail = f", {notes} notes" if notes else ""
    if not errors:
        return f"nothing is wrong{tail}"
    if not repairing:
        return f"{len(errors)} problems{tail}; `forebay repair` says what can be done"
    if applied:
        return f"{len(errors)} problems, {len(errors) - len(left)} repaired, {len(left)} left{tail}"
    return f"{len(errors)} problems, {len(errors) - len(left)} would be repaired, {len(left)} cannot be{tail}; give --apply"


# -- quarantine ----------------------------------------------------------------------------------------------------------


def quarantine_list(json: Json = False) -> int:
    """List bad copies in the cache and on the tiers.

    JSON: a list with id, run, step, session, name, where, path, size, reason, good.
    """
    with client() as gateway:
        found = list(gateway.care.quarantine())
    if json:
        print_json(found)
        return exits.DONE
    rows = [
        (
            entry.id,
            f"{entry.run}/{entry.step}",
            entry.name,
            entry.where,
            size_text(entry.size),
            ", ".join(entry.good) or "nowhere",
        )
        for entry in found
    ]
    table(("ID", "CHECKPOINT", "SHARD", "WHERE", "SIZE", "GOOD COPY"), rows, numeric=(4,))
    return exits.DONE


def quarantine_show(id: _Id, json: Json = False) -> int:
    """Say all about one bad copy. JSON keys: as in `quarantine ls`."""
    with client() as gateway:
        entry = _only(gateway.care.quarantine(id), id)
    print_json(entry) if json else _say_quarantined(entry)
    return exits.DONE


def _only(entries: Iterator[Quarantined], id: str) -> Quarantined:
    for entry in entries:
        return entry
    raise NotFound(f"nothing in quarantine has the id {id!r}")


def _say_quarantined(entry: Quarantined) -> None:
    say(f"{entry.id}: shard {entry.name} of {entry.run}/{entry.step}, session {entry.session}, {size_text(entry.size)}")
    say(f"  where   {entry.where} {entry.path}".rstrip())
    say(f"  reason  {entry.reason or 'unknown'}")
    say(f"  good    {', '.join(entry.good) or 'no good copy is known'}")


def quarantine_release(
    id: _Id,
    force: Annotated[bool, typer.Option("--force", help="Also where no good copy is known: what is left of it goes.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do it; without this only say what would go.")] = False,
    json: Json = False,
) -> int:
    """Drop a bad copy. Refused where no good one is known, unless --force is given. A dry run unless --yes is given.

    JSON keys: as in `quarantine ls`, and released.
    """
    left = "a release that has begun goes on to its end; run it again to see" if yes else NOTHING_CHANGED
    with on_interrupt(left), client() as gateway:
        entry = gateway.care.release(id, force=force, dry_run=not yes)
    if json:
        print_json({**asdict(entry), "released": yes})
    else:
        good = f"good at {', '.join(entry.good)}" if entry.good else "no good copy is known"
        act, more = ("released", "") if yes else ("would release", "; give --yes to do it")
        say(f"{act} {entry.id}: shard {entry.name} at {entry.where}; {good}{more}")
    return exits.DONE


# -- rebuild and gc ------------------------------------------------------------------------------------------------------


def rebuild(
    config: _ConfigFile = None,
    apply: _Apply = False,
    force: Annotated[bool, typer.Option("--force", help="Also a catalog that can be used.")] = False,
    json: Json = False,
) -> int:
    """Make the catalog anew from the cache's files and the tiers' manifests, without a running gateway.

    A dry run unless --apply is given. The old catalog is kept beside it, and pins, holds and deletions under way
    are set again.

    JSON keys: damage, sealed_files, part_files, applied, aside, checkpoints, from_tiers, unreachable, marks_lost.
    """
    with on_interrupt(NOTHING_CHANGED):
        done = _offline("rebuild", config, apply, force)
    if json:
        print_json(done)
        return exits.DONE
    say(f"catalog  {'damaged: ' + done['damage'] if done['damage'] else 'can be used'}")
    say(f"cache    {done['sealed_files']} sealed shard files, {done['part_files']} committed parts")
    if not done["applied"]:
        needed = "would set the catalog aside and make it anew from these files and the tiers' manifests; give --apply"
        say(needed if done["damage"] else "nothing to do; --apply --force makes it anew all the same")
        return exits.DONE
    say(f"rebuilt  {done['checkpoints']} checkpoints are known, {done['from_tiers']} of them complete")
    if done["aside"]:
        say(f"kept     the old catalog as {done['aside']}")
    if done["marks_lost"]:
        say(f"marks    {done['marks_lost']}")
    if done["unreachable"]:
        say(f"not asked, since they cannot be reached now: {', '.join(done['unreachable'])}")
    return exits.DONE


_STOP_FIRST = {"fsck": "stop the gateway first, or leave --offline away", "rebuild": "stop the gateway first"}


def _offline(verb: str, config: Path | None, *arguments: object) -> Any:
    """Run one of forebay_gateway.offline's acts; its errors become this package's."""
    try:
        from forebay_gateway import offline
    except ModuleNotFoundError as error:
        raise gateway_missing(error) from error
    act = {"fsck": offline.fsck, "rebuild": offline.rebuild}[verb]
    try:
        return act(None if config is None else str(config), *arguments)  # type: ignore[operator]
    except offline.CutOff as error:
        raise Interrupted(str(error)) from None
    except Exception as error:
        kind, sentence = getattr(error, "kind", ""), str(error)
        if not kind:
            raise
        if "has this cache open" in sentence:
            raise Unavailable(f"{verb}: {sentence}; {_STOP_FIRST[verb]}") from error
        raise (InvalidArgument if kind == "invalid_argument" else ForebayError)(f"{verb}: {sentence}") from error


def collect(
    apply: _Apply = False,
    older_than: Annotated[
        str, typer.Option("--older-than", metavar="TIME", help="Spare what is younger, such as 24h.")
    ] = "24h",
    json: Json = False,
) -> int:
    """Delete what is left over on the tiers: uploads and temporary files of ours, sessions that a newer one superseded.

    A dry run unless --apply is given. Files of others are listed, and never touched; so is a tier that could not be asked.

    JSON: a list with kind, where, path, what, age_s, deletable, outcome.
    """
    age_s = _seconds(older_than)
    left = "what was deleted so far is gone, the rest is as it was; run it again to go on" if apply else NOTHING_CHANGED
    with on_interrupt(left), client() as gateway:
        found = list(gateway.care.collect(apply=apply, older_than_s=age_s))
    if json:
        print_json(found)
    else:
        _say_garbage(found, apply, older_than)
    return exits.FAILED if any(item.outcome.startswith("failed") for item in found) else exits.DONE


def _seconds(text: str) -> float:
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS_S else (text, "s")
    try:
        value = float(number) * _UNITS_S[unit]
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e10:
        raise UsageError(f"gc: {text!r} is no time; write 90s, 30m, 24h or 7d")
    return value


def _say_garbage(found: list[Garbage], applied: bool, older_than: str) -> None:
    silent = [item for item in found if item.kind == "not_asked"]
    found = [item for item in found if item.kind != "not_asked"]
    for item in silent:
        say(f"not asked: {item.where} ({item.what})")
    for item in found:
        age = f", {duration_text(item.age_s)} old" if item.age_s is not None else ""
        act = item.outcome or ("would delete" if item.deletable else "leave")
        say(f"{act}: {item.where} {item.path} ({item.what}{age})")
    deletable = sum(item.deletable for item in found)
    left = f"{len(found) - deletable} left alone" + (
        f" (younger than {older_than}, or not ours)" if deletable < len(found) else ""
    )
    left += f"; not asked: {', '.join(item.where for item in silent)}" if silent else ""
    if applied:
        say(f"{sum(item.outcome == 'deleted' for item in found)} of {deletable} deleted, {left}")
    else:
        say(f"{deletable} would be deleted, {left}" + ("; give --apply" if deletable else ""))
