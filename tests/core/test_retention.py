"""Retention's rules and the order they go by, and what nodes of a fleet owe each other: pure."""

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_gateway.core.config_sections import RetainConfig
from forebay_gateway.core.fleet import Sighting, look, node_key, offset_s, share_of, unchanged_s
from forebay_gateway.core.retention import (
    Entry,
    Groups,
    Ledger,
    decide,
    ledger_key,
    parse_pin_key,
    pin_key,
    place,
    read_ledger,
    rule_of,
    tombstone_key,
)

DAY_S = 86_400.0


def line(*steps: int, session: str = "a", at_s: float | None = 0.0) -> Groups:
    """One after the other."""
    return tuple((Entry(step, session, at_s),) for step in steps)


def gone(rule: RetainConfig, groups: Groups, now_s: float | None = None, **more: object) -> list[int]:
    facts = {"protected": {}, "pinned": ()} | more
    return [verdict.entry.step for verdict in decide(rule, groups, now_s, **facts) if verdict.goes]  # type: ignore[arg-type]


def rule(**keys: object) -> RetainConfig:
    return RetainConfig(run="**", **keys)  # type: ignore[arg-type]


# -- which rule ----------------------------------------------------------------------------------------------------------


def test_a_rule_for_the_tier_comes_before_one_for_all() -> None:
    every = RetainConfig(run="**", keep_last=1)
    named = RetainConfig(run="team/*", tier="pfs", keep_last=9)
    first = RetainConfig(run="team/a", keep_last=5)
    rules = (every, named, first)
    assert rule_of("team/a", "pfs", rules) is named
    assert rule_of("team/a", "object", rules) is every
    assert rule_of("other", "pfs", rules) is every
    assert rule_of("other", "pfs", rules[1:]) is None


# -- verdicts ------------------------------------------------------------------------------------------------------------


def test_each_key_keeps_what_it_names_and_they_add_up() -> None:
    groups = tuple((Entry(step, "a", step * DAY_S),) for step in range(1, 11))
    now_s = 10 * DAY_S + 1
    assert gone(rule(keep_last=3), groups) == [1, 2, 3, 4, 5, 6, 7]
    assert gone(rule(keep_every=4), groups) == [1, 2, 3, 5, 6, 7, 9]  # the newest stays whatever the keys say
    assert gone(rule(keep_for=2.5 * DAY_S), groups, now_s) == [1, 2, 3, 4, 5, 6, 7]
    assert gone(rule(keep_last=2, keep_every=4, keep_for=1.5 * DAY_S), groups, now_s) == [1, 2, 3, 5, 6, 7]
    assert gone(rule(keep_last=2), groups, pinned={1}, protected={(2, "a"): "why"}) == [3, 4, 5, 6, 7, 8]


def test_final_ones_stay() -> None:
    groups = ((Entry(1, "a", final=True),), (Entry(2, "a"),), (Entry(3, "a"),))
    assert gone(rule(keep_last=1), groups) == [2]


def test_an_age_that_nobody_knows_keeps() -> None:
    groups = (*line(1, at_s=None), *line(2, 3, at_s=0.0))
    assert gone(rule(keep_for=1.0), groups, 10.0) == [2]
    assert gone(rule(keep_for=1.0), groups, None) == []
    assert gone(rule(keep_for=DAY_S), groups, -5 * DAY_S) == []  # the tier's clock went back


def test_what_came_together_is_kept_together_until_enough_is_certainly_newer() -> None:
    together = tuple(Entry(step, "a") for step in (1, 2, 3))
    assert gone(rule(keep_last=1), (together,)) == []
    assert gone(rule(keep_last=1), (together, *line(4))) == [1, 2, 3]
    assert gone(rule(keep_last=2), (together, *line(4))) == []
    assert gone(rule(keep_last=2), (*line(0), together)) == [0]


def test_nothing_at_all_is_no_verdict() -> None:
    assert decide(rule(keep_last=1), (), None, {}, ()) == []


