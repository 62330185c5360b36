"""TrainState: a job that stops and goes on gives the same losses, bit by bit; what cannot be saved or does not fit is said."""

import collections
import datetime
import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest

torch = pytest.importorskip("torch", reason="forebay.TrainState needs torch, which this environment does not have")
pytest.importorskip("torchdata", reason="these tests need torchdata's loader, which this environment does not have")

import torch.distributed.checkpoint as dcp  # noqa: E402

import forebay  # noqa: E402
from client import train_jobs  # noqa: E402
from client.train_jobs import ALONE, ALONE_SEED, STEPS, Job  # noqa: E402
from forebay import Client, Corrupt, Incomplete, InvalidArgument, NotFound, TrainState, Unavailable  # noqa: E402
from forebay.state import tensors  # noqa: E402
from forebay.state.document import decode, encode, inline  # noqa: E402
from forebay.testing import MemoryGateway  # noqa: E402
from forebay.torch import ForebayStorageReader, ForebayStorageWriter  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")]

RUN = "team/loop"


@pytest.fixture(scope="module")
def whole() -> dict[int, str]:
    """Of a job that never stopped and never saved."""
    return Job().losses()


@pytest.mark.parametrize("stop", [3, 5, 7, 10], ids=lambda step: f"at{step}")  # in an epoch, and at its end
@pytest.mark.parametrize("background", [False, True], ids=["save", "async"])
def test_it_goes_on_as_if_it_had_not_stopped(memory_client: Client, whole: dict[int, str], stop: int, background: bool) -> None:
    first = Job()

    def after(step: int) -> None:
        if background:
            first.state.async_save(memory_client, RUN)
        else:
            first.state.save(memory_client, RUN)

    before = first.losses(stop, after)
    assert list(before) == list(range(1, stop + 1))
    if background:
        first.state.async_save(memory_client, RUN, final=True).result()
    second = Job(seed=99)
    assert second.state.restore(memory_client, RUN) == second.state.step == stop
    assert second.progress == first.progress
    assert before | second.losses() == whole


def test_saving_changes_nothing(memory_client: Client, whole: dict[int, str]) -> None:
    job = Job()
    assert job.losses(after=lambda step: job.state.async_save(memory_client, RUN)) == whole


@pytest.mark.parametrize("workers", [1, 2])
def test_loaders_with_processes_of_their_own(memory_client: Client, workers: int) -> None:
    """What workers have drawn ahead is drawn again. (Their own generators torch seeds anew: the order is what can be kept.)"""
    whole = order(Job(workers=workers, noise=False), STEPS)
    first = Job(workers=workers, noise=False)
    before = order(first, 3)
    first.state.save(memory_client, RUN)
    second = Job(seed=7, workers=workers, noise=False)
    second.state.restore(memory_client, RUN)
    assert before + order(second, STEPS) == whole


def order(job: Job, steps: int) -> list[list[int]]:
    """Which items came, batch by batch."""
    found: list[list[int]] = []
    while job.state.step < steps:
        for batch in job.loader:
            found.append(batch.tolist())
            job.state.step += 1
            if job.state.step >= steps:
                break
    return found


@pytest.mark.slow
def test_a_job_that_is_killed(memory: MemoryGateway, tmp_path: Path, whole: dict[int, str]) -> None:
    """By SIGKILL while it saves in the background, twice; the third launch ends, and its losses are those of one launch."""
    losses = tmp_path / "losses"

    def launch(kill_at: int) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, train_jobs.__file__, memory.address, RUN, str(losses), str(kill_at)]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    with Client(memory.address) as client:
        for kill_at in (6, 9):
            assert launch(kill_at).returncode == -9
            kept = client.latest(RUN)
            assert kept is not None
            assert kept < kill_at or client.open(RUN, kept).checkpoint.complete
        done = launch(99)
    assert done.returncode == 0, done.stderr[-2000:]
    restored, *found = done.stdout.split()
    assert restored == str(kept)
    assert dict(each.split(":") for each in found) == {str(step): loss for step, loss in whole.items() if step > kept}


