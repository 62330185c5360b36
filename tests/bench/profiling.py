"""Where the CPU goes: the functions that a process is in when looked at, for the client, the gateway and a mover.

Owns the rows profile-*; no goal. perf looks at native code (its software clock also works in a virtual machine), py-spy at
Python's; each where it is installed and may look.
"""

import shutil
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
RATE_HZ = 99
ATTEMPTS = 3

Samples = Counter[str]


def where(job: Job) -> Iterator[Row]:
    """Client and front during saves, front and mover during a drain to POSIX."""
    _tools()
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
                yield from _rows(f"{lane}-save", f"{lane} save", pids, seconds, writers.save)
        yield from _draining(job, node, seconds)


def _draining(job: Job, node: Node, seconds: int) -> Iterator[Row]:
    shards = shards_of(data(job.size))
    node.client.release()
    node.client.wait(RUN, node.save({"warm": shards["shard-000"][: 1 << 20]}, "stream"), "pfs", timeout=TIMEOUT_S)
    movers = [mover for mover in node.client.status().movers if "pfs" in mover.name and psutil.pid_exists(mover.pid)]
    pids = {"gateway": node.pid}
    if movers:
        pids["mover"] = movers[0].pid

    def act() -> None:
        node.client.hold()
        step = node.save(shards, "stream")
        node.client.release()
        node.client.wait(RUN, step, "pfs", timeout=TIMEOUT_S)
        node.drop(step)

    yield from _rows("drain", "save, then drain", pids, seconds, act)


def _rows(name: str, what: str, pids: dict[str, int], seconds: int, act: Callable[[], object]) -> Iterator[Row]:
    seen = {tool: _sampled(look, pids, seconds, act) for tool, look in _tools().items()}
    for who in pids:
        spec = Spec(f"profile-{name}-{who}", f"{who}, {what}", "", None, "samples")
        detail = "; ".join(f"{tool}: {_top(samples[who])}" for tool, samples in seen.items())
        yield measured(spec, max(samples[who].total() for samples in seen.values()), detail)


def _tools() -> dict[str, Callable[[int, int, Path], Samples]]:
    """What can look here; raises CannotRun where nothing can."""
    found: dict[str, Callable[[int, int, Path], Samples]] = {}
    if shutil.which("perf") is not None:
        found["perf"] = _perf
    if (Path(sys.prefix) / "bin" / "py-spy").exists():
        found["py-spy"] = _py_spy
    if not found:
        raise CannotRun("neither perf (Debian: linux-perf) nor py-spy (pip: py-spy) is installed")
    return found


def _sampled(
    look: Callable[[int, int, Path], Samples], pids: dict[str, int], seconds: int, act: Callable[[], object]
) -> dict[str, Samples]:
    """Repeat `act` while each process is looked at."""
    results: dict[str, Samples] = {}
    failures: list[Exception] = []

    def watch(who: str, directory: Path) -> None:
        try:
            results[who] = look(pids[who], seconds, directory / who)
        except Exception as error:
            failures.append(error)

    with tempfile.TemporaryDirectory(prefix="bench-profile-") as name:
        threads = [threading.Thread(target=watch, args=(who, Path(name))) for who in pids]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            act()
    if failures:
        raise failures[0]
    return results


def _perf(pid: int, seconds: int, output: Path) -> Samples:
    record = ["perf", "record", "-e", "cpu-clock", "-F", str(RATE_HZ), "-p", str(pid), "-o", str(output)]
    for attempt in range(ATTEMPTS):  # it gives up when a thread ends just while it begins
        try:
            _run([*record, "--", "sleep", str(seconds)])
            break
        except CannotRun:
            if attempt == ATTEMPTS - 1:
                raise
    report = ["perf", "report", "-i", str(output), "--stdio", "--no-children", "-F", "sample,sym,dso", "-t", "|"]
    counted: Samples = Counter()
    for text in _run(report).splitlines():
        if text.strip() and not text.startswith("#"):
            count, symbol, library, *_ = text.split("|")
            counted[f"{symbol.strip()[4:]} ({library.strip()})"] += int(count)
    return counted


def _py_spy(pid: int, seconds: int, output: Path) -> Samples:
    """Only the thread that holds the interpreter's lock; by the innermost Python function."""
    command = [str(Path(sys.prefix) / "bin" / "py-spy"), "record", "--pid", str(pid), "--duration", str(seconds)]
    _run([*command, "--gil", "--rate", str(RATE_HZ), "--format", "raw", "--output", str(output)])
    counted: Samples = Counter()
    for text in output.read_text().splitlines():
        stack, _, count = text.rpartition(" ")
        function, _, place = stack.rpartition(";")[2].partition(" (")
        counted[f"{function} ({place.rstrip(')').rpartition('/')[2].partition(':')[0]})"] += int(count)
    return counted


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise CannotRun(
            f"{Path(command[0]).name} may not look at a process here: {(done.stderr or done.stdout).strip()[-200:]}"
        )
    return done.stdout


def _top(samples: Samples) -> str:
    total = samples.total()
    return ", ".join(f"{100 * count / total:.0f} % {name}" for name, count in samples.most_common(TOP)) or "idle"
