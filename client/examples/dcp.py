"""Four ranks train, save by torch.distributed.checkpoint through a gateway, and come back as three.

    forebay serve &
    python client/examples/dcp.py                   # --address, --run, --ranks
    python client/examples/dcp.py --compare 1024    # how long a save of so many MiB keeps the ranks, beside FileSystemWriter

Each rank would have its own node's gateway in a real job: leave `address` out there. Needs torch; in Forebay's tree,
pip install '.[torch]'.
"""

import argparse
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import forebay
from forebay.torch import ForebayStorageReader, ForebayStorageWriter

ROUNDS = 5


def job_of(ranks: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A small model, sharded over all ranks."""
    model = torch.nn.Sequential(torch.nn.Linear(512, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
    return model, torch.optim.AdamW(model.parameters())


def train(rank: int, ranks: int, store: Path, arguments: argparse.Namespace) -> None:
    """Three steps; each is saved while the next one is computed."""
    join(rank, ranks, store)
    model, optimizer = job_of(ranks)
    writer = ForebayStorageWriter(address=arguments.address, wait="all")  # "cache" is enough where a rank can come back
    saving, group = None, dist.new_group()  # a group of its own: training's collectives go on meanwhile
    for step in range(1, 4):
        model(torch.ones(8, 512)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if saving is not None:
            saving.result()  # one save at a time
        parameters, moments = get_state_dict(model, optimizer)
        state = {"model": parameters, "optimizer": moments, "step": step}
        checkpoint_id = f"forebay://{arguments.run}/{step}"
        saving = dcp.async_save(state, checkpoint_id=checkpoint_id, storage_writer=writer, process_group=group)
    assert saving is not None
    saving.result()
    dist.destroy_process_group()


def come_back(rank: int, ranks: int, store: Path, arguments: argparse.Namespace) -> None:
    """The newest checkpoint, over another number of ranks."""
    join(rank, ranks, store)
    model, optimizer = job_of(ranks)
    parameters, moments = get_state_dict(model, optimizer)
    state = {"model": parameters, "optimizer": moments, "step": 0}
    dcp.load(state, storage_reader=ForebayStorageReader(arguments.run, "latest", arguments.address))
    set_state_dict(model, optimizer, model_state_dict=parameters, optim_state_dict=moments)
    if rank == 0:
        print(f"{ranks} ranks go on from step {state['step']}")
    dist.destroy_process_group()


def compare(rank: int, ranks: int, store: Path, arguments: argparse.Namespace) -> None:
    """Print how long each way to save keeps rank 0: medians, after a first round that is not counted."""
    join(rank, ranks, store)
    rows = arguments.compare * (1 << 20) // (4 * 1024 * 16)
    mesh = init_device_mesh("cpu", (ranks,))
    state = {f"layer{n}": distribute_tensor(torch.ones(rows, 1024), mesh, [Shard(0)]) for n in range(16)}
    ours = ForebayStorageWriter(address=arguments.address)  # one for all steps
    group = dist.new_group()

    def theirs(step: int) -> dict[str, Any]:
        return {"storage_writer": dcp.FileSystemWriter(store.parent / f"step-{step}")}

    def through(step: int) -> dict[str, Any]:
        return {"storage_writer": ours, "checkpoint_id": f"forebay://{arguments.run}-compared/{step}"}

    ways: dict[str, tuple[Callable[..., Any], Callable[[int], dict[str, Any]]]] = {
        "dcp.save, FileSystemWriter": (dcp.save, theirs),
        "dcp.save, Forebay": (dcp.save, through),
        "dcp.async_save, FileSystemWriter": (dcp.async_save, theirs),
        "dcp.async_save, Forebay": (dcp.async_save, through),
    }
    blocked_s: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(ROUNDS + 1):
        for index, (name, (save, where)) in enumerate(ways.items()):
            os.sync()  # what others left to be written is not this save's
            dist.barrier()
            began_s = time.perf_counter()
            saving = save(state, process_group=group, **where(len(ways) * number + index))
            blocked_s[name].append(time.perf_counter() - began_s)
            if save is dcp.async_save:
                saving.result()
    if rank == 0:
        print(f"{'HOW':34} BLOCKED   {arguments.compare} MiB on {ranks} ranks, median of {ROUNDS}")
        for name, seconds in blocked_s.items():
            print(f"{name:34} {statistics.median(seconds[1:]):5.2f} s")
    dist.destroy_process_group()


def join(rank: int, ranks: int, store: Path) -> None:
    """As torchrun would do it."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=2))


def start(act: Callable[..., None], ranks: int, store: Path, arguments: argparse.Namespace) -> None:
    """Forked, so that torch is imported once: nothing has a thread or a channel here yet."""
    torch.multiprocessing.start_processes(act, (ranks, store, arguments), nprocs=ranks, start_method="fork")


def main() -> None:
    """Both launches, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="the gateway's; default: FOREBAY_ADDRESS, else the default socket")
    parser.add_argument("--run", default="examples/dcp")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--compare", type=int, metavar="MIB", help="only measure saves of so many MiB")
    parser.add_argument("--directory", help="where --compare writes files; best on the disk of the gateway's cache")
    arguments = parser.parse_args()
    if arguments.directory and not Path(arguments.directory).is_dir():
        parser.error(f"--directory {arguments.directory}: there is no such directory; make it first")
    warnings.filterwarnings("ignore", module="torch")
    if arguments.compare:
        with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
            start(compare, arguments.ranks, Path(directory) / "store", arguments)
        with forebay.Client(arguments.address) as client:
            for checkpoint in client.checkpoints(f"{arguments.run}-compared"):
                client.delete(checkpoint.run, checkpoint.step, force=True)
        return
    with tempfile.TemporaryDirectory() as directory:
        for launch, act, ranks in ((1, train, arguments.ranks), (2, come_back, arguments.ranks - 1)):
            store = Path(directory) / f"store-{launch}"
            start(act, ranks, store, arguments)
    with forebay.Client(arguments.address) as client:
        for checkpoint in client.checkpoints(arguments.run):
            levels = " ".join(f"{level.level}:{level.state}" for level in checkpoint.levels)
            print(f"step {checkpoint.step}: {checkpoint.shard_count} files of {checkpoint.writers} ranks, {levels}")


if __name__ == "__main__":
    main()