@pytest.mark.slow
def test_two_ranks(memory: MemoryGateway, memory_client: Client, tmp_path: Path, expected_logs: Any) -> None:
    """Rank 0 saves what they share, each its own; a job of more ranks than saved is told, unless it does not mind.

    By DCP, too: two ranks load what one saved, and one what two saved.
    """
    alone = Job(seed=ALONE_SEED)
    alone.state.step = 2
    dcp.save({"train": alone.state}, storage_writer=ForebayStorageWriter(ALONE, 2, memory.address), no_dist=True)
    command = [sys.executable, "-W", "ignore", train_jobs.__file__, memory.address, RUN, str(tmp_path / "store")]
    launched = [
        subprocess.Popen(
            command,
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=120) for process in launched]
    finally:
        for process in launched:
            process.kill()
    assert all("WELL" in out for out, _ in said), said[0][1][-2000:] + said[1][1][-2000:]
    writers = {shard.name: shard.writer for shard in memory_client.open(RUN, 3).shards()}
    assert {name for name, writer in writers.items() if writer == 1} == {"rank-00001.json", "rank-00001.safetensors"}
    assert {"model.safetensors", "train_state.json", "rank-00000.json"} < writers.keys()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forebay.state.ranks.place", lambda: (2, 3))
        patch.setattr("forebay.state.ranks.agreed", lambda ask: ask())
        with pytest.raises(InvalidArgument, match="rank 2 saved nothing of its own in it: it was saved by fewer ranks"):
            Job().state.restore(memory_client, RUN, 3)
        expected_logs.allow("this rank's generators and loaders stay as they are")
        assert Job().state.restore(memory_client, RUN, 3, strict=False) == 3
    fewer = Job(seed=8)
    dcp.load({"train": fewer.state}, storage_reader=ForebayStorageReader(RUN, 5, memory.address), no_dist=True)
    assert fewer.jitter.random() == numpy.random.default_rng(0).random()


def test_more_ranks_than_saved(memory: MemoryGateway, monkeypatch: pytest.MonkeyPatch, expected_logs: Any) -> None:
    """By DCP: its own planner raises; the state's passes over that alone, and still raises for what all ranks need."""
    first = Job()
    first.losses(2)
    dcp.save({"train": first.state}, storage_writer=ForebayStorageWriter(RUN, 2, memory.address), no_dist=True)
    monkeypatch.setattr("forebay.state.ranks.place", lambda: (1, 2))
    second = Job(seed=4)

    def load(state: TrainState, **options: Any) -> None:
        reader = ForebayStorageReader(RUN, 2, memory.address)
        dcp.load({"train": state}, storage_reader=reader, no_dist=True, **options)

    expected_logs.allow("Missing key")
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: train\.rank-00001"):
        load(second.state)
    expected_logs.allow("there were fewer ranks")
    jitter = second.jitter.bit_generator.state
    load(second.state, planner=second.state.load_planner())
    assert second.state.step == 2
    assert all(map(torch.equal, first.model.parameters(), second.model.parameters()))
    assert second.jitter.bit_generator.state == jitter
    wider = TrainState(model=torch.nn.Sequential(*second.model, torch.nn.Linear(1, 1)))
    with pytest.raises(dcp.CheckpointException, match=r"Missing key in checkpoint state_dict: train\.model"):
        load(wider, planner=wider.load_planner())


def test_what_changes_after_an_async_save_is_not_saved(memory_client: Client) -> None:
    job = Job()
    job.losses(2)
    wanted = {name: value.clone() for name, value in job.model.state_dict().items()}
    saving = job.state.async_save(memory_client, RUN)
    with torch.no_grad():
        for value in job.model.state_dict().values():
            value.fill_(7)
    job.progress["epoch"] = 50
    saving.result()
    again = Job(1)
    again.state.restore(memory_client, RUN, 2)
    for name, value in again.model.state_dict().items():
        assert torch.equal(value, wanted[name]), name
    assert again.progress["epoch"] == 0


