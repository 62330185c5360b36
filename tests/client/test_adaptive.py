"""forebay.AdaptiveInterval, on a fake clock."""

import math

import pytest

import forebay
from forebay import AdaptiveInterval, Pressure, TierBacklog
from forebay.plan.interval import daly_s, lost_share, young_s


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


def pressure(rate: float = 0.0, pending: int = 0, level: str = "ok", tier: str = "pfs") -> Pressure:
    return Pressure(level, "", 0.1, (TierBacklog(tier, pending, rate, None),))


def test_the_first_save_is_due_after_the_shortest_interval(clock: FakeClock) -> None:
    when = AdaptiveInterval(min_s=60, max_s=600, clock=clock)
    assert not when.due() and (when.interval_s, when.reason) == (60, "min_s")
    clock.now_s += 59.9
    assert not when.due()
    clock.now_s += 0.1
    assert when.due()
    when.saved(0.0, 100)
    assert not when.due() and when.due(clock.now_s + 60)


def test_failures_set_the_interval(clock: FakeClock) -> None:
    when = AdaptiveInterval(min_s=60, max_s=3600, mtbf_s=36_000, clock=clock)
    when.saved(5.0, 100)
    assert (when.interval_s, when.reason) == (daly_s(5.0, 36_000), "failures")
    when.mtbf_s = 3_600_000
    assert (when.interval_s, when.reason) == (3600, "max_s")
    when.mtbf_s = 100
    assert (when.interval_s, when.reason) == (60, "min_s")


def test_without_a_failure_rate_saves_take_a_share_of_the_time(clock: FakeClock) -> None:
    when = AdaptiveInterval(min_s=1, max_s=3600, overhead=0.1, clock=clock)
    when.saved(9.0, 100)
    assert (when.interval_s, when.reason) == (pytest.approx(81), "cost")  # 9 of 90 s
    when.saved(19.0, 100)
    assert when.interval_s == pytest.approx(9 * 12)  # one slow save does not turn everything over


def test_the_slowest_tier_sets_the_interval(clock: FakeClock) -> None:
    when = AdaptiveInterval(min_s=10, max_s=3600, headroom=0.5, clock=clock)
    when.saved(0.0, 1000)
    assert when.sustainable_s is None
    when.observe(pressure(rate=50.0))  # nothing waits: what it shows is no limit
    assert when.sustainable_s is None and when.reason == "min_s"
    when.observe(Pressure("soft", "", 0.7, (TierBacklog("pfs", 5, 10.0, None), TierBacklog("object", 5, 4.0, None))))
    assert (when.interval_s, when.reason) == (500, "drain") and when.sustainable_s == 500
    when.observe(pressure())  # an idle tier keeps the rate that was seen
    assert when.interval_s == 500
    when.observe(pressure(rate=14.0, pending=5, tier="object"))
    assert when.interval_s == pytest.approx(1000 / (0.5 * 7))


@pytest.mark.parametrize("level", ["hard", "refusing"])
def test_a_full_cache_doubles_the_interval_until_it_is_not(clock: FakeClock, level: str) -> None:
    when = AdaptiveInterval(min_s=60, max_s=400, clock=clock)
    when.saved(0.0, 100)
    for expected in (120, 240, 400, 400):
        when.observe(pressure(level=level))
        assert (when.interval_s, when.reason) == (expected, "pressure")
    when.observe(pressure(level="soft"))
    assert (when.interval_s, when.reason) == (60, "min_s")
    when.observe(pressure(level=level))
    assert when.reason == "pressure"


@pytest.mark.parametrize(
    "bounds",
    [
        {"min_s": 0},
        {"min_s": 10, "max_s": 5},
        {"max_s": math.inf},
        {"min_s": math.nan},
        {"mtbf_s": 0},
        {"headroom": 0},
        {"headroom": 1.1},
        {"overhead": 1},
    ],
)
def test_bounds_that_make_no_sense_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=r"must be|are shares"):
        AdaptiveInterval(**bounds)


@pytest.mark.parametrize(("cost_s", "size"), [(-1.0, 1), (math.nan, 1), (1.0, -1)])
def test_a_save_that_cannot_be_is_refused(cost_s: float, size: int) -> None:
    with pytest.raises(ValueError, match="at least 0"):
        AdaptiveInterval().saved(cost_s, size)


def test_pressure_says_the_shortest_interval_that_the_drain_carries() -> None:
    assert pressure(rate=10.0, pending=1).sustainable_interval_s(1000) == 100
    assert pressure(rate=10.0).sustainable_interval_s(1000) is None
    assert Pressure("ok", "", 0.0).sustainable_interval_s(1000) is None


def test_it_takes_what_a_client_gives(memory) -> None:
    with forebay.Client(memory.address) as client:
        when = AdaptiveInterval()
        when.observe(client.pressure())
        assert when.interval_s == 60


def test_young_and_daly() -> None:
    """Values worked out by hand from the papers' formulas."""
    assert young_s(200, 40_000) == 4000
    share = 200 / 80_000
    assert daly_s(200, 40_000) == pytest.approx(4000 * (1 + share**0.5 / 3 + share / 9) - 200)
    assert daly_s(100, 50) == 50 and daly_s(99.999, 50) == pytest.approx(50, rel=0.5)
    # Daly's is the best of its neighbours, where what is lost is counted.
    losses = [lost_share(interval_s, 200, 40_000) for interval_s in (3000, daly_s(200, 40_000), 5000)]
    assert min(losses) == losses[1]
