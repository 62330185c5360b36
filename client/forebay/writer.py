"""Saving: one writer's part of one checkpoint, from the first put to commit or abort.

Owns what this writer means to have put, repeating puts, and the rule that a block left without commit aborts. Does not own how
bytes travel (lanes/). Acknowledged shards stay with the gateway, also over its restart: the part goes on where it was.
"""

import dataclasses
import enum
import json
import logging
import os
import threading
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Literal, overload

from forebay.background import Background, PartPuts
from forebay.connection import CALL_TIMEOUT_S, Connection
from forebay.convert import record
from forebay.errors import AlreadyExists, DeadlineExceeded, ForebayError, InvalidArgument
from forebay.lanes import fd_put, stream
from forebay.lanes.fd import FD_BYTES_MIN, NoPlace, NotOffered
from forebay.pending import Pending
from forebay.retry import RetryPolicy
from forebay.snapshot import snapshotted
from forebay.sources import Source, source_of
from forebay.types import CommitReceipt, Pressure, Receipt
from forebay.waiting import wait_for
from forebay_wire.names import InvalidName, check_session, check_shard_name
from forebay_wire.v1 import gateway_pb2 as pb

SMALL_BYTES_MAX = 1 << 20
BATCH_BYTES_MAX = 4 << 20  # a batch is what is durable together: one fsync, and where it is packed one file
BATCH_SHARDS_MAX = 1000
COMMIT_BATCH = 1000  # shards in one message of a commit: a name may have 1 KiB
# An abort is a courtesy: the gateway drops what stays uncommitted by itself. It must not hold a failing job up.
_ABORT_POLICY = RetryPolicy(admit_timeout_s=0.0, retry_timeout_s=3.0)
_ABORT_TIMEOUT_S = 10.0

_log = logging.getLogger("forebay")


class _State(enum.Enum):
    OPEN = "open"
    COMMITTED = "committed"
    ABORTED = "aborted"


