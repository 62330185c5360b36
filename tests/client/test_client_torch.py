"""forebay.torch without ranks: what lies in its files, what a load reads, what goes wrong. Against the gateway in memory."""

import dataclasses
import functools
import inspect
import io
import os
import pickle
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="forebay.torch needs torch, which this environment does not have")

import torch.distributed.checkpoint as dcp  # noqa: E402
from torch.distributed.checkpoint.api import CheckpointException  # noqa: E402
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata  # noqa: E402
from torch.distributed.checkpoint.planner import LoadPlan  # noqa: E402

import forebay  # noqa: E402
from forebay.errors import Incomplete, InvalidArgument, NotFound, Unavailable  # noqa: E402
from forebay.reader import Reader  # noqa: E402
from forebay.session import ENVIRONMENT  # noqa: E402
from forebay.testing import MemoryGateway  # noqa: E402
from forebay.torch import ForebayStorageReader, ForebayStorageWriter  # noqa: E402
from forebay.torch.items import ItemsFile, saved, saved_size  # noqa: E402
from forebay_wire.memory import address_of  # noqa: E402

# torch warns of a process alone.
pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

RUN, STEP = "team/dcp", 3
LAYOUTS: list[dict[str, Any]] = [
    {},
    {"thread_count": 3},
    {"single_file_per_rank": False},
    {"single_file_per_rank": False, "thread_count": 3},
]


def state() -> dict[str, Any]:
    """Tensors of every kind that a state dict may hold, and objects."""
    torch.manual_seed(0)
    base = torch.randn(400, 300)
    return {
        "whole": torch.randn(300, 500),
        "rows": base[10:350],  # smaller than its storage
        "columns": base[:, 3:9],
        "transposed": torch.randn(200, 300).t(),
        "large": torch.randn(3, 1 << 18),
        "expanded": torch.randn(1, 7).expand(40, 7),
        "channels last": torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
        "half": torch.randn(200, 200).bfloat16(),
        "scalar": torch.tensor(3),
        "empty": torch.empty(0, 3),
        "conjugated": torch.randn(100, 100, dtype=torch.complex64).conj(),
        "parameter": torch.nn.Parameter(torch.randn(5)),
        "step": 5,
        "nested": {"rate": [0.1, 0.2], "range": torch.arange(10)},
    }


def blank(value: Any) -> Any:
    """Of the same shape, with nothing in it."""
    if isinstance(value, dict):
        return {key: blank(inside) for key, inside in value.items()}
    return torch.zeros_like(value) if isinstance(value, torch.Tensor) else None


def assert_equal(found: Any, wanted: Any) -> None:
    """By value."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, torch.Tensor):
        assert torch.equal(found, wanted)
    else:
        assert found == wanted


def save(memory: MemoryGateway, what: dict[str, Any], step: int = STEP, planner: Any = None, **keys: Any) -> None:
    """By a process alone."""
    dcp.save(what, storage_writer=ForebayStorageWriter(RUN, step, memory.address, **keys), planner=planner)


def load(memory: MemoryGateway, into: dict[str, Any], step: int | str = STEP, **keys: Any) -> None:
    """By a process alone."""
    dcp.load(into, storage_reader=ForebayStorageReader(RUN, step, memory.address, **keys))


def knows(what: Any, argument: str) -> bool:
    """Whether this release of torch has the argument."""
    return argument in inspect.signature(what).parameters


@pytest.fixture
def client(memory: MemoryGateway) -> forebay.Client:
    return forebay.Client(memory.address)


def named(number: int) -> str:
    """The n-th file of rank 0."""
    return f"__0_{number}.distcp"


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_files_are_torchs_own(memory: MemoryGateway, client: forebay.Client, tmp_path: Path, layout: dict[str, Any]) -> None:
    """Name by name and byte by byte what torch's FileSystemWriter makes of the same state; both readers read both."""
    wanted = state()
    dcp.save(wanted, storage_writer=dcp.FileSystemWriter(str(tmp_path / "torch"), **layout))
    save(memory, wanted, **layout)
    client.restore_dir(RUN, STEP, tmp_path / "forebay")
    theirs, ours = ({path.name: path for path in (tmp_path / which).iterdir()} for which in ("torch", "forebay"))
    assert ours.keys() == theirs.keys()
    for name in ours.keys() - {".metadata"}:
        assert ours[name].read_bytes() == theirs[name].read_bytes(), name
    mine, plain = (pickle.loads(files[".metadata"].read_bytes()) for files in (ours, theirs))
    assert (mine.storage_data, mine.planner_data) == (plain.storage_data, plain.planner_data)
    assert getattr(mine, "version", "none") == getattr(plain, "version", "none")  # DCP's own, in the releases that have one
    assert mine.storage_meta.checkpoint_id == f"forebay://{RUN}/{STEP}"

    found = blank(wanted)
    load(memory, found, "latest")
    assert_equal(found, wanted)
    found = blank(wanted)
    dcp.load(found, storage_reader=dcp.FileSystemReader(str(tmp_path / "forebay")))
    assert_equal(found, wanted)
    client.save_dir(tmp_path / "torch", RUN, 77)
    found = blank(wanted)
    load(memory, found, 77)
    assert_equal(found, wanted)