ENTRIES = st.builds(
    Entry,
    step=st.integers(0, 30),
    session=st.sampled_from(["a", "b"]),
    committed_s=st.none() | st.floats(0, 100),
    final=st.booleans(),
)
RULES = st.builds(
    rule,
    keep_last=st.none() | st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 7),
    keep_for=st.none() | st.floats(1, 100),
)


@given(
    groups=st.lists(st.lists(ENTRIES, min_size=1, max_size=3).map(tuple), max_size=8).map(tuple),
    rule=RULES,
    now_s=st.none() | st.floats(0, 300),
    pinned=st.sets(st.integers(0, 30), max_size=3),
)
def test_whatever_the_rules_what_must_stay_stays(
    groups: Groups, rule: RetainConfig, now_s: float | None, pinned: set[int]
) -> None:
    verdicts = decide(rule, groups, now_s, {}, pinned)
    assert [verdict.entry for verdict in verdicts] == [entry for group in groups for entry in group]
    newer = {id(entry): sum(map(len, groups[at + 1 :])) for at, group in enumerate(groups) for entry in group}
    for verdict in verdicts:
        entry = verdict.entry
        must = (
            newer[id(entry)] == 0
            or entry.step in pinned
            or entry.final
            or (rule.keep_last is not None and newer[id(entry)] < rule.keep_last)
            or (rule.keep_every is not None and entry.step % rule.keep_every == 0)
            or (
                rule.keep_for is not None
                and (now_s is None or entry.committed_s is None or now_s - entry.committed_s < rule.keep_for)
            )
        )
        assert verdict.goes != must
        assert verdict.reason


# -- order ---------------------------------------------------------------------------------------------------------------


def names(groups: Groups) -> list[list[int]]:
    return [sorted(entry.step for entry in group) for group in groups]


def test_commits_that_were_seen_here_are_the_order_also_where_steps_go_back() -> None:
    commits = {(30, "a"): 1, (31, "a"): 2, (20, "b"): 3, (21, "b"): 4}
    arrivals = [Entry(*name) for name in commits]
    for some in permutations(arrivals):
        assert names(place((), some, commits)) == [[30], [31], [20], [21]]
        one_by_one: Groups = ()
        for entry in some:  # they become complete on the tier in whatever order
            one_by_one = place(one_by_one, [entry], commits)
        assert names(one_by_one) == [[30], [31], [20], [21]]


def test_of_what_other_nodes_committed_only_a_later_and_higher_step_is_newer() -> None:
    first = place((), [Entry(10, "a"), Entry(20, "a")], {})
    assert names(first) == [[10, 20]]  # both were there at the first look: nobody knows
    second = place(first, [Entry(30, "a")], {})
    assert names(second) == [[10, 20], [30]]
    late = place(second, [Entry(25, "a")], {})
    assert names(late) == [[10, 20], [25, 30]]
    assert names(place(late, [Entry(31, "b")], {})) == [[10, 20], [25, 30], [31]]


def test_who_saw_the_commits_puts_in_order_what_another_node_could_not() -> None:
    together = place((), [Entry(1, "a"), Entry(2, "a"), Entry(3, "a")], {})
    assert names(together) == [[1, 2, 3]]
    assert names(place(together, [], {(1, "a"): 5, (3, "a"): 4})) == [[1, 2, 3]]  # one of them it did not see
    assert names(place(together, [], {(1, "a"): 5, (2, "a"): 3, (3, "a"): 4})) == [[2], [3], [1]]


def test_a_late_one_of_ours_goes_before_what_was_committed_after_it() -> None:
    groups = place((), [Entry(1, "a")], {(1, "a"): 1})
    groups = place(groups, [Entry(3, "a")], {(1, "a"): 1, (3, "a"): 3})
    groups = place(groups, [Entry(2, "a")], {(1, "a"): 1, (2, "a"): 2, (3, "a"): 3})
    assert names(groups) == [[1], [2], [3]]


