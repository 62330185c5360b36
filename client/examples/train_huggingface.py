"""A transformers Trainer whose checkpoints go to a gateway, and come back on a node that has none: a callback more.

    forebay serve &
    python client/examples/train_huggingface.py            # --address, --run

Needs transformers and accelerate; in Forebay's tree, pip install '.[huggingface]'. The model is made from a configuration: no
download.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments

import forebay
from forebay.huggingface import ForebayCallback, from_pretrained, resume_from_checkpoint, save_pretrained


class Rows(torch.utils.data.Dataset[Any]):
    """Any data set."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor([index, 1, 2, index % 5]), "labels": torch.tensor(index % 2)}


def train(run: str, address: str | None, directory: Path, steps: int) -> Any:
    """One launch, up to `steps`; the model."""
    config = BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
    args = TrainingArguments(
        output_dir=str(directory),
        max_steps=steps,
        save_strategy="steps",
        save_steps=5,
        save_total_limit=1,  # on the local disk; what Forebay keeps is the gateway's retention
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    callbacks = [ForebayCallback(run, address, background=True)]
    trainer = Trainer(BertForSequenceClassification(config), args, train_dataset=Rows(), callbacks=callbacks)
    resume = resume_from_checkpoint(run, args, address)
    print(f"goes on from {Path(resume).name}" if resume else "begins")
    trainer.train(resume_from_checkpoint=resume)
    return trainer.model


def main() -> None:
    """Two launches, each on a disk that has nothing; then the model is handed on."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="the gateway's; default: FOREBAY_ADDRESS, else the default socket")
    parser.add_argument("--run", default="examples/huggingface")
    arguments = parser.parse_args()
    for steps in (10, 20):
        with tempfile.TemporaryDirectory() as directory:
            model = train(arguments.run, arguments.address, Path(directory), steps)
    release = f"forebay://{arguments.run}/release/1"
    save_pretrained(model, release, arguments.address)
    loaded = from_pretrained(BertForSequenceClassification, release, arguments.address)
    same = all(map(torch.equal, model.state_dict().values(), loaded.state_dict().values()))
    print(f"{release} is the trained model: {same}")
    with forebay.Client(arguments.address) as client:
        for checkpoint in client.checkpoints(arguments.run):
            print(f"step {checkpoint.step} ({checkpoint.kind}): {checkpoint.shard_count} files")


if __name__ == "__main__":
    main()
