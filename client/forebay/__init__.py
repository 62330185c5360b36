"""The client: save checkpoints to a gateway, restore them from anywhere.

Errors and records are here at once; Client and AsyncClient bring gRPC with them and are loaded when first asked for, so that
a training script that only catches `forebay.ForebayError` pays nothing.
"""

from typing import TYPE_CHECKING, Any

from forebay.errors import (
    AlreadyExists,
    CacheFull,
    Corrupt,
    DeadlineExceeded,
    ForebayError,
    Incomplete,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from forebay.types import (
    Checkpoint,
    CommitReceipt,
    Deletion,
    Level,
    Missing,
    NotReached,
    Policy,
    Preempted,
    Pressure,
    Receipt,
    RestoreSummary,
    Run,
    SaveSummary,
    Shard,
    TierBacklog,
    WaitProgress,
)

if TYPE_CHECKING:
    from forebay.adaptive import AdaptiveInterval
    from forebay.aio import AsyncCheckpointWriter, AsyncClient, AsyncReader
    from forebay.aio_background import AsyncBackgroundCheckpoint, AsyncPending
    from forebay.aio_care import AsyncCare
    from forebay.api import Client
    from forebay.background_checkpoint import BackgroundCheckpoint, PendingCommit
    from forebay.care import Care
    from forebay.handoff import directory
    from forebay.pending import Pending
    from forebay.preemption import Preemption
    from forebay.reader import Reader
    from forebay.train_state import TrainState
    from forebay.writer import CheckpointWriter

__all__ = [
    "AdaptiveInterval",
    "AlreadyExists",
    "AsyncBackgroundCheckpoint",
    "AsyncCare",
    "AsyncCheckpointWriter",
    "AsyncClient",
    "AsyncPending",
    "AsyncReader",
    "BackgroundCheckpoint",
    "CacheFull",
    "Care",
    "Checkpoint",
    "CheckpointWriter",
    "Client",
    "CommitReceipt",
    "Corrupt",
    "DeadlineExceeded",
    "Deletion",
    "ForebayError",
    "Incomplete",
    "InvalidArgument",
    "Level",
    "Missing",
    "NotFound",
    "NotReached",
    "Pending",
    "PendingCommit",
    "PermissionDenied",
    "Policy",
    "Preempted",
    "Preemption",
    "Pressure",
    "Reader",
    "Receipt",
    "RestoreSummary",
    "Run",
    "SaveSummary",
    "Shard",
    "TierBacklog",
    "TrainState",
    "Unavailable",
    "Unsupported",
    "WaitProgress",
    "__version__",
    "directory",
]

_LAZY = {
    "AdaptiveInterval": "forebay.adaptive",
    "AsyncBackgroundCheckpoint": "forebay.aio_background",
    "AsyncCare": "forebay.aio_care",
    "AsyncCheckpointWriter": "forebay.aio",
    "AsyncClient": "forebay.aio",
    "AsyncPending": "forebay.aio_background",
    "AsyncReader": "forebay.aio",
    "BackgroundCheckpoint": "forebay.background_checkpoint",
    "Care": "forebay.care",
    "CheckpointWriter": "forebay.writer",
    "Client": "forebay.api",
    "Pending": "forebay.pending",
    "PendingCommit": "forebay.background_checkpoint",
    "Preemption": "forebay.preemption",
    "Reader": "forebay.reader",
    "directory": "forebay.handoff",
    "TrainState": "forebay.train_state",
}


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("forebay")
    raise AttributeError(f"module 'forebay' has no attribute {name!r}")