def test_the_files_are_read_by_safetensors(memory_client: Client, tmp_path: Path) -> None:
    """And large parts are cut into several, which come back as one."""
    loaded = pytest.importorskip("safetensors.torch", reason="needs safetensors, which this environment does not have")
    job = Job()
    job.losses(2)
    state = TrainState(model=job.model, optimizer=job.optimizer)
    state.save(memory_client, RUN, 1)
    memory_client.restore_dir(RUN, 1, tmp_path)
    found = loaded.load_file(tmp_path / "model.safetensors")
    assert found.keys() == job.model.state_dict().keys()
    for name, value in job.model.state_dict().items():
        assert torch.equal(found[name], value)
    assert set(loaded.load_file(tmp_path / "optimizer.safetensors")) > {"state.0.exp_avg", "state.3.exp_avg_sq"}
    assert json.loads((tmp_path / "train_state.json").read_text())["step"] == 1


@pytest.mark.parametrize("background", [False, True])
def test_a_part_of_many_files(memory_client: Client, monkeypatch: pytest.MonkeyPatch, background: bool) -> None:
    monkeypatch.setattr(tensors, "FILE_BYTES_MAX", 1000)
    weights = {f"w{index}": torch.randn(40 * index, 3) for index in range(9)}
    state = TrainState(weights=dict(weights), rng=False)
    if background:
        state.async_save(memory_client, RUN, 4).result()
    else:
        state.save(memory_client, RUN, 4)
    assert len([name for name in memory_client.open(RUN, 4).names() if name.endswith(".safetensors")]) > 4
    into: dict[str, Any] = {"gone": 1}
    TrainState(weights=into, rng=False).restore(memory_client, RUN)
    assert into.keys() == weights.keys()
    assert all(torch.equal(into[name], value) for name, value in weights.items())


def everything() -> dict[str, Any]:
    """Each kind of value that a state may hold."""
    base = torch.randn(40, 30)
    tied = torch.randn(4)
    return {
        "values": [None, True, 0, -(1 << 70), 1.5, float("inf"), float("-inf"), 1e-320, "text \ud83d\ude00 \U0001f600", ""],
        "keys": {1: "a", (2, "b"): "c", "$": "d", None: 1},
        "sequences": ((), [[]], {3, 1}, frozenset("ab"), torch.Size([2, 3]), collections.deque([1, 2])),
        "mappings": (collections.OrderedDict(b=1, a=2), collections.Counter("aab")),
        "others": [b"\x00\xff", bytearray(b"x"), 1 + 2j, torch.bfloat16, torch.device("cpu"), datetime.timedelta(1, 2, 3)],
        "arrays": [numpy.arange(6).reshape(2, 3)[:, ::2], numpy.float32(1.5), numpy.array(["x"]), numpy.zeros((0, 2), ">i2")],
        "tensors": [
            base[3:9, 2:7],
            base.t(),
            torch.tensor(3),
            torch.empty(0, 3),
            torch.randn(5).bfloat16(),
            torch.randn(3, dtype=torch.complex128).conj(),
            torch.randn(3, dtype=torch.complex64),
            torch.tensor([True, False]),
            torch.randn(3).to(torch.float8_e4m3fn),
            tied,
            tied,
            torch.arange(3, dtype=torch.uint8),
            torch.nn.Parameter(torch.randn(2)),
        ],
    }


def assert_equal(found: Any, wanted: Any) -> None:
    """By type and value."""
    assert type(found) is type(wanted) or isinstance(wanted, torch.nn.Parameter)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype
        assert found.shape == wanted.shape
        exact = torch.float32 if wanted.dtype.itemsize == 1 else wanted.dtype  # torch does not compare all of 8 bits
        assert torch.equal(found.to(exact), wanted.to(exact))
    elif isinstance(wanted, numpy.ndarray | numpy.generic):
        assert found.dtype == wanted.dtype
        assert numpy.array_equal(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key in wanted:
            assert_equal(found[key], wanted[key])
    elif isinstance(wanted, list | tuple | collections.deque):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted, strict=True):
            assert_equal(one, other)
    else:
        assert found == wanted


@pytest.mark.parametrize("background", [False, True])
def test_every_kind_of_value(memory_client: Client, background: bool) -> None:
    wanted = everything()
    state = TrainState(all=wanted)
    if background:
        state.async_save(memory_client, RUN, 1).result()
    else:
        state.save(memory_client, RUN, 1)
    found: dict[str, Any] = {}
    TrainState(all=found).restore(memory_client, RUN)
    assert_equal(found, wanted)
    tied = found["tensors"][9:11]
    assert tied[0].data_ptr() != tied[1].data_ptr()


