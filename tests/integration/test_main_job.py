"""The main job: three writers on two gateways, a POSIX tier and a real S3 server, and the loss of everything in turn."""

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

import forebay
from forebay.demo.gateways import GatewayProcess
from forebay.errors import Corrupt
from forebay_wire.manifest import Manifest, PartRecord
from forebay_wire.names import session8
from integration.conftest import Bucket
from integration.kit import (
    CHUNK,
    Cluster,
    Job,
    assert_clear,
    assert_refused,
    cache_file_of,
    eventually,
    files_below,
    flip_byte,
    held,
    some_bytes,
)

Pair = Cluster[Bucket]


@pytest.fixture
def saved(pair: Pair, job: Job) -> Pair:
    """Writers 0 and 2 through A, writer 1 through B; complete on both tiers. B has nothing of A's in its cache."""
    job.save_and_wait(pair)
    return pair


def missing_writers(client: forebay.Client, job: Job) -> list[int]:
    return [missing.writer for missing in client.describe(job.run, job.step).missing]


def not_drained(gateway: GatewayProcess, job: Job, writer: int) -> set[str]:
    """Of what the writer put through this gateway: the shards that are not verified on both tiers."""
    copies = job.copies(gateway)
    return {name for name in job.shards(writer) if {copies[name]["pfs"], copies[name]["object"]} != {"verified"}}


def lose(gateway: GatewayProcess) -> None:
    """The node dies and its disk with it."""
    gateway.kill()
    gateway.wipe()


def test_a_partial_checkpoint_is_never_visible(pair: Pair, job: Job, tmp_path: Path) -> None:
    a, b = pair
    root, bucket = pair.root / job.run, pair.bucket
    job.save(a, 0)
    job.save(b, 1)
    # Until both parts lie on both tiers there could be an excuse; from then on only writer 2 is missing. What waits still is
    # `.metadata`, which readers take for the sign of completeness.
    for gateway, writer in ((a, 0), (b, 1)):
        eventually(partial(not_drained, gateway, job, writer), lambda names: names <= {".metadata"})
    with forebay.Client(a.address) as client:  # and that it waits for a writer is no drain that stalls
        eventually(lambda: [tier.oldest_pending_s for tier in client.status().tiers], lambda ages: ages == [None, None])
    for gateway in pair:
        with forebay.Client(gateway.address) as client:
            eventually(partial(missing_writers, client, job), lambda found: found == [2])
            assert client.latest(job.run) is None
            found = client.describe(job.run, job.step)
            assert (found.state, found.complete) == ("incomplete", False)
            with pytest.raises(forebay.Incomplete, match=r"writer 2") as caught:
                client.restore_dir(job.run, job.step, tmp_path / "never")
            assert [missing.writer for missing in caught.value.missing] == [2]
            assert [run.latest_step for run in client.runs() if run.run == job.run] == [None]
        assert not (tmp_path / "never").exists()
        assert_refused(gateway.cli("restore", job.run, "latest", str(tmp_path / "never"), check=False), 3, "no complete")
        assert_refused(gateway.cli("restore", job.run, "7", str(tmp_path / "never"), check=False), 4, "writer 2")
        listed = gateway.cli("ls", job.run).stdout
        assert "incomplete" in listed
        [entry] = json.loads(gateway.cli("ls", job.run, "--json").stdout)
        assert (entry["step"], entry["state"]) == (7, "incomplete")
        assert [missing["writer"] for missing in entry["missing"]] == [2]
        shown = gateway.cli("info", job.run, "7").stdout
        assert "incomplete" in shown
        assert "writer 2 (absent)" in shown
        told = json.loads(gateway.cli("info", job.run, "7", "--json").stdout)
        assert told["missing"] == [{"writer": 2, "shards": [], "state": "absent"}]
    assert not list(root.rglob("manifest.json"))
    assert not list(root.rglob(".metadata"))
    assert not [key for key in bucket.keys(job.run) if key.endswith(("manifest.json", "/.metadata"))]

    job.save(a, 2)
    for gateway in pair:
        job.wait(gateway)
        with forebay.Client(gateway.address) as client:
            assert client.latest(job.run) == job.step
            assert client.describe(job.run, job.step).missing == ()
        assert "incomplete" not in gateway.cli("ls", job.run).stdout
    job.assert_restores(b, tmp_path / "restored")


