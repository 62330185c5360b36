"""A checkpoint out of a tier's directory, or a copy of it, without a gateway: plain shards copied, packs unpacked.

Owns the reading of what lies below a tier's root, every byte checked against the manifest. Does not own how files appear in the
target (directories.py) nor where things lie (forebay_wire.keys).
"""

import os
import time
from collections.abc import Generator, Iterable, Iterator
from pathlib import Path

from forebay import directories
from forebay.directories import OnBytes
from forebay.errors import Corrupt, InvalidArgument, NotFound
from forebay.progress import byte_counter
from forebay.types import RestoreSummary, Shard
from forebay_wire.checksums import crc32c
from forebay_wire.keys import manifest_key, parse_step_dir, shard_key
from forebay_wire.manifest import Manifest, ManifestError, ShardEntry
from forebay_wire.names import InvalidName, check_run, check_step
from forebay_wire.packs import PackedShard


class TierCopy:
    """A complete checkpoint below a tier's root."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._root = root
        self.manifest = manifest
        self._plain: dict[str, ShardEntry] = {}
        self._packed: dict[str, tuple[str, PackedShard]] = {}  # name: the pack's, and where in it
        self._writers: dict[str, int] = {}
        for writer, file, index in manifest.files():
            if index is None:
                self._plain[file.name] = file
                self._writers[file.name] = writer
                continue
            for packed in index:
                self._packed[packed.name] = (file.name, packed)
                self._writers[packed.name] = writer

    @classmethod
    def open(cls, root: Path, run: str, step: int) -> "TierCopy":
        """The checkpoint whose manifest lies there. Raises NotFound, Corrupt, InvalidArgument, OSError."""
        try:
            path = root / manifest_key(check_run(run), check_step(step))
        except InvalidName as error:
            raise InvalidArgument(str(error)) from error
        try:
            manifest = Manifest.from_json(path.read_bytes())
        except FileNotFoundError as error:
            raise NotFound(f"no complete checkpoint {run}/{step} lies below {root}: there is no {path}") from error
        except ManifestError as error:
            raise Corrupt(f"{path}: {error}") from error
        if (manifest.run, manifest.step) != (run, step):
            raise Corrupt(f"{path}: it belongs to another checkpoint, {manifest.run}/{manifest.step}")
        return cls(root, manifest)

    def shards(self) -> list[Shard]:
        """All shards, sorted by name; packs are none."""
        entries: list[ShardEntry | PackedShard] = [*self._plain.values(), *(packed for _, packed in self._packed.values())]
        found = [Shard(entry.name, entry.size, entry.crc32c, self._writers[entry.name], "", {}) for entry in entries]
        return sorted(found, key=lambda shard: shard.name)

    def stream(self, name: str) -> Iterator[memoryview]:
        """A shard's bytes, each piece checked before it is handed out. Raises Corrupt naming the file."""
        if name in self._plain:
            yield from self._pieces(name, self._plain[name])
            return
        pack, packed = self._packed[name]
        data = self._read(pack, packed.offset, packed.size)
        if crc32c(data) != packed.crc32c:
            raise Corrupt(f"{self._path(pack)}: the bytes of {name!r} do not match their checksum")
        yield memoryview(data)

    def write_to(self, name: str, descriptor: int, on_bytes: OnBytes) -> None:
        """A whole shard into an open file of the caller's. Raises as stream(), and OSError."""
        at = 0
        for piece in self.stream(name):
            left = piece
            while left:
                count = os.pwrite(descriptor, left, at)
                at, left = at + count, left[count:]
            on_bytes(piece.nbytes)

    def packed(self, shards: Iterable[Shard]) -> Generator[list[tuple[Shard, bytes]], None, None]:
        """Nothing: a file is as quickly read for one shard as for many."""
        yield from ()

    def _pieces(self, name: str, entry: ShardEntry) -> Iterator[memoryview]:
        path = self._path(name)
        for index, expected in enumerate(entry.chunk_crcs()):
            offset = index * entry.chunk_size
            data = self._read(name, offset, min(entry.chunk_size, entry.size - offset))
            if crc32c(data) != expected:
                raise Corrupt(f"{path}: the bytes from {offset} on do not match their checksum")
            yield memoryview(data)
        if self._size(path) != entry.size:
            raise Corrupt(f"{path}: it has {self._size(path)} bytes and should have {entry.size}")

    def _path(self, name: str) -> Path:
        return self._root / shard_key(self.manifest.run, self.manifest.step, self.manifest.session, name)

    def _size(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError as error:
            raise Corrupt(f"{path}: the manifest names this file, and it is not there") from error

    def _read(self, name: str, offset: int, size: int) -> bytes:
        path = self._path(name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError as error:
            raise Corrupt(f"{path}: the manifest names this file, and it is not there") from error
        try:
            data = bytearray()
            while len(data) < size and (piece := os.pread(descriptor, size - len(data), offset + len(data))):
                data += piece
        finally:
            os.close(descriptor)
        if len(data) != size:
            raise Corrupt(f"{path}: it ends at {offset + len(data)}, inside what the manifest says it holds")
        return bytes(data)


def newest_step(root: Path, run: str) -> int:
    """The highest step of the run with a manifest below the root. Raises NotFound, InvalidArgument, OSError."""
    try:
        directory = root / check_run(run)
    except InvalidName as error:
        raise InvalidArgument(str(error)) from error
    try:
        names = [entry.name for entry in directory.iterdir()]
    except (FileNotFoundError, NotADirectoryError):
        names = []
    steps = [step for name in names if (step := parse_step_dir(name)) is not None]
    for step in sorted(steps, reverse=True):
        if (root / manifest_key(run, step)).is_file():
            return step
    raise NotFound(f"run {run!r} has no complete checkpoint below {root}")


def export_dir(
    root: str | os.PathLike[str],
    run: str,
    step_or_latest: int | str,
    path: str | os.PathLike[str],
    *,
    streams: int = directories.STREAMS,
    durable: bool = False,
    progress: bool = True,
) -> RestoreSummary:
    """As Client.restore_dir, from a POSIX tier's root or a copy of one: no gateway is asked.

    Raises NotFound, Corrupt, InvalidArgument (the target is in the way), OSError.
    """
    started_s = time.monotonic()
    base = Path(root)
    if not base.is_dir():
        raise NotFound(f"{base}: no such directory")
    step = newest_step(base, run) if step_or_latest == "latest" else int(step_or_latest)
    copy = TierCopy.open(base, run, step)
    shards = copy.shards()
    size = sum(shard.size for shard in shards)
    target = directories.Target(Path(path), durable)
    try:
        with byte_counter(f"export {run}/{step}", size, progress) as count:
            directories.restore_files(copy, target, shards, streams, count)
        target.publish()
    finally:
        target.close()
    return RestoreSummary(run, step, copy.manifest.session, len(shards), size, str(path), time.monotonic() - started_s)
