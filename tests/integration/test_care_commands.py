"""The care commands on gateways of their own: what runs in the background, what is refused, and what an interruption leaves."""

import contextlib
import json
import os
import threading
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess, posix_tier
from forebay.demo.seaweedfs import SeaweedFS
from integration.conftest import Bucket, MakeGateway, assert_clean_log
from integration.kit import (
    CHUNK,
    SMALL_CHUNKS,
    Cluster,
    Job,
    assert_refused,
    cache_file_of,
    cache_files,
    eventually,
    flip_byte,
)
from soak.form import some

NAME = "rank0/model.bin"
DAY_S = 86400


@pytest.fixture(scope="module")
def auto(tmp_path_factory: pytest.TempPathFactory, s3_server: SeaweedFS) -> Iterator[Cluster[Bucket]]:
    """A gateway that mends by itself, for all tests here that do not end it."""
    directory = tmp_path_factory.mktemp("auto")
    root = directory / "pfs"
    root.mkdir()
    bucket = Bucket(s3_server, directory.name)
    keys = f'{SMALL_CHUNKS}\nscrub_rate = "1GiB"'
    tiers = [posix_tier(root), bucket.tier()]
    gateway = GatewayProcess(directory, "a", tiers, cache_keys=keys, environment=s3_server.environment)
    with gateway:
        first = Job(run="warm", writers=1)  # so that no later test is the one that starts a mover
        first.save(gateway, 0)
        first.wait(gateway)
        gateway.cli("evict", "warm", "7", "--yes")
        gateway.cli("warmup", "warm", "7")
        yield Cluster(gateway, gateway, root, bucket)
    bucket.close()
    assert_clean_log(gateway)


@pytest.fixture
def saved(auto: Cluster[Bucket], job: Job) -> Job:
    """Drained to both tiers."""
    job.writers = 1
    job.save(auto.a, 0)
    job.wait(auto.a)
    return job


def state(gateway: GatewayProcess, job: Job, where: str) -> str:
    return job.copies(gateway)[NAME][where]


def verify(gateway: GatewayProcess, job: Job) -> Any:
    return json.loads(gateway.cli("verify", job.run, "7", "--json", check=False).stdout)


# -- by itself -----------------------------------------------------------------------------------------------------------


def test_a_damaged_cache_file_is_replaced_by_itself(auto: Cluster[Bucket], saved: Job, tmp_path: Path) -> None:
    path = cache_file_of(auto.a, saved.shards(0)[NAME])
    inode = path.stat().st_ino
    flip_byte(path, 5 * CHUNK)
    assert verify(auto.a, saved)["bad"] == 1
    eventually(lambda: state(auto.a, saved, "cache"), lambda now: now == "evictable")
    assert path.stat().st_ino != inode
    assert verify(auto.a, saved)["bad"] == 0
    saved.assert_restores(auto.a, tmp_path / "restored", source="cache")
    assert not [alarm for alarm in auto.a.status()["alarms"] if NAME in alarm["what"]]


@pytest.mark.parametrize(
    ("evicted", "how"), some([*product((False, True), ("flipped", "gone"))], (False, "flipped"), (True, "gone"))
)
def test_a_lost_copy_on_a_tier_comes_back_by_itself(auto: Cluster[Bucket], saved: Job, evicted: bool, how: str) -> None:
    """Where the cache has evicted it, it comes from the other tier: the queue does not wait for ever."""
    if evicted:
        auto.a.cli("evict", saved.run, "7", "--yes")
        assert state(auto.a, saved, "cache") == "evicted"
    key = saved.key(NAME)
    if how == "gone":
        auto.bucket.delete(key)
    else:
        data = auto.bucket.get(key)
        auto.bucket.put(key, bytes([data[0] ^ 1]) + data[1:])
    assert verify(auto.a, saved)["bad"] == 1
    eventually(lambda: state(auto.a, saved, "object"), lambda now: now == "verified")
    assert auto.bucket.get(key) == saved.shards(0)[NAME]
    eventually(lambda: state(auto.a, saved, "cache"), lambda now: now == "evictable")  # and may go again
    assert auto.a.status()["cache"]["dirty_bytes"] == 0


def test_what_a_required_tier_lost_is_not_evicted(pair: Cluster[Bucket], job: Job) -> None:
    job.writers = 1
    job.save(pair.a, 0)
    job.wait(pair.a)
    flip_byte(pair.root / job.key(NAME), 3)
    assert verify(pair.a, job)["bad"] == 1
    assert state(pair.a, job, "cache") == "sealed"
    done = json.loads(pair.a.cli("evict", job.run, "7", "--yes", "--json").stdout)
    assert (done["left"], "not yet on every required tier" in done["reason"]) == (1, True)
    assert state(pair.a, job, "cache") == "sealed"


