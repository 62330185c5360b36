"""MemoryGateway: a gateway in memory, for tests of code that saves and restores.

Owns a faithful small model of the contract: checksums at the door, completeness, sessions, levels, errors with their details.
It keeps nothing and promises nothing: no disk, no tiers but their names. Faults can be asked for, so that a job's own error
handling can be tested.

    with MemoryGateway() as gateway:
        client = forebay.Client(gateway.address)
"""

import itertools
import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import grpc

from forebay._memory import MemoryStore
from forebay.errors import DETAIL_KEY, AlreadyExists, Corrupt, DeadlineExceeded, ForebayError, InvalidArgument, NotFound
from forebay.types import Missing
from forebay_wire import frames
from forebay_wire.checksums import crc32c
from forebay_wire.v1 import admin_pb2, admin_pb2_grpc, gateway_pb2_grpc
from forebay_wire.v1 import gateway_pb2 as pb

_CODES = {
    "not_found": grpc.StatusCode.NOT_FOUND,
    "already_exists": grpc.StatusCode.ALREADY_EXISTS,
    "invalid_argument": grpc.StatusCode.INVALID_ARGUMENT,
    "incomplete": grpc.StatusCode.FAILED_PRECONDITION,
    "corrupt": grpc.StatusCode.DATA_LOSS,
    "cache_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "permission_denied": grpc.StatusCode.PERMISSION_DENIED,
    "deadline_exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "unsupported": grpc.StatusCode.UNIMPLEMENTED,
}


@dataclass(slots=True)
class Fault:
    """`error` in place of the next `times` answers of `method`; in a stream only after `after` messages have passed.

    `damage` flips a bit of the message after those instead, where it is a chunk that is read.
    """

    method: str
    error: ForebayError | None = None
    times: int = 1
    after: int = 0
    damage: bool = False


