"""What the catalog keeps, as immutable rows. Sizes are bytes.

Owns the shapes. How rows are keyed and indexed is catalog/schema; how states move is core/states. Fields are only ever
appended, with a default: rows are stored as arrays.
"""

from enum import StrEnum
from typing import NamedTuple

import msgspec

from forebay_gateway.core.schedule_rows import Kind
from forebay_gateway.core.states import CopyState, ShardState
from forebay_wire.packs import PackedShard


class ShardKey(NamedTuple):
    """Names a shard on this node; both numbers are this catalog's own and stand in the cache file's path."""

    session_id: int
    shard_id: int


class Row(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Base of all rows. They refer to nothing that could refer back, so the garbage collector need not go through them: with a
    hundred thousand in memory one pass would hold the event loop for a tenth of a second."""


class PublishState(StrEnum):
    """A session on one tier."""

    PENDING = "pending"
    COMPLETE = "complete"  # manifest.json on the tier names this session
    SUPERSEDED = "superseded"  # manifest.json names a newer session of the same step
    REMOVED = "removed"  # it was complete there, and retention has taken it away
    SKIPPED = "skipped"  # by policy it does not go there: a newer checkpoint of its run does


class PartState(StrEnum):
    """A writer's part on this node."""

    OPEN = "open"
    COMMITTED = "committed"


class Origin(StrEnum):
    """Where a session's rows come from."""

    LOCAL = "local"  # written through this gateway
    TIER = "tier"  # adopted from a manifest on a tier, to be restored here


class CheckpointRow(Row, frozen=True, array_like=True, gc=False):
    """A (run, step): its sessions in the order in which they were opened here."""

    run: str
    step: int
    session_ids: tuple[int, ...] = ()
    pinned: bool = False
    deleting: bool = False
    held: bool = False  # an operator said that it does not go to any tier yet
    turn: int = 0  # above 0: an operator said that it goes first; lower before higher


class SessionRow(Row, frozen=True, array_like=True, gc=False):
    """One session of one checkpoint."""

    id: int
    run: str
    step: int
    session: str
    writers: int
    origin: Origin = Origin.LOCAL
    commit_seq: int = 0  # of the newest part committed here; 0 before the first
    publish: dict[str, PublishState] = {}  # by tier name
    known_parts: dict[int, str] = {}  # writer: node, for parts durable elsewhere, as seen on a tier
    predecessors: tuple[str, ...] = ()  # sessions whose manifest stood on a tier when this one began
    reason: str = ""  # why it cannot complete, where that is known
    kind: Kind = Kind.PERIODIC  # the most urgent of its parts
    tiers: tuple[str, ...] | None = None  # those that its policy named at its first commit; None: all, empty: it is transient
    skipped: dict[str, str] = {}  # tier: why it is SKIPPED there

    @property
    def is_transient(self) -> bool:
        """Whether it stays in the cache by policy, and is the first to leave it."""
        return self.tiers == ()

    @property
    def is_cache_only(self) -> bool:
        """Whether no tier has it or is to get it, by policy."""
        skipped = bool(self.publish) and all(state is PublishState.SKIPPED for state in self.publish.values())
        return self.is_transient or skipped

    def goes_to(self, tier: str) -> bool:
        """Whether its policy has it go there."""
        return self.tiers is None or tier in self.tiers

    @property
    def is_superseded(self) -> bool:
        """Whether a newer session stands in its place on every tier: nobody restores from it, and it may go."""
        return bool(self.publish) and all(state is PublishState.SUPERSEDED for state in self.publish.values())


class PartRow(Row, frozen=True, array_like=True, gc=False):
    """One writer's part on this node."""

    session_id: int
    writer: int
    state: PartState = PartState.OPEN
    metadata_json: str = ""
    commit_seq: int = 0
    shard_count: int = 0
    size: int = 0
    recorded: tuple[str, ...] = ()  # tiers on which its part record lies
    packs: int = 0  # of `shard_count`, and the bytes of `size` that are theirs
    packs_size: int = 0
    packed: int = 0  # shards that lie in packs, and their bytes
    packed_size: int = 0
    kind: Kind = Kind.PERIODIC  # as its commit named it

    @property
    def visible_count(self) -> int:
        """Shards as their writer put them: those in packs count, the packs do not."""
        return self.shard_count - self.packs + self.packed

    @property
    def visible_size(self) -> int:
        """Bytes of those."""
        return self.size - self.packs_size + self.packed_size

    @property
    def is_adopted(self) -> bool:
        """Whether it is another node's, known here from a tier's manifest: what it is on other tiers, that node answers for."""
        return self.state is PartState.COMMITTED and self.commit_seq == 0


class ShardRow(Row, frozen=True, array_like=True, gc=False):
    """One shard, or a pack of them. Chunk CRC table and index are kept apart (they are long and rarely needed)."""

    session_id: int
    shard_id: int
    writer: int
    name: str
    size: int
    chunk_size: int
    crc32c: int
    state: ShardState
    disk_size: int  # of the cache file, footer and padding included; 0 where there is none
    packed: int = 0  # shards in it, where it is a pack, and their bytes
    packed_size: int = 0

    @property
    def is_pack(self) -> bool:
        """Whether it holds other shards, and is none of its writer's own."""
        return self.packed > 0

    @property
    def visible_count(self) -> int:
        """Shards as their writer put them."""
        return self.packed or 1

    @property
    def visible_size(self) -> int:
        """Bytes of those."""
        return self.packed_size if self.is_pack else self.size

    @property
    def key(self) -> ShardKey:
        """The shard's key."""
        return ShardKey(self.session_id, self.shard_id)

    @property
    def is_cached(self) -> bool:
        """Whether the cache's own file may be read."""
        return self.state in (ShardState.SEALED, ShardState.EVICTABLE)


class NamedShard(msgspec.Struct, frozen=True, gc=False):
    """A shard as its writer put it: a file of its own, or `packed` in the one that `row` stands for."""

    row: ShardRow
    packed: PackedShard | None = None

    @property
    def name(self) -> str:
        """Of the shard."""
        return self.row.name if self.packed is None else self.packed.name

    @property
    def size(self) -> int:
        """Bytes of the shard."""
        return self.row.size if self.packed is None else self.packed.size

    @property
    def crc32c(self) -> int:
        """Of the shard."""
        return self.row.crc32c if self.packed is None else self.packed.crc32c

    @property
    def writer(self) -> int:
        """Whose it is."""
        return self.row.writer


class CopyRow(Row, frozen=True, array_like=True, gc=False):
    """One shard on one tier."""

    state: CopyState
    attempts: int = 0
    error: str = ""
    tag: str = ""  # the tier's version of the object


class UploadRow(Row, frozen=True, array_like=True, gc=False):
    """A multipart upload (or temporary file) that was begun; recorded before its first part."""

    key: str
    upload_id: str


class PendingCopy(NamedTuple):
    """An entry of the drain queue."""

    order: int  # commit_seq of its part: older first
    key: ShardKey


class TierTotals(NamedTuple):
    """What the queue of one tier holds."""

    copies: int
    size: int


class SessionSums(NamedTuple):
    """Running sums over one session's rows on this node."""

    parts: int
    committed: int  # parts that are COMMITTED
    committed_shards: int  # as they were at their parts' commits
    committed_size: int
    shards: int  # rows there are now
    size: int
    cached: int  # of those, shards whose cache file may be read
    cached_size: int
    sealed: int  # of those, SEALED: not yet safe on every required tier


class Totals(NamedTuple):
    """Running sums over the whole catalog."""

    used: int  # disk_size of all cache files that have a row
    dirty: int  # of those, SEALED: not yet safe on every required tier
    shards: int
    tiers: dict[str, TierTotals]
