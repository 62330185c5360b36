"""Ranks of a training job that save and load by DCP: real processes over gloo. What they find is compared here, in the rank.

Owns the processes and what each does. Needs torch. As a program it forks the ranks once everything is imported, and before
anything has a thread or a channel, so that all of them cost one import.
"""

import contextlib
import multiprocessing
import os
import pickle
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from forebay.torch import ForebayStorageReader, ForebayStorageWriter

RUN = "team/dcp"
PATIENCE_S = 100.0
SHARDS_ON_CPU = torch.torch_version.TorchVersion(torch.__version__) >= "2.7"  # FSDP2 does; in 2.6 it needs a GPU
Rank = Callable[["Job"], Any]


@dataclass(frozen=True)
class Job:
    """One rank's place in its job, and its gateway."""

    rank: int
    world: int
    directory: Path
    addresses: tuple[str, ...]

    @property
    def address(self) -> str:
        """Ranks are dealt over the gateways."""
        return self.addresses[self.rank % len(self.addresses)]

    def writer(self, step: int | None = None, **keys: Any) -> Any:
        """This rank's storage writer."""
        return ForebayStorageWriter(None if step is None else RUN, step, self.address, **keys)

    def reader(self, step: int | str | None = None, **keys: Any) -> Any:
        """This rank's storage reader."""
        return ForebayStorageReader(None if step is None else RUN, step, self.address, **keys)


def run_ranks(act: Rank, world: int, directory: Path, *addresses: str, dies: int = -1) -> list[Any]:
    """What `act` returns in each of `world` ranks; an error of any is raised. `dies`: that rank is expected to say nothing."""
    command = [sys.executable, "-m", "integration.dcp_ranks", act.__name__, str(world), str(directory), *addresses]
    tests = str(Path(__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([tests, os.environ.get("PYTHONPATH", "")])}
    with (directory / "ranks.log").open("ab") as log:
        subprocess.run(command, check=True, timeout=PATIENCE_S, env=environment, stdout=log, stderr=log)
    results = []
    for rank in range(world):
        path = _answer_of(act, rank, directory)
        assert path.exists() == (rank != dies), f"rank {rank}: {(directory / 'ranks.log').read_text()[-4000:]}"
        answer, error = pickle.loads(path.read_bytes()) if rank != dies else (None, "")
        assert not error, f"rank {rank}:\n{error}"
        results.append(answer)
    return results


def _launch(act: Rank, world: int, directory: Path, addresses: tuple[str, ...]) -> None:
    """Fork the ranks, and wait for all of them. Nothing here has a thread yet."""
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(act, Job(rank, world, directory, addresses))) for rank in range(world)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


def _rank(act: Rank, job: Job) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", RANK=str(job.rank), WORLD_SIZE=str(job.world))
    try:
        method = f"file://{job.directory}/store-{act.__name__}"
        patience = timedelta(seconds=60)
        dist.init_process_group("gloo", init_method=method, rank=job.rank, world_size=job.world, timeout=patience)
        answer = act(job), ""
    except BaseException:
        answer = None, traceback.format_exc()
    _answer_of(act, job.rank, job.directory).write_bytes(pickle.dumps(answer))
    with contextlib.suppress(Exception):
        dist.destroy_process_group()


def _answer_of(act: Rank, rank: int, directory: Path) -> Path:
    return directory / f"answer-{act.__name__}-{rank}"


# -- what is saved -------------------------------------------------------------------------------------------------------


def numbers() -> dict[str, torch.Tensor]:
    """The tensors of the job, whole: rows that no world size here divides, and one large enough for the fd lane."""
    make = torch.Generator().manual_seed(7)
    shapes = {"large": (2043, 700), "small": (7, 3), "bias": (13,)}
    made = {name: torch.randn(shape, generator=make) for name, shape in shapes.items()}
    return {**made, "half": torch.randn(33, 5, generator=make).bfloat16()}


def state_over(mesh: DeviceMesh, *, zero: bool) -> dict[str, Any]:
    """Sharded tensors over a mesh, and what each rank has alike."""
    whole = {name: torch.zeros_like(tensor) if zero else tensor for name, tensor in numbers().items()}
    state: dict[str, Any] = {name: distribute_tensor(tensor, mesh, [Shard(0)]) for name, tensor in whole.items()}
    state["alike"] = distribute_tensor(whole["large"][:5].clone(), mesh, [Replicate()])
    state["loader"] = {"epoch": 0 if zero else 3, "seen": [] if zero else [1, 2, 3]}
    return state


def assert_is_saved_state(state: dict[str, Any]) -> None:
    """Every value is the one that was saved."""
    for name, tensor in numbers().items():
        found = state[name].full_tensor() if isinstance(state[name], DTensor) else state[name]
        assert torch.equal(found, tensor), name
    alike = state["alike"]
    assert torch.equal(alike.to_local() if isinstance(alike, DTensor) else alike, numbers()["large"][:5])
    assert state["loader"] == {"epoch": 3, "seen": [1, 2, 3]}


def plain_state() -> dict[str, Any]:
    """As state_over(), for one process without a mesh."""
    state: dict[str, Any] = {name: torch.zeros_like(tensor) for name, tensor in numbers().items()}
    return {**state, "alike": torch.zeros(5, 700), "loader": {"epoch": 0, "seen": []}}


