"""forebay.v1.Gateway: the client's verbs.

Owns decoding and encoding. PutShard and ReadShard take and give raw messages: their chunks go through the hot-path codec.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any

from forebay_gateway.core.errors import Corrupt, DeadlineExceeded, Incomplete, InvalidArgument, NotFound, Unavailable
from forebay_gateway.core.records import SessionRow
from forebay_gateway.paths.commit import CommitPath, Expected
from forebay_gateway.paths.find import Finder
from forebay_gateway.paths.lease import Leases
from forebay_gateway.paths.many import ManyPath
from forebay_gateway.paths.node import Node
from forebay_gateway.paths.pages import SHARDS_A_PAGE, let_go, page_of
from forebay_gateway.paths.preempt import Preemption
from forebay_gateway.paths.read import ReadPath
from forebay_gateway.paths.retain import Retention
from forebay_gateway.paths.small import SmallPath, SmallShard, check_group
from forebay_gateway.paths.through import Passage, Through
from forebay_gateway.paths.view import CheckpointView, listed, view
from forebay_gateway.paths.wait import Progress, Waiter
from forebay_gateway.paths.wholeness import has_all_parts, is_complete
from forebay_gateway.paths.write import Existing, Incoming, Receipt, WritePath
from forebay_gateway.rpc import encode
from forebay_gateway.rpc.pressure import PressureBoard, StreamPressure
from forebay_gateway.rpc.receiving import Receiving
from forebay_gateway.rpc.sending import Sending
from forebay_gateway.rpc.status import Context, answers, check_formed, streams
from forebay_wire.frames import ChunkFrame, FrameError, decode_put_request, encode_read_chunk
from forebay_wire.names import InvalidName, check_run
from forebay_wire.v1 import gateway_pb2 as pb

WINDOW = 4
WAIT_S_MAX = 366 * 86400
COMMIT_SHARDS_MAX = 1 << 20
CHECKPOINTS_A_PAGE = 200
PAGE_BYTES = 1 << 20  # and one checkpoint more: its metadata may have as much


@dataclass
class Paths:
    """The story, as the services call it."""

    write: WritePath
    small: SmallPath
    commit: CommitPath
    find: Finder
    read: ReadPath
    many: ManyPath
    wait: Waiter
    retain: Retention
    leases: Leases
    preempt: Preemption
    through: Through


class GatewayService:
    """One instance a gateway."""

    def __init__(self, node: Node, paths: Paths) -> None:
        self._node = node
        self._paths = paths
        self.sending = Sending(node.config.node.stream_timeout)
        self._receiving = Receiving()
        self._pressure = PressureBoard(node)

    # -- writing -------------------------------------------------------------------------------------------------------

    @streams
    async def PutShard(self, requests: AsyncIterator[bytes], context: Context) -> AsyncGenerator[bytes, None]:
        """See gateway.proto. Messages are raw: the next one is read only once there is credit for it."""
        incoming: Incoming | Passage | Existing | None = None
        deadline_s = self._node.config.node.stream_timeout
        try:
            header = await _next_frame(requests, deadline_s)
            if not isinstance(header, pb.PutHeader):
                raise InvalidArgument("a PutShard stream begins with a header")
            size = header.size if header.HasField("size") else None
            wait_s = _wait_s(header.admit_timeout_s, context)
            path = self._paths.through if self._node.budget.disk.reason else self._paths.write
            incoming = await path.begin(encode.part_ref(header.part), header.name, size, wait_s)
            accepted = pb.Accepted(chunk_size=self._node.config.cache.chunk_size, window=WINDOW)
            if isinstance(incoming, Existing):
                accepted.existing.CopyFrom(self._receipt(header.part.run, incoming.receipt))
            yield pb.PutShardResponse(accepted=accepted).SerializeToString()
            while True:
                frame = await _next_frame(requests, deadline_s)
                if isinstance(frame, ChunkFrame):
                    await incoming.chunk(frame.offset, frame.crc32c, frame.data)
                elif isinstance(frame, pb.PutTrailer):
                    break
                else:
                    raise InvalidArgument("a PutShard stream has one header", name=header.name)
            receipt = await incoming.finish(frame.size, frame.crc32c)
            answer = pb.PutShardResponse(receipt=self._receipt(header.part.run, receipt), pressure=self._pressure.now())
            yield answer.SerializeToString()
        finally:
            if incoming is not None:
                await incoming.discard()

    @answers
    async def OpenShard(self, request: pb.OpenShardRequest, context: Context) -> pb.OpenShardResponse:
        """See gateway.proto."""
        leases = self._paths.leases
        wait_s = _wait_s(request.admit_timeout_s, context)
        part = encode.part_ref(request.part)
        self._paths.through.refuse_lease(part, request.size)
        lease = await leases.open_shard(request.ticket, part, request.name, request.size, wait_s)
        if isinstance(lease, Existing):
            return pb.OpenShardResponse(existing=self._receipt(request.part.run, lease.receipt))
        layout = encode.file_layout(self._node, lease.chunk_size)
        return pb.OpenShardResponse(lease=lease.id, token=lease.token, layout=layout)

    @answers
    async def SealShard(self, request: pb.SealShardRequest, context: Context) -> pb.SealShardResponse:
        """See gateway.proto."""
        sealed = await self._paths.leases.seal(request.lease, request.size, request.crc32c, request.chunk_crcs)
        receipt = self._receipt(sealed.run, sealed.receipt)
        return pb.SealShardResponse(receipt=receipt, copied=sealed.copied, pressure=self._pressure.now())

    @streams
    async def PutMany(
        self, requests: AsyncIterator[pb.PutManyRequest], context: Context
    ) -> AsyncGenerator[pb.PutManyResponse, None]:
        """See gateway.proto."""
        part: pb.PartRef | None = None
        pressure = StreamPressure(self._pressure)
        receive = partial(_next_message, requests, self._node.config.node.stream_timeout)
        while True:
            async with self._receiving.next(receive, _bytes_of) as request:
                if request is None:
                    return
                if request.HasField("part"):
                    part = request.part
                if part is None:
                    raise InvalidArgument("the first message of a PutMany stream names the part")
                check_group(len(request.shards))
                shards = [SmallShard(shard.name, shard.crc32c, memoryview(shard.data)) for shard in request.shards]
                wait_s = self._receiving.patience_s(_wait_s(request.admit_timeout_s, context))
                del request  # the shards are copies
                receipts = await self._paths.small.put(encode.part_ref(part), shards, wait_s)
                del shards  # not held while the next one is waited for
            answer = [self._receipt(part.run, receipt) for receipt in receipts]
            yield pb.PutManyResponse(receipts=answer, pressure=pressure.news())

    @answers
    async def CommitPart(self, requests: AsyncIterator[pb.CommitPartRequest], context: Context) -> pb.CommitPartResponse:
        """See gateway.proto."""
        deadline_s = self._node.config.node.stream_timeout
        first: pb.CommitPartRequest | None = await _next_message(requests, deadline_s)
        if first is None:
            raise InvalidArgument("the first message of a commit names the part")
        part, metadata_json, kind = encode.part_ref(first.part), first.metadata_json, first.kind
        expected: list[Expected] = []
        request: pb.CommitPartRequest | None = first
        while request is not None:
            if request is not first and (request.HasField("part") or request.metadata_json or request.kind):
                raise InvalidArgument("only the first message of a commit names the part, its metadata and its kind")
            if len(expected) + len(request.shards) > COMMIT_SHARDS_MAX:
                raise InvalidArgument(f"a commit has at most {COMMIT_SHARDS_MAX} shards", writer=part.writer)
            for begin in range(0, len(request.shards), SHARDS_A_PAGE):
                some = request.shards[begin : begin + SHARDS_A_PAGE]
                expected += [Expected(shard.name, shard.size, shard.crc32c) for shard in some]
                await asyncio.sleep(0)
            request = await _next_message(requests, deadline_s)
        done = await self._paths.commit.commit(part, expected, metadata_json, kind)
        await let_go(expected)
        return pb.CommitPartResponse(
            level="+".join(done.levels),
            through=done.through,
            checkpoint_complete=done.complete_at_cache,
            transient=done.transient,
            pressure=self._pressure.now(),
        )

    @answers
    async def AbortPart(self, request: pb.AbortPartRequest, context: Context) -> pb.AbortPartResponse:
        """See gateway.proto."""
        return pb.AbortPartResponse(shards_dropped=await self._paths.commit.abort(encode.part_ref(request.part)))

    @streams
    async def Wait(self, request: pb.WaitRequest, context: Context) -> AsyncGenerator[pb.WaitResponse, None]:
        """See gateway.proto."""
        self._check_run(request.run)
        if not 0 <= request.timeout_s <= WAIT_S_MAX:  # no number is in no range
            raise InvalidArgument(f"a time to wait is 0 to {WAIT_S_MAX} seconds", timeout_s=request.timeout_s)
        last: Progress | None = None
        try:
            async with (
                asyncio.timeout(request.timeout_s or None),
                aclosing(self._paths.wait.watch(request.run, request.step, request.level, request.session)) as watching,
            ):
                async for last in watching:
                    yield pb.WaitResponse(
                        reached=last.reached,
                        bytes_done=last.done,
                        bytes_total=last.total,
                        missing=encode.missing(last.missing),
                        reason=last.reason,
                    )
        except TimeoutError:
            raise DeadlineExceeded(
                f"step {request.step} has not reached {request.level!r}: {last.reason if last else 'no news'}",
                run=request.run,
            ) from None

    # -- reading -------------------------------------------------------------------------------------------------------

    @streams
    async def ReadShard(self, message: bytes, context: Context) -> AsyncGenerator[bytes, None]:
        """See gateway.proto."""
        try:
            request = pb.ReadShardRequest.FromString(message)
        except ValueError as error:
            raise InvalidArgument(f"not a ReadShardRequest: {error}") from error
        self._check_run(request.run)
        length = request.length if request.HasField("length") else None
        pieces = self._paths.read.read(
            request.run, request.step, request.session, request.name, request.offset, length, request.source
        )
        async with aclosing(pieces):
            async for piece in pieces:
                message = encode_read_chunk(piece.offset, piece.crc32c, piece.data)
                piece.release()  # the buffer serves others while the client takes its time
                yield message

    @streams
    async def ReadMany(self, request: pb.ReadManyRequest, context: Context) -> AsyncGenerator[bytes, None]:
        """See gateway.proto. Answers are raw: gRPC would keep the message beside its bytes for as long as nobody reads them."""
        self._check_run(request.run)
        groups = self._paths.many.read(
            request.run, request.step, request.session, request.names, request.source, lambda: self.sending.plenty
        )
        async with aclosing(groups):
            async for group in groups:
                shards = [pb.SmallShard(name=shard.name, crc32c=shard.crc32c, data=data) for shard, data in group]
                group.clear()  # the message has its own copy, and its client may take its time
                message = pb.ReadManyResponse(shards=shards).SerializeToString()
                del shards
                yield message

    @answers
    async def OpenRead(self, request: pb.OpenReadRequest, context: Context) -> pb.OpenReadResponse:
        """See gateway.proto."""
        self._check_run(request.run)
        lease = await self._paths.leases.open_read(
            request.ticket,
            request.run,
            request.step,
            request.session,
            request.name,
            request.offset,
            request.length,
            request.source,
        )
        item = lease.item
        return pb.OpenReadResponse(
            token=lease.token,
            layout=encode.file_layout(self._node, item.chunk_size),
            size=item.size,
            crc32c=item.crc32c,
            chunk_crcs=item.chunks,
        )

    @answers
    async def Describe(self, request: pb.DescribeRequest, context: Context) -> pb.Checkpoint:
        """See gateway.proto."""
        self._check_run(request.run)
        message = encode.checkpoint(await self._view(request.run, request.step))
        message.policy.CopyFrom(encode.policy(self._node, request.run))
        return message

    async def _view(self, run: str, step: int) -> CheckpointView:
        """Complete or not; what is not known anywhere raises."""
        error: Exception | None = None
        try:
            await self._paths.find.everywhere(run, step)
        except (Incomplete, Corrupt) as reason:
            error = reason
        with self._node.catalog.read() as txn:
            row = txn.checkpoint(run, step)
            found = None if row is None else view(self._node, txn, row)
        if found is None:
            raise error or NotFound(f"no checkpoint of run {run!r} has step {step}", run=run, step=step)
        return found

    @streams
    async def ListShards(self, request: pb.ListShardsRequest, context: Context) -> AsyncGenerator[pb.ListShardsResponse, None]:
        """See gateway.proto."""
        self._check_run(request.run)
        shown = self._whole_session(request)
        if shown is None:  # the tiers are asked
            shown = (await self._view(request.run, request.step)).session
        with self._node.catalog.read() as txn:
            session = txn.find_session(request.run, request.step, request.session) if request.session else shown
            if session is None:
                raise NotFound(f"no session {request.session!r} of this step is known here")
        shards = await listed(self._node, session)
        while page := page_of(self._node.clock, shards)[0]:
            keys = list(dict.fromkeys(shard.row.key for shard in page))  # of many shards in one pack, one
            with self._node.catalog.read() as txn:
                copies = dict(zip(keys, txn.copies_of(keys), strict=True))
            yield pb.ListShardsResponse(shards=[encode.shard(shard, copies[shard.row.key]) for shard in page])

    def _whole_session(self, request: pb.ListShardsRequest) -> SessionRow | None:
        """The session that is asked for, where all of it is known here: then no tier has to be asked."""
        with self._node.catalog.read() as txn:
            checkpoint = txn.checkpoint(request.run, request.step)
            if not request.session or checkpoint is None or checkpoint.deleting:
                return None
            session = txn.find_session(request.run, request.step, request.session)
            whole = session is not None and is_complete(txn, session) and has_all_parts(txn, session)
            return session if whole else None

    @streams
    async def ListCheckpoints(
        self, request: pb.ListCheckpointsRequest, context: Context
    ) -> AsyncGenerator[pb.ListCheckpointsResponse, None]:
        """See gateway.proto."""
        self._check_run(request.run)
        page, size, found_any = pb.ListCheckpointsResponse(), 0, False
        for step in await self._paths.find.steps(request.run):
            with self._node.catalog.read() as txn:  # one a checkpoint: a long run must not hold the event loop
                row = txn.checkpoint(request.run, step)
                found = None if row is None else view(self._node, txn, row)
            if found is not None:
                message, found_any = encode.checkpoint(found), True
                page.checkpoints.append(message)
                size += message.ByteSize()
            if size >= PAGE_BYTES or len(page.checkpoints) >= CHECKPOINTS_A_PAGE:
                yield page
                page, size = pb.ListCheckpointsResponse(), 0
            await asyncio.sleep(0)
        if not found_any:
            self._raise_unknown_run(request.run)
        if page.checkpoints:
            yield page

    def _raise_unknown_run(self, run: str) -> None:
        away = self._node.unreachable_tiers()
        hint = f"; not reachable now: {', '.join(tier.name for tier in away)}" if away else ""
        raise NotFound(f"no run {run!r} is known here or on the tiers{hint}")

    @answers
    async def ListRuns(self, request: pb.ListRunsRequest, context: Context) -> pb.ListRunsResponse:
        """See gateway.proto."""
        answer = pb.ListRunsResponse()
        for run in await self._paths.find.runs():
            steps = await self._paths.find.known_steps(run)
            if not steps:
                continue
            message = answer.runs.add(run=run, checkpoints=len(steps))
            with contextlib.suppress(NotFound, Unavailable):
                message.latest_step = (await self._paths.find.latest_of(run, steps)).session.step
        answer.note = self._paths.find.left_out
        return answer

    @answers
    async def Latest(self, request: pb.LatestRequest, context: Context) -> pb.Checkpoint:
        """See gateway.proto."""
        self._check_run(request.run)
        found = await self._paths.find.latest(request.run, request.level or "any")
        message = encode.checkpoint(await self._view(request.run, found.session.step))
        if found.unreachable:
            message.reason = f"a newer one may lie on a tier that cannot be reached now: {', '.join(found.unreachable)}"
        return message

    # -- keeping and dropping ------------------------------------------------------------------------------------------

    @answers
    async def Pin(self, request: pb.PinRequest, context: Context) -> pb.PinResponse:
        """See gateway.proto."""
        self._check_run(request.run)
        if request.all_nodes and request.pinned:
            raise InvalidArgument("a pin is one node's; only an unpin may be for all nodes")
        await self._paths.retain.pin(request.run, request.step, request.pinned, all_nodes=request.all_nodes)
        return pb.PinResponse()

    @answers
    async def Delete(self, request: pb.DeleteRequest, context: Context) -> pb.DeleteResponse:
        """See gateway.proto."""
        self._check_run(request.run)
        gone = await self._paths.retain.delete(request.run, request.step, force=request.force, dry_run=request.dry_run)
        return pb.DeleteResponse(shards=gone.shards, size=gone.size, levels=gone.levels)

    @answers
    async def GetPressure(self, request: pb.GetPressureRequest, context: Context) -> pb.Pressure:
        """See gateway.proto."""
        return encode.pressure(self._node)

    @answers
    async def Preempt(self, request: pb.PreemptRequest, context: Context) -> pb.PreemptResponse:
        """See gateway.proto."""
        if request.run:
            self._check_run(request.run)
        outcomes = await self._paths.preempt.run(request.run, request.deadline_s)
        return pb.PreemptResponse(checkpoints=[encode.preempted(outcome) for outcome in outcomes])

    def _receipt(self, run: str, receipt: Receipt) -> pb.Receipt:
        return encode.receipt(receipt, self._node.policy(run).transient)

    def _check_run(self, run: str) -> None:
        try:
            check_run(run)
        except InvalidName as error:
            raise InvalidArgument(str(error)) from error


def _wait_s(asked_s: float, context: Context) -> float:
    """For how long a call may wait for space: no longer than it lives. One that asks for nothing is refused at once."""
    if not asked_s > 0:  # also what is no number
        return 0.0
    left_s = context.time_remaining()
    return asked_s if left_s is None else min(asked_s, left_s)


def _bytes_of(message: Any | None) -> int:
    return 0 if message is None else int(message.ByteSize())


async def _next_frame(requests: AsyncIterator[Any], deadline_s: float) -> ChunkFrame | pb.PutHeader | pb.PutTrailer:
    """The stream's next message; raises when it ends, is malformed, or is silent for too long."""
    if (message := await _next_message(requests, deadline_s)) is None:
        raise InvalidArgument("the stream ended before its trailer; nothing of this shard was kept")
    try:
        return decode_put_request(message)
    except FrameError as error:
        raise InvalidArgument(str(error)) from error


async def _next_message(requests: AsyncIterator[Any], deadline_s: float) -> Any | None:
    """The client's next message, None when it has no more; raises when it is silent for too long."""
    try:
        async with asyncio.timeout(deadline_s):
            message = await anext(requests)
    except StopAsyncIteration:
        return None
    except TimeoutError:
        raise DeadlineExceeded("the stream made no progress; nothing unfinished was kept", silent_s=deadline_s) from None
    check_formed(message)
    return message