def test_evict_and_warm_up(auto: Cluster[Bucket], saved: Job, tmp_path: Path) -> None:
    used = auto.a.status()["cache"]["used_bytes"]
    dry = json.loads(auto.a.cli("evict", saved.run, "7", "--json").stdout)
    assert auto.a.status()["cache"]["used_bytes"] == used, "a dry run"
    gone = json.loads(auto.a.cli("evict", saved.run, "7", "--yes", "--json").stdout)
    assert dry == {**gone, "evicted": False} and gone["evicted"]
    assert "would be evicted" in auto.a.cli("evict", saved.run, "7").stdout
    assert (gone["shards"], gone["left"]) == (4, 0)
    assert auto.a.status()["cache"]["used_bytes"] == used - gone["size"]
    back = json.loads(auto.a.cli("warmup", saved.run, "7", "--json").stdout)
    assert (back["shards"], back["left"]) == (4, 0)
    assert auto.a.status()["cache"]["used_bytes"] == used
    saved.assert_restores(auto.a, tmp_path / "restored", source="cache")
    auto.a.cli("pin", saved.run, "7")
    assert_refused(auto.a.cli("evict", saved.run, "7", "--yes", check=False), 2, "pinned")
    assert "nothing waits" in auto.a.cli("drain", "--wait").stdout