class Opaque:
    """Nothing that a document can say."""


def cyclic() -> list[Any]:
    """It holds itself."""
    made: list[Any] = []
    made.append(made)
    return made


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (Opaque(), r"progress: a\.1: a value of type .*Opaque cannot be saved"),
        (lambda: None, r"progress: a\.1: a value of type builtins\.function cannot be saved"),
        (torch.eye(3).to_sparse(), r"progress: a\.1: a tensor on cpu with layout torch\.sparse_coo has no plain bytes"),
        (torch.empty(3, device="meta"), r"progress: a\.1: a tensor on meta"),
        (numpy.array([object()]), r"progress: a\.1: a value of type numpy\.ndarray cannot be saved"),
        (cyclic(), r"nested deeper than 100, or it holds itself"),
    ],
)
def test_what_cannot_be_saved(memory: MemoryGateway, memory_client: Client, value: Any, said: str) -> None:
    """Is named with its place, and nothing has been sent."""
    state = TrainState(progress={"a": [0, value]})
    for save in (state.save, state.async_save):
        with pytest.raises(InvalidArgument, match=said):
            save(memory_client, RUN, 1)
    assert not {"PutShard", "PutMany", "CommitPart"} & set(memory.calls)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"width": 17},
            r"restore team/loop/2: model does not fit: '0\.weight' is float32\[16, 6\] in it and float32\[17, 6\] in",
        ),
        ({"dtype": torch.bfloat16}, r"'0\.weight' is float32\[16, 6\] in it and bfloat16\[16, 6\] in the module"),
    ],
)
def test_another_shape_or_dtype(memory_client: Client, changed: dict[str, Any], said: str) -> None:
    """Nothing was touched then."""
    first = Job()
    first.losses(2)
    first.state.save(memory_client, RUN)
    other = Job(seed=5, **changed)
    before = [value.clone() for value in other.model.state_dict().values()]
    drawn = random.getstate(), torch.get_rng_state()
    with pytest.raises(InvalidArgument, match=said):
        other.state.restore(memory_client, RUN)
    assert all(torch.equal(one, two) for one, two in zip(before, other.model.state_dict().values(), strict=True))
    assert other.state.step == 0
    assert not other.optimizer.state
    assert drawn[0] == random.getstate()
    assert torch.equal(drawn[1], torch.get_rng_state())


def test_other_parts(memory_client: Client) -> None:
    TrainState(a={"x": 1}, b={"y": 2}).save(memory_client, RUN, 1)
    here: dict[str, Any] = {}
    other = TrainState(a=here, c={})
    with pytest.raises(InvalidArgument, match="it lacks c; it has b, which this state has not; with strict=False"):
        other.restore(memory_client, RUN)
    assert other.restore(memory_client, RUN, strict=False) == 1
    assert here == {"x": 1}
    layers = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    sgd = torch.optim.SGD(layers[0].parameters())
    TrainState(optimizer=sgd).save(memory_client, RUN, 2)
    both = torch.optim.SGD([*layers[0].parameters(), *layers[1].parameters()])
    with pytest.raises(InvalidArgument, match=r"groups of \[2\] parameters in it, and of \[4\] here"):
        TrainState(optimizer=both).restore(memory_client, RUN)


def test_what_is_no_part() -> None:
    with pytest.raises(InvalidArgument, match=r"epoch: a builtins\.int has no state_dict"):
        TrainState(epoch=3)
    with pytest.raises(InvalidArgument, match="may not be called 'step'"):
        TrainState(step={})
    assert TrainState(scheduler=None).step == 0


