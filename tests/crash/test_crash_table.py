"""The crash table of gateway/ARCHITECTURE.md, one state a test: made for real, if need be by editing files meanwhile."""

import contextlib
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from crash.kit import (
    LARGE,
    MIDDLE,
    RUN,
    SMALL,
    TEMP,
    TIERS,
    Bench,
    delete,
    movers_died,
    until,
)
from forebay import ForebayError, Incomplete
from forebay_gateway.cache.layout import CLEAN
from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.layout import manifest_key, shard_key, step_dir
from forebay_gateway.core.records import PublishState, ShardRow, UploadRow
from forebay_gateway.core.states import CopyEvent, CopyState, ShardState
from soak.form import some

SIZES = {"a": LARGE, "b": MIDDLE, "c": SMALL}


def saved(bench: Bench, *, wait: str = "all", step: int = 1) -> None:
    with bench.client() as client:
        bench.save(client, step, SIZES)
        client.wait(RUN, step, wait, timeout=60)


def drained(bench: Bench) -> None:
    """Started, saved, drained, down. What is then made of it is a crash's: no mark of an orderly stop."""
    bench.gateway.start()
    saved(bench)
    bench.gateway.terminate()
    (bench.cache / CLEAN).unlink()


def held(bench: Bench) -> None:
    """Saved with the drain held, killed."""
    bench.gateway.start()
    with bench.client() as client:
        client.hold("")
    saved(bench, wait="cache")
    bench.gateway.kill()


def states(bench: Bench, tier: str) -> dict[str, CopyState]:
    """Of the copies on a tier, by shard name; the gateway is down."""

    def look(txn: ReadTxn) -> Any:
        rows = [row for session in txn.sessions() for row in txn.shards(session.id)]
        return {row.name: copy.state for row in rows if (copy := txn.copy(row.key, tier)) is not None}

    found: dict[str, CopyState] = bench.rows(look)
    return found


def file_of(bench: Bench, name: str) -> Path:
    def look(txn: ReadTxn) -> Any:
        return next(row for row in txn.cached() if row.name == name)

    row: ShardRow = bench.rows(look)
    return bench.cache / "data" / f"{row.session_id:016x}" / f"{row.shard_id:016x}.shard"


def inodes_on_pfs(bench: Bench) -> dict[str, int]:
    """Inode of every shard: a second put makes a new one."""
    return {
        str(path.relative_to(bench.pfs)): path.stat().st_ino
        for path in bench.pfs.glob(f"{step_dir(RUN, 1)}/*/*")
        if "current" not in path.parts
        if path.is_file()
    }


def shard_versions(bench: Bench) -> dict[str, str]:
    key = shard_key(RUN, 1, "job-1", "")
    return {name: version for name, version in bench.versions().items() if name.startswith(key) and ".forebay/" not in name}


# -- files of the cache ------------------------------------------------------------------------------------------------


def test_unsealed_files_in_incoming_go(bench: Bench) -> None:
    drained(bench)
    (bench.cache / "incoming" / f"{1 << 40:016x}.tmp").write_bytes(b"half a shard")
    session = next((bench.cache / "data").iterdir())
    (session / f"{TEMP}part-0-9.json").write_bytes(b"half a part")
    (bench.cache / "incoming" / "notes.txt").write_text("an operator's own file stays")
    bench.gateway.start()
    assert [path.name for path in (bench.cache / "incoming").iterdir()] == ["notes.txt"]
    (bench.cache / "incoming" / "notes.txt").unlink()
    bench.check_settled({1})


def test_a_shard_that_was_on_its_way_is_not_there(bench: Bench) -> None:
    bench.gateway.start(failpoints="seal.before_fsync=kill")
    with bench.client(retry_s=0.0) as client:
        part = client.checkpoint(RUN, 1, session="job-1")
        with pytest.raises(ForebayError):
            bench.put(part, "a", LARGE)
    assert bench.gateway.wait_exit() == -signal.SIGKILL
    assert list((bench.cache / "incoming").iterdir()) != []
    bench.gateway.start()
    assert list((bench.cache / "incoming").iterdir()) == []
    assert bench.shard_files() == {}
    with bench.client() as client:
        assert client.latest(RUN) is None
        with pytest.raises(Incomplete):
            client.open(RUN, 1)


