"""Do the indexes and sums say what the rows say, and do the rows fit each other? A flipped bit that still decodes shows here.

    every entry of every database, a page a snapshot: a row must have all that hangs on it, an index entry must have its row,
    sums must equal a recount, a shard's chunk table must combine to its checksum, and so must what lies in a pack

Owns the comparison and nothing else: which of two that disagree is wrong cannot be told here, so what is wrong is for a rebuild
from the cache's files to mend.
"""

import asyncio
import contextlib
import struct
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from forebay_gateway.catalog import schema
from forebay_gateway.catalog.env import Catalog
from forebay_gateway.catalog.queries import OUT_OF_QUEUE, UNSETTLED, ReadTxn
from forebay_gateway.catalog.schema import CatalogDamaged
from forebay_gateway.core.errors import NotFound
from forebay_gateway.core.records import Origin, PartRow, PartState, PublishState, ShardKey, ShardRow
from forebay_gateway.core.states import CopyState, ShardState
from forebay_wire.checksums import crc32c, crc32c_of_chunks, crc32c_of_pieces
from forebay_wire.manifest import chunk_count, unpack_chunk_crcs
from forebay_wire.packs import PackError, PackIndex, encode_head

ENTRIES_A_PAGE = 500  # a snapshot holds up the event loop
SHARDS_A_PAGE = 2000  # of parts and sessions, whose sums are recounted
PACKED_BYTES = 40  # of one shard in a pack's index, about

_Check = Callable[[ReadTxn, bytes, bytes], str]


def check_page(txn: ReadTxn, name: str, after: bytes | None) -> tuple[list[str], bytes | None]:
    """What is wrong with the next entries of database `name` behind `after`, and where to go on; None at its end."""
    check, database = _CHECKS[name], getattr(txn._db, name)
    problems: list[str] = []
    looked = cost = 0
    try:
        for key, value in txn._scan(database, start=after):
            if key == after:
                continue
            try:
                problem = check(txn, key, value)
            except (CatalogDamaged, NotFound, IndexError, ValueError, struct.error) as error:
                problem = str(error)
            if problem:
                problems.append(f"{name} {key.hex()}: {problem}")
            looked += 1
            cost += _cost(txn, name, key, value)
            if looked >= ENTRIES_A_PAGE or cost >= SHARDS_A_PAGE:
                return problems, key
    except CatalogDamaged as error:  # nothing behind it can be relied on
        problems.append(f"{name}: {error}")
    return problems, None


async def index_problems(catalog: Catalog) -> AsyncGenerator[str, None]:
    """All there are, a sentence each. Acts may go on meanwhile: each page is a snapshot of its own, and whole in itself."""
    for name in CHECKED:
        after: bytes | None = None
        while True:
            with catalog.read() as txn:
                problems, after = check_page(txn, name, after)
            for problem in problems:
                yield problem
            if after is None:
                break
            await asyncio.sleep(0)
    async with aclosing(_pack_problems(catalog)) as found:
        async for problem in found:
            yield problem


async def _pack_problems(catalog: Catalog) -> AsyncGenerator[str, None]:
    """The numbers in the packs' indexes: a pack at a time, and not on the event loop."""
    after = b""
    while True:
        with catalog.read() as txn:
            entry = next((each for each in txn._scan(txn._db.packs, start=after) if each[0] != after), None)
            row = None
            if entry is not None:
                with contextlib.suppress(CatalogDamaged):  # told of above
                    row = txn.shard(schema.shard_of_key(entry[0]))
        if entry is None:
            return
        after = entry[0]
        if row is not None and (problem := await asyncio.to_thread(_numbers_of_pack, row, entry[1])):
            yield f"packs {after.hex()}: {problem}"


def _numbers_of_pack(row: ShardRow, encoded: bytes) -> str:
    """Head and shards, in the order in which they lie, are the pack: so its checksum proves every number in the index."""
    try:
        index = PackIndex(encoded)
        index.check(row.size)
    except PackError as error:
        return str(error)
    if (len(index), index.size) != (row.packed, row.packed_size):
        return "it holds other shards than its row counts"
    head = encode_head(index)
    lies = sorted(index, key=lambda packed: packed.offset)
    crc = crc32c_of_pieces([(crc32c(head), len(head)), *((packed.crc32c, packed.size) for packed in lies)])
    return "" if crc == row.crc32c else "its shards' checksums do not come to the pack's"


def _cost(txn: ReadTxn, name: str, key: bytes, value: bytes) -> int:
    try:
        match name:
            case "parts":
                return 1 + schema.PART.decode(value).shard_count
            case "sessions":
                return 1 + txn.session_sums(schema.number_of(key)).shards
            case "packs":
                return 1 + len(value) // PACKED_BYTES
    except CatalogDamaged:
        pass
    return 1


