"""Large tensors are read straight into their place, and only where what was saved is what is there."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="forebay.torch needs torch, which this environment does not have")

import torch.distributed.checkpoint as dcp  # noqa: E402

import forebay  # noqa: E402
from forebay.testing import MemoryGateway  # noqa: E402
from forebay.torch import ForebayStorageReader, ForebayStorageWriter  # noqa: E402
from forebay.torch import reader as reading  # noqa: E402
from forebay_wire.memory import address_of  # noqa: E402

# torch warns of a process alone.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

RUN, STEP = "team/dcp", 3
SIDE = 1024
MIB = 1 << 20


def square() -> Any:
    """4 MiB, each value another."""
    return torch.arange(SIDE * SIDE, dtype=torch.float32).reshape(SIDE, SIDE)


@pytest.fixture
def filled(memory: MemoryGateway, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """A checkpoint with square() as "a"; what reading straight into a tensor came to, each time it was tried."""
    save(memory, {"a": square()})
    outcomes: list[bool] = []
    original = reading.filled

    def noted(*arguments: Any) -> bool:
        outcomes.append(original(*arguments))
        return outcomes[-1]

    monkeypatch.setattr(reading, "filled", noted)
    return outcomes


def save(memory: MemoryGateway, state: dict[str, Any]) -> None:
    """By a process alone."""
    dcp.save(state, storage_writer=ForebayStorageWriter(RUN, STEP, memory.address))


def load(memory: MemoryGateway, state: dict[str, Any], planner: Any = None) -> None:
    """By a process alone."""
    dcp.load(state, storage_reader=ForebayStorageReader(RUN, STEP, memory.address), planner=planner)


def test_a_tensor_is_filled_where_it_is(memory: MemoryGateway, filled: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    found = torch.zeros(SIDE, SIDE)
    seen: list[tuple[int, int]] = []
    original = forebay.Reader.scatter

    def scatter(self: Any, name: str, buffers: Any, offset: int = 0) -> int:
        seen.extend((address_of(view), view.nbytes) for view in map(memoryview, buffers))
        return original(self, name, buffers, offset)

    monkeypatch.setattr(forebay.Reader, "scatter", scatter)
    monkeypatch.setattr(reading, "values_of", None)  # nothing else is read
    load(memory, {"a": found})
    assert filled == [True]
    assert torch.equal(found, square())
    assert (found.data_ptr(), found.nbytes) in seen
    assert sum(size for _, size in seen) - found.nbytes < 4096


def test_part_of_a_larger_tensor(memory: MemoryGateway, filled: list[bool]) -> None:
    """Its memory without gaps is enough; what lies before and behind it stays."""
    whole = torch.full((SIDE + 2, SIDE), -1.0)
    load(memory, {"a": whole[1:-1]})
    assert filled == [True]
    assert torch.equal(whole[1:-1], square())
    assert bool((whole[0] == -1).all() and (whole[-1] == -1).all())


@pytest.mark.parametrize(
    ("target", "tried"),
    [
        (torch.zeros(SIDE, SIDE, dtype=torch.int32), True),  # as many bytes, which mean something else
        (torch.zeros(SIDE, SIDE).t(), True),
        (torch.zeros(SIDE, SIDE, dtype=torch.float64), False),
        (torch.zeros(SIDE, 2 * SIDE)[:, ::2], False),
        (torch.zeros(SIDE, 2 * SIDE)[:, :SIDE], False),
    ],
    ids=["another type", "transposed", "wider", "strided", "with gaps"],
)
def test_a_tensor_unlike_the_one_saved(memory: MemoryGateway, filled: list[bool], target: Any, tried: bool) -> None:
    """The proof finds it out, and the values are what dcp makes of them."""
    load(memory, {"a": target})
    assert filled == ([False] if tried else [])
    assert torch.equal(target, square().to(target.dtype))


def test_tensors_that_share_memory(memory: MemoryGateway) -> None:
    """Two names of one tensor in a model, and two values in the checkpoint: one of them is there, and no mixture."""
    save(memory, {name: torch.full((MIB,), value) for name, value in (("a", 1.0), ("b", 2.0))})
    for _ in range(5):
        shared = torch.zeros(MIB)
        load(memory, {"a": shared, "b": shared})
        assert shared.unique().tolist() in ([1.0], [2.0])


def test_a_planner_that_acts_at_commit(memory: MemoryGateway, filled: list[bool]) -> None:
    """It may hand out one tensor for many items: each is asked for, filled and committed before the next."""
    order: list[str] = []

    class Planner(dcp.DefaultLoadPlanner):
        def resolve_tensor(self, read_item: Any) -> Any:
            order.append("resolve")
            return super().resolve_tensor(read_item)

        def commit_tensor(self, read_item: Any, tensor: Any) -> None:
            order.append("commit")

    found = {"a": torch.zeros(SIDE, SIDE)}
    load(memory, found, Planner())
    assert (filled, order) == ([], ["resolve", "commit"])
    assert torch.equal(found["a"], square())
