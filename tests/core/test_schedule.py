"""The drain scheduler: each rule of its docstring, and that nothing waits for ever."""

import math
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forebay_gateway.core.schedule import Idle, Kind, Next, Part, Rules, RunRules, Scheduler, Skip

MiB = 1 << 20


class Feed:
    """Parts with fresh numbers, and what becomes of them."""

    def __init__(self, rules: Rules | None = None, run_rules: Callable[[str], RunRules] = lambda run: RunRules()) -> None:
        self.queue = Scheduler(rules, run_rules)
        self.order = 0
        self.sessions = 0

    def save(self, run: str, since_s: float, *, parts: int = 1, copies: int = 1, complete: bool = True, **more) -> int:
        """A checkpoint; its session."""
        self.sessions += 1
        for _ in range(parts):
            self.order += 1
            self.queue.add(Part(self.order, run, self.sessions, self.sessions, copies, since_s, **more))
        if complete:
            self.queue.complete(self.sessions)
        return self.sessions

    def send(self, now_s: float, size: int = MiB) -> Next | Skip | Idle:
        """Decide, and hand out one copy of it."""
        found = self.queue.decide(now_s)
        if isinstance(found, Next):
            self.queue.took(found.order, 1, size, now_s)
            self.queue.verified(found.order)
        return found

    def sent(self, now_s: float) -> list[int]:
        """Sessions in the order in which everything goes now."""
        sessions = []
        while isinstance(found := self.send(now_s), Next):
            sessions.append(found.session_id)
        return sessions


def test_classes_go_in_their_order_and_older_ones_first() -> None:
    feed = Feed()
    old, new = feed.save("r", 0.0), feed.save("r", 1.0)
    final = feed.save("r", 2.0, kind=Kind.FINAL)
    preempted = feed.save("r", 3.0, kind=Kind.PREEMPTION)
    assert feed.sent(4.0) == [preempted, final, old, new]
    assert feed.send(5.0) == Idle(None) and len(feed.queue) == 0


def test_the_nearest_deadline_goes_first_between_runs() -> None:
    feed = Feed()
    first, second, third = feed.save("b", 0.0), feed.save("a", 1.0), feed.save("c", 2.0)
    assert feed.sent(3.0) == [first, second, third]


def test_a_checkpoint_that_has_begun_is_finished_first() -> None:
    feed = Feed()
    feed.save("r", 100.0, parts=2)
    assert feed.send(100.0) == Next(1, 1, "r", 1, "periodic")
    feed.queue.add(Part(9, "r", 9, 9, 1, 50.0))  # it is older, and came back
    assert feed.sent(101.0) == [1, 9]


def test_a_part_beyond_the_largest_age_goes_before_higher_classes() -> None:
    feed = Feed(Rules(max_age_s=100.0))
    old = feed.save("r", 0.0)
    final = feed.save("r", 99.0, kind=Kind.FINAL)
    assert feed.queue.decide(99.9).session_id == final
    assert feed.queue.decide(100.0) == Next(old, old, "r", old, "overdue")
    assert feed.queue.decide(100.0) == Next(old, old, "r", old, "overdue")  # asking changes nothing
    assert feed.sent(100.0) == [old, final]


def test_where_all_are_too_old_a_last_save_gets_half() -> None:
    feed = Feed(Rules(max_age_s=100.0))
    for _ in range(20):
        feed.save("r", 0.0)
    final = feed.save("r", 150.0, kind=Kind.FINAL, copies=8)
    sent = feed.sent(200.0)
    assert sent.index(final) == 1 and 20 - sent[::-1].index(final) <= 16
    assert sorted(sent) == sorted([*range(1, 21), *[final] * 8])


def test_an_operator_holds_releases_and_prioritises() -> None:
    feed = Feed()
    feed.save("r", 0.0)
    feed.save("r", 1.0, kind=Kind.FINAL)
    feed.save("r", 2.0)
    feed.queue.prioritise([3, 1])
    feed.queue.hold([3])
    assert feed.queue.decide(3.0) == Next(1, 1, "r", 1, "prioritised")
    feed.queue.release([3])
    assert feed.queue.decide(3.0) == Next(3, 3, "r", 3, "prioritised")  # it had kept its turn
    feed.queue.hold()
    assert feed.send(3.0) == Idle(None)
    feed.queue.hold([2])
    feed.queue.release()
    assert feed.sent(3.0) == [3, 1, 2]


