"""What the ranks of a job have to agree on, by torch.distributed where it has been initialised.

Owns this process's rank, and asking one rank for all. Does not own which question that is.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

_Value = TypeVar("_Value")


def place() -> tuple[int, int]:
    """This process's rank and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def agreed(ask: Callable[[], _Value]) -> _Value:
    """What rank 0 is told; all ranks call it. An error of it is every rank's: nobody waits for one that has failed."""
    rank, count = place()
    if count == 1:
        return ask()
    said: list[Any] = [None, None]
    if rank == 0:
        try:
            said[0] = ask()
        except Exception as error:  # noqa: BLE001 - the others wait to hear of it
            said[1] = error
    dist.broadcast_object_list(said, src=0)
    if said[1] is not None:
        raise said[1]
    return said[0]  # type: ignore[no-any-return]


def everybodys(value: _Value) -> list[_Value]:
    """What each rank says; all call it, and return once all have."""
    count = place()[1]
    if count == 1:
        return [value]
    said: list[Any] = [None] * count
    dist.all_gather_object(said, value)
    return said
