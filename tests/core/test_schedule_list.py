"""The drain scheduler's list for people: in order whatever happened, and read a page at a time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forebay_gateway.core.schedule import Entry, Kind, Part, Scheduler

MiB = 1 << 20


@given(st.lists(st.tuples(st.sampled_from(("add", "prio", "promote", "took", "forget")), st.integers(0, 40)), max_size=80))
def test_the_list_for_people_is_in_order_whatever_happened_and_its_pages_are_all_of_it(acts: list[tuple[str, int]]) -> None:
    queue = Scheduler()
    for order, (act, number) in enumerate(acts, 1):
        session = number % 9 + 1
        match act:
            case "add":
                queue.add(Part(order, "r", session, session, copies=1, since_s=0.0, kind=Kind(number % 3)))
            case "prio":
                queue.prioritise([number])
            case "promote":
                queue.promote(session, Kind(number % 3))
            case "took":
                queue.took(number, 1, MiB, 0.0)
                queue.verified(number)
            case "forget":
                queue.forget(session)
    entries = queue.entries()
    assert [entry.session_id for entry in entries] == [
        checkpoint.session_id
        for checkpoint in sorted(
            queue._checkpoints.values(),
            key=lambda each: (
                min((queue._parts[order].turn for order in each.parts if queue._parts[order].turn), default=float("inf")),
                each.kind,
                each.order,
            ),
        )
    ]
    pages = [queue.entries(None, 2)]
    while pages[-1]:
        pages.append(queue.entries(pages[-1][-1], 2))
    assert [entry for page in pages for entry in page] == entries


def test_a_page_of_a_long_list_looks_at_its_own_entries_only(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = Scheduler()
    for order in range(1, 5001):
        queue.add(Part(order, "r", order, order, copies=1, since_s=0.0))
    looked: list[int] = []
    real = Entry.of
    monkeypatch.setattr(Entry, "of", lambda checkpoint, parts: looked.append(checkpoint.session_id) or real(checkpoint, parts))
    (after,) = queue.entries(None, 1)
    queue.forget(1)
    assert [entry.session_id for entry in queue.entries(after, 3)] == [2, 3, 4]
    assert looked == [1, 2, 3, 4]
