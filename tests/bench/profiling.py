"""Where the CPU goes: the functions that a process is in when looked at, for the client, the gateway and a mover.

Owns the rows profile-*. py-spy looks where it is installed and may trace, with native frames where it can; no goal.
"""

import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from bench.harness import RUN, TIMEOUT_S, Job, Node, data, gateway, shards_of
from bench.rows import CannotRun, Row, Spec, measured
from bench.scaling import Writers

TOP = 6
RATE_HZ = 100


def needs_py_spy() -> Path:
    """The program; raises CannotRun without it."""
    program = Path(sys.prefix) / "bin" / "py-spy"
    if not program.exists():
        raise CannotRun("py-spy is not installed (pip: py-spy)")
    return program


def saving(job: Job) -> Iterator[Row]:
    """Client and front during saves over the stream lane, front and mover during a drain to POSIX."""
    needs_py_spy()
    job.room(6 * job.size)
    seconds = 3 if job.quick else 8
    with job.place() as place, gateway(place, capacity=12 * job.size) as node:
        for lane in ("stream", "fd"):
            try:
                node.needs_lane(lane)
            except CannotRun:
                continue
            with Writers(node, lane, 1, job.size) as writers:
                pids = {"client": writers.pids[0], "gateway": node.pid}
                yield from _rows(f"{lane}-save", f"{lane} save", _sampled(pids, seconds, lambda: writers.save()))
        yield from _draining(job, node, seconds)


def _draining(job: Job, node: Node, seconds: int) -> Iterator[Row]:
    shards = shards_of(data(job.size))
    node.client.release()
    node.client.wait(RUN, node.save({"warm": shards["shard-000"][: 1 << 20]}, "stream"), "pfs", timeout=TIMEOUT_S)
    pids = {"gateway": node.pid} | {
        f"mover {mover.name}": mover.pid for mover in node.client.status().movers if mover.pid and psutil.pid_exists(mover.pid)
    }

    def act() -> None:
        node.client.hold()
        step = node.save(shards, "stream")
        node.client.release()
        node.client.wait(RUN, step, "pfs", timeout=TIMEOUT_S)
        node.drop(step)

    yield from _rows("drain", "save, then drain to POSIX", _sampled(pids, seconds, act))


def _sampled(pids: dict[str, int], seconds: int, act: Callable[[], object]) -> dict[str, Counter[str]]:
    """Repeat `act` while each process is looked at; samples by function, innermost frame."""
    with tempfile.TemporaryDirectory(prefix="bench-spy-") as name:
        outputs = {who: Path(name) / str(number) for number, who in enumerate(pids)}
        spies = [_Spy(pids[who], seconds, output) for who, output in outputs.items()]
        while not all(spy.over for spy in spies):
            act()
        for spy in spies:
            spy.finish()
        return {who: _innermost(output) for who, output in outputs.items() if output.exists()}


class _Spy:
    """py-spy on one process: with native frames, or without them where that fails."""

    def __init__(self, pid: int, seconds: int, output: Path) -> None:
        common = [str(needs_py_spy()), "record", "--pid", str(pid), "--duration", str(seconds), "--rate", str(RATE_HZ)]
        common += ["--format", "raw", "--output", str(output)]
        self._commands = [[*common, "--native"], common]
        self._error = ""
        self._thread = threading.Thread(target=self._run, name="bench-spy")
        self._thread.start()

    def _run(self) -> None:
        for command in self._commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode == 0:
                return
            self._error = (done.stderr or done.stdout).strip()[-200:]

    @property
    def over(self) -> bool:
        """Whether it looks no more."""
        return not self._thread.is_alive()

    def finish(self) -> None:
        """Raise CannotRun where it could not look."""
        self._thread.join()
        if self._error and "No such" not in self._error:
            raise CannotRun(f"py-spy may not look at this process: {self._error}")


def _innermost(output: Path) -> Counter[str]:
    counted: Counter[str] = Counter()
    for text in output.read_text().splitlines():
        stack, _, count = text.rpartition(" ")
        counted[_short(stack.rpartition(";")[2])] += int(count)
    return counted


def _short(frame: str) -> str:
    """Function and file, without the way to it and without the line."""
    function, _, place = frame.partition(" (")
    return f"{function} ({place.rstrip(')').rpartition('/')[2].partition(':')[0]})" if place else function


def _rows(name: str, what: str, sampled: dict[str, Counter[str]]) -> Iterator[Row]:
    for who, counted in sampled.items():
        total = counted.total()
        spec = Spec(f"profile-{name}-{who.split()[0]}", f"profile of the {who}, {what}", "", None, "samples")
        top = ", ".join(f"{100 * count / total:.0f} % {function}" for function, count in counted.most_common(TOP))
        yield measured(spec, total, top or "idle")
