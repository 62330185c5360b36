"""The disk fails while the gateway starts, with files there that its catalog does not know: it starts, or says in one line why
not; and the next start finds all that was acknowledged.

FOREBAY_SOAK=1 tries every call with every error at many places; without it a few stand for them.
"""

import re
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest

from crash.disks import DiskBench, need, start_with_faults
from crash.kit import MIDDLE, RUN, SMALL
from soak.figures import reported
from soak.form import SOAK

FOOTERS = "pread64,preadv,preadv2"
SIZES = {"a": MIDDLE, "b": SMALL, "empty": 0}
# "files" are the sealed shards and parts, which the start has to judge; "all" is every name below the cache.
# Footers and indexes are read with preadv2, documents with read; the third name is opened before anything is judged.
FEW = (("files", FOOTERS, "EIO", "1+"), ("files", "read", "EIO", "1+"), ("all", "fallocate", "ENOSPC", "1"))
CALLS = (
    FOOTERS,
    "openat",
    "getdents64",
    "read",
    "pwrite64,pwritev",
    "fsync,fdatasync",
    "unlink",
    "rename",
    "mkdir",
    "fallocate",
)
EVERY = tuple(
    (where, call, error, when)
    for where in ("files", "all")
    for call in CALLS
    for error in ("EIO", "ENOSPC")
    for when in ("1", "2", "3", "5", "1+", "4+")
)


@pytest.mark.timeout(120 + 20 * len(EVERY if SOAK else FEW))
def test_a_start_on_a_failing_disk_drops_nothing(tmp_path: Path) -> None:
    need("strace")
    with ExitStack() as stack:
        bench = DiskBench(tmp_path, tmp_path)
        stack.callback(bench.gateway.close)
        bench.gateway.start()
        with bench.client() as client:
            client.hold("")  # the cache's files are the only copies
            bench.save(client, 1, SIZES)
            part = client.checkpoint(RUN, 2, session="job-1")
            bench.put(part, "acknowledged, not committed", SMALL)
        bench.gateway.kill()
        shutil.rmtree(bench.cache / "catalog")  # so that every file is one that the catalog does not know
        untouched = tmp_path / "untouched"
        shutil.copytree(bench.cache, untouched)
        figures = stack.enter_context(reported("start-faults", bench.figures, tried=0, faults=0, refused=0))
        for where, call, error, when in EVERY if SOAK else FEW:
            shutil.rmtree(bench.cache)
            shutil.copytree(untouched, bench.cache)
            paths = list((bench.cache / "data").glob("*/*"))
            if where == "all":
                paths = [bench.cache, *bench.cache.rglob("*"), bench.cache / "catalog", bench.cache / "catalog" / "data.mdb"]
            output = start_with_faults(bench.gateway, call, error, when, paths, tmp_path)
            figures["tried"] += 1
            figures["refused"] += not started(bench)
            struck = output.read_text(errors="replace").count("(INJECTED)")
            assert struck or SOAK, f"{call} was never made on {where}"
            figures["faults"] += struck
            if bench.gateway.process is not None:
                bench.gateway.kill()
            bench.gateway.start()
            with bench.client() as client:
                bench.compare(client, 1, "cache")
                bench.put(client.checkpoint(RUN, 2, session="job-1"), "acknowledged, not committed", SMALL)
            names = sorted(path.name for path in (bench.cache / "data").glob("*/*.shard"))
            assert names == sorted(path.name for path in (untouched / "data").glob("*/*.shard")), (where, call, error, when)
            bench.gateway.kill()
        assert figures["faults"] and figures["refused"]


def started(bench: DiskBench) -> bool:
    """Whether it serves; where it does not, it said why in a line."""
    before = len(bench.gateway.log.read_text(errors="replace"))
    try:
        bench.gateway.wait_ready(20.0)
        return True
    except RuntimeError:
        pass
    assert bench.gateway.wait_exit() == 1, bench.gateway.tail()
    told = bench.gateway.log.read_text(errors="replace")
    (line,) = re.findall(r"^forebay serve: .*$", told[-4000:], re.MULTILINE)[-1:]
    assert "Traceback" not in told[before - 10 :], told[-3000:]
    assert "Error(" not in line, line
    return False
