"""A plain PyTorch loop that is stopped in the middle of an epoch, and goes on as if it had not been.

    forebay serve &
    python client/examples/plain_torch.py                   # --address, --run
    python client/examples/plain_torch.py --compare 1024    # how long a save of so many MiB keeps the loop, beside torch.save

Needs torch and torchdata, whose loader knows where it is; in Forebay's tree, pip install '.[torch]' torchdata. With
--s3 s3://BUCKET/PREFIX --compare also saves by s3torchconnector (pip install s3torchconnector): the bucket must exist,
AWS_REGION must be set, AWS_ENDPOINT_URL too where it is not AWS, and credentials are those of the AWS chain.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import forebay

ROUNDS = 5


def train(client: forebay.Client, run: str, steps: int) -> list[float]:
    """One launch, up to `steps`; its losses."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    loader = StatefulDataLoader(torch.arange(512.0).reshape(64, 8) / 512, batch_size=8, shuffle=True)
    losses = []

    state = forebay.TrainState(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
    if (restored := state.restore(client, run)) is not None:  # the newest complete checkpoint; None at the first launch
        print(f"goes on from step {restored}")
    while state.step < steps:
        for batch in loader:
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            state.step += 1
            losses.append(loss.item())
            if state.step % 5 == 0 or state.step == steps:
                state.async_save(client, run, final=state.step == steps)  # copied when it returns; sent while training goes on
            if state.step == steps:
                break
    return losses


def compare(arguments: argparse.Namespace) -> None:
    """Print how long each way to save keeps a loop from going on: medians, after a first round that is not counted."""
    model = torch.nn.Linear(
        1024, arguments.compare * (1 << 20) // (3 * 4 * 1024), bias=False
    )  # with Adam's moments: three times
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.ones_like(model.weight)
    optimizer.step()
    state = forebay.TrainState(model=model, optimizer=optimizer)
    plain = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}

    with forebay.Client(arguments.address) as client, tempfile.TemporaryDirectory(dir=arguments.directory) as directory:

        def to_file(step: int) -> None:
            with (Path(directory) / "checkpoint.pt").open("wb") as file:
                torch.save(plain, file)
                file.flush()
                os.fsync(file.fileno())

        ways: dict[str, Callable[[int], Any]] = {
            "torch.save, fsync": to_file,
            "state.save": lambda step: state.save(client, f"{arguments.run}-compared", step),
            "state.async_save": lambda step: state.async_save(client, f"{arguments.run}-compared", 1000 + step),
        }
        if arguments.s3:
            ways = {"torch.save to S3Checkpoint": s3_save(arguments.s3, plain), **ways}
        blocked_s: dict[str, list[float]] = {name: [] for name in ways}
        for step in range(ROUNDS + 1):
            for name, save in ways.items():
                os.sync()  # what others left to be written is not this save's
                began_s = time.perf_counter()
                saved = save(step)
                blocked_s[name].append(time.perf_counter() - began_s)
                if name == "state.async_save":
                    saved.result()
        for checkpoint in client.checkpoints(f"{arguments.run}-compared"):
            client.delete(checkpoint.run, checkpoint.step, force=True)
    print(f"{'HOW':28} BLOCKED   {arguments.compare} MiB, median of {ROUNDS}")
    for name, seconds in blocked_s.items():
        print(f"{name:28} {statistics.median(seconds[1:]):5.2f} s")


def s3_save(prefix: str, plain: dict[str, Any]) -> Callable[[int], None]:
    """s3torchconnector's own way: the loop goes on when the object store has it all."""
    from s3torchconnector import S3Checkpoint, S3ClientConfig

    endpoint = os.environ.get("AWS_ENDPOINT_URL")
    config = S3ClientConfig(force_path_style=endpoint is not None)
    checkpoint = S3Checkpoint(region=os.environ["AWS_REGION"], endpoint=endpoint, s3client_config=config)

    def save(step: int) -> None:
        with checkpoint.writer(f"{prefix}/checkpoint.pt") as writer:
            torch.save(plain, writer)

    return save


def main() -> None:
    """Two launches of one job, then one that is not stopped: the same losses, bit by bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="the gateway's; default: FOREBAY_ADDRESS, else the default socket")
    parser.add_argument("--run", default="examples/plain-torch")
    parser.add_argument("--compare", type=int, metavar="MIB", help="only measure saves of so many MiB")
    parser.add_argument("--directory", help="where --compare writes files; best on the disk of the gateway's cache")
    parser.add_argument("--s3", metavar="s3://BUCKET/PREFIX", help="--compare with s3torchconnector too")
    arguments = parser.parse_args()
    if arguments.directory and not Path(arguments.directory).is_dir():
        parser.error(f"--directory {arguments.directory}: there is no such directory; make it first")
    if arguments.s3 and "AWS_REGION" not in os.environ:
        parser.error("--s3 needs AWS_REGION in the environment")
    if arguments.s3 and find_spec("s3torchconnector") is None:
        parser.error("--s3 needs s3torchconnector: pip install s3torchconnector")
    if arguments.compare:
        compare(arguments)
        return
    losses = []
    for run, launches in ((arguments.run, (13, 20)), (f"{arguments.run}-whole", (20,))):
        torch.manual_seed(1)
        found: list[float] = []
        for steps in launches:
            with forebay.Client(arguments.address) as client:  # its end waits for what is under way
                found += train(client, run, steps)
        losses.append(found)
    print(f"{len(losses[0])} losses, the same as of a job that did not stop: {losses[0] == losses[1]}")
    with forebay.Client(arguments.address) as client:
        for checkpoint in client.checkpoints(arguments.run):
            levels = " ".join(f"{level.level}:{level.state}" for level in checkpoint.levels)
            print(f"step {checkpoint.step} ({checkpoint.kind}): {checkpoint.shard_count} files, {levels}")


if __name__ == "__main__":
    main()