# -- rows, and what must hang on them ----------------------------------------------------------------------------------


def _checkpoint(txn: ReadTxn, key: bytes, value: bytes) -> str:
    row = schema.CHECKPOINT.decode(value)
    if key != schema.checkpoint_key(row.run, row.step):
        return "the row is another checkpoint's"
    if txn._get(txn._db.runs, schema.run_key(row.run)) != row.run.encode("utf-8"):
        return "its run is not in the list of runs"
    if row.deleting != (txn._get(txn._db.deleting, key) is not None):
        return "the list of deletions and the row disagree"
    for session_id in row.session_ids:
        session = txn.session(session_id)
        if session is None or (session.run, session.step) != (row.run, row.step):
            return f"its session {session_id} is not there, or another checkpoint's"
    if txn.recount_completeness(row) is not txn.completeness(row):
        return "the lists of complete and incomplete ones do not have it as its sessions are"
    return "" if row.session_ids else "it has no session"


def _session(txn: ReadTxn, key: bytes, value: bytes) -> str:
    row = schema.SESSION.decode(value)
    if key != schema.u64(row.id):
        return "the row is another session's"
    if txn._get(txn._db.session_names, schema.session_name_key(row.run, row.step, row.session)) != key:
        return "its name leads to another session, or to none"
    checkpoint = txn.checkpoint(row.run, row.step)
    if checkpoint is None or row.id not in checkpoint.session_ids:
        return "its checkpoint does not know it"
    for tier, number in txn._tiers.items():
        held = txn._get(txn._db.publish_order, schema.session_tier_key(row.id, number))
        if (held is not None) != (row.publish.get(tier) is PublishState.PENDING):
            return f"what is to be published on {tier} and the row disagree"
        if held is not None and txn._get(txn._db.publish, schema.publish_key(number, schema.number_of(held), row.id)) is None:
            return f"it is missing in the list of what is to be published on {tier}"
    if (txn._get(txn._db.cache_only, key) is not None) != row.is_cache_only:
        return "the list of what stays in the cache and the row disagree"
    sums, progress = txn.recount_session(row.id)
    if txn.session_sums(row.id) != sums:
        return "its sums are not what its parts and shards come to"
    for tier, _ in txn._tiers.items():
        if txn.session_progress(row.id, tier) != progress.get(tier, (0, 0, 0, 0)):
            return f"its sums for {tier} are not what its copies come to"
    return ""


def _part(txn: ReadTxn, key: bytes, value: bytes) -> str:
    row = schema.PART.decode(value)
    if key != schema.part_key(row.session_id, row.writer):
        return "the row is another part's"
    session = txn.session(row.session_id)
    if session is None or row.writer >= session.writers:
        return "its session is not there, or has fewer writers"
    if (row.state is PartState.OPEN) != (txn._get(txn._db.open_parts, key) is not None):
        return "the list of open parts and the row disagree"
    return _sums(txn, row)


def _sums(txn: ReadTxn, part: PartRow) -> str:
    numbers = txn._tiers.items()
    counted = {number: [0, 0, 0, 0] for _, number in numbers}
    shards = [0] * 6
    for shard in txn.shards(part.session_id, part.writer):
        for index, more in enumerate(
            (1, shard.size, shard.is_pack, shard.size * shard.is_pack, shard.packed, shard.packed_size)
        ):
            shards[index] += more
        for number, copy in txn._copy_rows(shard.key):
            if copy.state is not CopyState.SKIPPED and number in counted:
                verified = copy.state is CopyState.VERIFIED
                for index, more in enumerate((verified, 1, shard.size * verified, shard.size)):
                    counted[number][index] += more
    for tier, number in numbers:
        if list(txn.part_progress(part.session_id, part.writer, tier)) != counted[number]:
            return f"its sums for {tier} are not what its copies come to"
    committed = [part.shard_count, part.size, part.packs, part.packs_size, part.packed, part.packed_size]
    if part.state is PartState.OPEN:
        return "" if not any(committed) else "it is open, and counts what it was committed with"
    return "" if committed == shards or _is_going(txn, part.session_id) else "what it was committed with is not its shards"


def _is_going(txn: ReadTxn, session_id: int) -> bool:
    """Whether its shards go one page after the other: with its checkpoint, or because a newer session replaced it."""
    session = txn.session(session_id)
    checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
    return session is None or checkpoint is None or checkpoint.deleting or session.is_superseded


