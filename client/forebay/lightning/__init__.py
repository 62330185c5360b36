"""PyTorch Lightning on Forebay: `Trainer(plugins=[ForebayCheckpointIO("team-a/llama-70b")])`, all else as it was.

Owns the plugin that Lightning's strategies save and load through. Does not own when to save and what is kept (ModelCheckpoint)
nor how bytes travel (the client). Serves `lightning` and `pytorch_lightning`, which `import forebay` does not need.
"""

from importlib.util import find_spec

from forebay.errors import how_to_install

if not any(find_spec(name) for name in ("lightning", "pytorch_lightning", "lightning_fabric")):
    raise ImportError(f"forebay.lightning needs Lightning, which is not installed: {how_to_install('lightning')}")

from forebay.lightning.checkpoint_io import ForebayCheckpointIO

__all__ = ["ForebayCheckpointIO"]