# -- what ranks do -------------------------------------------------------------------------------------------------------


def save_and_load(job: Job) -> None:
    """Step 1 by dcp.save, step 2 by async_save on a thread, steps 3 and 4 of models, a save that fails; loads by 4, 3 and 2."""
    mesh = init_device_mesh("cpu", (job.world,))
    writer = job.writer(thread_count=2, wait="pfs")  # only there do gateways see each other's parts
    dcp.save(state_over(mesh, zero=False), checkpoint_id=f"forebay://{RUN}/1", storage_writer=writer)
    state = state_over(mesh, zero=False)
    saving = dcp.async_save(state, checkpoint_id=f"forebay://{RUN}/2", storage_writer=writer)
    for tensor in (value for value in state.values() if isinstance(value, DTensor)):
        tensor.to_local().fill_(-1.0)  # what was staged is what is saved
    saving.result()
    dist.barrier()
    for ranks in (4, 3, 2):
        group = dist.new_group(list(range(ranks)))
        if job.rank < ranks:
            loaded = state_over(DeviceMesh("cpu", list(range(ranks))), zero=True)
            reader = job.reader(2 if ranks == 3 else 1, lane="stream" if ranks == 2 else "auto")
            dcp.load(loaded, storage_reader=reader, process_group=group)
            assert_is_saved_state(loaded)
    dist.barrier()
    if SHARDS_ON_CPU:
        _train_and_come_back(job, 3, lambda model: fully_shard(model, mesh=mesh))
    _train_and_come_back(job, 4, DistributedDataParallel)
    _one_fails_then_all_save(job, mesh)


def _one_fails_then_all_save(job: Job, mesh: DeviceMesh) -> None:
    """A rank has what cannot be pickled: every rank hears of it. The same step is saved by the next try, in the same launch."""
    state = state_over(mesh, zero=False)
    bad = {**state, f"hook{job.rank}": (lambda: None) if job.rank == 1 else 0}
    try:
        dcp.save(bad, storage_writer=job.writer(21))
    except CheckpointException as error:
        assert sorted(error.failures) == [1]
        assert "pickle" in str(error)
    else:
        raise AssertionError("it was saved")
    dcp.save(state, storage_writer=job.writer(21, wait="pfs"))
    loaded = state_over(mesh, zero=True)
    dcp.load(loaded, storage_reader=job.reader(21))
    assert_is_saved_state(loaded)


def _train_and_come_back(job: Job, step: int, spread: Callable[[torch.nn.Module], torch.nn.Module]) -> None:
    """A model with its optimizer, saved, loaded into another one, compared."""

    def job_of(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = spread(torch.nn.Sequential(torch.nn.Linear(30, 17), torch.nn.ReLU(), torch.nn.Linear(17, 5)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(2, 30)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return model, optimizer

    model, optimizer = job_of(1)
    parameters, moments = get_state_dict(model, optimizer)
    dcp.save({"model": parameters, "optimizer": moments}, storage_writer=job.writer(step, wait="pfs"))
    other, other_optimizer = job_of(2)
    found, found_moments = get_state_dict(other, other_optimizer)
    dcp.load({"model": found, "optimizer": found_moments}, storage_reader=job.reader(step))
    set_state_dict(other, other_optimizer, model_state_dict=found, optim_state_dict=found_moments)
    for mine, saved in zip(_tensors(other, other_optimizer), _tensors(model, optimizer), strict=True):
        assert torch.equal(mine, saved)


def _tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for tree in get_state_dict(model, optimizer):
        for entry in torch.utils._pytree.tree_leaves(tree):
            if isinstance(entry, torch.Tensor):
                yield entry.full_tensor() if isinstance(entry, DTensor) else entry


def save_from_another_process(job: Job) -> None:
    """async_save by DCP's process checkpointer, twice: the second finds its process running."""
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType  # from torch 2.7 on

    mesh = init_device_mesh("cpu", (job.world,))
    for step in (11, 12):
        dcp.async_save(
            state_over(mesh, zero=False), storage_writer=job.writer(step), async_checkpointer_type=AsyncCheckpointerType.PROCESS
        ).result()
        dist.barrier()
        loaded = state_over(mesh, zero=True)
        dcp.load(loaded, storage_reader=job.reader(step))
        assert_is_saved_state(loaded)


class _Dies(dcp.DefaultSavePlanner):
    def resolve_data(self, write_item: Any) -> Any:
        os._exit(9)


def last_rank_dies(job: Job) -> tuple[float, str, str]:
    """The last rank dies in the middle of its save: how long the others took to notice, what they heard, and what lacks."""
    mesh = init_device_mesh("cpu", (job.world,))
    state = state_over(mesh, zero=False)
    writer = job.writer(31, session="one-launch")
    began_s = time.monotonic()
    try:
        dcp.save(state, storage_writer=writer, planner=_Dies() if job.rank == job.world - 1 else None)
    except BaseException as error:  # what gloo raises is its own
        said = f"{type(error).__name__}: {error}"
    else:
        said = "saved"
    lacking = writer.lacking()
    return time.monotonic() - began_s, said, str(lacking)


if __name__ == "__main__":
    _launch(globals()[sys.argv[1]], int(sys.argv[2]), Path(sys.argv[3]), tuple(sys.argv[4:]))