def test_acknowledged_and_not_committed_shards_stay_for_the_client(bench: Bench) -> None:
    bench.gateway.start()
    with bench.client() as client:
        part = client.checkpoint(RUN, 1, session="job-1")
        bench.put(part, "a", LARGE)
        bench.put_many(part, {"b": SMALL, "c": 1})
        bench.gateway.kill()
        bench.gateway.start()
        with pytest.raises(Incomplete):
            client.open(RUN, 1)
        bench.put(part, "d", MIDDLE)
        bench.commit(part)
        bench.compare(client, 1)
    bench.check_settled({1})


@pytest.mark.parametrize("where", some(["undrained", "drained", "evicted in part"], "undrained", "evicted in part"))
def test_without_the_catalog_everything_is_rebuilt_from_the_files(make_bench: Callable[..., Bench], where: str) -> None:
    bench = make_bench(soft=0.02 if where == "evicted in part" else 0.5)
    if where == "undrained":
        held(bench)
    else:
        drained(bench)
    files = len(bench.shard_files())
    assert files in ({3} if where != "evicted in part" else {1, 2})
    objects, inodes = shard_versions(bench), inodes_on_pfs(bench)
    shutil.rmtree(bench.cache / "catalog")
    bench.gateway.start()
    bench.check_visible()
    with bench.client() as client:
        found = bench.checkpoint(client, 1)
        assert found is not None and found.metadata == {"step": 1}
        level = {level.level: level.state for level in found.levels}["cache"]
        client.release("")
        assert level == ("evicted" if where == "evicted in part" else "complete")
        client.wait(RUN, 1, "all", timeout=60)
    if where != "undrained":  # proved where they are, not put again
        assert (shard_versions(bench), inodes_on_pfs(bench)) == (objects, inodes)
    bench.check_settled({1})


def test_without_the_catalog_uncommitted_shards_stay_too(bench: Bench) -> None:
    bench.gateway.start()
    with bench.client() as client:
        part = client.checkpoint(RUN, 1, session="job-1")
        bench.put(part, "a", LARGE)
        bench.gateway.kill()
        shutil.rmtree(bench.cache / "catalog")
        bench.gateway.start()
        with pytest.raises(Incomplete):
            client.open(RUN, 1)
        bench.put(part, "b", MIDDLE)
        bench.commit(part)
    bench.check_settled({1})


def test_an_evicted_file_that_came_back_is_no_second_shard(bench: Bench) -> None:
    """What a power loss may do to an unlink that was not synced."""
    bench.gateway.start(failpoints="evict.before_unlink=kill")
    with bench.client() as client:
        bench.save(client, 1, SIZES)
        assert bench.gateway.wait_exit() == -signal.SIGKILL
        evicting = bench.rows(lambda txn: [row.name for row in txn.cached() if row.state is ShardState.EVICTING])
        assert evicting
        kept = {
            key: (bench.cache / "data" / f"{key[0]:016x}" / f"{key[1]:016x}.shard").read_bytes() for key in bench.shard_files()
        }
        bench.gateway.start()
        until(lambda: len(bench.shard_files()) < len(kept), "evicted")
        bench.gateway.kill()
        for key, data in kept.items():
            path = bench.cache / "data" / f"{key[0]:016x}" / f"{key[1]:016x}.shard"
            path.parent.mkdir(exist_ok=True)
            if not path.exists():
                path.write_bytes(data)
        bench.gateway.start()
        bench.compare(client, 1)
    bench.check_settled({1})


@pytest.mark.parametrize("how", some(["gone", "cut"], "cut"))
def test_a_sealed_row_without_its_file_uses_the_tier(make_bench: Callable[..., Bench], how: str) -> None:
    bench = make_bench(soft=0.5)
    drained(bench)
    damage(file_of(bench, "a"), how)
    bench.gateway.start()
    assert bench.gateway.status()["alarms"] == []
    bench.check_visible()
    bench.check_settled({1})


