"""What a shard that goes through to a tier leaves on record: neither a kill nor a tier that goes away leaves anything there.

    a temporary file or upload is about to be begun -> noted -> it is whole, and about to get its name: noted with its checksums
    -> landed: a row with its copy, and the note gone, in one transaction
    a part that is dropped -> each of its landed objects noted with its version -> deleted, where it is still that version

Owns these notes (settings of the catalog) and their end: what an earlier process noted, or could not end because its tier was
away. Does not own the way itself (through.py). An object goes only where it is the very one that was put here, nothing in the
catalog has its name, and neither a part record nor a manifest on the tier names it: its writer may have gone on through another
gateway.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from functools import partial

import msgspec
from msgspec.structs import replace

from forebay_gateway.base import failpoints
from forebay_gateway.catalog import WriteTxn, evicted_row
from forebay_gateway.catalog.landing import land
from forebay_gateway.core.errors import (
    AlreadyExists,
    Corrupt,
    ForebayError,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from forebay_gateway.core.layout import manifest_key, part_key, shard_key
from forebay_gateway.core.records import ShardKey
from forebay_gateway.core.states import CopyState, ShardState
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.write import PartRef, WritePath
from forebay_gateway.tiers.base import ObjectInfo
from forebay_gateway.tiers.monitor import OF_ONE_OBJECT, MonitoredTier
from forebay_gateway.tiers.stream import Checksums
from forebay_wire.manifest import Manifest, ManifestError, PartRecord, ShardEntry, unpack_chunk_crcs
from forebay_wire.packs import PackIndex

log = logging.getLogger("forebay.through")

AGAIN_S = 5.0
PASSING, LEAVING = "passing", "leaving"


class Passing(msgspec.Struct, frozen=True):
    """A shard on its way to a tier. `whole`: it may have its name there, and these are its checksums."""

    session_id: int
    shard_id: int
    writer: int
    name: str
    key: str
    run: str = ""
    step: int = 0
    session: str = ""
    upload_id: str = ""
    whole: bool = False
    size: int = 0
    chunk_size: int = 0
    crc32c: int = 0
    chunks: bytes = b""
    index: bytes = b""
    version: str = ""  # of the object under its name, where it was known before it came there
    dropped: bool = False  # its part was, since: it is no shard of one that is begun anew

    def leaving(self, version: str) -> "Leaving":
        """The object of that version, which is no shard."""
        return Leaving(self.run, self.step, self.session, self.writer, self.name, version)


class Leaving(msgspec.Struct, frozen=True):
    """An object that no row stands for any more, and which version of it was put here."""

    run: str
    step: int
    session: str
    writer: int
    name: str
    version: str

    @property
    def key(self) -> str:
        """On the tier."""
        return shard_key(self.run, self.step, self.session, self.name)


_passing = msgspec.msgpack.Decoder(Passing)
_leaving = msgspec.msgpack.Decoder(Leaving)


def note_name(kind: str, tier: str, key: ShardKey) -> str:
    """Under which setting a note is kept."""
    return f"{kind}:{tier}:{key.session_id:x}-{key.shard_id:x}"


def version_of(info: ObjectInfo) -> str:
    """Which version of an object: of an equal one that was put again, the time is another."""
    return f"{info.tag} {info.modified_s}"


def note_passing(txn: WriteTxn, tier: str, passing: Passing) -> None:
    """Remember it, in the place of what was noted of this shard before; that its part was dropped meanwhile is kept."""
    name = note_name(PASSING, tier, ShardKey(passing.session_id, passing.shard_id))
    txn.keep_id(passing.shard_id)  # else the first shard after a kill has this number, and its note would replace this one
    before = txn.setting(name)
    dropped = before is not None and _passing.decode(before).dropped
    txn.set_setting(name, msgspec.msgpack.encode(replace(passing, dropped=dropped)))


def landed(txn: WriteTxn, tier: str, passing: Passing, tag: str) -> None:
    """It is a shard of its part, and the note goes. Raises as land()."""
    key = ShardKey(passing.session_id, passing.shard_id)
    entry = ShardEntry(passing.name, passing.size, passing.crc32c, passing.chunk_size, passing.chunks)
    index = PackIndex(passing.index) if passing.index else None
    land(txn, evicted_row(key, passing.writer, entry, index), passing.chunks, index, tier, tag)
    txn.set_setting(note_name(PASSING, tier, key), None)


def _landed_late(tier: str, passing: Passing, version: str, txn: WriteTxn) -> None:
    """The same, of what its sender has not heard of. Raises NotFound too where its part was dropped meanwhile, and perhaps
    begun anew."""
    noted = txn.setting(note_name(PASSING, tier, ShardKey(passing.session_id, passing.shard_id)))
    if noted is None or _passing.decode(noted).dropped:
        raise NotFound("the part was aborted while this shard was on its way", writer=passing.writer)
    landed(txn, tier, passing, version)


def note_leaving(txn: WriteTxn, session_id: int, writer: int) -> None:
    """Of an open part that is about to be dropped: what of it landed on a tier is to be deleted there, and what may have come
    there is to be no shard."""
    if (session := txn.session(session_id)) is None:
        return
    for name, value in list(txn.settings()):
        if not name.startswith(f"{PASSING}:"):
            continue
        noted = _passing.decode(value)
        if (noted.session_id, noted.writer) == (session_id, writer):
            txn.set_setting(name, msgspec.msgpack.encode(replace(noted, dropped=True)))
    for row in list(txn.shards(session_id, writer)):
        if row.state is not ShardState.EVICTED:
            continue
        for tier, copy in txn.copies(row.key).items():
            if copy.state is CopyState.VERIFIED and copy.tag:
                gone = Leaving(session.run, session.step, session.session, row.writer, row.name, copy.tag)
                txn.set_setting(note_name(LEAVING, tier, row.key), msgspec.msgpack.encode(gone))


def take_back(txn: WriteTxn, tier: str, passing: Passing, version: str) -> None:
    """It has its name on the tier, and is no shard: to be deleted there."""
    key = ShardKey(passing.session_id, passing.shard_id)
    txn.set_setting(note_name(PASSING, tier, key), None)
    txn.set_setting(note_name(LEAVING, tier, key), msgspec.msgpack.encode(passing.leaving(version)))


class Tidier:
    """Ends what is noted. One a gateway."""

    def __init__(self, node: Node, writes: WritePath) -> None:
        self._node, self._writes = node, writes
        self.under_way: set[str] = set()  # notes of shards that are on their way now
        self.wake: Callable[[], None] = lambda: None  # the worker that calls step()
        self._turns: dict[tuple[str, str], tuple[asyncio.Lock, int]] = {}  # (tier, object), and how many hold or want it
        self._may_have = set(node.tiers)  # tiers of which something may be noted that is to be ended
        node.left_behind = self.left

    def left(self) -> None:
        """Something was noted that is to be ended."""
        self._may_have.update(self._node.tiers)
        self.wake()

    async def make_way(self, tier: MonitoredTier, key: str) -> None:
        """End all that is noted of one object, which is about to be written anew by whoever has claimed its name: what an
        earlier try made whole is no shard any more. Raises what the tier says."""
        if tier.name not in self._may_have:
            return
        ended: set[str] = set()
        # One that it waited for may have become another meanwhile: that it is to be deleted.
        while found := [each for each in self._noted(tier.name) if each[1].key == key and each[0] not in ended]:
            for name, note in found:
                ended.add(name)
                await self._end(tier, name, note, is_replaced=True)

    async def tidy(self, tier: MonitoredTier) -> None:
        """End all that is noted of the tier and not under way. Raises what the tier says."""
        noted = self._noted(tier.name)
        for name, note in noted:
            await self._end(tier, name, note)
        if not noted:  # else it is looked once more whether something came meanwhile
            self._may_have.discard(tier.name)

    async def _end(self, tier: MonitoredTier, name: str, note: Passing | Leaving, *, is_replaced: bool = False) -> None:
        """One note, which goes; a tier that is away is asked again. What one object is refused for must not keep all others
        from their way."""
        async with self._turn(tier.name, note.key):
            if not self._is_noted(name):
                return  # ended by another
            try:
                if isinstance(note, Leaving):
                    is_ended = await self._end_leaving(tier, note, is_claimed=is_replaced)
                else:
                    is_ended = await self._end_passing(tier, note, is_replaced)
                if not is_ended:
                    return  # looked at again
            except (PermissionDenied, *OF_ONE_OBJECT) as error:
                log.info("something that is no shard stays on a tier tier=%s note=%s reason=%s", tier.name, name, error)
            await self.forget(name)

    @contextlib.asynccontextmanager
    async def _turn(self, tier: str, key: str) -> AsyncIterator[None]:
        """One at a time for each object."""
        lock, count = self._turns.get((tier, key), (asyncio.Lock(), 0))
        self._turns[tier, key] = (lock, count + 1)
        try:
            async with lock:
                yield
        finally:
            lock, count = self._turns.pop((tier, key))
            if count > 1:
                self._turns[tier, key] = (lock, count - 1)

    def _noted(self, tier: str) -> list[tuple[str, Passing | Leaving]]:
        begins = tuple(f"{kind}:{tier}:" for kind in (PASSING, LEAVING))
        with self._node.catalog.read() as txn:
            found = [each for each in txn.settings() if each[0].startswith(begins) and each[0] not in self.under_way]
        return [(name, _passing.decode(value) if name.startswith(PASSING) else _leaving.decode(value)) for name, value in found]

    def _is_noted(self, name: str) -> bool:
        with self._node.catalog.read() as txn:
            return txn.setting(name) is not None and name not in self.under_way

    async def forget(self, name: str) -> None:
        """The note goes."""
        await self._node.catalog.write(lambda txn: txn.set_setting(name, None))

    async def _end_passing(self, tier: MonitoredTier, passing: Passing, is_replaced: bool) -> bool:
        """Nothing half is left; what is whole is a shard of its part, as a sealed file without a row would be. Returns whether
        nothing is left to be done about it."""
        comes_again = not is_replaced and passing.name in self._writes.under_way(passing.session_id)
        if passing.upload_id:
            await tier.tier.abort_upload(passing.key, passing.upload_id)
        elif not (comes_again and passing.whole):  # a sweep would end what the next try, which a whole one stays for, has begun
            await tier.tier.sweep(passing.key)
        failpoints.hit("through.tidied")
        if not passing.whole:
            return True
        if comes_again:
            return False  # then it is known which of the two is the shard
        if is_replaced:  # perhaps: who is about to write it may fail half-way
            return bool(passing.version) and await self._end_leaving(tier, passing.leaving(passing.version), is_claimed=True)
        if passing.dropped:
            await self._is_no_shard(tier, passing, "its part was dropped")
            return True
        if not passing.version and self._tag_of_name(tier.name, passing.leaving("")) is not None:
            return True  # the next try came there
        crcs = tuple(unpack_chunk_crcs(passing.chunks))
        try:
            await tier.tier.verify(passing.key, Checksums(passing.size, passing.chunk_size, passing.crc32c, crcs))
            await tier.tier.settle(passing.key)  # what failed, or was cut short, may have been that
            version = version_of(await tier.tier.head(passing.key))
        except (NotFound, Corrupt) as error:
            log.info(
                "a shard that was on its way to a tier is not there tier=%s key=%s reason=%s", tier.name, passing.key, error
            )
            return True
        if (claim := self._claimed(passing.session_id, passing.writer, passing.name)) is None:
            return False
        with claim:  # nobody may bring it once more meanwhile
            try:
                await self._node.catalog.write(partial(_landed_late, tier.name, passing, version))
            except (NotFound, AlreadyExists, Unavailable) as error:
                await self._is_no_shard(tier, passing, str(error))
            else:
                self._node.changes.tell(passing.session_id)
        return True

    def _claimed(self, session_id: int, writer: int, name: str) -> contextlib.ExitStack | None:
        """The right to bring a shard of this name, to be given back; None while another has it."""
        try:
            return self._writes.claim(session_id, PartRef("", 0, "", writer, writer + 1), name)
        except (AlreadyExists, Unavailable):
            return None

    async def _is_no_shard(self, tier: MonitoredTier, passing: Passing, reason: str) -> None:
        """It may have its name there. Where its version is known it is to be deleted; else nobody can tell whose the object is:
        its writer may have gone on elsewhere, under this name."""
        if passing.version:
            await self._node.catalog.write(lambda txn: take_back(txn, tier.name, passing, passing.version))
        else:
            log.info("an object without a shard stays tier=%s key=%s reason=%s", tier.name, passing.key, reason)

    async def _end_leaving(self, tier: MonitoredTier, gone: Leaving, *, is_claimed: bool = False) -> bool:
        """Whether nothing is left to be done about it. While the catalog has another shard of its name it waits: that one
        replaces it there, or goes. `is_claimed`: by whoever asks."""
        if (tag := self._tag_of_name(tier.name, gone)) is not None:
            return bool(tag)  # it had landed, or the other one did
        try:
            if version_of(await tier.tier.head(gone.key)) != gone.version or await self._is_vouched_for(tier, gone):
                return True
        except NotFound:
            return True
        with contextlib.ExitStack() as held:
            session_id = self._session_of(gone)
            if session_id is not None and not is_claimed:
                if (claim := self._claimed(session_id, gone.writer, gone.name)) is None:
                    return False
                held.enter_context(claim)  # nobody puts it while it is being deleted
            if self._tag_of_name(tier.name, gone) is not None:  # put again meanwhile: it may have come there by now
                return False
            await tier.tier.delete(gone.key)
        failpoints.hit("through.left")
        return True

    def _session_of(self, gone: Leaving) -> int | None:
        with self._node.catalog.read() as txn:
            session = txn.find_session(gone.run, gone.step, gone.session)
        return None if session is None else session.id

    def _tag_of_name(self, tier: str, gone: Leaving) -> str | None:
        """Which version on the tier is the catalog's shard of this name, "" where none is known; None without such a shard."""
        with self._node.catalog.read() as txn:
            session = txn.find_session(gone.run, gone.step, gone.session)
            row = None if session is None else txn.shard_by_name(session.id, gone.name)
            copy = None if row is None else txn.copy(row.key, tier)
        return None if row is None else "" if copy is None else copy.tag

    async def _is_vouched_for(self, tier: MonitoredTier, gone: Leaving) -> bool:
        """Whether the part was committed elsewhere with it: its record, or a manifest of the session, names it."""
        try:
            document, _ = await tier.tier.get_small(part_key(gone.run, gone.step, gone.session, gone.writer))
            record = await self._node.aside(len(document), lambda: PartRecord.from_json(document))
            if any(file.name == gone.name for file, _ in record.files()):
                return True
        except NotFound:
            pass
        except ManifestError:
            return True  # nobody can tell
        try:
            document, _ = await tier.tier.get_small(manifest_key(gone.run, gone.step))
            manifest = await self._node.aside(len(document), lambda: Manifest.from_json(document))
        except NotFound:
            return False
        except ManifestError:
            return True
        return manifest.session == gone.session and any(file.name == gone.name for _, file, _ in manifest.files())

    async def step(self) -> float | None:
        """Background: each tier that can be asked; the pause in seconds, None where nothing is left."""
        for name in tuple(self._may_have):
            tier = self._node.tiers[name]
            if not tier.usable:
                continue
            try:
                await self.tidy(tier)
            except ForebayError as error:
                tier.failed(error)
        return AGAIN_S if self._may_have else None