def test_pauses_end_by_themselves_or_when_told() -> None:
    feed = Feed()
    feed.save("r", 0.0)
    feed.save("r", 0.0)
    feed.queue.pause(1, 5.0)
    feed.queue.pause(2)
    assert feed.send(1.0) == Idle(5.0)
    assert feed.queue.decide(5.0).order == 1
    feed.queue.pause(1)
    assert feed.send(6.0) == Idle(None)
    feed.queue.wake(2)
    assert feed.sent(6.0) == [2]


def test_many_pauses_that_end_at_once_are_all_over() -> None:
    feed = Feed()
    for number in range(1, 301):
        feed.save("r", 0.0)
        feed.queue.pause(number, 5.0)
    feed.queue.hold(range(1, 300))
    assert feed.sent(5.0) == [300]  # behind all that may not go
    feed.queue.release()
    assert len(feed.sent(5.0)) == 299


def test_what_failed_is_pending_again_and_what_is_out_is_not_given_twice() -> None:
    feed = Feed()
    feed.save("r", 0.0, copies=2)
    feed.queue.took(1, 2, MiB, 0.0)
    assert feed.queue.decide(0.0) == Idle(None)
    feed.queue.verified(1)
    feed.queue.failed(1)
    assert feed.queue.decide(0.0).order == 1 and 1 in feed.queue
    assert feed.sent(0.0) == [1] and 1 not in feed.queue


def test_what_is_gone_is_not_given_and_does_not_supersede() -> None:
    feed = Feed(run_rules=lambda run: RunRules(skip_superseded=True, lag_s=10.0))
    old, new = feed.save("r", 0.0), feed.save("r", 1.0)
    feed.queue.forget(new)
    assert feed.sent(20.0) == [old]
    for act in (feed.queue.forget, feed.queue.complete, feed.queue.wake, feed.queue.failed, feed.queue.verified):
        act(old)  # nothing is left to do it to
    feed.queue.took(old, 1, 1, 0.0)
    feed.queue.pause(old)


def test_the_same_order_twice_is_refused() -> None:
    feed = Feed()
    feed.save("r", 0.0)
    with pytest.raises(ValueError, match="order=1"):
        feed.queue.add(Part(1, "r", 1, 1, 1, 0.0))


# -- what is skipped ---------------------------------------------------------------------------------------------------


def test_a_lagging_drain_skips_what_is_superseded() -> None:
    feed = Feed(run_rules=lambda run: RunRules(skip_superseded=True, lag_s=10.0))
    begun = feed.save("r", 0.0, copies=2)
    assert feed.send(0.0).session_id == begun
    feed.save("r", 1.0)
    newest = feed.save("r", 2.0)
    incomplete = feed.save("r", 3.0, complete=False)
    assert feed.queue.decide(10.9).session_id == begun
    skipped = feed.send(11.0)
    assert skipped == Skip(2, "r", 2, (2,), f"the drain lags: step {newest} is newer and complete")
    assert feed.sent(100.0) == [begun, newest, incomplete]


def test_what_went_before_it_was_complete_supersedes_too() -> None:
    feed = Feed(run_rules=lambda run: RunRules(skip_superseded=True, lag_s=0.0))
    old, new = feed.save("r", 0.0), feed.save("r", 1.0, complete=False)
    feed.queue.prioritise([new])
    assert feed.send(2.0).session_id == new
    feed.queue.complete(new)
    assert feed.send(2.0) == Skip(old, "r", old, (old,), f"the drain lags: step {new} is newer and complete")


def test_a_queue_that_is_held_skips_nothing() -> None:
    feed = Feed(run_rules=lambda run: RunRules(skip_superseded=True, lag_s=0.0))
    old, new = feed.save("r", 0.0), feed.save("r", 1.0)
    feed.queue.hold()
    assert feed.send(5.0) == Idle(None) and len(feed.queue) == 2
    feed.queue.release()
    assert feed.send(5.0).session_id == old and feed.sent(5.0) == [new]


