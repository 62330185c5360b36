"""From the cache to one tier: shards in batches, by a mover that proves each copy.

    the part that goes next (order.py) -> a batch of it from the pending index -> copies WRITING -> mover: read, re-check, put,
    verify -> copies VERIFIED

Owns batches, what goes back to the queue, and when it is tried again. One Drain a tier; the index in the catalog is the queue,
so nothing is lost when this process ends. Does not own which part goes next (order.py), the movement of bytes (movers/) or
completion (complete.py).
"""

import logging
from collections.abc import Awaitable, Callable
from functools import partial
from itertools import islice

from forebay_gateway.base import failpoints
from forebay_gateway.base.tasks import uncut
from forebay_gateway.catalog import ReadTxn, WriteTxn
from forebay_gateway.core.errors import ForebayError, PermissionDenied, Unavailable
from forebay_gateway.core.layout import shard_key
from forebay_gateway.core.records import PartRow, PartState, PendingCopy, SessionRow, ShardKey, ShardRow, UploadRow
from forebay_gateway.core.schedule import Idle, Next, Skip
from forebay_gateway.core.states import CopyEvent, CopyState, ShardEvent, ShardState
from forebay_gateway.movers.jobs import DrainJob, Failure, ItemDone, ItemFailed, ShardItem
from forebay_gateway.paths import marks
from forebay_gateway.paths.fleet import not_before_s
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.order import BATCH_BYTES_MAX, BLOCKED_S, Order
from forebay_gateway.paths.safety import let_go
from forebay_gateway.paths.verdicts import Unsaid
from forebay_gateway.tiers.monitor import MonitoredTier
from forebay_wire.names import is_commit_last

log = logging.getLogger("forebay.drain")

BATCH_SHARDS_MAX = 128
LOOK_AHEAD_MAX = 4096  # entries of a part looked at for one batch, so that a few that must wait do not block the rest
PARTS_LOOKED_AT = 64  # for one batch: each that has to wait is passed over
RETRY_S_MIN, RETRY_S_MAX = 0.5, 60.0
IDLE_S = 5.0
PAUSES_MAX = 1024