@pytest.mark.parametrize("how", some(["gone", "cut"], "gone"))
def test_a_sealed_row_whose_only_copy_is_gone_is_an_alarm(make_bench: Callable[..., Bench], how: str) -> None:
    bench = make_bench(soft=0.5)
    held(bench)
    damage(file_of(bench, "a"), how)
    for _ in range(2):  # and stays one over the next restart
        bench.gateway.start()
        status = bench.gateway.status()
        assert status["health"] == "critical"
        assert any("'a'" in alarm["what"] for alarm in status["alarms"]), status["alarms"]
        with bench.client() as client:
            assert client.latest(RUN) is None
            found = bench.checkpoint(client, 1)
            assert found is not None and not found.complete and "'a'" in found.reason
        assert status["cache"]["used_bytes"] >= 0
        bench.gateway.kill()
    bench.gateway.start()
    with bench.client() as client:
        bench.log.deleting.add(1)
        delete(client, 1, force=True)
        until(lambda: client.status().cache.used_bytes == 0, "the deletion ends")
        until(lambda: client.status().alarms == (), "the alarm ends")


def damage(path: Path, how: str) -> None:
    path.unlink() if how == "gone" else os.truncate(path, path.stat().st_size - 4096)


# -- copies that were under way ----------------------------------------------------------------------------------------