class MemoryGateway(gateway_pb2_grpc.GatewayServicer, admin_pb2_grpc.AdminServicer):
    """Serves on a Unix socket of its own between start() and stop(), or inside a `with` block.

    `tiers` drain at once unless held. `capacity_bytes` is where puts begin to meet CacheFull.
    """

    def __init__(
        self,
        tiers: tuple[str, ...] = ("pfs",),
        chunk_size: int = 4 << 20,
        capacity_bytes: int = 1 << 30,
        retry_after_s: float = 0.2,
    ) -> None:
        self.chunk_size = chunk_size
        self.faults: list[Fault] = []
        self.calls: list[str] = []
        self._store = MemoryStore(tiers, capacity_bytes, retry_after_s)
        self._directory = ""
        self._server: grpc.Server | None = None

    @property
    def address(self) -> str:
        """What to give to Client."""
        return f"unix://{self._directory}/gateway.sock"

    def start(self) -> "MemoryGateway":
        """Serve; what was stored before a stop() is still there."""
        self._directory = self._directory or tempfile.mkdtemp(prefix="forebay-")
        self._server = grpc.server(
            ThreadPoolExecutor(32, thread_name_prefix="memory-gateway"),
            options=[
                ("grpc.max_send_message_length", frames.MAX_MESSAGE_BYTES),
                ("grpc.max_receive_message_length", frames.MAX_MESSAGE_BYTES),
                ("grpc.max_metadata_size", 1 << 20),
            ],
        )
        gateway_pb2_grpc.add_GatewayServicer_to_server(self, self._server)
        admin_pb2_grpc.add_AdminServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{self._directory}/gateway.sock")
        self._server.start()
        return self

    def stop(self) -> None:
        """End all calls and take the socket away; keep what is stored."""
        if self._server is not None:
            self._server.stop(0).wait()
            self._server = None

    def __enter__(self) -> "MemoryGateway":
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory = ""

    def fail(self, method: str, error: ForebayError, *, times: int = 1, after: int = 0) -> None:
        """Answer the next `times` calls of an RPC (such as "PutShard") with `error`, after `after` messages of its stream."""
        self.faults.append(Fault(method, error, times, after))

    def damage(self, *, times: int = 1, after: int = 0, method: str = "ReadShard") -> None:
        """Flip a bit of a chunk on its way to a reader, in the next `times` reads, after `after` chunks; with "ReadMany" of a
        small shard, after as many."""
        self.faults.append(Fault(method, None, times, after, damage=True))

    def damage_stored(self, run: str, step: int, name: str) -> None:
        """Flip a bit of a stored shard, as a bad disk would."""
        shard = next(shard for _, found, shard in self._store.checkpoints[run, step].shown().shards() if found == name)
        shard.data = bytes((shard.data[0] ^ 1,)) + shard.data[1:]

    # The Gateway service

    def PutShard(self, requests: Iterator[pb.PutShardRequest], context: Any) -> Iterator[pb.PutShardResponse]:
        """As the .proto says."""
        with _answering(context):
            fault = self._begin("PutShard")
            first = next(requests)
            if first.WhichOneof("frame") != "header":
                raise InvalidArgument("a stream begins with a header")
            header = first.header
            existing = self._store.admit(header.part, header.name, header.size)
            yield pb.PutShardResponse(accepted=pb.Accepted(chunk_size=self.chunk_size, window=4, existing=existing))
            data, trailer = self._receive(header, requests, fault)
            if existing is not None:
                if (existing.size, existing.crc32c) != (trailer.size, trailer.crc32c):
                    raise AlreadyExists(f"other bytes already have the name {header.name!r}")
                yield pb.PutShardResponse(receipt=existing)
                return
            if (len(data), crc32c(data)) != (trailer.size, trailer.crc32c):
                raise Corrupt(f"{header.name!r}: the trailer does not match the bytes that came")
            yield pb.PutShardResponse(receipt=self._store.store(header.part, header.name, data))

    def PutMany(self, requests: Iterator[pb.PutManyRequest], context: Any) -> Iterator[pb.PutManyResponse]:
        """As the .proto says."""
        with _answering(context):
            fault = self._begin("PutMany")
            part: pb.PartRef | None = None
            for count, request in enumerate(requests):
                _raise_due(fault, count)
                part = request.part if request.HasField("part") else part
                if part is None:
                    raise InvalidArgument("the first request names the part")
                yield pb.PutManyResponse(receipts=self._store.put_batch(part, request.shards))

    def CommitPart(self, requests: Iterator[pb.CommitPartRequest], context: Any) -> pb.CommitPartResponse:
        """As the .proto says."""
        with _answering(context):
            self._begin("CommitPart")
            request = pb.CommitPartRequest()
            for message in requests:
                request.MergeFrom(message)
            with self._store.changed:
                return self._store.commit(request)

    def AbortPart(self, request: pb.AbortPartRequest, context: Any) -> pb.AbortPartResponse:
        """As the .proto says."""
        with _answering(context):
            self._begin("AbortPart")
            with self._store.changed:
                return pb.AbortPartResponse(shards_dropped=self._store.abort(request.part))

    def Wait(self, request: pb.WaitRequest, context: Any) -> Iterator[pb.WaitResponse]:
        """As the .proto says."""
        with _answering(context):
            fault = self._begin("Wait")
            deadline_s = time.monotonic() + request.timeout_s if request.timeout_s else float("inf")
            levels = self._store.levels(request.level)
            for count in itertools.count():
                with self._store.changed:
                    answer = self._store.progress(request, levels)
                yield answer
                _raise_due(fault, count + 1)
                if answer.reached:
                    return
                with self._store.changed:
                    remaining_s = min(deadline_s - time.monotonic(), 0.2)
                    if remaining_s <= 0:
                        missing = [Missing(entry.writer, tuple(entry.shards), entry.state) for entry in answer.missing]
                        lacks = f"; missing: {', '.join(map(str, missing))}" if missing else ""
                        raise DeadlineExceeded(f"{request.level!r} was not reached in time{lacks}", missing=missing)
                    self._store.changed.wait(remaining_s)

    def ReadShard(self, request: pb.ReadShardRequest, context: Any) -> Iterator[pb.ReadShardResponse]:
        """As the .proto says."""
        with _answering(context):
            fault = self._begin("ReadShard")
            with self._store.changed:
                shard = self._store.find_shard(request)
            length = request.length if request.HasField("length") else len(shard.data) - request.offset
            end = request.offset + length
            if end > len(shard.data):
                raise InvalidArgument(f"{request.name!r} has {len(shard.data)} bytes")
            if crc32c(shard.data) != shard.crc32c:
                raise Corrupt(f"{request.name!r}: the only copy is damaged tried=cache")
            for count, offset in enumerate(range(request.offset, end, self.chunk_size)):
                _raise_due(fault, count)
                data = shard.data[offset : min(end, offset + self.chunk_size)]
                crc = crc32c(data)
                if fault is not None and fault.damage and fault.after == count:
                    data = bytes((data[0] ^ 1,)) + data[1:]
                yield pb.ReadShardResponse(chunk=pb.Chunk(offset=offset, crc32c=crc, data=data))

    def ReadMany(self, request: pb.ReadManyRequest, context: Any) -> Iterator[pb.ReadManyResponse]:
        """As the .proto says; all small shards are as if in packs."""
        with _answering(context):
            fault = self._begin("ReadMany")
            with self._store.changed:
                stored = self._store.find_shards(request)
            small = [name for name in request.names if name in stored and len(stored[name].data) < 1 << 20]
            for count, name in enumerate(name for name in small if crc32c(stored[name].data) == stored[name].crc32c):
                _raise_due(fault, count)
                data = stored[name].data
                if fault is not None and fault.damage and fault.after == count:
                    data = bytes((data[0] ^ 1,)) + data[1:]
                yield pb.ReadManyResponse(shards=[pb.SmallShard(name=name, crc32c=stored[name].crc32c, data=data)])

    def Describe(self, request: pb.DescribeRequest, context: Any) -> pb.Checkpoint:
        """As the .proto says."""
        with _answering(context):
            self._begin("Describe")
            with self._store.changed:
                return self._store.describe(request.run, request.step)

    def ListShards(self, request: pb.ListShardsRequest, context: Any) -> Iterator[pb.ListShardsResponse]:
        """As the .proto says."""
        with _answering(context):
            self._begin("ListShards")
            with self._store.changed:
                shards = self._store.shard_infos(request)
            for first in range(0, len(shards), 1000):
                yield pb.ListShardsResponse(shards=shards[first : first + 1000])

    def ListCheckpoints(self, request: pb.ListCheckpointsRequest, context: Any) -> Iterator[pb.ListCheckpointsResponse]:
        """As the .proto says."""
        with _answering(context):
            self._begin("ListCheckpoints")
            with self._store.changed:
                steps = sorted(step for run, step in self._store.checkpoints if run == request.run)
                if not steps:
                    raise NotFound(f"there is no run {request.run!r}")
                found = [self._store.describe(request.run, step) for step in steps]
            for first in range(0, len(found), 200):
                yield pb.ListCheckpointsResponse(checkpoints=found[first : first + 200])

    def ListRuns(self, request: pb.ListRunsRequest, context: Any) -> pb.ListRunsResponse:
        """As the .proto says."""
        with _answering(context):
            self._begin("ListRuns")
            with self._store.changed:
                names = sorted({run for run, _ in self._store.checkpoints})
                return pb.ListRunsResponse(runs=[self._store.run(name) for name in names])

    def Latest(self, request: pb.LatestRequest, context: Any) -> pb.Checkpoint:
        """As the .proto says."""
        with _answering(context):
            self._begin("Latest")
            levels = [] if request.level in ("", "any") else self._store.levels(request.level)
            with self._store.changed:
                for (run, step), checkpoint in sorted(self._store.checkpoints.items(), reverse=True):
                    if run == request.run and checkpoint.complete and checkpoint.drained.issuperset(set(levels) - {"cache"}):
                        return self._store.describe(run, step)
            raise NotFound(f"run {request.run!r} has no complete checkpoint")

    def Pin(self, request: pb.PinRequest, context: Any) -> pb.PinResponse:
        """As the .proto says."""
        with _answering(context):
            self._begin("Pin")
            with self._store.changed:
                self._store.checkpoint(request.run, request.step).pinned = request.pinned
            return pb.PinResponse()

    def Delete(self, request: pb.DeleteRequest, context: Any) -> pb.DeleteResponse:
        """As the .proto says."""
        with _answering(context):
            self._begin("Delete")
            with self._store.changed:
                checkpoint = self._store.checkpoint(request.run, request.step)
                if checkpoint.pinned:
                    raise InvalidArgument(
                        f"{request.run}/{request.step} is pinned, and force does not change that; unpin it first"
                    )
                if not request.force and not checkpoint.drained:
                    raise InvalidArgument(
                        f"{request.run}/{request.step} is on no tier yet; with --force (force=True) it goes all the same"
                    )
                shards = [shard for session in checkpoint.sessions.values() for _, _, shard in session.shards()]
                if not request.dry_run:
                    del self._store.checkpoints[request.run, request.step]
                size = sum(len(shard.data) for shard in shards)
                return pb.DeleteResponse(shards=len(shards), size=size, levels=["cache", *sorted(checkpoint.drained)])

    def GetPressure(self, request: pb.GetPressureRequest, context: Any) -> pb.Pressure:
        """As the .proto says."""
        with _answering(context):
            self._begin("GetPressure")
            with self._store.changed:
                return self._store.pressure()

    # The Admin service

    def GetStatus(self, request: admin_pb2.GetStatusRequest, context: Any) -> admin_pb2.Status:
        """As the .proto says."""
        with _answering(context):
            self._begin("GetStatus")
            with self._store.changed:
                shown = [self._store.describe(run, step) for run, step in self._store.checkpoints]
                complete = [checkpoint for checkpoint in shown if checkpoint.state == "complete"]
                return admin_pb2.Status(
                    node="memory",
                    version="memory",
                    health="ok",
                    pressure=self._store.pressure(),
                    cache=self._store.cache(),
                    tiers=[self._store.tier(tier) for tier in self._store.tiers],
                    checkpoints_complete=len(complete),
                    checkpoints_incomplete=len(shown) - len(complete),
                    incomplete=[checkpoint for checkpoint in shown if checkpoint.state != "complete"][:20],
                    listen=[self.address],
                )

    def GetConfig(self, request: admin_pb2.GetConfigRequest, context: Any) -> admin_pb2.GetConfigResponse:
        """As the .proto says."""
        with _answering(context):
            self._begin("GetConfig")
            return admin_pb2.GetConfigResponse(toml=f"[cache]\ncapacity = {self._store.capacity_bytes}\n", source="memory")

    def SetQueue(self, request: admin_pb2.SetQueueRequest, context: Any) -> admin_pb2.SetQueueResponse:
        """As the .proto says."""
        with _answering(context):
            self._begin("SetQueue")
            tiers = [tier for tier in self._store.tiers if request.tier in ("", tier)]
            if not tiers:
                raise NotFound(f"there is no tier {request.tier!r}")
            with self._store.changed:
                self._store.held = self._store.held | set(tiers) if request.held else self._store.held - set(tiers)
                self._store.drain()
            return admin_pb2.SetQueueResponse(tiers=tiers)

    def _begin(self, method: str) -> Fault | None:
        """Note the call; raise a fault that is due at once, return one that comes later in the stream."""
        self.calls.append(method)
        with self._store.changed:
            fault = next((fault for fault in self.faults if fault.method == method), None)
            if fault is None:
                return None
            fault.times -= 1
            if fault.times == 0:
                self.faults.remove(fault)
        if fault.error is not None and fault.after == 0:
            raise fault.error
        return fault

    def _receive(
        self, header: pb.PutHeader, requests: Iterator[pb.PutShardRequest], fault: Fault | None
    ) -> tuple[bytes, pb.PutTrailer]:
        data = bytearray()
        for count, request in enumerate(requests):
            _raise_due(fault, count)
            match request.WhichOneof("frame"):
                case "chunk":
                    self._check_chunk(request.chunk, header.name, len(data))
                    data += request.chunk.data
                    self._store.check_space(len(data))
                case "trailer":
                    return bytes(data), request.trailer
                case frame:
                    raise InvalidArgument(f"{header.name!r}: a {frame} where a chunk or the trailer was due")
        raise InvalidArgument(f"{header.name!r}: the stream ended without a trailer")

    def _check_chunk(self, chunk: pb.Chunk, name: str, at: int) -> None:
        if chunk.offset != at or at % self.chunk_size or not 0 < len(chunk.data) <= self.chunk_size:
            raise InvalidArgument(f"{name!r}: a chunk of {len(chunk.data)} bytes at {chunk.offset}, expected at {at}")
        if crc32c(chunk.data) != chunk.crc32c:
            raise Corrupt(f"{name!r}: a chunk arrived damaged offset={at}")


def _raise_due(fault: Fault | None, count: int) -> None:
    if fault is not None and fault.error is not None and fault.after == count:
        raise fault.error


@contextmanager
def _answering(context: Any) -> Iterator[None]:
    try:
        yield
    except ForebayError as error:
        detail = pb.ErrorDetail(
            kind=error.kind,
            message=error.message,
            retry_after_s=error.retry_after_s,
            missing=[pb.Missing(writer=entry.writer, shards=entry.shards, state=entry.state) for entry in error.missing],
        )
        context.set_trailing_metadata(((DETAIL_KEY, detail.SerializeToString()),))
        context.abort(_CODES.get(error.kind, grpc.StatusCode.INTERNAL), error.message)