class Drain:
    """The drain to one tier."""

    def __init__(
        self,
        node: Node,
        tier: MonitoredTier,
        *,
        recover_copies: Callable[[], Awaitable[None]],
        verified: Callable[[], None],
    ) -> None:
        self._node = node
        self._tier = tier
        self.order = Order(node, tier.name)
        self._recover_copies = recover_copies
        self._recovered = False
        self._verified = verified
        self._not_before_s: dict[ShardKey, float] = {}
        self._interrupted: set[ShardKey] = set()  # copies that may have left what is not recorded: their mover died
        self._recorded_elsewhere: dict[int, set[int]] = {}
        self._moved: set[int] = set()  # sessions with copies that were proved since complete.py has asked

    async def step(self) -> float | None:
        """One batch; returns the pause until the next look in seconds."""
        if not self._tier.usable:
            return IDLE_S
        if not self._recovered:  # what an earlier process had begun comes first
            try:
                await self._recover_copies()
            except (Unavailable, PermissionDenied) as error:
                self._tier.failed(error)
                return RETRY_S_MIN
            self._recovered = True
            self._verified()
        if self._tier.held:
            return IDLE_S
        try:
            items, wait_s = await self._next_batch()
        except Unsaid as error:  # the other nodes of a checkpoint could not be told what was decided
            self._tier.failed(error.cause)
            return RETRY_S_MIN
        if not items:
            return wait_s
        keys = await self._begin(items)
        if keys is None:
            return RETRY_S_MIN
        started = set(keys)
        items = [item for item in items if ShardKey(item.session_id, item.shard_id) in started]
        if not items:
            return 0.0
        failpoints.hit("drain.started")
        job = DrainJob(self._node.movers.next_job_id(), self._tier.name, self._tier.capabilities, tuple(items))
        reports = _Batch(self, items, keys)
        self._tier.rate.resume()
        try:
            await self._node.movers.drain(self._tier.name, job, reports)
        except Unavailable as error:
            log.info("a batch goes back to the queue tier=%s reason=%s", self._tier.name, error)
        finally:
            self._tier.rate.pause()
            await uncut(self._put_back(reports))
        self._node.changes.tell()  # once a batch: who waits for one copy looks four times a second anyway
        self._forget_expired()
        return 0.0

    async def _begin(self, items: list[ShardItem]) -> list[ShardKey] | None:
        """Those that are WRITING now, with nothing of an earlier attempt in their place; None where the tier did not answer."""
        wanted = [ShardKey(item.session_id, item.shard_id) for item in items]
        keys: list[ShardKey] = []
        try:
            try:
                await self._clean_up_after(items)
            except ForebayError as error:
                self._tier.failed(error)
                return None
            keys = await self._node.catalog.write(partial(self._start, wanted))
            return keys
        finally:
            for key in set(wanted).difference(keys):
                self.order.failed(key)

    def _start(self, wanted: list[ShardKey], txn: WriteTxn) -> list[ShardKey]:
        keys = start(txn, wanted, self._tier.name)
        if keys and (session := txn.session(keys[0].session_id)) is not None:
            self.order.begun(txn, session)
        return keys

    async def _clean_up_after(self, items: list[ShardItem]) -> None:
        """Remove what an earlier attempt left on the tier: by its record, and of a mover that died also what it had no time to
        have recorded. Only then may a new attempt be recorded in the old one's place."""
        with self._node.catalog.read() as txn:
            keys = [ShardKey(item.session_id, item.shard_id) for item in items]
            uploads = [(key, upload) for key in keys if (upload := txn.upload(key, self._tier.name)) is not None]
        for key, upload in uploads:
            await self._tier.tier.abort_upload(upload.key, upload.upload_id)
            failpoints.hit("drain.upload_aborted")
            await self._node.catalog.write(partial(clear_upload, key, self._tier.name))
        for item in items:
            if (key := ShardKey(item.session_id, item.shard_id)) in self._interrupted:
                await self._tier.tier.sweep(item.key)
                self._interrupted.discard(key)

    async def _put_back(self, reports: "_Batch") -> None:
        """What the mover did not report (it died, or we stop) is pending again."""
        left = reports.unreported()
        if left:
            self._interrupted.update(left)
            for key in left:
                self.order.failed(key)
            self._recovered = False  # where the catalog takes no note now, only a look at the tier can tell
            await self._node.catalog.write(lambda txn: fail(txn, left, self._tier.name, "interrupted"))
            self._recovered = True

    # -- the queue -----------------------------------------------------------------------------------------------------

    async def _next_batch(self) -> tuple[list[ShardItem], float | None]:
        """The shards that go now, all of one session, and how long to wait where there are none."""
        await self.order.catch_up()
        items = self._strays()
        seen: set[int] = set()
        for _ in range(0 if items else PARTS_LOOKED_AT):
            decision = self.order.decide()
            if isinstance(decision, Skip):
                if not await self.order.skip(decision):
                    await self.order.catch_up()
                continue
            if isinstance(decision, Idle):
                return items, self._idle_s(decision)
            # What is left of a part that has given something waits; so does a batch for nothing of another session.
            if decision.order in seen or (items and decision.session_id != items[0].session_id):
                break
            seen.add(decision.order)
            if not await self.order.may_begin(decision):
                continue
            items += self._batch_of(decision, len(items), sum(item.size for item in items))
            if len(items) >= BATCH_SHARDS_MAX or sum(item.size for item in items) >= BATCH_BYTES_MAX:
                break
        return items, 0.0

    def _idle_s(self, idle: Idle) -> float:
        if idle.until_s is None:
            return IDLE_S
        return min(IDLE_S, max(0.0, idle.until_s - self._node.clock.monotonic()))

    def _strays(self) -> list[ShardItem]:
        """Copies that were lost of what no commit of this node made: they were safe once, and go first."""
        return self._of_part(0, 0, 0)[0]

    def _batch_of(self, part: Next, count: int, size: int) -> list[ShardItem]:
        """What of a part goes into a batch of `count` shards with `size` bytes so far."""
        if (later_s := self._staggered_s(part)) > 0:
            self.order.blocked(part, later_s)
            return []
        items, wait_s = self._of_part(part.order, count, size)
        if items:
            keys = [ShardKey(item.session_id, item.shard_id) for item in items]
            self.order.took(part.order, keys, sum(item.size for item in items))
        elif wait_s is None:
            self.order.gone(part.order)
        else:
            self.order.blocked(part, wait_s)
        return items

    def _staggered_s(self, part: Next) -> float:
        """How long it waits so that not all nodes begin at once; what an operator puts first does not."""
        with self._node.catalog.read() as txn:
            session = txn.session(part.session_id)
        if session is None or part.why == "prioritised":
            return 0.0
        return not_before_s(self._node, self._tier.name, session) - self._node.clock.monotonic()

    def _of_part(self, order: int, count: int, size: int) -> tuple[list[ShardItem], float | None]:
        """Its shards that may go now, and how long to wait where none may; None where none is in the queue."""
        now_s = self._node.clock.monotonic()
        items: list[ShardItem] = []
        wait_s: float | None = None
        session: SessionRow | None = None
        with self._node.catalog.read() as txn:
            entries = txn.pending(self._tier.name, PendingCopy(order, ShardKey(0, 0)))
            for entry in islice(entries, LOOK_AHEAD_MAX):
                if entry.order != order or count + len(items) >= BATCH_SHARDS_MAX or size >= BATCH_BYTES_MAX:
                    break
                later_s = self._not_before_s.get(entry.key, 0.0) - now_s
                wait_s = min(wait_s or RETRY_S_MAX, later_s if later_s > 0 else BLOCKED_S)
                if later_s > 0:
                    continue
                if session is not None and entry.key.session_id != session.id:
                    break
                session = session or txn.session(entry.key.session_id)
                item = self._item(txn, entry, session)
                if item is not None:
                    items.append(item)
                    size += item.size
                elif not items:
                    session = None
        return items, wait_s

    def _item(self, txn: ReadTxn, entry: PendingCopy, session: SessionRow | None) -> ShardItem | None:
        row = txn.shard(entry.key)
        copy = txn.copy(entry.key, self._tier.name)
        if session is None or row is None or copy is None or copy.state not in (CopyState.PENDING, CopyState.QUARANTINED):
            return None
        checkpoint = txn.checkpoint(session.run, session.step)
        if checkpoint is None or checkpoint.deleting:
            return None
        if copy.state is CopyState.QUARANTINED or not row.is_cached:
            self._node.ask_mend(row.key)  # good bytes come into the cache first
            return None
        if is_commit_last(row.name) and not self._others_verified(txn, session, row):
            return None
        return shard_item(txn, session, row)

    def _others_verified(self, txn: ReadTxn, session: SessionRow, last: ShardRow) -> bool:
        """Whether a shard that readers take for the sign of completeness may go: all others are there."""
        parts = [part for part in txn.parts(session.id) if not part.is_adopted]
        if not all(part.state is PartState.COMMITTED and self._only_last_left(txn, part) for part in parts):
            return False
        # Writer 0 also waits for the parts of other nodes; others do not, or two nodes could wait for each other.
        here = {part.writer for part in parts}
        return last.writer != 0 or len(here | self.recorded_elsewhere(session.id)) >= session.writers

    def _only_last_left(self, txn: ReadTxn, part: PartRow) -> bool:
        """Whether all of the part's shards are verified but those that go last. Reads what is left, not what is done."""
        _, known, _, _ = txn.part_progress(part.session_id, part.writer, self._tier.name)
        if known < part.shard_count:
            return False
        for entry in txn.pending(self._tier.name, PendingCopy(part.commit_seq, ShardKey(part.session_id, 0))):
            if entry.order != part.commit_seq:
                break
            row = txn.shard(entry.key)
            if row is not None and not is_commit_last(row.name):
                return False
        return True

    def recorded_elsewhere(self, session_id: int) -> set[int]:
        """Writers whose part records complete.py has seen on this tier."""
        return self._recorded_elsewhere.get(session_id, set())

    def note_recorded_elsewhere(self, session_id: int, writers: set[int]) -> None:
        """complete.py saw these on this tier."""
        self._recorded_elsewhere.setdefault(session_id, set()).update(writers)
        self.order.wake(session_id)

    def forget_session(self, session_id: int) -> None:
        """It is complete or gone."""
        self._recorded_elsewhere.pop(session_id, None)
        self.order.joint.ended(session_id)

    def take_moved(self) -> set[int]:
        """Sessions with copies that were proved on this tier since the last time."""
        moved, self._moved = self._moved, set()
        return moved

    async def hold(self, held: bool) -> None:
        """An operator stops the hand-out of jobs, or lets it go on; survives a restart."""
        self._tier.held = held
        name, value = held_setting(self._tier.name), b"1" if held else None
        await self._node.marks.change(marks.setting(name, value), lambda txn: txn.set_setting(name, value))
        self._node.changes.tell()

    def _forget_expired(self) -> None:
        """Pauses that are over, also of shards that are gone."""
        if len(self._not_before_s) > PAUSES_MAX:
            now_s = self._node.clock.monotonic()
            self._not_before_s = {key: at_s for key, at_s in self._not_before_s.items() if at_s > now_s}

    def retry_now(self) -> None:
        """The tier came back, or an operator asked: nothing waits for its pause any more."""
        self._not_before_s.clear()
        self.order.wake_all()

    def retry_session(self, session_id: int) -> None:
        """The same for one checkpoint."""
        for key in [key for key in self._not_before_s if key.session_id == session_id]:
            del self._not_before_s[key]
        self.order.wake(session_id)

    # -- reports of one batch ------------------------------------------------------------------------------------------

    async def _done(self, key: ShardKey, item: ShardItem, tag: str) -> None:
        required = self._node.required_tiers

        def act(txn: WriteTxn) -> None:
            proved(txn, key, self._tier.name, tag)
            let_go(txn, key, required)

        failpoints.hit("drain.before_catalog")
        await self._node.catalog.write(act)
        failpoints.hit("drain.verified")
        self._not_before_s.pop(key, None)
        self._tier.worked()
        self._moved.add(key.session_id)
        self.order.verified(key)
        self.order.wake(key.session_id)  # its last shards may have waited for this one
        self._verified()

    async def _failed(self, key: ShardKey, failure: Failure) -> None:
        error = failure.error
        if failure.where == "cache":
            await self._quarantine(key, error)
            return
        attempts = await self._node.catalog.write(lambda txn: fail(txn, [key], self._tier.name, str(error)))
        self.order.failed(key)
        pause_s = min(RETRY_S_MAX, RETRY_S_MIN * 2.0 ** min(attempts, 10))
        self._not_before_s[key] = self._node.clock.monotonic() + max(pause_s, failure.retry_after_s or 0.0)
        if failure.details.get("operation") == "create_multipart_upload":
            self._interrupted.add(key)  # it may have begun, under an id that nobody heard
        log.info("a copy failed, it stays queued tier=%s error=%s", self._tier.name, error)
        if error.kind in ("unavailable", "permission_denied"):
            self._tier.failed(error)

    async def _quarantine(self, key: ShardKey, error: ForebayError) -> None:
        """The cache's own bytes are bad: never forwarded. The copy stays pending, the operator is told."""

        def act(txn: WriteTxn) -> str | None:
            fail(txn, [key], self._tier.name, str(error))
            row = txn.shard(key)
            if row is None or row.state not in (ShardState.SEALED, ShardState.EVICTABLE):
                return None  # evicted under the mover's eyes, or seen to be bad before
            return txn.shard_event(key, ShardEvent.MISMATCH).name

        name = await self._node.catalog.write(act)
        self.order.failed(key)
        self._node.ask_mend(key)
        if name is None:
            return
        log.warning("a shard in the cache is damaged and quarantined name=%s error=%s", name, error)
        self._node.alarms[f"quarantine-{key.session_id}-{key.shard_id}"] = (
            f"shard {name!r} in the cache is damaged: {error}",
            "restore reads it from a tier that holds it; save the step again if none does",
        )


