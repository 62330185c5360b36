"""What survives a kill, and that an acknowledgement comes after the sync."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from catalog.kit import TIERS, opened

LOAD = """
import asyncio, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from catalog.kit import opened, begin, sealed
from forebay_gateway.core.records import ShardKey

async def main():
    async with opened(Path(sys.argv[1])) as catalog:
        session = await begin(catalog, session=sys.argv[3], writers=64)
        limit = int(sys.argv[4])
        async def load(writer):
            for number in range(limit):
                key = ShardKey(session.id, catalog.new_id())
                name = f"{writer}/{number}"
                await catalog.write(lambda txn: txn.seal(sealed(key, name, writer=writer), name.encode()))
                if number % 10 == 9 and writer % 2:
                    await catalog.write(lambda txn: txn.drop_shard(key))
                else:
                    os.write(1, f"ACK {session.id} {key.shard_id} {name}\\n".encode())
        await asyncio.gather(*(load(writer) for writer in range(16 if limit > 10 else 1)))

asyncio.run(main())
"""


def command(path: Path, session: str, limit: int) -> list[str]:
    tests = Path(__file__).resolve().parent.parent
    return [sys.executable, "-c", LOAD, str(path), str(tests), session, str(limit)]


async def test_what_was_acknowledged_survives_kill_9(tmp_path: Path) -> None:
    """Three times over the same catalog, each time killed in the middle of its load."""
    acknowledged: set[tuple[int, int, str]] = set()
    for round_number in range(3):
        with subprocess.Popen(command(tmp_path / "c", f"s{round_number}", 10**6), stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            lines = []
            deadline_s = time.monotonic() + 20
            while len(lines) < 300 * (round_number + 1) and time.monotonic() < deadline_s:
                lines.append(process.stdout.readline())
            process.send_signal(signal.SIGKILL)
            lines += process.stdout.readlines()
        assert process.returncode == -signal.SIGKILL
        for line in lines:
            if line.endswith(b"\n"):
                _, session_id, shard_id, name = line.decode().split()
                acknowledged.add((int(session_id), int(shard_id), name))
        assert len(lines) >= 300
        async with opened(tmp_path / "c") as catalog:
            with catalog.read() as txn:
                rows = {(row.session_id, row.shard_id, row.name): row for s in txn.sessions() for row in txn.shards(s.id)}
                assert acknowledged <= set(rows)
                assert txn.totals() == txn.recount() and txn.totals().shards == len(rows)
                for row in rows.values():
                    assert txn.chunks(row.key) == row.name.encode()
                    assert txn.shard_by_name(row.session_id, row.name) == row
            assert catalog.new_id() > max(shard_id for _, shard_id, _ in rows)


@pytest.mark.parametrize("point", ["catalog.before_commit", "catalog.after_commit"])
async def test_killed_at_a_failpoint(tmp_path: Path, point: str) -> None:
    environment = {**os.environ, "FOREBAY_FAILPOINTS": f"{point}=8*kill"}
    done = subprocess.run(command(tmp_path / "c", "s", 10), stdout=subprocess.PIPE, env=environment, timeout=30, check=False)
    assert done.returncode == -signal.SIGKILL
    acknowledged = [line.split()[-1] for line in done.stdout.decode().splitlines()]
    async with opened(tmp_path / "c") as catalog:
        with catalog.read() as txn:
            (session,) = txn.sessions()
            names = [row.name for row in txn.shards(session.id)]
    # One session, seven acts before the kill; the last is there exactly if it was committed, and acknowledged in neither case.
    assert acknowledged == [f"0/{number}" for number in range(6)]
    assert names == acknowledged + (["0/6"] if point == "catalog.after_commit" else [])


@pytest.mark.skipif(shutil.which("strace") is None, reason="needs strace")
def test_an_acknowledgement_comes_after_the_sync(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    calls = "trace=openat,pwrite64,pwritev,writev,fdatasync,fsync,write,lseek"
    strace = ["strace", "-f", "-y", "-e", calls, "-o", str(trace)]
    subprocess.run([*strace, *command(tmp_path / "c", "s", 5)], check=True, timeout=60, stdout=subprocess.DEVNULL)
    unsynced = False
    acknowledged = synced = 0
    dsync = {
        match[1] for match in re.finditer(r'openat\(.*data\.mdb".*O_DSYNC.*\) = (\d+)<', trace.read_text(encoding="utf-8"))
    }
    assert dsync  # LMDB writes its meta page through a descriptor that syncs by itself
    for line in trace.read_text(encoding="utf-8").splitlines():
        call = re.search(r" (\w+)\((\d+)<([^>]*)>", line)
        if call is None:
            continue
        name, descriptor, target = call.groups()
        if target.endswith("data.mdb"):
            if name in ("fdatasync", "fsync"):
                unsynced, synced = False, synced + 1
            elif "write" in name and descriptor not in dsync:
                unsynced = True
        elif name == "write" and '"ACK' in line:
            acknowledged += 1
            assert not unsynced, line
    assert acknowledged == 5 and synced >= 5


async def test_a_dead_process_s_lock_is_no_hindrance(tmp_path: Path) -> None:
    with subprocess.Popen(command(tmp_path / "c", "s", 10**6), stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        from forebay_gateway.catalog import Catalog
        from forebay_gateway.core.errors import StartupError

        with pytest.raises(StartupError, match="in use"):
            await Catalog.open(tmp_path / "c", tiers=TIERS, node="node-1")
        process.kill()
    async with opened(tmp_path / "c"):
        pass
