"""The channel to the gateway: opened at first use, once for each process, and every single-answer RPC over it.

Owns channel options, the fork rule, deadlines of single-answer calls and their retries. Does not own streams (lanes/).
A forked child opens a channel of its own and never touches its parent's: closing it would speak on the parent's connection.
"""

import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import grpc

from forebay import address as addresses
from forebay import cancel
from forebay.errors import ForebayError, InvalidArgument, PermissionDenied, Unavailable, from_rpc
from forebay.retry import RetryPolicy
from forebay_wire import frames
from forebay_wire.v1 import admin_pb2_grpc, gateway_pb2, gateway_pb2_grpc

CALL_TIMEOUT_S = 60.0
_METADATA_BYTES_MAX = 1 << 20  # an error's detail travels as metadata and may name many missing shards

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    ("grpc.max_send_message_length", frames.MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", frames.MAX_MESSAGE_BYTES),
    ("grpc.max_metadata_size", _METADATA_BYTES_MAX),
    ("grpc.absolute_max_metadata_size", 2 * _METADATA_BYTES_MAX),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.keepalive_permit_without_calls", 0),
    ("grpc.enable_retries", 0),  # retries are ours: gRPC's own buffer streams and know nothing of offsets
    ("grpc.enable_http_proxy", 0),  # the gateway is on this node
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each client, not one for the process
    # A gateway that restarts is back within seconds; gRPC's own pauses grow to two minutes.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # What gRPC also gives one attempt, until the gateway's first answer; on a node that is busy training it may take a moment.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 2_000),
)

_Answer = TypeVar("_Answer")
# Channels of a parent process, seen from its fork. Kept so that they are never collected, which would close them.
_inherited: list[object] = []


@dataclass(frozen=True, slots=True)
class Stubs:
    """One process's channel and what can be called over it. `put_shard` and `read_shard` carry raw bytes one way."""

    pid: int
    target: str
    channel: grpc.Channel
    gateway: gateway_pb2_grpc.GatewayStub
    admin: admin_pb2_grpc.AdminStub
    care: admin_pb2_grpc.CareStub
    put_shard: Callable[[Iterator[bytes]], Any]
    read_shard: Callable[[gateway_pb2.ReadShardRequest], Any]


def _open(target: str) -> Stubs:
    channel = grpc.insecure_channel(target, options=CHANNEL_OPTIONS)
    return Stubs(
        pid=os.getpid(),
        target=target,
        channel=channel,
        gateway=gateway_pb2_grpc.GatewayStub(channel),
        admin=admin_pb2_grpc.AdminStub(channel),
        care=admin_pb2_grpc.CareStub(channel),
        put_shard=channel.stream_stream(  # type: ignore[arg-type]  # bytes pass as they are
            "/forebay.v1.Gateway/PutShard",
            request_serializer=None,
            response_deserializer=gateway_pb2.PutShardResponse.FromString,
        ),
        read_shard=channel.unary_stream(
            "/forebay.v1.Gateway/ReadShard",
            request_serializer=gateway_pb2.ReadShardRequest.SerializeToString,
            response_deserializer=None,
        ),
    )


