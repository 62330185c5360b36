"""What crash tests share: a gateway on real disks and a real S3 server, a driver that remembers what was acknowledged, and the
look at disks, catalog and tiers afterwards.

The driver plays a training job and is never restarted: its client outlives the gateway, as a trainer does.
"""

import asyncio
import contextlib
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forebay import Checkpoint, Client, Corrupt, ForebayError, Incomplete, NotFound
from forebay.demo.gateways import GatewayProcess, posix_tier, s3_tier
from forebay.demo.seaweedfs import SeaweedFS
from forebay_gateway.catalog import Catalog, ReadTxn, WriteTxn
from forebay_gateway.core.layout import manifest_key, part_key, shard_key, step_dir
from forebay_gateway.core.records import ShardKey
from forebay_wire.checksums import crc32c
from forebay_wire.manifest import Manifest

NODE = "a"
TIERS = ("pfs", "object")
RUN = "team/run"
LARGE, MIDDLE, SMALL = (6 << 20) + 4097, (2 << 20) + 1, 5000  # on S3: two parts, one request, one request
TEMP = ".forebay-tmp-"
SESSION = "job-1"


def content(seed: object, size: int) -> bytes:
    """Bytes that can be made again for comparison."""
    return random.Random(repr(seed)).randbytes(size)


