"""Client: the verbs of the contract.

Owns argument checks and which part of the package a verb goes to. Does not own the same verbs with await (aio.py).
"""

import logging
import time
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import TracebackType
from typing import Any

from forebay import directories
from forebay.background import COMMITS, TIMEOUT_S, Background
from forebay.background_checkpoint import BackgroundCheckpoint
from forebay.care import Care
from forebay.connection import Connection
from forebay.convert import record
from forebay.errors import ForebayError, Incomplete, InvalidArgument, NotFound
from forebay.lanes.fd import LANES
from forebay.progress import byte_counter
from forebay.reader import Reader, list_shards
from forebay.retry import RetryPolicy
from forebay.session import default_session
from forebay.types import (
    Checkpoint,
    Deletion,
    Preempted,
    Pressure,
    QueueEntry,
    QueueList,
    Reloaded,
    RestoreSummary,
    Run,
    SaveSummary,
    Status,
    WaitProgress,
)
from forebay.waiting import OnProgress, check_level, wait_for
from forebay.writer import CheckpointWriter, part_ref
from forebay_wire.names import InvalidName, check_run, check_step
from forebay_wire.v1 import admin_pb2
from forebay_wire.v1 import gateway_pb2 as pb

STREAMS_MAX = 64
PREEMPT_S_MAX = 3600
_ANSWER_S = 5.0  # beyond the deadline, for the answer to arrive
_DELETE_TIMEOUT_S = 600.0
_ONCE = RetryPolicy(admit_timeout_s=0.0, retry_timeout_s=0.0)

_log = logging.getLogger("forebay")