def items_file(what: dict[str, Any]) -> ItemsFile:
    """One file with all of it."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner(what, is_coordinator=True)
    plan = planner.create_local_plan()
    return ItemsFile("file", plan.items, planner, 0)


def test_the_size_is_known_before_anything_is_written() -> None:
    what = state()
    del what["conjugated"]
    file = items_file(what)
    first, again = (b"".join(bytes(piece) for piece in file.chunks(64 << 10)) for _ in range(2))
    assert file.size == len(first)
    assert first == again
    results = sorted(file.results, key=lambda result: result.storage_data.offset)
    assert [result.storage_data.offset for result in results[1:]] == [
        result.storage_data.offset + result.storage_data.length for result in results[:-1]
    ]
    assert sum(result.size_in_bytes for result in results) == len(first)


def test_tensors_whose_saved_form_is_not_known_beforehand() -> None:
    sparse = torch.randn(9, 9).relu().to_sparse()
    for tensor in (torch.randn(3, dtype=torch.complex64).conj(), sparse):
        assert saved_size(tensor) is None
    assert items_file({"a": torch.randn(3, dtype=torch.complex64).conj(), "b": torch.ones(2)}).size is None


def test_a_tensor_is_not_copied() -> None:
    """What is sent of it is its own memory, and all else is a few kilobytes."""
    tensor = torch.randn(1 << 20)
    pieces = saved(tensor)
    inside = [piece for piece in pieces if address_of(piece) == tensor.data_ptr()]
    assert [piece.nbytes for piece in inside] == [tensor.nbytes]
    assert sum(piece.nbytes for piece in pieces) - tensor.nbytes < 4096
    assert torch.equal(torch.load(io.BytesIO(b"".join(pieces))), tensor)


def test_a_file_is_never_in_memory_as_a_whole() -> None:
    """Of tensors that have to be copied, one at a time is."""
    base = torch.zeros(8, 2 << 20)
    held: list[int] = []
    original = torch.Tensor.clone
    file = items_file({f"column{n}": base[:, n : n + (1 << 20)] for n in range(8)})
    copies: list[Any] = []

    def clone(self: Any, *arguments: Any, **keys: Any) -> Any:
        made = original(self, *arguments, **keys)
        copies.append(weakref.ref(made.untyped_storage()))
        return made

    torch.Tensor.clone = clone  # type: ignore[method-assign]
    try:
        for _ in file.chunks(4 << 20):
            held.append(sum(copy() is not None for copy in copies))
    finally:
        torch.Tensor.clone = original  # type: ignore[method-assign]
    assert len(copies) == 8
    assert max(held) <= 2


def test_only_what_the_plan_needs_is_read(memory: MemoryGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours by one request, what lies far apart by its own; nothing else."""
    what = {"a": torch.ones(1000), "b": torch.ones(1000), "far": torch.ones(1 << 20), "z": torch.ones(1000)}
    save(memory, what)
    read: list[tuple[str, int]] = []
    original = Reader.read

    def counted(self: Reader, name: str, offset: int = 0, length: int | None = None) -> bytes:
        data = original(self, name, offset, length)
        read.append((name, len(data)))
        return data

    monkeypatch.setattr(Reader, "read", counted)
    found = {name: torch.zeros(1000) for name in ("a", "b", "z")}
    load(memory, found)
    assert all(torch.equal(tensor, torch.ones(1000)) for tensor in found.values())
    lengths = [length for name, length in read if name == named(0)]
    assert len(lengths) == 2, read
    assert sum(lengths) < 20_000


@pytest.mark.parametrize("hindrance", ["a sandbox", "an old format"])
def test_tensors_that_cannot_be_mapped(
    memory: MemoryGateway, client: forebay.Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hindrance: str
) -> None:
    """Large ones usually are."""
    with monkeypatch.context() as patch:
        if hindrance == "an old format":
            patch.setattr(torch, "save", functools.partial(torch.save, _use_new_zipfile_serialization=False))
        dcp.save(state(), storage_writer=dcp.FileSystemWriter(str(tmp_path)))
    client.save_dir(tmp_path, RUN, STEP)
    if hindrance == "a sandbox":
        monkeypatch.setattr(os, "memfd_create", lambda *_: (_ for _ in ()).throw(PermissionError("not here")))
    found = blank(state())
    load(memory, found)
    assert_equal(found, state())