def until(true: Callable[[], Any], what: str, timeout_s: float = 30.0, pause_s: float = 0.05) -> Any:
    """What `true` returns as soon as it is something."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := true()):
        if time.monotonic() > deadline_s:
            raise AssertionError(f"not within {timeout_s} s: {what}")
        time.sleep(pause_s)
    return value


@dataclass
class Log:
    """What the job was told. A checkpoint is `attempted` before its commit is sent, `promised` after the answer."""

    acknowledged: dict[tuple[int, str], tuple[int, int]] = field(default_factory=dict)  # (step, name): (size, CRC32C)
    attempted: set[int] = field(default_factory=set)
    promised: set[int] = field(default_factory=set)
    deleting: set[int] = field(default_factory=set)
    compared: set[tuple[int, str]] = field(default_factory=set)  # (step, name), read back and equal
    lost: set[tuple[int, str]] = field(default_factory=set)  # acknowledged, not deleted, and not there or not equal
    aborts: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def shards(self, step: int) -> dict[str, tuple[int, int]]:
        with self.lock:
            return {name: known for (each, name), known in self.acknowledged.items() if each == step}

    def give_up(self, step: int) -> None:
        """The job aborted it: nothing that was acknowledged of it is to be there."""
        with self.lock:
            self.aborts += 1
            for known in [known for known in self.acknowledged if known[0] == step]:
                del self.acknowledged[known]

    def miss(self, step: int, names: Iterable[str]) -> None:
        """What a look did not find as it was acknowledged; of a step that is being deleted nobody misses anything."""
        with self.lock:
            self.lost |= {(step, name) for name in names} if step not in self.deleting else set()

    def bytes_of(self, shards: Iterable[tuple[int, str]]) -> int:
        with self.lock:
            return sum(self.acknowledged[each][0] for each in shards if each in self.acknowledged)


@dataclass
class Leaks:
    """What lies somewhere and belongs to nothing, of all that was looked at."""

    looked_at: int = 0
    files: list[str] = field(default_factory=list)
    uploads: list[str] = field(default_factory=list)


class Trainer:
    """A job against one gateway, what it was told, and the look at the gateway's disk and catalog."""

    def __init__(self, gateway: GatewayProcess, tiers: tuple[str, ...], pfs: Path) -> None:
        self.gateway = gateway
        self.tiers = tiers
        self.pfs = pfs
        self.log = Log()
        self.leaks = Leaks()

    @property
    def cache(self) -> Path:
        return self.gateway.cache

    def client(self, *, retry_s: float = 60.0, admit_s: float = 60.0) -> Client:
        return Client(self.gateway.address, admit_timeout=admit_s, retry_timeout=retry_s, progress=False)

    # -- the job -------------------------------------------------------------------------------------------------------

    def put(self, part: Any, name: str, size: int) -> None:
        receipt = part.put(name, content((part.step, name), size))
        with self.log.lock:
            self.log.acknowledged[part.step, name] = (receipt.size, receipt.crc32c)

    def put_many(self, part: Any, sizes: dict[str, int]) -> None:
        for receipt in part.put_many({name: content((part.step, name), size) for name, size in sizes.items()}):
            with self.log.lock:
                self.log.acknowledged[part.step, receipt.name] = (receipt.size, receipt.crc32c)

    def commit(self, part: Any) -> None:
        self.log.attempted.add(part.step)
        part.commit({"step": part.step})
        self.log.promised.add(part.step)

    def save(self, client: Client, step: int, sizes: dict[str, int], *batches: dict[str, int]) -> None:
        """Each shard by itself, all small ones together, further batches of small ones each for itself, then the commit. Every
        other step goes over the fd lane."""
        with client.checkpoint(RUN, step, session=SESSION, lane="auto" if step % 2 else "stream") as part:
            for name in [name for name in sizes if sizes[name] > SMALL]:
                self.put(part, name, sizes[name])
            self.put_many(part, {name: size for name, size in sizes.items() if size <= SMALL})
            for tiny in batches:
                self.put_many(part, tiny)
            self.commit(part)

    def abort(self, client: Client, step: int, sizes: dict[str, int], *batches: dict[str, int]) -> None:
        """Put shards under the names that a save of the step may use, of other lengths, and take them back: whatever of them
        came again would be in that save's way, or among its shards."""

        def given_up() -> bool:
            with contextlib.suppress(ForebayError):  # the gateway is away; what it had taken is still to go
                client.checkpoint(RUN, step, session=SESSION).abort()
                return True
            return False

        part = client.checkpoint(RUN, step, session=SESSION, lane="auto" if step % 2 else "stream")
        for name in [name for name in sizes if sizes[name] > SMALL]:
            self.put(part, name, sizes[name] + 1)
        for tiny in ({name: size for name, size in sizes.items() if size <= SMALL}, *batches):
            self.put_many(part, {name: size + 1 for name, size in tiny.items()})
        with contextlib.suppress(ForebayError):
            part.abort()
        until(given_up, f"step {step} is aborted", 60.0, 0.2)
        self.log.give_up(step)

    def compare(self, client: Client, step: int, source: str = "auto") -> None:
        """Every acknowledged shard, every byte; and nothing else is in the checkpoint. Counts what is, and what is not."""
        known = self.log.shards(step)
        looked_for = set(known)
        try:
            reader = client.open(RUN, step, source=source)
            looked_for = set(known) - (names := set(reader.names()))
            self.log.miss(step, looked_for)
            assert names == set(known)
            for name, (size, crc) in known.items():
                looked_for = {name}
                data = reader.read(name)
                if data != content((step, name), size):
                    self.log.miss(step, looked_for)
                assert (len(data), crc32c(data)) == (size, crc), (step, name, source)
                assert data == content((step, name), size)
                with self.log.lock:
                    self.log.compared.add((step, name))
        except (NotFound, Incomplete, Corrupt):
            self.log.miss(step, looked_for)
            raise

    def figures(self) -> dict[str, int]:
        """What was promised, what was lost of it, and what was left lying about, as far as anybody has looked."""
        return {
            "acknowledged_shards": len(self.log.acknowledged),
            "acknowledged_bytes": self.log.bytes_of(list(self.log.acknowledged)),
            "compared_bytes": self.log.bytes_of(self.log.compared),
            "lost_bytes": self.log.bytes_of(self.log.lost),
            "parts_aborted": self.log.aborts,
            "files_looked_at": self.leaks.looked_at,
            "leaked_files": len(self.leaks.files),
            "leaked_uploads": len(self.leaks.uploads),
        }

    def checkpoint(self, client: Client, step: int) -> Checkpoint | None:
        return next((found for found in listed(client) if found.step == step), None)

    # -- what a restart must find --------------------------------------------------------------------------------------

    def check_visible(self) -> None:
        """Promised checkpoints are complete, and only such are complete whose commit was at least asked for."""
        promised, attempted = set(self.log.promised), self.log.attempted
        with self.client() as client:
            complete = {found.step for found in listed(client) if found.complete}
            latest = client.latest(RUN)
        gone = self.log.deleting
        assert promised - gone <= complete, f"a promised checkpoint is not there: {promised - gone - complete}"
        assert complete <= attempted, f"complete, and never committed: {complete - attempted}"
        assert latest is None or latest in attempted

    def check_queue_empty(self, client: Client) -> None:
        until(
            lambda: all(tier.pending_copies == 0 and tier.state == "ok" for tier in client.status().tiers),
            "the queue is empty",
        )

    def rows(self, look: Callable[[ReadTxn], Any]) -> Any:
        """What the catalog of the gateway, which is down, says."""

        async def act(catalog: Catalog) -> Any:
            with catalog.read() as txn:
                return look(txn)

        return self._with_catalog(act)

    def edit(self, change: Callable[[WriteTxn], None]) -> None:
        """Change the catalog of the gateway, which is down."""
        self._with_catalog(lambda catalog: catalog.write(change))

    def _with_catalog(self, act: Callable[[Catalog], Awaitable[Any]]) -> Any:
        async def opened() -> Any:
            catalog = await Catalog.open(self.cache / "catalog", tiers=self.tiers, node=NODE)
            try:
                return await act(catalog)
            finally:
                await catalog.close()

        return asyncio.run(opened())

    def check_disk(self) -> None:
        """Every file has its row and every row its file; sums hold; nothing is begun and not ended."""

        def look(txn: ReadTxn) -> Any:
            cached = {row.key: row.disk_size for row in txn.cached()}
            begun = list(txn.uploads())
            waiting = [entry for tier in self.tiers for entry in txn.pending(tier)]
            return cached, begun, waiting, txn.totals() == txn.recount(), txn.deleting()

        cached, begun, waiting, sums_hold, deleting = self.rows(look)
        found = self.shard_files()
        left = [*(self.cache / "incoming").iterdir(), *(self.cache / "data").rglob(f"{TEMP}*")]
        self.leaks.looked_at += len(found) + len(left)
        self.leaks.files += [f"{self.cache}: {each}" for each in (*(found.keys() - cached.keys()), *left)]
        assert found == cached
        assert (begun, waiting, deleting) == ([], [], [])
        assert sums_hold
        assert left == []

    def shard_files(self) -> dict[ShardKey, int]:
        """Length by session and shard number."""
        return {
            ShardKey(int(path.parent.name, 16), int(path.stem, 16)): path.stat().st_size
            for path in (self.cache / "data").glob("*/*.shard")
        }

    # -- what is left on the tiers ---------------------------------------------------------------------------------------

    def check_tiers(self, steps: Iterable[int]) -> None:
        """Nothing half done, and nothing but these checkpoints' files."""
        uploads = self.uploads()
        self.leaks.uploads += uploads
        left = self.temporary_files()
        wanted = set().union(*(self._files_of(step) for step in steps))
        for names in self.on_tiers():
            there = {name for name in names if not name.startswith(".forebay/")}
            assert wanted <= there, wanted - there
            left |= there - wanted
            self.leaks.looked_at += len(there)
        self.leaks.files += sorted(left)
        assert not uploads and not left, (uploads, left)

    def _files_of(self, step: int) -> set[str]:
        """Keys of the checkpoint's shards and documents, by its manifest, which must name what was acknowledged."""
        manifest = Manifest.from_json((self.pfs / manifest_key(RUN, step)).read_bytes())
        assert {name for part in manifest.parts for name in part.names()} == set(self.log.shards(step))
        shards = {shard_key(RUN, step, SESSION, file.name) for _, file, _ in manifest.files()}
        return shards | {part_key(RUN, step, SESSION, 0), manifest_key(RUN, step)}

    def temporary_files(self) -> set[str]:
        """On the directory, and what a probe has left there."""
        return {str(path) for path in (*self.pfs.rglob(f"{TEMP}*"), *self.pfs.glob(".forebay/probe/*"))}

    def await_deletions(self, steps: Iterable[int]) -> None:
        """Until no other steps than these have anything on a tier: a deletion goes on after its answer."""
        wanted = {step_dir(RUN, step) for step in steps}
        until(lambda: self.steps_on_tiers() == wanted, "what was deleted is gone")

    def steps_on_tiers(self) -> set[str]:
        names = set().union(*self.on_tiers())
        return {"/".join(name.split("/")[:3]) for name in names if not name.startswith(".forebay/")}

    def on_tiers(self) -> list[set[str]]:
        """Keys of all files, for each tier."""
        return [self.files_on_pfs()]

    def files_on_pfs(self) -> set[str]:
        # By os.walk: a directory may go while this looks. It follows no links, so `current` is not gone into.
        paths = (Path(directory, name) for directory, _, names in os.walk(self.pfs) for name in names)
        return {str(path.relative_to(self.pfs)) for path in paths if not path.is_symlink()}

    def uploads(self) -> list[str]:
        """Multipart uploads that were begun and not ended; a directory knows none."""
        return []