class _Batch:
    """Hears the reports of one drain job."""

    def __init__(self, drain: Drain, items: list[ShardItem], keys: list[ShardKey]) -> None:
        self._drain = drain
        self._items = items
        self._keys = keys
        self._reported: set[int] = set()

    def unreported(self) -> list[ShardKey]:
        return [key for index, key in enumerate(self._keys) if index not in self._reported]

    async def upload_begun(self, index: int, upload_id: str) -> None:
        upload = UploadRow(self._items[index].key, upload_id)
        drain, key = self._drain, self._keys[index]
        await drain._node.catalog.write(lambda txn: txn.record_upload(key, drain._tier.name, upload))
        failpoints.hit("drain.upload_recorded")

    async def item_done(self, index: int, report: ItemDone) -> None:
        self._drain._tier.rate.add(0)
        await self._drain._done(self._keys[index], self._items[index], report.tag_on_tier)
        self._reported.add(index)

    async def item_failed(self, index: int, report: ItemFailed) -> None:
        await self._drain._failed(self._keys[index], report.failure)
        self._reported.add(index)

    def progress(self, size: int) -> None:
        self._drain._tier.rate.add(size)


def held_setting(tier: str) -> str:
    """Under which name the catalog keeps that a tier is held."""
    return f"held:{tier}"


