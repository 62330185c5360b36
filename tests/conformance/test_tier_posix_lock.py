"""Conditional replaces on a shared file system: several nodes, one lock file, owners that die or sleep."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from forebay_gateway.base import failpoints
from forebay_gateway.base.clock import SystemClock
from forebay_gateway.core.errors import AlreadyExists, Unavailable
from forebay_gateway.tiers.posix.lock import lock_path, try_lock
from forebay_gateway.tiers.posix.tier import PosixTier


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "pfs"


@pytest.fixture
async def nodes(root: Path) -> AsyncIterator[list[PosixTier]]:
    tiers = [PosixTier("pfs", root, lock_ttl_s=2.0) for _ in range(4)]
    for tier in tiers:
        await tier.probe()
    yield tiers
    for tier in tiers:
        await tier.close()


async def test_replace_race_among_nodes_has_one_winner(nodes: list[PosixTier], root: Path) -> None:
    info = await nodes[0].put_small("d/doc", b"start")

    async def one(number: int) -> str:
        try:
            await nodes[number % 4].put_small("d/doc", f"writer {number}".encode(), if_match=info.tag)
        except AlreadyExists:
            return ""
        return f"writer {number}"

    won = [each for each in await asyncio.gather(*(one(number) for number in range(12))) if each]
    assert [(root / "d/doc").read_text()] == won
    assert [path.name for path in (root / "d").iterdir()] == ["doc"]


async def test_counting_up_among_nodes_loses_no_step(nodes: list[PosixTier], root: Path) -> None:
    await nodes[0].put_small("count", b"0")

    async def add(tier: PosixTier) -> None:
        while True:
            data, info = await tier.get_small("count")
            with contextlib.suppress(AlreadyExists):
                await tier.put_small("count", str(int(data) + 1).encode(), if_match=info.tag)
                return

    await asyncio.gather(*(add(nodes[number % 4]) for number in range(12)))
    assert (root / "count").read_bytes() == b"12"


def _plant_lock(document: Path, age_s: float, body: bytes | None = None) -> Path:
    path = lock_path(document)
    owner = {"owner": "gone:1", "token": "0123456789abcdef", "ttl_s": 2.0, "expires": 0}
    path.write_bytes(json.dumps(owner).encode() if body is None else body)
    then = path.stat().st_mtime - age_s
    os.utime(path, (then, then))
    return path


async def test_held_lock_is_waited_for_and_not_broken(nodes: list[PosixTier], root: Path) -> None:
    info = await nodes[0].put_small("doc", b"1")
    lock = _plant_lock(root / "doc", age_s=0)
    task = asyncio.create_task(nodes[0].put_small("doc", b"2", if_match=info.tag))
    await asyncio.sleep(0.4)
    assert not task.done()
    lock.unlink()
    await task
    assert (root / "doc").read_bytes() == b"2"


@pytest.mark.parametrize("body", [None, b"", b"{", b'{"token": "../../../etc", "ttl_s": 1}', b"[]"])
async def test_stale_lock_is_taken_over(nodes: list[PosixTier], root: Path, body: bytes | None) -> None:
    info = await nodes[0].put_small("doc", b"1")
    _plant_lock(root / "doc", age_s=3600, body=body)
    outcomes = await asyncio.gather(
        *(tier.put_small("doc", f"{number}".encode(), if_match=info.tag) for number, tier in enumerate(nodes)),
        return_exceptions=True,
    )
    assert sum(not isinstance(outcome, BaseException) for outcome in outcomes) == 1
    assert all(isinstance(outcome, AlreadyExists) for outcome in outcomes if isinstance(outcome, BaseException))
    assert {path.name for path in root.iterdir()} == {".forebay", "doc"}


async def test_claim_of_a_dead_taker_does_not_block_for_ever(nodes: list[PosixTier], root: Path) -> None:
    info = await nodes[0].put_small("doc", b"1")
    lock = _plant_lock(root / "doc", age_s=3600)
    claim = lock.with_name(f"{lock.name}.0123456789abcdef")
    shutil.copy2(lock, claim)
    await nodes[0].put_small("doc", b"2", if_match=info.tag)
    assert (root / "doc").read_bytes() == b"2"


async def test_lock_nobody_releases_ends_in_unavailable(root: Path) -> None:
    tier = PosixTier("pfs", root, lock_ttl_s=1.0)
    await tier.probe()
    info = await tier.put_small("doc", b"1")
    owner = {"owner": "alive:1", "token": "0123456789abcdef", "ttl_s": 3600.0, "expires": 0}
    _plant_lock(root / "doc", age_s=0, body=json.dumps(owner).encode())
    with pytest.raises(Unavailable, match="lock"):
        await tier.put_small("doc", b"2", if_match=info.tag)
    assert (root / "doc").read_bytes() == b"1"
    await tier.close()


def test_owner_that_slept_too_long_lets_the_lock_be(tmp_path: Path) -> None:
    clock = SystemClock()
    lock = try_lock(tmp_path / "doc", "me", 0.1, clock)
    assert lock is not None
    assert lock.is_safe(clock)
    time.sleep(0.06)
    assert not lock.is_safe(clock)
    lock.release(clock)
    assert lock.path.exists(), "it may be another's by now"


async def test_a_kill_in_the_probe_costs_the_next_one_no_waiting(root: Path) -> None:
    """The lock that it held lives for an hour, and the file that was to become one has no other owner."""
    first = PosixTier("pfs", root, owner="node-a", lock_ttl_s=3600.0)
    await first.probe()
    directory = root / ".forebay" / "probe" / "node-a"
    directory.mkdir(parents=True, exist_ok=True)
    owner = {"owner": "killed:1", "token": "0123456789abcdef", "ttl_s": 3600.0, "expires": 0}
    _plant_lock(directory / "document", age_s=0, body=json.dumps(owner).encode())
    assert (await first.probe()).conditional_replace
    assert not directory.exists()
    await first.close()


async def test_what_a_kill_left_of_a_lock_s_making_is_swept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = PosixTier("pfs", root, owner="node-a")
    await tier.probe()
    info = await tier.put_small("d/doc", b"1")

    class Killed(BaseException):
        """No code runs after it."""

    def link(source: Path, target: Path) -> None:
        raise Killed

    def unlink(self: Path, missing_ok: bool = False) -> None:
        """Neither does this."""

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(os, "link", link)
        patch.setattr(Path, "unlink", unlink)
        await tier.put_small("d/doc", b"2", if_match=info.tag)
    assert len(list((root / "d").iterdir())) == 2
    await tier.sweep("d/doc")
    assert [path.name for path in (root / "d").iterdir()] == ["doc"]
    await tier.close()


REPLACE = """
import asyncio, pathlib, sys
from forebay_gateway.tiers.posix.tier import PosixTier