def _shard(txn: ReadTxn, key: bytes, value: bytes) -> str:
    row = schema.SHARD.decode(value)
    if key != schema.shard_key(row.key):
        return "the row is another shard's"
    part = txn.part(row.session_id, row.writer)
    if part is None and not _is_being_adopted(txn, row.session_id):
        return "its part is not there"
    if txn._get(txn._db.names, schema.name_key(row.session_id, row.name)) != schema.u64(row.shard_id):
        return "its name leads to another shard, or to none"
    if row.is_pack != (txn._get(txn._db.packs, key) is not None):
        return "the list of packs and the row disagree"
    if (row.state in UNSETTLED) != (txn._get(txn._db.unsettled, key) is not None):
        return "the list of unsettled shards and the row disagree"
    if txn._get(txn._db.part_shards, schema.part_shard_key(row.session_id, row.writer, row.shard_id)) is None:
        return "its part does not list it"
    entry = schema.evictable_key(_eviction_order(txn, row, part), row.key)
    if (row.state is ShardState.EVICTABLE) != (txn._get(txn._db.evictable, entry) is not None):
        return "the list of what may be evicted and the row disagree"
    return _checksums(txn, row)


def _is_being_adopted(txn: ReadTxn, session_id: int) -> bool:
    """Whether its parts may be missing yet: a long manifest is taken in by several acts, the parts last, and a crash between
    them leaves it so until somebody asks for the checkpoint again."""
    session = txn.session(session_id)
    if session is None or session.origin is not Origin.TIER:
        return False
    return txn.session_sums(session_id).parts < session.writers


def _checksums(txn: ReadTxn, row: ShardRow) -> str:
    chunks = txn._get(txn._db.chunks, schema.shard_key(row.key))
    if chunks is None or len(chunks) != 4 * chunk_count(row.size, row.chunk_size):
        return "its chunk table is not there, or of the wrong length"
    if crc32c_of_chunks(unpack_chunk_crcs(chunks), row.chunk_size, row.size) != row.crc32c:
        return "its chunk table does not come to its checksum"
    return ""


def _copy(txn: ReadTxn, key: bytes, value: bytes) -> str:
    row = schema.COPY.decode(value)
    shard_key, number = schema.copy_of_key(key)
    tier = txn._tiers.name(number)  # raises for one that there never was; likewise below
    shard = txn.shard(shard_key)
    if shard is None:
        return "its shard is not there"
    part = txn.part(shard.session_id, shard.writer)
    entry = schema.pending_key(number, 0 if part is None else part.commit_seq, shard_key)
    if (row.state not in OUT_OF_QUEUE) != (txn._get(txn._db.pending, entry) is not None):
        return f"the queue of {tier} and the row disagree"
    return ""


# -- indexes, and the rows that they must stand for --------------------------------------------------------------------


def _setting(txn: ReadTxn, key: bytes, value: bytes) -> str:
    schema.checked(value, "setting")
    return ""


def _run(txn: ReadTxn, key: bytes, value: bytes) -> str:
    known = key == schema.run_key(value.decode("utf-8")) and next(txn._scan(txn._db.checkpoints, key), None) is not None
    return "" if known else "a run without a checkpoint"


def _deleting(txn: ReadTxn, key: bytes, _: bytes) -> str:
    return "" if txn._get(txn._db.checkpoints, key) is not None else "a deletion without its checkpoint"


def _session_name(txn: ReadTxn, key: bytes, value: bytes) -> str:
    row = txn.session(schema.number_of(value))
    fits = row is not None and key == schema.session_name_key(row.run, row.step, row.session)
    return "" if fits else "a name without its session"


def _publish(txn: ReadTxn, key: bytes, _: bytes) -> str:
    number, order, session_id = schema.publish_of_key(key)
    held = txn._get(txn._db.publish_order, schema.session_tier_key(session_id, number))
    return "" if held == schema.u64(order) else "something to publish that nobody asks for"


def _publish_order(txn: ReadTxn, key: bytes, _: bytes) -> str:
    txn._tiers.name(schema.number_of(key[8:]))
    return "" if txn._get(txn._db.sessions, key[:8]) is not None else "something to publish without its session"


def _open_part(txn: ReadTxn, key: bytes, _: bytes) -> str:
    return "" if txn._get(txn._db.parts, key) is not None else "an open part without its row"


def _part_shard(txn: ReadTxn, key: bytes, _: bytes) -> str:
    row = txn.shard(schema.shard_of_part_shard_key(key))
    fits = row is not None and key == schema.part_shard_key(row.session_id, row.writer, row.shard_id)
    return "" if fits else "a shard of a part without its row"


