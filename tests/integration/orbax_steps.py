"""Orbax through a gateway, in a process of its own: once JAX is imported, it warns of every fork that another test makes.

python orbax_steps.py ADDRESS UNDER LANE TIER
"""

import sys
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

import forebay

STATE: dict[str, Any] = {
    "weights": jax.numpy.arange(600_000.0).reshape(600, 1000),
    "bias": jax.numpy.ones((3,), "bfloat16"),
    "step": 7,
    "nothing": {},
}


def main(address: str, under: Path, lane: str, tier: Path) -> None:
    """Both checkpointers, with OCDBT, and the manager; restored from the cache and from the tier's plain files."""
    with forebay.directory("orbax", 1, address=address, under=under, lane=lane, wait="pfs", timeout=60) as path:
        with ocp.StandardCheckpointer() as standard:
            standard.save(path / "standard", STATE)
        ocp.PyTreeCheckpointer(use_ocdbt=True).save(path / "tree", STATE)
        with ocp.CheckpointManager(path / "manager") as manager:
            manager.save(5, args=ocp.args.StandardSave(STATE))
            manager.wait_until_finished()
        written = _files(path)
    assert any(name.endswith("manifest.ocdbt") for name in written)
    with forebay.directory("orbax", "latest", mode="r", address=address, under=under, lane=lane) as path:
        assert _files(path) == written
        with ocp.StandardCheckpointer() as standard:
            _check(standard.restore(path / "standard"))
        _check(ocp.PyTreeCheckpointer(use_ocdbt=True).restore(path / "tree"))
        with ocp.CheckpointManager(path / "manager") as manager:
            assert manager.latest_step() == 5
            _check(manager.restore(5, args=ocp.args.StandardRestore(STATE)))
    (plain,) = (tier / "orbax").glob("step-*/current")
    with ocp.StandardCheckpointer() as standard:
        _check(standard.restore(plain.resolve() / "standard"))
    print("all restored")


def _check(found: Any) -> None:
    pairs = jax.tree.map(lambda one, other: bool((jax.numpy.asarray(one) == other).all()), found, STATE)
    assert jax.tree.all(pairs)


def _files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3], Path(sys.argv[4]))