@given(
    batches=st.lists(st.lists(st.tuples(st.integers(0, 20), st.sampled_from("ab")), max_size=4, unique=True), max_size=6),
    seen=st.sets(st.tuples(st.integers(0, 20), st.sampled_from("ab"))),
    data=st.data(),
)
def test_no_arrival_is_lost_and_none_is_older_than_what_was_committed_before_it(
    batches: list[list[tuple[int, str]]], seen: set[tuple[int, str]], data: st.DataObject
) -> None:
    order = {name: at + 1 for at, name in enumerate(data.draw(st.permutations(sorted(seen))))}
    groups: Groups = ()
    told = set()
    for batch in batches:
        fresh = [Entry(*name) for name in batch if name not in told]
        told |= {entry.name for entry in fresh}
        groups = place(groups, fresh, order)
    assert sorted(entry.name for group in groups for entry in group) == sorted(told)
    newest = max((name for name in told if name in order), key=order.__getitem__, default=None)
    if newest is not None and told <= set(order):
        assert [entry.name for entry in groups[-1]] == [newest]


# -- documents -----------------------------------------------------------------------------------------------------------


def test_a_ledger_comes_back_as_it_was_written_and_nothing_else_is_one() -> None:
    import msgspec

    ledger = Ledger(run="team/a", owner="n", token="t", ttl_s=5, groups=line(1, 2), going=(Entry(0, "x"),), gone=((7, "y"),))
    assert read_ledger(msgspec.json.encode(ledger), "team/a") == ledger
    assert read_ledger(msgspec.json.encode(ledger), "team/b") is None
    for damaged in (b"", b"{}", b"[1]", b'{"format":"forebay.retain"}', b"\xff"):
        assert read_ledger(damaged, "team/a") is None
    assert ledger.has_dropped((0, "x")) and ledger.has_dropped((7, "y")) and not ledger.has_dropped((1, "a"))


def test_keys_of_any_run_and_node_are_short_and_apart() -> None:
    runs = ["a", "a/b", "x" * 1000, "ü/ö"]
    assert len({ledger_key(run) for run in runs}) == len(runs)
    assert all(len(part) < 255 for run in runs for part in (ledger_key(run) + tombstone_key(run, (5, "a"))).split("/"))
    assert parse_pin_key(pin_key("a/b", 12, "node-1")) == 12
    assert parse_pin_key(".forebay/pins/x/notes.txt") is None
    assert len({node_key(node) for node in ("a", "a/b", "n" * 400, "n" * 401)}) == 4


# -- the fleet -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fleet", "live", "own", "share"),
    [(None, 5, None, None), (None, 5, 7, 7), (100, 4, None, 25), (100, 4, 10, 10), (100, 0, None, 100), (3, 10, None, 1)],
)
def test_a_share_of_the_bandwidth(fleet: int | None, live: int, own: int | None, share: int | None) -> None:
    assert share_of(fleet, live, own) == share


def test_only_change_counts_as_life_on_the_own_clock() -> None:
    seen = look({}, {"a": "1", "b": "1"}, 100.0)
    seen = look(seen, {"a": "2", "b": "1", "c": "1"}, 150.0)
    assert seen == {"a": Sighting("2", 150.0), "b": Sighting("1", 100.0), "c": Sighting("1", 150.0)}
    assert unchanged_s(seen["b"], 160.0) == 60.0
    assert look(seen, {"b": "1"}, 170.0) == {"b": Sighting("1", 100.0)}


@given(window_s=st.floats(0.1, 3600), node=st.text(min_size=1), tier=st.text(min_size=1))
def test_an_offset_is_always_the_same_and_within_the_window(window_s: float, node: str, tier: str) -> None:
    assert 0 <= offset_s(node, tier, window_s) <= window_s
    assert offset_s(node, tier, window_s) == offset_s(node, tier, window_s)
    assert offset_s(node, tier, 0.0) == 0.0


def test_offsets_are_spread() -> None:
    tenths = [int(offset_s(f"node-{number}", "pfs", 10.0)) for number in range(1000)]
    assert all(60 < tenths.count(tenth) < 140 for tenth in range(10))