@pytest.mark.expected_logs("dropped", "abort")
def test_checkpoints_that_cannot_be_restored(memory: MemoryGateway, memory_client: Client, tmp_path: Path) -> None:
    state = TrainState(a={"x": torch.randn(10)})
    assert state.restore(memory_client, RUN) is None
    with pytest.raises(NotFound):
        state.restore(memory_client, RUN, 5)
    with memory_client.checkpoint(RUN, 5, writers=2, writer=0, session="s") as part:
        part.put("x", b"x")
        part.commit()
    assert state.restore(memory_client, RUN) is None
    with pytest.raises(Incomplete, match="writer 1"):
        state.restore(memory_client, RUN, 5)
    (tmp_path / "file").write_bytes(b"x")
    memory_client.save_dir(tmp_path, RUN, 6)
    with pytest.raises(InvalidArgument, match="no TrainState saved it"):
        state.restore(memory_client, RUN)
    state.save(memory_client, RUN, 7)
    memory.damage_stored(RUN, 7, "a.safetensors")
    with pytest.raises(Corrupt, match=r"a\.safetensors"):
        state.restore(memory_client, RUN)
    memory.stop()
    with Client(memory.address, retry_timeout=0) as hasty, pytest.raises(Unavailable):
        state.restore(hasty, RUN)


LENGTH = (60).to_bytes(8, "little")


@pytest.mark.parametrize(
    ("name", "data", "kind"),
    [
        ("train_state.json", b"[", Corrupt),
        ("train_state.json", b'{"forebay":1,"step":1,"parts":{"a":{"$":"os.system","value":"x"}}}', Corrupt),
        ("train_state.json", b'{"forebay":1,"step":1,"parts":{"a":{"$":"tensor","file":"a.safetensors","name":"y"}}}', Corrupt),
        ("train_state.json", b'{"forebay":2}', InvalidArgument),
        ("a.safetensors", b"", Corrupt),
        ("a.safetensors", b"\xff" * 8, Corrupt),
        ("a.safetensors", (2).to_bytes(8, "little") + b"[]", Corrupt),
        ("a.safetensors", LENGTH + b'{"x":{"dtype":"F32","shape":[9],"data_offsets":[0,4]}}'.ljust(64), Corrupt),
        ("a.safetensors", LENGTH + b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[1,5]}}'.ljust(68), Corrupt),
    ],
    ids=range(9),
)
def test_hostile_files(memory_client: Client, tmp_path: Path, name: str, data: bytes, kind: type[Exception]) -> None:
    TrainState(a={"x": torch.randn(1)}).save(memory_client, RUN, 1)
    memory_client.restore_dir(RUN, 1, tmp_path)
    (tmp_path / name).write_bytes(data)
    memory_client.save_dir(tmp_path, RUN, 2)
    with pytest.raises(kind):
        TrainState(a={}).restore(memory_client, RUN)


def test_two_jobs_that_write_the_same_run(memory: MemoryGateway, memory_client: Client) -> None:
    """Whoever restores gets one job's whole state, never a mixture."""
    jobs = [{"x": torch.full((300_000,), value), "id": value} for value in (1.0, 2.0)]
    with Client(memory.address) as other:
        saves = [
            TrainState(a=job).async_save(client, RUN, step)
            for step in range(4)
            for client, job in zip((memory_client, other), jobs, strict=True)
        ]
        for save in saves:
            save.result()
    found: dict[str, Any] = {}
    for step in range(4):
        TrainState(a=found).restore(memory_client, RUN, step)
        assert bool((found["x"] == found["id"]).all())


