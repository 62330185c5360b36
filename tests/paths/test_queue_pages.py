"""The queue as an operator lists it: by pages, so that a long one holds nobody up."""

from pathlib import Path

import pytest

from forebay_gateway.paths import queue
from paths.order_kit import RUN, SmallNode


async def test_the_queue_is_listed_a_page_at_a_time_and_others_have_their_turn_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "ENTRIES_A_PAGE", 2)
    async with SmallNode(tmp_path) as node:
        for step in range(1, 7):
            await node.save(step)
        await node.queue.change("prio", [f"{RUN}@{step}" for step in (6, 5, 4)])
        seen: list[list[tuple[str, int, int]]] = []
        async for page in node.queue.pages():
            seen.append([(each.tier, each.entry.step, each.place) for each in page])
            if len(seen) == 1:
                await node.batches("near", 1)  # the first of the page goes before the next one is asked for
        near = [each for page in seen for each in page if each[0] == "near"]
        assert near == [("near", 6, 1), ("near", 5, 2), ("near", 4, 3), ("near", 1, 0), ("near", 2, 0), ("near", 3, 0)]
        assert max(map(len, seen)) == 2
        assert sorted(await node.queue.change("hold", [])) == [f"{RUN}@{step}" for step in range(1, 7)]
