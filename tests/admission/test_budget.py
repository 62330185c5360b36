"""The watermarks: what counts, who is slowed, and that a bursty drain makes nothing flap."""

import contextlib

import pytest

from forebay_gateway.admission.budget import Budget, Pressure
from forebay_gateway.admission.curve import SLOWEST_BYTES_PER_S
from forebay_gateway.admission.disk import FAILURES_IN_A_ROW
from forebay_gateway.admission.quota import Quotas
from forebay_gateway.core.errors import CacheFull, InvalidArgument

MIB = 1 << 20


class Sums:
    """What the catalog and the tiers would say."""

    def __init__(self) -> None:
        self.dirty, self.rate, self.looks = 0, 100.0 * MIB, 0

    def look(self) -> int:
        self.looks += 1
        return self.dirty


def budget_of(sums: Sums, *, used: int = 0, quotas: Quotas | None = None, max_dirty_age_s: float = 0.0) -> Budget:
    return Budget(
        1000 * MIB,
        soft=0.6,
        hard=0.9,
        refuse=0.95,
        reopen=0.85,
        used=used,
        drain_rate=lambda: sums.rate,
        dirty=sums.look,
        quotas=quotas,
        max_dirty_age_s=max_dirty_age_s,
    )


def test_below_soft_nothing_is_looked_up() -> None:
    sums = Sums()
    budget = budget_of(sums, used=599 * MIB)
    assert budget.pace_s() == 0.0 == sums.looks


def test_verified_bytes_slow_nobody_and_dirty_ones_do() -> None:
    sums = Sums()
    budget = budget_of(sums, used=900 * MIB)
    sums.dirty = 500 * MIB
    assert budget.pace_s() == 0.0
    sums.dirty = 750 * MIB
    assert 1 / budget.pace_s() == pytest.approx(100 * MIB)
    found = budget.pressure()
    assert found.writers_bytes_per_s == pytest.approx(100 * MIB) and "slowed" in found.reason


def test_what_is_on_its_way_counts_as_dirty_and_never_twice() -> None:
    sums = Sums()
    budget = budget_of(sums, used=600 * MIB)
    sums.dirty = 600 * MIB
    reservation = budget.reserve(150 * MIB)
    assert 1 / budget.pace_s() == pytest.approx(100 * MIB)
    sums.dirty = 750 * MIB  # the catalog has it already, and the reservation is not settled yet
    assert 1 / budget.pace_s() == pytest.approx(100 * MIB)
    reservation.settle(150 * MIB)
    assert 1 / budget.pace_s() == pytest.approx(100 * MIB)


@pytest.mark.parametrize("age_s, slowed", [(59.0, False), (60.0, True)])
def test_what_waits_too_long_slows_writers_as_at_the_hard_watermark_whatever_the_fill(age_s: float, slowed: bool) -> None:
    budget = budget_of(Sums(), used=MIB, max_dirty_age_s=60.0)
    budget.dirty_age_s = age_s
    found = budget.pressure()
    if not slowed:
        assert found == Pressure("ok", "cache 0% full", found.fill, None)
        return
    assert (found.level, found.writers_bytes_per_s) == ("hard", SLOWEST_BYTES_PER_S)
    assert "has waited 60 s" in found.reason
    budget.reserve(MIB)  # slowed, not refused


def test_no_limit_to_the_age_is_none() -> None:
    budget = budget_of(Sums(), used=MIB)
    budget.dirty_age_s = 1e9
    assert budget.pressure().level == "ok"


def test_between_refuse_and_reopen_nothing_changes_under_a_bursty_drain() -> None:
    """Writers that always want more, and a drain that frees 60 MiB at once, then nothing for long: it refuses and reopens
    once for each tenth of the cache that drained, not with each burst."""
    sums = Sums()
    budget = budget_of(sums)
    transitions = drained = 0
    was = False
    for tick in range(10_000):
        with contextlib.suppress(CacheFull):
            budget.reserve(5 * MIB).settle(5 * MIB)
        if tick % 20 == 0 and budget.used >= 60 * MIB:
            budget.freed(60 * MIB)
            drained += 60
        now = budget.pressure().level == "refusing"
        transitions += now is not was
        was = now
    assert drained == 30_000 - 60
    assert 100 < transitions <= 2 * drained / 100 + 2


def test_the_time_to_come_back_is_what_the_drain_needs_for_all_who_wait() -> None:
    sums = Sums()
    budget = budget_of(sums, used=950 * MIB)
    with pytest.raises(CacheFull) as caught:
        budget.reserve(50 * MIB)
    assert caught.value.retry_after_s == pytest.approx(1.5)  # down to 850, with these 50 more, at 100 a second
    budget.waiting_bytes = 500 * MIB
    assert budget.refusal(50 * MIB).retry_after_s == pytest.approx(6.5)