def start(txn: WriteTxn, keys: list[ShardKey], tier: str) -> list[ShardKey]:
    """PENDING to WRITING; returns those that are still to go: a deletion that was marked meanwhile counts."""
    started = []
    for key in keys:
        copy, session = txn.copy(key, tier), txn.session(key.session_id)
        checkpoint = None if session is None else txn.checkpoint(session.run, session.step)
        if copy is not None and copy.state is CopyState.PENDING and checkpoint is not None and not checkpoint.deleting:
            txn.copy_event(key, tier, CopyEvent.START)
            started.append(key)
    return started


def proved(txn: WriteTxn, key: ShardKey, tier: str, tag: str) -> None:
    """WRITING or WRITTEN to VERIFIED. A manifest on the tier may have said so before."""
    copy = txn.copy(key, tier)
    if copy is None:
        return
    if copy.state is CopyState.WRITING:
        copy = txn.copy_event(key, tier, CopyEvent.PUT, tag=tag)
    if copy.state is CopyState.WRITTEN:
        txn.copy_event(key, tier, CopyEvent.VERIFY, tag=tag)
    txn.clear_upload(key, tier)


def clear_upload(key: ShardKey, tier: str, txn: WriteTxn) -> None:
    """It is complete or given up."""
    txn.clear_upload(key, tier)


def fail(txn: WriteTxn, keys: list[ShardKey], tier: str, error: str) -> int:
    """WRITING to PENDING again; returns the attempts of the last."""
    attempts = 0
    for key in keys:
        copy = txn.copy(key, tier)
        if copy is not None and copy.state is CopyState.WRITING:
            attempts = txn.copy_event(key, tier, CopyEvent.FAIL, error=error).attempts
    return attempts


def shard_item(txn: ReadTxn, session: SessionRow, row: ShardRow) -> ShardItem:
    """A shard as a mover needs it."""
    return ShardItem(
        session_id=row.session_id,
        shard_id=row.shard_id,
        key=shard_key(session.run, session.step, session.session, row.name),
        size=row.size,
        chunk_size=row.chunk_size,
        crc32c=row.crc32c,
        chunks=txn.chunks(row.key),
    )
