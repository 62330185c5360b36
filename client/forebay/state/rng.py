"""The state of random number generators: Python's, NumPy's old global one, torch's of the CPU and of the accelerators.

Owns taking and setting it. Does not own generators that a program makes itself: these are parts of a state (train_state.py).
"""

import logging
import random
import sys
from typing import Any

import torch

_log = logging.getLogger("forebay")


def take() -> dict[str, Any]:
    """Of all that are there; NumPy's where it has been imported."""
    taken: dict[str, Any] = {"python": random.getstate(), "torch": torch.get_rng_state()}
    if "numpy" in sys.modules:
        import numpy

        taken["numpy"] = numpy.random.get_state()
    if (found := _accelerator()) is not None:
        kind, module = found
        states = module.get_rng_state_all() if hasattr(module, "get_rng_state_all") else [module.get_rng_state()]
        taken["devices"] = {"kind": kind, "states": list(states)}
    return taken


def put(taken: dict[str, Any]) -> None:
    """Set what take() gave. Of more or other devices than are here it sets what it can, and logs what it cannot."""
    random.setstate(taken["python"])
    torch.set_rng_state(taken["torch"])
    if "numpy" in taken:
        import numpy

        numpy.random.set_state(taken["numpy"])
    if "devices" in taken:
        _put_devices(taken["devices"]["kind"], taken["devices"]["states"])


def _put_devices(kind: str, states: list[torch.Tensor]) -> None:
    found = _accelerator()
    count = found[1].device_count() if found is not None and found[0] == kind else 0
    if found is None or count < len(states):
        _log.warning("the state of %d %s generators was saved, and %d are here to take it", len(states), kind, count)
    if found is None:
        return
    for index, state in enumerate(states[:count]):
        if hasattr(found[1], "get_rng_state_all"):
            found[1].set_rng_state(state, index)
        else:
            found[1].set_rng_state(state)


def _accelerator() -> tuple[str, Any] | None:
    """The kind of this machine's accelerators and torch's module for it."""
    accelerator = getattr(torch, "accelerator", None)  # torch 2.6
    if accelerator is None or not accelerator.is_available():
        return None
    kind: str = accelerator.current_accelerator().type
    module = torch.get_device_module(kind)
    return (kind, module) if hasattr(module, "get_rng_state") else None
