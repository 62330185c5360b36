"""What MemoryGateway knows: checkpoints in dictionaries, and the contract's rules over them.

Owns the rules (names, sessions, completeness, levels, space). Does not own messages' order or faults (testing.py). Every method
but those that take `changed` themselves is called with it held.
"""

import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from forebay.errors import AlreadyExists, CacheFull, Corrupt, Incomplete, InvalidArgument, NotFound
from forebay.types import Missing
from forebay_wire.checksums import crc32c
from forebay_wire.names import InvalidName, check_run, check_session, check_shard_name, file_and_directory
from forebay_wire.v1 import admin_pb2
from forebay_wire.v1 import gateway_pb2 as pb


@dataclass(slots=True)
class Stored:
    """A shard's bytes and the checksum they came with."""

    data: bytes
    crc32c: int


@dataclass(slots=True)
class Part:
    """One writer's shards."""

    committed: bool = False
    metadata_json: str = ""
    shards: dict[str, Stored] = field(default_factory=dict)


@dataclass(slots=True)
class Session:
    """One session of a checkpoint."""

    name: str
    writers: int
    parts: dict[int, Part] = field(default_factory=dict)

    def missing(self) -> list[Missing]:
        """The writers that have not committed."""
        return [
            Missing(writer, state="open" if writer in self.parts else "absent")
            for writer in range(self.writers)
            if writer not in self.parts or not self.parts[writer].committed
        ]

    def shards(self) -> Iterator[tuple[int, str, Stored]]:
        """(writer, name, shard) of all parts."""
        for writer, part in sorted(self.parts.items()):
            for name, shard in part.shards.items():
                yield writer, name, shard


@dataclass(slots=True)
class Saved:
    """A checkpoint: its sessions, oldest first, and which of them is complete."""

    sessions: dict[str, Session] = field(default_factory=dict)
    complete: str = ""
    pinned: bool = False
    drained: set[str] = field(default_factory=set)

    def shown(self) -> Session:
        """The complete session, else the newest."""
        return self.sessions[self.complete or next(reversed(self.sessions))]


