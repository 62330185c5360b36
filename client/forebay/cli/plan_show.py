"""How a plan is printed, as text, as JSON and as charts.

Owns the formats only.
"""

from typing import Any

from forebay.cli.output import count_text, duration_text, plain, say, say_state, size_text, table
from forebay.plan.inputs import Inputs
from forebay.plan.interval import lost_share
from forebay.plan.needs import Need, Plan
from forebay.plan.plot import Chart, Line
from forebay.plan.state import Item

CURVE_POINTS = 60


def document(items: tuple[Item, ...], plan: Plan, outcome: Any) -> dict[str, Any]:
    """The JSON document."""
    return {"state": plain(items), **plain(plan), "simulation": None if outcome is None else plain(outcome)}


def show(items: tuple[Item, ...], plan: Plan, outcome: Any) -> None:
    """As text."""
    inputs = plan.inputs
    _show_state(items, inputs)
    say("")
    rows = [(need.name, need.scope, _amount(need.needs, need), _amount(need.has, need), *_shares(need)) for need in plan.needs]
    say(f"every {duration_text(inputs.interval_s)} needs")
    table(("RESOURCE", "OF THE", "NEEDS", "HAS", "BUSY", "SHORTEST", "SOURCE"), rows, numeric=(2, 3, 4, 5))
    if not inputs.tiers:
        say("no tier is known: give one, such as --tier pfs=20GB/s, or ask where a gateway runs")
    say("")
    say(f"saturates first  {plan.saturates_first}")
    say(f"shortest safe    {duration_text(plan.interval_safe_s)} (nothing busier than {inputs.headroom:.0%})")
    formulas = f"Young {duration_text(plan.interval_young_s)}, Daly {duration_text(plan.interval_daly_s)}"
    say(f"best             {duration_text(plan.interval_best_s)}, set by {plan.limited_by} ({formulas})")
    say(f"lost             {plan.lost_share:.1%} of the time to saves, failures, restarts; at best {plan.lost_share_best:.1%}")
    say(f"a job fails      every {duration_text(inputs.job_mtbf_s)}, a save stops it for {duration_text(inputs.cost_s)}")
    for drain in plan.drains:
        say(f"out on {drain.tier:<9} in {duration_text(drain.drain_s)}")
    _show_rest(plan)
    if outcome is not None:
        _show_outcome(outcome)
    for warning in plan.warnings:
        say_state("", "warning", f": {warning.what}; nearest: {warning.nearest}")


def _show_state(items: tuple[Item, ...], inputs: Inputs) -> None:
    total = inputs.size_bytes
    say(f"a checkpoint has {size_text(total)}, on each of {count_text(inputs.nodes, 'node')} {size_text(inputs.node_bytes)}")
    if len(items) > 1:
        table(("PART", "SIZE", ""), [(item.name, size_text(item.bytes), item.note) for item in items], numeric=(1,))
        weights = items[0].bytes
        say(f"that is {total / weights:.1f} times the weights" if weights else "")


def _amount(value: float | None, need: Need) -> str:
    if value is None:
        return "unknown"
    if need.unit == "bytes/s":
        return f"{size_text(value)}/s"
    return f"{value:.0%}" if need.unit == "s/s" else f"{value:,.1f}/s"


def _shares(need: Need) -> tuple[str, str, str]:
    if need.share is None:
        return "-", "-", need.source
    return f"{need.share:.0%}", duration_text(need.interval_min_s), need.source


def _show_rest(plan: Plan) -> None:
    cache, wear, inputs = plan.cache, plan.wear, plan.inputs
    if cache.needed_bytes is None:
        say("cache            no size lasts: a tier is slower than the interval needs")
    else:
        has = "" if cache.has_bytes is None else f"; it has {size_text(cache.has_bytes)}"
        away = duration_text(inputs.outage_s)
        say(
            f"cache            {size_text(cache.needed_bytes)} on a node, for {cache.saves} saves (a tier away for {away}){has}"
        )
    for item in plan.objects:
        kept = f"${item.storage_a_month:,.0f} for {count_text(inputs.keep, 'checkpoint')}"
        asked = f"${item.requests_a_month:,.0f} for requests ({item.puts_a_checkpoint:,} PUTs a checkpoint)"
        say(f"{item.tier + ' costs':<16} ${item.total_a_month:,.0f} a month: {kept}, {asked}")
    writes = "" if wear.drive_writes_a_day is None else f", {wear.drive_writes_a_day:.2f} drive writes"
    years = "its endurance is not known" if wear.years is None else f"it lasts {wear.years:.1f} years"
    say(f"disk wear        {size_text(wear.bytes_a_day)} a day{writes} (rated: {wear.rated_drive_writes_a_day:g}); {years}")


def _show_outcome(outcome: Any) -> None:
    say("")
    fleet = f"{count_text(outcome.nodes, 'node')}, {count_text(outcome.jobs, 'job')}, seed {outcome.seed}"
    say(f"simulated {duration_text(outcome.duration_s)}, {fleet}")
    say(
        f"  saves          {outcome.saves}: {outcome.complete} complete on the tier, {outcome.skipped} skipped, "
        f"{outcome.dropped} lost with a node, {outcome.waiting} waiting"
    )
    say(f"  failures       {outcome.failures}, with {duration_text(outcome.lost_work_s)} of training undone")
    say(f"  useful         {outcome.useful_share:.1%} of the time; stalled {duration_text(outcome.stalled_s)}")
    say(f"  backlog        at most {size_text(outcome.backlog_max_bytes)}, at the end {size_text(outcome.backlog_end_bytes)}")
    mean, p99 = duration_text(outcome.drain_mean_s), duration_text(outcome.drain_p99_s)
    say(f"  out in         {mean} on average, 99 of 100 in {p99}; the oldest {duration_text(outcome.oldest_max_s)}")
    say(f"  on the tier    a new one every {duration_text(outcome.interval_on_tier_s)}; it is busy {outcome.tier_busy:.0%}")


def charts(plan: Plan, outcome: Any) -> list[Chart]:
    """What is lost and how busy things are, by interval; of a simulation also the backlog by time."""
    inputs = plan.inputs
    low = max(1.0, min(plan.interval_safe_s, plan.interval_daly_s, inputs.interval_s) / 5)
    high = max(plan.interval_best_s, inputs.interval_s) * 5
    xs = [low * (high / low) ** (number / (CURVE_POINTS - 1)) for number in range(CURVE_POINTS)]
    behind_s = max((drain.drain_s or 0.0 for drain in plan.drains), default=0.0)
    lost = [(x, 100 * lost_share(x, inputs.cost_s, inputs.job_mtbf_s, behind_s, inputs.restart_s)) for x in xs]
    busy = [
        Line(f"{need.name} busy", [(x, 100 * need.share * inputs.interval_s / x) for x in xs])
        for need in plan.needs
        if need.share is not None
    ]
    marks = (("now", inputs.interval_s), ("shortest safe", plan.interval_safe_s), ("best", plan.interval_best_s))
    found = [Chart("By interval", "interval, s", "%", (Line("time lost", lost), *busy), marks, log_x=True, y_max=100.0)]
    if outcome is not None:
        hours = [(sample.at_s / 3600, sample) for sample in outcome.samples]
        backlog = Line("backlog", [(at, sample.backlog_bytes / 2**40) for at, sample in hours])
        oldest = Line("oldest", [(at, sample.oldest_s / 60) for at, sample in hours])
        found += [
            Chart("Simulated backlog", "hours", "TiB", (backlog,)),
            Chart("Simulated age of the oldest save that is not out", "hours", "minutes", (oldest,)),
        ]
    return found
