"""What a newer release wrote, in the cache or on a tier, is not ours to drop or to write over: it is left as it is, and said.

Documents and files carry a version each; the catalog may be lost, and then they are all there is.
"""

import asyncio
import shutil
import struct
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import pytest_asyncio

from forebay_gateway import offline
from forebay_gateway.base import durable
from forebay_gateway.cache import footer
from forebay_gateway.cache.layout import CLEAN
from forebay_gateway.core.errors import StartupError, Unavailable, Unsupported
from forebay_gateway.core.layout import manifest_key, part_key
from forebay_gateway.paths.care.finding import Severity
from forebay_gateway.tiers.memory import MemoryStore
from forebay_wire import document, packs
from forebay_wire.checksums import crc32c
from paths.kit import client_of, serving, tier, until
from paths.nodes_kit import Here, below
from paths.test_care_cut_short import Parts

RUN, STEP, SESSION = "team/run", 7, "job-1"
PFS = Path("pfs")
KEYS = {"manifest": manifest_key(RUN, STEP), "part_record": part_key(RUN, STEP, SESSION, 0)}


def newer_document(path: Path) -> None:
    """As a later release may write it: another version, and whole."""
    name = "forebay.manifest" if path.name == "manifest.json" else "forebay.part"
    body = document.open_document(path.read_bytes(), name)
    path.unlink()
    path.write_bytes(document.seal({**body, "version": 3, "more": True}))


def newer_footer(path: Path) -> None:
    """Likewise the footer of a sealed file, which it ends with where its chunk table takes one block."""
    data = path.read_bytes()
    at = len(data) - 2 * footer.BLOCK
    body = bytearray(data[at : at + footer.BLOCK - 4])
    struct.pack_into("<I", body, len(footer.MAGIC), footer.VERSION + 1)
    path.unlink()
    path.write_bytes(data[:at] + body + struct.pack("<I", crc32c(body)) + data[at + footer.BLOCK :])


def newer_pack(path: Path) -> None:
    """Likewise the head of a pack."""
    data = bytearray(path.read_bytes())
    struct.pack_into("<I", data, len(packs.MAGIC), packs.VERSION + 1)
    sum_at = packs.HEAD_BYTES - 4
    index = data[packs.HEAD_BYTES : packs.HEAD_BYTES + packs.index_bytes(bytes(data[: packs.HEAD_BYTES]))]
    struct.pack_into("<I", data, sum_at, crc32c(index, crc32c(data[:sum_at])))
    path.unlink()
    path.write_bytes(data)


@dataclass
class Down:
    """A gateway that is down, with one drained checkpoint: a shard of its own file and a pack."""

    directory: Path

    @property
    def cache(self) -> Path:
        return self.directory / "cache-a"

    def part(self) -> Path:
        (found,) = self.cache.glob("data/*/part-0-*.json")
        return found

    def shard(self) -> Path:
        return max(self.cache.glob("data/*/*.shard"), key=lambda path: path.stat().st_size)

    def pack(self) -> Path:
        (found,) = [path for path in self.cache.glob("data/*/*.shard") if path.read_bytes().startswith(packs.MAGIC)]
        return found

    def content(self) -> dict[str, bytes]:
        """Of the cache's files and the catalog's names; what a start notes for itself is not looked at."""
        paths = [*self.cache.glob("data/*/*"), *self.cache.glob("catalog*/*.mdb")]
        return {str(path.relative_to(self.cache)): path.read_bytes() for path in paths if path.name != "lock.mdb"}

    async def start(self) -> None:
        """Of a gateway, and its end."""
        async with serving(self.directory, tier(self.directory / PFS), cache_keys='repair = "ask"'):
            pass

    def rebuild(self) -> None:
        text = f'[node]\nid = "a"\nlisten = ["unix://{self.directory}/a.sock"]\n[cache]\npath = "{self.cache}"\n'
        config = self.directory / "a.toml"
        config.write_text(f'{text}capacity = "256MiB"\n{tier(self.directory / PFS)}')
        with mock.patch.object(offline, "setup_logging"):  # it is this process's, and its tests look at it
            offline.rebuild(str(config), True, True)


@pytest_asyncio.fixture
async def down(tmp_path: Path) -> Down:
    async with serving(tmp_path, tier(tmp_path / PFS)) as gateway, client_of(gateway) as client:
        part = client.checkpoint(RUN, STEP, session=SESSION)
        await part.put("large", bytes(100_000))
        await part.put_many({f"t/{number:03}": b"tiny" for number in range(80)})
        await part.commit()
        await client.wait(RUN, STEP, "pfs", timeout=60)
    return Down(tmp_path)


WRITTEN: dict[str, tuple[Callable[[Down], Path], Callable[[Path], None]]] = {
    "part file": (Down.part, newer_document),
    "footer": (Down.shard, newer_footer),
    "pack": (Down.pack, newer_pack),
}


@pytest.mark.parametrize("what", WRITTEN)
@pytest.mark.parametrize("lost", [True, False], ids=["no catalog", "a sound catalog"])
async def test_no_catalog_is_made_anew_from_what_it_cannot_read(down: Down, what: str, lost: bool) -> None:
    where, change = WRITTEN[what]
    path = where(down)
    change(path)
    if lost:
        shutil.rmtree(down.cache / "catalog")
        durable.sync_dir(down.cache)
    before = down.content()
    with pytest.raises(StartupError, match="newer") as refused:
        await asyncio.to_thread(down.rebuild)
    assert str(path) in str(refused.value)
    if lost:
        with pytest.raises(StartupError, match="newer"):
            await down.start()
    assert down.content() == before
    assert not list(down.cache.glob("catalog.damaged-*"))


