"""A bucket for one act of a peer.

Owns making it, proving that every byte arrived, and dropping it with all it holds, which frees the server's disk at once.
"""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

from bench.harness import drop_caches
from forebay.demo.seaweedfs import SeaweedFS


@contextlib.contextmanager
def own_bucket(server: SeaweedFS, paths: list[Path]) -> Iterator[str]:
    """Its name; the files to copy are not in memory when the block begins."""
    name = f"peer-{uuid.uuid4().hex[:12]}"
    client = server.client()
    try:
        client.create_bucket(Bucket=name)
        try:
            drop_caches(*paths)
            yield name
            listed = client.list_objects_v2(Bucket=name)
            arrived = sum(entry["Size"] for entry in listed.get("Contents", ()))
            sent = sum(path.stat().st_size for path in paths)
            if arrived < sent:
                raise AssertionError(f"the peer sent {sent} bytes, the server has {arrived}")
        finally:
            with contextlib.suppress(client.exceptions.NoSuchBucket):
                client.delete_bucket(Bucket=name)
    finally:
        client.close()
