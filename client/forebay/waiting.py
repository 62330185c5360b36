"""Waiting until a whole checkpoint has reached a level.

Owns the Wait call, its deadline and its resumption. Does not own what levels mean (the gateway).
"""

import time
from collections.abc import Callable
from typing import Any

import grpc

from forebay import cancel
from forebay.connection import Connection
from forebay.convert import record
from forebay.errors import DeadlineExceeded, ForebayError, Incomplete, InvalidArgument, NotFound, Unavailable, Unsupported
from forebay.types import WaitProgress
from forebay_wire.v1 import gateway_pb2 as pb

OnProgress = Callable[[WaitProgress], object]
# The gateway's own answer, which names what is missing, should come before this side gives up.
_GRACE_S = 2.0
_CHECK_S = 1.0  # for the gateway's first word on a level


def wait_for(
    connection: Connection,
    run: str,
    step: int,
    level: str,
    timeout_s: float | None = None,
    on_progress: OnProgress | None = None,
    session: str = "",
) -> WaitProgress:
    """Return once the checkpoint has reached `level`, by `session` where one is given: an older try of the step does not count.

    Raises DeadlineExceeded naming what is missing, Incomplete, NotFound, Unavailable.
    """
    if not level:
        raise InvalidArgument("wait: name a level: 'cache', a tier, or 'all'")
    request = pb.WaitRequest(run=run, step=step, level=level, session=session)
    return _Wait(connection, request, timeout_s, on_progress).finish()


def check_level(connection: Connection, run: str, step: int, level: str) -> None:
    """Raise InvalidArgument or Unsupported for a level that this gateway cannot reach, Unavailable where it is away.

    Meant for before anything is sent. The gateway looks at the level before it looks for the checkpoint, so its first word is
    enough, and its silence too: a tier that answers slowly must not hold a save up.
    """
    if level in ("", "cache"):
        return
    doing = f"wait for {run}/{step} at {level!r}"
    request = pb.WaitRequest(run=run, step=step, level=level, timeout_s=_CHECK_S)
    attempts = connection.policy.begin()
    while True:
        try:
            _first_word(connection, request, doing)
        except (InvalidArgument, Unsupported) as error:
            raise error.extended("(nothing was sent)") from error.__cause__
        except Unavailable as error:
            attempts.pause(error)
            continue
        except (DeadlineExceeded, Incomplete, NotFound):
            pass  # of the checkpoint, not of the level
        return


def _first_word(connection: Connection, request: pb.WaitRequest, doing: str) -> None:
    call: Any = connection.start(
        lambda stubs: lambda request: stubs.gateway.Wait(request, timeout=request.timeout_s + _GRACE_S), request, doing
    )
    with cancel.watching(call):
        try:
            next(call, None)
        except grpc.RpcError as error:
            raise connection.translate(error, doing) from error


class _Wait:
    def __init__(
        self,
        connection: Connection,
        request: pb.WaitRequest,
        timeout_s: float | None,
        on_progress: OnProgress | None,
    ) -> None:
        self._connection = connection
        self._request = request
        self._doing = f"wait for {request.run}/{request.step} at {request.level!r}"
        self._deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._timeout_s = timeout_s
        self._on_progress = on_progress
        self._attempts = connection.policy.begin()
        self._last: WaitProgress | None = None

    def finish(self) -> WaitProgress:
        while True:
            try:
                return self._once()
            except DeadlineExceeded as error:
                raise (error if error.missing else self._late()) from error
            except ForebayError as error:
                if self._remaining_s() == 0:
                    raise self._late() from error
                self._attempts.pause(error)

    def _remaining_s(self) -> float | None:
        return None if self._deadline_s is None else max(0.0, self._deadline_s - time.monotonic())

    def _once(self) -> WaitProgress:
        remaining_s = self._remaining_s()
        if remaining_s is not None:
            self._request.timeout_s = max(remaining_s, 0.001)  # 0 would mean no limit; "now" still gets an answer
        rpc_timeout_s = None if remaining_s is None else remaining_s + _GRACE_S
        call: Any = self._connection.start(
            lambda stubs: lambda request: stubs.gateway.Wait(request, timeout=rpc_timeout_s), self._request, self._doing
        )
        with cancel.watching(call):
            try:
                for response in call:
                    self._attempts.progressed()
                    self._last = record(response, WaitProgress)
                    if self._on_progress is not None:
                        self._on_progress(self._last)
                    if self._last.reached:
                        return self._last
            except grpc.RpcError as error:
                raise self._connection.translate(error, self._doing) from error
        raise Unavailable(f"{self._doing}: the gateway ended the stream before the level was reached")

    def _late(self) -> DeadlineExceeded:
        last = self._last
        parts = [f"{self._doing}: not reached in time"]
        if last is not None:
            parts += [last.reason] if last.reason else []
            if last.missing:
                parts.append("missing: " + "; ".join(map(str, last.missing[:5])))
            parts.append(f"bytes_done={last.bytes_done} bytes_total={last.bytes_total}")
        limit = "" if self._timeout_s is None else f" timeout_s={self._timeout_s:.1f}"
        return DeadlineExceeded(", ".join(parts) + limit, missing=last.missing if last else ())
