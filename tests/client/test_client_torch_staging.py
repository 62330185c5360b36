"""What `dcp.async_save` saves is what was there when it was called, in memory that the save before used."""

import gc
import io
import pickle
import threading
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="forebay.torch needs torch, which this environment does not have")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.staging import AsyncStager  # noqa: E402

from forebay.testing import MemoryGateway  # noqa: E402
from forebay.torch import ForebayStorageReader, ForebayStorageWriter, WarmStager  # noqa: E402

# torch warns of a process alone.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

RUN = "team/dcp"


def state(value: float) -> dict[str, Any]:
    """Tensors of every kind, and objects, all of them `value` or made of it."""
    base = torch.full((40, 30), value)
    return {
        "whole": torch.full((300, 500), value),
        "rows": base[10:35],
        "columns": base[:, 3:9],
        "transposed": torch.full((20, 30), value).t(),
        "expanded": torch.full((1, 7), value).expand(4, 7),
        "channels last": torch.full((2, 3, 8, 8), value).to(memory_format=torch.channels_last),
        "half": torch.full((20, 20), value).bfloat16(),
        "flags": torch.full((9,), value) > 1,
        "scalar": torch.tensor(value),
        "empty": torch.empty(0, 3),
        "conjugated": torch.full((3,), value, dtype=torch.complex64).conj(),
        "sparse": torch.full((3, 3), value).to_sparse(),
        "parameter": torch.nn.Parameter(torch.full((5,), value)),
        "nested": {"list": [torch.full((3,), value), (value, torch.full((2,), value))], "bytes": io.BytesIO(b"%f" % value)},
        "step": value,
    }


def tensors(value: Any) -> list[Any]:
    """All of them, in order."""
    if isinstance(value, dict | list | tuple):
        return [tensor for inside in (value.values() if isinstance(value, dict) else value) for tensor in tensors(inside)]
    return [value] if isinstance(value, torch.Tensor) else []


def overwrite(what: dict[str, Any]) -> None:
    """As an optimizer's next step does."""
    with torch.no_grad():
        for tensor in tensors(what):
            (tensor._values() if tensor.is_sparse else tensor).fill_(0)
    what["nested"]["list"].clear()
    what["nested"]["bytes"].truncate(0)


def test_what_is_changed_afterwards_changes_nothing() -> None:
    source = {**state(3.0), "expanded": torch.full((4, 7), 3.0)}  # an expanded one cannot be filled
    staged = WarmStager().stage(source)
    overwrite(source)
    wanted = state(3.0)
    assert staged.keys() == wanted.keys()
    pairs = list(zip(tensors(staged), tensors(wanted), strict=True))
    assert len(pairs) == 15
    for mine, theirs in pairs:
        assert mine.dtype == theirs.dtype and mine.is_sparse == theirs.is_sparse
        assert torch.equal(mine.to_dense() if mine.is_sparse else mine, theirs.to_dense() if mine.is_sparse else theirs)
    assert staged["nested"]["bytes"].getvalue() == b"3.000000"
    assert staged["nested"]["list"][1][0] == 3.0


def test_copies_are_dense_and_keep_their_order() -> None:
    """What is saved of one is then its own memory, and nothing else."""
    staged = WarmStager().stage(state(1.0))
    assert staged["transposed"].stride() == state(1.0)["transposed"].stride()
    assert staged["channels last"].is_contiguous(memory_format=torch.channels_last)
    for name in ("whole", "rows", "columns", "expanded", "half", "flags", "scalar", "parameter"):
        assert staged[name].untyped_storage().nbytes() == staged[name].nbytes, name
        assert staged[name].data_ptr() % 64 == 0, name


def test_memory_is_used_again_and_never_while_it_is_in_use() -> None:
    stager = WarmStager()
    first = stager.stage({"a": torch.full((1000,), 1.0), "b": torch.full((1000,), 1.5)})
    at = first["a"].data_ptr()
    second = stager.stage({"a": torch.full((1000,), 2.0), "b": torch.full((1000,), 2.5)})
    assert second["a"].data_ptr() != at
    kept = first.pop("b")
    del first
    third = stager.stage({"a": torch.full((1000,), 3.0), "b": torch.full((1000,), 3.5)})
    assert torch.equal(kept, torch.full((1000,), 1.5))  # one tensor of it is enough
    assert third["a"].data_ptr() != at
    del kept
    fourth = stager.stage({"a": torch.full((2000,), 4.0)})
    assert fourth["a"].data_ptr() == at
    assert torch.equal(second["b"], torch.full((1000,), 2.5)) and torch.equal(third["b"], torch.full((1000,), 3.5))


def test_what_is_too_small_is_let_go() -> None:
    """A state that grows leaves no trail of memory behind."""
    stager = WarmStager()
    for size in (1000, 10_000, 100_000):
        stager.stage({"a": torch.ones(size)})
        gc.collect()
    assert [mapping.size >= 400_000 for mapping in stager._free] == [True]
    stager.close()
    assert not stager._free


def test_async_save(memory: MemoryGateway) -> None:
    """By DCP: the writer is the stager, and the memory of one save is the next one's. It is still there when pickled."""
    writer = ForebayStorageWriter(address=memory.address)
    assert isinstance(writer, AsyncStager)
    pickle.loads(pickle.dumps(writer))
    places = set()
    for step in (1, 2, 3):
        source = {"a": torch.full((1 << 20,), float(step)), "b": torch.full((64, 64), float(step))}
        gate, original = threading.Event(), writer.write_data

        def write_data(*arguments: Any, gate: Any = gate, original: Any = original) -> Any:
            gate.wait(60)
            return original(*arguments)

        writer.write_data = write_data  # type: ignore[method-assign]
        saving = dcp.async_save(source, checkpoint_id=f"forebay://{RUN}/{step}", storage_writer=writer)
        for tensor in source.values():
            tensor.fill_(-1.0)
        gate.set()
        saving.result(60)
        writer.write_data = original  # type: ignore[method-assign]
        gc.collect()
        places |= {mapping.address for mapping in writer._free}
        found = {"a": torch.zeros(1 << 20), "b": torch.zeros(64, 64)}
        dcp.load(found, storage_reader=ForebayStorageReader(RUN, step, memory.address))
        assert all(torch.equal(tensor, torch.full_like(tensor, float(step))) for tensor in found.values())
    assert len(places) == 1