class CheckpointWriter:
    """One writer's part. Made by Client.checkpoint; put and put_many may be called from several threads at once."""

    def __init__(self, connection: Connection, part: pb.PartRef, background: Background, lane: str = "auto") -> None:
        self._connection = connection
        self._lane = lane
        self._part = part
        self._background = PartPuts(background, f"{part.run}/{part.step}")
        self._lock = threading.Lock()
        self._state = _State.OPEN
        self._receipts: dict[str, Receipt] = {}
        self._metadata_json = ""
        self._kind = ""
        self._pid = os.getpid()

    @property
    def run(self) -> str:
        """The run's name."""
        return self._part.run

    @property
    def step(self) -> int:
        """The step."""
        return self._part.step

    @property
    def session(self) -> str:
        """The session that this part belongs to."""
        return self._part.session

    @property
    def receipts(self) -> Mapping[str, Receipt]:
        """What is durable so far, by name."""
        with self._lock:
            return dict(self._receipts)

    @overload
    def put(
        self, name: str, data: Any, *, on_bytes: stream.OnBytes | None = None, background: Literal[False] = False
    ) -> Receipt: ...
    @overload
    def put(
        self, name: str, data: Any, *, on_bytes: stream.OnBytes | None = None, background: Literal[True]
    ) -> Pending[Receipt]: ...
    def put(
        self, name: str, data: Any, *, on_bytes: stream.OnBytes | None = None, background: bool = False
    ) -> Receipt | Pending[Receipt]:
        """Store one shard; it is durable in the gateway's cache when this returns, or on a tier where the receipt says so.

        `data`: bytes-like, numpy array or CPU tensor (contiguous), path, binary file, or iterable of buffers. It must not
        change meanwhile. Data that cannot be read twice is not sent again once it has flowed. `on_bytes` is called with each
        chunk's size. Putting the same bytes again under their name is a no-op.

        With `background` it returns once the bytes are copied and checksummed, paths and files read: they may change at once.
        What has no size before its end cannot be put so. It blocks, up to the client's `background_timeout`, until a buffer is
        free; the result says when the shard is durable. A failure is raised by every later call too, commit() included, until
        the name has been put again.
        Raises InvalidArgument, AlreadyExists (other bytes have this name), CacheFull, Unavailable, Corrupt, OSError for a path;
        in the background also DeadlineExceeded.
        """
        _check_name(name)
        self._check_open("put")
        self._background.check([name])
        label = f"shard {name!r}"
        if not background:
            return self._put_source(name, source_of(data, label), on_bytes)
        sources = {name: snapshotted(data, label)}
        futures = self._background.begin(sources, lambda copies: {name: self._put_source(name, copies[name], on_bytes)})
        return Pending(f"put {name!r}", futures, lambda: futures[0].result()[name])

    @overload
    def put_many(
        self, shards: Mapping[str, Any], *, on_bytes: stream.OnBytes | None = None, background: Literal[False] = False
    ) -> list[Receipt]: ...
    @overload
    def put_many(
        self, shards: Mapping[str, Any], *, on_bytes: stream.OnBytes | None = None, background: Literal[True]
    ) -> Pending[list[Receipt]]: ...
    def put_many(
        self, shards: Mapping[str, Any], *, on_bytes: stream.OnBytes | None = None, background: bool = False
    ) -> list[Receipt] | Pending[list[Receipt]]:
        """Store many shards; those up to 1 MiB travel together. All are durable when this returns; receipts in their order.

        Many small ones are packed into few files (the gateway's `cache.pack`). Names and kinds of data are checked before
        anything is sent: one bad name among many is named, and none of them is taken. `background` as in put(), for all of them
        together. Raises as put().
        """
        self._check_open("put_many")
        self._background.check(shards)
        read = snapshotted if background else source_of
        try:
            for name in shards:
                _check_name(name)
            sources = {name: read(data, f"shard {name!r}") for name, data in shards.items()}
        except InvalidArgument as error:
            raise error.extended(f"(none of {len(shards)} shards was sent)") from error.__cause__
        if not background:
            done = self._put_sources(sources, on_bytes)
            return [done[name] for name in shards]
        names = list(shards)
        futures = self._background.begin(sources, lambda copies: self._put_sources(copies, on_bytes))

        def receipts() -> list[Receipt]:
            landed = {name: receipt for future in futures for name, receipt in future.result().items()}
            return [landed[name] for name in names]

        return Pending(f"put {len(names)} shards", futures, receipts)

    def commit(
        self,
        metadata: Mapping[str, Any] | None = None,
        wait: str = "cache",
        timeout: float | None = None,
        *,
        final: bool = False,
    ) -> CommitReceipt:
        """Close this part: from here on its shards are promised. May be repeated.

        Puts in the background are waited for first. `metadata` is a JSON object; writer 0's stands in the manifest. `wait` is
        "cache" (this part), a tier's name or "all": then the call returns once the whole checkpoint, all writers, is complete
        there. `timeout` in seconds covers everything. `final` says that this is the run's last save: it drains before periodic
        ones and is never left out; one writer's word makes the whole checkpoint final. Raises Incomplete (also where the drain
        left it out on that tier), InvalidArgument, Unavailable, what a background put raised, and DeadlineExceeded naming what
        is missing: a part that was committed stays so.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        receipt = self.commit_json(None if metadata is None else metadata_json(metadata), deadline_s, final=final)
        if wait in ("", "cache"):
            return receipt
        remaining_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        try:
            wait_for(self._connection, self.run, self.step, wait, remaining_s, session=self.session)
        except DeadlineExceeded as error:
            raise DeadlineExceeded(
                f"this part is committed ({receipt.level}); {error.message}", missing=error.missing
            ) from error
        return dataclasses.replace(receipt, level=wait)

    def commit_json(self, metadata_json: str | None, deadline_s: float | None, *, final: bool = False) -> CommitReceipt:
        """commit() at "cache", of metadata as JSON (None: as before), until a time of the monotonic clock."""
        self._background.settle(deadline_s)
        self._background.check()
        with self._lock:
            if self._state is _State.ABORTED:
                raise InvalidArgument(f"commit: this part of {self.run}/{self.step} was aborted")
            if metadata_json is not None or self._state is _State.OPEN:
                self._metadata_json = metadata_json or ""
            self._kind = "final" if final else self._kind
            expected = list(self._receipts.values())
        response = self._commit_part(expected, deadline_s)
        self._connection.heard(response)
        with self._lock:
            self._state = _State.COMMITTED
        return CommitReceipt(
            level=response.level,
            checkpoint_complete=response.checkpoint_complete,
            transient=response.transient,
            pressure=record(response.pressure, Pressure),
            shard_count=len(expected),
            size=sum(receipt.size for receipt in expected),
            through=response.through,
        )

    def check_background(self) -> None:
        """Raise the failure of an earlier put in the background."""
        self._background.check()

    def abort(self) -> int:
        """Drop what was put, ending what is under way; returns how many shards. No effect on a committed part."""
        with self._lock:
            if self._state is not _State.OPEN:
                return 0
            self._state = _State.ABORTED
        self._background.cancel()  # first: what lands after the abort would open the part again
        response = self._connection.call(
            lambda stubs: stubs.gateway.AbortPart,
            pb.AbortPartRequest(part=self._part),
            f"abort writer {self._part.writer} of {self.run}/{self.step}",
            timeout_s=_ABORT_TIMEOUT_S,
            policy=_ABORT_POLICY,
        )
        return int(response.shards_dropped)

    def __enter__(self) -> "CheckpointWriter":
        self._pid = os.getpid()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._pid == os.getpid():  # a child that was forked inside the block leaves its parent's part alone
            self.give_up()

    def give_up(self) -> None:
        """abort(), whose failure is no more than logged."""
        try:
            self.abort()
        except AlreadyExists:
            pass  # the part is committed: by an earlier try of this session, or by a commit whose answer was lost
        except ForebayError as failure:
            if self._receipts:
                _log.warning("the abort did not reach the gateway, which drops the part by itself later: %s", failure)
            else:  # there is nothing to drop, and perhaps no gateway: what failed before says so
                _log.debug("the abort of a part without any shard did not reach the gateway: %s", failure)

    def _check_open(self, verb: str) -> None:
        if self._state is not _State.OPEN:
            raise InvalidArgument(f"{verb}: this part of {self.run}/{self.step} is already {self._state.value}")

    def _put_sources(self, sources: Mapping[str, Source], on_bytes: stream.OnBytes | None) -> dict[str, Receipt]:
        small, large = _split(sources)
        receipts = self._put_small(small, on_bytes)
        for name, source in large.items():
            receipts[name] = self._put_source(name, source, on_bytes)
        return receipts

    def _put_source(self, name: str, source: Source, on_bytes: stream.OnBytes | None) -> Receipt:
        header = pb.PutHeader(part=self._part, name=name, size=source.size)
        attempts = self._connection.policy.begin()
        by_fd = self._may_go_by_fd(source)
        while True:
            header.admit_timeout_s = attempts.admit_left_s
            attempt = fd_put.FdPut(header, source, on_bytes) if by_fd else stream.PutStream(header, source, on_bytes)
            try:
                receipt = attempt.run(self._connection)
                if receipt is not None:
                    return self._keep([record(receipt, Receipt)])[0]
                by_fd = False  # the name is taken: the stream lane compares
            except ForebayError as error:
                if isinstance(error, NotOffered | NoPlace) and self._lane != "fd":
                    by_fd = False
                    continue
                if attempt.began and not source.replayable:
                    raise
                attempts.pause(error)
                self._check_open("put")  # what another thread has aborted meanwhile would be opened again
                if on_bytes is not None and attempt.size:
                    on_bytes(-attempt.size)  # what has to be sent again

    def _may_go_by_fd(self, source: Source) -> bool:
        """Whether the fd lane can carry it; "auto" uses it for what is worth a lease."""
        if self._lane == "stream" or not source.replayable or not source.size:
            return False
        return self._lane == "fd" or source.size >= FD_BYTES_MIN

    def _put_small(self, shards: Sequence[stream.SmallShard], on_bytes: stream.OnBytes | None) -> dict[str, Receipt]:
        done: dict[str, Receipt] = {}

        def keep(batch: list[pb.Receipt]) -> None:
            for receipt in self._keep([record(message, Receipt) for message in batch]):
                done[receipt.name] = receipt
                if on_bytes is not None:
                    on_bytes(receipt.size)
            attempts.progressed()

        attempts = self._connection.policy.begin()
        while remaining := [shard for shard in shards if shard.name not in done]:
            try:
                stream.put_many(self._connection, self._part, _batches(remaining), keep, attempts.admit_left_s)
            except ForebayError as error:
                attempts.pause(error)
                self._check_open("put_many")
        return done

    def _keep(self, receipts: list[Receipt]) -> list[Receipt]:
        with self._lock:
            self._receipts.update((receipt.name, receipt) for receipt in receipts)
        self._background.durable([receipt.name for receipt in receipts])
        return receipts

    def _commit_part(self, expected: list[Receipt], deadline_s: float | None) -> Any:
        doing = f"commit writer {self._part.writer} of {self.run}/{self.step}"
        timeout_s = CALL_TIMEOUT_S
        policy = self._connection.policy
        if deadline_s is not None:
            remaining_s = deadline_s - time.monotonic()
            if remaining_s <= 0:
                raise DeadlineExceeded(f"{doing}: no time was left")
            timeout_s = min(timeout_s, remaining_s)
            policy = RetryPolicy(min(policy.admit_timeout_s, remaining_s), min(policy.retry_timeout_s, remaining_s))
        shards = [pb.ExpectedShard(name=item.name, size=item.size, crc32c=item.crc32c) for item in expected]
        first = pb.CommitPartRequest(part=self._part, metadata_json=self._metadata_json, kind=self._kind)
        first.shards.extend(shards[:COMMIT_BATCH])
        requests = [first]
        for begin in range(COMMIT_BATCH, len(shards), COMMIT_BATCH):
            requests.append(pb.CommitPartRequest(shards=shards[begin : begin + COMMIT_BATCH]))
        commit = self._connection.call
        return commit(lambda stubs: stubs.gateway.CommitPart, requests, doing, timeout_s=timeout_s, policy=policy)


def part_ref(run: str, step: int, session: str, writer: int, writers: int) -> pb.PartRef:
    """The checked name of a part whose run and step are valid. Raises InvalidArgument."""
    for name, value in (("writers", writers), ("writer", writer)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise InvalidArgument(f"{name} must be an integer, not {value!r}")
    if not 1 <= writers < 1 << 32:
        raise InvalidArgument(f"writers must be 1 or more, not {writers}")
    if not 0 <= writer < writers:
        raise InvalidArgument(f"writer {writer} is not among 0 to {writers - 1}")
    try:
        check_session(session)
    except InvalidName as error:
        raise InvalidArgument(str(error)) from error
    return pb.PartRef(run=run, step=step, session=session, writer=writer, writers=writers)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise InvalidArgument(f"a shard name must be text, not {name!r}")
    try:
        check_shard_name(name)
    except InvalidName as error:
        raise InvalidArgument(str(error)) from error


def metadata_json(metadata: Mapping[str, Any]) -> str:
    """As it travels. Raises InvalidArgument."""
    if not metadata:
        return ""
    if not isinstance(metadata, Mapping):
        raise InvalidArgument(f"metadata must be a JSON object, not {type(metadata).__name__}")
    try:
        return json.dumps(dict(metadata), sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument(f"metadata must be a JSON object: {error}") from error


def _split(sources: Mapping[str, Source]) -> tuple[list[stream.SmallShard], dict[str, Source]]:
    small: list[stream.SmallShard] = []
    large: dict[str, Source] = {}
    for name, source in sources.items():
        # Small shards may be sent again after a break, so they must be readable again.
        if source.size is not None and source.size <= SMALL_BYTES_MAX and source.replayable:
            small.append(stream.SmallShard(name, source, source.size))
        else:
            large[name] = source
    return small, large


def _batches(shards: Sequence[stream.SmallShard]) -> list[list[stream.SmallShard]]:
    batches: list[list[stream.SmallShard]] = []
    size = 0
    for shard in shards:
        if not batches or size + shard.size > BATCH_BYTES_MAX or len(batches[-1]) == BATCH_SHARDS_MAX:
            batches.append([])
            size = 0
        batches[-1].append(shard)
        size += shard.size
    return batches
