"""torch.distributed.checkpoint by one process: to files, as a training loop does without a gateway, or through forebay.torch.

Owns the tensors, and one save, one save beside training and one load of them. FileSystemWriter fsyncs, as DCP does by default.
"""

import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.harness import BLOCK, TIMEOUT_S, measure
from bench.rows import CannotRun, Measured

THREADS = 2


def needs_torch() -> None:
    """Raise CannotRun without torch."""
    if find_spec("torch") is None:
        raise CannotRun("torch is not installed (pip: torch)")


def tensors(view: memoryview) -> dict[str, Any]:
    """The data as a state dict of tensors, in place."""
    import torch

    return {
        f"layers.{at // BLOCK}.weight": torch.frombuffer(view[at : at + BLOCK], dtype=torch.uint8).view(torch.float32)
        for at in range(0, view.nbytes, BLOCK)
    }


def save(state: dict[str, Any], directory: Path) -> Measured:
    """Save and fsync; the files are gone afterwards."""
    taken = saved(state, file_writer(directory))
    shutil.rmtree(directory)
    return taken


def file_writer(directory: Path) -> Any:
    """DCP's own for a directory."""
    import torch.distributed.checkpoint as dcp

    return dcp.FileSystemWriter(directory, thread_count=THREADS)


def saved(state: dict[str, Any], writer: Any, *pids: int) -> Measured:
    """One dcp.save."""
    import torch.distributed.checkpoint as dcp

    def act() -> None:
        with warnings.catch_warnings(action="ignore"):  # it remarks on there being no process group
            dcp.save(state, storage_writer=writer, no_dist=True)

    return measure(act, *pids)


def blocked(state: dict[str, Any], writer: Any, checkpoint_id: str | None = None) -> Measured:
    """How long one dcp.async_save keeps the trainer; what it saves has been saved when this returns."""
    import torch.distributed.checkpoint as dcp

    saving: list[Any] = []

    def act() -> None:
        saving.append(dcp.async_save(state, checkpoint_id=checkpoint_id, storage_writer=writer, no_dist=True))

    with warnings.catch_warnings(action="ignore"):
        taken = measure(act)
        saving[0].result(TIMEOUT_S)
    return taken


def loaded(state: dict[str, Any], reader: Any, *pids: int) -> Measured:
    """One dcp.load into tensors that are there."""
    import torch.distributed.checkpoint as dcp

    def act() -> None:
        with warnings.catch_warnings(action="ignore"):
            dcp.load(state, storage_reader=reader, no_dist=True)

    return measure(act, *pids)