def test_a_whole_copy_that_was_not_recorded_is_not_put_again(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(soft=0.5)
    bench.gateway.start(failpoints="catalog.before_commit=all*sleep:0.01")
    with bench.client() as client:
        bench.save(client, 1, SIZES)
        # The objects are whole before the gateway can have recorded the last of them.
        until(
            lambda: len(shard_versions(bench)) == 3 and len(inodes_on_pfs(bench)) == 3,
            "all shards are on the tiers",
            60.0,
            0.005,
        )
        bench.gateway.kill()
    begun = {tier: set(states(bench, tier).values()) for tier in TIERS}
    objects, inodes = shard_versions(bench), inodes_on_pfs(bench)
    bench.gateway.start()
    with bench.client() as client:
        client.wait(RUN, 1, "all", timeout=60)
    assert (shard_versions(bench), inodes_on_pfs(bench)) == (objects, inodes), begun
    bench.check_settled({1})


@pytest.mark.parametrize("tier", some(TIERS, "object"))
def test_only_the_catalog_s_word_is_missing(make_bench: Callable[..., Bench], tier: str) -> None:
    """Killed between the tier's last act and the catalog: every copy is WRITING, every object is whole."""
    bench = make_bench(soft=0.5)
    drained(bench)

    def back(txn: WriteTxn) -> None:
        for session in list(txn.sessions()):
            txn.set_publish(session.id, tier, PublishState.PENDING)
            for row in list(txn.shards(session.id)):
                for event in (CopyEvent.GONE, CopyEvent.START):
                    txn.copy_event(row.key, tier, event)

    bench.edit(back)
    assert set(states(bench, tier).values()) == {CopyState.WRITING}
    objects, inodes = shard_versions(bench), inodes_on_pfs(bench)
    bench.gateway.start()
    with bench.client() as client:
        client.wait(RUN, 1, "all", timeout=60)
    assert (shard_versions(bench), inodes_on_pfs(bench)) == (objects, inodes)
    bench.check_settled({1})


def test_copies_that_are_not_whole_are_put_again(make_bench: Callable[..., Bench]) -> None:
    """With an upload open that was recorded, one that was not, and a temporary file: all of them go."""
    bench = make_bench(soft=0.5)
    drained(bench)
    key = shard_key(RUN, 1, "job-1", "a")
    with contextlib.closing(bench.server.client()) as s3:
        where = {"Bucket": bench.server.bucket, "Key": f"{bench.prefix}/{key}"}
        recorded, forgotten = (s3.create_multipart_upload(**where)["UploadId"] for _ in range(2))
        s3.upload_part(**where, UploadId=recorded, PartNumber=1, Body=b"half")
        s3.delete_object(**where)
    assert len(bench.uploads()) == 2 and forgotten
    (bench.pfs / key).rename((bench.pfs / key).with_name(f"{TEMP}0123"))

    def back(txn: WriteTxn) -> None:
        for session in list(txn.sessions()):
            row = next(row for row in txn.shards(session.id) if row.name == "a")
            for tier, upload in (("object", recorded), ("pfs", f"{TEMP}0123")):
                txn.set_publish(session.id, tier, PublishState.PENDING)
                for event in (CopyEvent.GONE, CopyEvent.START):
                    txn.copy_event(row.key, tier, event)
                txn.record_upload(row.key, tier, UploadRow(key, upload))

    bench.edit(back)
    bench.gateway.start()
    until(lambda: key in bench.objects() and (bench.pfs / key).exists(), "put again")
    bench.check_settled({1})


def test_a_mover_that_dies_costs_a_retry(bench: Bench) -> None:
    """Killed by its pid while an upload is open; no restart of the gateway cleans up after it."""
    bench.gateway.start()
    with bench.client() as client:
        killed: set[int] = set()
        bench.save(client, 1, SIZES)

        def kill_one() -> bool:
            for mover in client.status().movers:
                if mover.doing == "drain" and mover.pid and mover.pid not in killed:
                    killed.add(mover.pid)
                    psutil.Process(mover.pid).send_signal(signal.SIGKILL)
            return len(killed) >= 2

        until(kill_one, "two movers are killed at work", 60.0, 0.002)
        client.wait(RUN, 1, "all", timeout=90)
        assert movers_died(client) >= 2
        assert {mover.name for mover in client.status().movers if mover.restarts} <= {"drain-pfs-0", "drain-object-0"}
    bench.check_settled({1})


# -- deletions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", some([1, 2], 2))
def test_a_deletion_that_was_cut_off_goes_on(bench: Bench, passes: int) -> None:
    bench.gateway.start(failpoints=f"delete.manifest_gone={passes}*kill")
    saved(bench)
    saved(bench, step=2)
    with bench.client(retry_s=0.0) as client, pytest.raises(ForebayError):
        client.delete(RUN, 2)
    assert bench.gateway.wait_exit() == -signal.SIGKILL
    assert (bench.pfs / manifest_key(RUN, 1)).exists()
    assert not (bench.pfs / manifest_key(RUN, 2)).exists()
    bench.gateway.start()
    with bench.client() as client:
        assert client.latest(RUN) == 1
        assert [found.step for found in client.checkpoints(RUN)] == [1]
        until(lambda: not [name for name in (*bench.objects(), *bench.files_on_pfs()) if "step-000000000002" in name], "gone")
    bench.check_settled({1})


def test_a_deletion_that_was_cut_off_and_lost_its_catalog_goes_on(bench: Bench) -> None:
    """Its manifest is off one tier, its shards are everywhere, and only the marks beside the catalog know of it."""
    bench.gateway.start(failpoints="delete.manifest_gone=kill")
    saved(bench)
    saved(bench, step=2)
    with bench.client(retry_s=0.0) as client, pytest.raises(ForebayError):
        client.delete(RUN, 2)
    assert bench.gateway.wait_exit() == -signal.SIGKILL
    shutil.rmtree(bench.cache / "catalog")
    bench.gateway.start()
    with bench.client() as client:
        assert client.latest(RUN) == 1
        assert [found.step for found in client.checkpoints(RUN)] == [1]
        until(lambda: not [name for name in (*bench.objects(), *bench.files_on_pfs()) if "step-000000000002" in name], "gone")
    bench.check_settled({1})


def test_a_deletion_of_undrained_data_that_was_cut_off_is_no_alarm(bench: Bench) -> None:
    """Its files go before its rows: killed in between, the rows without files are not lost data."""
    held(bench)
    bench.gateway.start(failpoints="delete.files_gone=kill")
    with bench.client(retry_s=0.0) as client:
        until(lambda: all(tier.state == "held" for tier in client.status().tiers), "the gateway is up")
        with pytest.raises(ForebayError):
            client.delete(RUN, 1, force=True)
            until(lambda: client.pressure() is None, "it dies")
    assert bench.gateway.wait_exit() == -signal.SIGKILL
    assert bench.shard_files() == {}
    bench.gateway.start()
    # Until the tiers are proved and the deletion goes on, its copies wait in a held queue; nothing is called lost.
    assert [alarm for alarm in bench.gateway.status()["alarms"] if "is held" not in alarm["what"]] == []
    with bench.client() as client:
        assert client.latest(RUN) is None
        until(lambda: client.status().alarms == (), "the deletion ends")
        assert client.status().cache.used_bytes == 0
    bench.gateway.terminate()
    bench.check_disk()
