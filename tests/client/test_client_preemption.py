"""The signal that ends a job: noted, timed, passed on; what finish() asks for."""

import os
import signal
import sys
import threading
from types import FrameType
from typing import Any, cast

import pytest

import forebay
from forebay.errors import InvalidArgument


class Asked:
    """A client that notes what it is asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[float, str]] = []

    def preempt(self, deadline: float, run: str) -> tuple[()]:
        self.calls.append((deadline, run))
        return ()


def handler(asked: Asked, **options: Any) -> forebay.Preemption:
    return forebay.Preemption(cast(forebay.Client, asked), "run", **options)


def test_the_signal_is_noted_and_the_rest_of_the_time_is_spent() -> None:
    asked = Asked()
    before = signal.getsignal(signal.SIGUSR1)
    with handler(asked, grace_s=60, signals=[signal.SIGUSR1]) as leaving:
        assert not leaving.requested
        assert not leaving.wait(0.01)
        assert leaving.remaining_s == 60
        os.kill(os.getpid(), signal.SIGUSR1)
        assert leaving.wait(5)
        assert leaving.requested
        assert leaving.finish(margin_s=10) == ()
    ((deadline_s, run),) = asked.calls
    assert run == "run"
    assert 40 < deadline_s <= 50
    assert signal.getsignal(signal.SIGUSR1) is before


def test_the_handler_before_is_called_too() -> None:
    heard: list[int] = []

    def other(number: int, frame: FrameType | None) -> None:
        heard.append(number)

    before = signal.signal(signal.SIGUSR2, other)
    try:
        with handler(Asked(), signals=[signal.SIGUSR2]) as leaving:
            os.kill(os.getpid(), signal.SIGUSR2)
            assert leaving.wait(5)
        assert heard == [signal.SIGUSR2]
        assert signal.getsignal(signal.SIGUSR2) is other
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_a_second_request_gives_no_more_time() -> None:
    asked = Asked()
    leaving = handler(asked, grace_s=0.05)
    leaving.request()
    threading.Event().wait(0.1)
    leaving.request()
    assert leaving.remaining_s == 0
    leaving.finish()
    assert asked.calls == [(0.0, "run")]


@pytest.mark.parametrize("grace_s", [0, -1, float("nan"), float("inf")])
def test_a_time_that_makes_no_sense(grace_s: float) -> None:
    with pytest.raises(InvalidArgument, match="grace_s"):
        handler(Asked(), grace_s=grace_s)


@pytest.mark.parametrize("deadline", [-1, float("nan"), 3601, "soon", True])
def test_a_deadline_that_makes_no_sense(deadline: Any) -> None:
    with forebay.Client("unix:///nowhere.sock") as client, pytest.raises(InvalidArgument, match="deadline"):
        client.preempt(deadline)


def test_a_signal_at_any_point_of_a_wait_is_taken() -> None:
    """A handler runs between any two lines of the main thread, so it must not wait for what that thread holds."""
    for line in range(1, 30):
        leaving = handler(Asked(), grace_s=60)
        count = 0

        def trace(frame: FrameType, event: str, _: Any, line: int = line, leaving: forebay.Preemption = leaving) -> Any:
            nonlocal count
            count += event == "line"
            if count == line and event == "line":
                leaving._note(signal.SIGTERM, None)
            return trace

        def wait(leaving: forebay.Preemption = leaving, trace: Any = trace) -> None:
            sys.settrace(trace)
            leaving.wait(0.2)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        waiting.join(10)
        assert not waiting.is_alive(), line
