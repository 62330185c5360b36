"""torch DCP's FileSystemWriter: what a training loop does without a gateway.

Owns the tensors and one save of them by one process, fsynced as DCP does by default.
"""

import shutil
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from bench.harness import BLOCK, measure
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
    import torch.distributed.checkpoint as dcp

    def act() -> None:
        with warnings.catch_warnings(action="ignore"):  # it remarks on there being no process group
            dcp.save(state, storage_writer=dcp.FileSystemWriter(directory, thread_count=THREADS), no_dist=True)

    taken = measure(act)
    shutil.rmtree(directory)
    return taken
