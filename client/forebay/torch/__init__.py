"""torch.distributed.checkpoint on Forebay: `dcp.save`, `dcp.async_save` and `dcp.load` through a gateway.

    dcp.save(state_dict, storage_writer=ForebayStorageWriter(run="team-a/llama-70b", step=100))
    dcp.load(state_dict, storage_reader=ForebayStorageReader(run="team-a/llama-70b", step="latest"))

Owns the two storage classes that DCP calls. Does not own planning (DCP's planners) nor how bytes travel (the client). Needs
torch, which `import forebay` does not.
"""

from forebay.errors import how_to_install

try:
    import torch.distributed.checkpoint  # noqa: F401
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "torch":
        raise
    raise ImportError(f"forebay.torch needs PyTorch, which is not installed: {how_to_install('torch')}") from error

from forebay.torch.reader import ForebayStorageReader
from forebay.torch.staging import WarmStager
from forebay.torch.writer import ForebayStorageWriter

__all__ = ["ForebayStorageReader", "ForebayStorageWriter", "WarmStager"]