# -- refused -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "code", "part"),
    [
        (["verify", "no/such-run", "1"], 3, "no/such-run"),
        (["verify", "a//b", "1"], 2, "run"),
        (["verify", "r", "1", "--from", "nowhere"], 2, "nowhere"),
        (["evict", "no/such-run", "1"], 3, "no/such-run"),
        (["warmup", "no/such-run", "1"], 3, "no/such-run"),
        (["quarantine", "show", "1-99999"], 3, "1-99999"),
        (["quarantine", "release", "1-99999@pfs", "--yes"], 3, "1-99999@pfs"),
        (["quarantine", "release", "rubbish", "--yes"], 3, "rubbish"),
        (["quarantine", "show", f"{2**64}-1"], 3, "quarantine"),
        (["gc", "--older-than", "soon"], 2, "soon"),
        (["scrub", "--start", "--stop"], 2, "one of"),
        (["fsck", "--config", "x.toml"], 2, "--offline"),
        (["rebuild", "--config", "/nowhere/x.toml"], 1, "/nowhere/x.toml"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(auto: Cluster[Bucket], arguments: list[str], code: int, part: str) -> None:
    assert_refused(auto.a.cli(*arguments, check=False), code, part)


@pytest.mark.parametrize("command", [["fsck", "--offline"], ["rebuild"], ["rebuild", "--apply", "--force"]])
def test_offline_commands_refuse_a_running_gateway(auto: Cluster[Bucket], command: list[str]) -> None:
    result = auto.a.cli(*command, "--config", str(auto.a.config), check=False)
    assert_refused(result, 5, f"pid={auto.a.pid}", "stop the gateway")
    assert ("leave --offline away" in result.stderr) == ("--offline" in command)


def test_one_command_at_a_time_and_a_killed_repair_is_repeated(make: MakeGateway, job: Job, tmp_path: Path) -> None:
    """A read that takes its time holds the lock; then the gateway dies in the middle of a repair."""
    job.writers = 1
    gateway = make(cache_keys=f'{SMALL_CHUNKS}\nrepair = "ask"').start()
    job.save(gateway, 0)
    job.wait(gateway)
    flip_byte(cache_file_of(gateway, job.shards(0)[NAME]), 7)
    gateway.terminate()
    gateway.start(failpoints="read.before_chunk=all*sleep:0.4")
    outcomes: list[int] = []

    def verify() -> None:  # until it is not the one that is refused
        done = eventually(lambda: gateway.cli("verify", job.run, "7", check=False), lambda result: result.returncode != 5)
        outcomes.append(done.returncode)

    first = threading.Thread(target=verify)
    first.start()
    refused = eventually(lambda: gateway.cli("fsck", check=False), lambda result: result.returncode == 5)
    assert_refused(refused, 5, "forebay verify", "is running")
    first.join()
    assert outcomes == [4]
    assert gateway.cli("fsck", check=False).returncode == 4  # the lock is free again
    gateway.terminate()
    gateway.start(failpoints="seal.before_rename=kill")  # in the mover: the fetch dies, the gateway does not
    assert gateway.cli("repair", "--apply", check=False).returncode == 4
    assert state(gateway, job, "cache") == "quarantined"
    gateway.terminate()
    gateway.start(failpoints="seal.done=kill")  # the good file has its name, and nobody heard of it
    assert gateway.cli("repair", "--apply", check=False).returncode == 4
    gateway.kill()
    gateway.start()
    assert gateway.cli("repair", "--apply", check=False).returncode == 0
    assert gateway.cli("fsck", "--deep", check=False).returncode == 0
    job.assert_restores(gateway, tmp_path / "restored", source="cache")


# -- scrub ---------------------------------------------------------------------------------------------------------------


def test_a_scrub_is_paced_stopped_and_resumed_after_a_restart(make: MakeGateway, job: Job) -> None:
    job.writers = 3
    keys = f'{SMALL_CHUNKS}\nscrub_rate = "256KiB"\nscrub_every = "off"'  # some ten seconds: commands take their time too
    gateway = make(cache_keys=keys).start()
    job.save_all([gateway])
    job.wait(gateway)
    total = sum(map(len, job.everything.values()))

    def scrub(*arguments: str) -> Any:
        return json.loads(gateway.cli("scrub", *arguments, "--json").stdout)

    assert scrub()["state"] == "off"
    assert_refused(gateway.cli("scrub", "--stop", check=False), 2, "no scrub")
    scrub("--start")
    began_s = time.monotonic()
    assert_refused(gateway.cli("scrub", "--start", check=False), 5, "running already")
    eventually(scrub, lambda now: now["shards"] > 0)
    stopped = scrub("--stop")
    assert stopped["state"] == "stopped" and 0 < stopped["bytes"] < total
    gateway.kill()
    gateway.start()
    resumed = scrub()
    assert {**resumed, "next_in_s": None, "tiers": stopped["tiers"]} == stopped  # the tiers' own clocks went on
    scrub("--start")
    done = eventually(scrub, lambda now: now["passes"] == 1)
    assert done["shards"] == len(job.everything)  # none twice
    assert done["bytes"] >= total
    assert (done["bad"], done["copies"], done["copies_bad"]) == (0, len(job.everything), 0)
    assert time.monotonic() - began_s > total / (256 << 10) - 2


# -- gc ------------------------------------------------------------------------------------------------------------------


def test_gc_takes_what_is_ours_and_old_and_nothing_else(auto: Cluster[Bucket], saved: Job) -> None:
    session = auto.root / saved.key(NAME)
    here = session.parent
    old, young = here / ".forebay-tmp-00aa", here / ".forebay-tmp-00bb"
    foreign = here.parent.parent / "notes.txt"
    strange = here.parent.parent / "ffffffff" / ".forebay-tmp-00cc"
    strange.parent.mkdir()
    for path in (old, young, foreign, strange):
        path.write_bytes(b"x")
    for path in (old, foreign, strange):
        os.utime(path, (time.time() - 2 * DAY_S,) * 2)
    gone = "deleted/run/step-000000000003/00112233/x.bin"  # nothing here knows the step any more
    uploads = begin_uploads(auto.bucket, saved.key(NAME), f"{saved.directory}/else.bin", gone)
    dry = {entry["path"]: entry for entry in collect(auto.a)}
    below = lambda path: str(path.relative_to(auto.root))  # noqa: E731
    assert dry[below(old)]["deletable"] and not dry[below(young)]["deletable"]
    assert dry[below(foreign)]["kind"] == dry[below(strange)]["kind"] == "foreign"
    assert (dry[gone]["kind"], dry[gone]["where"]) == ("foreign", "object")
    assert old.exists()
    collect(auto.a, "--apply")
    assert [path.exists() for path in (old, young, foreign, strange)] == [False, True, True, True]
    assert open_uploads(auto.bucket) == uploads  # too young
    collect(auto.a, "--apply", "--older-than", "0s")
    assert [path.exists() for path in (young, foreign, strange)] == [False, True, True]
    del uploads[saved.key(NAME)]
    assert open_uploads(auto.bucket) == uploads
    assert verify(auto.a, saved)["bad"] == 0


def collect(gateway: GatewayProcess, *arguments: str) -> Any:
    return json.loads(gateway.cli("gc", "--json", *arguments).stdout)


def begin_uploads(bucket: Bucket, *keys: str) -> dict[str, str]:
    with contextlib.closing(bucket.server.client()) as s3:
        made = {key: s3.create_multipart_upload(Bucket=bucket.server.bucket, Key=f"{bucket.prefix}/{key}") for key in keys}
    return {key: answer["UploadId"] for key, answer in made.items()}


def open_uploads(bucket: Bucket) -> dict[str, str]:
    with contextlib.closing(bucket.server.client()) as s3:
        answer = s3.list_multipart_uploads(Bucket=bucket.server.bucket)
    start = f"{bucket.prefix}/"
    return {
        upload["Key"].removeprefix(start): upload["UploadId"]
        for upload in answer.get("Uploads", ())
        if upload["Key"].startswith(start)
    }


def test_gc_drops_a_session_that_a_newer_one_replaced(auto: Cluster[Bucket], saved: Job, tmp_path: Path) -> None:
    older = auto.root / saved.key(NAME)
    again = Job(run=saved.run, session="launch-2", writers=1)
    again.save(auto.a, 0)
    again.wait(auto.a)
    directory = str(Path(saved.key(NAME)).parents[1])
    kinds = {entry["path"]: entry for entry in collect(auto.a)}
    assert kinds[directory]["kind"] == "superseded" and not kinds[directory]["deletable"]
    collect(auto.a, "--apply", "--older-than", "0s")
    assert not older.exists()
    assert not auto.bucket.keys(f"{directory}/")
    assert len(cache_files(auto.a)) >= 4
    again.assert_restores(auto.a, tmp_path / "restored")
    assert verify(auto.a, again)["bad"] == 0
    with forebay.Client(auto.a.address) as client:
        assert [found for found in client.care.fsck(deep=True) if found.run == saved.run] == []
