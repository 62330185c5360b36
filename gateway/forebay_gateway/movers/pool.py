"""The front's side of the movers: spawn, supervise, hand out jobs, hear reports.

Owns the processes and which job is where. A mover that dies fails its jobs with Unavailable, so their owners queue them again;
the next job starts a new one, after a pause that grows while it keeps dying. Movers are spawned, never forked: gRPC and LMDB
do not survive a fork.
"""

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from forebay_gateway.base.clock import Clock
from forebay_gateway.core.errors import Unavailable
from forebay_gateway.movers.jobs import (
    Ack,
    Cancel,
    ItemDone,
    ItemFailed,
    Job,
    JobDone,
    Limits,
    Progress,
    Saves,
    Setup,
    ToFront,
    UploadBegun,
    receive_in_front,
    send,
)

log = logging.getLogger("forebay.movers")

RESPAWN_PAUSE_S_MAX = 10.0


class Reports(Protocol):
    """What the owner of a job wants to hear. Calls of one job come in order, one at a time."""

    async def upload_begun(self, index: int, upload_id: str) -> None:
        """Record it durably; parts are sent only after this returns."""

    async def item_done(self, index: int, report: ItemDone) -> None:
        """The item is where it should be."""

    async def item_failed(self, index: int, report: ItemFailed) -> None:
        """It is not; of a fetch, a source failed and the next one may still do."""

    def progress(self, size: int) -> None:
        """Bytes moved."""


@dataclass
class _Running:
    job: Job
    reports: Reports
    inbox: asyncio.Queue[ToFront | Unavailable] = field(default_factory=asyncio.Queue)


class MoverProcess:
    """One mover, restarted when needed."""

    def __init__(self, name: str, setup: Setup, depth: int, clock: Clock) -> None:
        self.name = name
        self.restarts = 0
        self._setup = setup
        self._depth = depth
        self._clock = clock
        self._process: asyncio.subprocess.Process | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Task[None] | None = None
        self._running: dict[int, _Running] = {}
        self._starting = asyncio.Lock()
        self._last_start_s = float("-inf")
        self._pause_s = 0.0
        self._stopped = False
        self._saves = Saves(False)
        self._limits: dict[str, Limits] = {}

    def limit(self, limits: Limits) -> None:
        """What it may do on a tier; told to the process, and to each that takes its place."""
        if limits != self._limits.get(limits.tier):
            self._limits[limits.tier] = limits
            if self._writer is not None and not self._writer.is_closing():
                send(self._writer, limits)

    def saves(self, under_way: bool) -> None:
        """Whether shards are being received; told to the process, and to each that takes its place."""
        if under_way != self._saves.under_way:
            self._saves = Saves(under_way)
            if self._writer is not None and not self._writer.is_closing():
                send(self._writer, self._saves)

    @property
    def load(self) -> int:
        """Jobs under way."""
        return len(self._running)

    @property
    def has_room(self) -> bool:
        """Whether a further job may be given to it."""
        return len(self._running) < self._depth

    @property
    def pid(self) -> int:
        """Of the process, 0 while there is none."""
        return self._process.pid if self._process is not None and self._process.returncode is None else 0

    @property
    def doing(self) -> str:
        """For people."""
        kinds = [type(running.job).__name__.removesuffix("Job").lower() for running in self._running.values()]
        return ", ".join(kinds) or "idle"

    async def do(self, job: Job, reports: Reports) -> None:
        """Run one job to its end; raises Unavailable if the process dies under it."""
        running = _Running(job, reports)
        self._running[job.id] = running
        try:
            writer = await self._ensure_started()
            send(writer, job)
            await writer.drain()
            await self._deliver(running)
        except ConnectionError as error:
            raise Unavailable("the mover went away", retry_after_s=0.5, mover=self.name) from error
        except BaseException:  # also where the owner failed at a report: nobody hears the rest
            if self._writer is not None and not self._writer.is_closing():
                send(self._writer, Cancel(job.id))
            raise
        finally:
            self._running.pop(job.id, None)

    async def _deliver(self, running: _Running) -> None:
        """Hand reports to the owner until the job is done; a report that raises ends the job with its error."""
        while True:
            message = await running.inbox.get()
            if isinstance(message, Unavailable):
                raise message
            await self._report(running, message)
            if isinstance(message, JobDone):
                return

    async def _report(self, running: _Running, message: ToFront) -> None:
        match message:
            case UploadBegun():
                await running.reports.upload_begun(message.index, message.upload_id)
                if self._writer is not None:
                    send(self._writer, Ack(message.id, message.index))
            case ItemDone():
                await running.reports.item_done(message.index, message)
            case ItemFailed():
                await running.reports.item_failed(message.index, message)
            case Progress():
                running.reports.progress(message.size)

    async def _ensure_started(self) -> asyncio.StreamWriter:
        async with self._starting:
            if self._stopped:
                raise Unavailable("the gateway is shutting down")
            if self._writer is not None and self.pid:
                return self._writer
            if self._clock.monotonic() - self._last_start_s < 60.0:
                await self._clock.sleep(self._pause_s)
                self._pause_s = min(RESPAWN_PAUSE_S_MAX, self._pause_s * 2 or 0.2)
            else:
                self._pause_s = 0.0
            self._last_start_s = self._clock.monotonic()
            return await self._spawn()

    async def _spawn(self) -> asyncio.StreamWriter:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "forebay_gateway.movers.worker",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(),),
                stdin=asyncio.subprocess.DEVNULL,
                env={**os.environ, "GRPC_ENABLE_FORK_SUPPORT": "0"},
            )
        reader, self._writer = await asyncio.open_connection(sock=ours)
        send(self._writer, self._setup)
        send(self._writer, self._saves)
        for limits in self._limits.values():
            send(self._writer, limits)
        self._listener = asyncio.create_task(self._listen(reader, self._process), name=f"mover {self.name}")
        return self._writer

    async def _listen(self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process) -> None:
        while (message := await receive_in_front(reader)) is not None:
            if (running := self._running.get(message.id)) is not None:
                running.inbox.put_nowait(message)
        code = await process.wait()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        if not self._stopped:
            self.restarts += 1
            log.warning("a mover died; its jobs go back to the queue mover=%s exit=%s", self.name, code)
        for running in self._running.values():
            running.inbox.put_nowait(Unavailable("the mover died", retry_after_s=0.5, mover=self.name, exit=code))

    async def stop(self, grace_s: float) -> None:
        """End the process: its socket closes, it cancels what it does; killed if it lingers."""
        self._stopped = True
        async with self._starting:
            process, listener = self._process, self._listener
            if self._writer is not None:
                self._writer.close()
                self._writer = None
        if process is not None and process.returncode is None:
            try:
                await asyncio.wait_for(process.wait(), grace_s)
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGKILL)  # process.kill() may reap it, and then nobody hears of its end
                await process.wait()
        if listener is not None:
            await asyncio.gather(listener, return_exceptions=True)


