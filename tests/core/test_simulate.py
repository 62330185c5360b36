"""The simulated fleet: what must come out where it can be worked out by hand, and what is refused beforehand."""

import dataclasses

import pytest

from forebay_gateway.core.schedule import RunRules
from forebay_gateway.plan.scenario import Outcome, Scenario, Unfinishable, check
from forebay_gateway.plan.simulate import simulate

GB = 10**9
# 100 s of training, 10 s of saving; a checkpoint is out in 50 s.
STEADY = Scenario(
    nodes=4, size_bytes=400 * GB, interval_s=100, tier_bytes_per_s=8 * GB, duration_s=11_000, mtbf_s=1e15, uneven=0.0
)


def run(**changes: object) -> Outcome:
    return simulate(dataclasses.replace(STEADY, **changes))


def test_a_steady_fleet_is_as_worked_out_by_hand() -> None:
    found = run()
    assert (found.saves, found.complete, found.waiting, found.skipped, found.dropped, found.failures) == (100, 99, 1, 0, 0, 0)
    assert found.drain_mean_s == pytest.approx(50) and found.drain_p99_s == pytest.approx(50)
    assert found.useful_share == pytest.approx(10 / 11) and found.saving_s == 1000 and found.stalled_s == 0
    assert found.tier_busy == pytest.approx(99 * 50 / 11_000, rel=0.01)
    assert found.backlog_max_bytes == pytest.approx(400 * GB)
    assert len(found.samples) == 200 and found.samples[-1].at_s == 11_000
    # 55 s each: saved at 110 and out at 160, so that the second shows nothing, the third all of it.
    assert [round(sample.backlog_bytes / GB) for sample in found.samples[:4]] == [0, 0, 400, 0]
    assert [round(sample.oldest_s) for sample in found.samples[:4]] == [0, 0, 50, 0]


def test_nodes_go_no_faster_than_their_network() -> None:
    assert run(node_bytes_per_s=1 * GB).drain_mean_s == pytest.approx(100)


def test_jobs_share_the_tier() -> None:
    """Two jobs of half the size each: alone each would need 25 s, together 25 to 50."""
    found = run(jobs=2, seed=3)
    assert 25 <= found.drain_mean_s <= 50 and found.saves == pytest.approx(200, abs=2)


def test_slower_nodes_hold_a_checkpoint_up() -> None:
    assert run(uneven=0.5).drain_p99_s > 50


def test_staggered_nodes_begin_later() -> None:
    assert run(stagger_s=40.0).drain_mean_s == pytest.approx(50)  # the tier is as busy as ever
    assert run(stagger_s=40.0, node_bytes_per_s=2 * GB).drain_mean_s == pytest.approx(80)  # the last one begins after 30 s


def test_a_tier_that_is_too_slow_falls_behind_or_skips() -> None:
    behind = run(tier_bytes_per_s=2 * GB)
    assert behind.tier_busy == pytest.approx(1, abs=0.02) and behind.skipped == 0
    assert behind.oldest_max_s > 4900 and behind.backlog_end_bytes > 40 * 400 * GB
    skipping = run(tier_bytes_per_s=2 * GB, rules=RunRules(skip_superseded=True))
    assert skipping.skipped > 30 and skipping.oldest_max_s < 600
    # As many get out, and newer ones; a little is lost where other groups had begun what the first one then skips.
    assert skipping.complete == pytest.approx(behind.complete, abs=5)
    assert skipping.saves == skipping.complete + skipping.skipped + skipping.waiting


def test_skips_keep_the_slowest_nodes_in_step() -> None:
    """The group that decides is faster than others: it waits until a checkpoint is out everywhere before it begins another."""
    for seed in range(1, 5):
        found = run(tier_bytes_per_s=2 * GB, uneven=0.4, seed=seed, rules=RunRules(skip_superseded=True))
        assert found.skipped > 30 and found.oldest_max_s < 900


def test_cadence_takes_every_nth() -> None:
    found = run(rules=RunRules(every=4))
    assert found.complete == 25 and found.skipped in (72, 73, 74)


def test_a_cache_that_is_full_stalls_the_job() -> None:
    small = run(tier_bytes_per_s=2 * GB, cache_bytes=400 * GB)  # room for two saves of 100 GB beside the one that is kept
    assert small.stalled_s > 3000
    assert small.backlog_max_bytes <= 3 * 400 * GB
    assert run(cache_bytes=400 * GB).stalled_s == 0


def test_failures_undo_work_and_drop_what_was_not_out() -> None:
    found = run(mtbf_s=4 * 1000.0, duration_s=110_000)  # a node of the four fails every 1,000 s of running
    assert 60 <= found.failures <= 110
    assert 40 * found.failures < found.lost_work_s < 200 * found.failures  # half an interval, and what was on its way
    assert found.restart_s == pytest.approx(found.failures * 350, rel=0.05)  # 300 s and reading for 50
    assert found.dropped > 10 and found.saves == found.complete + found.dropped + found.waiting
    total_s = found.duration_s
    parts_s = found.useful_share * total_s + found.lost_work_s + found.restart_s + found.saving_s
    assert parts_s == pytest.approx(total_s, rel=0.01)


def test_the_same_seed_gives_the_same_day() -> None:
    changes = {"jobs": 2, "uneven": 0.2, "mtbf_s": 4 * 2000.0, "rules": RunRules(every=2)}
    assert run(seed=7, **changes) == run(seed=7, **changes)
    assert run(seed=7, **changes) != run(seed=8, **changes)


def test_ten_thousand_nodes_are_simulated() -> None:
    found = simulate(Scenario(10_000, 10_000 * 20 * GB, 600, 10**12))
    assert found.nodes == 10_000 and 20 < found.failures < 60 and found.complete > 50


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"nodes": 0}, "nearest: 1"),
        ({"nodes": 10_001}, "nearest: 10000"),
        ({"jobs": 0}, "nearest: 1"),
        ({"jobs": 3}, "nearest: 2"),
        ({"interval_s": 0}, "above 0"),
        ({"tier_bytes_per_s": -1}, "above 0"),
        ({"stagger_s": -1.0}, "at least 0"),
        ({"uneven": 1.0}, "nearest to 1: 0.9"),
        ({"duration_s": 150.0}, "nearest: 1000 s"),
        ({"cache_bytes": 100 * GB}, "nearest: 2105"),
        ({"interval_s": 0.001, "save_cost_s": 0.0}, "events would take longer than a minute; nearest: an interval of"),
        ({"jobs": 2, "duration_s": 1e9}, "or 1 jobs"),
        ({"mtbf_s": 0.1}, "a node that fails every 0.1 s"),
    ],
)
def test_what_cannot_be_or_not_end_is_refused_beforehand(changes: dict[str, object], said: str) -> None:
    with pytest.raises(Unfinishable, match=said):
        run(**changes)


def test_the_nearest_interval_that_is_named_is_accepted() -> None:
    scenario = dataclasses.replace(STEADY, nodes=10_000, jobs=2_500, interval_s=60, duration_s=86_400)
    with pytest.raises(Unfinishable) as refused:
        check(scenario)
    interval_s = float(str(refused.value).partition("an interval of ")[2].partition(" s")[0])
    check(dataclasses.replace(scenario, interval_s=interval_s + 1))