class Client:
    """A gateway's client. Thread-safe; picklable (address and options only); usable in a forked child.

    `address` is "unix:///path", "host:port", or None for FOREBAY_ADDRESS, else the default socket. Nothing is opened before the
    first call. `admit_timeout` is how many seconds a put waits for space before CacheFull, `retry_timeout` how many any call
    repeats itself while the gateway is away before Unavailable. `progress=False` turns progress bars off.

    `background_bytes` is the most memory that puts in the background may hold (default: FOREBAY_BACKGROUND_BYTES, such as
    "16GiB", else 4 GiB). It is taken as it is needed and kept until close(), so that it is warm for the next save; a single
    shard may not be larger. `background_timeout` is how many seconds such a put waits for a free buffer, and async_checkpoint()
    for its predecessor, before DeadlineExceeded.
    """

    def __init__(
        self,
        address: str | None = None,
        admit_timeout: float = 60.0,
        *,
        retry_timeout: float = 60.0,
        progress: bool = True,
        background_bytes: int | None = None,
        background_timeout: float = TIMEOUT_S,
    ) -> None:
        self._connection = Connection(address, RetryPolicy(admit_timeout, retry_timeout))
        self._progress = progress
        self._background = Background(background_bytes, background_timeout)

    def __getstate__(self) -> tuple[Any, ...]:
        return self._connection, self._progress, self._background.size, self._background.timeout_s

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self._connection, self._progress, size, timeout_s = state
        self._background = Background(size, timeout_s)

    def close(self) -> None:
        """Finish what has been committed in the background, then close the connection; other calls under way end.

        Raises the failure of a background commit that nobody has seen.
        """
        try:
            self._background.close()
        finally:
            self._connection.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise  # else the block's own error is the one to show; this one has been logged

    # Saving

    def checkpoint(
        self, run: str, step: int, writers: int = 1, writer: int = 0, session: str | None = None, lane: str = "auto"
    ) -> CheckpointWriter:
        """This writer's part of a checkpoint, to put shards in and commit; a context manager that aborts unless committed.

        All writers of one launch share `session`; by default it comes from FOREBAY_SESSION, torchelastic or Slurm.
        `lane` is how bytes travel: "fd" into the cache's own files, for a gateway on this host's Unix socket (Unsupported
        elsewhere), "stream" over gRPC, "auto" the faster that is there. What "fd" cannot carry (small shards together, data of
        unknown size) goes by stream. Nothing is sent yet.
        """
        _check(run, step)
        _check_lane(lane)
        part_ref(run, step, "any", writer, writers)
        chosen = default_session(writers) if session is None else session
        return CheckpointWriter(self._connection, part_ref(run, step, chosen, writer, writers), self._background, lane)

    def async_checkpoint(
        self,
        run: str,
        step: int,
        writers: int = 1,
        writer: int = 0,
        session: str | None = None,
        lane: str = "auto",
        *,
        in_flight: int = 1,
    ) -> BackgroundCheckpoint:
        """As checkpoint(), but its puts only snapshot, and its commit returns at once with a handle; all else overlaps.

        At most `in_flight` checkpoints of this client are being saved at a time: this call waits until the ones before are
        committed, then raises the failure of one that nobody has seen yet (nothing is begun then). Raises DeadlineExceeded.
        """
        if isinstance(in_flight, bool) or not isinstance(in_flight, int) or not 1 <= in_flight <= COMMITS:
            raise InvalidArgument(f"in_flight must be 1 to {COMMITS}, not {in_flight!r}")
        part = self.checkpoint(run, step, writers, writer, session, lane)
        self._background.admit(in_flight, f"save {run}/{step} in the background")
        return BackgroundCheckpoint(self._connection, self._background, part)

    def prefault_background(self, size: int | None = None) -> None:
        """Have memory behind `size` bytes of the background's buffers (all, where None), so that the first save is as fast as
        the next ones."""
        self._background.fault_in(size)

    def save_dir(
        self,
        path: str | PathLike[str],
        run: str,
        step: int,
        *,
        writers: int = 1,
        writer: int = 0,
        session: str | None = None,
        metadata: Mapping[str, Any] | None = None,
        wait: str = "cache",
        timeout: float | None = None,
        streams: int = directories.STREAMS,
        lane: str = "auto",
        final: bool = False,
    ) -> SaveSummary:
        """Save every file below `path` as a shard of this writer's part and commit it; `wait`, `timeout` and `final` as in
        commit().

        What cannot be saved, or a level that the gateway does not have, is an error that names it, before anything is sent.
        `lane` as in checkpoint().
        """
        started_s = time.monotonic()
        files = directories.walk(Path(path))
        total = sum(size for _, size in files.values())
        part = self.checkpoint(run, step, writers, writer, session, lane)
        check_level(self._connection, run, step, wait)
        with part:
            with byte_counter(f"save {run}/{step}", total, self._progress) as count:
                directories.put_files(part, files, checked_streams(streams), count)
            receipt = part.commit(metadata, wait, timeout, final=final)
        return SaveSummary(
            run=run,
            step=step,
            session=part.session,
            writer=writer,
            shards=receipt.shard_count,
            size=receipt.size,
            level=receipt.level,
            checkpoint_complete=receipt.checkpoint_complete,
            elapsed_s=time.monotonic() - started_s,
            transient=receipt.transient,
            through=receipt.through,
        )

    # Looking

    def latest(self, run: str, level: str = "any") -> int | None:
        """The newest complete checkpoint's step (at `level`: "any", "cache" or a tier's name); None where there is none."""
        _check(run)
        try:
            found = self._call("Latest", pb.LatestRequest(run=run, level=level), f"find the latest checkpoint of {run!r}")
        except NotFound:
            return None
        return int(found.step)

    def runs(self) -> list[Run]:
        """All runs that the gateway knows."""
        answer = self._call("ListRuns", pb.ListRunsRequest(), "list runs")
        if answer.note:
            _log.warning("%s", answer.note)
        return [record(run, Run) for run in answer.runs]

    def checkpoints(self, run: str) -> list[Checkpoint]:
        """A run's checkpoints by step, incomplete ones too."""
        _check(run)
        doing = f"list the checkpoints of {run!r}"
        request = pb.ListCheckpointsRequest(run=run)
        pages = self._connection.pages(lambda stubs: stubs.gateway.ListCheckpoints, request, doing)
        return [record(checkpoint, Checkpoint) for page in pages for checkpoint in page.checkpoints]

    def describe(self, run: str, step: int) -> Checkpoint:
        """A checkpoint with its shards. Raises NotFound."""
        found = self._describe(run, step)
        shards = list_shards(self._connection, run, step, found.session)
        fields = {name: getattr(found, name) for name in Checkpoint.__slots__ if name != "shards"}
        return Checkpoint(**fields, shards=shards)

    def wait(
        self, run: str, step: int, level: str, timeout: float | None = None, progress: OnProgress | None = None
    ) -> WaitProgress:
        """Return once the whole checkpoint has reached `level` ("cache", a tier's name or "all").

        `progress` is called with each WaitProgress. Raises DeadlineExceeded naming what is missing, NotFound, Unavailable.
        """
        _check(run, step)
        return wait_for(self._connection, run, step, level, timeout, progress)

    @property
    def last_pressure(self) -> Pressure | None:
        """The newest pressure that came with an acknowledgement of this client, without asking; None before the first one."""
        newest = self._connection.pressure
        return None if newest is None else record(newest, Pressure)

    def pressure(self) -> Pressure:
        """How full the gateway's cache is, and how far behind its tiers are."""
        return record(self._call("GetPressure", pb.GetPressureRequest(), "ask for pressure"), Pressure)

    def preempt(self, deadline: float, run: str = "") -> tuple[Preempted, ...]:
        """This node is about to go: everything else waits for the newest complete checkpoint, and for what this node has of a
        newer one that other nodes complete. `run` limits it to one run; otherwise it is each of which something is not out yet.

        Returns when all are on all their tiers, at the latest `deadline` seconds from now: the newest first, each with the
        levels that it reached and those that it did not. Empty: everything is out. Raises NotFound, Unavailable.
        """
        if run:
            _check(run)
        if isinstance(deadline, bool) or not isinstance(deadline, int | float) or not 0 <= deadline <= PREEMPT_S_MAX:
            raise InvalidArgument(f"deadline must be 0 to {PREEMPT_S_MAX} seconds from now, not {deadline!r}")
        until_s = time.monotonic() + deadline
        attempts = RetryPolicy(0.0, min(deadline, self._connection.policy.retry_timeout_s)).begin()
        while True:
            left_s = max(0.0, until_s - time.monotonic())
            request = pb.PreemptRequest(deadline_s=left_s, run=run)
            try:
                answer = self._connection.call(
                    lambda stubs: stubs.gateway.Preempt, request, "preempt", timeout_s=left_s + _ANSWER_S, policy=_ONCE
                )
            except ForebayError as error:
                attempts.pause(error)
                continue
            return tuple(record(checkpoint, Preempted) for checkpoint in answer.checkpoints)

    # Restoring

    def open(self, run: str, step: int, *, source: str = "auto", lane: str = "auto") -> Reader:
        """A complete checkpoint for reading; `source` limits it to "cache" or a tier, `lane` is as in checkpoint().

        Raises NotFound, Incomplete(missing), InvalidArgument for a source that the gateway does not have.
        """
        _check_lane(lane)
        found = self._describe(run, step)
        known = ("auto", "cache", "peer", *(level.level for level in found.levels if level.level != "cache"))
        if source not in known:
            raise InvalidArgument(
                f"there is no source {source!r} to read {run}/{step} from; this gateway has {', '.join(known)}"
            )
        if source == "peer":
            raise NotFound(f"no other node is known to hold {run}/{step}: nodes do not read from each other in this release")
        if not found.complete:
            lacks = "; ".join(map(str, found.missing[:5])) or found.reason or "nothing known"
            raise Incomplete(f"checkpoint {run}/{step} is not complete; missing: {lacks}", missing=found.missing)
        return Reader(self._connection, found, source, lane)

    def restore_dir(
        self,
        run: str,
        step_or_latest: int | str,
        path: str | PathLike[str],
        *,
        source: str = "auto",
        streams: int = directories.STREAMS,
        durable: bool = False,
        lane: str = "auto",
    ) -> RestoreSummary:
        """Write every shard to a file below `path`, `streams` at a time; `step_or_latest` is a step or "latest".

        Files get their names only after all are whole and checked; a failed restore leaves what was there. `durable` syncs
        files and directories. Raises NotFound, Incomplete, Corrupt, Unavailable, InvalidArgument (the target is in the way).
        """
        started_s = time.monotonic()
        step = self.step_of(run, step_or_latest)
        reader = self.open(run, step, source=source, lane=lane)
        shards = reader.shards()
        size = sum(shard.size for shard in shards)
        target = directories.Target(Path(path), durable)
        try:
            with byte_counter(f"restore {run}/{step}", size, self._progress) as count:
                directories.restore_files(reader, target, shards, checked_streams(streams), count)
            target.publish()
        finally:
            target.close()
        session = reader.checkpoint.session
        return RestoreSummary(run, step, session, len(shards), size, str(path), time.monotonic() - started_s)

    # Keeping and dropping

    def pin(self, run: str, step: int) -> None:
        """Keep a checkpoint whatever retention says. Raises NotFound."""
        self._pin(run, step, True)

    def unpin(self, run: str, step: int, *, all_nodes: bool = False) -> None:
        """Undo pin(); with `all_nodes` also what other nodes have pinned, of which one may be gone for good.

        A node that lives and has pinned it still says so anew. Raises NotFound; Unavailable where a tier cannot be told."""
        self._pin(run, step, False, all_nodes)

    def delete(self, run: str, step: int, *, force: bool = False, dry_run: bool = False) -> Deletion:
        """Delete a checkpoint from this node's cache and from the tiers; `force` also what no tier holds yet; `dry_run` only
        says what it would remove. Another node that has all of it in its cache still offers it, until that is evicted.

        Sent once: a repeated delete could meet a checkpoint saved in between.
        """
        _check(run, step)
        request = pb.DeleteRequest(run=run, step=step, force=force, dry_run=dry_run)
        policy = self._connection.policy if dry_run else _ONCE
        answer = self._connection.call(
            lambda stubs: stubs.gateway.Delete, request, f"delete {run}/{step}", timeout_s=_DELETE_TIMEOUT_S, policy=policy
        )
        return record(answer, Deletion)

    # Operating

    @property
    def care(self) -> Care:
        """Checks and repairs of what the gateway stores."""
        return Care(self._connection)

    def status(self) -> Status:
        """The gateway at a glance."""
        answer = self._connection.call(lambda stubs: stubs.admin.GetStatus, admin_pb2.GetStatusRequest(), "ask for status")
        return record(answer, Status)

    def hold(self, tier: str = "") -> list[str]:
        """Stop draining to `tier` ("" means all); returns the tiers concerned."""
        return self._set_queue(tier, True)

    def release(self, tier: str = "") -> list[str]:
        """Undo hold()."""
        return self._set_queue(tier, False)

    def queue(self) -> QueueList:
        """What waits for the tiers, by checkpoint: what goes first comes first."""
        pages = self._connection.pages(lambda stubs: stubs.admin.ListQueue, admin_pb2.ListQueueRequest(), "list the queue")
        entries = tuple(record(entry, QueueEntry) for page in pages for entry in page.entries)
        return QueueList(entries, {each.tier: int(each.skipped) for page in pages for each in page.skips})

    def change_queue(self, action: str, *ids: str) -> list[str]:
        """ "hold", "release", "retry" or "prio" of checkpoints that wait, by QueueEntry.id, on every tier; their ids.

        No id means all that wait; "prio" needs some, and puts them first in the order given. Holds and priorities survive a
        restart. Raises InvalidArgument, NotFound; then nothing was changed.
        """
        request = admin_pb2.ChangeQueueRequest(action=action, ids=ids)
        doing = f"{action} {', '.join(ids[:3]) or 'the queue'}"
        answer = self._connection.call(lambda stubs: stubs.admin.ChangeQueue, request, doing)
        return list(answer.ids)

    def reload_config(self) -> Reloaded:
        """Have the gateway read its configuration file again and apply what may change while it runs.

        Raises InvalidArgument for a file that is not valid: nothing is changed then.
        """
        doing = "reload the configuration"
        answer = self._connection.call(lambda stubs: stubs.admin.ReloadConfig, admin_pb2.ReloadConfigRequest(), doing)
        return record(answer, Reloaded)

    def config(self) -> str:
        """The gateway's effective configuration as TOML, secrets left out."""
        doing = "ask for the configuration"
        answer = self._connection.call(lambda stubs: stubs.admin.GetConfig, admin_pb2.GetConfigRequest(), doing)
        return str(answer.toml)

    def _call(self, method: str, request: object, doing: str) -> Any:
        return self._connection.call(lambda stubs: getattr(stubs.gateway, method), request, doing)

    def _describe(self, run: str, step: int) -> Checkpoint:
        _check(run, step)
        return record(self._call("Describe", pb.DescribeRequest(run=run, step=step), f"describe {run}/{step}"), Checkpoint)

    def _pin(self, run: str, step: int, pinned: bool, all_nodes: bool = False) -> None:
        _check(run, step)
        request = pb.PinRequest(run=run, step=step, pinned=pinned, all_nodes=all_nodes)
        self._call("Pin", request, f"{'pin' if pinned else 'unpin'} {run}/{step}")

    def _set_queue(self, tier: str, held: bool) -> list[str]:
        request = admin_pb2.SetQueueRequest(held=held, tier=tier)
        doing = f"{'hold' if held else 'release'} the queue{f' of {tier!r}' if tier else ''}"
        return list(self._connection.call(lambda stubs: stubs.admin.SetQueue, request, doing).tiers)

    def step_of(self, run: str, step_or_latest: int | str) -> int:
        """A step as it is, or the newest complete checkpoint's for "latest". Raises NotFound where there is none."""
        if step_or_latest != "latest":
            return int(step_or_latest) if isinstance(step_or_latest, int) else _no_step(step_or_latest)
        latest = self.latest(run)
        if latest is None:
            raise NotFound(f"run {run!r} has no complete checkpoint")
        return latest


def _check_lane(lane: str) -> None:
    if lane not in LANES:
        raise InvalidArgument(f"lane must be 'auto', 'stream' or 'fd', not {lane!r}")


def _check(run: str, step: int = 0) -> None:
    if not isinstance(run, str):
        raise InvalidArgument(f"a run's name must be text, not {type(run).__name__}")
    try:
        check_run(run)
        check_step(step)
    except InvalidName as error:
        raise InvalidArgument(str(error)) from error


def checked_streams(streams: int) -> int:
    """How many files go at a time. Raises InvalidArgument."""
    if not 1 <= streams <= STREAMS_MAX:
        raise InvalidArgument(f"streams must be 1 to {STREAMS_MAX}, not {streams}")
    return streams


def _no_step(text: object) -> int:
    raise InvalidArgument(f"a step is a number or 'latest', not {text!r}")
