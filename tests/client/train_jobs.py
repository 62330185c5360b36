"""A small training job with all that makes resuming hard: dropout, shuffling, a scheduler, random augmentation of three kinds.

Run as a program it trains until it is killed, `train_jobs.py ADDRESS RUN LOSSES KILL_AT`, or is one rank of several that save
and restore, `train_jobs.py ADDRESS RUN STORE`, with RANK and WORLD_SIZE.
"""

import os
import random
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torchdata.stateful_dataloader import StatefulDataLoader

import forebay
from forebay.torch import ForebayStorageReader, ForebayStorageWriter

STEPS, EPOCH = 14, 5
ALONE, ALONE_SEED = "team/alone", 31


class Noisy(torch.utils.data.Dataset[Any]):
    """Each item is drawn anew, by Python's and NumPy's global generators; or it is its index alone."""

    def __init__(self, noise: bool = True) -> None:
        self.noise = noise

    def __len__(self) -> int:
        return EPOCH * 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if not self.noise:
            return torch.tensor(index)
        noise = numpy.random.standard_normal(6).astype(numpy.float32) * random.random()
        return torch.from_numpy(noise) + index


class Job:
    """Model, optimizer, scheduler, loader and a generator of its own."""

    def __init__(
        self, seed: int = 0, width: int = 16, dtype: torch.dtype = torch.float32, workers: int = 0, noise: bool = True
    ) -> None:
        torch.manual_seed(seed)
        random.seed(seed)
        numpy.random.seed(seed)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(6, width), torch.nn.BatchNorm1d(width), torch.nn.Dropout(0.3), torch.nn.Linear(width, 1)
        ).to(dtype)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.05, total_steps=STEPS + 5)
        self.loader: Any = StatefulDataLoader(Noisy(noise), batch_size=4, shuffle=True, num_workers=workers)
        self.jitter = numpy.random.default_rng(seed)
        self.progress = {"epoch": 0, "best": float("inf")}
        self.state = forebay.TrainState(
            model=self.model,
            optimizer=self.optimizer,
            scheduler=self.scheduler,
            scaler=torch.amp.GradScaler("cpu", enabled=True),
            loader=self.loader,
            jitter=self.jitter,
            progress=self.progress,
        )

    def losses(self, steps: int = STEPS, after: Any = lambda step: None) -> dict[int, str]:
        """Train from where the state stands; each step's loss, bit by bit."""
        found = {}
        while self.state.step < steps:
            for batch in self.loader:
                loss = (self.model(batch) * float(self.jitter.random())).square().mean()
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
                self.scheduler.step()
                self.state.step += 1
                self.progress["best"] = min(self.progress["best"], loss.item())
                found[self.state.step] = loss.item().hex()
                after(self.state.step)
                if self.state.step >= steps:
                    break
            else:
                self.progress["epoch"] += 1
        return found


def one_rank(address: str, run: str, store: str) -> None:
    """By a client, and by DCP: what ranks share and what each has of its own come back."""
    rank, count = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=count, timeout=timedelta(minutes=2))
    job, other = Job(seed=rank), Job(seed=50 + rank)
    for parameter in job.model.parameters():
        dist.broadcast(parameter.data, 0)
    with forebay.Client(address) as client:
        job.state.step = 3
        job.state.async_save(client, run).result()
        drawn = random.random(), torch.rand(2)
        dist.barrier()  # complete once all have committed
        assert other.state.restore(client, run) == 3
        assert drawn[0] == random.random() and torch.equal(drawn[1], torch.rand(2))
        assert other.jitter.random() == numpy.random.default_rng(rank).random()
        assert all(map(torch.equal, job.model.parameters(), other.model.parameters()))
        assert other.state.restore(client, f"{run}/none") is None
    dcp.save({"train": job.state}, storage_writer=ForebayStorageWriter(run, 5, address))
    drawn = random.random(), torch.rand(2)
    dcp.load({"train": other.state}, storage_reader=ForebayStorageReader(run, 5, address))
    assert drawn[0] == random.random() and torch.equal(drawn[1], torch.rand(2))
    of_fewer_ranks(address, rank)
    dist.destroy_process_group()
    print("WELL")


def of_fewer_ranks(address: str, rank: int) -> None:
    """What one rank saved by DCP: all have what is shared, and the other ranks' generators stay as they are."""
    other = Job(seed=70 + rank)
    storage = ForebayStorageReader(ALONE, 2, address)
    dcp.load({"train": other.state}, storage_reader=storage, planner=other.state.load_planner())
    assert other.state.step == 2
    assert other.model[0].weight.sum().item().hex() == Job(seed=ALONE_SEED).model[0].weight.sum().item().hex()
    assert other.jitter.random() == numpy.random.default_rng(ALONE_SEED if rank == 0 else 70 + rank).random()


def main() -> None:
    """Train, saving in the background at each step, and die by SIGKILL right after the commit of `kill_at` was asked for."""
    if "RANK" in os.environ:
        one_rank(*sys.argv[1:])
        return
    address, run, losses, kill_at = sys.argv[1:]
    client = forebay.Client(address)
    job = Job(seed=int(kill_at) if Path(losses).exists() else 0)  # a restarted job has other generators until it restores
    restored = job.state.restore(client, run)

    def after(step: int) -> None:
        saving = job.state.async_save(client, run)
        with Path(losses).open("a") as file:
            file.write(f"{step}\n")
        if step == int(kill_at):
            os.kill(os.getpid(), signal.SIGKILL)
        saving.done()

    found = job.losses(after=after)
    client.close()
    print(restored, *(f"{step}:{loss}" for step, loss in found.items()))


if __name__ == "__main__":
    main()
