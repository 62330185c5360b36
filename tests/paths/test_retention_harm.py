"""Retention where things go wrong: documents that are foreign, damaged or newer, rights that lack, pauses, saves meanwhile."""

from functools import partial
from pathlib import Path

import msgspec
import pytest

from forebay_gateway.base import failpoints
from forebay_gateway.core.errors import PermissionDenied, Unavailable, Unsupported
from forebay_gateway.core.layout import manifest_key
from forebay_gateway.core.records import CheckpointRow, PublishState
from forebay_gateway.core.retention import RESERVE_KEY, ledger_key, pins_dir
from forebay_gateway.core.states import CopyEvent
from forebay_gateway.paths.expire import LOOK_S
from forebay_gateway.paths.ledgers import TTL_S, Busy
from forebay_gateway.paths.reserve import RESERVE_BYTES
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.safety import copy_lost
from forebay_gateway.paths.standing import READ_LATELY_S
from forebay_gateway.tiers.base import ObjectInfo, StorageFull
from forebay_gateway.tiers.memory import MemoryStore, MemoryTier
from forebay_gateway.tiers.monitor import TierState
from paths.nodes_kit import LAST_2, Here, below, ledger_of, put_ledger


async def test_what_a_newer_release_has_written_is_left_to_it(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        document = b'{"format": "forebay.retain.2", "run": "r", "owners": ["b"]}'
        MemoryTier("pfs", store)._store(ledger_key("r"), document)
        with pytest.raises(Unsupported, match="newer release"):
            await node.look("r")
        assert store.objects[ledger_key("r")].data == document
        assert node.on_tier("r") == [1, 2, 3]


@pytest.mark.expected_logs("ledger of retention is damaged")
@pytest.mark.parametrize("names", [[-1, "a"], [2**64, "a"], [1, "../../b"]])
async def test_a_ledger_with_names_that_cannot_be_harms_no_gateway(tmp_path: Path, names: list[object]) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        document = msgspec.json.encode({"format": "forebay.retain", "run": "r", "going": [names]})
        MemoryTier("pfs", store)._store(ledger_key("r"), document)
        assert await node.expiries["pfs"].step() is not None


def copied(store: MemoryStore, source: str, target: str) -> None:
    for key in [key for key in store.objects if key.startswith(f"{source}/")]:
        store.objects[target + key.removeprefix(source)] = store.objects[key]


@pytest.mark.expected_logs("manifest that is damaged, or not this one")
async def test_a_copied_run_or_step_never_takes_the_original_s_files_with_it(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", '[[retain]]\nrun = "copy"\nkeep_last = 1\n') as node:
        await node.save("r", 1)
        original = below(store, "r", 1)
        copied(store, "r", "copy")
        await node.look("copy")
        await node.save("copy", 2)
        await node.look("copy")
        assert below(store, "r", 1) == original
        copied(store, "copy/step-000000000002", "copy/step-000000000003")
        await node.look("copy")
        assert node.on_tier("copy") == [1, 2, 3]


@pytest.mark.expected_logs("manifest that is damaged, or not this one", "a manifest is damaged")
async def test_nothing_goes_for_the_sake_of_a_manifest_that_was_damaged_since(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, keys='[[retain]]\nrun = "**"\nkeep_last = 1\n') as node:
        await node.save("r", 1, 2)
        await node.look("r", apply=False)
        MemoryTier("pfs", store)._store("r/step-000000000002/manifest.json", b"\x00" * 100)
        fates = await node.look("r")
        assert node.on_tier("r") == [1, 2], fates
        await node.save("r", 3)
        await node.look("r")
        assert node.on_tier("r") == [2, 3]


async def test_nothing_goes_for_the_sake_of_copies_known_to_be_bad_or_of_what_is_being_deleted(tmp_path: Path) -> None:
    async with Here(tmp_path, {"pfs": MemoryStore()}, keys='[[retain]]\nrun = "**"\nkeep_last = 1\n') as node:
        await node.save("r", 1, 2)
        with node.node.catalog.read() as txn:
            session = txn.find_session("r", 2, "s")
            assert session is not None
            keys = [row.key for row in txn.shards(session.id)]
        lost = partial(copy_lost, tier="pfs", event=CopyEvent.MISMATCH, error="flipped", required=["pfs"])
        await node.node.catalog.write(lambda txn: lost(txn, keys[0]))
        fates = await node.look("r")
        assert node.on_tier("r") == [1, 2]
        assert "damaged" in fates[1].reason
        await node.save("r", 3)
        await node.node.catalog.write(lambda txn: txn.mark_deleting("r", 3))
        fates = await node.look("r")
        assert node.on_tier("r") == [1, 2, 3]
        assert "being deleted" in fates[2].reason


@pytest.mark.expected_logs("retention cannot work on a run")
async def test_a_tier_that_lets_nothing_be_deleted_still_takes_what_drains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def denied(tier: MemoryTier, key: str) -> None:
        raise PermissionDenied("no deletion here", tier=tier.name)

    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("q", 1, 2, 3)
        await node.save("r", 1, 2, 3)
        with monkeypatch.context() as patched:
            patched.setattr(MemoryTier, "delete", denied)
            await node.expiries["pfs"].step()
        assert node.node.tiers["pfs"].usable
        what, _ = node.node.alarms["retain-pfs"]
        assert "2 of the runs" in what and "no deletion here" in what
        await node.clock.advance(LOOK_S)
        await node.expiries["pfs"].step()
        assert node.on_tier("q") == node.on_tier("r") == [2, 3]
        assert "retain-pfs" not in node.node.alarms


async def test_a_pin_made_while_the_tier_was_away_is_told_at_the_next_look(tmp_path: Path) -> None:
    store = MemoryStore()
    async with (
        Here(tmp_path, {"pfs": store}, "a", LAST_2) as one,
        Here(tmp_path, {"pfs": store}, "b", LAST_2) as other,
    ):
        await one.save("r", 1, 2)
        await one.look("r")
        one.node.tiers["pfs"].failed(Unavailable("away"))
        await one.retention.pin("r", 1, True)
        await one.node.tiers["pfs"].step()
        await one.look("r")  # nothing would go here
        await other.look("r")
        await other.save("r", 3, 4)
        await other.look("r")
        assert other.on_tier("r") == [1, 3, 4]


async def test_a_node_that_lost_its_catalog_takes_no_pin_of_its_own_back(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path / "before", {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2)
        await node.retention.pin("r", 1, True)
    async with Here(tmp_path / "after", {"pfs": store}, "a", LAST_2) as node:  # on a new disk
        await node.save("r", 3, 4)
        await node.look("r")
        assert 1 in node.on_tier("r")
        assert [key for key in store.objects if key.startswith(pins_dir("r"))]


async def test_a_holder_whose_clock_stood_still_meanwhile_does_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        real = failpoints.hit

        def paused(name: str) -> None:
            real(name)
            if name == "expire.kept_aside":
                ledger = ledger_of(store, "r")
                put_ledger(store, msgspec.structs.replace(ledger, owner="b", token="t", turn=ledger.turn + 1))

        monkeypatch.setattr(failpoints, "hit", paused)
        with pytest.raises(Busy):
            await node.look("r")
        assert node.on_tier("r") == [1, 2, 3]


async def test_a_catalog_that_cannot_follow_just_now_says_nothing_of_the_tier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def pinned_meanwhile(retention: Retention, row: CheckpointRow) -> None:
        raise Unavailable("the checkpoint was pinned meanwhile")

    async with Here(tmp_path, {"pfs": MemoryStore()}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        with monkeypatch.context() as patched:
            patched.setattr(Retention, "_mark", pinned_meanwhile)
            await node.expiries["pfs"].step()
        assert node.node.tiers["pfs"].usable
        assert node.known("r") == [1, 2, 3] and node.on_tier("r") == [2, 3]
        await node.clock.advance(LOOK_S)
        await node.expiries["pfs"].step()
        assert node.known("r") == [2, 3]


async def test_a_step_saved_again_at_the_moment_of_its_removal_is_complete_only_once_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    async with (
        Here(tmp_path, {"pfs": store}, "a", LAST_2) as one,
        Here(tmp_path, {"pfs": store}, "b", LAST_2) as other,
    ):
        await other.save("r", 1)
        await other.look("r", apply=False)
        await other.save("r", 2, 3)
        await one.commit("r", 1, session="again")
        await one.completions["pfs"].step()  # sees what stands there before it
        await one.drains["pfs"].step()
        real, replaced = MemoryTier.head, False

        async def head(tier: MemoryTier, key: str) -> ObjectInfo:
            nonlocal replaced
            info = await real(tier, key)
            if key == manifest_key("r", 1) and not replaced:  # between the look at the manifest and its deletion
                replaced = True
                one.completions["pfs"]._look_at_all_s = float("-inf")
                await one.completions["pfs"].step()
                assert store.objects[key].tag != info.tag
            return info

        monkeypatch.setattr(MemoryTier, "head", head)
        await other.look("r")
        assert replaced
        await one.drain("pfs")
        assert one.state("r", 1) is PublishState.COMPLETE
        assert one.on_tier("r") == [1, 2, 3]


@pytest.mark.parametrize("heir", ["itself", "another"])
async def test_what_was_to_go_for_the_sake_of_one_that_was_deleted_meanwhile_stays(tmp_path: Path, heir: str) -> None:
    store, last_1 = MemoryStore(), '[[retain]]\nrun = "**"\nkeep_last = 1\n'
    async with Here(tmp_path, {"pfs": store}, "a", last_1) as node:
        await node.save("r", 1, 2, 3)
        with failpoints.armed("expire.kept_aside=error:EIO"), pytest.raises(OSError):
            await node.look("r")
        assert [entry.step for entry in ledger_of(store, "r").going] == [1, 2]
        await node.retention.delete("r", 3, force=False, dry_run=False)  # it was no good
    async with Here(tmp_path, {"pfs": store}, "a" if heir == "itself" else "b", last_1) as later:
        with pytest.raises(Busy):
            await later.look("r")
        await later.clock.advance(TTL_S + 1)
        await later.look("r")
        assert later.on_tier("r") == [2]
        assert not [key for key in store.objects if key.startswith(".forebay/retain/") and key != ledger_key("r")]


async def test_a_name_that_was_saved_anew_has_not_gone_and_its_damage_is_damage(tmp_path: Path) -> None:
    store = MemoryStore()
    async with Here(tmp_path, {"pfs": store}, "a", LAST_2) as node:
        await node.save("r", 1, 2, 3)
        await node.look("r")
        assert ledger_of(store, "r").gone
        await node.save("r", 1)  # the job went back, in the same session
        await node.look("r")
        assert 1 in node.on_tier("r") and 1 not in [step for step, _ in ledger_of(store, "r").gone]
        del store.objects["r/step-000000000001/manifest.json"]
        rest = below(store, "r", 1)
        await node.look("r")
        assert rest and below(store, "r", 1) == rest  # nothing more is deleted for a manifest that got lost


async def test_a_tier_that_is_full_is_freed_by_a_deletion(tmp_path: Path) -> None:
    async with Here(tmp_path, {"pfs": MemoryStore()}) as node:
        await node.save("r", 1, 2)
        node.node.tiers["pfs"].failed(StorageFull("no space left"))
        gone = await node.retention.delete("r", 1, force=False, dry_run=False)
        assert gone.pending == () and node.on_tier("r") == node.known("r") == [2]


async def test_a_tier_that_is_full_is_freed_by_its_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the smallest document fits any more; what was set aside while there was space goes for the ledger."""
    store, store_ = MemoryStore(), MemoryTier._store
    limit_bytes = 1 << 40

    def stored_bytes() -> int:
        return sum(len(each.data) for each in store.objects.values())

    def limited(tier: MemoryTier, key: str, data: bytes) -> ObjectInfo:
        replaced = store.objects.get(key)
        if stored_bytes() + len(data) > limit_bytes and (replaced is None or len(replaced.data) < len(data)):
            raise StorageFull("no space left", tier=tier.name, key=key)
        return store_(tier, key, data)

    monkeypatch.setattr(MemoryTier, "_store", limited)
    async with Here(tmp_path, {"pfs": store}, keys=LAST_2) as node:
        await node.save("r", 1, 2, 3)
        await node.expiries["pfs"]._reserve.keep()
        assert len(store.objects[RESERVE_KEY].data) == RESERVE_BYTES
        limit_bytes = stored_bytes()
        node.node.tiers["pfs"].failed(StorageFull("no space left"))
        assert node.node.tiers["pfs"].state is TierState.FULL
        assert await node.expiries["pfs"].step() is not None
        assert node.on_tier("r") == [2, 3]
        assert RESERVE_KEY not in store.objects
        node.node.tiers["pfs"].worked()
        await node.clock.advance(LOOK_S)
        await node.expiries["pfs"].step()
        assert RESERVE_KEY in store.objects  # for the next time
        assert node.known("r") == [2, 3]
        limit_bytes = 1 << 40
        await node.save("r", 4)
        del store.objects[RESERVE_KEY]
        limit_bytes = stored_bytes()
        with pytest.raises(StorageFull):
            await node.look("r")
        assert node.on_tier("r") == [2, 3, 4]


async def test_what_is_being_restored_here_stays_meanwhile(tmp_path: Path) -> None:
    async with Here(tmp_path, {"pfs": MemoryStore()}, keys=LAST_2) as node:
        await node.save("r", 1, 2)
        await node.reads.locate("r", 1, "", "a.bin")
        await node.save("r", 3)
        fates = await node.look("r")
        assert node.on_tier("r") == [1, 2, 3] and "being read" in fates[0].reason
        await node.clock.advance(READ_LATELY_S)
        await node.look("r")
        assert node.on_tier("r") == [2, 3]
