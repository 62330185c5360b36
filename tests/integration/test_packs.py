"""Small shards in packs, seen from outside: through gateways, on the tiers, on another node, and without any gateway."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import forebay
from forebay.export import TierCopy, export_dir
from forebay_gateway.catalog import schema
from forebay_wire.manifest import Manifest
from forebay_wire.names import session8
from integration.conftest import Bucket, MakeGateway
from integration.kit import Cluster, files_below, flip_byte, some_bytes
from soak.form import some

Pair = Cluster[Bucket]
RUN, STEP = "team/packs", 3


def tiny(count: int = 300, seed: object = 0) -> dict[str, bytes]:
    """Small shards, an empty one and one just below the limit among them, and the sign of completeness."""
    made = {f"t/{n:04}": some_bytes((n * 37) % 4000, (seed, n)) for n in range(count)}
    return made | {"t/large": some_bytes((1 << 20) - 1, seed), "plain": some_bytes((1 << 20) + 1, seed), ".metadata": b"m" * 99}


def save(client: forebay.Client, shards: dict[str, bytes], run: str = RUN, wait: str = "cache") -> None:
    with client.checkpoint(run, STEP, session="s") as part:
        part.put_many(shards)
        part.commit({"epoch": 1}, wait=wait, timeout=60)


def session_files(root: Path, run: str = RUN) -> set[str]:
    base = root / run / f"step-{STEP:012d}" / session8("s")
    return {path.relative_to(base).as_posix() for path in base.rglob("*") if path.is_file()}


def manifest_of(root: Path, run: str = RUN) -> Manifest:
    return Manifest.from_json((root / run / f"step-{STEP:012d}" / "manifest.json").read_bytes())


def test_multitudes_become_few_files_and_stay_what_they_are(pair: Pair, tmp_path: Path) -> None:
    """Saved on node a; listed, read, ranged and restored on both; few files on both tiers."""
    shards = tiny()
    with forebay.Client(pair.a.address) as client:
        save(client, shards, wait="all")
        found = client.describe(RUN, STEP)
        assert (found.shard_count, found.size) == (len(shards), sum(map(len, shards.values())))
        assert {shard.name: shard.size for shard in found.shards} == {name: len(data) for name, data in shards.items()}
        assert {state for shard in found.shards for state in shard.copies.values()} == {"verified"}
    files = session_files(pair.root)
    assert {"plain", ".metadata", ".forebay/parts/0.json"} < files and len(files) <= 6
    packs = [name for name in files if name.startswith(".forebay/packs/0-")]
    assert len(packs) == len(files) - 3
    objects = pair.bucket.keys(f"{RUN}/step-{STEP:012d}/")
    assert len(objects) == len(files) + 1
    for node in pair:
        with forebay.Client(node.address) as client:
            reader = client.open(RUN, STEP)
            assert reader.names() == sorted(shards)
            for name in ("t/0000", "t/0001", "t/0299", "t/large", "plain", ".metadata"):
                assert reader.read(name) == shards[name]
            assert reader.read("t/large", 1000, 70_000) == shards["t/large"][1000:71_000]
            assert reader.read("t/large", 0, 0) == b""
            with pytest.raises(forebay.NotFound):
                reader.read(packs[0])
            with pytest.raises(forebay.InvalidArgument):
                reader.read("t/0001", 30, 30)
            client.restore_dir(RUN, STEP, tmp_path / node.node)
        assert files_below(tmp_path / node.node) == shards


@pytest.mark.parametrize("source", ["pfs", "object"])
def test_a_shard_is_read_out_of_a_pack_on_a_tier(pair: Pair, source: str) -> None:
    shards = tiny(100, source)
    with forebay.Client(pair.a.address) as client:
        save(client, shards, f"{RUN}-{source}", wait="all")
    with forebay.Client(pair.b.address) as client:
        reader = client.open(f"{RUN}-{source}", STEP, source=source)
        for name in list(shards)[:40]:
            assert reader.read(name) == shards[name]


def test_many_reads_bring_the_pack_into_the_cache(pair: Pair) -> None:
    shards = tiny(100, "fetch")
    run = f"{RUN}-fetch"
    with forebay.Client(pair.a.address) as client:
        save(client, shards, run, wait="all")
    with forebay.Client(pair.b.address) as client:
        reader = client.open(run, STEP)

        def states() -> set[str]:
            return {shard.state for shard in client.describe(run, STEP).shards if shard.name.startswith("t/0")}

        reader.read("t/0001")
        assert states() == {"evicted"}
        for n in range(20):
            assert reader.read(f"t/{n:04}") == shards[f"t/{n:04}"]
        assert states() == {"evictable"}


def test_care_of_packs_finds_nothing_wrong(pair: Pair) -> None:
    run = f"{RUN}-care"
    with forebay.Client(pair.a.address) as client:
        save(client, tiny(80, "care"), run, wait="all")
        assert {report.state for report in client.care.verify(run, STEP)} == {"good"}
        errors = [
            found for found in client.care.fsck(deep=True) if run in (found.run, found.path) and found.severity == "error"
        ]
        assert errors == []
        foreign = [found for found in client.care.fsck() if found.kind == "foreign_file" and run in found.path]
        assert foreign == []
        gone = client.delete(run, STEP)
        assert gone.shards == 83
        with pytest.raises(forebay.NotFound):
            client.open(run, STEP)
    assert session_files(pair.root, run) == set()


def test_a_handful_stays_plain(make: MakeGateway, root: Path) -> None:
    with make() as gateway, forebay.Client(gateway.address) as client:
        shards = {f"s{n}": b"x" * n for n in range(63)}
        save(client, shards, wait="pfs")
        assert session_files(root) == {*shards, ".forebay/parts/0.json"}
        assert not any(part.packs for part in manifest_of(root).parts)


def test_large_packs_reach_an_object_store(make: MakeGateway, bucket: Bucket) -> None:
    """With chunks as large as they are unless configured: an upload's part of a pack is many more, and small, chunks."""
    gateway = make("large-packs", [bucket.tier()], cache_keys="").start()
    shards = {f"t/{n:03}": some_bytes(250_000, n) for n in range(250)}
    with forebay.Client(gateway.address) as client:
        save(client, shards, wait="object")
        client.care.evict(RUN, STEP)
        reader = client.open(RUN, STEP)
        assert {name: reader.read(name) for name in list(shards)[::50]} == dict(list(shards.items())[::50])


