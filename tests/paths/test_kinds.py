"""A checkpoint's class goes along: into documents that are written again, to other nodes, with a commit that is said again."""

from pathlib import Path

from forebay_gateway.core.layout import manifest_key, part_key
from forebay_gateway.core.schedule_rows import Kind
from forebay_gateway.paths.care.documents import check_documents, write_again
from forebay_wire.manifest import Manifest, PartRecord
from paths.order_kit import RUN, SmallNode


async def test_documents_that_are_written_again_still_say_final(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        await node.save(1, kind="final")
        assert await node.batches() == ["1"]
        tier, session = node.node.tiers["near"], node.session(1)
        for key in (part_key(RUN, 1, "s1", 0), manifest_key(RUN, 1)):
            await tier.tier.delete(key)
        bad = await check_documents(node.node, session, tier)
        assert len(bad) == 2
        for each in bad:
            assert await write_again(node.node, session, each, tier) == ""
        manifest = Manifest.from_json((await tier.tier.get_small(manifest_key(RUN, 1)))[0])
        record = PartRecord.from_json((await tier.tier.get_small(part_key(RUN, 1, "s1", 0)))[0])
        assert [part.kind for part in manifest.parts] == [record.kind] == ["final"]


async def test_a_commit_that_is_said_again_as_final_is_that_on_the_tier(tmp_path: Path) -> None:
    async with SmallNode(tmp_path) as node:
        await node.save(1)
        await node.save(1, kind="final")
        assert await node.batches() == ["1"]
        document, _ = await node.node.tiers["near"].tier.get_small(manifest_key(RUN, 1))
        assert [part.kind for part in Manifest.from_json(document).parts] == ["final"]
        await node.node.catalog.write(lambda txn: txn.drop_session(node.session(1).id))
        manifest = Manifest.from_json(document)
        number = node.node.catalog.new_id()
        adopted = await node.node.catalog.write(
            lambda txn: txn.adopt_manifest(manifest, "near", session_id=number, new_id=node.node.catalog.new_id)
        )
        assert adopted.kind is Kind.FINAL  # as any node that finds it says