class Connection:
    """A client's way to its gateway. Thread-safe, picklable, usable after a fork."""

    def __init__(self, address: str | None, policy: RetryPolicy) -> None:
        addresses.candidates(address)  # a bad address is told at once, not at first use
        self.address = address
        self.policy = policy
        self._lock = threading.Lock()
        self._stubs: Stubs | None = None
        self._closed = False
        self.pressure: gateway_pb2.Pressure | None = None  # the newest that came with an answer

    def __getstate__(self) -> tuple[str | None, RetryPolicy]:
        return self.address, self.policy

    def __setstate__(self, state: tuple[str | None, RetryPolicy]) -> None:
        self.address, self.policy = state
        self._lock = threading.Lock()
        self._stubs = None
        self._closed = False
        self.pressure = None

    def heard(self, answer: Any) -> None:
        """Keep the pressure that an acknowledgement carries, where it does."""
        if answer.HasField("pressure"):
            self.pressure = answer.pressure

    def stubs(self) -> Stubs:
        """This process's channel. Raises Unavailable where no default socket has a listener, PermissionDenied where this user
        may not connect to the one that is there, InvalidArgument once closed."""
        if self._closed:
            raise InvalidArgument("the client is closed")
        current = self._stubs
        if current is not None and current.pid == os.getpid():
            return current
        if current is not None:
            # The parent may have held the lock while it forked; here only this thread exists.
            _inherited.append(current)
            self._lock = threading.Lock()
            self._stubs = None
        with self._lock:
            if self._stubs is None:
                self._stubs = _open(addresses.resolve(self.address))
            return self._stubs

    def close(self) -> None:
        """Close this process's channel and end the calls under way; a later call is an error."""
        with self._lock:
            current, self._stubs = self._stubs, None
            self._closed = True
        if current is None:
            return
        if current.pid == os.getpid():
            current.channel.close()
        else:
            _inherited.append(current)

    def translate(self, error: grpc.RpcError, doing: str) -> ForebayError:
        """The error that a failed RPC means: where the gateway's socket is not there, with a hint; where it is not for this
        user, PermissionDenied, which no repeating mends."""
        cancel.check()
        translated = from_rpc(error, doing)
        stubs = self._stubs
        if isinstance(translated, Unavailable) and stubs is not None and (hint := addresses.hint(stubs.target)):
            if hint.denied:
                return PermissionDenied(f"{doing}: {hint}")
            translated.extended(f"({hint})")
        return translated

    def start(self, method: Callable[[Stubs], Any], request: object, doing: str) -> Any:
        """Begin a streaming call. Raises as stubs()."""
        cancel.check()
        try:
            return method(self.stubs())(request)
        except ValueError as error:
            raise self._if_closed(error, doing) from error

    @staticmethod
    def messages(call: Any, doing: str) -> Iterator[Any]:
        """What comes over a stream. Raises Unavailable in a child that was forked meanwhile: there it would never go on, and is
        begun anew over a channel of the child's own."""
        pid = os.getpid()
        for message in call:
            yield message
            if os.getpid() != pid:
                raise Unavailable(f"{doing}: the stream belongs to the process that this one was forked from")

    def pages(self, method: Callable[[Stubs], Any], request: object, doing: str) -> list[Any]:
        """All messages of a listing; begun anew by this connection's policy while the gateway is away."""
        attempts = self.policy.begin()
        while True:
            cancel.check()
            try:
                return self._pages_once(method, request, doing)
            except ForebayError as error:
                attempts.pause(error)

    def _pages_once(self, method: Callable[[Stubs], Any], request: object, doing: str) -> list[Any]:
        call = self.start(method, request, doing)
        with cancel.watching(call):
            try:
                return list(call)
            except grpc.RpcError as error:
                raise self.translate(error, doing) from error

    def call(
        self,
        method: Callable[[Stubs], Any],
        request: object,
        doing: str,
        *,
        timeout_s: float | None = CALL_TIMEOUT_S,
        policy: RetryPolicy | None = None,
    ) -> Any:
        """One request, or a list of them for a method that takes a stream, and one answer. Repeated by `policy` (this
        connection's, unless given) while the gateway is away or full."""
        attempts = (policy or self.policy).begin()
        while True:
            cancel.check()
            try:
                return self._call_once(method, request, doing, timeout_s)
            except ForebayError as error:
                attempts.pause(error)

    def _call_once(self, method: Callable[[Stubs], Any], request: object, doing: str, timeout_s: float | None) -> Any:
        try:
            multicallable = method(self.stubs())
            if isinstance(request, list):
                request = iter(request)
            if not cancel.in_scope():
                return multicallable(request, timeout=timeout_s)
            future = multicallable.future(request, timeout=timeout_s)
            with cancel.watching(future):
                return future.result()
        except grpc.FutureCancelledError as error:
            raise cancel.Cancelled(doing) from error
        except grpc.RpcError as error:
            raise self.translate(error, doing) from error
        except ValueError as error:
            raise self._if_closed(error, doing) from error

    def _if_closed(self, error: ValueError, doing: str) -> Exception:
        # gRPC's word for a channel that another thread has closed meanwhile.
        return InvalidArgument(f"{doing}: the client is closed") if self._closed else error