def test_never_means_never(make: MakeGateway, root: Path) -> None:
    with make(cache_keys='chunk_size = "64KiB"\npack = "never"') as gateway, forebay.Client(gateway.address) as client:
        shards = {f"s{n}": b"x" * n for n in range(100)}
        save(client, shards, wait="pfs")
        assert session_files(root) == {*shards, ".forebay/parts/0.json"}


def test_many_small_requests_make_few_files(make: MakeGateway, root: Path) -> None:
    with make() as gateway, forebay.Client(gateway.address) as client:
        shards = {f"s{n:03}": some_bytes(n, n) for n in range(600)}
        with client.checkpoint(RUN, STEP, session="s") as part:
            for first in range(0, 600, 20):
                part.put_many({name: shards[name] for name in list(shards)[first : first + 20]})
            part.commit(wait="pfs", timeout=60)
        packs = [name for name in session_files(root) if ".forebay/packs" in name]
        assert len(packs) == 1
        assert {name: client.open(RUN, STEP).read(name) for name in list(shards)[::7]} == {
            name: shards[name] for name in list(shards)[::7]
        }


def test_names_are_one_space_over_packs_and_plain_shards(make: MakeGateway) -> None:
    shards = {f"s{n:03}": some_bytes(100, n) for n in range(100)}
    with make() as gateway, forebay.Client(gateway.address) as client:
        part = client.checkpoint(RUN, STEP, writers=2, writer=0, session="s")
        first = part.put_many(shards)
        assert part.put_many(shards) == first  # the same bytes: nothing new
        assert part.put("s001", shards["s001"]).crc32c == first[1].crc32c
        with pytest.raises(forebay.AlreadyExists, match="s001"):
            part.put("s001", b"other")
        with pytest.raises(forebay.AlreadyExists, match="s050"):
            part.put_many(shards | {"new": b"n", "s050": b"other"})
        other = client.checkpoint(RUN, STEP, writers=2, writer=1, session="s")
        with pytest.raises(forebay.AlreadyExists, match="another writer"):
            other.put_many({"s007": shards["s007"]})
        gateway.kill()
        gateway.start()
        again = client.checkpoint(RUN, STEP, writers=2, writer=0, session="s")
        assert again.put_many(shards) == first
        with pytest.raises(forebay.AlreadyExists, match="s002"):
            again.put("s002", b"other")
        assert again.abort() == 100
        assert list((gateway.cache / "data").glob("*/*.shard")) == []


def test_one_bad_name_among_ten_thousand(make: MakeGateway) -> None:
    shards = {f"s{n:05}": b"x" for n in range(10_000)}
    with make() as gateway, forebay.Client(gateway.address) as client:
        part = client.checkpoint(RUN, STEP, session="s")
        with pytest.raises(forebay.InvalidArgument, match=r"bad//name"):
            part.put_many(shards | {"bad//name": b"y"})
        assert part.receipts == {}
        assert list((gateway.cache / "data").glob("*/*.shard")) == []