def test_plain_files_and_objects_come_out(saved: Pair, job: Job) -> None:
    root, bucket, directory = saved.root, saved.bucket, job.directory
    inner = f"{directory}/{session8(job.session)}"
    assert (root / directory / "current").readlink() == Path(session8(job.session))
    plain = files_below(root / inner)
    parts = {name: plain.pop(name) for name in list(plain) if name.startswith(".forebay/")}
    assert plain == job.everything
    assert files_below(root / directory / "current") == plain | parts

    shards = [key for key in bucket.keys(inner) if "/.forebay/" not in key]
    assert {key.removeprefix(f"{inner}/"): bucket.get(key) for key in shards} == job.everything
    assert bucket.keys(f"{directory}/current") == []

    for read in (lambda key: (root / key).read_bytes(), bucket.get):
        manifest = Manifest.from_json(read(f"{directory}/manifest.json"))
        assert (manifest.run, manifest.step, manifest.session, manifest.writers) == (job.run, 7, job.session, 3)
        assert manifest.metadata == job.metadata
        assert {(writer, entry.name, entry.size) for writer, entry in manifest.shards()} == {
            (writer, name, len(data)) for writer in range(3) for name, data in job.shards(writer).items()
        }
        for writer, node in enumerate("aba"):
            record = PartRecord.from_json(read(f"{inner}/.forebay/parts/{writer}.json"))
            assert (record.writer, record.node, record.session) == (writer, node, job.session)
            assert {entry.name for entry in record.shards} == set(job.shards(writer))


def test_nodes_and_then_the_posix_tier_are_lost(doomed: Pair, job: Job, tmp_path: Path) -> None:
    a, b = doomed
    later = replace(job, step=8)
    job.save_and_wait(doomed)
    later.save_and_wait(doomed)
    lose(a)
    job.assert_restores(b, tmp_path / "pfs-alone", "pfs")
    job.assert_restores(b, tmp_path / "object-alone", "object")
    job.assert_restores(b, tmp_path / "nearest")
    assert set(job.copies(b)["rank0/model.bin"].values()) == {"evictable", "verified"}  # fetched into B's cache
    job.assert_restores(b, tmp_path / "cache", "cache")

    # B has heard of the later step from the POSIX tier alone; then that goes away.
    assert "complete" in b.cli("info", job.run, "8").stdout
    shutil.rmtree(doomed.root)
    with forebay.Client(b.address) as client:
        assert client.latest(job.run) == 8
    later.assert_restores(b, tmp_path / "posix-lost")
    assert later.copies(b)["rank0/model.bin"]["cache"] == "evictable"  # by a mover, not through the front

    # A node that never saw the job.
    lose(b)
    a.start()
    with forebay.Client(a.address) as client:
        eventually(lambda: {tier.name: tier.state for tier in client.status().tiers}["object"], lambda state: state == "ok")
    job.assert_restores(a, tmp_path / "fresh")


@pytest.mark.parametrize("away", ["own cache", "other cache"])
def test_any_byte_range_is_served(saved: Pair, job: Job, away: str) -> None:
    a, b = saved
    name = "rank0/model.bin"
    data = job.shards(0)[name]
    gateway = a if away == "own cache" else b
    ranges = [(0, 0), (0, 1), (1, CHUNK), (CHUNK - 1, 2), (3 * CHUNK, CHUNK), (CHUNK + 7, 5 * CHUNK), (len(data) - 1, 1)]
    with forebay.Client(gateway.address) as client:
        reader = client.open(job.run, job.step)
        for offset, length in [*ranges, (len(data), 0), (0, len(data))]:
            assert reader.read(name, offset, length) == data[offset : offset + length]
        buffer = bytearray(100_000)
        assert reader.readinto(name, buffer, 123_456) == 100_000
        assert buffer == data[123_456:223_456]
        with pytest.raises(forebay.InvalidArgument):
            reader.read(name, len(data), 1)


def test_damage_on_the_posix_tier_is_passed_over_in_the_middle_of_a_shard(saved: Pair, job: Job, tmp_path: Path) -> None:
    _, b = saved
    name = "rank0/model.bin"
    flip_byte(saved.root / job.key(name), 9 * CHUNK + 77)
    job.assert_restores(b, tmp_path / "restored")
    states = job.copies(b)
    assert (states[name]["pfs"], states[name]["object"]) == ("quarantined", "verified")
    assert states["rank2/model.bin"]["pfs"] == "verified"
    assert "quarantined" in b.cli("info", job.run, "7", name).stdout