def test_one_writer_serves_all_steps(memory: MemoryGateway, client: forebay.Client) -> None:
    writer = ForebayStorageWriter(address=memory.address, final=True, metadata={"loss": 0.5})
    for step in (1, 2):
        again = pickle.loads(pickle.dumps(writer))
        dcp.save({"step": step}, checkpoint_id=f"forebay://{RUN}/{step}", storage_writer=writer)
        dcp.save({"step": step}, checkpoint_id=f"forebay://{RUN}/{step + 10}", storage_writer=again)
    assert [found.step for found in client.checkpoints(RUN)] == [1, 2, 11, 12]
    assert client.describe(RUN, 1).metadata == {"loss": 0.5}
    reader = ForebayStorageReader(address=memory.address)
    for step in (1, 2):
        found = {"step": 0}
        dcp.load(found, checkpoint_id=f"forebay://{RUN}/{step}", storage_reader=reader)
        assert found == {"step": step}


def test_a_step_saved_again(memory: MemoryGateway, client: forebay.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same launch, too: the later one stands. `overwrite=False` refuses, before anything is sent."""
    monkeypatch.setenv(ENVIRONMENT, "launch")
    sessions = []
    for value in (1, 2):
        save(memory, {"value": value})
        sessions.append(client.describe(RUN, STEP).session)
    assert len(set(sessions)) == 2
    assert all(session.startswith("launch-") for session in sessions)
    with pytest.raises(CheckpointException, match="already exists"):
        save(memory, {"value": 3}, overwrite=False)
    found = {"value": 0}
    load(memory, found)
    assert found == {"value": 2}


@pytest.mark.skipif(not knows(dcp.DefaultSavePlanner, "enable_plan_caching"), reason="this torch's planners cache no plans")
def test_planners_that_cache_plans(memory: MemoryGateway) -> None:
    """DCP then does not hand out what the coordinator says, but what it said first."""
    for step in (1, 2, 3):
        what = {"a": torch.full((1000,), float(step)), "nested": {"b": torch.ones(step if step == 3 else 1)}}
        save(memory, what, step, dcp.DefaultSavePlanner(enable_plan_caching=True))
        found = blank(what)
        load(memory, found, step)
        assert_equal(found, what)


@pytest.mark.skipif(not knows(dcp.save, "use_collectives"), reason="this torch always uses collectives")
def test_without_collectives(memory: MemoryGateway) -> None:
    """Each rank writes metadata of its own, as torch has it."""
    writer = ForebayStorageWriter(RUN, STEP, memory.address)
    dcp.save({"a": torch.ones(3)}, storage_writer=writer, no_dist=True, use_collectives=False)
    assert forebay.Client(memory.address).open(RUN, STEP).names() == ["__0.metadata", named(0)]
    found = {"a": torch.zeros(3)}
    load(memory, found)
    assert torch.equal(found["a"], torch.ones(3))


def test_what_was_planned_and_did_not_land(memory: MemoryGateway, client: forebay.Client) -> None:
    """Two ranks, of which one says less than it should: no checkpoint, and the writer and its items are named."""
    planner = dcp.DefaultSavePlanner()
    planner.set_up_planner({"a": torch.ones(3), "b": torch.ones(3)}, is_coordinator=True)
    writer = ForebayStorageWriter(RUN, STEP, memory.address)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    (plan,), metadata = planner.create_global_plan([planner.create_local_plan()])
    ranks = [dataclasses.replace(plan, items=plan.items[:1]), dataclasses.replace(plan, items=plan.items[1:])]
    results = writer.write_data(writer.prepare_global_plan(ranks)[0], planner).wait()
    with pytest.raises(Incomplete, match=r"1 of 2 planned items did not land: writer 1 \(open: b\[0\]\)") as caught:
        writer.finish(metadata, [results, []])
    assert [(entry.writer, entry.shards) for entry in caught.value.missing] == [(1, ("b[0]",))]
    assert client.latest(RUN) is None
    with pytest.raises((NotFound, Incomplete)):
        client.open(RUN, STEP)


def test_ranks_never_load_different_saves(memory: MemoryGateway) -> None:
    """Where "latest" is not the same at each rank's gateway, or a newer save of the step is completed in between."""
    reader = ForebayStorageReader(RUN, "latest", memory.address)
    save(memory, {"a": 1}, 1)
    reader.read_metadata()
    first = reader.prepare_local_plan(LoadPlan([]))
    assert reader.prepare_global_plan([first, first]) == [first, first]
    save(memory, {"a": 1}, 2)
    reader.read_metadata()
    with pytest.raises(Incomplete, match="different saves"):
        reader.prepare_global_plan([first, reader.prepare_local_plan(LoadPlan([]))])


def test_more_than_may_be_ahead(memory: MemoryGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large items one by one, and what lies in many files."""
    monkeypatch.setattr("forebay.torch.reader.AHEAD_BYTES_MAX", 100_000)
    wanted = {f"tensor{n}": torch.full((5000 * (n % 7 + 1),), float(n)) for n in range(40)}
    save(memory, wanted, single_file_per_rank=False)
    found = blank(wanted)
    load(memory, found)
    assert_equal(found, wanted)


def test_storage_that_older_torch_sets_up(memory: MemoryGateway) -> None:
    """Without rank and use_collectives."""
    writer = ForebayStorageWriter(RUN, STEP, memory.address)
    writer.set_up_storage_writer(True)
    reader = ForebayStorageReader(RUN, STEP, memory.address)
    reader.set_up_storage_reader(Metadata({"a": BytesStorageMetadata()}, storage_data={}), True)
    with pytest.raises(AssertionError, match="storage_data"):
        reader.set_up_storage_reader(Metadata({}), True)


@pytest.mark.parametrize(
    "checkpoint_id, writable, readable",
    [
        (f"forebay://{RUN}/12", True, True),
        ("forebay://run/0", True, True),
        ("forebay://run/latest", False, True),
        ("forebay://run", False, False),
        ("forebay:///1", False, False),
        ("forebay://run/-1", False, False),
        ("forebay://run/1e3", False, False),
        ("forebay://run/²", False, False),
        ("forebay://run/18446744073709551616", False, False),
        ("forebay://a//b/1", False, False),
        ("s3://run/1", False, False),
        ("/some/path/1", False, False),
        ("", False, False),
    ],
)
def test_checkpoint_ids(checkpoint_id: str, writable: bool, readable: bool) -> None:
    assert ForebayStorageWriter.validate_checkpoint_id(checkpoint_id) == writable
    assert ForebayStorageReader.validate_checkpoint_id(checkpoint_id) == readable
    if writable:
        assert ForebayStorageWriter(checkpoint_id).checkpoint_id == checkpoint_id


@pytest.mark.parametrize(
    "keys",
    [
        {"run": "a", "step": -1},
        {"run": "a", "step": "latest"},
        {"step": 1},
        {"run": "a"},
        {"run": "a", "step": True},
        {"run": 3, "step": 1},
    ]
    + [{"run": "a", "step": 1, "thread_count": count} for count in (0, 65, 1.5, True)],
    ids=str,
)
def test_bad_arguments(keys: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgument):
        ForebayStorageWriter(**keys)


def test_nothing_was_named(memory: MemoryGateway) -> None:
    with pytest.raises(CheckpointException, match="name what to save"):
        dcp.save({"a": 1}, storage_writer=ForebayStorageWriter(address=memory.address))
    with pytest.raises(CheckpointException, match="name what to load"):
        dcp.load({"a": 1}, storage_reader=ForebayStorageReader(address=memory.address))


def test_states_that_do_not_fit(memory: MemoryGateway) -> None:
    """torch's own errors; what failed to be saved is not there."""
    with pytest.raises(CheckpointException, match="pickle"):
        save(memory, {"hook": lambda: None})
    with pytest.raises(CheckpointException, match="no checkpoint"):
        load(memory, {"hook": 0})
    save(memory, {"a": torch.ones(3, 4)})
    for wrong, said in (({"a": torch.ones(4, 4)}, "ize mismatch"), ({"other": torch.ones(3)}, "Missing key")):
        with pytest.raises(CheckpointException, match=said):
            load(memory, wrong)


def test_a_level_that_is_not_there(memory: MemoryGateway, client: forebay.Client) -> None:
    with pytest.raises(CheckpointException, match="nothing was sent"):
        save(memory, {"a": 1}, wait="nowhere")
    assert client.runs() == []


def test_a_gateway_that_is_away(tmp_path: Path) -> None:
    """One patience for both of DCP's questions."""
    reader = ForebayStorageReader(RUN, STEP, f"unix://{tmp_path}/none.sock", retry_timeout=0.2)
    with pytest.raises(Unavailable) as first:
        reader.read_metadata()
    with pytest.raises(Unavailable) as second:
        reader.read_metadata(rank=0)
    assert second.value is first.value


def test_without_torch() -> None:
    """A sentence that says what to install; and `import forebay` never asks for torch."""
    lines = [
        "import sys; sys.modules['torch'] = None; import forebay; forebay.Client",
        "try: import forebay.torch",
        "except ImportError as error: print(error)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, check=True)
    todo = "install Forebay's extra 'torch' (in its tree: pip install '.[torch]')"
    assert done.stdout == f"forebay.torch needs PyTorch, which is not installed: {todo}\n"
