"""safetensors files as shards: saved from the tensors' own memory, read tensor by tensor.

    save_file(tensors, "team-a/llama-70b", 100, metadata={"format": "pt"})     # or "forebay://team-a/llama-70b/100"
    tensors = load_file("team-a/llama-70b", "latest")
    with safe_open("team-a/llama-70b", 100) as file:
        rows = file.get_slice("embedding")[1000:2000]                           # reads these rows' bytes alone

Owns the layout of a file on its way to a gateway and back; what is written is what safetensors itself would write, so that
anything that reads these files reads them from a tier. Does not own how bytes travel (the client). Needs safetensors, and
torch or numpy, which `import forebay` does not.
"""

from forebay.errors import how_to_install

try:
    import numpy  # noqa: F401
    import safetensors as _host
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] not in ("safetensors", "numpy"):
        raise
    raise ImportError(
        f"forebay.safetensors needs {error.name}, which is not installed: {how_to_install('safetensors')}"
    ) from error

from forebay.safetensors.read import TensorFile, TensorSlice, load_file, safe_open
from forebay.safetensors.write import save_file, serialized

SafetensorError: type[Exception] = _host.SafetensorError

__all__ = ["SafetensorError", "TensorFile", "TensorSlice", "load_file", "safe_open", "save_file", "serialized"]
