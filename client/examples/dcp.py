"""Four ranks train, save by torch.distributed.checkpoint through a gateway, and come back as three.

    forebay serve &
    python client/examples/dcp.py            # --address, --run, --ranks

Each rank would have its own node's gateway in a real job: leave `address` out there. Needs torch: pip install 'forebay[torch]'.
"""

import argparse
import os
import tempfile
import warnings
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import forebay
from forebay.torch import ForebayStorageReader, ForebayStorageWriter


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


def join(rank: int, ranks: int, store: Path) -> None:
    """As torchrun would do it."""
    os.environ.update(LOCAL_RANK=str(rank), RANK=str(rank), WORLD_SIZE=str(ranks))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=ranks, timeout=timedelta(minutes=2))


def main() -> None:
    """Both launches, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="the gateway's; default: FOREBAY_ADDRESS, else the default socket")
    parser.add_argument("--run", default="examples/dcp")
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    with tempfile.TemporaryDirectory() as directory:
        for launch, act, ranks in ((1, train, arguments.ranks), (2, come_back, arguments.ranks - 1)):
            store = Path(directory) / f"store-{launch}"
            # Forked, so that torch is imported once: nothing has a thread or a channel here yet.
            torch.multiprocessing.start_processes(act, (ranks, store, arguments), nprocs=ranks, start_method="fork")
    with forebay.Client(arguments.address) as client:
        for checkpoint in client.checkpoints(arguments.run):
            levels = " ".join(f"{level.level}:{level.state}" for level in checkpoint.levels)
            print(f"step {checkpoint.step}: {checkpoint.shard_count} files of {checkpoint.writers} ranks, {levels}")


if __name__ == "__main__":
    main()
