"""How large a checkpoint is, from what is trained and how.

Owns the table of optimizers and types. Sizes are bytes of the whole checkpoint, over all nodes; replicas are saved once.
"""

from dataclasses import dataclass

DTYPES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
# Bytes a parameter of what the optimizer keeps, beside master weights. Factored and 8-bit ones: with scales for blocks of 256
# (two floats), and row and column sums of matrices of 4,096.
OPTIMIZERS = {
    "adam": (8.0, "two moments in fp32"),
    "adamw": (8.0, "two moments in fp32"),
    "adam8bit": (2.0 + 8 / 256, "two moments in 8 bits, scales for blocks of 256"),
    "lion": (4.0, "one moment in fp32"),
    "muon": (4.0, "one moment in fp32"),
    "sgd-momentum": (4.0, "one moment in fp32"),
    "adafactor": (8 / 4096, "row and column sums in fp32, matrices of 4,096"),
    "sgd": (0.0, "keeps nothing"),
    "none": (0.0, "not saved: weights alone"),
}
SCHEDULER_BYTES = 4 << 10  # the whole job's: a dictionary of numbers
RNG_BYTES = 16 << 10  # a rank's: PyTorch (5,056 bytes and 16 a device), numpy (2,500), Python (625 words, pickled)
LOADER_BYTES = 64 << 10  # a rank's: position, shuffle seed, a few buffers; one that keeps an index of samples needs more


@dataclass(frozen=True, slots=True)
class Item:
    """One line of the breakdown."""

    name: str
    bytes: int
    note: str


def breakdown(
    parameters: int, dtype: str, optimizer: str, ranks: int, *, master: bool | None = None, loader_bytes: int = LOADER_BYTES
) -> tuple[Item, ...]:
    """What is in a checkpoint. `master`: whether fp32 master weights are kept; None: where the dtype has less than 32 bits and
    there is an optimizer. Raises KeyError for a dtype or optimizer that is not in the tables."""
    width = DTYPES[dtype]
    moments, note = OPTIMIZERS[optimizer]
    if master is None:
        master = width < 4 and optimizer != "none"
    return (
        Item("weights", parameters * width, f"{dtype}, {width} bytes each"),
        Item("gradients", 0, f"not saved: {parameters * width:,} bytes are computed anew each step"),
        Item("moments", round(parameters * moments), f"{optimizer}: {note}"),
        Item("master weights", 4 * parameters if master else 0, "fp32, 4 bytes each" if master else "none"),
        Item("scheduler", SCHEDULER_BYTES if optimizer != "none" else 0, "once"),
        Item("RNG", ranks * RNG_BYTES, f"{ranks:,} ranks, {RNG_BYTES >> 10} KiB each"),
        Item("loader", ranks * loader_bytes, f"{ranks:,} ranks, {loader_bytes:,} bytes each"),
    )
