"""A job that is told to go: what it still saves gets out first, and it learns how far that came.

Owns the signal and the time that is left after it. Does not own the saving, nor the drain (the gateway's).
"""

import signal
import time
from collections.abc import Iterable
from types import FrameType, TracebackType
from typing import Any

from forebay.api import Client
from forebay.errors import InvalidArgument
from forebay.types import Preempted

LOOK_S = 0.05
GRACE_S = 30.0  # what schedulers commonly leave between SIGTERM and SIGKILL


class Preemption:
    """Notes the signal that ends a job, and spends the time that is left on getting its newest checkpoint out.

    `grace_s` is how many seconds the scheduler leaves after the signal; some of them stay for the process's own end. The
    handler that was there before is called too, unless it would end the process. To be entered in the main thread, as Python
    asks.

        with forebay.Preemption(client, run, grace_s=120) as leaving:
            for step, batch in enumerate(batches):
                train(batch)
                if leaving.requested:
                    save(step)
                    for checkpoint in leaving.finish():
                        print(checkpoint.step, checkpoint.reached, checkpoint.missed)
                    break
    """

    def __init__(
        self, client: Client, run: str = "", *, grace_s: float = GRACE_S, signals: Iterable[int] = (signal.SIGTERM,)
    ) -> None:
        """Raises InvalidArgument for a time that makes no sense."""
        if not 0 < grace_s < float("inf"):
            raise InvalidArgument(f"grace_s must be seconds above 0, not {grace_s!r}")
        self._client = client
        self._run = run
        self._grace_s = grace_s
        self._signals = tuple(signals)
        self._before: dict[int, Any] = {}
        self._until_s: float | None = None  # no lock: a handler runs in the midst of whatever the main thread does

    def __enter__(self) -> "Preemption":
        """Raises ValueError outside the main thread."""
        for number in self._signals:
            self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before.clear()

    @property
    def requested(self) -> bool:
        """Whether the signal has come."""
        return self._until_s is not None

    @property
    def remaining_s(self) -> float:
        """Seconds left; all of them before the signal."""
        return self._grace_s if self._until_s is None else max(0.0, self._until_s - time.monotonic())

    def wait(self, timeout: float | None = None) -> bool:
        """Until the signal comes, at most `timeout` seconds; whether it came."""
        until_s = float("inf") if timeout is None else time.monotonic() + timeout
        while not self.requested and (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(LOOK_S, left_s))
        return self.requested

    def request(self) -> None:
        """As if the signal had come: for schedulers that say it another way. The first time counts."""
        if not self.requested:
            self._until_s = time.monotonic() + self._grace_s

    def finish(self, margin_s: float = 2.0) -> tuple[Preempted, ...]:
        """Client.preempt() with what is left, less `margin_s`."""
        return self._client.preempt(max(0.0, self.remaining_s - margin_s), self._run)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.request()
        if callable(before := self._before.get(number)) and before is not signal.default_int_handler:
            before(number, frame)