def test_a_run_is_held_to_its_quota_by_what_waits_and_what_comes() -> None:
    quotas = Quotas(lambda run: 100 * MIB if run == "small" else None)
    budget = budget_of(Sums(), quotas=quotas)
    first = budget.reserve(60 * MIB, "small")
    with pytest.raises(CacheFull) as caught:
        budget.reserve(60 * MIB, "small")
    assert "quota" in str(caught.value) and caught.value.retry_after_s == pytest.approx(0.25)
    assert budget.pressure().level == "ok"  # the cache itself has room
    budget.reserve(600 * MIB, "other")
    with pytest.raises(InvalidArgument, match="quota"):
        budget.reserve(101 * MIB, "small")
    quotas.moved(7, "small", 60 * MIB)  # the catalog says it is sealed
    first.settle(60 * MIB)
    assert quotas.held("small") == 60 * MIB and quotas.run_of(7) == "small"
    with pytest.raises(CacheFull):
        budget.reserve(60 * MIB, "small")
    quotas.moved(7, "small", -60 * MIB)  # verified where it must be
    assert quotas.held("small") == 0 and quotas.run_of(7) is None
    growing = budget.reserve(60 * MIB, "small")
    with pytest.raises(CacheFull):
        growing.grow(60 * MIB)
    growing.release()
    assert quotas.held("small") == 0


def test_a_session_s_rest_of_an_estimate_goes_with_it() -> None:
    quotas = Quotas(lambda run: 100)
    quotas.moved(1, "run", 90)
    quotas.moved(1, "run", -95)  # with the padding that the estimate left out
    assert quotas.held("run") == 0


def test_a_disk_that_fails_again_and_again_is_told_and_one_success_clears_it() -> None:
    budget = budget_of(Sums())
    for _ in range(FAILURES_IN_A_ROW - 1):
        budget.disk.failed("cannot write")
    budget.disk.worked()
    budget.disk.failed("cannot write")
    assert budget.pressure().level == "ok"  # never in a row
    for _ in range(FAILURES_IN_A_ROW):
        budget.disk.failed("cannot write")
    found = budget.pressure()
    assert found.level == "refusing" and "disk fails: cannot write" in found.reason
    budget.disk.worked()
    assert budget.pressure().level == "ok"


def test_promised_bytes_that_the_disk_still_calls_free_are_known() -> None:
    budget = budget_of(Sums())
    one, other = budget.reserve(10 * MIB), budget.reserve(20 * MIB)
    one.unwritten(10 * MIB)
    other.unwritten(20 * MIB)
    assert budget.unwritten == 30 * MIB
    one.unwritten(0)
    other.grow(5 * MIB)
    other.unwritten(5 * MIB)
    assert budget.unwritten == 5 * MIB
    other.release()
    other.release()
    one.settle(10 * MIB)
    assert (budget.unwritten, budget.reserved, budget.used) == (0, 0, 10 * MIB)


def test_what_was_let_in_before_goes_on_while_new_ones_are_refused() -> None:
    budget = budget_of(Sums(), used=800 * MIB)
    growing = budget.reserve(80 * MIB)
    with pytest.raises(CacheFull):
        budget.reserve(100 * MIB)
    with pytest.raises(CacheFull):
        budget.reserve(MIB)  # until the fill is below `reopen`
    growing.grow(50 * MIB)
    with pytest.raises(CacheFull):
        growing.grow(50 * MIB)
    with pytest.raises(InvalidArgument):
        growing.check_grows(900 * MIB)
    growing.release()
    assert budget.reserved == 0


def test_a_second_file_of_a_shard_and_a_restore_count_against_no_quota() -> None:
    quotas = Quotas(lambda run: 100 * MIB)  # that of a glob for all runs
    budget = budget_of(Sums(), used=700 * MIB, quotas=quotas)
    first = budget.reserve(60 * MIB, "run")
    second = first.beside(60 * MIB)
    assert (quotas.held("run"), budget.reserved) == (60 * MIB, 120 * MIB)
    budget.reserve(110 * MIB).release()
    with pytest.raises(CacheFull):
        first.beside(200 * MIB)
    second.release()
    first.settle(60 * MIB)
    assert (quotas.held("run"), budget.reserved, budget.used) == (0, 0, 760 * MIB)


def test_a_quota_that_comes_later_finds_what_is_held_already() -> None:
    quota: int | None = None
    quotas = Quotas(lambda run: quota)
    budget = budget_of(Sums(), quotas=quotas)
    before = budget.reserve(60 * MIB, "run")
    quotas.moved(1, "run", 30 * MIB)
    quota = 100 * MIB
    with pytest.raises(CacheFull):
        budget.reserve(20 * MIB, "run")
    before.release()
    quotas.moved(1, "run", -30 * MIB)
    assert quotas.held("run") == 0
