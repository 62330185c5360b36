"""A training state as torch.distributed.checkpoint takes it: models and optimizers by parameter names, sharded as they are.

Owns which parts go that way. All others are JSON in one value each: DCP wants to know the keys of what it loads beforehand, and
the state of a loader has other keys at each step.
"""

import json
import logging
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, LoadPlan
from torch.distributed.checkpoint import state_dict as of

from forebay.errors import InvalidArgument
from forebay.state.document import Inline, decode, encode, inline
from forebay.state.parts import Part

_OWN = re.compile(r"(.*\.)?rank-\d{5,}")  # what a rank has of its own, wherever the state lies

_log = logging.getLogger("forebay")

Sharded = dict[str, tuple[torch.nn.Module, torch.optim.Optimizer | None]]


def split(parts: Mapping[str, Part]) -> tuple[Sharded, dict[str, Part]]:
    """The modules, and the optimizers with the module whose parameters they hold; and all other parts."""
    modules = {name: part.held for name, part in parts.items() if isinstance(part.held, torch.nn.Module)}
    sharded: Sharded = {name: (module, None) for name, module in modules.items()}
    for name, part in parts.items():
        if isinstance(part.held, torch.optim.Optimizer):
            sharded[name] = (_module_of(name, part.held, modules), part.held)
    return sharded, {name: part for name, part in parts.items() if name not in sharded}


def _module_of(name: str, optimizer: torch.optim.Optimizer, modules: Mapping[str, torch.nn.Module]) -> torch.nn.Module:
    held = {id(each) for group in optimizer.param_groups for each in group["params"]}
    for module in modules.values():
        if held <= {id(each) for each in module.parameters()}:
            return module
    raise InvalidArgument(f"{name}: no module of this state has the parameters that this optimizer holds")


def sharded_state(sharded: Sharded) -> dict[str, Any]:
    """Their state dicts by name."""
    return {
        name: of.get_model_state_dict(module) if optimizer is None else of.get_optimizer_state_dict(module, optimizer)
        for name, (module, optimizer) in sharded.items()
    }


def load_sharded_state(sharded: Sharded, state: Mapping[str, Any]) -> None:
    """What sharded_state() gave. Raises what torch raises for what does not fit."""
    for name, (module, optimizer) in sharded.items():
        if optimizer is None:
            of.set_model_state_dict(module, state[name])
        else:
            of.set_optimizer_state_dict(module, optimizer, state[name])


def text(state: Any) -> str:
    """As JSON, tensors in it."""
    return json.dumps(encode(state, "state", Inline()), separators=(",", ":"), allow_nan=False)


def of_text(written: str) -> Any:
    """What text() was given."""
    return decode(json.loads(written), inline)


class FewerRanksPlanner(DefaultLoadPlanner):  # type: ignore[misc, unused-ignore]
    """DCP's own, which passes over what a rank would have of its own where it was not there to save it. All else is needed."""

    def create_local_plan(self) -> LoadPlan:
        """As DefaultLoadPlanner."""
        saved = () if self.metadata is None else self.metadata.state_dict_metadata
        for key in [key for key in self.state_dict if _OWN.fullmatch(key) and key not in saved]:
            _log.warning("%r was not saved: there were fewer ranks; this rank's generators and loaders stay as they are", key)
            del self.state_dict[key]
        return super().create_local_plan()
