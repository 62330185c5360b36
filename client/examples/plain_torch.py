"""A plain PyTorch loop that is stopped in the middle of an epoch, and goes on as if it had not been.

    forebay serve &
    python client/examples/plain_torch.py            # --address, --run

Needs torch and torchdata, whose loader knows where it is: pip install 'forebay[torch]' torchdata.
"""

import argparse

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

import forebay


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


def main() -> None:
    """Two launches of one job, then one that is not stopped: the same losses, bit by bit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="the gateway's; default: FOREBAY_ADDRESS, else the default socket")
    parser.add_argument("--run", default="examples/plain-torch")
    arguments = parser.parse_args()
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