def _name(txn: ReadTxn, key: bytes, value: bytes) -> str:
    shard_id, ordinal = schema.named_of_value(value)
    row = txn.shard(ShardKey(schema.number_of(key[:8]), shard_id))
    if row is None:
        return "a name without its shard"
    name = row.name if ordinal is None else txn.pack_index(row.key)[ordinal].name
    return "" if key == schema.name_key(row.session_id, name) else "a name that leads to another shard"


def _pack(txn: ReadTxn, key: bytes, _: bytes) -> str:
    row = txn.shard(schema.shard_of_key(key))
    if row is None or not row.is_pack:
        return "the index of a pack that is not there"
    for ordinal, packed in enumerate(txn.pack_index(row.key)):
        if txn._get(txn._db.names, schema.name_key(row.session_id, packed.name)) != schema.packed_value(row.shard_id, ordinal):
            return f"the name of {packed.name!r} in it leads elsewhere"
    return ""


def _unsettled(txn: ReadTxn, key: bytes, _: bytes) -> str:
    row = txn.shard(schema.shard_of_key(key))
    return "" if row is not None and row.state in UNSETTLED else "it is settled, by its row"


def _cache_only(txn: ReadTxn, key: bytes, _: bytes) -> str:
    row = txn.session(schema.number_of(key))
    return "" if row is not None and row.is_cache_only else "it is to be on a tier, by its row"


def _session_sums(txn: ReadTxn, key: bytes, _: bytes) -> str:
    return "" if txn._get(txn._db.sessions, key) is not None else "sums without their session"


def _session_progress(txn: ReadTxn, key: bytes, _: bytes) -> str:
    txn._tiers.name(schema.number_of(key[8:]))
    return "" if txn._get(txn._db.sessions, key[:8]) is not None else "sums without their session"


def _completeness(txn: ReadTxn, key: bytes, _: bytes) -> str:
    data = txn._get(txn._db.checkpoints, key)
    if data is None:
        return "without its checkpoint"
    row = schema.CHECKPOINT.decode(data)
    return "" if txn.recount_completeness(row) is txn.completeness(row) else "the list and its sessions disagree"


def _of_shard(txn: ReadTxn, key: bytes, _: bytes) -> str:
    return "" if txn._get(txn._db.shards, key[:16]) is not None else "without its shard"


def _evictable(txn: ReadTxn, key: bytes, _: bytes) -> str:
    row = txn.shard(schema.shard_of_evictable_key(key))
    part = None if row is None else txn.part(row.session_id, row.writer)
    fits = row is not None and part is not None and row.state is ShardState.EVICTABLE
    if row is None or not fits or key != schema.evictable_key(_eviction_order(txn, row, part), row.key):
        return "it may not be evicted, by its row"
    return ""


def _pending(txn: ReadTxn, key: bytes, _: bytes) -> str:
    order, shard_key = schema.pending_of_key(key)
    tier = txn._tiers.name(schema.number_of(key[:2]))
    copy, row = txn.copy(shard_key, tier), txn.shard(shard_key)
    part = None if row is None else txn.part(row.session_id, row.writer)
    fits = copy is not None and copy.state not in OUT_OF_QUEUE and part is not None and part.commit_seq == order
    return "" if fits else f"it is in the queue of {tier}, and nothing is to be put there"


def _progress(txn: ReadTxn, key: bytes, _: bytes) -> str:
    txn._tiers.name(schema.number_of(key[12:]))
    has_part = txn._get(txn._db.parts, key[:12]) is not None or _is_being_adopted(txn, schema.number_of(key[:8]))
    return "" if has_part else "sums without their part"


def _eviction_order(txn: ReadTxn, row: ShardRow, part: PartRow | None) -> int:
    fetched = txn._get(txn._db.fetched, schema.shard_key(row.key))
    if fetched is not None:
        return schema.number_of(fetched)
    return 0 if part is None else part.commit_seq


_CHECKS: dict[str, _Check] = {
    "checkpoints": _checkpoint,
    "sessions": _session,
    "parts": _part,
    "shards": _shard,
    "copies": _copy,
    "settings": _setting,
    "runs": _run,
    "deleting": _deleting,
    "session_names": _session_name,
    "publish": _publish,
    "publish_order": _publish_order,
    "open_parts": _open_part,
    "part_shards": _part_shard,
    "names": _name,
    "packs": _pack,
    "unsettled": _unsettled,
    "cache_only": _cache_only,
    "session_sums": _session_sums,
    "session_progress": _session_progress,
    "complete": _completeness,
    "incomplete": _completeness,
    "chunks": _of_shard,
    "fetched": _of_shard,
    "uploads": _of_shard,
    "evictable": _evictable,
    "pending": _pending,
    "progress": _progress,
}
CHECKED = tuple(_CHECKS)