def test_a_catalog_of_before_opens_and_serves(make: MakeGateway) -> None:
    """Rows without the fields of packs, and no database of theirs."""
    import lmdb

    with make() as gateway, forebay.Client(gateway.address) as client:
        save(client, {"a": b"1", "b": b"2" * 3000})
        gateway.terminate()
        path = gateway.cache / "catalog"
        with lmdb.open(str(path), max_dbs=40, map_size=1 << 30) as env, env.begin(write=True) as txn:
            env_db = env.open_db(b"packs", txn=txn)
            txn.drop(env_db)
            import msgspec

            for name, keep in ((b"shards", 9), (b"parts", 8)):
                database = env.open_db(name, txn=txn)
                for key, value in list(txn.cursor(database)):
                    row = msgspec.msgpack.decode(schema.checked(value, "row"))
                    assert len(row) > keep
                    txn.put(key, schema.with_checksum(msgspec.msgpack.encode(row[:keep])), db=database)
        gateway.start()
        assert client.open(RUN, STEP).read("b") == b"2" * 3000
        assert client.describe(RUN, STEP).shard_count == 2


# -- without a gateway -------------------------------------------------------------------------------------------------------


@pytest.fixture
def exported(make: MakeGateway, root: Path) -> dict[str, bytes]:
    """A checkpoint on the POSIX tier; its gateway is gone."""
    shards = tiny(150, "export")
    with make() as gateway, forebay.Client(gateway.address) as client:
        save(client, shards, wait="pfs")
    return shards


def forebay_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from forebay.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_export_needs_no_gateway(exported: dict[str, bytes], root: Path, tmp_path: Path) -> None:
    done = forebay_command("export", RUN, str(tmp_path / "out"), "--root", str(root), "--json")
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert (said["shards"], said["size"], said["step"]) == (len(exported), sum(map(len, exported.values())), STEP)
    assert files_below(tmp_path / "out") == exported
    again = forebay_command("export", RUN, str(STEP), str(tmp_path / "out"), "--root", str(root))  # as restore: replaced whole
    assert again.returncode == 0 and "exported" in again.stdout


def test_export_says_what_is_not_there(exported: dict[str, bytes], root: Path, tmp_path: Path) -> None:
    for words in ((RUN, "4"), ("no/run", "latest"), ("no/run", "4")):
        done = forebay_command("export", *words, str(tmp_path / "out"), "--root", str(root))
        assert done.returncode == 3 and done.stderr.count("\n") == 1, done
    assert forebay_command("export", RUN, "x", str(tmp_path / "out"), "--root", str(root)).returncode == 2
    assert forebay_command("export", "a//b", "4", str(tmp_path / "out"), "--root", str(root)).returncode == 2
    assert forebay_command("export", RUN, str(tmp_path / "out"), "--root", str(tmp_path / "none")).returncode == 3
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("what", some(["plain", "packed", "cut", "gone", "manifest"], "plain", "packed", "manifest"))
def test_export_hands_out_nothing_damaged(what: str, exported: dict[str, bytes], root: Path, tmp_path: Path) -> None:
    base = root / RUN / f"step-{STEP:012d}"
    (pack,) = [path for path in (base / session8("s")).rglob("*.pack") if path.stat().st_size < 1 << 20] or [
        next((base / session8("s")).rglob("*.pack"))
    ]
    match what:
        case "plain":
            flip_byte(base / session8("s") / "plain", 70_000)
        case "packed":
            flip_byte(pack, pack.stat().st_size - 10)
        case "cut":
            pack.write_bytes(pack.read_bytes()[:-10])
        case "gone":
            pack.unlink()
        case "manifest":
            flip_byte(base / "manifest.json", 50)
    done = forebay_command("export", RUN, str(tmp_path / "out"), "--root", str(root))
    assert done.returncode == 4, done
    assert str(root) in done.stderr
    assert not (tmp_path / "out").exists() or files_below(tmp_path / "out") == {}


def test_export_refuses_what_is_in_the_way(exported: dict[str, bytes], root: Path, tmp_path: Path) -> None:
    (tmp_path / "out/plain").mkdir(parents=True)
    with pytest.raises(forebay.InvalidArgument, match="in the target is a directory"):
        export_dir(root, RUN, STEP, tmp_path / "out", progress=False)
    copy: Any = TierCopy.open(root, RUN, STEP)
    assert [shard.name for shard in copy.shards()] == sorted(exported)


def test_export_through_a_gateway_is_a_restore(make: MakeGateway, tmp_path: Path) -> None:
    shards = tiny(70, "through")
    with make() as gateway, forebay.Client(gateway.address) as client:
        save(client, shards)
        done = forebay_command("--address", gateway.address, "export", RUN, "latest", str(tmp_path / "out"))
        assert done.returncode == 0, done.stderr
    assert files_below(tmp_path / "out") == shards
