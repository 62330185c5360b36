"""The disk's own rate, as fio measures it: 4 MiB, O_DIRECT, libaio, depth 4, and for writes the fsync at the end."""

import json
import subprocess
from pathlib import Path

from bench.bare_grpc import Measured

FIO = "fio O_DIRECT, depth 4"


def fio(path: Path, size: int, direction: str) -> Measured:
    """One run over one file, which a write leaves for reads."""
    made = subprocess.run(
        [
            "fio",
            "--name=f",
            f"--filename={path}",
            f"--size={size}",
            "--bs=4M",
            f"--rw={direction}",
            "--direct=1",
            "--ioengine=libaio",
            "--iodepth=4",
            "--end_fsync=1",
            "--output-format=json",
        ],
        capture_output=True,
        text=True,
        check=True,
    )
    job = json.loads(made.stdout)["jobs"][0]
    return Measured(job["job_runtime"] / 1000, (job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000)
