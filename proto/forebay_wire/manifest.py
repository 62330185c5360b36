"""The JSON documents that lie beside the shards: a writer's part record and the checkpoint's manifest.

Owns their format: version 1, and version 2 for those that name packs, which a release that knows none must not take for
complete. A part record says that one writer's shards are there; a manifest says that the checkpoint is
complete, and carries all that a reader needs to check every byte. Does not own their text and its checksum (document.py), nor
the shards and packs that they list (entries.py).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from forebay_wire.document import (
    FORMAT_VERSION,
    PACKS_VERSION,
    ManifestError,
    NewerVersion,
    open_document,
    seal,
    what_is_wrong,
)
from forebay_wire.entries import (
    MAX_CHUNK_SIZE,
    MIN_CHUNK_SIZE,
    PackEntry,
    ShardEntry,
    chunk_count,
    list_of,
    pack_chunk_crcs,
    pack_from_json,
    pack_to_json,
    shard_from_json,
    shard_to_json,
    text,
    unpack_chunk_crcs,
    unsigned,
)
from forebay_wire.names import check_run, check_session, check_step, file_and_directory
from forebay_wire.packs import PackIndex

__all__ = [
    "FORMAT_VERSION",
    "MAX_CHUNK_SIZE",
    "MIN_CHUNK_SIZE",
    "PACKS_VERSION",
    "Manifest",
    "ManifestError",
    "NewerVersion",
    "PackEntry",
    "PartRecord",
    "ShardEntry",
    "chunk_count",
    "pack_chunk_crcs",
    "unpack_chunk_crcs",
    "what_is_wrong",
]


@dataclass(frozen=True, slots=True)
class PartRecord:
    """All shards of one writer, put and verified. `shards` are those with a file of their own, `packs` hold the others."""

    run: str
    step: int
    session: str
    writer: int
    writers: int
    node: str
    shards: tuple[ShardEntry, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    packs: tuple[PackEntry, ...] = ()
    kind: str = ""  # "final" or "preemption"; "" for a periodic one, and in documents of releases that knew no kinds
    tiers: tuple[str, ...] | None = (
        None  # in a cache's part file: what a policy restricts it to, none: it is transient; None: all
    )

    def files(self) -> Iterator[tuple[ShardEntry, PackIndex | None]]:
        """Every file there is of it: shards, then packs with their index."""
        yield from ((shard, None) for shard in self.shards)
        yield from ((pack.file, pack.index) for pack in self.packs)

    def names(self) -> Iterator[str]:
        """Of every shard, wherever it lies."""
        yield from (shard.name for shard in self.shards)
        for pack in self.packs:
            yield from (shard.name for shard in pack.index)

    def to_json(self) -> bytes:
        """The record as a document."""
        return seal(
            {
                "format": "forebay.part",
                "version": _version((self,)),
                "run": self.run,
                "step": self.step,
                "session": self.session,
                "writer": self.writer,
                "writers": self.writers,
                "node": self.node,
                "metadata": self.metadata,
                **({"kind": self.kind} if self.kind else {}),
                **({} if self.tiers is None else {"tiers": list(self.tiers)}),
                **_files_to_json(self),
            }
        )

    @classmethod
    def from_json(cls, document: bytes) -> "PartRecord":
        """Parse and check a document; raises ManifestError."""
        body = open_document(document, "forebay.part")
        try:
            part = cls(
                run=check_run(text(body["run"])),
                step=check_step(body["step"]),
                session=check_session(text(body["session"])),
                writer=unsigned(body["writer"]),
                writers=unsigned(body["writers"]),
                node=text(body["node"]),
                shards=tuple(shard_from_json(shard) for shard in list_of(body["shards"])),
                metadata=_object(body["metadata"]),
                packs=_packs_from_json(body),
                kind=text(body.get("kind", "")),
                tiers=tuple(map(text, list_of(body["tiers"]))) if "tiers" in body else None,
            )
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"part record: {_clause(error)}") from error
        if part.writer >= part.writers:
            raise ManifestError(f"part record: writer {part.writer} of {part.writers}")
        if part.packs:
            _check_distinct((part,))
        return part


@dataclass(frozen=True, slots=True)
class Manifest:
    """A complete checkpoint: every part of one session."""

    run: str
    step: int
    session: str
    writers: int
    node: str
    parts: tuple[PartRecord, ...]
    metadata: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of_parts(cls, parts: Iterable[PartRecord], node: str) -> "Manifest":
        """Join the parts of one session; raises ManifestError where they do not make one whole checkpoint."""
        ordered = tuple(sorted(parts, key=lambda part: part.writer))
        if not ordered:
            raise ManifestError("a manifest needs at least one part")
        first = ordered[0]
        manifest = cls(first.run, first.step, first.session, first.writers, node, ordered, first.metadata)
        manifest.check()
        return manifest

    def check(self) -> None:
        """Raise ManifestError unless the parts make one whole checkpoint with distinct shard names."""
        # The count first: a document may claim any number of writers.
        if len(self.parts) != self.writers or any(part.writer != index for index, part in enumerate(self.parts)):
            raise ManifestError(f"manifest: parts do not cover writers 0 to {self.writers - 1}")
        for part in self.parts:
            if (part.run, part.step, part.session, part.writers) != (self.run, self.step, self.session, self.writers):
                raise ManifestError(f"manifest: part {part.writer} belongs to another checkpoint or session")
        seen = _check_distinct(self.parts)
        if (clash := file_and_directory(seen)) is not None:
            raise ManifestError(f"manifest: shards {clash[0]!r} and {clash[1]!r} cannot both be files on a tier")

    def shards(self) -> Iterator[tuple[int, ShardEntry]]:
        """(writer, shard) of every shard with a file of its own."""
        for part in self.parts:
            for shard in part.shards:
                yield part.writer, shard

    def files(self) -> Iterator[tuple[int, ShardEntry, PackIndex | None]]:
        """(writer, file, its index where it is a pack) of every part."""
        for part in self.parts:
            for file, index in part.files():
                yield part.writer, file, index

    def to_json(self) -> bytes:
        """The manifest as a document."""
        return seal(
            {
                "format": "forebay.manifest",
                "version": _version(self.parts),
                "run": self.run,
                "step": self.step,
                "session": self.session,
                "writers": self.writers,
                "node": self.node,
                "metadata": self.metadata,
                "parts": [
                    {
                        "writer": part.writer,
                        "node": part.node,
                        **({"kind": part.kind} if part.kind else {}),
                        **_files_to_json(part),
                    }
                    for part in self.parts
                ],
            }
        )

    @classmethod
    def from_json(cls, document: bytes) -> "Manifest":
        """Parse and check a document; raises ManifestError."""
        body = open_document(document, "forebay.manifest")
        try:
            run, step = check_run(text(body["run"])), check_step(body["step"])
            session, writers = check_session(text(body["session"])), unsigned(body["writers"])
            metadata = _object(body["metadata"])
            parts = tuple(
                PartRecord(
                    run=run,
                    step=step,
                    session=session,
                    writer=unsigned(part["writer"]),
                    writers=writers,
                    node=text(part["node"]),
                    shards=tuple(shard_from_json(shard) for shard in list_of(part["shards"])),
                    metadata=metadata if index == 0 else {},
                    packs=_packs_from_json(part),
                    kind=text(part.get("kind", "")),
                )
                for index, part in enumerate(list_of(body["parts"]))
            )
            manifest = cls(run, step, session, writers, text(body["node"]), parts, metadata)
        except (KeyError, TypeError, ValueError) as error:
            raise ManifestError(f"manifest: {_clause(error)}") from error
        manifest.check()
        return manifest


def _files_to_json(part: PartRecord) -> dict[str, Any]:
    files: dict[str, Any] = {"shards": [shard_to_json(shard) for shard in part.shards]}
    if part.packs:
        files["packs"] = [pack_to_json(pack) for pack in part.packs]
    return files


def _version(parts: Iterable[PartRecord]) -> int:
    return PACKS_VERSION if any(part.packs for part in parts) else FORMAT_VERSION


def _check_distinct(parts: Iterable[PartRecord]) -> dict[str, int]:
    """The writer of every shard and pack by its name; raises ManifestError where a name comes twice."""
    seen: dict[str, int] = {}
    for part in parts:
        packs = (pack.file.name for pack in part.packs)
        for name in (*part.names(), *packs):
            if name in seen:
                raise ManifestError(f"manifest: writers {seen[name]} and {part.writer} both put {name!r}")
            seen[name] = part.writer
    return seen


def _packs_from_json(body: dict[str, Any]) -> tuple[PackEntry, ...]:
    return tuple(pack_from_json(pack) for pack in list_of(body.get("packs", [])))


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ManifestError(f"{value!r} is not an object")
    return value


def _clause(error: Exception) -> str:
    return f"key {error} is missing" if isinstance(error, KeyError) else str(error)