@pytest.mark.parametrize("kept", ["pinned", "final", "preempted", "held", "prioritised", "another's", "begun before"])
def test_what_is_never_skipped(kept: str) -> None:
    feed = Feed(run_rules=lambda run: RunRules(skip_superseded=True, lag_s=0.0, every=3))
    more = {
        "pinned": {"pinned": True},
        "final": {"kind": Kind.FINAL},
        "preempted": {"kind": Kind.PREEMPTION},
        "another's": {"may_skip": False},
        "begun before": {"started": True},
    }
    feed.save("r", 0.0, **more.get(kept, {}))
    if kept == "held":
        feed.queue.hold([1])
    if kept == "prioritised":
        feed.queue.prioritise([1])
    feed.save("r", 1.0)
    skipped = []
    while not isinstance(found := feed.send(1e9), Idle):
        skipped += [found.session_id] if isinstance(found, Skip) else []
    assert 1 not in skipped
    if kept == "held":
        feed.queue.release([1])
        assert isinstance(feed.send(1e9), Skip)
    assert len(feed.queue) == 0


def test_every_nth_goes_and_the_others_are_skipped_once_superseded() -> None:
    feed = Feed(run_rules=lambda run: RunRules(every=3, defer_max_s=1000.0))
    went, skipped = [], []
    for step in range(1, 9):
        now_s = 100.0 * step
        feed.save("r", now_s)
        while not isinstance(found := feed.send(now_s), Idle):
            (went if isinstance(found, Next) else skipped).append(found.session_id)
    assert (went, skipped) == ([1, 4, 7], [2, 3, 5, 6])
    assert found == Idle(1800.0)  # the last one goes after all, when nothing supersedes it
    assert feed.sent(1799.0) == [] and feed.sent(1800.0) == [8]


def test_a_smallest_interval_between_those_that_go() -> None:
    feed = Feed(run_rules=lambda run: RunRules(min_interval_s=250.0))
    went, skipped = [], []
    for now_s in range(100, 1000, 50):
        if now_s % 100 == 0 and now_s <= 800:
            feed.save("r", float(now_s))
        while not isinstance(found := feed.send(float(now_s)), Idle):
            (went if isinstance(found, Next) else skipped).append((found.session_id, now_s))
    assert went == [(1, 100), (3, 350), (6, 600), (8, 850)]  # the newest that is here when the time has passed
    assert skipped == [(2, 300), (4, 500), (5, 600), (7, 800)]


@pytest.mark.parametrize("rules", [RunRules(skip_superseded=True, lag_s=0.0), RunRules(every=2)])
def test_a_run_whose_checkpoints_are_all_superseded_is_not_put_off_for_ever(rules: RunRules) -> None:
    """Each is skipped for the next, while final saves keep the tier busy: the newest goes when the first has waited long."""
    feed = Feed(Rules(max_age_s=100.0), lambda run: rules if run == "r" else RunRules())
    for now_s in range(0, 200, 10):
        feed.save("other", float(now_s), kind=Kind.FINAL)
        newest = feed.save("r", float(now_s))
        while isinstance(found := feed.send(float(now_s)), Skip):
            pass
        if found.why == "overdue":
            break
    assert (found.session_id, now_s) == (newest, 100)


def test_cadence_goes_on_after_a_restart() -> None:
    feed = Feed(run_rules=lambda run: RunRules(every=3))
    feed.queue.resume("r", 0.0, seen_since=1)
    feed.save("r", 10.0)
    assert feed.sent(10.0) == []
    feed.save("r", 20.0)
    assert isinstance(feed.send(20.0), Skip)
    assert feed.sent(20.0) == [2]


def test_what_cadence_holds_back_does_not_count_as_waiting() -> None:
    feed = Feed(Rules(max_age_s=50.0), lambda run: RunRules(every=2, defer_max_s=500.0))
    assert feed.save("r", 0.0) and feed.sent(0.0) == [1]
    feed.save("r", 10.0)
    assert feed.send(100.0) == Idle(510.0)
    assert feed.queue.decide(511.0).why == "periodic"
    assert feed.queue.decide(560.0).why == "overdue"