def test_damage_is_passed_over_when_the_bytes_stream_through(saved: Pair, job: Job) -> None:
    """A small range is not fetched into the cache: the fall-over happens inside one stream."""
    _, b = saved
    name = "rank0/model.bin"
    data = job.shards(0)[name]
    flip_byte(saved.root / job.key(name), 4 * CHUNK + 5)
    with forebay.Client(b.address) as client:
        reader = client.open(job.run, job.step)
        assert reader.read(name, 2 * CHUNK + 3, 5 * CHUNK) == data[2 * CHUNK + 3 : 7 * CHUNK + 3]
    states = job.copies(b)[name]
    assert (states["cache"], states["pfs"], states["object"]) == ("evicted", "quarantined", "verified")


def test_damage_in_the_cache_is_passed_over(saved: Pair, job: Job, tmp_path: Path) -> None:
    a, _ = saved
    name = "rank0/model.bin"
    flip_byte(cache_file_of(a, job.shards(0)[name]), 5 * CHUNK + 1)
    job.assert_restores(a, tmp_path / "restored")
    assert job.copies(a)[name] == {"cache": "quarantined", "pfs": "verified", "object": "verified"}
    alarms = a.status()["alarms"]
    assert any(name in alarm["what"] and "damaged" in alarm["what"] for alarm in alarms)
    job.assert_restores(a, tmp_path / "again")


def test_damage_in_every_copy_is_corrupt_and_gives_no_byte(saved: Pair, job: Job, tmp_path: Path) -> None:
    _, b = saved
    name = "rank0/model.bin"
    key = job.key(name)
    data = bytearray(job.shards(0)[name])
    data[8 * CHUNK] ^= 1
    saved.bucket.put(key, bytes(data))
    flip_byte(saved.root / key, 8 * CHUNK)
    for attempt in ("first", "second"):  # the second knows already
        target = tmp_path / attempt
        result = b.cli("restore", job.run, "7", str(target), check=False)
        assert_refused(result, 4, name, "pfs", "object")
        assert not target.exists()
    with forebay.Client(b.address) as client:
        reader = client.open(job.run, job.step)
        with pytest.raises(Corrupt) as caught:
            reader.read(name)
        assert_clear(caught.value, Corrupt, name)
        assert reader.read("rank2/model.bin") == job.shards(2)["rank2/model.bin"]  # the others are not drawn in
    states = job.copies(b)[name]
    assert (states["pfs"], states["object"]) == ("quarantined", "quarantined")


def test_what_one_node_learns_does_not_complete_the_other_nodes_part(pair: Pair, job: Job, tmp_path: Path) -> None:
    """Complete on the first tier is no proof for the second: B reads one's manifest while A's drain to the other stands."""
    a, b = pair
    bucket, directory = pair.bucket, job.directory
    with held(a, "object"):
        job.save_and_wait(pair, "pfs")
        assert "complete" in b.cli("info", job.run, "7").stdout
        eventually(partial(not_drained, b, job, 1), lambda names: not names)
        with forebay.Client(b.address) as client, pytest.raises(forebay.DeadlineExceeded):
            client.wait(job.run, job.step, "object", timeout=3)
        assert bucket.keys(f"{directory}/manifest.json") == []
        assert [key.rpartition("/")[2] for key in bucket.keys(directory) if "/parts/" in key] == ["1.json"]
    for gateway in pair:
        job.wait(gateway, "object")
    manifest = Manifest.from_json(bucket.get(f"{directory}/manifest.json"))
    assert (manifest.metadata, [part.node for part in manifest.parts]) == (job.metadata, ["a", "b", "a"])
    job.assert_restores(b, tmp_path / "restored", "object")


def test_a_sign_of_completeness_of_another_writer_reaches_every_tier(pair: Pair, job: Job) -> None:
    """`.metadata` of a writer other than 0, also after its node has read the first tier's manifest."""
    b = pair.b
    parts = {0: {"zero.bin": some_bytes(CHUNK, 0)}, 1: {"one.bin": some_bytes(CHUNK, 1), "dcp/.metadata": b"index"}}
    job.writers = 2
    with forebay.Client(b.address) as client:
        with held(b, "object"):
            for writer, gateway in enumerate(pair):
                with forebay.Client(gateway.address) as own, job.part(own, writer) as part:
                    part.put_many(parts[writer])
                    part.commit()
            client.wait(job.run, job.step, "pfs", timeout=30)
            assert client.describe(job.run, job.step).complete
        client.wait(job.run, job.step, "object", timeout=30)
    assert pair.bucket.get(job.key("dcp/.metadata")) == b"index"
