"""A Lightning Trainer whose ModelCheckpoint saves through a gateway: one argument more.

    forebay serve &
    python client/examples/train_lightning.py            # --address, --run

Needs Lightning; in Forebay's tree, pip install '.[lightning]'.
"""

import argparse
import tempfile
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

import forebay
from forebay.lightning import ForebayCheckpointIO


class Model(pl.LightningModule):
    """Any LightningModule."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: Any, index: int) -> Any:
        """One step."""
        loss = self.net(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        """One optimizer."""
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def train(plugin: ForebayCheckpointIO, directory: Path, steps: int) -> None:
    """One launch, up to `steps`; it goes on from the newest checkpoint, on whatever node it is."""
    keep = ModelCheckpoint(directory, every_n_train_steps=8, monitor="loss", save_top_k=2)
    trainer = pl.Trainer(
        plugins=[plugin],
        callbacks=[keep],
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    resume = plugin.newest()
    print(f"goes on from {resume}" if resume else "begins")
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.rand(64, 8), batch_size=8), ckpt_path=resume)


def main() -> None:
    """Two launches, each as on a node of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="the gateway's; default: FOREBAY_ADDRESS, else the default socket")
    parser.add_argument("--run", default="examples/lightning")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", module="lightning")
    for steps in (16, 32):
        with tempfile.TemporaryDirectory() as directory:
            train(ForebayCheckpointIO(arguments.run, arguments.address, background=True), Path(directory), steps)
    with forebay.Client(arguments.address) as client:
        for checkpoint in client.checkpoints(arguments.run):
            print(f"step {checkpoint.step}: {', '.join(client.open(arguments.run, checkpoint.step).names())}")


if __name__ == "__main__":
    main()
