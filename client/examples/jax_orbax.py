"""A JAX state saved by Orbax through a gateway, and back.

    forebay serve &
    python client/examples/jax_orbax.py            # --address, --run

Needs jax and orbax-checkpoint.
"""

import argparse

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

import forebay


def main() -> None:
    """Three steps saved, the newest restored."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="the gateway's; default: FOREBAY_ADDRESS, else the default socket")
    parser.add_argument("--run", default="examples/orbax")
    arguments = parser.parse_args()
    state = {"weights": jnp.zeros((512, 512)), "bias": jnp.zeros(512, jnp.bfloat16), "step": 0}
    with forebay.Client(arguments.address) as client, ocp.StandardCheckpointer() as checkpointer:
        for step in range(1, 4):
            state = {"weights": state["weights"] + step, "bias": state["bias"] - 1, "step": step}
            with forebay.directory(arguments.run, step, client=client) as path:
                checkpointer.save(path / "state", state)
                checkpointer.wait_until_finished()  # it writes in the background: the block must not end before
        with forebay.directory(arguments.run, "latest", mode="r", client=client) as path:
            restored = checkpointer.restore(path / "state", jax.tree.map(ocp.utils.to_shape_dtype_struct, state))
    assert jax.tree.all(jax.tree.map(lambda one, other: bool((one == other).all()), jax.tree.map(jnp.asarray, restored), state))
    print(f"goes on from step {restored['step']} with weights of {float(restored['weights'][0, 0])}")


if __name__ == "__main__":
    main()