def test_a_loader_whose_workers_use_the_client(memory_client: Client) -> None:
    """Forked while a save is under way: the child has the client for itself, and the parent's save is untouched."""
    memory_client.save_dir(Path(__file__).parent, RUN, 1)

    class Asks(torch.utils.data.Dataset[int]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> int:
            state = TrainState(a={"x": torch.full((9,), float(index))})
            state.async_save(memory_client, f"{RUN}/worker", index + 1).result()
            return (memory_client.latest(RUN) or 0) * 100 + index

    weights = {"w": torch.randn(3_000_000)}
    kept = weights["w"].clone()
    saving = TrainState(weights=weights).async_save(memory_client, RUN, 2)
    found = [int(each) for each in torch.utils.data.DataLoader(Asks(), num_workers=2, batch_size=None)]
    weights["w"].zero_()
    saving.result()
    assert [each % 100 for each in found] == [0, 1, 2, 3]
    assert memory_client.latest(f"{RUN}/worker") == 4
    TrainState(weights=weights).restore(memory_client, RUN, 2)
    assert torch.equal(weights["w"], kept)


def test_a_failed_background_save_is_told(memory: MemoryGateway, memory_client: Client, expected_logs: Any) -> None:
    expected_logs.allow("failed")
    state = TrainState(a={"x": torch.randn(10)})
    memory.fail("CommitPart", forebay.PermissionDenied("no"))
    state.async_save(memory_client, RUN, 1).durable.result(30)
    with pytest.raises(forebay.PermissionDenied, match=r"commit of team/loop/1 in the background: .*no"):
        state.async_save(memory_client, RUN, 2)
    assert memory_client.latest(RUN) is None


def test_with_torch_distributed_checkpoint(memory: MemoryGateway, whole: dict[int, str]) -> None:
    """It is a Stateful: saved and loaded by DCP, the losses are the same."""
    first = Job()
    before = first.losses(4)
    dcp.save({"train": first.state}, storage_writer=ForebayStorageWriter(RUN, 4, memory.address), no_dist=True)
    second = Job(seed=3)
    dcp.load({"train": second.state}, storage_reader=ForebayStorageReader(RUN, "latest", memory.address), no_dist=True)
    assert second.state.step == 4
    assert before | second.losses() == whole


def test_documents_with_tensors_inside() -> None:
    from forebay.state.document import Inline

    wanted = everything()
    assert_equal(decode(json.loads(json.dumps(encode(wanted, "all", Inline()))), inline), wanted)


@pytest.mark.expected_logs("abort", "dropped")
@pytest.mark.parametrize("grows", [-1, 1], ids=["shrinks", "grows"])
@pytest.mark.parametrize("background", [False, True], ids=["put", "background"])
def test_a_file_that_changes_its_size(memory_client: Client, grows: int, background: bool) -> None:
    """Of torch.save, between its measuring and its being read: nothing is saved."""
    from forebay.state.saved import SavedFile

    value = {"x": torch.zeros(100_000), "list": ["a" * 1000]}
    file = SavedFile("x.ckpt", value)
    value["x"] = torch.zeros(100_000 + grows * 50_000)
    with memory_client.checkpoint(RUN, 1) as part, pytest.raises(InvalidArgument, match=r"'x\.ckpt': it .*changed meanwhile"):
        part.put("x.ckpt", file, background=background)  # type: ignore[call-overload]
    assert memory_client.latest(RUN) is None


def test_devices_that_are_not_here(monkeypatch: pytest.MonkeyPatch, expected_logs: Any) -> None:
    """The states of two devices, set on a machine with one, and with none."""
    from forebay.state import rng

    class Module:
        def __init__(self) -> None:
            self.states = [torch.tensor([1]), torch.tensor([2])]

        def device_count(self) -> int:
            return len(self.states)

        def get_rng_state_all(self) -> list[Any]:
            return self.states

        def set_rng_state(self, state: Any, index: int) -> None:
            self.states[index] = state

    module = Module()
    monkeypatch.setattr(rng, "_accelerator", lambda: ("fake", module))
    taken = rng.take()
    assert taken["devices"]["kind"] == "fake"
    module.states = [torch.tensor([5])]
    expected_logs.allow("2 fake generators was saved, and 1 are here")
    rng.put(taken)
    assert module.states[0].item() == 1
    monkeypatch.setattr(rng, "_accelerator", lambda: None)
    expected_logs.allow("2 fake generators was saved, and 0 are here")
    rng.put(taken)


def test_forebay_without_torch() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; import forebay\n"
        "try:\n    forebay.TrainState()\nexcept ImportError as error:\n    print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "install Forebay's extra 'torch' (in its tree: pip install '.[torch]')" in done.stdout, done.stderr
    code = "import sys, forebay; forebay.TrainState; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_an_option_that_there_is_not_is_refused_before_anything_is_sent() -> None:
    state = TrainState(progress={"a": 1}, rng=False)
    for save in (state.save, state.async_save):
        with pytest.raises(TypeError, match="'metdata'"):
            save(None, "run", 1, metdata={})  # type: ignore[arg-type,call-arg]
    assert state.step == 0
