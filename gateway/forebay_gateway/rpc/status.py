"""Errors as clients see them: the one table from kinds to gRPC codes, and the detail that travels with each.

Owns the mapping. Every failed call carries the trailing metadata "forebay-error-bin", a serialized ErrorDetail.
"""

import asyncio
import functools
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from forebay_gateway.core.errors import CacheFull, ForebayError, Incomplete, InvalidArgument
from forebay_gateway.rpc.sending import Answers, Sending
from forebay_wire.v1 import gateway_pb2 as pb

log = logging.getLogger("forebay.rpc")

DETAIL_KEY = "forebay-error-bin"
MISSING_SHOWN_MAX = 100
MESSAGE_CHARACTERS_MAX = 2000  # an error is sent as metadata, of which a client takes little; what it quotes may be long

CODES: dict[str, grpc.StatusCode] = {
    "invalid_argument": grpc.StatusCode.INVALID_ARGUMENT,
    "not_found": grpc.StatusCode.NOT_FOUND,
    "already_exists": grpc.StatusCode.ALREADY_EXISTS,
    "incomplete": grpc.StatusCode.FAILED_PRECONDITION,
    "corrupt": grpc.StatusCode.DATA_LOSS,
    "cache_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "unavailable": grpc.StatusCode.UNAVAILABLE,
    "permission_denied": grpc.StatusCode.PERMISSION_DENIED,
    "deadline_exceeded": grpc.StatusCode.DEADLINE_EXCEEDED,
    "unsupported": grpc.StatusCode.UNIMPLEMENTED,
    "failed_precondition": grpc.StatusCode.FAILED_PRECONDITION,
    "internal": grpc.StatusCode.INTERNAL,
}

Context = grpc.aio.ServicerContext[Any, Any]
Answer = TypeVar("Answer")


def detail_of(error: BaseException) -> pb.ErrorDetail:
    """What travels beside the gRPC status."""
    if not isinstance(error, ForebayError):
        return pb.ErrorDetail(kind="internal", message="internal error; the gateway's log has the cause")
    message = str(error)
    if len(message) > MESSAGE_CHARACTERS_MAX:
        message = f"{message[: MESSAGE_CHARACTERS_MAX - 3]}..."
    detail = pb.ErrorDetail(kind=error.kind, message=message)
    if error.retry_after_s is not None:
        detail.retry_after_s = error.retry_after_s
    if isinstance(error, CacheFull):
        detail.waited_s = error.waited_s
    if isinstance(error, Incomplete):
        for part in error.missing[:MISSING_SHOWN_MAX]:
            detail.missing.add(writer=part.writer, shards=part.shards, state=part.state)
    return detail


async def abort(context: Context, error: Exception) -> NoReturn:
    """End the call with the error's code and detail."""
    if not isinstance(error, ForebayError):
        log.error("a call failed unexpectedly", exc_info=error)
    detail = detail_of(error)
    try:
        await context.abort(
            CODES.get(detail.kind, grpc.StatusCode.INTERNAL), detail.message, ((DETAIL_KEY, detail.SerializeToString()),)
        )
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError("the client has gone") from gone
    raise AssertionError("abort returned")


@dataclass(frozen=True, slots=True)
class Malformed:
    """Bytes that are no message of their method. Handed on in the message's place: gRPC would make it a failure of ours."""

    reason: str


def parser(message: Any) -> Callable[[bytes], Any]:
    """A deserializer for a generated message class; it never raises."""

    def parse(data: bytes) -> Any:
        try:
            return message.FromString(data)
        except DecodeError as error:
            return Malformed(f"not a {message.DESCRIPTOR.name}: {error}")

    return parse


def check_formed(request: object) -> None:
    """Raise InvalidArgument for a message that is none."""
    if isinstance(request, Malformed):
        raise InvalidArgument(request.reason)


def answers(method: Callable[..., Awaitable[Answer]]) -> Callable[..., Awaitable[Answer]]:
    """A unary method whose errors become statuses."""

    @functools.wraps(method)
    async def call(self: object, request: object, context: Context) -> Answer:
        try:
            check_formed(request)
            return await method(self, request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:  # noqa: BLE001  every error becomes a status
            await abort(context, error)

    return call


class Streaming(Protocol):
    """A service with streams of answers."""

    sending: Sending


def streams(
    method: Callable[..., AsyncGenerator[Answer, None]],
) -> Callable[[Any, Any, Context], Awaitable[None]]:
    """A streaming method whose errors become statuses. What it holds is let go of when its client does not read in time."""

    @functools.wraps(method)
    async def call(self: Streaming, request: object, context: Context) -> None:
        sent = Answers(self.sending, context)
        try:
            check_formed(request)
            try:
                async with aclosing(method(self, request, context)) as answers:
                    async for answer in answers:
                        await sent.send(answer)
            except Exception:
                await sent.sent()  # what was made before the error comes before it
                raise
            await sent.sent()
        except grpc.aio.AbortError:
            raise
        except grpc.aio.InternalError as error:  # gRPC cannot send: nobody is there any more
            raise asyncio.CancelledError("the client has gone") from error
        except Exception as error:  # noqa: BLE001  every error becomes a status
            await abort(context, error)
        finally:
            await sent.close()

    return call
