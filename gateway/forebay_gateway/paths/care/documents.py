"""The documents that lie beside the shards on a tier, part records and manifest: are they whole, and can they be written again.

Owns the comparison with the catalog and the sources of a good one. Does not own when they are first written (complete.py).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from forebay_gateway.catalog import ReadTxn
from forebay_gateway.core.errors import AlreadyExists, Corrupt, ForebayError, NotFound, Unavailable
from forebay_gateway.core.layout import manifest_key, part_key
from forebay_gateway.core.records import PartRow, PartState, PublishState, SessionRow
from forebay_gateway.paths.commit import of_kind, part_record
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.write import PartRef
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.manifest import Manifest, ManifestError, NewerVersion, PartRecord, what_is_wrong


@dataclass(frozen=True, slots=True)
class BadDocument:
    """`kind` is "manifest" or "part_record"; `tag` the version that was seen, empty where `absent`. `newer`: it is whole, a
    newer release wrote it, and nothing is to be written over it."""

    kind: str
    key: str
    what: str
    absent: bool
    writer: int = 0
    tag: str = ""
    newer: bool = False


async def check_documents(node: Node, session: SessionRow, tier: MonitoredTier) -> list[BadDocument]:
    """What is wrong with this session's documents on the tier; nothing where they are not there yet. Raises Unavailable."""
    found: list[BadDocument] = []
    with node.catalog.read() as txn:
        current = txn.session(session.id) or session
        parts = [part for part in txn.parts(session.id) if part.state is PartState.COMMITTED]
    if current.publish.get(tier.name) is PublishState.REMOVED:
        return []
    complete = current.publish.get(tier.name) is PublishState.COMPLETE
    if complete and (problem := await _check_manifest(current, tier)) is not None:
        found.append(problem)
    for part in parts:
        if (tier.name in part.recorded or (complete and not part.is_adopted)) and (
            problem := await _check_part(node, current, part, tier)
        ) is not None:
            found.append(problem)
    return found


async def _check_manifest(session: SessionRow, tier: MonitoredTier) -> BadDocument | None:
    key = manifest_key(session.run, session.step)
    try:
        document, info = await tier.tier.get_small(key)
    except NotFound:
        return BadDocument("manifest", key, "the manifest is gone", absent=True)
    try:
        there = Manifest.from_json(document)
    except ManifestError as error:
        what, newer = what_is_wrong("the manifest", error), isinstance(error, NewerVersion)
        return BadDocument("manifest", key, what, absent=False, tag=info.tag, newer=newer)
    if (there.run, there.step) != (session.run, session.step):
        return BadDocument("manifest", key, "the manifest belongs to another checkpoint", absent=False, tag=info.tag)
    return None  # where it names a newer session, that one has superseded this


async def _check_part(node: Node, session: SessionRow, part: PartRow, tier: MonitoredTier) -> BadDocument | None:
    key = part_key(session.run, session.step, session.session, part.writer)
    try:
        document, info = await tier.tier.get_small(key)
    except NotFound:
        return BadDocument("part_record", key, f"writer {part.writer}'s part record is gone", True, part.writer)
    try:
        there = PartRecord.from_json(document)
    except ManifestError as error:
        what, newer = what_is_wrong(f"writer {part.writer}'s part record", error), isinstance(error, NewerVersion)
        return BadDocument("part_record", key, what, False, part.writer, info.tag, newer)
    if not same_part(there, local_record(node, session, part)):
        what = f"writer {part.writer}'s part record names other shards than this node committed"
        return BadDocument("part_record", key, what, False, part.writer, info.tag)
    return None


def same_part(one: PartRecord, other: PartRecord) -> bool:
    """Whether both promise the same bytes, whoever wrote them down."""

    def content(record: PartRecord) -> tuple[object, ...]:
        head = (record.run, record.step, record.session, record.writer, record.writers)
        files = frozenset((file.name, file.size, file.crc32c, file.chunks, index) for file, index in record.files())
        return (*head, files)

    return content(one) == content(other)


def local_record(node: Node, session: SessionRow, part: PartRow) -> PartRecord:
    """The part as the catalog knows it."""
    with node.catalog.read() as txn:
        return _record(node, txn, session, part)


def _record(node: Node, txn: ReadTxn, session: SessionRow, part: PartRow) -> PartRecord:
    ref = PartRef(session.run, session.step, session.session, part.writer, session.writers)
    record = part_record(txn, node.id, ref, list(txn.shards(session.id, part.writer)), part.metadata_json)
    return of_kind(record, part.kind)


async def good_document(node: Node, session: SessionRow, bad: BadDocument, tier: MonitoredTier) -> bytes | None:
    """What should stand there: another tier's, else made from the catalog; None where neither is to be had."""
    for other in node.usable_tiers():
        if other.name != tier.name and (document := await _same_elsewhere(session, bad, other)) is not None:
            return document
    with node.catalog.read() as txn:
        parts = [part for part in txn.parts(session.id) if part.state is PartState.COMMITTED]
        if bad.kind == "part_record":
            mine = next((part for part in parts if part.writer == bad.writer and not part.is_adopted), None)
            return None if mine is None else _record(node, txn, session, mine).to_json()
        if len(parts) < session.writers:
            return None
        records = [_record(node, txn, session, part) for part in parts]
    return _manifest(records, node.id)


def _manifest(records: Sequence[PartRecord], node_id: str) -> bytes | None:
    try:
        return Manifest.of_parts(records, node_id).to_json()
    except ManifestError:
        return None


async def _same_elsewhere(session: SessionRow, bad: BadDocument, tier: MonitoredTier) -> bytes | None:
    try:
        document, _ = await tier.tier.get_small(bad.key)
        named = (Manifest.from_json(document) if bad.kind == "manifest" else PartRecord.from_json(document)).session
    except (ForebayError, ManifestError):
        return None
    return document if named == session.session else None


async def is_named_elsewhere(node: Node, session: SessionRow, bad: BadDocument, tier: MonitoredTier) -> bool:
    """Whether the manifest that this tier lacks stands on another one: then it was lost here, and not deleted."""
    for other in node.usable_tiers():
        if other.name != tier.name and await _same_elsewhere(session, bad, other) is not None:
            return True
    return False


async def write_again(node: Node, session: SessionRow, bad: BadDocument, tier: MonitoredTier) -> str:
    """Replace the bad document, if it is still the one that was seen; empty, or why not. Raises Unavailable."""
    document = await good_document(node, session, bad, tier)
    if document is None:
        return "neither another tier nor this node's catalog has what it should say"
    try:
        if bad.kind == "part_record":
            await tier.tier.put_small(bad.key, document)
        elif bad.absent:
            await tier.tier.put_small(bad.key, document, if_absent=True)
        else:
            await tier.tier.put_small(bad.key, document, if_match=bad.tag)
    except AlreadyExists:
        return "somebody else wrote it meanwhile"
    except Corrupt as error:
        raise Unavailable(str(error), tier=tier.name) from error
    return ""