class Bench(Trainer):
    """One node with a POSIX and an S3 tier of its own."""

    def __init__(
        self, directory: Path, server: SeaweedFS, prefix: str, *, soft: float = 0.01, capacity: str = "160MiB"
    ) -> None:
        self.server = server
        self.prefix = prefix
        self.pfs = directory / "pfs"
        self.pfs.mkdir()
        gateway = GatewayProcess(
            directory,
            NODE,
            [posix_tier(self.pfs), s3_tier(server.endpoint, server.bucket, prefix=prefix, part_size="5MiB")],
            capacity=capacity,
            cache_keys=f'chunk_size = "1MiB"\nsoft = {soft}',
            environment=server.environment,
        )
        super().__init__(gateway, TIERS, self.pfs)

    def check_settled(self, steps: set[int]) -> None:
        """Everything drained and bit-exact at every level; then the process ends in order, and disks and tiers are clean."""
        with self.client() as client:
            for step in sorted(steps):
                client.wait(RUN, step, "all", timeout=60)
                for source in (*TIERS, "auto"):
                    self.compare(client, step, source)
            self.check_queue_empty(client)
            assert client.latest(RUN) == max(steps)
            assert [found.step for found in listed(client)] == sorted(steps)
            self.await_deletions(steps)
        assert self.gateway.terminate() == 0
        self.check_disk()
        self.check_tiers(steps)

    def on_tiers(self) -> list[set[str]]:
        return [self.files_on_pfs(), self.objects()]

    def objects(self) -> set[str]:
        return set(self.versions())

    def versions(self) -> dict[str, str]:
        """ETag and time of every object, by key below the prefix."""
        with contextlib.closing(self.server.client()) as s3:
            pages = s3.get_paginator("list_objects_v2").paginate(Bucket=self.server.bucket, Prefix=f"{self.prefix}/")
            found = [entry for page in pages for entry in page.get("Contents", ())]
        return {entry["Key"].removeprefix(f"{self.prefix}/"): f"{entry['ETag']} {entry['LastModified']}" for entry in found}

    def uploads(self) -> list[str]:
        """Multipart uploads that were begun and not ended."""
        with contextlib.closing(self.server.client()) as s3:
            answer = s3.list_multipart_uploads(Bucket=self.server.bucket)
        return [upload["Key"] for upload in answer.get("Uploads", ()) if upload["Key"].startswith(f"{self.prefix}/")]


class Job(threading.Thread):
    """A driver on a thread; join() raises what it raised."""

    def __init__(self, act: Callable[[], None]) -> None:
        super().__init__(daemon=True)
        self._act = act
        self.error: BaseException | None = None

    def run(self) -> None:
        try:
            self._act()
        except BaseException as error:
            self.error = error

    def finish(self, timeout_s: float) -> None:
        self.join(timeout_s)
        if self.error is not None:
            raise self.error
        assert not self.is_alive(), "the job does not end"


def listed(client: Client) -> list[Checkpoint]:
    """The run's checkpoints, none where nobody has heard of the run."""
    try:
        return client.checkpoints(RUN)
    except NotFound:
        return []


def movers_died(client: Client) -> int:
    """How many movers the gateway has seen die."""
    return sum(mover.restarts for mover in client.status().movers)


def delete(client: Client, step: int, **options: Any) -> None:
    """As a tool does: again while the gateway is away; gone is gone."""

    def gone() -> bool:
        with contextlib.suppress(NotFound):
            try:
                client.delete(RUN, step, **options)
            except NotFound:
                raise
            except ForebayError:
                return False
        return True

    until(gone, f"step {step} is deleted", 60.0, 0.2)
