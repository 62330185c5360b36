"""One rank of a Lightning job of two: `lit_jobs.py ADDRESS DIRECTORY`."""

import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from forebay.lightning import ForebayCheckpointIO

RUN = "team/ddp"


class Small(pl.LightningModule):
    """Its losses depend on the weights alone, and on each rank's rows."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.net = torch.nn.Linear(4, 1)
        self.seen: list[float] = []

    def training_step(self, batch: Any, index: int) -> Any:
        """Keep the loss."""
        loss = self.net(batch).square().mean()
        self.seen.append(loss.item())
        return loss

    def configure_optimizers(self) -> Any:
        """With momenta, which a checkpoint has to keep."""
        return torch.optim.AdamW(self.parameters(), lr=0.05)


def trained(steps: int, seed: int, root: Path, plugin: Any = None, resume: str | None = None) -> list[float]:
    """Train on two ranks; this rank's losses."""
    lit = Small(seed)
    trainer = pl.Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=2,
        max_steps=steps,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=plugin is not None,
        default_root_dir=root,
        plugins=[] if plugin is None else [plugin],
        callbacks=[] if plugin is None else [ModelCheckpoint(root / "ckpt", every_n_train_steps=2, save_last=True)],
    )
    rows = torch.arange(64, dtype=torch.float32).reshape(16, 4) / 64
    trainer.fit(lit, torch.utils.data.DataLoader(rows, batch_size=4), ckpt_path=resume)
    return lit.seen


def main() -> None:
    """One job; the same with a stop in between, and what goes on is on a node that has no file of the first."""
    address, directory = sys.argv[1], Path(sys.argv[2])
    plugin = ForebayCheckpointIO(RUN, address, background=True)
    before = trained(4, 1, directory / "a", plugin)
    torch.distributed.barrier()  # rank 0, which saves, has waited for its last save
    resume = plugin.newest()
    assert resume == f"forebay://{RUN}/4/epoch=1-step=4.ckpt", resume
    assert before + trained(8, 2, directory / "b", plugin, resume) == trained(8, 1, directory / "whole")
    print("WELL")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