def test_rules_classes_and_pins_change_while_it_waits() -> None:
    feed = Feed(run_rules=lambda run: RunRules(every=5))
    assert feed.save("r", 0.0) and feed.sent(0.0) == [1]
    feed.save("r", 1.0)
    assert feed.sent(1.0) == []
    feed.queue.pin(2, True)
    assert feed.sent(1.0) == [2]
    feed.save("r", 2.0)
    assert feed.sent(2.0) == []
    feed.queue.promote(3, Kind.PREEMPTION)
    assert feed.queue.decide(2.0).why == "preemption"
    assert feed.sent(2.0) == [3]
    feed.save("r", 3.0)
    assert feed.sent(3.0) == []
    feed.queue.rule("r", RunRules())
    assert feed.sent(3.0) == [4]


def test_a_late_part_belongs_to_its_checkpoint() -> None:
    feed = Feed(run_rules=lambda run: RunRules(every=2))
    assert feed.save("r", 0.0, complete=False) and feed.sent(0.0) == [1]
    feed.queue.add(Part(50, "r", 1, 1, 1, 5.0))  # another writer's: not held back, as the checkpoint has begun to go
    assert feed.sent(5.0) == [1]
    feed.queue.add(Part(51, "r", 1, 1, 1, 5.0, kind=Kind.FINAL))
    assert feed.queue.decide(5.0).why == "final"  # one writer knew that it is the last save: so it is
    assert feed.sent(5.0) == [1]


def test_no_deadline_is_behind_the_largest_age() -> None:
    rules = Rules(max_age_s=60.0, age_limits_s={Kind.PERIODIC: 10.0, Kind.FINAL: 600.0})
    assert [rules.age_limit_of(kind) for kind in Kind] == [30.0, 60.0, 10.0]


@pytest.mark.parametrize(
    "make",
    [
        lambda: RunRules(every=0),
        lambda: RunRules(lag_s=-1.0),
        lambda: RunRules(weight=0.0),
        lambda: Rules(max_age_s=0.0),
        lambda: Rules(quantum_bytes=0),
    ],
)
def test_rules_that_make_no_sense_are_refused(make) -> None:
    with pytest.raises(ValueError, match="must be"):
        make()


# -- in the long run ---------------------------------------------------------------------------------------------------


