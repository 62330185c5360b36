"""Tiny jobs of transformers and Accelerate; `hf_jobs.py ADDRESS DIRECTORY` is one rank of several."""

import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
import transformers

from forebay import ForebayError, NotFound
from forebay.huggingface import ForebayCallback, load_state, resume_from_checkpoint, save_state

RUN = "team/bert"


def tiny(seed: int = 0, width: int = 16) -> Any:
    """A model of a few thousand parameters, with dropout."""
    torch.manual_seed(seed)
    config = transformers.BertConfig(
        vocab_size=40,
        hidden_size=width,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
    )
    return transformers.BertForSequenceClassification(config)


class Rows(torch.utils.data.Dataset[Any]):
    """A few sentences of numbers."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor([index, 3, 5, index % 7]), "labels": torch.tensor(index % 2)}


def arguments(directory: Path, steps: int, **keys: Any) -> Any:
    """Quiet, on the CPU, saving every second step."""
    options = {
        "output_dir": str(directory),
        "max_steps": steps,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 2,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "lr_scheduler_type": "constant",
    }
    return transformers.TrainingArguments(**{**options, **keys})


def losses(trainer: Any) -> dict[int, float]:
    """Each step's."""
    return {entry["step"]: entry["loss"] for entry in trainer.state.log_history if "loss" in entry}


def trainers(address: str, directory: Path) -> None:
    """One trains two steps; another, on a node that has nothing, goes on."""
    for steps, name in ((2, "a"), (4, "b")):
        args = arguments(directory / name, steps, ddp_backend="gloo")
        trainer = transformers.Trainer(tiny(), args, train_dataset=Rows(), callbacks=[ForebayCallback(RUN, address)])
        where = resume_from_checkpoint(RUN, args, address)
        assert where == (str(directory / "b" / "checkpoint-2") if steps == 4 else None)
        trainer.train(resume_from_checkpoint=where)
        assert trainer.state.global_step == steps
        torch.distributed.barrier()  # complete once all have committed


def accelerators(address: str, directory: Path) -> None:
    """Save, draw, load, and draw the same again."""
    accelerator = accelerate.Accelerator(cpu=True)
    torch.manual_seed(accelerator.process_index)
    model = torch.nn.Linear(3, 3)
    torch.nn.init.ones_(model.weight)
    model = accelerator.prepare(model)
    save_state(accelerator, f"{RUN}/accelerate", 4, address)
    accelerator.wait_for_everyone()  # complete once all have committed
    drawn = torch.rand(3)
    torch.nn.init.constant_(accelerator.unwrap_model(model).weight, 7)
    assert load_state(accelerator, f"{RUN}/accelerate", directory, address) == 4
    assert torch.equal(torch.rand(3), drawn)
    assert accelerator.unwrap_model(model).weight.unique().tolist() == [1.0]


def failures(address: str, directory: Path) -> None:
    """An error of the rank that asks, or that brings the files, is everybody's."""
    try:
        resume_from_checkpoint(RUN, directory, address, step=99)
    except ForebayError as error:
        assert isinstance(error, NotFound) or "another rank could not" in str(error), error
    else:
        raise AssertionError("there is no step 99")


def main() -> None:
    """One rank."""
    address, directory = sys.argv[1], Path(sys.argv[2])
    trainers(address, directory)
    accelerators(address, directory)
    failures(address, directory)
    print("WELL")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