class MemoryStore:
    """All checkpoints. `changed` guards everything and is notified when something is committed or drained."""

    def __init__(self, tiers: tuple[str, ...], capacity_bytes: int, retry_after_s: float) -> None:
        self.tiers = tiers
        self.capacity_bytes = capacity_bytes
        self.retry_after_s = retry_after_s
        self.held: set[str] = set()
        self.changed = threading.Condition()
        self.checkpoints: dict[tuple[str, int], Saved] = {}

    # Putting; these take the lock

    def admit(self, part: pb.PartRef, name: str, size: int) -> pb.Receipt | None:
        """Check names and space for a shard; its receipt where this writer already has that name."""
        with self.changed:
            self._check_names(part, [name])
            shard = self._part(part).shards.get(name)
            if shard is None:
                self._check_writable(part, [name])
                self._check_space(size)
                return None
            return _receipt(name, shard)

    def check_space(self, size: int) -> None:
        """Raise CacheFull unless `size` more bytes fit."""
        with self.changed:
            self._check_space(size)

    def store(self, part: pb.PartRef, name: str, data: bytes) -> pb.Receipt:
        """Keep a whole shard."""
        with self.changed:
            self._check_writable(part, [name])
            shard = Stored(data, crc32c(data))
            self._part(part).shards[name] = shard
            return _receipt(name, shard)

    def put_batch(self, part: pb.PartRef, shards: Iterable[pb.SmallShard]) -> list[pb.Receipt]:
        """Keep all of them or none."""
        batch = list(shards)
        with self.changed:
            self._check_names(part, [shard.name for shard in batch])
            known = self._part(part).shards
            for shard in batch:
                if crc32c(shard.data) != shard.crc32c:
                    raise Corrupt(f"{shard.name!r} arrived damaged")
                if shard.name in known and known[shard.name].data != shard.data:
                    raise AlreadyExists(f"other bytes already have the name {shard.name!r}")
            new = [shard for shard in batch if shard.name not in known]
            self._check_writable(part, [shard.name for shard in new])
            self._check_space(sum(len(shard.data) for shard in new))
            known.update((shard.name, Stored(shard.data, shard.crc32c)) for shard in new)
            return [_receipt(shard.name, known[shard.name]) for shard in batch]

    # Everything below is called with the lock held

    def commit(self, request: pb.CommitPartRequest) -> pb.CommitPartResponse:
        """Close a part; complete the checkpoint where it was the last."""
        self._check_names(request.part, [])
        part = self._part(request.part)
        expected = {shard.name: (shard.size, shard.crc32c) for shard in request.shards}
        landed = {name: (len(shard.data), shard.crc32c) for name, shard in part.shards.items()}
        if part.committed and (landed != expected or part.metadata_json != request.metadata_json):
            raise AlreadyExists(f"writer {request.part.writer} has committed this part with other content")
        if (clash := file_and_directory(expected)) is not None:
            raise InvalidArgument(f"shards {clash[0]!r} and {clash[1]!r} cannot both be files")
        lacking = tuple(sorted(name for name in expected if landed.get(name) != expected[name]))
        if lacking:
            missing = Missing(request.part.writer, lacking, "open")
            raise Incomplete(f"not all shards have landed: {missing}", missing=[missing])
        part.committed, part.metadata_json = True, request.metadata_json
        part.shards = {name: part.shards[name] for name in expected}
        saved = self.checkpoints[request.part.run, request.part.step]
        session = saved.sessions[request.part.session]
        if not session.missing() and saved.complete != session.name:
            saved.complete = session.name
            saved.drained.clear()
        self.drain()
        self.changed.notify_all()
        complete = saved.complete == session.name
        return pb.CommitPartResponse(level="cache", checkpoint_complete=complete, pressure=self.pressure())

    def abort(self, ref: pb.PartRef) -> int:
        """Drop what is not committed, and what is then empty; how many shards."""
        saved = self.checkpoints.get((ref.run, ref.step), Saved())
        session = saved.sessions.get(ref.session, Session(ref.session, 0))
        part = session.parts.get(ref.writer, Part(committed=True))
        if part.committed:
            return 0
        del session.parts[ref.writer]
        if not session.parts:
            del saved.sessions[session.name]
        if not saved.sessions:
            del self.checkpoints[ref.run, ref.step]
        return len(part.shards)

    def shard_infos(self, request: pb.ListShardsRequest) -> list[pb.ShardInfo]:
        """The shards of a session, or of the one that is shown."""
        saved = self.checkpoint(request.run, request.step)
        session = saved.sessions[request.session] if request.session else saved.shown()
        copies = {tier: "verified" if tier in saved.drained else "pending" for tier in self.tiers}
        found = session.shards()
        return [
            pb.ShardInfo(name=name, size=len(shard.data), crc32c=shard.crc32c, writer=writer, state="sealed", copies=copies)
            for writer, name, shard in found
        ]

    def drain(self) -> None:
        """Let everything complete reach every tier that is not held."""
        for saved in self.checkpoints.values():
            if saved.complete:
                saved.drained |= {tier for tier in self.tiers if tier not in self.held}
        self.changed.notify_all()

    def levels(self, level: str) -> list[str]:
        """The levels that a level's name means."""
        if level == "all":
            return ["cache", *self.tiers]
        if level not in ("cache", *self.tiers):
            raise InvalidArgument(f"there is no level {level!r}; this gateway has cache, {', '.join(self.tiers)}")
        return [level]

    def progress(self, request: pb.WaitRequest, levels: list[str]) -> pb.WaitResponse:
        """How far a wait is."""
        saved = self.checkpoints.get((request.run, request.step))
        if saved is None:
            return pb.WaitResponse(reason="nothing of this checkpoint has come yet")
        session = saved.shown()
        size = sum(len(shard.data) for _, _, shard in session.shards())
        reached = bool(saved.complete) and saved.drained.issuperset(set(levels) - {"cache"})
        return pb.WaitResponse(
            reached=reached,
            bytes_done=size if reached else 0,
            bytes_total=size,
            missing=_missing(session.missing()),
            reason="" if reached else "the drain is held" if saved.complete else "writers are missing",
        )

    def checkpoint(self, run: str, step: int) -> Saved:
        """A checkpoint, or NotFound."""
        try:
            return self.checkpoints[run, step]
        except KeyError:
            raise NotFound(f"there is no checkpoint {run}/{step}") from None

    def find_shard(self, request: pb.ReadShardRequest) -> Stored:
        """A shard of a complete checkpoint, from the source asked for."""
        try:
            return self.find_shards(request)[request.name]
        except KeyError:
            raise NotFound(f"{request.run}/{request.step} has no shard {request.name!r}") from None

    def find_shards(self, request: pb.ReadShardRequest | pb.ReadManyRequest) -> dict[str, Stored]:
        """All shards of a complete checkpoint, by name, from the source asked for."""
        saved = self.checkpoint(request.run, request.step)
        if not saved.complete:
            raise Incomplete(f"{request.run}/{request.step} is incomplete", missing=saved.shown().missing())
        if request.source not in ("", "auto", "cache", *saved.drained):
            raise NotFound(f"{request.run}/{request.step} is not on {request.source!r}")
        session = saved.sessions.get(request.session or saved.complete)
        return {name: shard for _, name, shard in session.shards()} if session else {}

    def describe(self, run: str, step: int) -> pb.Checkpoint:
        """A checkpoint as it is shown."""
        saved = self.checkpoint(run, step)
        session = saved.shown()
        shards = [shard for _, _, shard in session.shards()]
        size = sum(len(shard.data) for shard in shards)
        first = session.parts.get(0)
        return pb.Checkpoint(
            run=run,
            step=step,
            session=session.name,
            writers=session.writers,
            state="complete" if saved.complete else "incomplete",
            missing=[] if saved.complete else _missing(session.missing()),
            levels=[self._level(saved, level, size) for level in ("cache", *self.tiers)],
            size=size,
            shard_count=len(shards),
            pinned=saved.pinned,
            metadata_json=first.metadata_json if first else "",
        )

    def run(self, run: str) -> pb.Run:
        """A run as it is listed."""
        steps = {step: saved for (name, step), saved in self.checkpoints.items() if name == run}
        latest = max((step for step, saved in steps.items() if saved.complete), default=None)
        return pb.Run(run=run, checkpoints=len(steps), latest_step=latest)

    def pressure(self) -> pb.Pressure:
        """How full it is."""
        fill = self.used_bytes() / self.capacity_bytes
        level = "refusing" if fill >= 0.95 else "hard" if fill >= 0.9 else "soft" if fill >= 0.6 else "ok"
        return pb.Pressure(level=level, fill=fill)

    def used_bytes(self) -> int:
        """Bytes of all shards."""
        sessions = [session for saved in self.checkpoints.values() for session in saved.sessions.values()]
        return sum(len(shard.data) for session in sessions for _, _, shard in session.shards())

    def cache(self) -> admin_pb2.CacheStatus:
        """The cache as status shows it."""
        return admin_pb2.CacheStatus(path="memory", capacity_bytes=self.capacity_bytes, used_bytes=self.used_bytes())

    def tier(self, tier: str) -> admin_pb2.TierStatus:
        """A tier as status shows it."""
        waiting = [saved for saved in self.checkpoints.values() if saved.complete and tier not in saved.drained]
        shards = [shard for saved in waiting for _, _, shard in saved.shown().shards()]
        return admin_pb2.TierStatus(
            name=tier,
            kind="memory",
            state="held" if tier in self.held else "ok",
            pending_copies=len(shards),
            pending_bytes=sum(len(shard.data) for shard in shards),
            oldest_pending_s=0.0 if shards else None,
            required=True,
        )

    @staticmethod
    def _level(saved: Saved, level: str, size: int) -> pb.Level:
        here = bool(saved.complete) and (level == "cache" or level in saved.drained)
        state = "complete" if here else "pending" if saved.complete else "incomplete"
        return pb.Level(level=level, state=state, bytes_done=size if here else 0, bytes_total=size)

    def _part(self, ref: pb.PartRef) -> Part:
        saved = self.checkpoints.setdefault((ref.run, ref.step), Saved())
        session = saved.sessions.setdefault(ref.session, Session(ref.session, ref.writers))
        if session.writers != ref.writers:
            raise InvalidArgument(f"session {ref.session!r} has {session.writers} writers, not {ref.writers}")
        return session.parts.setdefault(ref.writer, Part())

    @staticmethod
    def _check_names(ref: pb.PartRef, names: list[str]) -> None:
        try:
            check_run(ref.run)
            check_session(ref.session)
            for name in names:
                check_shard_name(name)
        except InvalidName as error:
            raise InvalidArgument(str(error)) from error
        if not ref.writer < ref.writers:
            raise InvalidArgument(f"writer {ref.writer} of {ref.writers}")

    def _check_writable(self, ref: pb.PartRef, names: list[str]) -> None:
        if not names:
            return
        if self._part(ref).committed:
            raise AlreadyExists(f"writer {ref.writer} has committed this part")
        session = self.checkpoints[ref.run, ref.step].sessions[ref.session]
        for writer, name, _ in session.shards():
            if writer != ref.writer and name in names:
                raise AlreadyExists(f"writer {writer} already put {name!r}")

    def _check_space(self, size: int) -> None:
        if self.used_bytes() + size > self.capacity_bytes:
            raise CacheFull(f"the cache has no room for {size} bytes", retry_after_s=self.retry_after_s)


def _receipt(name: str, shard: Stored) -> pb.Receipt:
    return pb.Receipt(name=name, size=len(shard.data), crc32c=shard.crc32c, level="cache")


def _missing(missing: list[Missing]) -> list[pb.Missing]:
    return [pb.Missing(writer=entry.writer, shards=entry.shards, state=entry.state) for entry in missing]
