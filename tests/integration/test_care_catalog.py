"""A catalog that is lost, cut off or flipped: said at start, and made anew from the cache's files and the tiers; or refused."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import forebay
from catalog.places import flip_bit, places
from forebay.demo.gateways import GatewayProcess
from integration.conftest import MakeGateway
from integration.kit import SMALL_CHUNKS, Job, assert_clear_line, assert_refused, cache_files, eventually, flip_byte
from soak.form import some

NAME = "rank0/model.bin"


def data_file(gateway: GatewayProcess) -> Path:
    return gateway.cache / "catalog" / "data.mdb"


def cut_off(gateway: GatewayProcess) -> None:
    os.truncate(data_file(gateway), 3 * 4096)


def emptied(gateway: GatewayProcess) -> None:
    os.truncate(data_file(gateway), 0)


def deleted(gateway: GatewayProcess) -> None:
    data_file(gateway).unlink()


def all_deleted(gateway: GatewayProcess) -> None:
    shutil.rmtree(gateway.cache / "catalog")


def flipped_meta(gateway: GatewayProcess) -> None:
    flip_byte(data_file(gateway), 4096 + 16)
    flip_byte(data_file(gateway), 16)


def flipped_rows(gateway: GatewayProcess) -> None:
    """A bit in every copy of a shard's row that the file holds: its array's length."""
    data = data_file(gateway).read_bytes()
    rows = [data.rfind(b"\x9b", max(0, found.start() - 32), found.start()) for found in re.finditer(NAME.encode(), data)]
    rows = [row for row in rows if row > 0]  # msgpack's array of eleven; the name stands in an index, too
    assert rows
    for row in rows:
        flip_byte(data_file(gateway), row)


DAMAGES: list[Callable[[GatewayProcess], None]] = [cut_off, emptied, deleted, all_deleted, flipped_meta, flipped_rows]


@pytest.fixture
def gateway(make: MakeGateway, job: Job) -> GatewayProcess:
    """Down, with a checkpoint in its cache and on its tier, and a part that waits for another writer."""
    job.writers = 1
    made = make()
    made.start()
    job.save(made, 0)
    job.wait(made)
    half_of(job).save(made, 0)
    made.terminate()
    return made


def half_of(job: Job) -> Job:
    return Job(run=job.run, step=8, writers=2)


@pytest.mark.parametrize("damage", some(DAMAGES, cut_off, deleted, flipped_rows))
def test_it_is_rebuilt_by_itself(
    gateway: GatewayProcess, job: Job, damage: Callable[[GatewayProcess], None], tmp_path: Path
) -> None:
    files = cache_files(gateway)
    damage(gateway)
    gateway.start()
    job.wait(gateway)
    assert cache_files(gateway) == files
    job.assert_restores(gateway, tmp_path / "restored", source="cache")
    (alarm,) = [alarm for alarm in gateway.status()["alarms"] if "rebuilt" in alarm["what"]]
    assert_clear_line(alarm["what"])
    aside = sorted(path.name for path in gateway.cache.glob("catalog.damaged-*"))
    assert aside == ([] if damage is all_deleted else ["catalog.damaged-1"])
    half = half_of(job)
    half.save(gateway, 1)  # the other writer comes: what was committed before still counts
    half.wait(gateway)
    half.assert_restores(gateway, tmp_path / "half")
    assert gateway.cli("fsck", "--deep").returncode == 0
    gateway.terminate()
    gateway.start()
    assert not [alarm for alarm in gateway.status()["alarms"] if "rebuilt" in alarm["what"]]


@pytest.mark.parametrize("damage", some([cut_off, all_deleted, flipped_rows], all_deleted))
def test_it_is_asked_for(
    make: MakeGateway, gateway: GatewayProcess, job: Job, damage: Callable[[GatewayProcess], None], tmp_path: Path
) -> None:
    gateway = make(cache_keys=f'{SMALL_CHUNKS}\nrebuild = "ask"')
    damage(gateway)
    gateway.start(ready=False)
    assert gateway.wait_exit() == 1
    refusal = gateway.tail().strip().splitlines()[-1]
    command = f"forebay rebuild --config {gateway.config} --apply"
    assert command in refusal, refusal
    assert_clear_line(refusal)
    found = offline_fsck(gateway)
    assert [entry["kind"] for entry in found] == ["catalog_damaged"]
    dry = json.loads(gateway.cli("rebuild", "--config", str(gateway.config), "--json").stdout)
    assert (dry["applied"], bool(dry["damage"]), dry["sealed_files"], dry["part_files"]) == (False, True, 8, 2)
    gateway.start(ready=False)
    assert gateway.wait_exit() == 1  # a dry run did nothing
    done = json.loads(gateway.cli(*command.split()[1:], "--json").stdout)
    assert (done["applied"], done["checkpoints"], done["from_tiers"]) == (True, 2, 1)
    gateway.start()
    job.assert_restores(gateway, tmp_path / "restored", source="cache")
    assert [alarm for alarm in gateway.status()["alarms"] if "writer" not in alarm["what"]] == []


def test_a_page_that_kills_the_process_kills_it_once(
    make: MakeGateway, gateway: GatewayProcess, job: Job, tmp_path: Path
) -> None:
    """LMDB ends the process where a page that every start reads is of another kind than it can be."""
    gateway = make(cache_keys=f'{SMALL_CHUNKS}\nrebuild = "ask"')
    another_kind(gateway, "tiers")
    assert [entry["kind"] for entry in offline_fsck(gateway)] == ["catalog_damaged"]  # whoever looks first does not die of it
    gateway.start(ready=False)
    assert gateway.wait_exit() == -signal.SIGABRT
    for _ in range(2):
        gateway.start(ready=False)
        assert gateway.wait_exit() == 1
        refusal = gateway.tail().strip().splitlines()[-1]
        assert "died of a fatal signal" in refusal and f"forebay rebuild --config {gateway.config} --apply" in refusal
    gateway = make()  # the same cache, with rebuild = "auto"
    gateway.start()
    job.assert_restores(gateway, tmp_path / "restored", source="cache")
    assert [alarm for alarm in gateway.status()["alarms"] if "died of a fatal signal" in alarm["what"]]
    assert gateway.cli("fsck", check=False).returncode == 0
    assert (gateway.cache / "FATAL").read_bytes() == b""


def another_kind(gateway: GatewayProcess, database: str) -> None:
    """The page of a database that has one entry becomes a branch, by its flags."""
    ((at, _),) = places(data_file(gateway))[f"key of {database}"]
    flip_bit(data_file(gateway), at // 4096 * 4096 + 10, 0)


def offline_fsck(gateway: GatewayProcess, *arguments: str) -> Any:
    result = gateway.cli("fsck", "--offline", "--config", str(gateway.config), "--json", *arguments, check=False)
    found = json.loads(result.stdout)
    assert result.returncode == (4 if any(entry["severity"] == "error" for entry in found) else 0)
    return found


def test_offline_fsck_sees_what_a_start_would_mend(gateway: GatewayProcess, job: Job) -> None:
    # A note may be there: on a slow machine the end cuts a mover off, and the next start sweeps what it left.
    assert [entry for entry in offline_fsck(gateway, "--deep") if entry["severity"] != "note"] == []
    stray = gateway.cache / "incoming" / f"{1 << 40:016x}.tmp"
    stray.write_bytes(b"half a shard")
    (gateway.cache / "notes.txt").write_text("not ours")
    large = max(cache_files(gateway), key=lambda path: path.stat().st_size)
    flip_byte(large, 70_000)
    stranger = large.with_name(f"{1 << 41:016x}.shard")
    shutil.copy(large, stranger)
    part = next(gateway.cache.glob("data/*/part-0-*.json"))
    kept = part.read_bytes()
    flip_byte(part, 40)
    found = {entry["kind"]: entry for entry in offline_fsck(gateway, "--deep")}
    assert set(found) - {"upload"} == {"incoming_file", "foreign_file", "file_damaged", "file_unknown", "part_file"}
    assert found["foreign_file"]["path"] == "notes.txt"
    assert stray.exists() and stranger.exists()  # it reports, and changes nothing
    part.write_bytes(kept)


def test_a_cache_of_a_newer_format_is_left_alone(gateway: GatewayProcess) -> None:
    (gateway.cache / "FORMAT").write_text("forebay-cache 2\n")
    for command in (["fsck", "--offline"], ["rebuild"], ["rebuild", "--apply", "--force"]):
        result = gateway.cli(*command, "--config", str(gateway.config), check=False)
        assert_refused(result, 1, "another release", "format=2")
    assert not list(gateway.cache.glob("catalog.damaged-*"))


def test_a_sound_catalog_is_not_rebuilt_without_force(gateway: GatewayProcess, job: Job, tmp_path: Path) -> None:
    config = ("--config", str(gateway.config))
    assert_refused(gateway.cli("rebuild", *config, "--apply", check=False), 2, "can be used", "--force")
    assert "can be used" in gateway.cli("rebuild", *config).stdout
    gateway.cli("rebuild", *config, "--apply", "--force")
    assert (gateway.cache / "catalog.damaged-1" / "data.mdb").exists()
    gateway.start()
    job.wait(gateway)
    job.assert_restores(gateway, tmp_path / "restored", source="cache")


def test_a_rebuild_finds_what_the_cache_no_longer_has(gateway: GatewayProcess, job: Job, tmp_path: Path) -> None:
    """Cache and catalog are lost; the tier's manifests are enough."""
    shutil.rmtree(gateway.cache / "data")
    shutil.rmtree(gateway.cache / "catalog")
    (gateway.cache / "data").mkdir()
    done = json.loads(gateway.cli("rebuild", "--config", str(gateway.config), "--apply", "--force", "--json").stdout)
    assert (done["sealed_files"], done["from_tiers"]) == (0, 1)
    gateway.start()
    with forebay.Client(gateway.address) as client:
        assert client.latest(job.run) == job.step
    job.assert_restores(gateway, tmp_path / "restored")
    eventually(lambda: gateway.cli("fsck", check=False), lambda result: result.returncode == 0)