class Tier:
    """A tier of 1 byte/s behind the scheduler, on a simulated clock; batches of at most `batch` bytes."""

    def __init__(self, quantum: int, batch: int, **more) -> None:
        self.queue = Scheduler(Rules(max_age_s=more.pop("max_age_s", math.inf), quantum_bytes=quantum), **more)
        self.batch = batch
        self.now_s = 0.0
        self.left: dict[int, int] = {}
        self.ended_s: dict[int, float] = {}

    def save(self, order: int, run: str, since_s: float, size: int) -> None:
        self.queue.add(Part(order, run, order, order, max(1, -(-size // self.batch)), since_s))
        self.left[order] = size

    def run_until(self, at_s: float) -> None:
        while self.now_s < at_s:
            found = self.queue.decide(self.now_s)
            if not isinstance(found, Next):
                self.now_s = at_s
                return
            size = min(self.batch, self.left[found.order])
            self.queue.took(found.order, 1, size, self.now_s)
            self.now_s += size
            self.left[found.order] -= size
            self.queue.verified(found.order)
            if not self.left[found.order]:
                self.ended_s[found.order] = self.now_s


@settings(max_examples=60, deadline=None)
@given(
    size=st.integers(400, 2000),  # of the small run's saves: at least two rounds
    ahead=st.integers(1, 20),  # saves of the big run that wait already
    at=st.integers(500, 3500),
    every=st.floats(3.0, 10.0),
)
def test_the_small_run_of_two_waits_at_most_twice_as_long_as_alone(size: int, ahead: int, at: int, every: float) -> None:
    """The big one saves ten times as much, and the tier is always behind."""
    quantum, batch = 200, 100
    tier = Tier(quantum, batch)
    for order in range(1, ahead + 1):
        tier.save(order, "big", 0.0, 10 * size)
    saves = []
    for number in range(6):
        since_s = at + number * every * size
        tier.run_until(since_s)
        order = 1000 + 2 * number
        tier.save(order, "big", since_s, 10 * size)
        tier.save(order + 1, "small", since_s, size)
        saves.append((order + 1, since_s))
    tier.run_until(at + 6 * 11 * 20 * 2000.0)
    for order, since_s in saves:
        assert tier.ended_s[order] - since_s <= 2 * size


@settings(max_examples=40, deadline=None)
@given(weight=st.sampled_from([0.5, 1.0, 2.0, 4.0]), size=st.integers(50, 400))
def test_shares_are_by_weight(weight: float, size: int) -> None:
    tier = Tier(200, 100, run_rules=lambda run: RunRules(weight=weight if run == "a" else 1.0))
    for number in range(200):
        tier.save(2 * number + 1, "a", 0.0, size)
        tier.save(2 * number + 2, "b", 0.0, size)
    tier.run_until(100.0 * size)
    given = {run: sum(size - tier.left[order] for order in range(first, 401, 2)) for run, first in (("a", 1), ("b", 2))}
    assert abs(given["a"] - weight * given["b"]) <= (1 + weight) * (200 + 100)


_ACTS = st.lists(
    st.tuples(
        st.sampled_from(["save", "save", "save", "send", "send", "fail", "pause", "hold", "release", "prio", "forget", "pin"]),
        st.integers(0, 3),
        st.sampled_from(list(Kind)),
        st.floats(0, 100),
    ),
    max_size=80,
)


@settings(max_examples=100, deadline=None)
@given(acts=_ACTS, skip=st.booleans(), every=st.integers(1, 3), min_interval_s=st.sampled_from([0.0, 70.0]))
def test_everything_leaves_the_queue(acts, skip: bool, every: int, min_interval_s: float) -> None:
    """Whatever happens, each part in the end went, was skipped by the rules, or was forgotten; and never twice."""
    rules = RunRules(every=every, min_interval_s=min_interval_s, skip_superseded=skip, lag_s=30.0, defer_max_s=300.0)
    feed = Feed(Rules(max_age_s=200.0, quantum_bytes=2 * MiB), lambda run: rules)
    now_s, waiting, kinds, pinned = 0.0, {}, {}, set()

    def step(now_s: float, fails: bool = False) -> bool:
        found = feed.queue.decide(now_s)
        if isinstance(found, Next):
            feed.queue.took(found.order, 1, MiB, now_s)
            (feed.queue.failed if fails else feed.queue.verified)(found.order)
            waiting[found.order] -= not fails
            assert waiting[found.order] >= 0
        elif isinstance(found, Skip):
            assert kinds[found.session_id] is Kind.PERIODIC and found.session_id not in pinned
            for order in found.orders:
                del waiting[order]
        return not isinstance(found, Idle)

    for act, number, kind, passed_s in acts:
        now_s += passed_s
        if act == "save":
            session = feed.save(f"run-{number}", now_s, kind=kind, copies=number + 1)
            waiting[feed.order], kinds[session] = number + 1, kind
        elif act == "send":
            step(now_s)
        elif act == "fail":
            step(now_s, fails=True)
        elif act == "forget":
            feed.queue.forget(number + 1)
            waiting.pop(number + 1, None)
        elif act == "pin" and number + 1 in kinds:
            feed.queue.pin(number + 1, True)
            pinned.add(number + 1)
        elif act == "pause":
            feed.queue.pause(number + 1, now_s + passed_s)
        elif act in ("hold", "release", "prio"):
            {"hold": feed.queue.hold, "release": feed.queue.release, "prio": feed.queue.prioritise}[act]([number + 1])
    feed.queue.release()
    for _ in range(10_000):
        if not step(now_s):
            now_s += 50.0
        if not len(feed.queue):
            break
    assert len(feed.queue) == 0
    assert all(left == 0 for left in waiting.values())


@settings(max_examples=40, deadline=None)
@example(finals=1, size=98, max_age_s=50, before=10)
@given(finals=st.integers(1, 4), size=st.integers(10, 100), max_age_s=st.integers(50, 1000), before=st.integers(0, 10))
def test_age_is_bounded_under_saturation(finals: int, size: int, max_age_s: int, before: int) -> None:
    """Final saves of other runs keep the tier busy; a periodic part still goes: after `max_age`, behind the older ones."""
    tier = Tier(200, 100, max_age_s=float(max_age_s))
    for order in range(1, before + 1):
        tier.save(order, "periodic", 0.0, 100)
    tier.save(100, "periodic", 1.0, 100)
    order = 1000
    while tier.now_s < 4 * max_age_s + 5000 and 100 not in tier.ended_s:
        for number in range(finals):
            order += 1
            tier.queue.add(Part(order, f"final-{number}", order, order, 1, tier.now_s, kind=Kind.FINAL))
            tier.left[order] = size
        tier.run_until(tier.now_s + 1)
    # Half of the tier's bytes are for what is too old, the oldest first; what was under way at a change is not called back.
    assert tier.ended_s[100] <= 1 + max_age_s + 2 * ((before + 1) * 100 + finals * size) + 300


def test_what_came_to_the_tier_another_way_is_gone() -> None:
    feed = Feed()
    first, second = feed.save("r", 0.0), feed.save("r", 1.0)
    feed.queue.gone(1)
    feed.queue.gone(77)
    assert feed.queue.orders(first) == []
    assert feed.sent(2.0) == [second]


def test_a_checkpoint_of_several_is_skipped_only_once_all_of_it_is_here() -> None:
    feed = Feed(run_rules=lambda run: RunRules(skip_superseded=True, lag_s=10.0))
    several = feed.save("r", 0.0, parts=2, may_skip=False)
    feed.save("r", 0.0)
    feed.queue.decides(several)
    found = feed.queue.decide(11.0)
    assert isinstance(found, Skip)
    assert (found.session_id, found.orders) == (several, (1, 2))


def test_what_another_node_decides_on_rests_until_it_has() -> None:
    feed = Feed(run_rules=lambda run: RunRules(every=3, defer_max_s=50.0))
    first, second = (feed.save("r", 0.0, may_skip=False) for _ in range(2))
    for session in (first, second):
        feed.queue.awaits(session)
    assert feed.queue.decide(1000.0) == Idle(None)  # neither its age nor a newer one that is here lets it go
    assert [(entry.state, entry.until_s) for entry in feed.queue.entries()] == [("awaiting", 0.0)] * 2
    feed.queue.goes(second)
    assert feed.sent(1001.0) == [second]
    third = feed.save("r", 1002.0)  # by this node's own cadence it would wait
    feed.queue.goes(third)
    assert feed.sent(1003.0) == [third]
    assert feed.queue.decide(1004.0) == Idle(None)
    feed.queue.decides(first)
    assert isinstance(feed.queue.decide(1005.0), Skip)


def test_what_goes_by_decision_is_not_skipped() -> None:
    feed = Feed(run_rules=lambda run: RunRules(skip_superseded=True, lag_s=10.0))
    old = feed.save("r", 0.0)
    feed.queue.goes(old)
    new = feed.save("r", 0.0)
    assert feed.sent(100.0) == [old, new]


def test_what_people_see_of_the_queue() -> None:
    feed = Feed(run_rules=lambda run: RunRules(every=2 if run == "cadence" else 1))
    going = feed.save("r", 0.0, copies=3)
    held, paused, final = feed.save("r", 1.0), feed.save("r", 2.0), feed.save("r", 3.0, kind=Kind.FINAL)
    first = feed.save("r", 4.0, copies=2)
    assert feed.queue.decide(5.0) == Next(4, final, "r", final, "final")
    feed.queue.took(1, 1, MiB, 5.0)
    feed.queue.hold([2])
    feed.queue.pause(3, 60.0)
    feed.queue.prioritise([5])
    seen = [(entry.session_id, entry.state, entry.copies, entry.until_s) for entry in feed.queue.entries()]
    assert seen == [
        (first, "waiting", 2, 0.0),
        (final, "waiting", 1, 0.0),
        (going, "going", 3, 0.0),
        (held, "held", 1, 0.0),
        (paused, "paused", 1, 60.0),
    ]
    assert [feed.queue.rests(order) for order in range(1, 6)] == [False, True, False, False, False]
    one, two = feed.save("cadence", 6.0), feed.save("cadence", 7.0, complete=False)
    feed.queue.took(6, 1, MiB, 7.0)
    feed.queue.decide(8.0)
    state = {entry.session_id: entry.state for entry in feed.queue.entries()}
    assert (state[one], feed.queue.rests(7)) == ("going", False)
    feed.queue.hold()
    assert feed.queue.rests(7)
    assert state[two] in ("waiting", "deferred")