class Movers(Protocol):
    """What the paths ask of the movers, wherever those run."""

    def next_job_id(self) -> int: ...
    def processes(self) -> list[MoverProcess]: ...
    def saves(self, under_way: bool) -> None: ...
    def limit(self, limits: Limits) -> None: ...
    async def drain(self, tier: str, job: Job, reports: Reports) -> None: ...
    async def fetch(self, job: Job, reports: Reports) -> None: ...
    async def stop(self, grace_s: float) -> None: ...


class MoverPool:
    """All movers of the node: one for the drain to each tier, and `movers` for fetches."""

    def __init__(self, setup: Setup, tiers: Sequence[str], movers: int, clock: Clock, fetch_depth: int = 4) -> None:
        self._ids = itertools.count(1)

        def mover(name: str, depth: int) -> MoverProcess:
            return MoverProcess(name, msgspec.structs.replace(setup, name=name), depth, clock)

        # Drain jobs carry a batch each and run one at a time; fetches are single shards, so a few share a process.
        self._lanes = {tier: [mover(f"drain-{tier}-0", 1)] for tier in tiers}
        self._lanes[""] = [mover(f"fetch-{number}", fetch_depth) for number in range(movers)]
        self._freed = asyncio.Condition()

    def next_job_id(self) -> int:
        """A number no other job of this process has."""
        return next(self._ids)

    def processes(self) -> list[MoverProcess]:
        """For status."""
        return [process for lane in self._lanes.values() for process in lane]

    def saves(self, under_way: bool) -> None:
        """Whether shards are being received now, for which drains should step back."""
        for process in self.processes():
            process.saves(under_way)

    def limit(self, limits: Limits) -> None:
        """What each mover may do on the tier from now on: the one that drains to it, and those that fetch from it."""
        for process in (*self._lanes[limits.tier], *self._lanes[""]):
            process.limit(limits)

    async def drain(self, tier: str, job: Job, reports: Reports) -> None:
        """Run a drain or check job in the tier's lane."""
        await self._do(self._lanes[tier], job, reports)

    async def fetch(self, job: Job, reports: Reports) -> None:
        """Run a fetch job."""
        await self._do(self._lanes[""], job, reports)

    async def _do(self, lane: list[MoverProcess], job: Job, reports: Reports) -> None:
        async with self._freed:
            await self._freed.wait_for(lambda: any(process.has_room for process in lane))
            process = min((process for process in lane if process.has_room), key=lambda process: process.load)
            task = asyncio.ensure_future(process.do(job, reports))
            await asyncio.sleep(0)  # the job counts as the process's load from here on
        try:
            await task
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            raise
        finally:
            async with self._freed:
                self._freed.notify_all()

    async def stop(self, grace_s: float) -> None:
        """End all movers."""
        await asyncio.gather(*(process.stop(grace_s) for process in self.processes()))
