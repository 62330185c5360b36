"""What differs between releases of torch, from 2.6 to the newest: everything that one has and another has not is asked here.

Owns those questions. What DCP passes to a method in one release only (`rank`, `use_collectives`: from 2.9 on) is in the method.
"""

import functools
import gc
import io
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem as dcp
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem, SavePlan

from forebay.errors import Unsupported

_transforms: Any = dcp._StorageReaderTransforms() if hasattr(dcp, "_StorageReaderTransforms") else None


def transforms_of(info: Any) -> Sequence[str]:
    """How a stored item's bytes were transformed, as .metadata says it; torch 2.6 says nothing, nor does what it saved."""
    return getattr(info, "transform_descriptors", None) or ()


def transformed(item: ReadItem, transforms: Sequence[str], stream: Any) -> Any:
    """The stream that an item's plain bytes come from. Raises Unsupported where this torch cannot transform (2.6)."""
    if _transforms is not None:
        return _transforms.transform_load_stream(item, transforms, stream)
    if transforms:
        raise Unsupported(f"{item.storage_index.fqn} was saved through {', '.join(transforms)}, which needs torch 2.7 or newer")
    return stream


def stamp(metadata: Metadata) -> None:
    """Write DCP's own version into the metadata, where this torch has one there."""
    if (version := getattr(dcp, "CURRENT_DCP_VERSION", None)) is not None:
        metadata.version = version


def tells_items(plan: SavePlan) -> bool:
    """Whether a plan says what is in it: one that a planner has cached does not. Older planners cache none."""
    return getattr(plan, "usable", True)


def let_go() -> None:
    """After torch.save of something large: older releases leave it in a cycle of references, and there a whole file of copied
    tensors would stay in memory until a collection happens to run."""
    if _save_keeps():
        gc.collect(1)


@functools.cache
def _save_keeps() -> bool:
    tensor = torch.zeros(1)
    storage = weakref.ref(tensor.untyped_storage())
    torch.save(tensor, io.BytesIO())
    del tensor
    return storage() is not None
