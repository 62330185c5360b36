"""Parts of a training state: whatever they are, they take and give a state dict.

Owns one adapter for each kind of object that has none of its own, and what can be checked before a state is loaded. Does not
own what is done with state dicts (train_state.py).
"""

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch

from forebay.errors import InvalidArgument

SHOWN = 5


class Part:
    """Something with state_dict() and load_state_dict(). `own`: each rank has one of its own."""

    own = False

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> Any:
        """Its state; tensors in it may be the live ones."""
        return self.held.state_dict()

    def load_state_dict(self, state: Any) -> None:
        """Take a state. Raises what the object itself raises."""
        self.held.load_state_dict(state)

    def check(self, state: Any, what: str) -> None:
        """Raise InvalidArgument for a state that this part cannot take, as far as it can be told."""


class _Module(Part):
    def check(self, state: Any, what: str) -> None:
        here = self.held.state_dict()
        if not isinstance(state, Mapping):
            raise InvalidArgument(f"{what}: a {type(state).__name__} was saved, and a module is to be restored")
        wrong = [f"it lacks {key!r}" for key in here if key not in state]
        wrong += [f"it has {key!r}, which the module has not" for key in state if key not in here]
        wrong += [
            f"{key!r} is {_shown(state[key])} in it and {_shown(value)} in the module"
            for key, value in here.items()
            if key in state and _shown(state[key]) != _shown(value)
        ]
        if wrong:
            more = f"; and {len(wrong) - SHOWN} more" if len(wrong) > SHOWN else ""
            raise InvalidArgument(f"{what} does not fit: {'; '.join(wrong[:SHOWN])}{more}")


class _Optimizer(Part):
    def check(self, state: Any, what: str) -> None:
        saved = [len(group["params"]) for group in state.get("param_groups", ())] if isinstance(state, Mapping) else []
        here = [len(group["params"]) for group in self.held.param_groups]
        if saved != here:
            raise InvalidArgument(f"{what} does not fit: groups of {saved} parameters in it, and of {here} here")


class _Loader(Part):
    """A loader that prepares its iterator only when it is first iterated draws a seed then. It is made to do so before the
    generators get their state back: the job that went on had done so already."""

    own = True

    def load_state_dict(self, state: Any) -> None:
        super().load_state_dict(state)
        self.held.state_dict()


class _Dict(Part):
    def state_dict(self) -> Any:
        return self.held

    def load_state_dict(self, state: Any) -> None:
        self.held.clear()
        self.held.update(state)

    def check(self, state: Any, what: str) -> None:
        if not isinstance(state, Mapping):
            raise InvalidArgument(f"{what}: a {type(state).__name__} was saved, and a dict is to be restored")


class _PythonGenerator(Part):
    own = True

    def state_dict(self) -> Any:
        return self.held.getstate()

    def load_state_dict(self, state: Any) -> None:
        self.held.setstate(state)


class _NumpyGenerator(Part):
    own = True

    def state_dict(self) -> Any:
        return self.held.bit_generator.state

    def load_state_dict(self, state: Any) -> None:
        self.held.bit_generator.state = state


class _TorchGenerator(Part):
    own = True

    def state_dict(self) -> Any:
        return self.held.get_state()

    def load_state_dict(self, state: Any) -> None:
        self.held.set_state(state)


def adapted(name: str, part: Any) -> Part:
    """The part for an object. Raises InvalidArgument for one that has no state."""
    numpy = sys.modules.get("numpy")
    if isinstance(part, torch.nn.Module):
        return _Module(part)
    if isinstance(part, torch.optim.Optimizer):
        return _Optimizer(part)
    if isinstance(part, torch.Generator):
        return _TorchGenerator(part)
    if isinstance(part, random.Random):
        return _PythonGenerator(part)
    if numpy is not None and isinstance(part, numpy.random.Generator):
        return _NumpyGenerator(part)
    if callable(getattr(part, "state_dict", None)) and callable(getattr(part, "load_state_dict", None)):
        return _Loader(part) if type(part).__module__.partition(".")[0] == "torchdata" or _is_loader(part) else Part(part)
    if isinstance(part, dict):
        return _Dict(part)
    raise InvalidArgument(
        f"{name}: a {type(part).__module__}.{type(part).__qualname__} has no state_dict() and load_state_dict(), and is no "
        "dict and no generator"
    )


def _is_loader(part: Any) -> bool:
    return isinstance(part, torch.utils.data.DataLoader)


def _shown(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