async def main():
    tier = PosixTier("pfs", pathlib.Path(sys.argv[1]), owner=sys.argv[2])
    await tier.probe()
    info = await tier.put_small("d/doc", b"1")
    await tier.put_small("d/doc", b"2", if_match=info.tag)

asyncio.run(main())
"""


def _killed_while_replacing(root: Path, owner: str) -> Path:
    """The lock of d/doc, whose owner died right after the replacement; the first replacement is the probe's."""
    environment = {**os.environ, "FOREBAY_FAILPOINTS": "posix.document_replaced=2*kill"}
    done = subprocess.run([sys.executable, "-c", REPLACE, str(root), owner], env=environment, timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert (root / "d" / "doc").read_bytes() == b"2"
    lock = lock_path(root / "d" / "doc")
    assert lock.exists()
    return lock


@pytest.fixture
async def after_a_kill(root: Path) -> AsyncIterator[tuple[Path, PosixTier, PosixTier]]:
    """The lock that node-a was killed with; its next process's tier, and another node's."""
    lock = _killed_while_replacing(root, "node-a")
    own, other = (PosixTier("pfs", root, owner=owner) for owner in ("node-a", "node-b"))
    for tier in (own, other):
        await tier.probe()
    yield lock, own, other
    for tier in (own, other):
        await tier.close()


async def test_a_lock_of_a_killed_owner_goes_with_its_node_s_next_sweep(
    after_a_kill: tuple[Path, PosixTier, PosixTier],
) -> None:
    lock, own, other = after_a_kill
    await other.sweep("d/doc")
    assert lock.exists()  # to another node it is in time
    assert await other.leftovers("d") == ()
    with pytest.raises(Unavailable, match="held"):
        await other.abort_upload("d/doc", lock.name)
    ((found),) = await own.leftovers("d")
    assert (found.id, found.is_lock) == (lock.name, True)
    await own.sweep("d/doc")
    assert [path.name for path in lock.parent.iterdir()] == ["doc"]


async def test_a_lock_that_ran_out_goes_with_any_node_s_sweep(after_a_kill: tuple[Path, PosixTier, PosixTier]) -> None:
    lock, _, other = after_a_kill
    then = lock.stat().st_mtime - 3600
    os.utime(lock, (then, then))
    claim = lock.with_name(f"{lock.name}.{json.loads(lock.read_bytes())['token']}")
    shutil.copy2(lock, claim)  # of one that died while it took it over
    assert {found.id for found in await other.leftovers("d")} == {lock.name, claim.name}
    await other.sweep("d/doc")
    await other.sweep("d/doc")  # whichever of the two the first met first
    assert [path.name for path in lock.parent.iterdir()] == ["doc"]


async def test_a_killed_node_s_own_lock_is_not_waited_for(after_a_kill: tuple[Path, PosixTier, PosixTier]) -> None:
    lock, own, _ = after_a_kill
    info = await own.head("d/doc")
    await asyncio.wait_for(own.put_small("d/doc", b"3", if_match=info.tag), 10)
    assert [path.name for path in lock.parent.iterdir()] == ["doc"]


async def test_a_left_lock_keeps_no_directory(after_a_kill: tuple[Path, PosixTier, PosixTier]) -> None:
    lock, own, _ = after_a_kill
    await own.delete("d/doc")
    assert not lock.parent.exists()


async def test_a_lock_that_this_process_holds_stays(root: Path) -> None:
    tier = PosixTier("pfs", root, owner="node-a")
    await tier.probe()
    info = await tier.put_small("d/doc", b"1")
    with failpoints.armed("posix.document_replaced=sleep:0.6"):
        replacing = asyncio.create_task(tier.put_small("d/doc", b"2", if_match=info.tag))
        while (root / "d" / "doc").read_bytes() == b"1":
            await asyncio.sleep(0.02)
        await tier.sweep("d/doc")
        assert lock_path(root / "d" / "doc").exists()
        assert await tier.leftovers("d") == ()
        await replacing
    await tier.close()
