"""`forebay://RUN/STEP/NAME` for everything that speaks fsspec: pandas, torch, safetensors, DCP's FsspecWriter, ...

    fs = fsspec.filesystem("forebay")  # FOREBAY_ADDRESS, else the default socket
    with fs.transaction:
        frame.to_parquet("forebay://team-a/llama-70b/100/stats.parquet")
    fs.cat_file("forebay://team-a/llama-70b/latest/stats.parquet", 0, 4)

Owns paths, steps that are being written, and files. Does not own how bytes travel (the client). Needs fsspec, which
`import forebay` does not.
"""

from forebay.errors import how_to_install

try:
    import fsspec
except ModuleNotFoundError as error:
    if error.name != "fsspec":
        raise
    raise ImportError(f"forebay.fsspec needs fsspec, which is not installed: {how_to_install('fsspec')}") from error

from forebay.fsspec.errors import StepCommitted
from forebay.fsspec.filesystem import ForebayFileSystem

__all__ = ["ForebayFileSystem", "StepCommitted"]

# The package's entry point does this too; not where the package runs from a tree that was never installed.
fsspec.register_implementation("forebay", ForebayFileSystem, clobber=True)