@pytest.mark.parametrize("what", WRITTEN)
async def test_a_file_that_only_a_newer_release_can_judge_stays(down: Down, what: str) -> None:
    """The catalog knows nothing of it, and holds all else."""
    where, change = WRITTEN[what]
    path = where(down)
    stranger = path.parent.with_name(f"{1 << 40:016x}") / path.name.replace("part-0-1.", "part-0-99.")
    stranger.parent.mkdir()
    shutil.copy(path, stranger)
    change(stranger)
    (down.cache / CLEAN).unlink()  # as after a kill: all files are looked at before it serves
    before = stranger.read_bytes()
    with pytest.raises(StartupError, match=r"newer release.*start the release that wrote it"):
        await down.start()
    assert stranger.read_bytes() == before


@pytest_asyncio.fixture
async def parts(down: Down) -> AsyncIterator[Parts]:
    """Up again."""
    async with serving(down.directory, tier(down.directory / PFS), cache_keys='repair = "ask"') as gateway:
        yield Parts(gateway)


@pytest.mark.parametrize("kind", [*KEYS, "part_file"])
async def test_a_repair_writes_over_no_newer_document(down: Down, parts: Parts, kind: str) -> None:
    path = down.part() if kind == "part_file" else down.directory / PFS / KEYS[kind]
    newer_document(path)
    before = path.read_bytes()
    (found,) = [finding for finding in await parts.repair() if finding.kind == kind]
    assert (found.severity, found.remedy, found.outcome) == (Severity.NOTE, "", "")
    assert "newer release" in found.what
    assert path.read_bytes() == before


@pytest.mark.parametrize("name", ["large", "pack"])
async def test_a_check_of_every_byte_goes_on_behind_a_newer_file(down: Down, parts: Parts, name: str) -> None:
    newer_pack(down.pack()) if name == "pack" else newer_footer(down.shard())
    kinds = {finding.kind async for finding in parts.checker.check(deep=True) if finding.severity is Severity.ERROR}
    assert kinds == ({"file_unreadable"} if name == "large" else {"file_damaged"})  # of a pack its checksum tells first


@pytest.mark.expected_logs("a checkpoint cannot complete")
async def test_a_newer_manifest_is_not_replaced(tmp_path: Path) -> None:
    """A node of a newer release has completed the step already."""
    async with serving(tmp_path, tier(tmp_path / PFS), node="b") as gateway, client_of(gateway) as client:
        part = client.checkpoint(RUN, STEP, session="theirs")
        await part.put("large", bytes(1000))
        await part.commit(wait="pfs")
    path = tmp_path / PFS / KEYS["manifest"]
    newer_document(path)
    before = path.read_bytes()
    async with serving(tmp_path, tier(tmp_path / PFS)) as gateway, client_of(gateway) as client:
        part = client.checkpoint(RUN, STEP, session="ours")
        await part.put("large", bytes(2000))
        await part.commit()

        def reason() -> str:
            with gateway.node.catalog.read() as txn:
                session = txn.find_session(RUN, STEP, "ours")
            return "" if session is None else session.reason

        await until(lambda: reason() or path.read_bytes() != before)
        assert "newer release" in reason()
        assert path.read_bytes() == before


async def test_a_deletion_leaves_a_newer_manifest_and_says_so(down: Down, parts: Parts) -> None:
    """Whose it is cannot be told: nothing of the checkpoint goes, here or there."""
    path = down.directory / PFS / KEYS["manifest"]
    newer_document(path)
    before, files = path.read_bytes(), down.content()
    await until(parts.node.usable_tiers)
    for dry_run in (True, False):
        with pytest.raises(Unsupported, match=r"newer release.*delete it with that release"):
            await parts.collector._retention.delete(RUN, STEP, force=True, dry_run=dry_run)
    assert path.read_bytes() == before
    assert (path.parent / "current").is_symlink()
    assert down.content().keys() == files.keys()
    with parts.node.catalog.read() as txn:
        row = txn.checkpoint(RUN, STEP)
    assert row is not None and not row.deleting


async def test_a_deletion_that_meets_a_newer_manifest_later_stops_there(tmp_path: Path) -> None:
    """It had begun while the tier was away."""
    store, key = MemoryStore(), manifest_key("r", 1)
    async with Here(tmp_path, {"pfs": store}) as here:
        await here.save("r", 1)
        here.node.tiers["pfs"].failed(Unavailable("away"))
        assert (await here.retention.delete("r", 1, force=True, dry_run=False)).pending == ("pfs",)
        body = document.open_document(store.objects[key].data, "forebay.manifest")
        here.tiers["pfs"]._store(key, document.seal({**body, "version": 3}))
        before, link = dict(store.objects), dict(store.links)
        here.node.tiers["pfs"].worked()
        assert await here.retention.step() is not None
        assert (store.objects, store.links) == (before, link)
        ((what, _),) = here.node.alarms.values()
        assert "newer release" in what
        del store.objects[key]
        assert await here.retention.step() is None
        assert not here.node.alarms
        assert not below(store, "r", 1)