def another_key(gateway: GatewayProcess) -> None:
    """One bit at the end of the key under which a shard's name stands: the keys are still in order, and nobody finds it."""
    at, length = places(data_file(gateway))["key of names"][0]
    flip_bit(data_file(gateway), at + length - 1, 3)


def test_an_index_that_is_wrong_and_still_decodes_is_found_and_mended_by_a_rebuild(
    gateway: GatewayProcess, job: Job, tmp_path: Path
) -> None:
    another_key(gateway)
    assert "index" in {entry["kind"] for entry in offline_fsck(gateway)}
    dry = json.loads(gateway.cli("rebuild", "--config", str(gateway.config), "--json").stdout)
    assert "contradicts itself" in dry["damage"]
    gateway.start()
    found = json.loads(gateway.cli("fsck", "--json", check=False).stdout)
    assert {entry["where"] for entry in found if entry["kind"] == "index"} == {"catalog"}
    done = gateway.cli("repair", "--apply", "--json", check=False)
    assert done.returncode == 4  # only the next start can
    outcomes = {entry["outcome"] for entry in json.loads(done.stdout) if entry["kind"] == "index"}
    assert outcomes == {"noted: the next start makes the catalog anew"}
    gateway.terminate()
    gateway.start()
    eventually(lambda: gateway.cli("fsck", "--deep", check=False), lambda result: result.returncode == 0)
    job.wait(gateway)
    job.assert_restores(gateway, tmp_path / "restored", source="cache")


def test_a_row_that_is_not_as_it_was_written_is_met_by_a_call_told_and_mended_by_the_next_start(
    gateway: GatewayProcess, job: Job, tmp_path: Path
) -> None:
    """What nothing else knows: a letter of the metadata in a part's row."""
    at, length = places(data_file(gateway))["value of parts"][0]
    letter = data_file(gateway).read_bytes()[at : at + length].index(b"epoch")
    flip_bit(data_file(gateway), at + letter, 1)
    gateway.start()
    with forebay.Client(gateway.address, retry_timeout=2.0) as client, pytest.raises(forebay.ForebayError, match="checksum"):
        client.describe(job.run, job.step)
    alarms = [alarm["what"] for alarm in gateway.status()["alarms"] if "the catalog is damaged" in alarm["what"]]
    assert len(alarms) == 1 and assert_clear_line(alarms[0]) is None
    eventually(lambda: (gateway.cache / "catalog" / "suspect").exists(), bool)
    gateway.terminate()
    gateway.start()
    job.assert_restores(gateway, tmp_path / "restored", source="cache")
    assert gateway.cli("fsck", "--deep").returncode == 0
