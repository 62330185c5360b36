"""Ranks that know directories only, each handing over what it wrote: one step of four writers, and back.

    forebay serve &
    python client/examples/directory.py            # --address, --run, --ranks

Each rank would be a process of its own, under a launcher that sets the session (torchrun, Slurm), and have its own node's
gateway.
"""

import argparse
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import forebay


def write_checkpoint(directory: Path, rank: int) -> None:
    """Stands for a library: what it is given is a path."""
    (directory / f"rank{rank}").mkdir()
    (directory / f"rank{rank}" / "weights.bin").write_bytes(os.urandom(2 << 20))
    if rank == 0:
        (directory / "config.json").write_text(json.dumps({"hidden": 4096}))


def main() -> None:
    """Saved by all ranks at once, read by one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", help="the gateway's; default: FOREBAY_ADDRESS, else the default socket")
    parser.add_argument("--run", default="examples/directory")
    parser.add_argument("--ranks", type=int, default=4)
    arguments = parser.parse_args()

    def save(rank: int) -> None:
        with forebay.directory(
            arguments.run, 100, writers=arguments.ranks, writer=rank, session="launch-1", address=arguments.address
        ) as path:
            write_checkpoint(path, rank)

    with ThreadPoolExecutor(arguments.ranks) as pool:
        list(pool.map(save, range(arguments.ranks)))
    with forebay.directory(arguments.run, "latest", mode="r", address=arguments.address) as path:
        for file in sorted(each for each in path.rglob("*") if each.is_file()):
            print(f"{file.relative_to(path)}: {file.stat().st_size} bytes")


if __name__ == "__main__":
    main()
