"""s3torchconnector: a training loop that writes its checkpoint to the object store itself.

Owns one save of the files' bytes, in a process of its own, whose environment holds the server's key.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from bench.peers.bucket import own_bucket
from bench.rows import CannotRun, Measured
from forebay.demo.seaweedfs import REGION, SeaweedFS

# Bytes are in memory before the clock starts: a trainer has them there.
PROGRAM = """
import json, sys, time
from pathlib import Path
from s3torchconnector import S3Checkpoint, S3ClientConfig
endpoint, region, bucket, *paths = sys.argv[1:]
checkpoint = S3Checkpoint(region=region, endpoint=endpoint, s3client_config=S3ClientConfig(force_path_style=True))
contents = {Path(path).name: Path(path).read_bytes() for path in paths}
cpu_s, began_s = time.process_time(), time.perf_counter()
for name, content in contents.items():
    with checkpoint.writer(f"s3://{bucket}/{name}") as writer:
        for at in range(0, len(content), 4 << 20):
            writer.write(content[at : at + (4 << 20)])
print(json.dumps([time.perf_counter() - began_s, time.process_time() - cpu_s]))
"""


def needs_connector() -> None:
    """Raise CannotRun where it cannot be imported."""
    for name in ("s3torchconnector", "torch"):
        if find_spec(name) is None:
            raise CannotRun(f"{name} is not installed (pip: {name})")


def save(server: SeaweedFS, paths: list[Path]) -> Measured:
    """Write the files' bytes into a bucket of their own, which is gone afterwards."""
    with own_bucket(server, paths) as bucket:
        command = [sys.executable, "-c", PROGRAM, server.endpoint, REGION, bucket, *map(str, paths)]
        os.sync()
        done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **server.environment})
        if done.returncode:
            raise CannotRun(f"s3torchconnector failed: {done.stderr.strip().splitlines()[-1][-300:]}")
        seconds, cpu_s = json.loads(done.stdout)
        return Measured(seconds, cpu_s)
