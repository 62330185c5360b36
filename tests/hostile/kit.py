"""What hostile clients share: raw asynchronous calls, the gateway's memory, and where figures go.

FOREBAY_SOAK=1 runs the full numbers; FOREBAY_RESULTS names a folder that gets one JSON document for each test that counts.
"""

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import psutil

from forebay.connection import CHANNEL_OPTIONS
from forebay.demo.gateways import GatewayProcess
from integration.kit import Leftovers
from soak.figures import report as figures_of
from soak.form import SOAK

MIB = 1 << 20


def full(number: int) -> int:
    """The full number in a soak, a tenth of it otherwise."""
    return number if SOAK else number // 10


def report(name: str, **figures: Any) -> None:
    """Print the figures, and keep them where they are collected."""
    figures_of(name, soak=SOAK, **figures)


class Wire:
    """One connection for asynchronous calls with raw messages."""

    def __init__(self, gateway: GatewayProcess, *options: tuple[str, int]) -> None:
        together = [*CHANNEL_OPTIONS, *options]
        self.channel = grpc.aio.insecure_channel(f"unix:{gateway.socket}", options=together)
        self.plain = grpc.insecure_channel(f"unix:{gateway.socket}", options=together)
        self.put: Any = self.channel.stream_stream("/forebay.v1.Gateway/PutShard")
        self.put_many: Any = self.channel.stream_stream("/forebay.v1.Gateway/PutMany")
        self.read: Any = self.channel.unary_stream("/forebay.v1.Gateway/ReadShard")

    def stream(self, method: str) -> Any:
        """A method with one request and a stream of answers, as bytes."""
        return self.channel.unary_stream(f"/forebay.v1.Gateway/{method}")

    def unary(self, method: str) -> Any:
        """A method with one request and one answer, as bytes."""
        return self.channel.unary_unary(f"/forebay.v1.Gateway/{method}")


@asynccontextmanager
async def wire(gateway: GatewayProcess, *options: tuple[str, int]) -> AsyncIterator[Wire]:
    """A connection of its own, ended with the block."""
    made = Wire(gateway, *options)
    try:
        yield made
    finally:
        await made.channel.close()
        made.plain.close()


async def at_once(count: int, width: int, act: Callable[[int], Awaitable[object]]) -> None:
    """`act` for each number below `count`, `width` at a time; the first error is raised."""
    numbers = iter(range(count))

    async def work() -> None:
        for number in numbers:
            await act(number)

    async with asyncio.TaskGroup() as group:
        for _ in range(width):
            group.create_task(work())


class Left(Leftovers):
    """Leftovers, of which descriptors count by what they are. Connections do not: those of clients last as long as the client's
    channel, those to an S3 server come and go (test_cancelled looks at them)."""

    def __init__(self, gateway: GatewayProcess) -> None:
        super().__init__(gateway)
        self._open = self._kinds()

    def _kinds(self) -> Counter[str]:
        kinds: Counter[str] = Counter()
        for entry in Path(f"/proc/{self._process.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                target = str(entry.readlink())
                if not target.startswith("socket:"):
                    kinds["pipe" if target.startswith("pipe:") else target] += 1
        return kinds

    def found(self) -> list[str]:
        left = [each for each in super().found() if "descriptors" not in each]
        return left + [f"{count} more {kind}" for kind, count in (self._kinds() - self._open).items()]


def rss(gateway: GatewayProcess) -> int:
    """Resident bytes of the gateway's process."""
    return int(psutil.Process(gateway.pid).memory_info().rss)


def loop_lag_ms(gateway: GatewayProcess) -> float:
    """The event loop's lag, 99 of 100, of the last minute."""
    return round(1000 * float(gateway.status()["loop_lag_p99_s"]), 1)
